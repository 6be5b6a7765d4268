//! Streams of a connection, and how each side detects that the other has left.

use crate::cluster::{Pair, authority, config, endpoint, node, pair, pair_of, until, with_timeout};
use crate::samples;
use kvasir_transport::Error;
use kvasir_transport::service::{WorkerApi, deadline};
use kvasir_transport::{
    CloseCode, Connection, Dialer, EncodeCall, EndpointConfig, GenerateCall, Incoming, TensorHeader,
    TensorType, VersionRange,
};
use pki::Expected;
use proto::codec::CodecError;
use proto::event::{KvReplay, KvSnapshot, Medium, PeerIndexAsk};
use proto::ids::{Epoch, Role};
use proto::message::{GenerateError, GenerateFrame, GenerateRequest, PromptLogprobs, TokenIds};
use proto::placement::{PlaceOrder, PlaceReport};
use proto::worker::WorkerStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tarpc::context::Context;

async fn next_call(worker_end: &Connection) -> GenerateCall {
    match with_timeout("a generation", worker_end.accept()).await.unwrap() {
        Incoming::Generate(call) => *call,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_generation_arrives_whole_and_in_order() {
    let nodes = pair().await;
    let mut stream = nodes.to_worker.open_generate(&samples::request()).await.unwrap();
    let mut call = next_call(&nodes.to_coordinator).await;
    assert_eq!(call.request, samples::request());
    let frames = &samples::frames()[..3];
    for frame in frames {
        call.reply.send(frame).await.unwrap();
    }
    for frame in frames {
        assert_eq!(&with_timeout("a frame", stream.next()).await.unwrap().unwrap(), frame);
    }
    assert!(stream.next().await.is_none(), "nothing follows the last frame");
    with_timeout("arrival of all", call.reply.cancelled()).await;
}

/// The kernel drops a burst as a whole if it does not accept it in one call. After a few such bursts, the
/// path is limited to the shortest datagrams.
#[tokio::test]
async fn bursts_of_long_datagrams_arrive() {
    const LONG: u16 = 4096;
    let nodes = pair().await;
    until("long datagrams", || nodes.to_worker.datagram_bytes() > LONG).await;
    let prompt = TokenIds::from(vec![70_000; 60_000]);
    let request = GenerateRequest { prompt, ..samples::request() };
    for _ in 0..50 {
        let stream = nodes.to_worker.open_generate(&request).await.unwrap();
        assert_eq!(next_call(&nodes.to_coordinator).await.request, request);
        drop(stream);
    }
    assert!(nodes.to_worker.datagram_bytes() > LONG);
}

/// `next` loses nothing when its future is dropped, however the frames are split into packets.
#[tokio::test]
async fn next_frame_can_be_awaited_in_pieces() {
    let nodes = pair().await;
    let mut stream = nodes.to_worker.open_generate(&samples::request()).await.unwrap();
    let mut call = next_call(&nodes.to_coordinator).await;
    let frames = samples::frames();
    let sender = tokio::spawn(async move {
        for _ in 0..200 {
            call.reply.send(&frames[1]).await.unwrap();
            tokio::task::yield_now().await;
        }
        call.reply.send(&frames[2]).await.unwrap();
    });
    let mut tokens = 0;
    let finished = with_timeout("all frames", async {
        loop {
            tokio::select! {
                biased;
                frame = stream.next() => match frame.unwrap().unwrap() {
                    GenerateFrame::Tokens(_) => tokens += 1,
                    other => break other,
                },
                () = tokio::task::yield_now() => {}
            }
        }
    })
    .await;
    assert_eq!((tokens, finished), (200, samples::frames()[2].clone()));
    sender.await.unwrap();
}

#[tokio::test]
async fn dropping_the_stream_cancels_at_the_worker() {
    let nodes = pair().await;
    let stream = nodes.to_worker.open_generate(&samples::request()).await.unwrap();
    let mut call = next_call(&nodes.to_coordinator).await;
    call.reply.send(&samples::frames()[0]).await.unwrap();
    let cancelled = call.reply.cancelled();
    drop(stream);
    with_timeout("the worker's notice", cancelled).await;
    let error = call.reply.send(&samples::frames()[1]).await.unwrap_err();
    assert!(matches!(error, Error::StreamEnded(_)), "{error:?}");
}

#[tokio::test]
async fn a_worker_that_leaves_cuts_the_stream() {
    let nodes = pair().await;
    let mut stream = nodes.to_worker.open_generate(&samples::request()).await.unwrap();
    let mut call = next_call(&nodes.to_coordinator).await;
    call.reply.send(&samples::frames()[1]).await.unwrap();
    drop(call);
    assert!(matches!(with_timeout("tokens", stream.next()).await, Some(Ok(GenerateFrame::Tokens(_)))));
    let error = with_timeout("the cut", stream.next()).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::StreamCut { .. }), "{error:?}");
    assert!(error.retryable());
    assert!(stream.next().await.is_none());
}

