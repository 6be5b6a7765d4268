//! A model's spec worked out in f64, plainly and slowly, against what the oracle computed: the translators and the
//! meaning of the spec, without any engine.

use std::collections::HashMap;

use crate::spec::*;
use crate::{GgmlType, ModelFile, ModelSpec};

/// Rows of one width each.
type Rows = Vec<Vec<f64>>;

/// A model with its weights.
pub(super) struct Model<'a> {
    pub(super) spec: ModelSpec,
    file: &'a ModelFile,
}

/// Keys and values of a layer's positions, head by head.
struct Cache {
    k: Rows,
    v: Rows,
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

    /// Logits of every position; of an encoder the vectors.
    pub(super) fn forward(&self, ids: &[u32]) -> Rows {
        let spec = &self.spec;
        let mut x = self.embed(ids);
        let per_layer = spec.per_layer_input.as_ref().map(|input| self.per_layer_input(input, ids, &x));
        let mut caches: Vec<Option<Cache>> = Vec::new();
        for (index, layer) in spec.layers.iter().enumerate() {
            let n = self.maybe_norm(&layer.mixer_norm, &x);
            let mixed = match &layer.mixer {
                MixerSpec::Attention(attention) => {
                    caches.push(self.cache(attention, &n));
                    let cache = match &attention.kv {
                        KvSpec::Own(_) => caches[index].as_ref(),
                        KvSpec::Shared { layer } => caches[*layer].as_ref(),
                    };
                    self.attention(attention, &n, cache.unwrap())
                }
                MixerSpec::DeltaNet(net) => self.delta_net(net, &n),
                MixerSpec::Mamba2(mamba) => self.mamba2(mamba, &n),
            };
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
        let Some(ClassifierSpec { dense, out }) = &pooled.classifier else { return vector };
        let mut rows = vec![vector];
        if let Some(dense) = dense {
            rows = self.linear(dense, &rows);
            rows[0].iter_mut().for_each(|x| *x = x.tanh());
        }
        self.linear(out, &rows).remove(0)
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

    /// Rows of the weight that `spec` means, of expert `expert`.
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
        let bias = spec.bias.as_ref().map(|name| self.tensor(name)[expert * spec.rows..].to_vec());
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

    /// Norms every `width` elements of every row; a weight of a whole row runs over it.
    fn norm(&self, norm: &NormSpec, x: &Rows) -> Rows {
        let tensor = |name: &Option<String>| name.as_ref().map(|name| self.tensor(name));
        let (weight, bias) = (tensor(&norm.weight), tensor(&norm.bias));
        let at = |list: &Option<Vec<f64>>, index: usize, absent: f64| {
            list.as_ref().map_or(absent, |list| list[index % list.len()])
        };
        let row = |row: &Vec<f64>| {
            let mut out = Vec::with_capacity(row.len());
            for part in row.chunks(norm.width) {
                let mean = match norm.kind {
                    NormKind::Rms => 0.0,
                    NormKind::Layer => part.iter().sum::<f64>() / part.len() as f64,
                };
                let square = part.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / part.len() as f64;
                let factor = (square + f64::from(norm.eps)).sqrt().recip();
                for x in part {
                    let index = out.len();
                    out.push((x - mean) * factor * at(&weight, index, 1.0) + at(&bias, index, 0.0));
                }
            }
            out
        };
        x.iter().map(row).collect()
    }

    fn cache(&self, spec: &AttentionSpec, n: &Rows) -> Option<Cache> {
        let own = spec.own_kv()?;
        let raw = self.linear(&own.k, n);
        let k = self.rope(&spec.rope, spec.head_dim, self.maybe_norm(&own.k_norm, &raw));
        let v = own.v.as_ref().map_or(raw, |v| self.linear(v, n));
        Some(Cache { k, v: self.maybe_norm(&own.v_norm, &v) })
    }

    fn attention(&self, spec: &AttentionSpec, n: &Rows, cache: &Cache) -> Rows {
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
        let row = |at: usize| {
            let channel = |c: usize| {
                let taps = (0..spec.taps).filter_map(|tap| {
                    let from = (at + tap + 1).checked_sub(spec.taps)?;
                    Some(weight[c * spec.taps + tap] * x[from][c])
                });
                silu(taps.sum::<f64>() + bias.as_ref().map_or(0.0, |bias| bias[c]))
            };
            (0..spec.channels).map(channel).collect()
        };
        (0..x.len()).map(row).collect()
    }

    fn delta_net(&self, net: &DeltaNetSpec, n: &Rows) -> Rows {
        let DeltaNetSpec { k_heads, v_heads, k_dim, v_dim, .. } = *net;
        let u = self.conv(&net.conv, &self.linear(&net.qkv, n));
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

    fn mamba2(&self, mamba: &Mamba2Spec, n: &Rows) -> Rows {
        let Mamba2Spec { heads, head_dim, groups, state, .. } = *mamba;
        let (z, dt) = (self.linear(&mamba.z, n), self.linear(&mamba.dt, n));
        let u = self.conv(&mamba.conv, &self.linear(&mamba.xbc, n));
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
            row.iter_mut().zip(&z[t]).for_each(|(y, z)| *y *= silu(*z));
            out.push(row);
        }
        self.linear(&mamba.out, &self.norm(&mamba.norm, &out))
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
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    x.iter_mut().for_each(|x| *x = (*x - most).exp());
    let sum: f64 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut Rows, y: &Rows, factor: f32) {
    x.iter_mut().flatten().zip(y.iter().flatten()).for_each(|(x, y)| *x += f64::from(factor) * y);
}
