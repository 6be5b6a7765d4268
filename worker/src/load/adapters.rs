//! LoRA adapters of a model.

use super::EngineOptions;
use crate::Error;
use engine::decoder::Decoder;
use engine::engine::EngineAdapter;
use kernels::backend::AdapterId;
use model::checkpoint::lora::LoraAdapter;
use model::{ModelFile, ModelSpec};
use proto::ids::ModelId;
use proto::stage::StageAdapter;
use std::path::{Path, PathBuf};

/// An adapter to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoraSource {
    /// Its name as a model.
    pub name: ModelId,
    /// Folder in PEFT's layout.
    pub path: PathBuf,
}

/// Reads the adapter in `folder` for the model in `base`.
///
/// # Errors
/// [`engine::Error::Adapter`], which names it.
pub fn read_adapter(base: &Path, name: &ModelId, folder: &Path) -> Result<LoraAdapter, Error> {
    let file = ModelFile::open(base)?;
    read(&file, &ModelSpec::from_file(&file)?, name, folder)
}

fn read(file: &ModelFile, spec: &ModelSpec, name: &ModelId, folder: &Path) -> Result<LoraAdapter, Error> {
    let adapter = LoraAdapter::open(folder, file, spec);
    adapter
        .map_err(|error| engine::Error::Adapter { name: name.to_string(), reason: error.to_string() }.into())
}

/// Loads the adapters of `options` into a decoder of the model in `file`.
pub(super) fn load_all(
    options: &EngineOptions,
    file: &ModelFile,
    decoder: &mut Decoder,
) -> Result<Vec<EngineAdapter>, Error> {
    let mut loaded: Vec<EngineAdapter> = Vec::with_capacity(options.lora.len());
    for LoraSource { name, path } in &options.lora {
        if loaded.iter().any(|adapter| adapter.name == *name) {
            let reason = "two adapters have this name".to_owned();
            return Err(engine::Error::Adapter { name: name.to_string(), reason }.into());
        }
        let adapter = read(file, decoder.spec(), name, path)?;
        options.lora_limits.admit(name, &adapter, loaded.iter().map(|adapter| adapter.bytes).sum())?;
        let id = decoder
            .load_adapter(&adapter)
            .map_err(|error| engine::Error::Adapter { name: name.to_string(), reason: error.to_string() })?;
        loaded.push(EngineAdapter::new(name.clone(), path.clone(), &adapter, id));
    }
    Ok(loaded)
}

/// The adapters as later stages are told to load them.
pub(super) fn for_stages(adapters: &[EngineAdapter]) -> Vec<StageAdapter> {
    let of = |adapter: &EngineAdapter| StageAdapter {
        number: adapter.id().number(),
        path: adapter.path.display().to_string(),
        digest: adapter.digest,
    };
    adapters.iter().map(of).collect()
}

/// Loads a later stage's part of an adapter.
///
/// # Errors
/// [`engine::Error::Adapter`] if the folder has another adapter than the first stage's.
pub(crate) fn stage_adapter(
    base: &Path,
    StageAdapter { number, path, digest }: &StageAdapter,
    decoder: &mut Decoder,
) -> Result<AdapterId, Error> {
    let file = ModelFile::open(base)?;
    let refuse = |reason: String| engine::Error::Adapter { name: number.to_string(), reason };
    let adapter = LoraAdapter::open(Path::new(path), &file, decoder.spec());
    let adapter = adapter.map_err(|error| refuse(error.to_string()))?;
    if adapter.digest != *digest {
        return Err(refuse(format!("{path} has another adapter here than at the first stage")).into());
    }
    Ok(decoder.load_adapter(&adapter)?)
}

/// Digest of a model with an adapter, as that of a model of its own: part of every block root, so that its caches are
/// its own.
pub fn served_digest(model_digest: &[u8; 32], adapter_digest: &[u8; 32]) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    hash.update(b"kvasir model with adapter 1").update(model_digest).update(adapter_digest);
    hash.finalize().into()
}

/// # Errors
/// [`engine::Error::Config`] if adapters are to be loaded.
pub(crate) fn refuse_adapters(options: &EngineOptions, what: &str) -> Result<(), Error> {
    match options.lora.first() {
        None => Ok(()),
        Some(LoraSource { name, .. }) => {
            let reason = format!("{what} takes no adapter ({name})");
            Err(engine::Error::Config { option: "lora", reason }.into())
        }
    }
}
