//! All stages of a replica but the first, as its engine sees them: steps go out, several at a time, and answers come
//! back in the same order.
//!
//! The engine's thread reads the stream of the last stage itself, and sends what is small itself (`outlet.rs`): a step of
//! some streams passes no other thread than those that QUIC has at the other end.

use super::activations;
use super::deadline::Deadline;
use super::draft;
use super::handshake::LostStage;
use super::lm_head_share::HeadShare;
use super::lm_head_split::HeadSplit;
use super::microbatch::{MicrobatchChoice, Pace};
use super::remote_blocks::Parts;
use super::send_queue::{Queue, SendQueue, Writes};
use super::step::{self, WantedRows};
use super::wait_policy::WaitPolicy;
use crate::Error;
use crate::decoder::{Blocks, Decoder, LayerState};
use crate::kv_cache::Slabs;
use crate::scheduler::{Demand, PlannedSequence, Scheduler, StepLimits, StepPlan};
use crate::telemetry::{StageCount, StageCounts};
use kernels::backend::MAX_DEFERRED_STEPS;
use proto::stage::{
    ActivationType, StageCounted, StageDrawn, StageFailure, StageFrame, StageGuess, StageHead, StageOrder,
    StageProgressReport, StageReport, StageRest, StageSampled, StageSpent, StageStep,
};
use proto::trace::TraceContext;
use proto::transport::{ActivationSender, Endpoint, StageControl, StageOrders, StageReports};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// How long an answer is waited for before the stages are asked how far they are, and then again.
const ASK_AFTER: Duration = Duration::from_millis(250);
/// A stage that answers nothing for so long is lost, though its connection stands.
const SILENCE: Duration = Duration::from_millis(2500);
/// A stage that has lost its neighbour is seldom the one to blame: for so long another is waited for.
const BLAME: Duration = Duration::from_millis(500);

/// Where the blocks of a replica lie.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) blocks: Slabs,
    /// As the first stage's arena is cut.
    pub(super) own: Slabs,
    pub(super) state_group: Option<usize>,
    pub(super) activations: ActivationType,
}

#[derive(Debug)]
pub(crate) struct PipelineExecutor {
    runtime: Handle,
    layout: Layout,
    parts: Parts,
    patience: WaitPolicy,
    steps: SendQueue<ActivationSender>,
    reports: StageReports,
    heard: mpsc::UnboundedReceiver<StageSignal>,
    /// Its other end, so that it stays open where there are none.
    _tell: mpsc::UnboundedSender<StageSignal>,
    /// Where the question for progress goes; dropped, a stage hears that the replica has ended.
    asks: Vec<mpsc::Sender<()>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    under_way: VecDeque<UnderWay>,
    stages: Vec<StageStatus>,
    pace: Pace,
    /// When a step was answered last.
    answered: Instant,
    head_share: HeadShare,
    /// Where all logits of the last stage's part are wanted, and where the largest one is.
    head_splits: [HeadSplit; 2],
    /// A step of whose logits the last stage has not sent its part.
    halved: Option<UnderWay>,
    counts: StageCounts,
    /// What the stages are reached by, and the leases under a cluster, which end with this.
    _held: (Arc<Endpoint>, JoinSet<()>),
}

/// What is known of a stage, the first one included.
#[derive(Debug, Clone)]
struct StageStatus {
    deadline: Deadline,
    progress: StageProgressReport,
    heard: Instant,
}

/// A step that the other stages have.
#[derive(Debug)]
struct UnderWay {
    step: u64,
    rows: usize,
    decodes: bool,
    /// What it was planned under.
    choice: Option<MicrobatchChoice>,
    /// Tokens, samples and rows of logits that must come.
    wanted: [usize; 3],
    /// Rows of the residual stream that must.
    returned: Vec<u32>,
    /// Guesses that may come of each sequence for which some were asked for.
    guesses: Vec<u32>,
    /// Values of a row of logits and of the residual stream.
    widths: (usize, usize),
    handed_over: Instant,
    /// What the first stage took.
    computed: Duration,
    /// No other was under way then.
    alone: bool,
    /// If its logits could be made at two places.
    split: Option<HeadSplitChoice>,
}

/// Of one row, whose logits are made where.
#[derive(Debug, Clone, Copy)]
struct HeadSplitChoice {
    /// The last stage's first token; none where it makes all logits.
    from: Option<u32>,
    /// Only the largest logit is wanted.
    best: bool,
}

