//! The tensors of a checkpoint's safetensors files, with those of a quantised matrix joined.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ::safetensors::Dtype;
use serde::Deserialize;

use super::config::Quantisation;
use super::{CheckpointError, Folder};
use crate::conversion::{Conversion, FloatMap, FloatType, Packing, Region, Scaled};
use crate::mmap::MappedFile;
use crate::{Error, GgmlType, safetensors};

/// Weights in one file.
pub const SINGLE: &str = "model.safetensors";
/// The list of the files of a set.
pub const INDEX: &str = "model.safetensors.index.json";
/// Most files of a set.
pub const MAX_FILES: usize = 4096;
/// Most columns whose places are exact as F32.
const MAX_ORDERED_COLS: u64 = 1 << 24;

/// A matrix or vector of a checkpoint.
#[derive(Debug, Clone)]
pub(super) struct StoredTensor {
    pub(super) ty: GgmlType,
    /// The last dimension is contiguous.
    pub(super) shape: Vec<u64>,
    pub(super) bytes: Conversion,
}

/// Tensors by name. A quantised matrix is one of them, with its scale beside it as `STEM.scale`, and the order of
/// its columns as `STEM.order`.
pub(super) type StoredTensors = BTreeMap<String, StoredTensor>;

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Whether `folder` has weights.
pub(super) fn exist(folder: &Path) -> bool {
    folder.join(SINGLE).exists() || folder.join(INDEX).exists()
}

/// Files of the weights: `only`, or those of the index, or the single one.
pub(super) fn files(folder: &Folder<'_>, only: Option<&Path>) -> Result<Vec<PathBuf>, Error> {
    let index = folder.path.join(INDEX);
    let names: Option<BTreeSet<String>> = match index.exists() {
        true => Some(folder.json::<Index>(INDEX)?.weight_map.into_values().collect()),
        false => None,
    };
    let is_in_set = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.zip(names.as_ref()).is_some_and(|(name, names)| names.contains(name))
    };
    match (only, &names) {
        (Some(only), _) if !is_in_set(only) => Ok(vec![only.to_owned()]),
        (_, Some(names)) => {
            let plain = |name: &&String| Path::new(name.as_str()).file_name() != Some(name.as_ref());
            if names.len() > MAX_FILES || names.iter().any(|name| plain(&name)) {
                let found = names.iter().find(plain).map_or(format!("{} files", names.len()), Clone::clone);
                let needs = format!("at most {MAX_FILES} names of files in the folder");
                return Err(folder.setting(INDEX, "weight_map", found, &needs));
            }
            Ok(names.iter().map(|name| folder.path.join(name)).collect())
        }
        _ => Ok(vec![folder.path.join(SINGLE)]),
    }
}

/// A tensor as safetensors has it.
struct Raw {
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Conversion,
}

/// Opens the files and joins the tensors of quantised matrices. Tensors for which `unused` is true are left out.
pub(super) fn open(
    paths: &[PathBuf],
    quantisation: &Quantisation,
    unused: fn(&str) -> bool,
) -> Result<(Vec<MappedFile>, StoredTensors), Error> {
    let (mut files, mut raw) = (Vec::with_capacity(paths.len()), BTreeMap::new());
    for (number, path) in paths.iter().enumerate() {
        let file = MappedFile::open(path)?;
        let found = safetensors::parse(file.bytes())
            .map_err(|source| CheckpointError::Malformed { path: path.clone(), source })?;
        for safetensors::Tensor { name, dtype, shape, offset, bytes } in found {
            if unused(&name) {
                continue;
            }
            let region = Region { file: number, offset, bytes };
            let shape = shape.into_iter().map(|dim| dim as u64).collect();
            let tensor = Raw { dtype, shape, bytes: Conversion::Stored(region) };
            if raw.insert(name.clone(), tensor).is_some() {
                return Err(CheckpointError::SameTensor { first: name.clone(), second: name }.into());
            }
        }
        files.push(file);
    }
    let joined = Join { files: &files, quantisation, raw, joined: StoredTensors::new() }.run()?;
    Ok((files, joined))
}

