//! Header, metadata and tensor table of one GGUF file.
//!
//! No allocation depends on an unverified count: a list is either a slice of existing bytes, or grows as
//! elements are read.

use std::collections::HashSet;

use super::cursor::{Cursor, Field};
use super::{Malformed, limits};
use crate::GgmlType;
use crate::conversion::Region;
use crate::header::TensorInfo;
use metadata::{Array, Metadata, Strings, Value};

/// Metadata key of the tensor data's alignment.
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";
/// Alignment in bytes of a file without that key.
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
/// First bytes of every GGUF file.
pub(super) const MAGIC: [u8; 4] = *b"GGUF";

/// Value types as numbered in a file.
pub(super) mod value_type {
    pub(in super::super) const U8: u32 = 0;
    pub(in super::super) const I8: u32 = 1;
    pub(in super::super) const U16: u32 = 2;
    pub(in super::super) const I16: u32 = 3;
    pub(in super::super) const U32: u32 = 4;
    pub(in super::super) const I32: u32 = 5;
    pub(in super::super) const F32: u32 = 6;
    pub(in super::super) const BOOL: u32 = 7;
    pub(in super::super) const STRING: u32 = 8;
    pub(in super::super) const ARRAY: u32 = 9;
    pub(in super::super) const U64: u32 = 10;
    pub(in super::super) const I64: u32 = 11;
    pub(in super::super) const F64: u32 = 12;
}

/// Everything before the tensor data of a file.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<TensorEntry>,
}

/// One entry of the tensor table. Its bytes were checked to be inside the file.
#[derive(Debug)]
pub(super) struct TensorEntry {
    pub(super) name: String,
    pub(super) ty: GgmlType,
    pub(super) dims: Vec<u64>,
    pub(super) bytes: u64,
    /// From the start of the file.
    pub(super) offset: u64,
}

/// Reads and checks a file, except the tensors' bytes.
pub(super) fn parse(file: &[u8]) -> Result<Header, Malformed> {
    let mut cursor = Cursor::new(file);
    let Header { metadata, mut tensors } = table(&mut cursor)?;
    let alignment = alignment(&metadata)?;
    // A file that ends after its table has no data section; offsets into it are refused below.
    let data_start = cursor.offset().next_multiple_of(alignment);
    let data_bytes = (file.len() as u64).saturating_sub(data_start);
    for entry in &mut tensors {
        locate(entry, alignment, data_start, data_bytes)?;
    }
    refuse_overlaps(&tensors)?;
    Ok(Header { metadata, tensors })
}

/// Reads the beginning of a file whose tensor bytes are elsewhere. Ignores the offsets in the table.
pub(crate) fn parse_table(start: &[u8]) -> Result<(Metadata, Vec<TensorInfo>), Malformed> {
    let Header { metadata, tensors } = table(&mut Cursor::new(start))?;
    let info = |TensorEntry { name, ty, dims, bytes, offset }| {
        TensorInfo::stored(name, ty, dims, Region { file: 0, offset, bytes })
    };
    Ok((metadata, tensors.into_iter().map(info).collect()))
}

/// Reads metadata and tensor table. Offsets are unchecked and relative to the data section.
fn table(cursor: &mut Cursor<'_>) -> Result<Header, Malformed> {
    let found = cursor.array(Field::of_file("the magic"))?;
    if found != MAGIC {
        return Err(Malformed::Magic { found });
    }
    let version = cursor.u32(Field::of_file("the version"))?;
    match version {
        2 | 3 => {}
        swapped if (1..=0xffff).contains(&swapped.swap_bytes()) => {
            return Err(Malformed::BigEndian { version: swapped.swap_bytes() });
        }
        found => return Err(Malformed::Version { found }),
    }
    let tensor_count = cursor.count(limits::TENSORS, Field::of_file("the number of tensors"))?;
    let key_count = cursor.count(limits::KEYS, Field::of_file("the number of keys"))?;

    let mut metadata = Metadata::default();
    for _ in 0..key_count {
        let key = name(cursor, limits::KEY_BYTES, "a key")?;
        let value = value(cursor, key)?;
        if metadata.insert(key, value).is_some() {
            return Err(Malformed::DuplicateKey { key: key.to_owned() });
        }
    }

    let mut names = HashSet::new();
    let mut tensors = Vec::new();
    for _ in 0..tensor_count {
        let entry = tensor_entry(cursor)?;
        if !names.insert(entry.name.clone()) {
            return Err(Malformed::DuplicateTensor { tensor: entry.name });
        }
        tensors.push(entry);
    }
    Ok(Header { metadata, tensors })
}

