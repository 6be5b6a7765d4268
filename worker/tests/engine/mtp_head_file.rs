//! Model files with an MTP head (`nextn.*`), derived from those of the oracle set, which have none because
//! the oracle's library has no such module.

use model::gguf::writer::Writer;
use model::{GgmlType, ModelFile};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

/// Kinds of MTP heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Block {
    /// Random weights, with its own norm before the output. Hardly any draft token is accepted.
    Random,
    /// Like `Random`, with its own embedding and output matrix.
    Whole,
    /// Passes the token's embedding through, in a model whose layers add little to it. Many draft tokens are
    /// accepted, and some are not.
    Telling,
}

/// Factor on the weights of the layer outputs of a `Telling` model.
const DAMPED: f32 = 0.04;
const DAMPED_TENSORS: [&str; 5] = [
    "attn_output.weight",
    "ssm_out.weight",
    "ffn_down.weight",
    "ffn_down_exps.weight",
    "ffn_down_shexp.weight",
];

/// Folder of the set. This file is compiled into several crates, whose folders have different depths.
fn fixtures() -> PathBuf {
    let mut above =
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|folder| folder.join("tests/fixtures"));
    let named = std::env::var_os("KVASIR_FIXTURES").map(PathBuf::from);
    named.unwrap_or_else(|| above.find(|folder| folder.is_dir()).expect("tests/fixtures of the workspace"))
}

/// Writes a model of the set with such a head into a folder.
pub(crate) fn write(arch: &str, block: Block, folder: &Path) -> PathBuf {
    let file = ModelFile::open(fixtures().join(format!("tiny/{arch}/{arch}-f32.gguf"))).unwrap();
    let blocks: u32 = file.metadata().require(&format!("{arch}.block_count")).unwrap();
    let hidden: u32 = file.metadata().require(&format!("{arch}.embedding_length")).unwrap();
    let (at, hidden) = (blocks, u64::from(hidden));
    let mut metadata = file.metadata().clone();
    metadata.insert(format!("{arch}.block_count"), blocks + 1);
    metadata.insert(format!("{arch}.nextn_predict_layers"), 1_u32);

    let mut tensors: Vec<(String, Vec<u64>, Vec<f32>)> = Vec::new();
    for info in file.tensors() {
        assert_eq!(info.ty(), GgmlType::F32);
        let bytes = file.tensor_data(info.name()).unwrap();
        let mut values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        if block == Block::Telling && DAMPED_TENSORS.iter().any(|name| info.name().ends_with(name)) {
            values.iter_mut().for_each(|value| *value *= DAMPED);
        }
        if block == Block::Telling && info.name() == "token_embd.weight" {
            for row in values.chunks_exact_mut(hidden as usize) {
                let square: f32 = row.iter().map(|value| value * value).sum();
                let scale = (hidden as f32 / square).sqrt();
                row.iter_mut().for_each(|value| *value *= scale);
            }
        }
        tensors.push((info.name().to_owned(), info.dims().to_vec(), values));
    }
    let tied = tensors.iter().all(|(name, ..)| name != "output.weight");
    let vocab = tensors.iter().find(|(name, ..)| name == "token_embd.weight").unwrap().1[1];

    // The last layer of all models of the set has attention.
    let last = format!("blk.{}.", blocks - 1);
    let mut random = Random(u64::from(at) + block as u64);
    let mut own: Vec<(String, Vec<u64>)> = tensors
        .iter()
        .filter_map(|(name, dims, _)| Some((name.strip_prefix(&last)?.to_owned(), dims.clone())))
        .collect();
    let mut add = |name: &str, dims: &[u64]| own.push((format!("nextn.{name}.weight"), dims.to_vec()));
    add("eh_proj", &[2 * hidden, hidden]);
    add("enorm", &[hidden]);
    add("hnorm", &[hidden]);
    if block != Block::Telling {
        add("shared_head_norm", &[hidden]);
    }
    if block == Block::Whole {
        add("embed_tokens", &[hidden, vocab]);
        add("shared_head_head", &[hidden, vocab]);
    }
    for (name, dims) in own {
        let count = dims.iter().product::<u64>() as usize;
        let telling = block == Block::Telling;
        let values: Vec<f32> = match name.as_str() {
            // Row r is zero except for a one in column r.
            "nextn.eh_proj.weight" if telling => {
                (0..count as u64).map(|i| f32::from(u8::from(i % (2 * hidden) == i / (2 * hidden)))).collect()
            }
            "nextn.enorm.weight" if telling => vec![1.0; count],
            _ if name.contains("norm") => (0..count).map(|_| 1.0 + 0.3 * random.next()).collect(),
            _ => {
                let small = telling && DAMPED_TENSORS.contains(&name.as_str());
                let bound = (3.0 / dims[0] as f32).sqrt() * if small { DAMPED } else { 1.0 };
                (0..count).map(|_| bound * random.next()).collect()
            }
        };
        tensors.push((format!("blk.{at}.{name}"), dims, values));
    }

    if block == Block::Telling && tied {
        // Otherwise each token would be followed by itself.
        let values = (0..hidden * vocab).map(|_| random.next()).collect();
        tensors.push(("output.weight".to_owned(), vec![hidden, vocab], values));
    }

    let mut writer = Writer::new(metadata).unwrap();
    for (name, dims, _) in &tensors {
        writer.tensor(name, GgmlType::F32, dims).unwrap();
    }
    let path = folder.join(format!("{arch}-{block:?}.gguf"));
    let mut out = BufWriter::new(std::fs::File::create(&path).unwrap());
    let mut values = tensors.iter().map(|(.., values)| values);
    let bytes = |_: &_| values.next().unwrap().iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    writer.write(&mut out, bytes).unwrap();
    path
}

/// Random values between -1 and 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32 / (1 << 23) as f32) - 1.0
    }
}
