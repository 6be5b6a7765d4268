//! Weights in the files of other programs: a folder of Hugging Face (`model.safetensors`, `config.json`), and
//! a file of whisper.cpp (`ggml-*.bin`).
//!
//! Their tensors have other names, and queries, keys and values are apart. Keys have no bias. A file of
//! whisper.cpp is, in little endian:
//!
//! ```text
//! magic: u32, vocabulary, audio context, width, heads and layers of the encoder, text context, width, heads
//! and layers of the decoder, bands, type: 11 times u32
//! bands: u32, bins: u32, filters: f32..
//! tokens: u32, each: bytes: u32, text
//! tensors to the end, each: rank: u32, bytes of its name: u32, type: u32, dimensions: u32.., the innermost
//! first, name, values
//! ```
//!
//! The content is not trusted: lengths are compared with the file's length before anything is read.

use super::source::Source;
use crate::Error;
use kernels::quant::{GgmlType, dequantize};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

const MAGIC: u32 = 0x6767_6d6c;
/// Most bytes of a safetensors header.
const MAX_HEADER: u64 = 64 << 20;
/// Most tensors, and tokens of a vocabulary.
const MAX_ENTRIES: u32 = 1 << 20;
/// Most bytes of a name or token.
const MAX_NAME: u32 = 1 << 12;

/// Project whose names the tensors have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    HuggingFace,
    OpenAi,
}

pub(super) struct Named {
    path: PathBuf,
    source: BufReader<File>,
    style: Style,
    tensors: HashMap<String, Tensor>,
    /// Heads of the encoder and of the decoder.
    heads: [u32; 2],
    width: usize,
}

#[derive(Debug, Clone)]
struct Tensor {
    dims: Vec<usize>,
    ty: GgmlType,
    at: u64,
    bytes: usize,
}

/// The text of whisper.cpp's tokens, and the size of the network's vocabulary.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Vocabulary {
    pub(super) tokens: Vec<Vec<u8>>,
    pub(super) size: u32,
}

/// Reads the fields of a file of whisper.cpp.
struct Fields<'a> {
    path: &'a Path,
    source: BufReader<File>,
    left: u64,
}

fn wrong(path: &Path, reason: impl Into<String>) -> Error {
    Error::Artefact { path: path.to_owned(), reason: reason.into() }
}

fn failed(path: &Path, source: std::io::Error) -> Error {
    Error::Io { what: format!("cannot read {}", path.display()), source }
}

fn open(path: &Path) -> Result<(BufReader<File>, u64), Error> {
    let file = File::open(path).map_err(|source| failed(path, source))?;
    let length = file.metadata().map_err(|source| failed(path, source))?.len();
    Ok((BufReader::new(file), length))
}

impl Fields<'_> {
    fn bytes(&mut self, count: u64, item: &str) -> Result<Vec<u8>, Error> {
        let left = self.left.checked_sub(count);
        self.left = left.ok_or_else(|| wrong(self.path, format!("it ends within {item}")))?;
        let mut bytes = vec![0; count as usize];
        self.source.read_exact(&mut bytes).map_err(|source| failed(self.path, source))?;
        Ok(bytes)
    }

    fn word(&mut self, item: &str) -> Result<u32, Error> {
        let bytes = self.bytes(4, item)?;
        Ok(bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes)))
    }

    /// A number that is at most `limit`.
    fn count(&mut self, item: &str, limit: u32) -> Result<u32, Error> {
        match self.word(item)? {
            count if count <= limit => Ok(count),
            count => Err(wrong(self.path, format!("{item} is {count}, the limit is {limit}"))),
        }
    }

    fn skip(&mut self, count: u64, item: &str) -> Result<(), Error> {
        let left = self.left.checked_sub(count);
        self.left = left.ok_or_else(|| wrong(self.path, format!("it ends within {item}")))?;
        // At most the file's length.
        self.source.seek_relative(count as i64).map_err(|source| failed(self.path, source))
    }
}

