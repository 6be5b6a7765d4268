//! Trace spans of how a worker was chosen for a generation or a call to encode texts.

use super::claim::Placed;
use crate::balancer::{Assignment, Explained};
use proto::trace::{Span, SpanKind, TraceContext, within};

/// Records the queue and route spans below `trace`. Returns the span of the attempt; `None` if nothing is
/// recorded.
pub(super) fn record(trace: TraceContext, placed: &Placed) -> Option<Span> {
    let Placed { assignment, submitted, chosen, .. } = placed;
    let Assignment { node, attempt, predicted, reason, prefill, pull, explained, .. } = assignment;
    if let Some(explained) = explained {
        let Explained { at, candidates } = &**explained;
        // A request that is placed at once has its decision before its submission time.
        let since = (*submitted).min(*at);
        if let Some(queue) = within(trace, SpanKind::Internal, "queue", since) {
            queue.end(*at);
        }
        if let Some(mut route) = within(trace, SpanKind::Internal, "route", *at) {
            let seconds = |part: fn(&crate::routing::Parts) -> f64| -> Vec<f64> {
                candidates.iter().map(|(_, parts)| part(parts)).collect()
            };
            let names: Vec<String> = candidates.iter().map(|(node, _)| node.to_string()).collect();
            route.set("kvasir.route.candidates", names);
            route.set("kvasir.route.cost_seconds", seconds(|parts| parts.cost));
            route.set("kvasir.route.queue_seconds", seconds(|parts| parts.queue));
            route.set("kvasir.route.prefill_seconds", seconds(|parts| parts.prefill));
            route.set("kvasir.route.transfer_seconds", seconds(|parts| parts.transfer));
            route.set("kvasir.route.decode_seconds", seconds(|parts| parts.decode));
            route.set("kvasir.route.cached_tokens", seconds(|parts| parts.cached.into()));
            route.set("kvasir.route.chosen", node.to_string());
            route.set("kvasir.route.reason", reason.as_str());
            route.set("kvasir.predicted_cached_tokens", *predicted);
            if let Some(prefill) = prefill {
                route.set("kvasir.route.prefill_worker", prefill.node.to_string());
            }
            if let Some(pull) = pull {
                route.set("kvasir.route.pull_from", pull.node.to_string());
            }
            route.end(*chosen);
        }
    }
    let mut dispatch = within(trace, SpanKind::Client, "dispatch", *chosen)?;
    dispatch.set("kvasir.worker", node.to_string());
    dispatch.set("kvasir.attempt", attempt.0);
    Some(dispatch)
}
