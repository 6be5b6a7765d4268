//! Bit equality: the other rows of a step never change a row.

use super::*;

/// Lengths that put rows on both sides of tile and split borders.
const LENGTH: usize = 1100;

/// Head groups and widths of the models served, and unusual ones.
const SHAPES: [(usize, usize, (usize, usize)); 5] =
    [(9, 3, (64, 64)), (2, 2, (24, 24)), (4, 1, (80, 48)), (4, 2, (128, 128)), (4, 1, (256, 256))];

fn worlds() -> impl Iterator<Item = World> {
    SHAPES.into_iter().enumerate().flat_map(|(i, (heads, kv, dims))| {
        // An emulated processor takes minutes for all types with all shapes.
        let types = if i < 2 { &TYPES[..] } else { &TYPES[..3] };
        types.iter().flat_map(move |&ty| {
            [0, 100].map(|window| {
                let shape = shape(ty, [16, 32, 64][i % 3], heads, kv, dims, window);
                World::new(shape, &[LENGTH, 70], 11 + i as u64)
            })
        })
    })
}

#[test]
fn a_row_does_not_depend_on_batch_chunks_threads_or_placement() {
    let isa = Isa::detect();
    let (one, two) = (pool(1), pool(2));
    for world in worlds() {
        let mut rows = rows_of(0, 1000..LENGTH);
        rows.extend(rows_of(1, 10..70));
        let mut memory = Memory::new(&world, &[LENGTH, 70], BlockOrder::Contiguous, isa);
        let whole = step(&world, &mut memory, &rows, &one, isa);
        let shape = world.shape;
        assert!(whole.iter().flatten().all(|x| x.is_finite()));
        assert_eq!(step(&world, &mut memory, &rows, &two, isa), whole, "threads, {shape:?}");
        let mut paged = Memory::new(&world, &[LENGTH, 70], BlockOrder::Permuted(3), isa);
        assert_eq!(step(&world, &mut paged, &rows, &two, isa), whole, "placement, {shape:?}");
        // Single rows, at borders and between them, as decode steps.
        for index in [0, 1, 22, 23, 24, 25, 63, 99, 100, 117, 118, 119, 159] {
            let alone = step(&world, &mut paged, &rows[index..=index], &two, isa);
            assert_eq!(alone[0], whole[index], "alone, {shape:?}");
        }
        // In chunks of 7, with the other sequence in reverse order.
        let mut chunked = Vec::new();
        for chunk in rows[..100].chunks(7) {
            let mut step_rows: Vec<_> = chunk.to_vec();
            step_rows.push(rows[159]);
            let mut out = step(&world, &mut paged, &step_rows, &one, isa);
            out.truncate(chunk.len());
            chunked.extend(out);
        }
        assert_eq!(chunked, whole[..100], "chunks, {shape:?}");
        let turned: Vec<_> = rows.iter().rev().copied().collect();
        let mut out = step(&world, &mut paged, &turned, &one, isa);
        out.reverse();
        assert_eq!(out, whole, "order, {shape:?}");
    }
}

#[test]
fn keys_that_a_row_does_not_see_may_be_anything() {
    let isa = Isa::detect();
    let one = pool(1);
    for world in worlds() {
        let rows = rows_of(0, 1020..1026);
        let mut full = Memory::new(&world, &[LENGTH, 70], BlockOrder::Paged, isa);
        let expected = step(&world, &mut full, &rows, &one, isa);
        // The rest of memory is NaN: positions not yet written, and the other sequence.
        let mut poisoned = Memory::new(&world, &[1026, 0], BlockOrder::Paged, isa);
        if world.shape.visible != Visible::Causal {
            // Blocks before the window do not exist.
            for block in &mut poisoned.tables[0][..(1020 - 99) / world.shape.layout.block_tokens()] {
                *block = NO_BLOCK;
            }
        }
        assert_eq!(step(&world, &mut poisoned, &rows, &one, isa), expected, "{:?}", world.shape);
        assert_eq!(step(&world, &mut poisoned, &rows[5..], &one, isa), expected[5..], "{:?}", world.shape);
    }
}

#[test]
fn sequences_that_share_blocks_are_computed_together_with_equal_results() {
    let isa = Isa::detect();
    for ty in TYPES {
        for window in [0, 300] {
            let shape = shape(ty, 16, 6, 2, (64, 64), window);
            let mut world = World::new(shape, &[1210; 12], 9);
            // Two families: one shares 1,200 positions, one 1,100.
            for s in 1..12 {
                let (parent, shared) = if s < 7 { (0, 1200) } else { (11, 1100) };
                for p in 0..shared {
                    let (k, v) = (world.sequences[parent].k[p].clone(), world.sequences[parent].v[p].clone());
                    world.sequences[s].k[p] = k;
                    world.sequences[s].v[p] = v;
                }
            }
            let lengths: Vec<usize> = (0..12).map(|s| 1204 + s % 3).collect();
            let mut memory = Memory::new(&world, &lengths, BlockOrder::Permuted(1), isa);
            let rows: Vec<_> =
                lengths.iter().enumerate().flat_map(|(s, len)| rows_of(s, len - 1 - s % 2..*len)).collect();
            let apart = step(&world, &mut memory, &rows, &pool(1), isa);
            for s in 1..11 {
                let (parent, shared) = if s < 7 { (0, 1200) } else { (11, 1100) };
                let blocks = memory.tables[parent][..shared / 16].to_vec();
                memory.tables[s][..shared / 16].copy_from_slice(&blocks);
            }
            for threads in [1, 2] {
                assert_eq!(step(&world, &mut memory, &rows, &pool(threads), isa), apart, "{shape:?}");
            }
        }
    }
}
