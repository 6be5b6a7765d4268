//! The engine's spans in the trace of a recorded request: queueing, prefill and decode time, and in a
//! pipeline the cost of its first steps at each stage.

use super::Engine;
use super::request::Request;
use crate::executor::StepSpent;
use crate::scheduler::StepPlan;
use proto::message::FinishReason;
use proto::stage::MAX_TRACES;
use proto::trace::{Span, TraceContext, follow};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of steps of a request that are recorded one by one in a pipeline.
const STEPS: u32 = 32;

#[derive(Debug)]
pub(super) struct Traced {
    /// The current phase. Declared before `whole`, so that it is dropped first.
    phase: Span,
    whole: Span,
    scheduled: bool,
    steps: u32,
    /// A clone of [`Engine`]'s counter: spans are recorded as long as a clone exists.
    _recorded: Arc<()>,
}

impl Traced {
    /// Starts the trace of a request below `parent`. `None` if nothing is recorded here.
    pub(super) fn begin(
        parent: TraceContext,
        now: Instant,
        prompt_tokens: usize,
        recorded: &Arc<()>,
    ) -> Option<Self> {
        let mut whole = follow(parent, "generate", now)?;
        whole.set("gen_ai.usage.input_tokens", prompt_tokens);
        let phase = whole.child("queue", now);
        Some(Self { phase, whole, scheduled: false, steps: 0, _recorded: Arc::clone(recorded) })
    }

    /// The request takes part in a step that is being planned.
    fn planned(&mut self, now: Instant) {
        self.steps += 1;
        if !std::mem::replace(&mut self.scheduled, true) {
            self.phase = self.whole.child("prefill", now);
        }
    }

    /// The prompt is computed; `cached` of its tokens came from the cache.
    pub(super) fn started(&mut self, cached: usize, computed: usize, lookup: &str) {
        self.phase.set("kvasir.cached_tokens", cached);
        self.phase.set("kvasir.computed_tokens", computed);
        self.phase.set("kvasir.lookup", lookup.to_owned());
        self.phase.set("kvasir.steps", self.steps);
        self.phase = self.whole.child("decode", Instant::now());
    }

    pub(super) fn finished(&mut self, reason: FinishReason, tokens: u32, preemptions: u32) {
        let reason = match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "abort",
        };
        self.whole.set("gen_ai.response.finish_reasons", vec![reason.to_owned()]);
        self.whole.set("gen_ai.usage.output_tokens", tokens);
        self.whole.set("kvasir.preemptions", preemptions);
        self.whole.set("kvasir.steps", self.steps);
    }
}

impl Request {
    /// Marks the request as failed for this reason.
    pub(super) fn fail(&mut self, reason: &'static str) {
        if let Some(traced) = &mut self.traced {
            traced.whole.fail(reason);
        }
    }
}

impl Engine {
    /// Counts a planned step. Returns a span for each recorded request in it if there are later stages.
    pub(super) fn trace_plan(&mut self, plan: &StepPlan) -> Vec<Span> {
        let (mut spans, now) = (Vec::new(), Instant::now());
        // Fast path: usually nothing is recorded.
        if Arc::strong_count(&self.recorded) == 1 {
            return spans;
        }
        for sequence in &plan.sequences {
            let request = self.requests.get_mut(&sequence.id);
            let Some(traced) = request.and_then(|request| request.traced.as_mut()) else { continue };
            traced.planned(now);
            if self.executor.ranks() > 1 && traced.steps <= STEPS && spans.len() < MAX_TRACES {
                let mut span = traced.phase.call("stages", now);
                span.set("kvasir.step", plan.step);
                span.set("kvasir.rows", sequence.rows.len());
                span.set("kvasir.step_rows", plan.tokens.len());
                spans.push(span);
            }
        }
        spans
    }
}

/// Writes the times that the stages spent on a step into the spans of its requests.
pub(super) fn record_times(spans: Vec<Span>, spent: &StepSpent) {
    let micros = |us: u32| Duration::from_micros(us.into());
    let downstream: Duration = spent.ranks.iter().skip(1).map(|stage| micros(stage.computed_us)).sum();
    for mut span in spans {
        // The first stage computes before the step is sent on.
        let first = spent.ranks.first().map_or(Duration::ZERO, |first| micros(first.computed_us));
        span.set("kvasir.first_stage_seconds", first);
        span.set("kvasir.stages_seconds", downstream);
        span.set("kvasir.hop_seconds", spent.in_flight.saturating_sub(downstream));
    }
}
