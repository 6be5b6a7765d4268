//! Trace spans of how a worker was chosen for a generation or a call to encode texts.

use super::ticket::PlacedAttempt;
use proto::trace::{Span, SpanKind, within};
use router::balancer::{Assignment, Explained, RouteRequest};

/// Records the queue and route spans of a request. Returns the span of the attempt; `None` if nothing is
/// recorded.
pub(super) fn record(request: &RouteRequest, placed: &PlacedAttempt) -> Option<Span> {
    let trace = request.trace?;
    let PlacedAttempt { assignment, chosen, .. } = placed;
    let Assignment { node, attempt, predicted, reason, prefill, pull, explained, .. } = assignment;
    if let Some(explained) = explained {
        let Explained { at, candidates } = &**explained;
        if let Some(queue) = within(trace, SpanKind::Internal, "queue", request.submitted) {
            queue.end(*at);
        }
        if let Some(mut route) = within(trace, SpanKind::Internal, "route", *at) {
            let seconds = |field: fn(&router::routing::CostEstimate) -> f64| -> Vec<f64> {
                candidates.iter().map(|(_, parts)| field(parts)).collect()
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
            if let Some((node, _)) = prefill {
                route.set("kvasir.route.prefill_worker", node.to_string());
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
