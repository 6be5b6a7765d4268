use super::*;
use crate::attention::SAME;
use kernels::attention::Visible;
use kernels::backend::StateExport;
use std::num::NonZeroU32;
use std::ops::Range;

const LIMITS: StepLimits = StepLimits { rows: 8, sequences: 3, exports: 2, table_entries: 20 };
const ARENA: usize = 64 * 100;

fn group(visible: Visible) -> KvGroup {
    KvGroup { block_tokens: 16, bytes: 128, visible }
}

fn sequence(rows: Range<usize>, context: usize) -> StepSequence {
    StepSequence { rows, context, segment_start: None }
}

/// Three sequences with five rows in total. One group sees everything, one has a window of four.
struct Input {
    sequences: Vec<StepSequence>,
    tables: Vec<Vec<Vec<u32>>>,
    states: Vec<StepState>,
}

impl Input {
    fn new() -> Self {
        let sequences = vec![
            sequence(0..2, 15),
            StepSequence { segment_start: Some(1), ..sequence(2..4, 0) },
            sequence(4..5, 40),
        ];
        let full = vec![vec![2, 4, 0xdead], vec![6], vec![8, 10, 12]];
        let windowed = vec![vec![20, 22], vec![24], vec![NO_BLOCK, NO_BLOCK, 26]];
        let states = vec![
            StepState {
                read: Some(30),
                write: 30,
                exports: vec![StateExport { row: 1, slot: 32 }],
                deferred: false,
            },
            StepState { read: None, write: 34, exports: vec![], deferred: true },
            StepState { read: Some(36), write: 38, exports: vec![], deferred: false },
        ];
        Self { sequences, tables: vec![full, windowed], states }
    }

    fn fill(&self, step: &mut Step) -> Result<(), Error> {
        let tables: Vec<Vec<_>> =
            self.tables.iter().map(|tables| tables.iter().map(|t| BlockTable::Paged(t)).collect()).collect();
        let tokens: Vec<u32> = (100..).take(self.sequences.iter().map(|s| s.rows.len()).sum()).collect();
        let (sequences, states) = (&self.sequences[..], &self.states[..]);
        step.fill(&StepInput { tokens: &tokens, sequences, tables: &tables, states }, ARENA)
    }

    fn refused(&self) -> Error {
        self.fill(&mut step()).unwrap_err()
    }
}

fn step() -> Step {
    let window = Visible::Window(NonZeroU32::new(4).unwrap());
    Step::new(StepLayout::new(LIMITS, &[group(Visible::Causal), group(window)]))
}

/// Returns the first elements of an array of a step at address 0.
fn array(step: &Step, ptr: DevicePtr, len: usize) -> Vec<u32> {
    let words = step.bytes()[ptr.0 as usize..].as_chunks().0;
    words[..len].iter().map(|word| u32::from_ne_bytes(*word)).collect()
}

#[test]
fn every_array_is_at_the_address_that_kernels_use() {
    let mut step = step();
    Input::new().fill(&mut step).unwrap();
    let at = step.layout().at(DevicePtr(0));
    let array = |ptr, len| array(&step, ptr, len);
    assert_eq!(array(at.tokens, 5), [100, 101, 102, 103, 104]);
    assert_eq!(array(at.positions, 5), [15, 16, 0, 1, 40]);
    assert_eq!(array(at.row_sequences, 5), [0, 0, 1, 1, 2]);
    assert_eq!(array(at.segments, 5), [0, 0, 0, 1, 0]);
    assert_eq!(array(at.sequence_ends, 3), [17, 2, 41]);
    assert_eq!((array(at.kept_rows, 2), step.kept_rows()), (vec![2, 3], 2));
    let states = at.states;
    assert_eq!(array(states.first_rows, 3), [0, 2, 4]);
    assert_eq!(array(states.rows, 3), [2, 2, 1]);
    assert_eq!(array(states.reads, 3), [30, NO_SLOT, 36]);
    assert_eq!(array(states.writes, 3), [30, NO_SLOT, 38]);
    assert_eq!(array(states.export_starts, 4), [0, 1, 1, 1]);
    assert_eq!(array(states.export_rows, 1), [1]);
    assert_eq!(array(states.export_slots, 1), [32]);
    for group in 0..2 {
        assert_eq!(array(at.order(group), 5), [0, 1, 2, 3, 4]);
        assert_eq!(array(at.common(group), 5), [0, SAME, 0, SAME, 0]);
    }
    let table = |group: usize, sequence: usize, blocks: usize| {
        let start = array(at.table_starts(group), 3)[sequence] as usize;
        array(at.tables.offset(4 * start), blocks)
    };
    assert_eq!(table(0, 0, 2), [2, 4]);
    assert_eq!(table(0, 1, 1), [6]);
    assert_eq!(table(0, 2, 3), [8, 10, 12]);
    assert_eq!(table(1, 0, 2), [20, 22]);
    assert_eq!(table(1, 2, 3), [NO_BLOCK, NO_BLOCK, 26]);
    assert_eq!(step.rows(), 5);
    // The tables end the step, and unused room is not uploaded.
    assert_eq!(step.bytes().len(), at.tables.0 as usize + 4 * (2 + 1 + 3 + 2 + 1 + 3));
    assert!(step.bytes().len() < step.layout().bytes());
}