async fn next_encode(worker_end: &Connection) -> EncodeCall {
    match with_timeout("an encode call", worker_end.accept()).await.unwrap() {
        Incoming::Encode(call) => call,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn texts_become_values_or_a_typed_refusal() {
    let nodes = pair().await;
    let request = samples::encode_request();
    let encoded = vec![vec![0.5f32, -1.25, f32::MIN_POSITIVE], vec![1e30, 0.0, -0.0]];
    let answers = async {
        let call = next_encode(&nodes.to_coordinator).await;
        assert_eq!(call.request, request);
        call.reply.send(&encoded).await.unwrap();
        let call = next_encode(&nodes.to_coordinator).await;
        call.reply.fail(GenerateError::QueueFull).await.unwrap();
    };
    let requests = async {
        let got = nodes.to_worker.encode(&request).await.unwrap().unwrap();
        let bits = |rows: &[Vec<f32>]| rows.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&encoded));
        assert_eq!(nodes.to_worker.encode(&request).await.unwrap(), Err(GenerateError::QueueFull));
    };
    with_timeout("both answers", async { tokio::join!(answers, requests) }).await;
}

#[tokio::test]
async fn a_reply_of_another_shape_than_requested_is_refused() {
    let nodes = pair().await;
    let request = samples::encode_request();
    // Too few texts, too many, none, texts of no width.
    for texts in [vec![vec![1.0]], vec![vec![1.0]; 3], vec![], vec![vec![]; 2]] {
        let answer = async {
            let call = next_encode(&nodes.to_coordinator).await;
            call.reply.send(&texts).await.unwrap();
        };
        let (got, ()) =
            with_timeout("refusal", async { tokio::join!(nodes.to_worker.encode(&request), answer) }).await;
        assert!(matches!(got, Err(Error::Protocol(_))), "{texts:?}: {got:?}");
    }
    let ragged = async {
        let call = next_encode(&nodes.to_coordinator).await;
        call.reply.send(&[vec![1.0, 2.0], vec![3.0]]).await
    };
    let (got, sent) =
        with_timeout("the cut", async { tokio::join!(nodes.to_worker.encode(&request), ragged) }).await;
    assert!(matches!(sent, Err(Error::Protocol(_))), "{sent:?}");
    assert!(matches!(got, Err(Error::StreamCut { .. })), "{got:?}");
}

#[tokio::test]
async fn dropping_an_encode_call_cancels_it_at_the_worker() {
    let nodes = pair().await;
    let to_worker = nodes.to_worker.clone();
    let asking = tokio::spawn(async move { to_worker.encode(&samples::encode_request()).await });
    let call = next_encode(&nodes.to_coordinator).await;
    asking.abort();
    with_timeout("the worker's notice", call.reply.cancelled()).await;
}

#[tokio::test]
async fn more_texts_than_a_call_may_have_are_not_sent() {
    let nodes = pair().await;
    let mut request = samples::encode_request();
    let text = request.texts.remove(0);
    request.texts = vec![text; proto::message::MAX_ENCODE_TEXTS + 1];
    let refused = nodes.to_worker.encode(&request).await;
    assert!(matches!(refused, Err(Error::Codec(_))), "{refused:?}");
}

#[tokio::test]
async fn a_lost_connection_ends_everything_at_once() {
    let Pair { worker, to_worker, to_coordinator, .. } = pair().await;
    let mut stream = to_worker.open_generate(&samples::request()).await.unwrap();
    let api = to_worker.worker_api().await.unwrap();
    worker.close().await;
    let error = with_timeout("the stream's end", stream.next()).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::ConnectionLost { .. }), "{error:?}");
    with_timeout("the call's end", api.drain(deadline(Duration::from_secs(60)))).await.unwrap_err();
    assert!(to_worker.is_closed() && to_coordinator.is_closed());
    let error = with_timeout("the end of accepting", to_worker.accept()).await.unwrap_err();
    assert!(error.to_string().contains("spiffe://c/worker/w1"), "{error}");
    assert!(to_worker.open_generate(&samples::request()).await.is_err());
}

