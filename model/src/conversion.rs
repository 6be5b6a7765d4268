//! A tensor's bytes as a function of the bytes of files.
//!
//! A GGUF's tensors are regions of its file. A checkpoint's tensors may be converted to the GGUF's form on access.
//! Everything here is lossless but [`FloatMap::PlusOne`], [`FloatMap::NegativeExp`] and [`FloatMap::Reciprocal`],
//! which round once to f32.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::mmap::MappedFile;
use crate::parallel::on_all_cpus;
use crate::{Error, GgmlType};

/// Bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    /// Index into [`crate::ModelFile::files`].
    pub(crate) file: usize,
    /// From the start of the file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Conversion {
    /// The bytes of a file as they are.
    Stored(Region),
    /// Computed at opening.
    Literal(Vec<u8>),
    /// One after the other.
    Concat(Vec<Self>),
    /// Runs of rows of `row_bytes` bytes, each from a first row up to one that is not of it, in this order.
    Rows { of: Box<Self>, row_bytes: u64, runs: Vec<(u64, u64)> },
    /// `[rows, cols]` to `[cols, rows]`, elements of `size` bytes. Of several matrices each by itself.
    Transposed { of: Box<Self>, rows: u64, cols: u64, size: u64 },
    /// Floats as F32.
    Floats { of: Box<Self>, from: FloatType, map: FloatMap },
    /// Codes of two E2M1 values in a byte, the lower bits first, and E4M3 scales of 16 values, to NVFP4.
    Nvfp4 { codes: Box<Self>, scales: Box<Self> },
    /// Codes of two E2M1 values in a byte, the lower bits first, and E8M0 scales of 32 values, to MXFP4.
    Mxfp4 { codes: Box<Self>, scales: Box<Self> },
    /// Codes of a byte each to a type with f32 scales: FP8, INT8, INT5 or INT4.
    Scaled(Box<Scaled>),
    /// The values of such a matrix as F32.
    Dequantised(Box<Scaled>),
    /// Codes of two E2M1 values in a byte, the lower bits first, and E4M3 scales of 16 values or E8M0 scales of 32
    /// values, to the values as BF16, which is exact.
    Fp4Values { codes: Box<Self>, scales: Box<Self>, group: u64 },
    /// Codes of 4 or 8 bits in words of 32 to a byte each, row by row of the matrix.
    Unpacked { of: Box<Self>, packing: Packing, rows: u64, cols: u64 },
}

/// A matrix of codes with a grid of scales.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scaled {
    /// Name of the matrix in the checkpoint.
    pub(crate) tensor: String,
    pub(crate) ty: GgmlType,
    /// `[rows, cols]`; E4M3, signed bytes (INT8), or unsigned ones.
    pub(crate) codes: Conversion,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    /// F32.
    pub(crate) scales: Conversion,
    /// Rows and columns of a scale; the last of a row or column may have fewer.
    pub(crate) block: [u64; 2],
    /// What is subtracted of unsigned codes: one value, or one for each scale. INT4 needs 8.
    pub(crate) zeros: Option<Conversion>,
    /// Added to stored zeros.
    pub(crate) more: u8,
    /// Codes are parts of another matrix, transposed; scales are that matrix's. Without zeros.
    pub(crate) turned: Option<Turned>,
}

/// Equal runs of rows of a matrix, each transposed: `[runs, cols, rows of a run]` of `[runs * stride, cols]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turned {
    /// Rows between the beginnings of runs.
    pub(crate) stride: u64,
    pub(crate) cols: u64,
}

