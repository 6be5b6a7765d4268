//! Prompts with images, compared with the oracle. As in `checkpoints.rs`, `KVASIR_FIXTURES=SET` compares all of them.

use crate::checkpoints::EXACT;
use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::{self, Tensors};
use model::ModelFile;
use std::path::{Path, PathBuf};
use text::tokenizer::Tokenizer;

/// Largest difference of a logit in f32 from pixels.
const MAX_DIFFERENCE: f32 = 3e-3;

fn folders() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(fixtures::root().join("hf")).unwrap().map(|entry| entry.unwrap());
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("vlm-"))
        .map(|entry| entry.path())
        .collect()
}

fn word(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Output of `kvasir logits` with exact arithmetic.
fn logits(folder: &Path, flags: &[&str]) -> Tensors {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.safetensors");
    let arguments = ["logits", word(folder), "--out", word(&out), "--greedy", "32", "--no-prefix-cache"];
    binary::stdout(&[&arguments[..], &EXACT, flags].concat()).unwrap();
    Tensors::read(&out).unwrap()
}

fn floats(tensors: &Tensors, name: &str) -> Vec<f32> {
    tensors.floats(name).unwrap().unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn prompts_with_images_match_their_references_from_files_and_from_pixels() {
    let folders = folders();
    assert!(folders.len() > 1);
    for folder in folders {
        let reference = Tensors::read(&folder.join("ref.safetensors")).unwrap();
        for (case, images) in [&["image0.png"][..], &["image0.png", "image1.png"]].into_iter().enumerate() {
            let name = format!("{} v{case}", folder.file_name().unwrap().to_string_lossy());
            let ids = reference.tokens(&format!("v{case}.ids")).unwrap().unwrap();
            let dir = tempfile::tempdir().unwrap();
            let prompts = dir.path().join("ids.json");
            std::fs::write(&prompts, serde_json::to_vec(&[&ids]).unwrap()).unwrap();
            let files: Vec<PathBuf> = images.iter().map(|image| folder.join(image)).collect();
            let mut flags = vec!["--tokens", word(&prompts)];
            files.iter().for_each(|file| flags.extend(["--image", word(file)]));
            let found = logits(&folder, &[&flags[..], &["--chunk", "5", "--threads", "1"]].concat());
            let (ours, theirs) =
                (floats(&found, "p0.logits"), floats(&reference, &format!("v{case}.logits")));
            let last = &ours[ours.len() - theirs.len()..];
            let differences = last.iter().zip(&theirs).map(|(ours, theirs)| (ours - theirs).abs());
            let worst = differences.fold(0.0, f32::max);
            println!("{name}: max |dlogit| {worst:e}");
            assert!(worst <= MAX_DIFFERENCE, "{name}: {worst}");
            let greedy = |tensors: &Tensors, name: String| tensors.tokens(&name).unwrap().unwrap();
            let expected = greedy(&reference, format!("v{case}.greedy"));
            assert_eq!(greedy(&found, "p0.greedy".to_owned()), expected, "{name}");

            // The output has the pixels that `--pixels` reads.
            let pixels = dir.path().join("pixels.safetensors");
            found.write(&pixels, "v0.").unwrap();
            let again = logits(&folder, &["--pixels", word(&pixels), "--chunk", "0", "--threads", "2"]);
            assert!(floats(&again, "p0.logits") == ours, "{name}: other bits from pixels");
            assert_eq!(greedy(&again, "p0.greedy".to_owned()), expected, "{name}");
        }
    }
}

#[test]
fn run_answers_to_an_image_as_the_reference_does() {
    for folder in folders() {
        let reference = Tensors::read(&folder.join("ref.safetensors")).unwrap();
        let tokenizer = Tokenizer::from_metadata(ModelFile::open(&folder).unwrap().metadata()).unwrap();
        let expected = tokenizer.decode(&reference.tokens("v0.greedy").unwrap().unwrap(), true);
        let image = folder.join("image0.png");
        let run =
            ["run", word(&folder), "--chat", "--image", word(&image), "--prompt", "Describe this image."];
        let said = binary::stdout(&[&run[..], &["--max-tokens", "32"], &EXACT].concat()).unwrap();
        let said = said.strip_suffix('\n').unwrap();
        // The reference goes on after the token that ends an answer.
        assert!(said.len() > 8 && expected.starts_with(said), "{}: {said:?} {expected:?}", folder.display());
    }
}

#[test]
fn images_that_do_not_fit_a_prompt_are_refused() {
    let folder = fixtures::root().join("hf/vlm-smolvlm");
    let dir = tempfile::tempdir().unwrap();
    let (prompts, damaged, out) =
        (dir.path().join("ids.json"), dir.path().join("damaged.png"), dir.path().join("out"));
    std::fs::write(&prompts, "[[1, 2, 3]]").unwrap();
    let file = std::fs::read(folder.join("image0.png")).unwrap();
    std::fs::write(&damaged, &file[..file.len() / 2]).unwrap();
    let image = folder.join("image0.png");
    let refused = |model: &Path, image: &Path, named: &str| {
        let arguments =
            ["logits", word(model), "--tokens", word(&prompts), "--out", word(&out), "--image", word(image)];
        let output = binary::run(&arguments).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(named), "{stderr}");
    };
    refused(&folder, &image, "the prompt has 0 tokens 4, its images have 48 rows");
    refused(&folder, &damaged, "damaged");
    refused(&fixtures::root().join("hf/llama3-rope"), &image, "sees no images");
}
