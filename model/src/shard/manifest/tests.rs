use super::*;
use crate::conversion::Region;
use crate::header::TensorInfo;
use crate::test_files::{fixture, split_llama};
use crate::{GgmlType, ModelFile, ModelSpec};
use metadata::{Metadata, Value};
use proptest::prelude::*;
use std::path::Path;
use std::sync::LazyLock;
use text::Tokenizer;

/// A version 1 manifest with two tensors; the second has two bytes in a chunk of its own.
const GOLDEN: &str = "\
    4b564d460100000087000000000000004747554603000000020000000000000001000000000000001400000000000000\
    67656e6572616c2e6172636869746563747572650800000005000000000000006c6c616d610100000000000000770100\
    000008000000000000000000000000000000000000000100000000000000760100000001002000000000000100000020\
    000000000000000101010101010101010101010101010101010101010101010101010101010101020202020202020202\
    020202020202020202020202020202020202020202020203030303030303030303030303030303030303030303030303\
    03030303030303";

fn golden() -> Vec<u8> {
    let (pairs, _) = GOLDEN.as_bytes().as_chunks::<2>();
    pairs.iter().map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn header(metadata: Metadata, tensors: &[(&str, GgmlType, u64)]) -> ModelHeader {
    let tensor = |(name, ty, row): &(&str, GgmlType, u64)| {
        let region = Region { file: 0, offset: 0, bytes: ty.byte_size(&[*row]).unwrap() };
        TensorInfo::stored((*name).to_owned(), *ty, vec![*row], region)
    };
    ModelHeader::new(metadata, tensors.iter().map(tensor).collect())
}

fn small() -> Manifest {
    let metadata = Metadata::from_iter([("general.architecture", Value::from("llama"))]);
    let tensors = [("w", GgmlType::F32, 8), ("v", GgmlType::F16, (1 << 21) + 1)];
    Manifest::new(&header(metadata, &tensors), [1, 2, 3].map(|fill| ChunkId([fill; 32])).to_vec()).unwrap()
}

#[test]
fn version_1_is_what_it_was() {
    let manifest = small();
    assert_eq!(manifest.encoded(), golden());
    let read = Manifest::decode(&golden(), &manifest.digest()).unwrap();
    let chunks: Vec<_> =
        read.chunks("v").unwrap().map(|chunk| (chunk.id.0[0], chunk.offset, chunk.bytes)).collect();
    assert_eq!(chunks, [(2, 0, CHUNK_BYTES), (3, CHUNK_BYTES as u64, 2)]);
    assert!(matches!(read.chunks("u").map(|_| ()), Err(Error::MissingTensor { .. })));
}

#[test]
fn a_node_without_the_file_has_the_model_by_its_manifest() {
    for name in ["llama", "gemma4", "qwen3moe", "qwen35", "bert"] {
        let file = ModelFile::open(fixture(&format!("tiny/{name}/{name}-f32.gguf"))).unwrap();
        let sent = Manifest::of_file(&file).unwrap();
        let read = Manifest::decode(sent.encoded(), &file.digest().unwrap()).unwrap();
        assert_eq!(read.digest(), file.digest().unwrap());
        assert_eq!(ModelSpec::from_header(read.header()).unwrap(), ModelSpec::from_file(&file).unwrap());
        let tokenizer = |metadata| Tokenizer::from_metadata(metadata).unwrap().digest();
        assert_eq!(tokenizer(read.header().metadata()), tokenizer(file.metadata()), "{name}");
        for info in file.tensors() {
            let data = file.tensor_data(info.name()).unwrap();
            let mut end = 0;
            for chunk in read.chunks(info.name()).unwrap() {
                assert_eq!(chunk.offset, end);
                end += chunk.bytes as u64;
                let start = chunk.offset as usize;
                assert_eq!(chunk.id, ChunkId::of(&data[start..start + chunk.bytes]));
            }
            assert_eq!(end, info.bytes(), "{name} {}", info.name());
        }
    }
}

#[test]
fn a_set_has_the_manifest_of_its_whole() {
    let manifest = |path: &Path| Manifest::of_file(&ModelFile::open(path).unwrap()).unwrap();
    let whole = manifest(&fixture("tiny/llama/llama-f32.gguf"));
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(manifest(&split_llama(dir.path())[1]).encoded(), whole.encoded());
}

#[test]
fn an_invalid_manifest_is_refused_with_its_error() {
    let (bytes, digest) = (golden(), small().digest());
    let refused = |bytes: &[u8]| Manifest::decode(bytes, &digest).map(|_| ()).unwrap_err();
    assert!(matches!(refused(&bytes[..15]), ManifestError::NotAManifest { bytes: 15 }));
    assert!(matches!(refused(&[&bytes[..], &[0]].concat()), ManifestError::NotAManifest { .. }));
    assert!(matches!(
        refused(&[&bytes[..], &[0; 32]].concat()),
        ManifestError::Chunks { found: 4, expected: 3 }
    ));
    assert!(matches!(refused(&vec![0; MANIFEST_BYTES + 1]), ManifestError::TooLong { .. }));
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        bytes
    };
    assert!(matches!(refused(&with(0, b'X')), ManifestError::NotAManifest { .. }));
    assert!(matches!(refused(&with(4, 2)), ManifestError::Version { found: 2 }));
    assert!(matches!(refused(&with(bytes.len() - 1, 9)), ManifestError::Digest { .. }));
    // A header longer than the input, and one that would fill all memory.
    assert!(matches!(refused(&with(15, 255)), ManifestError::NotAManifest { .. }));
    let aligned = Metadata::from_iter([
        ("general.architecture", Value::from("llama")),
        ("general.alignment", Value::U32(64)),
    ]);
    let tensors = [("w", GgmlType::F32, 8)];
    let manifest = Manifest::new(&header(aligned, &tensors), vec![ChunkId([1; 32])]).unwrap();
    assert_eq!(manifest.header().metadata().len(), 1, "how the file was aligned is left out");
}

#[test]
fn an_impossibly_large_tensor_is_refused_before_allocation() {
    let tensors = [("w", GgmlType::F16, 1 << 61)];
    let error = Manifest::new(&header(Metadata::default(), &tensors), Vec::new()).map(|_| ()).unwrap_err();
    assert!(matches!(error, ManifestError::Chunks { found: 0, expected } if expected == 1 << 40), "{error}");
}

static REAL: LazyLock<(Vec<u8>, [u8; 32])> = LazyLock::new(|| {
    let file = ModelFile::open(fixture("tiny/llama/llama-f32.gguf")).unwrap();
    (Manifest::of_file(&file).unwrap().encoded().to_vec(), file.digest().unwrap())
});

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_changed_byte_passes(at in any::<prop::sample::Index>(), flip in 1u8..) {
        let mut bytes = REAL.0.clone();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        prop_assert!(Manifest::decode(&bytes, &REAL.1).is_err());
    }

    #[test]
    fn a_truncated_manifest_is_refused(len in any::<prop::sample::Index>()) {
        prop_assert!(Manifest::decode(&REAL.0[..len.index(REAL.0.len())], &REAL.1).is_err());
    }
}
