use super::*;
use crate::gguf::writer::Writer;
use crate::shard::{CHUNK_BYTES, ChunkBuffer};
use crate::{Error, GgmlType, ModelFile};
use metadata::Metadata;
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;

const ROOM: u64 = 1 << 30;

/// Chunks as other workers receive them: read one by one, of tensors that are converted on access.
#[test]
fn folders_of_checkpoints_are_kept_like_files() {
    for name in ["fmt-awq-gemm", "fmt-fp8-block-ct", "fmt-mxfp4-gptoss", "qwen3_5_moe"] {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir, ROOM);
        let file = ModelFile::open(crate::test_files::fixture(&format!("hf/{name}"))).unwrap();
        let manifest = Manifest::of_file(&file).unwrap();
        for info in file.tensors() {
            for chunk in manifest.chunks(info.name()).unwrap() {
                let mut bytes = vec![0; chunk.bytes];
                file.read_tensor(info.name(), chunk.offset, &mut bytes).unwrap();
                store.put(chunk.id, &bytes).unwrap();
            }
        }
        let stored = ModelFile::open(store.keep(&manifest).unwrap().path()).unwrap();
        assert_eq!(stored.digest().unwrap(), file.digest().unwrap(), "{name}");
        assert_eq!(
            crate::ModelSpec::from_file(&stored).unwrap(),
            crate::ModelSpec::from_file(&file).unwrap()
        );
        for info in file.tensors() {
            let (ours, theirs) = (stored.tensor_data(info.name()), file.tensor_data(info.name()));
            assert!(ours.unwrap() == theirs.unwrap(), "{name}: {}", info.name());
        }
    }
}

/// A file with a small tensor and one of more than two chunks, filled from `seed`.
fn file(dir: &TempDir, seed: u8) -> ModelFile {
    let path = dir.path().join(format!("{seed}.gguf"));
    let mut writer = Writer::new(Metadata::default()).unwrap();
    writer.tensor("small", GgmlType::F32, &[300]).unwrap();
    writer.tensor("large", GgmlType::F32, &[1000, 2500]).unwrap();
    let fill = |info: &crate::header::TensorInfo| -> Vec<u8> {
        (0..info.bytes()).map(|i| (i / 1000) as u8 ^ seed ^ (i % 7) as u8).collect()
    };
    writer.write(&mut File::create(&path).unwrap(), fill).unwrap();
    ModelFile::open(path).unwrap()
}

/// Puts all chunks of a file into the store.
fn fill(store: &ShardStore, file: &ModelFile) -> HeldModel {
    let manifest = Manifest::of_file(file).unwrap();
    for info in file.tensors() {
        let bytes = file.tensor_data(info.name()).unwrap();
        for chunk in manifest.chunks(info.name()).unwrap() {
            store.put(chunk.id, &bytes[chunk.offset as usize..][..chunk.bytes]).unwrap();
        }
    }
    store.keep(&manifest).unwrap()
}

fn open(dir: &TempDir, limit: u64) -> ShardStore {
    ShardStore::open(dir.path().join("shards"), limit).unwrap()
}

