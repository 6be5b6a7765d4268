//! The downstream ranks of a replica, as the first rank's executor uses them. Several steps are in flight at
//! once; results return in the order of the steps.
//!
//! The engine's thread reads the last stage's stream itself and sends small messages itself
//! (`send_queue.rs`), so that a small step needs no other thread on this node.

use super::activations;
use super::deadline::Deadline;
use super::draft;
use super::lm_head_share::HeadShare;
use super::lm_head_split::HeadSplit;
use super::microbatch::{MicrobatchChoice, MicrobatchScheduler};
use super::remote_blocks::RemoteBlocks;
use super::send_queue::{Queue, SendQueue, Writes};
use super::step;
use super::wait_policy::WaitPolicy;
use engine::Error;
use engine::decoder::{Blocks, Decoder, LayerState};
use engine::executor::LostStage;
use engine::executor::{StepRequest, StepSpent};
use engine::kv_cache::Slabs;
use engine::scheduler::{Demand, PlannedSequence, Scheduler, StepLimits, StepPlan};
use engine::telemetry::{StageCount, StageCounts};
use kernels::backend::AdapterId;
use proto::stage::{
    ActivationType, StageAdapters, StageCounted, StageDrawn, StageFailure, StageFrame, StageHead, StageOrder,
    StageProgressReport, StageReport, StageRest, StageSampled, StageSpent, StageStep,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use transport::{ActivationSender, Endpoint, StageControl, StageOrders, StageReports};

/// Time to wait for a result before all stages are polled for their progress; also the polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// A stage that sends nothing for this long counts as lost, even if its connection is open.
const SILENCE: Duration = Duration::from_millis(2500);
/// When a stage reports a lost neighbour, the time to wait for a report that names the stage that failed.
const BLAME: Duration = Duration::from_millis(500);

/// Block layout of a replica.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) blocks: Slabs,
    /// Layout of the first stage's own arena.
    pub(super) own: Slabs,
    pub(super) state_group: Option<usize>,
    pub(super) activations: ActivationType,
}

#[derive(Debug)]
pub struct DownstreamRanks {
    runtime: Handle,
    layout: Layout,
    remote_blocks: RemoteBlocks,
    wait_policy: WaitPolicy,
    steps: SendQueue<ActivationSender>,
    reports: StageReports,
    signals: mpsc::UnboundedReceiver<StageSignal>,
    /// The sender of `signals`, kept so that the channel stays open if no task has a sender.
    _signals_tx: mpsc::UnboundedSender<StageSignal>,
    /// One channel for each later stage; a message polls its progress. Dropping it closes the stage's control
    /// stream, which ends the replica there.
    polls: Vec<mpsc::Sender<()>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    under_way: VecDeque<UnderWay>,
    stages: Vec<StageStatus>,
    microbatches: MicrobatchScheduler,
    /// When the last result arrived.
    answered: Instant,
    head_share: HeadShare,
    /// Head splits for rows whose logits are all needed (0) and for rows of which only the largest logit is
    /// needed (1).
    head_splits: [HeadSplit; 2],
    /// A step whose result arrived without the last stage's part of the logits.
    halved: Option<UnderWay>,
    counts: StageCounts,
    /// The endpoint to the stages, and the tasks that renew their leases in a cluster. Both end when this is
    /// dropped.
    _held: (Arc<Endpoint>, JoinSet<()>),
}

/// State of one stage. The first stage has an entry, too.
#[derive(Debug, Clone)]
struct StageStatus {
    deadline: Deadline,
    progress: StageProgressReport,
    last_report: Instant,
}

/// A step that was sent to the other stages and has no result yet.
#[derive(Debug)]
struct UnderWay {
    step: u64,
    rows: usize,
    decodes: bool,
    /// The choice that the step was planned with; `None` next to prompts.
    choice: Option<MicrobatchChoice>,
    /// Expected numbers of tokens, samples and rows of logits.
    expected: [usize; 3],
    /// Rows whose residual stream is expected back.
    returned: Vec<u32>,
    /// Maximum number of draft tokens for each sequence that requested some.
    draft_tokens: Vec<u32>,
    /// Values of a row of logits, and of a row of the residual stream.
    widths: (usize, usize),
    handed_over: Instant,
    /// Compute time of the first stage.
    computed: Duration,
    /// No other step was in flight when this one was sent.
    alone: bool,
    /// `None` if the step's logits cannot be split between two stages.
    split: Option<HeadSplitChoice>,
}

