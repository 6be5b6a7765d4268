//! Draft tokens of a model's MTP head (`--spec draft-mtp`) change no bit. Caches, files and transfers contain
//! what they would contain without them.

use crate::exactness::{assert_same, same_twice};
use crate::harness::{
    Output, Request, cramped, one_by_one, open, open_on, options, path, prompt, run_to_end, submit, together,
    whole_matrix,
};
use crate::mtp_head_file::{Block, write};
use crate::simulated::{simulated, small};
use crate::snapshots::{generate, key, save};
use crate::stages::{Workers, max_shards};
use cuda::Arch;
use engine::engine::Engine;
use engine::kv_cache::BlockLayout;
use engine::snapshot::Snapshot;
use engine::speculation::SpeculativeMethod;
use kvasir_worker::Error;
use kvasir_worker::load::{self, EngineOptions};
use proto::message::Sampling;
use tempfile::TempDir;

const HYBRID: &str = "tiny/qwen35/qwen35-f32";
const GENERATE: u32 = 40;

/// A model of the set with an MTP head, named as in the harness.
struct Model {
    _folder: TempDir,
    name: String,
}

impl Model {
    fn new(arch: &str, block: Block) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let name = write(arch, block, folder.path()).with_extension("").display().to_string();
        Self { _folder: folder, name }
    }

    fn options(&self) -> EngineOptions {
        EngineOptions { speculative_method: SpeculativeMethod::MtpHead, ..options(HYBRID) }
    }

    fn drafting(&self, options: &EngineOptions, draft_len: u32) -> Engine {
        open(&self.name, options).with_draft_len(draft_len)
    }

    fn plain(&self, requests: &[Request]) -> Vec<Output> {
        let options = EngineOptions {
            speculative_method: SpeculativeMethod::Off,
            prefix_cache: false,
            ..self.options()
        };
        one_by_one(&mut open(&self.name, &options), requests)
    }
}

fn requests() -> Vec<Request> {
    let lens = [5, 16, 33, 47, 20, 64, 70, 1];
    lens.iter().zip(1..).map(|(len, seed)| Request::greedy(prompt(seed, *len), GENERATE)).collect()
}

/// (verified draft tokens, accepted draft tokens).
fn counts(output: &Output) -> (u32, u32) {
    let finished = output.finished.as_ref().unwrap();
    (finished.drafted_tokens, finished.accepted_tokens)
}

