//! Cases of operations without a cache.

use super::{Inputs, Output};
use kernels::Error;
use kernels::backend::{
    AdapterId, Backend, BufferId, EmbedIndex, EmbedOp, ExpertGateUp, GateActivation, GateOp, GatedNormOp,
    HeadMatmulOp, HeadPart, LowRankSource, MatmulJob, MatrixId, MatrixSource, MoeOp, Norm, Selection,
    StepInput, StepSequence,
};
use kernels::quant::GgmlType;
use std::ops::Range;

/// Tolerance of sums of products in another order.
const SUMS: f64 = 2e-5;
/// Tolerance of sums of values that are rounded to four binary digits on the device alone, to a sixteenth at most,
/// after others that are rounded to 8 bits.
const ROUNDED: f64 = 8e-2;
/// The same with two binary digits: a quarter at most.
const ROUNDED_TO_4_BITS: f64 = 0.3;
/// Tolerance of equal operations with sums over a row in another order.
const ROWS: f64 = 1e-5;
/// Tolerance of sums with weights that are rounded to bf16.
const BF16_WEIGHTS: f64 = 4e-3;

impl Inputs<'_> {
    fn matrix(&mut self, ty: GgmlType, rows: usize, cols: usize, experts: usize) -> Result<MatrixId, Error> {
        let bytes = self.random.weights(ty.row_bytes(cols)? * rows * experts);
        self.backend.create_matrix(MatrixSource { ggml_type: ty.id(), rows, cols, experts, bytes: &bytes })
    }

    /// Begins a step of sequences with these numbers of rows.
    fn step(&mut self, lengths: &[usize], tokens: &[u32], segment_start: Option<usize>) -> Result<(), Error> {
        let mut start = 0;
        let sequence = |rows: &usize| {
            let rows = start..start + rows;
            start = rows.end;
            StepSequence { rows, context: 0, segment_start }
        };
        let sequences: Vec<_> = lengths.iter().map(sequence).collect();
        self.backend.begin_step(&StepInput { tokens, sequences: &sequences, tables: &[], states: &[] })
    }
}

/// Products of one type: few rows and more, a prompt with enough outputs for the whole device, ragged
/// sizes, and every option of the epilogue. Also embedding lookups.
pub(super) fn products(inputs: &mut Inputs<'_>, ty: GgmlType, multiprocessors: usize) -> Result<(), Error> {
    let prompt = (70, 64 * multiprocessors - 7, 256);
    for shape in [(1, 40, 512), (3, 33, 256), (6, 32, 256), (9, 64, 768), prompt] {
        product(inputs, ty, shape)?;
    }
    inputs.step(&[3, 2], &[7, 0, 39, 12, 7], Some(2))?;
    let table = inputs.matrix(ty, 40, 256, 1)?;
    let out = inputs.rows(5, 256)?;
    for (index, accumulate) in [(EmbedIndex::Token, false), (EmbedIndex::Position, true)] {
        inputs.backend.embed(&EmbedOp { table, index, scale: 0.75, accumulate, out })?;
        inputs.keep("embed", format!("{ty} by {index:?}"), ROWS, (out, 5, 256))?;
    }
    Ok(())
}

/// Adapters of some rows, one of them on one of two matrices alone, before and after another is loaded in its place.
pub(super) fn adapters(inputs: &mut Inputs<'_>) -> Result<(), Error> {
    let (rows, cols, outputs) = (6, 300, [40, 131]);
    let matrices = [
        inputs.matrix(GgmlType::F32, outputs[0], cols, 1)?,
        inputs.matrix(GgmlType::F32, outputs[1], cols, 1)?,
    ];
    let x = inputs.rows(rows, cols)?;
    let run = |inputs: &mut Inputs<'_>, of_rows: &[(Range<usize>, AdapterId)], what: &str| {
        inputs.backend.use_adapters(of_rows)?;
        inputs.step(&[4, 2], &[0; 6], None)?;
        let plain = inputs.backend.create_buffer(rows, outputs[0])?;
        let added = inputs.rows(rows, outputs[1])?;
        let job = MatmulJob { matrix: matrices[0], out: plain, bias: None, scale: 1.0, accumulate: false };
        let other = MatmulJob { matrix: matrices[1], out: added, bias: None, scale: 0.5, accumulate: true };
        inputs.backend.matmul(x, &[job, other])?;
        inputs.keep("use_adapters", format!("{what}, first matrix"), SUMS, (plain, rows, outputs[0]))?;
        inputs.keep("use_adapters", format!("{what}, second matrix"), SUMS, (added, rows, outputs[1]))
    };
    let load = |inputs: &mut Inputs<'_>, rank: usize, of: Range<usize>| {
        let parts: Vec<_> = of
            .map(|m| (m, inputs.random.values(rank * cols), inputs.random.values(outputs[m] * rank)))
            .collect();
        let sources: Vec<LowRankSource<'_>> = parts
            .iter()
            .map(|(m, a, b)| LowRankSource { matrix: matrices[*m], rank, scale: 0.7, a, b })
            .collect();
        inputs.backend.load_adapter(&sources)
    };
    let first = load(inputs, 4, 0..2)?;
    let second = load(inputs, 33, 1..2)?;
    run(inputs, &[(1..3, second), (5..6, first)], "two")?;
    run(inputs, &[], "none")?;
    inputs.backend.unload_adapter(second);
    let third = load(inputs, 8, 0..1)?;
    run(inputs, &[(0..1, third), (3..5, first)], "another in the place of one")
}

