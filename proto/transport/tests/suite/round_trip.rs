//! Any value of any message survives the wire. Any bytes decode to a value or to a typed error.

use crate::samples;
use kvasir_transport::{Hello, TensorHeader, TensorType, VersionRange};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proto::block::BlockId;
use proto::codec::{self, Cap, CodecError};
use proto::event::{KvEvent, KvEventBatch, KvFrame, KvReplay, KvSnapshotFrame, Medium};
use proto::ids::{Attempt, Epoch, ModelId, NodeId, RequestId};
use proto::message::*;
use proto::placement::{Drafter, OfferedDrafter};
use proto::pull::*;
use proto::served_model::*;
use proto::shard::*;
use proto::trace::{SpanId, TraceContext, TraceId};
use proto::worker::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

fn survives<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T, cap: Cap) {
    let bytes = codec::encode(value, cap).unwrap();
    assert_eq!(&codec::decode::<T>(&bytes, cap).unwrap(), value);
}

fn block() -> impl Strategy<Value = BlockId> {
    any::<[u8; 16]>().prop_map(BlockId)
}

fn node() -> impl Strategy<Value = NodeId> {
    "[a-z0-9-]{1,63}".prop_map(|text| NodeId::new(text).unwrap())
}

fn model_id() -> impl Strategy<Value = ModelId> {
    "[A-Za-z0-9._-]{1,96}".prop_map(|text| ModelId::new(text).unwrap())
}

fn medium() -> impl Strategy<Value = Medium> {
    prop_oneof![Just(Medium::Device), Just(Medium::Host), Just(Medium::Disk)]
}

fn float() -> impl Strategy<Value = f32> {
    // NaN is not equal to itself, so the comparison would fail.
    any::<f32>().prop_filter("NaN", |x| !x.is_nan())
}

prop_compose! {
    fn sampling()(
        temperature in float(), top_k: u32, top_p in float(), min_p in float(),
        penalties in [float(), float(), float()],
        logit_bias in vec((any::<u32>(), float()), 0..8), seed: u64, seeded: bool,
        logprobs in option::of(any::<u8>()),
    ) -> Sampling {
        let [repetition_penalty, presence_penalty, frequency_penalty] = penalties;
        Sampling {
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
            logit_bias, seed, seeded, logprobs,
        }
    }
}

prop_compose! {
    fn stop()(
        max_tokens: u32, min_tokens: u32, strings in vec(".*", 0..4), token_ids in vec(any::<u32>(), 0..4),
        ignore_eos: bool,
    ) -> Stop {
        Stop { max_tokens, min_tokens, strings, token_ids, ignore_eos }
    }
}

prop_compose! {
    /// Pull source, group size, trace and tenant of a request.
    fn origin()(
        source in option::of((node(), ".*", any::<u32>())), together: u32,
        trace in option::of(any::<([u8; 16], [u8; 8])>()), tenant: u64, weight: u32,
    ) -> (Option<PullSource>, u32, Option<TraceContext>, TenantShare) {
        let pull = source.map(|(node, quic, tokens)| PullSource { node, quic, tokens });
        let trace = trace.map(|(trace, span)| TraceContext { trace: TraceId(trace), span: SpanId(span) });
        (pull, together, trace, TenantShare { tenant, weight })
    }
}

prop_compose! {
    fn image()(
        file in vec(any::<u8>(), 0..200), digest: [u8; 32], runs in vec(any::<(u32, u32)>(), 0..3),
    ) -> PromptImage {
        let runs = runs.into_iter().map(|(start, end)| start..end).collect();
        PromptImage { file: file.into(), digest, runs }
    }
}

prop_compose! {
    fn request()(
        id in "[A-Za-z0-9._:-]{1,128}", choice: u32, attempt: u32, model in model_id(), root in block(),
        prompt in vec(any::<u32>(), 0..200), emitted in vec(any::<u32>(), 0..20), sampling in sampling(),
        (stop, (pull, together, trace, tenant_share)) in (stop(), origin()), numbers: (u32, u64),
    ) -> GenerateRequest {
        let (predicted_cached, deadline_ms) = numbers;
        GenerateRequest {
            request_id: RequestId::new(id).unwrap(), choice, attempt: Attempt(attempt), model, root,
            prompt: prompt.into(), images: Vec::new(), encoders: Vec::new(), prompt_logprobs: None, emitted: emitted.into(), sampling, stop,
            predicted_cached, deadline_ms,
            pull, together, trace, grammar: None, tenant: tenant_share,
        }
    }
}

