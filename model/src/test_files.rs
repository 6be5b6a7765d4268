//! Files for this crate's tests.

use std::path::{Path, PathBuf};

/// A file of the oracle set: under `$KVASIR_FIXTURES`, else under `tests/fixtures` of the workspace. That it is
/// there is for the caller to find out: a missing file fails a test, it never skips it.
pub(crate) fn fixture(name: &str) -> PathBuf {
    match std::env::var_os("KVASIR_FIXTURES") {
        Some(dir) => Path::new(&dir).join(name),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name),
    }
}
