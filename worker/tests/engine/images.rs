//! Prompts with rows of images: their results do not depend on chunks, batches, prefix hits or preemption.

#![allow(clippy::single_range_in_vec_init, reason = "images with one run of rows")]

use super::harness::{self, Output, RecordingSink, Request, options, prompt, run_to_end};
use engine::engine::{Engine, EngineImage, EngineRequest, ImageSource};
use engine::images::{
    EncodedImage, IMAGE_ID, ImageEncoder, PlacedImage, RemoteDone, RemoteEncoder, Unencoded,
};
use kernels::backend::{ActivationMode, KvType, KvTypes};
use kvasir_worker::load::{self, EngineOptions};
use proto::message::{GenerateError, TenantShare};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A request and its images.
#[derive(Clone)]
struct Seen {
    request: Request,
    images: Vec<EngineImage>,
}

fn submit(engine: &mut Engine, Seen { request, images }: &Seen) -> Arc<Mutex<Output>> {
    let output = Arc::new(Mutex::new(Output::default()));
    let sink = RecordingSink { wants_logits: request.logits, output: output.clone() };
    engine.submit(
        Instant::now(),
        EngineRequest {
            name: None,
            root: harness::ROOT,
            adapter: None,
            tenant: TenantShare::of_root(harness::ROOT),
            prompt: request.prompt.clone(),
            images: images.clone(),
            emitted: request.emitted.clone(),
            prompt_logprobs: None,
            sampling: request.sampling.clone(),
            stop: request.stop.clone(),
            deadline: None,
            pull: None,
            together: request.together,
            guide: None,
            sink: Box::new(sink),
        },
    );
    output
}

/// Runs all requests at once to the end.
fn together(engine: &mut Engine, seen: &[Seen]) -> Vec<Output> {
    let outputs: Vec<_> = seen.iter().map(|seen| submit(engine, seen)).collect();
    run_to_end(engine);
    outputs.iter().map(|output| output.lock().unwrap().clone()).collect()
}

/// Numbers in -1..1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    prompt(seed, len).into_iter().map(|number| (number as f32 - 184.0) / 180.0).collect()
}

/// An image of random rows at these positions, and its ids in the prompt.
fn image(tokens: &mut [u32], runs: &[Range<u32>], hidden: usize, seed: u8) -> EngineImage {
    let rows: u32 = runs.iter().map(|run| run.len() as u32).sum();
    let mut ids = (0..rows).map(|row| IMAGE_ID | u32::from(seed) << 16 | row);
    for run in runs {
        tokens[run.start as usize..run.end as usize].fill_with(|| ids.next().unwrap());
    }
    let len = rows as usize * hidden;
    let embedding =
        EncodedImage { rows: noise(seed.into(), len), deepstack: vec![noise(99, len)], grid: None };
    let place = PlacedImage { runs: runs.to_vec(), digest: [seed; 32] };
    EngineImage { place, source: ImageSource::Embedding(Arc::new(embedding)) }
}

const MODELS: [&str; 2] = ["tiny/llama/llama-f32", "tiny/gemma3/gemma3-f32"];

/// A prompt of `len` tokens with images at `runs`.
fn seen(engine: &Engine, len: usize, runs: &[&[Range<u32>]], max_tokens: u32) -> Seen {
    let hidden = engine.decoder().spec().hidden;
    let mut tokens = prompt(1, len);
    let images = (1..).zip(runs).map(|(seed, runs)| image(&mut tokens, runs, hidden, seed)).collect();
    Seen { request: Request::greedy(tokens, max_tokens), images }
}

