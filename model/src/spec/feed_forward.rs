//! Feed-forward parts of a layer: gated, plain, mixture of experts.

use super::{LinearSpec, NormSpec};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// GELU, tanh form, exact in f32.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    /// `max(x, 0)^2`
    ReluSquared,
    /// `g = min(gate, 7)`, `u = clamp(up, -7, 7)`, `g sigmoid(1.702 g) (u + 1)`: gpt-oss, gated only.
    ClampedSwiglu,
}

/// One of the parts whose outputs are summed.
#[derive(Debug, Clone, PartialEq)]
pub struct FfnPart {
    /// Norm of the residual for this part alone; `None` uses the layer's `ffn_norm`.
    pub own_norm: Option<NormSpec>,
    pub ffn: FfnSpec,
    /// Norm of its output before the parts are summed.
    pub post_norm: Option<NormSpec>,
}

/// The computation of a feed-forward part.
#[derive(Debug, Clone, PartialEq)]
pub enum FfnSpec {
    /// `down(act(gate x) * up x)`, times `sigmoid(row_gate x)` if present.
    Gated {
        gate: LinearSpec,
        up: LinearSpec,
        down: LinearSpec,
        activation: Activation,
        /// One row: weight of a shared expert for a token.
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

/// Mixture of experts: scores of all experts, the best `used` (ties: lower index), weights renormalised if
/// `renormalise`, `y = scale sum w_e down_e(act(gate_e x) * up_e x)` in rank order.
/// Biases of `gate_up` and `down` are `[rows, experts]`; the down bias is inside the weighting.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeSpec {
    /// Norm of the residual for the router alone; `None` uses the experts' input.
    pub router_norm: Option<NormSpec>,
    /// Router, `experts` rows.
    pub router: LinearSpec,
    pub experts: usize,
    /// Experts per token.
    pub used: usize,
    /// Scores are sigmoids of the router's logits instead of their softmax.
    pub sigmoid: bool,
    /// Name of `[experts]`, added to the scores for the choice alone.
    pub selection_bias: Option<String>,
    /// Groups of consecutive experts of which only the best are chosen from.
    pub groups: Option<ExpertGroups>,
    /// Weights of the chosen experts sum to one.
    pub renormalise: bool,
    /// Multiplies the sum.
    pub scale: f32,
    /// Gate and up of every expert.
    pub gate_up: ExpertGateUp,
    /// Down of every expert, `[n_ff, hidden, experts]`; `rows`/`cols` of one expert.
    pub down: LinearSpec,
    /// Inner width of one expert.
    pub expert_ff: usize,
    pub activation: Activation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Divides the number of experts; at most 32.
    pub count: usize,
    /// Groups per token.
    pub used: usize,
    /// A group's score is the sum of its two best scores if true, else its best one.
    pub two_best: bool,
}

/// Layout of the gate and up matrices of the experts.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpertGateUp {
    /// Two tensors `[hidden, n_ff, experts]`.
    Separate { gate: LinearSpec, up: LinearSpec },
    /// One tensor `[hidden, 2 n_ff, experts]`, gate rows first.
    Fused(LinearSpec),
}

impl FfnPart {
    /// A part that uses the layer's norm and adds its output unchanged.
    pub fn plain(ffn: FfnSpec) -> Self {
        Self { own_norm: None, ffn, post_norm: None }
    }
}
