//! Paths of units and the holders of each unit.
//!
//! A unit's id commits to all units before it, so ids form trees. A tree is stored as *strands*. A strand is
//! a run of units as first reported. A path that leaves it becomes a strand of its own. A strand is divided
//! into segments of equal holders; holes, kept tails and lone resume points are segments too. A unit without
//! a holder stays while a later unit is held, so that the path from any unit up to the start is known.
//!
//! A lookup finds the deepest known unit of a chain and walks up from there, strand by strand. It visits the
//! segments of the path, not its units. If the chain's last unit is unknown, the deepest known one is found
//! by following the chain from its start. This requires that the path to the start is known for every unit,
//! so that a chain's known units are its first ones. A strand is *loose* if a worker has kept a unit whose
//! path was never reported. While any strand is loose, the chain is scanned from its end instead, which is
//! slower and equally exact.
//!
//! No allocation exceeds the budget: before anything grows, the upper bound of its growth is added to the
//! current size. What does not fit is refused and counted. Even a removal may need memory (a hole splits a
//! segment in two). If that does not fit, more is dropped than requested, and that is counted too.

mod find;

use super::blocks::Blocks;
use super::heads::Heads;
use super::sets::{Lane, Set, Sets, table_bytes};
use super::strand::{Before, NONE, Strand};
use super::units::{CHUNK, UnitPosition, Units};
use proto::block::BlockId;
use std::collections::{HashMap, HashSet};

/// Maximum of known roots: one for each tenant, model and adapter.
const MAX_ROOTS: usize = 1 << 16;

/// Above this, units could not be numbered with 32 bits.
const MAX_BYTES: u64 = 60 << 30;

/// Number of ids whose table entries are prefetched at once.
const FETCH: usize = 64;

/// Number of chunks of an addition whose memory is checked at once, if there is plenty.
const SURE_CHUNKS: usize = 32;

/// Bytes reserved for removals, so that they need not drop more than requested.
const SPARE: usize = 16 << 10;

/// A change of a unit's holders.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change<'a> {
    /// The worker holds it and is no longer expected to.
    Hold {
        held: Lane,
        expected: Option<Lane>,
    },
    /// The worker is expected to hold it, unless it already does.
    Expect {
        held: Lane,
        expected: Lane,
    },
    Drop(Lane),
    /// These lanes were dropped.
    Forget(&'a [u64]),
}

impl Change<'_> {
    fn apply(self, set: Set, sets: &mut Sets) -> Set {
        match self {
            Self::Hold { held, expected } => {
                let with = sets.with(set, held);
                let Some(expected) = expected else { return with };
                let without = sets.without(with, expected);
                sets.release(with);
                without
            }
            Self::Expect { held, expected } if sets.contains(set, held) => sets.without(set, expected),
            Self::Expect { expected, .. } => sets.with(set, expected),
            Self::Drop(lane) => sets.without(set, lane),
            Self::Forget(lanes) => sets.minus(set, lanes),
        }
    }
}

#[derive(Debug)]
pub(super) struct Tree {
    units: Units,
    strands: Blocks<Strand, 6>,
    /// First of the free strands; each links to the next by `Before::Strand`.
    free: u32,
    strands_used: u32,
    strand_heap: usize,
    sets: Sets,
    /// The loose strands after each id that is not in the index.
    anchors: HashMap<BlockId, Vec<u32>>,
    anchor_heap: usize,
    loose: u32,
    /// Known roots.
    roots: HashSet<BlockId>,
    heads: Heads,
    /// An upper bound of the lanes in use.
    lanes: usize,
    max_bytes: usize,
    /// Bytes of the budget used outside the tree.
    foreign: usize,
    refused: u64,
    forgotten: u64,
}

impl Tree {
    pub(super) fn new(max_bytes: u64) -> Self {
        Self {
            units: Units::new(),
            strands: Blocks::new(),
            free: NONE,
            strands_used: 0,
            strand_heap: 0,
            sets: Sets::default(),
            anchors: HashMap::new(),
            anchor_heap: 0,
            loose: 0,
            roots: HashSet::new(),
            heads: Heads::new(max_bytes),
            lanes: 0,
            max_bytes: usize::try_from(max_bytes.min(MAX_BYTES)).unwrap_or(usize::MAX),
            foreign: 0,
            refused: 0,
            forgotten: 0,
        }
    }

