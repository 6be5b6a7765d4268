//! Reference of the MTP head in f64 and plain loops, from the equations in [`model::spec::MtpHeadSpec`]. It
//! reads the file itself. It shares only the model's hidden states with the tested code.

use model::ModelFile;
use std::path::Path;

pub(super) struct Reference {
    file: ModelFile,
    block: u32,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head: usize,
    turned: usize,
    base: f64,
    eps: f64,
    used: usize,
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    /// The model's hidden state of the last computed position.
    before: Vec<f64>,
}

pub(super) struct ReferenceDraft {
    pub(super) token: u32,
    pub(super) hidden: Vec<f64>,
    pub(super) logits: Vec<f64>,
    /// Difference between the logits of this token and the next best one.
    pub(super) margin: f64,
}

impl Reference {
    pub(super) fn new(path: &Path) -> Self {
        let file = ModelFile::open(path).unwrap();
        let arch: &str = file.metadata().require("general.architecture").unwrap();
        let number = |key: &str| file.metadata().require::<u32>(&format!("{arch}.{key}")).unwrap();
        let real = |key: &str| f64::from(file.metadata().require::<f32>(&format!("{arch}.{key}")).unwrap());
        let hidden = number("embedding_length") as usize;
        Self {
            block: number("block_count") - 1,
            hidden,
            heads: number("attention.head_count") as usize,
            kv_heads: number("attention.head_count_kv") as usize,
            head: number("attention.key_length") as usize,
            turned: number("rope.dimension_count") as usize,
            base: real("rope.freq_base"),
            eps: real("attention.layer_norm_rms_epsilon"),
            used: if arch == "qwen35" { 0 } else { number("expert_used_count") as usize },
            keys: Vec::new(),
            values: Vec::new(),
            before: vec![0.0; hidden],
            file,
        }
    }

    /// Adds a position that the model has computed: its token and its hidden state.
    pub(super) fn feed(&mut self, token: u32, hidden: &[f32]) {
        let before = self.before.clone();
        self.position(token, &before);
        self.before = hidden.iter().map(|value| f64::from(*value)).collect();
    }

    /// Drafts `count` tokens after the newest token.
    pub(super) fn draft(&mut self, newest: u32, count: usize) -> Vec<ReferenceDraft> {
        let len = self.keys.len();
        let (mut token, mut before) = (newest, self.before.clone());
        let mut draft_tokens = Vec::new();
        for _ in 0..count {
            let hidden = self.position(token, &before);
            let logits = self.times("output.weight", "nextn.shared_head_head.weight", &hidden);
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let margin = logits[order[0]] - logits[order[1]];
            (token, before) = (order[0] as u32, hidden.clone());
            draft_tokens.push(ReferenceDraft { token, hidden, logits, margin });
        }
        self.keys.truncate(len);
        self.values.truncate(len);
        draft_tokens
    }

    /// Runs a token at the next position, with the hidden state before it. Returns the head's output.
    fn position(&mut self, token: u32, before: &[f64]) -> Vec<f64> {
        let position = self.keys.len();
        let own = self.name("nextn.embed_tokens.weight");
        let table = if self.file.tensor(&own).is_some() { own } else { "token_embd.weight".to_owned() };
        let embedding = self.tensor(&table)[token as usize * self.hidden..][..self.hidden].to_vec();
        let mut both = self.norm(&embedding, &self.name("nextn.enorm.weight"));
        both.extend(self.norm(before, &self.name("nextn.hnorm.weight")));
        let x = product(&self.own("nextn.eh_proj.weight"), &both);

        let input = self.norm(&x, &self.name("attn_norm.weight"));
        let queries_and_gates = product(&self.own("attn_q.weight"), &input);
        let key = product(&self.own("attn_k.weight"), &input);
        let turn = |heads: &[f64], norm: &str| -> Vec<f64> {
            let normed = heads.chunks(self.head).map(|head| self.norm(head, &self.name(norm)));
            normed.flat_map(|head| self.turn(head, position)).collect()
        };
        let key = turn(&key, "attn_k_norm.weight");
        let value = product(&self.own("attn_v.weight"), &input);
        let queries: Vec<f64> =
            queries_and_gates.chunks(2 * self.head).flat_map(|both| both[..self.head].to_vec()).collect();
        let queries = turn(&queries, "attn_q_norm.weight");
        self.keys.push(key);
        self.values.push(value);
        let mut mixed = Vec::new();
        for (head, query) in queries.chunks(self.head).enumerate() {
            let at = head / (self.heads / self.kv_heads) * self.head;
            let scores: Vec<f64> = self.keys.iter().map(|key| dot(query, &key[at..at + self.head])).collect();
            let scores: Vec<f64> = scores.iter().map(|score| score / (self.head as f64).sqrt()).collect();
            let weights = softmax(&scores);
            for i in 0..self.head {
                let value: f64 = weights.iter().zip(&self.values).map(|(w, value)| w * value[at + i]).sum();
                mixed.push(value * sigmoid(queries_and_gates[(2 * head + 1) * self.head + i]));
            }
        }
        let x = add(&x, &product(&self.own("attn_output.weight"), &mixed));

        let input = self.norm(&x, &self.name("post_attention_norm.weight"));
        let x = add(&x, &self.feed_forward(&input));
        let own = self.name("nextn.shared_head_norm.weight");
        let norm = if self.file.tensor(&own).is_some() { own } else { "output_norm.weight".to_owned() };
        self.norm(&x, &norm)
    }

