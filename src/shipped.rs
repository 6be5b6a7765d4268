//! Models of other workers: their names, sources and local store.

use crate::config::{ByteSize, ConfigError};
use crate::cpus;
use crate::home;
use crate::models::{DIGEST, Resolved, resolve_named};
use anyhow::Context;
use model::shard::{ChunkId, ShardStore};
use pipeline::weight_distribution::{self, ShippingConfig};
use pki::Identity;
use proto::ids::ModelId;
use proto::shard::ModelRef;
use std::net::SocketAddr;
use std::path::Path;
use worker::defaults::Explained;

/// Default size of the shard store.
pub(crate) const STORE_BYTES: ByteSize = ByteSize(256 << 30);

/// Maximum number of lanes. A source accepts 256 connections from one host, not all of them for lanes.
pub(crate) const MAX_LANES: usize = 16;

/// Default number of lanes if `workers` workers share this machine's CPUs.
pub(crate) fn lanes(workers: usize) -> Explained<usize> {
    worker::defaults::shipping_lanes(cpus::capacity(), workers)
}

/// The host's shard store with this limit.
pub(crate) fn store(bytes: Option<ByteSize>) -> anyhow::Result<ShardStore> {
    let root = home::home()?.join("shards");
    Ok(ShardStore::open(root, bytes.unwrap_or(STORE_BYTES).0)?)
}

/// Resolves MODEL to a file, its name and its sources, using one lane.
///
/// Without `from`, MODEL is a file or a catalog name. Otherwise the workers `from` have it, under its digest
/// (`blake3:HEX`, `ID=blake3:HEX`) or the name under which they serve it. Data already in this host's store
/// is not downloaded again.
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
        // The sources may still be needed for a drafter's file.
        let store = if from.is_empty() { None } else { Some(store(bytes)?) };
        let shipping = ShippingConfig { store, from: from.to_vec(), ..ShippingConfig::default() };
        return Ok((resolve_named(model)?, shipping));
    }
    let store = store(bytes)?;
    let (id, target) = match digest {
        Some((id, digest)) => (id, ModelRef::Digest(digest)),
        None => {
            let id = ModelId::new(model)?;
            (id.clone(), ModelRef::Named(id))
        }
    };
    let identity = identity()?;
    // Before the node has ports, tasks and state.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let held = runtime
        .block_on(weight_distribution::find(&target, &store, from, listen, &identity))
        .context("the model has no manifest")?;
    tracing::info!(%id, digest = %ChunkId(held.manifest().digest()), "fetching the model from other workers");
    let resolved = Resolved { path: held.path().to_owned(), id };
    Ok((resolved, ShippingConfig { store: Some(store), from: from.to_vec(), ..ShippingConfig::default() }))
}

/// The digest in MODEL, and the model's name in the API.
fn digest(model: &str) -> Result<Option<(ModelId, [u8; 32])>, ConfigError> {
    let (id, hex) = match model.split_once('=') {
        Some((id, digest)) => (Some(id), digest.strip_prefix(DIGEST)),
        None => (None, model.strip_prefix(DIGEST)),
    };
    let Some(hex) = hex else { return Ok(None) };
    let wrong = || ConfigError::field("model", model, "must be blake3: and 64 hexadecimal digits");
    let digest = ChunkId::from_hex(hex).ok_or_else(wrong)?;
    let id = ModelId::new(id.unwrap_or(&hex[..16]))
        .map_err(|error| ConfigError::field("model", model, error.to_string()))?;
    Ok(Some((id, digest.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_distinguished_from_a_name() {
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
