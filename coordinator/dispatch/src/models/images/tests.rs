use super::*;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use metadata::{Strings, Value};
use proto::message::TokenPart;
use serde_json::{Map, Value as Json};
use std::fs;
use std::path::Path;
use text::chat_template::{Content, Message, Part};

const ROW: u32 = 257;
const BEGIN: u32 = 258;
const END: u32 = 259;

/// A byte vocabulary with tokens of images, of which `user_defined` ones are pieces of text.
fn metadata(config: &str, preprocessor: &str, user_defined: bool) -> Metadata {
    let mut tokens: Vec<String> = (0..256u32)
        .map(|byte| {
            let printable =
                (33..=126).contains(&byte) || (161..=172).contains(&byte) || (174..=255).contains(&byte);
            let others =
                (0..byte).filter(|b| !(33..=126).contains(b) && !(161..=172).contains(b) && *b < 174);
            let code = if printable { byte } else { 256 + others.count() as u32 };
            char::from_u32(code).unwrap().to_string()
        })
        .collect();
    tokens.extend(["<bos>", "<row>", "<begin>", "<end>"].map(String::from));
    let kind = |id: usize| if id > 256 && user_defined { 4 } else { 3 };
    let types: Vec<i32> = (0..tokens.len()).map(|id| if id < 256 { 1 } else { kind(id) }).collect();
    Metadata::from_iter([
        ("tokenizer.ggml.model", Value::from("gpt2")),
        ("tokenizer.ggml.pre", Value::from("gpt-2")),
        ("tokenizer.ggml.tokens", Value::from(tokens.iter().collect::<Strings>())),
        ("tokenizer.ggml.token_type", Value::from(types)),
        ("tokenizer.ggml.merges", Value::from(["a a"].iter().take(0).collect::<Strings>())),
        ("tokenizer.ggml.bos_token_id", Value::from(256u32)),
        ("tokenizer.ggml.eos_token_id", Value::from(256u32)),
        ("tokenizer.ggml.add_bos_token", Value::from(true)),
        ("vision.config", Value::from(config)),
        ("vision.preprocessor", Value::from(preprocessor)),
    ])
}

/// A model with rows between two tokens, as Gemma 3.
fn gemma(user_defined: bool) -> OfferedModel {
    let config = format!(
        r#"{{"model_type":"gemma3","image_token_index":{ROW},"boi_token_index":{BEGIN},"eoi_token_index":{END},"mm_tokens_per_image":4}}"#
    );
    let metadata = metadata(&config, r#"{"size":{"height":8,"width":8}}"#, user_defined);
    OfferedModel::of_metadata(ModelId::new("m").unwrap(), &metadata, 0, false).unwrap()
}

/// A committed image.
fn file(name: &str) -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/images/images.json");
    let images: Json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let files = images["files"].as_array().unwrap();
    let file = files.iter().find(|file| file["name"] == name).unwrap();
    BASE64_STANDARD.decode(file["file"].as_str().unwrap()).unwrap()
}

/// A prompt of which so many bytes at its beginning came with the request.
fn prompt(text: &str, quoted: usize) -> Prompt {
    let ranges = std::iter::once(0..quoted).filter(|range| !range.is_empty());
    Prompt { text: text.to_owned(), quoted: ranges.collect() }
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn markers_become_rows_that_name_their_image() {
    let model = gemma(false);
    let sees = model.images().unwrap();
    let images = [sees.see(&file("png rgb")).unwrap(), sees.see(&file("png turned")).unwrap()];
    let placed = model.chat_with_images(&prompt("a<begin>b<begin>", 0), &images, true).unwrap();
    let ids = images.each_ref().map(|image| vision::image_ids(&image.digest, 4));
    let run = |ids: &[u32]| [&bytes("\n\n"), &[BEGIN][..], ids, &[END], &bytes("\n\n")].concat();
    let expected = [&[256][..], &bytes("a"), &run(&ids[0]), &bytes("b"), &run(&ids[1])].concat();
    assert_eq!(*placed.tokens, expected);
    assert_eq!(placed.runs.concat(), [5..9, 16..20]);
    let written = model.in_vocabulary(&placed.tokens);
    assert_eq!(written[5..9], [ROW; 4]);
    assert!(written.iter().all(|id| *id < 260));
}

#[test]
fn text_of_a_request_is_no_marker() {
    for user_defined in [false, true] {
        let model = gemma(user_defined);
        let image = model.images().unwrap().see(&file("png rgb")).unwrap();
        let text = "<begin><row><begin>";
        let placed = model.chat_with_images(&prompt(text, 12), &[Arc::clone(&image)], false).unwrap();
        let quoted = bytes("<begin><row>\n\n");
        assert_eq!(placed.tokens[..quoted.len()], quoted, "user defined: {user_defined}");
        let first = quoted.len() as u32 + 1;
        assert_eq!(placed.runs.concat(), std::slice::from_ref(&(first..first + 4)));
        // A marker of which one byte is the request's.
        let half = model.chat_with_images(&prompt(text, 13), &[image], false).unwrap_err();
        assert_eq!(half, PlaceError::Template { given: 1, written: 0 });
        let plain = model.chat(&prompt(text, text.len()), false);
        assert_eq!(*plain, bytes(text), "user defined: {user_defined}");
    }
}

#[test]
fn faults_are_named() {
    let model = gemma(false);
    let image = model.images().unwrap().see(&file("png rgb")).unwrap();
    let place =
        |text: &str, images: &[_]| model.chat_with_images(&prompt(text, 0), images, false).unwrap_err();
    assert_eq!(place("<begin>", &[]), PlaceError::Template { given: 0, written: 1 });
    assert_eq!(place("a", std::slice::from_ref(&image)), PlaceError::Template { given: 1, written: 0 });
    assert_eq!(place("<row><begin>", &[image]), PlaceError::Rows { expected: 1, found: 2 });
    let blind = metadata("", "", false)
        .iter()
        .filter(|(key, _)| !key.starts_with("vision"))
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .collect();
    let blind = OfferedModel::of_metadata(ModelId::new("m").unwrap(), &blind, 0, false).unwrap();
    assert_eq!(blind.images().unwrap_err().to_string(), "the model m sees no images");
    let other = metadata(r#"{"model_type":"pixtral","image_token_id":257}"#, "{}", false);
    let other = OfferedModel::of_metadata(ModelId::new("m").unwrap(), &other, 0, false).unwrap();
    let reason = "the model m sees no images here: the model's vision configuration: config.json: model_type is \
        \"pixtral\", whose images are not supported";
    assert_eq!(other.images().unwrap_err().to_string(), reason);
}

#[test]
fn equal_files_that_come_together_are_decoded_once() {
    let model = gemma(false);
    let sees = model.images().unwrap();
    let (good, bad) = (file("png rgb"), b"GIF89a".to_vec());
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| (sees.see(&good).unwrap(), sees.see(&bad).unwrap_err()));
        }
    });
    assert_eq!(sees.counts(), [2, 30, 16]);
    assert_ne!(sees.see(&file("png turned")).unwrap().digest, sees.see(&good).unwrap().digest);
    assert_eq!(sees.counts(), [3, 31, 16]);
}

