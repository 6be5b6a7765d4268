use super::*;
use crate::ModelFile;
use crate::inspect::Summary;
use crate::spec::{MergeSpec, VisionSpec};
use crate::test_files::{self, Plan};
use metadata::Value;
use std::fs::File;

/// Width of the text models of the tests.
const TEXT: u64 = 16;
const HIDDEN: u64 = 24;
const INNER: u64 = 40;

/// A tower of two layers for pictures of 8 x 8 pixels in patches of 2 x 2.
fn part(projector: &str, settings: &[(&str, Value)], tensors: &[(&str, &[u64])], qwen: bool) -> Plan {
    let metadata = Metadata::from_iter([
        ("general.architecture", Value::from("clip")),
        ("clip.projector_type", projector.into()),
        ("clip.use_gelu", true.into()),
        ("clip.vision.embedding_length", Value::U32(HIDDEN as u32)),
        ("clip.vision.feed_forward_length", Value::U32(INNER as u32)),
        ("clip.vision.block_count", Value::U32(2)),
        ("clip.vision.attention.head_count", Value::U32(2)),
        ("clip.vision.attention.layer_norm_epsilon", Value::F32(1e-6)),
        ("clip.vision.image_size", Value::U32(8)),
        ("clip.vision.patch_size", Value::U32(2)),
        ("clip.vision.image_mean", vec![0.5_f32; 3].into()),
    ]);
    let mut plan = Plan { metadata, tensors: Vec::new() };
    for (key, value) in settings {
        plan = plan.set(key, value.clone());
    }
    plan = plan.tensor("v.patch_embd.weight", &[2, 2, 3, HIDDEN]);
    if qwen {
        plan = plan.tensor("v.patch_embd.weight.1", &[2, 2, 3, HIDDEN]);
    }
    let matrices: [(&str, &[u64]); 6] = [
        ("attn_q", &[HIDDEN, HIDDEN]),
        ("attn_k", &[HIDDEN, HIDDEN]),
        ("attn_v", &[HIDDEN, HIDDEN]),
        ("attn_out", &[HIDDEN, HIDDEN]),
        ("ffn_up", &[HIDDEN, INNER]),
        ("ffn_down", &[INNER, HIDDEN]),
    ];
    for layer in 0..2 {
        for (name, dims) in matrices {
            plan = plan.tensor(&format!("v.blk.{layer}.{name}.weight"), dims);
        }
        for name in ["ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias"] {
            plan = plan.tensor(&format!("v.blk.{layer}.{name}"), &[HIDDEN]);
        }
    }
    for (name, dims) in tensors {
        plan = plan.tensor(name, dims);
    }
    plan
}

fn gemma() -> Plan {
    let tensors: [(&str, &[u64]); 6] = [
        ("v.patch_embd.bias", &[HIDDEN]),
        ("v.position_embd.weight", &[HIDDEN, 16]),
        ("v.post_ln.weight", &[HIDDEN]),
        ("v.post_ln.bias", &[HIDDEN]),
        ("mm.soft_emb_norm.weight", &[HIDDEN]),
        (PROJECTION, &[TEXT, HIDDEN]),
    ];
    part("gemma3", &[("clip.vision.projector.scale_factor", Value::U32(2))], &tensors, false)
}

/// A text model with tokens of images.
fn text(plan: Plan, tokens: &[&str]) -> Plan {
    let all = (0..12 - tokens.len()).map(|id| format!("<{id}>"));
    let all = Strings::from_iter(all.chain(tokens.iter().map(|token| (*token).to_owned())));
    plan.set("tokenizer.ggml.tokens", Value::from(all))
}

const GEMMA_TOKENS: [&str; 3] = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"];

fn gemma_text() -> Plan {
    text(test_files::gemma3(1), &GEMMA_TOKENS)
}

fn write(folder: &Path, name: &str, plan: &Plan) {
    let mut file = File::create(folder.join(name)).unwrap();
    // Counts from 0 on, so that places are seen.
    let data = |info: &TensorInfo| -> Vec<u8> {
        (0..info.bytes() / 4).flat_map(|place| (place as f32).to_le_bytes()).collect()
    };
    plan.writer().write(&mut file, data).unwrap();
}

/// The files of a folder, and what sees images of its model.
fn opened(files: &[(&str, &Plan)]) -> (ModelFile, Option<VisionSpec>) {
    let folder = tempfile::tempdir().unwrap();
    for (name, plan) in files {
        write(folder.path(), name, plan);
    }
    let file = ModelFile::open(folder.path().join(files[0].0)).unwrap();
    let spec = VisionSpec::from_file(&file).unwrap();
    (file, spec)
}

