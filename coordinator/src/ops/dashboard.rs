//! The operators' page at `/`, and what it is told.
//!
//! The page is a few files that are part of the binary; it loads nothing from elsewhere and needs no build. What it shows
//! comes from `/admin/v1/dashboard/events`, which is for administrators like everything there. Its playground asks `/v1`
//! on this port, which is the API's own router behind the API's own gate.

mod engines;
mod feed;
mod paths;
mod requests;
mod snapshot;
mod why;

pub use feed::Feed;

use super::Ops;
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use std::sync::Arc;

/// Nothing but this page's own files and requests to where it came from; nobody shows it in a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// The page's files: path, content type, content.
const FILES: [(&str, &str, &str); 14] = [
    ("/", HTML, include_str!("dashboard/page/index.html")),
    ("/dashboard/icon.svg", SVG, include_str!("dashboard/page/icon.svg")),
    ("/dashboard/style.css", CSS, include_str!("dashboard/page/style.css")),
    ("/dashboard/panels.css", CSS, include_str!("dashboard/page/panels.css")),
    ("/dashboard/app.js", SCRIPT, include_str!("dashboard/page/app.js")),
    ("/dashboard/dom.js", SCRIPT, include_str!("dashboard/page/dom.js")),
    ("/dashboard/feed.js", SCRIPT, include_str!("dashboard/page/feed.js")),
    ("/dashboard/chart.js", SCRIPT, include_str!("dashboard/page/chart.js")),
    ("/dashboard/fleet.js", SCRIPT, include_str!("dashboard/page/fleet.js")),
    ("/dashboard/topology.js", SCRIPT, include_str!("dashboard/page/topology.js")),
    ("/dashboard/traffic.js", SCRIPT, include_str!("dashboard/page/traffic.js")),
    ("/dashboard/requests.js", SCRIPT, include_str!("dashboard/page/requests.js")),
    ("/dashboard/group.js", SCRIPT, include_str!("dashboard/page/group.js")),
    ("/dashboard/playground.js", SCRIPT, include_str!("dashboard/page/playground.js")),
];

/// The files, which hold no secret and are anybody's.
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
            // The next version of the binary has other files.
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
