//! The bytes of a panel: 16 rows of one matrix, column blocks in order.
//!
//! Quantised formats: column blocks of 32 are grouped into *clusters*. A cluster has the number of blocks
//! whose scales take 64 bytes (one, two or four). It is a line of scales, then the code planes of its blocks;
//! the last cluster of a row may have fewer blocks. In formats with two levels of scales, a header line
//! precedes each 256 columns (f16 scales of the 16 rows, then their f16 mins if the format has mins). Vector
//! loads therefore never straddle two lines, and a panel is read in strictly ascending order, as hardware
//! prefetchers need it.
//!
//! | scales of a block | bytes |
//! |---|---|
//! | F32 | `[f32; 16]` |
//! | F16, F16Min | `[f16; 16]` scales (, `[f16; 16]` mins) |
//! | E8m0, Super | `[u8; 16]` |
//! | SuperMin | `[u8; 16]` scales, `[u8; 16]` mins |
//! | Sixteenths, Ue4m3 | `[[u8; 2]; 16]`: both halves of each row |
//! | SixteenthsMin | the same, scale in the low and min in the high nibble |
//!
//! Codes are grouped into eight *groups* of four columns. A vector of 64 bytes holds one group; bytes
//! `4r..4r+4` are row `r`'s four columns. Planes keep that order:
//!
//! | plane | vectors | vector `v` holds |
//! |---|---|---|
//! | 8 bits | 8 | group `v` |
//! | 4 bits | 4 | group `v` in low nibbles, group `v + 4` in high ones |
//! | 2 bits | 2 | groups `4v..4v+4`, lowest bits first |
//! | 1 bit | 1 | all eight groups, lowest bit first |
//!
//! Five and six bits are a 4-bit plane and a plane with the rest. Three bits are a 2-bit plane and a plane
//! with the rest.
//!
//! Plain floats: `[column][16 rows]`.

use super::PANEL_ROWS;
use super::activations::BLOCK;
use crate::quant::{
    Bits, Codes, GgmlType, Levels, Scaling, Scheme, e4m3, e8m0_half, nibbles, split, split_scales, ue4m3_half,
};
use half::f16;

/// Groups of four columns in a block.
pub(super) const GROUPS: usize = 8;
/// Bytes of one vector of codes.
pub(super) const VECTOR: usize = 64;
/// Bytes of one f16 per row.
const F16_ROWS: usize = 2 * PANEL_ROWS;

pub(super) const HEADER_BLOCKS: usize = 256 / BLOCK;

/// Sizes of the planes of a quantised format's panel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    header: bool,
    /// Bytes of scales per block.
    scales: usize,
    codes: usize,
}

/// Byte offsets of the parts of a block in its panel.
#[derive(Debug, Clone, Copy)]
struct BlockOffsets {
    /// Offset of the header; meaningless for formats without one.
    header: usize,
    scales: usize,
    codes: usize,
}

/// The bytes of one block.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedBlock<'a> {
    header: &'a [u8],
    scales: &'a [u8],
    pub(super) codes: &'a [u8],
}

impl Layout {
    pub(super) const fn of(scheme: &Scheme) -> Self {
        let (header, scales) = match scheme.scaling {
            Scaling::F32 => (false, 2 * F16_ROWS),
            Scaling::F16 => (false, F16_ROWS),
            Scaling::F16Min => (false, 2 * F16_ROWS),
            Scaling::E8m0 => (false, PANEL_ROWS),
            Scaling::Ue4m3 => (false, 2 * PANEL_ROWS),
            Scaling::Super => (true, PANEL_ROWS),
            Scaling::SuperMin | Scaling::Sixteenths | Scaling::SixteenthsMin => (true, 2 * PANEL_ROWS),
        };
        let codes = match scheme.bits {
            Bits::Two => 2 * VECTOR,
            Bits::Three => 3 * VECTOR,
            Bits::Four => 4 * VECTOR,
            Bits::Five => 5 * VECTOR,
            Bits::Six => 6 * VECTOR,
            Bits::Eight => 8 * VECTOR,
        };
        Self { header, scales, codes }
    }

