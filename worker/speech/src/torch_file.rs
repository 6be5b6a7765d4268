//! Reads the tensors of a file that `torch.save` wrote (`.pt`, `.pth`, `pytorch_model.bin`) without running
//! any code of the file.
//!
//! The file's object is a tree of dictionaries; a tensor's name is the path to it, joined by dots
//! (`model_state.lstm.weight_ih_l0`). Values other than tensors are not read. A file's content is not
//! trusted: all positions are compared with the file's length, and values are read only when a tensor is
//! asked for.

pub(crate) mod archive;
mod pickle;
#[cfg(test)]
mod tests;

use crate::Error;
use archive::{Span, io_fault};
use half::f16;
use pickle::{Index, Pickle, Value};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Maximum number of tensors.
const MAX_TENSORS: usize = 1 << 14;
/// Maximum dimensions of a tensor.
const MAX_RANK: usize = 8;
/// Maximum depth of the dictionaries.
const MAX_DEPTH: usize = 8;
/// Maximum bytes of one tensor.
const MAX_TENSOR: u64 = 1 << 30;
/// Maximum bytes of a name.
const MAX_NAME: usize = 1 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Type {
    F32,
    F16,
    I64,
    /// A type that is not read, with the bytes of an element.
    Other(u64),
}

impl Type {
    fn of_storage(class: &str) -> Option<Self> {
        Some(match class {
            "FloatStorage" => Self::F32,
            "HalfStorage" => Self::F16,
            "LongStorage" => Self::I64,
            "DoubleStorage" => Self::Other(8),
            "IntStorage" => Self::Other(4),
            "ShortStorage" | "BFloat16Storage" => Self::Other(2),
            "CharStorage" | "ByteStorage" | "BoolStorage" => Self::Other(1),
            _ => return None,
        })
    }

    fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::I64 => 8,
            Self::Other(bytes) => bytes,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Tensor {
    ty: Type,
    storage: String,
    /// Elements of the storage before the first one.
    offset: u64,
    shape: Vec<usize>,
    strides: Vec<u64>,
}

/// A file's tensors by name.
#[derive(Debug)]
pub(crate) struct TorchFile {
    path: PathBuf,
    file: File,
    tensors: BTreeMap<String, Tensor>,
    storages: HashMap<String, Span>,
}

impl TorchFile {
    /// # Errors
    /// [`Error::Artefact`] if it is not a file of `torch.save`, or not a tree of tensors; I/O errors.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path);
        let file =
            file.map_err(|source| Error::Io { what: format!("cannot read {}", path.display()), source })?;
        let read = read(&file).map_err(|reason| Error::Artefact { path: path.to_owned(), reason });
        read.map(|(tensors, storages)| Self { path: path.to_owned(), file, tensors, storages })
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The dimensions of a tensor.
    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|tensor| tensor.shape.as_slice())
    }

    /// The values of a tensor of f32 or f16 in row-major order.
    ///
    /// # Errors
    /// [`Error::Artefact`] if there is none of this name, shape and type, or a value is not finite.
    pub(crate) fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let (ty, bytes) = self.values(name, shape)?;
        let values: Vec<f32> = match ty {
            Type::F32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            Type::F16 => {
                bytes.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect()
            }
            other => {
                return Err(self.fault(format!("tensor {name} has type {other:?}, it must be f32 or f16")));
            }
        };
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) => Err(self.fault(format!("tensor {name}: value {at} is not finite"))),
        }
    }

    /// The values of a tensor of i64 in row-major order.
    ///
    /// # Errors
    /// [`Error::Artefact`] if there is none of this name, shape and type.
    pub(crate) fn integers(&self, name: &str, shape: &[usize]) -> Result<Vec<i64>, Error> {
        match self.values(name, shape)? {
            (Type::I64, bytes) => {
                Ok(bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
            }
            (other, _) => Err(self.fault(format!("tensor {name} has type {other:?}, it must be i64"))),
        }
    }

    /// An error about this file.
    pub(crate) fn fault(&self, reason: impl Into<String>) -> Error {
        Error::Artefact { path: self.path.clone(), reason: reason.into() }
    }

    /// The type of a tensor, and the bytes of its elements in row-major order.
    fn values(&self, name: &str, shape: &[usize]) -> Result<(Type, Vec<u8>), Error> {
        let tensor =
            self.tensors.get(name).ok_or_else(|| self.fault(format!("there is no tensor {name}")))?;
        if tensor.shape != shape {
            return Err(
                self.fault(format!("tensor {name} has shape {:?}, it must be {shape:?}", tensor.shape))
            );
        }
        let Some(storage) = self.storages.get(&tensor.storage) else {
            return Err(self.fault(format!("tensor {name}: the file has no storage {}", tensor.storage)));
        };
        let fault = |reason: String| self.fault(format!("tensor {name}: {reason}"));
        let range = tensor.range(storage.len).map_err(fault)?;
        let span = Span { at: storage.at + range.at, len: range.len };
        let bytes = archive::read(&self.file, span).map_err(fault)?;
        Ok((tensor.ty, tensor.in_order(bytes)))
    }
}

