//! Reads CTranslate2's model files, version 6. Numbers are little endian. A text is its length in 16 bits and
//! its bytes, the last of which is 0.
//!
//! ```text
//! version: u32, specification: text, its revision: u32
//! variables: u32, each: name: text, rank: u8, dimensions: u32.., type: u8, bytes: u32, values
//! aliases: u32, each: alias: text, name: text
//! ```
//!
//! The content is not trusted: lengths are compared with the file's length before anything is read into
//! memory.

use super::source::Source;
use crate::Error;
use kernels::quant::GgmlType;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The supported version.
const VERSION: u32 = 6;
const SPECIFICATION: &str = "WhisperSpec";
/// Supported revisions of the specification.
const REVISIONS: std::ops::RangeInclusive<u32> = 2..=3;
/// Maximum number of variables, and of aliases.
const MAX_VARIABLES: u32 = 1 << 16;
/// Maximum dimensions of a variable.
const MAX_RANK: u8 = 4;

/// A model's variables by name, with the positions of their values.
pub(super) struct Weights<R> {
    path: PathBuf,
    source: R,
    variables: HashMap<String, Variable>,
}

#[derive(Debug, Clone)]
struct Variable {
    dims: Vec<usize>,
    ty: Type,
    at: u64,
    bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Type {
    F32,
    I8,
    I16,
    I32,
    F16,
    BF16,
}

impl Type {
    fn of(number: u8) -> Option<Self> {
        [Self::F32, Self::I8, Self::I16, Self::I32, Self::F16, Self::BF16].get(usize::from(number)).copied()
    }

    fn bytes(self) -> usize {
        match self {
            Self::I8 => 1,
            Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::I32 => 4,
        }
    }

    fn float(self) -> Option<GgmlType> {
        match self {
            Self::F32 => Some(GgmlType::F32),
            Self::F16 => Some(GgmlType::F16),
            Self::BF16 => Some(GgmlType::BF16),
            Self::I8 | Self::I16 | Self::I32 => None,
        }
    }
}

impl Weights<BufReader<File>> {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// [`Error::Artefact`] if it is not such a file; I/O errors.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let opened = File::open(path).map_err(|source| failed(path, source))?;
        Self::read(path, BufReader::new(opened))
    }
}

fn failed(path: &Path, source: io::Error) -> Error {
    Error::Io { what: format!("cannot read {}", path.display()), source }
}

/// Reads the entries of the header one after the other.
struct Reader<'a, R> {
    path: &'a Path,
    source: R,
    at: u64,
    len: u64,
}

