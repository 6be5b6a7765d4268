//! Numbers that nobody outside can guess, for seeds, names and ties. Not for keys.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A random number: the hash of nothing under a key that the operating system has drawn for this thread and
/// that changes with every call.
pub(crate) fn random_u64() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn numbers_do_not_repeat() {
        let numbers: HashSet<u64> = (0..10_000).map(|_| random_u64()).collect();
        assert_eq!(numbers.len(), 10_000);
    }
}
