//! Recurrent layers, one element at a time.

use crate::backend::StateShape;
use crate::recurrent::{DeltaNet, DeltaNetInput, Mamba2, Mamba2Input};

/// ln(1 + e^x)
pub fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// 1 / (1 + e^-x)
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `bias[c] + sum_j weight[c][j] x_{t-taps+1+j}[c]`, or `silu` of that, for each row of `x`. `past` has the inputs before
/// the first row, `[taps][channels]`, oldest first. It is updated to those before the next row.
pub fn conv(
    shape: &StateShape,
    weight: &[f32],
    (bias, silu): (Option<&[f32]>, bool),
    x: &[f32],
    past: &mut Vec<f64>,
) -> Vec<f64> {
    let StateShape { channels, taps, .. } = *shape;
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(channels) {
        past.drain(..channels);
        past.extend(row.iter().map(|x| f64::from(*x)));
        out.extend((0..channels).map(|c| {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[c]));
            let sum =
                (0..taps).map(|j| f64::from(weight[c * taps + j]) * past[j * channels + c]).sum::<f64>();
            if silu { (bias + sum) * sigmoid(bias + sum) } else { bias + sum }
        }));
    }
    out
}

/// See [`crate::recurrent::delta_net`]; `state` is `[heads][k_dim][v_dim]`.
pub fn delta_net(
    shape: &StateShape,
    net: &DeltaNet<'_>,
    input: &DeltaNetInput<'_>,
    state: &mut [f64],
) -> Vec<f64> {
    let StateShape { heads, rows: k_dim, cols: v_dim, .. } = *shape;
    let keys = net.k_heads * k_dim;
    let unit = |x: &[f32]| -> Vec<f64> {
        let square = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        x.iter().map(|x| f64::from(*x) / (square + f64::from(net.l2_eps)).sqrt()).collect()
    };
    let mut out = Vec::new();
    for (row, qkv) in input.qkv.chunks_exact(2 * keys + heads * v_dim).enumerate() {
        for head in 0..heads {
            let key_head = if net.tiled { head % net.k_heads } else { head / (heads / net.k_heads) };
            let (q, k) =
                (unit(&qkv[key_head * k_dim..][..k_dim]), unit(&qkv[keys + key_head * k_dim..][..k_dim]));
            let v = &qkv[2 * keys + head * v_dim..][..v_dim];
            let beta = sigmoid(f64::from(input.beta[row * heads + head]));
            let step = softplus(f64::from(input.alpha[row * heads + head] + net.dt_bias[head]));
            let decay = (f64::from(net.a[head]) * step).exp();
            let state = &mut state[head * k_dim * v_dim..][..k_dim * v_dim];
            state.iter_mut().for_each(|s| *s *= decay);
            for (column, v) in v.iter().enumerate() {
                let projected = (0..k_dim).map(|i| state[i * v_dim + column] * k[i]).sum::<f64>();
                let update = beta * (f64::from(*v) - projected);
                (0..k_dim).for_each(|i| state[i * v_dim + column] += k[i] * update);
                let o = (0..k_dim).map(|i| state[i * v_dim + column] * q[i]).sum::<f64>();
                out.push(o / (k_dim as f64).sqrt());
            }
        }
    }
    out
}

/// See [`crate::recurrent::mamba2`]; `state` is `[heads][head_dim][state]`.
pub fn mamba2(shape: &StateShape, net: &Mamba2<'_>, input: &Mamba2Input<'_>, state: &mut [f64]) -> Vec<f64> {
    let StateShape { heads, rows: head_dim, cols: width, .. } = *shape;
    let inner = heads * head_dim;
    let mut out = Vec::new();
    for (row, xbc) in input.xbc.chunks_exact(inner + 2 * net.groups * width).enumerate() {
        for head in 0..heads {
            let group = head / (heads / net.groups);
            let b = &xbc[inner + group * width..][..width];
            let c = &xbc[inner + (net.groups + group) * width..][..width];
            let dt = softplus(f64::from(input.dt[row * heads + head] + net.dt_bias[head]));
            let decay = (dt * f64::from(net.a[head])).exp();
            for i in 0..head_dim {
                let x = f64::from(xbc[head * head_dim + i]);
                let state = &mut state[(head * head_dim + i) * width..][..width];
                let mut y = f64::from(net.d[head]) * x;
                for (s, (b, c)) in state.iter_mut().zip(b.iter().zip(c)) {
                    *s = decay * *s + dt * x * f64::from(*b);
                    y += *s * f64::from(*c);
                }
                out.push(y);
            }
        }
    }
    out
}
