//! Logits and tokens are equal bit by bit, however a sequence is computed.

use crate::harness::{Output, QUANT, Request, TINY, cramped, one_by_one, open, options, prompt, together};
use engine::engine::Engine;
use engine::kv_cache::BlockLayout;
use kvasir_worker::load::EngineOptions;

const GENERATE: u32 = 12;

/// Prompts of awkward lengths: below a block, across several, longer than every sliding window, on a block
/// boundary.
pub(crate) fn requests() -> Vec<Request> {
    [5, 37, 90, 64].iter().zip(1..).map(|(len, seed)| Request::greedy(prompt(seed, *len), GENERATE)).collect()
}

/// Runs alone: the whole prompt at once, one thread, contiguous blocks, no sharing.
pub(crate) fn undisturbed(model: &str, requests: &[Request]) -> Vec<Output> {
    let options = EngineOptions {
        chunk: Some(0),
        prefix_cache: false,
        block_layout: BlockLayout::Contiguous,
        ..options(model)
    };
    let outputs = one_by_one(&mut open(model, &options), requests);
    for (request, output) in requests.iter().zip(&outputs) {
        assert_eq!(output.tokens.len(), GENERATE as usize);
        // Every input position has logits; the last drawn token is not an input.
        let inputs = request.prompt.len() + GENERATE as usize - 1;
        assert!(output.logits.keys().copied().eq(0..inputs), "{model}");
    }
    outputs
}

/// Runs the requests twice, the second time from the prefix cache if there is one. The outputs must equal
/// `expected` both times.
pub(crate) fn same_twice(
    case: &str,
    engine: &mut Engine,
    requests: &[Request],
    expected: &[Output],
    at_once: bool,
) -> Vec<Output> {
    let mut rounds = Vec::new();
    for _ in 0..2 {
        let got = if at_once { together(engine, requests) } else { one_by_one(engine, requests) };
        assert_same(case, expected, &got);
        engine.check().unwrap();
        rounds.extend(got);
    }
    rounds
}

/// Checks that tokens, and the logits of every position in `got`, equal those of `expected`.
pub(crate) fn assert_same(case: &str, expected: &[Output], got: &[Output]) {
    assert_eq!(expected.len(), got.len());
    for (index, (expected, got)) in expected.iter().zip(got).enumerate() {
        assert_eq!(got.failed, None, "{case}, prompt {index}");
        assert_eq!(got.tokens, expected.tokens, "{case}, prompt {index}");
        let computed = expected.logits.range(got.cached()..);
        assert!(computed.into_iter().all(|(position, _)| got.logits.contains_key(position)), "{case}");
        for (position, row) in &got.logits {
            assert!(*row == expected.logits[position], "{case}, prompt {index}: logits at {position} differ");
        }
    }
}

pub(crate) fn models() -> impl Iterator<Item = &'static str> {
    TINY.into_iter().chain(QUANT)
}

#[test]
fn chunks_batches_threads_and_layout_change_no_bit() {
    for model in models() {
        let requests = requests();
        let expected = undisturbed(model, &requests);
        let base = EngineOptions { prefix_cache: false, ..options(model) };
        let run = |case: &str, at_once: bool, options: EngineOptions| {
            let mut engine = open(model, &options);
            let got =
                if at_once { together(&mut engine, &requests) } else { one_by_one(&mut engine, &requests) };
            assert_same(&format!("{model}: {case}"), &expected, &got);
            assert_eq!(engine.load().kv_used, 0, "{model}: {case}");
        };
        for chunk in [1, 7, 64, 0] {
            run(
                &format!("alone, chunk {chunk}"),
                false,
                EngineOptions { chunk: Some(chunk), ..base.clone() },
            );
            run(
                &format!("together, chunk {chunk}"),
                true,
                EngineOptions { chunk: Some(chunk), ..base.clone() },
            );
        }
        let two = EngineOptions { threads: Some(2), ..base.clone() };
        run("two threads", true, two.clone());
        run(
            "two threads, contiguous",
            true,
            EngineOptions { block_layout: BlockLayout::Contiguous, ..two.clone() },
        );
        for (seed, block_tokens) in [(1, 16), (2, 32), (3, 64)] {
            let permuted = BlockLayout::Permuted { seed };
            let options =
                EngineOptions { block_layout: permuted, block_tokens, chunk: Some(7), ..base.clone() };
            run(&format!("permuted blocks of {block_tokens}"), true, options);
        }
        let rows =
            EngineOptions { max_rows: Some(9), max_sequences: Some(3), chunk: Some(7), ..base.clone() };
        run("steps of nine rows for three sequences", true, rows);
    }
}

