//! Compares the network with plain f64 sums, and with itself for other splits and numbers of threads.

use super::super::file::Weights;
use super::super::file::tests::{file, variable};
use super::*;
use std::collections::HashMap;
use std::io::Cursor;
use std::num::NonZeroUsize;
use std::path::Path;

pub(in super::super) const WIDTH: usize = 16;
pub(in super::super) const HEADS: usize = 2;
const BANDS: usize = 8;
const INNER: usize = 24;
pub(in super::super) const TOKENS: usize = 40;
const CONTEXT: usize = 16;

pub(in super::super) type Values = HashMap<String, (Vec<usize>, Vec<f32>)>;

/// A network of one layer each, with random weights.
pub(in super::super) fn tiny() -> (Values, Vec<u8>) {
    let mut state = 1u32;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    let mut all: Vec<(String, Vec<usize>)> = vec![
        ("encoder/conv1/weight".into(), vec![WIDTH, BANDS, TAPS]),
        ("encoder/conv1/bias".into(), vec![WIDTH]),
        ("encoder/conv2/weight".into(), vec![WIDTH, WIDTH, TAPS]),
        ("encoder/conv2/bias".into(), vec![WIDTH]),
        ("encoder/position_encodings/encodings".into(), vec![POSITIONS, WIDTH]),
        ("decoder/position_encodings/encodings".into(), vec![CONTEXT, WIDTH]),
        ("decoder/embeddings/weight".into(), vec![TOKENS, WIDTH]),
    ];
    let mut linear = |name: String, rows: usize, cols: usize| {
        all.push((format!("{name}/weight"), vec![rows, cols]));
        all.push((format!("{name}/bias"), vec![rows]));
    };
    for of in ["encoder", "decoder"] {
        linear(format!("{of}/layer_0/self_attention/linear_0"), 3 * WIDTH, WIDTH);
        linear(format!("{of}/layer_0/self_attention/linear_1"), WIDTH, WIDTH);
        linear(format!("{of}/layer_0/ffn/linear_0"), INNER, WIDTH);
        linear(format!("{of}/layer_0/ffn/linear_1"), WIDTH, INNER);
    }
    linear("decoder/layer_0/attention/linear_0".into(), WIDTH, WIDTH);
    linear("decoder/layer_0/attention/linear_1".into(), 2 * WIDTH, WIDTH);
    linear("decoder/layer_0/attention/linear_2".into(), WIDTH, WIDTH);
    let norms = [
        "encoder",
        "decoder",
        "encoder/layer_0/self_attention",
        "encoder/layer_0/ffn",
        "decoder/layer_0/self_attention",
        "decoder/layer_0/attention",
        "decoder/layer_0/ffn",
    ];
    for name in norms {
        for part in ["gamma", "beta"] {
            all.push((format!("{name}/layer_norm/{part}"), vec![WIDTH]));
        }
    }
    let mut values = Values::new();
    for (name, dims) in all {
        let shift = if name.ends_with("gamma") { 1.0 } else { 0.0 };
        let numbers: Vec<f32> = (0..dims.iter().product()).map(|_| next() * 0.3 + shift).collect();
        values.insert(name, (dims, numbers));
    }
    let bytes = ctranslate2(&values);
    (values, bytes)
}

/// A network as a file of CTranslate2.
pub(in super::super) fn ctranslate2(values: &Values) -> Vec<u8> {
    let mut stored: Vec<Vec<u8>> = values
        .iter()
        .map(|(name, (dims, numbers))| {
            let bytes: Vec<u8> = numbers.iter().flat_map(|value| value.to_le_bytes()).collect();
            variable(name, dims, 0, &bytes)
        })
        .collect();
    for of in ["encoder", "decoder"] {
        stored.push(variable(&format!("{of}/num_heads"), &[], 2, &[HEADS as u8, 0]));
        stored.push(variable(&format!("{of}/activation"), &[], 1, &[GELU as u8]));
        stored.push(variable(&format!("{of}/pre_norm"), &[], 1, &[1]));
    }
    file(&stored, &[("decoder/projection/weight", "decoder/embeddings/weight")])
}