fn path_of(store: &ShardStore, chunk: ChunkId) -> PathBuf {
    chunk_path(&store.chunks(), chunk)
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_model_of_the_store_is_what_its_file_was() {
    let dir = tempfile::tempdir().unwrap();
    let (store, file) = (open(&dir, ROOM), file(&dir, 3));
    let held = fill(&store, &file);
    let stored = ModelFile::open(held.path()).unwrap();
    assert!(stored.is_stored() && !file.is_stored());
    assert_eq!(stored.digest().unwrap(), file.digest().unwrap());
    assert_eq!(stored.files().collect::<Vec<_>>(), [held.path()]);
    for name in ["small", "large"] {
        assert!(stored.tensor_data(name).unwrap() == file.tensor_data(name).unwrap(), "{name}");
    }
    // Across the boundary of two chunks.
    let (mut of_store, mut of_file) = ([0; 100], [0; 100]);
    stored.read_tensor("large", CHUNK_BYTES as u64 - 50, &mut of_store).unwrap();
    file.read_tensor("large", CHUNK_BYTES as u64 - 50, &mut of_file).unwrap();
    assert_eq!(of_store, of_file);
    assert!(matches!(stored.read_tensor("small", 1150, &mut of_store), Err(Error::TensorRange { .. })));
    assert!(matches!(stored.tensor_data("none"), Err(Error::MissingTensor { .. })));
}

#[test]
fn a_missing_or_damaged_chunk_is_named_and_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let (store, file) = (open(&dir, ROOM), file(&dir, 3));
    let held = fill(&store, &file);
    let chunks: Vec<ChunkId> = held.manifest().chunks("large").unwrap().map(|chunk| chunk.id).collect();
    assert_eq!(chunks.len(), 3);
    flip(&path_of(&store, chunks[1]));
    let stored = ModelFile::open(held.path()).unwrap();
    assert!(stored.tensor_data("small").is_ok());
    let error = stored.tensor_data("large").unwrap_err();
    assert!(matches!(error, Error::Store(StoreError::Damaged { chunk }) if chunk == chunks[1]), "{error}");
    assert_eq!(store.check(chunks.clone()).unwrap(), 1);
    let error = stored.tensor_data("large").unwrap_err();
    assert!(matches!(error, Error::Store(StoreError::Missing { chunk }) if chunk == chunks[1]), "{error}");
    assert!(!store.has(chunks[1], CHUNK_BYTES) && store.has(chunks[0], CHUNK_BYTES));
    // A truncated file is refused regardless of its contents.
    File::options().write(true).open(path_of(&store, chunks[0])).unwrap().set_len(4096).unwrap();
    let error = ModelFile::open(held.path()).unwrap().tensor_data("large").unwrap_err();
    assert!(matches!(error, Error::Store(StoreError::Damaged { chunk }) if chunk == chunks[0]), "{error}");
    assert!(!store.has(chunks[0], CHUNK_BYTES));
    assert_eq!(store.get(chunks[0]).unwrap(), None);
}

#[test]
fn a_damaged_manifest_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (store, file) = (open(&dir, ROOM), file(&dir, 3));
    let digest = file.digest().unwrap();
    assert!(store.hold(&digest).unwrap().is_none());
    let path = fill(&store, &file).path().to_owned();
    assert!(store.hold(&digest).unwrap().is_some());
    flip(&path);
    assert!(matches!(ModelFile::open(&path), Err(Error::Store(StoreError::Manifest { .. }))));
    assert!(store.hold(&digest).unwrap().is_none());
    assert!(!path.exists());
}

#[test]
fn the_least_recently_used_models_are_dropped_first() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir, 35 << 20);
    let [first, second, third] = [1, 2, 3].map(|seed| fill(&store, &file(&dir, seed)));
    let long_ago = SystemTime::now() - Duration::from_secs(3600);
    let age = |held: &HeldModel, earlier: u64| {
        let file = File::options().write(true).open(held.path()).unwrap();
        file.set_modified(long_ago - Duration::from_secs(earlier)).unwrap();
    };
    age(&second, 20);
    age(&third, 10);
    let paths = [&first, &second, &third].map(|held| held.path().to_owned());
    drop((second, third));
    store.reserve(0).unwrap();
    assert!(paths.iter().all(|path| path.exists()), "there is room");
    // A chunk that belongs to no model is dropped first.
    let stray = ChunkId::of(b"stray");
    store.put(stray, b"stray").unwrap();
    store.reserve(10 << 20).unwrap();
    assert_eq!(store.get(stray).unwrap(), None);
    assert_eq!(paths.each_ref().map(|path| path.exists()), [true, false, true]);
    store.reserve(24 << 20).unwrap();
    assert_eq!(paths.each_ref().map(|path| path.exists()), [true, false, false]);
    let error = store.reserve(30 << 20).unwrap_err();
    assert!(
        matches!(error, StoreError::NoRoom { limit, needed, .. } if (limit, needed) == (35 << 20, 30 << 20))
    );
    assert!(ModelFile::open(first.path()).unwrap().tensor_data("large").is_ok(), "what is in use stays");
    assert!(store.bytes() <= 11 << 20);
}

