//! Attention of one head of one row.

/// `softmax(scale * q k^T) v` over the given keys, with the options of [`crate::attention::AttentionCall`].
#[derive(Debug, Clone, Copy)]
pub struct AttentionHead<'a> {
    /// The query, `[head_dim]`.
    pub q: &'a [f32],
    /// Visible keys, each `[head_dim]`, with their values, each `[v_head_dim]`.
    pub keys: &'a [(&'a [f32], &'a [f32])],
    pub scale: f32,
    /// `c`: scores become `c * tanh(score / c)`.
    pub softcap: Option<f32>,
    /// An extra logit in the softmax, without a value.
    pub sink: Option<f32>,
}

impl AttentionHead<'_> {
    /// The result, `[v_head_dim]`.
    pub fn run(&self) -> Vec<f64> {
        let score = |k: &[f32]| {
            let dot: f64 = self.q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let score = dot * f64::from(self.scale);
            self.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let scores: Vec<f64> = self.keys.iter().map(|(k, _)| score(k)).collect();
        let sink = self.sink.map_or(f64::NEG_INFINITY, f64::from);
        let highest = scores.iter().copied().fold(sink, f64::max);
        let sum = scores.iter().map(|score| (score - highest).exp()).sum::<f64>() + (sink - highest).exp();
        let width = self.keys.first().map_or(0, |(_, v)| v.len());
        let mut out = vec![0.0; width];
        for (score, (_, v)) in scores.iter().zip(self.keys) {
            let weight = (score - highest).exp() / sum;
            for (out, v) in out.iter_mut().zip(*v) {
                *out += weight * f64::from(*v);
            }
        }
        out
    }
}
