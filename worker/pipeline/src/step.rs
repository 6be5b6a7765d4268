//! Converts a planned step into the message for other stages, and that message into the decoder's input.

use engine::Error;
use engine::decoder::{Blocks, Decoder};
use engine::kv_cache::{NULL_OFFSET, Slabs};
use engine::scheduler::{MAX_CONTEXT, PlannedSequence, Scheduler, SequenceState, StepPlan};
use kernels::backend::{
    BlockTable, KvCopy, MAX_DEFERRED_ROWS, StateExport, StepInput, StepSequence, StepState,
};
use proto::stage::{StageCopy, StageCounted, StageSequence, StageState, StageStep, StageTable};
use std::collections::VecDeque;

/// Maximum table entries of a step, summed over all sequences and including skipped blocks.
const MAX_ENTRIES: usize = 4 << 20;

/// Describes a planned step by block numbers, without any requests for its rows. `slabs` is the layout of the
/// scheduler's cache.
pub(crate) fn describe(
    scheduler: &Scheduler,
    plan: &StepPlan,
    slabs: &Slabs,
    state_group: Option<usize>,
) -> Result<StageStep, Error> {
    let number = |group: usize, offset: u32| {
        let lost = || Error::Invariant(format!("group {group} has no block at offset {offset}"));
        slabs.number(group, offset).ok_or_else(lost)
    };
    let sequence = |planned: &PlannedSequence| -> Result<StageSequence, Error> {
        let tables = scheduler.tables(planned.slot).iter().enumerate();
        let tables = tables.filter(|(group, _)| Some(*group) != state_group).map(|(group, table)| {
            let offsets = table.offsets();
            let skipped = offsets.iter().take_while(|offset| **offset == NULL_OFFSET).count();
            let blocks = offsets[skipped..].iter().map(|offset| number(group, *offset));
            Ok(StageTable { skipped: skipped as u32, blocks: blocks.collect::<Result<_, Error>>()? })
        });
        let state = match (&planned.state, state_group) {
            (Some(state), Some(group)) => Some(describe_state(state, |slot| number(group, slot))?),
            _ => None,
        };
        Ok(StageSequence {
            rows: planned.rows.end - planned.rows.start,
            context: planned.context_before,
            tables: tables.collect::<Result<_, Error>>()?,
            state,
        })
    };
    let copies = plan.copies.iter().map(|copy| {
        let (from, to) = (number(copy.group, copy.src)?, number(copy.group, copy.dst)?);
        Ok(StageCopy { group: copy.group as u32, from, to })
    });
    Ok(StageStep {
        step: plan.step,
        tokens: plan.tokens.clone(),
        sequences: plan.sequences.iter().map(sequence).collect::<Result<_, Error>>()?,
        copies: copies.collect::<Result<_, Error>>()?,
        ..StageStep::default()
    })
}

fn describe_state(
    state: &SequenceState,
    number: impl Fn(u32) -> Result<u32, Error>,
) -> Result<StageState, Error> {
    let exports = state.exports.iter().map(|&(row, slot)| Ok((row, number(slot)?)));
    Ok(StageState {
        read: state.read.map(&number).transpose()?,
        write: number(state.write)?,
        exports: exports.collect::<Result<_, Error>>()?,
        deferred: state.deferred,
    })
}

