//! Sequences are saved, restored, forked and cut. Afterwards they continue as if nothing had happened, bit by
//! bit.

use crate::harness::{
    Output, ROOT, Request, cramped, one_by_one, open, options, prompt, run_to_end, submit, together,
};
use engine::decoder::{CacheKind, StateType};
use engine::engine::Engine;
use engine::engine::resume::SequenceKey;
use engine::snapshot::{Snapshot, SnapshotError};
use kernels::backend::KvType;
use kvasir_worker::load::EngineOptions;
use proto::block::BlockId;
use proto::ids::RequestId;
use proto::sequence::{SequenceError, SequenceName};
use std::time::Instant;
use tokio::sync::oneshot;

/// One model for every kind of cache: full, sliding (also with sinks, shared KV and two head sizes),
/// delta-net and Mamba-2 states, in f32 and in other types.
pub(crate) const KINDS: [&str; 12] = [
    "tiny/llama/llama-f32",
    "tiny/gemma3/gemma3-f32",
    "tiny/gpt-oss/gpt-oss-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "hf/falcon_h1",
    "hf/lfm2_moe",
    "tiny/qwen35/qwen35-f32+bf16",
    "tiny/granitehybrid/granitehybrid-f32+bf16",
    "tiny/gemma4/gemma4-f32",
    "tiny/llama/llama-f32+kv:fp8/q4_0",
    "tiny/gpt-oss/gpt-oss-f32+kv:q4_0/q8_0",
];
const GENERATE: u32 = 12;

fn name(request: &str) -> SequenceName {
    SequenceName { request: RequestId::new(request).unwrap(), choice: 0 }
}

pub(crate) fn key(request: &str) -> SequenceKey {
    SequenceKey { root: ROOT, name: name(request) }
}

pub(crate) fn save(engine: &mut Engine, request: &str) -> Result<Snapshot, SequenceError> {
    let (reply, mut answer) = oneshot::channel();
    engine.save(&key(request), reply);
    run_to_end(engine);
    Ok(answer.try_recv().expect("an answer")?.into_snapshot())
}

pub(crate) fn generate(engine: &mut Engine, request: &str, prompt: Vec<u32>) -> Vec<u32> {
    let output =
        together(engine, &[Request::greedy(prompt.clone(), GENERATE).named(name(request))]).remove(0);
    assert_eq!(output.failed, None);
    [prompt, output.tokens].concat()
}

/// The continuation of `tokens` without sharing: the logits of every position.
pub(crate) fn undisturbed(model: &str, tokens: &[u32]) -> Output {
    let options = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
    one_by_one(&mut open(model, &options), &[Request::greedy(tokens.to_vec(), GENERATE)]).remove(0)
}

/// Continues after `tokens`: at most one unit is computed again, and no bit differs.
pub(crate) fn assert_continues(
    case: &str,
    engine: &mut Engine,
    tokens: &[u32],
    expected: &Output,
    cached: usize,
) {
    let output = together(engine, &[Request::greedy(tokens.to_vec(), GENERATE)]).remove(0);
    assert_eq!(output.failed, None, "{case}");
    assert_eq!(output.cached(), cached, "{case}");
    assert_eq!(output.tokens, expected.tokens, "{case}");
    assert!(output.logits.len() == tokens.len() - cached + GENERATE as usize - 1, "{case}");
    for (position, row) in &output.logits {
        assert!(*row == expected.logits[position], "{case}: logits at {position} differ");
    }
}

#[test]
fn a_restored_sequence_continues_bit_by_bit() {
    for model in KINDS {
        for block_tokens in [16, 64] {
            let case = format!("{model}, blocks of {block_tokens}");
            let options = EngineOptions { block_tokens, ..options(model) };
            let mut first = open(model, &options);
            let tokens = generate(&mut first, "r", prompt(3, 333));
            let position = (tokens.len() - 1) / 16 * 16;
            let file = save(&mut first, "r").unwrap().to_bytes().unwrap();

            let mut second = open(model, &options);
            let snapshot = Snapshot::from_bytes(&file, &second.origin()).unwrap();
            assert_eq!((snapshot.tokens(), snapshot.position() as usize), (&tokens[..], position), "{case}");
            let restored = second.restore(key("again"), &snapshot).unwrap();
            assert_eq!(
                (restored.tokens as usize, restored.cached as usize),
                (tokens.len(), position),
                "{case}"
            );
            assert_eq!(second.metrics().steps.get(), 0, "{case}: nothing was computed to restore it");
            let expected = undisturbed(model, &tokens);
            assert_continues(&case, &mut second, &tokens, &expected, position);
            // It can be saved again unchanged, and the first engine still has it.
            assert_eq!(save(&mut second, "again").unwrap(), snapshot, "{case}");
            assert_continues(&case, &mut first, &tokens, &expected, position);
        }
    }
}

