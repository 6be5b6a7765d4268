//! One value of every variant of everything that crosses the wire or is written to disk.

use kvasir_proto::block::{BlockId, ClusterKey};
use kvasir_proto::codec::{self, Cap, CodecError};
use kvasir_proto::event::{
    KvEvent, KvEventBatch, KvFrame, KvReplay, KvSnapshotFrame, Medium, PeerIndexAsk, PeerIndexAskV1,
    PeerIndexFrame,
};
use kvasir_proto::ids::{Attempt, Epoch, ModelId, NodeId, RequestId};
use kvasir_proto::message::*;
use kvasir_proto::operation::*;
use kvasir_proto::placement::{
    CapacityV1, ClaimRefusal, DrafterV1, LeadReportV1, LeadState, LeadV1, LeaseAnswer, LeaseBeat,
    ModelFileV1, OfferedDrafterV1, PlaceOrder, PlaceOrderV1, PlaceOrderV2, PlaceReport, PlaceReportV1,
    PlacedStageV1, RegisterV4, RegisterV5, StageClaim, StageClaimV1,
};
use kvasir_proto::pull::*;
use kvasir_proto::sequence::*;
use kvasir_proto::service::{
    CertificateReport, CertificateReportV1, CoordinatorApiRequest, CoordinatorApiResponse, Refusal,
};
use kvasir_proto::service::{WorkerApiRequest, WorkerApiResponse};
use kvasir_proto::shard::*;
use kvasir_proto::stage::blocks::*;
use kvasir_proto::stage::*;
use kvasir_proto::trace::{SpanId, TraceContext, TraceId};
use kvasir_proto::transport::{
    Hello, HelloV1, Revocations, RevocationsV1, TensorHeader, TensorHeaderV1, TensorType, VersionRange,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

mod stages;
pub(crate) use stages::*;

/// A message type with its samples, seen through its bytes.
pub(crate) struct Samples {
    pub(crate) name: &'static str,
    pub(crate) cap: Cap,
    pub(crate) bytes: Vec<Vec<u8>>,
    /// Decodes, and encodes again what was decoded.
    pub(crate) recode: fn(&[u8], Cap) -> Result<Vec<u8>, CodecError>,
}

fn samples<T: Serialize + DeserializeOwned + Debug>(
    name: &'static str,
    cap: Cap,
    values: impl IntoIterator<Item = T>,
) -> Samples {
    Samples {
        name,
        cap,
        bytes: values.into_iter().map(|value| codec::encode(&value, cap).unwrap()).collect(),
        recode: |bytes, cap| codec::encode(&codec::decode::<T>(bytes, cap)?, cap),
    }
}

pub(crate) fn id(n: u8) -> BlockId {
    BlockId([n; 16])
}

fn prefix_note() -> PrefixNote {
    let numbered = |number, tokens| Some(NumberedPrefixV1 { number, tokens });
    PrefixNote::V1(PrefixNoteV1 { after: numbered(300, 7_200), keep: numbered(301, 70_000) })
}

pub(crate) fn request() -> GenerateRequest {
    GenerateRequest::V1(GenerateRequestV1 {
        request_id: RequestId::new("req-1").unwrap(),
        choice: 1,
        attempt: Attempt(2),
        model: ModelId::new("smollm2-135m").unwrap(),
        root: id(0xab),
        prompt: vec![1, 300, 70_000],
        emitted: vec![42],
        sampling: Sampling {
            temperature: 0.5,
            logit_bias: vec![(7, -1.5)],
            logprobs: Some(3),
            ..Sampling::default()
        },
        stop: Stop { max_tokens: 16, strings: vec!["\n\n".into()], token_ids: vec![2], ..Stop::default() },
        predicted_cached: 1488,
        deadline_ms: 30_000,
    })
}

fn model() -> ServedModelV1 {
    ServedModelV1 {
        id: ModelId::new("smollm2-135m").unwrap(),
        model_digest: [1; 32],
        tokenizer_digest: [2; 32],
        max_model_len: 8192,
        layers: (0, 30),
        numeric_class: "cpu".into(),
        block_tokens: 16,
    }
}

pub(crate) fn register(node: &str) -> Register {
    Register::V1(RegisterV1 {
        node: NodeId::new(node).unwrap(),
        epoch: Epoch(1_795_000_000),
        pid: 4242,
        quic: "127.0.0.1:7000".into(),
        ops: "127.0.0.1:9090".into(),
        models: vec![model()],
    })
}

/// With a place to pull from.
pub(crate) fn request_v2() -> GenerateRequest {
    let source =
        PullSourceV1 { node: NodeId::new("w2").unwrap(), quic: "10.0.0.2:7001".into(), tokens: 1488 };
    GenerateRequest::V2(GenerateRequestV2 { pull: Some(source), ..request().into_latest().request.into() })
}

/// With packed tokens.
pub(crate) fn request_v3() -> GenerateRequest {
    let grammar = GrammarV1 {
        field: "response_format".into(),
        syntax: GrammarSyntax::Lark,
        text: "start: \"a\"".into(),
        trigger: Some("<tool_call>".into()),
    };
    let request = request_v2().into_latest().request;
    GenerateRequest::V3(GenerateRequestV3 { trace: Some(trace()), grammar: Some(grammar), ..request })
}

/// With its tenant.
pub(crate) fn request_v4() -> GenerateRequest {
    let request = request_v3().into_latest().request;
    let turn = TenantTurnV1 { tenant: 0x0807_0605_0403_0201, weight: 300 };
    GenerateRequest::V4(GenerateRequestV4 { request, turn })
}

pub(crate) fn pull_request() -> PullRequest {
    PullRequest::V1(PullRequestV1 { origin: [3; 32], root: id(5), tokens: vec![1, 70_000], have: 300 })
}

fn trace() -> TraceContext {
    TraceContext { trace: TraceId([9; 16]), span: SpanId([7; 8]) }
}

pub(crate) fn shard_requests() -> Vec<ShardRequest> {
    let names = vec![[1; 32], [2; 32]];
    vec![ShardRequest::Manifest(ModelRefV1::Digest([8; 32])), ShardRequest::Chunks(ChunksV1 { names })]
}

pub(crate) fn certificate_report() -> CertificateReport {
    CertificateReport::V1(CertificateReportV1 { ends: 1_800_000_000 })
}

pub(crate) fn shipping_report() -> ShippingReport {
    let struck = vec![NodeId::new("w2").unwrap()];
    ShippingReport::V1(ShippingReportV1 { wanted: 70_000, present: 300, struck })
}

pub(crate) fn pull_frames() -> Vec<PullFrame> {
    vec![
        PullFrame::Head(PullHeadV1 { tokens: 70_000, pieces: 300 }),
        PullFrame::Piece(PulledPieceV1 { group: 1, end: 300, bytes: 70_000, digest: [4; 32] }),
        PullFrame::Failed(PullRefusal::NotHeld),
    ]
}

/// A worker with a model of each task.
pub(crate) fn register_v2(node: &str) -> Register {
    let RegisterV2 { node, epoch, pid, quic, ops, .. } = register(node).into_latest().worker.worker.worker;
    let tasks = [ModelTask::Generate, ModelTask::Embed { width: 384 }, ModelTask::Rerank { scores: 1 }];
    let models = tasks.map(|task| ServedModelV2 { task, ..model().into() });
    Register::V2(RegisterV2 { node, epoch, pid, quic, ops, models: models.into() })
}

/// A worker for decoding.
pub(crate) fn register_v3(node: &str) -> Register {
    let latest = register(node).into_latest().worker.worker;
    let model = latest.worker.models[0].id.clone();
    let pulls = vec![PullCostV1 { model, bytes_per_token: 23_040, bytes_per_point: 70_000 }];
    Register::V3(RegisterV3 { part: WorkPart::Decode, pulls, ..latest })
}

/// A worker of the pool.
pub(crate) fn register_v4(node: &str) -> Register {
    let latest = register(node).into_latest().worker;
    let files = vec![ModelFileV1 { model: ModelId::new("m").unwrap(), digest: [1; 32] }];
    let capacity =
        CapacityV1 { memory: 70_000 << 20, bandwidth: 40_000_000_000, compute: 100_000_000_000, files };
    let operations = vec![offered_operation()];
    Register::V4(RegisterV4 { capacity: Some(capacity), operations, ..latest })
}

/// The same, beside whose model a drafter guesses.
pub(crate) fn register_v5(node: &str) -> Register {
    let Register::V4(worker) = register_v4(node) else { unreachable!("it is of the fourth version") };
    let drafter = OfferedDrafterV1 {
        model_digest: [1; 32],
        drafter: DrafterV1::Assistant([2; 32]),
        from_layer: 300,
        weight_bytes: 70_000,
        reads_embedding: true,
        kv_elements: 300,
        state_elements: 3,
    };
    Register::V5(RegisterV5 { worker, drafter: Some(drafter) })
}

fn offered_operation() -> OfferedOperationV1 {
    OfferedOperationV1 {
        operation: Operation::Vad,
        model: ModelId::new("silero-vad").unwrap(),
        backend: "onnx".into(),
    }
}

pub(crate) fn operation_request() -> OperationRequest {
    OperationRequest::V1(OperationRequestV1 {
        request_id: RequestId::new("req-1").unwrap(),
        operation: Operation::TurnDetection,
        model: Some(ModelId::new("smart-turn").unwrap()),
        sample_rate: 16_000,
        options: OperationOptions::Turn(TurnOptionsV1 { threshold: Some(0.5) }),
        trace: Some(trace()),
    })
}

pub(crate) fn opened_operation() -> OpenedOperationV1 {
    OpenedOperationV1 {
        backend: "onnx".into(),
        model: ModelId::new("silero-vad").unwrap(),
        sample_rate: 16_000,
        window: 512,
        idle_timeout_ms: 30_000,
    }
}

fn operation_outputs() -> Vec<OperationOutput> {
    vec![
        OperationOutput::Opened(opened_operation()),
        OperationOutput::Windows(vec![WindowV1 { start: 70_144, probability: 0.5 }]),
        OperationOutput::SpeechStarted { at: 70_144 },
        OperationOutput::SpeechEnded { at: 71_168 },
        OperationOutput::Turn(TurnV1 { at: 70_144, complete: true, probability: 0.75 }),
        OperationOutput::Text(SpokenTextV1 {
            text: "so".into(),
            start: 300,
            end: 70_144,
            window: 0,
            tokens: vec![7, 70_000],
            mean_log: -0.25,
            silence: 0.125,
        }),
        OperationOutput::Segmented { at: 70_144 },
        OperationOutput::Restarted,
        OperationOutput::Finished { samples: 70_144 },
        OperationOutput::Failed(OperationError::Draining),
        OperationOutput::Language(LanguageV1 { code: "en".into(), probability: 0.75 }),
    ]
}

fn operation_errors() -> Vec<OperationError> {
    let (operation, model) = (Operation::Asr, ModelId::new("m").unwrap());
    vec![
        OperationError::NotServed { operation },
        OperationError::ModelNotFound { operation, model },
        OperationError::InvalidField { field: "sample_rate".into(), reason: "44100, not 16000".into() },
        OperationError::TooManySessions { limit: 300 },
        OperationError::Draining,
        OperationError::Idle { after_ms: 30_000 },
        OperationError::TooLong { limit: 70_000 },
        OperationError::Internal,
        OperationError::NotFinite,
    ]
}

fn place_order() -> PlaceOrderV1 {
    let stage = |node: &str, layers| PlacedStageV1 {
        at: StageAddressV1 { node: NodeId::new(node).unwrap(), quic: "10.0.0.3:7001".into() },
        layers,
    };
    let lead = LeadV1 {
        life: 70_000,
        model: ModelId::new("m").unwrap(),
        model_digest: [1; 32],
        cache_bytes: 70_000,
        stages: vec![stage("w1", (0, 15)), stage("w3", (15, 300))],
    };
    PlaceOrderV1 { version: 300, lead: Some(lead), holders: vec!["10.0.0.3:7001".into()] }
}

fn place_report() -> PlaceReport {
    let leads = LeadReportV1 {
        life: 70_000,
        state: LeadState::Waiting,
        attempts: 3,
        reason: "stage 1 is lost".into(),
    };
    PlaceReport::V1(PlaceReportV1 { leads: Some(leads), holds: Some(300) })
}

pub(crate) fn stage_claim() -> StageClaim {
    StageClaim::V1(StageClaimV1 { replica: ReplicaId([6; 16]), life: 70_000, epoch: Epoch(300) })
}

fn load_v2() -> LoadReport {
    let pulls = PullReportV1 { rate: 1e9, pulled_bytes: 70_000, sent_bytes: 300, failures: 2 };
    LoadReport::V2(LoadReportV2 { load: load(WorkerState::Ready), pulls })
}

pub(crate) fn encode_request_v2() -> EncodeRequest {
    let trace = Some(TraceContext { trace: TraceId([2; 16]), span: SpanId([3; 8]) });
    EncodeRequestV2 { trace, ..encode_request().into_latest() }.at_version(4)
}

pub(crate) fn encode_request() -> EncodeRequest {
    EncodeRequest::V1(EncodeRequestV1 {
        request_id: RequestId::new("req-1").unwrap(),
        part: 3,
        attempt: Attempt(2),
        model: ModelId::new("minilm-l6").unwrap(),
        texts: vec![
            EncodeTextV1 { tokens: vec![101, 7592, 102], segment_start: None },
            EncodeTextV1 { tokens: vec![101, 70_000, 102, 7, 102], segment_start: Some(3) },
        ],
        deadline_ms: 30_000,
    })
}

pub(crate) fn load(state: WorkerState) -> LoadReportV1 {
    LoadReportV1 {
        epoch: Epoch(3),
        state,
        running: 1,
        waiting: 2,
        pending_prefill_tokens: 3000,
        kv_used: 1 << 30,
        kv_total: 1 << 40,
        steps: 5,
        tokens: 6,
        stalled_ms: 7,
        prefill_rate: 1000.0,
        step_ms: 8.5,
        rss: 1 << 31,
    }
}

pub(crate) fn registered() -> Registered {
    let cluster_key = ClusterKey([9; 32]);
    Registered::V1(RegisteredV1 { lease_ms: 5000, report_every_ms: 500, cluster_key })
}

pub(crate) fn status() -> WorkerStatus {
    WorkerStatus::V1(WorkerStatusV1 {
        node: NodeId::new("w1").unwrap(),
        models: vec![model()],
        load: load(WorkerState::Ready),
        kv_sequence: 12,
        uptime_ms: 13,
    })
}

fn errors() -> Vec<GenerateError> {
    vec![
        GenerateError::ModelNotFound(ModelId::new("m").unwrap()),
        GenerateError::ContextLength { need: 9000, limit: 8192 },
        GenerateError::InvalidField { field: "top_p".into(), reason: "2 > 1".into() },
        GenerateError::QueueFull,
        GenerateError::Draining,
        GenerateError::DeadlineExceeded { after_ms: 100 },
        GenerateError::Internal,
        GenerateError::NotFinite,
    ]
}

fn finished(reason: FinishReason) -> GenerateFrame {
    let matched = Some("\n\n".into());
    GenerateFrame::Finished(FinishedV1 {
        reason,
        matched,
        tail: "x".into(),
        completion_tokens: 3,
        preemptions: 1,
        drafted_tokens: 8,
        accepted_tokens: 2,
    })
}

pub(crate) fn frames() -> Vec<GenerateFrame> {
    let logprobs = Some(TokenLogprobs { chosen: -0.5, top: vec![(1, -0.5), (2, -1.0)] });
    let tokens = vec![
        TokenOut { id: 5, text: "é".into(), logprobs: None },
        TokenOut { id: 70_000, text: String::new(), logprobs },
    ];
    vec![
        GenerateFrame::Started(StartedV1 { cached_tokens: 16, computed_tokens: 4, hit_stop: "end".into() }),
        GenerateFrame::Tokens(tokens),
        finished(FinishReason::Stop),
        GenerateFrame::Failed(GenerateError::Internal),
    ]
}

fn events() -> Vec<KvEvent> {
    vec![
        KvEvent::Stored { parent: id(1), units: vec![id(2), id(3)], medium: Medium::Device },
        KvEvent::Removed { units: vec![id(3)], medium: Medium::Host },
        KvEvent::Cleared,
        KvEvent::ResumePoint { unit: id(2), position: 16, medium: Medium::Disk },
    ]
}

pub(crate) fn batch(first_sequence: u64) -> KvEventBatch {
    KvEventBatch { epoch: Epoch(3), first_sequence, events: events() }
}

fn refusals() -> Vec<Refusal> {
    vec![
        Refusal::NotYourName { claimed: NodeId::new("w2").unwrap() },
        Refusal::StaleEpoch { known: Epoch(8) },
        Refusal::NotRegistered,
        Refusal::ModelDiffers { model: "m".into() },
        Refusal::AlreadyHere { at: "h:1".into() },
        Refusal::SettingsDiffer { settings: "cluster_key".into() },
    ]
}

pub(crate) fn sequence_name(choice: u32) -> SequenceName {
    SequenceName { request: RequestId::new("req-1").unwrap(), choice }
}

pub(crate) fn sequence_request(operation: SequenceOperation) -> SequenceRequest {
    let model = ModelId::new("smollm2-135m").unwrap();
    SequenceRequest::V1(SequenceRequestV1 { model, root: id(5), operation })
}

pub(crate) fn sequence_operations() -> Vec<SequenceOperation> {
    use SequenceOperation::*;
    vec![
        List,
        Save { sequence: sequence_name(0), medium: SaveMedium::Disk },
        Fetch { sequence: sequence_name(1) },
        Restore { snapshot: sequence_name(0), name: sequence_name(300) },
        Upload { name: sequence_name(0), bytes: 70_000 },
        Fork { sequence: sequence_name(0), name: sequence_name(1) },
        Reset { sequence: sequence_name(0), keep: 70_000 },
        Drop { sequence: sequence_name(0) },
        Pin { tokens: vec![1, 70_000], ttl_ms: 3_600_000 },
        Unpin { pin: 300 },
    ]
}

fn sequence_info() -> SequenceInfoV1 {
    SequenceInfoV1 { name: sequence_name(0), tokens: 40, cached: 32, live: true }
}

fn snapshot_info() -> SnapshotInfoV1 {
    SnapshotInfoV1 { name: sequence_name(0), bytes: 70_000, medium: SaveMedium::Memory }
}

fn pin_info() -> PinInfoV1 {
    PinInfoV1 { pin: 3, tokens: 96, ttl_ms: 70_000, pinned_bytes: 1 << 20, budget_bytes: 1 << 22 }
}

pub(crate) fn sequence_replies() -> Vec<SequenceReply> {
    let list = SequenceListV1 {
        sequences: vec![sequence_info()],
        snapshots: vec![snapshot_info()],
        pins: vec![pin_info()],
    };
    vec![
        SequenceReply::List(list),
        SequenceReply::Sequence(sequence_info()),
        SequenceReply::Saved(snapshot_info()),
        SequenceReply::Bytes(70_000),
        SequenceReply::Pinned(pin_info()),
        SequenceReply::Done,
        SequenceReply::Failed(SequenceError::Internal),
    ]
}

pub(crate) fn sequence_errors() -> Vec<SequenceError> {
    vec![
        SequenceError::Unknown { what: "sequence req-1".into() },
        SequenceError::Live(sequence_name(2)),
        SequenceError::InvalidField { field: "keep".into(), reason: "0 is below 1".into() },
        SequenceError::NotThisSnapshot("the snapshot's model is a, this worker has b".into()),
        SequenceError::OverBudget { what: "pins".into(), wanted: 70_000, limit: 300 },
        SequenceError::NoRoom { tokens: 70_000 },
        SequenceError::QueueFull,
        SequenceError::Unsupported("this worker encodes texts".into()),
        SequenceError::Internal,
    ]
}

pub(crate) fn all() -> Vec<Samples> {
    use Cap::{Control, Events, GenerateRequest as Request, Stream};
    let elements = [TensorType::U8, TensorType::I32, TensorType::F32, TensorType::F16, TensorType::Bf16];
    let tensor = |shape| TensorHeaderV1 { name: "k".into(), element: TensorType::F16, shape };
    let versions = VersionRange { min: 1, max: 300 };
    let node = NodeId::new("w1").unwrap();
    vec![
        samples("Hello", Control, [Hello::V1(HelloV1 { versions, node, epoch: Epoch(3) })]),
        samples("Revocations", Stream, [Revocations::V1(RevocationsV1 { list: vec![0x30, 0] })]),
        samples("GenerateRequest", Request, [request(), request_v2(), request_v3(), request_v4()]),
        samples("PrefixNote", Request, [prefix_note()]),
        samples("GenerateFrame", Stream, frames()),
        samples("GenerateError", Stream, errors()),
        samples("FinishReason", Stream, [FinishReason::Stop, FinishReason::Length, FinishReason::Cancelled]),
        samples("EncodeRequest", Request, [encode_request(), encode_request_v2()]),
        samples(
            "EncodeReply",
            Stream,
            [
                EncodeReply::Encoded(EncodedV1 { texts: 2, width: 384 }),
                EncodeReply::Failed(GenerateError::Draining),
            ],
        ),
        samples(
            "ModelTask",
            Control,
            [ModelTask::Generate, ModelTask::Embed { width: 384 }, ModelTask::Rerank { scores: 1 }],
        ),
        samples(
            "Register",
            Control,
            [register("w1"), register_v2("w1"), register_v3("w1"), register_v4("w1"), register_v5("w1")],
        ),
        samples(
            "PlaceOrder",
            Control,
            [
                PlaceOrder::V1(place_order()),
                PlaceOrder::V2(PlaceOrderV2 {
                    order: place_order(),
                    drafter: Some(DrafterV1::Assistant([2; 32])),
                }),
            ],
        ),
        samples(
            "DrafterV1",
            Control,
            [DrafterV1::Appended, DrafterV1::Assistant([2; 32]), DrafterV1::Model([3; 32])],
        ),
        samples("PlaceReport", Control, [place_report()]),
        samples(
            "LeadState",
            Control,
            [LeadState::Forming, LeadState::Serving, LeadState::Waiting, LeadState::BadFile],
        ),
        samples("StageClaim", Stream, [stage_claim()]),
        samples("LeaseBeat", Stream, [LeaseBeat::Beat(70_000)]),
        samples(
            "LeaseAnswer",
            Stream,
            [
                LeaseAnswer::Granted,
                LeaseAnswer::Refused(ClaimRefusal::Stale { life: 70_000, epoch: Epoch(300) }),
                LeaseAnswer::Beat(70_000),
            ],
        ),
        samples(
            "ClaimRefusal",
            Stream,
            [ClaimRefusal::Stale { life: 70_000, epoch: Epoch(300) }, ClaimRefusal::Leads],
        ),
        samples("Registered", Control, [registered()]),
        samples("Refusal", Control, refusals()),
        samples("LoadReport", Control, [LoadReport::V1(load(WorkerState::Ready)), load_v2()]),
        samples("WorkPart", Control, [WorkPart::Prefill, WorkPart::Decode, WorkPart::Both]),
        samples("PullRequest", Request, [pull_request()]),
        samples("PullFrame", Stream, pull_frames()),
        samples("ActivationType", Stream, [ActivationType::F32, ActivationType::Bf16]),
        samples("StageOrder", Stream, stage_orders()),
        samples(
            "StageDrafterV1",
            Stream,
            [StageDrafterV1::Assistant { digest: [2; 32] }, StageDrafterV1::Appended { sequences: 4 }],
        ),
        samples("StageReport", Stream, stage_reports()),
        samples("StageFailure", Stream, stage_failures()),
        samples("StageFeed", Stream, [StageFeed::V1(StageFeedV1 { replica: ReplicaId([6; 16]) })]),
        samples(
            "StageBlocksOrder",
            Control,
            [
                StageBlocksOrder::Read(vec![StageBlockV1 { group: 1, number: 70_000 }]),
                StageBlocksOrder::Write(vec![StageBlockV1 { group: 0, number: 3 }]),
                StageBlocksOrder::States(300),
                StageBlocksOrder::Behind(70_000),
            ],
        ),
        samples("StageBlocksReport", Control, stage_blocks_reports()),
        samples("StageStep", Control, [stage_step(), stage_step_v2(), stage_counted(), stage_step_v3()]),
        samples("ShardRequest", Request, shard_requests()),
        samples(
            "ModelRefV1",
            Request,
            [ModelRefV1::Digest([8; 32]), ModelRefV1::Named(ModelId::new("m").unwrap())],
        ),
        samples(
            "ShardFrame",
            Stream,
            [ShardFrame::Bytes(70_000), ShardFrame::NotHeld, ShardFrame::Failed(ShardRefusal::Busy)],
        ),
        samples("ShardRefusal", Stream, [ShardRefusal::Busy, ShardRefusal::Internal]),
        samples("ShippingReport", Control, [shipping_report()]),
        samples(
            "PullRefusal",
            Stream,
            [PullRefusal::OtherOrigin, PullRefusal::NotHeld, PullRefusal::Busy, PullRefusal::Internal],
        ),
        samples("WorkerState", Control, [WorkerState::Starting, WorkerState::Ready, WorkerState::Draining]),
        samples("WorkerStatus", Control, [status()]),
        samples("KvFrame", Events, [KvFrame::Events(batch(7))]),
        samples("KvEvent", Events, events()),
        samples("Medium", Events, [Medium::Device, Medium::Host, Medium::Disk]),
        samples("KvReplay", Control, [KvReplay::Events(batch(7)), KvReplay::TakeSnapshot]),
        samples(
            "KvSnapshotFrame",
            Events,
            [
                KvSnapshotFrame::Begin { epoch: Epoch(3), sequence: 70_000 },
                KvSnapshotFrame::Runs(vec![(id(1), vec![id(2)], Medium::Device)]),
                KvSnapshotFrame::End,
                KvSnapshotFrame::ResumePoints(vec![(id(1), 70_000, Medium::Device)]),
            ],
        ),
        samples(
            "PeerIndexAsk",
            Control,
            [PeerIndexAsk::V1(PeerIndexAskV1 {
                node: NodeId::new("w1").unwrap(),
                epoch: Epoch(3),
                after: 70_000,
            })],
        ),
        samples(
            "PeerIndexFrame",
            Events,
            [
                PeerIndexFrame::Roots(vec![id(1)]),
                PeerIndexFrame::Worker {
                    node: NodeId::new("w1").unwrap(),
                    epoch: Epoch(3),
                    sequence: 70_000,
                },
                PeerIndexFrame::Runs(vec![(id(1), vec![id(2)], Medium::Device)]),
                PeerIndexFrame::ResumePoints(vec![(id(1), 70_000, Medium::Device)]),
                PeerIndexFrame::End { digest: [7; 32] },
            ],
        ),
        samples("SequenceRequest", Request, [sequence_request(SequenceOperation::List)]),
        samples("SequenceOperation", Request, sequence_operations()),
        samples("SequenceReply", Control, sequence_replies()),
        samples("SequenceError", Control, sequence_errors()),
        samples("SaveMedium", Control, [SaveMedium::Memory, SaveMedium::Disk]),
        samples("Operation", Stream, Operation::ALL),
        samples("OperationRequest", Stream, [operation_request()]),
        samples(
            "OperationOptions",
            Stream,
            [
                OperationOptions::Default,
                OperationOptions::Speech(SpeechOptionsV1 {
                    threshold: Some(0.5),
                    min_silence_ms: Some(300),
                    windows: true,
                    ..SpeechOptionsV1::default()
                }),
                OperationOptions::Turn(TurnOptionsV1::default()),
                OperationOptions::Transcribe(TranscribeOptionsV1 {
                    language: Some("de".into()),
                    translate: true,
                    prompt: "so".into(),
                }),
            ],
        ),
        samples("Pcm", Stream, [Pcm::F32(vec![0.5, -1.0]), Pcm::I16(vec![-1, 300])]),
        samples(
            "OperationInput",
            Stream,
            [
                OperationInput::Samples(Pcm::I16(vec![-32_768, 7])),
                OperationInput::Segment,
                OperationInput::Reset,
                OperationInput::Finish,
                OperationInput::Close,
            ],
        ),
        samples("OperationOutput", Stream, operation_outputs()),
        samples("OperationError", Stream, operation_errors()),
        samples("TensorHeader", Stream, [TensorHeader::V1(tensor(vec![2, 300]))]),
        samples("TensorType", Stream, elements),
        samples("CertificateReport", Control, [certificate_report()]),
        samples(
            "CoordinatorApiRequest",
            Control,
            [
                CoordinatorApiRequest::Register { request: register("w1") },
                CoordinatorApiRequest::Report { report: LoadReport::V1(load(WorkerState::Draining)) },
                CoordinatorApiRequest::Shipping { report: shipping_report() },
                CoordinatorApiRequest::Certificate { report: certificate_report() },
            ],
        ),
        samples(
            "CoordinatorApiResponse",
            Control,
            [
                CoordinatorApiResponse::Register(Ok(registered())),
                CoordinatorApiResponse::Report(Err(Refusal::NotRegistered)),
                CoordinatorApiResponse::Shipping(()),
                CoordinatorApiResponse::Certificate(()),
            ],
        ),
        samples(
            "WorkerApiRequest",
            Control,
            [
                WorkerApiRequest::KvReplay { from: 70_000 },
                WorkerApiRequest::Drain {},
                WorkerApiRequest::Undrain {},
                WorkerApiRequest::Status {},
                WorkerApiRequest::MetricsText {},
                WorkerApiRequest::Place { order: PlaceOrder::V1(place_order()) },
            ],
        ),
        samples(
            "WorkerApiResponse",
            Control,
            [
                WorkerApiResponse::KvReplay(KvReplay::TakeSnapshot),
                WorkerApiResponse::Drain(()),
                WorkerApiResponse::Undrain(()),
                WorkerApiResponse::Status(status()),
                WorkerApiResponse::MetricsText("up 1\n".into()),
                WorkerApiResponse::Place(place_report()),
            ],
        ),
    ]
}