/// Products of a quantised type with f32 activations.
pub(super) fn exact_products(inputs: &mut Inputs<'_>, ty: GgmlType) -> Result<(), Error> {
    product(inputs, ty, (3, 40, 512))
}

/// Products of a type with activations in scaled blocks: one token, few, many, and a prompt. Columns of several
/// segments, and of a part of a unit.
pub(super) fn scaled_products(
    inputs: &mut Inputs<'_>,
    ty: GgmlType,
    multiprocessors: usize,
) -> Result<(), Error> {
    for shape in [(1, 40, 576), (6, 33, 256), (20, 64, 2368), (70, 64 * multiprocessors - 7, 320)] {
        let x = inputs.backend.create_buffer(shape.0, shape.2)?;
        let len = shape.0 * shape.2;
        let values = match ty {
            GgmlType::NVFP4 => inputs.random.nvfp4_values(len),
            _ => inputs.random.mxfp8_values(len),
        };
        inputs.backend.write_rows(x, &values)?;
        product_of(inputs, ty, x, shape)?;
    }
    Ok(())
}

/// Products of a type with bf16 activations: one token, few, many, and a prompt; and each of the first tokens alone.
pub(super) fn bf16_products(
    inputs: &mut Inputs<'_>,
    ty: GgmlType,
    multiprocessors: usize,
) -> Result<(), Error> {
    for (rows, outputs, cols) in
        [(1, 40, 512), (6, 33, 256), (20, 64, 2304), (70, 128 * multiprocessors - 7, 512)]
    {
        let matrix = inputs.matrix(ty, outputs, cols, 1)?;
        let values = inputs.random.mxfp8_values(rows * cols);
        let product = |inputs: &mut Inputs<'_>, values: &[f32]| {
            let rows = values.len() / cols;
            let (x, out) =
                (inputs.backend.create_buffer(rows, cols)?, inputs.backend.create_buffer(rows, outputs)?);
            inputs.backend.write_rows(x, values)?;
            let job = MatmulJob { matrix, out, bias: None, scale: 1.0, accumulate: false };
            inputs.backend.matmul(x, &[job]).map(|()| out)
        };
        let out = product(inputs, &values)?;
        let (mut together, mut alone, mut differing) = (vec![0.0; outputs], vec![0.0; outputs], 0);
        for (row, values) in values.chunks(cols).take(3).enumerate() {
            let one = product(inputs, values)?;
            inputs.backend.read_row(out, row, &mut together)?;
            inputs.backend.read_row(one, 0, &mut alone)?;
            differing += together.iter().zip(&alone).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        }
        let of = format!("{ty} with bf16, {rows} rows, {outputs} x {cols}");
        inputs.keep("matmul", of.clone(), BF16_WEIGHTS, (out, rows, outputs))?;
        let what = format!("{of}: values of rows alone that differ from those of rows together");
        inputs.outputs.push(Output { op: "matmul", what, tolerance: 0.0, values: vec![differing as f32] });
    }
    Ok(())
}

fn product(
    inputs: &mut Inputs<'_>,
    ty: GgmlType,
    (rows, outputs, cols): (usize, usize, usize),
) -> Result<(), Error> {
    let x = inputs.rows(rows, cols)?;
    product_of(inputs, ty, x, (rows, outputs, cols))
}

