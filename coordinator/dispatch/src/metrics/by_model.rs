//! Request metrics of each model. A metric is looked up in its family once for each model, not for each
//! request.

use super::families::{Histograms, LENGTH, One, TOKEN, Traced, Two, WAIT, exemplar, one, registered};
use super::{Served, finish_name};
use parking_lot::RwLock;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use proto::ids::ModelId;
use proto::message::FinishReason;
use proto::trace::TraceId;
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct ByModel {
    time_to_first_token: Traced,
    inter_token: Histograms,
    e2e: Traced,
    queue_time: Traced,
    prefill_time: Traced,
    decode_time: Traced,
    inference_time: Traced,
    mean_token_time: Histograms,
    prompt_length: Histograms,
    generation_length: Histograms,
    prompt_tokens: Family<One, Counter>,
    generation_tokens: Family<One, Counter>,
    success: Family<Two, Counter>,
    models: RwLock<HashMap<ModelId, Arc<OfModel>>>,
}

/// The metrics of one model. A metric that was never counted is not exported.
#[derive(Debug)]
struct OfModel {
    label: One,
    time_to_first_token: CachedIndex<HistogramWithExemplars<One>>,
    inter_token: CachedIndex<Histogram>,
    e2e: CachedIndex<HistogramWithExemplars<One>>,
    queue_time: CachedIndex<HistogramWithExemplars<One>>,
    prefill_time: CachedIndex<HistogramWithExemplars<One>>,
    decode_time: CachedIndex<HistogramWithExemplars<One>>,
    inference_time: CachedIndex<HistogramWithExemplars<One>>,
    mean_token_time: CachedIndex<Histogram>,
    prompt_length: CachedIndex<Histogram>,
    generation_length: CachedIndex<Histogram>,
    prompt_tokens: CachedIndex<Counter>,
    generation_tokens: CachedIndex<Counter>,
    stopped: CachedIndex<Counter>,
    cut: CachedIndex<Counter>,
    cancelled: CachedIndex<Counter>,
}

/// A metric, cached after its first lookup.
#[derive(Debug)]
struct CachedIndex<M>(OnceLock<M>);

impl<M: Clone> CachedIndex<M> {
    const fn new() -> Self {
        Self(OnceLock::new())
    }

    fn of<C: MetricConstructor<M>>(&self, family: &Family<One, M, C>, label: &One) -> &M {
        self.0.get_or_init(|| family.get_or_create_owned(label))
    }
}

impl OfModel {
    fn new(model: &ModelId) -> Self {
        Self {
            label: one("model_name", model.as_str().to_owned()),
            time_to_first_token: CachedIndex::new(),
            inter_token: CachedIndex::new(),
            e2e: CachedIndex::new(),
            queue_time: CachedIndex::new(),
            prefill_time: CachedIndex::new(),
            decode_time: CachedIndex::new(),
            inference_time: CachedIndex::new(),
            mean_token_time: CachedIndex::new(),
            prompt_length: CachedIndex::new(),
            generation_length: CachedIndex::new(),
            prompt_tokens: CachedIndex::new(),
            generation_tokens: CachedIndex::new(),
            stopped: CachedIndex::new(),
            cut: CachedIndex::new(),
            cancelled: CachedIndex::new(),
        }
    }
}

