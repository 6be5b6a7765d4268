//! Draft tokens: which drafter proposes them, and what happens to them.

use super::forward::tables_of;
use super::{Draw, Engine, Live, UnderWay};
use crate::Error;
use crate::decoder::DraftFrom;
use crate::pipeline::PipelineExecutor;
use crate::pipeline::step::WantedRows;
use crate::scheduler::{Decoding, PlannedSequence, SeqId, StepPlan};
use crate::speculation::Speculation;
use proto::stage::{MAX_GUESSES, StageGuess};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The row of the last step from which each sequence's newest token was drawn.
pub(super) type NewestRows = HashMap<SeqId, u32>;

/// The sequences for which a step requests draft tokens from the last stage, and their cost.
#[derive(Debug, Default)]
pub(super) struct GuessedElsewhere {
    pub(super) asked: Vec<SeqId>,
    rounds: usize,
    pub(super) took: Duration,
}

/// Disables draft tokens for sequences with a grammar: the mask after a draft token is known only after the
/// token has been accepted.
fn unguided<'a>(live: &HashMap<SeqId, Live>, decoding: Decoding<'a>) -> Decoding<'a> {
    let guided = live.get(&decoding.id).is_some_and(|live| live.guide.is_some());
    Decoding { most_guesses: if guided { 0 } else { decoding.most_guesses }, ..decoding }
}

impl Engine {
    /// Sets the draft tokens of the next step, where that pays.
    pub(super) fn guess(&mut self) -> Result<(), Error> {
        let looks = self.looks_at_guesses();
        let Some(speculation) = &mut self.speculation else { return Ok(()) };
        if !looks {
            return Ok(());
        }
        speculation.retain(|id| self.live.contains_key(&id));
        self.guessed.retain(|id, _| self.live.contains_key(id));
        if let Some(model) = &mut self.draft_model {
            model.retain(|id| self.live.contains_key(&id));
        }
        if speculation.is_computed() {
            if self.later.is_none() || self.draft_model.is_some() {
                return self.draft();
            }
            self.take_guessed();
            return Ok(());
        }
        let decoding = self.scheduler.decoding().map(|decoding| unguided(&self.live, decoding));
        for (id, guesses) in speculation.guess(decoding) {
            self.scheduler.guess(id, guesses);
        }
        Ok(())
    }

    /// Whether steps can verify draft tokens: recurrent states must be able to follow the accepted rows.
    fn looks_at_guesses(&self) -> bool {
        let defers = self.later.as_ref().is_none_or(PipelineExecutor::can_defer);
        defers || !self.decoder.spec().is_recurrent()
    }

    /// Whether the last stage drafts tokens after those that it draws.
    fn guesses_elsewhere(&self) -> bool {
        let computed = self.speculation.as_ref().is_some_and(Speculation::is_computed);
        computed && self.later.is_some() && self.draft_model.is_none() && self.looks_at_guesses()
    }

    /// Sets the draft tokens from the last stage for the next step.
    fn take_guessed(&mut self) {
        let decoding = self.scheduler.decoding().map(|decoding| unguided(&self.live, decoding));
        let most: Vec<(SeqId, u32)> = decoding.map(|decoding| (decoding.id, decoding.most_guesses)).collect();
        for (id, most) in most {
            if let Some(mut guesses) = self.guessed.remove(&id) {
                guesses.truncate(most as usize);
                self.scheduler.guess(id, guesses);
            }
        }
    }

    /// The draft tokens that a step requests from the last stage, where that pays: for sequences without
    /// followers or grammar whose tokens are drawn there. The last stage must know the drawn tokens, so for
    /// greedy sequences whose logits are returned whole, `wanted` also gets the argmax of these rows.
    pub(super) fn ask_for_guesses(
        &mut self,
        plan: &StepPlan,
        wanted: &mut WantedRows,
    ) -> (Vec<StageGuess>, GuessedElsewhere) {
        let nothing = || (Vec::new(), GuessedElsewhere::default());
        if !self.guesses_elsewhere() {
            return nothing();
        }
        let (mut asks, mut asked) = (Vec::new(), Vec::new());
        for (index, sequence) in (0u32..).zip(&plan.sequences) {
            let alone = sequence.samples && self.siblings.followers(sequence.id).next().is_none();
            let Some(live) = self.live.get(&sequence.id).filter(|live| alone && live.guide.is_none()) else {
                continue;
            };
            let draws = sequence.rows.end - 1 - sequence.guesses..sequence.rows.end;
            let best = live.all_logits && live.sampler.is_plain_argmax();
            let there = best || wanted.draws(draws.start);
            let most = self.scheduler.guesses_behind(sequence).min(MAX_GUESSES as u32);
            if there && most > 0 {
                asks.push((StageGuess { sequence: index, first: draws.start, most }, best.then_some(draws)));
                asked.push((sequence.id, most));
            }
        }
        let rows = plan.sequences.iter().filter(|sequence| sequence.samples).count() as u32;
        let Some(speculation) = &mut self.speculation else { return nothing() };
        let rounds = speculation.rounds(rows, &asked);
        if rounds == 0 {
            return nothing();
        }
        let guesses = asks.into_iter().map(|(ask, best)| {
            wanted.argmax.extend(best.into_iter().flatten());
            StageGuess { most: ask.most.min(rounds as u32), ..ask }
        });
        let guesses = guesses.collect();
        let asked = asked.into_iter().map(|(id, _)| id).collect();
        (guesses, GuessedElsewhere { asked, rounds, took: Duration::ZERO })
    }

