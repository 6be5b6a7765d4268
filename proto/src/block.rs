//! Block identity: the id that names a prefix in memory, on the wire and on disk.
//!
//! `root = H(cluster key; tag, tenant salt, model digest, tokenizer digest, adapter)`, with every variable
//! field length-prefixed. `unit = H(unit key; parent, 16 token ids)` with `unit key = H(cluster key; tag)`.
//! H is BLAKE3 in keyed mode; ids are cut to 128 bits. Token ids are packed as 24 bits each, little-endian,
//! so that a unit fits one block of the hash. If one id of a unit needs more than 24 bits, all ids of the
//! unit take 32 bits. Coordinators and workers run this code, so the key of a predicted hit and the key of
//! a worker's event are the same.

use serde::{Deserialize, Serialize};

/// Tokens per hash unit: the granularity at which prefixes are named. Independent of the KV block size.
pub const HASH_UNIT_TOKENS: usize = 16;

const ROOT_TAG: &[u8] = b"kvasir/root/1";
const UNIT_TAG: &[u8] = b"kvasir/unit/2";

/// Secret that keys every hash of one cluster. Ids cannot be forged without it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterKey(pub [u8; 32]);

impl std::fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClusterKey(..)")
    }
}

/// Secret salt of a tenant. Two tenants never share a block id.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantSalt(pub [u8; 32]);

impl std::fmt::Debug for TenantSalt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TenantSalt(..)")
    }
}

/// Identity of a scope (a root), or of a prefix that ends at a hash-unit boundary.
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

/// All inputs of a block id other than tokens. Equal scopes and equal tokens give equal ids.
#[derive(Debug, Clone, Copy)]
pub struct Scope<'a> {
    /// Salt of the tenant; never taken from a request body.
    pub salt: &'a TenantSalt,
    /// SHA-256 or BLAKE3 digest of the model's weights and hyper-parameters.
    pub model_digest: &'a [u8],
    /// Digest of vocabulary, merges and special tokens.
    pub tokenizer_digest: &'a [u8],
    /// Name of the adapter; empty if there is none.
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

    /// Derives the key that names units. Callers that hash many units should keep it.
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

/// Key for units alone. Nothing else is hashed with it, so a unit needs no tag.
#[derive(Clone)]
pub struct UnitKey([u8; 32]);

impl std::fmt::Debug for UnitKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UnitKey(..)")
    }
}

impl UnitKey {
    /// Returns the id of the prefix that consists of `parent` and one more unit of tokens.
    pub fn unit(&self, parent: BlockId, tokens: &[u32; HASH_UNIT_TOKENS]) -> BlockId {
        const ID: usize = size_of::<BlockId>();
        // The OR of all ids needs as many bits as the largest id.
        if tokens.iter().fold(0, |all, id| all | id) < 1 << 24 {
            let mut bytes = [0u8; ID + 3 * HASH_UNIT_TOKENS];
            let (id, ids) = bytes.split_at_mut(ID);
            id.copy_from_slice(&parent.0);
            let (chunks, _) = ids.as_chunks_mut::<12>();
            let (quads, _) = tokens.as_chunks::<4>();
            for (chunk, &[a, b, c, d]) in chunks.iter_mut().zip(quads) {
                let packed = u128::from(a) | u128::from(b) << 24 | u128::from(c) << 48 | u128::from(d) << 72;
                chunk.copy_from_slice(&packed.to_le_bytes()[..12]);
            }
            truncate(blake3::keyed_hash(&self.0, &bytes))
        } else {
            // The input is longer than in the packed form, so the two forms never collide.
            let mut bytes = [0u8; ID + 4 * HASH_UNIT_TOKENS];
            let (id, ids) = bytes.split_at_mut(ID);
            id.copy_from_slice(&parent.0);
            let (chunks, _) = ids.as_chunks_mut::<4>();
            for (chunk, token) in chunks.iter_mut().zip(tokens) {
                *chunk = token.to_le_bytes();
            }
            truncate(blake3::keyed_hash(&self.0, &bytes))
        }
    }

    /// Returns the ids of all full units of `tokens`, in order. A partial last unit has no id.
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
