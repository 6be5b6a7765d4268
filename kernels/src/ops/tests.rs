use std::num::NonZeroUsize;

use proptest::prelude::*;

use super::*;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::{Pool, PoolConfig};
use crate::reference::rows as reference;

mod qkv;

fn pool(threads: usize) -> Pool {
    Pool::new(PoolConfig::new(NonZeroUsize::new(threads).unwrap())).unwrap()
}

fn floats(n: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(-4.0f32..4.0, n)
}

fn close(got: &[f32], expected: &[f64], tolerance: f64) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        prop_assert!(
            error <= tolerance * expected.abs().max(1.0),
            "element {}: {} is not {}",
            i,
            got,
            expected
        );
    }
    Ok(())
}

/// Runs `f` on every ISA, checks that the bits are equal, and returns the result.
fn on_every_isa(f: impl Fn(Isa) -> Vec<f32>) -> Vec<f32> {
    let expected = f(Isa::Scalar);
    for isa in Isa::available() {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&f(isa)), bits(&expected), "{isa}");
    }
    expected
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn low_rank_additions_match_the_reference(
        seed in floats(6000..6001),
        rank in 1..80usize,
        rows in 1..150usize,
        cols in 1..150usize,
        scale in -2.0f32..2.0,
    ) {
        let values = |from: usize, count: usize| -> Vec<f32> {
            (from..from + count).map(|i| seed[i * 7 % seed.len()]).collect()
        };
        let (a, b, x, before) =
            (values(0, rank * cols), values(11, rows * rank), values(5, cols), values(3, rows));
        let low_rank = LowRank::new(rank, (rows, cols), scale, &a, &b).unwrap();
        let got = on_every_isa(|isa| {
            let mut out = before.clone();
            low_rank.add_row(isa, &x, &mut out).unwrap();
            out
        });
        let added = reference::low_rank(rank, scale, &a, &b, &x);
        let expected: Vec<f64> = before.iter().zip(added).map(|(x, y)| f64::from(*x) + y).collect();
        // Sums of terms of up to 16 cancel.
        let magnitude = 16.0 * 4.0 * (rank * cols) as f64;
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            prop_assert!((f64::from(*got) - expected).abs() <= 1e-6 * magnitude, "element {}: {} is not {}", i, got, expected);
        }
        prop_assert!(low_rank.add_row(Isa::Scalar, &x[1..], &mut before.clone()).is_err());
        prop_assert!(low_rank.add_row(Isa::Scalar, &x, &mut before[1..].to_vec()).is_err());
        prop_assert!(LowRank::new(rank, (rows, cols), scale, &a, &b[1..]).is_err());
    }

    #[test]
    fn norms_match_the_reference(
        seed in floats(1800..1801),
        width in 1..300usize,
        runs in 1..4usize,
        rows in 1..3usize,
        // Weights: none, of one run, or of the whole row.
        weights in 0..3usize,
        offset in -5.0f32..5.0,
    ) {
        let (cols, x) = (width * runs, &seed[..width * runs * rows]);
        let weight: Vec<f32> = seed.iter().rev().map(|x| 1.0 + x / 8.0).take([0, width, cols][weights]).collect();
        let weight = (weights > 0).then_some(&weight[..]);
        let norm = RmsNorm { width, weight, eps: 1e-5 };
        let one = pool(1);
        let out = on_every_isa(|isa| {
            let mut out = vec![0.0; x.len()];
            rms_norm(&one, isa, norm, x, &mut out).unwrap();
            let mut in_place = x.to_vec();
            rms_norm_in_place(&one, isa, norm, &mut in_place).unwrap();
            assert_eq!(in_place, out);
            out
        });
        let values_of_run = |values: Option<&'_ [f32]>, run: usize| -> Option<Vec<f32>> {
            values.map(|values| values.iter().copied().cycle().skip(run * width).take(width).collect())
        };
        let run_of = |i: usize| i % (cols / width);
        let expected: Vec<f64> = x
            .chunks(width)
            .enumerate()
            .flat_map(|(i, x)| reference::rms_norm(x, values_of_run(weight, run_of(i)).as_deref(), norm.eps))
            .collect();
        close(&out, &expected, 3e-6)?;
        let added = on_every_isa(|isa| {
            let mut residual = x.to_vec();
            rms_norm_add(&one, isa, norm, x, 0.5, &mut residual).unwrap();
            residual
        });
        let expected: Vec<f64> = expected.iter().zip(x).map(|(y, x)| f64::from(*x) + 0.5 * y).collect();
        close(&added, &expected, 3e-6)?;

        // A common offset must not cost precision.
        let x: Vec<f32> = x.iter().enumerate().map(|(i, x)| x + offset + (i % width) as f32 * 1e-2).collect();
        let norm = LayerNorm { width, weight, bias: weight, eps: 1e-5 };
        let out = on_every_isa(|isa| {
            let mut out = vec![0.0; x.len()];
            layer_norm(&one, isa, norm, &x, &mut out).unwrap();
            let mut in_place = x.to_vec();
            layer_norm_in_place(&one, isa, norm, &mut in_place).unwrap();
            assert_eq!(in_place, out);
            out
        });
        let expected: Vec<f64> = x
            .chunks(width)
            .enumerate()
            .flat_map(|(i, x)| {
                let weight = values_of_run(weight, run_of(i));
                reference::layer_norm(x, weight.as_deref(), weight.as_deref(), norm.eps)
            })
            .collect();
        // With few elements, the difference to the mean may consist of rounding only.
        close(&out, &expected, if width < 8 { 1e-3 } else { 2e-4 })?;
    }

    #[test]
    fn a_row_of_a_norm_does_not_depend_on_the_others(x in floats(130..131), threads in 1..4usize) {
        let norm = RmsNorm { width: 13, weight: None, eps: 1e-6 };
        let run = |x: &[f32], threads| {
            let mut out = vec![0.0; x.len()];
            rms_norm(&pool(threads), Isa::detect(), norm, x, &mut out).unwrap();
            out
        };
        let whole = run(&x, threads);
        for (row, out) in x.chunks(13).zip(whole.chunks(13)) {
            prop_assert_eq!(&run(row, 1)[..], out);
        }
    }

    #[test]
    fn rope_matches_the_reference(
        half in any::<bool>(),
        pairs in 0..40usize,
        pass in 0..20usize,
        heads in 1..4usize,
        positions in prop::array::uniform3(0..5000usize),
        axes in prop::option::of(prop::collection::vec(0..3u8, 40)),
        factors in any::<bool>(),
        seed in floats(400..401),
    ) {
        let params = RopeParams {
            style: if half { RopeStyle::Half } else { RopeStyle::Interleaved },
            n_rot: 2 * pairs,
            base: 10_000.0,
            freq_scale: 0.5,
            factors: factors.then(|| (0..pairs).map(|i| 1.0 + i as f32).collect()),
            magnitude: 1.25,
            axes: axes.map(|axes| axes[..pairs].to_vec()),
        };
        let head_dim = (2 * pairs + pass).max(1);
        let row = &seed[..heads * head_dim];
        let mut table = RopeTable::new(&params).unwrap();
        table.ensure(positions.iter().max().unwrap() + 1);
        let out = on_every_isa(|isa| {
            let mut row = row.to_vec();
            rope_on_axes(isa, &table, positions, head_dim, &mut row).unwrap();
            row
        });
        let heads = row.chunks(head_dim);
        let expected: Vec<f64> =
            heads.flat_map(|head| reference::rope_on_axes(&params, positions, head)).collect();
        close(&out, &expected, 2e-6)?;
        // Equal positions on all axes are the rotation without axes, bit for bit.
        let mut plain = RopeTable::new(&RopeParams { axes: None, ..params }).unwrap();
        plain.ensure(positions[0] + 1);
        let rotated = |table: &RopeTable| {
            on_every_isa(|isa| {
                let mut row = row.to_vec();
                rope(isa, table, positions[0], head_dim, &mut row).unwrap();
                row
            })
        };
        prop_assert_eq!(rotated(&table), rotated(&plain));
    }

    #[test]
    fn elementwise_operations_match_the_reference(x in floats(1..9000), threads in 1..3usize) {
        let y: Vec<f32> = x.iter().rev().map(|x| x * 2.0).collect();
        let pool = pool(threads);
        for (activation, reference) in [
            (Activation::Silu, reference::silu as fn(f32) -> f64),
            (Activation::GeluTanh, reference::gelu_tanh),
            (Activation::GeluErf, reference::gelu_erf),
            (Activation::Sigmoid, reference::sigmoid),
            (Activation::ReluSquared, reference::relu_squared),
            (Activation::Identity, f64::from),
        ] {
            let out = on_every_isa(|isa| {
                let mut out = x.clone();
                activate(&pool, isa, activation, &mut out);
                out
            });
            let expected: Vec<f64> = x.iter().map(|x| reference(*x)).collect();
            close(&out, &expected, 1e-6)?;
            let out = on_every_isa(|isa| {
                let mut out = x.clone();
                let all = Columns::all(&y, x.len());
                gate_in_place(&pool, isa, Gating::By(activation), &mut out, all).unwrap();
                out
            });
            let expected: Vec<f64> = expected.iter().zip(&y).map(|(x, y)| x * f64::from(*y)).collect();
            close(&out, &expected, 2e-6)?;
        }
        let added = on_every_isa(|isa| {
            let mut out = x.clone();
            add_scaled(&pool, isa, &mut out, 0.25, &y).unwrap();
            scale(&pool, isa, &mut out, 3.0);
            softcap(&pool, isa, &mut out, 5.0);
            out
        });
        let expected: Vec<f64> = x
            .iter()
            .zip(&y)
            .map(|(x, y)| 5.0 * ((f64::from(*x) + 0.25 * f64::from(*y)) * 3.0 / 5.0).tanh())
            .collect();
        close(&added, &expected, 2e-6)?;
        let curved = on_every_isa(|isa| {
            let mut out = x.clone();
            tanh(isa, &mut out);
            out
        });
        let expected: Vec<f64> = x.iter().map(|x| f64::from(*x).tanh()).collect();
        close(&curved, &expected, 1e-6)?;
    }

    #[test]
    fn gates_use_the_requested_columns(
        x in floats(1..700),
        rows in 1..5usize,
        before in 0..40usize,
        after in 0..40usize,
        threads in 1..3usize,
    ) {
        let rows = rows.min(x.len());
        let len = x.len() / rows;
        let gate: Vec<f32> = x[..rows * len].iter().map(|x| x * 4.0).collect();
        let width = before + len + after;
        let up: Vec<f32> = (0..rows * width).map(|i| x[i * 7 % x.len()] * 4.0).collect();
        let columns = Columns { values: &up, width, from: before, len };
        let pool = pool(threads);
        let expected: Vec<f64> = (0..rows * len)
            .map(|i| reference::clamped_swiglu(gate[i], up[i / len * width + before + i % len]))
            .collect();
        let out = on_every_isa(|isa| {
            let mut out = gate.clone();
            gate_in_place(&pool, isa, Gating::ClampedSwiglu, &mut out, columns).unwrap();
            let mut apart = vec![0.0; gate.len()];
            for (row, apart) in apart.chunks_mut(len).enumerate() {
                let up = &up[row * width + before..][..len];
                gated_row(isa, Gating::ClampedSwiglu, &gate[row * len..][..len], up, apart).unwrap();
            }
            assert_eq!(apart, out);
            out
        });
        close(&out, &expected, 1e-6)?;
        let out = on_every_isa(|isa| {
            let mut out = gate.clone();
            let gates = Columns { len: 1, ..columns };
            scale_rows(&pool, isa, len, &mut out, gates).unwrap();
            out
        });
        let expected: Vec<f64> = (0..rows * len)
            .map(|i| f64::from(gate[i]) * reference::sigmoid(up[i / len * width + before]))
            .collect();
        close(&out, &expected, 1e-6)?;
    }

    #[test]
    fn softmax_and_log_softmax_match_the_reference(x in floats(1..400), spread in 0.1f32..20.0) {
        let x: Vec<f32> = x.iter().map(|x| x * spread).collect();
        let expected = reference::log_softmax(&x);
        let logs = on_every_isa(|isa| {
            let mut out = x.clone();
            log_softmax(isa, &mut out);
            out
        });
        close(&logs, &expected, 2e-6)?;
        let weights = on_every_isa(|isa| {
            let mut out = x.clone();
            softmax(isa, &mut out);
            out
        });
        let expected: Vec<f64> = expected.iter().map(|x| x.exp()).collect();
        close(&weights, &expected, 2e-6)?;
    }

    #[test]
    fn selection_sorts_by_value_then_index(
        // Few distinct values, so that there are ties everywhere.
        x in prop::collection::vec((-6..7i32).prop_map(|x| if x == 6 { f32::NAN } else { x as f32 / 2.0 }), 1..500),
        k in 0..80usize,
    ) {
        let mut sorted: Vec<(usize, f32)> = x.iter().copied().enumerate().filter(|(_, x)| !x.is_nan()).collect();
        sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        for isa in Isa::available() {
            prop_assert_eq!(argmax(isa, &x), sorted.first().map_or(0, |best| best.0));
            prop_assert_eq!(&top_k(isa, &x, k)[..], &sorted[..k.min(sorted.len())]);
        }
    }
}

