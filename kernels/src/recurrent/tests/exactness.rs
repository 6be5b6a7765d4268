//! Bit equality: only a sequence's own rows and the state before them influence its result.

use super::*;

/// The outputs of all rows of a sequence and the states after each, as bits.
type History = (Vec<u32>, Vec<StateBits>);

/// Runs a sequence alone, one row per step, in place, on one thread.
fn stepped(layer: &Layer, isa: Isa, rows: &Rows) -> History {
    let mut arena = layer.arena(1);
    let (mut out, mut states) = (Vec::new(), Vec::new());
    let pool = pool(1);
    for row in 0..rows.len() {
        let state = write((row > 0).then_some(0), 0);
        out.extend(step(layer, isa, &pool, &mut arena, &[(&rows.slice(row..row + 1), state)]).remove(0));
        states.push(layer.state(&arena, 0));
    }
    (out, states)
}

fn all_sizes() -> impl Strategy<Value = Sizes> {
    let odd_sizes =
        (prop::sample::select(&ODD[..]), any::<u32>()).prop_map(|(odd, bf16)| Sizes { bf16, ..odd });
    prop_oneof![4 => sizes(), 1 => odd_sizes]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_isa_gives_the_same_bits(sizes in all_sizes(), rows in 1..12usize, seed in 0..1_000_000u64) {
        let layer = Layer::new(sizes, seed);
        let rows = Rows::new(&layer, rows, seed);
        let expected = stepped(&layer, Isa::Scalar, &rows);
        for isa in Isa::available() {
            prop_assert!(stepped(&layer, isa, &rows) == expected, "{}", isa);
        }
    }

    #[test]
    fn bfloat16_rounds_each_stored_state(sizes in all_sizes(), rows in 1..6usize, seed in 0..1_000_000u64) {
        let (layer, wide) = (Layer::new(sizes, seed), Layer::new(Sizes { bf16: 0, ..sizes }, seed));
        let rows = Rows::new(&layer, rows, seed);
        let (out, states) = stepped(&layer, Isa::detect(), &rows);
        let (mut arena, mut expected_out) = (wide.arena(1), Vec::new());
        for (row, expected_state) in states.iter().enumerate() {
            let state = write((row > 0).then_some(0), 0);
            let rows = [(&rows.slice(row..row + 1), state)];
            expected_out.extend(step(&wide, Isa::detect(), &pool(1), &mut arena, &rows).remove(0));
            for head in (0..wide.shape().heads).filter(|head| sizes.bf16 >> head & 1 == 1) {
                let start = OFFSET + wide.layout.strip(head, 0) * size_of::<f32>();
                let len = wide.layout.strips() * wide.layout.strip_len(head) * size_of::<f32>();
                for value in arena[start..start + len].as_chunks_mut().0 {
                    *value = half::bf16::from_f32(f32::from_ne_bytes(*value)).to_f32().to_ne_bytes();
                }
            }
            prop_assert!(wide.state(&arena, 0) == *expected_state);
        }
        prop_assert!(out == expected_out);
    }

    #[test]
    fn any_chunking_equals_single_steps(
        sizes in all_sizes(),
        chunks in prop::collection::vec((prop_oneof![4 => 1..12usize, 1 => 60..140usize], any::<bool>()), 1..6),
        seed in 0..1_000_000u64,
    ) {
        let layer = Layer::new(sizes, seed);
        let total = chunks.iter().map(|(rows, _)| rows).sum();
        let rows = Rows::new(&layer, total, seed);
        let (expected, states) = stepped(&layer, Isa::detect(), &rows);
        let mut arena = layer.arena(2);
        let (mut row, mut at, mut out) = (0, None, Vec::new());
        for (len, move_on) in chunks {
            // In place, or from one slot to the other.
            let (from, to) = (at, if move_on { 1 - at.unwrap_or(0) } else { at.unwrap_or(0) });
            let before = from.map(|from| layer.state(&arena, layer.slot(from)));
            let state = write(from.map(|from| layer.slot(from)), layer.slot(to));
            let chunk = [(&rows.slice(row..row + len), state)];
            out.extend(step(&layer, Isa::detect(), &pool(1), &mut arena, &chunk).remove(0));
            row += len;
            prop_assert!(layer.state(&arena, layer.slot(to)) == states[row - 1]);
            if let Some(from) = from && from != to {
                prop_assert!(Some(layer.state(&arena, layer.slot(from))) == before, "the slot read has changed");
            }
            at = Some(to);
        }
        prop_assert!(out == expected);
    }

    #[test]
    fn an_export_equals_the_state_of_a_sequence_that_ends_there(
        sizes in all_sizes(),
        context in 0..3usize,
        rows in 1..=8usize,
        copies_per_row in prop::collection::vec(0..3usize, 8),
        in_place in any::<bool>(),
        seed in 0..1_000_000u64,
    ) {
        let layer = Layer::new(sizes, seed);
        let all = Rows::new(&layer, context + rows, seed);
        let (expected, states) = stepped(&layer, Isa::detect(), &all);
        // Zero, one or two copies after each row.
        let copies = copies_per_row[..rows].iter().enumerate();
        let exported = copies.flat_map(|(row, copies)| (0..*copies).map(move |_| row));
        let exports: Vec<StateExport> = exported
            .enumerate()
            .map(|(i, row)| StateExport { row, slot: layer.slot(2 + i) })
            .collect();
        for isa in Isa::available() {
            let mut arena = layer.arena(2 + exports.len());
            if context > 0 {
                step(&layer, isa, &pool(1), &mut arena, &[(&all.slice(0..context), write(None, 0))]);
            }
            let read = (context > 0).then_some(0);
            let last = if in_place { 0 } else { layer.slot(1) };
            let state = StepState { read, write: last, exports: exports.clone(), deferred: false };
            let tail = all.slice(context..context + rows);
            let out = step(&layer, isa, &pool(1), &mut arena, &[(&tail, state)]);
            prop_assert!(expected.ends_with(&out[0]));
            for export in &exports {
                prop_assert!(layer.state(&arena, export.slot) == states[context + export.row]);
            }
            prop_assert!(layer.state(&arena, last) == states[context + rows - 1]);
        }
    }

    #[test]
    fn neighbours_and_threads_do_not_matter(
        sizes in all_sizes(),
        lens in prop::collection::vec(0..10usize, 1..6),
        fork in any::<bool>(),
        seed in 0..1_000_000u64,
    ) {
        let layer = Layer::new(sizes, seed);
        let prefix = Rows::new(&layer, 3, seed);
        let tails: Vec<Rows> =
            lens.iter().enumerate().map(|(i, len)| Rows::new(&layer, *len, seed + 100 * i as u64 + 1)).collect();
        let expected: Vec<_> = tails
            .iter()
            .map(|tail| {
                let mut all = if fork { prefix.clone() } else { Rows::new(&layer, 0, 0) };
                all.extend(tail);
                (stepped(&layer, Isa::detect(), &all), all.len())
            })
            .collect();
        for threads in [1, 2] {
            let pool = pool(threads);
            let mut arena = layer.arena(1 + tails.len());
            step(&layer, Isa::detect(), &pool, &mut arena, &[(&prefix, write(None, 0))]);
            // All sequences continue from one slot, or each starts without a state.
            let slot = |i: usize| layer.slot(1 + i);
            let sequences: Vec<_> = tails
                .iter()
                .enumerate()
                .map(|(i, tail)| (tail, write(fork.then_some(0), slot(i))))
                .collect();
            let out = step(&layer, Isa::detect(), &pool, &mut arena, &sequences);
            for (i, ((expected_out, states), rows)) in expected.iter().enumerate() {
                prop_assert!(expected_out.ends_with(&out[i]));
                // A sequence without rows keeps its state.
                let zeroes = || (vec![0; layer.shape().conv_len()], vec![0; layer.shape().recurrent_len()]);
                let state = rows.checked_sub(1).map_or_else(zeroes, |last| states[last].clone());
                prop_assert!(layer.state(&arena, slot(i)) == state);
            }
        }
    }
}
