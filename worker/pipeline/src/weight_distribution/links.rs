//! Connections to the workers that a model is fetched from, dialed on demand: one to each source over every
//! lane.
//!
//! One task reads a UDP socket and one task decrypts a connection, so a connection is limited to what one CPU
//! can do. A *lane* is a socket with a connection to each source. The first lane is the node's own socket;
//! its connection decides which node a source is and whether it is alive. Other lanes dial the address and
//! node that the first lane reached, so that all lanes lead to the same node even if its name has several
//! addresses. If a further connection is refused, for example by the source's limit of connections from a
//! host, the first lane is used instead.

use parking_lot::Mutex as SyncMutex;
use pki::Expected;
use proto::ids::{NodeId, Role};
use std::sync::{Arc, OnceLock};
use tokio::sync::Mutex;
use transport::{Connection, Endpoint};

/// Links to all sources. Sources and lanes are named by index.
#[derive(Debug)]
pub(crate) struct Links {
    endpoint: Arc<Endpoint>,
    /// Endpoints of the lanes after the first, bound when they are first used.
    further: Vec<SyncMutex<Option<Arc<Endpoint>>>>,
    sources: Vec<Link>,
}

#[derive(Debug)]
struct Link {
    target: String,
    /// Set once the source was reached.
    node: OnceLock<NodeId>,
    /// Connection over the first lane. The lock serializes dialing.
    first: Mutex<Option<Connection>>,
    further: Vec<Mutex<Further>>,
}

/// A connection over a lane after the first.
#[derive(Debug)]
enum Further {
    Undialled,
    Dialled(Connection),
    /// Dialing failed while the first lane was connected. The first lane is used for as long as these links
    /// exist.
    Refused,
}

impl Links {
    /// Links to `targets` (`host:port`) over `lanes` lanes, at least one.
    pub(crate) fn new(endpoint: Arc<Endpoint>, targets: &[String], lanes: usize) -> Self {
        let further = lanes.saturating_sub(1);
        let link = |target: &String| Link {
            target: target.clone(),
            node: OnceLock::new(),
            first: Mutex::default(),
            further: (0..further).map(|_| Mutex::new(Further::Undialled)).collect(),
        };
        let sources = targets.iter().map(link).collect();
        Self { endpoint, further: (0..further).map(|_| SyncMutex::default()).collect(), sources }
    }

    pub(crate) fn len(&self) -> usize {
        self.sources.len()
    }

    pub(crate) fn lanes(&self) -> usize {
        1 + self.further.len()
    }

    /// Address of a source; empty if there is no such source.
    pub(crate) fn target(&self, source: usize) -> &str {
        self.sources.get(source).map_or("", |link| &link.target)
    }

    /// Node of a source; `None` until it was reached.
    pub(crate) fn node(&self, source: usize) -> Option<&NodeId> {
        self.sources.get(source)?.node.get()
    }

    /// Name of a source for log lines: its node, or its address.
    pub(crate) fn name(&self, source: usize) -> &str {
        let address = || self.sources.get(source).map_or("", |link| &link.target);
        self.node(source).map_or_else(address, NodeId::as_str)
    }

    /// Returns the connection to a source over a lane, or dials it. Falls back to the first lane if the lane
    /// has none.
    pub(crate) async fn connect(&self, source: usize, lane: usize) -> Result<Connection, String> {
        let link = self.sources.get(source).ok_or("there is no such source")?;
        let further =
            lane.checked_sub(1).and_then(|index| link.further.get(index).zip(self.further.get(index)));
        let Some((further_connection, endpoint)) = further else { return self.first(link).await };
        let mut further_connection = further_connection.lock().await;
        match &*further_connection {
            Further::Dialled(connection) if !connection.is_closed() => return Ok(connection.clone()),
            Further::Refused => {
                drop(further_connection);
                return self.first(link).await;
            }
            Further::Undialled | Further::Dialled(_) => {}
        }
        // Dial the first lane first, so that a lost source is detected once and not by each lane.
        let first = self.first(link).await?;
        match self.dial_as(endpoint, &first).await {
            Ok(connection) => {
                *further_connection = Further::Dialled(connection.clone());
                Ok(connection)
            }
            // The source is gone, and the first connection has only just noticed.
            Err(error) if first.is_closed() => Err(error.to_string()),
            Err(error) => {
                let source = link.node.get().map_or(link.target.as_str(), NodeId::as_str);
                tracing::warn!(source, lane, %error, "cannot open a further connection to a source; the transfer continues without it");
                *further_connection = Further::Refused;
                Ok(first)
            }
        }
    }

    /// The connection over the first lane, which determines the source's node and address.
    async fn first(&self, link: &Link) -> Result<Connection, String> {
        let mut cached = link.first.lock().await;
        if let Some(connection) = cached.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let addresses = tokio::net::lookup_host(&link.target).await;
        let mut last = format!("{} has no address", link.target);
        for address in addresses.map_err(|error| error.to_string())? {
            match self.endpoint.connect(address, &Expected::any(Role::Worker)).await {
                Ok(connection) => {
                    link.node.get_or_init(|| connection.peer().node.clone());
                    *cached = Some(connection.clone());
                    return Ok(connection);
                }
                Err(error) => last = error.to_string(),
            }
        }
        Err(last)
    }

    /// Dials the address and node of `first` from another endpoint.
    async fn dial_as(
        &self,
        endpoint: &SyncMutex<Option<Arc<Endpoint>>>,
        first: &Connection,
    ) -> Result<Connection, transport::Error> {
        let endpoint = {
            let mut cached = endpoint.lock();
            match &*cached {
                Some(endpoint) => Arc::clone(endpoint),
                None => Arc::clone(cached.insert(Arc::new(self.endpoint.another()?))),
            }
        };
        let expected = Expected::node(Role::Worker, first.peer().node.clone());
        endpoint.connect(first.remote_address(), &expected).await
    }
}
