//! Paths of units and who holds what on them.
//!
//! A unit's id commits to everything before it, so ids form trees. A tree is kept as *strands*: a strand is a
//! run of units as it was first told, another path that leaves it goes off as a strand of its own, and a
//! strand's units are cut into segments of equal holders. Holes, kept tails, lone resume points are segments
//! like others. A unit that nobody holds stays while a unit behind it is held, so that from any unit the way
//! up to the start is known.
//!
//! So a lookup finds the deepest unit of a chain that is known at all, and from there walks up strand by
//! strand: it visits as many segments as the path has, not as many units. Where the end of the chain is not known, the
//! deepest unit is found by following the chain from its start. That is right as long as the way up to the start is
//! known for every unit, so that the known units of a chain are its first ones. While some strand is *loose* (a worker has kept a unit whose path was never told),
//! the chain is scanned from its end instead, which is slower and as exact.
//!
//! No allocation takes the whole over its budget: before anything grows, the highest that it may need is
//! added to what is there. What does not fit is refused and counted; where even forgetting would need memory
//! (a hole makes two segments of one), more is forgotten than was asked for, and that is counted too.

mod find;

use super::blocks::Blocks;
use super::heads::Heads;
use super::sets::{Lane, Set, Sets, table_bytes};
use super::strand::{Before, NONE, Strand};
use super::units::{CHUNK, UnitPosition, Units};
use proto::block::BlockId;
use std::collections::{HashMap, HashSet};

/// Roots known as such, at most: one for each tenant, model and adapter.
const MAX_ROOTS: usize = 1 << 16;

/// Beyond, units could no longer be numbered by 32 bits.
const MAX_BYTES: u64 = 60 << 30;

/// Ids whose places in the table are fetched at a time.
const FETCH: usize = 64;

/// Chunks of an addition that are checked for room all at once, if there is plenty.
const SURE_CHUNKS: usize = 32;

/// Bytes that only removals may use, so that they need not forget more than they are told to.
const SPARE: usize = 16 << 10;

