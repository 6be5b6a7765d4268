//! An engine that hangs inside a step is detected, gets no new work, is ended, and its streams continue
//! elsewhere.

use crate::group::{RECOVERY, completes};
use crate::stream::{prompt, read_all, request};
use kvasir_cluster_tests::fleet::{Fleet, ops};
use kvasir_cluster_tests::{http, signal, wait};
use std::time::Instant;

/// EX_SOFTWARE of sysexits, the exit code of the worker's watchdog.
const STALLED: i32 = 70;

#[test]
fn a_wedged_engine_is_noticed_and_its_streams_go_on() {
    let fleet = Fleet::builder("wedged", &crate::real_model(), 1, 2)
        .worker_flag("--stall-after", "4s")
        .start(34)
        .unwrap();
    let model = fleet.model().unwrap();
    let bodies: Vec<_> = (0..4).map(|n| request(&model, &prompt(n, 60), 96)).collect();
    let undisturbed = read_all(&fleet, &bodies, drop).unwrap();
    let streamed = read_all(&fleet, &bodies, |events| {
        let victim = events.recv().unwrap().worker;
        let pid = fleet.pid(victim).unwrap();
        let held = signal::hold_thread(pid, "kvasir-engine").unwrap();
        let wedged = Instant::now();
        let probe = || fleet.on_host(victim, || http::get(ops(), "/livez")).ok()?.ok();
        wait::until("it says that it is not well", RECOVERY, || (probe()?.status == 503).then_some(()))
            .unwrap();
        println!("not live after {:.2?}", wedged.elapsed());
        assert!(signal::is_alive(pid), "it is said before the end");
        // New requests avoid it.
        assert!(completes(&fleet, 0, &model));
        assert_eq!(fleet.ended(victim).unwrap(), Some(STALLED));
        println!("ended after {:.2?}", wedged.elapsed());
        drop(held);
        fleet.start(victim).unwrap();
        fleet.wait_for_workers(0, 2).unwrap();
    })
    .unwrap();
    for (streamed, undisturbed) in streamed.iter().zip(&undisturbed) {
        assert_eq!(streamed.tokens, undisturbed.tokens);
    }
    assert!(fleet.metric(0, "kvasir_retries_total").unwrap() > 0.0, "no stream was on the wedged worker");
    assert!(completes(&fleet, 0, &model));
}