#[test]
fn only_what_a_continuation_can_read_is_saved() {
    for model in KINDS {
        let mut engine = open(model, &options(model));
        let tokens = generate(&mut engine, "r", prompt(4, 400));
        let snapshot = save(&mut engine, "r").unwrap();
        let position = snapshot.position() as usize;
        assert_eq!(position, (tokens.len() - 1) / 16 * 16);
        for (index, group) in engine.decoder().groups().iter().enumerate() {
            let pieces = snapshot.pieces().filter(|(piece, _)| piece.group as usize == index).count();
            let expected_pieces = match group.kind {
                CacheKind::Full => position / 16..=position / 16,
                // The window of the next token, in whole blocks.
                CacheKind::Sliding(window) => (window - 1) / 16..=(window - 1).div_ceil(16) + 1,
                CacheKind::State => 1..=1,
            };
            assert!(expected_pieces.contains(&pieces), "{model}: {pieces} pieces of {:?}", group.kind);
        }
    }
}

#[test]
fn an_evicted_sequence_is_computed_again_to_be_saved() {
    for model in KINDS {
        let options = cramped(model, &options(model), 400);
        let mut engine = open(model, &options);
        let tokens = generate(&mut engine, "r", prompt(5, 200));
        let saved = save(&mut engine, "r").unwrap();
        for seed in 6..12 {
            generate(&mut engine, "other", prompt(seed, 330));
        }
        let steps = engine.metrics().steps.get();
        assert_eq!(save(&mut engine, "r").unwrap(), saved, "{model}: the same bytes");
        assert!(engine.metrics().steps.get() > steps, "{model}: it was gone");
        assert_eq!(saved.tokens(), tokens);
        assert_eq!(engine.load().kv_used, 0, "{model}");
    }
}

#[test]
fn a_live_sequence_is_saved_at_its_present_end() {
    for model in KINDS {
        let mut engine = open(model, &options(model));
        crate::harness::submit(&mut engine, &Request::greedy(prompt(8, 70), 60).named(name("live")));
        for _ in 0..30 {
            engine.step(std::time::Instant::now()).unwrap();
        }
        let (reply, mut answer) = oneshot::channel();
        engine.save(&key("live"), reply);
        assert!(matches!(engine.fork(&key("x"), name("live")), Err(SequenceError::Unknown { .. })));
        assert_eq!(engine.reset(&key("live"), 5), Err(SequenceError::Live(name("live"))));
        assert_eq!(engine.forget(&key("live")), Err(SequenceError::Live(name("live"))));
        assert!(engine.sequences(ROOT).iter().all(|sequence| sequence.live));
        run_to_end(&mut engine);
        let snapshot = answer.try_recv().unwrap().unwrap().into_snapshot();
        let len = snapshot.tokens().len();
        assert!((90..110).contains(&len), "{model}: {len}");
        assert_eq!(snapshot.position() as usize, (len - 1) / 16 * 16);
        let mut other = open(model, &options(model));
        other.restore(key("live"), &snapshot).unwrap();
        let expected = undisturbed(model, snapshot.tokens());
        assert_continues(model, &mut other, snapshot.tokens(), &expected, snapshot.position() as usize);

        generate(&mut engine, "short", prompt(9, 3));
        let short = save(&mut engine, "short").unwrap();
        assert_eq!((short.tokens().len(), short.position(), short.cache_bytes()), (15, 0, 0));
        assert_eq!(other.restore(key("short"), &short).unwrap().tokens, 15);
    }
}