impl Named {
    /// Reads the header of a safetensors file. `heads` and `width` are those of its `config.json`.
    ///
    /// # Errors
    /// [`Error::Artefact`] if it is not such a file; I/O errors.
    pub(super) fn safetensors(path: &Path, heads: [u32; 2], width: usize) -> Result<Self, Error> {
        let (mut source, length) = open(path)?;
        let mut head = [0; 8];
        source.read_exact(&mut head).map_err(|source| failed(path, source))?;
        let count = u64::from_le_bytes(head);
        if count > MAX_HEADER || count > length.saturating_sub(8) {
            return Err(wrong(path, format!("its header has {count} bytes, the limit is {MAX_HEADER}")));
        }
        let mut header = vec![0; count as usize];
        source.read_exact(&mut header).map_err(|source| failed(path, source))?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| wrong(path, format!("its header: {error}")))?;
        let mut tensors = HashMap::new();
        for (name, info) in metadata.tensors() {
            let (ty, width) = match info.dtype {
                Dtype::F32 => (GgmlType::F32, 4),
                Dtype::F16 => (GgmlType::F16, 2),
                Dtype::BF16 => (GgmlType::BF16, 2),
                // Refused if it is needed.
                _ => continue,
            };
            let (from, to) = info.data_offsets;
            let at = (8 + count).saturating_add(from as u64);
            if to < from || at.saturating_add((to - from) as u64) > length {
                return Err(wrong(path, format!("it ends within {name}")));
            }
            let bytes = info.shape.iter().try_fold(width, |all: usize, dim| all.checked_mul(*dim));
            if bytes != Some(to - from) {
                let reason =
                    format!("{name} is {:?} of {width} bytes each, and has {} bytes", info.shape, to - from);
                return Err(wrong(path, reason));
            }
            tensors.insert(name, Tensor { dims: info.shape.clone(), ty, at, bytes: to - from });
        }
        let style = Style::HuggingFace;
        Ok(Self { path: path.to_owned(), source, style, tensors, heads, width })
    }

    /// Reads the header of a file of whisper.cpp.
    ///
    /// # Errors
    /// As [`Self::safetensors`].
    pub(super) fn ggml(path: &Path) -> Result<(Self, Vocabulary), Error> {
        let (source, length) = open(path)?;
        let mut fields = Fields { path, source, left: length };
        let magic = fields.word("its magic")?;
        if magic != MAGIC {
            return Err(wrong(
                path,
                format!("it begins with {magic:#x}, a file of whisper.cpp with {MAGIC:#x}"),
            ));
        }
        let mut numbers = [0; 11];
        for number in &mut numbers {
            *number = fields.word("its numbers")?;
        }
        let [size, _, width, encoder_heads, _, _, _, decoder_heads, ..] = numbers;
        let filters = u64::from(fields.word("its filters")?) * u64::from(fields.word("its filters")?);
        fields.skip(filters.saturating_mul(4), "its filters")?;
        let mut tokens = Vec::new();
        for _ in 0..fields.count("its number of tokens", MAX_ENTRIES)? {
            let bytes = fields.count("the length of a token", MAX_NAME)?;
            tokens.push(fields.bytes(bytes.into(), "a token")?);
        }
        let mut tensors = HashMap::new();
        while fields.left > 0 {
            let (name, tensor) = tensor(&mut fields, length)?;
            tensors.insert(name, tensor);
        }
        let heads = [encoder_heads, decoder_heads];
        let (source, style) = (fields.source, Style::OpenAi);
        let named = Self { path: path.to_owned(), source, style, tensors, heads, width: width as usize };
        Ok((named, Vocabulary { tokens, size }))
    }

    /// The tensors that a name of CTranslate2's format stands for, concatenated by rows. `None`: zeros.
    fn parts(&self, name: &str) -> Vec<Option<String>> {
        let Some((of, rest)) = name.split_once('/') else { return Vec::new() };
        let (module, tensor) = rest.rsplit_once('/').unwrap_or((rest, ""));
        let open_ai = self.style == Style::OpenAi;
        let choose = |theirs: &str, open_ais: &str| if open_ai { open_ais } else { theirs }.to_owned();
        let prefix = choose("model.", "");
        if tensor == "encodings" {
            let table = choose("embed_positions.weight", "positional_embedding");
            return vec![Some(format!("{prefix}{of}.{table}"))];
        }
        let (module, part) = match (module.strip_suffix("/layer_norm"), tensor) {
            (Some(module), "gamma") => (format!("{module}/norm"), "weight"),
            (Some(module), _) => (format!("{module}/norm"), "bias"),
            (None, "gamma") => ("norm".to_owned(), "weight"),
            (None, "beta") => ("norm".to_owned(), "bias"),
            (None, part) => (module.to_owned(), part),
        };
        let named = |module: String| Some(format!("{prefix}{of}.{module}.{part}"));
        let Some((layer, inner)) = module.strip_prefix("layer_").and_then(|rest| rest.split_once('/')) else {
            return vec![named(match module.as_str() {
                "embeddings" => choose("embed_tokens", "token_embedding"),
                "norm" if of == "encoder" => choose("layer_norm", "ln_post"),
                "norm" => choose("layer_norm", "ln"),
                _ => module,
            })];
        };
        let within = |theirs: &str, open_ais: &str| match open_ai {
            true => named(format!("blocks.{layer}.{open_ais}")),
            false => named(format!("layers.{layer}.{theirs}")),
        };
        let keys = |theirs: &str, open_ais: &str| match part {
            "bias" => None,
            _ => within(theirs, open_ais),
        };
        match inner {
            "self_attention/norm" => vec![within("self_attn_layer_norm", "attn_ln")],
            "self_attention/linear_0" => vec![
                within("self_attn.q_proj", "attn.query"),
                keys("self_attn.k_proj", "attn.key"),
                within("self_attn.v_proj", "attn.value"),
            ],
            "self_attention/linear_1" => vec![within("self_attn.out_proj", "attn.out")],
            "attention/norm" => vec![within("encoder_attn_layer_norm", "cross_attn_ln")],
            "attention/linear_0" => vec![within("encoder_attn.q_proj", "cross_attn.query")],
            "attention/linear_1" => vec![
                keys("encoder_attn.k_proj", "cross_attn.key"),
                within("encoder_attn.v_proj", "cross_attn.value"),
            ],
            "attention/linear_2" => vec![within("encoder_attn.out_proj", "cross_attn.out")],
            "ffn/norm" => vec![within("final_layer_norm", "mlp_ln")],
            "ffn/linear_0" => vec![within("fc1", "mlp.0")],
            "ffn/linear_1" => vec![within("fc2", "mlp.2")],
            _ => Vec::new(),
        }
    }

    fn tensor(&self, name: &str) -> Result<&Tensor, Error> {
        let missing = || self.wrong(format!("it has no {name} of 16 or 32 bit floats"));
        self.tensors.get(name).ok_or_else(missing)
    }

    fn values(&mut self, tensor: &Tensor) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; tensor.bytes];
        let read =
            self.source.seek(SeekFrom::Start(tensor.at)).and_then(|_| self.source.read_exact(&mut bytes));
        read.map_err(|source| failed(&self.path, source))?;
        Ok(bytes)
    }
}