/// What the last stage has made of its part of a row's logits.
#[derive(Debug)]
pub(crate) enum Rest {
    Logits(Vec<f32>),
    /// The token of the largest one, and that.
    Best(u32, f32),
}

/// What was made of a step behind its last layer.
#[derive(Debug)]
pub(crate) struct StepResult {
    pub(crate) step: u64,
    /// For each row of [`WantedRows::argmax`].
    pub(crate) tokens: Vec<u32>,
    /// For each of [`WantedRows::samples`].
    pub(crate) samples: Vec<StageSampled>,
    /// Each row of [`WantedRows::logits`].
    pub(crate) logits: Vec<Vec<f32>>,
    /// If nothing of that has been made: the rows that something is wanted of, ascending, and their residual stream.
    pub(crate) returned: Option<(Vec<u32>, Vec<f32>)>,
    /// The last stage makes the logits of that one row itself from this token on: [`PipelineExecutor::rest`] gives them.
    pub(crate) head_from: Option<u32>,
    /// For each of [`StepRequest::guesses`] what will probably be drawn next.
    pub(crate) guessed: Vec<Vec<u32>>,
    /// What guessing has taken of the last stage's time.
    pub(crate) guessing: Duration,
    pub(crate) spent: Spent,
}

/// What the other stages are asked for beside a step's plan.
#[derive(Debug, Default)]
pub(crate) struct StepRequest {
    /// Rows that something is to be made of.
    pub(crate) wanted: WantedRows,
    /// Sequences behind whose draws the last stage is to guess, in the order of the plan's.
    pub(crate) guesses: Vec<StageGuess>,
    /// Spans that the step is below of.
    pub(crate) traces: Vec<TraceContext>,
}

/// What a step has cost.
#[derive(Debug)]
pub(crate) struct Spent {
    /// Each stage, the first one included; what that waits for and receives belongs to no one step.
    pub(crate) stages: Vec<StageSpent>,
    /// Since it was handed to the second stage: what the stages have not computed meanwhile it has waited or travelled.
    pub(crate) under_way: Duration,
}

#[derive(Debug)]
enum StageSignal {
    Progress(usize, StageProgressReport),
    Lost(LostStage),
}

impl Drop for PipelineExecutor {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

impl PipelineExecutor {
    /// Over the control streams of the later stages, in their order.
    pub(super) fn new(
        runtime: Handle,
        held: (Arc<Endpoint>, JoinSet<()>),
        (layout, parts): (Layout, Parts),
        sender: ActivationSender,
        controls: impl Iterator<Item = StageControl>,
    ) -> Result<Self, Error> {
        let (tell, heard) = mpsc::unbounded_channel();
        let handover = sender.handover();
        let (steps, queue) = SendQueue::new(runtime.clone(), sender, handover);
        let mut tasks = vec![runtime.spawn(pass_steps(queue, tell.clone()))];
        let (mut asks, mut last) = (Vec::new(), None);
        for (stage, StageControl { orders, reports }) in (1..).zip(controls) {
            let (ask, asked) = mpsc::channel(1);
            asks.push(ask);
            tasks.push(runtime.spawn(pass_questions(orders, asked)));
            if let Some((stage, reports)) = last.replace((stage, reports)) {
                tasks.push(runtime.spawn(listen(stage, reports, tell.clone())));
            }
        }
        let Some((last, reports)) = last else {
            return Err(Error::Invariant("a replica of one stage".to_owned()));
        };
        let known = StageStatus {
            deadline: Deadline::default(),
            progress: StageProgressReport::default(),
            heard: Instant::now(),
        };
        Ok(Self {
            runtime,
            layout,
            parts,
            patience: WaitPolicy::default(),
            steps,
            reports,
            heard,
            _tell: tell,
            asks,
            tasks,
            under_way: VecDeque::new(),
            stages: vec![known; last + 1],
            pace: Pace::new(last + 1),
            answered: Instant::now(),
            counts: StageCounts { stages: vec![StageCount::default(); last + 1], ..StageCounts::default() },
            head_share: HeadShare::default(),
            head_splits: Default::default(),
            halved: None,
            _held: held,
        })
    }

    /// What the next step takes of what there is to do; `None` if it must wait for an answer.
    pub(crate) fn limits(&mut self, demand: Demand) -> Option<StepLimits> {
        self.pace.limits(demand, self.under_way.len())
    }

    /// Whether a stage has failed to move its part of blocks: the next [`Self::answer`] says which.
    pub(crate) fn is_lost(&self) -> bool {
        self.parts.is_lost()
    }

