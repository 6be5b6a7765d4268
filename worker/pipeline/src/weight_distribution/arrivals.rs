//! Tracks which tensors of a model have arrived while the rest is being fetched, so that loading can start
//! early.

use model::shard::{ChunkId, ChunkSlot, TensorMemory};
use parking_lot::{Condvar, Mutex};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The tensors that a model's layers and its drafter need, some of which are still being fetched. Clones
/// share the same fetch.
#[derive(Debug, Clone)]
pub struct Arrivals {
    inner: Arc<Inner>,
    /// Names refer to the drafter's tensors.
    of_drafter: bool,
}

#[derive(Debug)]
struct Inner {
    /// The chunks of each tensor. The drafter's tensors are stored under [`drafter_key`].
    tensors: HashMap<String, Vec<ChunkId>>,
    /// Tensors that are loaded from memory.
    gathered: HashMap<String, TensorMemory>,
    /// The gathered tensor of a chunk, and the chunk's index in it.
    locations: HashMap<ChunkId, (String, usize)>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    missing: HashSet<ChunkId>,
    over: bool,
}

/// Ends all waits when it is dropped.
#[derive(Debug)]
pub(super) struct Ending(Arrivals);

impl PartialEq for Arrivals {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner) && self.of_drafter == other.of_drafter
    }
}

impl Eq for Arrivals {}

/// Key of a drafter's tensor, since the model may have a tensor with the same name.
pub(super) fn drafter_key(tensor: &str) -> String {
    format!("drafter/{tensor}")
}

impl Arrivals {
    /// `tensors` maps tensors to their chunks; `missing` has the chunks to fetch with their bytes. If all
    /// missing chunks together have at most `memory` bytes, tensors that are missing as a whole are gathered
    /// in memory.
    pub(super) fn new(
        tensors: HashMap<String, Vec<ChunkId>>,
        missing: &[(ChunkId, usize)],
        memory: u64,
    ) -> Self {
        let coming: HashMap<ChunkId, usize> = missing.iter().copied().collect();
        let (mut gathered, mut locations) = (HashMap::new(), HashMap::new());
        if missing.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>() <= memory {
            let mut uses = HashMap::<ChunkId, u32>::new();
            tensors.values().flatten().for_each(|chunk| *uses.entry(*chunk).or_default() += 1);
            for (name, chunks) in &tensors {
                let own = |chunk: &ChunkId| coming.get(chunk).filter(|_| uses.get(chunk) == Some(&1));
                let Some(lengths) = chunks.iter().map(own).collect::<Option<Vec<_>>>() else { continue };
                gathered.insert(name.clone(), TensorMemory::new(lengths.into_iter().sum()));
                locations
                    .extend(chunks.iter().zip(0..).map(|(chunk, number)| (*chunk, (name.clone(), number))));
            }
        }
        let state = State { missing: coming.into_keys().collect(), over: false };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self { inner: Arc::new(Inner { tensors, gathered, locations, state, changed }), of_drafter: false }
    }

    /// The same fetch, with the names of the drafter's tensors.
    pub fn of_drafter(&self) -> Self {
        Self { of_drafter: true, ..self.clone() }
    }

    fn key<'a>(&self, tensor: &'a str) -> Cow<'a, str> {
        match self.of_drafter {
            true => Cow::Owned(drafter_key(tensor)),
            false => Cow::Borrowed(tensor),
        }
    }

    /// Memory to receive a chunk into. `None` if its tensor is not gathered in memory.
    pub(super) fn slot(&self, chunk: ChunkId) -> Option<ChunkSlot> {
        let (tensor, number) = self.inner.locations.get(&chunk)?;
        let slot = self.inner.gathered.get(tensor)?.slot(*number);
        slot.inspect_err(|error| tracing::debug!(tensor, %error, "a tensor is not received in memory; it is read from the shard store"))
            .ok()?
    }

    /// The memory of a tensor; `None` if it is not gathered in memory.
    pub fn gathered(&self, tensor: &str) -> Option<&TensorMemory> {
        self.inner.gathered.get(self.key(tensor).as_ref())
    }

    /// Blocks until the whole tensor has arrived or the fetch has ended.
    pub fn wait(&self, tensor: &str) {
        let chunks = self.inner.tensors.get(self.key(tensor).as_ref()).map_or(&[][..], Vec::as_slice);
        let mut state = self.inner.state.lock();
        self.inner.changed.wait_while(&mut state, |state| {
            !state.over && chunks.iter().any(|chunk| state.missing.contains(chunk))
        });
    }

    pub(super) fn stored(&self, chunk: ChunkId) {
        self.inner.state.lock().missing.remove(&chunk);
        self.inner.changed.notify_all();
    }

    /// Returns a guard that ends all waits when it is dropped.
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
    fn a_wait_for_a_tensor_ends_when_it_is_complete_or_the_fetch_ends() {
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
            arrivals.stored(two);
            first.join().unwrap();
            assert!(!second.is_finished());
            drop(ending);
            second.join().unwrap();
        });
    }

    #[test]
    fn wholly_missing_tensors_are_gathered_if_memory_suffices() {
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
