//! Tests of embedding, norms, gates and sums.

use super::*;
use crate::backend::{EmbedIndex, GateActivation};
use crate::reference::rows as reference;
use proptest::prelude::*;

/// Two sequences: positions 2 to 4, then 0 to 3 with a second segment from 2 on.
fn sequences() -> [StepSequence; 2] {
    [
        StepSequence { rows: 0..3, context: 2, segment_start: None },
        StepSequence { rows: 3..7, context: 0, segment_start: Some(2) },
    ]
}

const TOKENS: [u32; 7] = [3, 0, 9, 9, 1, 2, 3];
const POSITIONS: [usize; 7] = [2, 3, 4, 0, 1, 2, 3];
const SEGMENTS: [usize; 7] = [0, 0, 0, 0, 0, 1, 1];

#[test]
fn embeddings_add_up() {
    let cols = 37;
    let mut random = Random(1);
    let [tokens, positions, segments] = [10, 5, 2].map(|rows| random.values(rows * cols));
    let out = on_every_isa(ActivationMode::F32, |backend| {
        let tables = [&tokens, &positions, &segments].map(|table| matrix(backend, 1, cols, table));
        let out = backend.create_buffer(7, cols).unwrap();
        begin(backend, &TOKENS, &sequences()).unwrap();
        for (table, index, scale, accumulate) in [
            (tables[0], EmbedIndex::Token, 6.0, false),
            (tables[1], EmbedIndex::Position, 1.0, true),
            (tables[2], EmbedIndex::Segment, 0.5, true),
        ] {
            backend.embed(&EmbedOp { table, index, scale, accumulate, out }).unwrap();
        }
        values(backend, out)
    });
    let expected: Vec<f64> = (0..7 * cols)
        .map(|i| {
            let (row, col) = (i / cols, i % cols);
            let at = |table: &[f32], row: usize| f64::from(table[row * cols + col]);
            6.0 * at(&tokens, TOKENS[row] as usize)
                + at(&positions, POSITIONS[row])
                + 0.5 * at(&segments, SEGMENTS[row])
        })
        .collect();
    assert_close(&out, &expected, 1e-6);
}

