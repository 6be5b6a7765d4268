//! Random storms through the real engine: requests are admitted, cancelled, preempted, evicted, forked, saved
//! and restored around a request. Its tokens are those of an undisturbed run, although unused cache bytes are
//! overwritten with NaN again and again.

use crate::harness::{
    Output, QUANT, ROOT, Request, Submitted, TINY, cramped, one_by_one, open, options, prompt, submit,
    whole_matrix,
};
use engine::engine::resume::{Capture, SequenceKey};
use engine::engine::{Engine, StepOutcome};
use engine::kv_cache::BlockLayout;
use engine::snapshot::Snapshot;
use kvasir_worker::load::EngineOptions;
use proto::ids::RequestId;
use proto::message::FinishReason;
use proto::sequence::{SequenceError, SequenceName};
use std::time::Instant;
use tokio::sync::oneshot;

/// Storms of each model, in a sample and in the whole matrix.
const SEEDS: (u64, u64) = (12, 96);
/// More than the growth for which admission keeps room.
const GENERATE: u32 = 44;
/// Minimum number of tokens that a fork or a restored sequence generates beyond that.
const AFTER: u32 = 8;
/// Maximum length of a prompt and its output.
const LONGEST: usize = 170;

/// Maximum number of requests of a storm, including those that continue from forks and snapshots.
const MAX_REQUESTS: usize = 24;

/// A small generator: the seed determines the storm.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Prompts that diverge at block boundaries, inside blocks, and not at all.
fn prompts() -> Vec<Vec<u32>> {
    let stem = prompt(1, 160);
    let mut prompts = vec![stem.clone(), prompt(2, 23), prompt(3, 70)];
    for (seed, shared_len) in (10..).zip([16, 40, 96, 100, 128, 150]) {
        prompts.push([&stem[..shared_len], &prompt(seed, 9)].concat());
    }
    // Continues another prompt, like the next turn of a chat.
    prompts.push([prompts[2].clone(), prompt(20, 30)].concat());
    prompts.push([prompts[5].clone(), prompt(21, 40)].concat());
    prompts
}

/// A request of the storm: its prompt, and the number of tokens of the undisturbed output that it starts
/// with.
struct Sent {
    prompt_index: usize,
    given: usize,
    key: SequenceKey,
    submitted: Submitted,
}

/// Counts over all storms.
#[derive(Debug, Default)]
struct Seen {
    preempted: u64,
    cached: u64,
    cancelled: u64,
    forks: u64,
    saves: u64,
    restores: u64,
    poisoned: u64,
}

struct Storm<'a> {
    case: String,
    dice: Dice,
    engine: Engine,
    requests: &'a [Request],
    expected: &'a [Output],
    sent: Vec<Sent>,
    saving: Vec<(usize, oneshot::Receiver<Result<Capture, SequenceError>>)>,
    saved: Vec<(usize, Snapshot)>,
    names: u32,
}

