//! Reads recurrent states in the layout of reference implementations.

use super::Decoder;
use crate::Error;
use model::spec::{DeltaNetSpec, HeadGrouping, MixerSpec};

/// The recurrent state of one layer of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerState {
    pub layer: usize,
    /// `[channels][taps]`: the inputs of the convolution at the last `taps` positions, the newest last.
    pub conv: Vec<f32>,
    /// Shape of `conv`.
    pub conv_shape: [usize; 2],
    /// `[heads][rows][cols]`. Delta net: key by value; Mamba-2: channel by state; empty for a short
    /// convolution. Value heads that share a
    /// key head are adjacent, whatever their order in the file.
    pub recurrent: Vec<f32>,
    /// Shape of `recurrent`.
    pub recurrent_shape: [usize; 3],
}

impl Decoder {
    /// Reads the states of all recurrent layers in a slot. `slot` is its byte offset / 64 in the arena.
    pub fn states(&mut self, slot: u32) -> Result<Vec<LayerState>, Error> {
        let mut states = Vec::new();
        for (index, cache) in self.caches.iter().enumerate() {
            let layer = self.config.layers.start + index;
            let Some(id) = cache.state else { continue };
            let mut mixers = self.spec.layers[layer].mixers();
            let Some(mixer) = mixers.find(|mixer| !matches!(mixer, MixerSpec::Attention(_))) else {
                continue;
            };
            let (conv_spec, shape) = match mixer {
                MixerSpec::Attention(_) => continue,
                MixerSpec::DeltaNet(d) => (&d.conv, [d.v_heads, d.k_dim, d.v_dim]),
                MixerSpec::Mamba2(m) => (&m.conv, [m.heads, m.head_dim, m.state]),
                MixerSpec::ShortConv(s) => (&s.conv, [0; 3]),
            };
            let (channels, taps) = (conv_spec.channels, conv_spec.taps);
            let mut by_position = vec![0f32; channels * taps];
            let mut recurrent = vec![0f32; shape.iter().product()];
            self.backend.read_state(id, slot, &mut by_position, &mut recurrent)?;
            let mut conv = vec![0f32; channels * taps];
            for (position, row) in by_position.chunks_exact(channels).enumerate() {
                for (channel, (value, factor)) in row.iter().zip(conv_spec.factors()).enumerate() {
                    conv[channel * taps + position] = *value * factor;
                }
            }
            if let MixerSpec::DeltaNet(delta) = mixer
                && delta.grouping == HeadGrouping::Tiled
            {
                let values = 2 * delta.k_heads * delta.k_dim * taps;
                group_heads(delta, delta.v_dim * taps, &mut conv[values..]);
                group_heads(delta, delta.k_dim * delta.v_dim, &mut recurrent);
            }
            states.push(LayerState {
                layer,
                conv,
                conv_shape: [channels, taps],
                recurrent,
                recurrent_shape: shape,
            });
        }
        Ok(states)
    }
}

/// Reorders value heads of `len` values each from tiled (head h uses key head h % k_heads) to grouped.
fn group_heads(delta: &DeltaNetSpec, len: usize, values: &mut [f32]) {
    let tiled = values.to_vec();
    let shared = delta.v_heads / delta.k_heads;
    for (grouped, out) in values.chunks_exact_mut(len).enumerate() {
        let from = (grouped % shared * delta.k_heads + grouped / shared) * len;
        out.copy_from_slice(&tiled[from..from + len]);
    }
}
