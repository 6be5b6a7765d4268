//! Which worker is hot, and why: facts in, a level and a sentence out.

use dispatch::metrics::state_name;
use proto::ids::ModelId;
use proto::worker::WorkerState;
use std::fmt::Write;
use std::time::Duration;

/// Seconds of queued work from which a worker is hot: the router gives no more before requests wait.
const HOT_S: f64 = 1.0;
/// Seconds of queued work from which a worker is busy.
const BUSY_S: f64 = 0.1;
/// Share of KV bytes from which sequences wait for room.
const FULL: f64 = 0.95;
/// A worker is stuck after a step this long with work waiting.
const STUCK: Duration = Duration::from_secs(3);
/// A worker is stuck after this long without a heartbeat.
const SILENT: Duration = Duration::from_millis(1_500);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// No work.
    Idle,
    Normal,
    /// Queued work for a noticeable time.
    Busy,
    /// Accepts no new work, or not yet.
    Out,
    /// At the limit of queued work.
    Hot,
    /// Makes no progress.
    Stuck,
}

impl Level {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Normal => "normal",
            Self::Busy => "busy",
            Self::Out => "out",
            Self::Hot => "hot",
            Self::Stuck => "stuck",
        }
    }
}

/// The common prefix of most of a worker's requests.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Common {
    pub(super) name: String,
    pub(super) tokens: usize,
    /// Share of the worker's recent requests that have the prefix.
    pub(super) share: f64,
    /// Number of workers that hold it.
    pub(super) holders: usize,
}

/// The known facts of a worker.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Facts {
    pub(super) id: String,
    /// Its models. Work for a model can only go to other workers with it.
    pub(super) models: Vec<ModelId>,
    /// The worker of which this is an instance.
    pub(super) instance_of: Option<String>,
    pub(super) state: WorkerState,
    /// Whether operators set it to drain.
    pub(super) draining: bool,
    /// Estimated seconds of queued work.
    pub(super) queue_s: f64,
    /// Known sequences of the worker, and the queued ones among them.
    pub(super) running: u32,
    pub(super) waiting: u32,
    /// Prompt tokens to compute.
    pub(super) pending_tokens: u64,
    /// Prompt tokens per second; 0 if unknown.
    pub(super) prefill_rate: f64,
    /// Share of KV bytes in use by sequences.
    pub(super) kv: f64,
    /// Preempted sequences in the last seconds.
    pub(super) preempted: f64,
    pub(super) silent: Duration,
    pub(super) stalled: Duration,
    /// Share of the fleet's recent requests.
    pub(super) share: Option<f64>,
    pub(super) common: Option<Common>,
    /// Bytes present and wanted of its model. `None` if it does not fetch the model from other workers.
    pub(super) shipping: Option<(u64, u64)>,
}

impl Facts {
    /// The worker, or the model and the worker of an instance.
    fn name(&self) -> String {
        match (&self.instance_of, self.models.first()) {
            (Some(worker), Some(model)) => format!("{} at {worker}", model.name()),
            _ => self.id.clone(),
        }
    }

    /// Whether it serves a model of `other`. Without any models, all workers are equal.
    fn shares_a_model(&self, other: &Self) -> bool {
        let both = self.models.iter().any(|model| other.models.contains(model));
        both || self.models.is_empty() && other.models.is_empty()
    }

    fn accepts_work(&self) -> bool {
        self.state == WorkerState::Ready && !self.draining
    }

    pub(super) fn level(&self) -> Level {
        let waits_for_room = self.kv >= FULL && self.waiting > 0;
        match self {
            _ if self.silent >= SILENT || self.stalled >= STUCK => Level::Stuck,
            _ if !self.accepts_work() => Level::Out,
            _ if self.queue_s >= HOT_S || waits_for_room => Level::Hot,
            _ if self.queue_s >= BUSY_S => Level::Busy,
            _ if self.running > 0 || self.pending_tokens > 0 => Level::Normal,
            _ => Level::Idle,
        }
    }

    /// Heat from 0 to 1. 1/2: [`HOT_S`] seconds of queued work.
    pub(super) fn heat(&self) -> f64 {
        let queue = self.queue_s / (self.queue_s + HOT_S);
        match self.level() {
            Level::Stuck => 1.0,
            Level::Hot if self.kv >= FULL => queue.max(0.5),
            _ => queue,
        }
    }

