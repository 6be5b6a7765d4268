//! Memo of prompts' block ids: maps a parent id and the tokens after it to unit ids.
//!
//! The memo is exact: an entry is found by parent id and tokens, and both are compared. The first parent is a
//! tenant's root, so a hit never reveals another tenant's prompts, not even by timing. If a prompt's
//! beginning is given as named parts ([`TokenIds::parts`]), only the names are compared. A part's name is no
//! hash: it is assigned once and always means the same tokens.

use proto::block::{BlockId, ClusterKey, HASH_UNIT_TOKENS, Scope, TenantSalt, UnitKey};
use proto::message::{TokenIds, TokenPart};
use std::sync::atomic::{AtomicU64, Ordering};
use text::recent::{Recent, RecentUse};

const UNITS: usize = 16;
const TOKENS: usize = UNITS * HASH_UNIT_TOKENS;

/// Maximum bytes of memoized roots: enough for some thousands of tenants and models.
const ROOT_BYTES: usize = 1 << 20;
/// One in this many bytes is for named parts. They store an id for each 16 tokens, while runs also store the
/// tokens.
const NAMED_PARTS_DIVISOR: usize = 4;

/// Computes the unit ids of prompts under one key, with a memo.
#[derive(Debug)]
pub struct ChainMemo {
    cluster: ClusterKey,
    key: UnitKey,
    runs: Recent<Box<Run>>,
    beginnings: Recent<Beginning>,
    next_beginning: AtomicU64,
    roots: Recent<Root>,
}

/// The last part of a prompt's beginning, given the parts before it.
#[derive(Debug)]
struct Beginning {
    root: BlockId,
    /// Number of the beginning before this part; 0 for none.
    before: u64,
    part: TokenPart,
    /// Unique number of the beginning that ends with this part; used as `before` of the next one.
    number: u64,
    /// Ids of the units that end in this part.
    ids: Box<[BlockId]>,
}

/// A scope and its root.
#[derive(Debug)]
struct Root {
    salt: TenantSalt,
    fields: [Box<[u8]>; 3],
    id: BlockId,
}

/// Consecutive units.
#[derive(Debug)]
struct Run {
    parent: BlockId,
    tokens: [u32; TOKENS],
    ids: [BlockId; UNITS],
    /// Hash of the run that last followed this one; 0 for none. A hint: the run found there is compared
    /// before use.
    next: AtomicU64,
}

impl ChainMemo {
    /// A memo of at most about `bytes` bytes.
    pub fn new(key: &ClusterKey, bytes: usize) -> Self {
        let (cluster, key) = (key.clone(), key.units());
        let beginnings = bytes / NAMED_PARTS_DIVISOR;
        Self {
            cluster,
            key,
            runs: Recent::new(bytes - beginnings),
            beginnings: Recent::new(beginnings),
            next_beginning: AtomicU64::new(1),
            roots: Recent::new(ROOT_BYTES),
        }
    }

    /// Memoized [`ClusterKey::root`].
    pub fn root(&self, scope: Scope<'_>) -> BlockId {
        let Scope { salt, model_digest, tokenizer_digest, adapter } = scope;
        let fields = [model_digest, tokenizer_digest, adapter];
        let mut hasher = self.roots.hasher();
        hasher.bytes(&salt.0);
        fields.iter().for_each(|field| hasher.bytes(field));
        let hash = hasher.finish();
        let same = |root: &Root| root.salt == *salt && root.fields.iter().zip(fields).all(|(a, b)| **a == *b);
        let memoized = self.roots.get(hash, |root| same(root).then_some(root.id));
        memoized.unwrap_or_else(|| {
            let id = self.cluster.root(scope);
            let bytes = size_of::<Root>() + fields.iter().map(|field| field.len()).sum::<usize>();
            self.roots.put(hash, Root { salt: salt.clone(), fields: fields.map(Box::from), id }, bytes);
            id
        })
    }

    /// Memoized [`UnitKey::chain`] for a prompt that may have named parts.
    pub fn chain_of(&self, root: BlockId, prompt: &TokenIds) -> Vec<BlockId> {
        let mut chain = Vec::with_capacity(prompt.len() / HASH_UNIT_TOKENS);
        let (mut before, mut parts) = (0, prompt.parts());
        while let [part, rest @ ..] = parts
            && let Some(number) = self.begins(root, before, *part, &mut chain)
        {
            (before, parts) = (number, rest);
        }
        if !prompt.parts().is_empty() {
            self.beginnings.count(before > 0);
        }
        let named = chain.len() * HASH_UNIT_TOKENS;
        let parent = chain.last().copied().unwrap_or(root);
        self.extend(parent, prompt.get(named..).unwrap_or_default(), &mut chain);
        let mut from = named / HASH_UNIT_TOKENS;
        for &part in parts {
            let until = part.end / HASH_UNIT_TOKENS;
            let ids = Box::from(chain.get(from..until).unwrap_or_default());
            let number = self.next_beginning.fetch_add(1, Ordering::Relaxed);
            let bytes = size_of::<Beginning>() + size_of_val(&*ids);
            let hash = self.beginning(root, before, part);
            self.beginnings.put(hash, Beginning { root, before, part, number, ids }, bytes);
            (before, from) = (number, until);
        }
        chain
    }