    pub(super) fn units(&self) -> u64 {
        self.units.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.units.bytes()
            + self.strands.bytes()
            + self.strand_heap
            + self.sets.bytes()
            + table_bytes(self.anchors.capacity(), size_of::<(BlockId, Vec<u32>)>())
            + self.anchor_heap
            + table_bytes(self.roots.capacity(), size_of::<BlockId>())
            + self.heads.bytes()
    }

    /// Number of units not recorded for lack of room.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    /// Number of units whose holders were dropped for lack of room.
    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// If `false`, no unit of the chain is known. Without loose strands, the first unit of a chain with known
    /// units begins a strand.
    #[inline]
    pub(super) fn may_contain(&self, chain: &[BlockId]) -> bool {
        self.loose > 0 || chain.first().is_some_and(|first| self.heads.may_begin(first))
    }

    /// Sets the bytes of the budget used outside the tree.
    pub(super) fn set_foreign(&mut self, bytes: usize) {
        self.foreign = bytes;
    }

    /// Whether `more` bytes fit into the budget.
    pub(super) fn has_room(&self, more: usize) -> bool {
        self.bytes() + self.foreign + more <= self.max_bytes
    }

    /// Sets the upper bound of lanes in use.
    pub(super) fn set_lanes(&mut self, lanes: usize) {
        self.lanes = lanes;
    }

    /// Applies `change` to a run of units and adds those that are unknown. `before` is what precedes the
    /// first unit.
    pub(super) fn insert(&mut self, before: Before, ids: &[BlockId], change: Change<'_>) {
        let cursor = match before {
            Before::After(id) => self.units.find(&id).map(|(strand, at)| (strand, at + 1)),
            _ => None,
        };
        self.insert_from(0, cursor, before, ids, change);
    }

    /// Like [`insert`](Self::insert), for a chain from its first unit. Its known part is found strand by
    /// strand, not unit by unit.
    pub(super) fn insert_chain(&mut self, chain: &[BlockId], change: Change<'_>) {
        let Some((path, known)) = self.known_path(chain) else {
            return self.insert_from(0, None, Before::Start(None), chain, change);
        };
        for &(strand, until) in path.iter().rev() {
            self.change_run(Some((strand, 0, until)), change);
        }
        self.insert_from(known, path.first().copied(), Before::Start(None), chain, change);
    }

    /// Inserts `ids[at..]`, which follow the position `cursor`.
    fn insert_from(
        &mut self,
        mut at: usize,
        mut cursor: Option<UnitPosition>,
        before: Before,
        ids: &[BlockId],
        change: Change<'_>,
    ) {
        let before = match before {
            Before::After(id) if self.roots.contains(&id) => Before::Start(Some(id)),
            other => other,
        };
        let mut pending: Option<(u32, u32, u32)> = None;
        let (mut full, mut unchanged) = (false, false);
        let mut fetched = 0;
        while let Some(id) = ids.get(at) {
            // Repeated reports mostly have the same order. What precedes such a unit is already known.
            if let Some(position) = cursor
                && let run @ 1.. = self.standing(position, &ids[at..])
            {
                let until = position.1 + run as u32;
                pending = match pending {
                    Some((strand, from, end)) if (strand, end) == position => Some((strand, from, until)),
                    other => {
                        unchanged |= !self.change_run(other, change);
                        Some((position.0, position.1, until))
                    }
                };
                (cursor, at) = (Some((position.0, until)), at + run);
                continue;
            }
            if at >= fetched {
                fetched = at + FETCH;
                self.units.fetch(ids[at..ids.len().min(fetched)].iter().copied());
            }
            let Some(position) = self.units.find(id) else {
                unchanged |= !self.change_run(pending.take(), change);
                let added = if full { None } else { self.append(cursor, before, &ids[at..], change) };
                if let Some((end, added)) = added {
                    (cursor, at) = (Some(end), at + added);
                } else {
                    // Known units after this one can still be changed.
                    (full, at) = (true, at + 1);
                    self.refused += 1;
                }
                continue;
            };
            if !full {
                self.learn(position, cursor, if at == 0 { before } else { Before::Unknown });
            }
            pending = match pending {
                Some((strand, from, until)) if (strand, until) == position => Some((strand, from, until + 1)),
                other => {
                    unchanged |= !self.change_run(other, change);
                    Some((position.0, position.1, position.1 + 1))
                }
            };
            cursor = Some((position.0, position.1 + 1));
            at += 1;
        }
        unchanged |= !self.change_run(pending, change);
        if unchanged && let Change::Hold { expected: Some(expected), .. } = change {
            // The worker's report ends the expectation, even if there was no room to record the holding.
            self.remove(ids, expected);
        }
    }