    /// Offsets of block `index`. Past the last block: the offsets that the next block would have.
    const fn offsets(&self, index: usize) -> BlockOffsets {
        let per_cluster = cluster_blocks(self.scales);
        let (cluster, nth) = (index / per_cluster, index % per_cluster);
        let (header, headers) = if self.header {
            let stride = VECTOR + HEADER_BLOCKS / per_cluster * self.cluster_bytes(per_cluster);
            (index / HEADER_BLOCKS * stride, (index / HEADER_BLOCKS + 1) * VECTOR)
        } else {
            (0, 0)
        };
        let start = headers + cluster * self.cluster_bytes(per_cluster);
        BlockOffsets { header, scales: start + nth * self.scales, codes: start + VECTOR + nth * self.codes }
    }

    const fn cluster_bytes(&self, blocks: usize) -> usize {
        VECTOR + blocks * self.codes
    }

    /// Bytes of a panel of `blocks` blocks.
    const fn panel_bytes(&self, blocks: usize) -> usize {
        if blocks == 0 { 0 } else { self.offsets(blocks - 1).codes + self.codes }
    }

    /// The blocks of a panel of `blocks` blocks, in order.
    pub(super) fn blocks(self, panel: &[u8], blocks: usize) -> impl Iterator<Item = PackedBlock<'_>> {
        (0..blocks).map(move |index| {
            let offsets = self.offsets(index);
            PackedBlock {
                header: &panel[offsets.header..][..VECTOR],
                scales: &panel[offsets.scales..][..self.scales],
                codes: &panel[offsets.codes..][..self.codes],
            }
        })
    }
}

/// Number of blocks in a full cluster of a format with `scales` bytes of scales per block.
pub(super) const fn cluster_blocks(scales: usize) -> usize {
    VECTOR / scales
}

/// Bytes of a panel of `cols` columns (whole file blocks), a multiple of a cache line; `None` if it overflows
/// or `ty` has no matmul.
pub(super) fn panel_bytes(ty: GgmlType, cols: usize) -> Option<usize> {
    let bytes = match (ty, Scheme::of(ty)) {
        (GgmlType::F32 | GgmlType::F16 | GgmlType::BF16, _) => {
            cols.checked_mul(ty.block_bytes() * PANEL_ROWS)?
        }
        (_, Some(scheme)) => {
            // A block takes less than 1 KiB, including its share of scales and headers.
            let blocks = cols / BLOCK;
            blocks.checked_mul(1 << 10)?;
            Layout::of(&scheme).panel_bytes(blocks)
        }
        (_, None) => return None,
    };
    bytes.checked_next_multiple_of(VECTOR)
}

/// Writes one row of file bytes into lane `lane` of a zeroed panel.
pub(super) fn pack_row(ty: GgmlType, row: &[u8], lane: usize, panel: &mut [u8]) {
    let Some(scheme) = Scheme::of(ty) else {
        return match ty.block_bytes() {
            2 => pack_values::<2>(row, lane, panel),
            _ => pack_values::<4>(row, lane, panel),
        };
    };
    let layout = Layout::of(&scheme);
    let blocks_per_file_block = ty.block_len() / BLOCK;
    let mut codes = Codes::default();
    for (file_block, bytes) in row.chunks_exact(ty.block_bytes()).enumerate() {
        match scheme.bits {
            Bits::Four => split_scales(ty, bytes, &mut codes),
            _ => split(ty, bytes, &mut codes),
        }
        if layout.header {
            let header = &mut panel[layout.offsets(file_block * blocks_per_file_block).header..];
            put_u16(header, lane, codes.d);
            put_u16(&mut header[F16_ROWS..], lane, codes.dmin);
        }
        for sub in 0..blocks_per_file_block {
            let offsets = layout.offsets(file_block * blocks_per_file_block + sub);
            let (front, planes) = panel.split_at_mut(offsets.codes);
            let scales = &mut front[offsets.scales..];
            let planes = &mut planes[..layout.codes];
            pack_scales(scheme.scaling, &codes, sub, lane, scales);
            if scheme.bits == Bits::Four {
                pack_nibbles(nibbles(ty, bytes, sub), lane, planes);
            } else {
                pack_codes(scheme.bits, &codes.codes[sub * BLOCK..][..BLOCK], lane, planes);
            }
        }
    }
}