/// Which stage computes which logits of one row.
#[derive(Debug, Clone, Copy)]
struct HeadSplitChoice {
    /// First token of the last stage's part. `None`: the last stage computes all logits.
    from: Option<u32>,
    /// Only the largest logit is needed.
    best: bool,
}

/// The last stage's part of a row's logits.
#[derive(Debug)]
pub(super) enum Rest {
    Logits(Vec<f32>),
    /// Token with the largest logit of the part, and that logit.
    Best(u32, f32),
}

/// The result of a step.
#[derive(Debug)]
pub(super) struct RankResult {
    pub(super) step: u64,
    /// For each row of [`RequestedRows::argmax`].
    pub(super) tokens: Vec<u32>,
    /// For each of [`RequestedRows::samples`].
    pub(super) samples: Vec<StageSampled>,
    /// Each row of [`RequestedRows::logits`].
    pub(super) logits: Vec<Vec<f32>>,
    /// The residual stream of rows for which the last stage computed no tokens or logits: their row numbers
    /// in ascending order, and their values, `[rows, hidden]`. `None` if the last stage computed the results.
    pub(super) returned: Option<(Vec<u32>, Vec<f32>)>,
    /// The part of the one row's logits that the last stage computes; [`DownstreamRanks::rest`] returns it.
    /// `None` if the logits are not split.
    pub(super) split: Option<LastRankLogits>,
    /// Draft tokens for each of [`StepRequest::drafts`].
    pub(super) draft_tokens: Vec<Vec<u32>>,
    /// Time that the last stage spent on drafting.
    pub(super) draft_time: Duration,
    pub(super) spent: StepSpent,
}

/// The last stage's part of the logits of one row.
#[derive(Debug, Clone, Copy)]
pub(super) struct LastRankLogits {
    /// First token of the part.
    pub(super) from: u32,
    /// Only the largest logit is needed.
    pub(super) best: bool,
}

#[derive(Debug)]
enum StageSignal {
    Progress(usize, StageProgressReport),
    Lost(LostStage),
}

impl Drop for DownstreamRanks {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

impl DownstreamRanks {
    /// Creates an executor over the control streams of the later stages, in the order of the stages.
    pub(super) fn new(
        runtime: Handle,
        held: (Arc<Endpoint>, JoinSet<()>),
        (layout, remote_blocks): (Layout, RemoteBlocks),
        sender: ActivationSender,
        controls: impl Iterator<Item = StageControl>,
    ) -> Result<Self, Error> {
        let (signals_tx, signals) = mpsc::unbounded_channel();
        let handover = sender.handover();
        let (steps, queue) = SendQueue::new(runtime.clone(), sender, handover);
        let mut tasks = vec![runtime.spawn(send_steps(queue, signals_tx.clone()))];
        let (mut polls, mut last) = (Vec::new(), None);
        for (stage, StageControl { orders, reports }) in (1..).zip(controls) {
            let (poll, polls_rx) = mpsc::channel(1);
            polls.push(poll);
            tasks.push(runtime.spawn(forward_polls(orders, polls_rx)));
            if let Some((stage, reports)) = last.replace((stage, reports)) {
                tasks.push(runtime.spawn(read_reports(stage, reports, signals_tx.clone())));
            }
        }
        let Some((last, reports)) = last else {
            return Err(Error::Invariant("a replica of one stage".to_owned()));
        };
        let status = StageStatus {
            deadline: Deadline::default(),
            progress: StageProgressReport::default(),
            last_report: Instant::now(),
        };
        Ok(Self {
            runtime,
            layout,
            remote_blocks,
            wait_policy: WaitPolicy::default(),
            steps,
            reports,
            signals,
            _signals_tx: signals_tx,
            polls,
            tasks,
            under_way: VecDeque::new(),
            stages: vec![status; last + 1],
            microbatches: MicrobatchScheduler::new(last + 1),
            answered: Instant::now(),
            counts: StageCounts { stages: vec![StageCount::default(); last + 1], ..StageCounts::default() },
            head_share: HeadShare::default(),
            head_splits: Default::default(),
            halved: None,
            _held: held,
        })
    }

