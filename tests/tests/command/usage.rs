//! Exit codes and outputs that scripts depend on.

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::Manifest;

const OK: Option<i32> = Some(0);
const FAILED: Option<i32> = Some(1);
const BAD_USAGE: Option<i32> = Some(2);
const BAD_CONFIG: Option<i32> = Some(64);

/// Exit code and stderr.
fn end(arguments: &[&str]) -> (Option<i32>, String) {
    let output = binary::run(arguments).unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn exit_codes() {
    for (arguments, code) in [
        (&["--version"][..], OK),
        (&["--help"], OK),
        (&["up", "--help"], OK),
        (&["tokenize", "/nonexistent.gguf", "--text", "a"], FAILED),
        (&["status", "--data-dir", "/nonexistent"], FAILED),
        (&["drain", "w0", "--data-dir", "/nonexistent"], FAILED),
        (&["top", "--once", "--data-dir", "/nonexistent"], FAILED),
        (&["drain"], BAD_USAGE),
        (&["drain", "w0", "--timeout", "1s"], BAD_USAGE),
        (&["undrain", "w0", "--wait"], BAD_USAGE),
        (&["unblock"], BAD_USAGE),
        (&["pardon", "00", "--data-dir", "/nonexistent"], FAILED),
        (&["top", "--every", "soon"], BAD_USAGE),
        (&["up", "--frobnicate"], BAD_USAGE),
        (&["frobnicate"], BAD_USAGE),
        (&["worker", "--threads", "many"], BAD_USAGE),
        (&["worker", "--config", "/nonexistent.toml"], BAD_CONFIG),
        (&["coordinator", "--config", "/nonexistent.toml"], BAD_CONFIG),
        (&["up", "--workers", "0"], BAD_CONFIG),
        (&["up", "--listen-public"], BAD_CONFIG),
        (&["up", "--state-tau", "8"], BAD_CONFIG),
        (&["up", "--max-model-len", "1"], BAD_CONFIG),
        (&["run", "m.gguf", "-p", "a", "--max-model-len", "1048577"], BAD_CONFIG),
        (&["run", "m.gguf", "-p", "a", "--state-type", "auto-bf16", "--state-tau", "0"], BAD_CONFIG),
        (&["run", "m.gguf", "-p", "a", "--state-type", "bf16"], BAD_USAGE),
        (&["run", "m.gguf", "-p", "a", "--spec", "draft"], BAD_USAGE),
    ] {
        let (found, stderr) = end(arguments);
        assert_eq!(found, code, "kvasir {}:\n{stderr}", arguments.join(" "));
    }
}

#[test]
fn flags_of_what_a_command_does_not_do_are_absent() {
    // It measures steps without sampling.
    assert_eq!(end(&["bench", "m", "--spec", "ngram"]).0, BAD_USAGE);
}

#[test]
fn a_bad_setting_is_named_with_its_value_and_limit() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("node.toml");
    for (text, expected) in [
        ("thread = 2\n", vec!["unknown field `thread`"]),
        ("kv_bytes = \"lots\"\n", vec!["kv_bytes", "lots"]),
    ] {
        std::fs::write(&file, text).unwrap();
        let (code, stderr) = end(&["worker", "--config", file.to_str().unwrap(), "--check-config"]);
        assert_eq!(code, BAD_CONFIG, "{stderr}");
        expected.iter().for_each(|text| assert!(stderr.contains(text), "{text} not in {stderr}"));
    }
}

#[test]
fn a_bad_variable_is_configuration_and_not_usage() {
    let mut command = binary::command(&["worker", "--check-config"]).unwrap();
    let output = command.env("KVASIR_THREADS", "many").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), BAD_CONFIG, "{stderr}");
    assert!(stderr.contains("KVASIR_THREADS") && stderr.contains("many"), "{stderr}");
}

