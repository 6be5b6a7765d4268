//! Towers in f64, written after the published models, on the names of their checkpoints.

use serde_json::Value as Json;
use std::collections::BTreeMap;

pub(super) type Rows = Vec<Vec<f64>>;

/// Tensors by name with their shapes.
#[derive(Default)]
pub(super) struct Weights {
    pub(super) tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    seed: u64,
}

impl Weights {
    /// Values in -1 to 1.
    pub(super) fn random(&mut self, count: usize) -> Vec<f32> {
        let mut draw = || {
            self.seed =
                self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.seed >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| draw()).collect()
    }

    pub(super) fn put(&mut self, name: impl Into<String>, shape: &[usize]) {
        let mut values = self.random(shape.iter().product());
        let width = shape[1..].iter().product::<usize>().max(1) as f32;
        values.iter_mut().for_each(|value| *value *= 1.5 / width.sqrt());
        self.tensors.insert(name.into(), (shape.to_vec(), values));
    }

    /// A matrix with its bias.
    pub(super) fn linear(&mut self, stem: &str, rows: usize, cols: usize) {
        self.put(format!("{stem}.weight"), &[rows, cols]);
        self.put(format!("{stem}.bias"), &[rows]);
    }

    pub(super) fn norm(&mut self, stem: &str, width: usize) {
        self.put(format!("{stem}.weight"), &[width]);
        self.put(format!("{stem}.bias"), &[width]);
    }