/// What happens to a unit's holders.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change<'a> {
    /// The worker holds it, which need not be expected any more.
    Hold {
        held: Lane,
        expected: Option<Lane>,
    },
    /// The worker is expected to hold it, unless it does.
    Expect {
        held: Lane,
        expected: Lane,
    },
    Drop(Lane),
    /// These lanes are of nobody any more.
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
    /// First of the free strands; each names the next in `Before::Strand`.
    free: u32,
    strands_used: u32,
    strand_heap: usize,
    sets: Sets,
    /// The loose strands behind each id that is not in the index.
    anchors: HashMap<BlockId, Vec<u32>>,
    anchor_heap: usize,
    loose: u32,
    /// Ids that are known to be roots.
    roots: HashSet<BlockId>,
    heads: Heads,
    /// Higher than any lane in use.
    lanes: usize,
    max_bytes: usize,
    /// Bytes that others than the tree have of the budget.
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

    /// Units that were not recorded for lack of room.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    /// Units of which it was forgotten who holds them, for lack of room.
    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// `false`: no unit of the chain is known. Where the way up to the start is known for every unit, the first unit of a
    /// chain of which any is known begins a strand.
    #[inline]
    pub(super) fn may_know(&self, chain: &[BlockId]) -> bool {
        self.loose > 0 || chain.first().is_some_and(|first| self.heads.may_begin(first))
    }

    /// Bytes of the budget that are used elsewhere.
    pub(super) fn set_foreign(&mut self, bytes: usize) {
        self.foreign = bytes;
    }

    /// Whether `more` bytes elsewhere would fit.
    pub(super) fn has_room(&self, more: usize) -> bool {
        self.bytes() + self.foreign + more <= self.max_bytes
    }

    /// Lanes below `lanes` are used from now on.
    pub(super) fn set_lanes(&mut self, lanes: usize) {
        self.lanes = lanes;
    }

    /// Records `change` for a run of units; what is not known yet is added. `before` tells what is before the
    /// first.
    pub(super) fn insert(&mut self, before: Before, ids: &[BlockId], change: Change<'_>) {
        let cursor = match before {
            Before::After(id) => self.units.find(&id).map(|(strand, at)| (strand, at + 1)),
            _ => None,
        };
        self.insert_from(0, cursor, before, ids, change);
    }

    /// [`insert`](Self::insert) of a chain from its first unit on, of which nothing is told but that it is one: what is
    /// known of it is found strand by strand, not unit by unit.
    pub(super) fn insert_chain(&mut self, chain: &[BlockId], change: Change<'_>) {
        let Some((path, known)) = self.known_path(chain) else {
            return self.insert_from(0, None, Before::Start(None), chain, change);
        };
        for &(strand, until) in path.iter().rev() {
            self.change_known(Some((strand, 0, until)), change);
        }
        self.insert_from(known, path.first().copied(), Before::Start(None), chain, change);
    }

    /// [`insert`](Self::insert) of `ids` from the one at `at` on, which comes after the `cursor`.
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
        let mut known: Option<(u32, u32, u32)> = None;
        let (mut full, mut unchanged) = (false, false);
        let mut fetched = 0;
        while let Some(id) = ids.get(at) {
            // What was told before is mostly told in the same order. What is before such a unit is known.
            if let Some(place) = cursor
                && let run @ 1.. = self.standing(place, &ids[at..])
            {
                let until = place.1 + run as u32;
                known = match known {
                    Some((strand, from, end)) if (strand, end) == place => Some((strand, from, until)),
                    other => {
                        unchanged |= !self.change_known(other, change);
                        Some((place.0, place.1, until))
                    }
                };
                (cursor, at) = (Some((place.0, until)), at + run);
                continue;
            }
            if at >= fetched {
                fetched = at + FETCH;
                self.units.fetch(ids[at..ids.len().min(fetched)].iter().copied());
            }
            let Some(place) = self.units.find(id) else {
                unchanged |= !self.change_known(known.take(), change);
                let added = if full { None } else { self.append(cursor, before, &ids[at..], change) };
                if let Some((end, added)) = added {
                    (cursor, at) = (Some(end), at + added);
                } else {
                    // What is known already can still be told of.
                    (full, at) = (true, at + 1);
                    self.refused += 1;
                }
                continue;
            };
            if !full {
                self.learn(place, cursor, if at == 0 { before } else { Before::Unknown });
            }
            known = match known {
                Some((strand, from, until)) if (strand, until) == place => Some((strand, from, until + 1)),
                other => {
                    unchanged |= !self.change_known(other, change);
                    Some((place.0, place.1, place.1 + 1))
                }
            };
            cursor = Some((place.0, place.1 + 1));
            at += 1;
        }
        unchanged |= !self.change_known(known, change);
        if unchanged && let Change::Hold { expected: Some(expected), .. } = change {
            // The worker has spoken, even if there was no room to note what it said.
            self.remove(ids, expected);
        }
    }

    /// `lane` leaves these units, in any order.
    pub(super) fn remove(&mut self, ids: &[BlockId], lane: Lane) {
        let mut known: Option<(u32, u32, u32)> = None;
        let (mut fetched, mut index) = (0, 0);
        while let Some(id) = ids.get(index) {
            if let Some((strand, from, until)) = known
                && let run @ 1.. = self.standing((strand, until), &ids[index..])
            {
                known = Some((strand, from, until + run as u32));
                index += run;
                continue;
            }
            if index >= fetched {
                fetched = index + FETCH;
                self.units.fetch(ids[index..ids.len().min(fetched)].iter().copied());
            }
            index += 1;
            let Some((strand, at)) = self.units.find(id) else { continue };
            known = match known {
                Some((s, from, until)) if (s, until) == (strand, at) => Some((s, from, until + 1)),
                Some((s, from, until)) if s == strand && at + 1 == from => Some((s, at, until)),
                other => {
                    // This may take units away, also that of `id` (if nobody holds it).
                    self.drop_known(other, lane);
                    self.units.find(id).map(|(strand, at)| (strand, at, at + 1))
                }
            };
        }
        self.drop_known(known, lane);
    }

    /// `lane` leaves the units of `chain` from `from` up to `until`, which are on one path.
    pub(super) fn remove_path(&mut self, chain: &[BlockId], from: usize, until: usize, lane: Lane) {
        let mut end = until.min(chain.len());
        while end > from {
            let Some((last, strand, at)) = self.deepest(&chain[..end]) else { return };
            let first = last.saturating_sub(at as usize);
            let low = from.saturating_sub(first) as u32;
            self.drop_known(Some((strand, low, at + 1)), lane);
            end = first;
        }
    }

    /// How many of the first of `ids` stand one after the other from `place` on, which may be behind the end of its strand.
    fn standing(&self, (strand, at): UnitPosition, ids: &[BlockId]) -> usize {
        let here = &self.strands[strand];
        let most = ids.len().min(here.len.saturating_sub(at) as usize);
        let mut done = 0;
        while done < most {
            let held = self.units.ids_from(unit(here, at + done as u32));
            let compared = held.iter().zip(&ids[done..most]);
            let same = compared.take_while(|(held, id)| held == id).count();
            done += same;
            if same < held.len() {
                break;
            }
        }
        done
    }

    /// Takes the lanes in `dead` out of up to `strands` strands from `from` on; where to go on, if not done.
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
                self.lessen(strand, 0, len, Change::Forget(dead));
            }
        }
        (end < self.strands.len()).then_some(end)
    }

    /// Ids that are known to be roots.
    pub(super) fn roots(&self) -> impl Iterator<Item = BlockId> {
        self.roots.iter().copied()
    }

    /// What is known of one of the strands, which are numbered without gaps: the parts of it that `lane` is in,
    /// first to last, each as what is before its first unit, and its units. `None` behind the last strand.
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

    /// Adds units of `ids` until one is known: where they end, and how many they are. `None` if there is no room
    /// for even one.
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

    /// Whether up to a chunk of units may be added, at this strand or at a new one.
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

    /// Tells what is before `strand` that it hangs there.
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

    /// Undoes [`bind`](Self::bind); the strand that it hung at, which may not be needed any more.
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

    /// The loose strands behind `id`, which wait no longer (and are loose still).
    fn take_anchored(&mut self, id: &BlockId) -> Vec<u32> {
        let waiting = self.anchors.remove(id).unwrap_or_default();
        self.anchor_heap -= waiting.capacity() * size_of::<u32>();
        for &strand in &waiting {
            self.strands[strand].before = Before::Unknown;
        }
        waiting
    }

    /// What a run tells about the unit at `place`, which was known: what is before it.
    fn learn(&mut self, place: UnitPosition, cursor: Option<UnitPosition>, before: Before) {
        let (strand, 0) = place else { return };
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

    /// `root` is what the first units of prompts come after.
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

    /// A loose strand turns out to be behind the first `at` units of `parent`.
    fn attach(&mut self, strand: u32, (parent, at): UnitPosition) {
        // Contradicting workers must not be able to close a circle, which nothing would ever free.
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

    /// `false` if there was no room for it.
    fn change_known(&mut self, known: Option<(u32, u32, u32)>, change: Change<'_>) -> bool {
        let Some((strand, from, until)) = known else { return true };
        let may = self.may_change(strand, SPARE);
        if may {
            self.change(strand, from, until, change);
        } else {
            self.refused += u64::from(until - from);
        }
        may
    }

    fn drop_known(&mut self, known: Option<(u32, u32, u32)>, lane: Lane) {
        if let Some((strand, from, until)) = known {
            self.lessen(strand, from, until, Change::Drop(lane));
        }
    }

    /// Takes holders away, and units that are not needed any more.
    fn lessen(&mut self, strand: u32, from: u32, until: u32, change: Change<'_>) {
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

    /// Takes away the units at the end of `strand` that are not needed; the strand itself if none is, and then
    /// perhaps units of what it hung at.
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