    /// Removes `lane` from these units, in any order.
    pub(super) fn remove(&mut self, ids: &[BlockId], lane: Lane) {
        let mut pending: Option<(u32, u32, u32)> = None;
        let (mut fetched, mut index) = (0, 0);
        while let Some(id) = ids.get(index) {
            if let Some((strand, from, until)) = pending
                && let run @ 1.. = self.standing((strand, until), &ids[index..])
            {
                pending = Some((strand, from, until + run as u32));
                index += run;
                continue;
            }
            if index >= fetched {
                fetched = index + FETCH;
                self.units.fetch(ids[index..ids.len().min(fetched)].iter().copied());
            }
            index += 1;
            let Some((strand, at)) = self.units.find(id) else { continue };
            pending = match pending {
                Some((s, from, until)) if (s, until) == (strand, at) => Some((s, from, until + 1)),
                Some((s, from, until)) if s == strand && at + 1 == from => Some((s, at, until)),
                other => {
                    // This may remove units, also that of `id` (if no worker holds it).
                    self.drop_run(other, lane);
                    self.units.find(id).map(|(strand, at)| (strand, at, at + 1))
                }
            };
        }
        self.drop_run(pending, lane);
    }

    /// Removes `lane` from the units `from..until` of `chain`, which are on one path.
    pub(super) fn remove_path(&mut self, chain: &[BlockId], from: usize, until: usize, lane: Lane) {
        let mut end = until.min(chain.len());
        while end > from {
            let Some((last, strand, at)) = self.deepest(&chain[..end]) else { return };
            let first = last.saturating_sub(at as usize);
            let low = from.saturating_sub(first) as u32;
            self.drop_run(Some((strand, low, at + 1)), lane);
            end = first;
        }
    }

    /// Number of leading `ids` that are stored consecutively from the position on. The position may be past the
    /// end of its strand.
    fn standing(&self, (strand, at): UnitPosition, ids: &[BlockId]) -> usize {
        let here = &self.strands[strand];
        let max = ids.len().min(here.len.saturating_sub(at) as usize);
        let mut done = 0;
        while done < max {
            let held = self.units.ids_from(unit(here, at + done as u32));
            let compared = held.iter().zip(&ids[done..max]);
            let same = compared.take_while(|(held, id)| held == id).count();
            done += same;
            if same < held.len() {
                break;
            }
        }
        done
    }

    /// Removes the lanes in `dead` from up to `strands` strands, starting at `from`. Returns where to
    /// continue, or `None` when done.
    pub(super) fn sweep(&mut self, dead: &[u64], from: u32, strands: u32) -> Option<u32> {
        let end = self.strands.len().min(from.saturating_add(strands));
        for strand in from..end {
            if strand >= self.strands.len() {
                break;
            }
            let met = |tree: &Self| {
                tree.strands[strand].segments().iter().any(|segment| tree.sets.meets(segment.set, dead))
            };
            if self.strands[strand].len > 0 && met(self) {
                let len = self.strands[strand].len;
                self.reduce(strand, 0, len, Change::Forget(dead));
            }
        }
        (end < self.strands.len()).then_some(end)
    }

    /// Known roots.
    pub(super) fn roots(&self) -> impl Iterator<Item = BlockId> {
        self.roots.iter().copied()
    }

