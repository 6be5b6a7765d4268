use super::*;
use crate::positions::{Placed, mrope_positions};
use crate::test_images::{bytes, file, fixtures};
use metadata::{Strings, Value};
use safetensors::SafeTensors;
use serde_json::{Map, Value as Json, json};
use std::fs;
use std::path::{Path, PathBuf};

fn processor(config: &Json, preprocessor: &Json, tokens: &[(usize, &str)]) -> Result<ImageProcessor, Error> {
    let last = tokens.iter().map(|(id, _)| *id + 1).max().unwrap_or(0);
    let mut strings = vec![""; last];
    for (id, token) in tokens {
        strings[*id] = token;
    }
    let metadata = Metadata::from_iter([
        ("vision.config", Value::String(config.to_string())),
        ("vision.preprocessor", Value::String(preprocessor.to_string())),
        ("tokenizer.ggml.tokens", Value::Array(metadata::Array::String(Strings::from_iter(strings)))),
    ]);
    ImageProcessor::from_metadata(&metadata).map(Option::unwrap)
}

/// Folders of checkpoints with `ref.json` and `ref.safetensors`, as transformers computes them.
fn references() -> Vec<PathBuf> {
    let folder =
        std::env::var("KVASIR_VISION_REFERENCES").expect("KVASIR_VISION_REFERENCES: a folder of checkpoints");
    let folders = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<_> = folders.filter(|folder| folder.join("ref.json").exists()).collect();
    folders.retain(|folder| folder.join("preprocessor_config.json").exists());
    folders.sort();
    assert!(!folders.is_empty());
    folders
}

