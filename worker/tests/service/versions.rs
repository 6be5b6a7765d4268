//! Coordinators of every version of the protocol: each is told what it understands (fault F25).

use crate::{PATIENCE, Told, pair, request};
use proto::message::GenerateFrame;
use proto::transport::VersionRange;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_coordinator_is_told_what_it_understands() {
    for newest in 1..=VersionRange::CURRENT.max + 1 {
        let pair = tokio::time::timeout(PATIENCE, pair(newest)).await.unwrap();
        let mut stream = pair.connection.open_generate(&request(4)).await.unwrap();
        let mut tokens = 0;
        while let Some(frame) = stream.next().await {
            if let GenerateFrame::Tokens(new) = frame.unwrap() {
                tokens += new.len();
            }
        }
        assert_eq!(tokens, 4, "protocol {newest}");
        for form in &pair.told {
            let (Told::Registered(version) | Told::Reported(version)) = form;
            assert!(*version <= newest, "protocol {newest}: {form:?}");
        }
    }
}
