//! Joins the workers' metrics into one text: every sample gets a label `worker`, samples of one family are
//! grouped, and names that older dashboards use are added.

use proto::ids::NodeId;
use std::collections::{BTreeMap, HashSet};

/// Families with an older name: (present, older).
const OLDER: [(&str, &str); 3] = [
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
];
/// Suffixes of sample names after the family's name.
const SUFFIXES: [&str; 6] = ["_total", "_created", "_bucket", "_count", "_sum", "_info"];

#[derive(Debug, Default)]
struct Family {
    /// `# HELP`, `# TYPE` and `# UNIT` lines of the first worker.
    heads: Vec<String>,
    samples: Vec<String>,
}

/// Appends the workers' samples to `text`. Families that `text` already has are the coordinator's own and are
/// omitted.
pub(crate) fn append(text: &mut String, workers: &[(NodeId, String)]) {
    let own: HashSet<&str> = text.lines().filter_map(head).map(|(_, family)| family).collect();
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    for (node, metrics) in workers {
        read(&mut families, node, metrics);
    }
    families.retain(|name, _| !own.contains(name.as_str()));
    let names: HashSet<String> = families.keys().cloned().collect();
    for (name, family) in &families {
        let mut write = |rename: &dyn Fn(&str) -> String| {
            for line in family.heads.iter().chain(&family.samples) {
                text.push_str(&rename(line));
                text.push('\n');
            }
        };
        write(&str::to_owned);
        if let Some((new, old)) = OLDER.iter().find(|(new, old)| new == name && !names.contains(*old)) {
            write(&|line| line.replacen(new, old, 1));
        }
    }
}

fn read(families: &mut BTreeMap<String, Family>, node: &NodeId, metrics: &str) {
    let mut current = String::new();
    for line in metrics.lines().filter(|line| !line.is_empty()) {
        if let Some((keyword, name)) = head(line) {
            let family = families.entry(name.to_owned()).or_default();
            // A family's heads come from one worker, before its first sample.
            if family.samples.is_empty()
                && !family.heads.iter().any(|h| head(h).is_some_and(|(k, _)| k == keyword))
            {
                family.heads.push(line.to_owned());
            }
            current.clear();
            current.push_str(name);
        } else if !line.starts_with('#') {
            let name = sample_name(line);
            let family = if belongs(name, &current) { current.as_str() } else { name };
            families.entry(family.to_owned()).or_default().samples.push(labelled(line, name, node));
        }
    }
}

/// Keyword and family of a `# HELP`, `# TYPE` or `# UNIT` line.
fn head(line: &str) -> Option<(&str, &str)> {
    let mut words = line.strip_prefix("# ")?.splitn(3, ' ');
    let keyword = words.next().filter(|word| matches!(*word, "HELP" | "TYPE" | "UNIT"))?;
    Some((keyword, words.next()?))
}

fn sample_name(line: &str) -> &str {
    line.split(['{', ' ']).next().unwrap_or_default()
}

fn belongs(sample: &str, family: &str) -> bool {
    sample.strip_prefix(family).is_some_and(|rest| rest.is_empty() || SUFFIXES.contains(&rest))
}

fn labelled(line: &str, name: &str, node: &NodeId) -> String {
    let rest = line.get(name.len()..).unwrap_or_default();
    match rest.strip_prefix('{') {
        Some(rest) if rest.starts_with('}') => format!("{name}{{worker=\"{node}\"{rest}"),
        Some(rest) => format!("{name}{{worker=\"{node}\",{rest}"),
        None => format!("{name}{{worker=\"{node}\"}}{rest}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_labelled_and_grouped_by_family() {
        let worker = |usage: &str| {
            format!(
                "# HELP vllm:kv_cache_usage_perc Used.\n# TYPE vllm:kv_cache_usage_perc gauge\n\
                 vllm:kv_cache_usage_perc {usage}\n# TYPE steps counter\nsteps_total{{model_name=\"m\"}} 7\n\
                 # TYPE mine gauge\nmine 1\nlone{{}} 3 # {{}} 1\n# EOF\n"
            )
        };
        let node = |name: &str| NodeId::new(name).unwrap();
        let mut text = "# TYPE mine gauge\nmine 0\n".to_owned();
        append(&mut text, &[(node("w1"), worker("0.5")), (node("w2"), worker("0.25"))]);
        let expected = "\
# TYPE mine gauge
mine 0
lone{worker=\"w1\"} 3 # {} 1
lone{worker=\"w2\"} 3 # {} 1
# TYPE steps counter
steps_total{worker=\"w1\",model_name=\"m\"} 7
steps_total{worker=\"w2\",model_name=\"m\"} 7
# HELP vllm:kv_cache_usage_perc Used.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{worker=\"w1\"} 0.5
vllm:kv_cache_usage_perc{worker=\"w2\"} 0.25
# HELP vllm:gpu_cache_usage_perc Used.
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{worker=\"w1\"} 0.5
vllm:gpu_cache_usage_perc{worker=\"w2\"} 0.25
";
        assert_eq!(text, expected);
    }
}