fn product_of(
    inputs: &mut Inputs<'_>,
    ty: GgmlType,
    x: BufferId,
    (rows, outputs, cols): (usize, usize, usize),
) -> Result<(), Error> {
    let matrix = inputs.matrix(ty, outputs, cols, 1)?;
    let bias = inputs.vector(outputs)?;
    let plain = inputs.backend.create_buffer(rows, outputs)?;
    let added = inputs.rows(rows, outputs)?;
    let job = MatmulJob { matrix, out: plain, bias: None, scale: 1.0, accumulate: false };
    let other = MatmulJob { matrix, out: added, bias: Some(bias), scale: 0.5, accumulate: true };
    inputs.backend.matmul(x, &[job, other])?;
    let activations = &inputs.backend.info().weight_path;
    let of = format!("{ty} with {activations}, {rows} rows, {outputs} x {cols}");
    inputs.keep("matmul", format!("{of}, plain"), SUMS, (plain, rows, outputs))?;
    inputs.keep("matmul", format!("{of}, scaled, biased, added"), SUMS, (added, rows, outputs))
}

/// A norm and a gate that only a product reads.
fn for_products(inputs: &mut Inputs<'_>) -> Result<(), Error> {
    /// A value at the border between two of 8 bits may become either.
    const QUANTS: f64 = 2e-3;
    let (rows, cols, outputs) = (3, 512, 40);
    let matrix = inputs.matrix(GgmlType::Q8_0, outputs, cols, 1)?;
    let weight = Some(inputs.vector(cols)?);
    let norm = Norm { rms: true, weight, bias: None, eps: 1e-5, width: cols };
    let (x, gate, up) = (inputs.rows(rows, cols)?, inputs.rows(rows, cols)?, inputs.rows(rows, cols)?);
    let (normed, out) =
        (inputs.backend.create_buffer(rows, cols)?, inputs.backend.create_buffer(rows, outputs)?);
    let job = MatmulJob { matrix, out, bias: None, scale: 1.0, accumulate: false };
    inputs.backend.norm_for(x, &norm, normed, &[matrix])?;
    inputs.backend.matmul(normed, &[job])?;
    inputs.keep("norm", "for a product", QUANTS, (out, rows, outputs))?;
    let op = GateOp { gate, up: Some(up), up_from: 0, activation: GateActivation::Silu };
    inputs.backend.gate_for(&op, &[matrix])?;
    inputs.backend.matmul(gate, &[job])?;
    inputs.keep("gate", "for a product", SUMS, (out, rows, outputs))
}

pub(super) fn rows(inputs: &mut Inputs<'_>) -> Result<(), Error> {
    for_products(inputs)?;
    const SHAPES: [(usize, usize, usize); 4] = [(1, 576, 576), (5, 96, 32), (3, 40, 40), (2, 2304, 2304)];
    for (rows, cols, width) in SHAPES {
        let (weight, bias) = (inputs.vector(width)?, inputs.vector(width)?);
        let rms = Norm { rms: true, weight: Some(weight), bias: None, eps: 1e-5, width };
        let layer = Norm { rms: false, bias: Some(bias), ..rms };
        let shape = format!("{rows} x {cols}, width {width}");
        let x = inputs.rows(rows, cols)?;
        let out = inputs.backend.create_buffer(rows, cols)?;
        for (name, norm) in [("RMS", rms), ("mean and variance", layer)] {
            inputs.backend.norm(x, &norm, out)?;
            inputs.keep("norm", format!("{name}, {shape}"), ROWS, (out, rows, cols))?;
        }
        inputs.backend.norm(x, &rms, x)?;
        inputs.keep("norm", format!("in place, {shape}"), ROWS, (x, rows, cols))?;
        let y = inputs.rows(rows, cols)?;
        inputs.backend.add(x, y, None, 0.7)?;
        inputs.keep("add", shape.clone(), ROWS, (x, rows, cols))?;
        inputs.backend.add(x, y, Some(&rms), 1.3)?;
        inputs.keep("add", format!("normed, {shape}"), ROWS, (x, rows, cols))?;
        inputs.backend.scale(x, 0.3)?;
        inputs.keep("scale", shape.clone(), ROWS, (x, rows, cols))?;
        inputs.backend.finish_logits(x, 9.0, Some(5.0))?;
        inputs.keep("finish_logits", shape.clone(), ROWS, (x, rows, cols))?;
        let input_rows = inputs.rows(rows, cols)?;
        let picked: Vec<u32> = (0..rows as u32).rev().collect();
        inputs.backend.gather_rows(input_rows, &picked, out)?;
        inputs.keep("gather_rows", shape.clone(), 0.0, (out, rows, cols))?;
        let mut largest = Vec::new();
        inputs.backend.argmax(input_rows, &mut largest)?;
        let values = largest.into_iter().map(|index| index as f32).collect();
        inputs.outputs.push(super::Output { op: "argmax", what: shape.clone(), tolerance: 0.0, values });
        let values = best(inputs.backend, input_rows, rows, cols)?;
        inputs.outputs.push(super::Output { op: "best", what: shape, tolerance: 0.0, values });
    }
    Ok(())
}

