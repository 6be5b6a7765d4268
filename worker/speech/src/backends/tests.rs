//! Table of the audio operations: which backend is selected for which bundle and environment.

use super::*;
use proto::ids::ModelId;
use std::fs;

/// A bundle with these files. Selection does not open them.
fn bundle(files: &[&str]) -> (tempfile::TempDir, Bundle) {
    let dir = tempfile::tempdir().unwrap();
    for file in files {
        let path = dir.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "not opened").unwrap();
    }
    let bundle = Bundle { id: ModelId::new("b").unwrap(), dir: dir.path().to_owned() };
    (dir, bundle)
}

/// The backend that is selected for an operation, or the error.
fn chosen(operation: Operation, bundle: &Bundle, environment: &[(&str, &str)]) -> Result<String, String> {
    fn of<O: Served<Request = Bundle>>(
        registry: &Registry<O>,
        bundle: &Bundle,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<String, String> {
        let provider = registry.select(bundle, environment).map_err(|error| error.to_string())?;
        Ok(provider.name().to_owned())
    }
    let look_up = |name: &str| {
        environment.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).to_owned())
    };
    match operation {
        Operation::Vad => of(&vad(), bundle, look_up),
        Operation::TurnDetection => of(&turn_detection(), bundle, look_up),
        Operation::Asr => of(&asr(NonZeroUsize::MIN), bundle, look_up),
        Operation::Tts => of(&tts(NonZeroUsize::MIN), bundle, look_up),
        Operation::Wakeword => of(&wakeword(), bundle, look_up),
        Operation::Speaker => of(&speaker(NonZeroUsize::MIN), bundle, look_up),
        Operation::Diarization => of(&diarization(NonZeroUsize::MIN), bundle, look_up),
        Operation::Embed | Operation::Rerank => panic!("{operation} is for texts"),
    }
}

/// An operation; the files with which a backend can serve it; that backend; the backend without and with
/// these files.
type Row = (Operation, &'static [&'static str], &'static str, Option<&'static str>, Option<&'static str>);

const WHISPER: &[&str] = &["asr/model.bin", "asr/config.json", "asr/tokenizer.json"];
const SMART_TURN: &[&str] = &["turn_detection/smart-turn-v3.2-cpu.onnx"];

const WAKEWORD: &[&str] =
    &["wakeword/melspectrogram.onnx", "wakeword/embedding_model.onnx", "wakeword/alexa_v0.1.onnx"];

const DIARIZATION: &[&str] = &["diarization/pytorch_model.bin", "diarization/pretrained.pt"];

const TABLE: [Row; 7] = [
    (Operation::Vad, &["vad/silero_vad.onnx"], onnx::NAME, None, Some(onnx::NAME)),
    (Operation::TurnDetection, SMART_TURN, onnx::NAME, None, Some(onnx::NAME)),
    (Operation::Asr, WHISPER, KERNELS, None, Some(KERNELS)),
    (Operation::Tts, &["tts/voice.onnx", "tts/voice.onnx.json"], onnx::NAME, None, Some(onnx::NAME)),
    (Operation::Wakeword, WAKEWORD, onnx::NAME, None, Some(onnx::NAME)),
    (Operation::Speaker, &["speaker/pretrained.pt"], KERNELS, None, Some(KERNELS)),
    (Operation::Diarization, DIARIZATION, KERNELS, None, Some(KERNELS)),
];

#[test]
fn the_table_of_every_audio_operation() {
    let texts = [Operation::Embed, Operation::Rerank];
    let all: Vec<_> = texts.into_iter().chain(TABLE.map(|row| row.0)).collect();
    assert_eq!(all, Operation::ALL);
    for (operation, files, by_files, without, with) in TABLE {
        // The only backend with a program of its own. Its absence is what this test reports then.
        if let (Operation::Tts, Err(missing)) = (operation, tts::available()) {
            let error = chosen(operation, &bundle(files).1, &[]).unwrap_err();
            assert!(error.contains(&missing) && missing.contains("espeak-ng"), "{error}");
            continue;
        }
        let own = format!("KVASIR_{}_BACKEND", operation.name().to_ascii_uppercase());
        let (_empty, empty) = bundle(&[]);
        let (_full, full) = bundle(files);
        let assert_selected =
            |choice: Option<&str>, bundle: &Bundle| match (choice, chosen(operation, bundle, &[])) {
                (Some(name), chosen) => assert_eq!(chosen.as_deref(), Ok(name), "{operation}"),
                (None, Err(error)) => {
                    assert!(
                        error.starts_with(&format!("no backend serves {operation}")),
                        "by its name: {error}"
                    );
                }
                (None, Ok(name)) => panic!("{operation} is served by {name}"),
            };
        assert_selected(without, &empty);
        assert_selected(with, &full);
        // A requested backend is used if it can serve, by either variable, else selection fails.
        for variable in [own.as_str(), "KVASIR_BACKEND"] {
            for name in [KERNELS, onnx::NAME, "npu"] {
                let answer = chosen(operation, &full, &[(variable, name)]);
                let exists = without == Some(name) || (name == by_files && !files.is_empty());
                match (exists, answer) {
                    (true, answer) => assert_eq!(answer.as_deref(), Ok(name), "{operation} by {variable}"),
                    (false, Err(error)) => {
                        // The table's file is not Silero's network.
                        let known = operation == Operation::Vad && name == KERNELS;
                        let reason =
                            if known { "which cannot serve this request" } else { "which is unknown" };
                        let expected =
                            format!("{variable} selects backend {name:?} for {operation}, {reason}");
                        assert!(error.starts_with(&expected), "{error}");
                    }
                    (false, Ok(chosen)) => panic!("{operation}: {chosen} instead of {name}"),
                }
            }
            if !files.is_empty() {
                let error = chosen(operation, &empty, &[(variable, by_files)]).unwrap_err();
                assert!(error.contains("cannot serve this request: there is no"), "{error}");
            }
            let unset = chosen(operation, &full, &[(variable, "")]);
            assert_eq!(unset.ok().as_deref(), with, "{operation}: an empty value is none");
        }
        // The operation's own variable precedes the general one; another operation's variable has no effect.
        if !files.is_empty() {
            let both = [("KVASIR_BACKEND", "npu"), (own.as_str(), by_files)];
            assert_eq!(chosen(operation, &full, &both).as_deref(), Ok(by_files), "{operation}");
        }
        let other = ("KVASIR_EMBED_BACKEND", "npu");
        assert_eq!(chosen(operation, &full, &[other]).ok().as_deref(), with, "{operation}");
    }
}

