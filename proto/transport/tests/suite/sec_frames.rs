//! R4: lengths are checked before anything is allocated. A malformed stream harms only itself. Unknown
//! variants of a newer peer are skipped and not fatal.

use crate::bare::{self, Root, frame, leaf};
use crate::cluster::{any_port, until, with_timeout};
use crate::samples;
use kvasir_transport::Error;
use kvasir_transport::{Connection, Endpoint, EndpointConfig, Incoming};
use proto::codec::{self, Cap, CodecError};
use proto::event::KvFrame;
use proto::ids::{Epoch, Role};
use proto::message::{GenerateRequest, NumberedPrefix, PrefixNote};

/// An endpoint's end of a connection whose other end the test controls.
struct Half {
    ours: quinn::Connection,
    theirs: Connection,
    endpoint: Endpoint,
}

async fn half(listener: &str, dialer: &str, accepts: Role) -> Half {
    let root = Root::new();
    let config = EndpointConfig::new(Epoch(1), [accepts]);
    let endpoint = Endpoint::bind(any_port(), &root.identity(listener, "n1"), config).unwrap();
    let shown = root.sign(&leaf(&format!("spiffe://c/{dialer}/n2")));
    let ours = bare::dial(endpoint.address(), Some(&shown)).await;
    let (_, theirs) =
        with_timeout("hello", async { tokio::join!(bare::hello(&ours, "n2"), endpoint.accept()) }).await;
    Half { ours, theirs: theirs.unwrap(), endpoint }
}

/// A worker; the test plays the coordinator.
async fn worker() -> Half {
    half("worker", "coordinator", Role::Coordinator).await
}

/// A coordinator; the test plays the worker.
async fn coordinator() -> Half {
    half("coordinator", "worker", Role::Worker).await
}

async fn write(connection: &quinn::Connection, bytes: &[u8]) -> (quinn::SendStream, quinn::RecvStream) {
    let (mut send, receive) = connection.open_bi().await.unwrap();
    send.write_all(bytes).await.unwrap();
    (send, receive)
}

/// Returns the codes with which the other side stopped and reset the two directions.
async fn refusal(stream: (quinn::SendStream, quinn::RecvStream)) -> (u64, u64) {
    let (send, mut receive) = stream;
    let stopped = with_timeout("stop", send.stopped()).await.unwrap().unwrap();
    match with_timeout("reset", receive.read(&mut [0])).await.unwrap_err() {
        quinn::ReadError::Reset(reset) => (stopped.into_inner(), reset.into_inner()),
        other => panic!("{other}"),
    }
}

/// A worker; the test plays another worker.
async fn worker_of_worker() -> Half {
    half("worker", "worker", Role::Worker).await
}