    /// Bytes of a block, at all stages together.
    pub(crate) fn block_bytes(&self, group: usize) -> usize {
        self.parts.block_bytes(group)
    }

    /// What blocks hold, those of `first` and all other stages. Blocks of completed steps may be read at any time.
    pub(crate) fn read_blocks(
        &mut self,
        first: Blocks<'_>,
        wanted: &[(usize, u32)],
    ) -> Result<Vec<Vec<u8>>, Error> {
        let limit = self.patience();
        self.parts.read(first, wanted, limit)
    }

    /// Fills blocks that no step under way knows.
    pub(crate) fn write_blocks(
        &mut self,
        first: Blocks<'_>,
        pieces: &[(usize, u32, &[u8])],
    ) -> Result<(), Error> {
        let limit = self.patience();
        self.parts.write(first, pieces, limit)
    }

    /// The recurrent states of all layers in a slot.
    pub(crate) fn read_states(&mut self, first: Blocks<'_>, slot: u32) -> Result<Vec<LayerState>, Error> {
        let limit = self.patience();
        self.parts.states(first, slot, limit)
    }

    /// How long a stage may take to move its part of a few blocks: it does so behind the layer that it computes.
    fn patience(&self) -> Duration {
        let steps = self.under_way.iter().map(|step| step.rows);
        let limits = steps.flat_map(|rows| self.stages.iter().map(move |known| known.deadline.limit(rows)));
        match self.parts.waits() {
            // Behind steps that are on the same way.
            true => limits.fold(SILENCE, Duration::saturating_add),
            false => limits.fold(SILENCE, Duration::max),
        }
    }

    /// Whether rows of as many steps as may be under way can be taken back.
    pub(crate) fn can_defer(&self) -> bool {
        self.pace.most() as usize <= MAX_DEFERRED_STEPS
    }

    /// So many rows count of each sequence that an answered step has deferred the state of. It goes the way of the steps,
    /// at once: the stages are done with it when the next one comes.
    pub(crate) fn counted(&mut self, step: u64, rows: &[usize]) {
        let rows = rows.iter().map(|rows| *rows as u32).collect();
        self.steps.send((StageFrame::Counted(StageCounted { step, rows }), Vec::new()));
        self.parts.counted(step);
    }

    /// What the stages have done so far.
    pub(crate) fn take_counts(&mut self) -> StageCounts {
        self.counts.under_way = self.under_way.len();
        let hops = std::mem::take(&mut self.counts.hops);
        StageCounts { hops, ..self.counts.clone() }
    }

    /// Runs a step over the first stage's layers and hands it on with what is asked for. [`Self::answer`] gives what became
    /// of it.
    pub(crate) fn run(
        &mut self,
        decoder: &mut Decoder,
        scheduler: &Scheduler,
        plan: &StepPlan,
        StepRequest { wanted, guesses, traces }: StepRequest,
    ) -> Result<(), Error> {
        let since = Instant::now();
        let Layout { blocks, own, state_group, activations } = &self.layout;
        let described = step::describe(scheduler, plan, blocks, *state_group)?;
        let mut step = StageStep { traces, guesses, ..described };
        step::forward(decoder, own, &step, None, &mut |_| {})?;
        let residual = decoder.residual(0..plan.tokens.len())?;
        let bytes = activations::encode(*activations, &residual);
        let one = |sequence: &PlannedSequence| sequence.rows.len() == 1 + sequence.guesses as usize;
        let decodes = plan.sequences.iter().all(|sequence| sequence.samples && one(sequence));
        // Who guesses behind draws must make them.
        let shared = decodes && decoder.has_head() && step.guesses.is_empty();
        // A step that has the stages to itself takes the shortest way.
        let alone = self.under_way.is_empty();
        let vocab = decoder.spec().vocab;
        let split = shared && alone && wanted.is_one() && decoder.splits_head();
        let split = split.then(|| {
            let best = !wanted.argmax.is_empty();
            HeadSplitChoice { from: self.head_splits[usize::from(best)].next(vocab), best }
        });
        step.head = split.and_then(|split| Some(StageHead { from: split.from?, best: split.best }));
        if step.head.is_some() || (shared && !alone && self.head_share.takes_next()) {
            step.returned = wanted.distinct();
        } else {
            step.argmax = wanted.argmax;
            step.logits = wanted.logits;
            step.samples = wanted.samples;
        }
        let under_way = UnderWay {
            step: plan.step,
            rows: plan.tokens.len(),
            decodes,
            choice: self.pace.choice(),
            wanted: [step.argmax.len(), step.samples.len(), step.logits.len()],
            returned: step.returned.clone(),
            guesses: step.guesses.iter().map(|guess| guess.most).collect(),
            widths: (vocab, decoder.spec().hidden),
            handed_over: Instant::now(),
            computed: since.elapsed(),
            alone,
            split,
        };
        self.steps.send((StageFrame::Step(step), bytes));
        self.under_way.push_back(under_way);
        Ok(())
    }