fn token() -> impl Strategy<Value = TokenOut> {
    let logprobs = (float(), vec((any::<u32>(), float()), 0..20))
        .prop_map(|(chosen, top)| TokenLogprobs { chosen, top });
    (any::<u32>(), ".*", option::of(logprobs)).prop_map(|(id, text, logprobs)| TokenOut {
        id,
        text,
        logprobs,
    })
}

fn error() -> impl Strategy<Value = GenerateError> {
    prop_oneof![
        model_id().prop_map(GenerateError::ModelNotFound),
        any::<(u64, u64)>().prop_map(|(need, limit)| GenerateError::ContextLength { need, limit }),
        (".*", ".*").prop_map(|(field, reason)| GenerateError::InvalidField { field, reason }),
        (".*", ".*").prop_map(|(field, reason)| GenerateError::Unsupported { field, reason }),
        any::<u64>().prop_map(|after_ms| GenerateError::DeadlineExceeded { after_ms }),
        Just(GenerateError::QueueFull),
        Just(GenerateError::Draining),
        Just(GenerateError::Internal),
        Just(GenerateError::NotFinite),
        ".*".prop_map(|reason| GenerateError::NoEncoder { reason }),
    ]
}

fn frame() -> impl Strategy<Value = GenerateFrame> {
    let reason =
        prop_oneof![Just(FinishReason::Stop), Just(FinishReason::Length), Just(FinishReason::Cancelled)];
    prop_oneof![
        (any::<u32>(), any::<bool>(), any::<u32>(), ".*").prop_map(
            |(cached_tokens, estimated, computed_tokens, hit_stop)| {
                GenerateFrame::Started(Started { cached_tokens, estimated, computed_tokens, hit_stop })
            }
        ),
        vec(token(), 0..8).prop_map(GenerateFrame::Tokens),
        (reason, option::of(".*"), ".*", any::<[u32; 4]>(), any::<Option<u32>>()).prop_map(
            |(reason, matched, tail, counts, cached_tokens)| {
                let [completion_tokens, preemptions, drafted_tokens, accepted_tokens] = counts;
                GenerateFrame::Finished(Finished {
                    reason,
                    matched,
                    tail,
                    completion_tokens,
                    cached_tokens,
                    preemptions,
                    drafted_tokens,
                    accepted_tokens,
                })
            }
        ),
        error().prop_map(GenerateFrame::Failed),
        vec((float(), any::<u32>(), vec((any::<u32>(), float()), 0..20)), 0..8).prop_map(|tokens| {
            let tokens = tokens.into_iter();
            GenerateFrame::Prompt(
                tokens.map(|(logprob, rank, top)| PromptLogprob { logprob, rank, top }).collect(),
            )
        }),
    ]
}

fn event() -> impl Strategy<Value = KvEvent> {
    prop_oneof![
        (block(), vec(block(), 0..20), medium()).prop_map(|(parent, units, medium)| KvEvent::Stored {
            parent,
            units,
            medium
        }),
        (vec(block(), 0..20), medium()).prop_map(|(units, medium)| KvEvent::Removed { units, medium }),
        Just(KvEvent::Cleared),
        (block(), any::<u32>(), medium()).prop_map(|(unit, position, medium)| KvEvent::ResumePoint {
            unit,
            position,
            medium
        }),
    ]
}

prop_compose! {
    fn batch()(epoch: u64, first_sequence: u64, events in vec(event(), 0..8)) -> KvEventBatch {
        KvEventBatch { epoch: Epoch(epoch), first_sequence, events }
    }
}

fn task() -> impl Strategy<Value = ModelTask> {
    prop_oneof![
        Just(ModelTask::Generate),
        Just(ModelTask::GenerateFromImages),
        any::<u32>().prop_map(|width| ModelTask::Embed { width }),
        any::<u32>().prop_map(|scores| ModelTask::Rerank { scores }),
    ]
}

