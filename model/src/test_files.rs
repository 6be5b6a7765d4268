//! Files for this crate's tests.

use std::path::{Path, PathBuf};

use crate::gguf::writer::Writer;
use crate::{GgmlType, Gguf, Metadata};

/// A file of the oracle set: under `$KVASIR_FIXTURES`, else under `tests/fixtures` of the workspace. That it is
/// there is for the caller to find out: a missing file fails a test, it never skips it.
pub(crate) fn fixture(name: &str) -> PathBuf {
    match std::env::var_os("KVASIR_FIXTURES") {
        Some(dir) => Path::new(&dir).join(name),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name),
    }
}

/// A file of these tensors, all zeros, opened. It is deleted; the mapping stays.
pub(crate) fn gguf(metadata: Metadata, tensors: &[(&str, GgmlType, &[u64])]) -> Gguf {
    let mut writer = Writer::new(metadata).unwrap();
    for (name, ty, dims) in tensors {
        writer.tensor(name, *ty, dims).unwrap();
    }
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writer.write(&mut file, |info| vec![0; usize::try_from(info.bytes()).unwrap()]).unwrap();
    Gguf::open(file.path()).unwrap()
}