/// Places of codes in words of 32 bits, the lowest bits first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// A word has consecutive columns of a row: `[rows, cols / N]`.
    Columns { bits: u32 },
    /// A word has consecutive rows of a column: `[rows / N, cols]`.
    Rows { bits: u32 },
    /// A word has inputs of an output: `[cols / N, rows]`, as GPTQ stores weights.
    Inputs { bits: u32 },
    /// A word has eight outputs of an input, in the order 0 2 4 6 1 3 5 7: `[cols, rows / 8]`, as AWQ stores weights.
    Outputs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatType {
    F32,
    F16,
    BF16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatMap {
    Same,
    /// `1 + x`, for norms that are stored without the 1.
    PlusOne,
    /// `-exp(x)`, for decays that are stored as logarithms.
    NegativeExp,
    /// `1 / x`.
    Reciprocal,
}

impl FloatType {
    const fn size(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    fn value(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Self::F16, &[a, b]) => f32::from(half::f16::from_le_bytes([a, b])),
            (Self::BF16, &[a, b]) => f32::from(half::bf16::from_le_bytes([a, b])),
            _ => f32::NAN,
        }
    }
}

impl FloatMap {
    fn apply(self, x: f32) -> f32 {
        let x = f64::from(x);
        (match self {
            Self::Same => x,
            Self::PlusOne => 1.0 + x,
            Self::NegativeExp => -x.exp(),
            Self::Reciprocal => x.recip(),
        }) as f32
    }
}

/// Bytes of a result that a thread makes at once.
const PIECE: u64 = 1 << 20;

/// Bytes of a block's codes and scales, and of the block itself.
const NVFP4: (usize, usize) = (32, 4);
const MXFP4: (usize, usize) = (16, 1);

impl Conversion {
    /// Calls `visit` with every region that the result is made of.
    pub(crate) fn for_each_region(&self, visit: &mut impl FnMut(&Region)) {
        match self {
            Self::Stored(region) => visit(region),
            Self::Literal(_) => {}
            Self::Concat(parts) => parts.iter().for_each(|part| part.for_each_region(visit)),
            Self::Rows { of, .. } | Self::Transposed { of, .. } | Self::Floats { of, .. } => {
                of.for_each_region(visit)
            }
            Self::Nvfp4 { codes, scales }
            | Self::Mxfp4 { codes, scales }
            | Self::Fp4Values { codes, scales, .. } => {
                codes.for_each_region(visit);
                scales.for_each_region(visit);
            }
            Self::Scaled(scaled) | Self::Dequantised(scaled) => {
                for part in
                    [Some(&scaled.codes), Some(&scaled.scales), scaled.zeros.as_ref()].into_iter().flatten()
                {
                    part.for_each_region(visit);
                }
            }
            Self::Unpacked { of, .. } => of.for_each_region(visit),
        }
    }

    /// The region of a file, if the bytes are not converted.
    pub(crate) fn region(&self) -> Option<&Region> {
        match self {
            Self::Stored(region) => Some(region),
            _ => None,
        }
    }

    /// `bytes` bytes of the result, from `start` on.
    pub(crate) fn part(&self, start: u64, bytes: u64) -> Self {
        match self {
            Self::Stored(region) => {
                Self::Stored(Region { offset: region.offset.saturating_add(start), bytes, ..*region })
            }
            of => Self::Rows { of: Box::new(of.clone()), row_bytes: 1, runs: vec![(start, start + bytes)] },
        }
    }

