//! Evaluates a model's spec in f64, simply and slowly, and compares it with the oracle: tests the translators
//! and the meaning of the spec without an engine.

use std::collections::HashMap;

use crate::spec::*;
use crate::{GgmlType, ModelFile, ModelSpec};

use mixers::Cache;

mod mixers;

/// Rows of one width each.
type Rows = Vec<Vec<f64>>;

/// A model with its weights.
pub(super) struct Model<'a> {
    pub(super) spec: ModelSpec,
    file: &'a ModelFile,
}

impl<'a> Model<'a> {
    pub(super) fn open(file: &'a ModelFile) -> Self {
        Self { spec: ModelSpec::from_file(file).unwrap(), file }
    }

    fn tensor(&self, name: &str) -> Vec<f64> {
        assert_eq!(self.file.tensor(name).unwrap().ty(), GgmlType::F32, "{name}");
        let bytes = self.file.tensor_data(name).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes).into()).collect()
    }

    /// Logits of every position; for an encoder the vectors.
    pub(super) fn forward(&self, ids: &[u32]) -> Rows {
        let spec = &self.spec;
        let mut x = self.embed(ids);
        let per_layer = spec.per_layer_input.as_ref().map(|input| self.per_layer_input(input, ids, &x));
        let mut caches: Vec<Option<Cache>> = Vec::new();
        for (index, layer) in spec.layers.iter().enumerate() {
            let n = self.maybe_norm(&layer.mixer_norm, &x);
            let mut mixed = vec![vec![0.0; spec.hidden]; x.len()];
            for mixer in layer.mixers() {
                let y = match mixer {
                    MixerSpec::Attention(attention) => {
                        caches.push(self.cache(attention, &n));
                        let cache = match &attention.kv {
                            KvSpec::Own(_) | KvSpec::Latent(_) => caches[index].as_ref(),
                            KvSpec::Shared { layer } => caches[*layer].as_ref(),
                        };
                        self.attention(attention, &n, cache.unwrap())
                    }
                    MixerSpec::DeltaNet(net) => self.delta_net(net, &n),
                    MixerSpec::Mamba2(mamba) => self.mamba2(mamba, &n),
                    MixerSpec::ShortConv(short) => self.short_conv(short, &n),
                };
                add(&mut mixed, &y, 1.0);
            }
            caches.resize_with(index + 1, || None);
            add(&mut x, &self.maybe_norm(&layer.mixer_post_norm, &mixed), layer.residual_scale);
            x = self.maybe_norm(&layer.mixer_out_norm, &x);
            let n = self.maybe_norm(&layer.ffn_norm, &x);
            let mut sum = vec![vec![0.0; spec.hidden]; x.len()];
            for part in &layer.ffn {
                let input = part.own_norm.as_ref().map(|norm| self.norm(norm, &x));
                let y = self.ffn(&part.ffn, input.as_ref().unwrap_or(&n), &x);
                add(&mut sum, &self.maybe_norm(&part.post_norm, &y), 1.0);
            }
            add(&mut x, &self.maybe_norm(&layer.ffn_post_norm, &sum), layer.residual_scale);
            x = self.maybe_norm(&layer.ffn_out_norm, &x);
            if let (Some(own), Some(inputs)) = (&layer.per_layer, &per_layer) {
                let mut gated = self.linear(&own.gate, &x);
                for (row, input) in gated.iter_mut().zip(inputs) {
                    let slice = &input[index * row.len()..];
                    row.iter_mut().zip(slice).for_each(|(y, t)| *y = gelu_tanh(*y) * t);
                }
                add(&mut x, &self.norm(&own.norm, &self.linear(&own.projection, &gated)), 1.0);
            }
            if let Some(scale) = &layer.output_scale {
                let scale = self.tensor(scale)[0];
                x.iter_mut().flatten().for_each(|x| *x *= scale);
            }
        }
        match &spec.output {
            OutputSpec::Pooled(_) => x,
            OutputSpec::Logits(head) => {
                let mut logits = self.linear(&head.linear, &self.norm(&head.norm, &x));
                for logit in logits.iter_mut().flatten() {
                    *logit *= f64::from(head.scale);
                    if let Some(cap) = head.softcap.map(f64::from) {
                        *logit = cap * (*logit / cap).tanh();
                    }
                }
                logits
            }
        }
    }

    /// The pooled vector of an encoder's [`forward`](Self::forward), or its scores.
    pub(super) fn pool(&self, x: &Rows) -> Vec<f64> {
        let OutputSpec::Pooled(pooled) = &self.spec.output else { panic!() };
        let vector = match pooled.pooling {
            Pooling::First => x[0].clone(),
            Pooling::Last => x[x.len() - 1].clone(),
            Pooling::Mean => (0..self.spec.hidden)
                .map(|at| x.iter().map(|row| row[at]).sum::<f64>() / x.len() as f64)
                .collect(),
        };
        let Some(ClassifierSpec { difference, dense, activation, norm, out }) = &pooled.classifier else {
            return vector;
        };
        let mut rows = vec![vector];
        if let Some(dense) = dense {
            rows = self.linear(dense, &rows);
            rows[0].iter_mut().for_each(|x| match activation {
                PoolerActivation::Tanh => *x = x.tanh(),
                PoolerActivation::GeluErf => *x = activate(Activation::GeluErf, *x),
            });
            rows = self.maybe_norm(norm, &rows);
        }
        let scores = self.linear(out, &rows).remove(0);
        if *difference { vec![scores[0] - scores[1]] } else { scores }
    }

    fn embed(&self, ids: &[u32]) -> Rows {
        let EmbeddingSpec { tensor, scale, positions, token_types, norm } = &self.spec.embedding;
        let hidden = self.spec.hidden;
        let table = self.tensor(tensor);
        let positions = positions.as_ref().map(|table| self.tensor(&table.tensor));
        let types = token_types.as_ref().map(|table| self.tensor(&table.tensor));
        let row = |(position, &id): (usize, &u32)| {
            let value = |at: usize| {
                f64::from(*scale) * table[id as usize * hidden + at]
                    + positions.as_ref().map_or(0.0, |table| table[position * hidden + at])
                    + types.as_ref().map_or(0.0, |table| table[at])
            };
            (0..hidden).map(value).collect()
        };
        self.maybe_norm(norm, &ids.iter().enumerate().map(row).collect())
    }

    fn per_layer_input(&self, spec: &PerLayerInputSpec, ids: &[u32], x0: &Rows) -> Rows {
        let all = spec.projection.rows;
        let table = self.tensor(&spec.table);
        let mut projected = self.norm(&spec.norm, &self.linear(&spec.projection, x0));
        for (row, &id) in projected.iter_mut().zip(ids) {
            for (value, token) in row.iter_mut().zip(&table[id as usize * all..]) {
                *value = (*value + f64::from(spec.table_scale) * token) / 2_f64.sqrt();
            }
        }
        projected
    }

    /// The weight rows of `spec`, for expert `expert`.
    fn matrix(&self, spec: &LinearSpec, expert: usize) -> Rows {
        let all = self.tensor(&spec.weight);
        let rows: Vec<&[f64]> =
            all.chunks(spec.cols).skip(expert * spec.tensor_rows()).take(spec.tensor_rows()).collect();
        let taken = |row: &usize| {
            let Some(RowSlice { period, start, len, .. }) = spec.slice else { return true };
            (start..start + len).contains(&(row % period))
        };
        let rows: Rows = (0..rows.len()).filter(taken).map(|row| rows[row].to_vec()).collect();
        assert_eq!(rows.len(), spec.rows, "{}", spec.weight);
        rows
    }

    fn linear(&self, spec: &LinearSpec, x: &Rows) -> Rows {
        self.expert_linear(spec, 0, x)
    }

    fn expert_linear(&self, spec: &LinearSpec, expert: usize, x: &Rows) -> Rows {
        let weights = self.matrix(spec, expert);
        let scale =
            spec.scale.as_ref().map_or(1.0, |name| self.tensor(name)[expert]) * f64::from(spec.factor);
        let of_slice = |row: &usize| {
            spec.slice.is_none_or(|RowSlice { period, start, len, .. }| {
                (start..start + len).contains(&(row % period))
            })
        };
        let bias = spec.bias.as_ref().map(|name| {
            let bias = &self.tensor(name)[expert * spec.rows..];
            let used = (0..bias.len()).filter(of_slice);
            used.map(|row| bias[row] * f64::from(spec.bias_factor)).collect::<Vec<f64>>()
        });
        let row = |x: &Vec<f64>| {
            let of =
                |(at, row): (usize, &Vec<f64>)| dot(row, x) * scale + bias.as_ref().map_or(0.0, |b| b[at]);
            weights.iter().enumerate().map(of).collect()
        };
        x.iter().map(row).collect()
    }

    fn maybe_norm(&self, norm: &Option<NormSpec>, x: &Rows) -> Rows {
        norm.as_ref().map_or_else(|| x.clone(), |norm| self.norm(norm, x))
    }

    /// Norms every `width` elements of every row. A weight as long as a row covers the whole row.
    fn norm(&self, norm: &NormSpec, x: &Rows) -> Rows {
        let tensor = |name: &Option<String>| name.as_ref().map(|name| self.tensor(name));
        let (weight, bias) = (tensor(&norm.weight), tensor(&norm.bias));
        let at = |list: &Option<Vec<f64>>, index: usize, absent: f64| {
            list.as_ref().map_or(absent, |list| list[index % list.len()])
        };
        let row = |row: &Vec<f64>| {
            let mut out = Vec::with_capacity(row.len());
            for chunk in row.chunks(norm.width) {
                let mean = match norm.kind {
                    NormKind::Rms => 0.0,
                    NormKind::Layer => chunk.iter().sum::<f64>() / chunk.len() as f64,
                };
                let square = chunk.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / chunk.len() as f64;
                let factor = (square + f64::from(norm.eps)).sqrt().recip();
                for x in chunk {
                    let index = out.len();
                    out.push((x - mean) * factor * at(&weight, index, 1.0) + at(&bias, index, 0.0));
                }
            }
            out
        };
        x.iter().map(row).collect()
    }

    fn ffn(&self, ffn: &FfnSpec, x: &Rows, residual: &Rows) -> Rows {
        match ffn {
            FfnSpec::Gated { gate, up, down, activation, row_gate } => {
                let h = gated(*activation, &self.linear(gate, x), &self.linear(up, x));
                let mut y = self.linear(down, &h);
                if let Some(row_gate) = row_gate {
                    for (y, gate) in y.iter_mut().zip(self.linear(row_gate, x)) {
                        y.iter_mut().for_each(|y| *y *= sigmoid(gate[0]));
                    }
                }
                y
            }
            FfnSpec::Plain { up, down, activation } => {
                let mut h = self.linear(up, x);
                h.iter_mut().flatten().for_each(|h| *h = activate(*activation, *h));
                self.linear(down, &h)
            }
            FfnSpec::Moe(moe) => self.moe(moe, x, residual),
        }
    }

    fn moe(&self, moe: &MoeSpec, x: &Rows, residual: &Rows) -> Rows {
        let routed = moe.router_norm.as_ref().map(|norm| self.norm(norm, residual));
        let mut probabilities = self.linear(&moe.router, routed.as_ref().unwrap_or(x));
        assert!(!moe.sigmoid && moe.selection_bias.is_none() && moe.groups.is_none() && moe.scale == 1.0);
        probabilities.iter_mut().for_each(|row| softmax(row));
        let mut outputs: HashMap<usize, Rows> = HashMap::new();
        let mut y = vec![vec![0.0; moe.down.rows]; x.len()];
        for (t, probabilities) in probabilities.iter().enumerate() {
            let mut ranked: Vec<usize> = (0..moe.experts).collect();
            ranked.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
            let used = &ranked[..moe.used];
            let sum: f64 = used.iter().map(|&expert| probabilities[expert]).sum();
            for &expert in used {
                let weight = probabilities[expert] / if moe.renormalise { sum } else { 1.0 };
                let rows = outputs.entry(expert).or_insert_with(|| self.expert(moe, expert, x));
                y[t].iter_mut().zip(&rows[t]).for_each(|(y, row)| *y += weight * row);
            }
        }
        y
    }

    fn expert(&self, moe: &MoeSpec, expert: usize, x: &Rows) -> Rows {
        let (gate, up) = match &moe.gate_up {
            ExpertGateUp::Separate { gate, up } => {
                (self.expert_linear(gate, expert, x), self.expert_linear(up, expert, x))
            }
            ExpertGateUp::Fused(both) => self
                .expert_linear(both, expert, x)
                .into_iter()
                .map(|row| (row[..moe.expert_ff].to_vec(), row[moe.expert_ff..].to_vec()))
                .unzip(),
        };
        self.expert_linear(&moe.down, expert, &gated(moe.activation, &gate, &up))
    }
}

