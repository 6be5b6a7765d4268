//! Operations that process each lane separately: packed values, loads, stores, atomics.

use super::{Block, Run};
use crate::FaultKind;
use crate::ast::Space;
use crate::lanes::{LANES, V64, each};
use crate::memory::Allocation;
use crate::op::{Access, Address, Atomic, AtomicOp, AtomicType, Data, Element};
use crate::shared::Accessor;
use crate::warp::Warp;
use crate::window;
use half::{bf16, f16};

fn bits(data: Data) -> u32 {
    match data {
        Data::B16(_) => 16,
        Data::B32(_) => 32,
        Data::B64(_) => 64,
    }
}

pub(super) fn pack(warp: &mut Warp, d: Data, parts: &[Data], mask: u32) {
    for lane in each(mask) {
        let mut value = 0;
        let mut at = 0;
        for &part in parts {
            value |= warp.lane(part, lane) << at;
            at += bits(part);
        }
        warp.set_lane(d, lane, value);
    }
}

pub(super) fn unpack(warp: &mut Warp, a: Data, parts: &[Option<Data>], mask: u32) {
    let each_bits = bits(a) / parts.len() as u32;
    for lane in each(mask) {
        let value = warp.lane(a, lane);
        for (i, part) in parts.iter().enumerate() {
            if let Some(part) = *part {
                warp.set_lane(part, lane, value >> (each_bits * i as u32));
            }
        }
    }
}

/// Reads a little-endian value of up to eight bytes.
fn value(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(all)
}

fn sign_extended(value: u64, bytes: u8) -> u64 {
    let shift = 64 - 8 * u32::from(bytes);
    ((value << shift) as i64 >> shift) as u64
}

/// Extends the value by its sign if the element is signed.
#[inline(always)]
fn extended(value: u64, element: Element) -> u64 {
    if element.signed { sign_extended(value, element.bytes) } else { value }
}

#[inline(always)]
fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = &bytes[at..at + 4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Returns the bytes of all lanes if each lane has a single element and they are consecutive.
fn in_a_row<'a>(offsets: &V64, bytes: &'a [u8], total: usize, size: usize) -> Option<&'a [u8]> {
    if total != size {
        return None;
    }
    let start = offsets[0];
    let apart = (0u64..).zip(offsets).fold(0, |apart, (lane, &at)| apart | at ^ (start + lane * size as u64));
    if apart != 0 {
        return None;
    }
    bytes.get(start as usize..start as usize + size * LANES)
}

impl Warp {
    fn addresses(&self, address: Address) -> V64 {
        match address.base {
            Data::B64(register) => self.v64(register).map(|base| base.wrapping_add_signed(address.offset)),
            Data::B32(register) | Data::B16(register) => {
                self.v32(register).map(|base| u64::from(base.wrapping_add(address.offset as u32)))
            }
        }
    }

    pub(super) fn address(&self, address: Address, lane: usize) -> u64 {
        let base = self.lane(address.base, lane);
        match address.base {
            Data::B64(_) => base.wrapping_add_signed(address.offset),
            // 32-bit addresses wrap around within 32 bits.
            _ => u64::from((base as u32).wrapping_add(address.offset as u32)),
        }
    }
}

