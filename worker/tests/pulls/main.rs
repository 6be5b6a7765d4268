//! Worker services that transfer KV from each other over QUIC. A transferred prefix gives the same answer as
//! a computed one, `cached` reports the transferred tokens, and any fault of a holder leads to computing.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod cluster;
#[cfg(feature = "ptx-sim")]
mod devices;
mod holder;

use cluster::{Cluster, Generated, options, with_timeout};
use holder::{Fault, Holder, Notice};
use kernels::backend::{KvType, KvTypes};
use kvasir_worker::load::EngineOptions;
use std::time::Duration;

/// Full attention, sliding windows, delta net, Mamba-2.
const KINDS: [&str; 4] = [
    "tiny/llama/llama-f32",
    "tiny/gemma3/gemma3-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/granitehybrid/granitehybrid-f32",
];
const LLAMA: &str = KINDS[0];
/// Maximum number of a prompt's tokens that are transferred.
const SERVED: u32 = 192;

fn prompt() -> Vec<u32> {
    (0..200).map(|i| 5 + (i * i * 31 + i * 7) % 350).collect()
}

/// Asserts equal tokens with equal log-probabilities, bit by bit.
fn assert_same(case: &str, answer: &Generated, expected: &Generated) {
    assert_eq!(answer.tokens, expected.tokens, "{case}");
    let bits = |answer: &Generated| -> Vec<u32> {
        let of = |logprobs: &proto::message::TokenLogprobs| {
            let top: Vec<u32> = logprobs.top.iter().flat_map(|(id, value)| [*id, value.to_bits()]).collect();
            [vec![logprobs.chosen.to_bits()], top].concat()
        };
        answer.logprobs.iter().flat_map(of).collect()
    };
    assert_eq!(bits(answer), bits(expected), "{case}");
}