#[test]
fn embeddings_of_tokens_give_what_the_tokens_give() {
    let model = MODELS[0];
    let mut engine = harness::open(model, &options(model));
    let text = Request::greedy(prompt(1, 50), 8);
    let mut expected = harness::one_by_one(&mut engine, std::slice::from_ref(&text)).remove(0);
    let hidden = engine.decoder().spec().hidden;
    let mut tokens = text.prompt.clone();
    let mut placed = image(&mut tokens, &[20..30], hidden, 1);
    let file = model::ModelFile::open(harness::path(model)).unwrap();
    let table = file.tensor_bytes("token_embd.weight").unwrap();
    let table = table.whole().unwrap();
    let row = |token: u32| {
        let bytes = &table[token as usize * hidden * 4..][..hidden * 4];
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
    };
    let rows = text.prompt[20..30].iter().flat_map(|token| row(*token)).collect();
    placed.source = ImageSource::Embedding(Arc::new(EncodedImage { rows, ..EncodedImage::default() }));
    let seen = Seen { request: Request { prompt: tokens, ..text }, images: vec![placed] };
    let output = together(&mut engine, &[seen]).remove(0);
    let computed = expected.logits.split_off(&output.cached());
    assert!(output.logits == computed && output.cached() == 16);
    assert_eq!(output.tokens, expected.tokens);
}

#[test]
fn results_do_not_depend_on_chunks_neighbours_hits_and_preemption() {
    for model in MODELS {
        let mut engine = harness::open(model, &options(model));
        // An image with two runs, two neighbours, and one at the end.
        let runs: [&[Range<u32>]; 4] = [&[3..23, 25..35], &[40..60], &[60..66], &[88..97]];
        let first = seen(&engine, 97, &runs, 12);
        let expected = together(&mut engine, std::slice::from_ref(&first)).remove(0);
        assert_eq!((expected.failed.clone(), expected.tokens.len()), (None, 12));
        let text = Request { prompt: prompt(1, 97), ..first.request.clone() };
        let other = harness::one_by_one(&mut engine, &[text]).remove(0);
        assert_ne!(other.logits, expected.logits);
        let same = |output: &Output, what: &str| {
            assert_eq!(output.failed, None, "{model}: {what}");
            let rows = output.logits.iter().filter(|(position, bits)| expected.logits[position] != **bits);
            assert_eq!(rows.count(), 0, "{model}: {what}");
            assert_eq!(output.tokens, expected.tokens, "{model}: {what}");
        };
        let again = together(&mut engine, std::slice::from_ref(&first)).remove(0);
        assert!(again.cached() > 0, "{model}");
        same(&again, "after a hit");
        for (chunk, max_rows) in [(1, 64), (7, 64), (16, 33), (64, 128)] {
            let sizes = EngineOptions { chunk: Some(chunk), max_rows: Some(max_rows), ..options(model) };
            let mut engine = harness::open(model, &sizes);
            let beside = Seen { request: Request::greedy(prompt(3, 70), 20), images: Vec::new() };
            let outputs = together(&mut engine, &[beside.clone(), first.clone(), beside, first.clone()]);
            same(&outputs[1], &format!("chunks of {chunk}"));
            same(&outputs[3], &format!("chunks of {chunk}, behind the first"));
        }
        let cramped = harness::cramped(model, &options(model), 140);
        let mut engine = harness::open(model, &EngineOptions { max_sequences: Some(2), ..cramped });
        let mut beside = seen(&engine, 97, &runs, 12);
        beside.request.prompt[0] += 1;
        let outputs = together(&mut engine, &[beside, first.clone()]);
        same(&outputs[1], "without room");
        let replayed = Request { emitted: expected.tokens[..5].to_vec(), ..first.request.clone() };
        let output = together(&mut engine, &[Seen { request: replayed, ..first }]).remove(0);
        assert_eq!(output.tokens, expected.tokens[5..], "{model}: replayed");
    }
}

#[test]
fn a_hit_ends_at_an_image_that_begins_like_another() {
    let model = MODELS[0];
    let mut engine = harness::open(model, &options(model));
    let first = seen(&engine, 64, &[&[28..60]], 1);
    together(&mut engine, std::slice::from_ref(&first));
    // Four ids of another image agree.
    let mut forged = first.clone();
    forged.request.prompt[32..60].iter_mut().for_each(|id| *id |= 1 << 20);
    let cached = together(&mut engine, &[forged]).remove(0).cached();
    assert_eq!(cached, 16);
    let cached = together(&mut engine, &[first]).remove(0).cached();
    assert_eq!(cached, 48);
}

