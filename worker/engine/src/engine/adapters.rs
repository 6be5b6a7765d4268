//! The LoRA adapters of an engine's model. A request has one of them or none.

use super::Engine;
use crate::Error;
use kernels::backend::AdapterId;
use model::checkpoint::lora::LoraAdapter;
use proto::ids::ModelId;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::scheduler::StepPlan;

/// A loaded adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineAdapter {
    /// Its name as a model.
    pub name: ModelId,
    /// Folder of its files.
    pub path: PathBuf,
    pub digest: [u8; 32],
    pub rank: usize,
    /// Bytes of its values.
    pub bytes: u64,
    id: AdapterId,
}

impl EngineAdapter {
    /// An adapter that the decoder has as `id`.
    pub fn new(name: ModelId, path: PathBuf, adapter: &LoraAdapter, id: AdapterId) -> Self {
        let (rank, bytes) = (adapter.rank(), adapter.bytes());
        Self { name, path, digest: adapter.digest, rank, bytes, id }
    }

    /// The adapter in the decoder.
    pub fn id(&self) -> AdapterId {
        self.id
    }
}

/// Limits of adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterLimits {
    /// Largest rank.
    pub rank: usize,
    /// Bytes of all loaded adapters together.
    pub bytes: u64,
}

impl Default for AdapterLimits {
    fn default() -> Self {
        Self { rank: 64, bytes: 1 << 30 }
    }
}

impl AdapterLimits {
    /// Whether an adapter may be loaded beside others of this many bytes.
    ///
    /// # Errors
    /// [`Error::Adapter`] if not.
    pub fn admit(&self, name: &ModelId, adapter: &LoraAdapter, others: u64) -> Result<(), Error> {
        let refuse = |reason: String| Err(Error::Adapter { name: name.to_string(), reason });
        let (rank, bytes) = (adapter.rank(), adapter.bytes());
        if rank > self.rank {
            return refuse(format!("its rank is {rank}, the limit is {} (--max-lora-rank)", self.rank));
        }
        if others.saturating_add(bytes) > self.bytes {
            let limit = self.bytes;
            return refuse(format!(
                "it needs {bytes} bytes beside {others}, the limit is {limit} (--lora-bytes)"
            ));
        }
        Ok(())
    }
}

#[derive(Default)]
pub(super) struct Adapters {
    limits: AdapterLimits,
    loaded: Vec<EngineAdapter>,
    /// Unloaded ones that requests still use.
    leaving: Vec<EngineAdapter>,
}

impl Engine {
    /// Starts with adapters that the decoder has, and limits those that are loaded later.
    pub fn with_adapters(mut self, loaded: Vec<EngineAdapter>, limits: AdapterLimits) -> Self {
        self.adapters = Adapters { limits, loaded, leaving: Vec::new() };
        self
    }

    /// The adapters that requests may use.
    pub fn adapters(&self) -> &[EngineAdapter] {
        &self.adapters.loaded
    }

    /// Loads an adapter of this model from `path`. Does nothing if the same one is loaded under this name.
    ///
    /// # Errors
    /// [`Error::Adapter`] if another one has this name, or a limit would be exceeded; [`Error::Kernel`] if the device
    /// serves no adapters.
    pub fn load_adapter(&mut self, name: &ModelId, adapter: &LoraAdapter, path: &Path) -> Result<(), Error> {
        let Adapters { limits, loaded, leaving } = &self.adapters;
        if let Some(existing) = loaded.iter().find(|existing| existing.name == *name) {
            return match existing.digest == adapter.digest {
                true => Ok(()),
                false => Err(Error::Adapter {
                    name: name.to_string(),
                    reason: "another adapter has this name: unload it first".to_owned(),
                }),
            };
        }
        limits.admit(name, adapter, loaded.iter().chain(leaving).map(|adapter| adapter.bytes).sum())?;
        let id = self.executor.load_adapter(adapter, path)?;
        self.adapters.loaded.push(EngineAdapter::new(name.clone(), path.to_owned(), adapter, id));
        self.metrics.weight_bytes.set(self.executor.decoder().backend().memory().weights as i64);
        Ok(())
    }

    /// Unloads an adapter: later requests cannot use it. Its memory becomes free once no request uses it. Returns
    /// whether it was loaded.
    pub fn unload_adapter(&mut self, name: &ModelId) -> bool {
        let found = self.adapters.loaded.iter().position(|adapter| adapter.name == *name);
        let Some(at) = found else { return false };
        let adapter = self.adapters.loaded.remove(at);
        self.adapters.leaving.push(adapter);
        self.free_adapters();
        true
    }

    pub(super) fn adapter(&self, digest: &[u8; 32]) -> Option<AdapterId> {
        self.adapters.loaded.iter().find(|adapter| adapter.digest == *digest).map(|adapter| adapter.id)
    }

    /// Frees unloaded adapters that no request uses.
    pub(super) fn free_adapters(&mut self) {
        if self.adapters.leaving.is_empty() {
            return;
        }
        let used = |id: AdapterId| self.requests.values().any(|request| request.adapter == Some(id));
        let leaving = std::mem::take(&mut self.adapters.leaving);
        let (leaving, free): (Vec<_>, Vec<_>) = leaving.into_iter().partition(|adapter| used(adapter.id));
        self.adapters.leaving = leaving;
        for adapter in free {
            self.executor.unload_adapter(adapter.id);
        }
        self.metrics.weight_bytes.set(self.executor.decoder().backend().memory().weights as i64);
    }

    /// The rows of a step that have an adapter.
    pub(super) fn adapter_rows(&self, plan: &StepPlan) -> Vec<(Range<usize>, AdapterId)> {
        let rows = plan.sequences.iter().filter_map(|sequence| {
            let adapter = self.requests.get(&sequence.id)?.adapter?;
            Some((sequence.rows.start as usize..sequence.rows.end as usize, adapter))
        });
        rows.collect()
    }
}
