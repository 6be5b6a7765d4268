//! Broken and hostile files: always an error of the expected kind.

use std::io::Write;

use proptest::prelude::*;

use super::good_files::small_file;
use crate::ModelFile;
use crate::gguf::Malformed;
use crate::gguf::parse::{parse, value_type};
use crate::inspect::Summary;
use crate::{Error, GgmlType};

/// A file under construction; every part can be made invalid.
struct Draft {
    start: Vec<u8>,
    tensor_count: u64,
    key_count: u64,
    keys: Vec<u8>,
    tensors: Vec<u8>,
    data: usize,
}

const WEIGHT_F32: u32 = GgmlType::F32 as u32;
const WEIGHT_Q4_K: u32 = GgmlType::Q4_K as u32;

/// A string with its length prefix.
fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    [&(text.as_ref().len() as u64).to_le_bytes(), text.as_ref()].concat()
}

/// An array's element type and count, followed by `elements`.
fn array(ty: u32, count: u64, elements: impl AsRef<[u8]>) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &count.to_le_bytes(), elements.as_ref()].concat()
}

impl Draft {
    /// A valid file: one key, no tensor, 64 bytes of data.
    fn new() -> Self {
        let start = [b"GGUF", 3_u32.to_le_bytes().as_slice()].concat();
        let draft = Self { start, tensor_count: 0, key_count: 0, keys: vec![], tensors: vec![], data: 64 };
        draft.key("general.architecture", value_type::STRING, string("llama"))
    }

    fn start(mut self, magic: &[u8], version: u32) -> Self {
        self.start = [magic, version.to_le_bytes().as_slice()].concat();
        self
    }

    fn key(mut self, key: impl AsRef<[u8]>, ty: u32, payload: impl AsRef<[u8]>) -> Self {
        self.key_count += 1;
        self.keys.extend(string(key));
        self.keys.extend(ty.to_le_bytes());
        self.keys.extend_from_slice(payload.as_ref());
        self
    }

    fn alignment(self, alignment: u32) -> Self {
        self.key("general.alignment", value_type::U32, alignment.to_le_bytes())
    }

