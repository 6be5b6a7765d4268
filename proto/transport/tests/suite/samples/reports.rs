//! Samples of orders and reports about deployed models, and of reports of usage.

use proto::block::BlockId;
use proto::deployment::*;
use proto::ids::{Attempt, Epoch, ModelId, RequestId};
use proto::served_model::ModelTask;
use proto::usage::*;

pub(super) fn host_report() -> HostReport {
    let stages = Some(StageSpeed { bandwidth: 70_000, compute: 300 });
    let (engine, labels) = ("kvasir".into(), vec!["gpu=gb10".into()]);
    HostReport { epoch: Epoch(3), budget: 70_000, engine, stages, labels }
}

pub(super) fn models_order() -> ModelsOrder {
    let chat = ModelId::new("chat").unwrap();
    let fetched = OrderedModel {
        model: chat.clone(),
        source: ModelSource::Fetch("smollm2-135m".into()),
        digest: None,
        wanted: WantedState::Identified,
        context: 0,
        pin: false,
        priority: 0,
        holders: Vec::new(),
    };
    let file = OrderedModel {
        model: chat.version(&[0xab; 32]).unwrap(),
        source: ModelSource::File("/models/chat.gguf".into()),
        digest: Some([0xab; 32]),
        wanted: WantedState::Ready,
        context: 4096,
        pin: true,
        priority: 3,
        holders: vec!["10.0.0.1:7001".into()],
    };
    let asleep = OrderedModel { wanted: WantedState::Asleep, ..file.clone() };
    ModelsOrder { version: 70_000, models: vec![fetched, file, asleep], lead: super::place_order().lead }
}

pub(super) fn models_report() -> ModelsReport {
    use ModelState::*;
    let facts = ModelFacts {
        digest: [0xab; 32],
        tokenizer_digest: [4; 32],
        task: ModelTask::Generate,
        context: 8192,
        needed_bytes: 70_000,
    };
    let report = |state| ModelReport {
        model: ModelId::new("chat").unwrap(),
        state,
        permille: 300,
        eta_ms: 70_000,
        failures: 1,
        reason: "x".into(),
        bytes: 70_000,
        idle_ms: 300,
        has_files: true,
        facts: (state == Ready).then_some(facts),
    };
    let models = [Absent, Fetching, Loading, Waking, Ready, Asleep, Failed, BadFile].map(report).to_vec();
    ModelsReport { version: 70_000, budget: 70_000, used: 300, own: 1, models }
}

pub(super) fn usage_report() -> UsageReport {
    let id = AttemptId {
        request: RequestId::new("r1").unwrap(),
        part: 1,
        attempt: Attempt(2),
        root: BlockId([7; 16]),
    };
    let record = UsageRecord {
        id,
        model: ModelId::new("m").unwrap(),
        input_tokens: 300,
        cached_tokens: 5,
        output_tokens: 70_000,
        input_ns: 1 << 33,
        output_ns: 9,
        energy_uj: 1_000,
        energy_ns: 7,
    };
    UsageReport { epoch: Epoch(3), first: 300, records: vec![record] }
}