#[test]
fn states_of_another_type_are_refused_by_name() {
    let narrow = |tau| {
        let model = "tiny/qwen35/qwen35-f32";
        open(model, &EngineOptions { state_type: StateType::AutoBf16 { tau }, ..options(model) })
    };
    let mut engines =
        [open("tiny/qwen35/qwen35-f32", &options("tiny/qwen35/qwen35-f32")), narrow(4), narrow(5)];
    let files = engines.each_mut().map(|engine| {
        generate(engine, "r", prompt(3, 100));
        save(engine, "r").unwrap().to_bytes().unwrap()
    });
    for (from, file) in files.iter().enumerate() {
        for (to, engine) in engines.iter().enumerate() {
            match Snapshot::from_bytes(file, &engine.origin()) {
                Ok(_) => assert_eq!(from, to),
                Err(error) => {
                    assert!(matches!(error, SnapshotError::Other { field: "numeric class", .. }), "{error}");
                    assert!(from != to && error.to_string().contains("/state-bf16.1-tau"), "{error}");
                }
            }
        }
    }
    assert!(files[1].len() < files[0].len());
    // Where no head forgets fast enough, or there is none, the class is that of f32 states.
    let class = |model: &str, state_type| {
        let options = EngineOptions { state_type, ..options(model) };
        open(model, &options).origin().numeric_class.clone()
    };
    let auto = StateType::AutoBf16 { tau: StateType::TAU };
    assert_eq!(class(KINDS[0], auto), class(KINDS[0], StateType::F32));
    let qwen = "tiny/qwen3next/qwen3next-f32";
    assert_ne!(class(qwen, auto), class(qwen, StateType::F32));
}

#[test]
fn a_foreign_or_forged_snapshot_is_refused_and_changes_nothing() {
    for model in KINDS {
        let mut engine = open(model, &options(model));
        generate(&mut engine, "r", prompt(3, 100));
        let snapshot = save(&mut engine, "r").unwrap();
        let file = snapshot.to_bytes().unwrap();
        for at in [0, 9, 40, file.len() / 2, file.len() - 1] {
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            assert!(Snapshot::from_bytes(&damaged, &engine.origin()).is_err(), "{model}: byte {at}");
        }
        let other_kv = EngineOptions { kv_type: KvType::F16.into(), ..options(model) };
        let refused = Snapshot::from_bytes(&file, &open(model, &other_kv).origin());
        assert!(matches!(refused, Err(SnapshotError::Other { field: "numeric class", .. })), "{refused:?}");
        let other_model = if model.starts_with(KINDS[0]) { KINDS[1] } else { KINDS[0] };
        let refused = Snapshot::from_bytes(&file, &open(other_model, &options(other_model)).origin());
        assert!(matches!(refused, Err(SnapshotError::Other { field: "model", .. })), "{refused:?}");

        // A well-formed but wrong header: pieces missing, a position inside a unit, tokens out of range.
        let pieces = || snapshot.pieces().map(|(piece, bytes)| (piece.group, piece.token, bytes.to_vec()));
        let forged = |tokens: &[u32], position, skip| {
            Snapshot::new((*engine.origin()).clone(), tokens.to_vec(), position, pieces().skip(skip))
        };
        let tokens = snapshot.tokens();
        let forgeries = [
            forged(tokens, snapshot.position(), 1),
            forged(tokens, snapshot.position() - 16, 0),
            forged(tokens, snapshot.position() - 1, 0),
            forged(&tokens[..20], snapshot.position(), 0),
            forged(&[u32::MAX; 112], snapshot.position(), 0),
            forged(&[], 0, 0),
        ];
        let before = (engine.sequences(ROOT), engine.load().kv_used);
        for (index, forgery) in forgeries.iter().enumerate() {
            let refused = engine.restore(key("new"), forgery).unwrap_err();
            let is_refusal =
                matches!(refused, SequenceError::NotThisSnapshot(_) | SequenceError::InvalidField { .. });
            assert!(is_refusal, "{model}: lie {index}: {refused}");
            assert_eq!((engine.sequences(ROOT), engine.load().kv_used), before, "{model}: lie {index}");
        }
        // Without room the restore is refused, and everything else remains.
        let small = cramped(model, &options(model), 40);
        let refused = open(model, &small).restore(key("new"), &snapshot);
        assert!(
            matches!(refused, Err(SequenceError::NoRoom { .. } | SequenceError::InvalidField { .. })),
            "{model}: {refused:?}"
        );
    }
}

