//! Adapters on some rows of a step.

use super::*;
use crate::backend::{AdapterId, LowRankSource};
use crate::reference::rows::low_rank;

const COLS: usize = 70;
const OUTPUTS: [usize; 2] = [50, 33];
const RANKS: [usize; 2] = [4, 9];

/// The model's products of `x` with two matrices, whose rows have these adapters of two.
fn products(backend: &mut CpuBackend, x: &[f32], of_rows: &[Option<usize>], accumulate: bool) -> Vec<f32> {
    let (mut random, rows) = (Random(11), of_rows.len());
    let matrices = OUTPUTS.map(|outputs| matrix(backend, 1, COLS, &random.values(outputs * COLS)));
    // The second adapter adds to the second matrix only.
    let ids: Vec<AdapterId> = RANKS
        .iter()
        .enumerate()
        .map(|(number, &rank)| {
            let parts: Vec<_> = (number..2)
                .map(|m| (matrices[m], random.values(rank * COLS), random.values(OUTPUTS[m] * rank)))
                .collect();
            let sources: Vec<LowRankSource<'_>> = parts
                .iter()
                .map(|(matrix, a, b)| LowRankSource { matrix: *matrix, rank, scale: 0.5, a, b })
                .collect();
            backend.load_adapter(&sources).unwrap()
        })
        .collect();
    let input = buffer(backend, COLS, x);
    let outs = OUTPUTS.map(|outputs| buffer(backend, outputs, &vec![1.0; rows * outputs]));
    let of_rows: Vec<_> = of_rows
        .iter()
        .enumerate()
        .filter_map(|(row, number)| number.map(|number| (row..row + 1, ids[number])))
        .collect();
    backend.use_adapters(&of_rows).unwrap();
    let sequences = [StepSequence { rows: 0..rows, context: 0, segment_start: None }];
    begin(backend, &vec![0; rows], &sequences).unwrap();
    let job = |m: usize| MatmulJob { matrix: matrices[m], out: outs[m], bias: None, scale: 2.0, accumulate };
    backend.matmul(input, &[job(0), job(1)]).unwrap();
    outs.iter().flat_map(|out| values(backend, *out)).collect()
}

#[test]
fn each_row_gets_what_its_own_adapter_adds() {
    let x = Random(3).values(5 * COLS);
    let of_rows = [Some(1), None, Some(0), Some(1), Some(0)];
    let run =
        |backend: &mut CpuBackend, of_rows: &[Option<usize>], x: &[f32]| products(backend, x, of_rows, true);
    for mode in [ActivationMode::F32, ActivationMode::Int8] {
        let together = on_every_isa(mode, |backend| run(backend, &of_rows, &x));
        let plain = on_every_isa(mode, |backend| run(backend, &[None; 5], &x));
        // A row has the same bits alone.
        for (row, of_row) in of_rows.iter().enumerate() {
            let x = &x[row * COLS..][..COLS];
            let alone = run(&mut device(Isa::detect(), mode, 1), &[*of_row], x);
            let own: Vec<f32> = [0, 5 * OUTPUTS[0]]
                .iter()
                .zip(OUTPUTS)
                .flat_map(|(start, outputs)| together[start + row * outputs..][..outputs].to_vec())
                .collect();
            assert_eq!(bits(&own), bits(&alone), "row {row}");
        }
        // And it is what the definition says. The values are made in the order of `products`.
        let mut random = Random(11);
        OUTPUTS.iter().for_each(|outputs| drop(random.values(outputs * COLS)));
        let parts: Vec<Vec<(Vec<f32>, Vec<f32>)>> = (0..2)
            .map(|number| {
                let part = |m: usize| {
                    (random.values(RANKS[number] * COLS), random.values(OUTPUTS[m] * RANKS[number]))
                };
                (number..2).map(part).collect()
            })
            .collect();
        for (row, of_row) in of_rows.iter().enumerate() {
            for m in 0..2 {
                let start = m * 5 * OUTPUTS[0] + row * OUTPUTS[m];
                let (got, before) = (&together[start..][..OUTPUTS[m]], &plain[start..][..OUTPUTS[m]]);
                let part =
                    of_row.and_then(|number| Some((number, parts[number].get(m.checked_sub(number)?)?)));
                let added = part.map_or(vec![0.0; OUTPUTS[m]], |(number, (a, b))| {
                    low_rank(RANKS[number], 0.5, a, b, &x[row * COLS..][..COLS])
                });
                let expected: Vec<f64> = before.iter().zip(added).map(|(x, y)| f64::from(*x) + y).collect();
                assert_close(got, &expected, 1e-4);
            }
        }
    }
}

#[test]
fn adapters_end_with_their_step_and_with_their_unloading() {
    let mut backend = device(Isa::detect(), ActivationMode::F32, 1);
    let x = Random(5).values(2 * COLS);
    let with = products(&mut backend, &x, &[Some(0), Some(1)], false);
    let matrices = [MatrixId(0), MatrixId(1)];
    let again = |backend: &mut CpuBackend| {
        let input = buffer(backend, COLS, &x);
        let outs = OUTPUTS.map(|outputs| backend.create_buffer(2, outputs).unwrap());
        let job = |m: usize| MatmulJob {
            matrix: matrices[m],
            out: outs[m],
            bias: None,
            scale: 2.0,
            accumulate: false,
        };
        let sequences = [StepSequence { rows: 0..2, context: 0, segment_start: None }];
        begin(backend, &[0; 2], &sequences).unwrap();
        backend.matmul(input, &[job(0), job(1)]).unwrap();
        outs.iter().flat_map(|out| values(backend, *out)).collect::<Vec<f32>>()
    };
    let without = again(&mut backend);
    assert_ne!(bits(&with), bits(&without));
    let both = [(0..1, AdapterId::new(0)), (1..2, AdapterId::new(1))];
    backend.use_adapters(&both).unwrap();
    assert_eq!(bits(&again(&mut backend)), bits(&with));
    assert_eq!(bits(&again(&mut backend)), bits(&without));
    let bytes = backend.memory().weights;
    backend.unload_adapter(AdapterId::new(1));
    assert!(backend.memory().weights < bytes);
    assert!(backend.use_adapters(&both).is_err());
    // Rows that the step does not have.
    backend.use_adapters(&[(1..3, AdapterId::new(0))]).unwrap();
    let sequences = [StepSequence { rows: 0..2, context: 0, segment_start: None }];
    assert!(begin(&mut backend, &[0; 2], &sequences).is_err());
    // A part that does not fit, and two for one matrix.
    let (a, b) = (vec![0.0; COLS], vec![0.0; OUTPUTS[0]]);
    let part = LowRankSource { matrix: matrices[0], rank: 1, scale: 1.0, a: &a, b: &b };
    assert!(backend.load_adapter(&[LowRankSource { a: &a[1..], ..part }]).is_err());
    assert!(backend.load_adapter(&[part, part]).is_err());
}