impl ByModel {
    /// Registers all metrics.
    pub(super) fn register(r: &mut Registry) -> Self {
        let inter_token = TOKEN.histograms(r, "vllm:inter_token_latency_seconds", "Time between two tokens");
        // The older name of the same metric.
        r.register("vllm:time_per_output_token_seconds", "Time between two tokens", inter_token.clone());
        Self {
            time_to_first_token: WAIT.histograms(
                r,
                "vllm:time_to_first_token_seconds",
                "Time from arrival to the first token",
            ),
            inter_token,
            e2e: WAIT.histograms(r, "vllm:e2e_request_latency_seconds", "Time from arrival to the end"),
            queue_time: WAIT.histograms(
                r,
                "vllm:request_queue_time_seconds",
                "Time until a worker was chosen",
            ),
            prefill_time: WAIT.histograms(
                r,
                "vllm:request_prefill_time_seconds",
                "Time from the choice of a worker to the first token",
            ),
            decode_time: WAIT.histograms(
                r,
                "vllm:request_decode_time_seconds",
                "Time from the first token to the last",
            ),
            inference_time: WAIT.histograms(
                r,
                "vllm:request_inference_time_seconds",
                "Time from the choice of a worker to the last token",
            ),
            mean_token_time: TOKEN.histograms(
                r,
                "vllm:request_time_per_output_token_seconds",
                "A request's mean time between tokens",
            ),
            prompt_length: LENGTH.histograms(r, "vllm:request_prompt_tokens", "Prompt tokens of a request"),
            generation_length: LENGTH.histograms(
                r,
                "vllm:request_generation_tokens",
                "Tokens generated for a request",
            ),
            prompt_tokens: registered(r, "vllm:prompt_tokens", "Prompt tokens of finished requests"),
            generation_tokens: registered(
                r,
                "vllm:generation_tokens",
                "Tokens generated for finished requests",
            ),
            success: registered(r, "vllm:request_success", "Finished requests"),
            models: RwLock::default(),
        }
    }

    fn of(&self, model: &ModelId) -> Arc<OfModel> {
        if let Some(of) = self.models.read().get(model) {
            return Arc::clone(of);
        }
        let mut models = self.models.write();
        Arc::clone(models.entry(model.clone()).or_insert_with(|| Arc::new(OfModel::new(model))))
    }

    /// Removes the metrics of versions that are not deployed any more. A request for one that ends later brings them back
    /// until the next call.
    pub(super) fn retain_versions(&self, is_deployed: impl Fn(&ModelId) -> bool) {
        let gone = |model: &ModelId| model.is_version() && !is_deployed(model);
        if !self.models.read().keys().any(gone) {
            return;
        }
        let mut models = self.models.write();
        let removed: Vec<_> = models.extract_if(|model, _| gone(model)).collect();
        for (model, of) in removed {
            let label = &of.label;
            for times in [
                &self.time_to_first_token,
                &self.e2e,
                &self.queue_time,
                &self.prefill_time,
                &self.decode_time,
                &self.inference_time,
            ] {
                times.remove(label);
            }
            for lengths in
                [&self.inter_token, &self.mean_token_time, &self.prompt_length, &self.generation_length]
            {
                lengths.remove(label);
            }
            for tokens in [&self.prompt_tokens, &self.generation_tokens] {
                tokens.remove(label);
            }
            for reason in REASONS {
                self.success.remove(&ended(&model, reason));
            }
        }
    }

    /// Counts a served encoder request.
    pub(super) fn encoded(
        &self,
        model: &ModelId,
        (queued, total): (Duration, Duration),
        tokens: u64,
        trace: Option<TraceId>,
    ) {
        let of = self.of(model);
        let label = &of.label;
        let observe = |histogram: &HistogramWithExemplars<One>, time: Duration| {
            let (exemplar, now) = exemplar(trace);
            histogram.observe(time.as_secs_f64(), exemplar, now);
        };
        observe(of.e2e.of(&self.e2e, label), total);
        observe(of.queue_time.of(&self.queue_time, label), queued);
        observe(of.inference_time.of(&self.inference_time, label), total.saturating_sub(queued));
        of.prompt_length.of(&self.prompt_length, label).observe(tokens as f64);
        of.prompt_tokens.of(&self.prompt_tokens, label).inc_by(tokens);
        self.succeeded(model, &of, FinishReason::Stop);
    }

