//! Shared memory of a block, with the warp and time of each access.

use crate::FaultKind;

/// Bytes that are tracked together.
const WORD: usize = 4;

/// Tracked accesses of a word.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    write: Stamp,
    /// The last reads of two different warps.
    reads: [Stamp; 2],
    /// Bytes that were ever written, one bit each.
    written: u8,
    /// Bytes of the last write.
    write_bytes: u8,
    /// Bytes of the two reads.
    read_bytes: [u8; 2],
    /// Bytes that a copy in progress will write; then `write` is the beginning of the copy.
    copied: u8,
    /// Fences of the writing warp before the write.
    fences: u32,
}

/// An access: warp (8 bits), clock (24 bits) and program counter (32 bits), from the top. 0 is no access.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Stamp(u64);

/// Maximum number of barriers before a block's clocks overflow. More count as an endless loop.
const MAX_CLOCK: u32 = (1 << 24) - 1;

impl Stamp {
    fn new(clock: u32, accessor: Accessor) -> Self {
        Self((accessor.warp as u64) << 56 | u64::from(clock) << 32 | u64::from(accessor.pc))
    }

    fn warp(self) -> usize {
        (self.0 >> 56) as usize
    }

    fn clock(self) -> u32 {
        (self.0 >> 32) as u32 & MAX_CLOCK
    }

    fn pc(self) -> u32 {
        self.0 as u32
    }

    /// Whether both accesses are by one warp between the same barriers.
    fn together(self, other: Self) -> bool {
        self.0 >> 32 == other.0 >> 32
    }
}

/// Vector clocks: for each warp, the latest clock of every warp that barriers order before it. A warp's clock
/// advances at each barrier.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clocks {
    warps: usize,
    seen: Vec<u32>,
}

impl Clocks {
    pub(crate) fn new(warps: usize) -> Self {
        let mut clocks = Self { warps, seen: vec![0; warps * warps] };
        for warp in 0..warps {
            clocks.seen[warp * warps + warp] = 1;
        }
        clocks
    }

    fn own(&self, warp: usize) -> u32 {
        self.seen[warp * self.warps + warp]
    }

    fn has_seen(&self, warp: usize, stamp: Stamp) -> bool {
        let other = stamp.warp();
        stamp.0 == 0 || other == warp || self.seen[warp * self.warps + other] >= stamp.clock()
    }

    /// Merges the clocks of warps that pass a barrier together.
    pub(crate) fn pass_barrier(&mut self, warps: &[usize]) {
        let mut all = vec![0; self.warps];
        for &warp in warps {
            let row = &self.seen[warp * self.warps..][..self.warps];
            for (seen, &clock) in all.iter_mut().zip(row) {
                *seen = clock.max(*seen);
            }
        }
        for &warp in warps {
            let row = &mut self.seen[warp * self.warps..][..self.warps];
            row.copy_from_slice(&all);
            row[warp] = (row[warp] + 1).min(MAX_CLOCK);
        }
    }
}

/// A race: the address, the kind of this access, and the kind, warp and instruction of the other.
#[derive(Debug)]
pub(crate) struct Race {
    pub(crate) address: u64,
    pub(crate) access: &'static str,
    pub(crate) other: &'static str,
    pub(crate) warp: usize,
    pub(crate) pc: u32,
}

/// Error of an access to shared memory.
#[derive(Debug)]
pub(crate) enum Wrong {
    Fault(FaultKind),
    Race(Race),
    /// A copy that this instruction began is in progress there.
    InFlight {
        address: u64,
        pc: u32,
    },
}

#[derive(Debug, Default)]
pub(crate) struct Shared {
    bytes: Vec<u8>,
    cells: Vec<Cell>,
    pub(crate) clocks: Clocks,
    /// For each warp, its number of `fence.proxy.async`.
    fences: Vec<u32>,
}

/// The warp and the instruction of an access.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Accessor {
    pub(crate) warp: usize,
    pub(crate) pc: u32,
}

impl Shared {
    pub(crate) fn new(bytes: usize) -> Self {
        let cells = vec![Cell::default(); bytes.div_ceil(WORD)];
        Self { bytes: vec![0xff; bytes], cells, ..Self::default() }
    }

    /// Resets the memory to its state at the start of a block.
    pub(crate) fn reset(&mut self, warps: usize) {
        self.bytes.fill(0xff);
        self.cells.fill(Cell::default());
        self.clocks = Clocks::new(warps);
        self.fences = vec![0; warps];
    }

    /// Makes the writes of a warp visible to [`Shared::read_asynchronously`].
    pub(crate) fn fence(&mut self, warp: usize) {
        self.fences[warp] += 1;
    }

    /// Like [`Shared::read`], by a product of a warp group: writes must be followed by a fence of their warp.
    pub(crate) fn read_asynchronously(
        &mut self,
        address: u64,
        bytes: usize,
        accessor: Accessor,
    ) -> Result<&[u8], Wrong> {
        let range = self.range(address, bytes)?;
        let cells = &self.cells[range.start / WORD..range.end.div_ceil(WORD)];
        if cells.iter().any(|cell| cell.written != 0 && self.fences[cell.write.warp()] <= cell.fences) {
            let what = format!("no fence.proxy.async follows the write to {address:#x} of shared memory");
            return Err(Wrong::Fault(FaultKind::Invalid { what }));
        }
        self.read(address, bytes, accessor)
    }