#[test]
fn images_that_cannot_be_served_are_refused_by_name() {
    let model = MODELS[1];
    let sizes = EngineOptions { chunk: Some(8), max_rows: Some(16), ..options(model) };
    let mut engine = harness::open(model, &sizes);
    let good = seen(&engine, 40, &[&[10..26]], 1);
    assert_eq!(together(&mut engine, std::slice::from_ref(&good)).remove(0).failed, None);
    let refused = |engine: &mut Engine, seen: Seen, reason: &str| {
        let failed = together(engine, &[seen]).remove(0).failed;
        let Some(GenerateError::InvalidField { field, reason: found }) = failed else {
            panic!("{failed:?}");
        };
        assert!(["images", "prompt"].contains(&field.as_str()) && found.contains(reason), "{field}: {found}");
    };
    let long = seen(&engine, 40, &[&[10..27]], 1);
    refused(&mut engine, long, "17 rows in a row, at most 16");
    let alone = Seen { images: Vec::new(), ..good.clone() };
    refused(&mut engine, alone, "outside the vocabulary");
    let mut moved = good.clone();
    moved.images[0].place.runs = vec![11..27];
    refused(&mut engine, moved, "no rows of an image");
    let mut narrow = good.clone();
    narrow.images[0].source = ImageSource::Embedding(Arc::default());
    refused(&mut engine, narrow, "0 values for 16 rows");
    let mut file = good;
    file.images[0].source = ImageSource::File(Arc::from(&b"GIF"[..]));
    refused(&mut engine, file, "sees no images");
}

/// Counts the images that it encodes, and refuses some.
struct Encoder {
    hidden: usize,
    encoded: Arc<Mutex<usize>>,
}

impl ImageEncoder for Encoder {
    fn encode(&mut self, file: &[u8], place: &PlacedImage) -> Result<EncodedImage, String> {
        *self.encoded.lock().unwrap() += 1;
        match file {
            b"bad" => Err("it is no image".to_owned()),
            _ => {
                let rows = noise(place.digest[0].into(), place.rows() as usize * self.hidden);
                Ok(EncodedImage { rows, ..EncodedImage::default() })
            }
        }
    }
}

#[test]
fn requests_that_share_an_image_encode_it_and_compute_its_rows_once() {
    let model = MODELS[0];
    let engine = harness::open(model, &options(model));
    let (hidden, encoded) = (engine.decoder().spec().hidden, Arc::new(Mutex::new(0)));
    let mut first = seen(&engine, 70, &[&[5..61]], 4);
    first.images[0].source = ImageSource::File(Arc::from(&b"good"[..]));
    let encoder = Encoder { hidden, encoded: Arc::clone(&encoded) };
    let mut engine = engine.with_images(Some(Box::new(encoder)), 1 << 20).unwrap();
    // Equal prompts, and prompts that differ behind the image.
    let requests: Vec<Seen> = (0..16)
        .map(|number| {
            let mut seen = Seen { request: first.request.clone().tokens_only(), ..first.clone() };
            seen.request.prompt[69] = 5 + number % 8;
            seen
        })
        .collect();
    let outputs = wait(&mut engine, &requests);
    assert!(outputs.iter().all(|output| output.failed.is_none() && output.tokens.len() == 4));
    assert_eq!((*encoded.lock().unwrap(), engine.metrics().images.encoded.get()), (1, 1));
    let metrics = &engine.metrics().images;
    assert_eq!((metrics.hits.get(), metrics.shared.get()), (0, 15));
    // The rows up to the last whole unit are computed once, and the rest once for each different prompt.
    let computed = engine.metrics().prefill_computed.get();
    assert!(computed <= 64 + 8 * 6, "{computed}");
    wait(&mut engine, &requests[..1]);
    assert_eq!((*encoded.lock().unwrap(), engine.metrics().images.hits.get()), (1, 1));
    let mut bad = first;
    bad.images[0].source = ImageSource::File(Arc::from(&b"bad"[..]));
    bad.images[0].place.digest = [9; 32];
    let failed = wait(&mut engine, &[bad]).remove(0).failed;
    let reason = "it is no image".to_owned();
    assert_eq!(failed, Some(GenerateError::InvalidField { field: "images".to_owned(), reason }));
}

