//! Tests of products of heads.

use super::*;
use crate::backend::{HeadMatmulOp, HeadPart};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Compares with sums in f64, and each row with the row alone.
    #[test]
    fn every_head_is_multiplied_by_its_matrix(
        seed: u64,
        heads in 1_usize..5,
        rows in 1_usize..7,
        cols in 1_usize..70,
        outputs in 1_usize..50,
        (at, behind) in (0_usize..9, 0_usize..5),
    ) {
        let width = at + outputs + behind;
        let mut random = Random(seed);
        let x = random.values(rows * heads * cols);
        let weights = random.values(heads * outputs * cols);
        let front = random.values(rows * heads * at.max(1));
        let run = |backend: &mut CpuBackend, rows: std::ops::Range<usize>| {
            let input = buffer(backend, heads * cols, &x[rows.start * heads * cols..rows.end * heads * cols]);
            let out = buffer(backend, heads * width, &vec![7.0; rows.len() * heads * width]);
            let matrix = matrix(backend, heads, cols, &weights);
            let part = HeadPart { buffer: out, width, at };
            backend.head_matmul(&HeadMatmulOp { x: input, matrix, heads, scale: 2.0, out: part }).unwrap();
            if at > 0 {
                let part = HeadPart { at: 0, ..part };
                let front = &front[rows.start * heads * at..rows.end * heads * at];
                let front = buffer(backend, heads * at, front);
                backend.place_heads(front, heads, &part).unwrap();
            }
            assert_eq!(values(backend, input).len(), rows.len() * heads * cols);
            values(backend, out)
        };
        let out = on_every_isa(ActivationMode::F32, |backend| run(backend, 0..rows));
        for (number, head) in out.chunks_exact(width).enumerate() {
            let x = &x[number * cols..][..cols];
            for (i, found) in head.iter().enumerate() {
                let expected = match i.checked_sub(at) {
                    None => f64::from(front[number * at + i]),
                    Some(row) if row < outputs => {
                        let w = &weights[(number % heads * outputs + row) * cols..][..cols];
                        2.0 * x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>()
                    }
                    Some(_) => 7.0,
                };
                prop_assert!((f64::from(*found) - expected).abs() < 1e-4, "{found} is not {expected}");
            }
        }
        let last = on_every_isa(ActivationMode::F32, |backend| run(backend, rows - 1..rows));
        prop_assert_eq!(&last[..], &out[(rows - 1) * heads * width..]);
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut backend = device(Isa::Scalar, ActivationMode::F32, 1);
    let x = buffer(&mut backend, 8, &[0.0; 16]);
    let out = backend.create_buffer(2, 12).unwrap();
    let matrix = matrix(&mut backend, 2, 4, &[0.0; 2 * 3 * 4]);
    let part = HeadPart { buffer: out, width: 6, at: 3 };
    let op = HeadMatmulOp { x, matrix, heads: 2, scale: 1.0, out: part };
    backend.head_matmul(&op).unwrap();
    let refused = |backend: &mut CpuBackend, op| backend.head_matmul(&op).unwrap_err();
    let beyond = HeadMatmulOp { out: HeadPart { at: 4, ..part }, ..op };
    assert!(matches!(refused(&mut backend, beyond), Error::OutOfRange { what: "column of a head", .. }));
    let one_head = HeadMatmulOp { heads: 1, ..op };
    assert!(matches!(refused(&mut backend, one_head), Error::Length { .. }));
    let in_place = HeadMatmulOp { out: HeadPart { buffer: x, ..part }, ..op };
    assert_eq!(refused(&mut backend, in_place), Error::SameBuffer);
    assert!(matches!(backend.place_heads(x, 3, &part), Err(Error::Length { .. })));
    assert!(matches!(backend.place_heads(x, 2, &part), Err(Error::OutOfRange { .. })));
}
