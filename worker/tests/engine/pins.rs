//! Prefixes that are computed ahead and pinned.

use crate::harness::{ROOT, Request, cramped, open, options, prompt, run_to_end, together};
use engine::engine::Engine;
use kvasir_worker::load::EngineOptions;
use proto::block::BlockId;
use proto::sequence::{PinInfo, SequenceError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

const KINDS: [&str; 6] = [
    "tiny/llama/llama-f32",
    "tiny/gemma3/gemma3-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "hf/falcon_h1",
    "hf/lfm2_moe",
];

fn pin(
    engine: &mut Engine,
    now: Instant,
    tokens: &[u32],
    ttl: Option<Duration>,
) -> Result<PinInfo, SequenceError> {
    let (reply, mut answer) = oneshot::channel();
    engine.pin(now, ROOT, tokens, ttl, reply);
    run_to_end(engine);
    answer.try_recv().expect("an answer")
}

fn cached(engine: &mut Engine, prefix: &[u32], seed: u64) -> usize {
    let prompt = [prefix, &prompt(seed, 9)].concat();
    together(engine, &[Request::greedy(prompt, 1)]).remove(0).cached()
}

fn overload(engine: &mut Engine, seed: u64) {
    for seed in seed..seed + 8 {
        together(engine, &[Request::greedy(prompt(seed, 200), 4).tokens_only()]);
    }
}

#[test]
fn a_pinned_prefix_stays_cached_under_load_until_its_time_is_up() {
    for model in KINDS {
        let options = EngineOptions { pin_bytes: Some(u64::MAX), ..cramped(model, &options(model), 400) };
        let mut engine = open(model, &options);
        let start = Instant::now();
        let prefix = prompt(1, 100);
        let info = pin(&mut engine, start, &prefix, Some(Duration::from_secs(3600))).unwrap();
        assert_eq!(info.tokens, 96, "{model}");
        assert!((1..=3_600_000).contains(&info.ttl_ms), "{model}: {}", info.ttl_ms);
        assert_eq!(engine.load().kv_used, info.pinned_bytes, "{model}: nothing else is held");
        assert_eq!(cached(&mut engine, &prefix, 50), 96, "{model}: the first request hits");
        overload(&mut engine, 100);
        assert_eq!(cached(&mut engine, &prefix, 51), 96, "{model}");
        // Pinned again: the same pin with a longer time.
        let renewed = pin(&mut engine, start, &prefix, Some(Duration::from_secs(7200))).unwrap();
        assert_eq!((renewed.pin, renewed.pinned_bytes), (info.pin, info.pinned_bytes), "{model}");
        assert_eq!(engine.pins(start, ROOT).len(), 1, "{model}");
        assert_eq!(engine.pins(start, BlockId([9; 16])), [], "{model}");
        // Its time is up.
        assert_eq!(engine.pins(start + Duration::from_secs(7200), ROOT), [], "{model}");
        overload(&mut engine, 200);
        assert_eq!(cached(&mut engine, &prefix, 52), 0, "{model}");
    }
}

#[test]
fn the_pin_budget_is_kept_and_unpinning_frees_it() {
    for model in KINDS {
        let now = Instant::now();
        let mut engine = open(model, &options(model));
        let one = pin(&mut engine, now, &prompt(1, 160), None).unwrap();
        assert_eq!(one.ttl_ms, 0);
        let tight = EngineOptions { pin_bytes: Some(one.pinned_bytes), ..options(model) };
        let mut engine = open(model, &tight);
        let first = pin(&mut engine, now, &prompt(1, 160), None).unwrap();
        match pin(&mut engine, now, &prompt(2, 160), None) {
            Err(SequenceError::OverBudget { limit, wanted, .. }) => {
                assert_eq!(limit, one.pinned_bytes, "{model}");
                assert!(wanted > limit, "{model}");
            }
            other => panic!("{model}: {other:?}"),
        }
        let foreign = engine.unpin(now, BlockId([9; 16]), first.pin);
        assert!(matches!(foreign, Err(SequenceError::Unknown { .. })), "{model}");
        engine.unpin(now, ROOT, first.pin).unwrap();
        assert!(engine.unpin(now, ROOT, first.pin).is_err(), "{model}");
        pin(&mut engine, now, &prompt(2, 160), None).unwrap();
        for bad in [&prompt(1, 15)[..], &[], &[u32::MAX; 32]] {
            assert!(matches!(pin(&mut engine, now, bad, None), Err(SequenceError::InvalidField { .. })));
        }
    }
}

#[test]
fn a_pin_without_a_receiver_is_not_computed() {
    let model = KINDS[0];
    let mut engine = open(model, &options(model));
    let (reply, answer) = oneshot::channel();
    engine.pin(Instant::now(), ROOT, &prompt(1, 160), None, reply);
    drop(answer);
    run_to_end(&mut engine);
    assert_eq!(engine.metrics().steps.get(), 0);
    assert!(!engine.has_work() && engine.pins(Instant::now(), ROOT).is_empty());
}