    /// Returns the limits of the next step, or `None` if the engine must first wait for a result.
    pub(super) fn limits(&mut self, demand: Demand) -> Option<StepLimits> {
        self.microbatches.limits(demand, self.under_way.len())
    }

    /// Whether a stage failed to read or write its part of blocks. The next [`Self::result`] returns the
    /// error.
    pub(super) fn is_lost(&self) -> bool {
        self.remote_blocks.is_lost()
    }

    /// Bytes of a block, summed over all stages.
    pub(super) fn block_bytes(&self, group: usize) -> usize {
        self.remote_blocks.block_bytes(group)
    }

    /// Reads whole blocks: the parts of `first` (this stage's blocks) and of all other stages. Blocks of
    /// completed steps may be read at any time.
    pub(super) fn read_blocks(
        &mut self,
        first: Blocks<'_>,
        blocks: &[(usize, u32)],
    ) -> Result<Vec<Vec<u8>>, Error> {
        let limit = self.block_timeout();
        self.remote_blocks.read(first, blocks, limit)
    }

    /// Writes blocks that no step in flight uses.
    pub(super) fn write_blocks(
        &mut self,
        first: Blocks<'_>,
        pieces: &[(usize, u32, &[u8])],
    ) -> Result<(), Error> {
        let limit = self.block_timeout();
        self.remote_blocks.write(first, pieces, limit)
    }

    /// Reads the recurrent states of all layers in a slot.
    pub(super) fn read_states(&mut self, first: Blocks<'_>, slot: u32) -> Result<Vec<LayerState>, Error> {
        let limit = self.block_timeout();
        self.remote_blocks.states(first, slot, limit)
    }

    /// Time limit for a stage to read or write its part of a few blocks. The stage does so only after the
    /// layer that it is computing.
    fn block_timeout(&self) -> Duration {
        let steps = self.under_way.iter().map(|step| step.rows);
        let limits = steps.flat_map(|rows| self.stages.iter().map(move |stage| stage.deadline.limit(rows)));
        match self.remote_blocks.waits() {
            // The order waits for accepted rows that follow these steps on their stream.
            true => limits.fold(SILENCE, Duration::saturating_add),
            false => limits.fold(SILENCE, Duration::max),
        }
    }

    /// Number of ranks, the first one included.
    pub(super) fn ranks(&self) -> usize {
        self.stages.len()
    }

    /// Maximum number of steps in flight.
    pub(super) fn max_steps(&self) -> u32 {
        self.microbatches.max_steps()
    }

    /// Sends the number of accepted rows of each sequence whose state update a finished step deferred. The
    /// message is sent at once on the stream of the steps, so stages apply it before the next step.
    pub(super) fn counted(&mut self, step: u64, rows: &[usize]) {
        let rows = rows.iter().map(|rows| *rows as u32).collect();
        self.steps.send((StageFrame::Counted(StageCounted { step, rows }), Vec::new()));
        self.remote_blocks.counted(step);
    }

    /// Has the later stages free an adapter that no later step uses.
    pub(super) fn unload_adapter(&mut self, adapter: AdapterId) {
        self.steps.send((StageFrame::AdapterUnloaded(adapter.number()), Vec::new()));
    }

    /// Returns the counters and resets [`StageCounts::hops`].
    pub(super) fn take_counts(&mut self) -> StageCounts {
        self.counts.under_way = self.under_way.len();
        let hops = std::mem::take(&mut self.counts.hops);
        StageCounts { hops, ..self.counts.clone() }
    }