/// Alignment of tensor data in bytes, from `metadata`.
pub(super) fn alignment(metadata: &Metadata) -> Result<u64, Malformed> {
    match metadata.value(ALIGNMENT_KEY) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(&Value::U32(found)) if found.is_power_of_two() && found >= 8 => Ok(found.into()),
        Some(&Value::U32(found)) => Err(Malformed::Alignment { found: found.to_string() }),
        Some(other) => Err(Malformed::Alignment { found: other.type_name().to_owned() }),
    }
}

/// Size of a tensor in bytes, after checking its name and dimensions.
pub(super) fn tensor_bytes(name: &str, ty: GgmlType, dims: &[u64]) -> Result<u64, Malformed> {
    let field = |label| Field::of(label, name).to_string();
    if dims.is_empty() {
        return Err(Malformed::Zero { field: field("the number of dimensions") });
    }
    if dims.contains(&0) {
        return Err(Malformed::Zero { field: field("a dimension") });
    }
    let block = ty.block_len() as u64;
    match (dims.first(), ty.byte_size(dims)) {
        (_, Some(bytes)) => Ok(bytes),
        (Some(&row), None) if row % block != 0 => {
            Err(Malformed::PartialBlock { tensor: name.to_owned(), ty, row, block })
        }
        _ => Err(Malformed::SizeOverflow { tensor: name.to_owned(), dims: dims.to_vec() }),
    }
}

fn name<'a>(cursor: &mut Cursor<'a>, limit: u64, label: &'static str) -> Result<&'a str, Malformed> {
    let name = cursor.string(limit, Field::of_file(label))?;
    if name.is_empty() {
        return Err(Malformed::Zero { field: label.to_owned() });
    }
    Ok(name)
}

fn value(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, Malformed> {
    let field = Field::of("the value", key);
    let ty = cursor.u32(Field::of("the value type", key))?;
    Ok(match ty {
        value_type::U8 => Value::U8(cursor.u8(field)?),
        value_type::I8 => Value::I8(i8::from_le_bytes(cursor.array(field)?)),
        value_type::U16 => Value::U16(u16::from_le_bytes(cursor.array(field)?)),
        value_type::I16 => Value::I16(i16::from_le_bytes(cursor.array(field)?)),
        value_type::U32 => Value::U32(cursor.u32(field)?),
        value_type::I32 => Value::I32(i32::from_le_bytes(cursor.array(field)?)),
        value_type::F32 => Value::F32(f32::from_le_bytes(cursor.array(field)?)),
        value_type::BOOL => Value::Bool(flag(cursor.u8(field)?, field)?),
        value_type::STRING => Value::String(cursor.string(limits::STRING_BYTES, field)?.to_owned()),
        value_type::ARRAY => Value::Array(array(cursor, key, 1)?),
        value_type::U64 => Value::U64(cursor.u64(field)?),
        value_type::I64 => Value::I64(i64::from_le_bytes(cursor.array(field)?)),
        value_type::F64 => Value::F64(f64::from_le_bytes(cursor.array(field)?)),
        found => return Err(Malformed::ValueType { field: field.to_string(), found }),
    })
}

fn array(cursor: &mut Cursor<'_>, key: &str, depth: u64) -> Result<Array, Malformed> {
    let field = Field::of("an element", key);
    if depth > limits::NESTING {
        let field = Field::of("the nesting", key).to_string();
        return Err(Malformed::OverLimit { field, found: depth, limit: limits::NESTING });
    }
    let ty = cursor.u32(Field::of("the element type", key))?;
    let count = cursor.count(limits::ELEMENTS, Field::of("the number of elements", key))?;
    Ok(match ty {
        value_type::U8 => Array::U8(cursor.list(count, u8::from_le_bytes, field)?),
        value_type::I8 => Array::I8(cursor.list(count, i8::from_le_bytes, field)?),
        value_type::U16 => Array::U16(cursor.list(count, u16::from_le_bytes, field)?),
        value_type::I16 => Array::I16(cursor.list(count, i16::from_le_bytes, field)?),
        value_type::U32 => Array::U32(cursor.list(count, u32::from_le_bytes, field)?),
        value_type::I32 => Array::I32(cursor.list(count, i32::from_le_bytes, field)?),
        value_type::F32 => Array::F32(cursor.list(count, f32::from_le_bytes, field)?),
        value_type::BOOL => {
            let bytes = cursor.take(count, field)?;
            Array::Bool(bytes.iter().map(|&byte| flag(byte, field)).collect::<Result<_, _>>()?)
        }
        value_type::STRING => {
            let mut strings = Strings::default();
            for _ in 0..count {
                strings.push(cursor.string(limits::STRING_BYTES, field)?);
            }
            Array::String(strings)
        }
        value_type::ARRAY => {
            let mut arrays = Vec::new();
            for _ in 0..count {
                arrays.push(array(cursor, key, depth + 1)?);
            }
            Array::Array(arrays)
        }
        value_type::U64 => Array::U64(cursor.list(count, u64::from_le_bytes, field)?),
        value_type::I64 => Array::I64(cursor.list(count, i64::from_le_bytes, field)?),
        value_type::F64 => Array::F64(cursor.list(count, f64::from_le_bytes, field)?),
        found => return Err(Malformed::ValueType { field: field.to_string(), found }),
    })
}

fn flag(byte: u8, field: Field<'_>) -> Result<bool, Malformed> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(Malformed::NotBool { field: field.to_string(), found }),
    }
}