/// Returns the sums of the best values of each row and of their indices, because the order of the best
/// values is undefined. Reads whole rows if the backend does not find the best values itself.
fn best(backend: &mut dyn Backend, x: BufferId, rows: usize, cols: usize) -> Result<Vec<f32>, Error> {
    const COUNT: usize = 64;
    let mut all = Vec::new();
    if backend.best_values() == COUNT {
        backend.best(x, &mut all)?;
    } else {
        for row in 0..rows {
            let mut values = vec![0.0; cols];
            backend.read_row(x, row, &mut values)?;
            let mut row: Vec<(u32, f32)> = (0..).zip(values).collect();
            row.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            row.truncate(COUNT);
            all.extend(row);
        }
    }
    let mut out = Vec::new();
    for row in all.chunks_mut(COUNT.min(cols)) {
        row.sort_unstable_by_key(|(index, _)| *index);
        out.extend(row.iter().flat_map(|(index, value)| [*index as f32, *value]));
    }
    Ok(out)
}

pub(super) fn gates(inputs: &mut Inputs<'_>) -> Result<(), Error> {
    use GateActivation::{ClampedSwiglu, GeluErf, GeluTanh, Identity, ReluSquared, Sigmoid, Silu};
    for activation in [Silu, GeluTanh, GeluErf, Sigmoid, ReluSquared, Identity, ClampedSwiglu] {
        let (gate, up) = (inputs.rows(3, 100)?, inputs.rows(3, 200)?);
        inputs.backend.gate(&GateOp { gate, up: Some(up), up_from: 50, activation })?;
        inputs.keep("gate", format!("{activation:?}"), ROWS, (gate, 3, 100))?;
        if activation != ClampedSwiglu {
            let alone = inputs.rows(2, 64)?;
            inputs.backend.gate(&GateOp { gate: alone, up: None, up_from: 0, activation })?;
            inputs.keep("gate", format!("{activation:?} alone"), ROWS, (alone, 2, 64))?;
        }
    }
    for gate_first in [false, true] {
        let weight = inputs.vector(64)?;
        let norm = Norm { rms: true, weight: Some(weight), bias: None, eps: 1e-6, width: 64 };
        let (x, gate) = (inputs.rows(3, 256)?, inputs.rows(3, 256)?);
        inputs.backend.gated_norm(&GatedNormOp { x, gate, norm, gate_first })?;
        inputs.keep("gated_norm", format!("gate first: {gate_first}"), ROWS, (x, 3, 256))?;
    }
    let (x, gate) = (inputs.rows(4, 72)?, inputs.rows(4, 1)?);
    inputs.backend.scale_rows(x, gate)?;
    inputs.keep("scale_rows", "4 x 72", ROWS, (x, 4, 72))
}

/// Embedding lookups by segment.
pub(super) fn embeddings(inputs: &mut Inputs<'_>) -> Result<(), Error> {
    inputs.step(&[3, 2], &[7, 0, 39, 12, 7], Some(2))?;
    let table = inputs.matrix(GgmlType::F32, 40, 256, 1)?;
    let out = inputs.rows(5, 256)?;
    let index = EmbedIndex::Segment;
    inputs.backend.embed(&EmbedOp { table, index, scale: 0.75, accumulate: true, out })?;
    inputs.keep("embed", format!("by {index:?}"), ROWS, (out, 5, 256))
}

/// Mixture of experts with every option of a model.
pub(super) fn experts(inputs: &mut Inputs<'_>) -> Result<(), Error> {
    mixture(inputs, GgmlType::Q8_0, SUMS)
}

/// The same with down matrices of a type that has products with activations in scaled blocks.
pub(super) fn scaled_experts(inputs: &mut Inputs<'_>, ty: GgmlType) -> Result<(), Error> {
    mixture(inputs, ty, if ty == GgmlType::NVFP4 { ROUNDED_TO_4_BITS } else { ROUNDED })
}

