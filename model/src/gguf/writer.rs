//! Writes GGUF v3 files: for tests, and for generated models.
//!
//! ```
//! use kvasir_model::gguf::writer::Writer;
//! use metadata::{Metadata, Value};
//! use kvasir_model::{GgmlType, ModelFile};
//!
//! let mut writer = Writer::new(Metadata::from_iter([("general.architecture", Value::from("llama"))]))?;
//! writer.tensor("output_norm.weight", GgmlType::F32, &[4])?;
//! let mut file = tempfile::NamedTempFile::new()?;
//! writer.write(&mut file, |tensor| vec![0; tensor.bytes() as usize])?;
//!
//! let gguf = ModelFile::open(file.path())?;
//! assert_eq!(*gguf.tensor_data("output_norm.weight")?, [0; 16]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{self, Write};

use super::cursor::Field;
use super::parse::{self, MAGIC, value_type};
use super::{Malformed, limits};
use crate::GgmlType;
use crate::conversion::Region;
use crate::header::TensorInfo;
use metadata::{Array, Metadata, Value};

const VERSION: u32 = 3;

/// A file being prepared: metadata and a table of tensors, laid out in order of declaration.
#[derive(Debug)]
pub struct Writer {
    metadata: Metadata,
    alignment: u64,
    tensors: Vec<TensorInfo>,
    names: HashSet<String>,
    data_end: u64,
}

impl Writer {
    /// A file without tensors. Data is aligned to `general.alignment`, by default to 32 bytes. Fails if that
    /// key is invalid.
    pub fn new(metadata: Metadata) -> Result<Self, Malformed> {
        let alignment = parse::alignment(&metadata)?;
        Ok(Self { metadata, alignment, tensors: Vec::new(), names: HashSet::new(), data_end: 0 })
    }

    /// Declares the next tensor, with the same checks as the reader. Returns its size in bytes.
    pub fn tensor(&mut self, name: &str, ty: GgmlType, dims: &[u64]) -> Result<u64, Malformed> {
        let over = |field: Field<'_>, found: usize, limit| {
            let found = found as u64;
            (found > limit).then(|| Malformed::OverLimit { field: field.to_string(), found, limit })
        };
        let refused = over(Field::of_file("the number of tensors"), self.tensors.len() + 1, limits::TENSORS)
            .or(over(Field::of_file("a tensor's name"), name.len(), limits::TENSOR_NAME_BYTES))
            .or(over(Field::of("the number of dimensions", name), dims.len(), limits::DIMS));
        if let Some(refused) = refused {
            return Err(refused);
        }
        if name.is_empty() {
            return Err(Malformed::Zero { field: "a tensor's name".to_owned() });
        }
        let bytes = parse::tensor_bytes(name, ty, dims)?;
        let offset = self.data_end;
        let data_end = offset.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(self.alignment));
        let Some(data_end) = data_end else {
            return Err(Malformed::SizeOverflow { tensor: name.to_owned(), dims: dims.to_vec() });
        };
        if !self.names.insert(name.to_owned()) {
            return Err(Malformed::DuplicateTensor { tensor: name.to_owned() });
        }
        self.data_end = data_end;
        let region = Region { file: 0, offset, bytes };
        self.tensors.push(TensorInfo::stored(name.to_owned(), ty, dims.to_vec(), region));
        Ok(bytes)
    }

    /// Writes the file. `data` returns the bytes of one tensor at a time, so that memory is needed only for
    /// the largest tensor.
    ///
    /// Fails with [`io::ErrorKind::InvalidInput`] if `data` returns a wrong number of bytes.
    pub fn write<'a, D: Into<Cow<'a, [u8]>>>(
        &self,
        out: &mut impl Write,
        mut data: impl FnMut(&TensorInfo) -> D,
    ) -> io::Result<()> {
        out.write_all(&self.start())?;
        for info in &self.tensors {
            let bytes = data(info).into();
            if bytes.len() as u64 != info.bytes {
                let (name, given, needed) = (&info.name, bytes.len(), info.bytes);
                let text = format!("{given} bytes given for tensor {name}, which takes {needed}");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            out.write_all(&bytes)?;
            io::copy(&mut io::Read::take(io::repeat(0), self.padding(info)), out)?;
        }
        out.flush()
    }

    /// The beginning of the file, up to the first tensor.
    pub fn start(&self) -> Vec<u8> {
        let mut header = self.header();
        pad(&mut header, self.alignment);
        header
    }

    /// The declared tensors in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Bytes between the end of a declared tensor and the next one.
    pub fn padding(&self, info: &TensorInfo) -> u64 {
        let end = info.offset().saturating_add(info.bytes);
        end.next_multiple_of(self.alignment).saturating_sub(end)
    }

    /// Bytes of all tensors with their padding.
    pub fn data_bytes(&self) -> u64 {
        self.data_end
    }

    /// Everything before the tensor data, without padding.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        put_len(&mut out, self.tensors.len());
        put_len(&mut out, self.metadata.len());
        for (key, value) in self.metadata.iter() {
            put_string(&mut out, key);
            encode_value(value, &mut out);
        }
        for info in &self.tensors {
            put_string(&mut out, &info.name);
            out.extend((info.dims.len() as u32).to_le_bytes());
            out.extend(info.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(info.ty.id().to_le_bytes());
            out.extend(info.offset().to_le_bytes());
        }
        out
    }
}