/// Copies values of `SIZE` bytes. The constant size avoids a call per copied value, which would dominate the
/// time.
fn pack_values<const SIZE: usize>(row: &[u8], lane: usize, panel: &mut [u8]) {
    let (values, slots) = (row.as_chunks::<SIZE>().0, panel.as_chunks_mut::<SIZE>().0);
    for (value, slots) in values.iter().zip(slots.chunks_exact_mut(PANEL_ROWS)) {
        slots[lane] = *value;
    }
}

fn put_u16(to: &mut [u8], lane: usize, value: u16) {
    to[2 * lane..][..2].copy_from_slice(&value.to_le_bytes());
}

fn pack_scales(scaling: Scaling, codes: &Codes, sub: usize, lane: usize, to: &mut [u8]) {
    let pair = [2 * sub, 2 * sub + 1];
    match scaling {
        Scaling::F32 => to[4 * lane..][..4].copy_from_slice(&codes.scale.to_le_bytes()),
        Scaling::F16 => put_u16(to, lane, codes.d),
        Scaling::F16Min => {
            put_u16(to, lane, codes.d);
            put_u16(&mut to[F16_ROWS..], lane, codes.dmin);
        }
        Scaling::E8m0 | Scaling::Super => to[lane] = codes.scales[sub],
        Scaling::SuperMin => {
            to[lane] = codes.scales[sub];
            to[PANEL_ROWS + lane] = codes.mins[sub];
        }
        Scaling::Sixteenths | Scaling::Ue4m3 => {
            to[2 * lane..][..2].copy_from_slice(&pair.map(|i| codes.scales[i]));
        }
        Scaling::SixteenthsMin => {
            let nibbles = pair.map(|i| codes.scales[i] | codes.mins[i] << 4);
            to[2 * lane..][..2].copy_from_slice(&nibbles);
        }
    }
}

/// Distributes the 32 stored codes of one row over the 4-bit plane, whose order is that of the nibbles.
fn pack_nibbles(nibbles: [u8; 16], lane: usize, planes: &mut [u8]) {
    for (word, vector) in nibbles.as_chunks::<4>().0.iter().zip(planes.chunks_exact_mut(VECTOR)) {
        vector[4 * lane..][..4].copy_from_slice(word);
    }
}