fn all(outputs: &[Output]) -> (u32, u32) {
    outputs.iter().map(counts).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

#[test]
fn draft_tokens_of_an_mtp_head_change_no_bit() {
    let mut preempted = 0;
    for (arch, block) in
        [("qwen35", Block::Telling), ("qwen35moe", Block::Whole), ("qwen3next", Block::Telling)]
    {
        let model = Model::new(arch, block);
        let requests = requests();
        let expected = model.plain(&requests);
        if block != Block::Telling {
            // The base model equals that of the file without the head.
            let name = format!("tiny/{arch}/{arch}-f32");
            assert_same(&name, &one_by_one(&mut open(&name, &options(&name)), &requests), &expected);
        }
        let (mut drafted, mut accepted) = (0, 0);
        let mut run = |case: &str, at_once: bool, options: EngineOptions| {
            let mut engine = model.drafting(&options, 4);
            let rounds =
                same_twice(&format!("{arch}, {block:?}: {case}"), &mut engine, &requests, &expected, at_once);
            let (all, right) = all(&rounds);
            (drafted, accepted) = (drafted + all, accepted + right);
            let metrics = engine.metrics();
            assert_eq!((metrics.drafted.get(), metrics.accepted.get()), (all.into(), right.into()), "{case}");
            assert_eq!(engine.load().kv_used, 0, "{arch}: {case}");
            rounds.iter().map(Output::preemptions).sum::<u32>()
        };
        run("alone", false, model.options());
        run("eight at once", true, model.options());
        run("chunks of 7", true, EngineOptions { chunk: Some(7), ..model.options() });
        run("no room for draft tokens", true, EngineOptions { max_rows: Some(9), ..model.options() });
        run("blocks of 64", true, EngineOptions { block_tokens: 64, ..model.options() });
        run("no prefix cache", true, EngineOptions { prefix_cache: false, ..model.options() });
        run("contiguous", true, EngineOptions { block_layout: BlockLayout::Contiguous, ..model.options() });
        preempted += run("preempted", true, cramped(&model.name, &model.options(), 140));
        assert!(drafted > accepted && drafted > 0, "{arch}: {accepted} of {drafted}");
        assert_eq!(accepted > drafted / 8, block == Block::Telling, "{arch}: {accepted} of {drafted}");
    }
    assert!(preempted > 0);
}

/// Draft tokens depend on the tokens alone. With chunks, and after a prefix from the cache, from another
/// worker or from an earlier attempt, as many are verified and accepted as when one worker computes
/// everything at once.
#[test]
fn draft_tokens_do_not_depend_on_where_the_caches_come_from() {
    let model = Model::new("qwen35", Block::Telling);
    for seed in [3, 11, 12] {
        let request = Request::greedy(prompt(seed, 75), GENERATE).tokens_only();
        let requests = std::slice::from_ref(&request);
        let mut engine = model.drafting(&EngineOptions { chunk: Some(0), ..model.options() }, 4);
        let first = one_by_one(&mut engine, requests).remove(0);
        let expected = counts(&first);
        assert!(expected.1 > 0, "{expected:?}");
        let again = one_by_one(&mut engine, requests).remove(0);
        assert_eq!((again.cached(), counts(&again)), (64, expected));
        let chunks = EngineOptions { chunk: Some(7), ..model.options() };
        assert_eq!(counts(&one_by_one(&mut model.drafting(&chunks, 4), requests)[0]), expected);
        let others: Vec<Request> =
            (20..24).map(|seed| Request::greedy(prompt(seed, 30), GENERATE).tokens_only()).collect();
        let crowd = [requests, &others].concat();
        let concurrent = together(&mut model.drafting(&model.options(), 4), &crowd).remove(0);
        assert_eq!((&concurrent.tokens, counts(&concurrent)), (&first.tokens, expected));
        // Where one attempt ended the next one continues, here or elsewhere. Its first token starts a round.
        for mut engine in [engine, model.drafting(&model.options(), 4)] {
            let resumed = Request { emitted: first.tokens[..17].to_vec(), ..request.clone() };
            let rest = one_by_one(&mut engine, &[resumed]).remove(0);
            assert_eq!(rest.tokens, first.tokens[17..]);
            assert!(counts(&rest).1 > 0);
        }
    }
}

/// Every byte of the caches after a generation is the same with and without draft tokens, however it was
/// computed, and another engine can continue from it.
#[test]
fn cached_bytes_are_a_function_of_the_tokens() {
    for (arch, block) in [("qwen35", Block::Random), ("qwen3next", Block::Telling)] {
        let model = Model::new(arch, block);
        for seed in [5, 6] {
            let saved = |options: EngineOptions, draft_len: u32, before: &[usize]| {
                let mut engine = model.drafting(&options, draft_len);
                for len in before {
                    generate(&mut engine, "before", prompt(seed, 60)[..*len].to_vec());
                }
                let tokens = generate(&mut engine, "r", prompt(seed, 60));
                (tokens, save(&mut engine, "r").unwrap(), engine)
            };
            let (tokens, expected, _) = saved(EngineOptions { chunk: Some(0), ..model.options() }, 0, &[]);
            let ways = [
                (model.options(), &[][..]),
                (EngineOptions { chunk: Some(7), ..model.options() }, &[][..]),
                (model.options(), &[60][..]),
                (model.options(), &[33, 49][..]),
            ];
            for (way, (options, before)) in ways.into_iter().enumerate() {
                let (got, snapshot, _) = saved(options, 4, before);
                assert_eq!(got, tokens, "{arch}, way {way}");
                assert!(snapshot == expected, "{arch}, way {way}: other bytes");
            }
            // It continues in another engine as in one that computed it.
            let next = Request::greedy([&tokens[..], &prompt(9, 20)].concat(), GENERATE).tokens_only();
            let output =
                one_by_one(&mut model.drafting(&model.options(), 4), std::slice::from_ref(&next)).remove(0);
            let mut second = model.drafting(&model.options(), 4);
            let snapshot = Snapshot::from_bytes(&expected.to_bytes().unwrap(), &second.origin()).unwrap();
            second.restore(key("again"), &snapshot).unwrap();
            let restored = one_by_one(&mut second, &[next]).remove(0);
            assert!(restored.cached() > 0);
            assert_eq!(
                (restored.tokens.clone(), counts(&restored)),
                (output.tokens.clone(), counts(&output))
            );
            // Without the head the caches are of another origin.
            let other = open(
                &model.name,
                &EngineOptions { speculative_method: SpeculativeMethod::Off, ..model.options() },
            );
            assert!(Snapshot::from_bytes(&expected.to_bytes().unwrap(), &other.origin()).is_err());
        }
    }
}

#[test]
fn draft_tokens_change_no_draw_choice_or_cancellation() {
    let model = Model::new("qwen35", Block::Telling);
    let choice = |seed, together| Request {
        sampling: Sampling { temperature: 0.4, top_p: 0.9, seed, ..Sampling::default() },
        together,
        ..requests().remove(3).tokens_only()
    };
    let apart: Vec<Request> = (1..4).map(|seed| choice(seed, 1)).collect();
    let expected = model.plain(&apart);
    for choices in [apart, (1..4).map(|seed| choice(seed, 3)).collect()] {
        let got = together(&mut model.drafting(&model.options(), 4), &choices);
        let same = expected.iter().zip(&got).all(|(expected, got)| expected.tokens == got.tokens);
        assert!(same && all(&got).1 > 0, "{:?}", all(&got));
    }
    let mut engine = model.drafting(&model.options(), 4);
    let submitted: Vec<_> = requests().iter().map(|request| submit(&mut engine, request)).collect();
    for submitted in submitted.iter().step_by(2) {
        for _ in 0..3 {
            engine.step(std::time::Instant::now()).unwrap();
        }
        engine.cancel(submitted.id.unwrap());
        engine.check().unwrap();
    }
    run_to_end(&mut engine);
    assert_eq!(engine.load().kv_used, 0);
    // With its own choice it drafts where that pays, and the tokens are the same.
    let got = together(&mut open(&model.name, &model.options()), &requests());
    assert_same("what pays", &model.plain(&requests()), &got);
}

/// On the CUDA backend, kernel for kernel: as many draft tokens are accepted as on the CPU.
#[test]
fn the_simulated_device_drafts_like_the_cpu() {
    let model = Model::new("qwen35", Block::Telling);
    let options = EngineOptions { speculative_method: SpeculativeMethod::MtpHead, ..small(HYBRID) };
    let requests = [14, 15].map(|seed| Request::greedy(prompt(seed, seed as usize), 12).tokens_only());
    let arch = Arch::CHECKED[1];
    let mut device = open_on(&model.name, &options, simulated(arch, &options)).with_draft_len(3);
    let (got, expected) =
        (together(&mut device, &requests), together(&mut model.drafting(&options, 3), &requests));
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!((&got.tokens, counts(got)), (&expected.tokens, counts(expected)));
    }
    assert!(all(&got).1 > 0);
}