async fn computed(cluster: &Cluster, model: &str, kv_type: impl Into<KvTypes>) -> Generated {
    let alone = EngineOptions { prefix_cache: false, ..options(kv_type) };
    let worker = cluster.worker("alone", model, alone).await;
    let answer = worker.generate(&prompt(), None).await;
    assert_eq!((answer.cached, answer.tokens.len(), answer.logprobs.len()), (0, 12, 12));
    worker.service.stop().await;
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pulled_prefix_answers_as_a_computed_one() {
    let small = [
        KvTypes::both(KvType::Fp8),
        KvTypes::both(KvType::Q4_0),
        KvTypes { k: KvType::Q8_0, v: KvType::Q4_0 },
    ];
    let kinds = KINDS.map(|model| (model, KvTypes::both(KvType::F32)));
    for (model, types) in kinds.into_iter().chain(small.map(|types| (LLAMA, types))) {
        let cluster = Cluster::new();
        let expected = computed(&cluster, model, types).await;
        let holder = cluster.worker("holds", model, options(types)).await;
        assert_same(model, &holder.generate(&prompt(), None).await, &expected);
        let puller = cluster.worker("pulls", model, options(types)).await;
        let answer = puller.generate(&prompt(), Some(holder.source(SERVED))).await;
        assert_same(model, &answer, &expected);
        assert_eq!((answer.cached, &*answer.lookup), (SERVED, "prompt_end transfer=192"), "{model}");
        // Both workers report the same number of bytes.
        let bytes = puller.metric("kvasir_block_transfer_bytes_total{direction=\"pulled\"}").await;
        assert!(bytes > 0.0, "{model}");
        assert_eq!(
            holder.metric("kvasir_block_transfer_bytes_total{direction=\"sent\"}").await,
            bytes,
            "{model}"
        );
        assert_eq!(puller.metric("kvasir_block_transfer_seconds_count").await, 1.0, "{model}");
        let equals_bytes = |pulled: u64| pulled as f64 == bytes;
        puller
            .wait_for_report("what was pulled", |r| {
                equals_bytes(r.pulled_bytes) && r.rate > 0.0 && r.failures == 0
            })
            .await;
        holder.wait_for_report("what was sent", |r| equals_bytes(r.sent_bytes)).await;
        // The prefix is then in the cache, and can be transferred to others.
        let again = puller.generate(&prompt(), Some(holder.source(SERVED))).await;
        assert_same(model, &again, &expected);
        assert_eq!(again.cached, SERVED, "{model}");
        let third = cluster.worker("third", model, options(types)).await;
        assert_eq!(third.generate(&prompt(), Some(puller.source(SERVED))).await.cached, SERVED, "{model}");
        for worker in [holder, puller, third] {
            worker.wait_until_idle().await;
            worker.service.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_holder_does_wrong_is_computed() {
    for model in KINDS {
        let cluster = Cluster::new();
        let expected = computed(&cluster, model, KvType::F32).await;
        let faults = [
            (Fault::None, SERVED, ""),
            (Fault::FlippedBit, 0, "damaged"),
            (Fault::OtherTokens, 0, "damaged"),
            (Fault::LongPiece, 0, "damaged"),
            (Fault::Repeats, 0, "damaged"),
            // For a model without windows and states, pieces that arrived before the fault are used. The end
            // of a connection overtakes data in flight.
            (Fault::Dies, if model == LLAMA { 48 } else { 0 }, "lost"),
        ];
        for (fault, cached, reason) in faults {
            let case = format!("{model}, {fault:?}");
            let holder = Holder::start(&cluster, "holder", model, &prompt(), fault);
            let worker = cluster.worker("pulls", model, options(KvType::F32)).await;
            let answer = worker.generate(&prompt(), Some(holder.source(SERVED))).await;
            assert_same(&case, &answer, &expected);
            let as_expected = answer.cached == cached || (fault == Fault::Dies && answer.cached < cached);
            assert!(as_expected, "{case}: {} cached, {}", answer.cached, answer.lookup);
            if !reason.is_empty() {
                let series = format!("kvasir_block_transfer_failures_total{{reason=\"{reason}\"}}");
                assert_eq!(worker.metric(&series).await, 1.0, "{case}");
            }
            // The computed prefix is cached as usual.
            assert_eq!(worker.generate(&prompt(), None).await.cached, SERVED, "{case}");
            worker.wait_until_idle().await;
            worker.service.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_holder_is_canceled_at_the_time_limit() {
    let cluster = Cluster::new();
    let expected = computed(&cluster, LLAMA, KvType::F32).await;
    let mut holder = Holder::start(&cluster, "holder", LLAMA, &prompt(), Fault::Silent);
    let hasty = EngineOptions { pull_timeout: Some(Duration::from_millis(500)), ..options(KvType::F32) };
    let worker = cluster.worker("pulls", LLAMA, hasty).await;
    let answer = worker.generate(&prompt(), Some(holder.source(SERVED))).await;
    assert_same("silent", &answer, &expected);
    assert!(answer.cached <= 48, "{}", answer.lookup);
    assert_eq!(worker.metric("kvasir_block_transfer_failures_total{reason=\"timed_out\"}").await, 1.0);
    // If not even the connection was established in time, there are no notices.
    if answer.cached > 0 {
        assert_eq!(with_timeout("pieces", holder.notices.recv()).await, Some(Notice::Silent));
        assert_eq!(with_timeout("the end", holder.notices.recv()).await, Some(Notice::Cancelled));
    }
    worker.wait_until_idle().await;
    worker.service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_canceled_request_cancels_its_transfer() {
    let cluster = Cluster::new();
    let mut holder = Holder::start(&cluster, "holder", LLAMA, &prompt(), Fault::Silent);
    let worker = cluster.worker("pulls", LLAMA, options(KvType::F32)).await;
    let stream = worker.open(&prompt(), Some(holder.source(SERVED))).await;
    assert_eq!(with_timeout("pieces", holder.notices.recv()).await, Some(Notice::Silent));
    drop(stream);
    assert_eq!(with_timeout("the end", holder.notices.recv()).await, Some(Notice::Cancelled));
    worker.wait_until_idle().await;
    let answer = worker.generate(&prompt(), None).await;
    assert_eq!((answer.cached, &*answer.lookup), (0, "not_cached group=0 token=0"));
    worker.wait_until_idle().await;
    worker.service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_holder_or_one_of_another_class_is_not_used() {
    let cluster = Cluster::new();
    let expected = computed(&cluster, LLAMA, KvType::F16).await;
    let worker = cluster.worker("pulls", LLAMA, options(KvType::F16)).await;
    let holder = Holder::start(&cluster, "holder", LLAMA, &prompt(), Fault::None);
    let answer = worker.generate(&prompt(), Some(holder.source(SERVED))).await;
    assert_same("another class", &answer, &expected);
    assert_eq!((answer.cached, &*answer.lookup), (0, "not_cached group=0 token=0 transfer=refused"));

    // The certificate identifies the node, whatever the address.
    let other = cluster.worker("other", LLAMA, options(KvType::F16)).await;
    let mut impostor = holder.source(SERVED);
    impostor.node = proto::ids::NodeId::new("pulls").unwrap();
    let answer = other.generate(&prompt(), Some(impostor)).await;
    assert_same("an impostor", &answer, &expected);
    assert_eq!(answer.cached, 0);
    let nowhere = proto::pull::PullSource { quic: "nowhere".into(), ..holder.source(SERVED) };
    let answer = other.generate(&prompt()[1..], Some(nowhere)).await;
    assert_eq!((answer.cached, &*answer.lookup), (0, "not_cached group=0 token=0 transfer=unreachable"));
    assert_eq!(other.metric("kvasir_block_transfer_failures_total{reason=\"unreachable\"}").await, 2.0);
    for worker in [worker, other] {
        worker.wait_until_idle().await;
        worker.service.stop().await;
    }
}

/// Compares transferring with computing for a given model. A measurement, not a check: run it alone on a
/// quiet machine, in an optimized build.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement: KVASIR_PULL_MODEL names a model"]
async fn pulling_beside_computing() {
    let model = std::env::var("KVASIR_PULL_MODEL").unwrap();
    let model = model.trim_end_matches(".gguf");
    let options = || EngineOptions {
        threads: Some(1),
        pull_timeout: options(KvType::F16).pull_timeout,
        ..EngineOptions::default()
    };
    let cluster = Cluster::new();
    let holder = cluster.worker("holds", model, options()).await;
    let puller = cluster.worker("pulls", model, options()).await;
    println!("{:>7} {:>12} {:>12} {:>12}", "tokens", "computed, s", "pulled, s", "MB");
    for (round, tokens) in [512u32, 1_024, 2_048, 4_096].into_iter().cycle().take(12).enumerate() {
        // Each round's prompts start with a different token, so they share no prefix.
        let prompt: Vec<u32> =
            (0..tokens).map(|i| if i == 0 { 100 + round as u32 } else { 5 + (i * 31) % 350 }).collect();
        let first = async |worker: &cluster::Worker, source| {
            let started = std::time::Instant::now();
            let mut stream = worker.open(&prompt, source).await;
            with_timeout("the first frame", stream.next()).await.unwrap().unwrap();
            started.elapsed().as_secs_f64()
        };
        let computed = first(&holder, None).await;
        holder.wait_until_idle().await;
        let before = puller.metric("kvasir_block_transfer_bytes_total{direction=\"pulled\"}").await;
        let pulled = first(&puller, Some(holder.source(tokens))).await;
        puller.wait_until_idle().await;
        let bytes = puller.metric("kvasir_block_transfer_bytes_total{direction=\"pulled\"}").await - before;
        println!("{tokens:>7} {computed:>12.4} {pulled:>12.4} {:>12.2}", bytes / 1e6);
    }
}
