//! Weight matrices in the layout that the GPU kernels read.
//!
//! A *tile* is 32 rows of one matrix, one for each lane of a warp. A *unit* is 256 columns of a tile. A
//! lane reads its own row in pieces of 16 bytes, so a warp reads 512 contiguous bytes and needs all of
//! them, in every format. Tiles lie one after the other, across experts too. A tile is its units in order.
//! A unit consists of the following parts, each for all 32 rows:
//!
//! | part | of each row |
//! |---|---|
//! | record | the scales, in pieces of 16 or 8 bytes, see below |
//! | side | 0, 2 or 4 bytes: scales that do not fit the record |
//! | minor plane | the upper bits of 3-, 5- and 6-bit codes, in pieces of 16 bytes |
//! | main plane | the lower bits, or all, in pieces of 16 bytes |
//!
//! The last unit of a tile may have fewer columns. Its main plane is shorter accordingly; all other parts
//! have full length. Columns and rows beyond the last are zeroes.
//!
//! The codes of 32 columns (a block) are eight *groups* of four. A 32-bit word holds one column of a group
//! in each of its four bytes, so that one `dp4a` processes it. Words are in the order of the fragments of
//! `mma.m16n8k32`: lane `t` of four needs the groups `t` and `t + 4` of a row.
//!
//! | plane | words of a block | word `v` holds |
//! |---|---|---|
//! | 8 bits | 8 | group `v`, as signed levels |
//! | 4 bits | 4 | group `v` in low nibbles, group `v + 4` in high ones |
//! | 4 bits of a codebook | 4 | see below |
//! | 2 bits | 2 | groups `4v..4v+4`, lowest bits first |
//! | 1 bit | 1 | all eight groups, lowest bit first |
//!
//! Word `v` of a codebook's plane holds the codes of the groups `v` and `v + 4`. The lower three bits of a
//! code are the index for `prmt`. They are in four adjacent nibbles, those of group `v` in the lower half
//! of the word and those of group `v + 4` in the upper half. The fourth bit of a code selects the half of
//! the codebook. For code `i` of group `v` it is bit 7 of byte `i`, for code `i` of group `v + 4` it is bit
//! 3 of byte `i`.
//!
//! | scales | record | side |
//! |---|---|---|
//! | f16 per 32 | 8 of them | |
//! | f16 scale and min per 32 | 8 pairs | |
//! | E8M0 per 32 | 8 bytes | |
//! | E4M3 per 16 | 16 bytes | |
//! | IQ4_XS | the block's first 8 bytes | |
//! | Q4_K, Q5_K | the block's first 16 bytes | |
//! | Q6_K | 16 scales | scale of scales |
//! | Q3_K | 12 bytes of scales, scale of scales, two zeroes | |
//! | Q2_K | 16 bytes of scales and mins | scales of both |
//!
//! Plain floats have a main plane only. Every format but Q3_K (112 bytes instead of 110) takes the same
//! space as in the file.

use kernels::Error;
use kernels::quant::{Bits, Codes, GgmlType, Levels, Scaling, Scheme, split};
use std::ops::Range;

#[cfg(test)]
pub(crate) mod tests;

/// Rows of a tile.
pub const TILE_ROWS: usize = 32;

pub const UNIT_COLS: usize = 256;

/// Activations that share a scale.
pub(crate) const BLOCK: usize = 32;

/// Bytes that a lane reads at once.
const PIECE: usize = 16;

/// Bytes of each plane of a unit, per row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct UnitLayout {
    record: usize,
    side: usize,
    minor: usize,
    main: usize,
}

