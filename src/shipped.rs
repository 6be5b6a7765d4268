//! Models that other workers have: their names, where they are asked for, where what they send is kept.

use crate::config::{ByteSize, ConfigError};
use crate::cpus;
use crate::home;
use crate::models::{Resolved, resolve_named};
use anyhow::Context;
use model::shard::{ChunkId, ShardStore};
use proto::ids::ModelId;
use proto::shard::ModelRef;
use proto::transport::Identity;
use std::net::SocketAddr;
use std::path::Path;
use worker::defaults::Explained;
use worker::weight_distribution::{self, ShippingConfig};

/// What stands before a digest in the place of MODEL.
pub(crate) const DIGEST: &str = "blake3:";
/// Bytes of the shard store unless they are set.
pub(crate) const STORE_BYTES: ByteSize = ByteSize(256 << 30);

/// Lanes that may be asked for: of 256 connections that a source takes of one host, some are for others.
pub(crate) const MAX_LANES: usize = 16;

/// Lanes of a worker that shares this machine's CPUs with others, `workers` together.
pub(crate) fn lanes(workers: usize) -> Explained<usize> {
    worker::defaults::shipping_lanes(cpus::capacity(), workers)
}

/// The store of this host, for so many bytes.
pub(crate) fn store(bytes: Option<ByteSize>) -> anyhow::Result<ShardStore> {
    let root = home::home()?.join("shards");
    Ok(ShardStore::open(root, bytes.unwrap_or(STORE_BYTES).0)?)
}

/// MODEL as a file and its name, and where it comes from, over one lane.
///
/// A file, or a name of the catalog, is what it is without `from`. Otherwise it is a model of the workers `from`, by its
/// digest (`blake3:HEX`, `ID=blake3:HEX`) or by the name under which they serve it; what the store of this host has of it
/// is not fetched again.
pub(crate) fn resolve(
    model: &str,
    from: &[String],
    bytes: Option<ByteSize>,
    listen: SocketAddr,
    identity: impl FnOnce() -> anyhow::Result<Identity>,
) -> anyhow::Result<(Resolved, ShippingConfig)> {
    let digest = digest(model)?;
    let is_here = digest.is_none() && (from.is_empty() || Path::new(model).exists());
    if is_here {
        // What others have may still be asked for: a drafter's file.
        let store = if from.is_empty() { None } else { Some(store(bytes)?) };
        let shipping = ShippingConfig { store, from: from.to_vec(), ..ShippingConfig::default() };
        return Ok((resolve_named(model)?, shipping));
    }
    let store = store(bytes)?;
    let (id, wanted) = match digest {
        Some((id, digest)) => (id, ModelRef::Digest(digest)),
        None => {
            let id = ModelId::new(model)?;
            (id.clone(), ModelRef::Named(id))
        }
    };
    let identity = identity()?;
    // Before the node has ports, tasks and a state of its own.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let held = runtime
        .block_on(weight_distribution::find(&wanted, &store, from, listen, &identity))
        .context("no manifest")?;
    tracing::info!(%id, digest = %ChunkId(held.manifest().digest()), "the model comes from other workers");
    let resolved = Resolved { path: held.path().to_owned(), id };
    Ok((resolved, ShippingConfig { store: Some(store), from: from.to_vec(), ..ShippingConfig::default() }))
}

/// The digest that MODEL names, and what the model is called in the API.
fn digest(model: &str) -> Result<Option<(ModelId, [u8; 32])>, ConfigError> {
    let (id, hex) = match model.split_once('=') {
        Some((id, digest)) => (Some(id), digest.strip_prefix(DIGEST)),
        None => (None, model.strip_prefix(DIGEST)),
    };
    let Some(hex) = hex else { return Ok(None) };
    let wrong = || ConfigError::field("model", model, "blake3: and 64 hexadecimal digits");
    let digest = ChunkId::from_hex(hex).ok_or_else(wrong)?;
    let id = ModelId::new(id.unwrap_or(&hex[..16]))
        .map_err(|error| ConfigError::field("model", model, error.to_string()))?;
    Ok(Some((id, digest.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_told_from_a_name_and_gives_one() {
        let hex = "ab".repeat(32);
        let found = digest(&format!("blake3:{hex}")).unwrap().unwrap();
        assert_eq!((found.0.as_str(), found.1), ("abababababababab", [0xab; 32]));
        let found = digest(&format!("mine=blake3:{hex}")).unwrap().unwrap();
        assert_eq!((found.0.as_str(), found.1), ("mine", [0xab; 32]));
        for name in ["smollm2-135m", "mine=/models/x.gguf", "blake3.gguf"] {
            assert!(digest(name).unwrap().is_none(), "{name}");
        }
        for wrong in
            ["blake3:", "blake3:ab", &format!("blake3:{hex}0"), &format!("x=blake3:{}", "zz".repeat(32))]
        {
            assert!(digest(wrong).is_err(), "{wrong}");
        }
    }
}
