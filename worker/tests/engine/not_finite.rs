//! Models that compute NaN or infinity: only requests that draw from such a row fail, with an error.

use crate::harness::{Output, ROOT, Request, open, options, prompt, run_to_end, submit, together};
use crate::stages::Workers;
use crate::tiers::{disk, finish};
use engine::pieces::Namer;
use engine::speculation::SpeculativeMethod;
use kvasir_worker::load::EngineOptions;
use model::gguf::writer::Writer;
use model::{GgmlType, ModelFile};
use proto::message::{GenerateError, Sampling};
use proto::pull::PullRefusal;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

/// A token with a NaN or infinite embedding.
const SICK: u32 = 7;

/// Writes a model of the set with its own output matrix. Returns the name by which it is opened. `change`
/// receives each tensor's name, the width of its rows, and its values.
fn write(folder: &Path, arch: &str, change: impl Fn(&str, u64, &mut [f32])) -> String {
    let file = ModelFile::open(crate::harness::path(&format!("tiny/{arch}/{arch}-f32"))).unwrap();
    let values = |name: &str| -> Vec<f32> {
        let bytes = file.tensor_data(name).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let mut tensors: Vec<(String, Vec<u64>, Vec<f32>)> = file
        .tensors()
        .map(|info| (info.name().to_owned(), info.dims().to_vec(), values(info.name())))
        .collect();
    if tensors.iter().all(|(name, ..)| name != "output.weight") {
        let embedding = tensors.iter().find(|(name, ..)| name == "token_embd.weight").unwrap();
        tensors.push(("output.weight".to_owned(), embedding.1.clone(), embedding.2.clone()));
    }
    let mut writer = Writer::new(file.metadata().clone()).unwrap();
    for (name, dims, values) in &mut tensors {
        change(name, dims[0], values);
        writer.tensor(name, GgmlType::F32, dims).unwrap();
    }
    let path = folder.join(arch);
    let mut out = BufWriter::new(File::create(path.with_extension("gguf")).unwrap());
    let mut values = tensors.iter().map(|(.., values)| values);
    let bytes = |_: &_| values.next().unwrap().iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    writer.write(&mut out, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

fn spoil_one_embedding(name: &str, width: u64, values: &mut [f32]) {
    if name == "token_embd.weight" {
        values[SICK as usize * width as usize] = f32::NAN;
    }
}

fn requests(prompt: &[u32]) -> Vec<Request> {
    let request =
        |sampling: Sampling| Request { sampling, ..Request::greedy(prompt.to_vec(), 6).tokens_only() };
    vec![
        request(Sampling::default()),
        request(Sampling { temperature: 1.0, seed: 5, ..Sampling::default() }),
        request(Sampling { temperature: 1.0, top_k: 4, seed: 6, ..Sampling::default() }),
        request(Sampling { logprobs: Some(3), ..Sampling::default() }),
        request(Sampling { presence_penalty: 1.0, ..Sampling::default() }),
    ]
}

fn is_refused(output: &Output) -> bool {
    output.failed == Some(GenerateError::NotFinite) && output.finished.is_none() && output.tokens.is_empty()
}

/// Changes the values of a tensor, given its name and the width of its rows.
type Spoil = fn(&str, u64, &mut [f32]);

#[test]
fn weights_that_are_not_finite_fail_each_request() {
    let dir = tempfile::tempdir().unwrap();
    let changes: [(&str, Spoil); 4] = [
        ("all of a norm", |name, _, values| {
            if name == "output_norm.weight" {
                values.fill(f32::NAN);
            }
        }),
        ("one value of the head", |name, _, values| {
            if name == "output.weight" {
                values[1] = f32::NAN;
            }
        }),
        ("infinity in the head", |name, _, values| {
            if name == "output.weight" {
                values[1] = f32::INFINITY;
            }
        }),
        ("overflow in a layer", |name, _, values| {
            if name == "blk.0.ffn_down.weight" || name == "blk.0.ffn_up.weight" {
                values.iter_mut().for_each(|value| *value *= 1e30);
            }
        }),
    ];
    for (case, change) in changes {
        let model = write(dir.path(), "llama", change);
        let mut engine = open(&model, &options("tiny/llama"));
        for (at, output) in together(&mut engine, &requests(&prompt(1, 20))).iter().enumerate() {
            assert!(is_refused(output), "{case}, way {at}: {output:?}");
        }
        engine.check().unwrap();
        assert!(!engine.has_work(), "{case}");
    }
}

#[test]
fn requests_with_finite_rows_continue() {
    let dir = tempfile::tempdir().unwrap();
    for arch in ["llama", "qwen35"] {
        let model = write(dir.path(), arch, spoil_one_embedding);
        let healthy: Vec<u32> =
            prompt(1, 40).into_iter().map(|token| if token == SICK { 8 } else { token }).collect();
        let sick = [&healthy[..30], &[SICK]].concat();
        for speculative_method in [SpeculativeMethod::Off, SpeculativeMethod::Ngram] {
            let options = EngineOptions { speculative_method, prefix_cache: true, ..options("tiny/x") };
            let alone = together(&mut open(&model, &options), &requests(&healthy));
            let mut engine = open(&model, &options);
            // Choices of one prompt fork at its end.
            let choices = requests(&sick).into_iter().map(|request| Request { together: 5, ..request });
            let submitted: Vec<_> =
                choices.chain(requests(&healthy)).map(|request| submit(&mut engine, &request)).collect();
            run_to_end(&mut engine);
            for (at, submitted) in submitted.iter().enumerate() {
                let output = submitted.output();
                match at.checked_sub(5) {
                    None => assert!(is_refused(&output), "{arch} {at}: {output:?}"),
                    Some(at) if alone[at].failed.is_none() => {
                        assert_eq!(output.tokens, alone[at].tokens, "{arch} {at}");
                        assert!(output.finished.is_some(), "{arch} {at}");
                    }
                    // It has drawn the sick token itself.
                    Some(at) => assert_eq!(output.failed, alone[at].failed, "{arch} {at}"),
                }
            }
            engine.check().unwrap();
        }
    }
}

/// Neither the arena nor the tiers keep the caches of a request with such rows, and they are not sent to
/// other workers.
#[test]
fn no_cache_of_a_spoiled_request_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    for arch in ["llama", "qwen35"] {
        let model = write(dir.path(), arch, spoil_one_embedding);
        let healthy = |seed, len| -> Vec<u32> {
            prompt(seed, len).into_iter().map(|token| if token == SICK { 8 } else { token }).collect()
        };
        let shared = healthy(1, 160);
        let with = |own: &[u32]| Request::greedy([&shared[..], own].concat(), 2).tokens_only();
        // First without the sick request: then the prefix is cached.
        for sick in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let options = EngineOptions { tiers: disk(folder.path(), 1 << 20), ..options("tiny/x") };
            let mut engine = open(&model, &options);
            let first = finish(&mut engine, &[with(&healthy(2, 30))]).remove(0);
            let origin = Namer::new(&engine.origin()).unwrap().origin();
            if sick {
                // Its first steps draw nothing, but what they wrote is no better.
                let prompt = [&[SICK], &healthy(3, 150)[..], &healthy(4, 40)].concat();
                assert!(is_refused(&finish(&mut engine, &[with(&prompt)])[0]), "{arch}");
                let offered = [&shared[..], &prompt[..16]].concat();
                let refused = engine.kv_sender().offer(&origin, ROOT, &offered, 0).err();
                assert_eq!(refused, Some(PullRefusal::NotHeld), "{arch}");
            } else {
                let prompt = [&shared[..], &healthy(2, 16)].concat();
                assert_eq!(
                    engine.kv_sender().offer(&origin, ROOT, &prompt, 0).unwrap().tokens,
                    176,
                    "{arch}"
                );
            }
            // The next process does not find it either.
            drop(engine);
            let mut engine = open(&model, &options);
            let again = finish(&mut engine, &[with(&healthy(2, 30))]).remove(0);
            assert_eq!(again.cached(), if sick { 0 } else { 176 }, "{arch}");
            assert_eq!(again.tokens, first.tokens, "{arch}");
        }
    }
}

#[test]
fn the_last_stage_reports_rows_that_are_not_finite() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), "llama", |name, _, values| {
        if name == "output_norm.weight" {
            values[3] = f32::NAN;
        }
    });
    let options = options("tiny/llama");
    let workers = Workers::start(&model, 1, &options);
    let mut engine = workers.next_engine(&model, &options);
    for (at, output) in together(&mut engine, &requests(&prompt(2, 20))).iter().enumerate() {
        assert!(is_refused(output), "way {at}: {output:?}");
    }
}
