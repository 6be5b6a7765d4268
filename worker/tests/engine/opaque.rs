//! The engine on a device whose memory the host cannot address.

use crate::harness::{
    Output, QUANT, Request, TINY, cramped, one_by_one, open, open_on, options, path, prompt, submit, together,
};
use crate::opaque_device::{Ledger, OpaqueDevice, Refuses};
use engine::engine::Engine;
use kernels::backend::BufferId;
use kvasir_worker::load::EngineOptions;
use kvasir_worker::{Error, load};
use proto::message::Sampling;
use std::sync::{Arc, Mutex};
use std::time::Instant;

fn open_opaque(model: &str, options: &EngineOptions) -> (Engine, Arc<Mutex<Ledger>>) {
    let (device, ledger) = OpaqueDevice::new(options.activations, Refuses::Nothing);
    (open_on(model, options, Box::new(device)), ledger)
}

/// The only buffer from which anything was read.
fn only_buffer(ledger: &Ledger) -> BufferId {
    let mut buffers = ledger.rows.iter().map(|(buffer, _)| *buffer).chain(ledger.drawn_from.iter().copied());
    let first = buffers.next().unwrap();
    assert!(buffers.all(|buffer| buffer == first), "more than the logits was read");
    first
}

fn assert_same(model: &str, cpu: &[Output], opaque: &[Output]) {
    for (cpu, opaque) in cpu.iter().zip(opaque) {
        assert_eq!(cpu.tokens, opaque.tokens, "{model}");
        assert_eq!(cpu.cached(), opaque.cached(), "{model}");
        assert!(cpu.logits == opaque.logits, "{model}: other logits");
    }
}

#[test]
fn a_device_that_the_host_cannot_address_gives_the_same_bits() {
    for model in TINY.into_iter().chain(QUANT) {
        let shared = prompt(3, 70);
        let with = |tail: u64, len| [shared.clone(), prompt(tail, len)].concat();
        let requests = [
            Request::greedy(with(4, 9), 12),
            Request::greedy(with(5, 30), 12).tokens_only(),
            Request {
                sampling: Sampling { temperature: 0.8, seed: 5, ..Sampling::default() },
                ..Request::greedy(with(6, 1), 12).tokens_only()
            },
        ];
        let options = EngineOptions { chunk: Some(32), ..options(model) };
        let (mut engine, ledger) = open_opaque(model, &options);
        assert_eq!(engine.decoder().backend().info().device, "opaque");
        let mut cpu = open(model, &options);
        // First with all requests in flight, then with the cache of the first round.
        for _ in 0..2 {
            assert_same(model, &together(&mut cpu, &requests), &together(&mut engine, &requests));
        }

        let ledger = ledger.lock().unwrap().clone();
        only_buffer(&ledger);
        assert!(ledger.ops > 0);
        assert_eq!(ledger.writes, 0, "{model}: the host wrote activations");
    }
}

#[test]
fn the_host_reads_sampled_tokens_and_requested_logits_only() {
    for model in TINY {
        let (mut engine, ledger) = open_opaque(model, &options(model));
        let vocab = engine.decoder().spec().vocab;
        // Greedy: only tokens come back.
        let greedy: Vec<Request> =
            (1..5).map(|seed| Request::greedy(prompt(seed, 50), 10).tokens_only()).collect();
        together(&mut engine, &greedy);
        let after = ledger.lock().unwrap().clone();
        assert_eq!((after.tokens, after.rows.len()), (40, 0), "{model}");
        let logits = only_buffer(&after);

        // Sampled on the host: one row for each token.
        let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
        let drawn = Request { sampling, ..Request::greedy(prompt(9, 50), 10).tokens_only() };
        together(&mut engine, &[drawn]);
        let after = ledger.lock().unwrap().clone();
        assert_eq!((after.tokens, after.rows.len()), (40, 10), "{model}");

        // All logits: one row for each computed token.
        let output = together(&mut engine, &[Request::greedy(prompt(10, 50), 10)]).remove(0);
        let after = ledger.lock().unwrap().clone();
        assert_eq!((output.rows, after.rows.len()), (59, 10 + 59), "{model}");
        assert!(after.rows.iter().all(|row| *row == (logits, vocab)), "{model}");
        assert_eq!((after.tokens, after.writes), (40, 0), "{model}");
    }
}

#[test]
fn preemption_reads_no_device_memory() {
    let model = TINY[0];
    let requests: Vec<Request> =
        (21..27).map(|seed| Request::greedy(prompt(seed, 20), 120).tokens_only()).collect();
    let expected = one_by_one(&mut open(model, &options(model)), &requests);
    let options = cramped(model, &EngineOptions { chunk: Some(8), ..options(model) }, 140);
    let (mut engine, ledger) = open_opaque(model, &options);
    let got = together(&mut engine, &requests);
    assert!(got.iter().map(Output::preemptions).sum::<u32>() > 0);
    assert!(expected.iter().zip(&got).all(|(expected, got)| expected.tokens == got.tokens));
    let ledger = ledger.lock().unwrap().clone();
    assert_eq!((ledger.tokens, ledger.rows.len()), (6 * 120, 0));
}

#[test]
fn a_refusal_of_the_device_is_reported() {
    let load = |model: &str, refuses| {
        let options = options(model);
        let (device, _) = OpaqueDevice::new(options.activations, refuses);
        load::open_on(&path(model), &options, Box::new(device), &mut |_, _| {})
    };
    let refusal = |model: &str, refuses| match load(model, refuses).err().unwrap() {
        Error::Engine(engine::Error::Kernel(refused)) => refused.to_string(),
        other => panic!("{other}"),
    };
    const Q6_K: u32 = 14;
    assert_eq!(refusal(QUANT[0], Refuses::Type(Q6_K)), "this backend does not serve weights of this type");
    assert_eq!(refusal(TINY[2], Refuses::Windows), "this backend does not serve sliding windows");
    // A model that does not need the refused feature is served.
    assert!(load(TINY[0], Refuses::Windows).is_ok());

    // In the middle of a step: the step fails, and no token is sent.
    let mut engine = load(TINY[0], Refuses::Attention).unwrap().engine;
    let submitted = submit(&mut engine, &Request::greedy(prompt(1, 20), 5));
    let failed = engine.step(Instant::now()).unwrap_err();
    let engine::Error::Kernel(failed) = failed else { panic!("{failed}") };
    assert!(matches!(failed, kernels::Error::Unsupported { what: "attention" }), "{failed}");
    assert!(submitted.output().tokens.is_empty());
}
