//! Where Kvasir keeps what outlives a command: `$KVASIR_HOME`, by default `~/.cache/kvasir`.

use crate::config::ConfigError;
use model::file::DigestCache;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// The root of caches and data directories; it need not exist yet.
pub(crate) fn home() -> Result<PathBuf, ConfigError> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let found = set("KVASIR_HOME").or_else(|| set("HOME").map(|dir| dir.join(".cache/kvasir")));
    found.ok_or_else(|| {
        ConfigError::Environment("set KVASIR_HOME: there is no HOME to keep a cache in".into())
    })
}

/// Where digests of models are remembered; nowhere where there is no home.
pub(crate) fn digests() -> Option<DigestCache> {
    Some(DigestCache::at(home().ok()?.join("digests")))
}

/// Where compiled kernels of GPUs are kept; nowhere where there is no home.
pub(crate) fn cubins() -> Option<PathBuf> {
    Some(home().ok()?.join("cubin"))
}

/// The data directory of `kvasir up` unless one is named: one a user, so that a shared home is no clash.
pub(crate) fn up_data_dir() -> Result<PathBuf, ConfigError> {
    // The owner of our own process entry is our user id, read without a foreign call.
    let user = std::fs::metadata("/proc/self").map_or(0, |entry| entry.uid());
    Ok(home()?.join(format!("up-{user}")))
}
