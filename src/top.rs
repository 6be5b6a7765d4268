//! `kvasir top`: shows a cluster's activity, refreshed periodically.

use crate::access::Access;
use crate::columns::columns;
use crate::config::Period;
use crate::status::{Cluster, Worker};
use std::collections::{BTreeMap, HashMap};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// A coordinator collects its workers' metrics before it responds.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Moves the cursor to the top left and clears the screen.
const HOME: &str = "\x1b[H\x1b[J";

/// Shows workers, coordinators, the queue and rates, and updates them continuously.
///
/// Rates are averages over one interval. Requests and tokens are those of the contacted coordinator; the rates of
/// workers include the work of all coordinators.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir top\n  kvasir top --ops 10.0.0.7:9090 --every 5s\n  kvasir top --once"
)]
pub(crate) struct Top {
    #[command(flatten)]
    access: Access,
    /// Time between two updates.
    #[arg(long, value_name = "TIME", default_value = "1s")]
    every: Period,
    /// Take two samples, print one table and exit.
    #[arg(long)]
    once: bool,
}

impl Top {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let every = self.every.0.max(Duration::from_millis(50));
        let terminal = std::io::stdout().is_terminal() && !self.once;
        let mut before = Sample::take(&self.access)?;
        loop {
            std::thread::sleep(every);
            let text = match Sample::take(&self.access) {
                Ok(now) => {
                    let text = screen(&before, &now);
                    before = now;
                    text
                }
                Err(error) if self.once => return Err(error),
                // The coordinator may come back.
                Err(error) => format!("{error:#}\n"),
            };
            let mut out = std::io::stdout().lock();
            write!(out, "{}{text}", if terminal { HOME } else { "" })?;
            if self.once {
                return Ok(());
            }
            if !terminal {
                writeln!(out)?;
            }
            out.flush()?;
        }
    }
}

/// One set of samples.
struct Sample {
    at: Instant,
    cluster: Cluster,
    series: Series,
}

impl Sample {
    fn take(access: &Access) -> anyhow::Result<Self> {
        let cluster = Cluster::fetch(access)?;
        let series = Series::read(&access.text("GET", "/metrics", TIMEOUT)?);
        Ok(Self { at: Instant::now(), cluster, series })
    }
}

/// Metric samples, summed over all labels except `worker`, and over all except `worker` and `model`.
#[derive(Debug, Default)]
struct Series(HashMap<(String, Place), f64>);

/// Origin of a sample: a worker, and a model that it holds beside its own.
type Place = (Option<String>, Option<String>);

impl Series {
    /// Parses the text format; ignores other lines.
    fn read(text: &str) -> Self {
        let mut series = HashMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse::<f64>() else { continue };
            let (name, labels) = name.split_once('{').unwrap_or((name, ""));
            let label = |name: &str| {
                let rest = labels.split_once(&format!("{name}=\""))?.1;
                Some(rest.split('"').next().unwrap_or_default().to_owned())
            };
            let (worker, model) = (label("worker"), label("model"));
            if model.is_some() {
                *series.entry((name.to_owned(), (worker.clone(), model))).or_default() += value;
            }
            *series.entry((name.to_owned(), (worker, None))).or_default() += value;
        }
        Self(series)
    }

    fn get(&self, name: &str, place: &Place) -> f64 {
        self.0.get(&(name.to_owned(), place.clone())).copied().unwrap_or(0.0)
    }
}

/// The coordinator's own samples.
const ALL: Place = (None, None);

/// Changes between two samples.
struct Since<'a> {
    before: &'a Series,
    now: &'a Series,
    seconds: f64,
}

impl Since<'_> {
    /// Increase of a counter. A counter that was reset counts from 0.
    fn grown(&self, name: &str, place: &Place) -> f64 {
        let (before, now) = (self.before.get(name, place), self.now.get(name, place));
        if now < before { now } else { now - before }
    }

    fn rate(&self, name: &str, place: &Place) -> String {
        format!("{:.1}", self.grown(name, place) / self.seconds)
    }

    /// Mean of a histogram's observations between the samples, in ms.
    fn mean_ms(&self, name: &str) -> String {
        let count = self.grown(&format!("{name}_count"), &ALL);
        let sum = self.grown(&format!("{name}_sum"), &ALL);
        if count > 0.0 { format!("{:.0} ms", 1e3 * sum / count) } else { "-".into() }
    }

    fn percent(&self, part: &str, whole: &str, place: &Place) -> String {
        let whole = self.grown(whole, place);
        if whole > 0.0 { format!("{:.0} %", 100.0 * self.grown(part, place) / whole) } else { "-".into() }
    }
}