/// Appends a value as in a file: its type number, then the value.
pub(crate) fn encode_value(value: &Value, out: &mut Vec<u8>) {
    macro_rules! scalar {
        ($ty:expr, $x:expr) => {{
            out.extend($ty.to_le_bytes());
            out.extend($x.to_le_bytes());
        }};
    }
    match value {
        Value::U8(x) => scalar!(value_type::U8, x),
        Value::I8(x) => scalar!(value_type::I8, x),
        Value::U16(x) => scalar!(value_type::U16, x),
        Value::I16(x) => scalar!(value_type::I16, x),
        Value::U32(x) => scalar!(value_type::U32, x),
        Value::I32(x) => scalar!(value_type::I32, x),
        Value::U64(x) => scalar!(value_type::U64, x),
        Value::I64(x) => scalar!(value_type::I64, x),
        Value::F32(x) => scalar!(value_type::F32, x),
        Value::F64(x) => scalar!(value_type::F64, x),
        Value::Bool(flag) => scalar!(value_type::BOOL, u8::from(*flag)),
        Value::String(string) => {
            out.extend(value_type::STRING.to_le_bytes());
            put_string(out, string);
        }
        Value::Array(array) => {
            out.extend(value_type::ARRAY.to_le_bytes());
            encode_array(array, out);
        }
    }
}

fn encode_array(array: &Array, out: &mut Vec<u8>) {
    macro_rules! list {
        ($ty:expr, $list:expr) => {{
            out.extend($ty.to_le_bytes());
            put_len(out, $list.len());
            out.extend($list.iter().flat_map(|x| x.to_le_bytes()));
        }};
    }
    match array {
        Array::U8(list) => list!(value_type::U8, list),
        Array::I8(list) => list!(value_type::I8, list),
        Array::U16(list) => list!(value_type::U16, list),
        Array::I16(list) => list!(value_type::I16, list),
        Array::U32(list) => list!(value_type::U32, list),
        Array::I32(list) => list!(value_type::I32, list),
        Array::U64(list) => list!(value_type::U64, list),
        Array::I64(list) => list!(value_type::I64, list),
        Array::F32(list) => list!(value_type::F32, list),
        Array::F64(list) => list!(value_type::F64, list),
        Array::Bool(list) => {
            out.extend(value_type::BOOL.to_le_bytes());
            put_len(out, list.len());
            out.extend(list.iter().map(|&flag| u8::from(flag)));
        }
        Array::String(list) => {
            out.extend(value_type::STRING.to_le_bytes());
            put_len(out, list.len());
            for string in list.iter() {
                put_string(out, string);
            }
        }
        Array::Array(list) => {
            out.extend(value_type::ARRAY.to_le_bytes());
            put_len(out, list.len());
            for array in list {
                encode_array(array, out);
            }
        }
    }
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    out.extend((len as u64).to_le_bytes());
}

fn put_string(out: &mut Vec<u8>, string: &str) {
    put_len(out, string.len());
    out.extend_from_slice(string.as_bytes());
}

fn pad(out: &mut Vec<u8>, alignment: u64) {
    let end = (out.len() as u64).next_multiple_of(alignment);
    out.resize(end as usize, 0);
}