impl Storm<'_> {
    fn key(&mut self) -> SequenceKey {
        self.names += 1;
        let name = SequenceName { request: RequestId::new("storm").unwrap(), choice: self.names };
        SequenceKey { root: ROOT, name }
    }

    /// Requests a prompt's output after its first `given` tokens, if there is more of it.
    fn submit_prompt(&mut self, prompt_index: usize, given: usize) {
        if given == self.expected[prompt_index].tokens.len() {
            return;
        }
        let key = self.key();
        let prompt =
            [&self.requests[prompt_index].prompt[..], &self.expected[prompt_index].tokens[..given]].concat();
        let max_tokens = if given == 0 { GENERATE } else { GENERATE + AFTER - given as u32 };
        let request = Request::greedy(prompt, max_tokens).tokens_only().named(key.name.clone());
        let submitted = submit(&mut self.engine, &request);
        self.sent.push(Sent { prompt_index, given, key, submitted });
    }

    /// Number of output tokens in a sequence of `tokens` tokens.
    fn given(&self, prompt_index: usize, tokens: u32) -> usize {
        tokens as usize - self.requests[prompt_index].prompt.len()
    }

    /// Forks a sequence, live or not, and submits a request that continues it.
    fn fork(&mut self, seen: &mut Seen) {
        let at = self.dice.below(self.sent.len());
        let (prompt_index, of, to) = (self.sent[at].prompt_index, self.sent[at].key.clone(), self.key());
        match self.engine.fork(&of, to.name) {
            Ok(info) => {
                seen.forks += 1;
                self.submit_prompt(prompt_index, self.given(prompt_index, info.tokens));
            }
            // Nothing of it has been computed yet, or it was refused.
            Err(error) => assert!(matches!(error, SequenceError::Unknown { .. }), "{}: {error}", self.case),
        }
    }

    fn save(&mut self) {
        let at = self.dice.below(self.sent.len());
        let (reply, answer) = oneshot::channel();
        self.engine.save(&self.sent[at].key, reply);
        self.saving.push((self.sent[at].prompt_index, answer));
    }

    /// Processes the snapshots that were completed meanwhile.
    fn collect(&mut self, seen: &mut Seen) {
        for (prompt_index, mut answer) in std::mem::take(&mut self.saving) {
            match answer.try_recv() {
                Ok(Ok(capture)) => {
                    seen.saves += 1;
                    self.saved.push((prompt_index, capture.into_snapshot()));
                }
                Ok(Err(SequenceError::Unknown { .. } | SequenceError::NoRoom { .. })) => {}
                Ok(Err(error)) => panic!("{}: {error}", self.case),
                Err(oneshot::error::TryRecvError::Empty) => self.saving.push((prompt_index, answer)),
                Err(error) => panic!("{}: {error}", self.case),
            }
        }
    }

    /// Restores a snapshot, and submits a request that continues it.
    fn restore(&mut self, seen: &mut Seen) {
        let at = self.dice.below(self.saved.len());
        let (prompt_index, snapshot) = self.saved.swap_remove(at);
        let key = self.key();
        match self.engine.restore(key, &snapshot) {
            Ok(_) => seen.restores += 1,
            // Live sequences hold too much.
            Err(error) => assert!(matches!(error, SequenceError::NoRoom { .. }), "{}: {error}", self.case),
        }
        self.submit_prompt(prompt_index, self.given(prompt_index, snapshot.tokens().len() as u32));
    }

    fn run(&mut self, seen: &mut Seen) {
        let mut left = 6 + self.dice.below(10);
        while left > 0 || self.engine.has_work() {
            while left > 0 && (!self.engine.has_work() || self.dice.below(3) == 0) {
                let prompt_index = self.dice.below(self.requests.len());
                self.submit_prompt(prompt_index, 0);
                left -= 1;
            }
            // Bounds the storm although forks are forked again.
            let open = self.sent.len() < MAX_REQUESTS;
            match self.dice.below(200) {
                0 | 1 => {
                    let at = self.dice.below(self.sent.len());
                    self.sent[at].submitted.id.into_iter().for_each(|id| self.engine.cancel(id));
                }
                2 | 3 if open => self.fork(seen),
                4 | 5 if open => self.save(),
                6..=9 if open && !self.saved.is_empty() => self.restore(seen),
                _ => {}
            }
            // A request that reads bytes of another one would get NaN in all further results.
            if self.dice.below(4) == 0 {
                seen.poisoned += self.engine.poison_unused().unwrap();
            }
            let outcome = self.engine.step(Instant::now()).unwrap();
            assert!(
                outcome != StepOutcome::Idle || !self.engine.has_work(),
                "{}: nothing is planned",
                self.case
            );
            self.collect(seen);
        }
        assert!(self.saving.is_empty(), "{}: a save has no answer", self.case);
    }

    fn check_outputs(&self, seen: &mut Seen) {
        assert_eq!(self.engine.load().kv_used, 0, "{}", self.case);
        for Sent { prompt_index, given, submitted, .. } in &self.sent {
            let case = format!("{}, prompt {prompt_index} and {given} tokens", self.case);
            let output = submitted.output();
            assert_eq!(output.failed, None, "{case}");
            let expected = &self.expected[*prompt_index].tokens[*given..];
            match &output.finished {
                Some(finished) => {
                    let len = if *given == 0 { GENERATE as usize } else { expected.len() };
                    assert_eq!(finished.reason, FinishReason::Length, "{case}");
                    assert_eq!(output.tokens, expected[..len], "{case}");
                    seen.cached += output.cached() as u64;
                }
                None => {
                    assert!(expected.starts_with(&output.tokens), "{case}");
                    seen.cancelled += 1;
                }
            }
        }
        seen.preempted += self.engine.metrics().preemptions.get();
    }
}

#[test]
fn a_storm_changes_no_token() {
    let mut seen = Seen::default();
    for model in TINY.into_iter().chain(QUANT) {
        let request = |prompt| Request::greedy(prompt, GENERATE + AFTER).tokens_only();
        let requests: Vec<Request> = prompts().into_iter().map(request).collect();
        let baseline = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
        let expected = one_by_one(&mut open(model, &baseline), &requests);
        // Windows hold more blocks at once with longer steps.
        let whole = EngineOptions { chunk: Some(0), ..options(model) };
        let longest = LONGEST + (GENERATE + AFTER) as usize;
        let smallest = cramped(model, &whole, longest).kv_bytes.unwrap();
        for seed in 0..if whole_matrix() { SEEDS.1 } else { SEEDS.0 } {
            let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
            let options = EngineOptions {
                kv_bytes: Some(smallest * dice.pick(&[4, 5, 6, 8, 12]) / 4),
                chunk: Some(dice.pick(&[1, 5, 16, 33, 64, 0])),
                max_rows: Some(dice.pick(&[8, 40, 200, 1024])),
                max_sequences: Some(dice.pick(&[2, 3, 6])),
                block_layout: dice.pick(&[BlockLayout::Paged, BlockLayout::Permuted { seed }]),
                ..options(model)
            };
            let mut storm = Storm {
                case: format!("{model}, seed {seed}"),
                dice,
                engine: open(model, &options),
                requests: &requests,
                expected: &expected,
                sent: Vec::new(),
                saving: Vec::new(),
                saved: Vec::new(),
                names: 0,
            };
            storm.run(&mut seen);
            storm.check_outputs(&mut seen);
        }
    }
    let Seen { preempted, cached, cancelled, forks, saves, restores, poisoned } = seen;
    assert!(preempted > 100 && cached > 10_000 && cancelled > 50, "{seen:?}");
    assert!(poisoned > 1 << 28, "{seen:?}");
    assert!(forks > 50 && saves > 50 && restores > 50, "{seen:?}");
    println!("{seen:?}");
}