fn screen(before: &Sample, now: &Sample) -> String {
    let seconds = now.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
    let since = Since { before: &before.series, now: &now.series, seconds };
    let cluster = &now.cluster;
    let mut coordinators = vec![["COORDINATOR", "ROLE", "TERM", "APPLIED"].map(str::to_owned).to_vec()];
    coordinators.extend(cluster.coordinators.iter().map(|node| {
        vec![node.id.clone(), node.role.clone(), node.term.to_string(), node.applied.to_string()]
    }));
    let head = [
        "WORKER",
        "STATE",
        "AHEAD",
        "RUN",
        "WAIT",
        "KV",
        "PREFILL T/S",
        "TOKENS/S",
        "STEPS/S",
        "PREFIX HITS",
        "PROGRESS",
    ];
    let mut workers = vec![head.map(str::to_owned).to_vec()];
    let generated = |worker: &Worker| {
        let first =
            before.cluster.workers.iter().find(|was| was.id == worker.id && was.epoch == worker.epoch);
        worker.generated_tokens - first.map_or(0, |was| was.generated_tokens.min(worker.generated_tokens))
    };
    let row = |name: String, worker: &Worker, place: &Place, generated: u64| {
        vec![
            name,
            worker.state.clone(),
            format!("{:.2} s", worker.queue_s),
            worker.running.to_string(),
            worker.waiting.to_string(),
            format!("{} %", (100 * worker.kv_used).checked_div(worker.kv_total).unwrap_or(0)),
            since.rate("kvasir_prefill_tokens_computed_total", place),
            format!("{:.1}", generated as f64 / seconds),
            since.rate("kvasir_steps_total", place),
            since.percent("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", place),
            format!("{} ms ago", worker.last_progress_ms),
        ]
    };
    // The busiest workers come first.
    let mut hottest: Vec<_> = cluster.whole_workers().into_iter().map(|w| (w.total(), w)).collect();
    hottest.sort_by(|(a, _), (b, _)| b.queue_s.total_cmp(&a.queue_s).then_with(|| a.id.cmp(&b.id)));
    for (total, whole) in &hottest {
        let of_instances: u64 = whole.instances.iter().map(|instance| generated(instance)).sum();
        let place = (Some(total.id.clone()), None);
        workers.push(row(total.id.clone(), total, &place, generated(whole.worker) + of_instances));
        for instance in &whole.instances {
            let model = instance.models.first();
            let name = format!("  {}", model.unwrap_or(&instance.id));
            let place = (Some(total.id.clone()), model.cloned());
            workers.push(row(name, instance, &place, generated(instance)));
        }
    }
    let queue = &cluster.queue;
    let operations = operations(cluster);
    format!(
        "requests: {} waiting ({} tokens), {} with workers, {}/s finished; \
         tokens/s: {} prompt, {} generated; first token after {}\n\n{}{operations}\n{}",
        queue.requests,
        queue.tokens,
        queue.inflight,
        since.rate("vllm:request_success_total", &ALL),
        since.rate("vllm:prompt_tokens_total", &ALL),
        since.rate("vllm:generation_tokens_total", &ALL),
        since.mean_ms("vllm:time_to_first_token_seconds"),
        columns(&workers),
        columns(&coordinators),
    )
}

