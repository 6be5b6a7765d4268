//! Metrics of a worker that holds several models: its memory and loads, and the engines' metrics by model.

use engine::telemetry::SecondsHistogram;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use proto::ids::ModelId;
use std::collections::HashMap;
use std::fmt::Write;

/// Families that describe the process and not an engine.
const OF_PROCESS: [&str; 2] = ["kvasir_rss_bytes", "kvasir_build_info"];

/// Metrics of the loads. Clones share their values.
#[derive(Debug, Clone, Default)]
pub(in crate::service) struct HostingMetrics {
    pub(super) budget: Gauge,
    pub(super) reserved: Gauge,
    pub(super) pinned: Gauge,
    pub(super) ready: Gauge,
    pub(super) loads: Counter,
    pub(super) wakes: Counter,
    pub(super) unloads: Counter,
    pub(super) failures: Counter,
    pub(super) unpins: Counter,
    pub(super) load_seconds: SecondsHistogram,
}

impl HostingMetrics {
    pub(in crate::service) fn register(&self, registry: &mut Registry) {
        let mut gauge =
            |name: &str, help: &str, metric: &Gauge| registry.register(name, help, metric.clone());
        gauge("kvasir_models_budget_bytes", "Bytes for all models of this worker", &self.budget);
        gauge("kvasir_models_reserved_bytes", "Bytes of these that models have reserved", &self.reserved);
        gauge(
            "kvasir_models_pinned_bytes",
            "Bytes of these that hold weights of models that are asleep",
            &self.pinned,
        );
        gauge("kvasir_models_ready", "Models that are loaded by order and take requests", &self.ready);
        let mut counter =
            |name: &str, help: &str, metric: &Counter| registry.register(name, help, metric.clone());
        counter("kvasir_model_loads", "Models that were loaded by order", &self.loads);
        counter("kvasir_model_wakes", "Models that were loaded again after they had slept", &self.wakes);
        counter("kvasir_model_unloads", "Models that were put to sleep or unloaded", &self.unloads);
        counter(
            "kvasir_model_failures",
            "Failed attempts to find, fetch, load or run a model",
            &self.failures,
        );
        counter(
            "kvasir_model_unpins",
            "Models asleep whose weights left host memory for another one",
            &self.unpins,
        );
        registry.register(
            "kvasir_model_load_seconds",
            "Loads and wakes of models",
            self.load_seconds.0.clone(),
        );
    }
}

/// Adds the texts of engines to a worker's own text. Their samples get the label `model`. Samples of one family stay
/// together, as the format demands.
pub(super) fn merge(own: String, engines: &[(ModelId, String)]) -> String {
    if engines.is_empty() {
        return own;
    }
    let mut families = Families::default();
    families.add(&own, None);
    for (model, text) in engines {
        families.add(text, Some(model));
    }
    families.text()
}

/// Families of a text in the order of their first appearance.
#[derive(Default)]
struct Families<'a> {
    all: Vec<Metadata<'a>>,
    by_name: HashMap<&'a str, usize>,
}

struct Metadata<'a> {
    header: Vec<&'a str>,
    samples: String,
}

impl<'a> Families<'a> {
    fn add(&mut self, text: &'a str, model: Option<&ModelId>) {
        let (mut current, mut new) = (None, false);
        for line in text.lines() {
            if let Some(comment) = line.strip_prefix("# ") {
                // `HELP name text`, `TYPE name type`, `EOF`.
                let Some((_, rest)) = comment.split_once(' ') else { continue };
                let name = rest.split_once(' ').map_or(rest, |(name, _)| name);
                if model.is_some() && OF_PROCESS.contains(&name) {
                    current = None;
                    continue;
                }
                let at = match self.by_name.get(name) {
                    Some(at) => {
                        new = current == Some(*at) && new;
                        *at
                    }
                    None => {
                        self.all.push(Metadata { header: Vec::new(), samples: String::new() });
                        self.by_name.insert(name, self.all.len() - 1);
                        new = true;
                        self.all.len() - 1
                    }
                };
                current = Some(at);
                if let (true, Some(family)) = (new, self.all.get_mut(at)) {
                    family.header.push(line);
                }
            } else if let Some(family) = current.and_then(|at| self.all.get_mut(at)) {
                add_sample(&mut family.samples, line, model);
            }
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for Metadata { header, samples } in &self.all {
            header.iter().for_each(|line| text.extend([line, "\n"]));
            text.push_str(samples);
        }
        text + "# EOF\n"
    }
}

/// Adds a sample with the label `model`. Names of models need no escapes.
fn add_sample(samples: &mut String, line: &str, model: Option<&ModelId>) {
    let name = line.find(['{', ' ']).unwrap_or(line.len());
    let (name, rest) = line.split_at(name);
    // Writing to a string cannot fail.
    let _ = match (model, rest.strip_prefix('{')) {
        (None, _) => writeln!(samples, "{line}"),
        (Some(model), Some(labels)) if labels.starts_with('}') => {
            writeln!(samples, "{name}{{model=\"{model}\"{labels}")
        }
        (Some(model), Some(labels)) => writeln!(samples, "{name}{{model=\"{model}\",{labels}"),
        (Some(model), None) => writeln!(samples, "{name}{{model=\"{model}\"}}{rest}"),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_all_engines_stay_in_their_family_with_the_models_name() {
        let own = "# HELP a First.\n# TYPE a gauge\na 1\n# HELP kvasir_build_info B.\n# TYPE kvasir_build_info gauge\n\
                   kvasir_build_info{version=\"1\"} 1\n# EOF\n";
        let engine = "# HELP a First.\n# TYPE a gauge\na 2\n# HELP kvasir_build_info B.\n# TYPE kvasir_build_info gauge\n\
                      kvasir_build_info{version=\"1\"} 1\n# HELP b Second.\n# TYPE b counter\nb_total{x=\"y z\"} 3\n# EOF\n";
        let engines = ["m", "n@0123456789ab"].map(|name| (ModelId::parse(name).unwrap(), engine.to_owned()));
        let expected = "# HELP a First.\n# TYPE a gauge\na 1\na{model=\"m\"} 2\na{model=\"n@0123456789ab\"} 2\n\
                        # HELP kvasir_build_info B.\n# TYPE kvasir_build_info gauge\nkvasir_build_info{version=\"1\"} 1\n\
                        # HELP b Second.\n# TYPE b counter\nb_total{model=\"m\",x=\"y z\"} 3\n\
                        b_total{model=\"n@0123456789ab\",x=\"y z\"} 3\n# EOF\n";
        assert_eq!(merge(own.to_owned(), &engines), expected);
        assert_eq!(merge(own.to_owned(), &[]), own);
    }
}