/// Distributes the 32 stored codes of one row over the planes. Groups are handled as words of four codes.
fn pack_codes(bits: Bits, codes: &[u8], lane: usize, planes: &mut [u8]) {
    let groups: [u32; GROUPS] = std::array::from_fn(|g| {
        u32::from_le_bytes([codes[4 * g], codes[4 * g + 1], codes[4 * g + 2], codes[4 * g + 3]])
    });
    let mut put = |vector: usize, word: u32| {
        planes[vector * VECTOR + 4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
    };
    let nibbles = |v: usize| groups[v] & 0x0f0f_0f0f | (groups[v + 4] & 0x0f0f_0f0f) << 4;
    let crumbs = |v: usize, shift: u32| {
        (0..4).fold(0, |word, i| word | (groups[4 * v + i] >> shift & 0x0303_0303) << (2 * i))
    };
    let single = |shift: u32| (0..8).fold(0, |word, g| word | (groups[g] >> shift & 0x0101_0101) << g);
    match bits {
        Bits::Eight => (0..8).for_each(|v| put(v, groups[v])),
        Bits::Two | Bits::Three => (0..2).for_each(|v| put(v, crumbs(v, 0))),
        Bits::Four | Bits::Five | Bits::Six => (0..4).for_each(|v| put(v, nibbles(v))),
    }
    match bits {
        Bits::Three => put(2, single(2)),
        Bits::Five => put(4, single(4)),
        Bits::Six => (0..2).for_each(|v| put(4 + v, crumbs(v, 4))),
        Bits::Two | Bits::Four | Bits::Eight => {}
    }
}

/// One value per row of a panel.
pub(super) type Lanes<T> = [T; PANEL_ROWS];

#[derive(Debug, Clone)]
pub(super) struct Block {
    /// Unsigned codes by group, then row, then column of the group.
    pub(super) codes: [Lanes<[u8; 4]>; GROUPS],
    /// Scale of each half's levels.
    pub(super) scale: [Lanes<f32>; 2],
    /// Min added to each half's weights; unused by formats without mins.
    pub(super) added: [Lanes<f32>; 2],
    /// The integer scales of each half, for the formats per 16.
    pub(super) factor: [Lanes<i32>; 2],
    /// The integer mins of each half, for Q2_K.
    pub(super) min_factor: [Lanes<i32>; 2],
    /// f16 scale of the header, for the formats per 16.
    pub(super) d: Lanes<f32>,
    /// Minus the f16 scale of mins of the header, for Q2_K.
    pub(super) minus_dmin: Lanes<f32>,
}

impl Block {
    pub(super) const EMPTY: Self = Self {
        codes: [[[0; 4]; PANEL_ROWS]; GROUPS],
        scale: [[0.0; PANEL_ROWS]; 2],
        added: [[0.0; PANEL_ROWS]; 2],
        factor: [[0; PANEL_ROWS]; 2],
        min_factor: [[0; PANEL_ROWS]; 2],
        d: [0.0; PANEL_ROWS],
        minus_dmin: [0.0; PANEL_ROWS],
    };

    #[inline(always)]
    pub(super) fn unpack(&mut self, scheme: &Scheme, packed: PackedBlock<'_>) {
        self.unpack_scales(scheme, packed, f16_lanes);
        self.unpack_codes(scheme.bits, packed.codes);
        if let Levels::Table(table) = scheme.levels {
            for code in self.codes.as_flattened_mut().as_flattened_mut() {
                *code = table[usize::from(*code & 15)];
            }
        }
    }

    /// The weight of column `k` of the block in row `row`.
    #[inline(always)]
    pub(super) fn weight(&self, scheme: &Scheme, k: usize, row: usize) -> f32 {
        let half = k / 16;
        let code = self.codes[k / 4][row][k % 4];
        let level = if scheme.is_integer() { (i32::from(code) - scheme.offset) as f32 } else { e4m3(code) };
        let weight = self.scale[half][row] * level;
        if scheme.scaling.has_min() { weight + self.added[half][row] } else { weight }
    }

    /// Unpacks everything but the codes. `f16_lanes` converts the 16 f16 values at the start of its argument.
    #[inline(always)]
    pub(super) fn unpack_scales(
        &mut self,
        scheme: &Scheme,
        packed: PackedBlock<'_>,
        f16_lanes: impl Fn(&[u8]) -> Lanes<f32>,
    ) {
        let PackedBlock { header, scales, .. } = packed;
        match scheme.scaling {
            Scaling::F32 => {
                let bytes = scales.as_chunks::<4>().0;
                self.scale = [lanes(|r| f32::from_le_bytes(bytes[r])); 2];
            }
            Scaling::F16 => self.scale = [f16_lanes(scales); 2],
            Scaling::F16Min => {
                self.scale = [f16_lanes(scales); 2];
                self.added = [f16_lanes(&scales[F16_ROWS..]); 2];
            }
            Scaling::E8m0 => self.scale = [lanes(|r| e8m0_half(scales[r])); 2],
            Scaling::Super => {
                let d = f16_lanes(header);
                self.scale = [lanes(|r| d[r] * f32::from(scales[r].cast_signed())); 2];
            }
            Scaling::SuperMin => {
                let (d, dmin) = (f16_lanes(header), f16_lanes(&header[F16_ROWS..]));
                self.scale = [lanes(|r| d[r] * f32::from(scales[r])); 2];
                self.added = [lanes(|r| -(dmin[r] * f32::from(scales[PANEL_ROWS + r]))); 2];
            }
            Scaling::Sixteenths => {
                self.d = f16_lanes(header);
                for half in 0..2 {
                    self.factor[half] = lanes(|r| i32::from(scales[2 * r + half].cast_signed()));
                    self.scale[half] = lanes(|r| self.d[r] * self.factor[half][r] as f32);
                }
            }
            Scaling::SixteenthsMin => {
                self.d = f16_lanes(header);
                let dmin = f16_lanes(&header[F16_ROWS..]);
                self.minus_dmin = lanes(|r| -dmin[r]);
                for half in 0..2 {
                    self.factor[half] = lanes(|r| i32::from(scales[2 * r + half] & 15));
                    self.min_factor[half] = lanes(|r| i32::from(scales[2 * r + half] >> 4));
                    self.scale[half] = lanes(|r| self.d[r] * self.factor[half][r] as f32);
                    self.added[half] = lanes(|r| self.minus_dmin[r] * self.min_factor[half][r] as f32);
                }
            }
            Scaling::Ue4m3 => {
                for half in 0..2 {
                    self.scale[half] = lanes(|r| ue4m3_half(scales[2 * r + half]));
                }
            }
        }
    }

    #[inline(always)]
    fn unpack_codes(&mut self, bits: Bits, planes: &[u8]) {
        for (g, group) in self.codes.iter_mut().enumerate() {
            let group = group.as_flattened_mut();
            let vector = |v: usize| &planes[v * VECTOR..][..VECTOR];
            match bits {
                Bits::Eight => group.copy_from_slice(vector(g)),
                Bits::Two | Bits::Three => put_bits(group, vector(g / 4), 2 * (g % 4), 3),
                Bits::Four | Bits::Five | Bits::Six => put_bits(group, vector(g % 4), 4 * (g / 4), 15),
            }
            match bits {
                Bits::Three => add_bits(group, vector(2), g, 1, 2),
                Bits::Five => add_bits(group, vector(4), g, 1, 4),
                Bits::Six => add_bits(group, vector(4 + g / 4), 2 * (g % 4), 3, 4),
                Bits::Two | Bits::Four | Bits::Eight => {}
            }
        }
    }
}

#[inline(always)]
fn put_bits(codes: &mut [u8], plane: &[u8], from: usize, mask: u8) {
    for (code, byte) in codes.iter_mut().zip(plane) {
        *code = byte >> from & mask;
    }
}

#[inline(always)]
fn add_bits(codes: &mut [u8], plane: &[u8], from: usize, mask: u8, to: usize) {
    for (code, byte) in codes.iter_mut().zip(plane) {
        *code |= (byte >> from & mask) << to;
    }
}

/// Calls `value` for each row. (`std::array::from_fn` is not inlined everywhere, and is then not compiled
/// with the vector features of its caller.)
#[inline(always)]
pub(super) fn lanes<T: Copy + Default>(value: impl Fn(usize) -> T) -> Lanes<T> {
    let mut lanes = [T::default(); PANEL_ROWS];
    for (r, lane) in lanes.iter_mut().enumerate() {
        *lane = value(r);
    }
    lanes
}

fn f16_lanes(bytes: &[u8]) -> Lanes<f32> {
    lanes(|r| f16::from_le_bytes([bytes[2 * r], bytes[2 * r + 1]]).to_f32())
}
