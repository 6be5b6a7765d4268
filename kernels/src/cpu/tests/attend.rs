//! Tests from projections to the result of attention, through the cache.

use super::*;
use crate::backend::{BlockTable, KvType, KvWrite, RowPlaces, StepSequence};
use crate::ops::{RopeParams, RopeStyle};
use crate::reference::attention::AttentionHead;
use crate::reference::rows as reference;
use std::ops::Range;

const BLOCK_TOKENS: usize = 16;
const POSITIONS: usize = 45;
const EPS: f32 = 1e-5;
/// Block numbers of one sequence.
const BLOCKS: [u32; 3] = [2, 0, 1];

#[derive(Clone, Copy)]
struct Layer {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    window: Option<usize>,
    causal: bool,
    /// Values are the keys before norm and rope.
    shared_projection: bool,
    sinks: bool,
}

const FULL: Layer = Layer {
    heads: 4,
    kv_heads: 2,
    dim: 16,
    window: None,
    causal: true,
    shared_projection: false,
    sinks: false,
};
const WINDOWED: Layer = Layer { heads: 3, kv_heads: 1, dim: 40, window: Some(7), ..FULL };

/// Weights of a layer and its projections of every position.
struct Input {
    layer: Layer,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    sinks: Vec<f32>,
    axes: Option<Vec<u8>>,
    /// Of each row, on each axis.
    positions: Vec<[usize; 3]>,
}

fn rope() -> RopeParams {
    let style = RopeStyle::Half;
    RopeParams { style, n_rot: 16, base: 1e4, freq_scale: 1.0, factors: None, magnitude: 1.3, axes: None }
}

impl Input {
    fn new(layer: Layer, seed: u64) -> Self {
        let mut random = Random(seed);
        let kv = POSITIONS * layer.kv_heads * layer.dim;
        Self {
            layer,
            q: random.values(POSITIONS * layer.heads * layer.dim),
            k: random.values(kv),
            v: random.values(kv),
            q_norm: random.values(layer.dim),
            k_norm: random.values(layer.dim),
            sinks: random.values(layer.heads).iter().map(|x| 3.0 * x).collect(),
            axes: None,
            positions: (0..POSITIONS).map(|position| [position; 3]).collect(),
        }
    }

    fn shape(&self) -> KvShape {
        let Layer { heads, kv_heads, dim, window, causal, .. } = self.layer;
        KvShape {
            block_tokens: BLOCK_TOKENS,
            kv_heads,
            head_dim: dim,
            v_head_dim: dim,
            latent: false,
            heads,
            kv_type: KvType::F32.into(),
            window,
            causal,
        }
    }

    /// The result at one position that sees `keys` of `cache`.
    fn reference(&self, cache: &Self, position: usize, keys: Range<usize>) -> Vec<f64> {
        let Layer { heads, dim, .. } = self.layer;
        let kv_heads = cache.layer.kv_heads;
        let f32s = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<f32>>();
        let head = |x: &[f32], heads: usize, position: usize, head: usize| {
            x[(position * heads + head) * dim..][..dim].to_vec()
        };
        let rotated = |x: Vec<f32>, weight: &[f32], position: usize| {
            let params = RopeParams { axes: cache.axes.clone(), ..rope() };
            let normed = f32s(reference::rms_norm(&x, Some(weight), EPS));
            f32s(reference::rope_on_axes(&params, cache.positions[position], &normed))
        };
        (0..heads)
            .flat_map(|h| {
                let kv_head = h / (heads / kv_heads);
                let of = |p: usize| {
                    let k = head(&cache.k, kv_heads, p, kv_head);
                    let v = if cache.layer.shared_projection {
                        k.clone()
                    } else {
                        head(&cache.v, kv_heads, p, kv_head)
                    };
                    let v = f32s(reference::rms_norm(&v, None, EPS));
                    (rotated(k, &cache.k_norm, p), v)
                };
                let pairs: Vec<_> = keys.clone().map(of).collect();
                AttentionHead {
                    q: &rotated(head(&self.q, heads, position, h), &self.q_norm, position),
                    keys: &pairs.iter().map(|(k, v)| (&k[..], &v[..])).collect::<Vec<_>>(),
                    scale: 0.5,
                    softcap: None,
                    sink: self.layer.sinks.then(|| self.sinks[h]),
                }
                .run()
            })
            .collect()
    }
}

