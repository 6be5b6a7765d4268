//! Frames that clients receive: start of the output, tokens, end.

use super::{Engine, Sink};
use crate::kv_cache::HitStop;
use crate::sampling::stop::Ending;
use crate::scheduler::SeqId;
use crate::telemetry::{FinishedLabel, LookupLabel, Reason};
use proto::message::{
    FinishReason, Finished, GenerateError, GenerateFrame, Started, TokenLogprobs, TokenOut,
};
use std::time::{Duration, Instant};

impl Engine {
    pub(super) fn start(&mut self, id: SeqId) {
        let Some(live) = self.live.get_mut(&id).filter(|live| !live.started) else { return };
        let Some(info) = self.scheduler.info(id) else { return };
        live.started = true;
        self.metrics.queue.0.observe(live.received.elapsed().as_secs_f64());
        let stop = info.hit_stop.name();
        self.metrics.lookups.get_or_create(&LookupLabel { stop }).inc();
        let cached = (info.cached_tokens as usize).min(live.prompt_len);
        if let Some(traced) = &mut live.traced {
            traced.started(cached, live.prompt_len - cached, stop);
        }
        live.sink.frame(GenerateFrame::Started(Started {
            cached_tokens: cached as u32,
            computed_tokens: (live.prompt_len - cached) as u32,
            hit_stop: live
                .pulled
                .map_or_else(|| info.hit_stop.to_string(), |pulled| format!("{} {pulled}", info.hit_stop)),
        }));
    }

    /// Sends the tokens that a step drew for a request; several if draft tokens were accepted.
    pub(super) fn emit(&mut self, now: Instant, id: SeqId, tokens: Vec<(u32, Option<TokenLogprobs>)>) {
        let Some(live) = self.live.get_mut(&id) else { return };
        let before = live.last_token.replace(now);
        let mut between = now.saturating_duration_since(before.unwrap_or(live.received)).as_secs_f64();
        if before.is_some() {
            // They arrived together, so each gets an equal part of the time.
            between /= tokens.len().max(1) as f64;
        }
        let (mut out, mut ending) = (Vec::with_capacity(tokens.len()), None);
        for (token, logprobs) in tokens {
            match before {
                None => self.metrics.ttft.0.observe(between),
                Some(_) => self.metrics.itl.0.observe(between),
            }
            self.tokens += 1;
            self.metrics.generation_tokens.inc();
            live.sampler.accept(token);
            let (text, ends) = live.text.push(token);
            if let (None, Some(guided)) = (&ends, &mut live.guide) {
                guided.accept(token);
            }
            out.push(TokenOut { id: token, text, logprobs });
            ending = ends;
        }
        let heard = live.sink.frame(GenerateFrame::Tokens(out));
        match ending {
            Some(ending) => self.finish(now, id, ending),
            None if !heard => self.cancel(id),
            None => {}
        }
    }

    pub(super) fn finish(&mut self, now: Instant, id: SeqId, ending: Ending) {
        self.remember_live(id);
        let info = self.scheduler.remove(id);
        let preemptions = info.map_or(0, |info| info.preemptions);
        let Some(mut live) = self.live.remove(&id) else { return };
        self.metrics.e2e.0.observe(now.saturating_duration_since(live.received).as_secs_f64());
        self.count_end(label(ending.reason));
        if let Some(traced) = &mut live.traced {
            traced.finished(ending.reason, live.text.generated(), preemptions);
        }
        live.sink.frame(GenerateFrame::Finished(Finished {
            reason: ending.reason,
            matched: ending.matched,
            tail: ending.tail,
            completion_tokens: live.text.generated(),
            preemptions,
            drafted_tokens: info.map_or(0, |info| info.drafted_tokens),
            accepted_tokens: info.map_or(0, |info| info.accepted_tokens),
        }));
    }

    /// Ends a request whose tokens were all sent by an earlier attempt that was cut off before the end frame.
    pub(super) fn finish_at_once(&self, sink: &mut dyn Sink, ending: Ending, completion_tokens: u32) {
        self.count_end(label(ending.reason));
        let hit_stop = HitStop::Disabled.to_string();
        sink.frame(GenerateFrame::Started(Started { cached_tokens: 0, computed_tokens: 0, hit_stop }));
        sink.frame(GenerateFrame::Finished(Finished {
            reason: ending.reason,
            matched: ending.matched,
            tail: ending.tail,
            completion_tokens,
            preemptions: 0,
            drafted_tokens: 0,
            accepted_tokens: 0,
        }));
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.expire_pins(now);
        self.expire_warming();
        let late = self.live.iter().filter_map(|(id, live)| {
            let age = now.saturating_duration_since(live.received);
            live.deadline.filter(|deadline| age >= *deadline).map(|_| (*id, age))
        });
        let late: Vec<(SeqId, Duration)> = late.collect();
        for (id, age) in late {
            self.remember_live(id);
            self.scheduler.remove(id);
            self.siblings.gone(id);
            self.pulling.gone(id);
            let Some(mut live) = self.live.remove(&id) else { continue };
            self.count_end(Reason::error);
            live.fail("deadline_exceeded");
            let after_ms = age.as_millis() as u64;
            live.sink.frame(GenerateFrame::Failed(GenerateError::DeadlineExceeded { after_ms }));
        }
    }

    /// Ends a request with an error because a row that it samples has NaN or infinite values. Everything
    /// cached on its path is forgotten.
    pub(super) fn fail_not_finite(&mut self, id: SeqId) {
        self.forget_kept(id);
        self.scheduler.remove_spoiled(id);
        self.siblings.gone(id);
        self.pulling.gone(id);
        let Some(mut live) = self.live.remove(&id) else { return };
        tracing::error!("a request failed: {}", GenerateError::NotFinite);
        self.count_end(Reason::error);
        live.fail("not_finite");
        live.sink.frame(GenerateFrame::Failed(GenerateError::NotFinite));
    }

    pub(super) fn count_end(&self, finished_reason: Reason) {
        self.metrics.finished.get_or_create(&FinishedLabel { finished_reason }).inc();
    }
}

fn label(reason: FinishReason) -> Reason {
    match reason {
        FinishReason::Stop => Reason::stop,
        FinishReason::Length => Reason::length,
        FinishReason::Cancelled => Reason::abort,
    }
}
