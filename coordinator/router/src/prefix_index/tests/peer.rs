//! Transfers to a peer lead to the same index, whatever happens meanwhile.

use super::churn::{Both, op};
use super::*;
use crate::prefix_index::peer::{Export, FrameSize, Import, PeerError};
use proto::codec::{self, Cap};
use proto::event::PeerIndexFrame;
use proto::ids::NodeId;

fn node(worker: usize) -> NodeId {
    NodeId::new(format!("w{worker}")).unwrap()
}

/// Workers 0 and 1, with a hole, a shared prefix, a path of their own and a path with an unknown start.
fn source_index() -> PrefixIndex {
    let mut index = joined(2);
    index.root(unit(0));
    index
        .apply(slot(0), batch(1, 1, vec![stored(1..=9_000), removed(100..=200), stored(20_000..=20_050)]))
        .unwrap();
    index.apply(slot(1), batch(1, 1, vec![stored(1..=50), stored(30_000..=30_010)])).unwrap();
    let point = KvEvent::ResumePoint { unit: unit(40_000), position: 640_000, medium: Medium::Device };
    index.apply(slot(1), batch(1, 3, vec![point])).unwrap();
    index
}

fn depths(index: &PrefixIndex, from: Slot) -> Vec<u32> {
    let chains = [1..=40u64, 1..=150, 1..=9_500, 19_000..=21_000, 29_990..=30_020, 39_999..=40_001];
    chains.into_iter().map(|units| index.lookup(&chain(units)).units(from)).collect()
}

/// An index in which the worker has just joined, without events. The receiver's slots differ from the
/// sender's.
fn empty_index(at: Slot) -> PrefixIndex {
    let mut to = PrefixIndex::new(1 << 22);
    to.join(at, Epoch(1));
    to
}

fn export(from: &PrefixIndex, worker: usize, after: u64) -> Export {
    Export::new(from, slot(worker), node(worker), after).unwrap()
}

fn import(worker: usize) -> Import {
    Import::new(slot(7), node(worker), Epoch(1))
}

fn frames(from: &PrefixIndex, worker: usize) -> Vec<Vec<u8>> {
    let mut export = export(from, worker, 0);
    std::iter::from_fn(|| export.next(from).unwrap()).collect()
}

#[test]
fn a_restarted_peer_ends_up_with_the_same_index() {
    let mut from = source_index();
    // A reservation adds units that the worker does not hold.
    from.reserve(slot(1), chain(1..=70));
    let s = slot(7);
    let mut to = empty_index(s);
    let (mut export, mut import) = (export(&from, 0, 0), import(0));
    let (mut frames, mut need) = (0, None);
    let missed = [removed(8_000..=9_000), stored(9_001..=9_010)];
    while let Some(frame) = export.next(&from).unwrap() {
        assert_eq!(need, None);
        need = import.take(&mut to, &frame).unwrap();
        frames += 1;
        if frames == 3 {
            // The first part has arrived and counts.
            assert!(to.lookup(&chain(1..=40)).units(s) > 0);
            from.apply(slot(0), batch(1, 4, missed.to_vec())).unwrap();
        }
    }
    // Later events are requested from the worker itself, and its new batches wait for them.
    assert_eq!(need, Some(GapRepair::Replay { from: 4 }));
    let next = batch(1, 6, vec![stored(9_011..=9_011)]);
    from.apply(slot(0), next.clone()).unwrap();
    assert_eq!(to.apply(s, next), Ok(None));
    assert!(to.stream(s).unwrap().behind);
    assert_eq!(to.replayed(s, Epoch(1), Some(batch(1, 4, missed.to_vec()))), Ok(None));
    assert_eq!(depths(&to, s), depths(&from, slot(0)));
    assert_eq!(to.stream(s).map(|view| (view.applied, view.behind)), Some((6, false)));
    // Reservations are not transferred.
    let mut to = empty_index(s);
    let mut import = Import::new(s, node(1), Epoch(1));
    for frame in self::frames(&from, 1) {
        import.take(&mut to, &frame).unwrap();
    }
    assert_eq!(depths(&to, s), [40, 50, 50, 0, 21, 2]);
}