prop_compose! {
    fn served()(
        id in model_id(), model_digest: [u8; 32], tokenizer_digest: [u8; 32], max_model_len: u32,
        layers: (u32, u32), numeric_class in ".*", block_tokens: u32, engine in ".*",
        hit_tokens: u32, task in task(),
    ) -> ServedModel {
        ServedModel { id, model_digest, tokenizer_digest, max_model_len, layers, numeric_class, block_tokens, engine, hit_tokens, task }
    }
}

prop_compose! {
    fn register()(
        node in node(), epoch: u64, pid: u32, quic in ".*", ops in ".*", models in vec(served(), 0..3),
        part in prop_oneof![Just(WorkPart::Prefill), Just(WorkPart::Decode), Just(WorkPart::Both)],
        pulls in vec((model_id(), any::<u64>(), any::<u64>()), 0..3), drafter in option::of(any::<[u8; 32]>()),
    ) -> Register {
        let cost = |(model, bytes_per_token, bytes_per_point)| PullCost { model, bytes_per_token, bytes_per_point };
        let drafter = drafter.map(|model_digest| OfferedDrafter {
            model_digest, drafter: Drafter::MtpHead, from_layer: 3, weight_bytes: 70_000,
            reads_embedding: false, kv_elements: 300, state_elements: 5,
        });
        Register {
            worker: WorkerInfo { node, epoch: Epoch(epoch), pid, quic, ops, models },
            part, pulls: pulls.into_iter().map(cost).collect(), capacity: None, operations: Vec::new(), drafter,
        }
    }
}

fn pull_frame() -> impl Strategy<Value = PullFrame> {
    let refusal = prop_oneof![
        Just(PullRefusal::OtherOrigin),
        Just(PullRefusal::NotHeld),
        Just(PullRefusal::Busy),
        Just(PullRefusal::Internal),
    ];
    prop_oneof![
        any::<(u32, u32)>().prop_map(|(tokens, pieces)| PullFrame::Head(PullHead { tokens, pieces })),
        any::<(u32, u32, u32, [u8; 32])>().prop_map(|(group, end, bytes, digest)| {
            PullFrame::Piece(PulledPiece { group, end, bytes, digest })
        }),
        refusal.prop_map(PullFrame::Failed),
    ]
}

prop_compose! {
    fn encode_request()(
        id in "[A-Za-z0-9._:-]{1,128}", part: u32, attempt: u32, model in model_id(), deadline_ms: u64,
        texts in vec((vec(any::<u32>(), 0..50), option::of(any::<u32>())), 0..8), (_, _, trace, _) in origin(),
    ) -> EncodeRequest {
        let text = |(tokens, segment_start)| EncodeText { tokens, segment_start };
        EncodeRequest {
            request_id: RequestId::new(id).unwrap(), part, attempt: Attempt(attempt), model,
            texts: texts.into_iter().map(text).collect(), deadline_ms, trace,
        }
    }
}

fn encode_reply() -> impl Strategy<Value = EncodeReply> {
    prop_oneof![
        any::<(u32, u32)>().prop_map(|(texts, width)| EncodeReply::Encoded(EncodedHead { texts, width })),
        error().prop_map(EncodeReply::Failed),
    ]
}

