use super::*;
use WantedState::{Asleep, Identified};

const READY: Target = Target::Wanted(WantedState::Ready);
const ASLEEP: Target = Target::Wanted(Asleep);
const IDENTIFIED: Target = Target::Wanted(Identified);

fn view(target: Target, stage: Stage) -> ModelView {
    ModelView { target, stage, ..ModelView::of_stage(100) }
}

#[test]
fn each_stage_leads_to_the_target() {
    use Stage::{BadFile, Ending, Finding, Found, Loading, Ready, Unknown};
    let now = Instant::now();
    let later = now + Duration::from_secs(1);
    let draining = |done, until| Stage::Draining { done, until };
    let table: [(Target, Stage, &[Action]); 27] = [
        (Target::Gone, Unknown, &[Action::Forget(0)]),
        (Target::Gone, Finding, &[Action::Cancel(0)]),
        (Target::Gone, Found, &[Action::Forget(0)]),
        (Target::Gone, Loading, &[Action::Cancel(0)]),
        (Target::Gone, Ready, &[Action::Drain(0)]),
        (Target::Gone, draining(false, later), &[]),
        (Target::Gone, draining(true, later), &[Action::End(0)]),
        (Target::Gone, draining(false, now), &[Action::End(0)]),
        (Target::Gone, Ending, &[]),
        (Target::Gone, BadFile, &[Action::Forget(0)]),
        (IDENTIFIED, Unknown, &[Action::Find(0)]),
        (IDENTIFIED, Finding, &[]),
        (IDENTIFIED, Found, &[]),
        (IDENTIFIED, Loading, &[Action::Cancel(0)]),
        (IDENTIFIED, Ready, &[Action::Drain(0)]),
        (ASLEEP, Unknown, &[Action::Find(0)]),
        (ASLEEP, Found, &[]),
        (ASLEEP, Loading, &[Action::Cancel(0)]),
        (ASLEEP, Ready, &[Action::Drain(0)]),
        (ASLEEP, BadFile, &[]),
        (READY, Unknown, &[Action::Find(0)]),
        (READY, Finding, &[]),
        (READY, Found, &[Action::Load(0)]),
        (READY, Loading, &[]),
        (READY, Ready, &[]),
        (READY, draining(true, now), &[Action::Undrain(0)]),
        (READY, Ending, &[]),
    ];
    for (target, stage, expected) in table {
        assert_eq!(decide(now, &[view(target, stage)], 100), expected, "{target:?}, {stage:?}");
    }
}

#[test]
fn attempts_wait_and_pauses_double() {
    let now = Instant::now();
    for (stage, action) in [(Stage::Unknown, Action::Find(0)), (Stage::Found, Action::Load(0))] {
        let waits = ModelView { retry_at: Some(now + Duration::from_millis(1)), ..view(READY, stage) };
        assert_eq!(decide(now, &[waits], 100), []);
        assert_eq!(decide(now + Duration::from_millis(1), &[waits], 100), [action]);
    }
    let pauses: Vec<u64> = (1..=9).map(|failures| pause(failures).as_millis() as u64).collect();
    assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]);
    assert_eq!(pause(u32::MAX), Duration::from_secs(60));
}

#[test]
fn one_model_at_a_time_is_loaded_and_only_into_free_room() {
    let now = Instant::now();
    let found = view(READY, Stage::Found);
    assert_eq!(decide(now, &[found, found], 1000), [Action::Load(0)]);
    assert_eq!(decide(now, &[view(READY, Stage::Loading), found], 1000), []);
    assert_eq!(decide(now, &[found], 99), [Action::NoRoom(0)]);
    // Room that is about to become free is waited for.
    let until = now + Duration::from_secs(1);
    for leaving in [Stage::Ready, Stage::Ending, Stage::Draining { done: false, until }] {
        let actions = decide(now, &[view(ASLEEP, leaving), found], 99);
        assert!(!actions.contains(&Action::NoRoom(1)), "{leaving:?}: {actions:?}");
    }
    let stays = view(READY, Stage::Ready);
    assert_eq!(decide(now, &[stays, found], 99), [Action::NoRoom(1)]);
    // A model without room is loaded as soon as there is some, but refused only once in a while.
    let refused = ModelView { retry_at: Some(until), short_of_room: true, ..found };
    assert_eq!(decide(now, &[refused], 99), []);
    assert_eq!(decide(now, &[refused], 100), [Action::Load(0)]);
    // A smaller one behind it is not held up.
    let small = ModelView { needed: 50, ..found };
    assert_eq!(decide(now, &[refused, small], 60), [Action::Load(1)]);
}

