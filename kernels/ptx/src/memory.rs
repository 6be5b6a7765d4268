//! Global memory: allocations with gaps between them. Each byte is known as written or unwritten.

use crate::lanes::{ALL, V64};
use crate::{FaultKind, RunError};

const FIRST: u64 = 0x7000_0000_0000;
/// Unallocated bytes between allocations.
const GAP: u64 = 1 << 16;
/// Alignment of every allocation.
const ALIGN: u64 = 256;
/// Bytes of a word, the unit in which stores of blocks are distinguished.
const WORD: usize = 4;
/// Value of unwritten bytes: NaN as a float, and far off as an integer.
const POISON: u8 = 0xff;

#[derive(Debug)]
pub(crate) struct Allocation {
    base: u64,
    len: u64,
    /// Empty after the allocation was freed.
    bytes: Vec<u8>,
    /// One bit per byte. Empty if all bytes were written from the start.
    written: Vec<u64>,
    /// Number of unwritten bytes.
    unwritten: u64,
    /// The launch that stored to it last.
    stored: u32,
    /// Whether any kernel has stored to it.
    stored_by_kernels: bool,
    /// For each word of four bytes, from the first store of a kernel on: the launch that stored to it last
    /// (low 32 bits) and the block (high 32 bits).
    writers: Vec<u64>,
    alive: bool,
    /// Name of a module's variable; `None` for allocations of the host.
    name: Option<String>,
}

/// All allocations in order of their addresses, which are never reused.
#[derive(Debug)]
pub(crate) struct Memory {
    allocations: Vec<Allocation>,
    next: u64,
    limit: u64,
    used: u64,
    launch: u32,
}

/// A block of the current launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockId {
    launch: u32,
    block: u32,
}

impl Allocation {
    /// Whether `bytes` bytes from `address` lie in the allocation.
    pub(crate) fn holds(&self, address: u64, bytes: u64) -> bool {
        let at = address.wrapping_sub(self.base);
        at < self.len && bytes <= self.len - at && self.alive
    }

    /// Returns the offset of each address, if all addresses of the lanes in `mask` lie in the allocation
    /// and are aligned to `bytes`, a power of two. The other lanes get the offset of lane `first`.
    pub(crate) fn offsets(&self, addresses: &V64, bytes: u64, first: usize, mask: u32) -> Option<V64> {
        if !self.alive || bytes > self.len {
            return None;
        }
        let last = self.len - bytes;
        let mut offsets = addresses.map(|address| address.wrapping_sub(self.base));
        if mask != ALL {
            let here = offsets[first];
            for (lane, offset) in offsets.iter_mut().enumerate() {
                *offset = if mask >> lane & 1 == 1 { *offset } else { here };
            }
        }
        let wrong = offsets.iter().fold(0, |wrong, &at| wrong | u64::from(at > last) | at & (bytes - 1));
        (wrong == 0).then_some(offsets)
    }

    /// Returns another block that stored to these words in the same launch. Bytes of a word are not
    /// distinguished.
    pub(crate) fn other_writer(&self, at: u64, bytes: usize, block_id: BlockId) -> Option<u32> {
        if self.stored != block_id.launch {
            return None;
        }
        let words = at as usize / WORD..(at as usize + bytes).div_ceil(WORD);
        self.writers[words].iter().find_map(|&writer| {
            let block = (writer >> 32) as u32;
            (writer as u32 == block_id.launch && block != block_id.block).then_some(block)
        })
    }

    pub(crate) fn stored_by_kernels(&self) -> bool {
        self.stored_by_kernels
    }

    pub(crate) fn record_writer(&mut self, at: u64, bytes: usize, block_id: BlockId) {
        self.stored_by_kernels = true;
        if bytes < WORD {
            return;
        }
        if self.writers.is_empty() {
            self.writers = vec![0; (self.len as usize).div_ceil(WORD)];
        }
        self.stored = block_id.launch;
        let words = at as usize / WORD..(at as usize + bytes).div_ceil(WORD);
        self.writers[words].fill(u64::from(block_id.block) << 32 | u64::from(block_id.launch));
    }

    /// Returns the offset of an address in the allocation.
    pub(crate) fn offset(&self, address: u64) -> u64 {
        address.wrapping_sub(self.base)
    }