#[test]
fn a_general_choice_of_kernels_selects_no_audio_backend() {
    let (_dir, bundle) = bundle(&["vad/silero_vad.onnx"]);
    let error = chosen(Operation::Vad, &bundle, &[("KVASIR_BACKEND", "cpu-scalar")]).unwrap_err();
    assert!(error.contains("cpu-scalar") && error.contains("vad"), "nobody else has kernels: {error}");
}

#[test]
fn a_folder_with_two_files_or_a_foreign_one_is_refused() {
    let vad = |files: &[&str]| {
        let (_dir, bundle) = bundle(files);
        chosen(Operation::Vad, &bundle, &[]).unwrap_err()
    };
    assert!(vad(&["vad/silero_vad.onnx", "vad/silero_vad_half.onnx"]).contains("more than one"));
    assert!(vad(&["vad/other.onnx"]).contains("there is no silero_vad*.onnx"));
    assert!(vad(&["turn_detection/silero_vad.onnx"]).contains("there is no silero_vad*.onnx"));
}

#[test]
fn a_model_of_transcripts_has_one_of_three_forms() {
    let asr = |files: &[&str]| {
        let (_dir, bundle) = bundle(files);
        chosen(Operation::Asr, &bundle, &[])
    };
    let beside = ["asr/config.json", "asr/tokenizer.json"];
    for file in ["asr/model.bin", "asr/model.safetensors"] {
        assert_eq!(asr(&[&[file], &beside[..]].concat()).as_deref(), Ok(KERNELS), "{file}");
        assert!(asr(&[file, beside[0]]).unwrap_err().contains("there is no tokenizer.json"));
    }
    assert_eq!(asr(&["asr/ggml-base.bin"]).as_deref(), Ok(KERNELS));
    let several = asr(&["asr/ggml-base.bin", "asr/ggml-tiny.bin"]).unwrap_err();
    assert!(several.contains("there are several models in"), "{several}");
}

fn failure(operation: Operation, bundle: &Bundle) -> Error {
    load_audio_models(operation, bundle, Choice::All, |_| None, NonZeroUsize::MIN).err().unwrap()
}

#[test]
fn folders_define_the_operations_and_unserved_ones_are_named() {
    let (_dir, full) = bundle(&["vad/x", "asr/x", "notes/x"]);
    assert_eq!(full.operations(), [Operation::Vad, Operation::Asr]);
    let error = failure(Operation::Tts, &full).to_string();
    assert!(error.starts_with("no backend serves tts; onnx: "), "{error}");
    let error = failure(Operation::Asr, &full).to_string();
    let models = "model.bin, model.safetensors or ggml-*.bin";
    assert!(
        error.starts_with(&format!("no backend serves asr; kernels: there is no {models} in")),
        "{error}"
    );
    let error = failure(Operation::Embed, &full).to_string();
    assert!(error.contains("embed is for texts"), "{error}");
}

#[test]
fn a_file_that_is_no_model_is_refused_with_its_path() {
    let files = [&["vad/silero_vad.onnx", "turn_detection/smart-turn-v3.onnx"], &WHISPER[..2], &WHISPER[2..]];
    let (_dir, bundle) = bundle(&files.concat());
    for operation in [Operation::Vad, Operation::TurnDetection, Operation::Asr] {
        let error = failure(operation, &bundle);
        assert!(matches!(&error, Error::Artefact { path, .. } if path.starts_with(&bundle.dir)), "{error}");
    }
}
