//! OpenAI's responses API and Anthropic's messages API through whole clusters, with their official clients.

use crate::openai_client::{endpoint, python, run};
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};

/// Creates a key.
fn key(cluster: &Cluster, request: &Value) -> String {
    let ops = cluster.coordinator().ops;
    let made = || http::post(ops, "/admin/v1/keys", request).ok().filter(|answer| answer.status == 201);
    let made = wait::until("a key is made", binary::NODE_TIMEOUT, made).unwrap().json().unwrap();
    made["key"].as_str().unwrap().to_owned()
}

#[test]
fn official_clients_stream_through_their_own_endpoints() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::builder("dialects", "smollm2-135m").data_dir(dir.path()).start().unwrap();
    let [base, model] = endpoint(&cluster);
    let good = key(&cluster, &json!({"tenant": "a"}));
    for script in ["openai_responses.py", "anthropic_client.py"] {
        // One request a minute: the second is refused.
        let few = key(&cluster, &json!({"tenant": "few", "rpm": 1}));
        run(&python(), script, &[base.clone(), model.clone(), good.clone(), few]);
    }
}