impl Tensor {
    /// The bytes of a storage of `storage` bytes from the first element to the last.
    fn range(&self, storage: u64) -> Result<Span, String> {
        let outside = || {
            let Self { offset, shape, strides, .. } = self;
            format!(
                "shape {shape:?}, strides {strides:?}, offset {offset} exceed its storage of {storage} bytes"
            )
        };
        let mut count = 1u64;
        let mut last = self.offset;
        for (dim, stride) in self.shape.iter().zip(&self.strides) {
            let dim = *dim as u64;
            count = count.checked_mul(dim).ok_or_else(outside)?;
            let far = dim.saturating_sub(1).checked_mul(*stride).and_then(|far| last.checked_add(far));
            last = far.ok_or_else(outside)?;
        }
        let size = self.ty.bytes();
        if count == 0 {
            return Ok(Span { at: 0, len: 0 });
        }
        let end = last.checked_add(1).and_then(|end| end.checked_mul(size)).ok_or_else(outside)?;
        // Strides of 0 could repeat few values without end.
        let bytes = count.checked_mul(size).ok_or_else(outside)?;
        if end > storage || bytes > storage {
            return Err(outside());
        }
        let at = self.offset * size;
        match end - at {
            0..=MAX_TENSOR => Ok(Span { at, len: end - at }),
            len => Err(format!("it has {len} bytes, at most {MAX_TENSOR}")),
        }
    }

    /// Brings the elements of the range into row-major order.
    fn in_order(&self, bytes: Vec<u8>) -> Vec<u8> {
        if bytes.is_empty() {
            return bytes;
        }
        let mut dense = 1;
        let mut is_dense = true;
        for (dim, stride) in self.shape.iter().zip(&self.strides).rev() {
            is_dense &= *dim <= 1 || *stride == dense;
            dense *= *dim as u64;
        }
        if is_dense {
            return bytes;
        }
        let size = self.ty.bytes() as usize;
        let mut ordered = Vec::with_capacity(dense as usize * size);
        let mut at = vec![0; self.shape.len()];
        for _ in 0..dense {
            let element: u64 = at.iter().zip(&self.strides).map(|(at, stride)| *at as u64 * stride).sum();
            let start = element as usize * size;
            ordered.extend_from_slice(&bytes[start..start + size]);
            for (at, dim) in at.iter_mut().zip(&self.shape).rev() {
                *at += 1;
                if *at < *dim {
                    break;
                }
                *at = 0;
            }
        }
        ordered
    }
}

type Content = (BTreeMap<String, Tensor>, HashMap<String, Span>);

fn read(file: &File) -> Result<Content, String> {
    let len = file.metadata().map_err(io_fault)?.len();
    match archive::members(file, len)? {
        Some(members) => read_archive(file, len, &members),
        None => read_sequence(file, len),
    }
}

