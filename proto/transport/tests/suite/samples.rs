//! Samples of every variant of every type that crosses the wire or is written to disk.

mod operations;
mod reports;

use kvasir_transport::service::{CoordinatorApiRequest, CoordinatorApiResponse};
use kvasir_transport::service::{WorkerApiRequest, WorkerApiResponse};
use kvasir_transport::{Hello, Revocations, TensorHeader, TensorType, VersionRange};
pub(crate) use operations::*;
use proto::adapter::*;
use proto::block::{BlockId, ClusterKey};
use proto::codec::{self, Cap, CodecError};
use proto::event::{
    KvEvent, KvEventBatch, KvFrame, KvReplay, KvSnapshotFrame, Medium, PeerIndexAsk, PeerIndexFrame,
};
use proto::ids::{Attempt, Epoch, ModelId, NodeId, RequestId, Role};
use proto::join::*;
use proto::message::image_encoder::ImageEncoders;
use proto::message::*;
use proto::operation::*;
use proto::placement::{
    Capacity, ClaimRefusal, Drafter, Lead, LeadReport, LeadState, LeaseAnswer, LeaseBeat, OfferedDrafter,
    OfferedModelFile, PlaceOrder, PlaceReport, PlacedStage, StageClaim,
};
use proto::pull::*;
use proto::sequence::*;
use proto::served_model::*;
use proto::shard::*;
use proto::stage::blocks::*;
use proto::stage::*;
use proto::trace::{SpanId, TraceContext, TraceId};
use proto::worker::*;
use reports::{host_report, models_order, models_report, usage_report};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

mod encoders;
pub(crate) use encoders::*;
mod stages;
pub(crate) use stages::*;

/// Samples of one message type, encoded.
pub(crate) struct Samples {
    pub(crate) name: &'static str,
    pub(crate) cap: Cap,
    /// Whether the type is an enum. Then there is one value for each variant, in order.
    pub(crate) is_enum: bool,
    pub(crate) bytes: Vec<Vec<u8>>,
    /// Decodes the bytes and encodes the result again.
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
        is_enum: true,
        bytes: values.into_iter().map(|value| codec::encode(&value, cap).unwrap()).collect(),
        recode: |bytes, cap| codec::encode(&codec::decode::<T>(bytes, cap)?, cap),
    }
}

fn samples_of_struct<T: Serialize + DeserializeOwned + Debug>(
    name: &'static str,
    cap: Cap,
    values: impl IntoIterator<Item = T>,
) -> Samples {
    Samples { is_enum: false, ..samples(name, cap, values) }
}

pub(crate) fn id(n: u8) -> BlockId {
    BlockId([n; 16])
}

fn prefix_note() -> PrefixNote {
    let numbered = |number, tokens| Some(NumberedPrefix { number, tokens });
    PrefixNote { after: numbered(300, 7_200), keep: numbered(301, 70_000) }
}

pub(crate) fn images() -> PromptImages {
    let runs = vec![1..2, 4..7];
    PromptImages(vec![PromptImage { file: b"GIF89a".to_vec().into(), digest: [4; 32], runs }])
}

pub(crate) fn request() -> GenerateRequest {
    let pull = PullSource { node: NodeId::new("w2").unwrap(), quic: "10.0.0.2:7001".into(), tokens: 1488 };
    let grammar = GrammarSpec {
        field: "response_format".into(),
        syntax: GrammarSyntax::Lark,
        text: "start: \"a\"".into(),
        trigger: Some("<tool_call>".into()),
    };
    GenerateRequest {
        request_id: RequestId::new("req-1").unwrap(),
        choice: 1,
        attempt: Attempt(2),
        model: ModelId::new("smollm2-135m").unwrap(),
        root: id(0xab),
        prompt: vec![1, 300, 70_000].into(),
        emitted: vec![42].into(),
        sampling: Sampling {
            temperature: 0.5,
            logit_bias: vec![(7, -1.5)],
            logprobs: Some(3),
            ..Sampling::default()
        },
        stop: Stop { max_tokens: 16, strings: vec!["\n\n".into()], token_ids: vec![2], ..Stop::default() },
        images: Vec::new(),
        encoders: Vec::new(),
        prompt_logprobs: None,
        predicted_cached: 1488,
        deadline_ms: 30_000,
        pull: Some(pull),
        together: 1,
        trace: Some(trace()),
        grammar: Some(grammar),
        tenant: TenantShare { tenant: 0x0807_0605_0403_0201, weight: 300 },
    }
}

