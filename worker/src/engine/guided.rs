//! Requests whose answers are of a grammar: a row is drawn from when it is known what may be drawn.
//!
//! That is worked out by other threads while the row is computed. Where it takes longer the row is kept and the sequence
//! sits steps out, and nobody else waits.

use super::Engine;
use crate::grammar::{Guide, Look, MASK_TIME};
use crate::sampling::TokenMask;
use crate::sampling::stop::Ending;
use crate::scheduler::SeqId;
use crate::telemetry::{Reason, Refused};
use proto::message::{FinishReason, GenerateError, GenerateFrame};
use std::sync::Arc;
use std::time::Instant;

pub(super) struct Guided {
    guide: Guide,
    /// A row that is drawn from when it is known what may be.
    row: Option<Vec<f32>>,
    /// Since when it has waited.
    since: Option<Instant>,
    /// That it waits is counted.
    counted: bool,
}

/// What becomes of a request.
enum Settled {
    /// It draws from the row that it has kept.
    Draws(Option<Arc<TokenMask>>),
    Ends,
    Fails(String),
}

impl Guided {
    pub(super) fn new(guide: Guide) -> Self {
        Self { guide, row: None, since: None, counted: false }
    }

    /// Whether what is drawn next depends on it.
    pub(super) fn constrains(&self) -> bool {
        self.guide.constrains()
    }

    /// Takes note of a token that was drawn.
    pub(super) fn accept(&mut self, token: u32) {
        self.row = None;
        self.since = None;
        self.guide.accept(token);
    }

    /// What may be drawn from this row: anything, or what is in the mask. None: nothing for now, and the row is kept if
    /// it is the request's own.
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
                let late = now.saturating_duration_since(since) > MASK_TIME;
                late.then(|| {
                    Settled::Fails(format!("what may follow takes more than {} ms", MASK_TIME.as_millis()))
                })
            }
        }
    }
}

impl Engine {
    /// Draws from rows that were kept, and ends requests that are complete or cannot go on.
    pub(super) fn settle(&mut self, now: Instant) {
        let mut settled: Vec<(SeqId, Settled)> = Vec::new();
        for (id, live) in &mut self.live {
            let Some(guided) = &mut live.guide else { continue };
            if guided.row.is_some() && !std::mem::replace(&mut guided.counted, true) {
                self.metrics.grammars.rows_waited.inc();
            }
            settled.extend(guided.settle(now).map(|settled| (*id, settled)));
        }
        // The order of a map is nobody's: frames go to requests of their own, but tokens to the log of events.
        settled.sort_unstable_by_key(|(id, _)| *id);
        for (id, settled) in settled {
            match settled {
                Settled::Draws(mask) => self.draw_kept(now, id, mask.as_deref()),
                Settled::Ends => self.complete_guided(now, id),
                Settled::Fails(reason) => self.fail_guided(id, reason),
            }
        }
    }

    fn draw_kept(&mut self, now: Instant, id: SeqId, mask: Option<&TokenMask>) {
        let Some(live) = self.live.get_mut(&id) else { return };
        let Some(guided) = &mut live.guide else { return };
        guided.counted = false;
        let Some(mut row) = guided.row.take() else { return };
        let Some((token, logprobs)) = live.sampler.draw_allowed(&mut row, mask) else {
            return self.fail_not_finite(id);
        };
        // Else its row is being computed once more, and is drawn from then.
        if self.scheduler.draw_late(id, token) {
            self.start(id);
            self.emit(now, id, vec![(token, logprobs)]);
        }
    }

    /// The grammar allows nothing more. Of a request that has not begun its prompt is computed first.
    fn complete_guided(&mut self, now: Instant, id: SeqId) {
        let Some(live) = self.live.get_mut(&id) else { return };
        let computed = live.guide.as_ref().is_some_and(|guided| guided.row.is_some());
        if live.started || computed {
            let ending: Ending = live.text.end(FinishReason::Stop, None);
            self.start(id);
            self.finish(now, id, ending);
        }
    }

    fn fail_guided(&mut self, id: SeqId, reason: String) {
        self.remember_live(id);
        self.scheduler.remove(id);
        self.siblings.gone(id);
        self.pulling.gone(id);
        let Some(mut live) = self.live.remove(&id) else { return };
        self.metrics.grammars.refused(Refused::mask);
        self.count_end(Reason::error);
        live.fail("grammar");
        let field = live.guide.map_or_else(String::new, |guided| guided.guide.field().to_owned());
        live.sink.frame(GenerateFrame::Failed(GenerateError::InvalidField { field, reason }));
    }
}