/// A layer on a device.
struct Placed {
    id: KvLayerId,
    q_norm: Norm,
    k_norm: Norm,
    sinks: Option<VectorId>,
    rope: RopeId,
}

impl Placed {
    /// Declares the layer in a group.
    fn new(backend: &mut CpuBackend, input: &Input, group: usize) -> Self {
        let id = backend.create_kv_layer(group, input.shape(), 0).unwrap();
        let width = input.layer.dim;
        let mut norm = |weight: &[f32]| {
            let weight = Some(backend.create_vector(weight).unwrap());
            Norm { rms: true, weight, bias: None, eps: EPS, width }
        };
        let (q_norm, k_norm) = (norm(&input.q_norm), norm(&input.k_norm));
        let sinks = input.layer.sinks.then(|| backend.create_vector(&input.sinks).unwrap());
        let RopeParams { n_rot, base, freq_scale, factors, magnitude, .. } = rope();
        let axes = input.axes.clone();
        let source = RopeSource { interleaved: false, n_rot, base, freq_scale, factors, magnitude, axes };
        Self { id, q_norm, k_norm, sinks, rope: backend.create_rope(source).unwrap() }
    }

    /// Writes keys and values of some positions if `writes`, then computes attention.
    fn run(&self, backend: &mut CpuBackend, input: &Input, rows: Range<usize>, writes: bool) -> Vec<f32> {
        let Layer { heads, kv_heads, dim, shared_projection, .. } = input.layer;
        let row_slice = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
        let q = buffer(backend, heads * dim, &row_slice(&input.q, heads * dim));
        let kv = writes.then(|| {
            let k = buffer(backend, kv_heads * dim, &row_slice(&input.k, kv_heads * dim));
            let v = match shared_projection {
                true => k,
                false => buffer(backend, kv_heads * dim, &row_slice(&input.v, kv_heads * dim)),
            };
            let v_norm = Norm { rms: true, weight: None, bias: None, eps: EPS, width: dim };
            KvWrite { k, v, k_norm: Some(self.k_norm), v_norm: Some(v_norm) }
        });
        let (q_norm, rope) = (Some(self.q_norm), Some(self.rope));
        backend.qkv(&QkvOp { q, q_norm, kv, rope, q_growth: None, layer: self.id }).unwrap();
        let out = backend.create_buffer(rows.len(), heads * dim).unwrap();
        let (sinks, layer) = (self.sinks, self.id);
        backend.attention(&AttentionOp { q, out, scale: 0.5, softcap: None, sinks, layer }).unwrap();
        values(backend, out)
    }
}

/// Creates an arena with blocks for these layers, each in a separate group, one after the other.
fn arena(backend: &mut CpuBackend, inputs: &[&Input]) -> Vec<Vec<u32>> {
    let bytes: Vec<usize> =
        inputs.iter().map(|input| backend.kv_block_bytes(input.shape()).unwrap()).collect();
    backend.create_kv_arena(bytes.iter().sum::<usize>() * BLOCKS.len(), &bytes).unwrap();
    let mut start = 0;
    bytes
        .iter()
        .map(|bytes| {
            let units = (bytes / 64) as u32;
            let table = BLOCKS.map(|block| start + block * units).to_vec();
            start += units * BLOCKS.len() as u32;
            table
        })
        .collect()
}

fn begin(backend: &mut CpuBackend, tables: &[Vec<u32>], rows: Range<usize>) -> Result<(), Error> {
    let tables: Vec<_> = tables.iter().map(|table| vec![BlockTable::Paged(table)]).collect();
    let sequence = StepSequence { rows: 0..rows.len(), context: rows.start, segment_start: None };
    let tokens = vec![0; rows.len()];
    backend.begin_step(&StepInput { tokens: &tokens, sequences: &[sequence], tables: &tables, states: &[] })
}