    /// Runs a step over the first stage's layers and sends it to the next stage with the request.
    /// [`Self::result`] returns its result.
    pub(super) fn run(
        &mut self,
        decoder: &mut Decoder,
        scheduler: &Scheduler,
        plan: &StepPlan,
        StepRequest { rows: requested, drafts, traces, adapters }: StepRequest,
    ) -> Result<(), Error> {
        let since = Instant::now();
        let Layout { blocks, own, state_group, activations } = &self.layout;
        let described = step::describe(scheduler, plan, blocks, *state_group)?;
        let mut step = StageStep { traces, draft_requests: drafts, ..described };
        decoder.use_adapters(&adapters)?;
        step::forward(decoder, own, &step, None, &mut |_| {})?;
        let residual = decoder.residual(0..plan.tokens.len())?;
        let bytes = activations::encode(*activations, &residual);
        let one = |sequence: &PlannedSequence| sequence.rows.len() == 1 + sequence.draft_tokens as usize;
        let decodes = plan.sequences.iter().all(|sequence| sequence.samples && one(sequence));
        // The stage that drafts must also sample, because drafting starts from the sampled tokens.
        let shared = decodes && decoder.has_head() && step.draft_requests.is_empty();
        // A step that is alone in the pipeline splits its logits to minimize latency.
        let alone = self.under_way.is_empty();
        let vocab = decoder.spec().vocab;
        let split = shared && alone && requested.is_one() && decoder.splits_head();
        let split = split.then(|| {
            let best = !requested.argmax.is_empty();
            HeadSplitChoice { from: self.head_splits[usize::from(best)].next(vocab), best }
        });
        step.head = split.and_then(|split| Some(StageHead { from: split.from?, best: split.best }));
        if step.head.is_some() || (shared && !alone && self.head_share.takes_next()) {
            step.returned = requested.distinct();
        } else {
            step.argmax = requested.argmax;
            step.logits = requested.logits;
            step.samples = requested.samples;
        }
        let under_way = UnderWay {
            step: plan.step,
            rows: plan.tokens.len(),
            decodes,
            choice: self.microbatches.choice(),
            expected: [step.argmax.len(), step.samples.len(), step.logits.len()],
            returned: step.returned.clone(),
            draft_tokens: step.draft_requests.iter().map(|draft_token| draft_token.most).collect(),
            widths: (vocab, decoder.spec().hidden),
            handed_over: Instant::now(),
            computed: since.elapsed(),
            alone,
            split,
        };
        if !adapters.is_empty() {
            let rows = adapters.iter().map(|(rows, id)| (rows.start as u32, rows.end as u32, id.number()));
            let frame = StageFrame::Adapters(StageAdapters { rows: rows.collect() });
            self.steps.send((frame, Vec::new()));
        }
        self.steps.send((StageFrame::Step(step), bytes));
        self.under_way.push_back(under_way);
        Ok(())
    }

    /// Records that the first stage spent `took` on logits of rows that the last stage returned.
    pub(super) fn head_took(&mut self, took: Duration) {
        self.head_share.head_took(took);
        if let Some(first) = self.counts.stages.first_mut() {
            first.computed += took.as_secs_f64();
        }
    }

    /// Returns the result of the oldest step in flight. `None` if there is no step, or if `wait` is false and
    /// the result has not arrived.
    pub(super) fn result(&mut self, wait: bool) -> Result<Option<RankResult>, Error> {
        let (since, runtime) = (Instant::now(), self.runtime.clone());
        if let Some(lost) = self.remote_blocks.take_lost() {
            return Err(runtime.block_on(self.blame(lost)).into());
        }
        let mut wait_policy = std::mem::take(&mut self.wait_policy);
        let received = match wait {
            true => wait_policy.block_on(&runtime, self.receive_result(true)),
            false => runtime.block_on(self.receive_result(false)),
        };
        self.wait_policy = wait_policy;
        let Some((drawn, rows)) = received? else { return Ok(None) };
        let Some(mut under_way) = self.under_way.pop_front() else { return Ok(None) };
        let StageDrawn { step, tokens, samples, spent, drafted, drafting_us, .. } = drawn;
        self.account(&under_way, &spent);
        if let Some(first) = self.counts.stages.first_mut() {
            first.stalled += since.elapsed().as_secs_f64();
            first.bytes += rows.iter().map(|row| size_of_val(row.as_slice()) as u64).sum::<u64>();
        }
        let computed_us = u32::try_from(under_way.computed.as_micros()).unwrap_or(u32::MAX);
        let first = StageSpent { computed_us, ..StageSpent::default() };
        let stages = std::iter::once(first).chain(spent).collect();
        let spent = StepSpent { ranks: stages, in_flight: under_way.handed_over.elapsed() };
        let (logits, returned) = match under_way.returned.is_empty() {
            true => (rows, None),
            false => (Vec::new(), Some((std::mem::take(&mut under_way.returned), rows.concat()))),
        };
        let split =
            under_way.split.and_then(|split| Some(LastRankLogits { from: split.from?, best: split.best }));
        match under_way.split {
            Some(HeadSplitChoice { from: Some(_), .. }) => self.halved = Some(under_way),
            Some(HeadSplitChoice { from: None, best }) => {
                let all = under_way.computed + under_way.handed_over.elapsed();
                self.head_splits[usize::from(best)].took(false, all);
            }
            None => {}
        }
        let draft_tokens = drafted.into_iter().map(|drafted| drafted.tokens).collect();
        let draft_time = Duration::from_micros(drafting_us.into());
        let result =
            RankResult { step, tokens, samples, logits, returned, split, draft_tokens, draft_time, spent };
        Ok(Some(result))
    }