#[test]
fn a_model_without_an_mtp_head_is_refused() {
    let refused = |loaded: Result<(), Error>| match loaded {
        Err(Error::Engine(engine::Error::Config { option: "spec", reason })) => reason,
        other => panic!("{other:?}"),
    };
    for (model, key) in [(HYBRID, "qwen35.nextn_predict_layers"), ("tiny/llama/llama-f32", "llama")] {
        let options = EngineOptions { speculative_method: SpeculativeMethod::MtpHead, ..options(model) };
        let reason = refused(load::open(&path(model), &options, &mut |_, _| {}).map(drop));
        assert!(reason.contains(key), "{reason}");
    }
    let workers = Workers::start(HYBRID, 1, &options(HYBRID));
    let options = EngineOptions { speculative_method: SpeculativeMethod::MtpHead, ..options(HYBRID) };
    let reason = refused(workers.engine(HYBRID, &options).map(drop));
    assert!(reason.contains("qwen35.nextn_predict_layers"), "{reason}");
}

/// The head is at the last stage, with its caches and its input from the position before.
#[test]
fn draft_tokens_of_an_mtp_head_at_the_last_stage_change_no_bit() {
    let mut preempted = 0;
    for (arch, block) in
        [("qwen35", Block::Telling), ("qwen35moe", Block::Whole), ("qwen3next", Block::Telling)]
    {
        let model = Model::new(arch, block);
        let requests = requests();
        let expected = model.plain(&requests);
        let max_shards = max_shards(&model.name).min(3);
        let min_shards = if whole_matrix() { 2 } else { max_shards };
        for shards in min_shards..=max_shards {
            let workers = Workers::start(&model.name, shards - 1, &options(HYBRID));
            let (mut drafted, mut accepted) = (0, 0);
            let mut run = |case: &str, at_once: bool, options: EngineOptions| {
                let case = format!("{arch} over {shards}, {block:?}: {case}");
                let mut engine = workers.next_engine(&model.name, &options).with_draft_len(4);
                let rounds = same_twice(&case, &mut engine, &requests, &expected, at_once);
                let (all, right) = all(&rounds);
                (drafted, accepted) = (drafted + all, accepted + right);
                assert_eq!(engine.load().kv_used, 0, "{case}");
                rounds.iter().map(Output::preemptions).sum::<u32>()
            };
            run("alone", false, model.options());
            run("eight at once", true, model.options());
            run("chunks of 7", true, EngineOptions { chunk: Some(7), ..model.options() });
            run("no room for draft tokens", true, EngineOptions { max_rows: Some(9), ..model.options() });
            run("no prefix cache", true, EngineOptions { prefix_cache: false, ..model.options() });
            preempted += run("preempted", true, cramped(&model.name, &model.options(), 140));
            assert!(drafted > accepted && drafted > 0, "{arch}: {accepted} of {drafted}");
            assert_eq!(accepted > drafted / 8, block == Block::Telling, "{arch}: {accepted} of {drafted}");
        }
    }
    assert!(preempted > 0);
}

