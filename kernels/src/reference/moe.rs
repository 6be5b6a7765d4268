//! Mixture of experts of one row.

use crate::backend::ExpertGroups;

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

/// The choice of experts: see [`crate::backend::Selection`].
#[derive(Debug, Clone, Default)]
pub struct Router {
    pub used: usize,
    pub renormalise: bool,
    pub sigmoid: bool,
    /// One for each expert; empty without any.
    pub bias: Vec<f32>,
    pub groups: Option<ExpertGroups>,
}

impl Router {
    /// The chosen experts with their weights; ties go to the lower index.
    pub fn choose(&self, logits: &[f32]) -> Vec<(usize, f64)> {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let score = |x: &f32| match self.sigmoid {
            true => (1.0 + (-f64::from(*x)).exp()).recip(),
            false => f64::from(x - highest).exp(),
        };
        let mut scores: Vec<f64> = logits.iter().map(score).collect();
        if !self.sigmoid {
            let sum: f64 = scores.iter().sum();
            scores.iter_mut().for_each(|score| *score /= sum);
        }
        let bias = |expert: usize| self.bias.get(expert).map_or(0.0, |bias| f64::from(*bias));
        let mut ranked: Vec<f64> =
            scores.iter().enumerate().map(|(expert, score)| score + bias(expert)).collect();
        if let Some(ExpertGroups { count, used, two_best }) = self.groups {
            let size = ranked.len() / count;
            let score = |group: &[f64]| {
                let order = order(group);
                order.iter().take(if two_best { 2 } else { 1 }).map(|expert| group[*expert]).sum::<f64>()
            };
            let of_groups: Vec<f64> = ranked.chunks(size).map(score).collect();
            for group in order(&of_groups).into_iter().skip(used) {
                ranked[group * size..][..size].fill(f64::NEG_INFINITY);
            }
        }
        let chosen: Vec<usize> = order(&ranked).into_iter().take(self.used).collect();
        let total: f64 = if self.renormalise { chosen.iter().map(|e| scores[*e]).sum() } else { 1.0 };
        chosen.into_iter().map(|expert| (expert, scores[expert] / total)).collect()
    }
}

/// Indices by descending value. The sort is stable, and zeros of both signs compare equal.
fn order(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].partial_cmp(&values[*a]).unwrap_or(std::cmp::Ordering::Equal));
    order
}

/// `sum of w_e expert_e(x)` over the chosen experts. `gate` computes one inner value from a gate and an up value.
pub fn mixture(
    experts: &[Expert],
    logits: &[f32],
    router: &Router,
    gate: impl Fn(f64, f64) -> f64,
    x: &[f32],
) -> Vec<f64> {
    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let mut out = vec![0.0; x.len()];
    for (e, weight) in router.choose(logits) {
        let expert = &experts[e];
        let gates = product(&expert.gate, &x, expert.scales[0], &expert.gate_bias);
        let ups = product(&expert.up, &x, expert.scales[1], &expert.up_bias);
        let inner: Vec<f64> = gates.iter().zip(&ups).map(|(g, u)| gate(*g, *u)).collect();
        let down = product(&expert.down, &inner, expert.scales[2], &expert.down_bias);
        for (out, down) in out.iter_mut().zip(down) {
            *out += weight * down;
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