/// Reads an entry of the table. Its offset is unchecked and relative to the data section.
fn tensor_entry(cursor: &mut Cursor<'_>) -> Result<TensorEntry, Malformed> {
    let name = name(cursor, limits::TENSOR_NAME_BYTES, "a tensor's name")?;
    let field = Field::of("the number of dimensions", name);
    let dim_count = u64::from(cursor.u32(field)?);
    if dim_count > limits::DIMS {
        let field = field.to_string();
        return Err(Malformed::OverLimit { field, found: dim_count, limit: limits::DIMS });
    }
    let dims = cursor.list(dim_count, u64::from_le_bytes, Field::of("a dimension", name))?;
    let found = cursor.u32(Field::of("the type", name))?;
    let ty =
        GgmlType::from_id(found).ok_or_else(|| Malformed::TensorType { tensor: name.to_owned(), found })?;
    let bytes = tensor_bytes(name, ty, &dims)?;
    let offset = cursor.u64(Field::of("the offset", name))?;
    Ok(TensorEntry { name: name.to_owned(), ty, dims, bytes, offset })
}

/// Checks an offset and converts it from the data section to the file.
fn locate(
    entry: &mut TensorEntry,
    alignment: u64,
    data_start: u64,
    data_bytes: u64,
) -> Result<(), Malformed> {
    let TensorEntry { offset, bytes, .. } = *entry;
    if offset % alignment != 0 {
        return Err(Malformed::Misaligned { tensor: entry.name.clone(), offset, alignment });
    }
    if offset.checked_add(bytes).is_none_or(|end| end > data_bytes) {
        return Err(Malformed::OutOfFile { tensor: entry.name.clone(), offset, bytes, have: data_bytes });
    }
    // Cannot overflow: the tensor ends inside the file.
    entry.offset = offset.saturating_add(data_start);
    Ok(())
}

fn refuse_overlaps(tensors: &[TensorEntry]) -> Result<(), Malformed> {
    let mut by_offset: Vec<&TensorEntry> = tensors.iter().collect();
    by_offset.sort_by_key(|entry| entry.offset);
    for (first, second) in by_offset.iter().zip(by_offset.iter().skip(1)) {
        if first.offset.saturating_add(first.bytes) > second.offset {
            let (first, second) = (first.name.clone(), second.name.clone());
            return Err(Malformed::Overlap { first, second });
        }
    }
    Ok(())
}
