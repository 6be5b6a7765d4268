//! Images that one worker encodes for another: their values arrive with the same bits, and nothing is read that the head
//! does not allow.

use crate::cluster::{authority, config, endpoint, node, pair, with_timeout};
use crate::samples;
use kvasir_transport::{
    Connection, EncodeImageCall, EncodeImageStream, Endpoint, Error, Incoming, StreamCode,
};
use pki::Expected;
use proto::ids::Role;
use proto::message::image_encoder::{EncodeImageFrame, EncodedImageHead, MAX_DEEPSTACK};

struct Workers {
    asker: Connection,
    encoder: Connection,
    _endpoints: [Endpoint; 2],
}

async fn workers() -> Workers {
    let ca = authority("c");
    let [a, b] = ["w1", "w2"].map(|name| endpoint(&ca, Role::Worker, name, config()));
    let expected = Expected::node(Role::Worker, node("w2"));
    let (asker, encoder) =
        with_timeout("joining", async { tokio::join!(a.connect(b.address(), &expected), b.accept()) }).await;
    Workers { asker: asker.unwrap(), encoder: encoder.unwrap(), _endpoints: [a, b] }
}

async fn started(workers: &Workers) -> (EncodeImageStream, EncodeImageCall) {
    let stream = workers.asker.open_encode_image(&samples::image_to_encode()).await.unwrap();
    match with_timeout("an image", workers.encoder.accept()).await.unwrap() {
        Incoming::EncodeImage(call) => (stream, call),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_values_of_an_image_arrive_with_the_same_bits() {
    let workers = workers().await;
    let (mut stream, mut call) = started(&workers).await;
    assert_eq!(call.image, samples::image_to_encode());
    let head = EncodedImageHead { rows: 500, ..samples::image_head() };
    let (values, count) = head.lists().unwrap();
    let number = |at: usize| f32::from_bits((at as u32).wrapping_mul(0x9e37_79b9));
    let sent: Vec<Vec<f32>> =
        (0..count).map(|list| (0..values).map(|at| number(at + list * values)).collect()).collect();
    let lists: Vec<&[f32]> = sent.iter().map(Vec::as_slice).collect();
    let encoder = async {
        call.reply.working().await.unwrap();
        call.reply.send(head, &lists).await.unwrap();
    };
    let asker = async {
        assert_eq!(stream.next().await.unwrap(), EncodeImageFrame::Working);
        assert_eq!(stream.next().await.unwrap(), EncodeImageFrame::Encoded(head));
        for sent in &sent {
            let mut list = Vec::new();
            while !stream.values(values, &mut list).await.unwrap() {}
            assert!(list.iter().map(|value| value.to_bits()).eq(sent.iter().map(|value| value.to_bits())));
        }
        drop(stream);
    };
    with_timeout("the image", async { tokio::join!(encoder, asker) }).await;
    // Lists that are not what the head says are not sent.
    let (_stream, call) = started(&workers).await;
    let refused = call.reply.send(head, &lists[1..]).await;
    assert!(matches!(refused, Err(Error::Protocol(_))), "{refused:?}");
}

#[tokio::test]
async fn refusals_arrive_and_a_cut_answer_is_an_error() {
    let workers = workers().await;
    for refusal in samples::image_refusals() {
        let (mut stream, call) = started(&workers).await;
        call.reply.fail(refusal.clone()).await.unwrap();
        assert_eq!(stream.next().await.unwrap(), EncodeImageFrame::Failed(refusal));
    }
    let (mut stream, call) = started(&workers).await;
    drop(call);
    let cut = with_timeout("the end", stream.next()).await.unwrap_err();
    assert!(matches!(cut, Error::StreamEnded(_) | Error::StreamCut { .. }), "{cut:?}");
}

#[test]
fn heads_beyond_the_limits_have_no_lists() {
    let head = samples::image_head();
    assert_eq!(head.lists(), Some((900, 3)));
    assert_eq!(EncodedImageHead { deepstack: MAX_DEEPSTACK + 1, ..head }.lists(), None);
    assert_eq!(EncodedImageHead { rows: u32::MAX, width: u32::MAX, ..head }.lists(), None);
    assert_eq!(
        EncodedImageHead { rows: 1 << 16, width: 1 << 12, deepstack: 0, ..head }.lists(),
        Some((1 << 28, 1))
    );
    assert_eq!(EncodedImageHead { rows: 1 << 16, width: 1 << 12, deepstack: 1, ..head }.lists(), None);
}

#[tokio::test]
async fn only_workers_have_images_encoded() {
    let nodes = pair().await;
    let mut stream = nodes.to_worker.open_encode_image(&samples::image_to_encode()).await.unwrap();
    let refused = with_timeout("the refusal", stream.next()).await.unwrap_err();
    assert!(matches!(refused, Error::StreamEnded(StreamCode::Forbidden)), "{refused:?}");
}
