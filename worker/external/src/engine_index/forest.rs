//! The engine's blocks as a forest, and the units that each block owns.

use super::names::{Candidates, ChainNames, HeadKind, same_beginning};
use super::units::{HeldUnits, MEDIA, rank};
use crate::kv_events::{EngineHash, EngineMedium, StoredBlocks};
use proto::block::{BlockId, HASH_UNIT_TOKENS, UnitKey};
use proto::event::{KvEvent, Medium};
use std::collections::{HashMap, HashSet};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ForestError {
    /// No room for a block. The blocks after it were left out as well.
    Full,
    /// A block was stored with other tokens or another parent than before.
    Conflict,
}

#[derive(Debug)]
pub(super) struct BlockForest {
    key: UnitKey,
    /// A block can be stored several times and removed as often.
    counts_copies: bool,
    max_blocks: usize,
    max_tokens: usize,
    blocks: HashMap<EngineHash, Block>,
    /// Tokens of all blocks.
    tokens: usize,
    names: ChainNames,
    /// First blocks without a salt.
    unsalted_heads: HashSet<EngineHash>,
    ambiguous_heads: HashSet<EngineHash>,
    units: HeldUnits,
    other_tiers: bool,
    refused: u64,
}

/// A block that the engine holds, or one that only its descendants keep here.
#[derive(Debug, Default)]
struct Block {
    /// `None` for a block that is known by its children alone.
    content: Option<Content>,
    /// Copies by medium, in the order of [`MEDIA`].
    copies: [u32; 3],
    children: Vec<EngineHash>,
    /// Own position in the parent's `children`.
    position: usize,
    /// Known once all blocks before it are.
    place: Option<Place>,
}

#[derive(Debug)]
struct Content {
    /// `None` for the first block of a chain.
    parent: Option<EngineHash>,
    tokens: Box<[u32]>,
    head: HeadKind,
    /// Its KV depends on more than tokens: it and all blocks after it have no names.
    other_inputs: bool,
}

/// A block's part of the chain from its beginning.
#[derive(Debug, Default)]
struct Place {
    /// Tokens after the last unit that ends in or before the block.
    tail: Vec<u32>,
    /// One for each root that names the chain.
    names: Vec<ChainName>,
    /// The slowest medium of this block and those before it; `None` if one of them is not held.
    reach: Option<Medium>,
    /// This block or one before it depends on more than tokens.
    nameless: bool,
}

#[derive(Debug, Clone)]
struct ChainName {
    root: BlockId,
    /// The unit before the block's first one, or the root.
    before: BlockId,
    /// Units that end inside the block.
    units: Vec<BlockId>,
}

impl ChainName {
    fn last(&self) -> BlockId {
        self.units.last().copied().unwrap_or(self.before)
    }

    /// The units, each with its parent.
    fn pairs(&self) -> impl Iterator<Item = (BlockId, BlockId)> {
        self.units.iter().copied().zip(std::iter::once(self.before).chain(self.units.iter().copied()))
    }
}

impl Block {
    /// The fastest medium that has the block.
    fn medium(&self) -> Option<Medium> {
        MEDIA.into_iter().zip(self.copies).find(|(_, copies)| *copies > 0).map(|(medium, _)| medium)
    }
}

/// Cuts `tail` and `tokens` into units after `before`.
fn cut(key: &UnitKey, root: BlockId, before: BlockId, tail: &[u32], tokens: &[u32]) -> ChainName {
    let all: Vec<u32> = tail.iter().chain(tokens).copied().collect();
    ChainName { root, before, units: key.chain(before, &all) }
}

