//! Unpredictable random numbers for seeds, names and ties, and random bytes for keys.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Read;

/// Random bytes for a key or salt, from the operating system.
pub fn random_bytes() -> std::io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A random number, not for keys: the hash of no input under a per-thread random key that changes with every
/// call.
pub fn random_u64() -> u64 {
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
        assert_ne!(random_bytes().unwrap(), random_bytes().unwrap());
    }
}