impl Block<'_> {
    pub(super) fn accessor(&self, warp: &Warp) -> Accessor {
        Accessor { warp: warp.index, pc: warp.pc }
    }

    pub(super) fn load(&mut self, warp: &mut Warp, access: &Access, mask: u32) -> Run<()> {
        if matches!(access.space, Space::Global | Space::Generic) {
            self.reads(warp, access.address, mask);
        }
        if access.space == Space::Global && self.gather(warp, access, mask) {
            return Ok(());
        }
        let size = usize::from(access.element.bytes);
        let total = size * access.data.len();
        let accessor = self.accessor(warp);
        let mut buffer = [0u8; 32];
        let mut hint = None;
        for lane in each(mask) {
            let address = warp.address(access.address, lane);
            self.read(warp, access.space, address, &mut buffer[..total], accessor, lane, &mut hint)?;
            for (data, bytes) in access.data.iter().zip(buffer[..total].chunks_exact(size)) {
                if let Some(data) = *data {
                    warp.set_lane(data, lane, extended(value(bytes), access.element));
                }
            }
        }
        Ok(())
    }

    /// Notes the address that the first lane of the warp's instruction reads from.
    pub(super) fn reads(&mut self, warp: &Warp, address: Address, mask: u32) {
        self.executed[warp.pc as usize].address = warp.address(address, mask.trailing_zeros() as usize);
    }

    /// Loads from global memory at once if all lanes read written bytes of one allocation that no other
    /// block stored to. Otherwise does nothing and returns `false`; then the lanes must be processed one by
    /// one.
    fn gather(&mut self, warp: &mut Warp, access: &Access, mask: u32) -> bool {
        let size = usize::from(access.element.bytes);
        let total = size * access.data.len();
        let first = mask.trailing_zeros() as usize;
        let addresses = warp.addresses(access.address);
        let Some(index) = self.memory.find(addresses[first], total as u64) else { return false };
        let allocation = self.memory.allocation(index);
        let Some(offsets) = allocation.offsets(&addresses, total as u64, first, mask) else { return false };
        let Some(bytes) = allocation.written(&offsets, total) else { return false };
        let block_id = self.memory.block_id(self.number);
        let raced = !self.synchronised
            && offsets.iter().any(|&offset| allocation.other_writer(offset, total, block_id).is_some());
        if raced {
            return false;
        }
        self.counts.global_read += total as u64 * u64::from(mask.count_ones());
        for (i, data) in access.data.iter().enumerate() {
            let Some(data) = *data else { continue };
            let at = i * size;
            match (size, data) {
                (4, Data::B32(register)) => {
                    let out = if let Some(row) = in_a_row(&offsets, bytes, total, 4) {
                        std::array::from_fn(|lane| word(row, 4 * lane))
                    } else {
                        std::array::from_fn(|lane| word(bytes, offsets[lane] as usize + at))
                    };
                    warp.set32(register, &out, mask);
                }
                (_, Data::B32(register)) => {
                    let out = offsets.map(|offset| {
                        extended(value(&bytes[offset as usize + at..][..size]), access.element) as u32
                    });
                    warp.set32(register, &out, mask);
                }
                (_, Data::B16(register)) => {
                    let out = offsets.map(|offset| {
                        let value = extended(value(&bytes[offset as usize + at..][..size]), access.element);
                        u32::from(value as u16)
                    });
                    warp.set32(register, &out, mask);
                }
                (_, Data::B64(register)) => {
                    let out = offsets.map(|offset| {
                        extended(value(&bytes[offset as usize + at..][..size]), access.element)
                    });
                    warp.set64(register, &out, mask);
                }
            }
        }
        true
    }

    pub(super) fn store(&mut self, warp: &mut Warp, access: &Access, mask: u32) -> Run<()> {
        if access.space == Space::Global && self.scatter(warp, access, mask) {
            return Ok(());
        }
        let size = usize::from(access.element.bytes);
        let total = size * access.data.len();
        let accessor = self.accessor(warp);
        let mut buffer = [0u8; 32];
        for lane in each(mask) {
            let address = warp.address(access.address, lane);
            for (data, bytes) in access.data.iter().zip(buffer.chunks_exact_mut(size)) {
                let value = data.map_or(0, |data| warp.lane(data, lane));
                bytes.copy_from_slice(&value.to_le_bytes()[..size]);
            }
            self.write(warp, access.space, address, &buffer[..total], accessor, lane)?;
        }
        Ok(())
    }

    /// The store that corresponds to [`Self::gather`].
    fn scatter(&mut self, warp: &Warp, access: &Access, mask: u32) -> bool {
        let size = usize::from(access.element.bytes);
        let total = size * access.data.len();
        let first = mask.trailing_zeros() as usize;
        let addresses = warp.addresses(access.address);
        let Some(index) = self.memory.find(addresses[first], total as u64) else { return false };
        let block_id = self.memory.block_id(self.number);
        let allocation = self.memory.allocation_mut(index);
        let Some(offsets) = allocation.offsets(&addresses, total as u64, first, mask) else { return false };
        let raced = !self.synchronised
            && offsets.iter().any(|&offset| allocation.other_writer(offset, total, block_id).is_some());
        if raced {
            return false;
        }
        self.counts.global_written += total as u64 * u64::from(mask.count_ones());
        for lane in each(mask) {
            allocation.record_writer(offsets[lane], total, block_id);
            let to = allocation.get_mut(addresses[lane], total);
            for (data, to) in access.data.iter().zip(to.chunks_exact_mut(size)) {
                let value = data.map_or(0, |data| warp.lane(data, lane));
                match size {
                    4 => to.copy_from_slice(&(value as u32).to_le_bytes()),
                    _ => to.copy_from_slice(&value.to_le_bytes()[..size]),
                }
            }
        }
        true
    }

    #[expect(clippy::too_many_arguments, reason = "one access in all its parts")]
    pub(super) fn read(
        &mut self,
        warp: &Warp,
        space: Space,
        address: u64,
        out: &mut [u8],
        accessor: Accessor,
        lane: usize,
        hint: &mut Option<usize>,
    ) -> Run<()> {
        let bytes = out.len();
        let from: &[u8] = match space {
            Space::Generic => {
                let (space, address) = window::resolve(address);
                return self.read(warp, space, address, out, accessor, lane, hint);
            }
            Space::Global => {
                let index = self.global(address, bytes, lane, hint)?;
                let allocation = self.memory.allocation(index);
                if !allocation.is_written(address, bytes) {
                    return Err((FaultKind::Unwritten { space: "global", address, bytes }, lane));
                }
                if let Some(block) = self.other_writer(allocation, address, bytes) {
                    return Err((block_race("read", address, block), lane));
                }
                self.counts.global_read += bytes as u64;
                allocation.get(address, bytes)
            }
            Space::Shared => match self.shared.read(address, bytes, accessor) {
                Ok(from) => from,
                Err(wrong) => return Err(self.wrong(wrong, lane)),
            },
            Space::Local => {
                let start = local(warp, address, bytes, lane)?;
                &warp.local[start..start + bytes]
            }
            Space::Const => bounded("const", self.constants, address, bytes, lane)?,
            Space::Param => bounded("param", &self.parameters, address, bytes, lane)?,
        };
        out.copy_from_slice(from);
        Ok(())
    }

    fn write(
        &mut self,
        warp: &mut Warp,
        space: Space,
        address: u64,
        from: &[u8],
        accessor: Accessor,
        lane: usize,
    ) -> Run<()> {
        let bytes = from.len();
        let to: &mut [u8] = match space {
            Space::Generic => {
                let (space, address) = window::resolve(address);
                return self.write(warp, space, address, from, accessor, lane);
            }
            Space::Global => {
                let index = self.global(address, bytes, lane, &mut None)?;
                let allocation = self.memory.allocation(index);
                // Writing the value that is already there is harmless.
                if let Some(block) = self.other_writer(allocation, address, bytes)
                    && allocation.get(address, bytes) != from
                {
                    return Err((block_race("write", address, block), lane));
                }
                self.counts.global_written += bytes as u64;
                let block_id = self.memory.block_id(self.number);
                let allocation = self.memory.allocation_mut(index);
                allocation.record_writer(allocation.offset(address), bytes, block_id);
                allocation.get_mut(address, bytes)
            }
            Space::Shared => match self.shared.write(address, bytes, accessor) {
                Ok(to) => to,
                Err(wrong) => return Err(self.wrong(wrong, lane)),
            },
            Space::Local => {
                let start = local(warp, address, bytes, lane)?;
                &mut warp.local[start..start + bytes]
            }
            Space::Const | Space::Param => {
                let what = format!("{} memory cannot be written", space.name());
                return Err((FaultKind::Invalid { what }, lane));
            }
        };
        to.copy_from_slice(from);
        Ok(())
    }

    /// Checks the addresses of a prefetch. Unwritten bytes may be prefetched, since no value is read. PTX promises nothing
    /// for an address outside all memory, so that is a fault; one of shared memory has no effect.
    pub(super) fn prefetch(&mut self, warp: &Warp, space: Space, address: Address, mask: u32) -> Run<()> {
        self.counts.prefetches += u64::from(mask.count_ones());
        let mut hint = None;
        for lane in each(mask) {
            let address = warp.address(address, lane);
            let (space, address) = match space {
                Space::Generic => window::resolve(address),
                named => (named, address),
            };
            match space {
                Space::Global => self.global(address, 1, lane, &mut hint)?,
                Space::Local => local(warp, address, 1, lane)?,
                Space::Shared => continue,
                other => {
                    let what = format!("a prefetch of {} memory", other.name());
                    return Err((FaultKind::Invalid { what }, lane));
                }
            };
        }
        Ok(())
    }

    /// Returns another block that stored there before, if nothing orders the two accesses.
    fn other_writer(&self, allocation: &Allocation, address: u64, bytes: usize) -> Option<u32> {
        let block_id = self.memory.block_id(self.number);
        let found = allocation.other_writer(allocation.offset(address), bytes, block_id);
        found.filter(|_| !self.synchronised)
    }

    /// Returns the index of the allocation that contains an access of global memory.
    fn global(&self, address: u64, bytes: usize, lane: usize, hint: &mut Option<usize>) -> Run<usize> {
        if !address.is_multiple_of(bytes as u64) {
            return Err((FaultKind::Misaligned { space: "global", address, bytes }, lane));
        }
        if let Some(index) = *hint
            && self.memory.allocation(index).holds(address, bytes as u64)
        {
            return Ok(index);
        }
        *hint = self.memory.find(address, bytes as u64);
        hint.ok_or_else(|| (self.memory.explain(address, bytes), lane))
    }

    pub(super) fn atomic(&mut self, warp: &mut Warp, atomic: &Atomic, mask: u32) -> Run<()> {
        let bytes = usize::from(atomic.bytes);
        for lane in each(mask) {
            let address = warp.address(atomic.address, lane);
            let (space, address) = match atomic.space {
                Space::Generic => window::resolve(address),
                space => (space, address),
            };
            let operand = warp.lane(atomic.operand, lane);
            let swap = atomic.swap.map(|swap| warp.lane(swap, lane));
            let bytes_at = match space {
                Space::Global => {
                    let index = self.global(address, bytes, lane, &mut None)?;
                    if !self.memory.allocation(index).is_written(address, bytes) {
                        return Err((FaultKind::Unwritten { space: "global", address, bytes }, lane));
                    }
                    self.counts.global_read += bytes as u64;
                    self.counts.global_written += bytes as u64;
                    self.synchronised = true;
                    self.memory.allocation_mut(index).get_mut(address, bytes)
                }
                Space::Shared => match self.shared.atomic(address, bytes) {
                    Ok(bytes_at) => bytes_at,
                    Err(wrong) => return Err(self.wrong(wrong, lane)),
                },
                other => {
                    let what = format!("an atomic of {} memory", other.name());
                    return Err((FaultKind::Invalid { what }, lane));
                }
            };
            let old = value(bytes_at);
            let new = combined(atomic, old, operand, swap);
            bytes_at.copy_from_slice(&new.to_le_bytes()[..bytes]);
            if let Some(to) = atomic.to {
                warp.set_lane(to, lane, old);
            }
        }
        Ok(())
    }
}

