//! Measurement of a path between two nodes.

use crate::cluster::{pair, with_timeout};
use kvasir_transport::{Error, receive_rate};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn either_side_measures_what_it_receives() {
    let pair = pair().await;
    let time = Duration::from_millis(200);
    for connection in [&pair.to_worker, &pair.to_coordinator] {
        let rate = with_timeout("a measurement", receive_rate(std::slice::from_ref(connection), time)).await;
        assert!(rate.unwrap() > 0.0);
    }
    // The zeros were not handed to the program, and the connection is as before.
    assert!(!pair.to_worker.is_closed() && !pair.to_coordinator.is_closed());
    // More streams than are answered at once: some end without a byte.
    let many = vec![pair.to_worker.clone(); 40];
    let refused = with_timeout("a refusal", receive_rate(&many, time)).await.unwrap_err();
    assert!(matches!(refused, Error::StreamCut { .. }), "{refused}");
}
