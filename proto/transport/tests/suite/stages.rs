//! Streams between the stages of a replica: orders, reports and activations arrive unchanged, and data
//! beyond the agreed length is not read.

use crate::cluster::{authority, config, endpoint, node, with_timeout};
use crate::samples;
use kvasir_transport::Error;
use kvasir_transport::{ActivationReceiver, ActivationSender, Connection, Endpoint, Incoming};
use pki::Expected;
use proto::ids::{Epoch, Role};
use proto::placement::ClaimRefusal;
use proto::stage::blocks::{StageBlock, StageBlocksOrder, StageBlocksReport};
use proto::stage::{ReplicaId, StageFailure, StageFeed, StageFrame, StageReport};
use std::pin::pin;
use std::task::Poll;
use tokio::runtime::{Builder, Runtime};

struct Workers {
    first: Connection,
    second: Connection,
    _endpoints: [Endpoint; 2],
}

async fn workers() -> Workers {
    let ca = authority("c");
    let [a, b] = ["w1", "w2"].map(|name| endpoint(&ca, Role::Worker, name, config()));
    let expected = Expected::node(Role::Worker, node("w2"));
    let (first, second) =
        with_timeout("joining", async { tokio::join!(a.connect(b.address(), &expected), b.accept()) }).await;
    Workers { first: first.unwrap(), second: second.unwrap(), _endpoints: [a, b] }
}