fn mixture(inputs: &mut Inputs<'_>, of_down: GgmlType, tolerance: f64) -> Result<(), Error> {
    let (hidden, ff, experts, used) = (256, 64, 8, 3);
    let ty = GgmlType::Q8_0;
    let gate = inputs.matrix(ty, ff, hidden, experts)?;
    let up = inputs.matrix(ty, ff, hidden, experts)?;
    let fused = inputs.matrix(GgmlType::Q4_K, 2 * ff, hidden, experts)?;
    let down = inputs.matrix(of_down, hidden, ff, experts)?;
    let scale = inputs.vector(experts)?;
    let [ff_bias, fused_bias, hidden_bias] =
        [experts * ff, experts * 2 * ff, experts * hidden].map(|len| inputs.vector(len));
    let (ff_bias, fused_bias, hidden_bias) = (ff_bias?, fused_bias?, hidden_bias?);
    let separate = ExpertGateUp::Separate {
        gate,
        up,
        gate_scale: Some(scale),
        up_scale: None,
        gate_bias: None,
        up_bias: Some(ff_bias),
    };
    let fused = ExpertGateUp::Fused { gate_up: fused, scale: Some(scale), bias: Some(fused_bias) };
    for (name, gate_up, activation) in
        [("separate", separate, GateActivation::Silu), ("fused", fused, GateActivation::ClampedSwiglu)]
    {
        for (rows, accumulate) in [(1, false), (4, true), (11, true)] {
            inputs.step(&[rows], &vec![0; rows], None)?;
            let (x, router) = (inputs.rows(rows, hidden)?, inputs.rows(rows, experts)?);
            let out = inputs.rows(rows, hidden)?;
            inputs.backend.moe(&MoeOp {
                x,
                router,
                out,
                accumulate,
                scale: 0.8,
                used,
                selection: Selection { sigmoid: rows == 4, ..Selection::default() },
                renormalise: rows != 4,
                gate_up,
                down,
                down_scale: Some(scale),
                down_bias: Some(hidden_bias),
                ff,
                activation,
            })?;
            let what = format!("{name}, down in {of_down}, {rows} rows");
            inputs.keep("moe", what, tolerance, (out, rows, hidden))?;
        }
    }
    Ok(())
}

/// Products of heads, and parts of heads that are put together.
pub(super) fn heads(inputs: &mut Inputs<'_>) -> Result<(), Error> {
    let (heads, cols, outputs) = (3, 96, 40);
    for ty in [GgmlType::F32, GgmlType::BF16, GgmlType::Q8_0, GgmlType::FP8] {
        let matrix = inputs.matrix(ty, outputs, cols, heads)?;
        for rows in [1, 4, 7] {
            let (x, front) = (inputs.rows(rows, heads * cols)?, inputs.rows(rows, heads * 8)?);
            let width = 8 + outputs;
            let buffer = inputs.rows(rows, heads * width)?;
            let out = HeadPart { buffer, width, at: 8 };
            inputs.backend.head_matmul(&HeadMatmulOp { x, matrix, heads, scale: 0.5, out })?;
            inputs.backend.place_heads(front, heads, &HeadPart { at: 0, ..out })?;
            inputs.keep("head_matmul", format!("{ty}, {rows} rows"), SUMS, (buffer, rows, heads * width))?;
            let placed = inputs.rows(rows, heads * 12)?;
            inputs.backend.place_heads(front, heads, &HeadPart { buffer: placed, width: 12, at: 3 })?;
            inputs.keep("place_heads", format!("{rows} rows"), 0.0, (placed, rows, heads * 12))?;
        }
    }
    Ok(())
}

/// Products with matrices that have their columns in another order, beside one that has not.
pub(super) fn orders(inputs: &mut Inputs<'_>) -> Result<(), Error> {
    let (outputs, cols) = (40, 256);
    let order: Vec<u32> = (0..cols as u32).map(|col| col * 77 % cols as u32).collect();
    for ty in [GgmlType::BF16, GgmlType::INT5] {
        let matrices = [(); 3].map(|()| inputs.matrix(ty, outputs, cols, 1));
        let [plain, first, second] = matrices;
        let (plain, first, second) = (plain?, first?, second?);
        inputs.backend.set_order(first, &order)?;
        inputs
            .backend
            .set_order(second, &order[1..].iter().chain(&order[..1]).copied().collect::<Vec<_>>())?;
        for rows in [1, 6, 70] {
            let x = inputs.rows(rows, cols)?;
            let mut jobs = Vec::new();
            for matrix in [first, plain, second] {
                let out = inputs.backend.create_buffer(rows, outputs)?;
                jobs.push(MatmulJob { matrix, out, bias: None, scale: 1.0, accumulate: false });
            }
            inputs.backend.matmul(x, &jobs)?;
            for (number, job) in jobs.iter().enumerate() {
                let what = format!("{ty}, {rows} rows, product {number} of three orders");
                inputs.keep("matmul", what, SUMS, (job.out, rows, outputs))?;
            }
        }
    }
    Ok(())
}