    fn get(&self, name: &str) -> Vec<f64> {
        let (_, values) = self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        values.iter().copied().map(f64::from).collect()
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn apply(&self, stem: &str, rows: &Rows) -> Rows {
        let weight = self.get(&format!("{stem}.weight"));
        let bias = format!("{stem}.bias");
        let bias = self.has(&bias).then(|| self.get(&bias));
        let of_row = |row: &Vec<f64>| {
            let product = |(number, weight): (usize, &[f64])| {
                let sum: f64 = weight.iter().zip(row).map(|(weight, value)| weight * value).sum();
                sum + bias.as_ref().map_or(0.0, |bias| bias[number])
            };
            weight.chunks(row.len()).enumerate().map(product).collect()
        };
        rows.iter().map(of_row).collect()
    }

    fn layer_norm(&self, stem: &str, rows: &Rows, eps: f64) -> Rows {
        let (weight, bias) = (self.get(&format!("{stem}.weight")), self.get(&format!("{stem}.bias")));
        let of_row = |row: &Vec<f64>| {
            let mean = row.iter().sum::<f64>() / row.len() as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
            let normed = row.iter().map(|x| (x - mean) / (variance + eps).sqrt());
            normed.zip(&weight).zip(&bias).map(|((x, weight), bias)| x * weight + bias).collect()
        };
        rows.iter().map(of_row).collect()
    }

    fn rms_norm(&self, stem: &str, rows: &Rows, eps: f64, one: f64) -> Rows {
        let weight = self.get(&format!("{stem}.weight"));
        let of_row = |row: &Vec<f64>| {
            let square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            row.iter().zip(&weight).map(|(x, weight)| x / (square + eps).sqrt() * (one + weight)).collect()
        };
        rows.iter().map(of_row).collect()
    }
}

fn each(rows: &Rows, function: impl Fn(f64) -> f64) -> Rows {
    rows.iter().map(|row| row.iter().copied().map(&function).collect()).collect()
}

fn sum(first: &Rows, second: &Rows) -> Rows {
    let add =
        |(first, second): (&Vec<f64>, &Vec<f64>)| first.iter().zip(second).map(|(a, b)| a + b).collect();
    first.iter().zip(second).map(add).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The error function by its series, for arguments of a few units.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

fn gelu(x: f64) -> f64 {
    if x.abs() > 6.0 { x.max(0.0) } else { 0.5 * x * (1.0 + erf(x / 2f64.sqrt())) }
}

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

/// Attention of rows `[heads * width]`; row `i` sees row `j` if `sees(i, j)`.
fn attend(q: &Rows, k: &Rows, v: &Rows, heads: usize, sees: &dyn Fn(usize, usize) -> bool) -> Rows {
    let width = q[0].len() / heads;
    let of_row = |(i, q): (usize, &Vec<f64>)| {
        (0..heads)
            .flat_map(|head| {
                let part = head * width..(head + 1) * width;
                let seen: Vec<usize> = (0..k.len()).filter(|&j| sees(i, j)).collect();
                let score = |&j: &usize| {
                    let product: f64 =
                        q[part.clone()].iter().zip(&k[j][part.clone()]).map(|(q, k)| q * k).sum();
                    (product / (width as f64).sqrt()).exp()
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let total: f64 = scores.iter().sum();
                let mut mixed = vec![0.0; width];
                for (&j, score) in seen.iter().zip(&scores) {
                    mixed.iter_mut().zip(&v[j][part.clone()]).for_each(|(out, v)| *out += score / total * v);
                }
                mixed
            })
            .collect()
    };
    q.iter().enumerate().map(of_row).collect()
}

fn count(settings: &Json, key: &str) -> usize {
    settings[key].as_u64().unwrap_or_else(|| panic!("no {key}")) as usize
}

/// Patches `[colours, lines, pixels]` of a picture, line by line.
fn patches(picture: &[f32], side: usize, patch: usize) -> Rows {
    let grid = side / patch;
    let of_patch = |number: usize| {
        let (top, left) = (number / grid * patch, number % grid * patch);
        let value = |at: usize| {
            let (colour, line, column) = (at / patch / patch, at / patch % patch, at % patch);
            f64::from(picture[(colour * side + top + line) * side + left + column])
        };
        (0..3 * patch * patch).map(value).collect()
    };
    (0..grid * grid).map(of_patch).collect()
}

/// The hidden states of a tower of the class CLIP or SigLIP under `stem`, without the last norm.
fn clip(
    weights: &Weights,
    stem: &str,
    vision: &Json,
    eps: f64,
    act: fn(f64) -> f64,
    picture: &[f32],
) -> Vec<Rows> {
    let name = |rest: &str| format!("{stem}.{rest}");
    let mut x = patches(picture, count(vision, "image_size"), count(vision, "patch_size"));
    x = weights.apply(&name("embeddings.patch_embedding"), &x);
    if weights.has(&name("embeddings.class_embedding")) {
        x.insert(0, weights.get(&name("embeddings.class_embedding")));
    }
    let table = weights.get(&name("embeddings.position_embedding.weight"));
    let positions: Rows = table.chunks(x[0].len()).map(<[f64]>::to_vec).collect();
    assert_eq!(positions.len(), x.len());
    x = sum(&x, &positions);
    if weights.has(&name("pre_layrnorm.weight")) {
        x = weights.layer_norm(&name("pre_layrnorm"), &x, eps);
    }
    let mut states = vec![x];
    for layer in 0..count(vision, "num_hidden_layers") {
        let name = |rest: &str| name(&format!("encoder.layers.{layer}.{rest}"));
        let x = &states[layer];
        let normed = weights.layer_norm(&name("layer_norm1"), x, eps);
        let [q, k, v] =
            ["q", "k", "v"].map(|part| weights.apply(&name(&format!("self_attn.{part}_proj")), &normed));
        let mixed = attend(&q, &k, &v, count(vision, "num_attention_heads"), &|_, _| true);
        let x = sum(x, &weights.apply(&name("self_attn.out_proj"), &mixed));
        let normed = weights.layer_norm(&name("layer_norm2"), &x, eps);
        let inner = each(&weights.apply(&name("mlp.fc1"), &normed), act);
        states.push(sum(&x, &weights.apply(&name("mlp.fc2"), &inner)));
    }
    states
}

pub(super) fn llava(weights: &Weights, config: &Json, picture: &[f32]) -> Rows {
    let act = |x: f64| x * sigmoid(1.702 * x);
    let states = clip(weights, "vision_tower.vision_model", &config["vision_config"], 1e-5, act, picture);
    let chosen: Vec<i64> = match &config["vision_feature_layer"] {
        Json::Array(list) => list.iter().map(|layer| layer.as_i64().unwrap()).collect(),
        single => vec![single.as_i64().unwrap()],
    };
    let state =
        |layer: i64| if layer < 0 { states.len() - layer.unsigned_abs() as usize } else { layer as usize };
    let class = usize::from(config["vision_feature_select_strategy"] == "default");
    let row = |row: usize| chosen.iter().flat_map(|layer| states[state(*layer)][row].clone()).collect();
    let rows: Rows = (class..states[0].len()).map(row).collect();
    let inner = each(&weights.apply("multi_modal_projector.linear_1", &rows), gelu);
    weights.apply("multi_modal_projector.linear_2", &inner)
}

/// Blocks of `side * side` patches of a square grid: their places, line by line.
fn blocks(patches: usize, side: usize) -> Vec<Vec<usize>> {
    let grid = patches.isqrt();
    let block = |number: usize| {
        let (top, left) = (number / (grid / side) * side, number % (grid / side) * side);
        (0..side * side).map(|at| (top + at / side) * grid + left + at % side).collect()
    };
    (0..patches / side / side).map(block).collect()
}

pub(super) fn gemma3(weights: &Weights, config: &Json, picture: &[f32]) -> Rows {
    let vision = &config["vision_config"];
    let states = clip(weights, "vision_tower.vision_model", vision, 1e-6, gelu_tanh, picture);
    let rows = weights.layer_norm("vision_tower.vision_model.post_layernorm", states.last().unwrap(), 1e-6);
    let side = (rows.len() / count(config, "mm_tokens_per_image")).isqrt();
    let mean = |block: Vec<usize>| {
        let value = |at: usize| block.iter().map(|row| rows[*row][at]).sum::<f64>() / block.len() as f64;
        (0..rows[0].len()).map(value).collect()
    };
    let pooled: Rows = blocks(rows.len(), side).into_iter().map(mean).collect();
    let normed = weights.rms_norm("multi_modal_projector.mm_soft_emb_norm", &pooled, 1e-6, 1.0);
    let matrix = weights.get("multi_modal_projector.mm_input_projection_weight");
    let out = matrix.len() / normed[0].len();
    let of_row = |row: &Vec<f64>| {
        (0..out)
            .map(|column| row.iter().enumerate().map(|(at, x)| x * matrix[at * out + column]).sum())
            .collect()
    };
    normed.iter().map(of_row).collect()
}

pub(super) fn smolvlm(weights: &Weights, config: &Json, picture: &[f32]) -> Rows {
    let states = clip(weights, "model.vision_model", &config["vision_config"], 1e-6, gelu_tanh, picture);
    let rows = weights.layer_norm("model.vision_model.post_layernorm", states.last().unwrap(), 1e-6);
    let join = |block: Vec<usize>| block.into_iter().flat_map(|row| rows[row].clone()).collect();
    let shuffled = blocks(rows.len(), count(config, "scale_factor")).into_iter().map(join).collect();
    weights.apply("model.connector.modality_projection.proj", &shuffled)
}

/// A picture of Qwen's towers: the line and column of each patch.
struct Grid {
    places: Vec<(usize, usize)>,
}

impl Grid {
    fn new(height: usize, width: usize, merge: usize) -> Self {
        let mut places = Vec::new();
        for block in 0..height * width / merge / merge {
            let (top, left) = (block / (width / merge) * merge, block % (width / merge) * merge);
            places.extend((0..merge * merge).map(|at| (top + at / merge, left + at % merge)));
        }
        Self { places }
    }
}

/// The hidden states behind the layers of Qwen's towers.
fn qwen(
    weights: &Weights,
    vision: &Json,
    (grid, mut x): (&Grid, Rows),
    norm: &dyn Fn(&str, &Rows) -> Rows,
    mlp: &dyn Fn(usize, &Rows) -> Rows,
    sees: &dyn Fn(usize, usize, usize) -> bool,
) -> Vec<Rows> {
    let heads = count(vision, "num_heads");
    let rotate = |rows: Rows| -> Rows {
        let of_row = |(row, place): (Vec<f64>, &(usize, usize))| {
            let width = row.len() / heads;
            let rotated = row.chunks(width).flat_map(|head| {
                let angle = |pair: usize| {
                    let quarter = width / 4;
                    let position = if pair < quarter { place.0 } else { place.1 };
                    position as f64 / 10_000f64.powf((pair % quarter) as f64 / quarter as f64)
                };
                let half = width / 2;
                let value = |at: usize| {
                    let (sin, cos) = angle(at % half).sin_cos();
                    let other = if at < half { -head[at + half] } else { head[at - half] };
                    head[at] * cos + other * sin
                };
                (0..width).map(value).collect::<Vec<f64>>()
            });
            rotated.collect()
        };
        rows.into_iter().zip(&grid.places).map(of_row).collect()
    };
    let mut states = Vec::new();
    for layer in 0..count(vision, "depth") {
        let name = |rest: &str| format!("visual.blocks.{layer}.{rest}");
        let fused = weights.apply(&name("attn.qkv"), &norm(&name("norm1"), &x));
        let width = x[0].len();
        let part = |number: usize| -> Rows {
            fused.iter().map(|row| row[number * width..(number + 1) * width].to_vec()).collect()
        };
        let sees = |i: usize, j: usize| sees(layer, i, j);
        let mixed = attend(&rotate(part(0)), &rotate(part(1)), &part(2), heads, &sees);
        x = sum(&x, &weights.apply(&name("attn.proj"), &mixed));
        x = sum(&x, &mlp(layer, &norm(&name("norm2"), &x)));
        states.push(x.clone());
    }
    states
}

fn rows_of(pixels: &[f32], width: usize) -> Rows {
    pixels.chunks(width).map(|row| row.iter().copied().map(f64::from).collect()).collect()
}

fn joined(rows: &Rows, count: usize) -> Rows {
    rows.chunks(count).map(<[Vec<f64>]>::concat).collect()
}

/// One frame of `height * width` patches.
pub(super) fn qwen2_5(
    weights: &Weights,
    config: &Json,
    pixels: &[f32],
    (height, width): (usize, usize),
) -> Rows {
    let vision = &config["vision_config"];
    let merge = count(vision, "spatial_merge_size");
    let grid = Grid::new(height, width, merge);
    let x = weights.apply("visual.patch_embed.proj", &rows_of(pixels, pixels.len() / height / width));
    let window = count(vision, "window_size") / count(vision, "patch_size");
    let whole: Vec<u64> = vision["fullatt_block_indexes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| layer.as_u64().unwrap())
        .collect();
    let of_window = |row: usize| (grid.places[row].0 / window, grid.places[row].1 / window);
    let sees = |layer: usize, i, j| whole.contains(&(layer as u64)) || of_window(i) == of_window(j);
    let norm = |stem: &str, rows: &Rows| weights.rms_norm(stem, rows, 1e-6, 0.0);
    let mlp = |layer: usize, rows: &Rows| {
        let [gate, up] =
            ["gate", "up"].map(|part| weights.apply(&format!("visual.blocks.{layer}.mlp.{part}_proj"), rows));
        let product = |(gate, up): (&Vec<f64>, &Vec<f64>)| {
            gate.iter().zip(up).map(|(g, u)| g * sigmoid(*g) * u).collect()
        };
        let inner = gate.iter().zip(&up).map(product).collect();
        weights.apply(&format!("visual.blocks.{layer}.mlp.down_proj"), &inner)
    };
    let states = qwen(weights, vision, (&grid, x), &norm, &mlp, &sees);
    let normed = norm("visual.merger.ln_q", states.last().unwrap());
    let inner = each(&weights.apply("visual.merger.mlp.0", &joined(&normed, merge * merge)), gelu);
    weights.apply("visual.merger.mlp.2", &inner)
}

/// One frame: its rows, then those of each further merger.
pub(super) fn qwen3(
    weights: &Weights,
    config: &Json,
    pixels: &[f32],
    (height, width): (usize, usize),
) -> Vec<Rows> {
    let vision = &config["vision_config"];
    let merge = count(vision, "spatial_merge_size");
    let grid = Grid::new(height, width, merge);
    let x = weights.apply("model.visual.patch_embed.proj", &rows_of(pixels, pixels.len() / height / width));
    let table = weights.get("model.visual.pos_embed.weight");
    let side = count(vision, "num_position_embeddings").isqrt();
    let at = |place: usize, count: usize| place as f64 * (side - 1) as f64 / (count - 1) as f64;
    let position = |&(line, column): &(usize, usize)| -> Vec<f64> {
        let (down, right) = (at(line, height), at(column, width));
        let hidden = table.len() / side / side;
        let value = |number: usize| {
            let mut sum = 0.0;
            for above in 0..side {
                for left in 0..side {
                    let near = |place: f64, line: usize| (1.0 - (place - line as f64).abs()).max(0.0);
                    sum += near(down, above)
                        * near(right, left)
                        * table[(above * side + left) * hidden + number];
                }
            }
            sum
        };
        (0..hidden).map(value).collect()
    };
    let x = sum(&x, &grid.places.iter().map(position).collect());
    let renamed = |stem: &str| stem.replacen("visual.", "model.visual.", 1);
    let norm = |stem: &str, rows: &Rows| weights.layer_norm(&renamed(stem), rows, 1e-6);
    let mlp = |layer: usize, rows: &Rows| {
        let name = |part: &str| format!("model.visual.blocks.{layer}.mlp.{part}");
        weights.apply(&name("linear_fc2"), &each(&weights.apply(&name("linear_fc1"), rows), gelu_tanh))
    };
    let short = Weights {
        tensors: weights
            .tensors
            .iter()
            .map(|(name, tensor)| (name.replacen("model.visual.", "visual.", 1), tensor.clone()))
            .collect(),
        seed: 0,
    };
    let states = qwen(&short, vision, (&grid, x), &norm, &mlp, &|_, _, _| true);
    let merger = |stem: &str, rows: &Rows| {
        let inner = each(&weights.apply(&format!("{stem}.linear_fc1"), rows), gelu);
        weights.apply(&format!("{stem}.linear_fc2"), &inner)
    };
    let normed = norm("visual.merger.norm", states.last().unwrap());
    let mut results = vec![merger("model.visual.merger", &joined(&normed, merge * merge))];
    for (number, layer) in vision["deepstack_visual_indexes"].as_array().unwrap().iter().enumerate() {
        let stem = format!("model.visual.deepstack_merger_list.{number}");
        let rows = joined(&states[layer.as_u64().unwrap() as usize], merge * merge);
        results.push(merger(&stem, &weights.layer_norm(&format!("{stem}.norm"), &rows, 1e-6)));
    }
    results
}
