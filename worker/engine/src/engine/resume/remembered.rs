//! The tokens of ended sequences, so that they can still be named. The number of sequences and tokens is
//! bounded; the least recently used sequence is forgotten first.

use super::SequenceKey;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

const MAX_SEQUENCES: usize = 4096;
/// Maximum number of tokens of all sequences together: 64 MiB.
const MAX_TOKENS: usize = 16 << 20;

#[derive(Debug, Default)]
pub(super) struct EndedSequences {
    sequences: HashMap<SequenceKey, (u64, Arc<[u32]>)>,
    /// By time of last use, the earliest first.
    order: BTreeMap<u64, SequenceKey>,
    clock: u64,
    tokens: usize,
}

impl EndedSequences {
    /// Adds a sequence, replacing one of the same name.
    pub(super) fn insert(&mut self, key: SequenceKey, tokens: &[u32]) {
        self.remove(&key);
        self.clock += 1;
        self.tokens += tokens.len();
        self.order.insert(self.clock, key.clone());
        self.sequences.insert(key, (self.clock, tokens.into()));
        while self.sequences.len() > MAX_SEQUENCES || self.tokens > MAX_TOKENS {
            let Some((_, oldest)) = self.order.pop_first() else { return };
            if let Some((_, tokens)) = self.sequences.remove(&oldest) {
                self.tokens -= tokens.len();
            }
        }
    }

    /// The tokens of a sequence, which becomes the most recently used.
    pub(super) fn get(&mut self, key: &SequenceKey) -> Option<Arc<[u32]>> {
        let (used, tokens) = self.sequences.get_mut(key)?;
        self.clock += 1;
        self.order.remove(used);
        self.order.insert(self.clock, key.clone());
        *used = self.clock;
        Some(Arc::clone(tokens))
    }

    pub(super) fn remove(&mut self, key: &SequenceKey) -> bool {
        let Some((used, tokens)) = self.sequences.remove(key) else { return false };
        self.order.remove(&used);
        self.tokens -= tokens.len();
        true
    }

    /// All sequences, the least recently used first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&SequenceKey, &[u32])> {
        self.order.values().filter_map(|key| Some((key, &*self.sequences.get(key)?.1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::block::BlockId;
    use proto::ids::RequestId;
    use proto::sequence::SequenceName;

    fn key(n: u32) -> SequenceKey {
        let request = RequestId::new("r").unwrap();
        SequenceKey { root: BlockId([0; 16]), name: SequenceName { request, choice: n } }
    }

    #[test]
    fn the_least_recently_used_sequence_is_forgotten_first() {
        let mut remembered = EndedSequences::default();
        for n in 0..MAX_SEQUENCES as u32 {
            remembered.insert(key(n), &[n]);
        }
        assert_eq!(remembered.get(&key(0)).as_deref(), Some(&[0][..]));
        remembered.insert(key(9999), &[1, 2]);
        assert!(remembered.get(&key(1)).is_none() && remembered.get(&key(0)).is_some());
        assert_eq!((remembered.sequences.len(), remembered.tokens), (MAX_SEQUENCES, MAX_SEQUENCES + 1));
        remembered.insert(key(7), &vec![0; MAX_TOKENS]);
        assert_eq!(remembered.iter().map(|(key, _)| key.name.choice).collect::<Vec<_>>(), [7]);
        assert!(remembered.remove(&key(7)) && !remembered.remove(&key(7)));
        assert_eq!((remembered.tokens, remembered.order.len()), (0, 0));
    }
}