    /// The worker's load in a few words, and why it is higher than that of the others.
    pub(super) fn why(&self, fleet: &[Self]) -> String {
        match self.level() {
            Level::Stuck if self.silent >= SILENT => {
                format!("Not heard of for {}: it gets no new work.", seconds(self.silent.as_secs_f64()))
            }
            Level::Stuck => format!(
                "Stuck in a step for {} while {} wait: it gets no new work.",
                seconds(self.stalled.as_secs_f64()),
                count(u64::from(self.running), "sequence")
            ),
            Level::Out => self.unavailable_reason(),
            Level::Idle => "Idle.".to_owned(),
            Level::Normal => format!("{}, hardly any wait.", self.load_summary()),
            Level::Busy | Level::Hot => {
                let mut text = format!("{} of work ahead: {}", seconds(self.queue_s), self.load_summary());
                if let Some(cause) = self.cause(fleet) {
                    let _infallible = write!(text, "; {cause}");
                }
                text + "."
            }
        }
    }

    fn unavailable_reason(&self) -> String {
        if let Some((present, wanted)) = self.shipping.filter(|(present, wanted)| present < wanted) {
            let percent = present.saturating_mul(100) / wanted.max(1);
            return format!("Gets its model from other workers: {percent} % of {} MiB.", wanted >> 20);
        }
        let left = self.running;
        match self.draining {
            true if left > 0 => {
                format!("Drains: takes no new work, {} left.", count(left.into(), "sequence"))
            }
            true => "Drained: takes no new work until it is taken back.".to_owned(),
            false => format!("Takes no work: {}.", state_name(self.state)),
        }
    }

    /// The worker's load.
    fn load_summary(&self) -> String {
        let mut phrases = Vec::new();
        if self.pending_tokens > 0 {
            phrases.push(format!("{} to compute", count(self.pending_tokens, "prompt token")));
        }
        if self.running > 0 {
            phrases.push(format!("{} there", count(self.running.into(), "sequence")));
        }
        if self.waiting > 0 {
            phrases.push(format!("{} of them queued", self.waiting));
        }
        if phrases.is_empty() { "work from elsewhere".to_owned() } else { phrases.join(", ") }
    }

    /// The cause of a high load.
    fn cause(&self, fleet: &[Self]) -> Option<String> {
        if self.kv >= FULL && self.waiting > 0 {
            let lost = if self.preempted >= 1.0 {
                format!(", and {} lost their room just now", self.preempted as u64)
            } else {
                String::new()
            };
            return Some(format!(
                "its KV cache is {:.0} % full and sequences wait for room{lost}",
                100.0 * self.kv
            ));
        }
        let same: Vec<&Self> = fleet.iter().filter(|other| self.shares_a_model(other)).collect();
        let others: Vec<&Self> = same.iter().copied().filter(|other| other.id != self.id).collect();
        if others.is_empty() {
            let whole = fleet.iter().all(|other| other.id == self.id);
            let only = if whole { "it is the only worker" } else { "no other worker has its model" };
            return Some(only.to_owned());
        }
        let available =
            others.iter().filter(|other| other.accepts_work() && other.level() != Level::Stuck).count();
        let rates = others.iter().filter(|other| other.accepts_work() && other.prefill_rate > 0.0);
        let mut rates: Vec<f64> = rates.map(|other| other.prefill_rate).collect();
        rates.sort_by(f64::total_cmp);
        let median = rates.get(rates.len() / 2).copied();
        if let Some(median) =
            median.filter(|median| self.prefill_rate > 0.0 && self.prefill_rate < 0.6 * median)
        {
            return Some(format!("it is slow: {:.0} prompt tokens/s, others {median:.0}", self.prefill_rate));
        }
        // A prefix that all workers hold does not attract requests to one of them.
        let common = self.common.as_ref().filter(|common| common.share >= 0.3 && common.holders < same.len());
        if let Some(common) = common {
            let held = match common.holders {
                0 | 1 => "only it holds that".to_owned(),
                n => format!("{n} workers hold that"),
            };
            return Some(format!(
                "{:.0} % of its requests share prefix {} ({}), and {held}",
                100.0 * common.share,
                common.name,
                count(common.tokens as u64, "token"),
            ));
        }
        if available == 0 {
            return Some("no other worker takes work".to_owned());
        }
        let even_share = 1.0 / (available + 1) as f64;
        if let Some(share) = self.share.filter(|share| *share > 1.5 * even_share) {
            return Some(format!("it got {:.0} % of the last requests", 100.0 * share));
        }
        let computing = self.pending_tokens as f64 / self.prefill_rate.max(1.0);
        (computing > 0.5 * self.queue_s).then(|| "most of that are prompts that no cache had".to_owned())
    }
}

