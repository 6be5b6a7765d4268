use std::num::NonZeroUsize;

use proptest::prelude::*;

use super::*;
use crate::aligned::AlignedBuf;
use crate::attention::{AttentionShape, KvLayout, KvType, Placement, QueryRow, StepPlan};
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::{Pool, PoolConfig};
use crate::reference::rows as reference;

fn pool(threads: usize) -> Pool {
    Pool::new(PoolConfig::new(NonZeroUsize::new(threads).unwrap())).unwrap()
}

fn floats(n: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(-4.0f32..4.0, n)
}

fn close(got: &[f32], want: &[f64], tolerance: f64) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        prop_assert!(error <= tolerance * want.abs().max(1.0), "element {}: {} is not {}", i, got, want);
    }
    Ok(())
}

/// Runs `f` on every ISA and checks that the bits are the same; the result.
fn on_every_isa(f: impl Fn(Isa) -> Vec<f32>) -> Vec<f32> {
    let want = f(Isa::Scalar);
    for isa in Isa::available() {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&f(isa)), bits(&want), "{isa}");
    }
    want
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rms_norm_is_the_reference(x in floats(1..300), weighted in any::<bool>()) {
        let weight: Vec<f32> = x.iter().map(|x| 1.0 + x / 8.0).collect();
        let norm = RmsNorm { weight: weighted.then_some(&weight[..]), eps: 1e-5 };
        let width = x.len();
        let out = on_every_isa(|isa| {
            let mut out = vec![0.0; width];
            rms_norm(&pool(1), isa, norm, width, &x, &mut out).unwrap();
            out
        });
        let want = reference::rms_norm(&x, norm.weight, norm.eps);
        close(&out, &want, 2e-6)?;
        let added = on_every_isa(|isa| {
            let mut residual = x.clone();
            rms_norm_add(&pool(1), isa, norm, width, &x, 0.5, &mut residual).unwrap();
            residual
        });
        let want: Vec<f64> = want.iter().zip(&x).map(|(y, x)| f64::from(*x) + 0.5 * y).collect();
        close(&added, &want, 2e-6)?;
    }

    #[test]
    fn layer_norm_is_the_reference(x in floats(2..300), offset in -5.0f32..5.0, affine in any::<bool>()) {
        // A common offset must not cost precision.
        let x: Vec<f32> = x.iter().enumerate().map(|(i, x)| x + offset + i as f32 * 1e-2).collect();
        let weight: Vec<f32> = x.iter().map(|x| 1.0 + x / 8.0).collect();
        let norm = LayerNorm { weight: affine.then_some(&weight[..]), bias: affine.then_some(&x[..]), eps: 1e-5 };
        let out = on_every_isa(|isa| {
            let mut out = vec![0.0; x.len()];
            layer_norm(&pool(1), isa, norm, x.len(), &x, &mut out).unwrap();
            out
        });
        close(&out, &reference::layer_norm(&x, norm.weight, norm.bias, norm.eps), 2e-4)?;
    }

    #[test]
    fn a_row_of_a_norm_does_not_depend_on_the_others(x in floats(130..131), threads in 1..4usize) {
        let norm = RmsNorm { weight: None, eps: 1e-6 };
        let run = |x: &[f32], threads| {
            let mut out = vec![0.0; x.len()];
            rms_norm(&pool(threads), Isa::detect(), norm, 13, x, &mut out).unwrap();
            out
        };
        let whole = run(&x, threads);
        for (row, out) in x.chunks(13).zip(whole.chunks(13)) {
            prop_assert_eq!(&run(row, 1)[..], out);
        }
    }

    #[test]
    fn rope_is_the_reference(
        half in any::<bool>(),
        pairs in 0..40usize,
        pass in 0..20usize,
        heads in 1..4usize,
        position in 0..5000usize,
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
        };
        let head_dim = (2 * pairs + pass).max(1);
        let row = &seed[..heads * head_dim];
        let mut table = RopeTable::new(&params).unwrap();
        table.ensure(position + 1);
        let out = on_every_isa(|isa| {
            let mut row = row.to_vec();
            rope(isa, &table, position, head_dim, &mut row).unwrap();
            row
        });
        let want: Vec<f64> =
            row.chunks(head_dim).flat_map(|head| reference::rope(&params, position, head)).collect();
        close(&out, &want, 2e-6)?;
    }

    #[test]
    fn elementwise_operations_are_the_reference(x in floats(1..9000), threads in 1..3usize) {
        let y: Vec<f32> = x.iter().rev().map(|x| x * 2.0).collect();
        let pool = pool(threads);
        for (activation, reference) in [
            (Activation::Silu, reference::silu as fn(f32) -> f64),
            (Activation::GeluTanh, reference::gelu_tanh),
        ] {
            let out = on_every_isa(|isa| {
                let mut out = vec![0.0; x.len()];
                gated_activation(&pool, isa, activation, &x, &y, &mut out).unwrap();
                out
            });
            let want: Vec<f64> = x.iter().zip(&y).map(|(x, y)| reference(*x) * f64::from(*y)).collect();
            close(&out, &want, 2e-6)?;
        }
        let added = on_every_isa(|isa| {
            let mut out = x.clone();
            add_scaled(&pool, isa, &mut out, 0.25, &y).unwrap();
            scale(&pool, isa, &mut out, 3.0);
            softcap(&pool, isa, &mut out, 5.0);
            out
        });
        let want: Vec<f64> = x
            .iter()
            .zip(&y)
            .map(|(x, y)| 5.0 * ((f64::from(*x) + 0.25 * f64::from(*y)) * 3.0 / 5.0).tanh())
            .collect();
        close(&added, &want, 2e-6)?;
    }

    #[test]
    fn softmax_and_log_softmax_are_the_reference(x in floats(1..400), spread in 0.1f32..20.0) {
        let x: Vec<f32> = x.iter().map(|x| x * spread).collect();
        let want = reference::log_softmax(&x);
        let logs = on_every_isa(|isa| {
            let mut out = x.clone();
            log_softmax(isa, &mut out);
            out
        });
        close(&logs, &want, 2e-6)?;
        let weights = on_every_isa(|isa| {
            let mut out = x.clone();
            softmax(isa, &mut out);
            out
        });
        let want: Vec<f64> = want.iter().map(|x| x.exp()).collect();
        close(&weights, &want, 2e-6)?;
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
    let norm = RmsNorm { weight: Some(&[1.0; 3]), eps: 1e-6 };
    let mut out = [0.0; 8];
    assert!(matches!(rms_norm(&pool, Isa::Scalar, norm, 4, &[0.0; 8], &mut out), Err(Error::Length { .. })));
    assert!(matches!(rms_norm(&pool, Isa::Scalar, norm, 3, &[0.0; 8], &mut out), Err(Error::Length { .. })));
    let gated = gated_activation(&pool, Isa::Scalar, Activation::Silu, &[0.0; 8], &[0.0; 7], &mut out);
    assert!(matches!(gated, Err(Error::Length { what: "up", .. })));
    let params = RopeParams {
        style: RopeStyle::Half,
        n_rot: 8,
        base: 1e4,
        freq_scale: 1.0,
        factors: None,
        magnitude: 1.0,
    };
    assert!(RopeTable::new(&RopeParams { n_rot: 7, ..params.clone() }).is_err());
    assert!(RopeTable::new(&RopeParams { factors: Some(vec![1.0; 3]), ..params.clone() }).is_err());
    let mut table = RopeTable::new(&params).unwrap();
    assert!(matches!(rope(Isa::Scalar, &table, 0, 8, &mut out), Err(Error::OutOfRange { .. })));
    table.ensure(1);
    assert_eq!(rope(Isa::Scalar, &table, 0, 8, &mut out), Ok(()));
    assert!(matches!(rope(Isa::Scalar, &table, 0, 4, &mut out), Err(Error::Length { .. })));
    assert!(matches!(rope(Isa::Scalar, &table, 1 << 40, 8, &mut out), Err(Error::OutOfRange { .. })));
}

