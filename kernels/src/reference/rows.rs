//! Operations on one row.

/// x / sqrt(mean(x^2) + eps) * weight
pub fn rms_norm(x: &[f32], weight: Option<&[f32]>, eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    let weight = |i: usize| weight.map_or(1.0, |weight| f64::from(weight[i]));
    x.iter().enumerate().map(|(i, x)| f64::from(*x) * factor * weight(i)).collect()
}

/// (x - mean) / sqrt(variance + eps) * weight + bias
pub fn layer_norm(x: &[f32], weight: Option<&[f32]>, bias: Option<&[f32]>, eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (variance + f64::from(eps)).sqrt();
    let weight = |i: usize| weight.map_or(1.0, |weight| f64::from(weight[i]));
    let bias = |i: usize| bias.map_or(0.0, |bias| f64::from(bias[i]));
    x.iter().enumerate().map(|(i, x)| (f64::from(*x) - mean) * factor * weight(i) + bias(i)).collect()
}

/// `scale * B (A x)`; `a` is `[rank][cols]`, `b` is `[rows][rank]`.
pub fn low_rank(rank: usize, scale: f32, a: &[f32], b: &[f32], x: &[f32]) -> Vec<f64> {
    let dot = |row: &[f32], x: &[f64]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let inner: Vec<f64> = a.chunks_exact(x.len()).map(|row| f64::from(scale) * dot(row, &x)).collect();
    b.chunks_exact(rank).map(|row| dot(row, &inner)).collect()
}

/// Rotates the pairs of one head to `position`; see [`crate::ops::RopeParams`].
pub fn rope(params: &crate::ops::RopeParams, position: usize, head: &[f32]) -> Vec<f64> {
    rope_on_axes(params, [position; 3], head)
}

/// Like [`rope`], with the position of each axis.
pub fn rope_on_axes(params: &crate::ops::RopeParams, positions: [usize; 3], head: &[f32]) -> Vec<f64> {
    let mut out: Vec<f64> = head.iter().map(|x| f64::from(*x)).collect();
    for i in 0..params.n_rot / 2 {
        let factor = params.factors.as_ref().map_or(1.0, |factors| f64::from(factors[i]));
        let frequency = f64::from(params.base).powf(-2.0 * i as f64 / params.n_rot as f64) / factor;
        let position = positions[params.axes.as_ref().map_or(0, |axes| usize::from(axes[i]))];
        let angle = position as f64 * frequency * f64::from(params.freq_scale);
        let (sin, cos) =
            (angle.sin() * f64::from(params.magnitude), angle.cos() * f64::from(params.magnitude));
        let (a, b) = match params.style {
            crate::ops::RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            crate::ops::RopeStyle::Half => (i, i + params.n_rot / 2),
        };
        let (x, y) = (out[a], out[b]);
        out[a] = x * cos - y * sin;
        out[b] = y * cos + x * sin;
    }
    out
}

pub fn silu(x: f32) -> f64 {
    let x = f64::from(x);
    x / (1.0 + (-x).exp())
}

/// GELU in its tanh form.
pub fn gelu_tanh(x: f32) -> f64 {
    let x = f64::from(x);
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// GELU by the error function.
pub fn gelu_erf(x: f32) -> f64 {
    let x = f64::from(x);
    0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2))
}

/// The error function: `2 / sqrt(pi) e^(-z^2) sum of 2^n z^(2n+1) / (1 3 5 .. (2n+1))`, whose terms have one
/// sign.
fn erf(z: f64) -> f64 {
    if z.abs() > 6.5 {
        return z.signum();
    }
    let (mut term, mut sum, mut odd) = (z, 0.0, 1.0);
    while sum + term != sum {
        sum += term;
        odd += 2.0;
        term *= 2.0 * z * z / odd;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-z * z).exp() * sum
}

/// `max(x, 0)^2`
pub fn relu_squared(x: f32) -> f64 {
    f64::from(x).max(0.0).powi(2)
}

/// 1 / (1 + e^-x)
pub fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

/// `g sigmoid(1.702 g) (u + 1)` with `g = min(gate, 7)` and `u = clamp(up, -7, 7)`
pub fn clamped_swiglu(gate: f32, up: f32) -> f64 {
    let (gate, up) = (f64::from(gate).min(7.0), f64::from(up).clamp(-7.0, 7.0));
    gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
}

/// x - max - ln(sum of e^(x - max))
pub fn log_softmax(x: &[f32]) -> Vec<f64> {
    let highest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let highest = f64::from(highest);
    let sum = x.iter().map(|x| (f64::from(*x) - highest).exp()).sum::<f64>();
    x.iter().map(|x| f64::from(*x) - highest - sum.ln()).collect()
}