/// Another worker: it encodes noise, or is away.
#[derive(Debug)]
struct Elsewhere {
    hidden: usize,
    away: bool,
}

impl RemoteEncoder for Elsewhere {
    fn encode(&self, _: Arc<[u8]>, place: PlacedImage, done: RemoteDone) {
        let rows = noise(place.digest[0].into(), place.rows() as usize * self.hidden);
        let made = match self.away {
            true => Err(Unencoded::NoEncoder("w9 is away".to_owned())),
            false => Ok(EncodedImage { rows, ..EncodedImage::default() }),
        };
        std::thread::spawn(move || done(made));
    }
}

#[test]
fn embeddings_of_another_worker_give_what_those_of_the_tower_here_give() {
    let model = MODELS[0];
    let engine = harness::open(model, &options(model));
    let hidden = engine.decoder().spec().hidden;
    let mut asked = seen(&engine, 70, &[&[5..61]], 4);
    let from = |away| {
        let remote: Arc<dyn RemoteEncoder> = Arc::new(Elsewhere { hidden, away });
        ImageSource::Elsewhere(Arc::from(&b"good"[..]), remote)
    };
    asked.images[0].source = ImageSource::File(Arc::from(&b"good"[..]));
    let encoded = Arc::new(Mutex::new(0));
    let encoder = Encoder { hidden, encoded: Arc::clone(&encoded) };
    let mut engine = engine.with_images(Some(Box::new(encoder)), 0).unwrap();
    let expected = wait(&mut engine, std::slice::from_ref(&asked)).remove(0);
    // Nothing is cached, and the tower here follows one that is away.
    asked.images[0].source = from(true);
    assert_eq!(wait(&mut engine, std::slice::from_ref(&asked)).remove(0).tokens, expected.tokens);
    let images = &engine.metrics().images;
    assert_eq!((*encoded.lock().unwrap(), images.remote.get(), images.fallbacks.get()), (2, 0, 1));
    let mut blind = harness::open(model, &options(model)).with_images(None, 0).unwrap();
    let failed = wait(&mut blind, std::slice::from_ref(&asked)).remove(0).failed;
    assert!(
        matches!(&failed, Some(GenerateError::NoEncoder { reason }) if reason.contains("w9")),
        "{failed:?}"
    );
    asked.images[0].source = from(false);
    let other = wait(&mut blind, &[asked]).remove(0);
    assert_eq!((other.failed, other.tokens, other.logits), (None, expected.tokens, expected.logits));
    assert_eq!(blind.metrics().images.remote.get(), 1);
}

/// Like [`together`], while images are encoded on another thread.
fn wait(engine: &mut Engine, seen: &[Seen]) -> Vec<Output> {
    let outputs: Vec<_> = seen.iter().map(|seen| submit(engine, seen)).collect();
    while engine.has_work() {
        engine.step(Instant::now()).unwrap();
        std::thread::yield_now();
    }
    engine.check().unwrap();
    outputs.iter().map(|output| output.lock().unwrap().clone()).collect()
}

