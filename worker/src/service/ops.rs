//! The worker's ops port: `/livez`, `/readyz`, `/startupz`, `/metrics`.

use super::Node;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use transport::heartbeat;

/// Maximum connections at a time. Only probes and scrapers connect.
const MAX_CONNECTIONS: usize = 64;
const HEADER_TIME: Duration = Duration::from_secs(5);

pub(super) async fn serve(listener: TcpListener, node: watch::Receiver<Arc<Node>>) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection on the ops port");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let node = node.clone();
        tokio::spawn(async move {
            let answer = service_fn(move |request| {
                let node = Arc::clone(&node.borrow());
                async move { Ok::<_, Infallible>(answer(&node, &request).await) }
            });
            let mut server = hyper::server::conn::http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(HEADER_TIME).max_headers(64);
            // A disconnect of the client is not an error.
            let _ = server.serve_connection(TokioIo::new(stream), answer).await;
            drop(permit);
        });
    }
}

async fn answer(node: &Node, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let probe = |good: bool| match good {
        true => text(StatusCode::OK, "ok\n".to_owned()),
        false => text(StatusCode::SERVICE_UNAVAILABLE, "not now\n".to_owned()),
    };
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET is served\n".to_owned());
    }
    match request.uri().path() {
        "/livez" => match heartbeat::stopped(&node.loops).await.as_slice() {
            [] => probe(node.alive()),
            stopped => text(StatusCode::SERVICE_UNAVAILABLE, format!("{} is stuck\n", stopped.join(" and "))),
        },
        "/readyz" if node.shortage.is_short() => {
            text(StatusCode::SERVICE_UNAVAILABLE, "free memory is below the floor\n".to_owned())
        }
        "/readyz" if node.twin.is_present() => text(
            StatusCode::SERVICE_UNAVAILABLE,
            "another process with this worker's identity is alive\n".to_owned(),
        ),
        "/readyz" => probe(node.ready()),
        "/startupz" => probe(node.engine().is_some()),
        "/metrics" => text(StatusCode::OK, node.metrics_text()),
        _ => text(
            StatusCode::NOT_FOUND,
            "not found; there are /livez, /readyz, /startupz and /metrics\n".to_owned(),
        ),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, kind);
    response
}
