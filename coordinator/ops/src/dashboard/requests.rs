//! Explains routing decisions: the candidates, their costs, and the outcome.

use super::why::{count, seconds};
use router::balancer::recent::{Decided, Ending, Lost, Outcome};
use router::routing::{Candidate, CostEstimate, Reason};
use router::slot::Slot;
use serde_json::{Value, json};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Most candidates shown: the chosen one and the cheapest.
const MAX_CANDIDATES: usize = 8;

/// Converts instants to milliseconds since 1970.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    pub(super) now: Instant,
    pub(super) unix_ms: u64,
}

impl Clock {
    pub(super) fn read() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { now: Instant::now(), unix_ms: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX) }
    }

    pub(super) fn ms(&self, at: Instant) -> u64 {
        self.ms_ago(self.now.saturating_duration_since(at))
    }

    /// The time of an event that was `ago`.
    pub(super) fn ms_ago(&self, ago: std::time::Duration) -> u64 {
        self.unix_ms.saturating_sub(u64::try_from(ago.as_millis()).unwrap_or(u64::MAX))
    }
}

/// A decision and its outcome.
pub(super) fn request(clock: Clock, decided: &Decided, outcome: &Outcome) -> Value {
    let request = &decided.request;
    let name = |slot: Slot| decided.names.of(slot).map(|node| node.as_str());
    let since = decided.at.checked_sub(decided.waited).unwrap_or(decided.at);
    let after = |at: Instant| rounded(at.saturating_duration_since(since).as_secs_f64());
    let parts = decided.parts();
    let compared: Vec<(&Candidate, &CostEstimate)> = decided.candidates.iter().zip(&parts).collect();
    let mut shown = compared.clone();
    shown.sort_by(|(a, x), (b, y)| {
        let chosen = |c: &Candidate| c.slot != decided.choice.slot;
        chosen(a).cmp(&chosen(b)).then(x.cost.total_cmp(&y.cost))
    });
    shown.truncate(MAX_CANDIDATES);
    let candidates: Vec<Value> = shown
        .iter()
        .map(|(candidate, parts)| {
            json!({
                "worker": name(candidate.slot),
                "chosen": candidate.slot == decided.choice.slot,
                "cached": parts.cached,
                "queue_s": rounded(parts.queue),
                "prefill_s": rounded(parts.prefill),
                "transfer_s": rounded(parts.transfer),
                "decode_s": rounded(parts.decode),
                "cost_s": rounded(parts.cost),
                "pending_tokens": candidate.pending_tokens,
                "running": candidate.running,
                "queued": candidate.queued,
                "pulls_from": candidate.pull.and_then(|pull| name(pull.from)),
            })
        })
        .collect();
    json!({
        "number": decided.number,
        "request": request.request_id.as_str(),
        "tenant": &*request.tenant,
        "model": request.model.as_str(),
        "attempt": decided.attempt.0,
        "at": clock.ms(since),
        "state": state(outcome),
        "prompt_tokens": request.prompt_tokens,
        "reason": decided.choice.reason.as_str(),
        "worker": name(decided.choice.slot),
        "predicted": decided.predicted,
        "cached": outcome.cached,
        "waited_s": rounded(decided.waited.as_secs_f64()),
        "started_s": outcome.started.map(after),
        "ended_s": outcome.ended.map(|(at, _)| after(at)),
        "generated": outcome.generated,
        "best": decided.best.and_then(|(tokens, slot)| Some(json!({"worker": name(slot)?, "tokens": tokens}))),
        "lost": decided.lost.map(|lost| lost.name()),
        "pull": decided.pull.and_then(|pull| Some(json!({"from": name(pull.from)?, "seconds": rounded(pull.seconds)}))),
        "prefill": decided.prefill.and_then(name),
        "compared": compared.len(),
        "candidates": candidates,
        "why": why(decided, &compared),
    })
}

fn state(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome { generated: Some(_), .. } => "done",
        Outcome { ended: Some((_, Ending::Failed)), .. } => "failed",
        Outcome { ended: Some(_), .. } => "ended",
        Outcome { started: Some(_), .. } => "decodes",
        _ => "prefills",
    }
}

