//! Block identity: the one name that a prefix has in memory, on the wire and on disk.
//!
//! `root = H(cluster key; tag, tenant salt, model digest, tokenizer digest, adapter)`, every variable field
//! length-prefixed, and `unit = H(unit key; parent, 16 token ids)` with `unit key = H(cluster key; tag)`, H being
//! BLAKE3 in keyed mode; ids are cut to 128 bits. Token ids are 24 bits each, little-endian, so that a unit is one
//! block of the hash; where one has more, all of them are 32 bits. Coordinator and worker run this same code, so a
//! predicted hit and an engine event are the same key.

use serde::{Deserialize, Serialize};

/// Tokens per hash unit: the granularity at which prefixes are named. Independent of the KV block size.
pub const HASH_UNIT_TOKENS: usize = 16;

const ROOT_TAG: &[u8] = b"kvasir/root/1";
const UNIT_TAG: &[u8] = b"kvasir/unit/2";

/// The secret that keys every hash of one cluster, so that ids cannot be forged from outside.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterKey(pub [u8; 32]);

impl std::fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClusterKey(..)")
    }
}

/// A tenant's secret salt; two tenants never share a block id.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantSalt(pub [u8; 32]);

impl std::fmt::Debug for TenantSalt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TenantSalt(..)")
    }
}

/// The identity of a prefix: of the scope (a root) or of a prefix that ends at a hash-unit boundary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockId(pub [u8; 16]);

impl std::fmt::Debug for BlockId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl std::fmt::Display for BlockId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// What a prefix belongs to besides its tokens. Equal scopes and equal tokens give equal ids.
#[derive(Debug, Clone, Copy)]
pub struct Scope<'a> {
    /// The tenant's salt; never taken from a request body.
    pub salt: &'a TenantSalt,
    /// SHA-256 or BLAKE3 digest of the model's weights and hyper-parameters.
    pub model_digest: &'a [u8],
    /// Digest of vocabulary, merges and special tokens.
    pub tokenizer_digest: &'a [u8],
    /// Adapter name; empty without one.
    pub adapter: &'a [u8],
}

impl ClusterKey {
    /// The root id of a scope: the parent of its first unit.
    pub fn root(&self, scope: Scope<'_>) -> BlockId {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for field in [ROOT_TAG, &scope.salt.0, scope.model_digest, scope.tokenizer_digest, scope.adapter] {
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field);
        }
        truncate(hasher.finalize())
    }

    /// What names units under this key. To be kept by who names many.
    pub fn units(&self) -> UnitKey {
        UnitKey(*blake3::keyed_hash(&self.0, UNIT_TAG).as_bytes())
    }

    /// [`UnitKey::unit`].
    pub fn unit(&self, parent: BlockId, tokens: &[u32; HASH_UNIT_TOKENS]) -> BlockId {
        self.units().unit(parent, tokens)
    }

    /// [`UnitKey::chain`].
    pub fn chain(&self, root: BlockId, tokens: &[u32]) -> Vec<BlockId> {
        self.units().chain(root, tokens)
    }
}

/// The key of units alone: nothing else is hashed with it, so a unit needs no tag.
#[derive(Clone)]
pub struct UnitKey([u8; 32]);

impl std::fmt::Debug for UnitKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UnitKey(..)")
    }
}

impl UnitKey {
    /// The id of the prefix that `parent` and one more unit of tokens make.
    pub fn unit(&self, parent: BlockId, tokens: &[u32; HASH_UNIT_TOKENS]) -> BlockId {
        const ID: usize = size_of::<BlockId>();
        // The bits of all of them together are as many as those of the largest.
        if tokens.iter().fold(0, |all, id| all | id) < 1 << 24 {
            let mut bytes = [0u8; ID + 3 * HASH_UNIT_TOKENS];
            let (id, ids) = bytes.split_at_mut(ID);
            id.copy_from_slice(&parent.0);
            let (places, _) = ids.as_chunks_mut::<12>();
            let (quads, _) = tokens.as_chunks::<4>();
            for (place, &[a, b, c, d]) in places.iter_mut().zip(quads) {
                let packed = u128::from(a) | u128::from(b) << 24 | u128::from(c) << 48 | u128::from(d) << 72;
                place.copy_from_slice(&packed.to_le_bytes()[..12]);
            }
            truncate(blake3::keyed_hash(&self.0, &bytes))
        } else {
            // Longer than the other form, so no two units are hashed alike.
            let mut bytes = [0u8; ID + 4 * HASH_UNIT_TOKENS];
            let (id, ids) = bytes.split_at_mut(ID);
            id.copy_from_slice(&parent.0);
            let (places, _) = ids.as_chunks_mut::<4>();
            for (place, token) in places.iter_mut().zip(tokens) {
                *place = token.to_le_bytes();
            }
            truncate(blake3::keyed_hash(&self.0, &bytes))
        }
    }

    /// The ids of all full units of `tokens`, in order; a partial last unit has none.
    pub fn chain(&self, root: BlockId, tokens: &[u32]) -> Vec<BlockId> {
        let (units, _) = tokens.as_chunks::<HASH_UNIT_TOKENS>();
        let mut parent = root;
        units
            .iter()
            .map(|unit| {
                parent = self.unit(parent, unit);
                parent
            })
            .collect()
    }
}

fn truncate(hash: blake3::Hash) -> BlockId {
    let mut id = [0u8; 16];
    id.copy_from_slice(&hash.as_bytes()[..16]);
    BlockId(id)
}
