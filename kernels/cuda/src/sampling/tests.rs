use super::super::tests::sim::{Sim, numbers};
use super::*;

/// Returns the indices and bits of the largest values, by the rule.
fn expected_best(row: &[f32], count: usize) -> Vec<(u32, u32)> {
    let rank = |x: f32| match (x.is_nan(), x.is_sign_negative()) {
        (true, _) => u32::MAX,
        (_, true) => !x.to_bits(),
        (_, false) => x.to_bits() | 1 << 31,
    };
    let mut indices: Vec<usize> = (0..row.len()).collect();
    indices.sort_by_key(|index| (std::cmp::Reverse(rank(row[*index])), *index));
    let mut best: Vec<_> =
        indices[..count].iter().map(|index| (*index as u32, row[*index].to_bits())).collect();
    best.sort_unstable();
    best
}

fn assert_best(sim: &mut Sim, rows: &[Vec<f32>], count: usize) {
    let compiled = sim.compiled(&source::SAMPLING);
    let kernels = SamplingKernels::load(&mut sim.device, compiled).unwrap();
    let of = Rows { rows: rows.len(), cols: rows[0].len() };
    let (x, out) = (sim.values(&rows.concat()), sim.room(8 * count * rows.len()));
    kernels.best(&mut sim.device, of, x, count, out).unwrap();
    let found = sim.read_numbers(out, 2 * count * rows.len());
    for (found, row) in found.chunks_exact(2 * count).zip(rows) {
        let mut found: Vec<(u32, u32)> =
            found.as_chunks::<2>().0.iter().map(|&[index, value]| (index, value)).collect();
        found.sort_unstable();
        assert_eq!(found, expected_best(row, count), "{count} of {} for {}", row.len(), sim.arch);
    }
}

#[test]
fn the_best_values_of_each_row_have_their_indices() {
    for mut sim in Sim::each() {
        let random = |seed, cols| numbers(seed, 0, cols);
        assert_best(&mut sim, &[random(1, 3000), random(2, 3000)], 64);
        assert_best(&mut sim, &[random(3, 64)], 64);
        assert_best(&mut sim, &[vec![0.25]], 1);
        // Few distinct values, so that many are equal, over several rounds of the block.
        let equal = |index: usize| ((index * 7919) % 5) as f32 - 2.0;
        assert_best(&mut sim, &[(0..2500).map(equal).collect(), vec![-1.5; 2500]], 33);
        // More than a step of the block: every value among the best so far, none of the later ones, all equal.
        let rising: Vec<f32> = (0..9000u16).map(f32::from).collect();
        let falling: Vec<f32> = rising.iter().rev().copied().collect();
        for count in [1, 64, 1024] {
            assert_best(&mut sim, &[rising.clone(), falling.clone(), vec![0.5; 9000]], count);
        }
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::MIN_POSITIVE / 2.0, -f32::NAN];
        let mixed: Vec<f32> = random(4, 70)
            .into_iter()
            .zip(0..)
            .map(|(x, i)| if i % 3 == 0 { odd[i % 7] } else { x })
            .collect();
        for count in [1, 20, 50, 69, 70] {
            assert_best(&mut sim, std::slice::from_ref(&mixed), count);
        }
    }
}

#[test]
fn more_values_than_a_row_has_are_refused() {
    let mut sim = Sim::each().next().unwrap();
    let compiled = sim.compiled(&source::SAMPLING);
    let kernels = SamplingKernels::load(&mut sim.device, compiled).unwrap();
    for (count, cols) in [(0, 3), (4, 3), (1025, 4096)] {
        let of = Rows { rows: 1, cols };
        assert!(kernels.best(&mut sim.device, of, DevicePtr(0), count, DevicePtr(0)).is_err());
    }
}