#[test]
fn selection_at_the_edges() {
    for isa in Isa::available() {
        assert_eq!(argmax(isa, &[]), 0);
        assert_eq!(argmax(isa, &[f32::NEG_INFINITY; 40]), 0);
        assert_eq!(argmax(isa, &[-0.0, 0.0]), 0);
        assert_eq!(top_k(isa, &[1.0, 2.0], 9), [(1, 2.0), (0, 1.0)]);
        let rising: Vec<f32> = (0..100_000).map(|i| i as f32).collect();
        assert_eq!(argmax(isa, &rising), 99_999);
        assert_eq!(top_k(isa, &rising, 2), [(99_999, 99_999.0), (99_998, 99_998.0)]);
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let pool = pool(1);
    let mut out = [0.0; 8];
    for (width, weight) in [(4, &[1.0; 3][..]), (3, &[1.0; 3]), (4, &[]), (0, &[]), (2, &[1.0; 6])] {
        let norm = RmsNorm { width, weight: Some(weight), eps: 1e-6 };
        let result = rms_norm(&pool, Isa::Scalar, norm, &[0.0; 8], &mut out);
        assert!(matches!(result, Err(Error::Length { .. })), "{width} {weight:?}");
        assert!(rms_norm_in_place(&pool, Isa::Scalar, norm, &mut out).is_err());
    }
    let gating = Gating::By(Activation::Silu);
    let mut gate = |up| gate_in_place(&pool, Isa::Scalar, gating, &mut out, up);
    let up = Columns::all(&[0.0; 7], 8);
    assert!(matches!(gate(up), Err(Error::Length { what: "up", .. })));
    assert_eq!(gate(Columns { values: &[0.0; 12], width: 6, from: 2, len: 4 }), Ok(()));
    let up = Columns { values: &[0.0; 12], width: 6, from: 3, len: 4 };
    assert_eq!(gate(up), Err(Error::OutOfRange { what: "up", index: 7, len: 6 }));
    let up = Columns { from: usize::MAX, ..up };
    assert!(matches!(gate(up), Err(Error::OutOfRange { what: "up", .. })));
    let params = RopeParams {
        style: RopeStyle::Half,
        n_rot: 8,
        base: 1e4,
        freq_scale: 1.0,
        factors: None,
        magnitude: 1.0,
        axes: None,
    };
    assert!(RopeTable::new(&RopeParams { n_rot: 7, ..params.clone() }).is_err());
    assert!(RopeTable::new(&RopeParams { factors: Some(vec![1.0; 3]), ..params.clone() }).is_err());
    assert!(RopeTable::new(&RopeParams { axes: Some(vec![0; 3]), ..params.clone() }).is_err());
    assert!(RopeTable::new(&RopeParams { axes: Some(vec![0, 1, 3, 0]), ..params.clone() }).is_err());
    let mut table = RopeTable::new(&params).unwrap();
    assert!(matches!(rope(Isa::Scalar, &table, 0, 8, &mut out), Err(Error::OutOfRange { .. })));
    table.ensure(1);
    assert_eq!(rope(Isa::Scalar, &table, 0, 8, &mut out), Ok(()));
    assert!(matches!(rope(Isa::Scalar, &table, 0, 4, &mut out), Err(Error::Length { .. })));
    assert!(matches!(rope(Isa::Scalar, &table, 1 << 40, 8, &mut out), Err(Error::OutOfRange { .. })));
}
