//! The cluster's key as a file: 64 hexadecimal digits, readable by its owner only.

use crate::config::ConfigError;
use proto::block::ClusterKey;
use proto::directory;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::Path;

/// Reads the key. Creates a random one if there is no file.
pub(crate) fn load_or_make(path: &Path) -> anyhow::Result<ClusterKey> {
    if !path.exists() {
        let made = random().and_then(|key| make(path, &key));
        made.map_err(|error| anyhow::anyhow!(directory::failed(path, &error)))?;
    }
    load(path)
}

/// Writes the key that this node has received. A file with another key is not overwritten.
pub(crate) fn keep(path: &Path, key: &ClusterKey) -> anyhow::Result<()> {
    if !path.exists() {
        make(path, key).map_err(|error| anyhow::anyhow!(directory::failed(path, &error)))?;
    }
    anyhow::ensure!(
        load(path)? == *key,
        "{}: the file has another key than this cluster; remove it if it belongs to no other cluster",
        path.display()
    );
    Ok(())
}

fn load(path: &Path) -> anyhow::Result<ClusterKey> {
    let text = fs::read_to_string(path).map_err(|error| anyhow::anyhow!(directory::failed(path, &error)))?;
    parse(text.trim()).ok_or_else(|| {
        // The error must not contain the file's contents.
        ConfigError::field("cluster_key", path.display(), "a file of 64 hexadecimal digits").into()
    })
}

pub(crate) fn random() -> std::io::Result<ClusterKey> {
    let mut key = [0u8; 32];
    File::open("/dev/urandom")?.read_exact(&mut key)?;
    Ok(ClusterKey(key))
}

/// If several processes create the file at once, the first one wins. No process reads a partial file.
fn make(path: &Path, key: &ClusterKey) -> std::io::Result<()> {
    if let Some(parent) = path.parent() {
        directory::make_private(parent)?;
    }
    let text: String = key.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let temporary = path.with_extension(format!("tmp{}", std::process::id()));
    // A leftover of a crashed process with the same process id, as in a container.
    let mut file = directory::create_private(&temporary)?;
    let written = writeln!(file, "{text}").and_then(|()| file.sync_all());
    if let Err(error) = written {
        // A failure to remove the temporary file must not hide the original error.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    let linked = match fs::hard_link(&temporary, path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    };
    fs::remove_file(&temporary)?;
    linked
}

fn parse(text: &str) -> Option<ClusterKey> {
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let bytes = pairs.iter().map(|[high, low]| u8::try_from(digit(*high)? * 16 + digit(*low)?).ok());
    let bytes: Vec<u8> = bytes.collect::<Option<_>>()?;
    Some(ClusterKey(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_made_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/cluster.key");
        let key = load_or_make(&path).unwrap();
        assert_ne!(key.0, [0; 32]);
        assert!(load_or_make(&path).unwrap() == key);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert!(load_or_make(&dir.path().join("other.key")).unwrap() != key);
    }

    #[test]
    fn a_spoilt_key_is_a_configuration_error_that_does_not_show_it() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "00", "zz", &"g".repeat(64), &"0".repeat(65)] {
            let path = dir.path().join("cluster.key");
            fs::write(&path, text).unwrap();
            let error = load_or_make(&path).unwrap_err();
            assert!(error.is::<ConfigError>());
            assert!(text.is_empty() || !error.to_string().contains(&format!("{text}:")));
        }
    }
}
