//! Operations on sequences at the workers that have them.

use super::{Dispatch, Link, RPC_LIMIT};
use model::recent::AsItIs;
use proto::block::BlockId;
use proto::ids::{ModelId, NodeId};
use proto::message::WorkerState;
use proto::sequence::{SequenceName, SequenceRequest};
use proto::service::deadline;
use proto::transport::SequenceExchange;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, BuildHasherDefault, RandomState};
use std::sync::Arc;
use std::time::Duration;

/// How long the answer to an operation waits for the index to learn what it has changed.
const CATCH_UP_LIMIT: Duration = RPC_LIMIT;

/// Requests of which is remembered who served them.
const MAX_SERVED: usize = 1 << 16;

/// Who served which request: a hint, so that not every worker has to be asked. So a request is known here by a hash under a
/// key of its own: texts of tens of thousands of names would be memory that has gone cold whenever one comes or goes.
#[derive(Debug, Default)]
pub(super) struct Served {
    key: RandomState,
    nodes: HashMap<u64, NodeId, BuildHasherDefault<AsItIs>>,
    /// In the order in which they were first served.
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
    /// A worker has a sequence of this name from now on.
    pub fn note_served(&self, root: BlockId, name: &SequenceName, node: &NodeId) {
        self.desk.lock().served.insert(root, name, node.clone());
    }

    /// The workers that serve a model: first the one that has the sequence of this name, as far as is known here, then
    /// those with least to do.
    pub fn serving(&self, model: &ModelId, sequence: Option<(BlockId, &SequenceName)>) -> Vec<NodeId> {
        let holder = sequence.and_then(|(root, name)| self.desk.lock().served.get(root, name).cloned());
        let mut workers = self.workers();
        workers.retain(|view| view.member.register.models.iter().any(|served| served.id == *model));
        workers.sort_by_key(|view| {
            let other = holder.as_ref() != Some(&view.member.register.node);
            (other, view.state() != WorkerState::Ready, view.inflight, view.pending_tokens)
        });
        workers.into_iter().map(|view| view.member.register.node.clone()).collect()
    }

    /// Opens an operation at a worker. `None`: it is no member.
    pub async fn open_sequence(
        &self,
        node: &NodeId,
        request: &SequenceRequest,
    ) -> Option<Result<SequenceExchange, proto::Error>> {
        let link: Arc<Link> = self.desk.lock().links.get(node).cloned()?;
        Some(link.connection().open_sequence(request).await)
    }

    /// Waits until the index knows all that the worker has announced up to now. An error says why it does not: the worker
    /// has left, or it took longer than 5 s.
    pub async fn catch_up(&self, node: &NodeId) -> Result<(), String> {
        let link = self.desk.lock().links.get(node).cloned().ok_or("it is no member any more")?;
        let caught_up = async {
            let api = link.api().await.map_err(|error| error.to_string())?;
            let status = api.status(deadline(CATCH_UP_LIMIT)).await.map_err(|error| error.to_string())?;
            loop {
                let heard = self.heard.notified();
                let streams = self.look(|balancer| balancer.stream(node));
                match streams {
                    Some(stream) if stream.epoch != link.epoch() => {
                        return Err("it has begun a new life".into());
                    }
                    Some(stream) if stream.applied >= status.kv_sequence && !stream.torn => return Ok(()),
                    Some(_) => heard.await,
                    None => return Err("it is no member any more".into()),
                }
            }
        };
        let late = || Err(format!("not after {} s", CATCH_UP_LIMIT.as_secs()));
        tokio::time::timeout(CATCH_UP_LIMIT, caught_up).await.unwrap_or_else(|_| late())
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