    /// Returns all bytes of the allocation if `bytes` bytes at each offset are written.
    pub(crate) fn written(&self, offsets: &V64, bytes: usize) -> Option<&[u8]> {
        let all = self.unwritten == 0 || offsets.iter().all(|&at| self.is_written(self.base + at, bytes));
        all.then_some(&self.bytes)
    }

    pub(crate) fn get(&self, address: u64, bytes: usize) -> &[u8] {
        let at = (address - self.base) as usize;
        &self.bytes[at..at + bytes]
    }

    pub(crate) fn get_mut(&mut self, address: u64, bytes: usize) -> &mut [u8] {
        let at = (address - self.base) as usize;
        self.mark(at, bytes);
        &mut self.bytes[at..at + bytes]
    }

    /// Whether all of these bytes were written.
    pub(crate) fn is_written(&self, address: u64, bytes: usize) -> bool {
        if self.unwritten == 0 {
            return true;
        }
        let at = (address - self.base) as usize;
        if at % 64 + bytes <= 64 && bytes < 64 {
            let mask = ((1u64 << bytes) - 1) << (at % 64);
            return self.written[at / 64] & mask == mask;
        }
        (at..at + bytes).all(|i| self.written[i / 64] >> (i % 64) & 1 == 1)
    }

    fn mark(&mut self, at: usize, bytes: usize) {
        if self.unwritten == 0 {
            return;
        }
        let mut i = at;
        while i < at + bytes {
            let count = (64 - i % 64).min(at + bytes - i);
            let mask = if count == 64 { u64::MAX } else { ((1 << count) - 1) << (i % 64) };
            let word = &mut self.written[i / 64];
            self.unwritten -= u64::from((mask & !*word).count_ones());
            *word |= mask;
            i += count;
        }
    }

    /// Copies the written flags of another range.
    fn set_written(&mut self, at: usize, written: &[bool]) {
        if self.written.is_empty() {
            self.written = vec![u64::MAX; self.bytes.len().div_ceil(64)];
        }
        for (i, &is) in (at..).zip(written) {
            let (word, bit) = (&mut self.written[i / 64], 1 << (i % 64));
            match (is, *word & bit != 0) {
                (true, false) => self.unwritten -= 1,
                (false, true) => self.unwritten += 1,
                _ => {}
            }
            *word = if is { *word | bit } else { *word & !bit };
        }
    }
}

impl Memory {
    pub(crate) fn new(limit: u64) -> Self {
        Self { allocations: Vec::new(), next: FIRST, limit, used: 0, launch: 0 }
    }

    /// Begins a new launch, to which the following stores of kernels belong.
    pub(crate) fn begin_launch(&mut self) {
        self.launch = self.launch.wrapping_add(1);
    }

    pub(crate) fn block_id(&self, block: u32) -> BlockId {
        BlockId { launch: self.launch, block }
    }

    /// Allocates zeroes that count as written. The host provides a page of them at its first access.
    pub(crate) fn allocate_zeroed(&mut self, bytes: usize) -> Result<u64, RunError> {
        let base = self.allocate(0, None)?;
        self.take(bytes)?;
        self.next = (base + bytes as u64 + GAP).next_multiple_of(ALIGN);
        if let Some(allocation) = self.allocations.last_mut() {
            allocation.len = bytes as u64;
            allocation.bytes = vec![0; bytes];
        }
        Ok(base)
    }

    fn take(&mut self, bytes: usize) -> Result<(), RunError> {
        let free = self.limit - self.used;
        if bytes as u64 > free {
            return Err(RunError::OutOfMemory { requested: bytes, free: free as usize });
        }
        self.used += bytes as u64;
        Ok(())
    }

    pub(crate) fn allocate(&mut self, bytes: usize, name: Option<String>) -> Result<u64, RunError> {
        self.take(bytes)?;
        let base = self.next;
        self.next = (base + bytes as u64 + GAP).next_multiple_of(ALIGN);
        self.allocations.push(Allocation {
            base,
            len: bytes as u64,
            bytes: vec![POISON; bytes],
            written: vec![0; bytes.div_ceil(64)],
            unwritten: bytes as u64,
            stored: 0,
            stored_by_kernels: false,
            writers: Vec::new(),
            alive: true,
            name,
        });
        Ok(base)
    }

