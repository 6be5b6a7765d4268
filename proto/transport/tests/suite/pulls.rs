//! KV transfer between workers: pulled pieces arrive unchanged, and reading stops at anything other than
//! the expected piece.

use crate::bare::frame;
use crate::cluster::{authority, config, endpoint, node, with_timeout};
use crate::samples;
use kvasir_transport::Error;
use kvasir_transport::{Connection, Endpoint, Incoming, PullCall, PullStream};
use pki::Expected;
use proto::codec::{Cap, CodecError};
use proto::ids::Role;
use proto::pull::{PullHead, PullRefusal, PulledPiece};

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

async fn started(workers: &Workers) -> (PullStream, PullCall) {
    let stream = workers.requester.open_pull(&samples::pull_request()).await.unwrap();
    match with_timeout("a pull", workers.holder.accept()).await.unwrap() {
        Incoming::Pull(call) => (stream, call),
        other => panic!("{other:?}"),
    }
}

/// Accepts only this piece, with `len` bytes.
fn only(group: u32, end: u32, len: usize) -> impl FnOnce(&PulledPiece) -> Option<usize> {
    move |piece| ((piece.group, piece.end) == (group, end)).then_some(len)
}

fn piece(group: u32, end: u32, bytes: usize) -> PulledPiece {
    PulledPiece { group, end, bytes: bytes as u32, digest: [7; 32] }
}

#[tokio::test]
async fn pulled_pieces_arrive_whole_and_in_order() {
    let workers = workers().await;
    let (mut stream, mut call) = started(&workers).await;
    assert_eq!(call.request, samples::pull_request());
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
    let cancelled = call.reply.cancelled();
    let holder = async {
        call.reply.head(PullHead { tokens: 32, pieces: 2 }).await.unwrap();
        call.reply.piece(piece(0, 16, 3), &bytes[..3]).await.unwrap();
        let refused = call.reply.piece(piece(0, 32, 4), &bytes[..3]).await;
        assert!(matches!(refused, Err(Error::Protocol(_))), "as many bytes as are announced");
        call.reply.piece(piece(1, 32, bytes.len()), &bytes).await.unwrap();
        call.reply.finish();
    };
    let asker = async {
        assert_eq!(stream.head().await.unwrap(), PullHead { tokens: 32, pieces: 2 });
        assert_eq!(stream.piece(only(0, 16, 3)).await.unwrap(), (piece(0, 16, 3), bytes[..3].to_vec()));
        let (head, got) = stream.piece(only(1, 32, bytes.len())).await.unwrap();
        assert!(head == piece(1, 32, bytes.len()) && got == bytes);
        assert!(matches!(stream.piece(only(0, 48, 3)).await, Err(Error::StreamCut { .. })));
    };
    with_timeout("all bytes", async { tokio::join!(holder, asker) }).await;
    with_timeout("arrival of all", cancelled).await;
}

#[tokio::test]
async fn a_refusal_is_typed_before_the_head_and_after_it() {
    let workers = workers().await;
    let (mut stream, call) = started(&workers).await;
    call.reply.fail(PullRefusal::NotHeld).await.unwrap();
    let error = with_timeout("the refusal", stream.head()).await.unwrap_err();
    assert!(matches!(error, Error::PullRefused(PullRefusal::NotHeld)), "{error:?}");

    let (mut stream, mut call) = started(&workers).await;
    call.reply.head(PullHead { tokens: 32, pieces: 2 }).await.unwrap();
    call.reply.fail(PullRefusal::Internal).await.unwrap();
    stream.head().await.unwrap();
    let error = with_timeout("the refusal", stream.piece(only(0, 16, 3))).await.unwrap_err();
    assert!(matches!(error, Error::PullRefused(PullRefusal::Internal)), "{error:?}");
}

#[tokio::test]
async fn an_unexpected_piece_is_not_read() {
    let workers = workers().await;
    for wrong in [piece(1, 16, 3), piece(0, 32, 3), piece(0, 16, 4), piece(0, 16, 0)] {
        let (mut stream, mut call) = started(&workers).await;
        call.reply.head(PullHead { tokens: 32, pieces: 2 }).await.unwrap();
        call.reply.piece(wrong, &vec![0; wrong.bytes as usize]).await.unwrap();
        stream.head().await.unwrap();
        let error = with_timeout("the piece", stream.piece(only(0, 16, 3))).await.unwrap_err();
        assert!(matches!(error, Error::Protocol(_)), "{wrong:?}: {error:?}");
    }
}

#[tokio::test]
async fn dropping_a_pull_cancels_it_and_a_holder_that_leaves_cuts_it() {
    let workers = workers().await;
    let (stream, call) = started(&workers).await;
    drop(stream);
    with_timeout("the holder's notice", call.reply.cancelled()).await;

    let (mut stream, mut call) = started(&workers).await;
    call.reply.head(PullHead { tokens: 32, pieces: 2 }).await.unwrap();
    drop(call);
    stream.head().await.unwrap();
    let error = with_timeout("the cut", stream.piece(only(0, 16, 3))).await.unwrap_err();
    assert!(matches!(error, Error::StreamCut { .. }), "{error:?}");
}

/// A frame that is longer than its cap is refused after its length field.
#[tokio::test]
async fn a_frame_longer_than_its_cap_is_refused_by_its_length() {
    let workers = workers().await;
    let (mut stream, mut call) = started(&workers).await;
    // The raw bytes of a piece may be anything, including the length of a frame that is too long.
    let long = frame(Cap::Stream.bytes() + 1, &[]);
    call.reply.head(PullHead { tokens: 1, pieces: 1 }).await.unwrap();
    call.reply.piece(piece(0, 16, long.len()), &long).await.unwrap();
    stream.head().await.unwrap();
    let read = with_timeout("the first piece", stream.piece(only(0, 16, 0))).await;
    assert!(matches!(read, Err(Error::Protocol(_))), "{read:?}");
    let error = with_timeout("the frame", stream.head()).await.unwrap_err();
    assert!(matches!(error, Error::Codec(CodecError::TooLong { .. })), "{error:?}");
}