/// Joins the tensors of quantised matrices.
struct Join<'a> {
    files: &'a [MappedFile],
    quantisation: &'a Quantisation,
    /// What is not joined yet.
    raw: BTreeMap<String, Raw>,
    joined: StoredTensors,
}

impl Join<'_> {
    fn run(mut self) -> Result<StoredTensors, Error> {
        let names: Vec<(String, Dtype)> =
            self.raw.iter().map(|(name, raw)| (name.clone(), raw.dtype)).collect();
        for (name, dtype) in &names {
            if let Some(stem) = name.strip_suffix("_blocks") {
                self.mxfp4_blocks(stem)?;
            } else if let Some(stem) = name.strip_suffix(".weight_packed") {
                match dtype {
                    Dtype::I32 => self.packed_integers(stem, name)?,
                    _ => self.fp4(stem, name)?,
                }
            } else if let Some(stem) = name.strip_suffix(".qweight") {
                self.gptq_or_awq(stem, name)?;
            } else if let Some(stem) = name.strip_suffix(".weight") {
                match dtype {
                    Dtype::U8 => self.fp4(stem, name)?,
                    Dtype::F8_E4M3 => self.bytes(stem, name, GgmlType::FP8)?,
                    Dtype::I8 => self.bytes(stem, name, GgmlType::INT8)?,
                    _ => {}
                }
            }
        }
        for (name, Raw { dtype, shape, bytes }) in self.raw {
            // For engines that quantise activations or the cache.
            if ["input", "q", "k", "v"].iter().any(|of| name.ends_with(&format!("{of}_zero_point"))) {
                continue;
            }
            let ty = match dtype {
                Dtype::F32 => GgmlType::F32,
                Dtype::F16 => GgmlType::F16,
                Dtype::BF16 => GgmlType::BF16,
                found => return Err(CheckpointError::TensorType { tensor: name, found }.into()),
            };
            self.joined.insert(name, StoredTensor { ty, shape, bytes });
        }
        Ok(self.joined)
    }

    fn take(&mut self, name: &str) -> Result<Raw, Error> {
        self.raw.remove(name).ok_or_else(|| Error::MissingTensor { tensor: name.to_owned() })
    }

    /// Joins the codes `name` of two values in a byte with their scales: E4M3 for 16 values and one of the whole
    /// matrix (NVFP4), or E8M0 for 32 values (MXFP4).
    fn fp4(&mut self, stem: &str, name: &str) -> Result<(), Error> {
        let codes = self.take(name)?;
        let unsupported = || CheckpointError::TensorType { tensor: name.to_owned(), found: codes.dtype };
        let scales = self.raw.remove(&format!("{stem}.weight_scale")).ok_or_else(unsupported)?;
        let (&[rows, packed], Dtype::U8) = (codes.shape.as_slice(), codes.dtype) else {
            return Err(unsupported().into());
        };
        let cols = packed.saturating_mul(2);
        let (ty, group) = match scales.dtype {
            Dtype::F8_E4M3 => (GgmlType::NVFP4, 16),
            Dtype::U8 => (GgmlType::MXFP4, 32),
            _ => return Err(unsupported().into()),
        };
        check_columns(name, cols, group)?;
        check_scales(name, &scales.shape, &[rows, cols / group])?;
        let (codes, scales) = (Box::new(codes.bytes), Box::new(scales.bytes));
        // Rows that are not whole blocks have no other type.
        let whole = cols.is_multiple_of(ty.block_len() as u64);
        let plain = |codes, scales| Conversion::Fp4Values { codes, scales, group };
        let bytes = match ty {
            GgmlType::NVFP4 => {
                // One divides by its scale, the other multiplies.
                let (divisor, factor) =
                    (format!("{stem}.weight_global_scale"), format!("{stem}.weight_scale_2"));
                let scale = match self.raw.remove(&divisor) {
                    Some(scale) => scalar(stem, scale, FloatMap::Reciprocal)?,
                    None => scalar(stem, self.take(&factor)?, FloatMap::Same)?,
                };
                self.joined.insert(format!("{stem}.scale"), scale);
                if whole { Conversion::Nvfp4 { codes, scales } } else { plain(codes, scales) }
            }
            _ => Conversion::Mxfp4 { codes, scales },
        };
        let ty = if whole { ty } else { GgmlType::BF16 };
        self.insert(stem, StoredTensor { ty, shape: vec![rows, cols], bytes })
    }

    /// Inserts the matrix of a module, and its scales of activations, which are for engines that quantise these.
    fn insert(&mut self, stem: &str, matrix: StoredTensor) -> Result<(), Error> {
        for part in ["input_scale", "input_global_scale", "k_scale", "v_scale"] {
            if let Some(scale) = self.raw.remove(&format!("{stem}.{part}")) {
                let (part, map) = match part {
                    "input_global_scale" => ("input_scale", FloatMap::Reciprocal),
                    part => (part, FloatMap::Same),
                };
                self.joined.insert(format!("{stem}.{part}"), scalar(stem, scale, map)?);
            }
        }
        self.joined.insert(format!("{stem}.weight"), matrix);
        Ok(())
    }

    /// Joins E4M3 values, or signed bytes, with the scales of the matrix, of each row, or of blocks.
    fn bytes(&mut self, stem: &str, name: &str, ty: GgmlType) -> Result<(), Error> {
        let codes = self.take(name)?;
        let unsupported = || CheckpointError::TensorType { tensor: name.to_owned(), found: codes.dtype };
        let &[rows, cols] = codes.shape.as_slice() else { return Err(unsupported().into()) };
        check_columns(name, cols, 1)?;
        let scales = match self.raw.remove(&format!("{stem}.weight_scale_inv")) {
            Some(scales) => scales,
            None => self.raw.remove(&format!("{stem}.weight_scale")).ok_or_else(unsupported)?,
        };
        let [row_block, col_block] = self.quantisation.block;
        let grid = [rows.div_ceil(row_block), cols.div_ceil(col_block)];
        let block = match *scales.shape.as_slice() {
            [] | [1] => [rows, cols],
            [found] | [found, 1] if found == rows => [1, cols],
            [1, 1] if grid != [1, 1] => [rows, cols],
            [found, groups] if found == rows && [found, groups] != grid => {
                [1, self.group_of(name, cols, groups)?]
            }
            _ => {
                check_scales(name, &scales.shape, &grid)?;
                [row_block, col_block]
            }
        };
        self.scaled(
            stem,
            Scaled {
                tensor: name.to_owned(),
                ty,
                codes: codes.bytes,
                rows,
                cols,
                scales: floats(stem, scales.dtype, scales.bytes)?,
                block,
                zeros: None,
                more: 0,
                turned: None,
            },
        )
    }

    /// A matrix of a type with blocks; of its values if it has no whole blocks, or codes too far from their zeros.
    fn scaled(&mut self, stem: &str, scaled: Scaled) -> Result<(), Error> {
        let (ty, shape) = (scaled.ty, vec![scaled.rows, scaled.cols]);
        let far = ty == GgmlType::INT8 && scaled.zeros.as_ref().is_some_and(|zeros| zeros.len() > 1);
        let (ty, bytes) = match scaled.has_blocks() && (!far || self.quantisation.symmetric) {
            true => (ty, Conversion::Scaled(Box::new(scaled))),
            false => (GgmlType::F32, Conversion::Dequantised(Box::new(scaled))),
        };
        self.insert(stem, StoredTensor { ty, shape, bytes })
    }

    /// Columns of a scale: of the sizes in the settings the one that gives `groups`, else equal parts.
    fn group_of(&self, tensor: &str, cols: u64, groups: u64) -> Result<u64, Error> {
        let fits = |group: &u64| cols.div_ceil(*group) == groups;
        let equal = || cols.checked_div(groups).filter(|group| group.saturating_mul(groups) == cols);
        let group = if groups == 1 { None } else { self.quantisation.groups.iter().copied().find(fits) };
        group.or_else(equal).filter(|&group| group > 0).ok_or_else(|| {
            let tensor = tensor.to_owned();
            CheckpointError::Columns { tensor, found: cols, block: groups }.into()
        })
    }

    /// Joins compressed-tensors' integers in words of 32 bits: offset by half of their range, or with zero points.
    fn packed_integers(&mut self, stem: &str, name: &str) -> Result<(), Error> {
        let codes = self.take(name)?;
        let unsupported = || CheckpointError::TensorType { tensor: name.to_owned(), found: codes.dtype };
        let scales = self.take(&format!("{stem}.weight_scale"))?;
        let shape = self.take(&format!("{stem}.weight_shape"))?;
        let shape = self.integers(stem, &shape)?;
        let (&[rows, words], &[_, cols]) = (codes.shape.as_slice(), shape.as_slice()) else {
            return Err(unsupported().into());
        };
        let bits = [4_u32, 8].into_iter().find(|bits| words == cols.div_ceil(32 / u64::from(*bits)));
        let bits = bits.ok_or_else(unsupported)?;
        check_columns(name, cols, 1)?;
        let &[scale_rows, groups] = scales.shape.as_slice() else { return Err(unsupported().into()) };
        check_scales(name, &[scale_rows], &[rows])?;
        let group = self.group_of(name, cols, groups)?;
        let zeros = self.raw.remove(&format!("{stem}.weight_zero_point"));
        let ty = match (bits, &zeros) {
            (8, _) => GgmlType::INT8,
            (_, None) => GgmlType::INT4,
            (_, Some(_)) => GgmlType::INT5,
        };
        let zeros = match zeros {
            // Packed along the outputs.
            Some(zeros) => {
                check_scales(name, &zeros.shape, &[rows.div_ceil(32 / u64::from(bits)), groups])?;
                let of = Box::new(zeros.bytes);
                Some(Conversion::Unpacked { of, packing: Packing::Rows { bits }, rows, cols: groups })
            }
            None => (bits == 8).then(|| Conversion::Literal(vec![128])),
        };
        let packing = Packing::Columns { bits };
        let codes = Conversion::Unpacked { of: Box::new(codes.bytes), packing, rows, cols };
        let codes = self.ordered(stem, &format!("{stem}.weight_g_idx"), [rows, cols, group], codes)?;
        self.scaled(
            stem,
            Scaled {
                tensor: name.to_owned(),
                ty,
                codes,
                rows,
                cols,
                scales: floats(stem, scales.dtype, scales.bytes)?,
                block: [1, group],
                zeros,
                more: 0,
                turned: None,
            },
        )
    }

    /// Joins GPTQ's or AWQ's codes with their scales and zero points, all of which have the inputs first.
    fn gptq_or_awq(&mut self, stem: &str, name: &str) -> Result<(), Error> {
        let codes = self.take(name)?;
        let &Quantisation { awq, zeros_less_one, symmetric, .. } = self.quantisation;
        let unsupported = || CheckpointError::TensorType { tensor: name.to_owned(), found: codes.dtype };
        let (scales, zeros) = (self.take(&format!("{stem}.scales"))?, self.take(&format!("{stem}.qzeros"))?);
        let (&[first, second], &[groups, outputs]) = (codes.shape.as_slice(), scales.shape.as_slice()) else {
            return Err(unsupported().into());
        };
        // Matrices may differ: the words of the zeros of all outputs tell.
        let words = zeros.shape.last().copied().unwrap_or(0);
        let bits = [4_u32, 8].into_iter().find(|bits| words == outputs.div_ceil(32 / u64::from(*bits)));
        let bits = bits.unwrap_or(4);
        let per_word = 32 / u64::from(bits);
        let (cols, rows) =
            if awq { (first, second.saturating_mul(8)) } else { (first.saturating_mul(per_word), second) };
        check_columns(name, cols, 1)?;
        check_scales(name, &[outputs], &[rows])?;
        check_scales(name, &zeros.shape, &[groups, rows.div_ceil(per_word)])?;
        if !rows.is_multiple_of(per_word) {
            return Err(
                CheckpointError::Columns { tensor: name.to_owned(), found: rows, block: per_word }.into()
            );
        }
        let group = self.group_of(name, cols, groups)?;
        let packing = if awq { Packing::Outputs } else { Packing::Inputs { bits } };
        let codes = Conversion::Unpacked { of: Box::new(codes.bytes), packing, rows, cols };
        let codes = self.ordered(stem, &format!("{stem}.g_idx"), [rows, cols, group], codes)?;
        let upright = |of: Conversion, size: u64| Conversion::Transposed {
            of: Box::new(of),
            rows: groups,
            cols: rows,
            size,
        };
        let of = Box::new(zeros.bytes);
        let zeros = match awq {
            true => Conversion::Unpacked { of, packing: Packing::Outputs, rows, cols: groups },
            false => upright(
                Conversion::Unpacked { of, packing: Packing::Columns { bits }, rows: groups, cols: rows },
                1,
            ),
        };
        let size = if scales.dtype == Dtype::F32 { 4 } else { 2 };
        self.scaled(
            stem,
            Scaled {
                tensor: name.to_owned(),
                ty: match (bits, symmetric) {
                    (8, _) => GgmlType::INT8,
                    (_, true) => GgmlType::INT4,
                    (_, false) => GgmlType::INT5,
                },
                codes,
                rows,
                cols,
                scales: floats(stem, scales.dtype, upright(scales.bytes, size))?,
                block: [1, group],
                zeros: Some(zeros),
                more: u8::from(zeros_less_one),
                turned: None,
            },
        )
    }

    /// The codes with the columns of each group side by side. If tensor `name` gives another order (desc_act), the
    /// columns' places before go to `STEM.order`.
    fn ordered(
        &mut self,
        stem: &str,
        name: &str,
        [rows, cols, group]: [u64; 3],
        codes: Conversion,
    ) -> Result<Conversion, Error> {
        let Some(raw) = self.raw.remove(name) else { return Ok(codes) };
        let groups = self.integers(stem, &raw)?;
        if groups.iter().enumerate().all(|(col, &found)| found == col as u64 / group) {
            return Ok(codes);
        }
        let mut order: Vec<u64> = (0..groups.len() as u64).collect();
        order.sort_by_key(|&col| groups[col as usize]);
        let whole = |(place, &col): (usize, &u64)| groups[col as usize] == place as u64 / group;
        if groups.len() as u64 != cols || cols > MAX_ORDERED_COLS || !order.iter().enumerate().all(whole) {
            return Err(CheckpointError::Order { tensor: name.to_owned(), cols, group }.into());
        }
        let places: Vec<f32> = order.iter().map(|&col| col as f32).collect();
        self.joined.insert(format!("{stem}.order"), StoredTensor::literal(&places));
        let by_column = Conversion::Transposed { of: Box::new(codes), rows, cols, size: 1 };
        let runs = order.into_iter().map(|col| (col, col + 1)).collect();
        let by_column = Conversion::Rows { of: Box::new(by_column), row_bytes: rows, runs };
        Ok(Conversion::Transposed { of: Box::new(by_column), rows: cols, cols: rows, size: 1 })
    }

    /// The values of a small tensor of integers.
    fn integers(&self, stem: &str, raw: &Raw) -> Result<Vec<u64>, Error> {
        let bytes = raw.bytes.bytes(self.files)?;
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let size = match raw.dtype {
            Dtype::I64 => 8,
            Dtype::I32 => 4,
            found => {
                return Err(CheckpointError::TensorType {
                    tensor: format!("{stem}'s shape or order"),
                    found,
                }
                .into());
            }
        };
        Ok(bytes.chunks_exact(size).map(number).collect())
    }

    /// Joins gpt-oss's experts: codes `[experts, rows, blocks, 16]` and scales `[experts, rows, blocks]`.
    fn mxfp4_blocks(&mut self, stem: &str) -> Result<(), Error> {
        let name = format!("{stem}_blocks");
        let (codes, scales) = (self.take(&name)?, self.take(&format!("{stem}_scales"))?);
        let (&[experts, rows, blocks, 16], Dtype::U8, Dtype::U8) =
            (codes.shape.as_slice(), codes.dtype, scales.dtype)
        else {
            return Err(CheckpointError::TensorType { tensor: name, found: codes.dtype }.into());
        };
        check_scales(&name, &scales.shape, &[experts, rows, blocks])?;
        let bytes = Conversion::Mxfp4 { codes: Box::new(codes.bytes), scales: Box::new(scales.bytes) };
        let shape = vec![experts, rows, blocks.saturating_mul(32)];
        self.joined.insert(stem.to_owned(), StoredTensor { ty: GgmlType::MXFP4, shape, bytes });
        Ok(())
    }
}