#[test]
fn a_prefix_hit_gives_the_bits_of_a_miss() {
    for model in models() {
        for (block_tokens, block_layout) in
            [(16, BlockLayout::Paged), (32, BlockLayout::Permuted { seed: 5 }), (64, BlockLayout::Paged)]
        {
            let shared = prompt(11, 150);
            let tails = [prompt(12, 20), prompt(13, 7), Vec::new()];
            let requests: Vec<Request> = tails
                .iter()
                .map(|tail| Request::greedy([shared.as_slice(), tail].concat(), GENERATE))
                .collect();
            let expected = undisturbed(model, &requests);
            let case = format!("{model}, blocks of {block_tokens}");
            let options = EngineOptions { block_tokens, block_layout, ..options(model) };

            let mut engine = open(model, &options);
            let one_by_one = one_by_one(&mut engine, &requests);
            assert_same(&case, &expected, &one_by_one);
            assert_eq!(one_by_one[0].cached(), 0, "{case}: nothing was there to hit");
            for hit in &one_by_one[1..] {
                assert!(hit.cached() >= 128, "{case}: {} tokens hit", hit.cached());
                assert!(hit.logits.keys().all(|position| *position >= hit.cached()), "{case}");
            }
            // All requests again: now the end of the last prompt is cached too.
            let again = together(&mut engine, &requests);
            assert_same(&case, &expected, &again);
            assert!(again.iter().all(|hit| hit.cached() >= 128), "{case}");

            // One sequence computes the prefix, the others follow it.
            let followed = together(&mut open(model, &options), &requests);
            assert_same(&format!("{case}, followed"), &expected, &followed);
            let computed: usize = requests
                .iter()
                .zip(&followed)
                .map(|(request, output)| request.prompt.len() - output.cached())
                .sum();
            assert!(computed < 2 * shared.len(), "{case}: {computed} prompt tokens were computed");
        }
    }
}

#[test]
fn preemption_changes_no_bit() {
    for model in models() {
        let requests: Vec<Request> = (21..27).map(|seed| Request::greedy(prompt(seed, 20), 120)).collect();
        let baseline = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
        let expected = one_by_one(&mut open(model, &baseline), &requests);
        for (prefix_cache, block_tokens) in [(false, 16), (true, 16), (true, 32)] {
            let case = format!("{model}, prefix cache {prefix_cache}, blocks of {block_tokens}");
            let options = EngineOptions { prefix_cache, block_tokens, chunk: Some(8), ..options(model) };
            let mut options = cramped(model, &options, 140);
            // Arenas from one that serves one sequence after the other to one that serves all. In between
            // some sequences are admitted and later preempted.
            let smallest = options.kv_bytes.unwrap();
            let preemptions = (4..40).find_map(|quarters| {
                options.kv_bytes = Some(smallest * quarters / 4);
                let mut engine = open(model, &options);
                let got = together(&mut engine, &requests);
                assert_same(&case, &expected, &got);
                assert_eq!(engine.load().kv_used, 0, "{case}");
                let preemptions: u32 = got.iter().map(Output::preemptions).sum();
                assert_eq!(engine.metrics().preemptions.get(), u64::from(preemptions), "{case}");
                (preemptions > 0).then_some(preemptions)
            });
            assert!(preemptions.is_some(), "{case}: nothing was preempted");
        }
    }
}