    /// The parts of a strand that `lane` holds, in order, each as what precedes it and its units. Strands are
    /// numbered without gaps. `None` after the last strand.
    pub(super) fn held_in(&self, strand: u32, lane: Lane) -> Option<Vec<(Before, Vec<BlockId>)>> {
        if strand >= self.strands.len() {
            return None;
        }
        let here = &self.strands[strand];
        let id = |strand: &Strand, at: u32| *self.units.id(unit(strand, at));
        let (mut parts, mut start) = (Vec::new(), 0);
        for segment in here.segments() {
            let from = std::mem::replace(&mut start, segment.end);
            if !self.sets.contains(segment.set, lane) {
                continue;
            }
            let before = match here.before {
                _ if from > 0 => Before::After(id(here, from - 1)),
                Before::Strand { parent, at } => Before::After(id(&self.strands[parent], at - 1)),
                other => other,
            };
            parts.push((before, (from..segment.end).map(|at| id(here, at)).collect()));
        }
        Some(parts)
    }

    /// Appends units of `ids` until a known one. Returns the end position and the number of units; `None` if
    /// there is no room for any.
    fn append(
        &mut self,
        cursor: Option<UnitPosition>,
        before: Before,
        ids: &[BlockId],
        change: Change<'_>,
    ) -> Option<(UnitPosition, usize)> {
        if !self.may_add(cursor.map(|(strand, _)| strand)) {
            return None;
        }
        let strand = match cursor {
            Some((strand, at)) if self.strands[strand].len == at => strand,
            Some((parent, at)) => self.begin(Before::Strand { parent, at }),
            None => self.begin(before),
        };
        let heap = self.strands[strand].heap();
        let mut len = self.strands[strand].len;
        let (first, mut waiting) = (len, Vec::new());
        let sure = self.has_room(SURE_CHUNKS * self.units.growth() + self.strands[strand].growth() + SPARE);
        for (index, &id) in ids.iter().enumerate() {
            let in_chunk = len % CHUNK;
            if in_chunk == 0 {
                let sure = sure && index / (CHUNK as usize) < SURE_CHUNKS - 1;
                if index > 0 && !sure && !self.may_add(Some(strand)) {
                    break;
                }
                let chunk = self.units.take_chunk(strand, len / CHUNK);
                self.strands[strand].chunks.push(chunk);
            }
            let chunk = self.strands[strand].chunks[(len / CHUNK) as usize];
            if !self.units.insert(id, chunk * CHUNK + in_chunk) {
                if in_chunk == 0 {
                    self.strands[strand].chunks.pop();
                    self.units.give_chunk(chunk);
                }
                break;
            }
            if len == 0 {
                self.heads.add(&id);
            }
            len += 1;
            if !self.anchors.is_empty() {
                waiting.extend(self.take_anchored(&id).into_iter().map(|loose| (loose, len)));
            }
        }
        let set = change.apply(Set::EMPTY, &mut self.sets);
        let Self { strands, sets, .. } = self;
        strands[strand].extend(len, set, sets);
        self.strand_heap = self.strand_heap - heap + self.strands[strand].heap();
        for (loose, at) in waiting {
            self.attach(loose, (strand, at));
        }
        Some(((strand, len), (len - first) as usize))
    }

    /// Whether there is room for a chunk of units, at this strand or at a new one.
    fn may_add(&self, strand: Option<u32>) -> bool {
        let strands = if self.free == NONE { self.strands.growth() } else { 0 };
        let anchors = table_bytes(self.anchors.capacity() * 2 + 4, size_of::<(BlockId, Vec<u32>)>()) + 64;
        let strand = strand.map_or(0, |strand| self.strands[strand].growth());
        let roots = table_bytes(self.roots.capacity() * 2 + 4, size_of::<BlockId>());
        let sets = self.sets.growth(self.lanes);
        self.has_room(SPARE + self.units.growth() + strands + anchors + strand + roots + 2 * sets)
    }