    /// The first stage has made logits of rows that came back, in so much time.
    pub(crate) fn helped(&mut self, took: Duration) {
        self.head_share.head_took(took);
        if let Some(first) = self.counts.stages.first_mut() {
            first.computed += took.as_secs_f64();
        }
    }

    /// What became of the oldest step under way; none if that is not known yet and is not waited for, or if there is
    /// no step.
    pub(crate) fn answer(&mut self, wait: bool) -> Result<Option<StepResult>, Error> {
        let (since, runtime) = (Instant::now(), self.runtime.clone());
        if let Some(lost) = self.parts.take_lost() {
            return Err(runtime.block_on(self.blame(lost)).into());
        }
        let mut patience = std::mem::take(&mut self.patience);
        let heard = match wait {
            true => patience.block_on(&runtime, self.hear(true)),
            false => runtime.block_on(self.hear(false)),
        };
        self.patience = patience;
        let Some((drawn, rows)) = heard? else { return Ok(None) };
        let Some(mut under_way) = self.under_way.pop_front() else { return Ok(None) };
        let StageDrawn { step, tokens, samples, spent, guessed, guessing_us, .. } = drawn;
        self.account(&under_way, &spent);
        if let Some(first) = self.counts.stages.first_mut() {
            first.stalled += since.elapsed().as_secs_f64();
            first.bytes += rows.iter().map(|row| size_of_val(row.as_slice()) as u64).sum::<u64>();
        }
        let computed_us = u32::try_from(under_way.computed.as_micros()).unwrap_or(u32::MAX);
        let first = StageSpent { computed_us, ..StageSpent::default() };
        let stages = std::iter::once(first).chain(spent).collect();
        let spent = Spent { stages, under_way: under_way.handed_over.elapsed() };
        let (logits, returned) = match under_way.returned.is_empty() {
            true => (rows, None),
            false => (Vec::new(), Some((std::mem::take(&mut under_way.returned), rows.concat()))),
        };
        let head_from = under_way.split.and_then(|split| split.from);
        match under_way.split {
            Some(HeadSplitChoice { from: Some(_), .. }) => self.halved = Some(under_way),
            Some(HeadSplitChoice { from: None, best }) => {
                let all = under_way.computed + under_way.handed_over.elapsed();
                self.head_splits[usize::from(best)].took(false, all);
            }
            None => {}
        }
        let guessed = guessed.into_iter().map(|guessed| guessed.tokens).collect();
        let guessing = Duration::from_micros(guessing_us.into());
        Ok(Some(StepResult { step, tokens, samples, logits, returned, head_from, guessed, guessing, spent }))
    }

