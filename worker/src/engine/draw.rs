//! From a step's rows to tokens: which rows are wanted, before it runs, and what is drawn from them, after.

use super::{Draw, Engine};
use crate::Error;
use crate::scheduler::{SeqId, StepPlan};
use crate::stage::step::WantedRows;

/// The rows of a step that somebody waits for.
#[derive(Debug, Default)]
pub(super) struct Targets {
    /// The rows themselves.
    pub(super) rows: WantedRows,
    /// For each row whose most likely token is wanted: the sequence of the row, and who draws.
    plain: Vec<(SeqId, SeqId)>,
    /// For each row whose logits are: the same, its position, and whether this row is drawn from.
    whole: Vec<(SeqId, SeqId, usize, bool)>,
}

impl Engine {
    /// Rows that are drawn from or wanted whole. The last row of a prompt is drawn from for everybody who waits for
    /// it.
    pub(super) fn targets(&self, plan: &StepPlan) -> Targets {
        let mut targets = Targets::default();
        let with_siblings = plan.sequences.iter().flat_map(|sequence| {
            let siblings = sequence.samples.then(|| self.siblings.followers(sequence.id));
            let ids = std::iter::once(sequence.id).chain(siblings.into_iter().flatten());
            ids.map(move |id| (sequence, id))
        });
        for (sequence, id) in with_siblings {
            let Some(live) = self.live.get(&id) else { continue };
            let of = sequence.id;
            let last = sequence.rows.end - 1;
            let position = |row: u32| (sequence.context_before + row - sequence.rows.start) as usize;
            if live.all_logits {
                for row in sequence.rows.clone() {
                    targets.rows.logits.push(row);
                    targets.whole.push((of, id, position(row), sequence.samples && row == last));
                }
            } else if sequence.samples {
                match live.sampler.is_plain_argmax() {
                    true => {
                        targets.rows.argmax.push(last);
                        targets.plain.push((of, id));
                    }
                    false => {
                        targets.rows.logits.push(last);
                        targets.whole.push((of, id, position(last), true));
                    }
                }
            }
        }
        targets
    }

    /// The draws of a step that has run.
    pub(super) fn draw(&mut self, step: u64, targets: &Targets) -> Result<Vec<Draw>, Error> {
        let Targets { rows, plain, whole } = targets;
        let (mut best, mut drawn) = (Vec::with_capacity(plain.len()), Vec::new());
        let live = &mut self.live;
        let mut sink = |index: usize, row: &[f32]| {
            let Some(&(of, id, position, draws)) = whole.get(index) else { return };
            let Some(live) = live.get_mut(&id) else { return };
            if live.all_logits {
                live.sink.logits(position, row);
            }
            if draws {
                let mut scratch = row.to_vec();
                let (token, logprobs) = live.sampler.draw(&mut scratch);
                drawn.push(Draw { of, id, token, logprobs });
            }
        };
        match &mut self.later {
            Some(later) => later.drawn(step, rows, &mut best, &mut sink)?,
            None => {
                if !rows.argmax.is_empty() {
                    self.decoder.argmax(&rows.argmax, &mut best)?;
                }
                if !rows.logits.is_empty() {
                    self.decoder.logits(&rows.logits, &mut sink)?;
                }
            }
        }
        let plain = plain.iter().zip(best);
        let plain = plain.map(|(&(of, id), token)| Draw { of, id, token, logprobs: None });
        Ok(plain.chain(drawn).collect())
    }
}