#[test]
fn reserved_bytes_are_not_reserved_twice_and_are_freed_on_drop() {
    let dir = tempfile::tempdir().unwrap();
    let (store, other) = (open(&dir, 1 << 20), open(&dir, 1 << 20));
    let room = store.reserve(700 << 10).unwrap();
    let error = other.reserve(400 << 10).unwrap_err();
    assert!(matches!(error, StoreError::NoRoom { used, .. } if used >= 700 << 10), "{error}");
    assert!(other.reserve(300 << 10).is_ok());
    // Written bytes are not counted twice.
    let bytes = vec![3; 600 << 10];
    let chunk = ChunkId::of(&bytes);
    store.put(chunk, &bytes).unwrap();
    room.used(600 << 10);
    let second = other.reserve(300 << 10).unwrap();
    assert!(store.has(chunk, bytes.len()), "there was room without dropping anything");
    assert!(store.reserve(700 << 10).is_err());
    drop((room, second));
    assert!(store.reserve(400 << 10).is_ok());
    // File of a killed process.
    let left = store.reserved().join("left");
    fs::write(&left, (900u64 << 10).to_le_bytes()).unwrap();
    assert!(store.reserve(400 << 10).is_ok());
    assert!(!left.exists());
}

#[test]
fn files_of_a_crash_are_removed_and_files_are_private() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir, ROOM);
    let [old, young] = ["old", "young"].map(|name| store.temporary().join(name));
    for path in [&old, &young] {
        fs::write(path, "half").unwrap();
    }
    let age = File::options().write(true).open(&old).unwrap();
    age.set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
    let store = open(&dir, ROOM);
    assert!(!old.exists() && young.exists());
    let chunk = ChunkId::of(b"bytes");
    store.put(chunk, b"bytes").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(
        (mode(&path_of(&store, chunk)), mode(&store.chunks()), mode(store.root())),
        (0o600, 0o700, 0o700)
    );
}

#[test]
fn a_full_disk_is_reported_as_disk_full() {
    let error = write_error(Path::new("/x"), 7)(ErrorKind::StorageFull.into());
    assert!(matches!(error, StoreError::DiskFull { bytes: 7, .. }), "{error}");
}

#[test]
fn a_direct_write_keeps_the_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir, ROOM);
    let mut buffer = ChunkBuffer::default();
    buffer.clear().unwrap();
    let bytes: Vec<u8> = (0..3 * 4096 + 5u32).map(|i| (i / 100) as u8 ^ i as u8).collect();
    buffer.push(&bytes);
    // With a tail, without one, a tail only, and misaligned memory.
    for slice in [&buffer[..], &buffer[..8192], &buffer[..7], &buffer[1..5000]] {
        let chunk = ChunkId::of(slice);
        store.put_aside(chunk, slice).unwrap();
        assert_eq!(store.get(chunk).unwrap().as_deref(), Some(slice), "{} bytes", slice.len());
        assert!(store.sound.is_verified(chunk, &fs::metadata(path_of(&store, chunk)).unwrap()));
        assert_eq!(fs::metadata(path_of(&store, chunk)).unwrap().permissions().mode() & 0o777, 0o600);
    }
    assert!(files(&store.temporary()).is_empty());
}

#[test]
fn a_stored_chunk_is_hashed_only_after_a_touch_or_by_check() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes) = (open(&dir, ROOM), b"as its name says");
    let chunk = ChunkId::of(bytes);
    let (path, mut found) = (path_of(&store, chunk), Vec::new());
    // Changes the contents but keeps the modification time.
    let spoil = || {
        store.put(chunk, bytes).unwrap();
        let changed = fs::metadata(&path).unwrap().modified().unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"is", 0).unwrap();
        file.set_modified(changed).unwrap();
        file
    };
    spoil();
    assert!(store.read(chunk, &mut found).unwrap());
    assert_eq!(found, b"is its name says");
    assert_eq!(store.check([chunk]).unwrap(), 1, "who checks hashes");
    assert!(!path.exists());

    spoil().set_modified(SystemTime::now() + Duration::from_secs(1)).unwrap();
    assert!(!store.read(chunk, &mut found).unwrap());
    assert!(!path.exists());
}
