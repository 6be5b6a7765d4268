//! Kvasir's directory for persistent data: `$KVASIR_HOME`, by default `~/.cache/kvasir`.

use crate::config::ConfigError;
use model::file::DigestCache;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// The root of caches and data directories; it need not exist yet.
pub(crate) fn home() -> Result<PathBuf, ConfigError> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let found = set("KVASIR_HOME").or_else(|| set("HOME").map(|dir| dir.join(".cache/kvasir")));
    found.ok_or_else(|| {
        ConfigError::Environment(
            "neither KVASIR_HOME nor HOME is set, so there is no directory for caches; set KVASIR_HOME"
                .into(),
        )
    })
}

/// Cache of model digests; `None` without a home directory.
pub(crate) fn digests() -> Option<DigestCache> {
    Some(DigestCache::at(home().ok()?.join("digests")))
}

/// Cache of compiled GPU kernels; `None` without a home directory.
pub(crate) fn cubins() -> Option<PathBuf> {
    Some(home().ok()?.join("cubin"))
}

/// Default data directory of `kvasir up`. It contains the user id, so that users of a shared home do not
/// clash.
pub(crate) fn up_data_dir() -> Result<PathBuf, ConfigError> {
    // The owner of the process's /proc entry is the user id, read without a foreign call.
    let user = std::fs::metadata("/proc/self").map_or(0, |entry| entry.uid());
    Ok(home()?.join(format!("up-{user}")))
}
