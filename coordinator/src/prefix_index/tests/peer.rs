//! What a peer is told: the same index, whatever happens meanwhile.

use super::*;
use crate::prefix_index::peer::{Export, Import, PeerError};
use proto::codec::{self, Cap};
use proto::event::PeerIndexFrame;
use proto::ids::NodeId;

fn node(worker: usize) -> NodeId {
    NodeId::new(format!("w{worker}")).unwrap()
}

/// Workers 0 and 1, with a hole, a shared start, a path of its own and a path nobody knows the start of.
fn told() -> PrefixIndex {
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

fn depths(index: &PrefixIndex) -> Vec<(u32, u32)> {
    let chains = [1..=40u64, 1..=150, 1..=9_500, 19_000..=21_000, 29_990..=30_020, 39_999..=40_001];
    let depths = |units| {
        let overlap = index.lookup(&chain(units));
        (overlap.units(slot(0)), overlap.units(slot(1)))
    };
    chains.into_iter().map(depths).collect()
}

/// Which slot a node has at the receiver: not the sender's.
fn place(node: &NodeId, epoch: Epoch) -> Option<Slot> {
    (epoch == Epoch(1)).then(|| slot(usize::from(node.as_str() == "w1")))
}

#[test]
fn a_peer_that_has_restarted_ends_up_with_the_same() {
    let mut from = told();
    // Made by a request, named by nobody: it has a place but holds nothing.
    from.reserve(slot(1), chain(1..=70));
    let mut to = PrefixIndex::new(1 << 22);
    (0..2).for_each(|w| {
        to.join(slot(w), Epoch(1));
    });
    let mut export = Export::new(&from, [(slot(0), node(0)), (slot(1), node(1))]);
    let mut import = Import::default();
    let mut frames = 0;
    let missed = [removed(8_000..=9_000), stored(9_001..=9_010)];
    while let Some(frame) = export.next(&from).unwrap() {
        import.take(&mut to, &frame, place).unwrap();
        frames += 1;
        if frames == 3 {
            // The first part of worker 0 is there and counts.
            assert!(to.lookup(&chain(1..=40)).units(slot(0)) > 0);
            from.apply(slot(0), batch(1, 4, missed.to_vec())).unwrap();
        }
    }
    // The receiver hears what came meanwhile from the worker, from the announced number on.
    let next = batch(1, 6, vec![stored(9_011..=9_011)]);
    from.apply(slot(0), next.clone()).unwrap();
    assert_eq!(to.apply(slot(0), next.clone()), Ok(Some(Need::Replay { from: 4 })));
    let replay = batch(1, 4, [missed.to_vec(), next.events].concat());
    assert_eq!(to.replayed(slot(0), Epoch(1), Some(replay)), Ok(None));
    from.expire(Instant::now());
    let mut all = depths(&from);
    // The reservation is the sender's alone.
    all[1].1 = 50;
    all[2].1 = 50;
    assert_eq!(depths(&to), all);
    assert_eq!(to.stream(slot(1)).unwrap().applied, 3);
}

#[test]
fn what_is_not_complete_or_not_true_is_fetched_from_the_worker() {
    let from = told();
    let frames = || {
        let mut export = Export::new(&from, [(slot(0), node(0))]);
        std::iter::from_fn(move || export.next(&told()).unwrap()).collect::<Vec<_>>()
    };
    let fresh = || {
        let mut to = PrefixIndex::new(1 << 22);
        to.join(slot(0), Epoch(1));
        to
    };
    // One frame is lost: the digest tells.
    let (mut to, mut import) = (fresh(), Import::default());
    let mut lossy = frames();
    lossy.remove(2);
    let end = lossy.pop().unwrap();
    lossy.iter().for_each(|frame| import.take(&mut to, frame, place).unwrap());
    assert_eq!(import.take(&mut to, &end, place), Err(PeerError::Digest(node(0))));
    assert_eq!(to.apply(slot(0), batch(1, 9, vec![stored([1])])), Ok(Some(Need::Snapshot)));
    // It breaks off.
    let (mut to, mut import) = (fresh(), Import::default());
    frames()[..3].iter().for_each(|frame| import.take(&mut to, frame, place).unwrap());
    import.broken_off(&mut to);
    assert_eq!(to.apply(slot(0), batch(1, 9, vec![stored([1])])), Ok(Some(Need::Snapshot)));
    // What the worker itself has said already is not undone by what a peer has heard.
    let mut to = joined(1);
    to.apply(slot(0), batch(1, 1, (1..=5).map(|n| stored([n])).collect())).unwrap();
    let mut import = Import::default();
    frames().iter().for_each(|frame| import.take(&mut to, frame, place).unwrap());
    assert_eq!(to.lookup(&chain(1..=9)).units(slot(0)), 5);
    // Nonsense is refused.
    let part = codec::encode(&PeerIndexFrame::Runs(vec![]), Cap::Events).unwrap();
    assert_eq!(Import::default().take(&mut to, &part, place), Err(PeerError::NoWorker));
    assert!(matches!(Import::default().take(&mut to, &[99], place), Err(PeerError::Codec(_))));
}
