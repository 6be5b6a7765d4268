//! Writes files past the page cache where the file system and the memory's alignment allow it. The written
//! data is not read from the cache soon, and allocating its pages would cost more than the rest of the write.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use tempfile::NamedTempFile;

/// Alignment of memory, offset and length of a direct write: the largest that a disk requires.
const ALIGNMENT: usize = 4096;

/// Writes a new file in `dir`. `None` if a direct write is not possible.
pub(super) fn write(dir: &Path, bytes: &[u8]) -> io::Result<Option<NamedTempFile>> {
    let (body, tail) = bytes.split_at(bytes.len() / ALIGNMENT * ALIGNMENT);
    if body.is_empty() || !body.as_ptr().addr().is_multiple_of(ALIGNMENT) {
        return Ok(None);
    }
    let open = |path: &Path| {
        File::options().write(true).create_new(true).mode(0o600).custom_flags(libc::O_DIRECT).open(path)
    };
    let written = tempfile::Builder::new().make_in(dir, open).and_then(|mut file| {
        file.write_all(body)?;
        if !tail.is_empty() {
            File::options().write(true).open(file.path())?.write_all_at(tail, body.len() as u64)?;
        }
        Ok(file)
    });
    match written {
        Ok(file) => Ok(Some(file)),
        // The file system has no direct writes, or requires another alignment.
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(None),
        Err(error) => Err(error),
    }
}