async fn generation_still_works(half: &Half) {
    let body = codec::encode(&samples::request(), Cap::GenerateRequest).unwrap();
    let _stream = write(&half.ours, &[&[2], &frame(body.len(), &body)[..]].concat()).await;
    match with_timeout("a generation", half.theirs.accept()).await.unwrap() {
        Incoming::Generate(call) => assert_eq!(call.request, samples::request()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn malformed_requests_end_their_own_stream() {
    let half = worker().await;
    let body = codec::encode(&samples::request(), Cap::GenerateRequest).unwrap();
    let mut trailing = body.clone();
    trailing.push(0);
    let rows = [
        ("longer than its cap", frame(Cap::GenerateRequest.bytes() + 1, &[])),
        ("4 GiB", frame(u32::MAX as usize, &[])),
        ("trailing byte", frame(trailing.len(), &trailing)),
        ("nothing in it", frame(0, &[])),
        ("unknown version", frame(2, &[9, 9])),
        ("cut body", frame(body.len() - 1, &body[..body.len() - 1])),
    ];
    for (what, bytes) in rows {
        // As a generate request, and as an encode call, which has another form.
        for kind in [2, 6] {
            let stream = write(&half.ours, &[&[kind], &bytes[..]].concat()).await;
            assert_eq!(refusal(stream).await, (3, 3), "{what}, kind {kind}");
        }
    }
    generation_still_works(&half).await;
}

/// A worker may only pull from another. A malformed request harms only its own stream.
#[tokio::test]
async fn a_worker_may_pull_from_another_and_nothing_else() {
    let half = worker_of_worker().await;
    for kind in [0u8, 1, 2, 3, 5, 6, 7, 8] {
        let stream = write(&half.ours, &[kind]).await;
        assert_eq!(refusal(stream).await, (2, 2), "kind {kind}");
    }
    let body = codec::encode(&samples::pull_request(), Cap::GenerateRequest).unwrap();
    let rows = [
        ("longer than its cap", frame(Cap::GenerateRequest.bytes() + 1, &[])),
        ("unknown version", frame(2, &[9, 9])),
        ("cut body", frame(body.len() - 1, &body[..body.len() - 1])),
    ];
    for (what, bytes) in rows {
        let stream = write(&half.ours, &[&[9], &bytes[..]].concat()).await;
        assert_eq!(refusal(stream).await, (3, 3), "{what}");
    }
    for (what, bytes) in [("unknown request", frame(2, &[9, 9])), ("cut request", frame(2, &[1, 1]))] {
        let stream = write(&half.ours, &[&[13], &bytes[..]].concat()).await;
        assert_eq!(refusal(stream).await, (3, 3), "{what}");
    }
    let _stream = write(&half.ours, &[&[9], &frame(body.len(), &body)[..]].concat()).await;
    match with_timeout("a pull", half.theirs.accept()).await.unwrap() {
        Incoming::Pull(call) => assert_eq!(call.request, samples::pull_request()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn unknown_kinds_and_wrong_directions_are_refused() {
    let half = worker().await;
    for (kind, code) in [(8u8, 2), (9, 2), (10, 2), (99, 1), (254, 1), (0, 2), (3, 2), (255, 2), (4, 3)] {
        let stream = write(&half.ours, &[kind]).await;
        assert_eq!(refusal(stream).await, (code, code), "kind {kind}");
    }
    assert_eq!(half.endpoint.stats().streams_refused, 9);
    generation_still_works(&half).await;
}

/// An incomplete request does not delay other streams.
#[tokio::test]
async fn an_incomplete_request_does_not_delay_other_streams() {
    let half = worker().await;
    let mut waiting = Vec::new();
    for part in [&[2][..], &[2, 0, 0], &[2, 0, 0, 1, 0, 7]] {
        for _ in 0..100 {
            waiting.push(write(&half.ours, part).await);
        }
    }
    generation_still_works(&half).await;
}

#[tokio::test]
async fn an_event_stream_survives_unknown_events_and_reports_a_cut() {
    let half = coordinator().await;
    let good = codec::encode(&KvFrame::Events(samples::batch(1)), Cap::Events).unwrap();
    let mut newer = good.clone();
    // The kind of the first event becomes one of a later version.
    newer[4] = 9;
    let mut send = half.ours.open_uni().await.unwrap();
    let frames =
        [frame(good.len(), &good), frame(newer.len(), &newer), frame(2, &[7, 7]), frame(good.len(), &good)];
    send.write_all(&[&[3], &frames.concat()[..], &frame(good.len(), &good[..10])].concat()).await.unwrap();
    send.finish().unwrap();
    let Incoming::KvEvents(mut events) = with_timeout("events", half.theirs.accept()).await.unwrap() else {
        panic!("not an event stream");
    };
    assert_eq!(events.next().await.unwrap().unwrap(), samples::batch(1));
    for index in [9, 7] {
        let error = events.next().await.unwrap().unwrap_err();
        assert!(
            matches!(error, Error::Codec(CodecError::UnknownVariant { index: i, .. }) if i == index),
            "{error:?}"
        );
    }
    assert_eq!(events.next().await.unwrap().unwrap(), samples::batch(1));
    let error = events.next().await.unwrap().unwrap_err();
    assert!(matches!(error, Error::StreamCut { .. }), "{error:?}");
}

#[tokio::test]
async fn an_event_frame_longer_than_its_cap_is_refused_by_its_length() {
    let half = coordinator().await;
    let mut send = half.ours.open_uni().await.unwrap();
    send.write_all(&[&[3], &frame(Cap::Events.bytes() + 1, &[])[..]].concat()).await.unwrap();
    let Incoming::KvEvents(mut events) = with_timeout("events", half.theirs.accept()).await.unwrap() else {
        panic!("not an event stream");
    };
    let error = with_timeout("refusal", events.next()).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Codec(CodecError::TooLong { .. })), "{error:?}");
}

/// A reset in the middle of a frame is an error of that stream and carries the peer's code.
#[tokio::test]
async fn a_reset_inside_a_frame_is_an_error_with_its_code() {
    let half = coordinator().await;
    let mut send = half.ours.open_uni().await.unwrap();
    send.write_all(&[3, 0, 0, 1]).await.unwrap();
    let Incoming::KvEvents(mut events) = with_timeout("events", half.theirs.accept()).await.unwrap() else {
        panic!("not an event stream");
    };
    send.reset(quinn::VarInt::from_u32(77)).unwrap();
    let error = with_timeout("the reset", events.next()).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("77"), "{error}");
}

#[tokio::test]
async fn a_malformed_rpc_ends_only_its_channel() {
    let half = worker().await;
    for bytes in [frame(Cap::Control.bytes() + 1, &[]), frame(2, &[9, 9]), frame(0, &[])] {
        let (_send, mut receive) = write(&half.ours, &[&[1], &bytes[..]].concat()).await;
        let Incoming::WorkerRpc(rpc) = with_timeout("a channel", half.theirs.accept()).await.unwrap() else {
            panic!("not a channel");
        };
        with_timeout("the channel's end", rpc.serve(Unreachable)).await;
        let end = with_timeout("the end", receive.read(&mut [0])).await;
        assert!(matches!(end, Ok(None) | Err(quinn::ReadError::Reset(_))), "{end:?}");
    }
    generation_still_works(&half).await;
}

/// An API that must not be called.
#[derive(Clone)]
struct Unreachable;

impl kvasir_transport::service::WorkerApi for Unreachable {
    async fn kv_replay(self, _: tarpc::context::Context, _: u64) -> proto::event::KvReplay {
        panic!("called")
    }
    async fn drain(self, _: tarpc::context::Context) {
        panic!("called")
    }
    async fn undrain(self, _: tarpc::context::Context) {
        panic!("called")
    }
    async fn status(self, _: tarpc::context::Context) -> proto::worker::WorkerStatus {
        panic!("called")
    }
    async fn metrics_text(self, _: tarpc::context::Context) -> String {
        panic!("called")
    }
    async fn place(
        self,
        _: tarpc::context::Context,
        _: proto::placement::PlaceOrder,
    ) -> proto::placement::PlaceReport {
        panic!("called")
    }

    async fn load_adapter(
        self,
        _: tarpc::context::Context,
        _: proto::adapter::AdapterOrder,
    ) -> Result<(), proto::adapter::AdapterRefusal> {
        panic!("called")
    }

    async fn unload_adapter(
        self,
        _: tarpc::context::Context,
        _: proto::ids::ModelId,
    ) -> Result<(), proto::adapter::AdapterRefusal> {
        panic!("called")
    }

    async fn models(
        self,
        _: tarpc::context::Context,
        _: proto::deployment::ModelsOrder,
    ) -> proto::deployment::ModelsReport {
        panic!("called")
    }

    async fn prompt_progress(
        self,
        _: tarpc::context::Context,
        _: proto::block::BlockId,
        _: proto::sequence::SequenceName,
    ) -> Option<proto::sequence::PromptProgress> {
        panic!("called")
    }
}

#[tokio::test]
async fn a_first_stream_that_is_no_hello_ends_the_connection() {
    let root = Root::new();
    let config = EndpointConfig::new(Epoch(1), [Role::Worker]);
    let endpoint = Endpoint::bind(any_port(), &root.identity("coordinator", "n1"), config).unwrap();
    for (tried, bytes) in [&[0u8][..], &[2, 0, 0, 0, 0], &[255, 255, 255, 255, 255], &[255, 0, 0, 0, 1, 7]]
        .into_iter()
        .enumerate()
    {
        let shown = root.sign(&leaf("spiffe://c/worker/n2"));
        let ours = bare::dial(endpoint.address(), Some(&shown)).await;
        let _stream = write(&ours, bytes).await;
        let reason = with_timeout("closing", ours.closed()).await;
        assert!(matches!(reason, quinn::ConnectionError::ApplicationClosed(_)), "{bytes:?}: {reason}");
        until("counting", || endpoint.stats().failed == tried as u64 + 1).await;
    }
    assert_eq!(endpoint.stats().accepted, 0);
}

/// Stream kind of a generation whose prompt may use a numbered prefix.
const GENERATE_AFTER: u8 = 16;
const UNKNOWN_PREFIX: u32 = 4;

#[tokio::test]
async fn a_prompt_after_an_unknown_prefix_is_refused_with_a_code() {
    let half = worker().await;
    let message = |note, request: &GenerateRequest| {
        let note = codec::encode(&note, Cap::GenerateRequest).unwrap();
        let request = codec::encode(request, Cap::GenerateRequest).unwrap();
        [&[GENERATE_AFTER], &frame(note.len(), &note)[..], &frame(request.len(), &request)].concat()
    };
    let numbered = |number, tokens| Some(NumberedPrefix { number, tokens });
    let keeping = PrefixNote { after: None, keep: numbered(7, 2) };
    let _numbered = write(&half.ours, &message(keeping, &samples::request())).await;
    assert!(matches!(with_timeout("it", half.theirs.accept()).await.unwrap(), Incoming::Generate(_)));
    // An unknown number, a wrong length, and a length beyond the prompt.
    for after in [numbered(8, 2), numbered(7, 1), numbered(7, u32::MAX)] {
        let (_send, mut receive) =
            write(&half.ours, &message(PrefixNote { after, keep: None }, &samples::request())).await;
        let refused = with_timeout("the refusal", receive.read(&mut [0])).await.unwrap_err();
        assert_eq!(refused, quinn::ReadError::Reset(UNKNOWN_PREFIX.into()), "{after:?}");
    }
    let follow_up = PrefixNote { after: numbered(7, 2), keep: numbered(9, u32::MAX) };
    let _follow_up = write(&half.ours, &message(follow_up, &samples::request())).await;
    let Incoming::Generate(call) = with_timeout("it", half.theirs.accept()).await.unwrap() else { panic!() };
    let prompt = samples::request().prompt;
    assert_eq!(*call.request.prompt, *[&prompt[..2], &prompt].concat());
    generation_still_works(&half).await;
}

#[tokio::test]
async fn a_worker_without_the_prefix_gets_the_whole_prompt() {
    let half = coordinator().await;
    let prompt: Vec<u32> = (0..4_000).collect();
    let request = GenerateRequest { prompt: prompt.into(), predicted_cached: 3_000, ..samples::request() };
    let answer = codec::encode(&samples::frames()[2], Cap::Stream).unwrap();
    let whole = codec::encode(&request, Cap::GenerateRequest).unwrap();
    let next = async || {
        let (send, mut receive) = with_timeout("a stream", half.ours.accept_bi()).await.unwrap();
        (send, with_timeout("the request", receive.read_to_end(1 << 20)).await.unwrap())
    };
    for turn in 0..3 {
        let mut stream = half.theirs.open_generate(&request).await.unwrap();
        let (mut send, sent) = next().await;
        assert_eq!(sent[0], GENERATE_AFTER);
        assert_eq!(sent.ends_with(&whole), turn == 0, "the first numbers it, the others go without it");
        if turn == 2 {
            send.reset(UNKNOWN_PREFIX.into()).unwrap();
            let (frames, resent) = tokio::join!(stream.next(), async {
                let (mut send, resent) = next().await;
                send.write_all(&frame(answer.len(), &answer)).await.unwrap();
                send.finish().unwrap();
                resent
            });
            assert_eq!(resent, [&[2], &frame(whole.len(), &whole)[..]].concat());
            assert_eq!(frames.unwrap().unwrap(), samples::frames()[2]);
            assert!(stream.next().await.is_none());
        } else {
            send.write_all(&frame(answer.len(), &answer)).await.unwrap();
            send.finish().unwrap();
            assert_eq!(
                with_timeout("the answer", stream.next()).await.unwrap().unwrap(),
                samples::frames()[2]
            );
        }
    }
    // A prefix that the worker does not have gets a new number.
    let _stream = half.theirs.open_generate(&request).await.unwrap();
    assert!(next().await.1.ends_with(&whole));
}
