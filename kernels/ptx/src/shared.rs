//! A block's shared memory: what was written, by which warp, and when.

use crate::FaultKind;

/// Bytes that are watched together.
const WORD: usize = 4;

/// What is known of a word.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    write: Stamp,
    /// The last reads of two different warps.
    reads: [Stamp; 2],
    /// Bytes that were ever written, one bit each.
    written: u8,
    /// Bytes of the last write and of the two reads.
    write_bytes: u8,
    read_bytes: [u8; 2],
    /// Bytes that a copy is on its way to; `write` is its beginning.
    copied: u8,
}

/// Accessor did something, when, and with which instruction: warp, clock and place, from the top. That of nobody is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Stamp(u64);

/// Barriers that a block passes before its clocks are full: more are taken for an endless loop.
const MAX_CLOCK: u32 = (1 << 24) - 1;

impl Stamp {
    fn new(clock: u32, who: Accessor) -> Self {
        Self((who.warp as u64) << 56 | u64::from(clock) << 32 | u64::from(who.pc))
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

    /// Whether both are of one warp between the same barriers.
    fn together(self, other: Self) -> bool {
        self.0 >> 32 == other.0 >> 32
    }
}

/// What each warp knows of the others' clocks. A warp's clock moves at each barrier.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clocks {
    warps: usize,
    known: Vec<u32>,
}

impl Clocks {
    pub(crate) fn new(warps: usize) -> Self {
        let mut clocks = Self { warps, known: vec![0; warps * warps] };
        for warp in 0..warps {
            clocks.known[warp * warps + warp] = 1;
        }
        clocks
    }

    fn own(&self, warp: usize) -> u32 {
        self.known[warp * self.warps + warp]
    }

    fn knows(&self, warp: usize, stamp: Stamp) -> bool {
        let other = stamp.warp();
        stamp.0 == 0 || other == warp || self.known[warp * self.warps + other] >= stamp.clock()
    }

    /// Warps pass a barrier together: each knows afterwards what any knew.
    pub(crate) fn meet(&mut self, warps: &[usize]) {
        let mut all = vec![0; self.warps];
        for &warp in warps {
            let row = &self.known[warp * self.warps..][..self.warps];
            for (known, &clock) in all.iter_mut().zip(row) {
                *known = clock.max(*known);
            }
        }
        for &warp in warps {
            let row = &mut self.known[warp * self.warps..][..self.warps];
            row.copy_from_slice(&all);
            row[warp] = (row[warp] + 1).min(MAX_CLOCK);
        }
    }
}

/// A race: the address, what this access is, and the other one's kind, warp and instruction.
#[derive(Debug)]
pub(crate) struct Race {
    pub(crate) address: u64,
    pub(crate) access: &'static str,
    pub(crate) other: &'static str,
    pub(crate) warp: usize,
    pub(crate) pc: u32,
}

/// What an access of shared memory did wrong.
#[derive(Debug)]
pub(crate) enum Wrong {
    Fault(FaultKind),
    Race(Race),
    /// A copy that this instruction began goes on there.
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
}

/// Accessor accesses: warp and instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Accessor {
    pub(crate) warp: usize,
    pub(crate) pc: u32,
}

impl Shared {
    pub(crate) fn new(bytes: usize) -> Self {
        let cells = vec![Cell::default(); bytes.div_ceil(WORD)];
        Self { bytes: vec![0xff; bytes], cells, clocks: Clocks::default() }
    }

    /// As at the start of a block.
    pub(crate) fn reset(&mut self, warps: usize) {
        self.bytes.fill(0xff);
        self.cells.fill(Cell::default());
        self.clocks = Clocks::new(warps);
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

    /// Reads, if it was written and nobody writes at the same time.
    pub(crate) fn read(&mut self, address: u64, bytes: usize, who: Accessor) -> Result<&[u8], Wrong> {
        let range = self.range(address, bytes)?;
        let stamp = Stamp::new(self.clocks.own(who.warp), who);
        for word in range.start / WORD..range.end.div_ceil(WORD) {
            let cell = &mut self.cells[word];
            let mask = covered(&range, word);
            if cell.copied & mask != 0 {
                return Err(Wrong::InFlight { address, pc: cell.write.pc() });
            }
            if cell.written & mask != mask {
                return Err(Wrong::Fault(FaultKind::Unwritten { space: "shared", address, bytes }));
            }
            if cell.write_bytes & mask != 0 && !self.clocks.knows(who.warp, cell.write) {
                return Err(race(address, "read", "write", cell.write));
            }
            if cell.reads[0].together(stamp) {
                cell.read_bytes[0] |= mask;
                cell.reads[0] = stamp;
            } else if cell.reads[0].warp() == who.warp {
                cell.read_bytes[0] = mask;
                cell.reads[0] = stamp;
            } else {
                cell.reads = [stamp, cell.reads[0]];
                cell.read_bytes = [mask, cell.read_bytes[0]];
            }
        }
        Ok(&self.bytes[range])
    }

    /// A place to write to, if nobody reads or writes it at the same time.
    pub(crate) fn write(&mut self, address: u64, bytes: usize, who: Accessor) -> Result<&mut [u8], Wrong> {
        let range = self.range(address, bytes)?;
        let stamp = Stamp::new(self.clocks.own(who.warp), who);
        for word in range.start / WORD..range.end.div_ceil(WORD) {
            let cell = &mut self.cells[word];
            let mask = covered(&range, word);
            if cell.copied & mask != 0 {
                return Err(Wrong::InFlight { address, pc: cell.write.pc() });
            }
            if cell.write_bytes & mask != 0 && !self.clocks.knows(who.warp, cell.write) {
                return Err(race(address, "write", "write", cell.write));
            }
            for (read, bytes) in cell.reads.into_iter().zip(cell.read_bytes) {
                if bytes & mask != 0 && !self.clocks.knows(who.warp, read) {
                    return Err(race(address, "write", "read", read));
                }
            }
            let same = cell.write.together(stamp);
            cell.write_bytes = if same { cell.write_bytes | mask } else { mask };
            cell.write = stamp;
            cell.written |= mask;
        }
        Ok(&mut self.bytes[range])
    }

    /// A copy begins: from now on the place may not be used.
    pub(crate) fn copy_begin(&mut self, address: u64, bytes: usize, who: Accessor) -> Result<(), Wrong> {
        self.write(address, bytes, who)?;
        let range = self.range(address, bytes)?;
        for word in range.start / WORD..range.end.div_ceil(WORD) {
            self.cells[word].copied |= covered(&range, word);
        }
        Ok(())
    }

    /// A copy was waited for: what it brought is there.
    pub(crate) fn copy_end(&mut self, address: u64, data: &[u8], who: Accessor) -> Result<(), Wrong> {
        let range = self.range(address, data.len())?;
        for word in range.start / WORD..range.end.div_ceil(WORD) {
            self.cells[word].copied &= !covered(&range, word);
        }
        self.write(address, data.len(), who)?.copy_from_slice(data);
        Ok(())
    }

    /// Atomics do not race with each other: they are watched for bounds and first writes only.
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

/// Which bytes of a word a range covers.
fn covered(range: &std::ops::Range<usize>, word: usize) -> u8 {
    let from = range.start.saturating_sub(word * WORD).min(WORD);
    let to = (range.end - word * WORD).min(WORD);
    ((1u8 << to) - 1) & !((1u8 << from) - 1)
}

fn race(address: u64, access: &'static str, other: &'static str, stamp: Stamp) -> Wrong {
    Wrong::Race(Race { address, access, other, warp: stamp.warp(), pc: stamp.pc() })
}