    /// Returns the last stage's part of the logits of the row that the last result returned, if
    /// [`RankResult::split`] is set. `own` is the time that the first stage spent on its own part.
    pub(super) fn rest(&mut self, own: Duration) -> Result<Rest, Error> {
        let Some(halved) = self.halved.take() else {
            return Err(Error::Invariant("no stage makes a part of these logits".to_owned()));
        };
        // The step stays in flight until its logits arrive, so that timeouts apply to it.
        self.under_way.push_front(halved);
        let (since, runtime) = (Instant::now(), self.runtime.clone());
        let mut wait_policy = std::mem::take(&mut self.wait_policy);
        let received = wait_policy.block_on(&runtime, self.receive_rest());
        self.wait_policy = wait_policy;
        let (rest, logits) = received?;
        let waited = since.elapsed();
        if let Some(halved) = self.under_way.pop_front() {
            self.counts.divided += 1;
            let best = halved.split.is_some_and(|split| split.best);
            let split = &mut self.head_splits[usize::from(best)];
            split.met(own, waited);
            split.took(true, halved.computed + halved.handed_over.elapsed());
        }
        if let Some(first) = self.counts.stages.first_mut() {
            first.computed += own.as_secs_f64();
            first.stalled += waited.as_secs_f64();
            first.bytes += size_of_val(logits.as_slice()) as u64;
        }
        if let Some(last) = self.counts.stages.last_mut() {
            last.computed += f64::from(rest.computed_us) / 1e6;
        }
        Ok(match rest.best {
            Some((token, logit)) => Rest::Best(token, logit),
            None => Rest::Logits(logits),
        })
    }

    fn account(&mut self, under_way: &UnderWay, spent: &[StageSpent]) {
        let now = Instant::now();
        let since_last = now - std::mem::replace(&mut self.answered, now);
        self.microbatches.answered(under_way.choice.filter(|_| under_way.decodes), since_last);
        let times = || {
            let downstream = spent.iter().map(|spent| Duration::from_micros(spent.computed_us.into()));
            std::iter::once(under_way.computed).chain(downstream)
        };
        for (stage, took) in self.stages.iter_mut().zip(times()) {
            stage.deadline.took(under_way.rows, took);
        }
        for (count, took) in self.counts.stages.iter_mut().zip(times()) {
            count.computed += took.as_secs_f64();
        }
        for (count, spent) in self.counts.stages.iter_mut().skip(1).zip(spent) {
            count.bytes += spent.received;
            count.stalled += f64::from(spent.stalled_us) / 1e6;
        }
        if under_way.decodes
            && !under_way.returned.is_empty()
            && let (Some(first), Some(last)) = (times().next(), times().last())
        {
            self.head_share.layers_took(first, last);
        }
        if under_way.alone {
            let computed: f64 = spent.iter().map(|spent| f64::from(spent.computed_us) / 1e6).sum();
            self.counts.hops.push((under_way.handed_over.elapsed().as_secs_f64() - computed).max(0.0));
        }
    }

    /// Receives the oldest step's result and its rows. `None` if there is no step, or if `wait` is false and
    /// no result has arrived.
    async fn receive_result(&mut self, wait: bool) -> Result<Option<(StageDrawn, Vec<Vec<f32>>)>, Error> {
        match self.report(wait).await? {
            None => Ok(None),
            Some(StageReport::Drawn(drawn)) => self.rows_of(drawn).await.map(Some),
            Some(other) => Err(self.blame(self.unexpected(other)).await.into()),
        }
    }