    fn begin(&mut self, before: Before) -> u32 {
        if self.free == NONE {
            let first = self.strands.len();
            self.strands.grow(Strand::new(Before::Unknown));
            for strand in (first..self.strands.len()).rev() {
                self.release_strand(strand);
            }
        }
        let strand = self.free;
        self.free = match self.strands[strand].before {
            Before::Strand { parent, .. } => parent,
            _ => NONE,
        };
        self.strands[strand] = Strand::new(before);
        self.strands_used += 1;
        self.bind(strand);
        strand
    }

    fn release_strand(&mut self, strand: u32) {
        self.strands[strand] = Strand::new(Before::Strand { parent: self.free, at: 0 });
        self.free = strand;
    }

    /// Registers `strand` at its predecessor.
    fn bind(&mut self, strand: u32) {
        let before = self.strands[strand].before;
        self.loose += u32::from(before.is_loose());
        match before {
            Before::Strand { parent, at } => {
                let heap = self.strands[parent].heap();
                self.strands[parent].add_fork(at);
                self.strand_heap = self.strand_heap - heap + self.strands[parent].heap();
            }
            Before::After(id) => {
                let waiting = self.anchors.entry(id).or_default();
                self.anchor_heap -= waiting.capacity() * size_of::<u32>();
                waiting.push(strand);
                self.anchor_heap += waiting.capacity() * size_of::<u32>();
            }
            Before::Start(_) | Before::Unknown => {}
        }
    }

    /// Undoes [`bind`](Self::bind). Returns the parent strand, which may no longer be needed.
    fn unbind(&mut self, strand: u32) -> Option<u32> {
        let before = self.strands[strand].before;
        self.loose -= u32::from(before.is_loose());
        match before {
            Before::Strand { parent, at } => {
                self.strands[parent].drop_fork(at);
                return Some(parent);
            }
            Before::After(id) => {
                if let Some(waiting) = self.anchors.get_mut(&id) {
                    waiting.retain(|&other| other != strand);
                    if waiting.is_empty() {
                        self.anchor_heap -= waiting.capacity() * size_of::<u32>();
                        self.anchors.remove(&id);
                        if self.anchors.is_empty() {
                            self.anchors = HashMap::new();
                        }
                    }
                }
            }
            Before::Start(_) | Before::Unknown => {}
        }
        None
    }

    /// Removes and returns the strands that wait for `id`. They stay loose.
    fn take_anchored(&mut self, id: &BlockId) -> Vec<u32> {
        let waiting = self.anchors.remove(id).unwrap_or_default();
        self.anchor_heap -= waiting.capacity() * size_of::<u32>();
        for &strand in &waiting {
            self.strands[strand].before = Before::Unknown;
        }
        waiting
    }

    /// Records what precedes the known unit at `position`, if it begins a strand.
    fn learn(&mut self, position: UnitPosition, cursor: Option<UnitPosition>, before: Before) {
        let (strand, 0) = position else { return };
        match (self.strands[strand].before, cursor, before) {
            (Before::After(_) | Before::Unknown, Some(cursor), _) => self.attach(strand, cursor),
            (Before::After(root), None, Before::Start(_)) => self.add_root(root),
            (Before::Unknown, None, Before::Start(_) | Before::After(_)) => {
                self.unbind(strand);
                self.strands[strand].before = before;
                self.bind(strand);
            }
            (Before::Start(None), None, Before::After(root) | Before::Start(Some(root))) => {
                self.strands[strand].before = Before::Start(Some(root));
                self.add_root(root);
            }
            _ => {}
        }
    }

    /// Declares `root` as an id that precedes the first units of prompts.
    pub(super) fn add_root(&mut self, root: BlockId) {
        for strand in self.take_anchored(&root) {
            self.unbind(strand);
            self.strands[strand].before = Before::Start(Some(root));
        }
        let growth = table_bytes(self.roots.capacity() * 2 + 4, size_of::<BlockId>());
        if self.roots.len() < MAX_ROOTS && self.has_room(growth) {
            self.roots.insert(root);
        }
    }

