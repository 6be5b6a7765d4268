//! Layers without a decoder around them.

use super::layout::{self, Buffers, LayerCache, Widths};
use super::{feed_forward, mixer};
use crate::Error;
use crate::weights::LayerWeights;
use kernels::backend::{Backend, BufferId, KvLayerId};
use model::spec::LayerSpec;

/// The ops of layers with attention, on a residual stream that the caller fills and reads.
pub(crate) struct LayerOps {
    buffers: Buffers,
}

impl LayerOps {
    /// For steps of at most `rows`.
    pub(crate) fn new(
        hidden: usize,
        layers: &[LayerSpec],
        rows: usize,
        backend: &mut dyn Backend,
    ) -> Result<Self, Error> {
        let widths = Widths::of_layers(hidden, layers);
        Ok(Self { buffers: layout::buffers(&widths, hidden, rows, (0, 0), backend)? })
    }

    pub(crate) fn residual(&self) -> BufferId {
        self.buffers.x
    }

    /// Free between layers; as wide as the residual stream.
    pub(crate) fn branch(&self) -> BufferId {
        self.buffers.branch
    }

    /// Free between layers; as wide as the residual stream.
    pub(crate) fn normed(&self) -> BufferId {
        self.buffers.normed
    }

    /// Runs a layer of the step that has begun. `cache`: that of its attention.
    pub(crate) fn run(
        &self,
        backend: &mut dyn Backend,
        layer: &LayerWeights,
        cache: KvLayerId,
    ) -> Result<(), Error> {
        let cache = LayerCache { kv: Some(cache), state: None };
        mixer::run(backend, &self.buffers, layer, 1.0, cache)?;
        feed_forward::run(backend, &self.buffers, layer, 1.0)
    }
}