/// One sentence about the fleet, with its level and the worker that it is about. `waiting`: requests that no
/// worker has yet.
pub(super) fn verdict(fleet: &[Facts], waiting: usize) -> (Option<String>, Level, String) {
    let queued =
        if waiting > 0 { format!(" {} for a worker.", count_waiting(waiting)) } else { String::new() };
    if let Some(stuck) = fleet.iter().find(|facts| facts.level() == Level::Stuck) {
        let text = format!("{} does not get on. {}{queued}", stuck.name(), stuck.why(fleet));
        return (Some(stuck.id.clone()), Level::Stuck, text);
    }
    let available: Vec<&Facts> = fleet.iter().filter(|facts| facts.accepts_work()).collect();
    let Some(hottest) = available.iter().max_by(|a, b| a.heat().total_cmp(&b.heat())) else {
        let text = if fleet.is_empty() { "No worker is there." } else { "No worker takes work." };
        return (None, Level::Stuck, format!("{text}{queued}"));
    };
    let mean = available.iter().map(|facts| facts.queue_s).sum::<f64>() / available.len() as f64;
    let level = hottest.level();
    let all_hot = available.len() > 1 && available.iter().all(|facts| facts.level() == Level::Hot);
    let others = (mean * available.len() as f64 - hottest.queue_s) / (available.len() - 1).max(1) as f64;
    let text = match level {
        Level::Hot if all_hot && hottest.queue_s < 2.0 * others => {
            return (
                None,
                Level::Hot,
                format!("All workers are hot: {} of work ahead each.{queued}", seconds(mean)),
            );
        }
        Level::Hot => format!("{} is hot. {}", hottest.name(), hottest.why(fleet)),
        Level::Busy => format!("{} is the busiest. {}", hottest.name(), hottest.why(fleet)),
        Level::Normal => {
            let running = available.iter().map(|facts| u64::from(facts.running)).sum();
            let text = format!("No worker is hot: {} in all, hardly any wait.", count(running, "sequence"));
            return (None, level, text + &queued);
        }
        _ => return (None, level, format!("All quiet.{queued}")),
    };
    (Some(hottest.id.clone()), level, text + &queued)
}

fn count_waiting(waiting: usize) -> String {
    if waiting == 1 { "1 request waits".to_owned() } else { format!("{waiting} requests wait") }
}

/// `1 token`, `1 234 tokens`.
pub(super) fn count(number: u64, noun: &str) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    format!("{text} {noun}{}", if number == 1 { "" } else { "s" })
}