    /// Attaches a loose strand after the first `at` units of `parent`.
    fn attach(&mut self, strand: u32, (parent, at): UnitPosition) {
        // Contradicting reports must not create a cycle, which would never be freed.
        let mut above = parent;
        loop {
            if above == strand {
                return;
            }
            let Before::Strand { parent, .. } = self.strands[above].before else { break };
            above = parent;
        }
        if !self.has_room(self.strands[parent].growth()) {
            return;
        }
        self.unbind(strand);
        self.strands[strand].before = Before::Strand { parent, at };
        self.bind(strand);
    }

    /// Applies `change` to a known run of units. Returns `false` if there was no room.
    fn change_run(&mut self, run: Option<(u32, u32, u32)>, change: Change<'_>) -> bool {
        let Some((strand, from, until)) = run else { return true };
        let may = self.may_change(strand, SPARE);
        if may {
            self.change(strand, from, until, change);
        } else {
            self.refused += u64::from(until - from);
        }
        may
    }

    fn drop_run(&mut self, run: Option<(u32, u32, u32)>, lane: Lane) {
        if let Some((strand, from, until)) = run {
            self.reduce(strand, from, until, Change::Drop(lane));
        }
    }

    /// Removes holders, then units that are no longer needed.
    fn reduce(&mut self, strand: u32, from: u32, until: u32, change: Change<'_>) {
        if self.may_change(strand, 0) {
            self.change(strand, from, until, change);
        } else {
            let held = |tree: &Self| tree.strands[strand].segments().iter().any(|s| s.set != Set::EMPTY);
            if held(self) {
                self.forgotten += u64::from(self.strands[strand].len);
            }
            let len = self.strands[strand].len;
            let Self { strands, sets, .. } = self;
            let heap = strands[strand].heap();
            strands[strand].change(0, len, sets, |_, _| Set::EMPTY);
            self.strand_heap = self.strand_heap - heap + self.strands[strand].heap();
        }
        self.trim(strand);
    }

    fn may_change(&self, strand: u32, spare: usize) -> bool {
        let segments = self.strands[strand].segments().len() + 1;
        self.has_room(spare + self.strands[strand].growth() + 2 * segments * self.sets.growth(self.lanes))
    }

    fn change(&mut self, strand: u32, from: u32, until: u32, change: Change<'_>) {
        let Self { strands, sets, .. } = self;
        let heap = strands[strand].heap();
        strands[strand].change(from, until, sets, |set, sets| change.apply(set, sets));
        self.strand_heap = self.strand_heap - heap + self.strands[strand].heap();
    }

    /// Removes unneeded units from the end of `strand`. If none is left, removes the strand, and then perhaps
    /// units of its parent.
    fn trim(&mut self, strand: u32) {
        let mut next = Some(strand);
        while let Some(strand) = next.take() {
            let (len, keep) = (self.strands[strand].len, self.strands[strand].needed());
            if keep == len {
                return;
            }
            let Self { units, strands, heads, .. } = self;
            let here = &strands[strand];
            if keep == 0 {
                heads.remove(units.id(unit(here, 0)));
            }
            for from in (keep..len).step_by(FETCH) {
                let until = len.min(from + FETCH as u32);
                units.fetch((from..until).map(|at| *units.id(unit(here, at))));
                (from..until).for_each(|at| units.remove(unit(here, at)));
            }
            let heap = self.strands[strand].heap();
            let chunks = keep.div_ceil(CHUNK) as usize;
            while self.strands[strand].chunks.len() > chunks {
                if let Some(chunk) = self.strands[strand].chunks.pop() {
                    self.units.give_chunk(chunk);
                }
            }
            if keep > 0 {
                self.strands[strand].truncate(keep);
                if chunks * 4 < self.strands[strand].chunks.capacity() {
                    self.strands[strand].chunks.shrink_to(chunks);
                }
                self.strand_heap = self.strand_heap - heap + self.strands[strand].heap();
            } else {
                next = self.unbind(strand);
                self.strand_heap -= heap;
                self.release_strand(strand);
                self.strands_used -= 1;
            }
        }
        if self.strands_used == 0 {
            self.strands.clear();
            self.free = NONE;
            self.units.free_chunks();
        }
    }
}

fn unit(strand: &Strand, at: u32) -> u32 {
    strand.chunks[(at / CHUNK) as usize] * CHUNK + at % CHUNK
}
