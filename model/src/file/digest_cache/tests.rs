use super::*;
use crate::GgmlType;
use crate::gguf::writer::Writer;
use crate::test_files::{fixture, split_llama};
use metadata::Metadata;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

/// A model with one tensor and an old modification time.
fn model(dir: &Path) -> PathBuf {
    let path = dir.join("m.gguf");
    let mut writer = Writer::new(Metadata::default()).unwrap();
    writer.tensor("w", GgmlType::F32, &[8]).unwrap();
    writer.write(&mut File::create(&path).unwrap(), |_| vec![1; 32]).unwrap();
    age(&path, 3600);
    path
}

/// Sets the modification time to `seconds` before September 2001.
fn age(path: &Path, seconds: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000 - seconds)).unwrap();
}

/// Changes the tensor's last byte in place.
fn spoil(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let end = file.metadata().unwrap().len();
    file.write_all_at(&[9], end - 1).unwrap();
}

/// The file's digest through the cache.
fn digest(cache: &DigestCache, path: &Path) -> [u8; 32] {
    let file = ModelFile::open(path).unwrap();
    cache.fill(&file).unwrap();
    file.digest().unwrap()
}

fn read(path: &Path) -> [u8; 32] {
    ModelFile::open(path).unwrap().digest().unwrap()
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).map_or(Vec::new(), |found| found.map(|entry| entry.unwrap().path()).collect())
}

#[test]
fn a_file_is_read_once_and_again_when_it_has_changed() {
    let dir = tempfile::tempdir().unwrap();
    let (path, cache) = (model(dir.path()), DigestCache::at(dir.path().join("digests")));
    let first = read(&path);
    assert_eq!(digest(&cache, &path), first);
    // The bytes are not read while the file's metadata is unchanged.
    spoil(&path);
    age(&path, 3600);
    assert_eq!(digest(&cache, &path), first);
    age(&path, 60);
    assert_ne!(digest(&cache, &path), first);
    assert_eq!(digest(&cache, &path), read(&path));
    assert_eq!(entries(&dir.path().join("digests")).len(), 1, "and no file is left over");
}

#[test]
fn another_file_in_its_place_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (path, cache) = (model(dir.path()), DigestCache::at(dir.path().join("digests")));
    let first = digest(&cache, &path);
    let other = dir.path().join("other.gguf");
    std::fs::copy(&path, &other).unwrap();
    spoil(&other);
    age(&other, 3600);
    std::fs::rename(&other, &path).unwrap();
    assert_ne!(digest(&cache, &path), first);
}

#[test]
fn a_corrupt_entry_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let (path, cache) = (model(dir.path()), DigestCache::at(dir.path().join("digests")));
    let first = digest(&cache, &path);
    let [entry] = &entries(&dir.path().join("digests"))[..] else { panic!("one entry") };
    let whole = std::fs::read(entry).unwrap();
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(entry, &bytes).unwrap();
        assert_eq!(digest(&cache, &path), first, "byte {at}");
        assert_eq!(std::fs::read(entry).unwrap(), whole, "and is written anew");
        std::fs::write(entry, &whole[..at]).unwrap();
        assert_eq!(digest(&cache, &path), first, "cut at {at}");
    }
}

#[test]
fn a_file_that_may_still_change_is_not_remembered() {
    let dir = tempfile::tempdir().unwrap();
    let (path, cache) = (model(dir.path()), DigestCache::at(dir.path().join("digests")));
    for time in [SystemTime::now(), SystemTime::now() + Duration::from_secs(3600)] {
        OpenOptions::new().write(true).open(&path).unwrap().set_modified(time).unwrap();
        assert_eq!(digest(&cache, &path), read(&path));
        assert!(entries(&dir.path().join("digests")).is_empty());
    }
}

#[test]
fn a_cache_that_cannot_be_written_costs_only_the_reading() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path());
    // Its directory would have to be created inside a file.
    let cache = DigestCache::at(path.join("digests"));
    assert_eq!(digest(&cache, &path), read(&path));
}

#[test]
fn a_set_is_remembered_by_all_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DigestCache::at(dir.path());
    let parts = tempfile::tempdir().unwrap();
    let [first, _, third] = split_llama(parts.path()).map(|part| digest(&cache, &part));
    assert_eq!(first, third);
    assert_eq!(first, read(&fixture("tiny/llama/llama-f32.gguf")));
    assert!(entries(dir.path()).len() <= 1, "one entry whichever file is named");
}

#[test]
fn hashed_files_are_known_until_they_are_touched() {
    let dir = tempfile::tempdir().unwrap();
    let (path, cache) = (model(dir.path()), DigestCache::at(dir.path().join("digests")));
    let hashed = || {
        let file = ModelFile::open(&path).unwrap();
        (cache.fill(&file).unwrap(), file)
    };
    let (read, file) = hashed();
    let (recalled, _) = hashed();
    assert_eq!(read, recalled, "once read, known to all");
    assert!(file.is_still(&read.unwrap()));
    age(&path, 60);
    assert!(!file.is_still(&recalled.unwrap()));
}

#[test]
fn bytes_that_were_read_before_the_system_started_are_not_known() {
    let dir = tempfile::tempdir().unwrap();
    let (path, cache) = (model(dir.path()), DigestCache::at(dir.path().join("digests")));
    let file = ModelFile::open(&path).unwrap();
    let identity = identity(&file, &file.stamps().unwrap());
    for start in [[0; 32], [7; 32]] {
        cache.keep(&cache.dir.join(name(&file)), identity.clone(), start, file.chunks().unwrap()).unwrap();
        let again = ModelFile::open(&path).unwrap();
        assert_eq!(cache.fill(&again).unwrap(), None);
        assert!(again.chunks.get().is_some(), "though their names are");
    }
}

#[test]
fn bytes_of_a_file_that_may_still_change_are_not_known() {
    let dir = tempfile::tempdir().unwrap();
    let (path, cache) = (model(dir.path()), DigestCache::at(dir.path().join("digests")));
    OpenOptions::new().write(true).open(&path).unwrap().set_modified(SystemTime::now()).unwrap();
    assert_eq!(cache.fill(&ModelFile::open(&path).unwrap()).unwrap(), None);
}
