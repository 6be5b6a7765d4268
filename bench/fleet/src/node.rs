//! A worker: its real scheduler and cache, with measured step times.

use crate::pulls::{PullRates, PullRequest, Pulling, Pulls};
use crate::rates::Rates;
use crate::routers::EPOCH;
use anyhow::{Context, Result, anyhow};
use engine::kv_cache::{CacheSpec, GroupKind, GroupSpec};
use engine::scheduler::{
    LogitRows, QueuePosition, Scheduler, SchedulerConfig, SeqId, SequenceRequest, StepPlan,
};
use proto::block::{BlockId, ClusterKey};
use proto::event::KvEvent;
use proto::message::{PullReport, TenantShare};
use proto::pull::SENDS_AT_ONCE;
use proto::worker::{LoadReport, WorkerState};
use std::collections::HashMap;
use std::time::Duration;

/// Configuration of a worker.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Build {
    /// Bytes of its KV arena.
    pub(crate) kv_bytes: u64,
    /// Prompt rows per step.
    pub(crate) chunk: u32,
    pub(crate) layers: u32,
    /// Maximum number of sequences in the batch.
    pub(crate) max_seqs: usize,
    /// Step times.
    pub(crate) rates: Rates,
    /// Pull times.
    pub(crate) pulls: PullRates,
}

/// Progress of a request in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The first token, and the cached tokens of the prompt.
    Started {
        request: usize,
        /// Prompt tokens found in the cache.
        cached: u32,
    },
    /// The last token.
    Ended { request: usize },
}

#[derive(Debug)]
pub(crate) struct Node {
    build: Build,
    scheduler: Scheduler,
    live: HashMap<SeqId, Live>,
    step: Option<Running>,
    pulls: Pulls,
    /// Requests of other workers that arrived during a step.
    pull_requests: Vec<(usize, PullRequest)>,
    /// Time at which the link is free.
    link_free: Duration,
    /// End of each of its transfers.
    sends: Vec<Duration>,
    /// Seconds that recent copies add to the next step.
    copying: f64,
    prefill_rate: f64,
    step_ms: f64,
    generated: u64,
}

#[derive(Debug)]
struct Live {
    prompt: u32,
    left: u32,
    position: QueuePosition,
    started: bool,
}

#[derive(Debug)]
struct Running {
    plan: StepPlan,
    seconds: f64,
    prompt_rows: u32,
}

impl Node {
    /// An empty worker.
    pub(crate) fn new(build: Build) -> Result<Self> {
        // One cache group, as for a model with attention in all layers.
        const BLOCK: u32 = 16;
        let groups = vec![GroupSpec {
            kind: GroupKind::Full,
            block_bytes: (u64::from(BLOCK) * build.rates.kv_bytes_per_token).next_multiple_of(64),
        }];
        let spec = CacheSpec { groups, block_tokens: BLOCK, arena_bytes: build.kv_bytes };
        let config = SchedulerConfig {
            chunk: build.chunk,
            max_seqs: build.max_seqs,
            max_batch_tokens: build.chunk + build.max_seqs as u32,
            check_interval: 0,
            ..SchedulerConfig::default()
        };
        let scheduler = Scheduler::new(config, spec, ClusterKey([3; 32]))?;
        Ok(Self {
            build,
            scheduler,
            live: HashMap::new(),
            step: None,
            pulls: Pulls::default(),
            pull_requests: Vec::new(),
            link_free: Duration::ZERO,
            sends: Vec::new(),
            copying: 0.0,
            prefill_rate: 0.0,
            step_ms: 0.0,
            generated: 0,
        })
    }

    /// A request for `out` tokens arrives. Returns the pull to request, if any.
    pub(crate) fn submit(
        &mut self,
        now: Duration,
        root: BlockId,
        asking: Pulling,
        out: u32,
    ) -> Result<Option<PullRequest>> {
        let id = SeqId(asking.request as u64);
        let position = self.scheduler.next_position();
        self.live
            .insert(id, Live { prompt: asking.prompt.len() as u32, left: out, position, started: false });
        let (computes, request) = self.pulls.wait(now, &self.scheduler, root, asking, self.prefill_rate);
        computes.map_or(Ok(()), |request| self.compute(root, &request))?;
        Ok(request)
    }

    /// Another worker requests a prefix.
    pub(crate) fn request_pull(&mut self, puller: usize, request: PullRequest) {
        self.pull_requests.push((puller, request));
    }

    /// Serves the requests between two layers of its step: (worker, pull, depth, arrival time) of each.
    pub(crate) fn serve(&mut self, now: Duration, root: BlockId) -> Vec<(usize, usize, u32, Duration)> {
        let layer = self.step.as_ref().map_or(0.0, |step| step.seconds / 2.0 / f64::from(self.build.layers));
        let now = now + Duration::from_secs_f64(layer);
        self.sends.retain(|until| *until > now);
        let mut sent = Vec::new();
        for (puller, request) in std::mem::take(&mut self.pull_requests) {
            let held = self.scheduler.resume_point(root, &request.tokens).map_or(0, |point| point.tokens);
            let rates = self.build.pulls;
            let overhead = Duration::from_secs_f64(rates.overhead);
            if held <= request.have || self.sends.len() >= SENDS_AT_ONCE {
                sent.push((puller, request.pull, 0, now + overhead));
                continue;
            }
            let bytes = f64::from(held - request.have) * self.build.rates.kv_bytes_per_token as f64;
            self.copying += bytes / rates.copied_per_second;
            let takes = Duration::from_secs_f64(bytes / rates.bytes_per_second);
            self.link_free = self.link_free.max(now) + takes;
            self.sends.push(self.link_free);
            sent.push((puller, request.pull, held, self.link_free + overhead));
        }
        sent
    }

