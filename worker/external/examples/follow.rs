//! Follows an engine's KV events and prints what the index holds.
//!
//! `cargo run -p kvasir-external --example follow -- vllm 127.0.0.1:5557 [127.0.0.1:5558]`

use kvasir_external::{
    EngineIndex, EngineKind, IndexConfig, KvEventSource, SubscriberLimits, spawn_kv_follower,
};
use parking_lot::Mutex;
use proto::block::{BlockId, ClusterKey};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, address, rest @ ..] = arguments.as_slice() else {
        return Err("arguments: ENGINE HOST:PORT [REPLAY_HOST:PORT]".into());
    };
    let kind = EngineKind::from_name(kind).ok_or("the engines are vllm and sglang")?;
    let replay = rest.first().cloned();
    let mut index = EngineIndex::new(ClusterKey([0; 32]).units(), IndexConfig::new(kind, replay.is_some()));
    // Chains without a salt are named under this root.
    index.register(BlockId([0; 16]), &[], false);
    let index = Arc::new(Mutex::new(index));
    let source = KvEventSource { address: address.clone(), replay, topic: String::new() };
    let report = |events: Vec<_>| println!("{} events: {:?}", events.len(), events.first());
    let _follower = spawn_kv_follower(source, SubscriberLimits::default(), Arc::clone(&index), report);
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let index = index.lock();
        let (blocks, units) = (index.blocks(), index.held_units());
        println!("{blocks} blocks, {units} units, inexact {:?}, {:?}", index.inexact(), index.stats());
    }
}