#[test]
fn kernels_that_cannot_be_had_are_bad_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let (ids, out) = (dir.path().join("ids.json"), dir.path().join("out.safetensors"));
    std::fs::write(&ids, "[[1, 2, 3]]").unwrap();
    let model = Manifest::read().unwrap().tiny("llama").unwrap().path();
    let [model, ids, out] = [&model, &ids, &out].map(|path| path.to_str().unwrap());
    for (variable, value, code) in [
        ("KVASIR_BACKEND", "cuda", BAD_CONFIG),
        ("KVASIR_ATTENTION_BACKEND", "fast", BAD_CONFIG),
        ("KVASIR_MATMUL_BACKEND", "cpu-scalar", OK),
    ] {
        let mut command = binary::command(&["logits", model, "--tokens", ids, "--out", out]).unwrap();
        let output = command.env(variable, value).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), code, "{stderr}");
        if code != OK {
            assert!(stderr.contains(variable) && stderr.contains(value), "{stderr}");
        }
    }
}

/// With a GPU it is checked; without one, every command reports only what is missing.
#[test]
fn the_error_names_the_missing_gpu_library() {
    let output = binary::run(&["gpu-check", "--json"]).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["coverage"]["matmul"], "gpu");
    if report["devices"].as_array().is_some_and(|devices| !devices.is_empty()) {
        assert_eq!(output.status.code(), OK, "{report}");
        return;
    }
    assert_eq!(output.status.code(), FAILED, "{report}");
    let missing = report["missing"][0].as_str().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains(missing), "{missing} not in {stderr}");
    let model = Manifest::read().unwrap().tiny("llama").unwrap().path();
    let model = model.to_str().unwrap();
    for arguments in [
        &["worker", "--check-config", "--device", "cuda", "--model", model][..],
        &["run", model, "-p", "a", "--device", "cuda"],
        &["bench", model, "--device", "cuda"],
    ] {
        let (code, stderr) = end(arguments);
        assert_eq!(code, BAD_CONFIG, "kvasir {}: {stderr}", arguments.join(" "));
        assert!(stderr.contains("device: cuda is not usable") && stderr.contains(missing), "{stderr}");
    }
    let explain = ["worker", "--explain", "--device", "auto", "--model", model];
    assert_eq!(end(&explain).0, OK);
}

#[test]
fn a_models_digest_is_remembered_and_a_damaged_memory_of_it_changes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let (ids, out) = (home.path().join("ids.json"), home.path().join("out.safetensors"));
    std::fs::write(&ids, "[[1, 2, 3]]").unwrap();
    let model = Manifest::read().unwrap().tiny("llama").unwrap().path();
    let [model, ids_name, out_name] = [&model, &ids, &out].map(|path| path.to_str().unwrap());
    let run = || {
        let arguments = ["logits", model, "--tokens", ids_name, "--out", out_name];
        let output = binary::command(&arguments).unwrap().env("KVASIR_HOME", home.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read(&out).unwrap()
    };
    let first = run();
    let digests = std::fs::read_dir(home.path().join("digests")).unwrap();
    let [entry] = &digests.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()[..] else {
        panic!("one file, one entry")
    };
    let remembered = std::fs::read(entry).unwrap();
    assert_eq!(run(), first);
    std::fs::write(entry, &remembered[1..]).unwrap();
    assert_eq!(run(), first);
    assert_eq!(std::fs::read(entry).unwrap(), remembered, "it was read and remembered again");
}

#[test]
fn a_model_with_a_missing_part_is_refused_by_the_name_of_the_part() {
    let dir = tempfile::tempdir().unwrap();
    let files = Manifest::read().unwrap().split[0].write(dir.path()).unwrap();
    std::fs::remove_file(&files[2]).unwrap();
    let missing = files[2].file_name().unwrap().to_str().unwrap();
    let (code, stderr) = end(&["models", "inspect", files[0].to_str().unwrap()]);
    assert_eq!(code, FAILED, "{stderr}");
    assert!(stderr.contains(missing), "{stderr}");
}