#[tokio::test]
async fn silence_is_noticed_by_the_idle_timeout() {
    let ca = authority("c");
    let short = EndpointConfig { idle_timeout: Duration::from_secs(1), ..config() };
    let silent = EndpointConfig { keep_alive: Duration::from_secs(3600), ..short.clone() };
    let nodes = pair_of(
        endpoint(
            &ca,
            Role::Coordinator,
            "c1",
            EndpointConfig { keep_alive: Duration::from_secs(3600), ..short },
        ),
        endpoint(&ca, Role::Worker, "w1", silent),
    )
    .await;
    let error = with_timeout("the timeout", nodes.to_worker.closed()).await;
    assert!(error.to_string().contains("timed out"), "{error}");
}

#[tokio::test]
async fn pings_keep_a_quiet_connection_open() {
    let ca = authority("c");
    let lively = EndpointConfig {
        idle_timeout: Duration::from_secs(2),
        keep_alive: Duration::from_millis(100),
        ..config()
    };
    let nodes = pair_of(
        endpoint(&ca, Role::Coordinator, "c1", lively.clone()),
        endpoint(&ca, Role::Worker, "w1", lively),
    )
    .await;
    let open = tokio::time::timeout(Duration::from_secs(5), nodes.to_worker.closed()).await;
    assert!(open.is_err(), "lost after two idle timeouts: {open:?}");
}

#[tokio::test]
async fn kv_events_and_snapshots() {
    let nodes = pair().await;
    let mut sender = nodes.to_coordinator.open_kv_events().await.unwrap();
    for sequence in [1, 5, 9] {
        sender.send(samples::batch(sequence)).await.unwrap();
    }
    let Incoming::KvEvents(mut receiver) = with_timeout("events", nodes.to_worker.accept()).await.unwrap()
    else {
        panic!("not an event stream");
    };
    for sequence in [1, 5, 9] {
        assert_eq!(
            with_timeout("a batch", receiver.next()).await.unwrap().unwrap(),
            samples::batch(sequence)
        );
    }
    drop(sender);
    assert!(with_timeout("the end", receiver.next()).await.is_none());

    // More units than one frame holds.
    let units = (0..150_000u32).map(|n| proto::block::BlockId(u128::from(n).to_le_bytes()));
    let runs =
        vec![(samples::id(1), units.collect(), Medium::Device), (samples::id(2), vec![], Medium::Disk)];
    let resume_points = (0..70_000).map(|n| (samples::id(3), n, Medium::Device)).collect();
    let snapshot = KvSnapshot { epoch: Epoch(3), sequence: 77, runs, resume_points };
    let answer = async {
        match nodes.to_coordinator.accept().await.unwrap() {
            Incoming::KvSnapshot(reply) => reply.send(&snapshot).await.unwrap(),
            other => panic!("{other:?}"),
        }
    };
    let (got, ()) =
        with_timeout("the snapshot", async { tokio::join!(nodes.to_worker.kv_snapshot(), answer) }).await;
    let got = got.unwrap();
    assert_eq!((got.epoch, got.sequence), (Epoch(3), 77));
    let chain = |snapshot: &KvSnapshot| -> Vec<_> {
        let link = |(parent, units, medium): &(_, Vec<_>, _)| {
            let parents = std::iter::once(*parent).chain(units.iter().copied());
            parents.zip(units.clone()).map(|(p, u)| (p, u, *medium)).collect::<Vec<_>>()
        };
        snapshot.runs.iter().flat_map(link).collect()
    };
    assert!(got.runs.len() > snapshot.runs.len(), "the long run came in parts");
    assert!(chain(&got) == chain(&snapshot), "and has the same links");
    assert!(got.resume_points == snapshot.resume_points);
}

#[tokio::test]
async fn a_snapshot_without_an_answer_is_cut() {
    let nodes = pair().await;
    let drop_it = async { drop(nodes.to_coordinator.accept().await) };
    let (got, ()) =
        with_timeout("the cut", async { tokio::join!(nodes.to_worker.kv_snapshot(), drop_it) }).await;
    assert!(matches!(got, Err(Error::StreamCut { .. })), "{got:?}");
}

