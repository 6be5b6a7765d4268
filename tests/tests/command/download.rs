//! Downloads from addresses as by users and Jobs. `http://` on this machine stands for a TLS server.

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::file_server::{FileServer, add_repository};
use kvasir_cluster_tests::fixtures::{self, Manifest, sha256};
use std::path::PathBuf;
use std::process::{Command, Output};

/// A directory to serve, with a model in it, and one to pull into.
struct World {
    served: tempfile::TempDir,
    home: tempfile::TempDir,
    server: FileServer,
    model: PathBuf,
}

fn world() -> World {
    let (served, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let model = Manifest::read().unwrap().tiny("llama").unwrap().path();
    std::fs::copy(&model, served.path().join("tiny.gguf")).unwrap();
    let server = FileServer::start(served.path()).unwrap();
    World { served, home, server, model }
}

impl World {
    fn kvasir(&self, arguments: &[&str]) -> Command {
        let mut command = binary::command(arguments).unwrap();
        command.env("KVASIR_HOME", self.home.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.kvasir(arguments).output().unwrap()
    }

    fn address(&self) -> String {
        format!("{}/tiny.gguf", self.server.url())
    }
}

fn out(output: Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn a_download_that_is_cut_again_and_again_arrives_and_is_used_by_its_address() {
    let world = world();
    let bytes = std::fs::metadata(&world.model).unwrap().len();
    // The pause after a cut that followed received bytes is one second.
    world.server.cut_after(bytes / 3 + 1);
    let path = PathBuf::from(out(world.run(&["models", "pull", &world.address()])));
    assert_eq!(sha256(&path).unwrap(), sha256(&world.model).unwrap());
    let from: Vec<_> = world.server.requests().iter().map(|request| request.from).collect();
    assert_eq!(from, [None, Some(bytes / 3 + 1), Some(2 * (bytes / 3 + 1))]);
    let ids = out(world.run(&["tokenize", &world.address(), "--text", "hello", "--json"]));
    assert!(ids.starts_with("{\"ids\":["), "{ids}");
    assert_eq!(world.server.requests().len(), 3, "what is here is not asked for again");
    let list: serde_json::Value =
        serde_json::from_str(&out(world.run(&["models", "list", "--json"]))).unwrap();
    let download = &list["downloads"][0];
    assert_eq!((&download["verification"], &download["present"]), (&"unverified".into(), &true.into()));
    assert_eq!(download["address"], world.address());
    assert!(out(world.run(&["models", "list"])).contains("unverified"));
    assert!(out(world.run(&["models", "verify", &world.address()])).contains("unverified"));
}

#[test]
fn processes_at_the_same_time_download_once_and_a_sum_is_held_to() {
    let world = world();
    let (address, right) = (world.address(), sha256(&world.model).unwrap());
    let wrong = world.run(&["models", "pull", &address, "--sha256", &"0".repeat(64)]);
    let stderr = String::from_utf8_lossy(&wrong.stderr);
    assert!(wrong.status.code() == Some(1) && stderr.contains(&right), "{stderr}");
    let pull = || world.kvasir(&["models", "pull", &address, "--sha256", &right]).spawn().unwrap();
    for mut child in [pull(), pull(), pull()] {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(world.server.requests().len(), 2, "one that was refused and one for all three");
    let list: serde_json::Value =
        serde_json::from_str(&out(world.run(&["models", "list", "--json"]))).unwrap();
    assert_eq!(list["downloads"][0]["verification"], "given");
}

#[test]
fn a_hub_address_comes_from_its_variable_and_others_are_refused() {
    let world = world();
    let folder = world.served.path().join("o/r/resolve/v1");
    std::fs::create_dir_all(&folder).unwrap();
    let files = Manifest::read().unwrap().split[0].write(&folder).unwrap();
    let name = |at: usize| files[at].file_name().unwrap().to_str().unwrap();
    let set = format!("hf://o/r@v1/{}", name(1));
    let set = set.as_str();
    let pulled =
        world.kvasir(&["models", "pull", set]).env("HF_ENDPOINT", world.server.url()).output().unwrap();
    let path = PathBuf::from(out(pulled));
    assert!(path.ends_with(name(0)), "{}", path.display());
    assert!(path.with_file_name(name(2)).exists());
    out(world.run(&["models", "inspect", set]));
    for (address, code, words) in [
        ("http://models.example/m.gguf", 1, "--allow-http"),
        ("https://me:secret@models.example/m.gguf", 2, "credentials"),
        ("hf://o", 2, "hf://OWNER/REPO/FILE.gguf or hf://OWNER/REPO"),
        (&format!("{}/none.gguf", world.server.url()), 1, "no such file (404)"),
        ("no-such-name", 2, "smollm2-135m"),
    ] {
        let output = world.run(&["models", "pull", address]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && stderr.contains(words), "{address}: {stderr}");
    }
}

#[test]
fn a_repository_of_a_hub_arrives_as_a_folder_and_is_used_by_its_address() {
    let world = world();
    let folder = fixtures::root().join("hf/fmt-nvfp4-ct");
    add_repository(world.served.path(), "o/tiny.1", &folder).unwrap();
    let hub =
        |arguments: &[&str]| world.kvasir(arguments).env("HF_ENDPOINT", world.server.url()).output().unwrap();
    let bytes = std::fs::metadata(folder.join("model.safetensors")).unwrap().len();
    world.server.cut_after(bytes / 2 + 1);
    let address = "hf://o/tiny.1";
    let path = PathBuf::from(out(hub(&["models", "pull", address])));
    assert_eq!(
        sha256(&path.join("model.safetensors")).unwrap(),
        sha256(&folder.join("model.safetensors")).unwrap()
    );
    assert!(!path.join("ref.safetensors").exists(), "only what the model needs");
    let requests = world.server.requests();
    assert!(requests.iter().any(|request| request.from == Some(bytes / 2 + 1)), "{requests:?}");
    // Every subcommand takes the address, and asks for nothing again.
    let ids = world.home.path().join("ids.json");
    std::fs::write(&ids, "[[1, 5, 9, 200, 7]]").unwrap();
    let logits = |model: &str, name: &str| {
        let to = world.home.path().join(name);
        out(hub(&["logits", model, "--tokens", ids.to_str().unwrap(), "--out", to.to_str().unwrap()]));
        std::fs::read(to).unwrap()
    };
    assert_eq!(logits(address, "a"), logits(folder.to_str().unwrap(), "b"));
    assert!(out(hub(&["models", "inspect", address])).contains("NVFP4"));
    assert!(out(hub(&["models", "verify", address])).contains("hf://o/tiny.1 is unchanged"));
    assert_eq!(world.server.requests().len(), requests.len());
    let list: serde_json::Value =
        serde_json::from_str(&out(world.run(&["models", "list", "--json"]))).unwrap();
    let download = &list["downloads"][0];
    assert_eq!((&download["name"], &download["present"]), (&"tiny.1".into(), &true.into()));
    for (arguments, words) in [
        (&["models", "pull", address, "--sha256", &"0".repeat(64)][..], "hf://o/tiny.1@COMMIT"),
        (&["models", "pull", "hf://o/none"], "hf://o/none: it has no config.json"),
    ] {
        let output = hub(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && stderr.contains(words), "{stderr}");
    }
}