    fn range(&self, address: u64, bytes: usize) -> Result<std::ops::Range<usize>, Wrong> {
        if address.is_multiple_of(bytes as u64) && address < self.bytes.len() as u64 {
            let at = address as usize;
            if bytes <= self.bytes.len() - at {
                return Ok(at..at + bytes);
            }
        }
        let space = "shared";
        Err(Wrong::Fault(if !address.is_multiple_of(bytes as u64) {
            FaultKind::Misaligned { space, address, bytes }
        } else {
            let near = format!("the block has {} bytes", self.bytes.len());
            FaultKind::OutOfBounds { space, address, bytes, near }
        }))
    }

    /// Reads bytes that were written and that no other warp writes concurrently.
    pub(crate) fn read(&mut self, address: u64, bytes: usize, accessor: Accessor) -> Result<&[u8], Wrong> {
        let range = self.range(address, bytes)?;
        let stamp = Stamp::new(self.clocks.own(accessor.warp), accessor);
        for word in range.start / WORD..range.end.div_ceil(WORD) {
            let cell = &mut self.cells[word];
            let mask = covered(&range, word);
            if cell.copied & mask != 0 {
                return Err(Wrong::InFlight { address, pc: cell.write.pc() });
            }
            if cell.written & mask != mask {
                return Err(Wrong::Fault(FaultKind::Unwritten { space: "shared", address, bytes }));
            }
            if cell.write_bytes & mask != 0 && !self.clocks.has_seen(accessor.warp, cell.write) {
                return Err(race(address, "read", "write", cell.write));
            }
            if cell.reads[0].together(stamp) {
                cell.read_bytes[0] |= mask;
                cell.reads[0] = stamp;
            } else if cell.reads[0].warp() == accessor.warp {
                cell.read_bytes[0] = mask;
                cell.reads[0] = stamp;
            } else {
                cell.reads = [stamp, cell.reads[0]];
                cell.read_bytes = [mask, cell.read_bytes[0]];
            }
        }
        Ok(&self.bytes[range])
    }

    /// Returns bytes to write, if no other warp accesses them concurrently.
    pub(crate) fn write(
        &mut self,
        address: u64,
        bytes: usize,
        accessor: Accessor,
    ) -> Result<&mut [u8], Wrong> {
        let range = self.range(address, bytes)?;
        let stamp = Stamp::new(self.clocks.own(accessor.warp), accessor);
        for word in range.start / WORD..range.end.div_ceil(WORD) {
            let cell = &mut self.cells[word];
            let mask = covered(&range, word);
            if cell.copied & mask != 0 {
                return Err(Wrong::InFlight { address, pc: cell.write.pc() });
            }
            if cell.write_bytes & mask != 0 && !self.clocks.has_seen(accessor.warp, cell.write) {
                return Err(race(address, "write", "write", cell.write));
            }
            for (read, bytes) in cell.reads.into_iter().zip(cell.read_bytes) {
                if bytes & mask != 0 && !self.clocks.has_seen(accessor.warp, read) {
                    return Err(race(address, "write", "read", read));
                }
            }
            let same = cell.write.together(stamp);
            cell.write_bytes = if same { cell.write_bytes | mask } else { mask };
            cell.write = stamp;
            cell.fences = self.fences[accessor.warp];
            cell.written |= mask;
        }
        Ok(&mut self.bytes[range])
    }

    /// Begins a copy. Until it ends, the bytes must not be used.
    pub(crate) fn copy_begin(&mut self, address: u64, bytes: usize, accessor: Accessor) -> Result<(), Wrong> {
        self.write(address, bytes, accessor)?;
        let range = self.range(address, bytes)?;
        for word in range.start / WORD..range.end.div_ceil(WORD) {
            self.cells[word].copied |= covered(&range, word);
        }
        Ok(())
    }

    /// Ends a copy that was waited for: its data becomes visible.
    pub(crate) fn copy_end(&mut self, address: u64, data: &[u8], accessor: Accessor) -> Result<(), Wrong> {
        let range = self.range(address, data.len())?;
        for word in range.start / WORD..range.end.div_ceil(WORD) {
            self.cells[word].copied &= !covered(&range, word);
        }
        self.write(address, data.len(), accessor)?.copy_from_slice(data);
        Ok(())
    }

    /// Atomics do not race with each other. Only bounds and unwritten bytes are checked.
    pub(crate) fn atomic(&mut self, address: u64, bytes: usize) -> Result<&mut [u8], Wrong> {
        let range = self.range(address, bytes)?;
        for word in range.start / WORD..range.end.div_ceil(WORD) {
            let mask = covered(&range, word);
            if self.cells[word].written & mask != mask {
                return Err(Wrong::Fault(FaultKind::Unwritten { space: "shared", address, bytes }));
            }
        }
        Ok(&mut self.bytes[range])
    }
}

/// Returns the bytes of a word that a range covers, one bit each.
fn covered(range: &std::ops::Range<usize>, word: usize) -> u8 {
    let from = range.start.saturating_sub(word * WORD).min(WORD);
    let to = (range.end - word * WORD).min(WORD);
    ((1u8 << to) - 1) & !((1u8 << from) - 1)
}

fn race(address: u64, access: &'static str, other: &'static str, stamp: Stamp) -> Wrong {
    Wrong::Race(Race { address, access, other, warp: stamp.warp(), pc: stamp.pc() })
}