#[test]
fn contiguous_sequences_get_a_table_of_their_blocks() {
    let mut step = Step::new(StepLayout::new(LIMITS, &[group(Visible::Causal)]));
    let tables = vec![vec![BlockTable::Contiguous { first: 10, stride: 3 }]];
    let sequences = [sequence(0..1, 32)];
    let input = StepInput { tokens: &[7], sequences: &sequences, tables: &tables, states: &[] };
    step.fill(&input, ARENA).unwrap();
    let at = step.layout().at(DevicePtr(0));
    assert_eq!(array(&step, at.tables, 3), [10, 13, 16]);
}

/// Single rows are placed next to rows whose caches begin with the same blocks, as far as they see whole
/// splits.
#[test]
fn sequences_with_a_common_beginning_are_adjacent() {
    const TOKENS: usize = 64;
    // (positions before the step, blocks of the named common beginning, name); the other blocks are the
    // sequence's own.
    let specs = [
        (1100, 16, "a"),
        (1049, 16, "a"),
        (1600, 10, "b"),
        (520, 8, "a"),
        // Its row is the last of its first split, in its own block.
        (511, 7, "a"),
        (600, 9, "b"),
        (3, 0, "b"),
    ];
    let mut next = 500;
    let tables: Vec<Vec<u32>> = specs
        .iter()
        .map(|(context, shared, of)| {
            let first = if *of == "a" { 200 } else { 100 };
            let own = context / TOKENS + 1 - shared;
            next += own as u32;
            (first..first + *shared as u32).chain(next - own as u32..next).map(|block| 2 * block).collect()
        })
        .collect();
    let single: Vec<_> =
        (0..).zip(specs).map(|(row, (context, ..))| sequence(row..row + 1, context)).collect();
    let window = Visible::Window(NonZeroU32::new(2000).unwrap());
    let groups =
        [Visible::Causal, window].map(|visible| KvGroup { block_tokens: TOKENS, bytes: 128, visible });
    let limits = StepLimits { rows: 12, sequences: 9, exports: 0, table_entries: 500 };
    let mut step = Step::new(StepLayout::new(limits, &groups));
    let mut fill = |sequences: &[StepSequence], tables: &[&[u32]]| {
        let rows = sequences.last().unwrap().rows.end;
        let placed: Vec<_> = tables.iter().map(|table| BlockTable::Paged(table)).collect();
        let (tokens, tables) = (vec![0; rows], [placed.clone(), placed]);
        let input = StepInput { tokens: &tokens, sequences, tables: &tables, states: &[] };
        step.fill(&input, 1 << 20).unwrap();
        let at = step.layout().at(DevicePtr(0));
        [0, 1].map(|group| (array(&step, at.order(group), rows), array(&step, at.common(group), rows)))
    };
    let paged: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
    let [causal, windowed] = fill(&single, &paged);
    assert_eq!(causal, (vec![6, 5, 2, 3, 0, 1, 4], vec![0, 0, 1, 0, 1, 2, 0]));
    assert_eq!(windowed, ((0..7).collect(), vec![0; 7]));

    // After a prompt, with a prompt that ends a run of single rows, and with sequences without rows.
    let lengths = [(3, 0), (1, 1), (1, 0), (0, 3), (1, 3), (2, 5), (1, 1)];
    let own: Vec<u32> = (3000..3010).collect();
    let mut rows = 0;
    let sequences = lengths.map(|(count, of)| {
        rows += count;
        sequence(rows - count..rows, if of == 5 || (of == 0 && count == 3) { 0 } else { specs[of].0 })
    });
    let last: Vec<u32> = paged[1].iter().take(16).copied().chain(4000..4002).collect();
    let tables = [&own[..1], paged[1], paged[0], paged[3], paged[3], &own[2..3], &last];
    let [causal, _] = fill(&sequences, &tables);
    let expected = (vec![0, 1, 2, 5, 3, 4, 6, 7, 8], vec![0, SAME, SAME, 0, 1, 2, 0, SAME, 0]);
    assert_eq!((&causal.0, &causal.1), (&expected.0, &expected.1));
}