/// Steps of one sequence: a prefill, a decode, another chunk.
const CHUNKS: [Range<usize>; 3] = [0..20, 20..21, 21..POSITIONS];

fn seen(layer: Layer, position: usize) -> Range<usize> {
    layer.window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1
}

#[test]
fn layers_of_two_head_widths_live_in_two_groups() {
    let full = Input::new(Layer { sinks: true, ..FULL }, 1);
    let windowed = Input::new(Layer { shared_projection: true, ..WINDOWED }, 2);
    for input in [0, 1] {
        let out = on_every_isa(ActivationMode::F32, |backend| {
            let inputs = [&full, &windowed];
            let tables = arena(backend, &inputs);
            let placed = [0, 1].map(|group| Placed::new(backend, inputs[group], group));
            let mut out = Vec::new();
            for chunk in CHUNKS {
                begin(backend, &tables, chunk.clone()).unwrap();
                let results = [0, 1].map(|i| placed[i].run(backend, inputs[i], chunk.clone(), true));
                out.extend_from_slice(&results[input]);
            }
            out
        });
        let input = [&full, &windowed][input];
        let expected: Vec<f64> =
            (0..POSITIONS).flat_map(|p| input.reference(input, p, seen(input.layer, p))).collect();
        assert_close(&out, &expected, 3e-6);
    }
}

#[test]
fn a_layer_may_read_the_cache_of_another_one() {
    // With the writer's handle if the number of query heads is equal; with a separate handle at the same
    // offset if it is not.
    let writer = Input::new(FULL, 3);
    let same = Input::new(Layer { sinks: true, ..FULL }, 4);
    let more = Input::new(Layer { heads: 6, ..FULL }, 5);
    for reader in [&same, &more] {
        let out = on_every_isa(ActivationMode::F32, |backend| {
            let tables = arena(backend, &[&writer]);
            let placed = Placed::new(backend, &writer, 0);
            let mut read = Placed::new(backend, reader, 0);
            if reader.layer.heads == writer.layer.heads {
                read.id = placed.id;
            }
            let mut out = Vec::new();
            for chunk in CHUNKS {
                begin(backend, &tables, chunk.clone()).unwrap();
                placed.run(backend, &writer, chunk.clone(), true);
                let mut before = vec![0; backend.memory().kv];
                backend.read_arena(0, &mut before).unwrap();
                out.extend(read.run(backend, reader, chunk, false));
                let mut after = vec![0; before.len()];
                backend.read_arena(0, &mut after).unwrap();
                assert_eq!(after, before);
            }
            out
        });
        let expected: Vec<f64> =
            (0..POSITIONS).flat_map(|p| reader.reference(&writer, p, seen(FULL, p))).collect();
        assert_close(&out, &expected, 3e-6);
    }
}

#[test]
fn without_causality_every_row_sees_the_whole_sequence_or_what_is_around_it() {
    for window in [None, Some(1), Some(5), Some(POSITIONS + 3)] {
        let input = Input::new(Layer { causal: false, window, ..FULL }, 6);
        let out = on_every_isa(ActivationMode::F32, |backend| {
            let tables = arena(backend, &[&input]);
            let placed = Placed::new(backend, &input, 0);
            begin(backend, &tables, 0..POSITIONS).unwrap();
            placed.run(backend, &input, 0..POSITIONS, true)
        });
        let reach = window.unwrap_or(POSITIONS);
        let around = |p: usize| (p + 1).saturating_sub(reach)..(p + reach).min(POSITIONS);
        let expected: Vec<f64> = (0..POSITIONS).flat_map(|p| input.reference(&input, p, around(p))).collect();
        assert_close(&out, &expected, 3e-6);
    }
    let input = Input::new(Layer { causal: false, ..FULL }, 6);
    let mut backend = device(Isa::detect(), ActivationMode::F32, 1);
    let tables = arena(&mut backend, &[&input]);
    Placed::new(&mut backend, &input, 0);
    let partial = begin(&mut backend, &tables, 1..POSITIONS);
    assert_eq!(partial, Err(Error::PartialSequence { sequence: 0, position: 0 }));
    for causal in [false, true] {
        let window = KvShape { window: Some(0), causal, ..input.shape() };
        assert_eq!(backend.create_kv_layer(0, window, 0), Err(Error::EmptyWindow));
    }
}

