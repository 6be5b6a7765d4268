//! The operators' dashboard at `/`, and its data.
//!
//! The page consists of a few files in the binary. It loads nothing from other sites and needs no build. Its
//! data comes from `/admin/v1/dashboard/events`, which requires an administrator. Its playground calls `/v1`
//! on this port, which is the API's own service with the API's own authentication.

mod engines;
mod feed;
mod paths;
mod requests;
mod snapshot;
mod traffic;
mod why;

pub use feed::Feed;

use super::Ops;
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use std::sync::Arc;

/// Allows the page's own files and requests to its own origin; forbids frames.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// The page's files: path, content type, content.
const FILES: [(&str, &str, &str); 16] = [
    ("/", HTML, include_str!("dashboard/page/index.html")),
    ("/dashboard/icon.svg", SVG, include_str!("dashboard/page/icon.svg")),
    ("/dashboard/style.css", CSS, include_str!("dashboard/page/style.css")),
    ("/dashboard/panels.css", CSS, include_str!("dashboard/page/panels.css")),
    ("/dashboard/app.js", SCRIPT, include_str!("dashboard/page/app.js")),
    ("/dashboard/dom.js", SCRIPT, include_str!("dashboard/page/dom.js")),
    ("/dashboard/feed.js", SCRIPT, include_str!("dashboard/page/feed.js")),
    ("/dashboard/chart.js", SCRIPT, include_str!("dashboard/page/chart.js")),
    ("/dashboard/fleet.js", SCRIPT, include_str!("dashboard/page/fleet.js")),
    ("/dashboard/models.js", SCRIPT, include_str!("dashboard/page/models.js")),
    ("/dashboard/usage.js", SCRIPT, include_str!("dashboard/page/usage.js")),
    ("/dashboard/topology.js", SCRIPT, include_str!("dashboard/page/topology.js")),
    ("/dashboard/traffic.js", SCRIPT, include_str!("dashboard/page/traffic.js")),
    ("/dashboard/requests.js", SCRIPT, include_str!("dashboard/page/requests.js")),
    ("/dashboard/group.js", SCRIPT, include_str!("dashboard/page/group.js")),
    ("/dashboard/playground.js", SCRIPT, include_str!("dashboard/page/playground.js")),
];

/// Routes of the page's files. They contain no secrets and need no authentication.
pub(super) fn files() -> Router<Arc<Ops>> {
    FILES.into_iter().fold(Router::new(), |router, (path, kind, text)| router.route(path, file(kind, text)))
}

fn file(kind: &'static str, text: &'static str) -> MethodRouter<Arc<Ops>> {
    get(async move || {
        let fixed = HeaderValue::from_static;
        let headers = [
            (header::CONTENT_TYPE, fixed(kind)),
            (header::CONTENT_SECURITY_POLICY, fixed(POLICY)),
            (header::X_CONTENT_TYPE_OPTIONS, fixed("nosniff")),
            (header::REFERRER_POLICY, fixed("no-referrer")),
            (HeaderName::from_static("cross-origin-opener-policy"), fixed("same-origin")),
            // Another version of the binary has other files.
            (header::CACHE_CONTROL, fixed("no-cache")),
        ];
        (headers, text).into_response()
    })
}

pub(super) fn router() -> Router<Arc<Ops>> {
    Router::new().route("/admin/v1/dashboard/events", get(events))
}

async fn events(State(ops): State<Arc<Ops>>) -> Response {
    feed::events(ops).into_response()
}
