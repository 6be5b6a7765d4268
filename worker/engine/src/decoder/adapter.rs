//! LoRA adapters of a decoder's layers.

use super::Decoder;
use crate::Error;
use kernels::backend::{AdapterId, LowRankSource};
use model::checkpoint::lora::LoraAdapter;
use model::spec::RowSlice;
use std::borrow::Cow;
use std::ops::Range;

impl Decoder {
    /// Loads what an adapter of this model adds to the layers of this range.
    ///
    /// # Errors
    /// [`Error::Kernel`] if the device serves no adapters.
    pub fn load_adapter(&mut self, adapter: &LoraAdapter) -> Result<AdapterId, Error> {
        let mut parts = Vec::new();
        let mut done = Vec::new();
        for linear in self.spec.layer_linears(self.config.layers.clone()) {
            let Some(low_rank) = adapter.matrices.get(&linear.weight) else { continue };
            let key = (linear.weight.clone(), linear.slice);
            let Some(matrix) = self.weights.matrices.get(&key).copied() else {
                return Err(Error::MissingTensor { name: key.0 });
            };
            if done.contains(&matrix) {
                continue;
            }
            done.push(matrix);
            let b = match linear.slice {
                None => Cow::Borrowed(low_rank.b.as_slice()),
                Some(slice) => Cow::Owned(rows_of(&low_rank.b, low_rank.rank, slice)),
            };
            parts.push((matrix, low_rank, low_rank.scale * linear.factor, b));
        }
        let sources: Vec<LowRankSource<'_>> = parts
            .iter()
            .map(|(matrix, low_rank, scale, b)| LowRankSource {
                matrix: *matrix,
                rank: low_rank.rank,
                scale: *scale,
                a: &low_rank.a,
                b,
            })
            .collect();
        Ok(self.backend.load_adapter(&sources)?)
    }

    /// Frees an adapter that no later step uses.
    pub fn unload_adapter(&mut self, adapter: AdapterId) {
        self.backend.unload_adapter(adapter);
    }

    /// Sets the adapters of rows of the next step. The other rows, and steps after it, have none.
    pub fn use_adapters(&mut self, rows: &[(Range<usize>, AdapterId)]) -> Result<(), Error> {
        Ok(self.backend.use_adapters(rows)?)
    }
}

fn rows_of(b: &[f32], rank: usize, slice: RowSlice) -> Vec<f32> {
    let RowSlice { period, start, len, .. } = slice;
    let periods = b.chunks_exact((period * rank).max(1));
    periods.flat_map(|rows| &rows[start * rank..(start + len) * rank]).copied().collect()
}
