//! The caches of a replica of several stages equal those of one worker, byte by byte. Sequences are saved,
//! restored, brought back from tiers and pulled between replicas with other stage boundaries.

use crate::harness::{Request, one_by_one, open, options, run_to_end, submit, submit_pulling};
use crate::pulls::{self, Direct, Shared, patient};
use crate::snapshots::{self, assert_continues, generate, key, save};
use crate::stages::{Workers, max_shards};
use crate::tiers::{self, base_request, disk, evict, finish, host, pieces, small};
use engine::Error;
use engine::engine::Engine;
use engine::snapshot::Snapshot;
use engine::tiers::TiersConfig;
use kvasir_worker::load::EngineOptions;
use proto::sequence::SequenceError;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// A copy budget per step that is too small for every sequence here.
const FEW: u64 = 5_000;

/// A replica of several stages, or one worker. It copies a few bytes at a time.
struct Stages {
    engine: Engine,
    _workers: Option<Workers>,
}

fn stages(model: &str, count: usize, options: &EngineOptions) -> Stages {
    if count == 1 {
        return Stages { engine: open(model, options).with_copy_bytes(FEW), _workers: None };
    }
    let workers = Workers::start(model, count - 1, options);
    let engine = workers.engine(model, options).unwrap().with_copy_bytes(FEW);
    Stages { engine, _workers: Some(workers) }
}

#[test]
fn a_sequence_continues_bit_by_bit_with_any_stage_boundaries() {
    for model in snapshots::KINDS {
        for block_tokens in [16, 64] {
            let options = EngineOptions { block_tokens, ..options(model) };
            let max_shards = max_shards(model).min(3);
            let prompt = crate::harness::prompt(3, 333);
            let mut files: Vec<Vec<u8>> = Vec::new();
            for count in 1..=max_shards {
                let mut saver = stages(model, count, &options);
                let tokens = generate(&mut saver.engine, "r", prompt.clone());
                files.push(save(&mut saver.engine, "r").unwrap().to_bytes().unwrap());
                assert!(files[0] == files[count - 1], "{model} over {count}: another file");
                if count == max_shards {
                    // A snapshot from one replica continues in all others.
                    let expected = snapshots::undisturbed(model, &tokens);
                    for count in 1..=max_shards {
                        let case = format!(
                            "{model}, blocks of {block_tokens}, saved over {max_shards}, restored over {count}"
                        );
                        let mut other = stages(model, count, &options);
                        let snapshot = Snapshot::from_bytes(&files[0], &other.engine.origin()).unwrap();
                        other.engine.restore(key("again"), &snapshot).unwrap();
                        let position = (tokens.len() - 1) / 16 * 16;
                        assert_eq!(other.engine.metrics().steps.get(), 0, "{case}");
                        assert_continues(&case, &mut other.engine, &tokens, &expected, position);
                        assert!(save(&mut other.engine, "again").unwrap() == snapshot, "{case}");
                        assert_eq!(other.engine.load().kv_used, 0, "{case}");
                        other.engine.check().unwrap();
                    }
                }
            }
        }
    }
}

/// Steps in flight need more states than one step: twice those of one worker.
fn roomier(model: &str, tiers: TiersConfig) -> EngineOptions {
    let options = small(model, 16, tiers);
    EngineOptions { kv_bytes: options.kv_bytes.map(|bytes| 2 * bytes), ..options }
}

#[test]
fn tiers_of_a_replica_bring_back_what_was_evicted_and_serve_one_worker_too() {
    for model in tiers::KINDS {
        let expected = tiers::undisturbed(model, &base_request());
        let max_shards = max_shards(model).min(3);
        let mut replica = stages(model, max_shards, &roomier(model, host(64 << 20)));
        finish(&mut replica.engine, &[base_request()]);
        evict(&mut replica.engine);
        let output = finish(&mut replica.engine, &[base_request()]).remove(0);
        assert_eq!((output.cached(), replica.engine.metrics().tiers.hits.get()), (192, 1), "{model}");
        tiers::assert_same(model, &output, &expected);
        drop(replica);

        let dir = tempfile::tempdir().unwrap();
        let options = roomier(model, disk(dir.path(), 0));
        for count in [max_shards, 1, 2, 1] {
            let case = format!("{model}, files for {count} stages");
            let mut next = stages(model, count, &options);
            let output = finish(&mut next.engine, &[base_request()]).remove(0);
            let first = next.engine.metrics().tiers.hits.get() == 0;
            assert_eq!(
                (output.cached(), first),
                if count == max_shards && first { (0, true) } else { (192, false) },
                "{case}"
            );
            tiers::assert_same(&case, &output, &expected);
        }
        // Damaged pieces are computed again.
        for path in pieces(dir.path()) {
            let mut bytes = std::fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            std::fs::write(path, bytes).unwrap();
        }
        let mut next = stages(model, 2, &options);
        let output = finish(&mut next.engine, &[base_request()]).remove(0);
        assert_eq!(output.cached(), 0, "{model}");
        assert!(next.engine.metrics().tiers.load_failures.get() > 0, "{model}");
        tiers::assert_same(model, &output, &expected);
    }
}

