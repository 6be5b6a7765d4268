//! Streams of operations on sequences.

use crate::cluster::{pair, with_timeout};
use crate::samples::{sequence_name, sequence_request};
use kvasir_transport::Error;
use kvasir_transport::{Connection, Incoming, SequenceCall};
use proto::sequence::{SequenceError, SequenceOperation, SequenceReply};

async fn next_call(worker_end: &Connection) -> SequenceCall {
    match with_timeout("an operation", worker_end.accept()).await.unwrap() {
        Incoming::Sequence(call) => call,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn snapshots_arrive_unchanged_in_both_directions() {
    let nodes = pair().await;
    let file: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
    let upload =
        sequence_request(SequenceOperation::Upload { name: sequence_name(0), bytes: file.len() as u64 });
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
    with_timeout("there and back", async { tokio::join!(worker, coordinator) }).await;
}

#[tokio::test]
async fn a_long_body_is_refused_unread_and_a_short_one_is_cut_off() {
    let nodes = pair().await;
    let upload = sequence_request(SequenceOperation::Upload { name: sequence_name(0), bytes: 1 << 40 });
    let exchange = nodes.to_worker.open_sequence(&upload).await.unwrap();
    let call = next_call(&nodes.to_coordinator).await;
    assert!(matches!(call.body.read(1 << 20).await, Err(Error::Codec(_))));
    call.reply.fail(SequenceError::NoRoom { tokens: 7 }).await.unwrap();
    let (reply, mut bytes) = with_timeout("the refusal", exchange.answer()).await.unwrap();
    assert_eq!(reply, SequenceReply::Failed(SequenceError::NoRoom { tokens: 7 }));
    assert_eq!(bytes.next().await.unwrap(), None);

    let short = sequence_request(SequenceOperation::Upload { name: sequence_name(0), bytes: 100 });
    let mut exchange = nodes.to_worker.open_sequence(&short).await.unwrap();
    exchange.send(&[1; 99]).await.unwrap();
    let worker = async {
        let call = next_call(&nodes.to_coordinator).await;
        assert!(matches!(call.body.read(1 << 20).await, Err(Error::StreamCut { .. })));
    };
    let (answer, ()) = with_timeout("the cut", async { tokio::join!(exchange.answer(), worker) }).await;
    assert!(matches!(answer, Err(Error::StreamCut { .. })), "{answer:?}");
}

#[tokio::test]
async fn announced_bytes_must_be_sent_and_a_drop_cancels() {
    let nodes = pair().await;
    let exchange = nodes.to_worker.open_sequence(&sequence_request(SequenceOperation::List)).await.unwrap();
    let call = next_call(&nodes.to_coordinator).await;
    assert!(matches!(call.reply.send(SequenceReply::Bytes(3)).await, Err(Error::Protocol(_))));
    drop(exchange);
    let exchange = nodes.to_worker.open_sequence(&sequence_request(SequenceOperation::List)).await.unwrap();
    let call = next_call(&nodes.to_coordinator).await;
    drop(exchange);
    with_timeout("the worker's notice", call.reply.cancelled()).await;
}