/// A duration in a readable unit.
pub(super) fn seconds(time: f64) -> String {
    match time {
        t if t < 0.001 => "0 ms".to_owned(),
        t if t < 0.1 => format!("{:.0} ms", 1e3 * t),
        t if t < 10.0 => format!("{t:.1} s"),
        t => format!("{t:.0} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle(id: &str) -> Facts {
        Facts {
            id: id.to_owned(),
            models: vec![ModelId::new("m").unwrap()],
            instance_of: None,
            state: WorkerState::Ready,
            draining: false,
            queue_s: 0.0,
            running: 0,
            waiting: 0,
            pending_tokens: 0,
            prefill_rate: 1_000.0,
            kv: 0.1,
            preempted: 0.0,
            silent: Duration::from_millis(100),
            stalled: Duration::ZERO,
            share: None,
            common: None,
            shipping: None,
        }
    }

    fn hot(id: &str) -> Facts {
        Facts { queue_s: 2.4, running: 8, pending_tokens: 2_400, ..idle(id) }
    }

    #[test]
    fn a_hot_worker_is_named_with_the_prefix_that_causes_it() {
        let common = Common { name: "3fa9c1d2".into(), tokens: 4_096, share: 0.62, holders: 1 };
        let fleet = [idle("w0"), Facts { common: Some(common), ..hot("w1") }, idle("w2")];
        let (worker, level, text) = verdict(&fleet, 0);
        assert_eq!((worker.as_deref(), level), (Some("w1"), Level::Hot));
        assert_eq!(
            text,
            "w1 is hot. 2.4 s of work ahead: 2\u{202f}400 prompt tokens to compute, 8 sequences there; \
             62 % of its requests share prefix 3fa9c1d2 (4\u{202f}096 tokens), and only it holds that."
        );
        assert!(fleet[1].heat() > 0.6 && fleet[0].heat() == 0.0);
    }

    #[test]
    fn the_cause_is_the_fact_that_differs_from_other_workers() {
        let cause = |facts: Facts| facts.why(&[idle("w0"), facts.clone(), idle("w2")]);
        assert!(
            cause(Facts { prefill_rate: 310.0, ..hot("w1") })
                .contains("slow: 310 prompt tokens/s, others 1000")
        );
        assert!(cause(Facts { share: Some(0.7), ..hot("w1") }).contains("got 70 % of the last requests"));
        assert!(
            cause(Facts { share: Some(0.35), ..hot("w1") })
                .ends_with("; most of that are prompts that no cache had.")
        );
        let decodes = Facts { pending_tokens: 100, ..hot("w1") };
        assert!(cause(decodes.clone()).ends_with("8 sequences there."));
        let everywhere = Common { name: "3fa9c1d2".into(), tokens: 400, share: 0.9, holders: 3 };
        assert!(!cause(Facts { common: Some(everywhere), ..decodes }).contains("3fa9c1d2"));
        let full = Facts { kv: 0.97, waiting: 5, preempted: 3.0, queue_s: 0.2, ..hot("w1") };
        assert_eq!(full.level(), Level::Hot);
        assert!(cause(full).contains("97 % full and sequences wait for room, and 3 lost their room"));
        assert!(hot("w1").why(&[hot("w1")]).contains("the only worker"));
        let out = Facts { draining: true, ..idle("w0") };
        assert!(hot("w1").why(&[hot("w1"), out]).contains("no other worker takes work"));
    }

    #[test]
    fn an_instance_is_named_by_its_model_and_compared_with_those_of_the_same_model() {
        let instance = |id: &str, model: &str, facts: fn(&str) -> Facts| Facts {
            models: vec![ModelId::new(model).unwrap().version(&[7; 32]).unwrap()],
            instance_of: id.split_once('.').map(|(worker, _)| worker.to_owned()),
            ..facts(id)
        };
        let alone = [idle("w0"), instance("w0.1", "chat", hot), instance("w1.1", "code", idle)];
        let (worker, _, text) = verdict(&alone, 0);
        assert_eq!(worker.as_deref(), Some("w0.1"));
        assert!(text.starts_with("chat at w0 is hot. ") && text.ends_with("no other worker has its model."));
        let two = [alone[1].clone(), instance("w1.2", "chat", idle), alone[2].clone()];
        let slow = Facts { prefill_rate: 100.0, ..two[0].clone() };
        assert!(slow.why(&two).contains("it is slow: 100 prompt tokens/s, others 1000"));
    }

    #[test]
    fn a_worker_that_takes_no_work_has_a_reason() {
        let why = |facts: Facts| (facts.level(), facts.why(&[]));
        let drains = Facts { draining: true, running: 1, ..idle("w") };
        assert_eq!(why(drains), (Level::Out, "Drains: takes no new work, 1 sequence left.".into()));
        let ships = Facts { state: WorkerState::Starting, shipping: Some((1 << 20, 4 << 20)), ..idle("w") };
        assert_eq!(why(ships).1, "Gets its model from other workers: 25 % of 4 MiB.");
        let silent = Facts { silent: Duration::from_secs(2), ..idle("w") };
        assert_eq!(why(silent), (Level::Stuck, "Not heard of for 2.0 s: it gets no new work.".into()));
        let stalled = Facts { stalled: Duration::from_secs(12), running: 2, ..idle("w") };
        assert!(why(stalled).1.starts_with("Stuck in a step for 12 s while 2 sequences wait"));
    }

    #[test]
    fn an_evenly_loaded_fleet_gets_one_verdict() {
        let (worker, level, text) = verdict(&[hot("w0"), hot("w1")], 14);
        assert_eq!((worker, level), (None, Level::Hot));
        assert_eq!(text, "All workers are hot: 2.4 s of work ahead each. 14 requests wait for a worker.");
        let (worker, _, text) = verdict(&[idle("w0"), idle("w1")], 0);
        assert_eq!((worker, text.as_str()), (None, "All quiet."));
        let (worker, _, _) = verdict(&[hot("w0"), Facts { queue_s: 9.0, ..hot("w1") }], 0);
        assert_eq!(worker.as_deref(), Some("w1"));
        assert_eq!(verdict(&[], 1).2, "No worker is there. 1 request waits for a worker.");
        let (worker, level, _) = verdict(&[Facts { silent: STUCK, ..idle("w0") }, hot("w1")], 0);
        assert_eq!((worker.as_deref(), level), (Some("w0"), Level::Stuck));
    }
}
