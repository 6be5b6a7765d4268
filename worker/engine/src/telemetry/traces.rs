//! Metrics of the spans of traced requests.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use std::fmt;

/// Counts of this process's spans, read on every scrape.
#[derive(Debug)]
pub(super) struct SpanCounts;

impl Collector for SpanCounts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Spans of traced requests, by outcome";
        let mut family =
            encoder.encode_descriptor("kvasir_worker_trace_spans", help, None, MetricType::Counter)?;
        for (outcome, spans) in proto::trace::counts().by_outcome() {
            ConstCounter::new(spans).encode(family.encode_family(&[("outcome", outcome)])?)?;
        }
        Ok(())
    }
}