#[test]
fn a_file_beside_the_model_is_part_of_it() {
    let (file, spec) = opened(&[("model.gguf", &gemma_text()), ("mmproj-model-f16.gguf", &gemma())]);
    let summary = Summary::of(&file).unwrap().to_string();
    assert!(
        summary
            .contains("images         2 layers of width 24; patches of 2 x 2 pixels, 2 x 2 of them a row\n")
    );
    assert!(!summary.contains("not served"), "{summary}");
    let spec = spec.unwrap();
    assert_eq!((spec.out, spec.layers.len(), spec.projector.merge), (16, 2, MergeSpec::Mean { side: 2 }));
    let config: Json = serde_json::from_str(file.metadata().require(CONFIG_KEY).unwrap()).unwrap();
    let ids =
        ["boi_token_index", "eoi_token_index", "image_token_index"].map(|key| config[key].as_u64().unwrap());
    assert_eq!((ids, config["mm_tokens_per_image"].as_u64()), ([9, 10, 11], Some(4)));
    let preprocessor: Json =
        serde_json::from_str(file.metadata().require(PREPROCESSOR_KEY).unwrap()).unwrap();
    assert_eq!(
        (&preprocessor["image_mean"], &preprocessor["size"]),
        (&json!([0.5, 0.5, 0.5]), &json!({"height": 8, "width": 8}))
    );
    // Rows of the projection are those of its inputs, in the file and only there.
    let projection = file.tensor_data(PROJECTION).unwrap();
    let values: Vec<f32> =
        projection.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(
        (file.tensor(PROJECTION).unwrap().dims(), &values[..3]),
        (&[HIDDEN, TEXT][..], &[0.0, 16.0, 32.0][..])
    );
    assert_eq!(file.files().len(), 2);
    let alone = opened(&[("model.gguf", &gemma_text())]);
    assert!(alone.1.is_none());
    assert_ne!(alone.0.digest().unwrap(), file.digest().unwrap());
}

#[test]
fn files_of_other_models_are_left() {
    let model = gemma_text();
    let none = |files: &[(&str, &Plan)]| assert_eq!(opened(files).1, None);
    // Another width, another kind, no tokens of images, another name, and no GGUF.
    none(&[("model.gguf", &model), ("mmproj.gguf", &gemma().tensor(PROJECTION, &[32, HIDDEN]))]);
    none(&[("model.gguf", &test_files::llama()), ("mmproj.gguf", &gemma())]);
    none(&[("model.gguf", &test_files::gemma3(1)), ("mmproj.gguf", &gemma())]);
    none(&[("model.gguf", &model), ("vision.gguf", &gemma())]);
    none(&[("model.gguf", &model), ("mmproj.gguf", &gemma().set("general.architecture", "llama"))]);
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "model.gguf", &model);
    std::fs::write(folder.path().join("mmproj.gguf"), "GGUF").unwrap();
    let file = ModelFile::open(folder.path().join("model.gguf")).unwrap();
    assert_eq!(VisionSpec::from_file(&file).unwrap(), None);
}

#[test]
fn of_several_files_the_one_with_the_models_name_is_used() {
    let model = gemma_text();
    let named = |layers: u32| gemma().set("clip.vision.block_count", layers);
    let chosen = |files: &[(&str, &Plan)]| opened(files).1.unwrap().layers.len();
    let (one, two) = (named(1), named(2));
    let files = [
        ("gemma-3-4b-it-Q4_K_M.gguf", &model),
        ("mmproj-gemma-3-4b-it-f16.gguf", &one),
        ("mmproj-medgemma-4b-it-bf16.gguf", &two),
    ];
    assert_eq!(chosen(&files), 1);
    assert_eq!(chosen(&[("model.gguf", &model), ("mmproj-BF16.gguf", &one), ("mmproj-F16.gguf", &two)]), 2);
}