impl UnitLayout {
    /// Returns `None` for a type without a matmul.
    fn of(ty: GgmlType) -> Option<Self> {
        let Some(scheme) = Scheme::of(ty) else {
            let float = matches!(ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
            return float.then_some(Self { record: 0, side: 0, minor: 0, main: BLOCK * ty.block_bytes() });
        };
        let (record, side) = match scheme.scaling {
            Scaling::E8m0 | Scaling::Super => (8, 0),
            Scaling::F16 | Scaling::Ue4m3 | Scaling::SuperMin => (16, 0),
            Scaling::F32 | Scaling::F16Min => (32, 0),
            Scaling::Sixteenths if ty == GgmlType::Q3_K => (16, 0),
            Scaling::Sixteenths => (16, 2),
            Scaling::SixteenthsMin => (16, 4),
        };
        let (minor, main) = match scheme.bits {
            Bits::Two => (0, 8),
            Bits::Three => (32, 8),
            Bits::Four => (0, 16),
            Bits::Five => (32, 16),
            Bits::Six => (64, 16),
            Bits::Eight => (0, 32),
        };
        Some(Self { record, side, minor, main })
    }

    /// Returns the bytes of a unit of `cols` columns.
    fn unit_bytes(&self, cols: usize) -> usize {
        let Self { record, side, minor, main } = self;
        let main = (cols * main).div_ceil(BLOCK).next_multiple_of(PIECE);
        TILE_ROWS * (record + side + minor + main)
    }

    fn minor_at(&self) -> usize {
        TILE_ROWS * (self.record + self.side)
    }

    fn main_at(&self) -> usize {
        self.minor_at() + TILE_ROWS * self.minor
    }
}

/// Format and shape of a tensor of `experts` matrices of `rows x cols`, with the offsets of its packed
/// parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiledShape {
    ty: GgmlType,
    rows: usize,
    cols: usize,
    experts: usize,
    row_bytes: usize,
    tile_bytes: usize,
    layout: UnitLayout,
}

impl TiledShape {
    /// # Errors
    /// [`Error::NoMatmul`] for a type without a matmul kernel, [`Error::PartialBlock`] for rows that are
    /// not whole blocks, [`Error::Shape`] for a dimension of zero or a size beyond the address space.
    pub fn new(ty: GgmlType, rows: usize, cols: usize, experts: usize) -> Result<Self, Error> {
        let impossible = Error::Shape { rows, cols, experts };
        if rows == 0 || cols == 0 || experts == 0 || u32::try_from(rows.max(cols)).is_err() {
            return Err(impossible);
        }
        let row_bytes = ty.row_bytes(cols)?;
        let layout = UnitLayout::of(ty).ok_or(Error::NoMatmul { ty: ty.name() })?;
        let tail = match cols % UNIT_COLS {
            0 => 0,
            tail => layout.unit_bytes(tail),
        };
        // Columns fit 32 bits, so this cannot overflow.
        let tile_bytes = cols / UNIT_COLS * layout.unit_bytes(UNIT_COLS) + tail;
        let shape = Self { ty, rows, cols, experts, row_bytes, tile_bytes, layout };
        let checked = |count: usize, bytes: usize| {
            count.checked_mul(experts)?.checked_mul(bytes).filter(|&total| isize::try_from(total).is_ok())
        };
        checked(rows, row_bytes).ok_or(impossible.clone())?;
        checked(shape.tiles(), tile_bytes).ok_or(impossible)?;
        Ok(shape)
    }