impl<R: Read + Seek> Reader<'_, R> {
    fn wrong(&self, reason: impl Into<String>) -> Error {
        Error::Artefact { path: self.path.to_owned(), reason: reason.into() }
    }

    /// Checks that this many bytes are left.
    fn has(&self, bytes: u64, item: &str) -> Result<(), Error> {
        let left = self.len - self.at;
        if bytes <= left {
            return Ok(());
        }
        Err(self
            .wrong(format!("it ends within {item}: {bytes} bytes at {}, of which {left} are there", self.at)))
    }

    fn bytes<const N: usize>(&mut self, item: &str) -> Result<[u8; N], Error> {
        self.has(N as u64, item)?;
        let mut bytes = [0; N];
        self.source.read_exact(&mut bytes).map_err(|source| failed(self.path, source))?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn byte(&mut self, item: &str) -> Result<u8, Error> {
        self.bytes(item).map(|[byte]| byte)
    }

    fn word(&mut self, item: &str) -> Result<u32, Error> {
        self.bytes(item).map(u32::from_le_bytes)
    }

    fn count(&mut self, item: &str) -> Result<u32, Error> {
        let count = self.word(item)?;
        if count > MAX_VARIABLES {
            return Err(self.wrong(format!("it has {count} {item}, the limit is {MAX_VARIABLES}")));
        }
        Ok(count)
    }

    fn text(&mut self, item: &str) -> Result<String, Error> {
        let len = u16::from_le_bytes(self.bytes(item)?);
        self.has(len.into(), item)?;
        let mut text = vec![0; len.into()];
        self.source.read_exact(&mut text).map_err(|source| failed(self.path, source))?;
        self.at += u64::from(len);
        if text.last() == Some(&0) {
            text.pop();
        }
        String::from_utf8(text).map_err(|_| self.wrong(format!("{item} is not UTF-8")))
    }

    fn skip(&mut self, bytes: u64, item: &str) -> Result<(), Error> {
        self.has(bytes, item)?;
        let by = i64::try_from(bytes).map_err(|_| self.wrong(format!("{item} is too long")))?;
        self.source.seek_relative(by).map_err(|source| failed(self.path, source))?;
        self.at += bytes;
        Ok(())
    }

    fn variable(&mut self) -> Result<(String, Variable), Error> {
        let name = self.text("the name of a variable")?;
        let rank = self.byte(&name)?;
        if rank > MAX_RANK {
            return Err(self.wrong(format!("{name} has {rank} dimensions, the limit is {MAX_RANK}")));
        }
        let mut dims = Vec::with_capacity(rank.into());
        for _ in 0..rank {
            dims.push(self.word(&name)? as usize);
        }
        // With a zero dimension, the other dimensions could be arbitrary, since no bytes back them.
        if dims.contains(&0) {
            return Err(self.wrong(format!("{name} is {dims:?}, no dimension may be 0")));
        }
        let number = self.byte(&name)?;
        let ty = Type::of(number)
            .ok_or_else(|| self.wrong(format!("{name} is of type {number}, known are 0 to 5")))?;
        let bytes = self.word(&name)?;
        let values = dims.iter().try_fold(ty.bytes(), |all, dim| all.checked_mul(*dim));
        if values != Some(bytes as usize) {
            return Err(
                self.wrong(format!("{name} is {dims:?} of {} bytes each, and has {bytes} bytes", ty.bytes()))
            );
        }
        let at = self.at;
        self.skip(bytes.into(), &name)?;
        Ok((name, Variable { dims, ty, at, bytes: bytes as usize }))
    }
}

impl<R: Read + Seek> Weights<R> {
    pub(super) fn read(path: &Path, mut source: R) -> Result<Self, Error> {
        let len = source.seek(SeekFrom::End(0)).and_then(|len| source.rewind().map(|()| len));
        let len = len.map_err(|source| failed(path, source))?;
        let mut reader = Reader { path, source, at: 0, len };
        let version = reader.word("its version")?;
        if version != VERSION {
            return Err(reader
                .wrong(format!("it is of version {version} of CTranslate2's format, {VERSION} is read")));
        }
        let specification = reader.text("the name of its specification")?;
        if specification != SPECIFICATION {
            return Err(
                reader.wrong(format!("it is a model of {specification:?}, {SPECIFICATION:?} is served"))
            );
        }
        let revision = reader.word("its revision")?;
        if !REVISIONS.contains(&revision) {
            let (from, to) = (REVISIONS.start(), REVISIONS.end());
            return Err(
                reader.wrong(format!("{SPECIFICATION} is of revision {revision}, {from} to {to} are read"))
            );
        }
        let mut variables = HashMap::new();
        for _ in 0..reader.count("variables")? {
            let (name, variable) = reader.variable()?;
            if variables.contains_key(&name) {
                return Err(reader.wrong(format!("{name} is there twice")));
            }
            variables.insert(name, variable);
        }
        for _ in 0..reader.count("aliases")? {
            let (alias, name) = (reader.text("an alias")?, reader.text("what an alias stands for")?);
            let Some(variable) = variables.get(&name).cloned() else {
                return Err(reader.wrong(format!("{alias} stands for {name}, which is not there")));
            };
            variables.entry(alias).or_insert(variable);
        }
        if reader.at != len {
            return Err(reader.wrong(format!("{} bytes follow its end", len - reader.at)));
        }
        Ok(Self { path: path.to_owned(), source: reader.source, variables })
    }