/// Hugging Face folders with `config.json` and `ref.safetensors`, below the folder that a variable names: embeddings of
/// the reference's tower, its logits and tokens.
#[test]
fn released_models_give_what_their_references_give() {
    let Some(root) = std::env::var_os("KVASIR_VISION_REFERENCES") else { return };
    let mut cases = 0;
    for folder in std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()) {
        if !folder.join("ref.safetensors").exists() || !folder.join("image0.png").exists() {
            continue;
        }
        let bytes = std::fs::read(folder.join("ref.safetensors")).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let image_token = ["image_token_id", "image_token_index"].iter().find_map(|key| config[key].as_u64());
        let merge = config["vision_config"]["spatial_merge_size"].as_u64().unwrap_or(1) as u32;
        let numbers = |name: &str| -> Option<Vec<u32>> {
            let data = reference.tensor(name).ok()?.data().to_vec();
            Some(data.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
        };
        let floats = |name: &str| -> Option<Vec<f32>> {
            Some(numbers(name)?.into_iter().map(f32::from_bits).collect())
        };
        for chunk in [512, 5] {
            let exact = EngineOptions {
                kv_type: KvTypes::both(KvType::F32),
                activations: ActivationMode::F32,
                chunk: Some(chunk),
                ..options("hf/")
            };
            let mut engine = load::open(&folder, &exact, &mut |_, _| {}).unwrap().engine;
            let hidden = engine.decoder().spec().hidden;
            for case in 0..3 {
                let key = |name: &str| format!("v{case}.{name}");
                let Some(mut ids) = numbers(&key("ids")) else { continue };
                let embeds = floats(&key("image_embeds")).unwrap_or_default();
                let grids = numbers(&key("image_grid_thw")).unwrap_or_default();
                let deep: Vec<Vec<f32>> =
                    (0..).map_while(|k| floats(&key(&format!("deepstack.{k}")))).collect();
                let (mut images, mut row, mut at) = (Vec::new(), 0, 0);
                while at < ids.len() {
                    let len = ids[at..].iter().take_while(|id| Some(u64::from(**id)) == image_token).count();
                    if len > 0 {
                        let part = |list: &Vec<f32>| list[row * hidden..(row + len) * hidden].to_vec();
                        let deepstack = deep.iter().map(part).collect();
                        let grid = grids.chunks(3).nth(images.len());
                        let grid = grid.map(|grid| [grid[0], grid[1] / merge, grid[2] / merge]);
                        let embedding = EncodedImage { rows: part(&embeds), deepstack, grid };
                        let digest = [images.len() as u8 + case as u8 * 16; 32];
                        let id = |n: usize| IMAGE_ID | u32::from(digest[0]) << 16 | n as u32;
                        (0..len).for_each(|n| ids[at + n] = id(n));
                        let place = PlacedImage { runs: vec![at as u32..(at + len) as u32], digest };
                        images
                            .push(EngineImage { place, source: ImageSource::Embedding(Arc::new(embedding)) });
                        (row, at) = (row + len, at + len);
                    }
                    at += usize::from(len == 0);
                }
                let count = images.len();
                let greedy = numbers(&key("greedy")).unwrap();
                let request = Request::greedy(ids.clone(), greedy.len() as u32);
                let output = together(&mut engine, &[Seen { request, images }]).remove(0);
                assert_eq!(output.failed, None, "{}", folder.display());
                let expected = floats(&key("logits")).unwrap();
                let vocab = engine.decoder().spec().vocab;
                let first = ids.len() - expected.len() / vocab;
                let mut worst = 0.0f32;
                for (position, expected) in (first..).zip(expected.chunks(vocab)) {
                    let found = output.logits[&position].iter().map(|bits| f32::from_bits(*bits));
                    worst = found.zip(expected).map(|(x, y)| (x - y).abs()).fold(worst, f32::max);
                }
                println!("{} v{case}: {count} images, {worst:e}", folder.display());
                assert!(worst < 1e-3, "{} v{case}: {worst}", folder.display());
                assert_eq!(output.tokens, greedy, "{} v{case}", folder.display());
                cases += 1;
            }
        }
    }
    assert!(cases > 0);
}