/// A race with another block.
fn block_race(access: &'static str, address: u64, block: u32) -> FaultKind {
    let other = format!("the write of block {block} (counted through the grid)");
    FaultKind::Race { space: "global", address, access, other }
}

/// Returns the value that an atomic operation stores.
fn combined(atomic: &Atomic, old: u64, operand: u64, swap: Option<u64>) -> u64 {
    let signed = |value: u64| sign_extended(value, atomic.bytes) as i64;
    match (atomic.op, atomic.ty) {
        (AtomicOp::Add, AtomicType::F32) => {
            u64::from((f32::from_bits(old as u32) + f32::from_bits(operand as u32)).to_bits())
        }
        (AtomicOp::Add, AtomicType::F64) => (f64::from_bits(old) + f64::from_bits(operand)).to_bits(),
        (AtomicOp::Add, AtomicType::F16 | AtomicType::F16x2) => each_half(old, operand, |a, b| {
            f16::from_f32(f16::from_bits(a).to_f32() + f16::from_bits(b).to_f32()).to_bits()
        }),
        (AtomicOp::Add, AtomicType::Bf16 | AtomicType::Bf16x2) => each_half(old, operand, |a, b| {
            bf16::from_f32(bf16::from_bits(a).to_f32() + bf16::from_bits(b).to_f32()).to_bits()
        }),
        (AtomicOp::Add, _) => old.wrapping_add(operand),
        (AtomicOp::Min, AtomicType::Signed) => signed(old).min(signed(operand)) as u64,
        (AtomicOp::Max, AtomicType::Signed) => signed(old).max(signed(operand)) as u64,
        (AtomicOp::Min, _) => old.min(operand),
        (AtomicOp::Max, _) => old.max(operand),
        (AtomicOp::And, _) => old & operand,
        (AtomicOp::Or, _) => old | operand,
        (AtomicOp::Xor, _) => old ^ operand,
        (AtomicOp::Exchange, _) => operand,
        (AtomicOp::CompareAndSwap, _) => {
            if old == operand {
                swap.unwrap_or(old)
            } else {
                old
            }
        }
        (AtomicOp::Increment, _) => {
            if old >= operand {
                0
            } else {
                old + 1
            }
        }
        (AtomicOp::Decrement, _) => {
            if old == 0 || old > operand {
                operand
            } else {
                old - 1
            }
        }
    }
}

