//! Connections to the workers that a model is fetched from, one each, dialled when they are needed.

use proto::ids::{NodeId, Role};
use proto::transport::{Connection, Endpoint, Expected};
use std::sync::{Arc, OnceLock};
use tokio::sync::Mutex;

/// See the module. Sources are named by their number.
#[derive(Debug)]
pub(crate) struct Links {
    endpoint: Arc<Endpoint>,
    sources: Vec<Link>,
}

#[derive(Debug)]
struct Link {
    target: String,
    /// Once it has been reached.
    node: OnceLock<NodeId>,
    /// One dials at a time.
    connection: Mutex<Option<Connection>>,
}

impl Links {
    /// To these addresses, `host:port`.
    pub(crate) fn new(endpoint: Arc<Endpoint>, targets: &[String]) -> Self {
        let link = |target: &String| Link {
            target: target.clone(),
            node: OnceLock::new(),
            connection: Mutex::default(),
        };
        Self { endpoint, sources: targets.iter().map(link).collect() }
    }

    pub(crate) fn len(&self) -> usize {
        self.sources.len()
    }

    /// Where a source is reached; empty if there is no such source.
    pub(crate) fn target(&self, source: usize) -> &str {
        self.sources.get(source).map_or("", |link| &link.target)
    }

    /// Who a source is, once it has been reached.
    pub(crate) fn node(&self, source: usize) -> Option<&NodeId> {
        self.sources.get(source)?.node.get()
    }

    /// What a source is called in words.
    pub(crate) fn name(&self, source: usize) -> &str {
        let address = || self.sources.get(source).map_or("", |link| &link.target);
        self.node(source).map_or_else(address, NodeId::as_str)
    }

    /// A connection to a source, a new one if there is none.
    pub(crate) async fn connect(&self, source: usize) -> Result<Connection, String> {
        let link = self.sources.get(source).ok_or("there is no such source")?;
        let mut place = link.connection.lock().await;
        if let Some(connection) = place.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let addresses = tokio::net::lookup_host(&link.target).await;
        let mut last = format!("{} has no address", link.target);
        for address in addresses.map_err(|error| error.to_string())? {
            match self.endpoint.connect(address, &Expected::any(Role::Worker)).await {
                Ok(connection) => {
                    link.node.get_or_init(|| connection.peer().node.clone());
                    *place = Some(connection.clone());
                    return Ok(connection);
                }
                Err(error) => last = error.to_string(),
            }
        }
        Err(last)
    }
}