    /// Number of bytes of the result.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Stored(region) => region.bytes,
            Self::Literal(bytes) => bytes.len() as u64,
            Self::Concat(parts) => parts.iter().map(Self::len).sum(),
            Self::Rows { row_bytes, runs, .. } => {
                runs.iter().map(|(start, end)| (end - start) * row_bytes).sum()
            }
            Self::Transposed { of, .. } => of.len(),
            Self::Floats { of, from, .. } => of.len() / from.size() * 4,
            Self::Nvfp4 { codes, scales } | Self::Mxfp4 { codes, scales } => codes.len() + scales.len(),
            Self::Scaled(scaled) => scaled.rows * (scaled.cols / GROUP) * scaled.ty.block_bytes() as u64,
            Self::Dequantised(scaled) => scaled.rows * scaled.cols * 4,
            Self::Fp4Values { codes, .. } => codes.len() * 4,
            Self::Unpacked { rows, cols, .. } => rows * cols,
        }
    }

    /// The whole result: mapped if it is a file's bytes, else a copy.
    pub(crate) fn bytes<'a>(&self, files: &'a [MappedFile]) -> Result<Cow<'a, [u8]>, Error> {
        let Self::Stored(region) = self else { return self.made(files).map(Cow::Owned) };
        let file = region.file(files)?;
        file.check_size()?;
        let range = usize::try_from(region.offset).ok().zip(usize::try_from(region.bytes).ok());
        let bytes = range.and_then(|(start, len)| file.bytes().get(start..start.checked_add(len)?));
        bytes.map(Cow::Borrowed).ok_or_else(|| region.outside(file))
    }

    /// Whether [`read`](Self::read) of a part reads no more than that part needs.
    pub(crate) fn reads_parts(&self) -> bool {
        match self {
            Self::Stored(_) | Self::Literal(_) => true,
            Self::Transposed { .. } => false,
            Self::Concat(parts) => parts.iter().all(Self::reads_parts),
            Self::Rows { of, .. } | Self::Floats { of, .. } => of.reads_parts(),
            Self::Nvfp4 { codes, scales }
            | Self::Mxfp4 { codes, scales }
            | Self::Fp4Values { codes, scales, .. } => codes.reads_parts() && scales.reads_parts(),
            Self::Scaled(scaled) | Self::Dequantised(scaled) => {
                scaled.codes.reads_parts() && scaled.scales.reads_parts()
            }
            Self::Unpacked { of, packing, .. } => {
                matches!(packing, Packing::Columns { .. } | Packing::Rows { .. }) && of.reads_parts()
            }
        }
    }

    /// The whole result, made by all CPUs if it is large.
    fn made(&self, files: &[MappedFile]) -> Result<Vec<u8>, Error> {
        let len = self.len();
        if len <= PIECE || !self.reads_parts() {
            return self.read(files, 0..len);
        }
        let mut result = vec![0; len as usize];
        let pieces = result.chunks_mut(PIECE as usize).enumerate();
        let (count, pieces, failed) = (pieces.len(), Mutex::new(pieces), OnceLock::new());
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        on_all_cpus(count, || {
            while let Some((number, piece)) = next() {
                let start = number as u64 * PIECE;
                match self.read(files, start..start + piece.len() as u64) {
                    Ok(made) => piece.copy_from_slice(&made),
                    Err(error) => drop(failed.set(error)),
                }
            }
        });
        match failed.into_inner() {
            Some(error) => Err(error),
            None => Ok(result),
        }
    }

    /// A part of the result, read without the mapping.
    pub(crate) fn read(&self, files: &[MappedFile], range: Range<u64>) -> Result<Vec<u8>, Error> {
        let whole = match self {
            Self::Stored(region) => {
                let file = region.file(files)?;
                let mut bytes = vec![0; (range.end - range.start) as usize];
                file.read_at(&mut bytes, region.offset.saturating_add(range.start))?;
                return Ok(bytes);
            }
            Self::Concat(parts) => {
                let (mut bytes, mut at) = (Vec::with_capacity((range.end - range.start) as usize), 0);
                for part in parts {
                    let end = at + part.len();
                    let (from, to) = (range.start.max(at), range.end.min(end));
                    if from < to {
                        bytes.extend(part.read(files, from - at..to - at)?);
                    }
                    at = end;
                }
                return Ok(bytes);
            }
            Self::Rows { of, row_bytes, runs } => return pick(of, *row_bytes, runs, files, range),
            Self::Floats { of, from, map } => {
                let (first, end) = (range.start / 4, range.end.div_ceil(4));
                let stored = of.read(files, first * from.size()..end * from.size())?;
                let values = stored.chunks_exact(from.size() as usize);
                let bytes = values.flat_map(|bytes| map.apply(from.value(bytes)).to_le_bytes()).collect();
                return Ok(cut(bytes, first * 4, range));
            }
            Self::Nvfp4 { codes, scales } => return read_blocks(codes, scales, NVFP4, files, range),
            Self::Mxfp4 { codes, scales } => return read_blocks(codes, scales, MXFP4, files, range),
            Self::Scaled(scaled) => {
                let row_bytes = (scaled.cols / GROUP * scaled.ty.block_bytes() as u64).max(1);
                let (first, end) = (range.start / row_bytes, range.end.div_ceil(row_bytes));
                return Ok(cut(scaled.blocks(files, first..end)?, first * row_bytes, range));
            }
            Self::Dequantised(scaled) => {
                let row_bytes = (scaled.cols * 4).max(1);
                let (first, end) = (range.start / row_bytes, range.end.div_ceil(row_bytes));
                return Ok(cut(scaled.values(files, first..end)?, first * row_bytes, range));
            }
            Self::Fp4Values { codes, scales, group } => {
                let (first, end) = (range.start / 2 / group, range.end.div_ceil(2 * group));
                let codes = codes.read(files, first * group / 2..end * group / 2)?;
                let scales = scales.read(files, first..end)?;
                let values =
                    codes.chunks_exact(*group as usize / 2).zip(scales).flat_map(|(codes, scale)| {
                        let scale =
                            if *group == 16 { e4m3(scale) } else { 2f32.powi(i32::from(scale) - 127) };
                        codes.iter().flat_map(move |code| {
                            let values =
                                [code & 15, code >> 4].map(|code| half::bf16::from_f32(e2m1(code) * scale));
                            values.into_iter().flat_map(|value| value.to_le_bytes())
                        })
                    });
                return Ok(cut(values.collect(), first * group * 2, range));
            }
            Self::Transposed { of, rows, cols, size } => {
                let matrix = (rows * cols * size).max(1);
                let (first, end) = (range.start / matrix, range.end.div_ceil(matrix));
                let of = of.read(files, first * matrix..end * matrix)?;
                let bytes = transposed(&of, *rows as usize, *cols as usize, *size as usize);
                return Ok(cut(bytes, first * matrix, range));
            }
            Self::Unpacked { of, packing: packing @ Packing::Columns { bits }, cols, .. } if *cols > 0 => {
                let (first, end) = (range.start / cols, range.end.div_ceil(*cols));
                let row_bytes = 4 * cols.div_ceil(32 / u64::from(*bits));
                let words = of.read(files, first * row_bytes..end * row_bytes)?;
                let codes = packing.unpack(&words, (end - first) as usize, *cols as usize);
                return Ok(cut(codes, first * cols, range));
            }
            Self::Unpacked { of, packing: packing @ Packing::Rows { bits }, cols, .. } if *cols > 0 => {
                let per_word = 32 / u64::from(*bits);
                let (first, end) =
                    (range.start / cols / per_word, range.end.div_ceil(*cols).div_ceil(per_word));
                let words = of.read(files, 4 * first * cols..4 * end * cols)?;
                let rows = ((end - first) * per_word) as usize;
                let codes = packing.unpack(&words, rows, *cols as usize);
                return Ok(cut(codes, first * per_word * cols, range));
            }
            Self::Literal(bytes) => bytes.clone(),
            Self::Unpacked { of, packing, rows, cols } => {
                packing.unpack(&of.whole(files)?, *rows as usize, *cols as usize)
            }
        };
        Ok(cut(whole, 0, range))
    }

    fn whole(&self, files: &[MappedFile]) -> Result<Vec<u8>, Error> {
        self.read(files, 0..self.len())
    }
}

