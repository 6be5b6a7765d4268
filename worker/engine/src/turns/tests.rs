use super::*;
use proptest::prelude::*;
use std::sync::mpsc::channel;

fn begins(order: &mut TurnOrder, now: Instant) -> MemberId {
    match order.next(now) {
        NextTurn::Begins(id) => id,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_model_that_was_idle_gets_no_credit() {
    let (mut order, now) = (TurnOrder::default(), Instant::now());
    let (busy, late) = (order.join(1), order.join(1));
    for _ in 0..100 {
        order.request(busy, now);
        assert_eq!(begins(&mut order, now), busy);
        order.end(busy, 10, true, now);
    }
    order.request(late, now);
    let mut steps = [0_u64, 0];
    for _ in 0..40 {
        order.request(busy, now);
        order.request(late, now);
        let id = begins(&mut order, now);
        steps[usize::from(id == late)] += 1;
        order.end(id, 10, true, now);
    }
    assert!(steps[0].abs_diff(steps[1]) <= 2, "{steps:?}");
}

#[test]
fn a_model_with_short_steps_keeps_its_place_for_a_moment() {
    let (mut order, now) = (TurnOrder::default(), Instant::now());
    let (long, short) = (order.join(1), order.join(1));
    order.request(long, now);
    assert_eq!(begins(&mut order, now), long);
    order.request(short, now);
    assert_eq!(order.next(now), NextTurn::Nothing, "the device computes");
    order.end(long, 512, true, now);
    assert_eq!(begins(&mut order, now), short);
    order.end(short, 1, true, now);
    order.request(long, now);
    let NextTurn::WaitUntil(until) = order.next(now) else { panic!("the short steps are far behind") };
    order.request(short, now);
    assert_eq!(begins(&mut order, now), short);
    order.end(short, 1, true, now);
    assert_eq!(begins(&mut order, until), long, "the place was not used in time");
    order.end(long, 1, true, now);
    order.request(short, until);
    order.withdraw(long);
    assert_eq!(begins(&mut order, until), short);
    order.leave(short);
    assert_eq!(order.next(until), NextTurn::Nothing);
}

#[test]
fn threads_take_turns() {
    let turns = Turns::default();
    let (computed_tx, computed) = channel();
    let inside = Arc::new(Mutex::new(()));
    let threads: Vec<_> = (1..=3_usize)
        .map(|weight| {
            let (turn, inside, computed) =
                (turns.join(weight as u32), Arc::clone(&inside), computed_tx.clone());
            std::thread::spawn(move || {
                for step in 0..300 {
                    turn.begin();
                    let alone = inside.try_lock().expect("one step at a time");
                    computed.send(weight).unwrap();
                    drop(alone);
                    turn.end(5, step < 299);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    drop(computed_tx);
    let mut steps = [0; 4];
    computed.iter().for_each(|weight| steps[weight] += 1);
    assert_eq!(steps, [0, 300, 300, 300]);
}

proptest! {
    /// Tokens by weight of two models that both always have work differ by at most their longest steps.
    #[test]
    fn models_with_work_share_by_weight(
        models in prop::collection::vec((1..8_u32, 1..600_u64), 2..6),
        idle in prop::collection::vec((0..6_usize, 0..200_usize), 0..4),
    ) {
        let (mut order, now) = (TurnOrder::default(), Instant::now());
        let ids: Vec<MemberId> = models.iter().map(|(weight, _)| order.join(*weight)).collect();
        let paused = |model: usize, step: usize| {
            idle.iter().any(|(which, until)| which % models.len() == model && step < *until)
        };
        let (mut since, mut tokens) = (vec![None; models.len()], vec![vec![0_u64; models.len()]; models.len()]);
        for step in 0..400 {
            for (model, id) in ids.iter().enumerate() {
                if paused(model, step) {
                    order.withdraw(*id);
                } else {
                    order.request(*id, now);
                    if since[model].is_none() {
                        since[model] = Some(step);
                    }
                }
            }
            let NextTurn::Begins(id) = order.next(now) else { continue };
            let at = ids.iter().position(|other| *other == id).unwrap();
            for (model, share) in tokens.iter_mut().enumerate() {
                if since[model].is_some() {
                    share[at] += models[at].1;
                }
            }
            order.end(id, models[at].1, true, now);
        }
        for a in 0..models.len() {
            for b in 0..models.len() {
                let (Some(from_a), Some(from_b)) = (since[a], since[b]) else { continue };
                // Since both have had work.
                let shares = &tokens[if from_a >= from_b { a } else { b }];
                let share = |model: usize| shares[model] as f64 / f64::from(models[model].0);
                let step = |model: usize| models[model].1 as f64 / f64::from(models[model].0);
                let (apart, allowed) = ((share(a) - share(b)).abs(), 2.0 * (step(a) + step(b)));
                prop_assert!(apart <= allowed, "{apart} tokens by weight apart, {allowed} allowed");
            }
        }
    }
}