    /// Receives the last stage's part of the oldest step's logits.
    async fn receive_rest(&mut self) -> Result<(StageRest, Vec<f32>), Error> {
        let split = |step: &UnderWay| Some((step.step, step.widths.0, step.split?.from?, step.split?.best));
        let Some((step, vocab, from, best)) = self.under_way.front().and_then(split) else {
            return Err(Error::Invariant("logits of no step".to_owned()));
        };
        let logits = if best { 0 } else { vocab - from as usize };
        let answers = |rest: &StageRest| {
            let in_part = |(token, _)| token >= from && (token as usize) < vocab;
            let actual = (rest.step, rest.logits as usize, rest.best.is_some());
            actual == (step, logits, best) && rest.best.is_none_or(in_part)
        };
        match self.report(true).await? {
            Some(StageReport::Rest(rest)) if answers(&rest) => {
                let stage = self.polls.len();
                let row = self.reports.row(logits).await;
                Ok((rest, row.map_err(|source| LostStage { stage, source })?))
            }
            Some(StageReport::Rest(rest)) => {
                Err(Error::Invariant(format!("{logits} logits of step {step} are answered by {rest:?}")))
            }
            Some(other) => Err(self.blame(self.unexpected(other)).await.into()),
            None => Err(Error::Invariant("logits that nobody makes".to_owned())),
        }
    }

    /// Error for a report that the last stage sent at the wrong time.
    fn unexpected(&self, report: StageReport) -> LostStage {
        LostStage { stage: self.polls.len(), source: unexpected(Ok(report)) }
    }

    /// Receives the last stage's next result. `None` if there is no step, or if `wait` is false and no result
    /// has arrived.
    async fn report(&mut self, wait: bool) -> Result<Option<StageReport>, Error> {
        if self.under_way.is_empty() {
            return Ok(None);
        }
        let (since, last) = (Instant::now(), self.polls.len());
        let mut poll_at = since + POLL_INTERVAL;
        loop {
            let signal = tokio::select! {
                biased;
                report = self.reports.next() => match report {
                    Ok(report @ (StageReport::Drawn(_) | StageReport::Rest(_))) => return Ok(Some(report)),
                    Ok(StageReport::Progress(progress)) => StageSignal::Progress(last, progress),
                    report => StageSignal::Lost(LostStage { stage: last, source: unexpected(report) }),
                },
                Some(signal) = self.signals.recv() => signal,
                () = std::future::ready(()), if !wait => return Ok(None),
                () = tokio::time::sleep_until(poll_at.into()) => {
                    if let Some(overdue_stage) = self.overdue_stage(since) {
                        return Err(overdue_stage.into());
                    }
                    // A stage that has not answered the last poll is not polled again.
                    for poll in &self.polls {
                        let _ = poll.try_send(());
                    }
                    poll_at = Instant::now() + POLL_INTERVAL;
                    continue;
                }
            };
            match signal {
                StageSignal::Lost(lost) => return Err(self.blame(lost).await.into()),
                StageSignal::Progress(stage, progress) => {
                    if let Some(status) = self.stages.get_mut(stage) {
                        (status.progress, status.last_report) = (progress, Instant::now());
                    }
                }
            }
        }
    }

    /// Reads the rows that follow a report, after checking that it matches the oldest step.
    async fn rows_of(&mut self, drawn: StageDrawn) -> Result<(StageDrawn, Vec<Vec<f32>>), Error> {
        let Some(oldest) = self.under_way.front() else {
            return Err(Error::Invariant("an answer to no step".to_owned()));
        };
        let ([tokens, samples, logits], returned) = (oldest.expected, oldest.returned.len());
        let actual = (drawn.step, drawn.tokens.len(), drawn.samples.len());
        let rows = (drawn.rows as usize, drawn.returned as usize);
        let last = self.polls.len();
        if actual != (oldest.step, tokens, samples) || rows != (logits, returned) || drawn.spent.len() != last
        {
            return Err(Error::Invariant(format!("{oldest:?} is answered by {actual:?}, {rows:?}")));
        }
        let (vocab, hidden) = oldest.widths;
        if !draft::answers(&drawn.drafted, &oldest.draft_tokens, vocab) {
            let requested = &oldest.draft_tokens;
            return Err(Error::Invariant(format!(
                "{requested:?} draft tokens are answered by {:?}",
                drawn.drafted
            )));
        }
        let widths = std::iter::repeat_n(vocab, logits).chain(std::iter::repeat_n(hidden, returned));
        let mut rows = Vec::with_capacity(logits + returned);
        for width in widths {
            let row = self.reports.row(width).await;
            rows.push(row.map_err(|source| LostStage { stage: last, source })?);
        }
        Ok((drawn, rows))
    }