#[test]
fn incomplete_or_invalid_transfers_are_refused() {
    let from = source_index();
    // A lost frame: the digest is wrong, and the worker's snapshot is needed.
    let (mut to, mut lossy_import) = (empty_index(slot(7)), import(0));
    let mut lossy = frames(&from, 0);
    lossy.remove(2);
    let end = lossy.pop().unwrap();
    assert!(!lossy_import.has_started());
    lossy.iter().for_each(|frame| assert_eq!(lossy_import.take(&mut to, frame), Ok(None)));
    assert_eq!(lossy_import.take(&mut to, &end), Err(PeerError::Digest(node(0))));
    assert!(lossy_import.has_started());
    assert_eq!(to.apply(slot(7), batch(1, 9, vec![stored([1])])), Ok(None), "it waits for the snapshot");
    let snapshot = KvSnapshot { epoch: Epoch(1), sequence: 8, runs: vec![], resume_points: vec![] };
    assert_eq!(install(&mut to, slot(7), snapshot), Ok(None));
    assert_eq!(to.lookup(&chain(1..=9)).units(slot(7)), 1, "nothing of the peer's is left");
    // Invalid frames are refused.
    let encode = |frame| codec::encode(&frame, Cap::Events).unwrap();
    let frame = encode(PeerIndexFrame::Runs(vec![]));
    assert_eq!(import(0).take(&mut empty_index(slot(7)), &frame), Err(PeerError::NoWorker));
    assert!(matches!(import(0).take(&mut to, &[99]), Err(PeerError::Codec(_))));
    for (worker, epoch) in [(1, 1), (0, 2)] {
        let (node, epoch) = (node(worker), Epoch(epoch));
        let head = encode(PeerIndexFrame::Worker { node: node.clone(), epoch, sequence: 3 });
        let refused = import(0).take(&mut empty_index(slot(7)), &head);
        assert_eq!(refused, Err(PeerError::Another { node, epoch }));
    }
}

#[test]
fn a_peers_older_knowledge_does_not_replace_the_workers_events() {
    let from = source_index();
    let mut to = PrefixIndex::new(1 << 22);
    join(&mut to, 7, 1);
    to.apply(slot(7), batch(1, 1, (1..=5).map(|n| stored([n])).collect())).unwrap();
    let mut import = import(0);
    let frames = frames(&from, 0);
    assert_eq!(import.take(&mut to, &frames[0]), Ok(None), "roots are anybody's");
    assert_eq!(import.take(&mut to, &frames[1]), Err(PeerError::Old { sequence: 3 }));
    assert!(!import.has_started());
    assert_eq!(to.lookup(&chain(1..=9)).units(slot(7)), 5);
    // An export needs newer events than the receiver has.
    assert!(Export::new(&from, slot(0), node(0), 3).is_none());
    assert!(Export::new(&from, slot(5), node(5), 0).is_none());
}

#[test]
fn an_export_has_no_end_frame_if_the_worker_restarts() {
    let mut from = source_index();
    let mut export = export(&from, 0, 0);
    for _ in 0..3 {
        assert!(export.next(&from).unwrap().is_some());
    }
    from.join(slot(0), Epoch(2));
    assert_eq!(export.next(&from).unwrap(), None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// After a transfer during random operations, and the following events, the receiver equals the
    /// reference.
    #[test]
    fn after_an_import_and_the_stream_the_index_equals_the_reference(
        before in proptest::collection::vec(op(), 1..60),
        meanwhile in proptest::collection::vec(op(), 0..12),
        worker in 0..5usize,
        unknown in 0..40u64,
    ) {
        let mut both = Both::new(1 << 22);
        before.into_iter().for_each(|op| both.apply(op));
        let (epoch, from) = (both.epochs[worker], both.sequences[worker]);
        let Some(mut export) = Export::new(&both.index, slot(worker), node(worker), 0) else {
            prop_assert_eq!(from, 0);
            return Ok(());
        };
        // Minimal frames, so that many operations happen in between.
        export.size = FrameSize { strands: 1, units: 3 };
        let mut to = PrefixIndex::new(1 << 22);
        to.join(slot(7), Epoch(epoch));
        let mut import = Import::new(slot(7), node(worker), Epoch(epoch));
        let mut need = None;
        let mut meanwhile = meanwhile.into_iter();
        while let Some(frame) = export.next(&both.index).unwrap() {
            need = import.take(&mut to, &frame).unwrap();
            meanwhile.next().into_iter().for_each(|op| both.apply(op));
        }
        if both.epochs[worker] != epoch {
            // The worker has a new epoch: the transfer of the old one is useless.
            return Ok(());
        }
        let Some(GapRepair::Replay { from }) = need else { panic!("{need:?}") };
        let missed = both.events_since(worker, from);
        if missed.is_none() {
            // A snapshot has replaced the events; the worker reports that they are gone.
            prop_assert_eq!(to.replayed(slot(7), Epoch(epoch), None), Ok(Some(GapRepair::Snapshot)));
            return Ok(());
        }
        prop_assert_eq!(to.replayed(slot(7), Epoch(epoch), missed), Ok(None));
        for (got, expected, edge) in both.held_depths(&to, slot(7), worker, unknown) {
            prop_assert_eq!(got, expected, "edge {:?}", edge);
        }
    }
}
