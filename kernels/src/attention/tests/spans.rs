//! Rows that see a span of positions in both directions.

use super::*;

/// A sequence of 1,100 positions with spans at its start, across a tile's and a split's border, and next to each
/// other, and one of 40.
fn world(ty: KvTypes, dims: (usize, usize), window: u32, seed: u64) -> World {
    let mut world = World::new(shape(ty, 16, 4, 2, dims, window), &[1100, 40], seed);
    world.spans = vec![(0, 0..5), (0, 100..180), (0, 1010..1040), (0, 1040..1047), (1, 3..30)];
    world
}

const WINDOWS: [u32; 4] = [0, 1, 12, 200];

#[test]
fn rows_of_a_span_see_all_of_it_and_what_others_see() {
    for (i, window) in WINDOWS.into_iter().enumerate() {
        for dims in [(24, 24), (64, 64), (40, 72)] {
            let world = world(TYPES[i], dims, window, i as u64);
            let rows =
                [rows_of(0, 0..8), rows_of(0, 96..184), rows_of(0, 1000..1050), rows_of(1, 0..40)].concat();
            let mut first = None;
            for isa in Isa::available() {
                let mut memory = Memory::new(&world, &[1100, 40], BlockOrder::Permuted(7), isa);
                let out = step(&world, &mut memory, &rows, &pool(2), isa);
                match &first {
                    None => assert_close(&world, &rows, &out),
                    Some(first) => assert_eq!(&out, first, "{isa}"),
                }
                first.get_or_insert(out);
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_batch_chunks_threads_or_placement() {
    let isa = Isa::detect();
    for window in WINDOWS {
        let world = world(KvType::F16.into(), (64, 64), window, 5);
        let rows = [rows_of(0, 0..200), rows_of(1, 0..40), rows_of(0, 1000..1100)].concat();
        let mut memory = Memory::new(&world, &[1100, 40], BlockOrder::Contiguous, isa);
        let whole = step(&world, &mut memory, &rows, &pool(1), isa);
        assert_eq!(step(&world, &mut memory, &rows, &pool(2), isa), whole);
        let mut paged = Memory::new(&world, &[1100, 40], BlockOrder::Permuted(3), isa);
        assert_eq!(step(&world, &mut paged, &rows, &pool(2), isa), whole);
        // Parts that end where a span ends, or have its end without its start.
        for part in [0..5, 5..100, 100..180, 150..180, 179..180, 180..200, 200..240, 250..287, 280..340] {
            assert_eq!(step(&world, &mut paged, &rows[part.clone()], &pool(2), isa), whole[part]);
        }
        let turned: Vec<_> = rows.iter().rev().copied().collect();
        let mut out = step(&world, &mut paged, &turned, &pool(1), isa);
        out.reverse();
        assert_eq!(out, whole);
    }
}

#[test]
fn a_span_outside_the_step_is_refused() {
    let shape = shape(KvType::F16, 16, 1, 1, (8, 8), 0);
    let placements = [BlockTable::Paged(&[0, 8])];
    let plan = |rows: std::ops::Range<usize>, spans: &[(u32, u32)]| {
        StepPlan::with_spans(shape, &rows_of(0, rows), spans, &placements, 1).map(|plan| plan.rows())
    };
    assert_eq!(plan(4..6, &[(4, 6), (4, 6)]), Ok(2));
    assert_eq!(plan(4..6, &[(2, 6), (0, 0)]), Ok(2));
    let refused = |position, start, end| Err(Error::Span { position, start, end });
    assert_eq!(plan(4..6, &[(4, 7), (4, 7)]), refused(4, 4, 7));
    assert_eq!(plan(4..6, &[(5, 6), (5, 6)]), refused(4, 5, 6));
    assert_eq!(plan(4..6, &[(0, 0), (4, 5)]), refused(5, 4, 5));
    assert_eq!(plan(4..6, &[(4, 6), (5, 6)]), refused(5, 5, 6));
    assert!(matches!(plan(4..6, &[(4, 6)]), Err(Error::Length { .. })));
}
