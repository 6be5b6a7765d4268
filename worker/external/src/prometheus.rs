//! Samples of a Prometheus text page, as far as load reports need them.

use crate::error::bounded;

/// Most samples that are kept of a page. The rest is dropped.
const MAX_SAMPLES: usize = 20_000;

/// The samples whose names contain a colon: engines prefix theirs with their name.
#[derive(Debug, Default)]
pub(crate) struct Samples(Vec<Sample>);

#[derive(Debug)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Samples {
    /// Lines of another form are skipped.
    pub(crate) fn parse(page: &[u8]) -> Self {
        let lines = page.split(|&byte| byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
        Self(lines.filter_map(parse_line).take(MAX_SAMPLES).collect())
    }

    /// Sum over all label sets; `None` without a finite sample.
    pub(crate) fn sum(&self, name: &str) -> Option<f64> {
        self.values(name).reduce(|a, b| a + b)
    }

    pub(crate) fn max(&self, name: &str) -> Option<f64> {
        self.values(name).reduce(f64::max)
    }

    /// The label of the first sample of this name.
    pub(crate) fn label(&self, name: &str, label: &str) -> Option<&str> {
        let sample = self.0.iter().find(|sample| sample.name == name)?;
        sample.labels.iter().find(|(known, _)| known == label).map(|(_, value)| value.as_str())
    }

    fn values(&self, name: &str) -> impl Iterator<Item = f64> {
        self.0
            .iter()
            .filter(move |sample| sample.name == name && sample.value.is_finite())
            .map(|sample| sample.value)
    }
}

fn parse_line(line: &str) -> Option<Sample> {
    let line = line.trim();
    let name_end = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, mut rest) = line.split_at(name_end);
    if !name.contains(':') || name.starts_with('#') {
        return None;
    }
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            rest = rest.trim_start_matches([',', ' ']);
            if let Some(after) = rest.strip_prefix('}') {
                rest = after;
                break;
            }
            let (label, after) = rest.split_once("=\"")?;
            let mut value = String::new();
            let mut chars = after.char_indices();
            let end = loop {
                match chars.next()? {
                    (at, '"') => break at,
                    (_, '\\') => value.push(match chars.next()?.1 {
                        'n' => '\n',
                        other => other,
                    }),
                    (_, other) => value.push(other),
                }
            };
            labels.push((label.to_owned(), bounded(&value)));
            rest = &after[end + 1..];
        }
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels, value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: &str = "# HELP vllm:num_requests_running Number\n# TYPE vllm:num_requests_running gauge\n\
        vllm:num_requests_running{engine=\"0\",model_name=\"a\\\"}b\"} 3.0\n\
        vllm:num_requests_running{engine=\"1\",model_name=\"c\"} 4.0\n\
        vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"7\"} 1.0\n\
        vllm:kv_cache_usage_perc{engine=\"0\"} NaN\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.25\nup 1\nllamacpp:x 2e1\n";

    #[test]
    fn sums_maxima_and_labels_are_found() {
        let samples = Samples::parse(PAGE.as_bytes());
        assert_eq!(samples.sum("vllm:num_requests_running"), Some(7.0));
        assert_eq!(samples.max("vllm:kv_cache_usage_perc"), Some(0.25));
        assert_eq!(samples.sum("llamacpp:x"), Some(20.0));
        assert_eq!(samples.sum("vllm:none"), None);
        assert_eq!(samples.label("vllm:cache_config_info", "block_size"), Some("16"));
        assert_eq!(samples.label("vllm:num_requests_running", "model_name"), Some("a\"}b"));
    }

    proptest! {
        #[test]
        fn any_page_is_parsed_without_panic(page in "[a:{}\"\\\\=, 0-9\n#é]{0,200}") {
            let _ = Samples::parse(page.as_bytes()).sum("a:a");
        }
    }
}