    fn tensor(mut self, name: impl AsRef<[u8]>, dims: &[u64], ty: u32, offset: u64) -> Self {
        self.tensor_count += 1;
        self.tensors.extend(string(name));
        self.tensors.extend((dims.len() as u32).to_le_bytes());
        self.tensors.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        self.tensors.extend(ty.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self
    }

    /// Adds raw bytes, counted as one key or one tensor.
    fn raw_key(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.key_count += 1;
        self.keys.extend_from_slice(bytes.as_ref());
        self
    }

    fn raw_tensor(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.tensor_count += 1;
        self.tensors.extend_from_slice(bytes.as_ref());
        self
    }

    fn counts(mut self, tensors: u64, keys: u64) -> Self {
        (self.tensor_count, self.key_count) = (tensors, keys);
        self
    }

    fn bytes(self) -> Vec<u8> {
        let counts = [self.tensor_count.to_le_bytes(), self.key_count.to_le_bytes()].concat();
        let mut bytes = [self.start, counts, self.keys, self.tensors].concat();
        bytes.resize(bytes.len().next_multiple_of(32) + self.data, 0);
        bytes
    }

    /// The same without padding and data.
    fn bytes_without_data(mut self) -> Vec<u8> {
        self.data = 0;
        let table = self.start.len() + 16 + self.keys.len() + self.tensors.len();
        let mut bytes = self.bytes();
        bytes.truncate(table);
        bytes
    }
}

/// A table row: the defect, the file, and a check of the error.
type Row = (&'static str, Vec<u8>, fn(&Malformed) -> bool);

macro_rules! rows {
    ($($case:literal: $bytes:expr => $expected:pat $(if $guard:expr)?,)*) => {
        vec![$(($case, $bytes, |error| matches!(error, $expected $(if $guard)?))),*]
    };
}

fn header() -> Vec<Row> {
    use Malformed::*;
    let new = Draft::new;
    rows! {
        "empty": vec![] => Truncated { offset: 0, need: 4, have: 0, .. },
        "three bytes": b"GGU".to_vec() => Truncated { need: 4, have: 3, .. },
        "an older format": new().start(b"GGML", 3).bytes() => Magic { found } if found == b"GGML",
        "lower case": new().start(b"gguf", 3).bytes() => Magic { .. },
        "backwards": new().start(b"FUGG", 3).bytes() => Magic { .. },
        "a zip archive": b"PK\x03\x04 and so on and on and on".to_vec() => Magic { .. },
        "no version": b"GGUF\x03".to_vec() => Truncated { offset: 4, need: 4, have: 1, .. },
        "version 0": new().start(b"GGUF", 0).bytes() => Version { found: 0 },
        "version 1": new().start(b"GGUF", 1).bytes() => Version { found: 1 },
        "version 4": new().start(b"GGUF", 4).bytes() => Version { found: 4 },
        "version of ones": new().start(b"GGUF", u32::MAX).bytes() => Version { found: u32::MAX },
        "big-endian": new().start(b"GGUF", 3_u32.to_be()).bytes() => BigEndian { version: 3 },
        "big-endian 2": new().start(b"GGUF", 2_u32.to_be()).bytes() => BigEndian { version: 2 },
        "no counts": b"GGUF\x03\0\0\0".to_vec() => Truncated { offset: 8, need: 8, have: 0, .. },
        "tensors without end": new().counts(u64::MAX, 1).bytes()
            => OverLimit { found: u64::MAX, limit: 65_536, .. },
        "a tensor over the limit": new().counts(65_537, 1).bytes() => OverLimit { found: 65_537, .. },
        "most tensors, none there": new().counts(65_536, 1).bytes_without_data() => Truncated { .. },
        "keys without end": new().counts(0, u64::MAX).bytes()
            => OverLimit { found: u64::MAX, limit: 65_536, .. },
        "a key over the limit": new().counts(0, 65_537).bytes() => OverLimit { found: 65_537, .. },
        "negative keys": new().counts(0, 1 << 63).bytes() => OverLimit { .. },
        "most keys, one there": new().counts(0, 65_536).bytes_without_data() => Truncated { .. },
        "a tensor that is not there": new().counts(1, 1).bytes() => Zero { .. },
    }
}

fn metadata() -> Vec<Row> {
    use Malformed::*;
    use value_type::*;
    let new = Draft::new;
    rows! {
        "empty key": new().key("", U8, [1]).bytes() => Zero { .. },
        "key without end": new().raw_key([0xff; 8]).bytes()
            => OverLimit { found: u64::MAX, limit: 65_535, .. },
        "key over the limit": new().key("k".repeat(65_536), U8, [1]).bytes() => OverLimit { .. },
        "key not UTF-8": new().key(b"\xc3\x28", U8, [1]).bytes() => NotUtf8 { .. },
        "key twice": new().key("a", U8, [1]).key("b", U8, [1]).key("a", U8, [2]).bytes()
            => DuplicateKey { key } if key == "a",
        "value type 13": new().key("a", 13, [0; 8]).bytes() => ValueType { found: 13, .. },
        "value type of ones": new().key("a", u32::MAX, [0; 8]).bytes() => ValueType { found: u32::MAX, .. },
        "a bool of 2": new().key("a", BOOL, [2]).bytes()
            => NotBool { found: 2, field } if field == "the value of a",
        "value cut off": new().key("a", U64, [1, 2, 3]).bytes_without_data()
            => Truncated { need: 8, have: 3, .. },
        "string without end": new().key("a", STRING, [0xff; 8]).bytes()
            => OverLimit { found: u64::MAX, limit: 67_108_864, .. },
        "string over the limit": new().key("a", STRING, (67_108_865_u64).to_le_bytes()).bytes()
            => OverLimit { found: 67_108_865, .. },
        "string longer than the file": new().key("a", STRING, (1_048_576_u64).to_le_bytes()).bytes()
            => Truncated { need: 1_048_576, .. },
        "string not UTF-8": new().key("a", STRING, string(b"a\xff")).bytes()
            => NotUtf8 { field, .. } if field == "the value of a",
        "elements of type 13": new().key("a", ARRAY, array(13, 1, [0; 8])).bytes()
            => ValueType { found: 13, .. },
        "elements without end": new().key("a", ARRAY, array(U8, u64::MAX, [])).bytes()
            => OverLimit { found: u64::MAX, limit: 16_777_216, .. },
        "an element over the limit": new().key("a", ARRAY, array(F32, 16_777_217, [])).bytes()
            => OverLimit { found: 16_777_217, .. },
        "most elements, none there": new().key("a", ARRAY, array(F32, 16_777_216, [])).bytes()
            => Truncated { need: 67_108_864, .. },
        "most strings, none there": new().key("a", ARRAY, array(STRING, 16_777_216, [])).bytes_without_data()
            => Truncated { .. },
        "most arrays, none there": new().key("a", ARRAY, array(ARRAY, 16_777_216, [])).bytes_without_data()
            => Truncated { .. },
        "an element too few": new().key("a", ARRAY, array(U64, 2, [0; 15])).bytes_without_data()
            => Truncated { need: 16, have: 15, .. },
        "a bool element of 7": new().key("a", ARRAY, array(BOOL, 3, [0, 1, 7])).bytes()
            => NotBool { found: 7, .. },
        "a string element over the limit": new().key("a", ARRAY, array(STRING, 1, [0xff; 8])).bytes()
            => OverLimit { found: u64::MAX, .. },
        "a string element not UTF-8": new().key("a", ARRAY, array(STRING, 1, string([0x80]))).bytes()
            => NotUtf8 { .. },
        "five arrays deep": {
            let nest = |inner: Vec<u8>| array(ARRAY, 1, inner);
            new().key("a", ARRAY, nest(nest(nest(nest(array(U8, 1, [7])))))).bytes()
        } => OverLimit { found: 5, limit: 4, .. },
        "an inner array without end": new().key("a", ARRAY, array(ARRAY, 1, array(U8, u64::MAX, []))).bytes()
            => OverLimit { .. },
        "alignment 0": new().alignment(0).bytes() => Alignment { .. },
        "alignment 3": new().alignment(3).bytes() => Alignment { .. },
        "alignment 4": new().alignment(4).bytes() => Alignment { found } if found == "4",
        "alignment 48": new().alignment(48).bytes() => Alignment { .. },
        "alignment in words": new().key("general.alignment", STRING, string("32")).bytes()
            => Alignment { found } if found == "string",
    }
}

fn tensors() -> Vec<Row> {
    use Malformed::*;
    let new = Draft::new;
    rows! {
        "empty name": new().tensor("", &[8], WEIGHT_F32, 0).bytes() => Zero { .. },
        "name over the limit": new().tensor("n".repeat(65), &[8], WEIGHT_F32, 0).bytes()
            => OverLimit { found: 65, limit: 64, .. },
        "name without end": new().raw_tensor([0xff; 8]).bytes() => OverLimit { found: u64::MAX, .. },
        "name not UTF-8": new().tensor(b"\xf0\x9f", &[8], WEIGHT_F32, 0).bytes() => NotUtf8 { .. },
        "no dimension": new().tensor("w", &[], WEIGHT_F32, 0).bytes() => Zero { .. },
        "five dimensions": new().tensor("w", &[1; 5], WEIGHT_F32, 0).bytes() => OverLimit { found: 5, limit: 4, .. },
        "dimensions without end": new().raw_tensor([string("w"), vec![0xff; 4]].concat()).bytes()
            => OverLimit { found: 0xffff_ffff, .. },
        "a dimension of zero": new().tensor("w", &[8, 0], WEIGHT_F32, 0).bytes() => Zero { .. },
        "a size that overflows": new().tensor("w", &[1 << 32, 1 << 32], WEIGHT_F32, 0).bytes() => SizeOverflow { .. },
        "a size that wraps to zero": new().tensor("w", &[1 << 62, 4], WEIGHT_F32, 0).bytes() => SizeOverflow { .. },
        "a size that wraps to four": new().tensor("w", &[(1 << 62) + 1], WEIGHT_F32, 0).bytes()
            => SizeOverflow { .. },
        "blocks that wrap": new().tensor("w", &[256, 1 << 60, 2], WEIGHT_Q4_K, 0).bytes() => SizeOverflow { .. },
        "a negative dimension": new().tensor("w", &[u64::MAX], WEIGHT_F32, 0).bytes() => SizeOverflow { .. },
        "a removed type": new().tensor("w", &[32], 4, 0).bytes() => TensorType { found: 4, .. },
        "a type to come": new().tensor("w", &[32], 41, 0).bytes() => TensorType { found: 41, .. },
        "a type of ones": new().tensor("w", &[32], u32::MAX, 0).bytes() => TensorType { .. },
        "part of a block": new().tensor("w", &[100], WEIGHT_Q4_K, 0).bytes()
            => PartialBlock { row: 100, block: 256, .. },
        "a row that ends in a block": new().tensor("w", &[128, 2], WEIGHT_Q4_K, 0).bytes() => PartialBlock { .. },
        "an odd offset": new().tensor("w", &[8], WEIGHT_F32, 1).bytes()
            => Misaligned { offset: 1, alignment: 32, .. },
        "an offset off the file's own alignment": new().alignment(64).tensor("w", &[8], WEIGHT_F32, 32).bytes()
            => Misaligned { offset: 32, alignment: 64, .. },
        "past the end": new().tensor("w", &[8], WEIGHT_F32, 64).bytes()
            => OutOfFile { offset: 64, bytes: 32, have: 64, .. },
        "over the end": new().tensor("w", &[17], WEIGHT_F32, 0).bytes() => OutOfFile { bytes: 68, have: 64, .. },
        "far past the end": new().tensor("w", &[8], WEIGHT_F32, 1 << 40).bytes() => OutOfFile { .. },
        "an end that wraps": new().tensor("w", &[8], WEIGHT_F32, u64::MAX - 31).bytes() => OutOfFile { .. },
        "a negative offset": new().tensor("w", &[8], WEIGHT_F32, 1 << 63).bytes() => OutOfFile { .. },
        "data that the alignment puts past the end": new().alignment(1 << 31).tensor("w", &[8], WEIGHT_F32, 0).bytes()
            => OutOfFile { have: 0, .. },
        "no data": new().tensor("w", &[8], WEIGHT_F32, 0).bytes_without_data() => OutOfFile { have: 0, .. },
        "the same bytes": new().tensor("v", &[8], WEIGHT_F32, 32).tensor("w", &[8], WEIGHT_F32, 32).bytes()
            => Overlap { .. },
        "some of the same bytes": new().tensor("v", &[1], WEIGHT_F32, 32).tensor("w", &[9], WEIGHT_F32, 0).bytes()
            => Overlap { first, second } if first == "w" && second == "v",
        "a tensor twice": new().tensor("w", &[8], WEIGHT_F32, 0).tensor("w", &[8], WEIGHT_F32, 32).bytes()
            => DuplicateTensor { tensor } if tensor == "w",
        "a table cut off": new().raw_tensor(string("w")).bytes_without_data() => Truncated { .. },
    }
}

fn open(bytes: &[u8]) -> Result<ModelFile, Error> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    ModelFile::open(file.path())
}

#[test]
fn each_bad_file_has_its_error() {
    let rows: Vec<Row> = [header(), metadata(), tensors()].into_iter().flatten().collect();
    assert!(rows.len() >= 60, "{}", rows.len());
    for (case, bytes, is_expected) in rows {
        match open(&bytes) {
            Err(Error::Malformed { source, .. }) => assert!(is_expected(&source), "{case}: {source:?}"),
            other => panic!("{case}: {other:?}"),
        }
    }
}

#[test]
fn the_base_of_the_bad_files_is_valid() {
    let good = Draft::new().alignment(32).tensor("v", &[8], WEIGHT_F32, 32).tensor("w", &[8], WEIGHT_F32, 0);
    assert_eq!(open(&good.bytes()).unwrap().tensors().len(), 2);
    assert_eq!(open(&Draft::new().start(b"GGUF", 2).bytes()).unwrap().metadata().len(), 1);
    assert_eq!(open(&Draft::new().bytes_without_data()).unwrap().tensors().len(), 0);
    let deep = array(value_type::ARRAY, 1, array(value_type::ARRAY, 1, array(value_type::U8, 1, [7])));
    assert!(open(&Draft::new().key("a", value_type::ARRAY, deep).bytes()).is_ok());
}

#[test]
fn errors_name_the_field_the_value_and_the_limit() {
    let text = |draft: Draft| parse(&draft.bytes()).unwrap_err().to_string();
    assert_eq!(
        text(Draft::new().counts(1 << 40, 0)),
        "the number of tensors is 1099511627776, the limit is 65536"
    );
    assert_eq!(
        text(Draft::new().tensor("blk.0.attn_q.weight", &[64; 5], WEIGHT_F32, 0)),
        "the number of dimensions of blk.0.attn_q.weight is 5, the limit is 4"
    );
    assert_eq!(
        text(Draft::new().tensor("w", &[8], WEIGHT_F32, 64)),
        "tensor w takes 32 bytes from 64 of the data section, which has 64"
    );
    let key = Draft::new().key("tokenizer.ggml.tokens", value_type::ARRAY, array(value_type::F32, 100, []));
    assert!(
        text(key).starts_with("the file ends inside an element of tokenizer.ggml.tokens: 400 bytes needed")
    );
}

#[test]
fn every_truncation_is_an_error() {
    let file = small_file();
    assert!(file.len() <= 20 << 10, "{}", file.len());
    parse(&file).unwrap();
    for len in 0..file.len() {
        assert!(parse(&file[..len]).is_err(), "{len} bytes of {}", file.len());
    }
    for len in (0..file.len()).step_by(509) {
        assert!(matches!(open(&file[..len]), Err(Error::Malformed { .. })), "{len} bytes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// No bytes cause a panic, and every listed tensor can be read.
    #[test]
    fn flipped_bytes_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        // Half of the flips are in the header.
        near_the_start in any::<bool>(),
    ) {
        let mut file = small_file();
        let reach = if near_the_start { 3_000 } else { file.len() };
        for (at, byte) in flips {
            file[at.index(reach)] = byte;
        }
        if let Ok(gguf) = open(&file) {
            for info in gguf.tensors() {
                prop_assert_eq!(gguf.tensor_data(info.name()).unwrap().len() as u64, info.bytes());
            }
            // Errors are fine, panics are not.
            let _ = Summary::of(&gguf).map(|summary| summary.to_string());
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut file = b"GGUF\x03\0\0\0\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
        file.extend(bytes);
        let _ = parse(&file);
    }
}