    /// Returns the stage that delayed the oldest step beyond its limit, if any. `since` is the start of the
    /// wait.
    fn overdue_stage(&self, since: Instant) -> Option<LostStage> {
        let oldest = self.under_way.front()?;
        let mut before = Duration::ZERO;
        for (stage, status) in self.stages.iter().enumerate().skip(1) {
            let timeout = |what, limit: Duration| {
                let source = transport::Error::Timeout { what, limit_ms: limit.as_millis() as u64 };
                Some(LostStage { stage, source })
            };
            if status.last_report.max(since).elapsed() > SILENCE {
                return timeout("reporting progress", SILENCE);
            }
            let StageProgressReport { done, computes, for_us } = status.progress;
            let computed = self.under_way.iter().find(|step| step.step == computes);
            let limit = status.deadline.limit(computed.map_or(oldest.rows, |step| step.rows));
            before += limit;
            if computed.is_some() && Duration::from_micros(for_us) > limit {
                return timeout("computing a step", limit);
            }
            if done < oldest.step {
                // The stage computes an earlier step, or this step has not arrived there.
                let lost = computed.is_none() && since.elapsed() > before;
                return if lost { timeout("receiving a step", before) } else { None };
            }
        }
        None
    }

    /// Finds the stage that failed. If `lost` only reports a lost neighbour, waits up to [`BLAME`] for a
    /// report that names another stage.
    async fn blame(&mut self, lost: LostStage) -> LostStage {
        let second_hand = |source: &transport::Error| {
            matches!(
                source,
                transport::Error::StageFailed(StageFailure::Neighbour { .. })
                    | transport::Error::StreamEnded(_)
            )
        };
        let (until, last) = (Instant::now() + BLAME, self.polls.len());
        let mut reads_last = lost.stage != last;
        while second_hand(&lost.source) {
            let signal = tokio::select! {
                Some(signal) = self.signals.recv() => signal,
                report = self.reports.next(), if reads_last => {
                    reads_last = false;
                    StageSignal::Lost(LostStage { stage: last, source: unexpected(report) })
                }
                () = tokio::time::sleep_until(until.into()) => break,
            };
            match signal {
                StageSignal::Lost(other) if !second_hand(&other.source) => return other,
                StageSignal::Lost(_) | StageSignal::Progress(..) => {}
            }
        }
        lost
    }
}

/// Converts an unexpected report, or a receive error, into the error that ends the replica.
fn unexpected(report: Result<StageReport, transport::Error>) -> transport::Error {
    report.map_or_else(|error| error, |_| transport::Error::Protocol("a report at the wrong time"))
}

impl Writes for ActivationSender {
    type Message = (StageFrame, Vec<u8>);

    async fn write(&mut self, (step, activations): Self::Message) -> Result<(), transport::Error> {
        self.send(&step, activations).await.map(drop)
    }

    fn bytes((_, activations): &Self::Message) -> usize {
        activations.len()
    }
}

/// Sends queued messages until the queue ends or a write fails.
async fn send_steps(queue: Queue<ActivationSender>, signals_tx: mpsc::UnboundedSender<StageSignal>) {
    if let Err(source) = queue.write_all().await {
        // The send fails only if the engine is gone.
        let _ = signals_tx.send(StageSignal::Lost(LostStage { stage: 1, source }));
    }
}

async fn forward_polls(mut orders: StageOrders, mut polls: mpsc::Receiver<()>) {
    while polls.recv().await.is_some() {
        // The reader of the stage's reports notices a lost stage.
        if orders.send(&StageOrder::TellProgress).await.is_err() {
            return;
        }
    }
}

async fn read_reports(
    stage: usize,
    mut reports: StageReports,
    signals_tx: mpsc::UnboundedSender<StageSignal>,
) {
    loop {
        let signal = match reports.next().await {
            Ok(StageReport::Progress(progress)) => StageSignal::Progress(stage, progress),
            report => StageSignal::Lost(LostStage { stage, source: unexpected(report) }),
        };
        let last = matches!(signal, StageSignal::Lost(_));
        // The send fails only if the engine is gone.
        if signals_tx.send(signal).is_err() || last {
            return;
        }
    }
}
