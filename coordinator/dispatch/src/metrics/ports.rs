//! Metrics of the HTTP connections of a port.

use super::families::{One, one, registered};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Debug)]
pub(super) struct Ports {
    open: Family<One, Gauge>,
    limit: Family<One, Gauge>,
    refused: Family<One, Counter>,
    closed: Family<One, Counter>,
}

#[derive(Debug)]
pub struct Port {
    open: Gauge,
    refused: Counter,
    closed: Counter,
}

impl Ports {
    pub(super) fn register(r: &mut Registry) -> Self {
        Self {
            open: registered(r, "kvasir_http_connections", "Open HTTP connections"),
            limit: registered(r, "kvasir_http_connections_max", "Limit of open HTTP connections"),
            refused: registered(
                r,
                "kvasir_http_connections_refused",
                "HTTP connections refused because all others served requests",
            ),
            closed: registered(
                r,
                "kvasir_http_connections_closed_idle",
                "Idle HTTP connections closed to make room for new ones",
            ),
        }
    }

    pub(super) fn port(&self, name: &'static str, limit: usize) -> Port {
        let label = one("port", name);
        self.limit.get_or_create(&label).set(i64::try_from(limit).unwrap_or(i64::MAX));
        Port {
            open: self.open.get_or_create_owned(&label),
            refused: self.refused.get_or_create_owned(&label),
            closed: self.closed.get_or_create_owned(&label),
        }
    }
}

impl Port {
    /// Sets the number of open connections.
    pub fn open(&self, connections: usize) {
        self.open.set(i64::try_from(connections).unwrap_or(i64::MAX));
    }

    /// Counts a connection that arrived while all were in use.
    pub fn refused(&self) {
        self.refused.inc();
    }

    /// Counts an idle connection that was closed for a new one.
    pub fn made_room(&self) {
        self.closed.inc();
    }
}