fn read_archive(file: &File, len: u64, members: &archive::Members) -> Result<Content, String> {
    let mut roots = members.keys().filter_map(|name| name.strip_suffix("/data.pkl"));
    let (Some(root), None) = (roots.next(), roots.next()) else {
        return Err("the archive must have one member named data.pkl".to_owned());
    };
    if let Some((name, span)) = members.get_key_value(&format!("{root}/byteorder")) {
        let order = archive::member(file, len, name, Span { len: span.len.min(16), ..*span })?;
        if archive::read(file, order)? != b"little" {
            return Err("its byte order is not little".to_owned());
        }
    }
    let name = format!("{root}/data.pkl");
    let span = archive::member(file, len, &name, members[&name])?;
    if span.len > pickle::MAX_BYTES as u64 {
        return Err(format!("data.pkl has {} bytes, at most {}", span.len, pickle::MAX_BYTES));
    }
    let bytes = archive::read(file, span)?;
    let tensors = Tree::of(&pickle::read(&bytes)?)?;
    let mut storages = HashMap::new();
    for tensor in tensors.values() {
        let name = format!("{root}/data/{}", tensor.storage);
        if !storages.contains_key(&tensor.storage)
            && let Some(member) = members.get(&name)
        {
            storages.insert(tensor.storage.clone(), archive::member(file, len, &name, *member)?);
        }
    }
    Ok((tensors, storages))
}

/// A file from before PyTorch 1.6: its pickles, then for each storage the number of elements and the
/// elements.
fn read_sequence(file: &File, len: u64) -> Result<Content, String> {
    let bytes = archive::read(file, Span { at: 0, len: len.min(pickle::MAX_BYTES as u64) })?;
    let start = archive::sequence(&bytes)?;
    let object = pickle::read(&bytes[start..])?;
    let tensors = Tree::of(&object)?;
    let keys_start = start + object.len;
    let keys = pickle::read(&bytes[keys_start..])?;
    let Value::List(list) = &keys.values[keys.root] else {
        return Err("the list of storages is not a list".to_owned());
    };
    let types = storage_types(&object);
    let mut storages = HashMap::new();
    let mut at = (keys_start + keys.len) as u64;
    for key in list {
        let Value::Text(key) = keys.values[*key] else {
            return Err("a storage's key is not a text".to_owned());
        };
        let ty = types.get(key).ok_or_else(|| format!("the type of storage {key} is unknown"))?;
        let outside = || format!("storage {key} is not in the file's {len} bytes: it is truncated");
        if at + 8 > len {
            return Err(outside());
        }
        let mut count = [0; 8];
        count.copy_from_slice(&archive::read(file, Span { at, len: 8 })?);
        let bytes = u64::from_le_bytes(count).checked_mul(ty.bytes()).ok_or_else(outside)?;
        at += 8;
        let end = at.checked_add(bytes).filter(|end| *end <= len).ok_or_else(outside)?;
        storages.insert((*key).to_owned(), Span { at, len: bytes });
        at = end;
    }
    Ok((tensors, storages))
}

/// The types of all storages that a pickle names.
fn storage_types(pickle: &Pickle<'_>) -> HashMap<String, Type> {
    let storages = pickle.values.iter().filter_map(|value| match value {
        Value::Persistent(description) => storage(pickle, *description).ok(),
        _ => None,
    });
    storages.map(|(ty, key)| (key.to_owned(), ty)).collect()
}

/// A storage's type and key, from `('storage', class, key, device, elements, ..)`.
fn storage<'a>(pickle: &Pickle<'a>, description: Index) -> Result<(Type, &'a str), String> {
    let fault = || "a value from outside is not a storage of a known type".to_owned();
    let Value::List(items) = &pickle.values[description] else { return Err(fault()) };
    let [kind, class, key, ..] = items.as_slice() else { return Err(fault()) };
    match [kind, class, key].map(|item| &pickle.values[*item]) {
        [Value::Text("storage"), Value::Global("torch", class), Value::Text(key)] => {
            Ok((Type::of_storage(class).ok_or_else(fault)?, key))
        }
        _ => Err(fault()),
    }
}

