//! Towers against references.

use super::*;
use kernels::backend::ActivationMode;
use kernels::cpu::{CpuBackend, CpuConfig};
use kernels::pool::{Pool, PoolConfig};
use model::ModelFile;
use reference::{Rows, Weights};
use safetensors::SafeTensors;
use serde_json::{Value as Json, json};
use std::num::NonZeroUsize;
use std::path::Path;
use tempfile::TempDir;

mod reference;

fn backend(threads: usize) -> Box<dyn Backend> {
    let cpu = CpuConfig::select(ActivationMode::F32, |name| std::env::var(name).ok()).unwrap();
    let pool = Pool::new(PoolConfig::new(NonZeroUsize::new(threads).unwrap())).unwrap();
    Box::new(CpuBackend::new(cpu, pool).unwrap())
}

fn tower(path: &Path, threads: usize, step_rows: usize) -> VisionTower {
    let file = ModelFile::open(path).unwrap();
    let spec = VisionSpec::from_file(&file).unwrap().unwrap();
    VisionTower::load(spec, &file, backend(threads), step_rows).unwrap()
}

/// Compares the model that `KVASIR_VISION_REFERENCE` names, a folder or a file, with `ref.safetensors` in its folder:
/// `vN.pixel_values`, `vN.image_grid_thw`, `vN.image_embeds` and `vN.deepstack.K`.
#[test]
#[ignore = "compares a model with references: KVASIR_VISION_REFERENCE names it"]
fn references_of_a_model() {
    let model = std::env::var_os("KVASIR_VISION_REFERENCE").expect("KVASIR_VISION_REFERENCE names a model");
    let model = Path::new(&model);
    let folder = if model.is_dir() { model } else { model.parent().unwrap() };
    let mut tower = tower(model, 2, 4096);
    let bytes = std::fs::read(folder.join("ref.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| -> Vec<f32> {
        let data = tensors.tensor(name).unwrap();
        data.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let mut compared = 0;
    for case in 0.. {
        let Ok(pixels) = tensors.tensor(&format!("v{case}.pixel_values")) else { break };
        let values = floats(&format!("v{case}.pixel_values"));
        let mut shape = pixels.shape().to_vec();
        if shape.len() == 5 {
            shape = vec![shape[0] * shape[1], shape[2], shape[3], shape[4]];
        }
        let embeddings = match tensors.tensor(&format!("v{case}.image_grid_thw")) {
            Err(_) => tower.encode(&[Pixels { values: &values, shape: &shape, grid: None }]).unwrap(),
            Ok(grids) => {
                let numbers: Vec<u32> =
                    grids.data().as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
                let (mut start, mut images) = (0, Vec::new());
                for grid in numbers.as_chunks::<3>().0 {
                    let rows = grid.iter().product::<u32>() as usize;
                    images.push((start, [rows, shape[1]], *grid));
                    start += rows * shape[1];
                }
                let pixels = |(start, shape, grid): &'_ (usize, [usize; 2], [u32; 3])| {
                    (&values[*start..start + shape[0] * shape[1]], *shape, *grid)
                };
                let images: Vec<_> = images.iter().map(pixels).collect();
                let images: Vec<Pixels<'_>> = images
                    .iter()
                    .map(|(values, shape, grid)| Pixels { values, shape, grid: Some(*grid) })
                    .collect();
                tower.encode(&images).unwrap()
            }
        };
        let worst = |found: Vec<f32>, name: String| {
            let expected = floats(&name);
            assert_eq!(found.len(), expected.len(), "{name}");
            let errors = found.iter().zip(&expected).map(|(found, expected)| (found - expected).abs());
            let worst = errors.fold(0.0, f32::max);
            println!("{name}: {worst:e}");
            assert!(worst < 1e-3, "{name}: {worst:e}");
        };
        let rows = embeddings.iter().flat_map(|embedding| embedding.rows.clone()).collect();
        worst(rows, format!("v{case}.image_embeds"));
        for list in 0..tower.spec().deepstack.len() {
            let rows = embeddings.iter().flat_map(|embedding| embedding.deepstack[list].clone()).collect();
            worst(rows, format!("v{case}.deepstack.{list}"));
        }
        compared += 1;
    }
    assert!(compared > 0);
}

/// A model with a random tower.
struct Model {
    folder: TempDir,
    config: Json,
    weights: Weights,
}

/// Patches of the tests have 2 x 2 pixels.
const PATCH: usize = 2;
const OUT: usize = 12;

impl Model {
    fn new(config: Json, fill: impl Fn(&mut Weights)) -> Self {
        let text = json!({"model_type": "llama", "hidden_size": OUT, "num_hidden_layers": 1, "num_attention_heads": 1,
            "intermediate_size": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "vocab_size": 8});
        let mut weights = Weights::default();
        fill(&mut weights);
        let folder = tempfile::tempdir().unwrap();
        let mut written = config.clone();
        written["text_config"] = text;
        std::fs::write(folder.path().join("config.json"), written.to_string()).unwrap();
        let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = weights
            .tensors
            .iter()
            .map(|(name, (shape, values))| {
                (name.clone(), shape.clone(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
            })
            .collect();
        let views = bytes.iter().map(|(name, shape, bytes)| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
            (name.as_str(), view.unwrap())
        });
        safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
        Self { folder, config, weights }
    }

    fn tower(&self, threads: usize, step_rows: usize) -> VisionTower {
        tower(self.folder.path(), threads, step_rows)
    }

    /// Compares with `reference` of each picture, and results of all with those of each by itself.
    fn check(&self, shape: &[usize], grid: Option<[u32; 3]>, reference: impl Fn(&Self, &[f32]) -> Vec<Rows>) {
        let (mut random, pictures) = (Weights::default(), shape.iter().product::<usize>());
        let images: Vec<Vec<f32>> = (0..3).map(|_| random.random(pictures)).collect();
        let pixels: Vec<Pixels<'_>> = images.iter().map(|values| Pixels { values, shape, grid }).collect();
        let all = self.tower(3, 4096).encode(&pixels).unwrap();
        let mut one = self.tower(1, 64);
        for ((values, pixels), found) in images.iter().zip(&pixels).zip(&all) {
            // The same bits whatever is beside an image, for any step and number of threads.
            let alone = one.encode(std::slice::from_ref(pixels)).unwrap();
            assert_eq!(&alone[0], found);
            assert_eq!(one.rows(pixels).unwrap() * OUT, found.rows.len());
            let expected = reference(self, values);
            let lists = std::iter::once(&found.rows).chain(&found.deepstack);
            assert_eq!(expected.len(), 1 + found.deepstack.len());
            for (found, expected) in lists.zip(&expected) {
                let expected = expected.concat();
                assert_eq!(found.len(), expected.len());
                let errors =
                    found.iter().zip(&expected).map(|(found, expected)| (f64::from(*found) - expected).abs());
                let worst = errors.fold(0.0, f64::max);
                assert!(worst < 1e-4, "{worst:e}");
            }
        }
    }
}

/// A tower of the class CLIP or SigLIP.
fn clip(weights: &mut Weights, stem: &str, hidden: usize, (layers, patches): (usize, usize), class: bool) {
    let name = |rest: &str| format!("{stem}.{rest}");
    weights.put(name("embeddings.patch_embedding.weight"), &[hidden, 3, PATCH, PATCH]);
    if class {
        weights.put(name("embeddings.class_embedding"), &[hidden]);
        weights.norm(&name("pre_layrnorm"), hidden);
    } else {
        weights.put(name("embeddings.patch_embedding.bias"), &[hidden]);
    }
    weights.put(name("embeddings.position_embedding.weight"), &[patches + usize::from(class), hidden]);
    weights.norm(&name("post_layernorm"), hidden);
    for layer in 0..layers {
        let name = |rest: &str| name(&format!("encoder.layers.{layer}.{rest}"));
        for norm in ["layer_norm1", "layer_norm2"] {
            weights.norm(&name(norm), hidden);
        }
        for part in ["q_proj", "k_proj", "v_proj", "out_proj"] {
            weights.linear(&name(&format!("self_attn.{part}")), hidden, hidden);
        }
        weights.linear(&name("mlp.fc1"), 40, hidden);
        weights.linear(&name("mlp.fc2"), hidden, 40);
    }
}

fn clip_settings(kind: &str, layers: usize) -> Json {
    json!({"model_type": kind, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": layers,
        "num_attention_heads": 2, "image_size": 8, "patch_size": PATCH})
}

/// Layers that LLaVA's features come from, and what becomes of the class.
fn llava(features: Json, strategy: &str) -> Model {
    let count = features.as_array().map_or(1, Vec::len);
    let config = json!({"model_type": "llava", "vision_config": clip_settings("clip_vision_model", 3),
        "vision_feature_layer": features, "vision_feature_select_strategy": strategy});
    Model::new(config, |weights| {
        clip(weights, "vision_tower.vision_model", 24, (3, 16), true);
        weights.linear("multi_modal_projector.linear_1", 20, 24 * count);
        weights.linear("multi_modal_projector.linear_2", OUT, 20);
    })
}

#[test]
fn llava_reads_features_of_its_layers() {
    for (features, strategy) in [(json!(-2), "default"), (json!([1, -1]), "full"), (json!(0), "default")] {
        let model = llava(features, strategy);
        model.check(&[1, 3, 8, 8], None, |model, values| {
            vec![reference::llava(&model.weights, &model.config, values)]
        });
    }
}

#[test]
fn gemma3_pools_patches() {
    let config = json!({"model_type": "gemma3", "vision_config": clip_settings("siglip_vision_model", 2),
        "mm_tokens_per_image": 4});
    let model = Model::new(config, |weights| {
        clip(weights, "vision_tower.vision_model", 24, (2, 16), false);
        weights.put("multi_modal_projector.mm_soft_emb_norm.weight", &[24]);
        weights.put("multi_modal_projector.mm_input_projection_weight", &[24, OUT]);
    });
    let rows = |model: &Model, values: &[f32]| {
        let pictures = values.chunks(values.len() / 2);
        vec![pictures.flat_map(|values| reference::gemma3(&model.weights, &model.config, values)).collect()]
    };
    model.check(&[2, 3, 8, 8], None, rows);
}

#[test]
fn smolvlm_shuffles_patches_of_tiles() {
    let config = json!({"model_type": "smolvlm", "scale_factor": 2,
        "vision_config": clip_settings("smolvlm_vision", 2)});
    let model = Model::new(config, |weights| {
        clip(weights, "model.vision_model", 24, (2, 16), false);
        weights.put("model.connector.modality_projection.proj.weight", &[OUT, 4 * 24]);
    });
    let rows = |model: &Model, values: &[f32]| {
        let tiles = values.chunks(values.len() / 3);
        vec![tiles.flat_map(|values| reference::smolvlm(&model.weights, &model.config, values)).collect()]
    };
    model.check(&[3, 3, 8, 8], None, rows);
}

/// The blocks of a tower of Qwen's.
fn qwen_blocks(weights: &mut Weights, stem: &str, depth: usize, gated: bool) {
    for block in 0..depth {
        let name = |rest: &str| format!("{stem}.blocks.{block}.{rest}");
        weights.linear(&name("attn.qkv"), 48, 16);
        weights.linear(&name("attn.proj"), 16, 16);
        if gated {
            weights.put(name("norm1.weight"), &[16]);
            weights.put(name("norm2.weight"), &[16]);
            weights.linear(&name("mlp.gate_proj"), 20, 16);
            weights.linear(&name("mlp.up_proj"), 20, 16);
            weights.linear(&name("mlp.down_proj"), 16, 20);
        } else {
            weights.norm(&name("norm1"), 16);
            weights.norm(&name("norm2"), 16);
            weights.linear(&name("mlp.linear_fc1"), 20, 16);
            weights.linear(&name("mlp.linear_fc2"), 16, 20);
        }
    }
}

/// Two frames of 6 x 10 patches, of which windows of 4 x 4 cut off a part.
const GRID: [u32; 3] = [2, 6, 10];
const PATCHES: [usize; 2] = [120, 3 * 2 * PATCH * PATCH];

#[test]
fn qwen2_5_vl_sees_windows() {
    let config = json!({"model_type": "qwen2_5_vl", "vision_config": {"depth": 4, "hidden_size": 16,
        "intermediate_size": 20, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "window_size": 8, "fullatt_block_indexes": [1, 2], "out_hidden_size": OUT}});
    let model = Model::new(config, |weights| {
        weights.put("visual.patch_embed.proj.weight", &[16, 3, 2, PATCH, PATCH]);
        qwen_blocks(weights, "visual", 4, true);
        weights.put("visual.merger.ln_q.weight", &[16]);
        weights.linear("visual.merger.mlp.0", 64, 64);
        weights.linear("visual.merger.mlp.2", OUT, 64);
    });
    model.check(&PATCHES, Some(GRID), |model, values| {
        let frames = values.chunks(values.len() / 2);
        vec![
            frames
                .flat_map(|values| reference::qwen2_5(&model.weights, &model.config, values, (6, 10)))
                .collect(),
        ]
    });
}

fn qwen3_vl() -> Model {
    let config = json!({"model_type": "qwen3_vl", "vision_config": {"depth": 3, "hidden_size": 16,
        "intermediate_size": 20, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2], "out_hidden_size": OUT}});
    Model::new(config, |weights| {
        weights.put("model.visual.patch_embed.proj.weight", &[16, 3, 2, PATCH, PATCH]);
        weights.put("model.visual.patch_embed.proj.bias", &[16]);
        weights.put("model.visual.pos_embed.weight", &[16, 16]);
        qwen_blocks(weights, "model.visual", 3, false);
        let mergers = ["merger", "deepstack_merger_list.0", "deepstack_merger_list.1"];
        for (merger, width) in mergers.into_iter().zip([16, 64, 64]) {
            let stem = format!("model.visual.{merger}");
            weights.norm(&format!("{stem}.norm"), width);
            weights.linear(&format!("{stem}.linear_fc1"), 64, 64);
            weights.linear(&format!("{stem}.linear_fc2"), OUT, 64);
        }
    })
}

#[test]
fn qwen3_vl_gives_rows_of_several_layers() {
    qwen3_vl().check(&PATCHES, Some(GRID), |model, values| {
        let frames = values.chunks(values.len() / 2);
        let mut lists = vec![Rows::new(); 3];
        for values in frames {
            let found = reference::qwen3(&model.weights, &model.config, values, (6, 10));
            lists.iter_mut().zip(found).for_each(|(list, rows)| list.extend(rows));
        }
        lists
    });
}

#[test]
fn pixels_that_are_not_served_are_named() {
    let refused = |tower: &mut VisionTower, shape: &[usize], grid: Option<[u32; 3]>, fill: f32| {
        let values = vec![fill; shape.iter().product()];
        tower.encode(&[Pixels { values: &values, shape, grid }]).unwrap_err().to_string()
    };
    let mut square = llava(json!(-2), "default").tower(1, 16);
    assert!(refused(&mut square, &[1, 3, 8, 10], None, 0.0).contains("10 x 8 pixels, expected 8 x 8"));
    assert!(refused(&mut square, &[1, 4, 8, 8], None, 0.0).contains("expected [pictures, 3, height, width]"));
    assert!(refused(&mut square, &[1, 3, 8, 8], None, f32::NAN).contains("a value is NaN"));
    let values = [0.0; 8];
    let short = Pixels { values: &values, shape: &[1, 3, 8, 8], grid: None };
    assert!(
        square.encode(&[short]).unwrap_err().to_string().contains("8 values, expected those of the shape")
    );
    let mut any = qwen3_vl().tower(1, 64);
    let mut patches = |grid: [u32; 3]| {
        let count = grid.iter().product::<u32>() as usize;
        refused(&mut any, &[count, PATCHES[1]], Some(grid), 0.0)
    };
    assert!(patches([1, 10, 8]).contains("a picture of 80 patches, the limit is 64"));
    assert!(patches([1, 4, 7]).contains("7 x 4 patches, expected multiples of 2"));
    assert!(patches([1, 0, 4]).contains("expected 1 to"));
    let grid = Some([1, 4, 4]);
    assert!(
        refused(&mut any, &[12, PATCHES[1]], grid, 0.0).contains("12 patches, expected those of the grid")
    );
}