/// The logits after some tokens.
pub(in super::super) fn logits_of(network: &Network) -> Vec<f32> {
    let compute = Compute::new(NonZeroUsize::new(2).unwrap()).unwrap();
    let encoded = network.encode(&compute, &features()).unwrap();
    let memory = network.memory(&compute, &encoded).unwrap();
    network.decode(&compute, &memory, &mut network.cache(), &SEQUENCE, &[3, 6]).unwrap().concat()
}

fn load(bytes: Vec<u8>, threads: usize) -> Result<(Network, Compute), Error> {
    let mut weights = Weights::read(Path::new("model.bin"), Cursor::new(bytes))?;
    let compute = Compute::new(NonZeroUsize::new(threads).unwrap())?;
    Ok((Network::load(&mut weights, threads)?, compute))
}

/// Features of varying loudness.
fn features() -> Vec<f32> {
    (0..BANDS * FRAMES)
        .map(|n| ((n * 7919 % 1009) as f32 / 1009.0 - 0.4) * (n as f32 / 700.0).sin())
        .collect()
}

/// Plain reference implementation with rows of f64.
struct Plain<'a>(&'a Values);

type Rows = Vec<Vec<f64>>;

impl Plain<'_> {
    fn of(&self, name: &str) -> Vec<f64> {
        self.0[name].1.iter().map(|value| f64::from(*value)).collect()
    }

    fn linear(&self, x: &Rows, name: &str) -> Rows {
        let (weight, bias) = (self.of(&format!("{name}/weight")), self.of(&format!("{name}/bias")));
        let row = |x: &Vec<f64>| {
            let weights = weight.chunks(x.len());
            let product = |weights: &[f64]| weights.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
            weights.zip(&bias).map(|(weights, bias)| product(weights) + bias).collect()
        };
        x.iter().map(row).collect()
    }

    fn norm(&self, x: &Rows, name: &str) -> Rows {
        let (gamma, beta) =
            (self.of(&format!("{name}/layer_norm/gamma")), self.of(&format!("{name}/layer_norm/beta")));
        let row = |x: &Vec<f64>| {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
            let scaled = x.iter().map(|x| (x - mean) / (variance + 1e-5).sqrt());
            scaled.zip(&gamma).zip(&beta).map(|((x, gamma), beta)| x * gamma + beta).collect()
        };
        x.iter().map(row).collect()
    }

    fn convolve(&self, x: &Rows, name: &str, stride: usize) -> Rows {
        let (weight, bias) = (self.of(&format!("{name}/weight")), self.of(&format!("{name}/bias")));
        let channels = x[0].len();
        let at = |position: i64, channel: usize| {
            usize::try_from(position).ok().and_then(|position| x.get(position)).map_or(0.0, |x| x[channel])
        };
        let output = |row: usize, out: usize| {
            let mut sum = bias[out];
            for channel in 0..channels {
                for tap in 0..TAPS {
                    let position = (row * stride + tap) as i64 - 1;
                    sum += weight[(out * channels + channel) * TAPS + tap] * at(position, channel);
                }
            }
            gelu(sum)
        };
        (0..x.len() / stride).map(|row| (0..WIDTH).map(|out| output(row, out)).collect()).collect()
    }

    fn attend(queries: &Rows, keys: &Rows, values: &Rows, causal: bool) -> Rows {
        let dims = WIDTH / HEADS;
        let mut out = vec![vec![0.0; WIDTH]; queries.len()];
        for (row, query) in queries.iter().enumerate() {
            for head in 0..HEADS {
                let of = head * dims..(head + 1) * dims;
                let seen = if causal { row + 1 } else { keys.len() };
                let dot = |key: &Vec<f64>| {
                    query[of.clone()].iter().zip(&key[of.clone()]).map(|(q, k)| q * k).sum::<f64>()
                };
                let weights: Vec<f64> =
                    keys[..seen].iter().map(|key| (dot(key) / (dims as f64).sqrt()).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for (weight, value) in weights.iter().zip(values) {
                    of.clone().for_each(|at| out[row][at] += weight / sum * value[at]);
                }
            }
        }
        out
    }

    fn self_attention(&self, x: &mut Rows, of: &str, causal: bool) {
        let name = format!("{of}/self_attention");
        let qkv = self.linear(&self.norm(x, &name), &format!("{name}/linear_0"));
        let columns =
            |n: usize| qkv.iter().map(|row| row[n * WIDTH..(n + 1) * WIDTH].to_vec()).collect::<Rows>();
        let attended = Self::attend(&columns(0), &columns(1), &columns(2), causal);
        add(x, &self.linear(&attended, &format!("{name}/linear_1")));
    }

    fn feed_forward(&self, x: &mut Rows, of: &str) {
        let name = format!("{of}/ffn");
        let mut wide = self.linear(&self.norm(x, &name), &format!("{name}/linear_0"));
        wide.iter_mut().flatten().for_each(|x| *x = gelu(*x));
        add(x, &self.linear(&wide, &format!("{name}/linear_1")));
    }

    fn encode(&self, features: &[f32]) -> Rows {
        let x: Rows = (0..FRAMES)
            .map(|frame| (0..BANDS).map(|band| f64::from(features[band * FRAMES + frame])).collect())
            .collect();
        let x = self.convolve(&x, "encoder/conv1", 1);
        let mut x = self.convolve(&x, "encoder/conv2", 2);
        let positions = self.of("encoder/position_encodings/encodings");
        add(&mut x, &positions.chunks(WIDTH).map(<[f64]>::to_vec).collect());
        self.self_attention(&mut x, "encoder/layer_0", false);
        self.feed_forward(&mut x, "encoder/layer_0");
        self.norm(&x, "encoder")
    }

    fn embed(&self, tokens: &[u32]) -> Rows {
        let (embeddings, positions) =
            (self.of("decoder/embeddings/weight"), self.of("decoder/position_encodings/encodings"));
        let row = |(at, token): (usize, &u32)| {
            let embedding = &embeddings[*token as usize * WIDTH..][..WIDTH];
            embedding.iter().zip(&positions[at * WIDTH..]).map(|(e, p)| e + p).collect()
        };
        let mut x: Rows = tokens.iter().enumerate().map(row).collect();
        self.self_attention(&mut x, "decoder/layer_0", true);
        x
    }

    /// Queries of the attention to the encoder's output.
    fn queries(&self, tokens: &[u32]) -> Rows {
        let name = "decoder/layer_0/attention";
        self.linear(&self.norm(&self.embed(tokens), name), &format!("{name}/linear_0"))
    }

    fn decode(&self, encoded: &Rows, tokens: &[u32]) -> Rows {
        let embeddings = self.of("decoder/embeddings/weight");
        let (mut x, queries) = (self.embed(tokens), self.queries(tokens));
        let name = "decoder/layer_0/attention";
        let keys_values = self.linear(encoded, &format!("{name}/linear_1"));
        let columns = |n: usize| {
            keys_values.iter().map(|row| row[n * WIDTH..(n + 1) * WIDTH].to_vec()).collect::<Rows>()
        };
        let attended = Self::attend(&queries, &columns(0), &columns(1), false);
        add(&mut x, &self.linear(&attended, &format!("{name}/linear_2")));
        self.feed_forward(&mut x, "decoder/layer_0");
        let x = self.norm(&x, "decoder");
        let logits = |x: &Vec<f64>| {
            embeddings.chunks(WIDTH).map(|e| e.iter().zip(x).map(|(e, x)| e * x).sum()).collect()
        };
        x.iter().map(logits).collect()
    }
}

