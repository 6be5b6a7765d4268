//! Connections to the workers that a model is fetched from, dialled when they are needed: one to each over every lane.
//!
//! What comes to a UDP socket is read by one task, and what comes over a connection is decrypted by one, so that a connection
//! carries what a CPU can. A *lane* is a socket of its own with a connection to each source; the first is the node's own
//! socket. Who a source is, and whether it is there, the first lane's connection says. The others are dialled to where that
//! one leads and to the same node, so that all of a source's lanes are of one node also where its name has several
//! addresses; one that cannot be had, because the source has as many connections of this host as it takes, say, is done
//! without.

use parking_lot::Mutex as SyncMutex;
use proto::ids::{NodeId, Role};
use proto::transport::{Connection, Endpoint, Expected};
use std::sync::{Arc, OnceLock};
use tokio::sync::Mutex;

/// See the module. Sources and lanes are named by their number.
#[derive(Debug)]
pub(crate) struct Links {
    endpoint: Arc<Endpoint>,
    /// Of the lanes behind the first, once they have something to carry.
    further: Vec<SyncMutex<Option<Arc<Endpoint>>>>,
    sources: Vec<Link>,
}

#[derive(Debug)]
struct Link {
    target: String,
    /// Once it has been reached.
    node: OnceLock<NodeId>,
    /// Over the first lane. One dials at a time.
    first: Mutex<Option<Connection>>,
    further: Vec<Mutex<Further>>,
}

/// A connection over a lane behind the first.
#[derive(Debug)]
enum Further {
    Undialled,
    Dialled(Connection),
    /// It could not be had while the first stood: for as long as these links live the first has to do.
    Refused,
}

impl Links {
    /// To these addresses, `host:port`, over so many lanes; at least one.
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

    /// A connection to a source over a lane, a new one if there is none; over the first one if that lane has none to give.
    pub(crate) async fn connect(&self, source: usize, lane: usize) -> Result<Connection, String> {
        let link = self.sources.get(source).ok_or("there is no such source")?;
        let further =
            lane.checked_sub(1).and_then(|index| link.further.get(index).zip(self.further.get(index)));
        let Some((place, endpoint)) = further else { return self.first(link).await };
        let mut place = place.lock().await;
        match &*place {
            Further::Dialled(connection) if !connection.is_closed() => return Ok(connection.clone()),
            Further::Refused => {
                drop(place);
                return self.first(link).await;
            }
            Further::Undialled | Further::Dialled(_) => {}
        }
        // A source that is gone is found to be gone once, and not by each lane.
        let first = self.first(link).await?;
        match self.dial_as(endpoint, &first).await {
            Ok(connection) => {
                *place = Further::Dialled(connection.clone());
                Ok(connection)
            }
            // The source is gone, of which the first connection has only just heard.
            Err(error) if first.is_closed() => Err(error.to_string()),
            Err(error) => {
                let source = link.node.get().map_or(link.target.as_str(), NodeId::as_str);
                tracing::warn!(source, lane, %error, "a further connection cannot be had, it goes on without");
                *place = Further::Refused;
                Ok(first)
            }
        }
    }

    /// The connection over the first lane, which says who and where the source is.
    async fn first(&self, link: &Link) -> Result<Connection, String> {
        let mut place = link.first.lock().await;
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

    /// Another connection to where this one leads, over a lane of this endpoint.
    async fn dial_as(
        &self,
        endpoint: &SyncMutex<Option<Arc<Endpoint>>>,
        first: &Connection,
    ) -> Result<Connection, proto::Error> {
        let endpoint = {
            let mut place = endpoint.lock();
            match &*place {
                Some(endpoint) => Arc::clone(endpoint),
                None => Arc::clone(place.insert(Arc::new(self.endpoint.another()?))),
            }
        };
        let expected = Expected::node(Role::Worker, first.peer().node.clone());
        endpoint.connect(first.remote_address(), &expected).await
    }
}
