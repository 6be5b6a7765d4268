//! Files mapped read-only; the one unsafe module of this crate.
//!
//! Accessing a page past the end of a truncated file kills the process (SIGBUS). This cannot be ruled out for
//! files that others may write. Therefore every access to tensor bytes calls [`MappedFile::check_size`]
//! first, and [`MappedFile::read_at`] copies without the mapping.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use memmap2::{Mmap, UncheckedAdvice};

use crate::Error;

/// Drops a range of a file from the page cache, except pages that are mapped. `len` 0 means up to the end of
/// the file.
pub(crate) fn forget_cached(file: &File, start: usize, len: usize) {
    advise(file, start as u64, len as u64, libc::POSIX_FADV_DONTNEED);
}

fn advise(file: &File, start: u64, len: u64, advice: libc::c_int) {
    let (start, len) = (libc::off_t::try_from(start), libc::off_t::try_from(len));
    if let (Ok(start), Ok(len)) = (start, len) {
        // SAFETY: advice on an open file; it changes no byte, and a refusal changes nothing.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), start, len, advice) };
    }
}

/// A regular file, completely mapped read-only.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    file: File,
    map: Mmap,
}

impl MappedFile {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let io = |action| move |source| Error::Io { action, path: path.to_owned(), source };
        // Checked before opening, because opening a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(io("open"))?.is_file() {
            return Err(Error::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(io("open"))?;
        // SAFETY: the mapping is private to this process's address space and read-only, `file` stays open as
        // long as it, and only `&[u8]` is handed out. What remains is another process writing or cutting the
        // file: callers treat the bytes as untrusted (no length or index read from them is used unchecked),
        // and sizes are checked again before tensor bytes are handed out (see the module's note).
        let map = unsafe { Mmap::map(&file) }.map_err(io("map"))?;
        Ok(Self { path: path.to_owned(), file, map })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file as it was when opened.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Identifies the file's state: device, inode, length, seconds and nanoseconds of its last change.
    pub(crate) fn identity(&self) -> Result<[u64; 5], Error> {
        let stat = self.file.metadata().map_err(|source| self.io("stat", source))?;
        let (seconds, nanoseconds) = (stat.mtime().cast_unsigned(), stat.mtime_nsec().cast_unsigned());
        Ok([stat.dev(), stat.ino(), stat.len(), seconds, nanoseconds])
    }

    pub(crate) fn modified(&self) -> Result<SystemTime, Error> {
        self.file.metadata().and_then(|stat| stat.modified()).map_err(|source| self.io("stat", source))
    }

    /// Fails if the file is now shorter than its mapping.
    pub(crate) fn check_size(&self) -> Result<(), Error> {
        let stat = self.file.metadata().map_err(|source| self.io("stat", source))?;
        let was = self.map.len() as u64;
        if stat.len() < was {
            return Err(Error::Shrunk { path: self.path.clone(), was, now: stat.len() });
        }
        Ok(())
    }

    /// Has the system read a range into the page cache.
    pub(crate) fn read_ahead(&self, start: u64, len: u64) {
        advise(&self.file, start, len, libc::POSIX_FADV_WILLNEED);
    }

    /// Releases the pages of a range, in the mapping and, unless other processes map them, in the page cache.
    /// The next access reads them from disk. Errors are ignored.
    pub(crate) fn forget(&self, start: usize, len: usize) {
        if start.checked_add(len).is_none_or(|end| end > self.map.len()) {
            return;
        }
        // SAFETY: the pages belong to a file that is mapped read-only and shared: a later access, also
        // through a slice that was handed out before, sees the file's bytes as before.
        let given_back = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) };
        if given_back.is_ok() {
            forget_cached(&self.file, start, len);
        }
    }

    /// Releases the mapping's pages of a range. They stay in the page cache. Errors are ignored.
    pub(crate) fn release(&self, start: usize, len: usize) {
        if start.checked_add(len).is_some_and(|end| end <= self.map.len()) {
            // SAFETY: as in `forget`.
            let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) };
        }
    }

    /// Copies `buffer.len()` bytes from `offset` without touching the mapping.
    pub(crate) fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), Error> {
        self.file.read_exact_at(buffer, offset).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => match self.check_size() {
                Err(shrunk) => shrunk,
                Ok(()) => self.io("read", source),
            },
            _ => self.io("read", source),
        })
    }

    fn io(&self, action: &'static str, source: io::Error) -> Error {
        Error::Io { action, path: self.path.clone(), source }
    }
}

/// A file whose bytes are kept in memory until this is dropped.
#[derive(Debug)]
pub struct PinnedFile {
    file: MappedFile,
    locked: bool,
}

impl PinnedFile {
    /// Reads the whole file into memory. Its pages are locked if the limit of locked memory allows it; else they are
    /// mapped, and the kernel may drop them when memory runs out.
    ///
    /// # Errors
    /// If the file cannot be mapped.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = MappedFile::open(path)?;
        let locked = file.map.lock().is_ok();
        if !locked {
            // A kernel that does not know the advice reads the pages when they are used.
            let _ = file.map.advise(memmap2::Advice::PopulateRead);
        }
        Ok(Self { file, locked })
    }

    /// Whether the kernel cannot drop its pages.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    pub fn bytes(&self) -> u64 {
        self.file.map.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// KiB of a file's mappings in this process that are in memory.
    fn resident(path: &Path) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
        let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        rss.trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    fn released_pages_leave_this_process_and_read_as_before() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes = vec![7; 4 << 20];
        file.write_all(&bytes).unwrap();
        let mapped = MappedFile::open(file.path()).unwrap();
        assert!(mapped.bytes() == bytes);
        mapped.release(0, (4 << 20) + 1);
        assert_eq!(resident(file.path()), 4096, "a range outside of the file");
        mapped.release(0, 4 << 20);
        assert_eq!(resident(file.path()), 0);
        assert!(mapped.bytes() == bytes);
    }

    #[test]
    fn a_pinned_file_is_in_memory() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[7; 1 << 20]).unwrap();
        let pinned = PinnedFile::open(file.path()).unwrap();
        assert_eq!((pinned.bytes(), resident(file.path())), (1 << 20, 1024));
        assert!(PinnedFile::open(Path::new("/no/such/file")).is_err());
    }

    #[test]
    fn dropped_pages_leave_memory_and_read_as_before() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..4u32 << 20).map(|i| (i % 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        file.as_file().sync_all().unwrap();
        let mapped = MappedFile::open(file.path()).unwrap();
        assert!(mapped.bytes() == bytes);
        assert_eq!(resident(file.path()), 4096);
        mapped.forget(1 << 20, 2 << 20);
        // Less where pages are so large that their other parts went with them.
        let rest = resident(file.path());
        assert!(rest <= 2048, "{rest} KiB");
        mapped.forget(3 << 20, (1 << 20) + 1);
        assert_eq!(resident(file.path()), rest);
        assert!(mapped.bytes() == bytes);
    }
}