prop_compose! {
    fn load()(
        epoch: u64, state in prop_oneof![Just(WorkerState::Starting), Just(WorkerState::Ready), Just(WorkerState::Draining)],
        counts: [u32; 2], sizes: [u64; 7], rates in [float(), float(), float()], sums: [u64; 3], exact: bool,
    ) -> LoadReport {
        let [pulled_bytes, sent_bytes, failures] = sums;
        LoadReport {
            epoch: Epoch(epoch), state, running: counts[0], waiting: counts[1],
            pending_prefill_tokens: sizes[0], exact, kv_used: sizes[1], kv_total: sizes[2], steps: sizes[3],
            tokens: sizes[4], stalled_ms: sizes[5], prefill_rate: rates[0], step_ms: rates[1], rss: sizes[6],
            pulls: PullReport { rate: rates[2], pulled_bytes, sent_bytes, failures },
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn generation(request in request(), frame in frame(), images in vec(image(), 0..3)) {
        survives(&request, Cap::GenerateRequest);
        survives(&PromptImages(images), Cap::Images);
        survives(&frame, Cap::Stream);
    }

    #[test]
    fn reports(load in load()) {
        survives(&load, Cap::Control);
    }

    #[test]
    fn pulls(
        origin: [u8; 32], root in block(), tokens in vec(any::<u32>(), 0..200), have: u32, frame in pull_frame(),
    ) {
        survives(&PullRequest { origin, root, tokens, have }, Cap::GenerateRequest);
        survives(&frame, Cap::Stream);
    }

    #[test]
    fn shards(
        names in vec(any::<[u8; 32]>(), 0..MAX_CHUNKS), bytes: u32, sums: [u64; 2], struck in vec(node(), 0..5),
    ) {
        survives(&ShardRequest::Chunks(ChunkRequest { names }), Cap::GenerateRequest);
        survives(&ShardFrame::Bytes(bytes), Cap::Stream);
        let [wanted, present] = sums;
        survives(&ShippingReport { wanted, present, struck }, Cap::Control);
    }

    #[test]
    fn encoding(request in encode_request(), reply in encode_reply()) {
        survives(&request, Cap::GenerateRequest);
        survives(&reply, Cap::Stream);
    }

    #[test]
    fn registering(register in register()) {
        survives(&register, Cap::Control);
    }

    #[test]
    fn kv(
        batches in vec(batch(), 0..4),
        runs in vec((block(), vec(block(), 0..9), medium()), 0..9),
        points in vec((block(), any::<u32>(), medium()), 0..9),
        at: (u64, u64),
    ) {
        for batch in &batches {
            survives(&KvFrame::Events(batch.clone()), Cap::Events);
            survives(&KvReplay::Events(batch.clone()), Cap::Control);
        }
        survives(&KvSnapshotFrame::Runs(runs), Cap::Events);
        survives(&KvSnapshotFrame::ResumePoints(points), Cap::Events);
        survives(&KvSnapshotFrame::Begin { epoch: Epoch(at.0), sequence: at.1 }, Cap::Events);
    }

    #[test]
    fn control(register in register(), load in load(), node in node(), min: u16, max: u16, epoch: u64) {
        survives(&register, Cap::Control);
        survives(&load, Cap::Control);
        let versions = VersionRange { min, max };
        survives(&Hello { versions, node, epoch: Epoch(epoch) }, Cap::Control);
    }

    #[test]
    fn tensor_headers(name in ".*", shape in vec(any::<u64>(), 0..=8)) {
        let header = TensorHeader { name, element: TensorType::Bf16, shape: shape.clone() };
        survives(&header, Cap::Stream);
        let elements = shape.iter().try_fold(2u64, |size, n| size.checked_mul(*n));
        prop_assert_eq!(header.payload_bytes().ok().map(|n| n as u64), elements);
    }

    /// Noise and damaged messages never panic. Accepted bytes encode again to at most as many bytes,
    /// because a number may be written longer than necessary.
    #[test]
    fn damaged_messages(noise in vec(any::<u8>(), 0..64), at: prop::sample::Index, flip in 1u8..) {
        for samples in samples::all() {
            let _ = (samples.recode)(&noise, samples.cap);
            for mut bytes in samples.bytes {
                let at = at.index(bytes.len());
                bytes[at] ^= flip;
                if let Ok(again) = (samples.recode)(&bytes, samples.cap) {
                    prop_assert!(again.len() <= bytes.len());
                }
            }
        }
    }
}

#[test]
fn a_name_that_breaks_its_rule_is_refused_on_the_wire() {
    for text in ["", "UPPER", "a/b", "a b", &"x".repeat(64)] {
        let bytes = codec::encode(&text, Cap::Control).unwrap();
        let error = codec::decode::<NodeId>(&bytes, Cap::Control).unwrap_err();
        assert!(matches!(error, CodecError::Invalid { .. }), "{text:?}: {error:?}");
    }
}