/// Offered operations and open sessions; empty if there are none.
fn operations(cluster: &Cluster) -> String {
    let mut all: BTreeMap<(&str, &str), (u64, u64)> = BTreeMap::new();
    for offer in cluster.workers.iter().flat_map(|worker| &worker.operations) {
        let (workers, sessions) = all.entry((&offer.operation, &offer.model)).or_default();
        *workers += 1;
        *sessions += offer.sessions;
    }
    if all.is_empty() {
        return String::new();
    }
    let mut rows = vec![["OPERATION", "MODEL", "WORKERS", "SESSIONS"].map(str::to_owned).to_vec()];
    rows.extend(all.iter().map(|((operation, model), (workers, sessions))| {
        vec![(*operation).to_owned(), (*model).to_owned(), workers.to_string(), sessions.to_string()]
    }));
    format!("\n{}", columns(&rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: Instant, metrics: &str) -> Sample {
        let cluster = serde_json::json!({
            "coordinators": [{"id": "c0", "role": "leader", "term": 3, "applied": 40}],
            "workers": [{"id": "w0", "epoch": 1, "state": "ready", "kv_used": 25, "kv_total": 100, "running": 2,
                         "waiting": 1, "last_progress_ms": 7, "queue_s": 0.25, "generated_tokens": 40},
                        {"id": "w1", "epoch": 1, "state": "ready", "kv_used": 0, "kv_total": 100, "queue_s": 1.5,
                         "operations": [{"operation": "vad", "model": "v", "sessions": 2}]}],
            "queue": {"requests": 5, "tokens": 900, "inflight": 3},
        });
        Sample { at, cluster: serde_json::from_value(cluster).unwrap(), series: Series::read(metrics) }
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks() {
        let at = Instant::now();
        let text = |tokens: u32, steps: u32, hits: u32| {
            format!(
                "# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total{{model_name=\"m\"}} {tokens}\n\
                 vllm:time_to_first_token_seconds_sum{{model_name=\"m\"}} {}\n\
                 vllm:time_to_first_token_seconds_count{{model_name=\"m\"}} {tokens}\n\
                 kvasir_steps_total{{worker=\"w0\"}} {steps}\nkvasir_steps_total{{worker=\"w1\"}} 9\n\
                 vllm:prefix_cache_hits_total{{worker=\"w0\"}} {hits}\n\
                 vllm:prefix_cache_queries_total{{worker=\"w0\"}} {}\n",
                f64::from(tokens) / 5.0,
                2 * hits
            )
        };
        let before = sample(at, &text(100, 50, 8));
        let now = sample(at + Duration::from_secs(2), &text(300, 10, 10));
        let screen = screen(&before, &now);
        let row = screen.lines().find(|line| line.starts_with("w0")).unwrap();
        let cells: Vec<&str> = row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        // The worker restarted, so its step counter began at 0 again.
        assert_eq!(
            cells,
            ["w0", "ready", "0.25 s", "2", "1", "25 %", "0.0", "0.0", "5.0", "50 %", "7 ms ago"]
        );
        assert!(screen.find("w1 ") < screen.find("w0 "), "who has most to do comes first\n{screen}");
        assert!(screen.starts_with("requests: 5 waiting (900 tokens), 3 with workers"), "{screen}");
        let offered = screen.lines().find(|line| line.starts_with("vad")).unwrap();
        assert_eq!(offered.split_whitespace().collect::<Vec<_>>(), ["vad", "v", "1", "2"]);
        assert!(
            screen.contains("100.0 prompt")
                && screen.contains("first token after 200 ms")
                && screen.contains("c0")
                && screen.contains("leader"),
            "{screen}"
        );
    }

    #[test]
    fn series_are_summed_over_all_labels_but_the_worker_and_its_models() {
        let series = Series::read(
            "a{m=\"1\"} 2\na{m=\"2\"} 3\na{worker=\"w\",m=\"1\"} 7\na{worker=\"w\",model=\"c@1\",m=\"1\"} 4\n\
             nonsense\n# a 9\n",
        );
        let worker = || Some("w".to_owned());
        assert_eq!((series.get("a", &ALL), series.get("b", &ALL)), (5.0, 0.0));
        assert_eq!(series.get("a", &(worker(), None)), 11.0);
        assert_eq!(series.get("a", &(worker(), Some("c@1".into()))), 4.0);
    }

    #[test]
    fn a_worker_has_the_sums_of_its_instances_which_are_below_it() {
        let at = Instant::now();
        let sample = |at: Instant, steps: u32, tokens: u32| {
            let cluster = serde_json::json!({"workers": [
                {"id": "w0.1", "instance_of": "w0", "epoch": 2, "state": "ready", "models": ["chat@1"], "kv_used": 1,
                 "kv_total": 4, "running": 3, "queue_s": 0.5, "generated_tokens": tokens},
                {"id": "w0", "epoch": 1, "state": "ready", "kv_used": 0, "kv_total": 4, "generated_tokens": 2 * tokens}]});
            let metrics = format!(
                "kvasir_steps_total{{worker=\"w0\"}} {steps}\nkvasir_steps_total{{worker=\"w0\",model=\"chat@1\"}} {steps}\n"
            );
            Sample { at, cluster: serde_json::from_value(cluster).unwrap(), series: Series::read(&metrics) }
        };
        let screen = screen(&sample(at, 10, 0), &sample(at + Duration::from_secs(2), 30, 40));
        let cells = |start: &str| -> Vec<String> {
            let line = screen.lines().find(|line| line.starts_with(start)).unwrap();
            line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect()
        };
        assert_eq!(cells("w0 ")[2..9], ["0.50 s", "3", "0", "12 %", "0.0", "60.0", "20.0"]);
        assert_eq!(cells("  chat@1")[2..9], ["0.50 s", "3", "0", "25 %", "0.0", "20.0", "10.0"]);
    }
}