fn add(x: &mut Rows, y: &Rows) {
    x.iter_mut().flatten().zip(y.iter().flatten()).for_each(|(x, y)| *x += y);
}

/// Uses the series of the error function, which is exact enough below 6.
fn gelu(x: f64) -> f64 {
    let z = x / std::f64::consts::SQRT_2;
    let (mut term, mut sum) = (z, z);
    for n in 1..200 {
        term *= -z * z / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    let erf = if z.abs() > 4.0 { z.signum() } else { sum * 2.0 / std::f64::consts::PI.sqrt() };
    0.5 * x * (1.0 + erf)
}

fn worst(found: &[f32], expected: &Rows) -> f64 {
    assert_eq!(found.len(), expected.iter().map(Vec::len).sum::<usize>());
    found.iter().zip(expected.iter().flatten()).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
}

const SEQUENCE: [u32; 7] = [3, 39, 0, 17, 17, 8, 21];

#[test]
fn the_network_equals_plain_sums() {
    let (values, bytes) = tiny();
    let (network, compute) = load(bytes, 2).unwrap();
    let encoded = network.encode(&compute, &features()).unwrap();
    let expected = Plain(&values).encode(&features());
    let difference = worst(&encoded, &expected);
    assert!(difference < 1e-4, "encoder: {difference}");
    let memory = network.memory(&compute, &encoded).unwrap();
    let all: Vec<usize> = (0..SEQUENCE.len()).collect();
    let logits = network.decode(&compute, &memory, &mut network.cache(), &SEQUENCE, &all).unwrap();
    let difference = worst(&logits.concat(), &Plain(&values).decode(&expected, &SEQUENCE));
    assert!(difference < 1e-4, "decoder: {difference}");
}

#[test]
fn no_bit_depends_on_threads_or_on_the_split_of_tokens() {
    let (_, bytes) = tiny();
    let mut found = Vec::new();
    for threads in [1, 3] {
        let (network, compute) = load(bytes.clone(), threads).unwrap();
        let encoded = network.encode(&compute, &features()).unwrap();
        let memory = network.memory(&compute, &encoded).unwrap();
        for step in [1, 2, SEQUENCE.len()] {
            let mut cache = network.cache();
            let mut logits = Vec::new();
            for tokens in SEQUENCE.chunks(step) {
                let all: Vec<usize> = (0..tokens.len()).collect();
                logits.extend(network.decode(&compute, &memory, &mut cache, tokens, &all).unwrap());
            }
            assert_eq!(cache.tokens(), SEQUENCE.len());
            found.push((encoded.clone(), logits));
        }
    }
    assert!(found.iter().all(|other| *other == found[0]));
}

#[test]
fn sequences_decoded_together_have_the_bits_of_each_alone() {
    let (_, bytes) = tiny();
    let (network, compute) = load(bytes, 2).unwrap();
    let memory = network.memory(&compute, &network.encode(&compute, &features()).unwrap()).unwrap();
    let starts: [&[u32]; 3] = [&[3], &[39, 0, 17], &[8, 8]];
    let mut caches: Vec<Cache> = starts
        .iter()
        .map(|start| {
            let mut cache = network.cache();
            network.decode(&compute, &memory, &mut cache, start, &[]).unwrap();
            cache
        })
        .collect();
    let alone = |cache: &Cache, token| {
        network.decode(&compute, &memory, &mut cache.clone(), &[token], &[0]).unwrap().concat()
    };
    let expected: Vec<Vec<f32>> =
        caches.iter().zip([5, 6, 7]).map(|(cache, token)| alone(cache, token)).collect();
    let tokens: [&[u32]; 3] = [&[5], &[6], &[7]];
    let mut sequences: Vec<(&mut Cache, &[u32])> = caches.iter_mut().zip(tokens).collect();
    assert_eq!(network.decode_each(&compute, &memory, &mut sequences).unwrap(), expected);
    assert_eq!(caches.iter().map(Cache::tokens).collect::<Vec<_>>(), [2, 4, 3]);
}

#[test]
fn the_attention_of_heads_and_the_probabilities_of_tokens_equal_plain_sums() {
    let (values, bytes) = tiny();
    let (network, compute) = load(bytes, 2).unwrap();
    let encoded = network.encode(&compute, &features()).unwrap();
    let memory = network.memory(&compute, &encoded).unwrap();
    let mut scores = Vec::new();
    let mut take = |head: Vec<f32>| scores.push(head);
    let (first, end) = (2, 30);
    let shares = network.attention(&compute, &memory, &SEQUENCE, (first, end), &[[0, 1]], &mut take).unwrap();
    let plain = Plain(&values);
    let encoded: Rows =
        encoded.chunks(WIDTH).map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect();
    let (keys, dims) = (plain.linear(&encoded, "decoder/layer_0/attention/linear_1"), WIDTH / HEADS);
    let queries = plain.queries(&SEQUENCE);
    let expected: Rows = queries
        .iter()
        .map(|query| {
            let dot = |key: &Vec<f64>| (dims..2 * dims).map(|at| query[at] * key[at]).sum::<f64>();
            keys.iter().map(|key| dot(key) / (dims as f64).sqrt()).collect()
        })
        .collect();
    assert_eq!(scores.len(), 1);
    assert!(worst(&scores[0], &expected) < 1e-4);
    let logits = plain.decode(&encoded, &SEQUENCE);
    let expected: Vec<f64> = (first..SEQUENCE.len() - 1)
        .map(|at| {
            let texts: Vec<f64> = logits[at - 1][..end as usize].iter().map(|logit| logit.exp()).collect();
            texts.get(SEQUENCE[at] as usize).map_or(0.0, |share| share / texts.iter().sum::<f64>())
        })
        .collect();
    assert!(worst(&shares, &vec![expected]) < 1e-4, "{shares:?}");
}

#[test]
fn invalid_tokens_are_refused() {
    let (_, bytes) = tiny();
    let (network, compute) = load(bytes, 1).unwrap();
    let memory = network.memory(&compute, &vec![0.0; POSITIONS * WIDTH]).unwrap();
    let mut cache = network.cache();
    assert!(network.decode(&compute, &memory, &mut cache, &[TOKENS as u32], &[0]).is_err(), "no such token");
    let many = vec![0; CONTEXT + 1];
    assert!(network.decode(&compute, &memory, &mut network.cache(), &many, &[0]).is_err(), "no room");
}

#[test]
fn another_network_is_refused_by_name() {
    let of = |name: &str, dims: &[usize], ty: u8, value: &[u8]| {
        let (values, _) = tiny();
        let stored = values.iter().filter(|(other, _)| *other != name).map(|(name, (dims, numbers))| {
            let bytes: Vec<u8> = numbers.iter().flat_map(|value| value.to_le_bytes()).collect();
            variable(name, dims, 0, &bytes)
        });
        let mut stored: Vec<_> = stored.collect();
        for heads in ["encoder/num_heads", "decoder/num_heads"].into_iter().filter(|heads| *heads != name) {
            stored.push(variable(heads, &[], 2, &[HEADS as u8, 0]));
        }
        stored.push(variable(name, dims, ty, value));
        load(file(&stored, &[]), 1).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let assert_contains = |found: String, expected: &str| {
        assert!(found.contains(expected), "{found:?} does not say {expected:?}")
    };
    assert_contains(of("encoder/activation", &[], 1, &[0]), "encoder/activation is 0, 3 is served");
    assert_contains(of("decoder/pre_norm", &[], 1, &[0]), "decoder/pre_norm is 0");
    assert_contains(of("encoder/num_heads", &[], 2, &[3, 0]), "encoder/num_heads is 3");
    assert_contains(of("encoder/num_heads", &[], 2, &[0, 0]), "encoder/num_heads is 0");
    assert_contains(of("encoder/conv1/bias", &[4], 0, &[0; 16]), "encoder/conv1/bias is [4]");
    assert_contains(of("encoder/conv1/bias", &[WIDTH], 1, &[0; WIDTH]), "encoder/conv1/bias is of I8");
    let not_numbers = f32::NAN.to_le_bytes().repeat(WIDTH);
    assert_contains(
        of("encoder/conv1/bias", &[WIDTH], 0, &not_numbers),
        "value 0 of encoder/conv1/bias is not a number",
    );
    assert_contains(of("encoder/layer_0/ffn/linear_0/weight", &[2], 0, &[0; 8]), "must have 2 dimensions");
    assert_contains(of("encoder/conv1/weight", &[1, 1, 1], 0, &[0; 4]), "1 dimensions, 16 to 8192");
}