fn check_columns(tensor: &str, cols: u64, block: u64) -> Result<(), Error> {
    match cols.is_multiple_of(block) && cols > 0 {
        true => Ok(()),
        false => Err(CheckpointError::Columns { tensor: tensor.to_owned(), found: cols, block }.into()),
    }
}

fn check_scales(tensor: &str, found: &[u64], expected: &[u64]) -> Result<(), Error> {
    match found == expected {
        true => Ok(()),
        false => Err(CheckpointError::ScaleShape {
            tensor: tensor.to_owned(),
            found: found.to_vec(),
            expected: expected.to_vec(),
        }
        .into()),
    }
}

/// Scales as F32.
fn floats(stem: &str, dtype: Dtype, of: Conversion) -> Result<Conversion, Error> {
    let from = match dtype {
        Dtype::F32 => return Ok(of),
        Dtype::F16 => FloatType::F16,
        Dtype::BF16 => FloatType::BF16,
        found => return Err(CheckpointError::TensorType { tensor: format!("{stem}'s scale"), found }.into()),
    };
    Ok(Conversion::Floats { of: Box::new(of), from, map: FloatMap::Same })
}

/// A scale of one element, or of one for each expert, as F32.
fn scalar(stem: &str, raw: Raw, map: FloatMap) -> Result<StoredTensor, Error> {
    let from = match raw.dtype {
        Dtype::F32 => FloatType::F32,
        Dtype::F16 => FloatType::F16,
        Dtype::BF16 => FloatType::BF16,
        found => return Err(CheckpointError::TensorType { tensor: format!("{stem}'s scale"), found }.into()),
    };
    let elements = raw.shape.iter().fold(1_u64, |all, &dim| all.saturating_mul(dim));
    if elements != 1 {
        let tensor = format!("{stem}'s scale");
        return Err(CheckpointError::ScaleShape { tensor, found: raw.shape, expected: vec![1] }.into());
    }
    let bytes = Conversion::Floats { of: Box::new(raw.bytes), from, map };
    Ok(StoredTensor { ty: GgmlType::F32, shape: vec![1], bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The codes and the order of two rows of 64 columns, of which `group_of_column` gives the groups.
    fn ordered(group_of_column: impl Fn(u32) -> u32) -> Result<(Vec<u8>, Option<Vec<u8>>), Error> {
        let literal = |bytes: Vec<u8>| Conversion::Literal(bytes);
        let groups = (0..64).flat_map(|col| group_of_column(col).to_le_bytes()).collect();
        let groups = Raw { dtype: Dtype::I32, shape: vec![64], bytes: literal(groups) };
        let raw = BTreeMap::from([("a.g_idx".to_owned(), groups)]);
        let quantisation =
            Quantisation { zeros_less_one: true, symmetric: false, block: [1, 32], ..Quantisation::PLAIN };
        let mut join = Join { files: &[], quantisation: &quantisation, raw, joined: StoredTensors::new() };
        let codes = literal((0..64).chain(100..164).collect());
        let codes = join.ordered("a", "a.g_idx", [2, 64, 32], codes)?;
        assert!(join.raw.is_empty());
        let order = join.joined.remove("a.order").map(|order| order.bytes.bytes(&[]).unwrap().into_owned());
        Ok((codes.bytes(&[])?.into_owned(), order))
    }

    #[test]
    fn columns_of_a_group_come_side_by_side() {
        let (codes, order) = ordered(|col| col / 32).unwrap();
        assert_eq!((codes, order), ((0..64).chain(100..164).collect(), None));
        // Even columns are of the second group.
        let (codes, order) = ordered(|col| 1 - col % 2).unwrap();
        let places: Vec<u8> = (0..32).map(|i| 2 * i + 1).chain((0..32).map(|i| 2 * i)).collect();
        let second = places.iter().map(|col| 100 + col);
        assert_eq!(codes, places.iter().copied().chain(second).collect::<Vec<u8>>());
        let floats: Vec<u8> = places.iter().flat_map(|&col| f32::from(col).to_le_bytes()).collect();
        assert_eq!(order, Some(floats));
    }

    #[test]
    fn the_settings_say_how_wide_groups_are() {
        let group = |groups: &[u64], cols, count| {
            let quantisation = Quantisation { groups: groups.to_vec(), ..Quantisation::PLAIN };
            let join = Join {
                files: &[],
                quantisation: &quantisation,
                raw: BTreeMap::new(),
                joined: StoredTensors::new(),
            };
            join.group_of("a", cols, count).ok()
        };
        // The last group has 32 columns.
        assert_eq!(group(&[64], 160, 3), Some(64));
        assert_eq!(group(&[128, 64], 192, 3), Some(64));
        assert_eq!(group(&[128], 192, 2), Some(128));
        // One for all columns, and equal parts.
        assert_eq!(
            (group(&[128], 96, 1), group(&[], 96, 3), group(&[128], 96, 3)),
            (Some(96), Some(32), Some(32))
        );
        assert_eq!((group(&[128], 100, 3), group(&[], 96, 0)), (None, None));
    }

    #[test]
    fn codes_far_from_their_zeros_become_values() {
        let literal = |bytes: Vec<u8>| Conversion::Literal(bytes);
        let raw = |dtype, shape: &[u64], bytes| Raw { dtype, shape: shape.to_vec(), bytes: literal(bytes) };
        // Eight bits, not symmetric: 32 inputs of 8 outputs, all 250, zeros of 100 stored less 1, scales of 0.5.
        let raw = BTreeMap::from([
            ("a.qweight".to_owned(), raw(Dtype::I32, &[8, 8], vec![250; 256])),
            ("a.qzeros".to_owned(), raw(Dtype::I32, &[1, 2], vec![99; 8])),
            ("a.scales".to_owned(), raw(Dtype::F32, &[1, 8], [0.5_f32.to_le_bytes(); 8].concat())),
        ]);
        let quantisation = Quantisation { zeros_less_one: true, symmetric: false, ..Quantisation::PLAIN };
        let join = Join { files: &[], quantisation: &quantisation, raw, joined: StoredTensors::new() };
        let matrix = join.run().unwrap().remove("a.weight").unwrap();
        assert_eq!((matrix.ty, matrix.shape), (GgmlType::F32, vec![8, 32]));
        assert_eq!(matrix.bytes.bytes(&[]).unwrap()[..4], 75_f32.to_le_bytes());
    }

    #[test]
    fn groups_that_are_not_full_are_refused() {
        for group_of_column in [|col| u32::from(col < 33), |_| 0, |col| col % 2 * 2] {
            let message = ordered(group_of_column).unwrap_err().to_string();
            assert_eq!(message, "tensor a.g_idx does not put 64 columns into groups of 32");
        }
    }
}
