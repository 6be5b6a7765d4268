//! Mixture of experts of one row.

/// One expert: gate and up products, gating, down product; each product is `scale * (matrix x) + bias`.
/// Matrices are `[outputs][inputs]`.
#[derive(Debug, Clone)]
pub struct Expert {
    /// `[ff][hidden]`
    pub gate: Vec<f32>,
    /// `[ff][hidden]`
    pub up: Vec<f32>,
    /// `[hidden][ff]`
    pub down: Vec<f32>,
    /// `[ff]`
    pub gate_bias: Vec<f32>,
    /// `[ff]`
    pub up_bias: Vec<f32>,
    /// `[hidden]`
    pub down_bias: Vec<f32>,
    /// Factors of the three products.
    pub scales: [f32; 3],
}

/// `sum of w_e expert_e(x)` over the `used` most probable experts; ties go to the lower index. The weights
/// are the probabilities over all experts, or over the chosen ones if `renormalise`. `gate` computes one
/// inner value from a gate and an up value.
pub fn mixture(
    experts: &[Expert],
    logits: &[f32],
    used: usize,
    renormalise: bool,
    gate: impl Fn(f64, f64) -> f64,
    x: &[f32],
) -> Vec<f64> {
    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|x| f64::from(x - highest).exp()).collect();
    let mut order: Vec<usize> = (0..experts.len()).collect();
    // The sort is stable, and zeros of both signs compare equal.
    order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap_or(std::cmp::Ordering::Equal));
    order.truncate(used);
    let total: f64 = if renormalise { order.iter().map(|e| weights[*e]).sum() } else { weights.iter().sum() };
    let mut out = vec![0.0; x.len()];
    for e in order {
        let expert = &experts[e];
        let gates = product(&expert.gate, &x, expert.scales[0], &expert.gate_bias);
        let ups = product(&expert.up, &x, expert.scales[1], &expert.up_bias);
        let inner: Vec<f64> = gates.iter().zip(&ups).map(|(g, u)| gate(*g, *u)).collect();
        let down = product(&expert.down, &inner, expert.scales[2], &expert.down_bias);
        for (out, down) in out.iter_mut().zip(down) {
            *out += weights[e] / total * down;
        }
    }
    out
}

fn product(matrix: &[f32], x: &[f64], scale: f32, bias: &[f32]) -> Vec<f64> {
    let rows = matrix.chunks_exact(x.len()).zip(bias);
    rows.map(|(row, bias)| {
        let dot: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        dot * f64::from(scale) + f64::from(*bias)
    })
    .collect()
}
