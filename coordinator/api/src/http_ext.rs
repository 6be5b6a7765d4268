//! Extensions of HTTP requests that the listeners set and handlers read.

use std::convert::Infallible;
use std::net::SocketAddr;
use tokio::sync::{mpsc, watch};

/// Remote address of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// One of the listener's connections. An upgraded connection keeps it, so that the connection counts towards the limit,
/// and the listener waits for it when it stops.
#[derive(Debug, Clone)]
pub struct ConnectionPermit {
    close: watch::Receiver<bool>,
    _taken: mpsc::Sender<Infallible>,
}

impl ConnectionPermit {
    pub fn new(close: watch::Receiver<bool>, taken: mpsc::Sender<Infallible>) -> Self {
        Self { close, _taken: taken }
    }

    /// Completes when the listener closes its connections.
    pub async fn closing(&self) {
        closing(&mut self.close.clone()).await;
    }
}

/// Completes when `close` becomes `true`, or when its sender is dropped.
pub async fn closing(close: &mut watch::Receiver<bool>) {
    let _ = close.wait_for(|close| *close).await;
}