#[test]
fn the_number_of_known_files_is_bounded() {
    let mut known = Known::default();
    let name = |at: usize| *blake3::hash(&at.to_le_bytes()).as_bytes();
    let first = known.slot(name(0));
    for at in 1..MAX_KNOWN * 2 {
        known.slot(name(at));
        assert!(Arc::ptr_eq(&known.slot(name(0)), &first), "a used one stays");
        assert!(known.young.len() + known.old.len() <= MAX_KNOWN);
    }
}

/// Names of parts would let an index take two images for one.
#[test]
fn known_parts_end_before_the_first_row() {
    let model = gemma(false);
    let image = model.images().unwrap().see(&file("png rgb")).unwrap();
    let placed = model.chat_with_images(&prompt("<begin>", 0), &[image], true).unwrap();
    assert!(
        placed.tokens.parts().iter().all(|TokenPart { end, .. }| *end <= 4),
        "{:?}",
        placed.tokens.parts()
    );
}

/// `KVASIR_VISION_REFERENCES`: folders of checkpoints with `ref.json`, as transformers computes it.
#[test]
#[ignore = "needs KVASIR_VISION_REFERENCES"]
fn references_have_these_ids() {
    let root =
        std::env::var("KVASIR_VISION_REFERENCES").expect("KVASIR_VISION_REFERENCES: a folder of checkpoints");
    let folders = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let folders: Vec<_> = folders.filter(|folder| folder.join("preprocessor_config.json").exists()).collect();
    assert!(!folders.is_empty());
    for folder in folders {
        let id = ModelId::new("m").unwrap();
        let models =
            super::super::Models::open(&[super::super::ModelEntry { id, path: folder.clone() }], false);
        let model = models.unwrap().get("m").unwrap();
        let reference: Json = serde_json::from_slice(&fs::read(folder.join("ref.json")).unwrap()).unwrap();
        for case in reference["cases"].as_array().unwrap() {
            compare(&folder, &model, case);
        }
    }
}

fn compare(folder: &Path, model: &OfferedModel, case: &Json) {
    let mut images = Vec::new();
    for image in case["images"].as_array().unwrap() {
        let file = fs::read(folder.join(format!("image{image}.png"))).unwrap();
        images.push(model.images().unwrap().see(&file).unwrap());
    }
    let mut next = 0..;
    let mut part = |part: &Json| match part["type"].as_str() {
        Some("image") => Part::Image(next.next().unwrap()),
        _ => Part::Text(part["text"].as_str().unwrap().to_owned().into()),
    };
    let message = |message: &Json| {
        let mut read = Message::new(message["role"].as_str().unwrap(), "");
        read.content =
            Some(Content::Parts(message["content"].as_array().unwrap().iter().map(&mut part).collect()));
        read
    };
    let messages: Vec<_> = case["messages"].as_array().unwrap().iter().map(message).collect();
    let template = model.template.as_ref().unwrap();
    let prompt = template.render_marked(&messages, None, true, &Map::new()).unwrap();
    assert_eq!(prompt.text, case["text"].as_str().unwrap());
    // The text has what begins a prompt.
    let bos = !model
        .tokenizer
        .token_text(model.tokenizer.bos().unwrap_or(u32::MAX))
        .is_some_and(|bos| prompt.text.starts_with(bos));
    let placed = model.chat_with_images(&prompt, &images, bos).unwrap();
    let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
    assert_eq!(model.in_vocabulary(&placed.tokens), expected, "{}: {}", folder.display(), prompt.text);
    for (image, runs) in images.iter().zip(&placed.runs) {
        let rows = runs.iter().flat_map(|run| &placed.tokens[run.start as usize..run.end as usize]);
        assert!(rows.eq(&vision::image_ids(&image.digest, image.rows)));
    }
}