    pub(crate) fn free(&mut self, address: u64) -> Result<(), RunError> {
        let found = self.allocations.binary_search_by_key(&address, |a| a.base).ok();
        match found.map(|index| &mut self.allocations[index]) {
            Some(allocation) if allocation.alive && allocation.name.is_none() => {
                allocation.alive = false;
                allocation.bytes = Vec::new();
                allocation.written = Vec::new();
                allocation.writers = Vec::new();
                self.used -= allocation.len;
                Ok(())
            }
            _ => {
                let reason = "nothing that lives begins there".into();
                Err(RunError::Host { address, bytes: 0, reason })
            }
        }
    }

    /// Returns the index of the allocation that contains an access.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Option<usize> {
        let index = self.allocations.partition_point(|a| a.base <= address).checked_sub(1)?;
        self.allocations[index].holds(address, bytes).then_some(index)
    }

    pub(crate) fn allocation(&self, index: usize) -> &Allocation {
        &self.allocations[index]
    }

    pub(crate) fn allocation_mut(&mut self, index: usize) -> &mut Allocation {
        &mut self.allocations[index]
    }

    /// Returns the fault of an access that lies in no allocation.
    pub(crate) fn explain(&self, address: u64, bytes: usize) -> FaultKind {
        let next = self.allocations.partition_point(|a| a.base <= address);
        let below = next.checked_sub(1).map(|index| &self.allocations[index]);
        if let Some(below) = below
            && !below.alive
            && address - below.base < below.len
        {
            return FaultKind::Freed { address, bytes };
        }
        let near = match (below, self.allocations.get(next)) {
            (Some(a), _) if address - a.base < a.len + GAP => {
                let past = (address - a.base).saturating_sub(a.len);
                format!("{past} bytes past the end of {} of {} bytes at {:#x}", a.label(), a.len, a.base)
            }
            (_, Some(a)) if a.base - address < GAP => {
                let before = a.base - address;
                format!("{before} bytes before {} of {} bytes at {:#x}", a.label(), a.len, a.base)
            }
            _ => "nothing is near".into(),
        };
        FaultKind::OutOfBounds { space: "global", address, bytes, near }
    }

    fn host(&self, address: u64, bytes: usize) -> Result<usize, RunError> {
        self.find(address, bytes as u64).ok_or_else(|| {
            let reason = self.explain(address, bytes).to_string();
            RunError::Host { address, bytes, reason }
        })
    }

    pub(crate) fn write(&mut self, address: u64, data: &[u8]) -> Result<(), RunError> {
        if !data.is_empty() {
            let index = self.host(address, data.len())?;
            self.allocations[index].get_mut(address, data.len()).copy_from_slice(data);
        }
        Ok(())
    }

    pub(crate) fn fill(&mut self, address: u64, value: u8, bytes: usize) -> Result<(), RunError> {
        if bytes > 0 {
            let index = self.host(address, bytes)?;
            self.allocations[index].get_mut(address, bytes).fill(value);
        }
        Ok(())
    }

    pub(crate) fn read(&self, address: u64, out: &mut [u8]) -> Result<(), RunError> {
        if !out.is_empty() {
            let index = self.host(address, out.len())?;
            out.copy_from_slice(self.allocations[index].get(address, out.len()));
        }
        Ok(())
    }

    /// Whether the host or a kernel wrote all of these bytes.
    pub(crate) fn is_written(&self, address: u64, bytes: usize) -> Result<bool, RunError> {
        Ok(bytes == 0 || self.allocations[self.host(address, bytes)?].is_written(address, bytes))
    }

    /// Copies bytes and their written flags.
    pub(crate) fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), RunError> {
        if bytes == 0 {
            return Ok(());
        }
        let (source, target) = (self.host(from, bytes)?, self.host(to, bytes)?);
        let source = &self.allocations[source];
        let data = source.get(from, bytes).to_vec();
        if source.unwritten == 0 {
            return self.write(to, &data);
        }
        let written: Vec<bool> = (from..).take(bytes).map(|at| source.is_written(at, 1)).collect();
        let target = &mut self.allocations[target];
        let at = (to - target.base) as usize;
        target.bytes[at..at + bytes].copy_from_slice(&data);
        target.set_written(at, &written);
        Ok(())
    }
}

impl Allocation {
    fn label(&self) -> String {
        self.name.as_ref().map_or_else(|| "an allocation".into(), |name| format!("variable {name}"))
    }
}