/// The bytes `range` of a result of which `bytes` are those from `start` on.
fn cut(mut bytes: Vec<u8>, start: u64, range: Range<u64>) -> Vec<u8> {
    bytes.truncate((range.end - start) as usize);
    bytes.drain(..((range.start - start) as usize).min(bytes.len()));
    bytes
}

/// A part of the runs of rows of `of`.
fn pick(
    of: &Conversion,
    row_bytes: u64,
    runs: &[(u64, u64)],
    files: &[MappedFile],
    range: Range<u64>,
) -> Result<Vec<u8>, Error> {
    // The pieces of the runs that are in the range, as bytes of `of`.
    let (mut pieces, mut at) = (Vec::new(), 0);
    for &(start, end) in runs {
        let bytes = (end - start) * row_bytes;
        let (from, to) = (range.start.max(at), range.end.min(at + bytes));
        if from < to {
            pieces.push(start * row_bytes + from - at..start * row_bytes + to - at);
        }
        at += bytes;
    }
    let needed = range.end - range.start;
    let mut picked = Vec::with_capacity(needed as usize);
    // Pieces that are close together are read at once.
    for near in pieces.chunk_by(|before, after| after.start.abs_diff(before.end) <= needed) {
        let low = near.iter().map(|piece| piece.start).min().unwrap_or(0);
        let high = near.iter().map(|piece| piece.end).max().unwrap_or(0);
        if high - low <= 4 * needed {
            let bytes = of.read(files, low..high)?;
            for piece in near {
                picked.extend_from_slice(&bytes[(piece.start - low) as usize..(piece.end - low) as usize]);
            }
        } else {
            for piece in near {
                picked.extend(of.read(files, piece.clone())?);
            }
        }
    }
    Ok(picked)
}

