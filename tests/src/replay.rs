//! Loads of a cache of whole models on a trace of requests: the least that is possible, and those of LRU.
//!
//! A cluster whose workers all can have every model, with room for the same number of models each, is one cache with the
//! slots of all workers: where a model is does not matter, and each slot has one model.

use std::collections::BTreeMap;

/// Loads of the offline optimum: the model whose next request is furthest away leaves (Belady). Each request needs its
/// model loaded, in the order of the trace.
pub fn belady(trace: &[usize], slots: usize) -> usize {
    let mut next = vec![usize::MAX; trace.len()];
    let mut later = BTreeMap::new();
    for (at, model) in trace.iter().enumerate().rev() {
        next[at] = later.insert(*model, at).unwrap_or(usize::MAX);
    }
    // The greatest key leaves.
    loads(trace, slots, |at| next[at])
}

/// Loads if the least recently used model leaves.
pub fn lru(trace: &[usize], slots: usize) -> usize {
    loads(trace, slots, |at| usize::MAX - at)
}

/// `key` of a model's last request: of the loaded models, the one with the greatest key leaves.
fn loads(trace: &[usize], slots: usize, key: impl Fn(usize) -> usize) -> usize {
    let mut loaded: BTreeMap<usize, usize> = BTreeMap::new();
    let mut loads = 0;
    for (at, model) in trace.iter().enumerate() {
        if !loaded.contains_key(model) {
            loads += 1;
            if loaded.len() >= slots.max(1)
                && let Some(leaves) = loaded.iter().max_by_key(|(_, key)| **key).map(|(model, _)| *model)
            {
                loaded.remove(&leaves);
            }
        }
        loaded.insert(*model, key(at));
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use std::collections::BTreeSet;

    /// Tries every choice.
    fn least(trace: &[usize], slots: usize, loaded: &BTreeSet<usize>) -> usize {
        let Some((model, rest)) = trace.split_first() else { return 0 };
        if loaded.contains(model) {
            return least(rest, slots, loaded);
        }
        let with = |without: Option<&usize>| {
            let mut loaded = loaded.clone();
            without.map(|leaves| loaded.remove(leaves));
            loaded.insert(*model);
            least(rest, slots, &loaded)
        };
        1 + match loaded.len() < slots {
            true => with(None),
            false => loaded.iter().map(|leaves| with(Some(leaves))).min().unwrap_or_default(),
        }
    }

    #[test]
    fn no_choice_loads_less_than_the_optimum() {
        let mut random = Random::new(1);
        for _ in 0..300 {
            let (models, slots) = (random.within(2, 6), random.within(1, 4) as usize);
            let trace: Vec<usize> = (0..10).map(|_| random.below(models) as usize).collect();
            let optimum = belady(&trace, slots);
            assert_eq!(optimum, least(&trace, slots, &BTreeSet::new()), "{trace:?} {slots}");
            assert!(lru(&trace, slots) >= optimum);
        }
    }

    #[test]
    fn the_least_recently_used_model_leaves() {
        assert_eq!(lru(&[1, 2, 1, 3, 1, 2], 2), 4);
        assert_eq!(belady(&[1, 2, 1, 3, 1, 2], 2), 4);
        assert_eq!((lru(&[1, 2, 3, 1, 2, 3], 2), belady(&[1, 2, 3, 1, 2, 3], 2)), (6, 4));
        assert_eq!((lru(&[1, 2, 3, 1, 2, 3], 3), lru(&[], 3)), (3, 0));
    }
}
