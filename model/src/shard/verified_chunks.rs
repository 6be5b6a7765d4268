//! Which chunks of a store somebody has hashed since the system started, so that they are not hashed again to be loaded.
//!
//! One file a start of the system, `sound/BOOT`, to which every process of the host appends: a record says which chunk
//! was found to be as its name says, in which file, as long and changed as then. A file that has been touched since, or
//! another one, is another record's. What a power cut tears has no record, since the file of another start is not read.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::ChunkId;

/// Where it is in a store.
pub(crate) const DIR: &str = "sound";
/// Which file, how long, and when it was changed.
const STAMP_BYTES: usize = 5 * 8;
const BODY_BYTES: usize = 32 + STAMP_BYTES;
/// A record and the first bytes of its hash.
const RECORD_BYTES: usize = BODY_BYTES + 8;
/// Of a longer file no more is read: what is not known is hashed.
const MOST_BYTES: u64 = 64 << 20;

type Stamp = [u8; STAMP_BYTES];

#[derive(Debug)]
pub(crate) struct VerifiedChunks {
    /// Nothing is remembered of a system that does not say when it started.
    path: Option<PathBuf>,
    known: Mutex<VerifiedState>,
}

#[derive(Debug, Default)]
struct VerifiedState {
    stamps: HashMap<ChunkId, Stamp>,
    /// How far the file has been read.
    read: u64,
}

impl VerifiedChunks {
    /// Of the store in `root`, where [`DIR`] must be for anything to be noted.
    pub(crate) fn of_store(root: &Path) -> Self {
        let path = start_of_system().map(|start| root.join(DIR).join(start));
        Self { path, known: Mutex::default() }
    }

    /// Removes what was noted before the system started.
    pub(crate) fn clear_older(&self) {
        let Some((path, dir)) = self.path.as_ref().and_then(|path| Some((path, path.parent()?))) else {
            return;
        };
        for entry in fs::read_dir(dir).into_iter().flatten().flatten().filter(|entry| entry.path() != *path) {
            // Whatever stays is not read.
            let _ = fs::remove_file(entry.path());
        }
    }

    /// Whether `file`, which is a chunk's, has been found to be as the chunk's name says, and has not been touched since.
    pub(crate) fn knows(&self, chunk: ChunkId, file: &Metadata) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = stamp(file);
        if known.stamps.get(&chunk) == Some(&stamp) {
            return true;
        }
        // Others may have noted it in the meantime. What cannot be read is not known.
        let _ = self.path.as_deref().map_or(Ok(()), |path| known.read_on(path));
        known.stamps.get(&chunk) == Some(&stamp)
    }

    /// Notes that `file` is as the chunk's name says. Without the note it is hashed again, and that is all.
    pub(crate) fn note(&self, chunk: ChunkId, file: &Metadata) {
        let stamp = stamp(file);
        self.known.lock().unwrap_or_else(PoisonError::into_inner).stamps.insert(chunk, stamp);
        let Some(path) = &self.path else { return };
        let mut record = Vec::with_capacity(RECORD_BYTES);
        record.extend(chunk.0);
        record.extend(stamp);
        record.extend(&blake3::hash(&record).as_bytes()[..RECORD_BYTES - BODY_BYTES]);
        let file = File::options().append(true).create(true).open(path);
        let appended = file.and_then(|mut file| file.write_all(&record));
        if let Err(error) = appended {
            tracing::debug!(%error, "it is not noted that a chunk is sound");
        }
    }
}

impl VerifiedState {
    fn read_on(&mut self, path: &Path) -> io::Result<()> {
        let file = File::open(path)?;
        let left = file.metadata()?.len().min(MOST_BYTES).saturating_sub(self.read);
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

/// What this start of the system is called; none where the system does not say.
pub(crate) fn start_of_system() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let boot = boot.trim();
    (!boot.is_empty() && !boot.contains('/')).then(|| boot.to_owned())
}

fn stamp(file: &Metadata) -> Stamp {
    let parts =
        [file.dev(), file.ino(), file.len(), file.mtime().cast_unsigned(), file.mtime_nsec().cast_unsigned()];
    let mut stamp = [0; STAMP_BYTES];
    for (to, part) in stamp.as_chunks_mut::<8>().0.iter_mut().zip(parts) {
        *to = part.to_le_bytes();
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
        assert!(!theirs.knows(one, &file()));
        ours.note(one, &file());
        assert!(ours.knows(one, &file()) && theirs.knows(one, &file()));
        assert!(VerifiedChunks::of_store(dir.path()).knows(one, &file()));
        assert!(!theirs.knows(other, &file()), "another chunk");

        File::options().write(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert!(!theirs.knows(one, &file()), "it has been changed");
        let copy = dir.path().join("copy");
        fs::copy(&path, &copy).unwrap();
        ours.note(one, &file());
        assert!(theirs.knows(one, &file()) && !theirs.knows(one, &fs::metadata(copy).unwrap()));
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
        assert!(!VerifiedChunks::of_store(dir.path()).knows(chunk, &file));

        let older = notes.with_file_name("another-start");
        fs::write(&older, &bytes).unwrap();
        sound.clear_older();
        assert!(!older.exists() && notes.exists());
    }
}
