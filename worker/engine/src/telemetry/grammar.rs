//! Metrics of grammars: compilations, refusals and the time of masks.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RefusedLabel {
    pub reason: Refused,
}

/// Why a grammar was refused, or why it ended a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case on the wire")]
pub enum Refused {
    /// It is not valid, or exceeds a limit.
    invalid,
    /// It takes too long to compile.
    time,
    /// Computing a mask failed or took too long.
    mask,
}

/// A histogram of seconds, 10 us to 2.5 s.
#[derive(Debug, Clone)]
pub struct MaskHistogram(pub Histogram);

impl Default for MaskHistogram {
    fn default() -> Self {
        let buckets = [
            1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
            1.0, 2.5,
        ];
        Self(Histogram::new(buckets))
    }
}

/// Metrics of grammars. Clones share their values.
#[derive(Debug, Clone, Default)]
pub struct GrammarMetrics {
    /// Compiled grammars; cached ones are not compiled again.
    pub compiled: Counter,
    /// Requests refused or ended because of their grammar.
    pub refusals: Family<RefusedLabel, Counter>,
    /// Seconds to compute a mask.
    pub mask_seconds: MaskHistogram,
    /// Rows that were computed before their mask was ready, and sampled later.
    pub rows_waited: Counter,
}

impl GrammarMetrics {
    pub(crate) fn refused(&self, reason: Refused) {
        self.refusals.get_or_create(&RefusedLabel { reason }).inc();
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("kvasir_grammars_compiled", "Grammars compiled", self.compiled.clone());
        registry.register(
            "kvasir_grammars_refused",
            "Requests refused or ended because of their grammar, by reason",
            self.refusals.clone(),
        );
        registry.register(
            "kvasir_grammar_mask_seconds",
            "Time to compute a mask",
            self.mask_seconds.0.clone(),
        );
        registry.register(
            "kvasir_grammar_rows_waited",
            "Rows that were computed before their mask and drawn from later",
            self.rows_waited.clone(),
        );
    }
}
