//! Messages between the stages of a replica.

use super::trace;
use proto::ids::NodeId;
use proto::message::{Sampling, TokenLogprobs};
use proto::stage::blocks::*;
use proto::stage::*;

pub(crate) fn stage_join() -> StageJoin {
    StageJoin {
        replica: ReplicaId([6; 16]),
        model_digest: [1; 32],
        layers: (15, 30),
        class: "cpu/kv-f16".into(),
        max_rows: 2048,
        block_tokens: 16,
        activations: ActivationType::F32,
        next: Some(StageAddress { node: NodeId::new("w3").unwrap(), quic: "10.0.0.3:7001".into() }),
        drafter: Some(StageDrafter::Assistant { digest: [2; 32] }),
    }
}

pub(crate) fn stage_orders() -> Vec<StageOrder> {
    let begin = StageBegin { slabs: 70_000, blocks_per_slab: vec![50, 1] };
    let adapter = StageAdapter { number: 300, path: "/a".into(), digest: [4; 32] };
    let join = StageOrder::Join(stage_join());
    vec![join, StageOrder::Begin(begin), StageOrder::TellProgress, StageOrder::Adapter(adapter)]
}

pub(crate) fn stage_drawn() -> StageDrawn {
    StageDrawn {
        step: 300,
        tokens: vec![70_000],
        rows: 2,
        samples: vec![StageSampled {
            token: 4,
            logprobs: Some(TokenLogprobs { chosen: -0.5, top: vec![(4, -0.5), (300, -1.25)] }),
        }],
        returned: 1,
        spent: vec![stage_spent()],
        drafted: vec![StageDraftTokens { tokens: vec![70_000, 4] }, StageDraftTokens::default()],
        drafting_us: 300,
    }
}

fn stage_spent() -> StageSpent {
    StageSpent { stalled_us: 300, computed_us: 70_000, received: 1 << 20 }
}

pub(crate) fn stage_reports() -> Vec<StageReport> {
    vec![
        StageReport::Joined(StageJoined { block_bytes: vec![1 << 20, 0] }),
        StageReport::Ready,
        StageReport::Drawn(stage_drawn()),
        StageReport::Failed(StageFailure::Busy),
        StageReport::Progress(StageProgressReport { done: 299, computes: 300, for_us: 70_000 }),
        StageReport::Rest(StageRest { step: 300, logits: 0, best: Some((70_000, 1.5)), computed_us: 3_000 }),
        StageReport::AdapterLoaded,
    ]
}

pub(crate) fn stage_blocks_reports() -> Vec<StageBlocksReport> {
    let state = StageLayerState { layer: 3, conv: [400, 4], recurrent: [8, 128, 64] };
    vec![
        StageBlocksReport::Read(1 << 20),
        StageBlocksReport::Written,
        StageBlocksReport::States(vec![state]),
        StageBlocksReport::Failed("no such block".into()),
    ]
}

pub(crate) fn stage_failures() -> Vec<StageFailure> {
    let reason = || "out of memory".to_owned();
    vec![
        StageFailure::OtherClass { class: "cpu/kv-f32".into() },
        StageFailure::Busy,
        StageFailure::Layers,
        StageFailure::Load { reason: reason() },
        StageFailure::Neighbour { reason: reason() },
        StageFailure::Step { reason: reason() },
        StageFailure::Stops,
        StageFailure::BadFile { reason: reason() },
    ]
}

pub(crate) fn stage_frames() -> Vec<StageFrame> {
    let adapters = StageAdapters { rows: vec![(0, 300, 2)] };
    let step = StageFrame::Step(stage_step());
    vec![step, stage_counted(), StageFrame::Adapters(adapters), StageFrame::AdapterUnloaded(300)]
}

pub(crate) fn stage_counted() -> StageFrame {
    StageFrame::Counted(StageCounted { step: 300, rows: vec![1, 0, 8] })
}

pub(crate) fn stage_step() -> StageStep {
    let sample = StageSample {
        row: 1,
        sampling: Sampling { temperature: 0.5, logit_bias: vec![(300, -1.5)], ..Sampling::default() },
        drawn: 300,
        barred: vec![2],
        prompt: vec![70_000],
        counts: vec![(300, 2)],
    };
    let table = |skipped, blocks: &[u32]| StageTable { skipped, blocks: blocks.to_vec() };
    let sequence = StageSequence {
        rows: 2,
        context: 300,
        tables: vec![table(0, &[7, 70_000]), table(1, &[3])],
        state: Some(StageState { read: Some(4), write: 5, exports: vec![(1, 6)], deferred: false }),
    };
    StageStep {
        step: 300,
        tokens: vec![1, 70_000, 2],
        sequences: vec![sequence, StageSequence { rows: 1, ..StageSequence::default() }],
        copies: vec![StageCopy { group: 1, from: 8, to: 300 }],
        argmax: vec![2],
        logits: vec![0, 1],
        samples: vec![sample],
        returned: vec![2],
        spent: vec![stage_spent()],
        traces: vec![trace()],
        draft_requests: vec![StageDraftRequest { sequence: 0, first: 1, most: 4 }],
        head: Some(StageHead { from: 70_000, best: true }),
    }
}