impl BlockForest {
    pub(super) fn new(key: UnitKey, counts_copies: bool, max_blocks: usize, max_tokens: usize) -> Self {
        Self {
            key,
            counts_copies,
            max_blocks,
            max_tokens,
            blocks: HashMap::new(),
            tokens: 0,
            names: ChainNames::default(),
            unsalted_heads: HashSet::new(),
            ambiguous_heads: HashSet::new(),
            units: HeldUnits::default(),
            other_tiers: false,
            refused: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn held_units(&self) -> usize {
        self.units.len()
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    pub(super) fn is_ambiguous(&self) -> bool {
        !self.ambiguous_heads.is_empty()
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.units.is_suspended()
    }

    /// A block was stored elsewhere than on the device.
    pub(super) fn uses_other_tiers(&self) -> bool {
        self.other_tiers
    }

    pub(super) fn take_events(&mut self) -> Vec<KvEvent> {
        self.units.take_events()
    }

    pub(super) fn suspend(&mut self) {
        self.units.suspend();
    }

    pub(super) fn resume(&mut self) {
        self.units.resume();
    }

    /// Removes all blocks.
    pub(super) fn clear(&mut self) {
        self.blocks = HashMap::new();
        self.tokens = 0;
        self.unsalted_heads = HashSet::new();
        self.ambiguous_heads = HashSet::new();
        self.units.clear();
    }

    /// Removes all blocks of a run of the engine, and what was learnt of it.
    pub(super) fn reset(&mut self) {
        self.clear();
        self.names.forget_salts();
        self.other_tiers = false;
    }

    pub(super) fn register(&mut self, root: BlockId, prompt: &[u32], salted: bool) {
        if let Some(leading) = self.names.register(root, prompt, salted) {
            self.name_unsalted_heads(&leading);
        }
    }

    /// Stores a run of blocks.
    pub(super) fn store(&mut self, run: &StoredBlocks) -> Result<(), ForestError> {
        let medium = match run.medium {
            EngineMedium::Device => Medium::Device,
            EngineMedium::Host => Medium::Host,
            EngineMedium::Disk => Medium::Disk,
            EngineMedium::Elsewhere => return Ok(()),
        };
        self.other_tiers |= medium != Medium::Device;
        if run.salt.is_some() && self.names.see_salt() {
            self.name_unsalted_heads(&[]);
        }
        let size = run.block_size.max(1) as usize;
        let mut parent = run.parent;
        for (&hash, tokens) in run.hashes.iter().zip(run.tokens.chunks_exact(size)) {
            let head = if parent.is_none() { HeadKind::of(run) } else { HeadKind::NoSalt };
            self.store_block(
                hash,
                Content { parent, tokens: tokens.into(), head, other_inputs: run.other_inputs },
            )?;
            if let Some(block) = self.blocks.get_mut(&hash) {
                let copies = &mut block.copies[rank(medium)];
                *copies =
                    if self.counts_copies && medium == Medium::Device { copies.saturating_add(1) } else { 1 };
            }
            self.update_reach(hash);
            parent = Some(hash);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, hashes: &[EngineHash], medium: EngineMedium) {
        let medium = match medium {
            EngineMedium::Device => Medium::Device,
            EngineMedium::Host => Medium::Host,
            EngineMedium::Disk => Medium::Disk,
            EngineMedium::Elsewhere => return,
        };
        for &hash in hashes {
            // Unknown blocks were stored before the index began, or refused.
            let Some(block) = self.blocks.get_mut(&hash) else { continue };
            let copies = &mut block.copies[rank(medium)];
            *copies = copies.saturating_sub(1);
            self.update_reach(hash);
            self.prune(hash);
        }
    }

    /// Enters a block's content, links it to its parent and places it and its descendants.
    fn store_block(&mut self, hash: EngineHash, content: Content) -> Result<(), ForestError> {
        if let Some(known) = self.blocks.get(&hash).and_then(|block| block.content.as_ref()) {
            let same = known.parent == content.parent
                && known.tokens == content.tokens
                && known.head == content.head;
            return if same { Ok(()) } else { Err(ForestError::Conflict) };
        }
        if content.parent == Some(hash) {
            return Err(ForestError::Conflict);
        }
        // The block itself, and its parent if that is unknown.
        if self.blocks.len() + 2 > self.max_blocks || self.tokens + content.tokens.len() > self.max_tokens {
            self.refused += 1;
            return Err(ForestError::Full);
        }
        if let Some(parent) = content.parent {
            if self.is_below(parent, hash) {
                return Err(ForestError::Conflict);
            }
            let siblings = &mut self.blocks.entry(parent).or_default().children;
            let position = siblings.len();
            siblings.push(hash);
            self.blocks.entry(hash).or_default().position = position;
        } else if content.head == HeadKind::NoSalt {
            self.unsalted_heads.insert(hash);
        }
        self.tokens += content.tokens.len();
        self.blocks.entry(hash).or_default().content = Some(content);
        self.place(hash);
        Ok(())
    }

    /// Whether `block` is a descendant of `of`, so that `of` cannot be stored below it. Only a block that
    /// already has children can have descendants.
    fn is_below(&self, block: EngineHash, of: EngineHash) -> bool {
        if self.blocks.get(&of).is_none_or(|block| block.children.is_empty()) {
            return false;
        }
        let mut at = Some(block);
        while let Some(hash) = at {
            if hash == of {
                return true;
            }
            at = self.blocks.get(&hash).and_then(|block| block.content.as_ref()?.parent);
        }
        false
    }

    /// Places a block whose content has become known, and all descendants that waited for it.
    fn place(&mut self, hash: EngineHash) {
        let mut next = vec![hash];
        while let Some(hash) = next.pop() {
            let Some(place) = self.place_of(hash) else { continue };
            let Some(block) = self.blocks.get_mut(&hash) else { continue };
            block.place = Some(place);
            next.extend(block.children.iter().copied());
        }
        if self.unsalted_heads.contains(&hash) {
            self.name_head(hash);
        }
        self.update_reach(hash);
    }

    /// A block's place below its parent's, not reachable yet.
    fn place_of(&self, hash: EngineHash) -> Option<Place> {
        let content = self.blocks.get(&hash)?.content.as_ref()?;
        let mut place = Place { nameless: content.other_inputs, ..Place::default() };
        let tokens = &content.tokens;
        let tail: &[u32] = match content.parent {
            None => {
                if let HeadKind::Root(root) = content.head
                    && !place.nameless
                {
                    place.names.push(cut(&self.key, root, root, &[], tokens));
                }
                &[]
            }
            Some(parent) => {
                let before = self.blocks.get(&parent)?.place.as_ref()?;
                place.nameless |= before.nameless;
                if !place.nameless {
                    let names = before.names.iter();
                    place.names = names
                        .map(|name| cut(&self.key, name.root, name.last(), &before.tail, tokens))
                        .collect();
                }
                &before.tail
            }
        };
        let after = (tail.len() + tokens.len()) % HASH_UNIT_TOKENS;
        let all = tail.iter().chain(tokens);
        place.tail = all.skip(tail.len() + tokens.len() - after).copied().collect();
        Some(place)
    }

    /// Recomputes whether the block and those after it can be hit, and reports their units.
    fn update_reach(&mut self, hash: EngineHash) {
        let mut next = vec![hash];
        while let Some(hash) = next.pop() {
            let Some(block) = self.blocks.get(&hash) else { continue };
            let (Some(content), Some(place)) = (&block.content, &block.place) else { continue };
            let before = match content.parent {
                None => Some(Medium::Device),
                Some(parent) => self
                    .blocks
                    .get(&parent)
                    .and_then(|parent| parent.place.as_ref())
                    .and_then(|place| place.reach),
            };
            let slower = |(a, b): (Medium, Medium)| if rank(a) >= rank(b) { a } else { b };
            let reach = before.zip(block.medium()).map(slower);
            if reach == place.reach {
                continue;
            }
            for (unit, parent) in place.names.iter().flat_map(ChainName::pairs) {
                self.units.change(unit, parent, place.reach, reach);
            }
            if let Some(block) = self.blocks.get_mut(&hash) {
                if let Some(place) = &mut block.place {
                    place.reach = reach;
                }
                next.extend(block.children.iter().copied());
            }
        }
    }

    /// Names the chains without a salt again that begin like `leading`, after what is known of requests has
    /// changed.
    fn name_unsalted_heads(&mut self, leading: &[u32]) {
        let begins = |hash: &&EngineHash| {
            let content = self.blocks.get(hash).and_then(|block| block.content.as_ref());
            content.is_some_and(|content| same_beginning(&content.tokens, leading))
        };
        let heads: Vec<EngineHash> = self.unsalted_heads.iter().filter(begins).copied().collect();
        for hash in heads {
            self.name_head(hash);
        }
    }

    /// Gives a chain without a salt the roots that it belongs to now.
    fn name_head(&mut self, hash: EngineHash) {
        let Some(block) = self.blocks.get(&hash) else { return };
        let (Some(content), Some(place)) = (&block.content, &block.place) else { return };
        if content.other_inputs {
            return;
        }
        let roots = |place: &Place| place.names.iter().map(|name| name.root).collect::<Vec<_>>();
        let taken = || {
            let others = self.unsalted_heads.iter().filter(|&&other| other != hash).filter_map(|other| {
                let block = self.blocks.get(other)?;
                let same = block.content.as_ref()?.tokens == content.tokens;
                if same { block.place.as_ref().map(roots) } else { None }
            });
            others.flatten().collect()
        };
        let candidates = self.names.candidates(&content.tokens, &roots(place), taken);
        let roots = match candidates {
            Candidates::Roots(roots) => {
                self.ambiguous_heads.remove(&hash);
                roots
            }
            Candidates::Ambiguous => {
                self.ambiguous_heads.insert(hash);
                Vec::new()
            }
        };
        self.set_roots(hash, &roots);
    }

    /// Names a chain, with all blocks after it, under exactly these roots.
    fn set_roots(&mut self, head: EngineHash, roots: &[BlockId]) {
        let mut next = vec![head];
        while let Some(hash) = next.pop() {
            let Some(block) = self.blocks.get(&hash) else { continue };
            let (Some(content), Some(place)) = (&block.content, &block.place) else { continue };
            if place.nameless {
                continue;
            }
            let kept = |name: &&ChainName| roots.contains(&name.root);
            if place.names.len() == roots.len() && place.names.iter().all(|name| kept(&name)) {
                continue;
            }
            let before = content.parent.and_then(|parent| self.blocks.get(&parent)?.place.as_ref());
            let mut names: Vec<ChainName> = place.names.iter().filter(kept).cloned().collect();
            for &root in roots {
                if names.iter().any(|name| name.root == root) {
                    continue;
                }
                let after = before.and_then(|place| place.names.iter().find(|name| name.root == root));
                let after = after.map_or(root, ChainName::last);
                let tail = before.map_or(&[][..], |place| &place.tail);
                let name = cut(&self.key, root, after, tail, &content.tokens);
                for (unit, parent) in name.pairs().filter(|_| place.reach.is_some()) {
                    self.units.change(unit, parent, None, place.reach);
                }
                names.push(name);
            }
            for name in place.names.iter().filter(|name| !kept(name)) {
                for (unit, parent) in name.pairs().filter(|_| place.reach.is_some()) {
                    self.units.change(unit, parent, place.reach, None);
                }
            }
            if let Some(block) = self.blocks.get_mut(&hash) {
                if let Some(place) = &mut block.place {
                    place.names = names;
                }
                next.extend(block.children.iter().copied());
            }
        }
    }

    /// Drops a block that is not held and has no descendants, then its ancestors of the same kind.
    fn prune(&mut self, hash: EngineHash) {
        let mut at = Some(hash);
        while let Some(hash) = at {
            let Some(block) = self.blocks.get(&hash) else { return };
            if block.medium().is_some() || !block.children.is_empty() {
                return;
            }
            let position = block.position;
            let Some(block) = self.blocks.remove(&hash) else { return };
            self.unsalted_heads.remove(&hash);
            self.ambiguous_heads.remove(&hash);
            let Some(content) = block.content else { return };
            self.tokens = self.tokens.saturating_sub(content.tokens.len());
            at = content.parent;
            let Some(parent) = content.parent.and_then(|parent| self.blocks.get_mut(&parent)) else { return };
            if position < parent.children.len() {
                parent.children.swap_remove(position);
            }
            if let Some(&moved) = parent.children.get(position)
                && let Some(moved) = self.blocks.get_mut(&moved)
            {
                moved.position = position;
            }
        }
    }
}