    /// Memoized [`UnitKey::chain`].
    pub fn chain(&self, root: BlockId, tokens: &[u32]) -> Vec<BlockId> {
        let mut chain = Vec::with_capacity(tokens.len() / HASH_UNIT_TOKENS);
        self.extend(root, tokens, &mut chain);
        chain
    }

    /// If the last part of a beginning is known, appends its ids and returns its number.
    fn begins(&self, root: BlockId, before: u64, part: TokenPart, chain: &mut Vec<BlockId>) -> Option<u64> {
        self.beginnings.get(self.beginning(root, before, part), |beginning| {
            (beginning.root == root && beginning.before == before && beginning.part == part).then(|| {
                chain.extend_from_slice(&beginning.ids);
                beginning.number
            })
        })
    }

    fn beginning(&self, root: BlockId, before: u64, part: TokenPart) -> u64 {
        let mut hasher = self.beginnings.hasher();
        hasher.bytes(&root.0);
        hasher.pair(before, part.name);
        hasher.finish()
    }

    /// Appends the ids of the units after `parent`.
    fn extend(&self, parent: BlockId, tokens: &[u32], chain: &mut Vec<BlockId>) {
        let (runs, rest) = tokens.as_chunks::<TOKENS>();
        let (mut parent, mut before, mut next) = (parent, 0, 0);
        for run in runs {
            // A repeated run is mostly followed by the same run as before, which then need not be hashed.
            let found = if next == 0 { None } else { self.recall(next, parent, run, chain) };
            let hash = if found.is_some() { next } else { self.hash(parent, run) };
            let found = found.or_else(|| self.recall(hash, parent, run, chain));
            self.runs.count(found.is_some());
            let after = found.unwrap_or_else(|| {
                self.name(hash, parent, run, chain);
                0
            });
            if before != 0 && hash != next {
                self.link(before, hash);
            }
            parent = chain.last().copied().unwrap_or(parent);
            (before, next) = (hash, after);
        }
        let (units, _) = rest.as_chunks::<HASH_UNIT_TOKENS>();
        for unit in units {
            parent = self.key.unit(parent, unit);
            chain.push(parent);
        }
    }

    /// Hits and misses. A prompt with named parts counts once, by its first part; other tokens count by run.
    pub fn usage(&self) -> RecentUse {
        let (runs, beginnings) = (self.runs.usage(), self.beginnings.usage());
        RecentUse {
            hits: runs.hits + beginnings.hits,
            misses: runs.misses + beginnings.misses,
            bytes: runs.bytes + beginnings.bytes,
        }
    }

    /// Appends the ids of the run known at `hash`. Returns the hash of the run that last followed it.
    fn recall(
        &self,
        hash: u64,
        parent: BlockId,
        tokens: &[u32; TOKENS],
        chain: &mut Vec<BlockId>,
    ) -> Option<u64> {
        self.runs.get(hash, |run| {
            (run.parent == parent && run.tokens == *tokens).then(|| {
                chain.extend_from_slice(&run.ids);
                run.next.load(Ordering::Relaxed)
            })
        })
    }

    /// Computes, appends and stores the ids of an unknown run.
    fn name(&self, hash: u64, parent: BlockId, tokens: &[u32; TOKENS], chain: &mut Vec<BlockId>) {
        let mut ids = [parent; UNITS];
        let mut last = parent;
        let (units, _) = tokens.as_chunks::<HASH_UNIT_TOKENS>();
        for (id, unit) in ids.iter_mut().zip(units) {
            last = self.key.unit(last, unit);
            *id = last;
        }
        chain.extend_from_slice(&ids);
        let run = Run { parent, tokens: *tokens, ids, next: AtomicU64::new(0) };
        self.runs.put(hash, Box::new(run), size_of::<Run>());
    }

    /// Records that the run at `next` follows the one at `before`.
    fn link(&self, before: u64, next: u64) {
        self.runs.get(before, |run| {
            run.next.store(next, Ordering::Relaxed);
            Some(())
        });
    }

