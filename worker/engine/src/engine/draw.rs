//! Sampling of a step: which rows are needed, before the step runs, and the tokens drawn from them,
//! afterwards.

use super::guided::Guided;
use super::request::Request;
use super::{Draw, Engine};
use crate::Error;
use crate::decoder::RowLogits;
use crate::executor::{DecoderRows, RequestedRows, StepRows};
use crate::sampling::Sampler;
use crate::scheduler::{SeqId, StepPlan};
use proto::message::TokenLogprobs;
use proto::stage::StageSampled;
use std::borrow::Cow;
use std::time::Instant;

/// Maximum number of known tokens with which a draw is sent to another stage. With more, that stage returns
/// the logits instead.
const MAX_SAMPLE_TOKENS: usize = 16_384;

/// The rows of a step from which results are needed.
#[derive(Debug, Default)]
pub(super) struct Targets {
    /// Rows whose most likely token is needed.
    plain: Vec<Target>,
    /// Rows that are sampled otherwise.
    sampled: Vec<Target>,
    /// Rows whose logits are needed: (target, position, whether a token is drawn).
    whole: Vec<(Target, usize, bool)>,
}

#[derive(Debug, Clone)]
struct Target {
    row: u32,
    /// The sequence of the row.
    of: SeqId,
    id: SeqId,
    /// The draft tokens up to this row. The row is accepted only if they equal the tokens drawn from the rows
    /// before it.
    draft_tokens: Vec<u32>,
}

/// The draws of a step.
#[derive(Default)]
pub(super) struct Drawn {
    /// Accepted rows only, in the order of rows for each way of sampling.
    pub(super) draws: Vec<Draw>,
    /// Sequences that would draw from a row with NaN or infinite values. Their requests fail.
    pub(super) spoiled: Vec<SeqId>,
}

/// Result of a row.
enum Row {
    Token(u32, Option<TokenLogprobs>),
    /// The grammar mask is not known yet.
    Waits,
    /// No token is drawn from it.
    Unused,
    /// It has NaN or infinite values.
    Spoiled,
}

impl Row {
    /// Converts the draw of a device, another stage or a sampler. `None` and tokens outside the vocabulary
    /// mean that the row cannot be sampled.
    fn of(drawn: Option<(u32, Option<TokenLogprobs>)>, vocab: usize) -> Self {
        match drawn {
            Some((token, logprobs)) if (token as usize) < vocab => Self::Token(token, logprobs),
            _ => Self::Spoiled,
        }
    }
}

impl Target {
    /// Whether the row is accepted, given the draws so far. The rows of a sequence are consecutive.
    fn counts(&self, drawn: &[Draw]) -> bool {
        self.draft_tokens.last().is_none_or(|draft_token| {
            let before = drawn.last().filter(|draw| draw.id == self.id && draw.row + 1 == self.row);
            before.is_some_and(|draw| draw.token == *draft_token)
        })
    }
}

impl Drawn {
    /// Adds the row's draw if the row is accepted.
    fn add(&mut self, target: &Target, draw: impl FnOnce() -> Row) {
        if !target.counts(&self.draws) {
            return;
        }
        let Target { row, of, id, .. } = *target;
        match draw() {
            Row::Token(token, logprobs) => self.draws.push(Draw { of, id, row, token, logprobs }),
            Row::Spoiled => self.spoiled.push(id),
            Row::Waits | Row::Unused => {}
        }
    }
}

impl Request {
    /// Processes a row of logits: passes it to the sink if `position` is requested, reads the prompt's next
    /// log-probability, and draws from it.
    fn read(&mut self, target: &Target, position: Option<usize>, draws: bool, row: &[f32]) -> Row {
        if let Some(position) = position.filter(|_| self.all_logits) {
            self.sink.logits(position, row);
        }
        if let (Some(scores), Some(position)) = (&mut self.scores, position)
            && !scores.read(position, row)
        {
            return Row::Spoiled;
        }
        if !draws {
            return Row::Unused;
        }
        let mask = match &mut self.guide {
            // A sequence that draws from another one's row keeps no row of its own.
            Some(guided) => match guided.allows(row, target.of == target.id) {
                Some(mask) => mask,
                None => return Row::Waits,
            },
            None => None,
        };
        let drawn = self.sampler_of(target).draw_allowed(&mut row.to_vec(), mask.as_deref());
        Row::of(drawn, row.len())
    }

    /// The sampler for a row. The only place that defines the sampler's state after draft tokens.
    fn sampler_of(&self, target: &Target) -> Cow<'_, Sampler> {
        match target.draft_tokens.as_slice() {
            [] => Cow::Borrowed(&self.sampler),
            draft_tokens => Cow::Owned(self.sampler.ahead(draft_tokens)),
        }
    }
}

