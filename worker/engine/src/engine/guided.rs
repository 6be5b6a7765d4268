//! Requests with a grammar: a row is sampled once the mask of allowed tokens is known.
//!
//! Other threads compute the mask while the row is computed. If that takes longer, the row is stored and the
//! sequence skips steps, without delaying other sequences.

use super::Engine;
use super::request::Removal;
use crate::grammar::{Guide, Look, MASK_TIME};
use crate::sampling::TokenMask;
use crate::sampling::stop::Ending;
use crate::scheduler::SeqId;
use proto::message::FinishReason;
use std::sync::Arc;
use std::time::Instant;

pub(super) struct Guided {
    guide: Guide,
    /// A row that is sampled when its mask is known.
    row: Option<Vec<f32>>,
    /// Start of the wait.
    since: Option<Instant>,
    /// Whether the wait has been counted.
    counted: bool,
}

/// Outcome for a request that waited.
enum Settled {
    /// It samples the stored row.
    Draws(Option<Arc<TokenMask>>),
    Ends,
    Fails(String),
}

impl Guided {
    pub(super) fn new(guide: Guide) -> Self {
        Self { guide, row: None, since: None, counted: false }
    }

    /// Whether the grammar restricts the next token.
    pub(super) fn constrains(&self) -> bool {
        self.guide.constrains()
    }

    /// The request's field that has the grammar.
    pub(super) fn field(&self) -> &str {
        self.guide.field()
    }

    /// Accepts a drawn token.
    pub(super) fn accept(&mut self, token: u32) {
        self.row = None;
        self.since = None;
        self.guide.accept(token);
    }

    /// The mask for this row: `Some(None)` allows every token. `None` means that the mask is not known yet;
    /// the row is stored if it is the request's own.
    pub(super) fn allows(&mut self, row: &[f32], own: bool) -> Option<Option<Arc<TokenMask>>> {
        self.row = None;
        match self.guide.look() {
            Look::Free => Some(None),
            Look::Mask(mask) => Some(Some(mask)),
            Look::Waits | Look::Over | Look::Failed(_) => {
                self.row = own.then(|| row.to_vec());
                None
            }
        }
    }

    fn settle(&mut self, now: Instant) -> Option<Settled> {
        match self.guide.look() {
            Look::Over => Some(Settled::Ends),
            Look::Failed(reason) => Some(Settled::Fails(reason)),
            Look::Free => self.row.is_some().then_some(Settled::Draws(None)),
            Look::Mask(mask) => self.row.is_some().then_some(Settled::Draws(Some(mask))),
            Look::Waits => {
                let since = *self.since.get_or_insert(now);
                let timed_out = now.saturating_duration_since(since) > MASK_TIME;
                timed_out.then(|| {
                    Settled::Fails(format!("computing the mask takes more than {} ms", MASK_TIME.as_millis()))
                })
            }
        }
    }
}

impl Engine {
    /// Samples stored rows, and ends requests that are complete or cannot continue.
    pub(super) fn settle(&mut self, now: Instant) {
        let mut settled: Vec<(SeqId, Settled)> = Vec::new();
        for (id, request) in &mut self.requests {
            let Some(guided) = &mut request.guide else { continue };
            if guided.row.is_some() && !std::mem::replace(&mut guided.counted, true) {
                self.metrics.grammars.rows_waited.inc();
            }
            settled.extend(guided.settle(now).map(|settled| (*id, settled)));
        }
        // Sort: a map has no fixed order, and although frames go to separate requests, tokens go to the
        // common event log.
        settled.sort_unstable_by_key(|(id, _)| *id);
        for (id, settled) in settled {
            match settled {
                Settled::Draws(mask) => self.draw_stored_row(now, id, mask.as_deref()),
                Settled::Ends => self.complete_guided(now, id),
                Settled::Fails(reason) => self.remove(id, Removal::NoMask(reason)),
            }
        }
    }

    fn draw_stored_row(&mut self, now: Instant, id: SeqId, mask: Option<&TokenMask>) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let Some(guided) = &mut request.guide else { return };
        guided.counted = false;
        let Some(mut row) = guided.row.take() else { return };
        let Some((token, logprobs)) = request.sampler.draw_allowed(&mut row, mask) else {
            return self.remove(id, Removal::NotFinite);
        };
        // Otherwise its row is computed once more and sampled then.
        if self.scheduler.draw_late(id, token) {
            self.start(id);
            self.emit(now, id, vec![(token, logprobs)]);
        }
    }

    /// The grammar allows no further token. If the request has not started, its prompt is computed first.
    fn complete_guided(&mut self, now: Instant, id: SeqId) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let computed = request.guide.as_ref().is_some_and(|guided| guided.row.is_some());
        if request.started || computed {
            let ending: Ending = request.text.end(FinishReason::Stop, None);
            self.start(id);
            self.remove(id, Removal::Finished(ending, now));
        }
    }
}
