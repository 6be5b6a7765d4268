//! Files of a split set.

use std::path::{Path, PathBuf};

use crate::gguf::Malformed;
use crate::gguf::writer::Writer;
use crate::test_files::{fixture, split_llama};
use crate::{Error, GgmlType, ModelFile};
use metadata::{Metadata, Value};

#[test]
fn a_set_is_the_single_file() {
    let single = ModelFile::open(fixture("tiny/llama/llama-f32.gguf")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let files = split_llama(dir.path());
    for path in &files {
        let set = ModelFile::open(path).unwrap();
        assert_eq!(set.files().collect::<Vec<_>>(), files);
        assert_eq!(set.metadata(), single.metadata());
        assert_eq!(set.total_tensor_bytes(), single.total_tensor_bytes());
        assert_eq!(set.tensors().len(), single.tensors().len());
        for (a, b) in set.tensors().zip(single.tensors()) {
            assert_eq!((a.name(), a.ty(), a.dims()), (b.name(), b.ty(), b.dims()));
            assert_eq!(set.tensor_data(a.name()).unwrap(), single.tensor_data(b.name()).unwrap());
        }
        assert_eq!(set.digest().unwrap(), single.digest().unwrap());
    }
}

/// Writes a file with these `split.*` keys and one tensor of this name.
fn write(dir: &Path, file: &str, [number, count, tensor_count]: [u64; 3], tensor: &str) -> PathBuf {
    let metadata = Metadata::from_iter([
        ("split.no", Value::U16(number.try_into().unwrap())),
        ("split.count", Value::U16(count.try_into().unwrap())),
        ("split.tensors.count", Value::I32(tensor_count.try_into().unwrap())),
    ]);
    let mut writer = Writer::new(metadata).unwrap();
    writer.tensor(tensor, GgmlType::F32, &[8]).unwrap();
    let path = dir.join(file);
    writer.write(&mut std::fs::File::create(&path).unwrap(), |_| vec![0; 32]).unwrap();
    path
}

#[test]
fn a_missing_part_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let third = write(dir.path(), "m-00003-of-00003.gguf", [2, 3, 3], "c");
    write(dir.path(), "m-00001-of-00003.gguf", [0, 3, 3], "a");
    let error = ModelFile::open(&third).unwrap_err();
    let missing = dir.path().join("m-00002-of-00003.gguf");
    assert_eq!(error.to_string(), format!("part 2 of 3 is missing: {}", missing.display()));
    write(dir.path(), "m-00002-of-00003.gguf", [1, 3, 3], "b");
    let names: Vec<_> =
        ModelFile::open(&third).unwrap().tensors().map(|info| info.name().to_owned()).collect();
    assert_eq!(names, ["a", "b", "c"]);
}

#[test]
fn parts_must_agree() {
    let dir = tempfile::tempdir().unwrap();
    let open_with = |second: [u64; 3], tensor: &str| {
        let first = write(dir.path(), "m-00001-of-00002.gguf", [0, 2, 2], "a");
        write(dir.path(), "m-00002-of-00002.gguf", second, tensor);
        ModelFile::open(first)
    };
    assert!(open_with([1, 2, 2], "b").is_ok());
    let mismatch = |result: Result<ModelFile, Error>| match result {
        Err(Error::SplitMismatch { path, key, found, expected }) => {
            assert!(path.ends_with("m-00002-of-00002.gguf"), "{}", path.display());
            (key, found, expected)
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(mismatch(open_with([0, 2, 2], "b")), ("split.no", 0, 1));
    assert_eq!(mismatch(open_with([1, 3, 2], "b")), ("split.count", 3, 2));
    assert_eq!(mismatch(open_with([1, 2, 3], "b")), ("split.tensors.count", 3, 2));
    assert!(matches!(
        open_with([1, 2, 2], "a"),
        Err(Error::Malformed { source: Malformed::DuplicateTensor { tensor }, .. }) if tensor == "a"
    ));
}

#[test]
fn a_part_must_be_named_and_numbered_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let open = |file, keys| ModelFile::open(write(dir.path(), file, keys, "a")).unwrap_err();
    let error = open("model.gguf", [0, 2, 2]);
    assert!(matches!(error, Error::SplitName { number: 1, count: 2, .. }), "{error}");
    assert!(error.to_string().ends_with("is not named PREFIX-00001-of-00002.gguf"), "{error}");
    let error = open("m-00002-of-00002.gguf", [0, 2, 2]);
    assert!(matches!(error, Error::SplitName { number: 1, .. }), "{error}");
    let error = open("m-00003-of-00002.gguf", [2, 2, 2]);
    assert!(matches!(error, Error::SplitMismatch { key: "split.no", found: 2, .. }), "{error}");
    for count in [0, 1_025] {
        let error = open("m-00001-of-00000.gguf", [0, count, 2]);
        assert!(matches!(error, Error::SplitMismatch { key: "split.count", .. }), "{error}");
    }
    // A set of one file needs no special name.
    assert!(ModelFile::open(write(dir.path(), "one.gguf", [0, 1, 1], "a")).is_ok());
}