    fn hash(&self, parent: BlockId, tokens: &[u32; TOKENS]) -> u64 {
        let mut hasher = self.runs.hasher();
        let before = u128::from_le_bytes(parent.0);
        hasher.pair(before as u64, (before >> 64) as u64);
        let (quads, _) = tokens.as_chunks::<4>();
        for &[a, b, c, d] in quads {
            hasher.pair(u64::from(a) << 32 | u64::from(b), u64::from(c) << 32 | u64::from(d));
        }
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn remembered_or_not_the_ids_are_the_same(
            roots in prop::collection::vec(any::<[u8; 16]>(), 1..3),
            prompts in prop::collection::vec((0..4usize, 0..3usize, 0..700usize, any::<u32>()), 1..8),
        ) {
            let key = ClusterKey([5; 32]);
            let memo = ChainMemo::new(&key, 1 << 20);
            for (text, root, len, last) in prompts.iter().chain(&prompts) {
                // Four texts. Each prompt is a prefix of one, plus one other token.
                let mut tokens: Vec<u32> = (0..*len as u32).map(|at| at * 31 + *text as u32).collect();
                tokens.push(*last);
                let root = BlockId(roots[root % roots.len()]);
                prop_assert_eq!(memo.chain(root, &tokens), key.chain(root, &tokens));
            }
        }
    }

    #[test]
    fn roots_are_those_of_their_scopes() {
        let (key, other) = (ClusterKey([5; 32]), TenantSalt([2; 32]));
        let memo = ChainMemo::new(&key, 1 << 20);
        let salt = TenantSalt([1; 32]);
        let scope = Scope { salt: &salt, model_digest: b"ab", tokenizer_digest: b"c", adapter: b"" };
        let scopes = [
            scope,
            Scope { salt: &other, ..scope },
            // The same bytes, split differently.
            Scope { model_digest: b"a", tokenizer_digest: b"bc", ..scope },
            Scope { tokenizer_digest: b"", adapter: b"c", ..scope },
        ];
        for scope in scopes.iter().chain(&scopes) {
            assert_eq!(memo.root(*scope), key.root(*scope), "{scope:?}");
        }
    }

    /// A prompt of these parts, followed by `rest`. A part's tokens follow from its name.
    fn prompt_of(names: &[u64], rest: &[u32]) -> TokenIds {
        let (mut tokens, mut parts) = (Vec::new(), Vec::new());
        for &name in names {
            tokens.extend((0..name as u32 * 7 % 90).map(|at| at * 3 + name as u32));
            parts.push(TokenPart { name, end: tokens.len() });
        }
        tokens.extend(rest);
        TokenIds::from_parts(tokens, parts)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn ids_of_named_parts_equal_computed_ones(
            roots in prop::collection::vec(any::<[u8; 16]>(), 1..3),
            prompts in prop::collection::vec(
                (0..3usize, prop::collection::vec(1..6u64, 0..9), prop::collection::vec(any::<u32>(), 0..40)), 1..8),
        ) {
            let key = ClusterKey([5; 32]);
            let memo = ChainMemo::new(&key, 1 << 20);
            for (root, names, rest) in prompts.iter().chain(&prompts) {
                let root = BlockId(roots[root % roots.len()]);
                let prompt = prompt_of(names, rest);
                prop_assert_eq!(memo.chain_of(root, &prompt), key.chain(root, &prompt));
            }
            let with_parts = prompts.iter().filter(|(_, names, _)| !names.is_empty()).count() as u64;
            prop_assert!(memo.beginnings.usage().hits >= with_parts);
        }
    }

    #[test]
    fn named_parts_are_not_shared_between_tenants() {
        let memo = ChainMemo::new(&ClusterKey([5; 32]), 1 << 20);
        let prompt = prompt_of(&[5, 3, 4], &[]);
        let hits = |root| {
            let before = memo.beginnings.usage().hits;
            memo.chain_of(BlockId([root; 16]), &prompt);
            memo.beginnings.usage().hits - before
        };
        assert_eq!([hits(1), hits(1), hits(2), hits(2)], [0, 1, 0, 1]);
    }

    #[test]
    fn runs_are_not_shared_between_tenants() {
        let memo = ChainMemo::new(&ClusterKey([5; 32]), 1 << 20);
        let tokens = [7; 2 * TOKENS];
        let hits = |root| {
            let before = memo.usage().hits;
            memo.chain(BlockId([root; 16]), &tokens);
            memo.usage().hits - before
        };
        assert_eq!([hits(1), hits(1), hits(2), hits(2)], [0, 2, 0, 2]);
    }
}
