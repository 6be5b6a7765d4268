//! Feed-forward parts of a layer: gated, plain, mixtures of experts.

use super::{LinearSpec, NormSpec};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// GELU, tanh form, exact in f32.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    /// `g = min(gate, 7)`, `u = clamp(up, -7, 7)`, `g sigmoid(1.702 g) (u + 1)`: gpt-oss, gated only.
    ClampedSwiglu,
}

/// One of the parts whose sum is a layer's feed-forward.
#[derive(Debug, Clone, PartialEq)]
pub struct FfnPart {
    /// Norm of the residual for this part alone; none takes what the layer's `ffn_norm` gives.
    pub own_norm: Option<NormSpec>,
    pub ffn: FfnSpec,
    /// Norm of its output before the parts are summed.
    pub post_norm: Option<NormSpec>,
}

/// What a feed-forward part computes.
#[derive(Debug, Clone, PartialEq)]
pub enum FfnSpec {
    /// `down(act(gate x) * up x)`, times `sigmoid(row_gate x)` where there is one.
    Gated {
        gate: LinearSpec,
        up: LinearSpec,
        down: LinearSpec,
        activation: Activation,
        /// One row: how much of a shared expert a token takes.
        row_gate: Option<LinearSpec>,
    },
    /// `down(act(up x))`.
    Plain {
        up: LinearSpec,
        down: LinearSpec,
        activation: Activation,
    },
    Moe(MoeSpec),
}

/// Mixture of experts: softmax over all experts, the best `used` by probability (ties: lower index),
/// weights renormalised if `renormalise`, `y = sum w_e down_e(act(gate_e x) * up_e x)` in rank order.
/// Biases of `gate_up` and `down` are `[rows, experts]`; the down bias is inside the weighting.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeSpec {
    /// Norm of the residual for the router alone; none routes on the experts' input.
    pub router_norm: Option<NormSpec>,
    /// Router, `experts` rows.
    pub router: LinearSpec,
    pub experts: usize,
    /// Experts per token.
    pub used: usize,
    /// Weights of the chosen experts sum to one.
    pub renormalise: bool,
    /// Gate and up of every expert.
    pub gate_up: ExpertGateUp,
    /// Down of every expert, `[n_ff, hidden, experts]`; `rows`/`cols` of one expert.
    pub down: LinearSpec,
    /// Inner width of one expert.
    pub expert_ff: usize,
    pub activation: Activation,
}

/// How gate and up matrices of the experts are stored.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpertGateUp {
    /// Two tensors `[hidden, n_ff, experts]`.
    Separate { gate: LinearSpec, up: LinearSpec },
    /// One tensor `[hidden, 2 n_ff, experts]`, gate rows first.
    Fused(LinearSpec),
}

impl FfnPart {
    /// A part on the layer's own norm, its output added as it is.
    pub fn plain(ffn: FfnSpec) -> Self {
        Self { own_norm: None, ffn, post_norm: None }
    }
}