#[test]
fn all_kinds_have_settings() {
    let image = |plan: Plan, tokens: &[&str]| text(plan, tokens);
    let spec = |model: &Plan, part: &Plan| opened(&[("model.gguf", model), ("mmproj.gguf", part)]).1.unwrap();
    let bias = ("v.patch_embd.bias", &[HIDDEN][..]);
    let table = ("v.position_embd.weight", &[HIDDEN, 16][..]);
    let norm = [("v.post_ln.weight", &[HIDDEN][..]), ("v.post_ln.bias", &[HIDDEN])];

    let fc = ("mm.model.fc.weight", &[9 * HIDDEN, TEXT][..]);
    let settings =
        [("clip.vision.projector.scale_factor", Value::U32(3)), ("clip.vision.image_size", Value::U32(12))];
    let tensors = [bias, ("v.position_embd.weight", &[HIDDEN, 36]), norm[0], norm[1], fc];
    let found =
        spec(&image(test_files::llama(), &["<image>"]), &part("idefics3", &settings, &tensors, false));
    assert_eq!(found.projector.merge, MergeSpec::Concat { side: 3 });

    let mlp = [
        ("mm.0.weight", &[HIDDEN, 20][..]),
        ("mm.0.bias", &[20]),
        ("mm.2.weight", &[20, TEXT]),
        ("mm.2.bias", &[TEXT]),
    ];
    let pre = [("v.pre_ln.weight", &[HIDDEN][..]), ("v.pre_ln.bias", &[HIDDEN])];
    let clip = [("v.class_embd", &[HIDDEN][..]), ("v.position_embd.weight", &[HIDDEN, 17]), pre[0], pre[1]];
    let tensors = [&clip[..], &mlp].concat();
    let llava = image(test_files::llama(), &["<image>"]);
    let found = spec(&llava, &part("mlp", &[("clip.use_gelu", false.into())], &tensors, false));
    assert_eq!((found.features, found.skips_first), (vec![2], true));
    // Older files have the feed-forward's names exchanged.
    let mut old = part("mlp", &[], &tensors, false);
    for layer in 0..2 {
        old = old.tensor(&format!("v.blk.{layer}.ffn_up.weight"), &[INNER, HIDDEN]);
        old = old.tensor(&format!("v.blk.{layer}.ffn_down.weight"), &[HIDDEN, INNER]);
    }
    assert_eq!(spec(&llava, &old).layers.len(), 2);

    let merger = [
        ("mm.0.weight", &[4 * HIDDEN, 64][..]),
        ("mm.0.bias", &[64]),
        ("mm.2.weight", &[64, TEXT]),
        ("mm.2.bias", &[TEXT]),
    ];
    let tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"];
    let settings = [
        ("clip.use_silu", true.into()),
        ("clip.use_gelu", false.into()),
        ("clip.vision.n_wa_pattern", Value::U32(2)),
        ("clip.vision.window_size", Value::U32(8)),
    ];
    let mut plan = part("qwen2.5vl_merger", &settings, &[&norm[..1], &merger].concat(), true);
    for layer in 0..2 {
        plan = plan.tensor(&format!("v.blk.{layer}.ffn_gate.weight"), &[HIDDEN, INNER]);
        plan = plan.without(&format!("v.blk.{layer}.ln1.bias")).without(&format!("v.blk.{layer}.ln2.bias"));
    }
    let qwen = |plan: Plan, arch: &str| {
        let keys: Vec<(String, Value)> =
            plan.metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect();
        let renamed = keys.into_iter().fold(Metadata::default(), |mut all, (key, value)| {
            let key = key.split_once('.').map_or(key.clone(), |(first, rest)| match first {
                "qwen2" | "qwen3" => format!("{arch}.{rest}"),
                _ => key.clone(),
            });
            all.insert(key, value);
            all
        });
        let plan = Plan { metadata: renamed, ..plan }.set("general.architecture", arch);
        image(plan.set(&format!("{arch}.rope.dimension_sections"), vec![2_i32, 1, 1, 0]), &tokens)
    };
    let found = spec(&qwen(test_files::qwen2(), "qwen2vl"), &plan);
    let windows = found.windows.clone().unwrap();
    assert_eq!((windows.side, windows.whole, found.merge_side()), (2, vec![false, true], 2));

    let flags: Vec<bool> = vec![true, false];
    let settings = [("clip.vision.is_deepstack_layers", Value::from(flags))];
    let wide = 4 * HIDDEN;
    let deepstack = [
        ("v.deepstack.0.norm.weight", &[wide][..]),
        ("v.deepstack.0.norm.bias", &[wide]),
        ("v.deepstack.0.fc1.weight", &[wide, 64]),
        ("v.deepstack.0.fc2.weight", &[64, TEXT]),
    ];
    let tensors = [&[bias, table][..], &norm, &merger, &deepstack].concat();
    let found =
        spec(&qwen(test_files::qwen3(), "qwen3vl"), &part("qwen3vl_merger", &settings, &tensors, true));
    assert_eq!(found.deepstack.iter().map(|(layer, _)| *layer).collect::<Vec<usize>>(), [0]);
}