fn json_of(path: &Path) -> Json {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn of_folder(folder: &Path) -> ImageProcessor {
    let mut preprocessor = Map::new();
    for name in ["preprocessor_config.json", "processor_config.json"] {
        if folder.join(name).exists() {
            preprocessor.extend(json_of(&folder.join(name)).as_object().unwrap().clone());
        }
    }
    let text = |json: Json| Value::String(json.to_string());
    let metadata = Metadata::from_iter([
        ("vision.config", text(json_of(&folder.join("config.json")))),
        ("vision.preprocessor", text(Json::Object(preprocessor))),
        ("tokenizer.huggingface.json", text(json_of(&folder.join("tokenizer.json")))),
    ]);
    ImageProcessor::from_metadata(&metadata).unwrap().unwrap()
}

#[test]
#[ignore = "needs KVASIR_VISION_REFERENCES"]
fn references_have_these_pixels_and_positions() {
    for folder in references() {
        let processor = of_folder(&folder);
        let bytes = fs::read(folder.join("ref.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let reference = json_of(&folder.join("ref.json"));
        for (at, case) in reference["cases"].as_array().unwrap().iter().enumerate() {
            let images = case["images"].as_array().unwrap();
            let images: Vec<_> = images
                .iter()
                .map(|image| {
                    let file = format!("image{}.png", image.as_u64().unwrap());
                    processor.process(&fs::read(folder.join(file)).unwrap()).unwrap()
                })
                .collect();
            if images.is_empty() {
                continue;
            }
            let tensor = tensors.tensor(&format!("v{at}.pixel_values")).unwrap();
            let values = tensor.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            let pixels: Vec<f32> = images.iter().flat_map(ProcessedImage::pixels).collect();
            assert_eq!(pixels.len(), tensor.shape().iter().product::<usize>(), "{}", folder.display());
            let worst =
                pixels.iter().zip(values).map(|(ours, theirs)| (ours - theirs).abs()).fold(0.0, f32::max);
            eprintln!("{} v{at}: pixels differ by {worst:e}", folder.display());
            assert!(worst <= 0.02, "{} v{at}: {worst}", folder.display());

            let row = u64::from(processor.row_token());
            let ids: Vec<_> = case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
            let rows: usize = images.iter().map(|image| image.rows).sum();
            assert_eq!(ids.iter().filter(|id| **id == row).count(), rows, "{}", folder.display());
            let Ok(expected) = tensors.tensor(&format!("v{at}.position_ids")) else { continue };
            let mut from = 0;
            let placed: Vec<_> = images
                .iter()
                .map(|image| {
                    let start = from + ids[from..].iter().position(|id| *id == row).unwrap();
                    from = start + image.rows;
                    Placed { start, grid: image.row_grid.unwrap() }
                })
                .collect();
            let (positions, delta) = mrope_positions(ids.len(), &placed);
            let axes = (0..3).flat_map(|axis| positions.iter().map(move |position| position[axis]));
            let expected = expected.data().as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
            assert!(axes.eq(expected), "{}", folder.display());
            let expected = tensors.tensor(&format!("v{at}.rope_delta")).unwrap().data().to_vec();
            assert_eq!(delta as i32, i32::from_le_bytes(expected.try_into().unwrap()));
        }
    }
}

/// The processor of a family, with a small configuration.
fn of_family(family: &str, preprocessor: &Json) -> ImageProcessor {
    let config = json!({
        "model_type": family,
        "image_token_id": 3, "boi_token_index": 1, "eoi_token_index": 2, "mm_tokens_per_image": 4, "scale_factor": 2,
        "vision_config": {"model_type": "clip_vision_model", "patch_size": 2},
    });
    processor(&config, preprocessor, &[(1, "<begin>"), (2, "<end>"), (3, "<image>")]).unwrap()
}

/// Pillow's weights have more bits than torchvision's, so that each of three passes may differ by one level.
#[test]
fn images_are_preprocessed_as_transformers_does() {
    for case in fixtures()["processed"].as_array().unwrap() {
        let (family, options) = (case["family"].as_str().unwrap(), &case["preprocessor"]);
        let image = of_family(family, options).process(&bytes(&case["file"])).unwrap();
        let shape: Vec<_> =
            case["shape"].as_array().unwrap().iter().map(|side| side.as_u64().unwrap()).collect();
        let shape = if family == "idefics3" { &shape[1..] } else { &shape[..] };
        assert!(
            image.shape.iter().map(|side| *side as u64).eq(shape.iter().copied()),
            "{options}: {:?}",
            image.shape
        );
        let grid = case["grid"].as_array().unwrap().iter().map(|side| side.as_u64().unwrap());
        assert!(image.grid.iter().flatten().map(|side| u64::from(*side)).eq(grid), "{options}");
        let expected = bytes(&case["pixels"]);
        let expected =
            expected.as_chunks::<2>().0.iter().map(|bytes| f32::from(i16::from_le_bytes(*bytes)) / 4096.0);
        let tolerance = case["level"].as_f64().unwrap() as f32 * 3.0 + 2e-4;
        let pixels = image.pixels();
        assert_eq!(pixels.len(), expected.len());
        for (at, (ours, theirs)) in pixels.iter().zip(expected).enumerate() {
            assert!(
                (ours - theirs).abs() <= tolerance,
                "{family} {options}: {ours} instead of {theirs} at {at}"
            );
        }
    }
}

#[test]
fn markers_become_the_tokens_and_rows_of_transformers() {
    let text = |text: &str| Piece::Text(text.to_owned());
    let file = file("png rgb");
    let expand = |family, options: Json| {
        let processor = of_family(family, &options);
        (processor.marker().to_owned(), processor.expand(&processor.process(&file).unwrap()))
    };
    let size = json!({"height": 8, "width": 8});
    let gemma = [text("\n\n<begin>"), Piece::Rows(4), text("<end>\n\n")];
    assert_eq!(expand("gemma3", json!({"size": size})), ("<begin>".to_owned(), gemma.to_vec()));
    let crops = json!({"size": size, "do_pan_and_scan": true, "pan_and_scan_min_crop_size": 2,
        "pan_and_scan_max_num_crops": 2, "pan_and_scan_min_ratio_to_activate": 1.2});
    let mut with_crops =
        vec![text("Here is the original image \n\n<begin>"), Piece::Rows(4), text("<end>\n\n")];
    with_crops.push(text(" and here are some crops to help you see better \n\n<begin>"));
    with_crops.extend([
        Piece::Rows(4),
        text("<end>\n\n"),
        text(" \n\n<begin>"),
        Piece::Rows(4),
        text("<end>\n\n"),
    ]);
    assert_eq!(expand("gemma3", crops).1, with_crops);
    let crop = json!({"size": 8, "crop_size": size});
    assert_eq!(expand("llava", crop), ("<image>".to_owned(), vec![Piece::Rows(16)]));
    let tiles =
        json!({"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}, "image_seq_len": 4});
    let around = "<fake_token_around_image>";
    let mut split = Vec::new();
    for (row, column, lead) in [(1, 1, ""), (1, 2, ""), (2, 1, "\n"), (2, 2, "")] {
        split.extend([Piece::Text(format!("{lead}{around}<row_{row}_col_{column}>")), Piece::Rows(4)]);
    }
    split.extend([Piece::Text(format!("\n\n{around}<global-img>")), Piece::Rows(4), text(around)]);
    assert_eq!(expand("smolvlm", tiles.clone()).1, split);
    let mut whole = tiles;
    whole["do_image_splitting"] = json!(false);
    let whole = expand("smolvlm", whole).1;
    assert_eq!(whole, [Piece::Text(format!("{around}<global-img>")), Piece::Rows(4), text(around)]);
    let patches = json!({"patch_size": 2, "min_pixels": 16, "max_pixels": 64});
    assert_eq!(expand("qwen3_vl", patches), ("<image>".to_owned(), vec![Piece::Rows(4)]));
}

#[test]
fn tokens_are_found_in_the_files_of_a_folder() {
    let config =
        json!({"model_type": "gemma3", "image_token_index": 3, "boi_token_index": 1, "eoi_token_index": 2});
    let read = |tokenizer: &str| {
        let metadata = Metadata::from_iter([
            ("vision.config", Value::String(config.to_string())),
            ("tokenizer.huggingface.json", Value::String(tokenizer.to_owned())),
        ]);
        ImageProcessor::from_metadata(&metadata).map(Option::unwrap)
    };
    let token = |id: u32, content: &str| json!({"id": id, "content": content, "special": true});
    let tokens = [token(3, "<row>"), token(1, "<begin>"), token(2, "<end>")];
    let processor = read(&json!({"model": {"vocab": {}}, "added_tokens": tokens}).to_string()).unwrap();
    assert_eq!((processor.marker(), processor.row_token()), ("<begin>", 3));
    let begin = "the model's vision configuration: ";
    let refused = read(&json!({"added_tokens": &tokens[..1]}).to_string()).unwrap_err().to_string();
    assert_eq!(refused, format!("{begin}config.json: boi_token_index is 1, which is no token"));
    let refused = read("{").unwrap_err().to_string();
    assert!(refused.starts_with(&format!("{begin}tokenizer.huggingface.json is not read: ")), "{refused}");
}

#[test]
fn the_digest_is_that_of_the_preprocessed_pixels() {
    let size = json!({"size": {"height": 8, "width": 8}});
    let processor = of_family("gemma3", &size);
    let digest = |name| processor.process(&file(name)).unwrap().digest;
    assert_eq!(digest("png rgb"), digest("webp lossless"));
    assert_ne!(digest("png rgb"), digest("png turned"));
    let mut other = size;
    other["image_mean"] = json!([0.4, 0.5, 0.5]);
    assert_ne!(of_family("gemma3", &other).process(&file("png rgb")).unwrap().digest, digest("png rgb"));
    let ids = crate::image_ids(&digest("png rgb"), 20);
    assert!(ids.iter().all(|id| *id >= crate::IMAGE_ID));
    assert_eq!(ids[..5], crate::image_ids(&digest("png rgb"), 5));
    assert_ne!(ids, crate::image_ids(&digest("png turned"), 20));
}

#[test]
fn extreme_images_stay_within_the_limits() {
    let crop = json!({"size": 8192, "crop_size": {"height": 8, "width": 8}});
    let long = Rgb::filled(400, 2, [9; 3]);
    let file = {
        let mut file = Vec::new();
        let image = image::RgbImage::from_raw(400, 2, long.bytes).unwrap();
        image.write_to(&mut std::io::Cursor::new(&mut file), image::ImageFormat::Png).unwrap();
        file
    };
    let refused = of_family("llava", &crop).process(&file).unwrap_err();
    let text = "the image becomes 1638400 x 8192 pixels in preprocessing, the limit is 67108864 pixels";
    assert_eq!(refused.to_string(), text);
    let tiles = json!({"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}});
    assert_eq!(of_family("smolvlm", &tiles).process(&file).unwrap().shape, [3, 3, 8, 8]);
}

#[test]
fn configurations_that_are_not_supported_are_refused_by_name() {
    let refused = |config: Json, preprocessor: Json| {
        processor(&config, &preprocessor, &[(1, "<image>")]).unwrap_err().to_string()
    };
    let begin = "the model's vision configuration: ";
    let config = json!({"model_type": "pixtral", "image_token_id": 1});
    let kind = "config.json: model_type is \"pixtral\", whose images are not supported";
    assert_eq!(refused(config, json!({})), format!("{begin}{kind}"));
    let qwen = |preprocessor| refused(json!({"model_type": "qwen3_vl", "image_token_id": 1}), preprocessor);
    let file = "preprocessor_config.json: ";
    let resample = "resample is none of 1 (Lanczos), 2 (bilinear) and 3 (bicubic)";
    assert_eq!(qwen(json!({"resample": 0})), format!("{begin}{file}{resample}"));
    let patch = "patch_size is 0, expected 1 to 256";
    assert_eq!(qwen(json!({"patch_size": 0})), format!("{begin}{file}{patch}"));
    let pixels = "min_pixels is 9 pixels, more than max_pixels, 8";
    assert_eq!(qwen(json!({"min_pixels": 9, "max_pixels": 8})), format!("{begin}{file}{pixels}"));
    let rows = json!({"max_image_size": {"longest_edge": 8}, "image_seq_len": 5});
    let config = json!({"model_type": "smolvlm", "image_token_id": 1, "vision_config": {"patch_size": 2}});
    let text = "image_seq_len is 5, but images of 8 pixels have 4 rows";
    assert_eq!(refused(config, rows), format!("{begin}{file}{text}"));
    assert_eq!(ImageProcessor::from_metadata(&Metadata::default()).map(|found| found.is_none()), Ok(true));
}