fn model() -> ServedModel {
    ServedModel {
        id: ModelId::new("smollm2-135m").unwrap(),
        model_digest: [1; 32],
        tokenizer_digest: [2; 32],
        max_model_len: 8192,
        layers: (0, 30),
        engine: "kvasir".into(),
        hit_tokens: 16,
        numeric_class: "cpu".into(),
        block_tokens: 16,
        task: ModelTask::Generate,
    }
}

fn join_requests() -> [JoinRequest; 2] {
    let join = NodeJoin {
        credential: JoinCredential::Token(TokenId([1; 8]), TokenSecret([2; 32])),
        role: Role::Worker,
        node: NodeId::new("w1").unwrap(),
        request: vec![0x30, 0],
        labels: vec![("zone".into(), "a".into())],
    };
    [JoinRequest::Join(join), JoinRequest::Renew(vec![0x30, 0])]
}

fn join_credentials() -> [JoinCredential; 2] {
    let token = JoinCredential::Token(TokenId([1; 8]), TokenSecret([2; 32]));
    [token, JoinCredential::ServiceAccount("a.b.c".into())]
}

fn join_replies() -> [JoinReply; 3] {
    let joined = Joined {
        certificate_pem: "certificate".into(),
        roots_pem: "roots".into(),
        cluster_key: Some(SharedKey([3; 32])),
        coordinators: vec![(NodeId::new("c0").unwrap(), "10.0.0.1:7000".into())],
    };
    [JoinReply::Joined(Box::new(joined)), JoinReply::Pending, JoinReply::Refused(JoinRefusal::UnknownToken)]
}

fn join_refusals() -> [JoinRefusal; 16] {
    [
        JoinRefusal::UnknownToken,
        JoinRefusal::Expired,
        JoinRefusal::UsedUp,
        JoinRefusal::WrongRole(Role::Worker),
        JoinRefusal::WrongNode(NodeId::new("w1").unwrap()),
        JoinRefusal::NameTaken,
        JoinRefusal::AnotherWaits,
        JoinRefusal::Invalid("why".into()),
        JoinRefusal::ServiceAccount("why".into()),
        JoinRefusal::NoAuthority,
        JoinRefusal::NoQuorum,
        JoinRefusal::NoGroup,
        JoinRefusal::TooMany(1000),
        JoinRefusal::Full("nodes".into()),
        JoinRefusal::NoCertificate,
        JoinRefusal::Internal,
    ]
}

/// Registration of a pool worker with a model of each task and a drafter.
pub(crate) fn register(node: &str) -> Register {
    let tasks = [ModelTask::Generate, ModelTask::Embed { width: 384 }, ModelTask::Rerank { scores: 1 }];
    let worker = WorkerInfo {
        node: NodeId::new(node).unwrap(),
        epoch: Epoch(1_795_000_000),
        pid: 4242,
        quic: "127.0.0.1:7000".into(),
        ops: "127.0.0.1:9090".into(),
        models: tasks.map(|task| ServedModel { task, ..model() }).into(),
    };
    let files = vec![OfferedModelFile { model: ModelId::new("m").unwrap(), digest: [1; 32] }];
    let capacity =
        Capacity { memory: 70_000 << 20, bandwidth: 40_000_000_000, compute: 100_000_000_000, files };
    let drafter = OfferedDrafter {
        model_digest: [1; 32],
        drafter: Drafter::Assistant([2; 32]),
        from_layer: 300,
        weight_bytes: 70_000,
        reads_embedding: true,
        kv_elements: 300,
        state_elements: 3,
    };
    Register {
        worker,
        part: WorkPart::Decode,
        pulls: vec![PullCost { model: model().id, bytes_per_token: 23_040, bytes_per_point: 70_000 }],
        capacity: Some(capacity),
        operations: vec![offered_operation()],
        drafter: Some(drafter),
    }
}