    pub(super) fn served(&self, model: &ModelId, served: &Served) {
        let of = self.of(model);
        let label = &of.label;
        let time = |histogram: &HistogramWithExemplars<One>, seconds: f64| {
            let (exemplar, now) = exemplar(served.trace);
            histogram.observe(seconds, exemplar, now);
        };
        let (first, total) = (served.to_first.as_secs_f64(), served.total.as_secs_f64());
        let queued = served.queued.as_secs_f64();
        time(of.time_to_first_token.of(&self.time_to_first_token, label), first);
        time(of.e2e.of(&self.e2e, label), total);
        time(of.queue_time.of(&self.queue_time, label), queued);
        time(of.prefill_time.of(&self.prefill_time, label), (first - queued).max(0.0));
        time(of.decode_time.of(&self.decode_time, label), (total - first).max(0.0));
        time(of.inference_time.of(&self.inference_time, label), (total - queued).max(0.0));
        if served.generated > 1 {
            let mean = (total - first).max(0.0) / (served.generated - 1) as f64;
            of.mean_token_time.of(&self.mean_token_time, label).observe(mean);
        }
        of.prompt_length.of(&self.prompt_length, label).observe(served.prompt as f64);
        of.generation_length.of(&self.generation_length, label).observe(served.generated as f64);
        of.prompt_tokens.of(&self.prompt_tokens, label).inc_by(served.prompt);
        of.generation_tokens.of(&self.generation_tokens, label).inc_by(served.generated);
        self.succeeded(model, &of, served.reason);
    }

    /// Counts `tokens` tokens, each `each` seconds after the one before.
    pub(super) fn tokens(&self, model: &ModelId, each: f64, tokens: usize) {
        let of = self.of(model);
        let histogram = of.inter_token.of(&self.inter_token, &of.label);
        (0..tokens).for_each(|_| histogram.observe(each));
    }

    fn succeeded(&self, model: &ModelId, of: &OfModel, reason: FinishReason) {
        let counter_cell = match reason {
            FinishReason::Stop => &of.stopped,
            FinishReason::Length => &of.cut,
            FinishReason::Cancelled => &of.cancelled,
        };
        let counter = counter_cell.0.get_or_init(|| self.success.get_or_create_owned(&ended(model, reason)));
        counter.inc();
    }
}

const REASONS: [FinishReason; 3] = [FinishReason::Stop, FinishReason::Length, FinishReason::Cancelled];

/// Labels of a model's requests that ended for `reason`.
fn ended(model: &ModelId, reason: FinishReason) -> Two {
    let model = ("model_name", Cow::Owned(model.as_str().to_owned()));
    [model, ("finished_reason", Cow::Borrowed(finish_name(reason)))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;

    #[test]
    fn the_series_of_a_version_end_with_it() {
        let mut registry = Registry::default();
        let metrics = ByModel::register(&mut registry);
        let text = |registry: &Registry| {
            let mut text = String::new();
            encode(&mut text, registry).unwrap();
            text
        };
        let model = ModelId::new("chat").unwrap();
        let [old, new] = [1, 2].map(|digest| model.version(&[digest; 32]).unwrap());
        let served = |reason| Served {
            to_first: Duration::from_millis(40),
            queued: Duration::from_millis(1),
            total: Duration::from_millis(400),
            prompt: 12,
            generated: 9,
            reason,
            trace: None,
        };
        let serve = |model: &ModelId| {
            REASONS.into_iter().for_each(|reason| metrics.served(model, &served(reason)));
            metrics.tokens(model, 0.01, 8);
            metrics.encoded(model, (Duration::ZERO, Duration::from_secs(1)), 5, None);
        };
        [&model, &old, &new].into_iter().for_each(serve);
        metrics.retain_versions(|version| *version == new);
        let kept = text(&registry);
        assert!(!kept.contains(old.as_str()) && kept.contains(new.as_str()), "{kept}");
        assert!(kept.contains("model_name=\"chat\""), "a model of the configuration keeps its series");
        // A late request brings them back from 0, until they are removed again.
        serve(&old);
        let count = format!("vllm:prompt_tokens_total{{model_name=\"{old}\"}} 41\n");
        assert!(text(&registry).contains(&count), "{}", text(&registry));
        metrics.retain_versions(|_| false);
        assert!(!text(&registry).contains('@'));
    }
}