/// A part of the blocks of `codes` and `scales`.
fn read_blocks(
    codes: &Conversion,
    scales: &Conversion,
    sizes: (usize, usize),
    files: &[MappedFile],
    range: Range<u64>,
) -> Result<Vec<u8>, Error> {
    let (code_bytes, scale_bytes) = (sizes.0 as u64, sizes.1 as u64);
    let block_bytes = code_bytes + scale_bytes;
    let (first, end) = (range.start / block_bytes, range.end.div_ceil(block_bytes));
    let codes = codes.read(files, first * code_bytes..end * code_bytes)?;
    let scales = scales.read(files, first * scale_bytes..end * scale_bytes)?;
    Ok(cut(blocks(&codes, &scales, sizes), first * block_bytes, range))
}

impl Region {
    fn file<'a>(&self, files: &'a [MappedFile]) -> Result<&'a MappedFile, Error> {
        files.get(self.file).ok_or_else(|| Error::MissingTensor { tensor: format!("of file {}", self.file) })
    }

    fn outside(&self, file: &MappedFile) -> Error {
        let (was, now) = (self.offset.saturating_add(self.bytes), file.bytes().len() as u64);
        Error::Shrunk { path: file.path().to_owned(), was, now }
    }
}

/// Values of a scale of [`Scaled`]'s types.
const GROUP: u64 = 32;

/// Codes of some rows, with the scales and zeros of the grid from one of its places on.
struct Parts {
    codes: Vec<u8>,
    scales: Vec<u8>,
    zeros: Vec<u8>,
    first: usize,
}

impl Scaled {
    /// Whether the columns are whole blocks of a type with f32 scales, all of a block with one scale.
    pub(crate) fn has_blocks(&self) -> bool {
        self.cols.is_multiple_of(GROUP) && (self.block[1].is_multiple_of(GROUP) || self.block[1] >= self.cols)
    }

    /// The place of an element's scale.
    fn scale_at(&self, row: usize, col: usize) -> usize {
        let [row_block, col_block] = self.block.map(|len| len as usize);
        let (row, col, cols) = match self.turned {
            None => (row, col, self.cols as usize),
            Some(Turned { stride, cols }) => {
                let cols = cols as usize;
                (row / cols * stride as usize + col, row % cols, cols)
            }
        };
        row / row_block * cols.div_ceil(col_block) + col / col_block
    }

    fn parts(&self, files: &[MappedFile], rows: &Range<u64>) -> Result<Parts, Error> {
        let per_row = self.cols.div_ceil(self.block[1]);
        // Scales of these rows, of a transposed matrix all.
        let grid = match self.turned {
            None => rows.start / self.block[0] * per_row..rows.end.div_ceil(self.block[0]) * per_row,
            Some(_) => 0..self.scales.len() / 4,
        };
        let scales = self.scales.read(files, 4 * grid.start..4 * grid.end)?;
        let codes = self.codes.read(files, rows.start * self.cols..rows.end * self.cols)?;
        let zeros = match &self.zeros {
            None => Vec::new(),
            Some(zeros) if zeros.len() == 1 => zeros.read(files, 0..1)?,
            Some(zeros) => {
                let zeros = zeros.read(files, grid.clone())?;
                zeros.into_iter().map(|zero| zero.wrapping_add(self.more)).collect()
            }
        };
        Ok(Parts { codes, scales, zeros, first: grid.start as usize })
    }

