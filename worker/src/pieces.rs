//! Names of pieces: a digest of all that a piece's bytes depend on. So a name can be trusted as tokens can, wherever
//! the piece lies: in a file, or at another worker.

use crate::Error;
use crate::snapshot::Origin;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::codec::{self, Cap};

/// Names a piece: a digest of the tokens up to its end and what else decides its bytes, and the cache group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PieceKey {
    pub(crate) prefix: [u8; 32],
    pub(crate) group: u32,
}

impl PieceKey {
    /// Digest of the piece's bytes, which only these bytes of this very piece have.
    pub fn digest(&self, bytes: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.prefix);
        hasher.update(&self.group.to_le_bytes());
        *hasher.update(bytes).finalize().as_bytes()
    }
}

/// Names the pieces of caches of one origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namer {
    seed: [u8; 32],
}

impl Namer {
    /// For caches of `origin`.
    pub fn new(origin: &Origin) -> Result<Self, Error> {
        let origin =
            codec::encode(origin, Cap::Control).map_err(|error| Error::Invariant(error.to_string()))?;
        Ok(Self { seed: blake3::derive_key("kvasir 2026-11 tiers of the KV cache", &origin) })
    }

    /// Digest of the origin: equal on two workers if the bytes of one mean the same to the other.
    pub fn origin(&self) -> [u8; 32] {
        self.seed
    }

    /// Names the pieces of the full units of `tokens` behind `root`.
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

/// A prompt, so that its pieces can be named.
#[derive(Debug, Clone)]
pub struct PrefixNames(Vec<[u8; 32]>);

impl PrefixNames {
    /// The piece of `group` whose last token is the one before `end`, a multiple of 16. `None`: it lies behind the
    /// prefix, or before it.
    pub fn piece(&self, group: usize, end: u32) -> Option<PieceKey> {
        let unit = (end as usize / HASH_UNIT_TOKENS).checked_sub(1)?;
        Some(PieceKey { prefix: *self.0.get(unit)?, group: u32::try_from(group).ok()? })
    }
}