fn gated(activation: Activation, gate: &Rows, up: &Rows) -> Rows {
    let value = |gate: f64, up: f64| match activation {
        Activation::ClampedSwiglu => {
            let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
            gate * sigmoid(1.702 * gate) * (up + 1.0)
        }
        _ => activate(activation, gate) * up,
    };
    let row = |(gate, up): (&Vec<f64>, &Vec<f64>)| gate.iter().zip(up).map(|(g, u)| value(*g, *u)).collect();
    gate.iter().zip(up).map(row).collect()
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => silu(x),
        Activation::GeluTanh => gelu_tanh(x),
        Activation::ReluSquared => x.max(0.0).powi(2),
        Activation::GeluErf => 0.5 * x * (1.0 + erf(x / 2_f64.sqrt())),
        Activation::ClampedSwiglu => panic!("gated only"),
    }
}

/// `2 / sqrt(pi) exp(-x^2) sum 2^n x^(2n+1) / (1 3 5 .. 2n+1)`, whose terms do not cancel; beyond 6 it is 1.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    sum * (-x * x).exp() * 2.0 / std::f64::consts::PI.sqrt()
}

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

fn sigmoid(x: f64) -> f64 {
    (1.0 + (-x).exp()).recip()
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

fn softmax(x: &mut [f64]) {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f64 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut Rows, y: &Rows, factor: f32) {
    x.iter_mut().flatten().zip(y.iter().flatten()).for_each(|(x, y)| *x += f64::from(factor) * y);
}