    /// A prefix from another worker arrived.
    pub(crate) fn brought(&mut self, pull: usize, depth: u32) {
        self.pulls.brought(pull, depth);
    }

    /// Between two steps, continues the requests whose pull has arrived or timed out. Returns the KV events.
    pub(crate) fn end_pulls(&mut self, now: Duration, root: BlockId) -> Result<Vec<KvEvent>> {
        if self.step.is_some() {
            return Ok(Vec::new());
        }
        let (freed, copied) = self.pulls.end(now, &mut self.scheduler, root);
        let bytes = f64::from(copied) * self.build.rates.kv_bytes_per_token as f64;
        self.copying += bytes / self.build.pulls.copied_per_second;
        freed.iter().try_for_each(|request| self.compute(root, request))?;
        Ok(self.scheduler.take_events())
    }

    fn compute(&mut self, root: BlockId, request: &Pulling) -> Result<()> {
        let id = SeqId(request.request as u64);
        let out = self.live.get(&id).map_or(0, |live| live.left);
        Ok(self.scheduler.submit(SequenceRequest {
            id,
            root,
            prompt: request.prompt.to_vec(),
            images: None,
            max_new_tokens: out,
            logit_rows: LogitRows::LastOnly,
            boundaries: Vec::new(),
            tenant: TenantShare::of_root(root),
            priority: 0,
            position: self.live.get(&id).map(|live| live.position),
        })?)
    }

    /// Begins a step if none is running and there is work. Returns its duration.
    pub(crate) fn begin(&mut self) -> Result<Option<Duration>> {
        if self.step.is_some() {
            return Ok(None);
        }
        let Some(plan) = self.scheduler.plan().map_err(|broken| anyhow!("{broken}"))? else {
            return Ok(None);
        };
        let is_prompt = |s: &engine::scheduler::PlannedSequence| {
            self.live.get(&s.id).is_some_and(|live| s.context_before < live.prompt)
        };
        let (seconds, prompt_rows) = self.build.rates.of(&plan, is_prompt);
        let seconds = seconds + std::mem::take(&mut self.copying);
        self.step = Some(Running { plan, seconds, prompt_rows });
        Ok(Some(Duration::from_secs_f64(seconds)))
    }

    /// The step is complete.
    pub(crate) fn complete(&mut self) -> Result<(Vec<Progress>, Vec<KvEvent>)> {
        let Running { plan, seconds, prompt_rows } = self.step.take().context("a step under way")?;
        self.measure(seconds, plan.tokens.len(), prompt_rows);
        // The sampled token is arbitrary, but different for each sequence.
        let token = |id: SeqId| (id.0 % 40_000) as u32;
        let drawn: Vec<(SeqId, u32)> =
            plan.sequences.iter().filter(|s| s.samples).map(|s| (s.id, token(s.id))).collect();
        self.scheduler.complete(plan.step, &drawn)?;
        let mut progress = Vec::new();
        for (id, _) in drawn {
            self.generated += 1;
            let Some(live) = self.live.get_mut(&id) else { continue };
            let request = id.0 as usize;
            if !std::mem::replace(&mut live.started, true) {
                let cached = self.scheduler.info(id).context("a sequence that lives")?.cached_tokens;
                progress.push(Progress::Started { request, cached });
            }
            live.left -= 1;
            if live.left == 0 {
                self.live.remove(&id);
                self.scheduler.remove(id);
                progress.push(Progress::Ended { request });
            }
        }
        Ok((progress, self.scheduler.take_events()))
    }

    /// Rates as the engine measures them: the newest step has a weight of one fifth, and prefill is measured
    /// only in steps with little else.
    fn measure(&mut self, seconds: f64, rows: usize, prompt_rows: u32) {
        let blend = |old: f64, new: f64| if old == 0.0 { new } else { old + 0.2 * (new - old) };
        self.step_ms = blend(self.step_ms, seconds * 1e3);
        if prompt_rows as usize * 10 >= rows * 9 && prompt_rows >= 64 {
            self.prefill_rate = blend(self.prefill_rate, f64::from(prompt_rows) / seconds);
        }
    }

    /// The report for coordinators.
    pub(crate) fn report(&self) -> LoadReport {
        let stats = self.scheduler.stats();
        LoadReport {
            epoch: EPOCH,
            state: WorkerState::Ready,
            running: stats.running as u32,
            waiting: stats.waiting as u32,
            pending_prefill_tokens: stats.pending_prefill_tokens,
            kv_used: stats.kv_used_bytes,
            kv_total: stats.kv_total_bytes,
            steps: stats.counters.steps,
            tokens: self.generated,
            stalled_ms: 0,
            prefill_rate: self.prefill_rate as f32,
            step_ms: self.step_ms as f32,
            exact: true,
            rss: 0,
            pulls: PullReport::default(),
        }
    }

    /// Prompt tokens computed so far.
    pub(crate) fn computed(&self) -> u64 {
        self.scheduler.stats().counters.prefill_tokens_computed
    }
}