#[test]
fn tables_that_kernels_could_not_read_are_refused() {
    let with = |change: &dyn Fn(&mut Input)| {
        let mut input = Input::new();
        change(&mut input);
        input.refused()
    };
    let missing = with(&|input| input.tables[0][2][1] = NO_BLOCK);
    assert_eq!(missing, Error::MissingBlock { sequence: 2, block: 1 });
    let short = with(&|input| input.tables[1][2].truncate(2));
    assert_eq!(short, Error::MissingBlock { sequence: 2, block: 2 });
    let outside = with(&|input| input.tables[0][1][0] = 99);
    assert_eq!(outside, Error::OutsideArena { end: 101 * 64, len: ARENA });
    let shared = with(&|input| input.tables[0][1][0] = 3);
    assert_eq!(shared, Error::OverlappingWrites { offset: 3 * 64 });
    let same = with(&|input| input.tables[0][1][0] = 4);
    assert_eq!(same, Error::OverlappingWrites { offset: 4 * 64 });
    assert!(matches!(
        with(&|input| {
            input.tables.pop();
        }),
        Error::OutOfRange { index: 1, .. }
    ));
    assert!(matches!(
        with(&|input| {
            input.tables[1].pop();
        }),
        Error::Length { .. }
    ));
    assert!(matches!(
        with(&|input| {
            input.states.pop();
        }),
        Error::Length { .. }
    ));
    assert!(matches!(with(&|input| input.sequences[1].rows = 3..4), Error::Length { .. }));
}

#[test]
fn a_step_beyond_the_limits_is_refused() {
    let with = |limits: StepLimits| {
        let groups = [group(Visible::Causal), group(Visible::Causal)];
        let mut input = Input::new();
        input.tables[1] = vec![vec![20, 22], vec![24], vec![26, 28, 40]];
        input.fill(&mut Step::new(StepLayout::new(limits, &groups)))
    };
    with(StepLimits { rows: 5, sequences: 3, exports: 1, table_entries: 12 }).unwrap();
    for limits in [
        StepLimits { rows: 4, ..LIMITS },
        StepLimits { sequences: 2, ..LIMITS },
        StepLimits { exports: 0, ..LIMITS },
        StepLimits { table_entries: 11, ..LIMITS },
    ] {
        let refused = with(limits).unwrap_err();
        assert!(matches!(refused, Error::OutOfRange { .. }), "{refused}");
    }
}

#[test]
fn an_encoder_gets_whole_sequences() {
    let mut step = Step::new(StepLayout::new(LIMITS, &[group(Visible::Whole)]));
    let tables = vec![vec![BlockTable::Paged(&[0, 2])]];
    let mut fill = |context: usize| {
        let sequences = [sequence(0..2, context)];
        step.fill(&StepInput { tokens: &[1, 2], sequences: &sequences, tables: &tables, states: &[] }, ARENA)
    };
    assert_eq!(fill(0), Ok(()));
    assert_eq!(fill(1), Err(Error::PartialSequence { sequence: 0, position: 0 }));
}
