//! The official `openai` Python client against a cluster, and libraries that are built on it.

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::cluster::Cluster;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The interpreter of the virtual environment that `./test` makes.
pub(crate) fn python() -> PathBuf {
    interpreter("test-venv")
}

/// The one of the environment with the libraries that are built on the client.
pub(crate) fn clients() -> PathBuf {
    interpreter("clients-venv")
}

fn interpreter(environment: &str) -> PathBuf {
    let python = binary::target().join(environment).join("bin/python");
    assert!(python.exists(), "{} is missing: run `./test setup`", python.display());
    python
}

/// Runs a script beside this file, which must succeed.
pub(crate) fn run(python: &Path, script: &str, arguments: &[String]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster").join(script);
    let output = Command::new(python).arg(script).args(arguments).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{stdout}");
    assert!(output.status.success(), "{stdout}\n{stderr}");
    stdout.into_owned()
}

/// The base URL and the model of a cluster.
pub(crate) fn endpoint(cluster: &Cluster) -> [String; 2] {
    [format!("http://{}/v1", cluster.http()), cluster.model().to_owned()]
}

#[test]
fn the_official_client_streams_a_chat_and_sees_typed_errors() {
    let cluster = Cluster::builder("openai-client", "smollm2-135m").start().unwrap();
    run(&python(), "openai_client.py", &endpoint(&cluster));
}

#[test]
fn langchain_llama_index_and_litellm_chat_stream_and_embed_unmodified() {
    let chat = Cluster::builder("client-libraries", "smollm2-135m").start().unwrap();
    let embed = Cluster::builder("client-libraries-embed", "minilm-l6").start_second(&chat).unwrap();
    let arguments = [endpoint(&chat), endpoint(&embed)].concat();
    run(&clients(), "client_libraries.py", &arguments);
}
