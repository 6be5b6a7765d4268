//! The official `openai` Python client against a cluster.

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::cluster::Cluster;
use std::path::Path;
use std::process::Command;

/// The interpreter of the virtual environment that `./test` makes.
pub(crate) fn python() -> std::path::PathBuf {
    let python = binary::target().join("test-venv/bin/python");
    assert!(python.exists(), "{} is missing: run `./test venv`", python.display());
    python
}

#[test]
fn the_official_client_streams_a_chat_and_sees_typed_errors() {
    let cluster = Cluster::builder("openai-client", "smollm2-135m").start().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/openai_client.py");
    let output = Command::new(python())
        .arg(script)
        .args([format!("http://{}/v1", cluster.http()), cluster.model().to_owned()])
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{stdout}");
    assert!(output.status.success(), "{stdout}\n{stderr}");
}
