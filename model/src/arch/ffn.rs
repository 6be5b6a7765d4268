//! Feed-forward parts with the usual tensor names.

use super::decoder::Decoder;
use super::shape::{Shape, limits};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, ExpertGateUp, ExpertGroups, FfnPart, FfnSpec, LinearSpec, MoeSpec, RowSlice};

impl Decoder<'_> {
    /// The function of the key `feed_forward.activation`, or `usual` without it.
    pub(super) fn activation(&self, usual: Activation) -> Result<Activation, Error> {
        match usual {
            Activation::ClampedSwiglu => Ok(usual),
            _ => activation(self.source, usual),
        }
    }

    /// The gated feed-forward of every layer.
    pub(super) fn dense(&self, activation: Activation) -> Result<Vec<FfnSpec>, Error> {
        let widths = self.shape.feed_forward_lengths(self.source)?;
        let layers = widths.iter().take(self.shape.layers).enumerate();
        layers.map(|(layer, &width)| self.gated(layer, "", width, activation)).collect()
    }

    /// The gated feed-forward of a layer; tensor names end in `suffix`.
    pub(super) fn gated(
        &self,
        layer: usize,
        suffix: &str,
        width: usize,
        activation: Activation,
    ) -> Result<FfnSpec, Error> {
        let hidden = self.shape.hidden;
        let linear = |name, cols, rows| self.linear(layer, &format!("{name}{suffix}"), cols, rows);
        Ok(FfnSpec::Gated {
            gate: linear("ffn_gate", hidden, width)?,
            up: linear("ffn_up", hidden, width)?,
            down: linear("ffn_down", width, hidden)?,
            activation: self.activation(activation)?,
            row_gate: None,
        })
    }

    /// The gated feed-forward of a layer whose gate and up rows are one matrix, the gate's first.
    pub(super) fn gated_in_one(
        &self,
        layer: usize,
        width: usize,
        activation: Activation,
    ) -> Result<FfnSpec, Error> {
        let hidden = self.shape.hidden;
        let half = |start| {
            let slice = RowSlice { of: 2 * width, period: 2 * width, start, len: width };
            self.source.linear_slice(&self.stem(layer, "ffn_up"), hidden, slice)
        };
        Ok(FfnSpec::Gated {
            gate: half(0)?,
            up: half(width)?,
            down: self.linear(layer, "ffn_down", width, hidden)?,
            activation: self.activation(activation)?,
            row_gate: None,
        })
    }

    /// The shared expert, weighted by its own one-row router.
    pub(super) fn shared_expert(&self, layer: usize, width: usize) -> Result<FfnSpec, Error> {
        let gate = self.linear(layer, "ffn_gate_inp_shexp", self.shape.hidden, 1)?;
        let mut ffn = self.gated(layer, "_shexp", width, Activation::Silu)?;
        if let FfnSpec::Gated { row_gate, .. } = &mut ffn {
            *row_gate = Some(gate);
        }
        Ok(ffn)
    }

    /// Inner width of the shared expert: by default that of the dense feed-forward.
    pub(super) fn shared_expert_widths(&self) -> Result<Vec<usize>, Error> {
        match self.source.count("expert_shared_feed_forward_length", 0..=limits::WIDTH)? {
            None | Some(0) => self.shape.feed_forward_lengths(self.source),
            Some(width) => Ok(vec![width; self.shape.blocks]),
        }
    }

    /// Number of experts, and experts per token.
    fn expert_counts(&self) -> Result<(usize, usize), Error> {
        let experts = self.source.require_count("expert_count", 1..=limits::EXPERTS)?;
        Ok((experts, self.source.require_count("expert_used_count", 1..=experts)?))
    }

    /// Inner width of an expert in each layer: by default the dense width divided by the experts per token.
    pub(super) fn expert_widths(&self) -> Result<Vec<usize>, Error> {
        if let Some(width) = self.source.count("expert_feed_forward_length", 1..=limits::WIDTH)? {
            return Ok(vec![width; self.shape.blocks]);
        }
        let (_, used) = self.expert_counts()?;
        Ok(self.shape.feed_forward_lengths(self.source)?.iter().map(|width| width / used).collect())
    }

    /// The mixture of experts of every layer, weights renormalised; `widths` are those of an expert.
    pub(super) fn moe(&self, widths: &[usize], activation: Activation) -> Result<Vec<MoeSpec>, Error> {
        let router = |layer, experts| self.linear(layer, "ffn_gate_inp", self.shape.hidden, experts);
        self.moe_routed(widths, activation, router)
    }

    /// Like [`moe`](Self::moe); `router` returns the router of a layer for a number of experts.
    pub(super) fn moe_routed(
        &self,
        widths: &[usize],
        activation: Activation,
        router: impl Fn(usize, usize) -> Result<LinearSpec, Error>,
    ) -> Result<Vec<MoeSpec>, Error> {
        let moe = |(layer, &width): (usize, &usize)| self.moe_of(layer, width, activation, &router);
        widths.iter().take(self.shape.layers).enumerate().map(moe).collect()
    }

    /// The mixture of a layer, with softmax scores, of silu.
    pub(super) fn moe_layer(&self, layer: usize, width: usize) -> Result<MoeSpec, Error> {
        let router = |layer, experts| self.linear(layer, "ffn_gate_inp", self.shape.hidden, experts);
        self.moe_of(layer, width, Activation::Silu, router)
    }

    /// Like [`moe_layer`](Self::moe_layer), of another function and router.
    fn moe_of(
        &self,
        layer: usize,
        width: usize,
        activation: Activation,
        router: impl Fn(usize, usize) -> Result<LinearSpec, Error>,
    ) -> Result<MoeSpec, Error> {
        let (source, hidden) = (self.source, self.shape.hidden);
        let (experts, used) = self.expert_counts()?;
        let stem = |name| self.stem(layer, name);
        let rows = |name, rows| source.experts(&stem(name), hidden, rows, experts);
        let gate_up = if source.has(&stem("ffn_gate_up_exps.weight")) {
            ExpertGateUp::Fused(rows("ffn_gate_up_exps", 2 * width)?)
        } else {
            ExpertGateUp::Separate { gate: rows("ffn_gate_exps", width)?, up: rows("ffn_up_exps", width)? }
        };
        Ok(MoeSpec {
            router_norm: None,
            router: router(layer, experts)?,
            experts,
            used,
            sigmoid: false,
            selection_bias: None,
            groups: None,
            renormalise: self.renormalises(true)?,
            scale: 1.0,
            gate_up,
            down: source.experts(&stem("ffn_down_exps"), width, hidden, experts)?,
            expert_ff: width,
            activation: self.activation(activation)?,
        })
    }

    /// Whether the weights of a token's experts sum to one; `usual`: without the key.
    pub(super) fn renormalises(&self, usual: bool) -> Result<bool, Error> {
        Ok(self.source.metadata().get(&self.source.key("expert_weights_norm"))?.unwrap_or(usual))
    }

    /// The feed-forward of each layer: that of `mixture`, or the dense one where the file says so.
    pub(super) fn mixtures_or_dense(
        &self,
        mixture: impl Fn(usize) -> Result<Vec<FfnPart>, Error>,
    ) -> Result<Vec<Vec<FfnPart>>, Error> {
        let (source, &Shape { layers, blocks, .. }) = (self.source, &self.shape);
        let dense = source.count("leading_dense_block_count", 0..=layers)?.unwrap_or(0);
        // A key of Kvasir's, for other orders.
        let sparse = match source.layer_flags("expert_layers", &[layers, blocks])? {
            Some(sparse) => sparse,
            None => (0..layers).map(|layer| layer >= dense).collect(),
        };
        let all = sparse.iter().all(|&sparse| sparse);
        let widths = if all { Vec::new() } else { self.shape.feed_forward_lengths(source)? };
        let parts = |layer: usize| match sparse[layer] {
            true => mixture(layer),
            false => Ok(vec![FfnPart::plain(self.gated(layer, "", widths[layer], Activation::Silu)?)]),
        };
        (0..layers).map(parts).collect()
    }

    /// The feed-forward of each layer: dense in the first ones, then a mixture with the router that the keys
    /// describe, and its shared experts. `sigmoid`, `renormalise`: without keys for them.
    pub(super) fn dense_then_mixtures(
        &self,
        sigmoid: bool,
        renormalise: bool,
    ) -> Result<Vec<Vec<FfnPart>>, Error> {
        let source = self.source;
        let width = source.require_count("expert_feed_forward_length", 1..=limits::WIDTH)?;
        let shared = source.count("expert_shared_count", 0..=limits::EXPERTS)?.unwrap_or(0);
        let shared = source
            .count("expert_shared_feed_forward_length", 0..=limits::WIDTH)?
            .unwrap_or_else(|| shared.saturating_mul(width));
        self.mixtures_or_dense(|layer| {
            let moe = self.keyed_moe(layer, width, sigmoid)?;
            let moe = MoeSpec { renormalise: self.renormalises(renormalise)?, ..moe };
            let mut parts = vec![FfnPart::plain(FfnSpec::Moe(moe))];
            if shared > 0 {
                parts.push(FfnPart::plain(self.gated(layer, "_shexp", shared, Activation::Silu)?));
            }
            Ok(parts)
        })
    }

    /// A mixture with the router that the keys describe.
    fn keyed_moe(&self, layer: usize, width: usize, sigmoid: bool) -> Result<MoeSpec, Error> {
        let source = self.source;
        let moe = self.moe_layer(layer, width)?;
        let gating = "expert_gating_func";
        let sigmoid = match source.count(gating, 0..=usize::MAX)? {
            None | Some(0) => sigmoid,
            Some(1) => false,
            Some(2) => true,
            Some(other) => return Err(source.refuse(gating, other, "1 (softmax) or 2 (sigmoid)")),
        };
        let group_key = "expert_group_count";
        let groups = match source.count(group_key, 0..=32)?.filter(|&count| count > 1) {
            None => None,
            Some(count) => {
                let used = source.require_count("expert_group_used_count", 1..=count)?;
                if !moe.experts.is_multiple_of(count) || moe.experts / count * used < moe.used {
                    let needs = format_args!(
                        "a divisor of {} experts, with {} in the used groups",
                        moe.experts, moe.used
                    );
                    return Err(source.refuse(group_key, count, needs));
                }
                // Scores with a bias are ranked by the two best of a group, as in DeepSeek-V3.
                Some(ExpertGroups { count, used, two_best: sigmoid })
            }
        };
        Ok(MoeSpec {
            sigmoid,
            selection_bias: source.optional_floats(&self.stem(layer, "exp_probs_b.bias"), &[moe.experts])?,
            groups,
            scale: source.positive_unless_zero("expert_weights_scale")?.unwrap_or(1.0),
            ..moe
        })
    }
}

/// The function of the key `feed_forward.activation`, or `usual` without it. A key of Kvasir's: in a GGUF the
/// architecture says it.
pub(super) fn activation(source: &Source<'_>, usual: Activation) -> Result<Activation, Error> {
    let key = "feed_forward.activation";
    match source.metadata().get::<&str>(&source.key(key))? {
        None => Ok(usual),
        Some("silu") => Ok(Activation::Silu),
        Some("gelu") => Ok(Activation::GeluErf),
        Some("gelu_tanh") => Ok(Activation::GeluTanh),
        Some("relu2") => Ok(Activation::ReluSquared),
        Some(other) => Err(source.refuse(key, other, "silu, gelu, gelu_tanh or relu2")),
    }
}
