//! Workers on interpreted GPUs next to one on the CPU. KV in device memory is transferred within a numeric
//! class; between classes it is computed.

use crate::cluster::{Cluster, options};
use crate::{KINDS, assert_same};
use kernels::backend::KvType;
use kvasir_worker::load::{DeviceChoice, EngineOptions};
use std::path::Path;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_are_transferred_between_devices_of_one_class_only() {
    // A model with keys and values, and states.
    let model = KINDS[2];
    let cubins = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/cubins");
    let simulated = EngineOptions {
        device: DeviceChoice::PtxSim,
        cubins: Some(cubins),
        kv_bytes: Some(2 << 20),
        max_rows: Some(64),
        max_sequences: Some(4),
        ..options(KvType::F32)
    };
    let prompt: Vec<u32> = (0..40).map(|i| 5 + (i * i * 31 + i * 7) % 350).collect();
    let cluster = Cluster::new();
    let holder = cluster.worker("holds", model, simulated.clone()).await;
    let expected = holder.generate(&prompt, None).await;
    assert_eq!((expected.cached, expected.tokens.len()), (0, 12));
    let puller = cluster.worker("pulls", model, simulated).await;
    let answer = puller.generate(&prompt, Some(holder.source(32))).await;
    assert_same(model, &answer, &expected);
    assert_eq!((answer.cached, &*answer.lookup), (32, "prompt_end transfer=32"));
    let on_cpu = cluster.worker("cpu", model, options(KvType::F32)).await;
    let answer = on_cpu.generate(&prompt, Some(holder.source(32))).await;
    assert_eq!((answer.cached, &answer.tokens), (0, &expected.tokens), "{}", answer.lookup);
    assert_eq!(on_cpu.metric("kvasir_block_transfer_bytes_total{direction=\"pulled\"}").await, 0.0);
    let op = "kvasir_device_ops{op=\"delta_net\",device=\"ptx-sim\",isa=\"sm_121a\"}";
    assert_eq!((puller.metric(op).await, on_cpu.metric(op).await), (1.0, 0.0));
    for worker in [holder, puller, on_cpu] {
        worker.wait_until_idle().await;
        worker.service.stop().await;
    }
}
