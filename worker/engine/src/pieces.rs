//! Keys of pieces: a digest of everything that a piece's bytes depend on. A key is as trustworthy as the
//! tokens, wherever the piece is stored: in a file, or at another worker.

use crate::Error;
use crate::snapshot::Origin;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::codec::{self, Cap};

/// Key of a piece: a digest of the tokens up to its end and of everything else that determines its bytes, and
/// the layer group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PieceKey {
    pub(crate) prefix: [u8; 32],
    pub(crate) group: u32,
}

impl PieceKey {
    /// Digest of the piece's bytes, keyed with the piece: other bytes or another piece give another digest.
    pub fn digest(&self, bytes: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.prefix);
        hasher.update(&self.group.to_le_bytes());
        *hasher.update(bytes).finalize().as_bytes()
    }
}

/// Computes the keys of pieces of caches of one origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namer {
    seed: [u8; 32],
}

impl Namer {
    pub fn new(origin: &Origin) -> Result<Self, Error> {
        let origin =
            codec::encode(origin, Cap::Control).map_err(|error| Error::Invariant(error.to_string()))?;
        Ok(Self { seed: blake3::derive_key("kvasir 2026-11 tiers of the KV cache", &origin) })
    }

    /// Digest of the origin. If it is equal on two workers, they can use each other's bytes.
    pub fn origin(&self) -> [u8; 32] {
        self.seed
    }

    /// Keys of the pieces of the full units of `tokens` after `root`.
    pub fn names(&self, root: BlockId, tokens: &[u32]) -> PrefixNames {
        let mut hasher = blake3::Hasher::new_keyed(&self.seed);
        let mut above = *hasher.update(&root.0).finalize().as_bytes();
        let units = tokens.as_chunks::<HASH_UNIT_TOKENS>().0.iter();
        let names = units.map(|unit| {
            let mut hasher = blake3::Hasher::new_keyed(&self.seed);
            hasher.update(&above);
            for token in unit {
                hasher.update(&token.to_le_bytes());
            }
            above = *hasher.finalize().as_bytes();
            above
        });
        PrefixNames(names.collect())
    }
}

/// The keys of a prompt's pieces, one prefix digest per unit.
#[derive(Debug, Clone)]
pub struct PrefixNames(Vec<[u8; 32]>);

impl PrefixNames {
    /// The piece of `group` that ends at `end`, a multiple of 16. `None` if it is not within the prefix.
    pub fn piece(&self, group: usize, end: u32) -> Option<PieceKey> {
        let unit = (end as usize / HASH_UNIT_TOKENS).checked_sub(1)?;
        Some(PieceKey { prefix: *self.0.get(unit)?, group: u32::try_from(group).ok()? })
    }
}