/// As many draft tokens are verified and accepted as in one worker, and every byte of the caches is the same:
/// the other one can continue from a snapshot.
#[test]
fn the_last_stage_caches_and_drafts_like_one_worker() {
    for arch in ["qwen35", "qwen3next"] {
        let model = Model::new(arch, Block::Telling);
        for shards in 2..=max_shards(&model.name).min(3) {
            let workers = Workers::start(&model.name, shards - 1, &options(HYBRID));
            for seed in [3, 11] {
                let case = format!("{arch} over {shards}, prompt {seed}");
                let request = Request::greedy(prompt(seed, 75), GENERATE).tokens_only();
                let requests = std::slice::from_ref(&request);
                let mut one = model.drafting(&model.options(), 4);
                let mut cut = workers.next_engine(&model.name, &model.options()).with_draft_len(4);
                for again in [false, true] {
                    let (expected, got) =
                        (one_by_one(&mut one, requests).remove(0), one_by_one(&mut cut, requests).remove(0));
                    assert_eq!(
                        (&got.tokens, got.cached()),
                        (&expected.tokens, expected.cached()),
                        "{case}, again: {again}"
                    );
                    assert_eq!(counts(&got), counts(&expected), "{case}, again: {again}");
                    assert!(counts(&got).1 > 0, "{case}");
                }
                let tokens = generate(&mut one, "r", prompt(seed, 60));
                assert_eq!(generate(&mut cut, "r", prompt(seed, 60)), tokens, "{case}");
                let file = save(&mut one, "r").unwrap();
                assert!(save(&mut cut, "r").unwrap() == file, "{case}: other bytes");
                // Restored in one worker it drafts as in a pipeline.
                drop(cut);
                let next = Request::greedy([&tokens[..], &prompt(9, 20)].concat(), GENERATE).tokens_only();
                let next = std::slice::from_ref(&next);
                let expected = one_by_one(&mut one, next).remove(0);
                let mut cut = workers.next_engine(&model.name, &model.options()).with_draft_len(4);
                let file = Snapshot::from_bytes(&file.to_bytes().unwrap(), &cut.origin()).unwrap();
                cut.restore(key("again"), &file).unwrap();
                let got = one_by_one(&mut cut, next).remove(0);
                assert_eq!((&got.tokens, got.cached()), (&expected.tokens, expected.cached()), "{case}");
                assert_eq!(counts(&got), counts(&expected), "{case}");
            }
        }
    }
}
