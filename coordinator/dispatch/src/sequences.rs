//! Operations on sequences at the workers that hold them.

use super::{Dispatch, Link, RPC_LIMIT};
use proto::block::BlockId;
use proto::ids::{ModelId, NodeId};
use proto::sequence::{SequenceName, SequenceRequest};
use proto::worker::WorkerState;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, BuildHasherDefault, RandomState};
use std::sync::Arc;
use std::time::Duration;
use text::recent::AsItIs;
use transport::SequenceExchange;
use transport::service::deadline;

/// How long an operation's answer waits for the index to apply the operation's KV events.
const CATCH_UP_LIMIT: Duration = RPC_LIMIT;

/// Maximum of requests whose worker is remembered.
const MAX_SERVED: usize = 1 << 16;

/// The worker that served each request. A hint, so that not every worker must be asked. Requests are stored
/// as hashes under a random key: tens of thousands of name strings would cost a cache miss on each insertion
/// and removal.
#[derive(Debug, Default)]
pub(super) struct Served {
    key: RandomState,
    nodes: HashMap<u64, NodeId, BuildHasherDefault<AsItIs>>,
    /// Request hashes in the order first served.
    order: VecDeque<u64>,
}

impl Served {
    pub(super) fn insert(&mut self, root: BlockId, name: &SequenceName, node: NodeId) {
        let name = self.key.hash_one((root, name));
        if self.nodes.insert(name, node).is_some() {
            return;
        }
        self.order.push_back(name);
        if self.order.len() > MAX_SERVED
            && let Some(oldest) = self.order.pop_front()
        {
            self.nodes.remove(&oldest);
        }
    }

    fn get(&self, root: BlockId, name: &SequenceName) -> Option<&NodeId> {
        self.nodes.get(&self.key.hash_one((root, name)))
    }
}

impl Dispatch {
    /// Records that a worker has a sequence of this name.
    pub fn note_served(&self, root: BlockId, name: &SequenceName, node: &NodeId) {
        self.state.lock().served.insert(root, name, node.clone());
    }

    /// The workers that serve a model. The holder of the named sequence comes first, if known; then ready
    /// workers, then those with the fewest requests.
    pub fn serving(&self, model: &ModelId, sequence: Option<(BlockId, &SequenceName)>) -> Vec<NodeId> {
        let holder = sequence.and_then(|(root, name)| self.state.lock().served.get(root, name).cloned());
        let mut workers = self.workers();
        workers.retain(|view| view.member.register.models.iter().any(|served| served.id == *model));
        workers.sort_by_key(|view| {
            let other = holder.as_ref() != Some(&view.member.register.node);
            (other, view.state() != WorkerState::Ready, view.inflight, view.pending_tokens)
        });
        workers.into_iter().map(|view| view.member.register.node.clone()).collect()
    }

    /// Starts an operation at a worker; `None` if it is not a member.
    pub async fn open_sequence(
        &self,
        node: &NodeId,
        request: &SequenceRequest,
    ) -> Option<Result<SequenceExchange, transport::Error>> {
        let link: Arc<Link> = self.state.lock().links.get(node).cloned()?;
        Some(link.connection().open_sequence(request).await)
    }

    /// Waits until the index has applied all events that the worker has announced up to now.
    ///
    /// # Errors
    /// The worker has left or has a new epoch, an RPC failed, or 5 s have passed.
    pub async fn catch_up(&self, node: &NodeId) -> Result<(), String> {
        let link = self.state.lock().links.get(node).cloned().ok_or("the worker is not a member any more")?;
        let caught_up = async {
            let api = link.api().await.map_err(|error| error.to_string())?;
            let status = api.status(deadline(CATCH_UP_LIMIT)).await.map_err(|error| error.to_string())?;
            loop {
                let applied = self.events_applied.notified();
                let streams = self.look(|balancer| balancer.stream(node));
                match streams {
                    Some(stream) if stream.epoch != link.epoch() => {
                        return Err("the worker has started a new epoch".into());
                    }
                    Some(stream) if stream.applied >= status.kv_sequence && !stream.torn => return Ok(()),
                    Some(_) => applied.await,
                    None => return Err("the worker is not a member any more".into()),
                }
            }
        };
        let timed_out = || Err(format!("the events did not arrive within {} s", CATCH_UP_LIMIT.as_secs()));
        tokio::time::timeout(CATCH_UP_LIMIT, caught_up).await.unwrap_or_else(|_| timed_out())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::ids::RequestId;

    #[test]
    fn the_oldest_requests_are_forgotten_first() {
        let name = |n: usize| SequenceName { request: RequestId::new(format!("r{n}")).unwrap(), choice: 0 };
        let node = |text: &str| NodeId::new(text).unwrap();
        let root = BlockId([1; 16]);
        let mut served = Served::default();
        for n in 0..=MAX_SERVED {
            served.insert(root, &name(n), node("w1"));
            served.insert(root, &name(n), node("w2"));
        }
        assert_eq!((served.nodes.len(), served.order.len()), (MAX_SERVED, MAX_SERVED));
        assert_eq!(served.get(root, &name(0)), None);
        assert_eq!(served.get(root, &name(1)), Some(&node("w2")));
        assert_eq!(served.get(BlockId([2; 16]), &name(1)), None, "another tenant's");
    }
}