fn each_half(a: u64, b: u64, f: impl Fn(u16, u16) -> u16) -> u64 {
    let low = u64::from(f(a as u16, b as u16));
    low | u64::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

/// Returns the offset of a local-memory address in the warp's local memory.
fn local(warp: &Warp, address: u64, bytes: usize, lane: usize) -> Run<usize> {
    let each = warp.local.len() / crate::lanes::LANES;
    if !address.is_multiple_of(bytes as u64) {
        return Err((FaultKind::Misaligned { space: "local", address, bytes }, lane));
    }
    if address >= each as u64 || bytes > each - address as usize {
        let near = format!("the thread has {each} bytes");
        return Err((FaultKind::OutOfBounds { space: "local", address, bytes, near }, lane));
    }
    Ok(lane * each + address as usize)
}

fn bounded<'a>(space: &'static str, all: &'a [u8], address: u64, bytes: usize, lane: usize) -> Run<&'a [u8]> {
    if !address.is_multiple_of(bytes as u64) {
        return Err((FaultKind::Misaligned { space, address, bytes }, lane));
    }
    usize::try_from(address).ok().and_then(|at| all.get(at..at.checked_add(bytes)?)).ok_or_else(|| {
        let near = format!("there are {} bytes", all.len());
        (FaultKind::OutOfBounds { space, address, bytes, near }, lane)
    })
}
