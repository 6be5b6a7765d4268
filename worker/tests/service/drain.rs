//! A worker that is drained and stopped while it serves.

use crate::{TIMEOUT, pair, request};
use kvasir_worker::service::WorkerService;
use proto::message::GenerateFrame;
use tokio::task::JoinSet;

/// Number of rounds, so that the drain starts between any two actions of a worker for a call.
const ROUNDS: u32 = 24;
const TOKENS: u32 = 40;

async fn end(worker: WorkerService) {
    worker.drain().await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_accepted_call_is_served_until_its_end_has_arrived() {
    for round in 0..ROUNDS {
        let pair = tokio::time::timeout(TIMEOUT, pair()).await.unwrap();
        let mut stream = pair.connection.open_generate(&request(TOKENS)).await.unwrap();
        // Drain before the first token, or after it or a later one has arrived.
        let drain_after = round % 8;
        let mut worker = Some(pair.worker);
        let mut ending = JoinSet::new();
        let (mut tokens, mut refused) = (0, false);
        let finished = loop {
            if tokens >= drain_after {
                worker.take().into_iter().for_each(|worker| drop(ending.spawn(end(worker))));
            }
            match stream.next().await {
                Some(Ok(GenerateFrame::Tokens(new))) => tokens += u32::try_from(new.len()).unwrap(),
                Some(Ok(GenerateFrame::Finished(_))) => break true,
                Some(Ok(GenerateFrame::Failed(_))) => refused = true,
                Some(Ok(_)) => {}
                // The worker has not received the call.
                Some(Err(_)) if tokens == 0 => refused = true,
                Some(Err(error)) => panic!("round {round}, after {tokens} tokens: {error}"),
                None => break false,
            }
        };
        // A call that was not accepted may be refused; an accepted one is served completely.
        assert!(if refused { tokens == 0 } else { finished && tokens == TOKENS }, "round {round}: {tokens}");
        tokio::time::timeout(TIMEOUT, ending.join_all()).await.unwrap();
    }
}