impl Engine {
    /// The rows from which tokens are drawn or that are needed whole. The last row of a prompt is sampled for
    /// all sequences that wait for it.
    pub(super) fn targets(&self, plan: &StepPlan) -> Targets {
        let mut targets = Targets::default();
        let with_followers = plan.sequences.iter().flat_map(|sequence| {
            let followers = if sequence.samples { self.equal_prompts.followers(sequence.id) } else { &[] };
            std::iter::once(&sequence.id).chain(followers).map(move |id| (sequence, *id))
        });
        for (sequence, id) in with_followers {
            let Some(request) = self.requests.get(&id) else { continue };
            // The sampled rows: the one before the draft tokens, and those of the draft tokens.
            let first = sequence.rows.end - 1 - sequence.draft_tokens;
            let target = |row: u32| {
                let draft_tokens = (first + 1..=row).map(|row| plan.tokens[row as usize]).collect();
                Target { row, of: sequence.id, id, draft_tokens }
            };
            let position = |row: u32| (sequence.context_before + row - sequence.rows.start) as usize;
            if let Some(scores) = request.scores.as_ref().filter(|_| id == sequence.id) {
                let rows = sequence.rows.clone().filter(|row| scores.needs(position(*row)));
                targets.whole.extend(rows.map(|row| (target(row), position(row), false)));
            }
            if request.all_logits {
                let rows = sequence.rows.clone();
                targets
                    .whole
                    .extend(rows.map(|row| (target(row), position(row), sequence.samples && row >= first)));
            } else if sequence.samples {
                let rows = first..sequence.rows.end;
                match request.sampler.is_plain_argmax() {
                    // A grammar may allow any token, so the whole row is needed. Such sequences have no draft
                    // tokens.
                    _ if request.guide.as_ref().is_some_and(Guided::constrains) => {
                        targets.whole.extend(rows.map(|row| (target(row), position(row), true)));
                    }
                    true => targets.plain.extend(rows.map(target)),
                    false if request.sampler.tokens_known() > MAX_SAMPLE_TOKENS => {
                        targets.whole.extend(rows.map(|row| (target(row), position(row), true)));
                    }
                    false => targets.sampled.extend(rows.map(target)),
                }
            }
        }
        targets
    }

    /// The same targets in the form of the rank that computes the rows.
    pub(super) fn requested_rows(&self, targets: &Targets) -> RequestedRows {
        let sample =
            |target: &Target| Some(self.requests.get(&target.id)?.sampler_of(target).sample(target.row));
        RequestedRows {
            argmax: targets.plain.iter().map(|target| target.row).collect(),
            samples: targets.sampled.iter().filter_map(sample).collect(),
            logits: targets.whole.iter().map(|(target, ..)| target.row).collect(),
        }
    }

    /// The draws of a step.
    pub(super) fn draw(&mut self, targets: &Targets, rows: StepRows) -> Result<Drawn, Error> {
        match rows {
            StepRows::Computed { argmax, samples, logits } => {
                Ok(self.draw_computed(targets, argmax, samples, logits))
            }
            StepRows::InDecoder(rows) => {
                let since = Instant::now();
                let drawn = self.draw_in_decoder(targets, &rows)?;
                self.executor.drawing_took(since.elapsed());
                Ok(drawn)
            }
        }
    }

    fn draw_in_decoder(&mut self, targets: &Targets, rows: &DecoderRows) -> Result<Drawn, Error> {
        let Targets { plain, sampled, whole } = targets;
        let decoder_row = |target: &Target| rows.decoder_row(target.row);
        let decoder = self.executor.decoder_mut();
        let vocab = decoder.spec().vocab;
        let mut best = Vec::with_capacity(plain.len());
        let rows: Vec<u32> = plain.iter().map(decoder_row).collect();
        if !rows.is_empty() {
            decoder.argmax(&rows, &mut best)?;
        }
        let mut drawn = Drawn::default();
        for (target, token) in plain.iter().zip(best) {
            drawn.add(target, || Row::of(Some((token, None)), vocab));
        }
        let logits = sampled.iter().chain(whole.iter().map(|(target, ..)| target));
        let logits: Vec<u32> = logits.map(decoder_row).collect();
        if !logits.is_empty() {
            let requests = &mut self.requests;
            let few = |target: &Target| {
                requests.get(&target.id).is_some_and(|request| request.sampler.draws_of_few())
            };
            let drawn_from = if sampled.iter().any(few) { sampled.len() } else { 0 };
            decoder.logits_to_draw(&logits, drawn_from, &mut |index, row| {
                let (target, position, draws) = match sampled.get(index) {
                    Some(target) => (target, None, true),
                    None => match whole.get(index - sampled.len()) {
                        Some((target, position, draws)) => (target, Some(*position), *draws),
                        None => return true,
                    },
                };
                let Some(request) = requests.get_mut(&target.id).filter(|_| target.counts(&drawn.draws))
                else {
                    return true;
                };
                match row {
                    RowLogits::Whole(row) => drawn.add(target, || request.read(target, position, draws, row)),
                    RowLogits::Best(best) => match request.sampler_of(target).draw_of_best(best) {
                        Some(token) => drawn.add(target, || Row::of(Some((token, None)), vocab)),
                        None => return false,
                    },
                }
                true
            })?;
        }
        Ok(drawn)
    }

    /// The draws of a step whose rows the last rank computed.
    fn draw_computed(
        &mut self,
        targets: &Targets,
        argmax: Vec<u32>,
        samples: Vec<StageSampled>,
        logits: Vec<Vec<f32>>,
    ) -> Drawn {
        let vocab = self.executor.decoder().spec().vocab;
        let mut drawn = Drawn::default();
        for (target, token) in targets.plain.iter().zip(argmax) {
            drawn.add(target, || Row::of(Some((token, None)), vocab));
        }
        for (target, sample) in targets.sampled.iter().zip(samples) {
            drawn.add(target, || Row::of(Some((sample.token, sample.logprobs)), vocab));
        }
        for ((target, position, draws), row) in targets.whole.iter().zip(logits) {
            let Some(request) = self.requests.get_mut(&target.id) else { continue };
            drawn.add(target, || request.read(target, Some(*position), *draws, &row));
        }
        drawn
    }
}
