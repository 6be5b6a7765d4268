//! Frames that clients receive: start of the output, tokens, end.

use super::request::Removal;
use super::{Engine, Sink};
use crate::kv_cache::HitStop;
use crate::sampling::stop::Ending;
use crate::scheduler::SeqId;
use crate::telemetry::LookupLabel;
use proto::message::{GenerateFrame, Started, TokenLogprobs, TokenOut};
use std::time::{Duration, Instant};

impl Engine {
    pub(super) fn start(&mut self, id: SeqId) {
        let Some(request) = self.requests.get_mut(&id).filter(|request| !request.started) else { return };
        let Some(info) = self.scheduler.info(id) else { return };
        request.started = true;
        self.metrics.queue.0.observe(request.received.elapsed().as_secs_f64());
        let stop = info.hit_stop.name();
        self.metrics.lookups.get_or_create(&LookupLabel { stop }).inc();
        let cached = (info.cached_tokens as usize).min(request.prompt_len);
        if let Some(traced) = &mut request.traced {
            traced.started(cached, request.prompt_len - cached, stop);
        }
        if let Some(usage) = &request.usage {
            usage.cached(cached as u64);
        }
        request.sink.frame(GenerateFrame::Started(Started {
            cached_tokens: cached as u32,
            estimated: false,
            computed_tokens: (request.prompt_len - cached) as u32,
            hit_stop: request.transfer.map_or_else(
                || info.hit_stop.to_string(),
                |transfer| format!("{} {transfer}", info.hit_stop),
            ),
        }));
    }

    /// Sends the tokens that a step drew for a request; several if draft tokens were accepted.
    pub(super) fn emit(&mut self, now: Instant, id: SeqId, tokens: Vec<(u32, Option<TokenLogprobs>)>) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let before = request.last_token.replace(now);
        let mut between = now.saturating_duration_since(before.unwrap_or(request.received)).as_secs_f64();
        if before.is_some() {
            // They arrived together, so each gets an equal part of the time.
            between /= tokens.len().max(1) as f64;
        }
        if let Some(usage) = &request.usage {
            usage.drawn(tokens.len() as u64);
        }
        let (mut out, mut ending) = (Vec::with_capacity(tokens.len()), None);
        for (token, logprobs) in tokens {
            match before {
                None => self.metrics.ttft.0.observe(between),
                Some(_) => self.metrics.itl.0.observe(between),
            }
            self.tokens += 1;
            self.metrics.generation_tokens.inc();
            request.sampler.accept(token);
            let (text, ends) = request.text.push(token);
            if let (None, Some(guided)) = (&ends, &mut request.guide) {
                guided.accept(token);
            }
            out.push(TokenOut { id: token, text, logprobs });
            ending = ends;
        }
        let received = request.sink.frame(GenerateFrame::Tokens(out));
        match ending {
            Some(ending) => self.remove(id, Removal::Finished(ending, now)),
            None if !received => self.cancel(id),
            None => {}
        }
    }

    /// Ends a request whose tokens were all sent by an earlier attempt that was cut off before the end frame.
    pub(super) fn finish_at_once(&self, sink: &mut dyn Sink, ending: Ending, completion_tokens: u32) {
        let hit_stop = HitStop::Disabled.to_string();
        sink.frame(GenerateFrame::Started(Started {
            cached_tokens: 0,
            estimated: false,
            computed_tokens: 0,
            hit_stop,
        }));
        self.finish(sink, ending, completion_tokens, None);
    }

    /// Removes the requests whose deadline has passed, and pins and computations that are over.
    pub(super) fn expire(&mut self, now: Instant) {
        self.expire_pins(now);
        self.expire_warming();
        let expired = self.requests.iter().filter_map(|(id, request)| {
            let age = now.saturating_duration_since(request.received);
            request.deadline.filter(|deadline| age >= *deadline).map(|_| (*id, age))
        });
        let expired: Vec<(SeqId, Duration)> = expired.collect();
        for (id, age) in expired {
            self.remove(id, Removal::DeadlineExceeded(age));
        }
    }
}