    fn feed_forward(&self, input: &[f64]) -> Vec<f64> {
        let gated = |gate: &[f64], up: &[f64], down: &[f64]| {
            let inner = product(gate, input).into_iter().zip(product(up, input));
            let inner: Vec<f64> = inner.map(|(gate, up)| gate * sigmoid(gate) * up).collect();
            product(down, &inner)
        };
        if self.used == 0 {
            let [gate, up, down] = ["gate", "up", "down"].map(|name| self.own(&format!("ffn_{name}.weight")));
            return gated(&gate, &up, &down);
        }
        let router = softmax(&product(&self.own("ffn_gate_inp.weight"), input));
        let mut order: Vec<usize> = (0..router.len()).collect();
        order.sort_by(|a, b| router[*b].total_cmp(&router[*a]));
        let all: f64 = order[..self.used].iter().map(|expert| router[*expert]).sum();
        let experts = ["gate", "up", "down"].map(|name| self.own(&format!("ffn_{name}_exps.weight")));
        let mut sum = vec![0.0; self.hidden];
        for &expert in &order[..self.used] {
            let each = experts[0].len() / router.len();
            let [gate, up, down] = experts.each_ref().map(|all| &all[expert * each..(expert + 1) * each]);
            let expert_output = gated(gate, up, down);
            sum.iter_mut().zip(expert_output).for_each(|(sum, output)| *sum += router[expert] / all * output);
        }
        let [gate, up, down] =
            ["gate", "up", "down"].map(|name| self.own(&format!("ffn_{name}_shexp.weight")));
        let share = sigmoid(dot(&self.own("ffn_gate_inp_shexp.weight"), input));
        let shared = gated(&gate, &up, &down);
        sum.iter_mut().zip(shared).for_each(|(sum, shared)| *sum += share * shared);
        sum
    }

    /// Applies the rotary embedding to the first values of a head, pairing the first half with the second.
    fn turn(&self, mut head: Vec<f64>, position: usize) -> Vec<f64> {
        let half = self.turned / 2;
        for i in 0..half {
            let angle = position as f64 * self.base.powf(-(i as f64) / half as f64);
            let (a, b) = (head[i], head[half + i]);
            head[i] = a * angle.cos() - b * angle.sin();
            head[half + i] = a * angle.sin() + b * angle.cos();
        }
        head
    }

    fn norm(&self, x: &[f64], weight: &str) -> Vec<f64> {
        let square = dot(x, x) / x.len() as f64;
        x.iter().zip(self.tensor(weight)).map(|(x, weight)| x / (square + self.eps).sqrt() * weight).collect()
    }

    /// Multiplies by the head's own matrix, else the model's, else its embedding.
    fn times(&self, models: &str, own: &str, x: &[f64]) -> Vec<f64> {
        let own = self.name(own);
        let there = |name: &&str| self.file.tensor(name).is_some();
        let name = [own.as_str(), models, "token_embd.weight"].into_iter().find(there).unwrap();
        product(&self.tensor(name), x)
    }

    fn name(&self, name: &str) -> String {
        format!("blk.{}.{name}", self.block)
    }

    fn own(&self, name: &str) -> Vec<f64> {
        self.tensor(&self.name(name))
    }

    fn tensor(&self, name: &str) -> Vec<f64> {
        let bytes = self.file.tensor_data(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        bytes.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Matrix-vector product; the matrix is row-major.
fn product(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(x.len()).map(|row| dot(row, x)).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let all: f64 = x.iter().map(|x| (x - max).exp()).sum();
    x.iter().map(|x| (x - max).exp() / all).collect()
}
