//! Cache of compiled kernels in files. Compiling all kernels takes seconds, reading them milliseconds.

use super::{Compiled, Compiler, named_options};
use crate::source::{self, HEADERS, Source};
use crate::{Arch, CudaError};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

/// First bytes of every file. Another file layout needs another value.
const MAGIC: &[u8] = b"kvasir cubin 1\n";
const EXTENSION: &str = "cubin";
const HASH: usize = blake3::OUT_LEN;
/// Maximum bytes of a file. No kernel is that large, so a longer file is foreign.
const MAX_FILE: u64 = 64 << 20;
/// Default limit of the folder's size in bytes: some versions of all kernels for two architectures.
const MAX_BYTES: u64 = 256 << 20;

/// A folder of compiled sources. File names are hashes of all inputs. Several processes may share a folder.
#[derive(Debug, Clone)]
pub struct CubinCache {
    folder: PathBuf,
    max_bytes: u64,
}

impl CubinCache {
    /// Creates a cache in a folder, which is created by the first write.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), max_bytes: MAX_BYTES }
    }

    /// Sets another limit in bytes. The oldest files are removed first.
    #[must_use]
    pub fn with_max_bytes(self, max_bytes: u64) -> Self {
        Self { max_bytes, ..self }
    }

    /// Returns the cached source, or compiles and caches it. A folder that cannot be read or written only
    /// costs time.
    ///
    /// # Errors
    /// Those of [`Compiler::compile`].
    pub fn compile(&self, compiler: &Compiler, source: &Source, arch: Arch) -> Result<Compiled, CudaError> {
        let path = path(&self.folder, compiler.version(), source, arch);
        if let Some(compiled) = read(&path, source, arch) {
            return Ok(compiled);
        }
        let compiled = compiler.compile(source, arch)?;
        if let Err(error) = self.keep(&path, &compiled) {
            tracing::warn!(path = %path.display(), %error, "cannot cache a compiled kernel; the next start compiles it again");
        }
        Ok(compiled)
    }

    /// Fills the folder with the CUBINs of every kernel for all checked architectures, without PTX and
    /// logs, to ship them with the program.
    ///
    /// # Errors
    /// Those of [`Compiler::compile`], and [`CudaError::Call`] for a folder that cannot be written.
    pub fn prebuild(&self, compiler: &Compiler) -> Result<usize, CudaError> {
        let unbounded = self.clone().with_max_bytes(u64::MAX);
        for arch in Arch::CHECKED {
            for source in source::all(arch) {
                let Compiled { source_name, arch, cubin, .. } = compiler.compile(source, arch)?;
                let machine_code =
                    Compiled { source_name, arch, cubin, ptx: String::new(), log: String::new() };
                let path = path(&self.folder, compiler.version(), source, arch);
                let written = unbounded.keep(&path, &machine_code);
                written.map_err(|error| CudaError::Call {
                    call: "keeping a kernel",
                    status: error.to_string(),
                })?;
            }
        }
        Ok(Arch::CHECKED.into_iter().map(|arch| source::all(arch).count()).sum())
    }

    /// Writes a file atomically.
    fn keep(&self, path: &Path, compiled: &Compiled) -> io::Result<()> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        fs::create_dir_all(&self.folder)?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let partial = path.with_extension(format!("{}-{number}.partial", std::process::id()));
        let written = fs::write(&partial, encode(compiled)).and_then(|()| fs::rename(&partial, path));
        if written.is_err() {
            let _ = fs::remove_file(&partial);
        }
        written.and_then(|()| self.shrink(path))
    }

    /// Removes the oldest files, but not `newest`, until all fit the limit.
    fn shrink(&self, newest: &Path) -> io::Result<()> {
        let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let ours =
                path.extension().is_some_and(|extension| extension == EXTENSION || extension == "partial");
            // Another process may have removed it meanwhile.
            if let (true, Ok(found)) = (ours && path != newest, fs::metadata(&path)) {
                files.push((found.modified()?, found.len(), path));
            }
        }
        files.sort();
        let mut bytes = fs::metadata(newest)?.len() + files.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
        for (_, size, path) in files {
            if bytes <= self.max_bytes {
                break;
            }
            bytes -= size;
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Returns the path of a source that one version of the compiler has compiled.
pub(super) fn path(folder: &Path, version: (i32, i32), source: &Source, arch: Arch) -> PathBuf {
    folder.join(key(version, source, arch)).with_extension(EXTENSION)
}

/// Hashes all inputs of a compiled source.
fn key(version: (i32, i32), source: &Source, arch: Arch) -> String {
    let mut hasher = blake3::Hasher::new();
    let version = format!("{}.{}", version.0, version.1);
    let options = named_options(arch).join("\n");
    let headers = HEADERS.map(|(_, text)| text);
    for field in [&version, &options, source.name, source.text].into_iter().chain(headers) {
        hasher.update(&(field.len() as u64).to_le_bytes());
        hasher.update(field.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// Encodes the magic, the hash of the rest, and the three sections, each after its length.
fn encode(compiled: &Compiled) -> Vec<u8> {
    let mut body = Vec::new();
    for section in [compiled.cubin.as_slice(), compiled.ptx.as_bytes(), compiled.log.as_bytes()] {
        body.extend((section.len() as u64).to_le_bytes());
        body.extend(section);
    }
    [MAGIC, blake3::hash(&body).as_bytes(), &body].concat()
}

/// Reads a file. Returns `None` if it is missing or damaged.
pub(super) fn read(path: &Path, source: &Source, arch: Arch) -> Option<Compiled> {
    if fs::metadata(path).ok()?.len() > MAX_FILE {
        return None;
    }
    let bytes = fs::read(path).ok()?;
    let (hash, mut body) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<HASH>()?;
    if blake3::hash(body) != *hash {
        tracing::warn!(path = %path.display(), "a cached kernel is damaged; it is compiled again");
        return None;
    }
    let mut next_section = || {
        let (len, rest) = body.split_first_chunk::<8>()?;
        let (section, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        body = rest;
        Some(section.to_vec())
    };
    let (cubin, ptx, log) = (next_section()?, next_section()?, next_section()?);
    let (ptx, log) = (String::from_utf8(ptx).ok()?, String::from_utf8(log).ok()?);
    Some(Compiled { source_name: source.name.into(), arch, cubin, ptx, log })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: Source = Source { name: "a.cu", text: "text", kernels: &["a"] };

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kvasir-cubins-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    fn compiled() -> Compiled {
        let (cubin, ptx, log) = (vec![7; 1000], "ptx".into(), String::new());
        Compiled { source_name: "a.cu".into(), arch: Arch::SM_90, cubin, ptx, log }
    }

    #[test]
    fn the_file_name_depends_on_all_inputs_of_the_code() {
        let changed = |name, text| Source { name, text, kernels: &["a"] };
        let keys = [
            key((13, 0), &SOURCE, Arch::SM_90),
            key((13, 1), &SOURCE, Arch::SM_90),
            key((13, 0), &SOURCE, Arch::SM_121A),
            key((13, 0), &changed("b.cu", "text"), Arch::SM_90),
            key((13, 0), &changed("a.cu", "texts"), Arch::SM_90),
        ];
        assert_eq!(keys.iter().collect::<std::collections::BTreeSet<_>>().len(), keys.len());
    }

    #[test]
    fn a_cached_file_is_read_unless_it_is_damaged() {
        let cache = CubinCache::new(folder("bits"));
        let path = cache.folder.join("a.cubin");
        assert_eq!(read(&path, &SOURCE, Arch::SM_90), None);
        cache.keep(&path, &compiled()).unwrap();
        assert_eq!(read(&path, &SOURCE, Arch::SM_90), Some(compiled()));
        let bytes = fs::read(&path).unwrap();
        for at in [0, MAGIC.len(), MAGIC.len() + HASH, bytes.len() / 2, bytes.len() - 1] {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            fs::write(&path, &bytes).unwrap();
            assert_eq!(read(&path, &SOURCE, Arch::SM_90), None, "byte {at}");
        }
        for len in [0, MAGIC.len(), MAGIC.len() + HASH, bytes.len() - 1] {
            fs::write(&path, &bytes[..len]).unwrap();
            assert_eq!(read(&path, &SOURCE, Arch::SM_90), None, "cut to {len}");
        }
        fs::remove_dir_all(&cache.folder).unwrap();
    }

    #[test]
    fn the_oldest_files_are_removed_when_the_folder_is_full() {
        let size = encode(&compiled()).len() as u64;
        let cache = CubinCache::new(folder("cap")).with_max_bytes(2 * size);
        let long_ago = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
        for (age, name) in ["a.cubin", "b.cubin", "c.cubin"].iter().enumerate() {
            let path = cache.folder.join(name);
            cache.keep(&path, &compiled()).unwrap();
            let modified = long_ago + std::time::Duration::from_secs(age as u64);
            fs::File::options().append(true).open(&path).unwrap().set_modified(modified).unwrap();
        }
        let mut left: Vec<_> =
            fs::read_dir(&cache.folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["b.cubin", "c.cubin"]);
        fs::remove_dir_all(&cache.folder).unwrap();
    }

    #[test]
    fn a_compiled_source_is_read_from_its_file() {
        let cache = CubinCache::new(folder("hit"));
        let compiler = Compiler::find().unwrap();
        let source = &source::ROWWISE;
        let first = cache.compile(&compiler, source, Arch::SM_90).unwrap();
        let path = path(&cache.folder, compiler.version(), source, Arch::SM_90);
        let marked = Compiled { log: "from the file".into(), ..first.clone() };
        fs::write(&path, encode(&marked)).unwrap();
        assert_eq!(cache.compile(&compiler, source, Arch::SM_90).unwrap().log, marked.log);
        fs::write(&path, b"something else").unwrap();
        let again = cache.compile(&compiler, source, Arch::SM_90).unwrap();
        assert!(again.ptx == first.ptx && again.log != marked.log, "{}", again.log);
        fs::remove_dir_all(&cache.folder).unwrap();
    }
}