    /// Stores the draft tokens that the last stage returned with a step. Earlier ones of these sequences are
    /// dropped.
    pub(super) fn hear_guesses(&mut self, step: &mut UnderWay, guessed: Vec<Vec<u32>>, took: Duration) {
        for sequence in &step.plan.sequences {
            self.guessed.remove(&sequence.id);
        }
        let GuessedElsewhere { asked, rounds, took: known } = &mut step.guesses;
        let Some(speculation) = self.speculation.as_mut().filter(|_| *rounds > 0) else { return };
        speculation.rounds_took(*rounds, took);
        *known = took;
        self.guessed.extend(asked.iter().copied().zip(guessed));
    }

    fn draft(&mut self) -> Result<(), Error> {
        let newest = std::mem::take(&mut self.newest_rows);
        let rows = self.scheduler.decoding().count() as u32;
        let drafts = |decoding: &Decoding<'_>| {
            decoding.most_guesses > 0 && (self.draft_model.is_some() || newest.contains_key(&decoding.id))
        };
        let decoding = self.scheduler.decoding().map(|decoding| unguided(&self.live, decoding));
        let decoding: Vec<Decoding<'_>> = decoding.filter(drafts).collect();
        let sequences: Vec<(SeqId, u32)> = decoding.iter().map(|d| (d.id, d.most_guesses)).collect();
        let Some(speculation) = &mut self.speculation else { return Ok(()) };
        let rounds = speculation.rounds(rows, &sequences);
        if rounds == 0 {
            return Ok(());
        }
        let since = Instant::now();
        let drafted: Vec<Vec<u32>> = match &mut self.draft_model {
            Some(model) => {
                let tokens: Vec<(SeqId, &[u32])> = decoding.iter().map(|d| (d.id, d.tokens)).collect();
                model.draft(&tokens, rounds)?
            }
            None => {
                let rows: Vec<u32> = sequences.iter().filter_map(|(id, _)| newest.get(id).copied()).collect();
                let hidden = self.decoder.hidden(&rows)?;
                let strides = self.decoder.block_strides();
                let from = |(decoding, hidden): (&Decoding<'_>, Vec<f32>)| DraftFrom {
                    token: decoding.tokens.last().copied().unwrap_or_default(),
                    context: decoding.tokens.len() - 1,
                    hidden,
                    tables: tables_of(self.scheduler.tables(decoding.slot), &strides),
                    most: decoding.most_guesses as usize,
                };
                let from: Vec<DraftFrom<'_>> = decoding.iter().zip(hidden).map(from).collect();
                let drafted = self.decoder.draft(&from, rounds)?;
                drafted.into_iter().map(|drafted| drafted.tokens).collect()
            }
        };
        speculation.rounds_took(rounds, since.elapsed());
        for ((id, most), mut guesses) in sequences.into_iter().zip(drafted) {
            guesses.truncate(most as usize);
            self.scheduler.guess(id, guesses);
        }
        Ok(())
    }

    /// Removes draws after the end of a generation.
    pub(super) fn end_with_the_text(&self, drawn: &mut Vec<Draw>) {
        let mut counts = Vec::with_capacity(drawn.len());
        for run in drawn.chunk_by(|before, behind| before.id == behind.id) {
            let tokens: Vec<u32> = run.iter().map(|draw| draw.token).collect();
            let live = run.first().and_then(|draw| self.live.get(&draw.id));
            let count = live.map_or(tokens.len(), |live| live.text.counts_of(&tokens));
            counts.extend((0..run.len()).map(|at| at < count));
        }
        let mut counts = counts.into_iter();
        drawn.retain(|_| counts.next().unwrap_or(true));
    }

    /// Commits the states of sequences with draft tokens up to the accepted rows, at all stages, and updates
    /// the acceptance rates.
    pub(super) fn accept(&mut self, plan: &StepPlan, drawn: &[Draw]) -> Result<(), Error> {
        let Some(speculation) = &mut self.speculation else { return Ok(()) };
        self.newest_rows.clear();
        self.newest_rows.extend(drawn.iter().map(|draw| (draw.id, draw.row)));
        let counted = |sequence: &PlannedSequence| drawn.iter().filter(|draw| draw.id == sequence.id).count();
        let mut rows = Vec::new();
        for sequence in plan.sequences.iter().filter(|sequence| sequence.guesses > 0) {
            // For a sequence that is gone, keep only the rows before its draft tokens.
            let mut counts = sequence.rows.len() - sequence.guesses as usize;
            if self.live.contains_key(&sequence.id) {
                counts = counted(sequence);
                speculation.looked_at(sequence.id, sequence.guesses as usize, counts.saturating_sub(1));
            }
            if sequence.state.is_some() {
                rows.push(counts);
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        self.decoder.accept(&rows)?;
        if let Some(later) = &mut self.later {
            later.counted(plan.step, &rows);
        }
        Ok(())
    }
}