pub(crate) fn pull_request() -> PullRequest {
    PullRequest { origin: [3; 32], root: id(5), tokens: vec![1, 70_000], have: 300 }
}

fn trace() -> TraceContext {
    TraceContext { trace: TraceId([9; 16]), span: SpanId([7; 8]) }
}

pub(crate) fn shard_requests() -> Vec<ShardRequest> {
    let names = vec![[1; 32], [2; 32]];
    vec![ShardRequest::Manifest(ModelRef::Digest([8; 32])), ShardRequest::Chunks(ChunkRequest { names })]
}

fn adapter_order() -> AdapterOrder {
    let (name, parent) = (ModelId::new("sql").unwrap(), ModelId::new("m").unwrap());
    AdapterOrder { name, parent, path: "/a/sql".into() }
}

fn adapter_report() -> AdapterReport {
    let AdapterOrder { name, parent, path } = adapter_order();
    let adapter = OfferedAdapter { name, parent, digest: [5; 32], rank: 300, path, ordered: true };
    AdapterReport { epoch: Epoch(3), adapters: vec![adapter] }
}

pub(crate) fn certificate_report() -> CertificateReport {
    CertificateReport { ends: 1_800_000_000 }
}

pub(crate) fn shipping_report() -> ShippingReport {
    let struck = vec![NodeId::new("w2").unwrap()];
    ShippingReport { wanted: 70_000, present: 300, struck }
}

pub(crate) fn pull_frames() -> Vec<PullFrame> {
    vec![
        PullFrame::Head(PullHead { tokens: 70_000, pieces: 300 }),
        PullFrame::Piece(PulledPiece { group: 1, end: 300, bytes: 70_000, digest: [4; 32] }),
        PullFrame::Failed(PullRefusal::NotHeld),
    ]
}

fn place_order() -> PlaceOrder {
    let stage = |node: &str, layers| PlacedStage {
        at: StageAddress { node: NodeId::new(node).unwrap(), quic: "10.0.0.3:7001".into() },
        layers,
    };
    let lead = Lead {
        plan_index: 70_000,
        model: ModelId::new("m").unwrap(),
        model_digest: [1; 32],
        cache_bytes: 70_000,
        stages: vec![stage("w1", (0, 15)), stage("w3", (15, 300))],
    };
    PlaceOrder {
        version: 300,
        lead: Some(lead),
        holders: vec!["10.0.0.3:7001".into()],
        drafter: Some(Drafter::Assistant([2; 32])),
    }
}

fn place_report() -> PlaceReport {
    let leads = LeadReport {
        plan_index: 70_000,
        state: LeadState::Waiting,
        attempts: 3,
        reason: "stage 1 is lost".into(),
    };
    PlaceReport { leads: Some(leads), holds: Some(300) }
}

pub(crate) fn stage_claim() -> StageClaim {
    StageClaim { replica: ReplicaId([6; 16]), plan_index: 70_000, epoch: Epoch(300) }
}

pub(crate) fn encode_request() -> EncodeRequest {
    EncodeRequest {
        request_id: RequestId::new("req-1").unwrap(),
        part: 3,
        attempt: Attempt(2),
        model: ModelId::new("minilm-l6").unwrap(),
        texts: vec![
            EncodeText { tokens: vec![101, 7592, 102], segment_start: None },
            EncodeText { tokens: vec![101, 70_000, 102, 7, 102], segment_start: Some(3) },
        ],
        deadline_ms: 30_000,
        trace: Some(trace()),
    }
}

pub(crate) fn load(state: WorkerState) -> LoadReport {
    LoadReport {
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
        exact: true,
        rss: 1 << 31,
        pulls: PullReport { rate: 1e9, pulled_bytes: 70_000, sent_bytes: 300, failures: 2 },
    }
}

pub(crate) fn registered() -> Registered {
    let cluster_key = ClusterKey([9; 32]);
    Registered { lease_ms: 5000, report_every_ms: 500, cluster_key }
}

