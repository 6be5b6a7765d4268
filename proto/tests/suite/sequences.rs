//! Operations on sequences: samples of their messages, and how they travel.

use crate::cluster::{pair, soon};
use crate::samples::id;
use kvasir_proto::Error;
use kvasir_proto::ids::{ModelId, RequestId};
use kvasir_proto::sequence::*;
use kvasir_proto::transport::{Connection, Incoming, SequenceCall};

fn name(choice: u32) -> SequenceName {
    SequenceName { request: RequestId::new("req-1").unwrap(), choice }
}

pub(crate) fn request(operation: SequenceOperation) -> SequenceRequest {
    let model = ModelId::new("smollm2-135m").unwrap();
    SequenceRequest::V1(SequenceRequestV1 { model, root: id(5), operation })
}

pub(crate) fn operations() -> Vec<SequenceOperation> {
    use SequenceOperation::*;
    vec![
        List,
        Save { sequence: name(0), medium: SaveMedium::Disk },
        Fetch { sequence: name(1) },
        Restore { snapshot: name(0), name: name(300) },
        Upload { name: name(0), bytes: 70_000 },
        Fork { sequence: name(0), name: name(1) },
        Reset { sequence: name(0), keep: 70_000 },
        Drop { sequence: name(0) },
        Pin { tokens: vec![1, 70_000], ttl_ms: 3_600_000 },
        Unpin { pin: 300 },
    ]
}

fn info() -> SequenceInfoV1 {
    SequenceInfoV1 { name: name(0), tokens: 40, cached: 32, live: true }
}

fn snapshot() -> SnapshotInfoV1 {
    SnapshotInfoV1 { name: name(0), bytes: 70_000, medium: SaveMedium::Memory }
}

fn pin() -> PinInfoV1 {
    PinInfoV1 { pin: 3, tokens: 96, ttl_ms: 70_000, pinned_bytes: 1 << 20, budget_bytes: 1 << 22 }
}

pub(crate) fn replies() -> Vec<SequenceReply> {
    let list = SequenceListV1 { sequences: vec![info()], snapshots: vec![snapshot()], pins: vec![pin()] };
    vec![
        SequenceReply::List(list),
        SequenceReply::Sequence(info()),
        SequenceReply::Saved(snapshot()),
        SequenceReply::Bytes(70_000),
        SequenceReply::Pinned(pin()),
        SequenceReply::Done,
        SequenceReply::Failed(SequenceError::Internal),
    ]
}

pub(crate) fn errors() -> Vec<SequenceError> {
    vec![
        SequenceError::Unknown { what: "sequence req-1".into() },
        SequenceError::Live(name(2)),
        SequenceError::InvalidField { field: "keep".into(), reason: "0 is below 1".into() },
        SequenceError::NotThisSnapshot("the snapshot's model is a, this worker has b".into()),
        SequenceError::OverBudget { what: "pins".into(), wanted: 70_000, limit: 300 },
        SequenceError::NoRoom { tokens: 70_000 },
        SequenceError::QueueFull,
        SequenceError::Unsupported("this worker encodes texts".into()),
        SequenceError::Internal,
    ]
}

async fn next_call(worker_end: &Connection) -> SequenceCall {
    match soon("an operation", worker_end.accept()).await.unwrap() {
        Incoming::Sequence(call) => call,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn snapshots_travel_both_ways_as_they_are() {
    let nodes = pair().await;
    let file: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
    let upload = request(SequenceOperation::Upload { name: name(0), bytes: file.len() as u64 });
    let worker = async {
        let call = next_call(&nodes.to_coordinator).await;
        assert_eq!(call.request, upload);
        let got = call.body.read(1 << 30).await.unwrap();
        call.reply.send_bytes(&got).await.unwrap();
    };
    let coordinator = async {
        let mut exchange = nodes.to_worker.open_sequence(&upload).await.unwrap();
        for piece in file.chunks(100_001) {
            exchange.send(piece).await.unwrap();
        }
        let (reply, mut bytes) = exchange.answer().await.unwrap();
        assert_eq!(reply, SequenceReply::Bytes(file.len() as u64));
        let mut back = Vec::new();
        while let Some(piece) = bytes.next().await.unwrap() {
            back.extend_from_slice(&piece);
        }
        assert!(back == file);
    };
    soon("there and back", async { tokio::join!(worker, coordinator) }).await;
}

#[tokio::test]
async fn what_is_too_long_is_refused_unread_and_what_ends_early_is_cut() {
    let nodes = pair().await;
    let upload = request(SequenceOperation::Upload { name: name(0), bytes: 1 << 40 });
    let exchange = nodes.to_worker.open_sequence(&upload).await.unwrap();
    let call = next_call(&nodes.to_coordinator).await;
    assert!(matches!(call.body.read(1 << 20).await, Err(Error::Codec(_))));
    call.reply.fail(SequenceError::NoRoom { tokens: 7 }).await.unwrap();
    let (reply, mut bytes) = soon("the refusal", exchange.answer()).await.unwrap();
    assert_eq!(reply, SequenceReply::Failed(SequenceError::NoRoom { tokens: 7 }));
    assert_eq!(bytes.next().await.unwrap(), None);

    let short = request(SequenceOperation::Upload { name: name(0), bytes: 100 });
    let mut exchange = nodes.to_worker.open_sequence(&short).await.unwrap();
    exchange.send(&[1; 99]).await.unwrap();
    let worker = async {
        let call = next_call(&nodes.to_coordinator).await;
        assert!(matches!(call.body.read(1 << 20).await, Err(Error::StreamCut { .. })));
    };
    let (answer, ()) = soon("the cut", async { tokio::join!(exchange.answer(), worker) }).await;
    assert!(matches!(answer, Err(Error::StreamCut { .. })), "{answer:?}");
}

#[tokio::test]
async fn bytes_cannot_be_announced_and_left_out_and_a_drop_cancels() {
    let nodes = pair().await;
    let exchange = nodes.to_worker.open_sequence(&request(SequenceOperation::List)).await.unwrap();
    let call = next_call(&nodes.to_coordinator).await;
    assert!(matches!(call.reply.send(SequenceReply::Bytes(3)).await, Err(Error::Protocol(_))));
    drop(exchange);
    let exchange = nodes.to_worker.open_sequence(&request(SequenceOperation::List)).await.unwrap();
    let call = next_call(&nodes.to_coordinator).await;
    drop(exchange);
    soon("the worker's notice", call.reply.cancelled()).await;
}