#[tokio::test]
async fn orders_reports_and_rows_of_logits_arrive() {
    let workers = workers().await;
    let mut control = workers.first.open_stage().await.unwrap();
    for order in samples::stage_orders() {
        control.orders.send(&order).await.unwrap();
    }
    let Incoming::Stage(mut call) = with_timeout("control", workers.second.accept()).await.unwrap() else {
        panic!("a control stream");
    };
    for order in samples::stage_orders() {
        assert_eq!(call.orders.next().await.unwrap(), order);
    }
    let rows: [Vec<f32>; 2] = [vec![1.5, -0.0, f32::MIN_POSITIVE], vec![2.0, 3.0, 4.0]];
    let drawn = StageReport::Drawn(samples::stage_drawn());
    let bytes = rows.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
    call.reporter.send(&StageReport::Ready, Vec::new()).await.unwrap();
    call.reporter.send(&drawn, bytes).await.unwrap();
    call.reporter.send(&StageReport::Failed(StageFailure::Stops), Vec::new()).await.unwrap();
    let mut reporter = call.reporter;
    let finished = tokio::spawn(async move { reporter.finish().await });
    assert_eq!(control.reports.next().await.unwrap(), StageReport::Ready);
    assert_eq!(control.reports.next().await.unwrap(), drawn);
    for row in &rows {
        let got = control.reports.row(3).await.unwrap();
        assert!(got.iter().zip(row).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
    let failed = control.reports.next().await.unwrap_err();
    assert!(matches!(failed, Error::StageFailed(StageFailure::Stops)), "{failed}");
    with_timeout("the end", finished).await.unwrap();
    drop(control);
    assert!(call.orders.next().await.is_err(), "the first stage is gone");
}

#[tokio::test]
async fn activations_follow_their_step_and_further_rows_are_refused() {
    let workers = workers().await;
    let feed = StageFeed { replica: ReplicaId([6; 16]) };
    let mut sender = workers.first.open_activations(&feed).await.unwrap();
    let step = StageFrame::Step(samples::stage_step());
    let bytes: Vec<u8> = (0..3 * 400_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
    let sent = async {
        let sent = sender.send(&step, bytes.clone()).await.unwrap();
        assert!(sent > bytes.len());
        sender.send(&step, bytes.clone()).await.unwrap();
    };
    let received = async {
        let Incoming::Activations(mut receiver) = workers.second.accept().await.unwrap() else {
            panic!("a stream of activations");
        };
        assert_eq!(receiver.feed, feed);
        let mut got = Vec::new();
        let mut sink = |part: &[u8]| got.extend_from_slice(part);
        assert_eq!(receiver.next(400_000, 3, &mut sink).await.unwrap(), Some(step.clone()));
        let refused = receiver.next(400_000, 2, &mut sink).await.unwrap_err();
        assert_eq!(got, bytes);
        assert!(matches!(refused, Error::Protocol(_)), "{refused}");
    };
    with_timeout("both", async { tokio::join!(sent, received) }).await;
    with_timeout("the refusal", sender.cancelled()).await;
}

/// A runtime with one thread, which a test can keep busy.
fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Two workers, each on its own runtime, and a stream from the first to the second.
fn stream_between(
    first: &Runtime,
    second: &Runtime,
) -> ([Endpoint; 2], [Connection; 2], ActivationSender, ActivationReceiver) {
    let ca = authority("c");
    let expected = Expected::node(Role::Worker, node("w2"));
    let b = second.block_on(async { endpoint(&ca, Role::Worker, "w2", config()) });
    let a = first.block_on(async { endpoint(&ca, Role::Worker, "w1", config()) });
    let address = b.address();
    let accepting = second.spawn(async move {
        let accepted = with_timeout("accepting", b.accept()).await.unwrap();
        (b, accepted)
    });
    let dialed = first.block_on(with_timeout("dialing", a.connect(address, &expected))).unwrap();
    let feed = StageFeed { replica: ReplicaId([6; 16]) };
    let sender = first.block_on(dialed.open_activations(&feed)).unwrap();
    let (b, accepted) = second.block_on(accepting).unwrap();
    let Incoming::Activations(receiver) =
        second.block_on(with_timeout("the stream", accepted.accept())).unwrap()
    else {
        panic!("a stream of activations");
    };
    ([a, b], [dialed, accepted], sender, receiver)
}

#[test]
fn handed_over_writes_are_sent_while_the_runtime_is_busy() {
    let (first, second) = (runtime(), runtime());
    let (_endpoints, _connections, mut sender, mut receiver) = stream_between(&first, &second);
    let (started_tx, started_rx) = std::sync::mpsc::channel();
    let (free, held) = std::sync::mpsc::channel::<()>();
    first.spawn(async move {
        started_tx.send(()).unwrap();
        held.recv().unwrap();
    });
    started_rx.recv().unwrap();
    let handover = sender.handover();
    let step = StageFrame::Step(samples::stage_step());
    let mut read = |times: u8| {
        second.block_on(with_timeout("the step", async {
            for time in 0..times {
                let mut got = Vec::new();
                let mut sink = |part: &[u8]| got.extend_from_slice(part);
                assert_eq!(receiver.next(4, 3, &mut sink).await.unwrap(), Some(step.clone()));
                assert_eq!(got, [time; 12]);
            }
        }));
    };
    let hand_over = |sender: &mut ActivationSender, time: u8| {
        let sent = handover.poll(first.handle(), pin!(sender.send(&step, vec![time; 12])));
        assert!(matches!(sent, Poll::Ready(Ok(_))), "{sent:?}");
    };
    hand_over(&mut sender, 0);
    read(1);
    free.send(()).unwrap();
    // In parallel with the runtime's thread, which receives acknowledgements meanwhile.
    for time in 0..200 {
        hand_over(&mut sender, time);
    }
    read(200);
    drop(receiver);
    first.block_on(with_timeout("the end", sender.cancelled()));
}

#[test]
fn a_runtime_that_ends_drops_the_connection_that_a_handover_could_drive() {
    let (first, second) = (runtime(), runtime());
    let (endpoints, connections, sender, receiver) = stream_between(&first, &second);
    let (handover, address) = (sender.handover(), endpoints[0].address());
    drop((endpoints, connections, sender, receiver));
    drop(first);
    std::net::UdpSocket::bind(address).expect("its socket is closed");
    drop(handover);
}

#[tokio::test]
async fn block_contents_follow_orders_and_reports() {
    let workers = workers().await;
    let feed = StageFeed { replica: ReplicaId([6; 16]) };
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(i) >> 5) as u8).collect();
    let block = StageBlock { group: 1, number: 70_000 };
    let (read, write) = (StageBlocksOrder::Read(vec![block]), StageBlocksOrder::Write(vec![block]));
    let orders = async {
        let mut blocks = workers.first.open_stage_blocks(&feed).await.unwrap();
        blocks.order(&write, bytes.clone()).await.unwrap();
        assert_eq!(blocks.report().await.unwrap(), StageBlocksReport::Written);
        blocks.order(&read, Vec::new()).await.unwrap();
        assert_eq!(blocks.report().await.unwrap(), StageBlocksReport::Read(3_000_000));
        assert_eq!(blocks.bytes(1_000_000).await.unwrap(), bytes[..1_000_000]);
        assert_eq!(blocks.bytes(2_000_000).await.unwrap(), bytes[1_000_000..]);
        let cut = blocks.report().await.unwrap_err();
        assert!(matches!(cut, Error::StreamCut { .. } | Error::StreamEnded(_)), "{cut}");
    };
    let second_stage = async {
        let Incoming::StageBlocks(mut call) = workers.second.accept().await.unwrap() else {
            panic!("a stream of blocks");
        };
        assert_eq!(call.feed, feed);
        assert_eq!(call.next().await.unwrap(), Some(write.clone()));
        let filled = call.bytes(3_000_000).await.unwrap();
        call.report(&StageBlocksReport::Written, Vec::new()).await.unwrap();
        assert_eq!(call.next().await.unwrap(), Some(read.clone()));
        call.report(&StageBlocksReport::Read(3_000_000), filled).await.unwrap();
    };
    with_timeout("both", async { tokio::join!(orders, second_stage) }).await;
}

#[tokio::test]
async fn a_claim_is_granted_or_refused_and_renewed_by_heartbeats() {
    let workers = workers().await;
    let incoming = async || match with_timeout("a claim", workers.second.accept()).await.unwrap() {
        Incoming::StageLease(call) => call,
        other => panic!("{other:?}"),
    };
    let claim = samples::stage_claim();
    let (lease, held) = with_timeout("a lease", async {
        tokio::join!(workers.first.claim_stage(&claim), async {
            let call = incoming().await;
            assert_eq!(call.claim, claim);
            call.grant().await.unwrap()
        })
    })
    .await;
    let (mut lease, mut held) = (lease.unwrap(), held);
    for _ in 0..3 {
        let (beaten, answered) =
            with_timeout("a beat", async { tokio::join!(lease.beat(), held.beat()) }).await;
        beaten.unwrap();
        answered.unwrap();
    }
    drop(lease);
    assert!(with_timeout("the end", held.beat()).await.is_err(), "the first stage wants it no more");

    let refusal = ClaimRefusal::Stale { plan_index: 9, epoch: Epoch(3) };
    let (refused, ()) = with_timeout("a refusal", async {
        tokio::join!(workers.first.claim_stage(&claim), async {
            incoming().await.refuse(refusal.clone()).await.unwrap();
        })
    })
    .await;
    let Err(Error::StageClaimed(why)) = refused else { panic!("{refused:?}") };
    assert_eq!(why, refusal);
}