pub(crate) fn status() -> WorkerStatus {
    WorkerStatus {
        node: NodeId::new("w1").unwrap(),
        models: vec![model()],
        load: load(WorkerState::Ready),
        kv_sequence: 12,
        uptime_ms: 13,
    }
}

fn errors() -> Vec<GenerateError> {
    vec![
        GenerateError::ModelNotFound(ModelId::new("m").unwrap()),
        GenerateError::ContextLength { need: 9000, limit: 8192 },
        GenerateError::InvalidField { field: "top_p".into(), reason: "2 > 1".into() },
        GenerateError::Unsupported { field: "seed".into(), reason: "vllm ignores it".into() },
        GenerateError::QueueFull,
        GenerateError::Draining,
        GenerateError::DeadlineExceeded { after_ms: 100 },
        GenerateError::Internal,
        GenerateError::NotFinite,
        GenerateError::NoEncoder { reason: "w9 is away".into() },
    ]
}

fn finished(reason: FinishReason) -> GenerateFrame {
    let matched = Some("\n\n".into());
    GenerateFrame::Finished(Finished {
        reason,
        matched,
        tail: "x".into(),
        completion_tokens: 3,
        cached_tokens: Some(32),
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
        GenerateFrame::Started(Started {
            cached_tokens: 16,
            estimated: true,
            computed_tokens: 4,
            hit_stop: "end".into(),
        }),
        GenerateFrame::Tokens(tokens),
        finished(FinishReason::Stop),
        GenerateFrame::Failed(GenerateError::Internal),
        GenerateFrame::Prompt(vec![PromptLogprob { logprob: -0.5, rank: 2, top: vec![(1, -0.25)] }]),
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
    SequenceRequest { model, root: id(5), operation }
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

fn sequence_info() -> SequenceInfo {
    SequenceInfo { name: sequence_name(0), tokens: 40, cached: 32, live: true }
}

fn snapshot_info() -> SnapshotInfo {
    SnapshotInfo { name: sequence_name(0), bytes: 70_000, medium: SaveMedium::Memory }
}

fn pin_info() -> PinInfo {
    PinInfo { pin: 3, tokens: 96, ttl_ms: 70_000, pinned_bytes: 1 << 20, budget_bytes: 1 << 22 }
}

pub(crate) fn sequence_replies() -> Vec<SequenceReply> {
    let list = SequenceList {
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
    use Cap::{Control, Events, GenerateRequest as Request, Images, Stream};
    let elements = [TensorType::U8, TensorType::I32, TensorType::F32, TensorType::F16, TensorType::Bf16];
    let tensor = |shape| TensorHeader { name: "k".into(), element: TensorType::F16, shape };
    let versions = VersionRange { min: 1, max: 300 };
    let node = NodeId::new("w1").unwrap();
    vec![
        samples_of_struct("Hello", Control, [Hello { versions, node, epoch: Epoch(3) }]),
        samples_of_struct("Revocations", Stream, [Revocations { list: vec![0x30, 0] }]),
        samples_of_struct("GenerateRequest", Request, [request()]),
        samples_of_struct("PrefixNote", Request, [prefix_note()]),
        samples_of_struct("PromptImages", Images, [images()]),
        samples_of_struct("PromptLogprobs", Stream, [PromptLogprobs { top: 3 }]),
        samples_of_struct("ImageEncoders", Stream, [ImageEncoders(encoders())]),
        samples_of_struct("EncodeImage", Images, [image_to_encode()]),
        samples("EncodeImageFrame", Stream, image_frames()),
        samples("EncodeImageRefusal", Stream, image_refusals()),
        samples_of_struct("EncoderReport", Control, [encoder_report()]),
        samples("GenerateFrame", Stream, frames()),
        samples("GenerateError", Stream, errors()),
        samples("FinishReason", Stream, [FinishReason::Stop, FinishReason::Length, FinishReason::Cancelled]),
        samples_of_struct("EncodeRequest", Request, [encode_request()]),
        samples(
            "EncodeReply",
            Stream,
            [
                EncodeReply::Encoded(EncodedHead { texts: 2, width: 384 }),
                EncodeReply::Failed(GenerateError::Draining),
            ],
        ),
        samples(
            "ModelTask",
            Control,
            [
                ModelTask::Generate,
                ModelTask::Embed { width: 384 },
                ModelTask::Rerank { scores: 1 },
                ModelTask::GenerateFromImages,
            ],
        ),
        samples_of_struct("Register", Control, [register("w1")]),
        samples("JoinRequest", Stream, join_requests()),
        samples("JoinCredential", Stream, join_credentials()),
        samples("JoinReply", Stream, join_replies()),
        samples("JoinRefusal", Stream, join_refusals()),
        samples_of_struct("PlaceOrder", Control, [place_order()]),
        samples("Drafter", Control, [Drafter::MtpHead, Drafter::Assistant([2; 32]), Drafter::Model([3; 32])]),
        samples_of_struct("PlaceReport", Control, [place_report()]),
        samples(
            "LeadState",
            Control,
            [LeadState::Forming, LeadState::Serving, LeadState::Waiting, LeadState::BadFile],
        ),
        samples_of_struct("StageClaim", Stream, [stage_claim()]),
        samples("LeaseBeat", Stream, [LeaseBeat::Beat(70_000)]),
        samples(
            "LeaseAnswer",
            Stream,
            [
                LeaseAnswer::Granted,
                LeaseAnswer::Refused(ClaimRefusal::Stale { plan_index: 70_000, epoch: Epoch(300) }),
                LeaseAnswer::Beat(70_000),
            ],
        ),
        samples(
            "ClaimRefusal",
            Stream,
            [ClaimRefusal::Stale { plan_index: 70_000, epoch: Epoch(300) }, ClaimRefusal::Leads],
        ),
        samples_of_struct("Registered", Control, [registered()]),
        samples("Refusal", Control, refusals()),
        samples_of_struct("LoadReport", Control, [load(WorkerState::Ready)]),
        samples("WorkPart", Control, [WorkPart::Prefill, WorkPart::Decode, WorkPart::Both]),
        samples_of_struct("PullRequest", Request, [pull_request()]),
        samples("PullFrame", Stream, pull_frames()),
        samples("ActivationType", Stream, [ActivationType::F32, ActivationType::Bf16]),
        samples("StageOrder", Stream, stage_orders()),
        samples(
            "StageDrafter",
            Stream,
            [StageDrafter::Assistant { digest: [2; 32] }, StageDrafter::MtpHead { sequences: 4 }],
        ),
        samples("StageReport", Stream, stage_reports()),
        samples("StageFailure", Stream, stage_failures()),
        samples_of_struct("StageFeed", Stream, [StageFeed { replica: ReplicaId([6; 16]) }]),
        samples(
            "StageBlocksOrder",
            Control,
            [
                StageBlocksOrder::Read(vec![StageBlock { group: 1, number: 70_000 }]),
                StageBlocksOrder::Write(vec![StageBlock { group: 0, number: 3 }]),
                StageBlocksOrder::States(300),
                StageBlocksOrder::Behind(70_000),
            ],
        ),
        samples("StageBlocksReport", Control, stage_blocks_reports()),
        samples("StageFrame", Control, stage_frames()),
        samples("ShardRequest", Request, shard_requests()),
        samples(
            "ModelRef",
            Request,
            [ModelRef::Digest([8; 32]), ModelRef::Named(ModelId::new("m").unwrap())],
        ),
        samples(
            "ShardFrame",
            Stream,
            [ShardFrame::Bytes(70_000), ShardFrame::NotHeld, ShardFrame::Failed(ShardRefusal::Busy)],
        ),
        samples("ShardRefusal", Stream, [ShardRefusal::Busy, ShardRefusal::Internal]),
        samples_of_struct("ShippingReport", Control, [shipping_report()]),
        samples(
            "PullRefusal",
            Stream,
            [PullRefusal::OtherOrigin, PullRefusal::NotHeld, PullRefusal::Busy, PullRefusal::Internal],
        ),
        samples("WorkerState", Control, [WorkerState::Starting, WorkerState::Ready, WorkerState::Draining]),
        samples_of_struct("WorkerStatus", Control, [status()]),
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
        samples_of_struct(
            "PeerIndexAsk",
            Control,
            [PeerIndexAsk { node: NodeId::new("w1").unwrap(), epoch: Epoch(3), after: 70_000 }],
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
        samples_of_struct("SequenceRequest", Request, [sequence_request(SequenceOperation::List)]),
        samples("SequenceOperation", Request, sequence_operations()),
        samples("SequenceReply", Control, sequence_replies()),
        samples("SequenceError", Control, sequence_errors()),
        samples("SaveMedium", Control, [SaveMedium::Memory, SaveMedium::Disk]),
        samples("Operation", Stream, Operation::ALL),
        samples_of_struct("OperationRequest", Stream, [operation_request()]),
        samples_of_struct("BackendRequest", Stream, [backend_request()]),
        samples(
            "OperationOptions",
            Stream,
            [
                OperationOptions::Default,
                OperationOptions::Speech(SpeechOptions {
                    threshold: Some(0.5),
                    min_silence_ms: Some(300),
                    windows: true,
                    ..SpeechOptions::default()
                }),
                OperationOptions::Turn(TurnOptions::default()),
                OperationOptions::Transcribe(TranscribeOptions {
                    language: Some("de".into()),
                    translate: true,
                    prompt: "so".into(),
                    words: true,
                    temperature: 0.5,
                }),
                OperationOptions::Wakeword(WakewordOptions {
                    threshold: Some(0.5),
                    words: vec!["alexa".into()],
                    debounce_ms: Some(300),
                    windows: true,
                }),
                OperationOptions::Diarization(DiarizationOptions {
                    num_speakers: Some(2),
                    min_speakers: Some(1),
                    max_speakers: Some(4),
                    threshold: Some(0.75),
                }),
                OperationOptions::Speak(SpeakOptions {
                    input: "so".into(),
                    voice: Some("joe".into()),
                    speed: Some(1.5),
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
        samples_of_struct("TensorHeader", Stream, [tensor(vec![2, 300])]),
        samples("TensorType", Stream, elements),
        samples_of_struct("CertificateReport", Control, [certificate_report()]),
        samples_of_struct("AdapterReport", Control, [adapter_report()]),
        samples_of_struct("HostReport", Control, [host_report()]),
        samples_of_struct("UsageReport", Control, [usage_report()]),
        samples(
            "AdapterRefusal",
            Control,
            [
                AdapterRefusal::Unknown(ModelId::new("sql").unwrap()),
                AdapterRefusal::Refused { reason: "x".into() },
            ],
        ),
        samples(
            "CoordinatorApiRequest",
            Control,
            [
                CoordinatorApiRequest::Register { request: register("w1") },
                CoordinatorApiRequest::Report { report: load(WorkerState::Draining) },
                CoordinatorApiRequest::Shipping { report: shipping_report() },
                CoordinatorApiRequest::Certificate { report: certificate_report() },
                CoordinatorApiRequest::Adapters { report: adapter_report() },
                CoordinatorApiRequest::Host { report: host_report() },
                CoordinatorApiRequest::Usage { report: usage_report() },
                CoordinatorApiRequest::Encoder { report: encoder_report() },
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
                CoordinatorApiResponse::Adapters(Ok(())),
                CoordinatorApiResponse::Host(Ok(())),
                CoordinatorApiResponse::Usage(()),
                CoordinatorApiResponse::Encoder(()),
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
                WorkerApiRequest::Place { order: place_order() },
                WorkerApiRequest::LoadAdapter { order: adapter_order() },
                WorkerApiRequest::UnloadAdapter { name: ModelId::new("sql").unwrap() },
                WorkerApiRequest::Models { order: models_order() },
                WorkerApiRequest::PromptProgress { root: BlockId([7; 16]), name: sequence_name(0) },
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
                WorkerApiResponse::LoadAdapter(Err(AdapterRefusal::Refused { reason: "x".into() })),
                WorkerApiResponse::UnloadAdapter(Ok(())),
                WorkerApiResponse::Models(models_report()),
                WorkerApiResponse::PromptProgress(Some(PromptProgress { computed: 1024, prompt: 70_000 })),
            ],
        ),
    ]
}
