//! The encoder's thread: concurrent requests, cancellation, limits, metrics.

use crate::{model, open, options, text};
use engine::encoder::Text;
use engine::encoder::thread::EncoderHandle;
use kvasir_worker::Error;
use kvasir_worker::load::{self, EngineOptions};
use proto::ids::{Epoch, ModelId};
use proto::message::GenerateError;
use proto::served_model::ModelTask;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);

fn start(arch: &str, options: &EngineOptions) -> EncoderHandle {
    EncoderHandle::start(open(arch, options), Epoch(1), TIMEOUT, None).unwrap()
}

fn texts(lengths: &[usize]) -> Vec<Text> {
    lengths.iter().map(|len| text((0..*len as u32).map(|i| 5 + i % 300).collect())).collect()
}

/// A metric without labels, or the sum of all metrics with this prefix.
fn metric(handle: &EncoderHandle, name: &str) -> f64 {
    let text = handle.metrics_text();
    text.lines()
        .filter(|line| line.starts_with(name))
        .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap())
        .sum()
}

fn wait_until(condition: &str, reached: impl Fn() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !reached() {
        assert!(Instant::now() < end, "{condition}");
        std::thread::yield_now();
    }
}

#[test]
fn concurrent_requests_get_the_same_results_as_alone() {
    let requests = [vec![3, 40, 7], vec![150], vec![1; 100], vec![16, 17, 64, 5]];
    let mut encoder = open("bert", &options());
    let expected: Vec<Vec<Vec<f32>>> = requests
        .iter()
        .map(|lengths| {
            let alone = |text: Text| encoder.run(&[&text]).unwrap().pooled(0).unwrap();
            texts(lengths).into_iter().map(alone).collect()
        })
        .collect();
    let handle = start("bert", &EngineOptions { chunk: Some(256), ..options() });
    let answers: Vec<_> =
        requests.iter().map(|lengths| handle.encode(texts(lengths), None, None, None).unwrap()).collect();
    for (answer, expected) in answers.into_iter().zip(expected) {
        assert_eq!(answer.blocking_recv().unwrap().unwrap(), expected);
    }
    wait_until("all is counted", || metric(&handle, "vllm:request_success_total") == 4.0);
    let tokens = requests.iter().flatten().sum::<usize>() as f64;
    assert_eq!(metric(&handle, "vllm:prompt_tokens_total"), tokens);
    assert_eq!(metric(&handle, "vllm:request_queue_time_seconds_count"), 4.0);
    wait_until("nothing is left", || handle.load().running + handle.load().waiting == 0 && !handle.busy());
    let load = handle.load();
    assert!(load.steps >= 2 && load.prefill_rate > 0.0 && load.pending_prefill_tokens == 0, "{load:?}");
    handle.stop();
}

#[test]
fn invalid_texts_are_refused_and_others_are_served() {
    let handle = start("bert", &options());
    let longest = 256;
    let refused = |texts: Vec<Text>| handle.encode(texts, None, None, None).map(drop).unwrap_err();
    let too_long = GenerateError::ContextLength { need: longest as u64 + 1, limit: longest as u64 };
    assert_eq!(refused(texts(&[3, longest + 1])), too_long);
    for wrong in
        [vec![], texts(&[0]), vec![text(vec![5, 448])], vec![Text { tokens: vec![5], second: Some(2) }]]
    {
        assert!(matches!(refused(wrong), GenerateError::InvalidField { .. }));
    }
    let answer = handle.encode(texts(&[longest]), None, None, None).unwrap();
    assert_eq!(answer.blocking_recv().unwrap().unwrap()[0].len(), 64);
}

#[test]
fn late_requests_fail_and_canceled_ones_are_dropped() {
    let handle = start("bert", &options());
    // Queued first, so that the others are still waiting when they are canceled.
    let first = handle.encode(texts(&[200; 64]), None, None, None).unwrap();
    let expired = handle.encode(texts(&[5]), Some(Instant::now()), None, None).unwrap();
    drop(handle.encode(texts(&[200; 64]), None, None, None).unwrap());
    assert!(matches!(expired.blocking_recv().unwrap(), Err(GenerateError::DeadlineExceeded { .. })));
    assert_eq!(first.blocking_recv().unwrap().unwrap().len(), 64);
    wait_until("the books are empty", || !handle.busy());
    let ended = |reason: &str| {
        metric(&handle, &format!("vllm:request_success_total{{finished_reason=\"{reason}\"}}"))
    };
    wait_until("every end is counted", || (ended("stop"), ended("error"), ended("abort")) == (1.0, 1.0, 1.0));
}

#[test]
fn a_full_queue_refuses_but_an_empty_one_takes_anything() {
    let handle = start("bert", &options());
    let mut waiting = Vec::new();
    let refused = loop {
        match handle.encode(texts(&[250; 256]), None, None, None) {
            Ok(answer) => waiting.push(answer),
            Err(error) => break error,
        }
        assert!(waiting.len() < 1000, "never full");
    };
    assert_eq!(refused, GenerateError::QueueFull);
    assert!(waiting.len() >= 15, "{} requests of 64,000 tokens", waiting.len());
    waiting.clear();
    wait_until("all are forgotten", || !handle.busy());
    handle.encode(texts(&[5]), None, None, None).unwrap().blocking_recv().unwrap().unwrap();
}

#[test]
fn a_model_reports_its_task_and_is_refused_for_another() {
    let served = open("bert", &options()).served(ModelId::new("b").unwrap());
    assert_eq!((served.task, served.max_model_len), (ModelTask::Embed { width: 64 }, 256));
    assert!(served.numeric_class.ends_with("/kv-f32"), "{}", served.numeric_class);
    assert_eq!(load::task(&model("llama")).unwrap(), ModelTask::Generate);
    let generating = load::encoder(&model("llama"), &options(), &mut |_, _| {}).err().unwrap();
    assert!(matches!(generating, Error::WrongTask { .. }), "{generating}");
    let encoding = load::open(&model("bert"), &options(), &mut |_, _| {}).err().unwrap();
    assert!(encoding.to_string().contains("kvasir embed"), "{encoding}");
    let cramped = EngineOptions { kv_bytes: Some(1000), ..options() };
    let refused = load::encoder(&model("bert"), &cramped, &mut |_, _| {}).err().unwrap();
    assert!(matches!(refused, Error::Engine(engine::Error::KvMemory { .. })), "{refused}");
}