#[test]
fn prefixes_are_pulled_between_replicas_with_other_stage_boundaries() {
    for model in tiers::KINDS {
        let expected = tiers::undisturbed(model, &base_request());
        let max_shards = max_shards(model).min(3);
        for (from, to) in [(1, 2), (2, 1), (2, max_shards)] {
            let case = format!("{model}, from {from} stages to {to}");
            let options = patient(model, 16);
            let Stages { mut engine, _workers } = stages(model, from, &options);
            one_by_one(&mut engine, &[base_request()]);
            let holder: Shared = Arc::new(Mutex::new(engine));
            let mut puller = stages(model, to, &options);
            let submitted =
                submit_pulling(&mut puller.engine, &base_request(), Box::new(Direct::from(&holder)));
            pulls::finish(&mut puller.engine);
            let output = submitted.output();
            assert_eq!(output.cached(), 192, "{case}");
            tiers::assert_same(&case, &output, &expected);
            assert_eq!(puller.engine.load().kv_used, 0, "{case}");
            puller.engine.check().unwrap();
            holder.lock().unwrap().check().unwrap();
        }
    }
}

/// Steps until the replica has noticed that a stage is lost.
fn step_until_error(engine: &mut Engine) -> Error {
    let since = Instant::now();
    loop {
        let stepped = engine.step(Instant::now());
        assert!(since.elapsed() < 3 * Duration::from_secs(3), "the stage is not missed");
        if let Err(error) = stepped {
            return error;
        }
    }
}

#[test]
fn a_stage_that_dies_while_blocks_are_moved_ends_the_replica_and_changes_no_bit() {
    let model = "tiny/qwen35/qwen35-f32";
    let tokens = generate(&mut open(model, &options(model)), "r", crate::harness::prompt(3, 200));
    let mut whole = open(model, &options(model));
    generate(&mut whole, "r", crate::harness::prompt(3, 200));
    let snapshot = save(&mut whole, "r").unwrap();
    for lost in [0, 1] {
        for restores in [false, true] {
            let case = format!("stage {}, restore: {restores}", lost + 1);
            let mut workers = Workers::start(model, 2, &options(model));
            let mut engine = workers.engine(model, &options(model)).unwrap();
            if !restores {
                generate(&mut engine, "r", crate::harness::prompt(3, 200));
            }
            // Together with a request that computes.
            let concurrent =
                submit(&mut engine, &Request::greedy(crate::harness::prompt(9, 20), 400).tokens_only());
            while concurrent.output().tokens.len() < 3 {
                engine.step(Instant::now()).unwrap();
            }
            let service = workers.services.remove(lost);
            workers.runtime.block_on(service.stop());
            let failed = match restores {
                true => engine.restore(key("r"), &snapshot).map(drop),
                false => {
                    let (reply, mut answer) = oneshot::channel();
                    engine.save(&key("r"), reply);
                    answer.try_recv().expect("an answer").map(drop)
                }
            };
            assert!(matches!(failed, Err(SequenceError::Internal)), "{case}: {failed:?}");
            assert!(engine.has_work(), "{case}");
            let error = step_until_error(&mut engine);
            assert!(matches!(&error, Error::StageLost(_)), "{case}: {error}");
            // Further steps fail too.
            assert!(engine.step(Instant::now()).is_err(), "{case}");
            engine.check().unwrap();
            drop(engine);
            // A new replica restores the snapshot.
            workers.replace(lost, model);
            let mut engine = workers.next_engine(model, &options(model));
            engine.restore(key("r"), &snapshot).unwrap();
            let expected = snapshots::undisturbed(model, &tokens);
            assert_continues(&case, &mut engine, &tokens, &expected, (tokens.len() - 1) / 16 * 16);
            run_to_end(&mut engine);
            assert_eq!(engine.load().kv_used, 0, "{case}");
        }
    }
}