    pub fn ty(&self) -> GgmlType {
        self.ty
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn experts(&self) -> usize {
        self.experts
    }

    pub fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// Returns the bytes of a packed tile; a multiple of 32.
    pub fn tile_bytes(&self) -> usize {
        self.tile_bytes
    }

    /// Returns the bytes of one packed matrix.
    pub fn expert_bytes(&self) -> usize {
        self.tiles() * self.tile_bytes
    }

    /// Returns the bytes of all packed matrices.
    pub fn packed_bytes(&self) -> usize {
        self.experts * self.expert_bytes()
    }

    /// Returns the bytes of the tensor in a file.
    pub fn file_bytes(&self) -> usize {
        self.experts * self.rows * self.row_bytes
    }

    /// Returns the range of file bytes with the rows of some tiles. Tile numbers run through all matrices.
    pub fn file_range(&self, tiles: Range<usize>) -> Range<usize> {
        self.first_row(tiles.start) * self.row_bytes..self.first_row(tiles.end) * self.row_bytes
    }

    /// Returns the first row of a tile, counted through all matrices. For the tile after the last, that is
    /// the number of rows.
    fn first_row(&self, tile: usize) -> usize {
        let (expert, tile) = (tile / self.tiles(), tile % self.tiles());
        expert * self.rows + tile * TILE_ROWS
    }

    /// Packs tiles from the bytes of their [`file_range`](Self::file_range) into `out`, whose old contents
    /// are dropped. The result belongs at the offset [`tile_bytes`](Self::tile_bytes) times the first
    /// tile's number.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for tiles past the end, [`Error::Length`] if `rows` has another length than
    /// the range.
    pub fn pack(&self, tiles: Range<usize>, rows: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
        let all = self.tiles() * self.experts;
        if tiles.end > all || tiles.start > tiles.end {
            return Err(Error::OutOfRange { what: "tile", index: tiles.end, len: all });
        }
        let expected = self.file_range(tiles.clone()).len();
        if rows.len() != expected {
            return Err(Error::Length { what: "bytes of tiles", expected, found: rows.len() });
        }
        out.clear();
        out.resize(tiles.len() * self.tile_bytes, 0);
        let (mut codes, mut rows) = (Codes::default(), rows);
        for (tile, packed) in tiles.zip(out.chunks_exact_mut(self.tile_bytes)) {
            let count = self.first_row(tile + 1) - self.first_row(tile);
            let (of_tile, rest) = rows.split_at(count * self.row_bytes);
            rows = rest;
            for (lane, row) in of_tile.chunks_exact(self.row_bytes).enumerate() {
                self.pack_row(row, lane, packed, &mut codes);
            }
        }
        Ok(())
    }

    fn pack_row(&self, row: &[u8], lane: usize, tile: &mut [u8], codes: &mut Codes) {
        let unit_bytes = self.layout.unit_bytes(UNIT_COLS);
        let units = row.chunks(UNIT_COLS / self.ty.block_len() * self.ty.block_bytes());
        for (row, unit) in units.zip(tile.chunks_mut(unit_bytes)) {
            match Scheme::of(self.ty) {
                None => pack_pieces(row, lane, unit),
                Some(scheme) => self.pack_blocks(&scheme, row, lane, unit, codes),
            }
        }
    }

    /// Packs one row's blocks of a quantised unit.
    fn pack_blocks(&self, scheme: &Scheme, row: &[u8], lane: usize, unit: &mut [u8], codes: &mut Codes) {
        let (minor_at, main_at) = (self.layout.minor_at(), self.layout.main_at());
        let per_file_block = self.ty.block_len() / BLOCK;
        for (index, bytes) in row.chunks_exact(self.ty.block_bytes()).enumerate() {
            split(self.ty, bytes, codes);
            let (front, main) = unit.split_at_mut(main_at);
            let (scales, minor) = front.split_at_mut(minor_at);
            let (record, side) = scales.split_at_mut(TILE_ROWS * self.layout.record);
            self.pack_scales(scheme.scaling, bytes, codes, index, lane, record, side);
            for sub in 0..per_file_block {
                let block = index * per_file_block + sub;
                pack_codes(scheme, &codes.codes[sub * BLOCK..][..BLOCK], block, lane, minor, main);
            }
        }
    }

    /// Packs the scales of file block `index` of a unit.
    #[allow(clippy::too_many_arguments, reason = "one caller; the parts of one unit")]
    fn pack_scales(
        &self,
        scaling: Scaling,
        bytes: &[u8],
        codes: &Codes,
        index: usize,
        lane: usize,
        record: &mut [u8],
        side: &mut [u8],
    ) {
        let mut put = |at: usize, bytes: &[u8]| record[at..][..bytes.len()].copy_from_slice(bytes);
        let own = lane * PIECE;
        match scaling {
            Scaling::F16 => put(own + 2 * index, &codes.d.to_le_bytes()),
            Scaling::F32 => {
                let at = index / 4 * TILE_ROWS * PIECE + own + 4 * (index % 4);
                put(at, &codes.scale.to_le_bytes());
            }
            Scaling::F16Min => {
                let at = index / 4 * TILE_ROWS * PIECE + own + 4 * (index % 4);
                put(at, &codes.d.to_le_bytes());
                put(at + 2, &codes.dmin.to_le_bytes());
            }
            Scaling::E8m0 => put(8 * lane + index, &codes.scales[..1]),
            Scaling::Super => put(8 * lane, &bytes[..8]),
            Scaling::SuperMin => put(own, &bytes[..16]),
            Scaling::Ue4m3 => put(own + 4 * index, &codes.scales[..4]),
            Scaling::Sixteenths if self.ty == GgmlType::Q3_K => put(own, &bytes[96..110]),
            Scaling::Sixteenths => {
                put(own, &codes.scales);
                side[2 * lane..][..2].copy_from_slice(&codes.d.to_le_bytes());
            }
            Scaling::SixteenthsMin => {
                put(own, &bytes[..16]);
                side[4 * lane..][..4].copy_from_slice(&bytes[80..84]);
            }
        }
    }
}

/// Copies the bytes of one row into a plane, piece by piece.
fn pack_pieces(row: &[u8], lane: usize, plane: &mut [u8]) {
    for (piece, of_rows) in row.chunks(PIECE).zip(plane.chunks_exact_mut(TILE_ROWS * PIECE)) {
        of_rows[lane * PIECE..][..piece.len()].copy_from_slice(piece);
    }
}

/// Distributes the 32 stored codes of a block over the planes of its unit. A group is processed as a word
/// of four codes.
fn pack_codes(scheme: &Scheme, codes: &[u8], block: usize, lane: usize, minor: &mut [u8], main: &mut [u8]) {
    let groups: [u32; 8] = std::array::from_fn(|g| {
        u32::from_le_bytes([codes[4 * g], codes[4 * g + 1], codes[4 * g + 2], codes[4 * g + 3]])
    });
    let table = matches!(scheme.levels, Levels::Table(_));
    match scheme.bits {
        Bits::Two | Bits::Three => put_words(main, block, lane, &crumbs(&groups, 0)),
        Bits::Eight if scheme.is_integer() => {
            put_words(main, block, lane, &groups.map(|group| group ^ 0x8080_8080));
        }
        Bits::Eight => put_words(main, block, lane, &groups),
        Bits::Four if table => put_words(main, block, lane, &words(|v| indices(groups[v], groups[v + 4]))),
        Bits::Four | Bits::Five | Bits::Six => {
            let nibbles = |v: usize| groups[v] & 0x0f0f_0f0f | (groups[v + 4] & 0x0f0f_0f0f) << 4;
            put_words(main, block, lane, &words(nibbles));
        }
    }
    match scheme.bits {
        Bits::Three => put_words(minor, block, lane, &[single(&groups, 2)]),
        Bits::Five => put_words(minor, block, lane, &[single(&groups, 4)]),
        Bits::Six => put_words(minor, block, lane, &crumbs(&groups, 4)),
        Bits::Two | Bits::Four | Bits::Eight => {}
    }
}

fn words(word: impl Fn(usize) -> u32) -> [u32; 4] {
    std::array::from_fn(word)
}

/// Returns the word of codebook indices of two groups, see the module.
fn indices(lower: u32, upper: u32) -> u32 {
    let run = |group: u32| (0..4).fold(0, |run, i| run | (group >> (8 * i) & 7) << (4 * i));
    run(lower) | run(upper) << 16 | (lower & 0x0808_0808) << 4 | upper & 0x0808_0808
}

/// Returns two bits of each code, from bit `shift` on.
fn crumbs(groups: &[u32; 8], shift: u32) -> [u32; 2] {
    std::array::from_fn(|v| {
        (0..4).fold(0, |word, i| word | (groups[4 * v + i] >> shift & 0x0303_0303) << (2 * i))
    })
}

/// Returns bit `shift` of each code.
fn single(groups: &[u32; 8], shift: u32) -> u32 {
    (0..8).fold(0, |word, g| word | (groups[g] >> shift & 0x0101_0101) << g)
}

/// Writes a row's words of block `block` into a plane.
fn put_words(plane: &mut [u8], block: usize, lane: usize, words: &[u32]) {
    for (i, word) in words.iter().enumerate() {
        // First the offset in the row, then in the plane, where the pieces of all rows lie side by side.
        let byte = 4 * (block * words.len() + i);
        let at = byte / PIECE * TILE_ROWS * PIECE + lane * PIECE + byte % PIECE;
        plane[at..][..4].copy_from_slice(&word.to_le_bytes());
    }
}
