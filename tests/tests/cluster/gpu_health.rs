//! The health of GPUs, read through a fake management library, in the coordinator's metrics.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::nvml::{FakeNvml, LOADER_PATH};
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::json;

const HEALTHY: &str = "gpus 1\npower 45500\ntemperature 61\nreasons 0x1\npcie_width 16\npcie_width_max 16\n";

fn cluster(name: &str, fake: &FakeNvml) -> Cluster {
    let builder = Cluster::builder(name, &tiny_model()).flag("--workers", "1").flag("--threads", "1");
    builder.env(LOADER_PATH, fake.folder().to_str().unwrap()).start().unwrap()
}

/// The samples of GPUs at the coordinator.
fn samples(cluster: &Cluster) -> Vec<String> {
    let text = http::get(cluster.coordinator().ops, "/metrics").unwrap().text().unwrap();
    text.lines().filter(|line| line.starts_with("kvasir_gpu_")).map(str::to_owned).collect()
}

fn wait_for(cluster: &Cluster, sample: &str) -> Vec<String> {
    wait::until(sample, binary::NODE_TIMEOUT, || {
        let samples = samples(cluster);
        samples.iter().any(|found| found == sample).then_some(samples)
    })
    .unwrap()
}

#[test]
fn the_health_of_a_gpu_reaches_the_coordinator_and_a_lost_gpu_is_named() {
    let fake = FakeNvml::new(HEALTHY).unwrap();
    let cluster = cluster("gpu-health", &fake);
    let samples = wait_for(&cluster, "kvasir_gpu_power_watts{worker=\"worker-0\",gpu=\"0\"} 45.5");
    for expected in [
        "kvasir_gpu_readable{worker=\"worker-0\",gpu=\"0\"} 1.0",
        "kvasir_gpu_temperature_celsius{worker=\"worker-0\",gpu=\"0\"} 61.0",
        "kvasir_gpu_throttled{worker=\"worker-0\",gpu=\"0\",reason=\"idle\"} 1",
    ] {
        assert!(samples.iter().any(|found| found == expected), "{expected}\n{samples:#?}");
    }
    assert!(!samples.iter().any(|found| found.contains("memory")), "not reported: {samples:#?}");
    fake.plant("gpus 1\npower lost\n").unwrap();
    let samples = wait_for(&cluster, "kvasir_gpu_readable{worker=\"worker-0\",gpu=\"0\"} 0.0");
    assert_eq!(samples.len(), 1, "{samples:#?}");
}

#[test]
fn a_library_that_hangs_blocks_nothing() {
    let fake = FakeNvml::new("gpus hang\n").unwrap();
    let cluster = cluster("gpu-hang", &fake);
    let body = json!({"model": cluster.model(), "prompt": [5, 6, 7], "max_tokens": 4});
    http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap();
    assert_eq!(samples(&cluster), [""; 0]);
}
