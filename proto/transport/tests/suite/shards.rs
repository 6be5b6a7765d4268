//! Weight distribution between workers: manifests and chunks arrive complete and in the order of the
//! request, and longer replies are refused.

use crate::cluster::{authority, config, endpoint, node, with_timeout};
use crate::samples;
use kvasir_transport::Error;
use kvasir_transport::{Connection, Endpoint, Incoming, ShardCall, ShardStream};
use pki::Expected;
use proto::ids::Role;
use proto::shard::ShardRefusal;

struct Workers {
    requester: Connection,
    holder: Connection,
    _endpoints: [Endpoint; 2],
}

async fn workers() -> Workers {
    let ca = authority("c");
    let [a, b] = ["w1", "w2"].map(|name| endpoint(&ca, Role::Worker, name, config()));
    let expected = Expected::node(Role::Worker, node("w2"));
    let (requester, holder) =
        with_timeout("joining", async { tokio::join!(a.connect(b.address(), &expected), b.accept()) }).await;
    Workers { requester: requester.unwrap(), holder: holder.unwrap(), _endpoints: [a, b] }
}

async fn started(workers: &Workers) -> (ShardStream, ShardCall) {
    let [_, request] = <[_; 2]>::try_from(samples::shard_requests()).unwrap();
    let stream = workers.requester.open_shard(&request).await.unwrap();
    match with_timeout("a request", workers.holder.accept()).await.unwrap() {
        Incoming::Shard(call) => {
            assert_eq!(call.request, request);
            (stream, call)
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn requested_items_arrive_whole_and_in_order() {
    let workers = workers().await;
    let (mut stream, mut call) = started(&workers).await;
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
    let cancelled = call.reply.cancelled();
    let holder = async {
        call.reply.bytes(bytes.clone()).await.unwrap();
        call.reply.not_held().await.unwrap();
        call.reply.bytes(Vec::new()).await.unwrap();
        call.reply.finish();
    };
    let asker = async {
        assert_eq!(stream.next(bytes.len()).await.unwrap().as_ref(), Some(&bytes));
        assert_eq!(stream.next(5).await.unwrap(), None);
        assert_eq!(stream.next(5).await.unwrap(), Some(Vec::new()));
        assert!(matches!(stream.next(5).await, Err(Error::StreamCut { .. })));
    };
    with_timeout("all bytes", async { tokio::join!(holder, asker) }).await;
    with_timeout("arrival of all", cancelled).await;
}

#[tokio::test]
async fn a_reply_longer_than_requested_is_not_read() {
    let workers = workers().await;
    let (mut stream, mut call) = started(&workers).await;
    call.reply.bytes(vec![1; 6]).await.unwrap();
    let error = with_timeout("an answer", stream.next(5)).await.unwrap_err();
    assert!(matches!(error, Error::Protocol(_)), "{error:?}");
}

#[tokio::test]
async fn a_refusal_is_typed_and_dropping_the_stream_cancels() {
    let workers = workers().await;
    let (mut stream, call) = started(&workers).await;
    call.reply.fail(ShardRefusal::Busy).await.unwrap();
    let error = with_timeout("the refusal", stream.next(5)).await.unwrap_err();
    assert!(matches!(error, Error::ShardRefused(ShardRefusal::Busy)), "{error:?}");

    let (stream, call) = started(&workers).await;
    drop(stream);
    with_timeout("the cancellation", call.reply.cancelled()).await;
}
