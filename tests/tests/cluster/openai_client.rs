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

/// The one of the environment with libraries for agents.
fn agents() -> PathBuf {
    interpreter("agents-venv")
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
fn langchain_llama_index_litellm_and_ollama_chat_stream_and_embed_unmodified() {
    let chat = Cluster::builder("client-libraries", "smollm2-135m").start().unwrap();
    let embed = Cluster::builder("client-libraries-embed", "minilm-l6").start_second(&chat).unwrap();
    let arguments = [endpoint(&chat), endpoint(&embed)].concat();
    run(&clients(), "client_libraries.py", &arguments);
}

#[test]
fn libraries_for_agents_call_tools_and_get_their_types() {
    let cluster = Cluster::builder("agent-libraries", "smollm2-135m").start().unwrap();
    run(&agents(), "agent_libraries.py", &endpoint(&cluster));
}

/// Runs a script of `tests/frameworks` against a cluster. `./test frameworks` installs the libraries.
fn frameworks(program: &Path, directory: &Path, script: &str) {
    let cluster = Cluster::builder("frameworks", "smollm2-135m").start().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("frameworks").join(script);
    let status =
        Command::new(program).arg(script).args(endpoint(&cluster)).current_dir(directory).status().unwrap();
    assert!(status.success(), "{status}");
}

#[test]
#[ignore = "downloads 600 MB: ./test frameworks"]
fn frameworks_for_agents_work_unmodified() {
    let dir = tempfile::tempdir().unwrap();
    frameworks(&interpreter("frameworks-venv"), dir.path(), "frameworks.py");
}

#[test]
#[ignore = "needs npm: ./test frameworks"]
fn javascript_libraries_work_unmodified() {
    frameworks(Path::new("node"), &binary::target().join("frameworks-node"), "clients.mjs");
}

#[test]
#[ignore = "downloads 6 GB: ./test loads"]
fn load_generators_report_no_error() {
    let cluster = Cluster::builder("loads", "smollm2-135m").start().unwrap();
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let paths = [
        tests.join("fixtures/hf/deepseek_v3"),
        binary::target().join("test-logs/loads"),
        binary::target().join("guidellm-venv/bin"),
        binary::target().join("aiperf-venv/bin"),
    ];
    let status = Command::new(python())
        .arg(tests.join("frameworks/load_generators.py"))
        .args([format!("http://{}", cluster.http()), cluster.model().to_owned()])
        .args(paths)
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}
