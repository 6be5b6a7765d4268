//! The reader reads files of the writer.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};

use proptest::prelude::*;

use crate::gguf::Malformed;
use crate::gguf::writer::Writer;
use crate::test_files::{self, fixture};
use crate::{Error, GgmlType, ModelFile};
use metadata::{Array, Metadata, Strings, Value};

/// A whole llama model with a tokenizer, of under 20 KiB; its last byte belongs to a tensor.
pub(super) fn small_file() -> Vec<u8> {
    let plan = test_files::llama();
    let mut file = Vec::new();
    plan.writer().write(&mut file, |info| vec![0x5a_u8; usize::try_from(info.bytes()).unwrap()]).unwrap();
    assert_eq!(file.last(), Some(&0x5a));
    file
}

#[test]
fn every_fixture_opens() {
    let manifest = std::fs::read_to_string(fixture("manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    let mut opened = 0;
    for arch in ["llama", "llama3rope", "qwen2", "qwen3", "qwen3moe", "gemma3"] {
        let item = manifest["items"].as_array().unwrap().iter().find(|item| item["arch"] == arch).unwrap();
        let path = fixture(item["file"].as_str().unwrap());
        let gguf = ModelFile::open(&path).unwrap();
        assert_eq!(gguf.files().collect::<Vec<_>>(), [path]);
        assert!(gguf.tensors().all(|info| info.ty() == GgmlType::F32));
        assert!(gguf.total_tensor_bytes() < item["bytes"].as_u64().unwrap());
        opened += 1;
    }
    for item in manifest["quant"].as_array().unwrap() {
        let gguf = ModelFile::open(fixture(item["file"].as_str().unwrap())).unwrap();
        let mut found: HashMap<&str, u64> = HashMap::new();
        for info in gguf.tensors().filter(|info| !info.name().ends_with(".scale")) {
            *found.entry(info.ty().name()).or_default() += 1;
        }
        let expected = item["tensor_types"].as_object().unwrap();
        let expected = expected.iter().map(|(ty, count)| (ty.as_str(), count.as_u64().unwrap())).collect();
        assert_eq!(found, expected, "{}", item["file"]);
        opened += 1;
    }
    assert!(opened >= 10, "{opened}");
}

#[test]
fn a_tensor_is_read_in_place_and_in_parts() {
    let gguf = ModelFile::open(fixture("tiny/llama/llama-f32.gguf")).unwrap();
    let info = gguf.tensor("blk.1.attn_q.weight").unwrap();
    let bytes = gguf.tensor_data(info.name()).unwrap();
    assert_eq!((bytes.len() as u64, info.elements() * 4), (info.bytes(), info.bytes()));
    assert_eq!(bytes.as_ptr() as usize % 8, 0);
    let mut buffer = vec![0; 100];
    gguf.read_tensor(info.name(), 28, &mut buffer).unwrap();
    assert_eq!(buffer, bytes[28..128]);

    assert!(matches!(gguf.tensor_data("nothing"), Err(Error::MissingTensor { .. })));
    for offset in [info.bytes() - 99, u64::MAX] {
        let result = gguf.read_tensor(info.name(), offset, &mut buffer);
        assert!(matches!(result, Err(Error::TensorRange { len: 100, .. })), "{result:?}");
    }
}

#[test]
fn a_file_that_shrinks_is_an_error() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&small_file()).unwrap();
    let gguf = ModelFile::open(file.path()).unwrap();
    let last = gguf.tensors().last().unwrap().name().to_owned();
    let was = file.as_file().metadata().unwrap().len();
    OpenOptions::new().write(true).open(file.path()).unwrap().set_len(was - 1).unwrap();
    let is_shrunk =
        |error: &Error| matches!(error, Error::Shrunk { was: a, now, .. } if *a == was && *now == was - 1);
    assert!(is_shrunk(&gguf.tensor_data(&last).unwrap_err()));
    assert!(is_shrunk(&gguf.digest().unwrap_err()));
    let mut buffer = vec![0; usize::try_from(gguf.tensor(&last).unwrap().bytes()).unwrap()];
    assert!(is_shrunk(&gguf.read_tensor(&last, 0, &mut buffer).unwrap_err()));
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = ModelFile::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
    let error = ModelFile::open(dir.path().join("absent.gguf")).unwrap_err();
    assert!(matches!(&error, Error::Io { source, .. } if source.kind() == ErrorKind::NotFound), "{error}");
}