#[test]
fn rows_have_positions_on_axes_and_spans_for_one_step() {
    let pairs = 8;
    let mut input = Input::new(WINDOWED, 8);
    input.axes = Some((0..pairs).map(|pair| pair % 3).collect());
    let axes: Vec<[u32; 3]> = (0..POSITIONS as u32).map(|p| [p / 2, 300 - p, p % 7]).collect();
    input.positions = axes.iter().map(|axes| axes.map(|p| p as usize)).collect();
    let span = 9..30;
    let spans: Vec<(u32, u32)> = (0..POSITIONS)
        .map(|p| if span.contains(&p) { (span.start as u32, span.end as u32) } else { (0, 0) })
        .collect();
    let out = on_every_isa(ActivationMode::F32, |backend| {
        let tables = arena(backend, &[&input]);
        let placed = Placed::new(backend, &input, 0);
        let mut out = Vec::new();
        for chunk in [0..30, 30..31, 31..POSITIONS] {
            let (axes, spans) = (&axes[chunk.clone()], &spans[chunk.clone()]);
            backend.place_rows(&RowPlaces { axes, spans }).unwrap();
            begin(backend, &tables, chunk.clone()).unwrap();
            out.extend(placed.run(backend, &input, chunk, true));
        }
        out
    });
    let seen = |p: usize| match span.contains(&p) {
        true => span.start.min(seen(WINDOWED, p).start)..span.end,
        false => seen(WINDOWED, p),
    };
    let expected: Vec<f64> = (0..POSITIONS).flat_map(|p| input.reference(&input, p, seen(p))).collect();
    assert_close(&out, &expected, 3e-6);
    let mut backend = device(Isa::detect(), ActivationMode::F32, 1);
    let tables = arena(&mut backend, &[&input]);
    Placed::new(&mut backend, &input, 0);
    let mut refused = |places| {
        backend.place_rows(&places).unwrap();
        let refused = begin(&mut backend, &tables, 0..20).is_err();
        // The step after it has ordinary places.
        refused && begin(&mut backend, &tables, 0..20).is_ok()
    };
    assert!(refused(RowPlaces { axes: &axes[..19], spans: &[] }));
    assert!(refused(RowPlaces { axes: &[], spans: &spans[..19] }));
    assert!(refused(RowPlaces { axes: &[], spans: &spans[..20] }));
}

#[test]
fn head_norms_and_sinks_of_wrong_shapes_are_refused() {
    let input = Input::new(FULL, 7);
    let mut backend = device(Isa::detect(), ActivationMode::F32, 1);
    let tables = arena(&mut backend, &[&input]);
    let placed = Placed::new(&mut backend, &input, 0);
    begin(&mut backend, &tables, 0..POSITIONS).unwrap();
    let q = buffer(&mut backend, 64, &input.q);
    let norm = |norm| QkvOp { q, q_norm: Some(norm), kv: None, rope: None, q_growth: None, layer: placed.id };
    let wrong = Norm { width: 15, ..placed.q_norm };
    assert!(matches!(backend.qkv(&norm(wrong)), Err(Error::Length { .. })));
    let wrong = Norm { rms: false, ..placed.q_norm };
    assert!(matches!(backend.qkv(&norm(wrong)), Err(Error::Unsupported { .. })));
    let out = backend.create_buffer(POSITIONS, 64).unwrap();
    let sinks = Some(backend.create_vector(&[0.0; 3]).unwrap());
    let op = AttentionOp { q, out, scale: 1.0, softcap: None, sinks, layer: placed.id };
    assert!(matches!(backend.attention(&op), Err(Error::Length { what: "attention sinks", .. })));
}