/// Reads the head of a tensor and passes over its values.
fn tensor(fields: &mut Fields<'_>, length: u64) -> Result<(String, Tensor), Error> {
    let rank = fields.count("the number of dimensions of a tensor", 4)?;
    let name_bytes = fields.count("the length of a tensor's name", MAX_NAME)?;
    let number = fields.word("the type of a tensor")?;
    let mut dims = Vec::new();
    for _ in 0..rank {
        dims.push(fields.word("the dimensions of a tensor")? as usize);
    }
    dims.reverse();
    // A bias of a convolution is a column.
    if let [rows, 1] = dims[..] {
        dims = vec![rows];
    }
    let name = String::from_utf8(fields.bytes(name_bytes.into(), "the name of a tensor")?)
        .map_err(|_| wrong(fields.path, "a tensor's name is not UTF-8"))?;
    let (ty, width) = match number {
        0 => (GgmlType::F32, 4),
        1 => (GgmlType::F16, 2),
        _ => {
            let reason = format!("{name} is of type {number}; 0 and 1, floats of 32 and 16 bits, are served");
            return Err(wrong(fields.path, reason));
        }
    };
    let bytes = dims.iter().try_fold(width, |all: usize, dim| all.checked_mul(*dim));
    let bytes = bytes.ok_or_else(|| wrong(fields.path, format!("{name} is {dims:?}")))?;
    let at = length - fields.left;
    fields.skip(bytes as u64, &name)?;
    Ok((name, Tensor { dims, ty, at, bytes }))
}

impl Source for Named {
    fn wrong(&self, reason: String) -> Error {
        wrong(&self.path, reason)
    }

    fn has(&self, name: &str) -> bool {
        let parts = self.parts(name);
        !parts.is_empty() && parts.iter().flatten().all(|part| self.tensors.contains_key(part))
    }

    fn dims_of(&self, name: &str) -> Result<Vec<usize>, Error> {
        match &self.parts(name)[..] {
            [Some(part)] => Ok(self.tensor(part)?.dims.clone()),
            _ => Err(self.wrong(format!("it has no {name}"))),
        }
    }

    fn number(&mut self, name: &str) -> Result<Option<i32>, Error> {
        let heads = match name {
            "encoder/num_heads" => self.heads[0],
            "decoder/num_heads" => self.heads[1],
            // Of the published networks.
            _ => return Ok(None),
        };
        Ok(Some(heads.try_into().unwrap_or(0)))
    }

    fn floats(&mut self, name: &str, dims: &[usize]) -> Result<(GgmlType, Vec<u8>), Error> {
        let parts = self.parts(name);
        if parts.is_empty() {
            return Err(self.wrong(format!("it has no {name}")));
        }
        let mut dims = dims.to_vec();
        if let Some(rows) = dims.first_mut() {
            *rows /= parts.len();
        }
        let mut all = Vec::new();
        for part in &parts {
            let Some(part) = part else {
                all.push((GgmlType::F32, vec![0; 4 * self.width]));
                continue;
            };
            let tensor = self.tensor(part)?.clone();
            if tensor.dims != dims {
                return Err(self.wrong(format!("{part} is {:?}, it must be {dims:?}", tensor.dims)));
            }
            all.push((tensor.ty, self.values(&tensor)?));
        }
        match &all[..] {
            [(ty, _), rest @ ..] if rest.iter().all(|(other, _)| other == ty) => {
                let ty = *ty;
                Ok((ty, all.into_iter().flat_map(|(_, bytes)| bytes).collect()))
            }
            // Parts of different precision, such as zeros and a bias of 16 bits.
            _ => {
                let mut floats = Vec::new();
                for (ty, bytes) in all {
                    let mut values = vec![0.0f32; dims.iter().product()];
                    dequantize(ty, &bytes, &mut values)?;
                    floats.extend(values.into_iter().flat_map(f32::to_le_bytes));
                }
                Ok((GgmlType::F32, floats))
            }
        }
    }
}

#[cfg(test)]
mod tests;
