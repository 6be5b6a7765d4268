//! A piece as a file: a header with length and digest, followed by the bytes.
//!
//! Files are not synced to the disk. A file that a crash has torn is detected by its digest, and its prefix
//! is computed again.

use super::PieceKey;
use proto::codec::{self, Cap};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const MAGIC: &[u8; 8] = b"kvasirt1";
const EXTENSION: &str = "kvpiece";
/// Extension of a file that is not complete.
pub(super) const UNFINISHED: &str = "unfinished";
/// Maximum number of bytes of a header. A file with a longer one is damaged.
const MAX_HEADER_BYTES: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Header {
    prefix: [u8; 32],
    group: u32,
    length: u64,
    digest: [u8; 32],
}

pub(super) fn path_of(dir: &Path, key: PieceKey) -> PathBuf {
    dir.join(format!("{}-{}.{EXTENSION}", blake3::Hash::from_bytes(key.prefix).to_hex(), key.group))
}

/// The reverse of [`path_of`]; `None` for a file that is not a piece.
pub(super) fn key_of(path: &Path) -> Option<PieceKey> {
    let stem = path.file_name()?.to_str()?.strip_suffix(EXTENSION)?.strip_suffix('.')?;
    let (prefix, group) = stem.split_once('-')?;
    let key =
        PieceKey { prefix: *blake3::Hash::from_hex(prefix).ok()?.as_bytes(), group: group.parse().ok()? };
    // Refuse other spellings of the same key: they would be counted twice.
    (path_of(Path::new(""), key) == Path::new(path.file_name()?)).then_some(key)
}

fn header(key: PieceKey, bytes: &[u8]) -> Result<Vec<u8>, io::Error> {
    let PieceKey { prefix, group } = key;
    let digest = *blake3::hash(bytes).as_bytes();
    let header = Header { prefix, group, length: bytes.len() as u64, digest };
    codec::encode(&header, Cap::Control).map_err(io::Error::other)
}

/// Writes a piece atomically. Returns the bytes of the file.
pub(super) fn write(dir: &Path, key: PieceKey, bytes: &[u8]) -> io::Result<u64> {
    let path = path_of(dir, key);
    let unfinished = path.with_extension(UNFINISHED);
    let header = header(key, bytes)?;
    let length = u32::try_from(header.len()).map_err(io::Error::other)?.to_le_bytes();
    let written = proto::directory::create_private(&unfinished).and_then(|mut file| {
        file.write_all(MAGIC)?;
        file.write_all(&length)?;
        file.write_all(&header)?;
        file.write_all(bytes)
    });
    let moved = written.and_then(|()| std::fs::rename(&unfinished, &path));
    if moved.is_err() {
        // Remove the partial file. A failure of that is not the error to report.
        let _ = std::fs::remove_file(&unfinished);
    }
    moved?;
    Ok((MAGIC.len() + length.len() + header.len() + bytes.len()) as u64)
}

/// Reads a piece and verifies it.
pub(super) fn read(dir: &Path, key: PieceKey) -> io::Result<Vec<u8>> {
    let mut file = File::open(path_of(dir, key))?;
    let length = file.metadata()?.len();
    let damaged = |reason: &str| io::Error::new(ErrorKind::InvalidData, reason.to_owned());
    let mut start = [0; 12];
    file.read_exact(&mut start)?;
    let (magic, header_len) = start.split_at(MAGIC.len());
    let header_len = header_len.try_into().map_or(usize::MAX, |bytes| u32::from_le_bytes(bytes) as usize);
    if magic != MAGIC || header_len > MAX_HEADER_BYTES {
        return Err(damaged("it is not a piece"));
    }
    let mut header = vec![0; header_len];
    file.read_exact(&mut header)?;
    let header: Header = codec::decode(&header, Cap::Control).map_err(io::Error::other)?;
    if (header.prefix, header.group) != (key.prefix, key.group) {
        return Err(damaged("it is another piece"));
    }
    if length.checked_sub((start.len() + header_len) as u64) != Some(header.length) {
        return Err(damaged("it has another length"));
    }
    let mut bytes = vec![0; usize::try_from(header.length).map_err(io::Error::other)?];
    file.read_exact(&mut bytes)?;
    if *blake3::hash(&bytes).as_bytes() != header.digest {
        return Err(damaged("its bytes have a wrong digest"));
    }
    // Marks the file as used for the next process. If that fails, only the eviction order suffers.
    let _ = file.set_modified(SystemTime::now());
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: PieceKey = PieceKey { prefix: [0xab; 32], group: 3 };

    #[test]
    fn a_written_piece_is_read_and_every_damage_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..200).collect();
        let length = write(dir.path(), KEY, &bytes).unwrap();
        assert_eq!(read(dir.path(), KEY).unwrap(), bytes);
        let path = path_of(dir.path(), KEY);
        assert_eq!(key_of(&path), Some(KEY));
        let file = std::fs::read(&path).unwrap();
        assert_eq!(file.len() as u64, length);
        for at in 0..file.len() {
            let mut damaged = file.clone();
            damaged[at] ^= 0x10;
            std::fs::write(&path, &damaged).unwrap();
            assert!(read(dir.path(), KEY).is_err(), "byte {at}");
            std::fs::write(&path, &file[..at]).unwrap();
            assert!(read(dir.path(), KEY).is_err(), "cut at {at}");
        }
        std::fs::write(&path, [&file[..], &[0]].concat()).unwrap();
        assert!(read(dir.path(), KEY).is_err());
        // Impossible lengths, among them some that would overflow to the length of this file.
        for claimed in [u64::MAX, u64::MAX - 70, 1 << 40, 201] {
            let header = Header { prefix: KEY.prefix, group: KEY.group, length: claimed, digest: [0; 32] };
            let header = codec::encode(&header, Cap::Control).unwrap();
            let start = [&MAGIC[..], &(header.len() as u32).to_le_bytes(), &header, &bytes].concat();
            std::fs::write(&path, start).unwrap();
            let error = read(dir.path(), KEY).unwrap_err().to_string();
            assert_eq!(error, "it has another length", "{claimed}");
        }
        // A valid piece under another key is refused.
        let other = PieceKey { group: 4, ..KEY };
        std::fs::write(path_of(dir.path(), other), &file).unwrap();
        assert!(read(dir.path(), other).is_err());
    }

    #[test]
    fn a_piece_is_written_in_the_form_of_this_version() {
        let golden = [
            &b"kvasirt1"[..],
            &66u32.to_le_bytes(),
            &[0xab; 32],
            &[3, 2],
            blake3::hash(b"kv").as_bytes(),
            b"kv",
        ]
        .concat();
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), KEY, b"kv").unwrap();
        assert_eq!(std::fs::read(path_of(dir.path(), KEY)).unwrap(), golden);
    }

    #[test]
    fn foreign_files_have_no_key() {
        for name in ["notes.txt", "ab-3.kvpiece", ".kvpiece", &format!("{}-03.kvpiece", "ab".repeat(32))] {
            assert_eq!(key_of(Path::new(name)), None, "{name}");
        }
    }
}