#[tokio::test]
async fn tensors() {
    let nodes = pair().await;
    let header =
        |shape: &[u64]| TensorHeader { name: "k".into(), element: TensorType::F16, shape: shape.to_vec() };
    let large: Vec<u8> = (0..3_000_000u32).map(|n| n as u8).collect();
    let sent = [(header(&[]), vec![1, 2]), (header(&[0, 7]), vec![]), (header(&[1500, 1000]), large)];
    let sending = async {
        let mut bulk = nodes.to_worker.open_bulk().await.unwrap();
        for (header, bytes) in &sent {
            bulk.send(header, bytes).await.unwrap();
        }
        let error = bulk.send(&header(&[2]), &[0; 3]).await.unwrap_err();
        assert!(matches!(error, Error::Protocol(_)), "{error:?}");
        bulk.finish();
    };
    let receiving = async {
        let Incoming::Bulk(mut bulk) = nodes.to_coordinator.accept().await.unwrap() else {
            panic!("not a bulk stream");
        };
        for (header, bytes) in &sent {
            let tensor = bulk.next(3_000_000).await.unwrap().unwrap();
            assert!(tensor.header == *header && tensor.bytes == *bytes);
        }
        assert_eq!(bulk.next(3_000_000).await.unwrap(), None);
    };
    with_timeout("all tensors", async { tokio::join!(sending, receiving) }).await;
}

#[tokio::test]
async fn a_tensor_larger_than_wanted_is_refused_by_its_header() {
    let nodes = pair().await;
    let mut bulk = nodes.to_worker.open_bulk().await.unwrap();
    let header = TensorHeader { name: "k".into(), element: TensorType::F32, shape: vec![3] };
    bulk.send(&header, &[0; 12]).await.unwrap();
    let Incoming::Bulk(mut bulk) = with_timeout("bulk", nodes.to_coordinator.accept()).await.unwrap() else {
        panic!("not a bulk stream");
    };
    let error = with_timeout("the header", bulk.next(11)).await.unwrap_err();
    assert!(matches!(error, Error::Codec(_)), "{error:?}");
}

/// A worker's service whose `drain` never returns and whose `undrain` panics.
#[derive(Clone, Default)]
struct Api {
    drained: Arc<AtomicBool>,
    dropped: Arc<AtomicBool>,
}

