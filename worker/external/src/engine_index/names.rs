//! Which roots a chain of blocks is named under.
//!
//! - Its first block has a salt of ours: the root inside the salt.
//! - It has another salt, or an adapter without a salt of ours: none.
//! - It has no salt, and some request was sent without one: every root of such requests. Without salts an
//!   engine serves a chain to all requests, so all these names are true.
//! - It has no salt, all requests were sent with one, and no event has ever had one: this engine's events lack
//!   salts. The root is then that of a registered prompt whose beginning is the block's. If several roots have
//!   such a prompt, those that already name another chain with the same first block are left out, because one
//!   root's chains with equal tokens are the same chain. If several are still left the chain is not named, and
//!   the index is not exact while the engine holds it.

use crate::kv_events::StoredBlocks;
use crate::salt::root_of;
use proto::block::BlockId;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most roots of requests without a salt.
const MAX_UNSALTED_ROOTS: usize = 16;
/// Most prompts that are kept for engines whose events have no salts.
const MAX_PROMPTS: usize = 4096;
/// Most tokens of such a prompt that are kept. Longer blocks are compared by these.
const MAX_LEADING_TOKENS: usize = 1024;

/// How the first block of a chain names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadKind {
    Root(BlockId),
    /// Nothing that Kvasir sent.
    Foreign,
    NoSalt,
}

impl HeadKind {
    pub(super) fn of(blocks: &StoredBlocks) -> Self {
        match &blocks.salt {
            Some(salt) => root_of(salt).map_or(Self::Foreign, Self::Root),
            None if blocks.adapter => Self::Foreign,
            None => Self::NoSalt,
        }
    }
}

/// The roots that a chain without a salt is named under.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Candidates {
    Roots(Vec<BlockId>),
    Ambiguous,
}

/// Registered requests.
#[derive(Debug, Default)]
pub(super) struct ChainNames {
    unsalted: Vec<BlockId>,
    prompts: VecDeque<(BlockId, Arc<[u32]>)>,
    /// An event had a salt, so all events of requests with salts have them.
    salts_seen: bool,
}

impl ChainNames {
    /// Returns the leading tokens of the chains whose names may have changed; empty for all chains.
    pub(super) fn register(&mut self, root: BlockId, prompt: &[u32], salted: bool) -> Option<Arc<[u32]>> {
        if !salted {
            if self.unsalted.contains(&root) || self.unsalted.len() == MAX_UNSALTED_ROOTS {
                return None;
            }
            self.unsalted.push(root);
            return Some(Arc::default());
        }
        let leading = &prompt[..prompt.len().min(MAX_LEADING_TOKENS)];
        if self.salts_seen || leading.is_empty() {
            return None;
        }
        if self.prompts.iter().any(|(known, tokens)| *known == root && **tokens == *leading) {
            return None;
        }
        if self.prompts.len() == MAX_PROMPTS {
            self.prompts.pop_front();
        }
        let leading: Arc<[u32]> = leading.into();
        self.prompts.push_back((root, Arc::clone(&leading)));
        Some(leading)
    }

    /// An event has a salt. Returns whether that is new.
    pub(super) fn see_salt(&mut self) -> bool {
        self.prompts.clear();
        !std::mem::replace(&mut self.salts_seen, true)
    }

    /// A new run of the engine may be of another version.
    pub(super) fn forget_salts(&mut self) {
        self.salts_seen = false;
    }

    /// The roots of a chain that begins with `block`, has no salt and is named under `current` now. `taken`
    /// returns the roots that name another chain with this first block.
    pub(super) fn candidates(
        &self,
        block: &[u32],
        current: &[BlockId],
        taken: impl FnOnce() -> Vec<BlockId>,
    ) -> Candidates {
        if !self.salts_seen && current.iter().any(|root| !self.unsalted.contains(root)) {
            return Candidates::Roots(current.to_vec());
        }
        let mut salted: Vec<BlockId> = Vec::new();
        for (root, leading) in &self.prompts {
            if same_beginning(block, leading) && !salted.contains(root) {
                salted.push(*root);
            }
        }
        if salted.len() > 1 {
            let taken = taken();
            salted.retain(|root| !taken.contains(root));
        }
        match (salted.len(), self.unsalted.len()) {
            (0, _) => Candidates::Roots(self.unsalted.clone()),
            (1, 0) => Candidates::Roots(salted),
            _ => Candidates::Ambiguous,
        }
    }
}

/// Whether the shorter one is a prefix of the other.
pub(super) fn same_beginning(a: &[u32], b: &[u32]) -> bool {
    let common = a.len().min(b.len());
    a[..common] == b[..common]
}