/// Collects the tensors of a pickle's object.
struct Tree<'a> {
    pickle: &'a Pickle<'a>,
    tensors: BTreeMap<String, Tensor>,
    /// Dictionaries' items that may still be read. Dictionaries may occur in each other, more than once.
    left: usize,
}

impl<'a> Tree<'a> {
    fn of(pickle: &'a Pickle<'a>) -> Result<BTreeMap<String, Tensor>, String> {
        let mut tree = Self { pickle, tensors: BTreeMap::new(), left: pickle::MAX_VALUES };
        tree.collect("", pickle.root, 0)?;
        match tree.tensors.is_empty() {
            false => Ok(tree.tensors),
            true => Err("it has no tensors in dictionaries".to_owned()),
        }
    }

    fn value(&self, index: Index) -> &'a Value<'a> {
        &self.pickle.values[index]
    }

    fn collect(&mut self, name: &str, index: Index, depth: usize) -> Result<(), String> {
        let items = match self.value(index) {
            Value::Dict(items) => items,
            Value::Called { function, arguments, items } => match self.value(*function) {
                Value::Global("collections", "OrderedDict") => items,
                Value::Global("torch._utils", "_rebuild_tensor_v2") => {
                    let tensor =
                        self.tensor(*arguments).map_err(|fault| format!("tensor {name}: {fault}"))?;
                    if self.tensors.len() == MAX_TENSORS {
                        return Err(format!("it has more than {MAX_TENSORS} tensors"));
                    }
                    self.tensors.insert(name.to_owned(), tensor);
                    return Ok(());
                }
                Value::Global("torch._utils", "_rebuild_parameter") => {
                    return match self.value(*arguments) {
                        Value::List(items) if !items.is_empty() && depth < MAX_DEPTH => {
                            self.collect(name, items[0], depth + 1)
                        }
                        _ => Err(format!("parameter {name} has no tensor")),
                    };
                }
                _ => return Ok(()),
            },
            _ => return Ok(()),
        };
        if depth == MAX_DEPTH {
            return Err(format!("its dictionaries are nested more than {MAX_DEPTH} deep"));
        }
        for (key, value) in items {
            self.left = self.left.checked_sub(1).ok_or("its dictionaries refer to each other too often")?;
            let key = match self.value(*key) {
                Value::Text(key) => (*key).to_owned(),
                Value::Int(Some(key)) => key.to_string(),
                _ => continue,
            };
            if name.len() + key.len() >= MAX_NAME {
                return Err(format!("a name has more than {MAX_NAME} bytes"));
            }
            let name = if name.is_empty() { key } else { format!("{name}.{key}") };
            self.collect(&name, *value, depth + 1)?;
        }
        Ok(())
    }

    /// A tensor from `(storage, offset, shape, strides, ..)`.
    fn tensor(&self, arguments: Index) -> Result<Tensor, String> {
        let fault = || "its description is not (storage, offset, shape, strides, ..)".to_owned();
        let Value::List(items) = self.value(arguments) else { return Err(fault()) };
        let [from, offset, shape, strides, ..] = items.as_slice() else { return Err(fault()) };
        let Value::Persistent(description) = self.value(*from) else { return Err(fault()) };
        let (ty, key) = storage(self.pickle, *description)?;
        let number = |index: Index| match self.value(index) {
            Value::Int(Some(number)) => u64::try_from(*number).map_err(|_| fault()),
            _ => Err(fault()),
        };
        let numbers = |index: Index| match self.value(index) {
            Value::List(items) if items.len() <= MAX_RANK => items.iter().map(|item| number(*item)).collect(),
            _ => Err(fault()),
        };
        let (shape, strides): (Vec<u64>, Vec<u64>) = (numbers(*shape)?, numbers(*strides)?);
        if shape.len() != strides.len() {
            return Err(fault());
        }
        let shape = shape.into_iter().map(|dim| usize::try_from(dim).map_err(|_| fault()));
        Ok(Tensor {
            ty,
            storage: key.to_owned(),
            offset: number(*offset)?,
            shape: shape.collect::<Result<_, _>>()?,
            strides,
        })
    }
}
