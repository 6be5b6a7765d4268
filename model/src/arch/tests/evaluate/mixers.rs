//! Reference implementation of the mixers.

use super::{Model, Rows, dot, sigmoid, silu, softmax, softplus};
use crate::spec::*;

/// Keys and values of a layer's positions, head by head.
pub(super) struct Cache {
    k: Rows,
    v: Rows,
}

impl Model<'_> {
    pub(super) fn cache(&self, spec: &AttentionSpec, n: &Rows) -> Option<Cache> {
        let own = spec.own_kv()?;
        let raw = self.linear(&own.k, n);
        let k = self.rope(&spec.rope, spec.head_dim, self.maybe_norm(&own.k_norm, &raw));
        let v = own.v.as_ref().map_or(raw, |v| self.linear(v, n));
        Some(Cache { k, v: self.maybe_norm(&own.v_norm, &v) })
    }

    pub(super) fn attention(&self, spec: &AttentionSpec, n: &Rows, cache: &Cache) -> Rows {
        let q = self.maybe_norm(&spec.q_norm, &self.linear(&spec.q, n));
        let q = self.rope(&spec.rope, spec.head_dim, q);
        let sinks = spec.sinks.as_ref().map(|name| self.tensor(name));
        let gate = spec.gate.as_ref().map(|gate| self.linear(gate, n));
        let mut out = Rows::new();
        for (position, q) in q.iter().enumerate() {
            let visible = |&key: &usize| {
                (!spec.causal || key <= position)
                    && spec.window.is_none_or(|window| position.abs_diff(key) < window)
            };
            let keys: Vec<usize> = (0..cache.k.len()).filter(visible).collect();
            let mut row = vec![0.0; spec.heads * spec.v_head_dim];
            for head in 0..spec.heads {
                let kv_head = head / (spec.heads / spec.kv_heads);
                let of = |row: &[f64], head: usize, dim: usize| row[head * dim..(head + 1) * dim].to_vec();
                let query = of(q, head, spec.head_dim);
                let mut weights: Vec<f64> = keys
                    .iter()
                    .map(|&key| {
                        dot(&query, &of(&cache.k[key], kv_head, spec.head_dim)) * f64::from(spec.scale)
                    })
                    .collect();
                weights.extend(sinks.as_ref().map(|sinks| sinks[head]));
                softmax(&mut weights);
                for (&key, weight) in keys.iter().zip(&weights) {
                    let value = of(&cache.v[key], kv_head, spec.v_head_dim);
                    let to = &mut row[head * spec.v_head_dim..];
                    to.iter_mut().zip(value).for_each(|(to, value)| *to += weight * value);
                }
            }
            if let Some(gate) = &gate {
                row.iter_mut().zip(&gate[position]).for_each(|(x, gate)| *x *= sigmoid(*gate));
            }
            out.push(row);
        }
        self.linear(&spec.o, &out)
    }

    fn rope(&self, rope: &Option<RopeSpec>, dim: usize, mut x: Rows) -> Rows {
        let Some(rope) = rope else { return x };
        let half = rope.n_rot / 2;
        let factors = match &rope.factors {
            None => vec![1.0; half],
            Some(RopeFactors::Tensor(name)) => self.tensor(name),
            Some(RopeFactors::ByContext { short, long, is_long, .. }) => {
                self.tensor(if *is_long { long } else { short })
            }
            Some(RopeFactors::Values(values)) => values.iter().map(|&factor| factor.into()).collect(),
        };
        for (position, row) in x.iter_mut().enumerate() {
            for head in row.chunks_mut(dim) {
                for (i, factor) in factors.iter().enumerate() {
                    let frequency = f64::from(rope.base).powf(-2.0 * i as f64 / rope.n_rot as f64);
                    let angle = position as f64 * frequency / factor * f64::from(rope.freq_scale);
                    let (sin, cos) = angle.sin_cos();
                    let (a, b) = match rope.style {
                        RopeStyle::Half => (i, i + half),
                        RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                    };
                    let magnitude = f64::from(rope.magnitude);
                    let (x, y) = (head[a] * magnitude, head[b] * magnitude);
                    (head[a], head[b]) = (x * cos - y * sin, x * sin + y * cos);
                }
            }
        }
        x
    }

    fn conv(&self, spec: &ConvSpec, x: &Rows) -> Rows {
        let weight = self.tensor(&spec.weight);
        let bias = spec.bias.as_ref().map(|name| self.tensor(name));
        let factors: Vec<f32> = spec.factors().collect();
        let row = |at: usize| {
            let channel = |c: usize| {
                let taps = (0..spec.taps).filter_map(|tap| {
                    let from = (at + tap + 1).checked_sub(spec.taps)?;
                    Some(weight[c * spec.taps + tap] * f64::from(factors[c]) * x[from][c])
                });
                taps.sum::<f64>() + bias.as_ref().map_or(0.0, |bias| bias[c])
            };
            (0..spec.channels).map(channel).collect()
        };
        (0..x.len()).map(row).collect()
    }

    pub(super) fn delta_net(&self, net: &DeltaNetSpec, n: &Rows) -> Rows {
        let DeltaNetSpec { k_heads, v_heads, k_dim, v_dim, .. } = *net;
        let u = activated(self.conv(&net.conv, &self.linear(&net.qkv, n)));
        let (gate, beta) = (self.linear(&net.gate, n), self.linear(&net.beta, n));
        let (alpha, a, dt_bias) =
            (self.linear(&net.alpha, n), self.tensor(&net.a), self.tensor(&net.dt_bias));
        let unit = |x: &[f64]| -> Vec<f64> {
            let length = (dot(x, x) + f64::from(net.l2_eps)).sqrt();
            x.iter().map(|x| x / length).collect()
        };
        let mut states = vec![vec![vec![0.0; v_dim]; k_dim]; v_heads];
        let mut out = Rows::new();
        for (t, u) in u.iter().enumerate() {
            let mut row = Vec::new();
            for (head, state) in states.iter_mut().enumerate() {
                let k_head = match net.grouping {
                    HeadGrouping::Grouped => head / (v_heads / k_heads),
                    HeadGrouping::Tiled => head % k_heads,
                };
                let at = |start: usize, dim: usize| &u[start..start + dim];
                let q = unit(at(k_head * k_dim, k_dim));
                let k = unit(at((k_heads + k_head) * k_dim, k_dim));
                let v = at(2 * k_heads * k_dim + head * v_dim, v_dim);
                let decay = (a[head] * softplus(alpha[t][head] + dt_bias[head])).exp();
                state.iter_mut().flatten().for_each(|s| *s *= decay);
                let read = |state: &Rows, by: &[f64], j: usize| -> f64 {
                    state.iter().zip(by).map(|(row, by)| row[j] * by).sum()
                };
                let correction: Vec<f64> =
                    (0..v_dim).map(|j| sigmoid(beta[t][head]) * (v[j] - read(state, &k, j))).collect();
                for (row, k) in state.iter_mut().zip(&k) {
                    row.iter_mut().zip(&correction).for_each(|(s, d)| *s += k * d);
                }
                row.extend((0..v_dim).map(|j| read(state, &q, j) * (k_dim as f64).powf(-0.5)));
            }
            out.push(row);
        }
        let mut y = self.norm(&net.norm, &out);
        y.iter_mut().flatten().zip(gate.iter().flatten()).for_each(|(y, z)| *y *= silu(*z));
        self.linear(&net.out, &y)
    }

    pub(super) fn mamba2(&self, mamba: &Mamba2Spec, n: &Rows) -> Rows {
        let Mamba2Spec { heads, head_dim, groups, state, .. } = *mamba;
        let (z, dt) = (self.linear(&mamba.z, n), self.linear(&mamba.dt, n));
        let u = activated(self.conv(&mamba.conv, &self.linear(&mamba.xbc, n)));
        let [a, d, dt_bias] = [&mamba.a, &mamba.d, &mamba.dt_bias].map(|name| self.tensor(name));
        let inner = heads * head_dim;
        let mut states = vec![vec![vec![0.0; state]; head_dim]; heads];
        let mut out = Rows::new();
        for (t, u) in u.iter().enumerate() {
            let mut row = Vec::new();
            for (head, rows) in states.iter_mut().enumerate() {
                let group = head / (heads / groups);
                let b = &u[inner + group * state..][..state];
                let c = &u[inner + (groups + group) * state..][..state];
                let step = softplus(dt[t][head] + dt_bias[head]);
                for (x, s) in u[head * head_dim..].iter().zip(rows) {
                    for (s, b) in s.iter_mut().zip(b) {
                        *s = *s * (step * a[head]).exp() + step * x * b;
                    }
                    row.push(dot(s, c) + d[head] * x);
                }
            }
            out.push(row);
        }
        let gated = |y: &Rows| product(y, &activated(z.clone()));
        let y = match mamba.norm_first {
            true => gated(&self.maybe_norm(&mamba.norm, &out)),
            false => self.maybe_norm(&mamba.norm, &gated(&out)),
        };
        self.linear(&mamba.out, &y)
    }

    pub(super) fn short_conv(&self, short: &ShortConvSpec, n: &Rows) -> Rows {
        let [b, c, x] = [&short.b, &short.c, &short.x].map(|linear| self.linear(linear, n));
        let y = product(&c, &self.conv(&short.conv, &product(&b, &x)));
        self.linear(&short.out, &y)
    }
}

fn product(a: &Rows, b: &Rows) -> Rows {
    let row = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(a, b)| a * b).collect();
    a.iter().zip(b).map(row).collect()
}

fn activated(mut x: Rows) -> Rows {
    x.iter_mut().flatten().for_each(|x| *x = silu(*x));
    x
}