#[test]
fn the_digest_names_the_model() {
    let digest = |metadata: &[(&str, Value)], name: &str, fill: u8| {
        let mut writer = Writer::new(metadata.iter().cloned().collect()).unwrap();
        writer.tensor(name, GgmlType::F32, &[8]).unwrap();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writer.write(&mut file, |_| vec![fill; 32]).unwrap();
        ModelFile::open(file.path()).unwrap().digest().unwrap()
    };
    let arch = || ("general.architecture", Value::from("llama"));
    let first = digest(&[arch()], "w", 1);
    assert_eq!(first, digest(&[arch()], "w", 1));
    assert_eq!(first, digest(&[arch(), ("general.alignment", Value::U32(64))], "w", 1));
    assert_eq!(first, digest(&[("split.note", Value::U8(0)), arch()], "w", 1));
    let others = [
        digest(&[arch()], "w", 2),
        digest(&[arch()], "v", 1),
        digest(&[("general.architecture", Value::from("qwen2"))], "w", 1),
        digest(&[arch(), ("general.name", Value::from("x"))], "w", 1),
    ];
    assert!(!others.contains(&first));
    // Golden value: block ids depend on it, so it must not change.
    let hex: String = first.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, "c9373a6a221635041851587e6aae06d9a3df9467f9050103ddd5c4b3e1f335d8");
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let alignment = Metadata::from_iter([("general.alignment", Value::U32(12))]);
    assert!(matches!(Writer::new(alignment), Err(Malformed::Alignment { .. })));

    let mut writer = Writer::new(Metadata::default()).unwrap();
    writer.tensor("w", GgmlType::Q8_0, &[64, 2]).unwrap();
    let mut refuse = |name: &str, dims: &[u64]| writer.tensor(name, GgmlType::Q8_0, dims).unwrap_err();
    assert!(matches!(refuse("w", &[32]), Malformed::DuplicateTensor { .. }));
    assert!(matches!(refuse("", &[32]), Malformed::Zero { .. }));
    assert!(matches!(refuse(&"n".repeat(65), &[32]), Malformed::OverLimit { .. }));
    assert!(matches!(refuse("v", &[33]), Malformed::PartialBlock { .. }));
    assert!(matches!(refuse("v", &[32; 5]), Malformed::OverLimit { .. }));
    assert!(matches!(refuse("v", &[32, 1 << 62]), Malformed::SizeOverflow { .. }));

    let error = writer.write(&mut Vec::new(), |_| vec![0; 135]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(error.to_string(), "135 bytes given for tensor w, which takes 136");
}

fn arrays() -> impl Strategy<Value = Array> {
    macro_rules! of {
        ($variant:ident, $ty:ty) => {
            prop::collection::vec(any::<$ty>(), 0..5).prop_map(Array::$variant)
        };
    }
    let leaf = prop_oneof![
        of!(U8, u8),
        of!(I8, i8),
        of!(U16, u16),
        of!(I16, i16),
        of!(U32, u32),
        of!(I32, i32),
        of!(U64, u64),
        of!(I64, i64),
        of!(F32, f32),
        of!(F64, f64),
        of!(Bool, bool),
        prop::collection::vec(".{0,6}", 0..5).prop_map(|list| Array::String(Strings::from_iter(list))),
    ];
    // A leaf inside three arrays has depth four, the limit.
    leaf.prop_recursive(3, 24, 4, |inner| prop::collection::vec(inner, 0..4).prop_map(Array::Array))
}

fn values() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f32>().prop_map(Value::F32),
        any::<f64>().prop_map(Value::F64),
        any::<bool>().prop_map(Value::Bool),
        ".{0,12}".prop_map(Value::String),
        arrays().prop_map(Value::Array),
    ]
}

fn tensors() -> impl Strategy<Value = HashMap<String, (GgmlType, Vec<u64>, u8)>> {
    let ty = prop::sample::select(GgmlType::ALL.as_slice());
    let tensor = (ty, 1..3_u64, prop::collection::vec(1..4_u64, 0..4), any::<u8>());
    let tensor = tensor.prop_map(|(ty, blocks, rest, fill)| {
        (ty, [vec![blocks * ty.block_len() as u64], rest].concat(), fill)
    });
    prop::collection::hash_map("[a-z0-9._]{1,64}", tensor, 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn written_data_is_read(
        entries in prop::collection::btree_map("[a-z._]{1,20}", values(), 0..8),
        tensors in tensors(),
        alignment in prop::option::of(3..9_u32),
    ) {
        let mut metadata = Metadata::from_iter(entries);
        metadata.retain(|key| !key.starts_with("split.") && key != "general.alignment");
        if let Some(bits) = alignment {
            metadata.insert("general.alignment", 1_u32 << bits);
        }
        let mut writer = Writer::new(metadata.clone()).unwrap();
        for (name, (ty, dims, _)) in &tensors {
            writer.tensor(name, *ty, dims).unwrap();
        }
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes = |fill: u8, len: u64| -> Cow<'static, [u8]> { vec![fill; usize::try_from(len).unwrap()].into() };
        writer.write(&mut file, |info| bytes(tensors[info.name()].2, info.bytes())).unwrap();

        let gguf = ModelFile::open(file.path()).unwrap();
        prop_assert_eq!(gguf.metadata(), &metadata);
        prop_assert_eq!(gguf.tensors().len(), tensors.len());
        for (name, (ty, dims, fill)) in &tensors {
            let info = gguf.tensor(name).unwrap();
            prop_assert_eq!((info.ty(), info.dims()), (*ty, dims.as_slice()));
            prop_assert_eq!(gguf.tensor_data(name).unwrap(), &*bytes(*fill, info.bytes()));
        }
    }
}
