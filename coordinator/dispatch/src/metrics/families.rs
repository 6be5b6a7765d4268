//! Metric families: labels, bucket bounds, registration.

use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};
use proto::trace::TraceId;
use std::borrow::Cow;
use std::time::SystemTime;

pub(super) type One = [(&'static str, Cow<'static, str>); 1];
pub(super) type Two = [(&'static str, Cow<'static, str>); 2];

/// Bounds of waiting times: from a cache hit on a small model to a long document on a busy cluster.
pub(super) const WAIT: Buckets = Buckets(&[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
]);
/// Bounds of the time of one token.
pub(super) const TOKEN: Buckets = Buckets(&[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
]);
/// Bounds of the length of prompts and outputs.
pub(super) const LENGTH: Buckets = Buckets(&[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 1e6,
]);
/// Bounds of the coordinator's own time before a worker has the request.
pub(super) const STAGE: Buckets =
    Buckets(&[1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0]);

#[derive(Debug, Clone, Copy)]
pub(super) struct Buckets(&'static [f64]);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

impl MetricConstructor<HistogramWithExemplars<One>> for Buckets {
    fn new_metric(&self) -> HistogramWithExemplars<One> {
        HistogramWithExemplars::new(self.0.iter().copied())
    }
}

/// Metrics of a family that every request updates, each looked up once. They are few, so the search is
/// linear.
#[derive(Debug)]
pub(super) struct CachedMetrics<K, M>(RwLock<Vec<(K, M)>>);

impl<K, M> Default for CachedMetrics<K, M> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<K: PartialEq, M: Clone> CachedMetrics<K, M> {
    /// The metric of `key`. `look_up` finds it the first time.
    pub(super) fn of(&self, key: K, look_up: impl FnOnce() -> M) -> MappedRwLockReadGuard<'_, M> {
        let position = |metrics: &Vec<(K, M)>| metrics.iter().position(|(of, _)| *of == key);
        let metrics = self.0.read();
        if let Some(at) = position(&metrics) {
            return RwLockReadGuard::map(metrics, |metrics| &metrics[at].1);
        }
        drop(metrics);
        let mut metrics = self.0.write();
        let at = position(&metrics).unwrap_or(metrics.len());
        if at == metrics.len() {
            metrics.push((key, look_up()));
        }
        RwLockReadGuard::map(RwLockWriteGuard::downgrade(metrics), |metrics| &metrics[at].1)
    }
}

pub(super) type Histograms = Family<One, Histogram, Buckets>;
/// Times of requests. A bucket has the trace of one of its requests as exemplar, if one was recorded.
pub(super) type Traced = Family<One, HistogramWithExemplars<One>, Buckets>;

impl Buckets {
    /// Registers histograms with these bounds.
    pub(super) fn histograms<M>(self, registry: &mut Registry, name: &str, help: &str) -> Family<One, M, Self>
    where
        Self: MetricConstructor<M>,
        Family<One, M, Self>: Metric + Clone,
    {
        register_metric(registry, name, help, Family::new_with_constructor(self))
    }
}

/// Registers a metric or a family at zero.
pub(super) fn registered<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    register_metric(registry, name, help, M::default())
}

fn register_metric<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

/// The exemplar of an observation: its trace and the current time.
pub(super) fn exemplar(trace: Option<TraceId>) -> (Option<One>, Option<SystemTime>) {
    (trace.map(|trace| one("trace_id", trace.to_string())), trace.map(|_| SystemTime::now()))
}

pub(super) fn one(name: &'static str, value: impl Into<Cow<'static, str>>) -> One {
    [(name, value.into())]
}