#[test]
fn large_arenas_make_room() {
    let now = Instant::now();
    let found = view(READY, Stage::Found);
    let ready = |spare| ModelView { spare, ..view(READY, Stage::Ready) };
    let shrunk = |actions: &[Action]| actions == [Action::Shrink(1, 50), Action::Shrink(0, 10)];
    assert!(shrunk(&decide(now, &[ready(30), ready(50), found], 40)));
    assert_eq!(decide(now, &[ready(30), ready(29), found], 40), [Action::NoRoom(2)]);
    // What was asked for is waited for and not asked for again.
    let shrinking = ModelView { shrinks: true, ..ready(50) };
    assert_eq!(decide(now, &[shrinking, found], 60), []);
    assert_eq!(decide(now, &[ready(50), found], 100), [Action::Load(1)]);
    // Weights of models that are asleep go first.
    let pinned = ModelView { pinned: 40, to_pin: 40, ..view(ASLEEP, Stage::Found) };
    assert_eq!(decide(now, &[ready(50), pinned, found], 60), [Action::Unpin(1), Action::Load(2)]);
    // Sequences that wait get a quarter of the largest.
    let lacks = ModelView { lacks: true, ..ready(0) };
    assert_eq!(decide(now, &[lacks, ready(10), ready(41)], 0), [Action::Shrink(2, 11)]);
    assert_eq!(decide(now, &[lacks, shrinking], 0), []);
    assert_eq!(decide(now, &[lacks, ready(0)], 0), []);
}

#[test]
fn weights_of_sleeping_models_stay_until_a_ready_one_needs_the_room() {
    let now = Instant::now();
    let asleep = ModelView { to_pin: 40, ..view(ASLEEP, Stage::Found) };
    assert_eq!(decide(now, &[asleep, asleep], 70), [Action::Pin(0)]);
    let pinned = ModelView { pinned: 40, ..asleep };
    assert_eq!(decide(now, &[pinned, asleep], 30), []);
    // Nothing is pinned while a model waits to be loaded.
    assert_eq!(decide(now, &[asleep, view(READY, Stage::Unknown)], 70), [Action::Find(1)]);
    let found = view(READY, Stage::Found);
    assert_eq!(decide(now, &[pinned, found], 100), [Action::Load(1)]);
    assert_eq!(decide(now, &[pinned, found], 60), [Action::Unpin(0), Action::Load(1)]);
    assert_eq!(decide(now, &[pinned, pinned, found], 60), [Action::Unpin(0), Action::Load(2)]);
    // Its own pages are given up last.
    let own = ModelView { pinned: 40, ..found };
    assert_eq!(decide(now, &[own, pinned], 60), [Action::Unpin(1), Action::Load(0)]);
    assert_eq!(decide(now, &[own], 60), [Action::Unpin(0), Action::Load(0)]);
    assert_eq!(decide(now, &[own], 59), [Action::NoRoom(0)]);
    // Not wanted any more.
    let unwanted = ModelView { to_pin: 0, ..pinned };
    assert_eq!(decide(now, &[unwanted], 0), [Action::Unpin(0)]);
    let identified = ModelView { target: IDENTIFIED, ..pinned };
    assert_eq!(decide(now, &[identified], 0), [Action::Unpin(0)]);
    let gone = ModelView { target: Target::Gone, ..pinned };
    assert_eq!(decide(now, &[gone], 0), [Action::Unpin(0), Action::Forget(0)]);
}