struct OnDrop(Arc<AtomicBool>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl WorkerApi for Api {
    async fn kv_replay(self, _: Context, from: u64) -> KvReplay {
        KvReplay::Events(samples::batch(from))
    }

    async fn drain(self, _: Context) {
        let _on_drop = OnDrop(self.dropped);
        self.drained.store(true, Ordering::SeqCst);
        std::future::pending().await
    }

    async fn undrain(self, _: Context) {
        panic!("as the test wants it");
    }

    async fn status(self, _: Context) -> WorkerStatus {
        samples::status()
    }

    async fn metrics_text(self, _: Context) -> String {
        "x".repeat(20 << 20)
    }

    async fn place(self, _: Context, _: PlaceOrder) -> PlaceReport {
        PlaceReport::default()
    }

    async fn load_adapter(
        self,
        _: Context,
        order: proto::adapter::AdapterOrder,
    ) -> Result<(), proto::adapter::AdapterRefusal> {
        Err(proto::adapter::AdapterRefusal::Unknown(order.name))
    }

    async fn unload_adapter(
        self,
        _: Context,
        name: proto::ids::ModelId,
    ) -> Result<(), proto::adapter::AdapterRefusal> {
        Err(proto::adapter::AdapterRefusal::Unknown(name))
    }

    async fn models(self, _: Context, _: proto::deployment::ModelsOrder) -> proto::deployment::ModelsReport {
        proto::deployment::ModelsReport::default()
    }

    async fn prompt_progress(
        self,
        _: Context,
        _: proto::block::BlockId,
        _: proto::sequence::SequenceName,
    ) -> Option<proto::sequence::PromptProgress> {
        None
    }
}

async fn serve(connection: Connection, api: Api) {
    while let Ok(incoming) = connection.accept().await {
        if let Incoming::WorkerRpc(rpc) = incoming {
            tokio::spawn(rpc.serve(api.clone()));
        }
    }
}

#[tokio::test]
async fn calls_answer_or_fail_alone() {
    let nodes = pair().await;
    let api = Api::default();
    tokio::spawn(serve(nodes.to_coordinator.clone(), api.clone()));
    let client = nodes.to_worker.worker_api().await.unwrap();
    let long = || deadline(Duration::from_secs(20));
    assert_eq!(client.status(long()).await.unwrap(), samples::status());
    assert_eq!(client.kv_replay(long(), 9).await.unwrap(), KvReplay::Events(samples::batch(9)));

    let error = client.drain(deadline(Duration::from_millis(50))).await.unwrap_err();
    assert!(matches!(error, tarpc::client::RpcError::DeadlineExceeded), "{error:?}");

    let error = client.metrics_text(long()).await.unwrap_err();
    assert!(error.to_string().contains("server"), "an answer that does not fit a frame: {error:?}");

    client.undrain(deadline(Duration::from_millis(200))).await.unwrap_err();
    assert_eq!(client.status(long()).await.unwrap(), samples::status(), "the channel has survived all that");
}

#[tokio::test]
async fn dropping_a_call_cancels_its_handler() {
    let nodes = pair().await;
    let api = Api::default();
    tokio::spawn(serve(nodes.to_coordinator.clone(), api.clone()));
    let client = nodes.to_worker.worker_api().await.unwrap();
    let call = tokio::spawn(async move { client.drain(deadline(Duration::from_secs(60))).await });
    until("the call's arrival", || api.drained.load(Ordering::SeqCst)).await;
    call.abort();
    until("the handler's end", || api.dropped.load(Ordering::SeqCst)).await;
}

/// The dialer reconnects to a coordinator that was restarted on the same port.
#[tokio::test]
async fn a_dialer_reconnects() {
    let ca = authority("c");
    let first = endpoint(&ca, Role::Coordinator, "c1", config());
    let address = first.address();
    let worker = Arc::new(endpoint(&ca, Role::Worker, "w1", config()));
    let expected = Expected::node(Role::Coordinator, node("c1"));
    let mut dialer = Dialer::new(worker, format!("localhost:{}", address.port()), expected);
    let connection = with_timeout("connecting", dialer.connect()).await;
    drop(with_timeout("accepting", first.accept()).await.unwrap());
    first.close().await;
    drop(first);
    with_timeout("the loss", connection.closed()).await;

    let reconnecting = tokio::spawn(async move { dialer.connect().await });
    let identity = crate::cluster::identity(&ca, Role::Coordinator, "c1");
    let second_epoch = || EndpointConfig { epoch: Epoch(2), ..config() };
    let mut second = None;
    until("the port to be free", || {
        second = kvasir_transport::Endpoint::bind(address, &identity, second_epoch()).ok();
        second.is_some()
    })
    .await;
    let again = with_timeout("reconnecting", reconnecting).await.unwrap();
    assert_eq!(again.peer_epoch(), Epoch(2));
}

#[tokio::test]
async fn a_fenced_worker_receives_the_close_code() {
    let nodes = pair().await;
    nodes.to_worker.close(CloseCode::Fenced);
    let error = with_timeout("the close", nodes.to_coordinator.closed()).await;
    assert!(error.to_string().contains("fenced"), "{error}");
}

#[tokio::test]
async fn coordinators_exchange_frames_in_both_directions() {
    let ca = authority("c");
    let config = || EndpointConfig { accepts: vec![Role::Coordinator], ..config() };
    let [c1, c2] = ["c1", "c2"].map(|name| endpoint(&ca, Role::Coordinator, name, config()));
    let expected = Expected::node(Role::Coordinator, node("c2"));
    let (ours, theirs) = tokio::join!(c1.connect(c2.address(), &expected), c2.accept());
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
    assert_eq!(theirs.peer().node, node("c1"));
    // Either side may open such a stream on the one connection.
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        let mut sender = from.open_group::<Vec<u8>>().await.unwrap();
        let too_long = sender.send(&vec![0; 2 << 20]).await;
        assert!(matches!(too_long, Err(Error::Codec(_))), "{too_long:?}");
        sender.send(&vec![7; 1000]).await.unwrap();
        let Incoming::Group(stream) = with_timeout("a stream", to.accept()).await.unwrap() else {
            panic!("another kind");
        };
        let mut frames = stream.frames::<Vec<u8>>();
        assert_eq!(with_timeout("a frame", frames.next()).await.unwrap().unwrap(), vec![7; 1000]);
        drop(sender);
        assert!(with_timeout("the end", frames.next()).await.is_none());
    }
}

