//! Draft tokens: requests them from the drafter, stores them, and commits the states of the accepted ones.

use super::request::Request;
use super::{Draw, Engine, InFlightStep};
use crate::Error;
use crate::decoder::DraftFrom;
use crate::executor::{RequestedRows, tables_of};
use crate::scheduler::{Decoding, PlannedSequence, SeqId, StepPlan};
use crate::speculation::Speculation;
use proto::stage::{MAX_STAGE_DRAFT_TOKENS, StageDraftRequest};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The row of the last step from which each sequence's newest token was drawn.
pub(super) type NewestRows = HashMap<SeqId, u32>;

/// The sequences for which a step requests draft tokens from the last rank, and their cost.
#[derive(Debug, Default)]
pub(super) struct RemoteDrafts {
    sequences: Vec<SeqId>,
    rounds: usize,
    pub(super) took: Duration,
}

/// Disables draft tokens for sequences with a grammar, since the mask after a draft token is known only after the token
/// has been accepted, and for those with images, which drafters do not see.
fn drafted<'a>(requests: &HashMap<SeqId, Request>, decoding: Decoding<'a>) -> Decoding<'a> {
    let alone = |request: &Request| request.guide.is_some() || request.has_images;
    let alone = requests.get(&decoding.id).is_some_and(alone);
    Decoding { max_draft_tokens: if alone { 0 } else { decoding.max_draft_tokens }, ..decoding }
}

impl Engine {
    /// Sets the draft tokens of the next step, where that pays.
    pub(super) fn set_drafts(&mut self) -> Result<(), Error> {
        let verifies = self.can_verify_drafts();
        let Some(speculation) = &mut self.speculation else { return Ok(()) };
        if !verifies {
            return Ok(());
        }
        speculation.retain(|id| self.requests.contains_key(&id));
        self.draft_tokens.retain(|id, _| self.requests.contains_key(id));
        if let Some(model) = &mut self.draft_model {
            model.retain(|id| self.requests.contains_key(&id));
        }
        if speculation.is_computed() {
            if self.executor.ranks() == 1 || self.draft_model.is_some() {
                return self.draft();
            }
            self.set_remote_drafts();
            return Ok(());
        }
        let decoding = self.scheduler.decoding().map(|decoding| drafted(&self.requests, decoding));
        for (id, draft_tokens) in speculation.draft(decoding) {
            self.scheduler.set_draft_tokens(id, draft_tokens);
        }
        Ok(())
    }

    /// Whether steps can verify draft tokens: recurrent states must be able to follow the accepted rows.
    fn can_verify_drafts(&self) -> bool {
        self.executor.can_defer() || !self.executor.decoder().spec().is_recurrent()
    }

    /// Whether the last rank drafts tokens after those that it draws.
    fn drafts_remotely(&self) -> bool {
        let computed = self.speculation.as_ref().is_some_and(Speculation::is_computed);
        computed && self.executor.ranks() > 1 && self.draft_model.is_none() && self.can_verify_drafts()
    }

    /// Sets the draft tokens from the last rank for the next step.
    fn set_remote_drafts(&mut self) {
        let decoding = self.scheduler.decoding().map(|decoding| drafted(&self.requests, decoding));
        let limits: Vec<(SeqId, u32)> =
            decoding.map(|decoding| (decoding.id, decoding.max_draft_tokens)).collect();
        for (id, max_draft_tokens) in limits {
            if let Some(mut draft_tokens) = self.draft_tokens.remove(&id) {
                draft_tokens.truncate(max_draft_tokens as usize);
                self.scheduler.set_draft_tokens(id, draft_tokens);
            }
        }
    }

    /// The draft tokens that a step requests from the last rank, where that pays: for sequences without
    /// followers or grammar whose tokens are drawn there. The last rank must know the drawn tokens, so for
    /// greedy sequences whose logits are returned whole, `requested` also gets the argmax of these rows.
    pub(super) fn request_drafts(
        &mut self,
        plan: &StepPlan,
        requested: &mut RequestedRows,
    ) -> (Vec<StageDraftRequest>, RemoteDrafts) {
        let no_drafts = || (Vec::new(), RemoteDrafts::default());
        if !self.drafts_remotely() {
            return no_drafts();
        }
        let (mut stage_requests, mut limits) = (Vec::new(), Vec::new());
        for (index, sequence) in (0u32..).zip(&plan.sequences) {
            let alone = sequence.samples && self.equal_prompts.followers(sequence.id).is_empty();
            let request = self.requests.get(&sequence.id);
            let Some(request) =
                request.filter(|request| alone && request.guide.is_none() && !request.has_images)
            else {
                continue;
            };
            let draws = sequence.rows.end - 1 - sequence.draft_tokens..sequence.rows.end;
            let best = request.all_logits && request.sampler.is_plain_argmax();
            let drawn_there = best || requested.draws(draws.start);
            let max_tokens = self.scheduler.draft_tokens_after(sequence).min(MAX_STAGE_DRAFT_TOKENS as u32);
            if drawn_there && max_tokens > 0 {
                stage_requests.push((
                    StageDraftRequest { sequence: index, first: draws.start, most: max_tokens },
                    best.then_some(draws),
                ));
                limits.push((sequence.id, max_tokens));
            }
        }
        let rows = plan.sequences.iter().filter(|sequence| sequence.samples).count() as u32;
        let Some(speculation) = &mut self.speculation else { return no_drafts() };
        let rounds = speculation.rounds(rows, &limits);
        if rounds == 0 {
            return no_drafts();
        }
        let drafts = stage_requests.into_iter().map(|(stage_request, best)| {
            requested.argmax.extend(best.into_iter().flatten());
            StageDraftRequest { most: stage_request.most.min(rounds as u32), ..stage_request }
        });
        let drafts = drafts.collect();
        let sequences = limits.into_iter().map(|(id, _)| id).collect();
        (drafts, RemoteDrafts { sequences, rounds, took: Duration::ZERO })
    }