    /// The zero of a place of the grid, if there are zeros.
    fn zero(&self, parts: &Parts, at: usize) -> Result<Option<u8>, Error> {
        let zero = match parts.zeros.as_slice() {
            [] => return Ok(None),
            [zero] => *zero,
            zeros => zeros.get(at - parts.first).copied().unwrap_or(0),
        };
        if self.ty == GgmlType::INT4 && zero != 8 {
            return Err(Error::ZeroPoint { tensor: self.tensor.clone(), found: zero });
        }
        Ok(Some(zero))
    }

    /// Refuses codes of a block that are no numbers of its type.
    fn check(&self, codes: &[u8], zero: Option<u8>) -> Result<(), Error> {
        if self.ty == GgmlType::FP8 && codes.iter().any(|code| code & 0x7f == 0x7f) {
            return Err(Error::NotANumber { tensor: self.tensor.clone() });
        }
        let is_outside = |zero: u8, code: u8| i8::try_from(i16::from(code) - i16::from(zero)).is_err();
        match zero.filter(|&zero| codes.iter().any(|&code| is_outside(zero, code))) {
            Some(found) => Err(Error::ZeroPoint { tensor: self.tensor.clone(), found }),
            None => Ok(()),
        }
    }

    /// The values of these rows: each is its code times its scale, rounded once.
    fn values(&self, files: &[MappedFile], rows: Range<u64>) -> Result<Vec<u8>, Error> {
        let parts = self.parts(files, &rows)?;
        let mut result = Vec::with_capacity(parts.codes.len() * 4);
        for (row, codes) in (rows.start as usize..).zip(parts.codes.chunks_exact(self.cols as usize)) {
            for (col, &code) in codes.iter().enumerate() {
                let at = self.scale_at(row, col);
                let place = 4 * (at - parts.first);
                let scale =
                    parts.scales.get(place..place + 4).map_or(0.0, |bytes| FloatType::F32.value(bytes));
                let value = match (self.ty, self.zero(&parts, at)?) {
                    (GgmlType::FP8, _) => {
                        self.check(&[code], None)?;
                        e4m3(code)
                    }
                    (GgmlType::INT8, None) => f32::from(code as i8),
                    (_, zero) => f32::from(i16::from(code) - i16::from(zero.unwrap_or(8))),
                };
                result.extend((value * scale).to_le_bytes());
            }
        }
        Ok(result)
    }

    /// The blocks of these rows.
    fn blocks(&self, files: &[MappedFile], rows: Range<u64>) -> Result<Vec<u8>, Error> {
        let parts = self.parts(files, &rows)?;
        let mut result = Vec::with_capacity(parts.codes.len() / 32 * self.ty.block_bytes());
        for (row, codes) in (rows.start as usize..).zip(parts.codes.chunks_exact(self.cols as usize)) {
            for (block, codes) in codes.as_chunks::<32>().0.iter().enumerate() {
                let at = self.scale_at(row, 32 * block);
                let place = 4 * (at - parts.first);
                result.extend_from_slice(parts.scales.get(place..place + 4).unwrap_or(&[0; 4]));
                let zero = self.zero(&parts, at)?;
                self.check(codes, zero.filter(|_| self.ty == GgmlType::INT8))?;
                put_codes(self.ty, codes, zero.unwrap_or(0), &mut result);
            }
        }
        Ok(result)
    }
}

/// An E4M3 value that is a number.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match exponent {
        0 => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// An E2M1 value.
fn e2m1(code: u8) -> f32 {
    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { size } else { -size }
}