    /// The last stage's part of the logits of the row that the last answer has given back, where that says that it makes one.
    /// The first stage has made its own in so much time.
    pub(crate) fn rest(&mut self, own: Duration) -> Result<Rest, Error> {
        let Some(halved) = self.halved.take() else {
            return Err(Error::Invariant("no stage makes a part of these logits".to_owned()));
        };
        // Until then it is not done, wherever it hangs.
        self.under_way.push_front(halved);
        let (since, runtime) = (Instant::now(), self.runtime.clone());
        let mut patience = std::mem::take(&mut self.patience);
        let heard = patience.block_on(&runtime, self.hear_rest());
        self.patience = patience;
        let (rest, logits) = heard?;
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
        self.pace.answered(under_way.choice.filter(|_| under_way.decodes), since_last);
        let times = || {
            let later = spent.iter().map(|spent| Duration::from_micros(spent.computed_us.into()));
            std::iter::once(under_way.computed).chain(later)
        };
        for (known, took) in self.stages.iter_mut().zip(times()) {
            known.deadline.took(under_way.rows, took);
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

    /// The answer to the oldest step, and its rows, unless there is no step.
    async fn hear(&mut self, wait: bool) -> Result<Option<(StageDrawn, Vec<Vec<f32>>)>, Error> {
        match self.report(wait).await? {
            None => Ok(None),
            Some(StageReport::Drawn(drawn)) => self.rows_of(drawn).await.map(Some),
            Some(other) => Err(self.blame(self.not_awaited(other)).await.into()),
        }
    }

    /// What the last stage has made of the oldest step's logits.
    async fn hear_rest(&mut self) -> Result<(StageRest, Vec<f32>), Error> {
        let split = |step: &UnderWay| Some((step.step, step.widths.0, step.split?.from?, step.split?.best));
        let Some((step, vocab, from, best)) = self.under_way.front().and_then(split) else {
            return Err(Error::Invariant("logits of no step".to_owned()));
        };
        let logits = if best { 0 } else { vocab - from as usize };
        let answers = |rest: &StageRest| {
            let of_part = |(token, _)| token >= from && (token as usize) < vocab;
            let said = (rest.step, rest.logits as usize, rest.best.is_some());
            said == (step, logits, best) && rest.best.is_none_or(of_part)
        };
        match self.report(true).await? {
            Some(StageReport::Rest(rest)) if answers(&rest) => {
                let stage = self.asks.len();
                let row = self.reports.row(logits).await;
                Ok((rest, row.map_err(|source| LostStage { stage, source })?))
            }
            Some(StageReport::Rest(rest)) => {
                Err(Error::Invariant(format!("{logits} logits of step {step} are answered by {rest:?}")))
            }
            Some(other) => Err(self.blame(self.not_awaited(other)).await.into()),
            None => Err(Error::Invariant("logits that nobody makes".to_owned())),
        }
    }

    /// The last stage, which reports something at the wrong time.
    fn not_awaited(&self, report: StageReport) -> LostStage {
        LostStage { stage: self.asks.len(), source: not_awaited(Ok(report)) }
    }

    /// The last stage's next report of a step, unless there is no step; none, too, if it is not there and not waited for.
    async fn report(&mut self, wait: bool) -> Result<Option<StageReport>, Error> {
        if self.under_way.is_empty() {
            return Ok(None);
        }
        let (since, last) = (Instant::now(), self.asks.len());
        let mut ask_at = since + ASK_AFTER;
        loop {
            let heard = tokio::select! {
                biased;
                report = self.reports.next() => match report {
                    Ok(report @ (StageReport::Drawn(_) | StageReport::Rest(_))) => return Ok(Some(report)),
                    Ok(StageReport::Progress(progress)) => StageSignal::Progress(last, progress),
                    report => StageSignal::Lost(LostStage { stage: last, source: not_awaited(report) }),
                },
                Some(heard) = self.heard.recv() => heard,
                () = std::future::ready(()), if !wait => return Ok(None),
                () = tokio::time::sleep_until(ask_at.into()) => {
                    if let Some(late) = self.late(since) {
                        return Err(late.into());
                    }
                    // Whoever has not answered the last question need not be asked again.
                    for ask in &self.asks {
                        let _ = ask.try_send(());
                    }
                    ask_at = Instant::now() + ASK_AFTER;
                    continue;
                }
            };
            match heard {
                StageSignal::Lost(lost) => return Err(self.blame(lost).await.into()),
                StageSignal::Progress(stage, progress) => {
                    if let Some(known) = self.stages.get_mut(stage) {
                        (known.progress, known.heard) = (progress, Instant::now());
                    }
                }
            }
        }
    }

    /// The rows behind a report, if it says what the oldest step wants to know.
    async fn rows_of(&mut self, drawn: StageDrawn) -> Result<(StageDrawn, Vec<Vec<f32>>), Error> {
        let Some(oldest) = self.under_way.front() else {
            return Err(Error::Invariant("an answer to no step".to_owned()));
        };
        let ([tokens, samples, logits], returned) = (oldest.wanted, oldest.returned.len());
        let said = (drawn.step, drawn.tokens.len(), drawn.samples.len());
        let rows = (drawn.rows as usize, drawn.returned as usize);
        let later = self.asks.len();
        if said != (oldest.step, tokens, samples) || rows != (logits, returned) || drawn.spent.len() != later
        {
            return Err(Error::Invariant(format!("{oldest:?} is answered by {said:?}, {rows:?}")));
        }
        let (vocab, hidden) = oldest.widths;
        if !draft::answers(&drawn.guessed, &oldest.guesses, vocab) {
            let asked = &oldest.guesses;
            return Err(Error::Invariant(format!("{asked:?} guesses are answered by {:?}", drawn.guessed)));
        }
        let widths = std::iter::repeat_n(vocab, logits).chain(std::iter::repeat_n(hidden, returned));
        let mut rows = Vec::with_capacity(logits + returned);
        for width in widths {
            let row = self.reports.row(width).await;
            rows.push(row.map_err(|source| LostStage { stage: later, source })?);
        }
        Ok((drawn, rows))
    }

    /// The stage that has held up the oldest step for longer than it may, if one has; waited for since `since`.
    fn late(&self, since: Instant) -> Option<LostStage> {
        let oldest = self.under_way.front()?;
        let mut before = Duration::ZERO;
        for (stage, known) in self.stages.iter().enumerate().skip(1) {
            let timeout = |what, limit: Duration| {
                let source = proto::Error::Timeout { what, limit_ms: limit.as_millis() as u64 };
                Some(LostStage { stage, source })
            };
            if known.heard.max(since).elapsed() > SILENCE {
                return timeout("saying how far it is", SILENCE);
            }
            let StageProgressReport { done, computes, for_us } = known.progress;
            let computed = self.under_way.iter().find(|step| step.step == computes);
            let limit = known.deadline.limit(computed.map_or(oldest.rows, |step| step.rows));
            before += limit;
            if computed.is_some() && Duration::from_micros(for_us) > limit {
                return timeout("computing a step", limit);
            }
            if done < oldest.step {
                // It computes what came before, or the step has not reached it.
                let lost = computed.is_none() && since.elapsed() > before;
                return if lost { timeout("receiving a step", before) } else { None };
            }
        }
        None
    }

    /// Who is to blame when a stage is lost: if it only says that it has lost its neighbour, whoever is heard to be
    /// lost soon.
    async fn blame(&mut self, lost: LostStage) -> LostStage {
        let second_hand = |source: &proto::Error| {
            matches!(
                source,
                proto::Error::StageFailed(StageFailure::Neighbour { .. }) | proto::Error::StreamEnded(_)
            )
        };
        let (until, last) = (Instant::now() + BLAME, self.asks.len());
        let mut hears_last = lost.stage != last;
        while second_hand(&lost.source) {
            let heard = tokio::select! {
                Some(heard) = self.heard.recv() => heard,
                report = self.reports.next(), if hears_last => {
                    hears_last = false;
                    StageSignal::Lost(LostStage { stage: last, source: not_awaited(report) })
                }
                () = tokio::time::sleep_until(until.into()) => break,
            };
            match heard {
                StageSignal::Lost(other) if !second_hand(&other.source) => return other,
                StageSignal::Lost(_) | StageSignal::Progress(..) => {}
            }
        }
        lost
    }
}

/// Why a report ends the replica.
fn not_awaited(report: Result<StageReport, proto::Error>) -> proto::Error {
    report.map_or_else(|error| error, |_| proto::Error::Protocol("a report at the wrong time"))
}

impl Writes for ActivationSender {
    type Message = (StageFrame, Vec<u8>);

    async fn write(&mut self, (step, activations): Self::Message) -> Result<(), proto::Error> {
        self.send(&step, activations).await.map(drop)
    }

    fn bytes((_, activations): &Self::Message) -> usize {
        activations.len()
    }
}

/// Writes what does not leave at once.
async fn pass_steps(queue: Queue<ActivationSender>, heard: mpsc::UnboundedSender<StageSignal>) {
    if let Err(source) = queue.write_all().await {
        // An engine that is gone need not hear it.
        let _ = heard.send(StageSignal::Lost(LostStage { stage: 1, source }));
    }
}

async fn pass_questions(mut orders: StageOrders, mut asked: mpsc::Receiver<()>) {
    while asked.recv().await.is_some() {
        // A stage that is gone is noticed by whoever reads its reports.
        if orders.send(&StageOrder::TellProgress).await.is_err() {
            return;
        }
    }
}

async fn listen(stage: usize, mut reports: StageReports, heard: mpsc::UnboundedSender<StageSignal>) {
    loop {
        let told = match reports.next().await {
            Ok(StageReport::Progress(progress)) => StageSignal::Progress(stage, progress),
            report => StageSignal::Lost(LostStage { stage, source: not_awaited(report) }),
        };
        let last = matches!(told, StageSignal::Lost(_));
        // An engine that is gone need not hear it.
        if heard.send(told).is_err() || last {
            return;
        }
    }
}
