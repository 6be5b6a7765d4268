//! Records which chunks of a store were hashed since the system started, so that loading does not hash them
//! again.
//!
//! All processes of the host append to one file per boot, `sound/BOOT`. A record says that a chunk's file
//! matched its name and has that file's identity, length and change time. A file touched or replaced since
//! then does not match its record. A chunk torn by a power cut has no valid record, because the file of an
//! earlier boot is not read.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::ChunkId;

/// Directory in the store.
pub(crate) const DIR: &str = "sound";
/// Size of the file's identity, length and change time.
const STAMP_BYTES: usize = 5 * 8;
const BODY_BYTES: usize = 32 + STAMP_BYTES;
/// A record and the first bytes of its hash.
const RECORD_BYTES: usize = BODY_BYTES + 8;
/// Reads at most this many bytes of the file. Chunks without a record are hashed again.
const MAX_BYTES: u64 = 64 << 20;

type Stamp = [u8; STAMP_BYTES];

#[derive(Debug)]
pub(crate) struct VerifiedChunks {
    /// `None` if the system has no boot id; then nothing is recorded.
    path: Option<PathBuf>,
    state: Mutex<VerifiedState>,
}

#[derive(Debug, Default)]
struct VerifiedState {
    stamps: HashMap<ChunkId, Stamp>,
    /// Bytes of the file read so far.
    read: u64,
}

impl VerifiedChunks {
    /// For the store in `root`. Records are written only if the directory [`DIR`] exists there.
    pub(crate) fn of_store(root: &Path) -> Self {
        let path = start_of_system().map(|start| root.join(DIR).join(start));
        Self { path, state: Mutex::default() }
    }

    /// Removes the record files of earlier boots.
    pub(crate) fn clear_older(&self) {
        let Some((path, dir)) = self.path.as_ref().and_then(|path| Some((path, path.parent()?))) else {
            return;
        };
        for entry in fs::read_dir(dir).into_iter().flatten().flatten().filter(|entry| entry.path() != *path) {
            // A file that cannot be removed is never read.
            let _ = fs::remove_file(entry.path());
        }
    }

    /// True if the chunk's `file` was verified against the chunk's name and has not been touched since.
    pub(crate) fn is_verified(&self, chunk: ChunkId, file: &Metadata) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = stamp(file);
        if state.stamps.get(&chunk) == Some(&stamp) {
            return true;
        }
        // Another process may have added a record. A read error counts as no record.
        let _ = self.path.as_deref().map_or(Ok(()), |path| state.read_on(path));
        state.stamps.get(&chunk) == Some(&stamp)
    }

    /// Records that `file` matches the chunk's name. If writing fails, the chunk is hashed again later.
    pub(crate) fn note(&self, chunk: ChunkId, file: &Metadata) {
        let stamp = stamp(file);
        self.state.lock().unwrap_or_else(PoisonError::into_inner).stamps.insert(chunk, stamp);
        let Some(path) = &self.path else { return };
        let mut record = Vec::with_capacity(RECORD_BYTES);
        record.extend(chunk.0);
        record.extend(stamp);
        record.extend(&blake3::hash(&record).as_bytes()[..RECORD_BYTES - BODY_BYTES]);
        let file = File::options().append(true).create(true).open(path);
        let appended = file.and_then(|mut file| file.write_all(&record));
        if let Err(error) = appended {
            tracing::debug!(%error, "cannot record that a chunk was verified; it is verified again later");
        }
    }
}

impl VerifiedState {
    fn read_on(&mut self, path: &Path) -> io::Result<()> {
        let file = File::open(path)?;
        let left = file.metadata()?.len().min(MAX_BYTES).saturating_sub(self.read);
        let mut bytes = vec![0; usize::try_from(left).unwrap_or(0) / RECORD_BYTES * RECORD_BYTES];
        file.read_exact_at(&mut bytes, self.read)?;
        self.read += bytes.len() as u64;
        for record in bytes.chunks_exact(RECORD_BYTES) {
            let (body, check) = record.split_at(BODY_BYTES);
            let Some((chunk, rest)) = body.split_first_chunk::<32>() else { continue };
            let Ok(stamp) = Stamp::try_from(rest) else { continue };
            if blake3::hash(body).as_bytes().starts_with(check) {
                self.stamps.insert(ChunkId(*chunk), stamp);
            }
        }
        Ok(())
    }
}

/// The boot id. `None` if the system does not provide one.
pub(crate) fn start_of_system() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let boot = boot.trim();
    (!boot.is_empty() && !boot.contains('/')).then(|| boot.to_owned())
}

fn stamp(file: &Metadata) -> Stamp {
    let fields =
        [file.dev(), file.ino(), file.len(), file.mtime().cast_unsigned(), file.mtime_nsec().cast_unsigned()];
    let mut stamp = [0; STAMP_BYTES];
    for (to, field) in stamp.as_chunks_mut::<8>().0.iter_mut().zip(fields) {
        *to = field.to_le_bytes();
    }
    stamp
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store_dir() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(DIR)).unwrap();
        dir
    }

    #[test]
    fn a_file_is_known_to_all_until_it_is_touched() {
        let dir = store_dir();
        let path = dir.path().join("chunk");
        let [one, other] = [b"1", b"2"].map(|bytes| ChunkId::of(bytes));
        fs::write(&path, "1").unwrap();
        let file = || fs::metadata(&path).unwrap();
        let (ours, theirs) = (VerifiedChunks::of_store(dir.path()), VerifiedChunks::of_store(dir.path()));
        assert!(!theirs.is_verified(one, &file()));
        ours.note(one, &file());
        assert!(ours.is_verified(one, &file()) && theirs.is_verified(one, &file()));
        assert!(VerifiedChunks::of_store(dir.path()).is_verified(one, &file()));
        assert!(!theirs.is_verified(other, &file()), "another chunk");

        File::options().write(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert!(!theirs.is_verified(one, &file()), "it has been changed");
        let copy = dir.path().join("copy");
        fs::copy(&path, &copy).unwrap();
        ours.note(one, &file());
        assert!(theirs.is_verified(one, &file()) && !theirs.is_verified(one, &fs::metadata(copy).unwrap()));
    }

    #[test]
    fn damaged_records_and_those_of_another_start_do_not_count() {
        let dir = store_dir();
        let path = dir.path().join("chunk");
        fs::write(&path, "1").unwrap();
        let (chunk, file) = (ChunkId::of(b"1"), fs::metadata(&path).unwrap());
        let sound = VerifiedChunks::of_store(dir.path());
        sound.note(chunk, &file);
        let notes = sound.path.clone().unwrap();
        let mut bytes = fs::read(&notes).unwrap();
        bytes[40] ^= 1;
        fs::write(&notes, &bytes).unwrap();
        assert!(!VerifiedChunks::of_store(dir.path()).is_verified(chunk, &file));

        let older = notes.with_file_name("another-start");
        fs::write(&older, &bytes).unwrap();
        sound.clear_older();
        assert!(!older.exists() && notes.exists());
    }
}