/// Appends the codes of a block in the layout of `ty`.
fn put_codes(ty: GgmlType, codes: &[u8; 32], zero: u8, result: &mut Vec<u8>) {
    let (low, high) = codes.split_at(16);
    match ty {
        GgmlType::INT4 => result.extend(low.iter().zip(high).map(|(low, high)| low & 15 | high << 4)),
        GgmlType::INT5 => {
            // Differences from the zero, each plus 16.
            let code = |code: u8| (code.wrapping_sub(zero).wrapping_add(16)) & 31;
            let fifth =
                |bits: u32, (place, &value): (usize, &u8)| bits | u32::from(code(value) >> 4) << place;
            result.extend(codes.iter().enumerate().fold(0, fifth).to_le_bytes());
            result.extend(low.iter().zip(high).map(|(low, high)| code(*low) & 15 | (code(*high) & 15) << 4));
        }
        // Unsigned codes become signed ones.
        GgmlType::INT8 => result.extend(codes.iter().map(|code| code.wrapping_sub(zero))),
        _ => result.extend_from_slice(codes),
    }
}

impl Packing {
    fn unpack(self, of: &[u8], rows: usize, cols: usize) -> Vec<u8> {
        let word = |at: usize| {
            of.get(4 * at..4 * at + 4)
                .map_or(0, |bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        let code =
            |word: u32, place: usize, bits: u32| (word >> (place as u32 * bits) & ((1 << bits) - 1)) as u8;
        let mut codes = Vec::with_capacity(rows * cols);
        for row in 0..rows {
            codes.extend((0..cols).map(|col| match self {
                Self::Columns { bits } => {
                    let per_word = 32 / bits as usize;
                    code(word(row * cols.div_ceil(per_word) + col / per_word), col % per_word, bits)
                }
                Self::Rows { bits } => {
                    let per_word = 32 / bits as usize;
                    code(word(row / per_word * cols + col), row % per_word, bits)
                }
                Self::Inputs { bits } => {
                    let per_word = 32 / bits as usize;
                    code(word(col / per_word * rows + row), col % per_word, bits)
                }
                Self::Outputs => {
                    // The place of each output in its word.
                    const PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
                    code(word(col * (rows / 8) + row / 8), PLACES[row % 8], 4)
                }
            }));
        }
        codes
    }
}

fn transposed(of: &[u8], rows: usize, cols: usize, size: usize) -> Vec<u8> {
    let mut result = vec![0; of.len()];
    let matrix = (rows * cols * size).max(1);
    for (of, result) in of.chunks_exact(matrix).zip(result.chunks_exact_mut(matrix)) {
        for (row, line) in of.chunks_exact(cols * size).enumerate() {
            for (col, element) in line.chunks_exact(size).enumerate() {
                let at = (col * rows + row) * size;
                result[at..at + size].copy_from_slice(element);
            }
        }
    }
    result
}

/// GGUF blocks of scales and codes. There the first half of a scale's values is in the lower bits.
fn blocks(codes: &[u8], scales: &[u8], (code_bytes, scale_bytes): (usize, usize)) -> Vec<u8> {
    let group = code_bytes / scale_bytes;
    let mut result = Vec::with_capacity(codes.len() + scales.len());
    for (codes, scales) in codes.chunks_exact(code_bytes).zip(scales.chunks_exact(scale_bytes)) {
        result.extend_from_slice(scales);
        for group in codes.chunks_exact(group) {
            let (low, high) = group.split_at(group.len() / 2);
            for (low, high) in low.as_chunks::<4>().0.iter().zip(high.as_chunks::<4>().0) {
                result.extend_from_slice(&(spread(*low) | spread(*high) << 4).to_le_bytes());
            }
        }
    }
    result
}

/// The eight values of 4 bits to a byte each.
fn spread(codes: [u8; 4]) -> u64 {
    let halves = u64::from(u32::from_le_bytes(codes));
    let quarters = (halves | halves << 16) & 0x0000_ffff_0000_ffff;
    let bytes = (quarters | quarters << 8) & 0x00ff_00ff_00ff_00ff;
    (bytes | bytes << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

#[cfg(test)]
mod tests;
