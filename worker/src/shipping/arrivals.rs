//! What of a model is here while the rest is being fetched, for whoever loads it meanwhile.

use model::shard::ChunkId;
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The tensors that a model's layers need, some of which are still under way. Clones are of the same fetch.
#[derive(Debug, Clone)]
pub struct Arrivals(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The chunks of each tensor.
    tensors: HashMap<String, Vec<ChunkId>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    missing: HashSet<ChunkId>,
    /// Nothing more comes.
    over: bool,
}

/// Ends the waiting when it is dropped.
#[derive(Debug)]
pub(super) struct Ending(Arrivals);

impl PartialEq for Arrivals {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Arrivals {}

impl Arrivals {
    pub(super) fn new(
        tensors: HashMap<String, Vec<ChunkId>>,
        missing: impl IntoIterator<Item = ChunkId>,
    ) -> Self {
        let state = State { missing: missing.into_iter().collect(), over: false };
        Self(Arc::new(Inner { tensors, state: Mutex::new(state), changed: Condvar::new() }))
    }

    /// Waits until all of a tensor is here, or nothing more comes.
    pub(crate) fn wait(&self, tensor: &str) {
        let chunks = self.0.tensors.get(tensor).map_or(&[][..], Vec::as_slice);
        let mut state = self.0.state.lock();
        self.0.changed.wait_while(&mut state, |state| {
            !state.over && chunks.iter().any(|chunk| state.missing.contains(chunk))
        });
    }

    /// A chunk is here.
    pub(super) fn kept(&self, chunk: ChunkId) {
        self.0.state.lock().missing.remove(&chunk);
        self.0.changed.notify_all();
    }

    /// Nobody waits any more once this is dropped.
    pub(super) fn ending(&self) -> Ending {
        Ending(self.clone())
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.0.state.lock().over = true;
        self.0.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_tensor_is_waited_for_until_all_of_it_is_here_or_nothing_more_comes() {
        let [one, two, three] = [b"1", b"2", b"3"].map(|bytes| ChunkId::of(bytes));
        let tensors = [("a", vec![one, two]), ("b", vec![three])];
        let tensors = tensors.map(|(name, chunks)| (name.to_owned(), chunks)).into();
        let arrivals = Arrivals::new(tensors, [two, three]);
        arrivals.wait("not of this model");
        thread::scope(|scope| {
            let ending = arrivals.ending();
            let first = scope.spawn(|| arrivals.wait("a"));
            let second = scope.spawn(|| arrivals.wait("b"));
            assert!(!first.is_finished());
            arrivals.kept(two);
            first.join().unwrap();
            assert!(!second.is_finished());
            drop(ending);
            second.join().unwrap();
        });
    }
}