    /// Stores the draft tokens that the last rank returned with a step. Earlier ones of these sequences are
    /// dropped.
    pub(super) fn store_drafts(&mut self, step: &mut InFlightStep, drafted: Vec<Vec<u32>>, took: Duration) {
        for sequence in &step.plan.sequences {
            self.draft_tokens.remove(&sequence.id);
        }
        let RemoteDrafts { sequences, rounds, took: recorded } = &mut step.drafts;
        let Some(speculation) = self.speculation.as_mut().filter(|_| *rounds > 0) else { return };
        speculation.rounds_took(*rounds, took);
        *recorded = took;
        self.draft_tokens.extend(sequences.iter().copied().zip(drafted));
    }

    fn draft(&mut self) -> Result<(), Error> {
        let newest = std::mem::take(&mut self.newest_rows);
        let rows = self.scheduler.decoding().count() as u32;
        let drafts = |decoding: &Decoding<'_>| {
            decoding.max_draft_tokens > 0 && (self.draft_model.is_some() || newest.contains_key(&decoding.id))
        };
        let decoding = self.scheduler.decoding().map(|decoding| drafted(&self.requests, decoding));
        let decoding: Vec<Decoding<'_>> = decoding.filter(drafts).collect();
        let sequences: Vec<(SeqId, u32)> = decoding.iter().map(|d| (d.id, d.max_draft_tokens)).collect();
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
                let decoder = self.executor.decoder_mut();
                let hidden = decoder.hidden(&rows)?;
                let strides = decoder.block_strides();
                let from = |(decoding, hidden): (&Decoding<'_>, Vec<f32>)| DraftFrom {
                    token: decoding.tokens.last().copied().unwrap_or_default(),
                    context: decoding.tokens.len() - 1,
                    hidden,
                    tables: tables_of(self.scheduler.tables(decoding.slot), &strides),
                    most: decoding.max_draft_tokens as usize,
                };
                let from: Vec<DraftFrom<'_>> = decoding.iter().zip(hidden).map(from).collect();
                let drafted = decoder.draft(&from, rounds)?;
                drafted.into_iter().map(|drafted| drafted.tokens).collect()
            }
        };
        speculation.rounds_took(rounds, since.elapsed());
        for ((id, max_tokens), mut draft_tokens) in sequences.into_iter().zip(drafted) {
            draft_tokens.truncate(max_tokens as usize);
            self.scheduler.set_draft_tokens(id, draft_tokens);
        }
        Ok(())
    }

    /// Removes draws after the end of a generation.
    pub(super) fn end_with_the_text(&self, drawn: &mut Vec<Draw>) {
        let mut counts = Vec::with_capacity(drawn.len());
        for run in drawn.chunk_by(|before, behind| before.id == behind.id) {
            let tokens: Vec<u32> = run.iter().map(|draw| draw.token).collect();
            let request = run.first().and_then(|draw| self.requests.get(&draw.id));
            let count = request.map_or(tokens.len(), |request| request.text.counts_of(&tokens));
            counts.extend((0..run.len()).map(|at| at < count));
        }
        let mut counts = counts.into_iter();
        drawn.retain(|_| counts.next().unwrap_or(true));
    }

    /// Commits the states of sequences with draft tokens up to the accepted rows and updates the acceptance
    /// rates.
    pub(super) fn accept(&mut self, plan: &StepPlan, drawn: &[Draw]) -> Result<(), Error> {
        let Some(speculation) = &mut self.speculation else { return Ok(()) };
        self.newest_rows.clear();
        self.newest_rows.extend(drawn.iter().map(|draw| (draw.id, draw.row)));
        let counted = |sequence: &PlannedSequence| drawn.iter().filter(|draw| draw.id == sequence.id).count();
        let mut rows = Vec::new();
        for sequence in plan.sequences.iter().filter(|sequence| sequence.draft_tokens > 0) {
            // For a removed sequence, keep only the rows before its draft tokens.
            let mut counts = sequence.rows.len() - sequence.draft_tokens as usize;
            if self.requests.contains_key(&sequence.id) {
                counts = counted(sequence);
                speculation.observe(sequence.id, sequence.draft_tokens as usize, counts.saturating_sub(1));
            }
            if sequence.state.is_some() {
                rows.push(counts);
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        self.executor.accept(plan.step, &rows)
    }
}
