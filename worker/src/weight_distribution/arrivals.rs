//! What of a model is here while the rest is being fetched, for whoever loads it meanwhile.

use model::shard::{ChunkId, ChunkSlot, TensorMemory};
use parking_lot::{Condvar, Mutex};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The tensors that a model's layers need, and its drafter's, some of which are still under way. Clones are of the same
/// fetch.
#[derive(Debug, Clone)]
pub struct Arrivals {
    inner: Arc<Inner>,
    /// Names are those of the drafter's tensors.
    of_drafter: bool,
}

#[derive(Debug)]
struct Inner {
    /// The chunks of each tensor; the drafter's stand under [`drafter_key`].
    tensors: HashMap<String, Vec<ChunkId>>,
    /// Tensors that are loaded from memory.
    gathered: HashMap<String, TensorMemory>,
    /// The one that a chunk belongs to, and its number there.
    places: HashMap<ChunkId, (String, usize)>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    missing: HashSet<ChunkId>,
    over: bool,
}

/// Ends the waiting when it is dropped.
#[derive(Debug)]
pub(super) struct Ending(Arrivals);

impl PartialEq for Arrivals {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner) && self.of_drafter == other.of_drafter
    }
}

impl Eq for Arrivals {}

/// A drafter's tensor, whose name a tensor of the model may have too.
pub(super) fn drafter_key(tensor: &str) -> String {
    format!("drafter/{tensor}")
}

impl Arrivals {
    /// Of these tensors, by their chunks, of which these (with their bytes) are to come. What comes whole is gathered in
    /// memory if all of it is no more than `memory` bytes.
    pub(super) fn new(
        tensors: HashMap<String, Vec<ChunkId>>,
        missing: &[(ChunkId, usize)],
        memory: u64,
    ) -> Self {
        let coming: HashMap<ChunkId, usize> = missing.iter().copied().collect();
        let (mut gathered, mut places) = (HashMap::new(), HashMap::new());
        if missing.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>() <= memory {
            let mut uses = HashMap::<ChunkId, u32>::new();
            tensors.values().flatten().for_each(|chunk| *uses.entry(*chunk).or_default() += 1);
            for (name, chunks) in &tensors {
                let own = |chunk: &ChunkId| coming.get(chunk).filter(|_| uses.get(chunk) == Some(&1));
                let Some(lengths) = chunks.iter().map(own).collect::<Option<Vec<_>>>() else { continue };
                gathered.insert(name.clone(), TensorMemory::new(lengths.into_iter().sum()));
                places.extend(chunks.iter().zip(0..).map(|(chunk, number)| (*chunk, (name.clone(), number))));
            }
        }
        let state = State { missing: coming.into_keys().collect(), over: false };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self { inner: Arc::new(Inner { tensors, gathered, places, state, changed }), of_drafter: false }
    }

    /// The same fetch, by the names of the drafter's tensors.
    pub(crate) fn of_drafter(&self) -> Self {
        Self { of_drafter: true, ..self.clone() }
    }

    fn key<'a>(&self, tensor: &'a str) -> Cow<'a, str> {
        match self.of_drafter {
            true => Cow::Owned(drafter_key(tensor)),
            false => Cow::Borrowed(tensor),
        }
    }

    /// Where a chunk is received that stays in memory; none where its tensor is not gathered there.
    pub(super) fn slot(&self, chunk: ChunkId) -> Option<ChunkSlot> {
        let (tensor, number) = self.inner.places.get(&chunk)?;
        let slot = self.inner.gathered.get(tensor)?.slot(*number);
        slot.inspect_err(|error| tracing::debug!(tensor, %error, "a tensor is not gathered in memory"))
            .ok()?
    }

    /// A tensor that is gathered in memory.
    pub(crate) fn gathered(&self, tensor: &str) -> Option<&TensorMemory> {
        self.inner.gathered.get(self.key(tensor).as_ref())
    }

    /// Waits until all of a tensor is here, or nothing more comes.
    pub(crate) fn wait(&self, tensor: &str) {
        let chunks = self.inner.tensors.get(self.key(tensor).as_ref()).map_or(&[][..], Vec::as_slice);
        let mut state = self.inner.state.lock();
        self.inner.changed.wait_while(&mut state, |state| {
            !state.over && chunks.iter().any(|chunk| state.missing.contains(chunk))
        });
    }

    pub(super) fn kept(&self, chunk: ChunkId) {
        self.inner.state.lock().missing.remove(&chunk);
        self.inner.changed.notify_all();
    }

    /// Nobody waits any more once this is dropped.
    pub(super) fn ending(&self) -> Ending {
        Ending(self.clone())
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.inner.state.lock().over = true;
        self.0.inner.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::shard::CHUNK_BYTES;
    use std::thread;

    #[test]
    fn a_tensor_is_waited_for_until_all_of_it_is_here_or_nothing_more_comes() {
        let [one, two, three] = [b"1", b"2", b"3"].map(|bytes| ChunkId::of(bytes));
        let tensors = [("a", vec![one, two]), ("b", vec![three])];
        let tensors = tensors.map(|(name, chunks)| (name.to_owned(), chunks)).into();
        let arrivals = Arrivals::new(tensors, &[(two, 1), (three, 1)], 0);
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

    #[test]
    fn what_comes_whole_is_gathered_where_there_is_memory_for_it() {
        let (first, second) = (vec![1; CHUNK_BYTES], vec![2; 5]);
        let [here, one, two, twice] = [&b"0"[..], &first, &second, b"3"].map(ChunkId::of);
        let tensors = || {
            let tensors =
                [("whole", vec![one, two]), ("part", vec![here]), ("a", vec![twice]), ("b", vec![twice])];
            tensors.map(|(name, chunks)| (name.to_owned(), chunks)).into()
        };
        let missing = [(one, CHUNK_BYTES), (two, 5), (twice, 1)];
        let bytes = CHUNK_BYTES as u64 + 6;
        assert!(
            Arrivals::new(tensors(), &missing, bytes - 1).slot(two).is_none(),
            "more than there is memory for"
        );
        let arrivals = Arrivals::new(tensors(), &missing, bytes);
        let put = |chunk, bytes: &[u8]| {
            let mut slot = arrivals.slot(chunk).unwrap();
            slot.push(bytes);
            slot.finish()
        };
        assert!(put(two, &second) && arrivals.gathered("whole").unwrap().bytes().is_none());
        assert!(put(one, &first) && arrivals.slot(twice).is_none() && arrivals.slot(here).is_none());
        let whole = arrivals.gathered("whole").unwrap().bytes();
        assert_eq!(whole.unwrap(), [first, second].concat());
        assert!(["part", "a", "b"].iter().all(|name| arrivals.gathered(name).is_none()));
    }
}