    fn find(&self, name: &str) -> Result<Variable, Error> {
        self.variables.get(name).cloned().ok_or_else(|| self.wrong(format!("it has no {name}")))
    }

    fn values(&mut self, variable: &Variable) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; variable.bytes];
        let read =
            self.source.seek(SeekFrom::Start(variable.at)).and_then(|_| self.source.read_exact(&mut bytes));
        read.map_err(|source| failed(&self.path, source))?;
        Ok(bytes)
    }
}

impl<R: Read + Seek> Source for Weights<R> {
    fn wrong(&self, reason: String) -> Error {
        Error::Artefact { path: self.path.clone(), reason }
    }

    fn has(&self, name: &str) -> bool {
        self.variables.contains_key(name)
    }

    fn dims_of(&self, name: &str) -> Result<Vec<usize>, Error> {
        Ok(self.find(name)?.dims)
    }

    fn number(&mut self, name: &str) -> Result<Option<i32>, Error> {
        let Some(variable) = self.variables.get(name).cloned() else { return Ok(None) };
        if !variable.dims.is_empty() {
            return Err(self.wrong(format!("{name} is {:?}, it must be one number", variable.dims)));
        }
        let bytes = self.values(&variable)?;
        Ok(Some(match (variable.ty, bytes.as_slice()) {
            (Type::I8, [a]) => i32::from(a.cast_signed()),
            (Type::I16, [a, b]) => i32::from(i16::from_le_bytes([*a, *b])),
            (Type::I32, [a, b, c, d]) => i32::from_le_bytes([*a, *b, *c, *d]),
            (ty, _) => return Err(self.wrong(format!("{name} is of {ty:?}, it must be a whole number"))),
        }))
    }

