//! Which backend is selected for a text model, by its bundle, its options and the environment.

use super::*;
use kernels::registry::SelectError;
use std::fs;

/// A directory with these files. Selection does not open them.
fn bundle(files: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in files {
        let path = dir.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "not opened").unwrap();
    }
    dir
}

/// Options of an encoder with nothing requested.
fn plain() -> EngineOptions {
    EngineOptions { kv_type: KvType::F32.into(), ..EngineOptions::default() }
}

/// The backend that is selected for an operation, or the error.
fn chosen(
    operation: Operation,
    bundle: &Path,
    options: EngineOptions,
    environment: &[(&str, &str)],
) -> Result<String, String> {
    let look_up = kernels_too(|name: &str| {
        environment.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).to_owned())
    });
    let model = TextModel { path: bundle.join("model.gguf"), options };
    let name =
        |selected: Result<&str, SelectError>| selected.map(str::to_owned).map_err(|error| error.to_string());
    match operation {
        Operation::Embed => name(embed().select(&model, look_up).map(|provider| provider.name())),
        Operation::Rerank => name(rerank().select(&model, look_up).map(|provider| provider.name())),
        other => panic!("{other} is not for texts"),
    }
}

#[test]
fn the_table_of_every_text_operation() {
    for operation in [Operation::Embed, Operation::Rerank] {
        let own = format!("KVASIR_{}_BACKEND", operation.name().to_ascii_uppercase());
        let (empty, full) = (bundle(&[]), bundle(&[&format!("{operation}/model.onnx")]));
        let empty = |variable: &str, name| chosen(operation, empty.path(), plain(), &[(variable, name)]);
        let full = |environment: &[(&str, &str)]| chosen(operation, full.path(), plain(), environment);
        assert_eq!(full(&[]).as_deref(), Ok(KERNELS), "{operation}");
        // A requested backend is used if it can serve, by either variable, else selection fails.
        for variable in [own.as_str(), "KVASIR_BACKEND"] {
            for name in [KERNELS, onnx::NAME] {
                assert_eq!(full(&[(variable, name)]).as_deref(), Ok(name), "{operation} by {variable}");
            }
            let error = full(&[(variable, "npu")]).unwrap_err();
            let expected = format!("{variable} selects backend \"npu\" for {operation}, which is unknown");
            assert!(error.starts_with(&expected), "{error}");
            assert_eq!(empty(variable, KERNELS).as_deref(), Ok(KERNELS), "{operation}");
            let error = empty(variable, onnx::NAME).unwrap_err();
            assert!(error.contains("cannot serve this request: there is no"), "{error}");
            assert_eq!(
                full(&[(variable, "")]).as_deref(),
                Ok(KERNELS),
                "{operation}: an empty value is none"
            );
        }
        // The operation's own variable precedes the general one; another operation's variable has no effect.
        let both = [("KVASIR_BACKEND", "npu"), (own.as_str(), onnx::NAME)];
        assert_eq!(full(&both).as_deref(), Ok(onnx::NAME), "{operation}");
        assert_eq!(full(&[("KVASIR_VAD_BACKEND", "npu")]).as_deref(), Ok(KERNELS), "{operation}");
        // The general variable also selects among kernels; an operation's own variable does not.
        assert_eq!(full(&[("KVASIR_BACKEND", "cpu-scalar")]).as_deref(), Ok(KERNELS), "{operation}");
        assert!(full(&[(own.as_str(), "cpu-scalar")]).is_err(), "{operation}");
    }
}

#[test]
fn options_that_another_runtime_ignores_are_refused_by_name() {
    let bundle = bundle(&["embed/model.onnx"]);
    let demand = [("KVASIR_EMBED_BACKEND", onnx::NAME)];
    let with = |options| chosen(Operation::Embed, bundle.path(), options, &demand);
    assert_eq!(with(plain()).as_deref(), Ok(onnx::NAME));
    let placed = EngineOptions { cpus: Some(vec![0]), threads: Some(1), ..plain() };
    assert_eq!(with(placed).as_deref(), Ok(onnx::NAME), "threads are placed as asked");
    for (options, argument) in [
        (EngineOptions { device: DeviceChoice::Cuda, ..plain() }, "device"),
        (EngineOptions { kv_type: KvType::F16.into(), ..plain() }, "kv-type"),
        (EngineOptions { kv_bytes: Some(1 << 30), ..plain() }, "kv-bytes"),
    ] {
        let error = with(options).unwrap_err();
        assert!(error.ends_with(&format!("argument {argument} is not supported")), "{error}");
    }
}