#[test]
fn forks_share_and_a_reset_frees_only_unshared_units() {
    for model in KINDS {
        let mut engine = open(model, &options(model));
        let tokens = generate(&mut engine, "r", prompt(12, 300));
        let position = (tokens.len() - 1) / 16 * 16;
        let fork = engine.fork(&key("r"), name("fork")).unwrap();
        assert_eq!((fork.tokens as usize, fork.cached as usize), (tokens.len(), position), "{model}");
        let expected = undisturbed(model, &tokens);

        // The fork still uses the tokens, so they stay cached.
        assert_eq!(engine.reset(&key("r"), 100).unwrap().tokens, 100);
        assert_continues(model, &mut engine, &tokens, &expected, position);
        // A continuation after the cut diverges from the fork.
        let cut = undisturbed(model, &tokens[..100]);
        let output = together(&mut engine, &[Request::greedy(tokens[..100].to_vec(), GENERATE)]).remove(0);
        assert_eq!(output.tokens, cut.tokens, "{model}");
        assert!(output.logits.iter().all(|(position, row)| *row == cut.logits[position]), "{model}");

        // If no other sequence uses the tokens, they are gone down to the cut.
        let mut engine = open(model, &options(model));
        assert_eq!(generate(&mut engine, "r", prompt(12, 300)), tokens);
        engine.fork(&key("r"), name("fork")).unwrap();
        engine.reset(&key("r"), 100).unwrap();
        assert_eq!(engine.sequences(ROOT)[0].cached as usize, position, "{model}: the fork has it");
        assert!(matches!(engine.reset(&key("fork"), 500), Err(SequenceError::InvalidField { .. })));
        engine.reset(&key("fork"), 100).unwrap();
        assert_eq!(engine.sequences(ROOT).iter().map(|s| s.tokens).collect::<Vec<_>>(), [100, 100]);
        let again = together(&mut engine, &[Request::greedy(tokens.clone(), 1)]).remove(0);
        assert!(again.cached() <= 96, "{model}: {} tokens are still there", again.cached());
        assert!(engine.forget(&key("fork")).unwrap() && !engine.forget(&key("fork")).unwrap());
        assert!(matches!(engine.reset(&key("fork"), 1), Err(SequenceError::Unknown { .. })));

        // To nothing: the name stays, the tokens are gone, and the next request starts over.
        let mut engine = open(model, &options(model));
        assert_eq!(generate(&mut engine, "r", prompt(12, 300)), tokens);
        let emptied = engine.reset(&key("r"), 0).unwrap();
        assert_eq!((emptied.tokens, emptied.cached), (0, 0), "{model}");
        let over = together(&mut engine, &[Request::greedy(tokens.clone(), 1)]).remove(0);
        assert_eq!(over.cached(), 0, "{model}");
    }
}

#[test]
fn a_name_is_seen_by_its_own_tenant_only() {
    let model = KINDS[0];
    let mut engine = open(model, &options(model));
    generate(&mut engine, "r", prompt(1, 50));
    let root = proto::block::BlockId([8; 16]);
    let foreign = SequenceKey { root, name: name("r") };
    assert!(engine.sequences(root).is_empty() && engine.sequences(ROOT).len() == 1);
    assert!(matches!(engine.fork(&foreign, name("s")), Err(SequenceError::Unknown { .. })));
    let (reply, mut answer) = oneshot::channel();
    engine.save(&foreign, reply);
    assert!(matches!(answer.try_recv().unwrap(), Err(SequenceError::Unknown { .. })));
}

#[test]
fn the_progress_of_a_prompt_is_told_by_name() {
    let model = "tiny/llama/llama-f32";
    let mut engine = open(model, &EngineOptions { chunk: Some(32), ..options(model) });
    generate(&mut engine, "before", prompt(1, 64));
    let request = [prompt(1, 64), prompt(2, 100)].concat();
    let _sequence = submit(&mut engine, &Request::greedy(request, 4).named(name("running")));
    let mut told = Vec::new();
    for _ in 0..10 {
        told.extend(engine.prompt_progress(&key("running")));
        engine.step(Instant::now()).unwrap();
    }
    assert!(told.iter().all(|progress| progress.prompt == 164), "{told:?}");
    let computed: Vec<u32> = told.iter().map(|progress| progress.computed).collect();
    assert!(computed.is_sorted() && computed.contains(&164), "{computed:?}");
    // With the cached tokens, after the first step.
    assert!(computed.iter().any(|&computed| (64..164).contains(&computed)), "{computed:?}");
    let elsewhere = SequenceKey { root: BlockId([9; 16]), name: name("running") };
    assert_eq!(engine.prompt_progress(&elsewhere), None);
    run_to_end(&mut engine);
    assert_eq!(engine.prompt_progress(&key("running")), None);
}
