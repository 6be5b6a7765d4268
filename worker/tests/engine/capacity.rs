//! How much one arena holds when sequences share prefixes and grow, compared with reserving a whole context
//! for each.

use crate::harness::{Request, Submitted, TINY, options, path, prompt, run_to_end, submit};
use engine::engine::Engine;
use kvasir_worker::load::{self, EngineOptions};
use std::time::Instant;

/// Full attention in every layer: the test compares sharing and paging, not windows.
const MODEL: &str = TINY[0];
const BLOCK_TOKENS: usize = 16;
/// Realistic prompt lengths.
const LENGTHS: &str = include_str!("../../../bench/data/lengths.txt");

/// A copy of the model with a context of 4,096 tokens, which its file does not allow. The value of the key,
/// 32 bits after its type, is changed.
fn long_context() -> tempfile::NamedTempFile {
    const KEY: &[u8] = b"llama.context_length";
    let mut bytes = std::fs::read(path(MODEL)).unwrap();
    let key = bytes.windows(KEY.len()).position(|window| window == KEY).unwrap();
    let value = key + KEY.len() + size_of::<u32>();
    bytes[value..value + size_of::<u32>()].copy_from_slice(&4096u32.to_le_bytes());
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    file
}

/// An engine that computes every prompt in one step, so that all can be counted before any grows.
fn engine(blocks: u64, rows: usize, prefix_cache: bool) -> (Engine, u64) {
    let with = |kv_bytes| EngineOptions {
        prefix_cache,
        block_tokens: BLOCK_TOKENS,
        kv_bytes: Some(kv_bytes),
        max_rows: Some(rows),
        chunk: Some(0),
        max_sequences: Some(256),
        ..options(MODEL)
    };
    let file = long_context();
    let open = |kv_bytes| load::open(file.path(), &with(kv_bytes), &mut |_, _| {}).unwrap().engine;
    let block = open(64 << 20).decoder().groups().iter().map(|group| group.block_bytes as u64).sum();
    (open(blocks * block), block)
}

/// Requests for one token each, and one more token that keeps the sequence alive.
fn requests(prompts: Vec<Vec<u32>>) -> Vec<Request> {
    prompts.into_iter().map(|prompt| Request::greedy(prompt, 2).tokens_only()).collect()
}

#[test]
fn thirty_two_users_of_one_prefix_take_an_eleventh_of_the_blocks() {
    const USERS: u64 = 32;
    let shared = prompt(1, 1024);
    let prompts = (0..USERS).map(|user| [shared.clone(), prompt(100 + user, 64)].concat());
    let requests = requests(prompts.collect());
    let blocks = |prefix_cache: bool| {
        let (mut engine, block) = engine(4096, 40_000, prefix_cache);
        let submitted: Vec<Submitted> = requests.iter().map(|request| submit(&mut engine, request)).collect();
        engine.step(Instant::now()).unwrap();
        assert!(submitted.iter().all(|submitted| submitted.output().tokens.len() == 1), "all prompts are in");
        let used = engine.load().kv_used / block;
        run_to_end(&mut engine);
        used
    };
    let (alone, together) = (blocks(false), blocks(true));
    let ratio = alone as f64 / together as f64;
    println!(
        "32 users, 1,024 shared and 64 own tokens: {alone} blocks alone, {together} shared, {ratio:.2}x"
    );
    assert!(ratio >= 11.0, "{alone} blocks alone, {together} shared");
}

#[test]
fn five_hundred_and_twelve_blocks_hold_what_the_lengths_allow() {
    const BUDGET: usize = 512;
    const CONTEXT: usize = 4096;
    let lengths: Vec<usize> = LENGTHS
        .lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(str::split_whitespace)
        .map(|number| number.parse().unwrap())
        .collect();
    let blocks = lengths.iter().map(|length| length.div_ceil(BLOCK_TOKENS));
    let ideal = blocks.scan(0, |sum, blocks| Some(*sum + blocks).inspect(|all| *sum = *all));
    let ideal = ideal.take_while(|sum| *sum <= BUDGET).count();
    assert!(ideal < lengths.len(), "more lengths than fit");

    let (mut engine, _) = engine(BUDGET as u64, 40_000, true);
    let prompts = lengths.iter().zip(1..).map(|(&length, seed)| prompt(seed, length));
    for request in requests(prompts.collect()) {
        submit(&mut engine, &request);
    }
    engine.step(Instant::now()).unwrap();
    let held = engine.load().running;
    let reserved = BUDGET * BLOCK_TOKENS / CONTEXT;
    println!(
        "{BUDGET} blocks: {held} sequences held, {ideal} ideal, {reserved} with {CONTEXT} tokens reserved each: {:.1}x",
        held as f64 / reserved as f64
    );
    assert!(held as f64 >= 0.95 * ideal as f64, "{held} sequences held, {ideal} ideal");
    run_to_end(&mut engine);
}