/// Rounds to microseconds.
pub(super) fn rounded(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

/// The decision in a sentence.
fn why(decided: &Decided, compared: &[(&Candidate, &CostEstimate)]) -> String {
    let name = |slot: Slot| decided.names.of(slot).map_or("?", |node| node.as_str());
    let choice = &decided.choice;
    let chosen = name(choice.slot);
    let own = compared.iter().find(|(candidate, _)| candidate.slot == choice.slot).map(|(_, parts)| *parts);
    let others = compared.iter().filter(|(candidate, _)| candidate.slot != choice.slot);
    let next = others.min_by(|(_, a), (_, b)| a.cost.total_cmp(&b.cost));
    let has = match decided.predicted {
        0 => "has nothing of the prompt".to_owned(),
        tokens => {
            format!("has {tokens} of {} in its cache", count(decided.request.prompt_tokens.into(), "token"))
        }
    };
    let mut text = match choice.reason {
        Reason::Only => format!("Only {chosen} could take it; it {has}."),
        Reason::Prefix => format!("{chosen} {has}."),
        Reason::Group => {
            format!("{chosen} computes what this request has in common with others just now; it {has}.")
        }
        Reason::Replica => {
            format!(
                "Those that hold the prefix are asked too often: {chosen} holds it from now on; it {has}."
            )
        }
        Reason::Load => format!("{chosen} has the least to do; it {has}."),
    };
    if let (Some(own), Some((other, parts))) = (own, next) {
        let answers = |parts: &CostEstimate| seconds(parts.queue + parts.prefill + parts.transfer);
        text += &format!(
            " First token expected after {}, at {} after {}.",
            answers(own),
            name(other.slot),
            answers(parts)
        );
    }
    if let Some(pull) = decided.pull {
        text += &format!(" The rest is pulled from {}.", name(pull.from));
    }
    if let (Some(lost), Some((tokens, slot))) = (decided.lost, decided.best) {
        let because = match lost {
            Lost::Load => "has more to do",
            Lost::Replica => "is asked too often",
            Lost::Full => "has as many requests as it may have",
            Lost::Drain => "drains",
            Lost::NotReady => "is not ready",
            Lost::Silent => "was not heard of, or does not get on",
            Lost::Role => "only computes prompts for others",
            Lost::Declined => "had declined it, or may not go on with it",
        };
        text += &format!(" {} holds {tokens} tokens of it, but {because}.", name(slot));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::ids::{Attempt, ModelId, RequestId};
    use router::balancer::recent::Names;
    use router::balancer::{Output, RouteRequest};
    use router::routing::pace::DecodePace;
    use router::routing::{Query, Routing, choose};
    use std::sync::Arc;
    use std::time::Duration;

    fn decided(at: Instant, candidates: Vec<Candidate>) -> Decided {
        let query = Query {
            routing: Routing::Prefix,
            prompt_tokens: 1_530,
            output_tokens: 0.0,
            standing: None,
            random: 0,
            round: 0,
        };
        let choice = choose(&query, &candidates).unwrap();
        let request = RouteRequest {
            request_id: RequestId::new("req-7").unwrap(),
            tenant: "acme".into(),
            model: ModelId::new("m").unwrap(),
            operation: None,
            prompt_tokens: 1_530,
            chain: [].into(),
            output: Output::default(),
            images: false,
            group: None,
            trace: None,
            priority: 0,
            submitted: at,
            deadline: at,
        };
        Decided {
            number: 3,
            request: Arc::new(request),
            attempt: Attempt(0),
            waited: Duration::from_millis(250),
            at,
            query,
            candidates,
            choice,
            predicted: choice.predicted,
            pull: None,
            prefill: None,
            best: None,
            lost: None,
            names: Arc::new(Names::default()),
        }
    }

    fn candidate(index: usize, units: u32, pending_tokens: u64) -> Candidate {
        Candidate {
            slot: Slot::new(index).unwrap(),
            units,
            pending_tokens,
            running: 0,
            queued: 0,
            slots: 0,
            prefill_rate: 1_000.0,
            prefill_age_s: 0.0,
            pace: DecodePace::default(),
            pace_age_s: 0.0,
            given_tokens: 0.0,
            pull: None,
        }
    }

    #[test]
    fn a_decision_has_its_costs_and_its_outcome() {
        let at = Instant::now();
        let decided = decided(at, vec![candidate(0, 0, 0), candidate(1, 93, 100)]);
        let clock = Clock { now: at + Duration::from_secs(2), unix_ms: 1_000_000 };
        let placed = request(clock, &decided, &Outcome::default());
        assert_eq!(
            (&placed["reason"], &placed["state"], &placed["at"]),
            (&json!("prefix"), &json!("prefills"), &json!(997_750))
        );
        let chosen = &placed["candidates"][0];
        assert_eq!(
            (&chosen["chosen"], &chosen["cached"], &chosen["queue_s"]),
            (&json!(true), &json!(1_488), &json!(0.1))
        );
        assert_eq!(chosen["prefill_s"], json!(0.042));
        assert_eq!(placed["candidates"][1]["prefill_s"], json!(1.53));
        let why = placed["why"].as_str().unwrap();
        assert!(why.contains("has 1488 of 1\u{202f}530 tokens in its cache"), "{why}");
        assert!(why.contains("expected after 0.1 s, at ? after 1.5 s"), "{why}");
        let outcome = Outcome {
            started: Some(at + Duration::from_millis(150)),
            cached: Some(1_488),
            ended: Some((at + Duration::from_secs(1), Ending::Over)),
            generated: Some(40),
        };
        let done = request(clock, &decided, &outcome);
        assert_eq!(
            (&done["state"], &done["cached"], &done["started_s"]),
            (&json!("done"), &json!(1_488), &json!(0.4))
        );
        assert_eq!(
            (&done["ended_s"], &done["generated"], &done["number"]),
            (&json!(1.25), &json!(40), &json!(3))
        );
    }

    #[test]
    fn of_many_candidates_the_chosen_and_the_cheapest_are_shown() {
        let at = Instant::now();
        let many = (0..40).map(|index| candidate(index, 0, 100 * index as u64)).collect();
        let view = request(Clock::read(), &decided(at, many), &Outcome::default());
        assert_eq!(view["compared"], json!(40));
        let candidates = view["candidates"].as_array().unwrap();
        assert_eq!((candidates.len(), &candidates[0]["chosen"]), (MAX_CANDIDATES, &json!(true)));
        let costs: Vec<f64> = candidates[1..].iter().map(|c| c["cost_s"].as_f64().unwrap()).collect();
        assert!(costs.is_sorted(), "{costs:?}");
    }
}
