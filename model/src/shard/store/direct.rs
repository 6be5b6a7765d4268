//! Files that are written past the page cache, where file system and memory allow it: what the writer has in memory
//! anyway, nobody reads from there soon, and pages for it cost more than everything else that is done to it.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use tempfile::NamedTempFile;

/// What memory, place and length of a write must be multiples of: as much as any disk asks for.
const ALIGNMENT: usize = 4096;

/// Writes a new file in `dir`; none where that takes the page cache.
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
        // The file system knows no such writes, or wants another alignment.
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(None),
        Err(error) => Err(error),
    }
}