/// The fused step must be what its parts are, and write what `kv_write` writes.
#[test]
fn the_fused_step_is_its_parts() {
    use crate::attention::{ArenaView, kv_write};
    let (heads, kv_heads, dim, v_dim) = (4, 2, 24, 40);
    let q_weight: Vec<f32> = (0..dim).map(|i| 1.0 + i as f32 / 10.0).collect();
    let params = RopeParams {
        style: RopeStyle::Half,
        n_rot: 16,
        base: 1e4,
        freq_scale: 1.0,
        factors: None,
        magnitude: 1.0,
    };
    let mut table = RopeTable::new(&params).unwrap();
    table.ensure(64);
    let layout = KvLayout::new(KvType::F16, 16, kv_heads, dim, v_dim).unwrap();
    let shape = AttentionShape { layout, heads, window: None };
    let stride = layout.bytes().next_multiple_of(64);
    let blocks: [&[u32]; 2] = [&[1, 3], &[0]];
    let blocks: Vec<Vec<u32>> =
        blocks.iter().map(|table| table.iter().map(|block| block * (stride / 64) as u32).collect()).collect();
    let placements: Vec<_> = blocks.iter().map(|table| Placement::Paged(table)).collect();
    let rows: Vec<_> = [(0, 17), (1, 0), (0, 16), (1, 1)]
        .map(|(sequence, position)| QueryRow { sequence, position })
        .to_vec();
    let numbers = |n: usize| (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 20.0).collect::<Vec<f32>>();
    let q = numbers(rows.len() * heads * dim);
    let k = numbers(rows.len() * kv_heads * dim);
    let v = numbers(rows.len() * kv_heads * v_dim);
    let norm = RmsNorm { weight: Some(&q_weight), eps: 1e-6 };
    for (q_norm, k_norm, rotate) in [(Some(norm), None, true), (None, Some(norm), true), (None, None, false)]
    {
        let step = QkvStep { layer_offset: 64, q_norm, k_norm, rope: rotate.then_some(&table) };
        for isa in Isa::available() {
            let parts = |x: &[f32], n: usize, norm: Option<RmsNorm<'_>>| -> Vec<f32> {
                let mut x = x.to_vec();
                if let Some(norm) = norm {
                    let input = x.clone();
                    rms_norm(&pool(1), isa, norm, dim, &input, &mut x).unwrap();
                }
                for (row, x) in rows.iter().zip(x.chunks_mut(n * dim)).filter(|_| rotate) {
                    rope(isa, &table, row.position as usize, dim, x).unwrap();
                }
                x
            };
            let (want_q, want_k) = (parts(&q, heads, q_norm), parts(&k, kv_heads, k_norm));
            let mut want = AlignedBuf::<u8>::zeroed(64 + 4 * stride);
            for (i, row) in rows.iter().enumerate() {
                let start = blocks[row.sequence as usize][row.position as usize / 16] as usize * 64 + 64;
                let k = &want_k[i * kv_heads * dim..(i + 1) * kv_heads * dim];
                let v = &v[i * kv_heads * v_dim..(i + 1) * kv_heads * v_dim];
                let block = &mut want[start..start + layout.bytes()];
                kv_write(isa, &layout, block, row.position as usize % 16, k, v).unwrap();
            }
            for threads in [1, 3] {
                let mut arena = AlignedBuf::<u8>::zeroed(64 + 4 * stride);
                let (mut q, mut k) = (q.clone(), k.clone());
                let plan = StepPlan::new(shape, &rows, &placements, threads).unwrap();
                let mut view = ArenaView::new(&mut arena).unwrap();
                let qkv = Qkv { q: &mut q, k: &mut k, v: &v };
                norm_rope_write(&pool(threads), isa, &plan, &step, &mut view, qkv).unwrap();
                assert_eq!((&q, &k), (&want_q, &want_k));
                assert_eq!(&arena[..], &want[..]);
            }
        }
    }
    // Two rows that would write one slot.
    let twice = [rows[0], rows[0]];
    let plan = StepPlan::new(shape, &twice, &placements, 1).unwrap();
    let mut arena = AlignedBuf::<u8>::zeroed(64 + 4 * stride);
    let mut view = ArenaView::new(&mut arena).unwrap();
    let step = QkvStep { layer_offset: 0, q_norm: None, k_norm: None, rope: None };
    let (mut q, mut k) = (numbers(2 * heads * dim), numbers(2 * kv_heads * dim));
    let v = numbers(2 * kv_heads * v_dim);
    let result =
        norm_rope_write(&pool(1), Isa::Scalar, &plan, &step, &mut view, Qkv { q: &mut q, k: &mut k, v: &v });
    assert!(matches!(result, Err(Error::OverlappingWrites { .. })));
}