#[test]
fn embeddings_refuse_indices_outside_the_table() {
    let mut backend = device(Isa::detect(), ActivationMode::F32, 1);
    let table = matrix(&mut backend, 1, 4, &[0.0; 16]);
    let out = backend.create_buffer(7, 4).unwrap();
    let op = EmbedOp { table, index: EmbedIndex::Position, scale: 1.0, accumulate: false, out };
    begin(&mut backend, &TOKENS, &sequences()).unwrap();
    // Row 2 is at position 4.
    assert_eq!(backend.embed(&op), Err(Error::OutOfRange { what: "row", index: 4, len: 4 }));
    let op = EmbedOp { index: EmbedIndex::Segment, accumulate: true, ..op };
    assert_eq!(backend.embed(&op), Ok(()));
    begin(&mut backend, &TOKENS[..3], &sequences()[..1]).unwrap();
    // The buffer still holds seven rows.
    assert!(matches!(backend.embed(&op), Err(Error::Length { what: "rows to add to", .. })));
    let small = backend.create_buffer(2, 5).unwrap();
    let op = EmbedOp { accumulate: false, out: small, ..op };
    assert!(matches!(backend.embed(&op), Err(Error::OutOfRange { what: "buffer value", .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn norms_run_over_their_width(
        seed in any::<u64>(),
        width in 2..70usize,
        runs in 1..4usize,
        rows in 1..4usize,
        rms in any::<bool>(),
        per_row in any::<bool>(),
    ) {
        let cols = width * runs;
        let mut random = Random(seed);
        let x: Vec<f32> = random.values(rows * cols).iter().map(|x| x * 3.0).collect();
        let (weight, bias) = (random.values(cols), random.values(cols));
        let len = if per_row { cols } else { width };
        let out = on_every_isa(ActivationMode::F32, |backend| {
            let x = buffer(backend, cols, &x);
            let weight = Some(backend.create_vector(&weight[..len]).unwrap());
            let bias = (!rms).then(|| backend.create_vector(&bias[..len]).unwrap());
            let norm = Norm { rms, weight, bias, eps: 1e-5, width };
            let out = backend.create_buffer(rows, cols).unwrap();
            backend.norm(x, &norm, out).unwrap();
            backend.norm(x, &norm, x).unwrap();
            let out = values(backend, out);
            assert_eq!(bits(&out), bits(&values(backend, x)));
            out
        });
        let expected: Vec<f64> = x
            .chunks(width)
            .enumerate()
            .flat_map(|(run, x)| {
                let from = if per_row { run % runs * width } else { 0 };
                let (weight, bias) = (&weight[from..from + width], &bias[from..from + width]);
                match rms {
                    true => reference::rms_norm(x, Some(weight), 1e-5),
                    false => reference::layer_norm(x, Some(weight), Some(bias), 1e-5),
                }
            })
            .collect();
        assert_close(&out, &expected, if width < 8 { 1e-3 } else { 1e-4 });
    }

    #[test]
    fn gates_of_every_kind(
        seed in any::<u64>(),
        cols in 1..90usize,
        rows in 1..4usize,
        from in 0..20usize,
        after in 0..20usize,
    ) {
        let mut random = Random(seed);
        let x: Vec<f32> = random.values(rows * cols).iter().map(|x| x * 9.0).collect();
        let width = from + cols + after;
        let up: Vec<f32> = random.values(rows * width).iter().map(|x| x * 9.0).collect();
        let at = |i: usize| up[i / cols * width + from + i % cols];
        type Reference = fn(f32) -> f64;
        for (activation, reference) in [
            (GateActivation::Silu, Some(reference::silu as Reference)),
            (GateActivation::GeluTanh, Some(reference::gelu_tanh)),
            (GateActivation::GeluErf, Some(reference::gelu_erf)),
            (GateActivation::ReluSquared, Some(reference::relu_squared)),
            (GateActivation::Sigmoid, Some(reference::sigmoid)),
            (GateActivation::Identity, Some(f64::from)),
            (GateActivation::ClampedSwiglu, None),
        ] {
            for gated in [true, false] {
                let gate = |i: usize| match (reference, gated) {
                    (Some(f), true) => f(x[i]) * f64::from(at(i)),
                    (Some(f), false) => f(x[i]),
                    (None, _) => reference::clamped_swiglu(x[i], at(i)),
                };
                if reference.is_none() && !gated {
                    continue;
                }
                let out = on_every_isa(ActivationMode::F32, |backend| {
                    let gate = buffer(backend, cols, &x);
                    let up = gated.then(|| buffer(backend, width, &up));
                    let up_from = if gated { from } else { 0 };
                    backend.gate(&GateOp { gate, up, up_from, activation }).unwrap();
                    values(backend, gate)
                });
                assert_close(&out, &(0..x.len()).map(gate).collect::<Vec<_>>(), 2e-6);
            }
        }
    }

    #[test]
    fn rows_are_scaled_and_added(seed in any::<u64>(), cols in 1..90usize, rows in 1..5usize) {
        let mut random = Random(seed);
        let [x, y] = [0; 2].map(|_| random.values(rows * cols));
        let (gates, weight) = (random.values(rows * 3), random.values(cols));
        let out = on_every_isa(ActivationMode::F32, |backend| {
            let x = buffer(backend, cols, &x);
            let y = buffer(backend, cols, &y);
            let gates = buffer(backend, 3, &gates);
            let weight = Some(backend.create_vector(&weight).unwrap());
            let norm = Norm { rms: true, weight, bias: None, eps: 1e-5, width: cols };
            backend.scale_rows(x, gates).unwrap();
            backend.add(x, y, Some(&norm), 0.25).unwrap();
            backend.scale(x, -3.0).unwrap();
            backend.add(x, y, None, 2.0).unwrap();
            values(backend, x)
        });
        let expected: Vec<f64> = (0..rows)
            .flat_map(|row| {
                let range = row * cols..(row + 1) * cols;
                let factor = reference::sigmoid(gates[row * 3]);
                let normed = reference::rms_norm(&y[range.clone()], Some(&weight), 1e-5);
                let pairs = x[range.clone()].iter().zip(&y[range]).zip(normed);
                pairs
                    .map(|((x, y), n)| {
                        -3.0 * (f64::from(*x) * factor + 0.25 * n) + 2.0 * f64::from(*y)
                    })
                    .collect::<Vec<_>>()
            })
            .collect();
        assert_close(&out, &expected, 4e-6);
    }
}

#[test]
fn norms_and_gates_refuse_arguments_that_they_would_ignore() {
    let mut backend = device(Isa::detect(), ActivationMode::F32, 1);
    let x = buffer(&mut backend, 12, &[1.0; 24]);
    let y = buffer(&mut backend, 12, &[1.0; 24]);
    let [four, five] = [4, 5].map(|len| backend.create_vector(&vec![1.0; len]).unwrap());
    let norm = Norm { rms: true, weight: Some(four), bias: None, eps: 1e-5, width: 4 };
    assert_eq!(backend.norm(x, &norm, y), Ok(()));
    for wrong in [
        Norm { width: 5, ..norm },
        Norm { width: 0, ..norm },
        Norm { weight: Some(five), ..norm },
        Norm { rms: false, bias: Some(five), ..norm },
    ] {
        assert!(matches!(backend.norm(x, &wrong, y), Err(Error::Length { .. })), "{wrong:?}");
    }
    let wrong = Norm { bias: Some(four), ..norm };
    assert!(matches!(backend.norm(x, &wrong, y), Err(Error::Unsupported { .. })));
    let layer = Norm { rms: false, ..norm };
    assert!(matches!(backend.add(x, y, Some(&layer), 1.0), Err(Error::Unsupported { .. })));
    let gate = GateOp { gate: x, up: Some(y), up_from: 0, activation: GateActivation::ClampedSwiglu };
    assert_eq!(backend.gate(&gate), Ok(()));
    assert!(matches!(backend.gate(&GateOp { up: None, ..gate }), Err(Error::Unsupported { .. })));
    let silu = GateOp { activation: GateActivation::Silu, up: None, ..gate };
    assert!(matches!(backend.gate(&GateOp { up_from: 1, ..silu }), Err(Error::Unsupported { .. })));
    assert!(matches!(backend.gate(&GateOp { up_from: 1, ..gate }), Err(Error::OutOfRange { .. })));
    assert_eq!(backend.gate(&GateOp { up: Some(x), ..gate }), Err(Error::SameBuffer));
    let short = buffer(&mut backend, 12, &[1.0; 12]);
    assert!(matches!(backend.gate(&GateOp { up: Some(short), ..gate }), Err(Error::Length { .. })));
    assert!(matches!(backend.scale_rows(x, short), Err(Error::Length { .. })));
}