#[tokio::test]
async fn a_coordinator_requests_another_ones_index_of_a_worker() {
    let ca = authority("c");
    let config = || EndpointConfig { accepts: vec![Role::Coordinator], ..config() };
    let [c1, c2] = ["c1", "c2"].map(|name| endpoint(&ca, Role::Coordinator, name, config()));
    let expected = Expected::node(Role::Coordinator, node("c2"));
    let (ours, theirs) = tokio::join!(c1.connect(c2.address(), &expected), c2.accept());
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
    let request = PeerIndexAsk { node: node("w1"), epoch: Epoch(7), after: 12 };
    let mut answer = ours.open_peer_index(&request).await.unwrap();
    let Incoming::PeerIndex(mut call) = with_timeout("a question", theirs.accept()).await.unwrap() else {
        panic!("another kind");
    };
    assert_eq!(call.request, request);
    // The bytes arrive unchanged, whatever they contain.
    for frame in [&[9u8; 1_000_000][..], &[]] {
        let (sent, got) = tokio::join!(call.send(frame), answer.next());
        sent.unwrap();
        assert_eq!(got.unwrap().unwrap(), frame);
    }
    let too_long = call.send(&vec![0; 5 << 20]).await;
    assert!(matches!(too_long, Err(Error::Codec(_))), "{too_long:?}");
    call.finish();
    assert_eq!(with_timeout("the end", answer.next()).await.unwrap(), None);
}

/// Frames between coordinators of two versions: the earlier build skips unknown frames and continues.
#[tokio::test]
async fn coordinators_of_two_versions_skip_unknown_frames() {
    use serde::{Deserialize, Serialize};
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Now {
        Known(u32),
        Later(String),
    }
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Before {
        Known(u32),
    }
    let ca = authority("c");
    let current = VersionRange::CURRENT;
    let speaks = |versions| EndpointConfig { accepts: vec![Role::Coordinator], versions, ..config() };
    let earlier = VersionRange { min: current.min - 1, max: current.max - 1 };
    let both = VersionRange { min: earlier.min, max: current.max };
    let c1 = endpoint(&ca, Role::Coordinator, "c1", speaks(both));
    let c2 = endpoint(&ca, Role::Coordinator, "c2", speaks(earlier));
    let expected = Expected::node(Role::Coordinator, node("c2"));
    let (ours, theirs) = tokio::join!(c1.connect(c2.address(), &expected), c2.accept());
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
    assert_eq!((ours.version(), theirs.version()), (earlier.max, earlier.max));
    let mut sender = ours.open_group::<Now>().await.unwrap();
    for message in [Now::Known(1), Now::Later("x".into()), Now::Known(2)] {
        sender.send(&message).await.unwrap();
    }
    let Incoming::Group(stream) = with_timeout("a stream", theirs.accept()).await.unwrap() else {
        panic!("another kind");
    };
    let mut frames = stream.frames::<Before>();
    assert_eq!(with_timeout("a frame", frames.next()).await.unwrap().unwrap(), Before::Known(1));
    let unknown = with_timeout("a frame", frames.next()).await.unwrap().unwrap_err();
    assert!(matches!(unknown, Error::Codec(CodecError::UnknownVariant { index: 1, .. })), "{unknown:?}");
    assert_eq!(with_timeout("a frame", frames.next()).await.unwrap().unwrap(), Before::Known(2));
}

/// The common prefix of several prompts is sent once, with and without images, encoders and a request for
/// log-probabilities.
#[tokio::test]
async fn prompts_with_numbered_prefixes_arrive_whole() {
    let nodes = pair().await;
    let request = |text: u32, length: u32, end: u32, predicted_cached: u32| {
        let prompt: Vec<u32> = (0..length).map(|at| at * 3 + text).chain([end]).collect();
        let images = if matches!(end, 1 | 2) { samples::images().0 } else { Vec::new() };
        let encoders = if end == 2 { samples::encoders() } else { Vec::new() };
        let prompt_logprobs = (end == 3).then_some(PromptLogprobs { top: 5 });
        let prompt = prompt.into();
        GenerateRequest { prompt, predicted_cached, images, encoders, prompt_logprobs, ..samples::request() }
    };
    for (text, length, cached) in [
        (1, 4_000, 0),
        (1, 4_000, 4_000),
        (1, 4_000, 4_000),
        (2, 4_000, 4_000),
        (1, 6_000, 5_000),
        (1, 6_000, 5_000),
    ] {
        for end in 0..4 {
            let request = request(text, length, end, cached);
            let mut stream = nodes.to_worker.open_generate(&request).await.unwrap();
            let mut call = next_call(&nodes.to_coordinator).await;
            assert_eq!(call.request, request);
            call.reply.send(&samples::frames()[2]).await.unwrap();
            assert_eq!(
                with_timeout("the answer", stream.next()).await.unwrap().unwrap(),
                samples::frames()[2]
            );
        }
    }
}
