//! The tensors of a checkpoint's safetensors files, with those of a quantised matrix joined.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ::safetensors::Dtype;
use serde::Deserialize;

use super::{CheckpointError, Folder};
use crate::conversion::{Conversion, FloatMap, FloatType, Region};
use crate::mmap::MappedFile;
use crate::{Error, GgmlType, safetensors};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Most files of a set.
const MAX_FILES: usize = 4096;

/// A matrix or vector of a checkpoint.
#[derive(Debug, Clone)]
pub(super) struct StoredTensor {
    pub(super) ty: GgmlType,
    /// The last dimension is contiguous.
    pub(super) shape: Vec<u64>,
    pub(super) bytes: Conversion,
}

/// Tensors by name. A quantised matrix is one of them, with its scale beside it as `STEM.scale`.
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
    Ok((files, join(raw)?))
}

fn join(mut raw: BTreeMap<String, Raw>) -> Result<StoredTensors, Error> {
    let mut tensors = StoredTensors::new();
    let names: Vec<String> = raw.keys().cloned().collect();
    for name in &names {
        if let Some(stem) = name.strip_suffix("_blocks") {
            join_mxfp4_blocks(stem, &mut raw, &mut tensors)?;
        } else if let Some(stem) = name.strip_suffix(".weight_packed") {
            join_fp4(stem, name, &mut raw, &mut tensors)?;
        } else if let (Some(stem), Some(Dtype::U8)) =
            (name.strip_suffix(".weight"), raw.get(name).map(|raw| raw.dtype))
        {
            join_fp4(stem, name, &mut raw, &mut tensors)?;
        }
    }
    for (name, Raw { dtype, shape, bytes }) in raw {
        let ty = match dtype {
            Dtype::F32 => GgmlType::F32,
            Dtype::F16 => GgmlType::F16,
            Dtype::BF16 => GgmlType::BF16,
            found => return Err(CheckpointError::TensorType { tensor: name, found }.into()),
        };
        tensors.insert(name, StoredTensor { ty, shape, bytes });
    }
    Ok(tensors)
}

/// Joins the codes `name` of two values in a byte with their scales: E4M3 for 16 values and one of the whole matrix
/// (NVFP4), or E8M0 for 32 values (MXFP4).
fn join_fp4(
    stem: &str,
    name: &str,
    raw: &mut BTreeMap<String, Raw>,
    tensors: &mut StoredTensors,
) -> Result<(), Error> {
    let Some(codes) = raw.remove(name) else { return Ok(()) };
    let unsupported = || CheckpointError::TensorType { tensor: name.to_owned(), found: codes.dtype };
    let scales = raw.remove(&format!("{stem}.weight_scale")).ok_or_else(unsupported)?;
    let (&[rows, packed], Dtype::U8) = (codes.shape.as_slice(), codes.dtype) else {
        return Err(unsupported().into());
    };
    let cols = packed.saturating_mul(2);
    let (ty, group) = match scales.dtype {
        Dtype::F8_E4M3 => (GgmlType::NVFP4, 16),
        Dtype::U8 => (GgmlType::MXFP4, 32),
        _ => return Err(unsupported().into()),
    };
    check_fp4(name, cols, ty)?;
    if scales.shape != [rows, cols / group] {
        let expected = vec![rows, cols / group];
        return Err(
            CheckpointError::ScaleShape { tensor: name.to_owned(), found: scales.shape, expected }.into()
        );
    }
    let (codes, scales) = (Box::new(codes.bytes), Box::new(scales.bytes));
    let bytes = match ty {
        GgmlType::NVFP4 => {
            // One divides by its scale, the other multiplies.
            let (divisor, factor) = (format!("{stem}.weight_global_scale"), format!("{stem}.weight_scale_2"));
            let (scale, map) = match raw.remove(&divisor) {
                Some(scale) => (Some(scale), FloatMap::Reciprocal),
                None => (raw.remove(&factor), FloatMap::Same),
            };
            let scale = scale.ok_or(Error::MissingTensor { tensor: factor })?;
            let scale = scalar(stem, scale, map)?;
            tensors.insert(format!("{stem}.scale"), scale);
            Conversion::Nvfp4 { codes, scales }
        }
        _ => Conversion::Mxfp4 { codes, scales },
    };
    // Scales of activations, for engines that quantise them.
    for part in ["input_scale", "input_global_scale", "k_scale", "v_scale"] {
        if let Some(scale) = raw.remove(&format!("{stem}.{part}")) {
            let (part, map) = match part {
                "input_global_scale" => ("input_scale", FloatMap::Reciprocal),
                part => (part, FloatMap::Same),
            };
            tensors.insert(format!("{stem}.{part}"), scalar(stem, scale, map)?);
        }
    }
    tensors.insert(format!("{stem}.weight"), StoredTensor { ty, shape: vec![rows, cols], bytes });
    Ok(())
}

/// Joins gpt-oss's experts: codes `[experts, rows, blocks, 16]` and scales `[experts, rows, blocks]`.
fn join_mxfp4_blocks(
    stem: &str,
    raw: &mut BTreeMap<String, Raw>,
    tensors: &mut StoredTensors,
) -> Result<(), Error> {
    let (name, scales) = (format!("{stem}_blocks"), format!("{stem}_scales"));
    let Some(codes) = raw.remove(&name) else { return Ok(()) };
    let scales = raw.remove(&scales).ok_or(Error::MissingTensor { tensor: scales })?;
    let (&[experts, rows, blocks, 16], Dtype::U8, Dtype::U8) =
        (codes.shape.as_slice(), codes.dtype, scales.dtype)
    else {
        return Err(CheckpointError::TensorType { tensor: name, found: codes.dtype }.into());
    };
    if scales.shape != [experts, rows, blocks] {
        let expected = vec![experts, rows, blocks];
        return Err(CheckpointError::ScaleShape { tensor: name, found: scales.shape, expected }.into());
    }
    let bytes = Conversion::Mxfp4 { codes: Box::new(codes.bytes), scales: Box::new(scales.bytes) };
    let shape = vec![experts, rows, blocks.saturating_mul(32)];
    tensors.insert(stem.to_owned(), StoredTensor { ty: GgmlType::MXFP4, shape, bytes });
    Ok(())
}

fn check_fp4(tensor: &str, cols: u64, ty: GgmlType) -> Result<(), Error> {
    let block = ty.block_len() as u64;
    match cols.is_multiple_of(block) && cols > 0 {
        true => Ok(()),
        false => Err(CheckpointError::Columns { tensor: tensor.to_owned(), found: cols, block }.into()),
    }
}

/// A scale of one element, or of one for each expert, as F32.
fn scalar(stem: &str, raw: Raw, map: FloatMap) -> Result<StoredTensor, Error> {
    let from = match raw.dtype {
        Dtype::F32 => FloatType::F32,
        Dtype::F16 => FloatType::F16,
        Dtype::BF16 => FloatType::BF16,
        found => return Err(CheckpointError::TensorType { tensor: format!("{stem}'s scale"), found }.into()),
    };
    let elements = raw.shape.iter().product::<u64>();
    if elements != 1 {
        let tensor = format!("{stem}'s scale");
        return Err(CheckpointError::ScaleShape { tensor, found: raw.shape, expected: vec![1] }.into());
    }
    let bytes = Conversion::Floats { of: Box::new(raw.bytes), from, map };
    Ok(StoredTensor { ty: GgmlType::F32, shape: vec![1], bytes })
}