/// Runs a step over the layers of a stage, whose arena is laid out as `slabs`. `activations` have the shape
/// `[rows, hidden]`; `None` on the first stage. Calls `between_layers` after each layer. Checks every field
/// of the step before it computes anything.
pub fn forward(
    decoder: &mut Decoder,
    slabs: &Slabs,
    step: &StageStep,
    activations: Option<&[f32]>,
    between_layers: &mut dyn FnMut(Blocks<'_>),
) -> Result<(), Error> {
    let sampled = step.samples.iter().map(|sample| &sample.row).chain(&step.returned);
    let rows = step.tokens.len();
    let refuse = |reason: String| Err(Error::StageStep { reason });
    let vocab = decoder.spec().vocab;
    if let Some(token) = step.tokens.iter().find(|token| **token as usize >= vocab) {
        return refuse(format!("token {token} is outside the vocabulary of {vocab}"));
    }
    let mut requested = step.argmax.iter().chain(&step.logits).chain(sampled);
    if let Some(row) = requested.find(|row| **row as usize >= rows) {
        return refuse(format!("row {row} of {rows} is wanted"));
    }
    let groups = decoder.groups().len();
    let recurrent = decoder.spec().is_recurrent();
    let paged = groups - usize::from(recurrent);
    let offset = |group: usize, number: u32| self::offset(slabs, group, number);
    let mut sequences = Vec::with_capacity(step.sequences.len());
    let mut tables: Vec<Vec<Vec<u32>>> = vec![Vec::with_capacity(step.sequences.len()); paged];
    let mut states = Vec::new();
    let (mut from, mut entries) = (0usize, 0usize);
    for sequence in &step.sequences {
        let (count, context) = (sequence.rows as usize, sequence.context as usize);
        if context + count > MAX_CONTEXT || from + count > rows {
            return refuse(format!("{count} rows behind {context} positions, {rows} rows in all"));
        }
        if sequence.tables.len() != paged || sequence.state.is_some() != recurrent {
            return refuse(format!("{} tables where there are {paged}", sequence.tables.len()));
        }
        for (group, table) in sequence.tables.iter().enumerate() {
            entries = entries.saturating_add(table.skipped as usize).saturating_add(table.blocks.len());
            if entries > MAX_ENTRIES {
                return refuse(format!("more than {MAX_ENTRIES} table entries"));
            }
            tables[group].push(offsets(slabs, group, table)?);
        }
        if let Some(state) = &sequence.state {
            if state.deferred && (count > MAX_DEFERRED_ROWS || !state.exports.is_empty()) {
                let exports = state.exports.len();
                return refuse(format!(
                    "{count} deferred rows of at most {MAX_DEFERRED_ROWS}, {exports} exports"
                ));
            }
            states.push(step_state(state, |slot| offset(paged, slot))?);
        }
        sequences.push(StepSequence { rows: from..from + count, context, segment_start: None });
        from += count;
    }
    let mut copies = Vec::with_capacity(step.copies.len());
    for copy in &step.copies {
        let group = copy.group as usize;
        copies.push(KvCopy { group, from: offset(group, copy.from)?, to: offset(group, copy.to)? });
    }
    let tables: Vec<Vec<BlockTable<'_>>> =
        tables.iter().map(|group| group.iter().map(|offsets| BlockTable::Paged(offsets)).collect()).collect();
    let input = StepInput { tokens: &step.tokens, sequences: &sequences, tables: &tables, states: &states };
    match activations {
        None => decoder.forward_with(&copies, &input, between_layers),
        Some(activations) => decoder.forward_from(&copies, &input, activations, between_layers),
    }
}

fn offset(slabs: &Slabs, group: usize, number: u32) -> Result<u32, Error> {
    let reason = || Error::StageStep { reason: format!("group {group} has no block {number}") };
    slabs.offset(group, number).filter(|offset| *offset != NULL_OFFSET).ok_or_else(reason)
}

/// Offsets of a table's blocks. The caller has checked that the table has at most [`MAX_ENTRIES`] entries.
pub(crate) fn offsets(slabs: &Slabs, group: usize, table: &StageTable) -> Result<Vec<u32>, Error> {
    let mut offsets = vec![NULL_OFFSET; table.skipped as usize];
    for number in &table.blocks {
        offsets.push(offset(slabs, group, *number)?);
    }
    Ok(offsets)
}

fn step_state(state: &StageState, offset: impl Fn(u32) -> Result<u32, Error>) -> Result<StepState, Error> {
    let exports =
        state.exports.iter().map(|&(row, slot)| Ok(StateExport { row: row as usize, slot: offset(slot)? }));
    Ok(StepState {
        read: state.read.map(&offset).transpose()?,
        write: offset(state.write)?,
        exports: exports.collect::<Result<_, Error>>()?,
        deferred: state.deferred,
    })
}

/// Steps with deferred state updates whose numbers of accepted rows are not known yet.
#[derive(Debug, Default)]
pub struct Uncounted {
    /// The step and, for each deferred sequence, its number of rows. The oldest step comes first.
    steps: VecDeque<(u64, Vec<u32>)>,
}

impl Uncounted {
    /// Records a step that was run.
    pub fn ran(&mut self, step: &StageStep) {
        let defers = |sequence: &&StageSequence| sequence.state.as_ref().is_some_and(|state| state.deferred);
        let rows: Vec<u32> = step.sequences.iter().filter(defers).map(|sequence| sequence.rows).collect();
        if !rows.is_empty() {
            self.steps.push_back((step.step, rows));
        }
    }

    /// Applies the numbers of accepted rows to the states, after checking them.
    ///
    /// # Errors
    /// [`Error::StageStep`] if the step is not the oldest one, or if the number of sequences or of rows does
    /// not match.
    pub fn count(&mut self, decoder: &mut Decoder, counted: &StageCounted) -> Result<(), Error> {
        let StageCounted { step, rows } = counted;
        let refuse = |reason: String| Err(Error::StageStep { reason });
        let Some((_, of)) = self.steps.front().filter(|(oldest, _)| oldest == step) else {
            return refuse(format!("rows count of step {step}, which waits for that not or not first"));
        };
        if of.len() != rows.len() || of.iter().zip(rows).any(|(of, rows)| rows > of) {
            return refuse(format!("of step {step} rows {rows:?} count, it has {of:?}"));
        }
        self.steps.pop_front();
        let rows: Vec<usize> = rows.iter().map(|rows| *rows as usize).collect();
        decoder.accept(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_stage;
    use proto::stage::StageSample;

    fn good(decoder: &Decoder) -> StageStep {
        let recurrent = decoder.spec().is_recurrent();
        let table = StageTable { skipped: 0, blocks: vec![5] };
        let state = StageState { read: None, write: 4, exports: vec![(0, 3)], deferred: false };
        let sequence = StageSequence {
            rows: 2,
            context: 0,
            tables: vec![table; decoder.groups().len() - usize::from(recurrent)],
            state: recurrent.then_some(state),
        };
        StageStep {
            step: 1,
            tokens: vec![3, 4],
            sequences: vec![sequence],
            copies: vec![StageCopy { group: 0, from: 1, to: 2 }],
            argmax: vec![1],
            logits: vec![0],
            samples: vec![StageSample { row: 1, ..StageSample::default() }],
            returned: vec![0],
            ..StageStep::default()
        }
    }

    fn run(decoder: &mut Decoder, slabs: &Slabs, step: &StageStep, activations: &[f32]) -> Result<(), Error> {
        forward(decoder, slabs, step, Some(activations), &mut |_| {})
    }

    /// A change that makes a step invalid, and its name.
    type Spoil = (&'static str, fn(&mut StageStep));

    /// An invalid step is refused before anything is computed.
    #[test]
    fn sec_handle_oob() {
        let spoils: [Spoil; 13] = [
            ("a sample", |step| step.samples[0].row = 2),
            ("a row back", |step| step.returned[0] = 2),
            ("a token", |step| step.tokens[0] = u32::MAX),
            ("a wanted token", |step| step.argmax[0] = 2),
            ("wanted logits", |step| step.logits[0] = u32::MAX),
            ("more rows", |step| step.sequences[0].rows = 3),
            ("a long context", |step| step.sequences[0].context = u32::MAX),
            ("no tables", |step| step.sequences[0].tables.clear()),
            ("a block", |step| step.sequences[0].tables[0].blocks[0] = 6),
            ("no block", |step| step.sequences[0].tables[0].blocks[0] = NULL_OFFSET),
            ("skipped blocks", |step| step.sequences[0].tables[0].skipped = u32::MAX),
            ("a copy", |step| step.copies[0].to = 6),
            ("a copy's group", |step| step.copies[0].group = 9),
        ];
        let states: [Spoil; 5] = [
            ("an export of what may be taken back", |step| {
                step.sequences[0].state.as_mut().unwrap().deferred = true;
            }),
            ("more rows than may be taken back", |step| {
                let state = step.sequences[0].state.as_mut().unwrap();
                (state.deferred, state.exports) = (true, Vec::new());
                step.sequences[0].rows = MAX_DEFERRED_ROWS as u32 + 1;
                step.tokens = vec![3; MAX_DEFERRED_ROWS + 1];
            }),
            ("no state", |step| step.sequences[0].state = None),
            ("a slot", |step| step.sequences[0].state.as_mut().unwrap().write = 6),
            ("an export", |step| step.sequences[0].state.as_mut().unwrap().exports[0].1 = NULL_OFFSET),
        ];
        for arch in ["llama", "granitehybrid"] {
            let (mut decoder, slabs) = test_stage::load(arch, None);
            let activations = vec![0.5; 2 * decoder.spec().hidden];
            let step = good(&decoder);
            let mut forward =
                |step: &StageStep, activations: &[f32]| run(&mut decoder, &slabs, step, activations);
            forward(&step, &activations).unwrap();
            let of_states = states.iter().filter(|_| step.sequences[0].state.is_some());
            for (what, spoil) in spoils.iter().chain(of_states) {
                let mut step = step.clone();
                spoil(&mut step);
                let refused = forward(&step, &activations);
                assert!(matches!(refused, Err(Error::StageStep { .. })), "{arch}, {what}: {refused:?}");
            }
            let short = forward(&step, &activations[1..]);
            assert!(matches!(short, Err(Error::Invariant(_))), "{arch}: {short:?}");
        }
    }

    /// Accepted rows are applied once, to the oldest waiting step, and never more than it has.
    #[test]
    fn sec_counted_rows() {
        let (mut decoder, slabs) = test_stage::load("granitehybrid", None);
        let activations = vec![0.5; 2 * decoder.spec().hidden];
        let mut uncounted = Uncounted::default();
        let mut step = good(&decoder);
        // A step without deferred updates does not wait for accepted rows.
        run(&mut decoder, &slabs, &step, &activations).unwrap();
        uncounted.ran(&step);
        for (number, write) in [(2, 4), (3, 5)] {
            step.step = number;
            step.sequences[0].state =
                Some(StageState { read: None, write, exports: Vec::new(), deferred: true });
            run(&mut decoder, &slabs, &step, &activations).unwrap();
            uncounted.ran(&step);
        }
        let mut count = |step: u64, rows: &[u32]| {
            uncounted.count(&mut decoder, &StageCounted { step, rows: rows.to_vec() })
        };
        for (step, rows) in
            [(1, &[1][..]), (3, &[1]), (4, &[1]), (2, &[]), (2, &[1, 1]), (2, &[3]), (2, &[u32::MAX])]
        {
            let refused = count(step, rows);
            assert!(matches!(refused, Err(Error::StageStep { .. })), "{step}, {rows:?}: {refused:?}");
        }
        count(2, &[2]).unwrap();
        assert!(matches!(count(2, &[2]), Err(Error::StageStep { .. })));
        count(3, &[0]).unwrap();
        assert!(matches!(count(3, &[0]), Err(Error::StageStep { .. })));
    }
}