    fn floats(&mut self, name: &str, dims: &[usize]) -> Result<(GgmlType, Vec<u8>), Error> {
        let variable = self.find(name)?;
        if variable.dims != dims {
            return Err(self.wrong(format!("{name} is {:?}, it must be {dims:?}", variable.dims)));
        }
        let Some(ty) = variable.ty.float() else {
            return Err(
                self.wrong(format!("{name} is of {:?}; floats of 16 or 32 bits are served", variable.ty))
            );
        };
        Ok((ty, self.values(&variable)?))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u16 + 1).to_le_bytes()[..], text.as_bytes(), &[0]].concat()
    }

    /// A variable in the file's format.
    pub(in super::super) fn variable(name: &str, dims: &[usize], ty: u8, values: &[u8]) -> Vec<u8> {
        let mut out = text(name);
        out.push(dims.len() as u8);
        dims.iter().for_each(|dim| out.extend((*dim as u32).to_le_bytes()));
        out.push(ty);
        out.extend((values.len() as u32).to_le_bytes());
        out.extend(values);
        out
    }

    pub(in super::super) fn file(variables: &[Vec<u8>], aliases: &[(&str, &str)]) -> Vec<u8> {
        let mut out = [&VERSION.to_le_bytes()[..], &text(SPECIFICATION), &3u32.to_le_bytes()].concat();
        out.extend((variables.len() as u32).to_le_bytes());
        out.extend(variables.concat());
        out.extend((aliases.len() as u32).to_le_bytes());
        aliases.iter().for_each(|(alias, name)| out.extend([text(alias), text(name)].concat()));
        out
    }

    fn read(bytes: &[u8]) -> Result<Weights<Cursor<Vec<u8>>>, Error> {
        Weights::read(Path::new("model.bin"), Cursor::new(bytes.to_vec()))
    }

    fn small() -> Vec<u8> {
        let halves: Vec<u8> = [0x3c00u16, 0xc000].iter().flat_map(|half| half.to_le_bytes()).collect();
        let floats: Vec<u8> = [0.5f32, 1.5, -2.0].iter().flat_map(|float| float.to_le_bytes()).collect();
        let variables = [
            variable("a/weight", &[1, 2], 4, &halves),
            variable("b", &[3], 0, &floats),
            variable("heads", &[], 2, &[8, 0]),
        ];
        file(&variables, &[("c/weight", "a/weight")])
    }

    #[test]
    fn variables_are_read_by_name_and_by_alias() {
        let mut weights = read(&small()).unwrap();
        assert_eq!(weights.vector("a/weight", &[1, 2]).unwrap(), [1.0, -2.0]);
        assert_eq!(weights.vector("c/weight", &[1, 2]).unwrap(), [1.0, -2.0]);
        assert_eq!(weights.vector("b", &[3]).unwrap(), [0.5, 1.5, -2.0]);
        assert_eq!(weights.number("heads").unwrap(), Some(8));
        assert_eq!(weights.number("nothing").unwrap(), None);
        assert_eq!(weights.dims("a/weight").unwrap(), [1, 2]);
        assert!(weights.has("c/weight") && !weights.has("c"));
    }

    #[test]
    fn the_error_names_the_field() {
        let error_of = |bytes: &[u8]| read(bytes).err().map(|error| error.to_string()).unwrap();
        let good = small();
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        assert!(error_of(&with(0, 5)).contains("version 5"));
        assert!(error_of(&with(6, b'X')).contains("\"XhisperSpec\""));
        assert!(error_of(&with(18, 9)).contains("revision 9"));
        assert!(error_of(&with(24, 0xff)).contains("variables, the limit is 65536"));
        assert!(error_of(&[&good[..], &[1]].concat()).contains("1 bytes follow"));
        let bad = |variable: Vec<u8>| error_of(&file(&[variable], &[]));
        assert!(bad(variable("w", &[2], 9, &[0; 2])).contains("w is of type 9"));
        assert!(bad(variable("w", &[2; 5], 1, &[0; 32])).contains("5 dimensions"));
        assert!(bad(variable("w", &[3], 4, &[0; 4])).contains("and has 4 bytes"));
        assert!(bad(variable("w", &[u32::MAX as usize; 4], 4, &[])).contains("and has 0 bytes"));
        assert!(
            bad(variable("w", &[u32::MAX as usize, 0], 4, &[]))
                .contains("w is [4294967295, 0], no dimension")
        );
        assert!(error_of(&file(&[], &[("a", "b")])).contains("a stands for b"));
        let twice = variable("w", &[], 1, &[0]);
        assert!(error_of(&file(&[twice.clone(), twice], &[])).contains("twice"));
        let mut weights = read(&good).unwrap();
        let mut error_of = |name: &str, dims: &[usize]| weights.vector(name, dims).unwrap_err().to_string();
        assert!(error_of("x", &[1]).contains("it has no x"));
        assert!(error_of("b", &[4]).contains("b is [3], it must be [4]"));
        assert!(error_of("heads", &[]).contains("heads is of I16"));
        assert!(weights.number("b").unwrap_err().to_string().contains("one number"));
    }

    proptest! {
        /// A truncated or changed file is read or refused, and never needs more memory than it has bytes.
        #[test]
        fn whatever_comes_is_read_or_refused(
            cut in 0usize..200,
            changes in proptest::collection::vec((0usize..200, any::<u8>()), 0..6),
        ) {
            let good = small();
            if cut < good.len() {
                prop_assert!(read(&good[..cut]).is_err());
            }
            let mut bytes = good;
            for (at, byte) in changes {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            if let Ok(mut weights) = read(&bytes) {
                let names: Vec<String> = weights.variables.keys().cloned().collect();
                for name in names {
                    let dims = weights.variables[&name].dims.clone();
                    let _either = weights.vector(&name, &dims);
                    let _either = weights.number(&name);
                }
            }
        }
    }
}
