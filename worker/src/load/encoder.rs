//! From a model file to an encoder.

use super::{
    EngineOptions, MAX_CONTEXT, Memory, Plan, Progress, backend, digest, environment, load_decoder, plan_for,
};
use crate::Error;
use crate::encoder::{Encoder, Layout, task};
use crate::kv_cache::memory::{MemoryFloor, MemoryRefused};
use model::ModelFile;
use model::spec::ModelSpec;
use model::tokenizer::Tokenizer;
use proto::message::{MAX_ENCODED_WIDTH, ModelTask};
use std::path::Path;
use std::sync::Arc;

/// Loads a model that encodes texts. Of the options `chunk` and `max_sequences` are the most tokens and texts of a
/// step, and `kv_bytes` is the most that keys and values may take; prefixes and placement do not apply.
pub fn encoder(path: &Path, options: &EngineOptions, progress: &mut Progress<'_>) -> Result<Encoder, Error> {
    let gguf = ModelFile::open(path)?;
    let spec = ModelSpec::from_file(&gguf)?;
    let width = match task(&spec) {
        ModelTask::Embed { width } | ModelTask::Rerank { scores: width } => width,
        ModelTask::Generate => {
            let instead = "`kvasir run` and `kvasir up` let it";
            return Err(Error::WrongTask { does: "generates text, it has no vectors to give", instead });
        }
    };
    if !(1..=MAX_ENCODED_WIDTH).contains(&width) {
        let reason = format!("it gives {width} values for a text; 1 to {MAX_ENCODED_WIDTH} are served");
        return Err(Error::Config { option: "model", reason });
    }
    let tokenizer = Arc::new(Tokenizer::from_metadata(gguf.metadata())?);
    let Plan { defaults, .. } = plan_for(&gguf, &spec, options)?;
    let positions = spec.embedding.positions.as_ref().map_or(usize::MAX, |table| table.rows);
    let longest = spec.context_length.min(positions).min(MAX_CONTEXT);
    let text_tokens = options.max_model_len.unwrap_or(longest).min(longest);
    let step_tokens = options.chunk.unwrap_or(defaults.chunk.value as usize).max(text_tokens);
    let step_texts = options.max_sequences.unwrap_or(defaults.max_seqs.value).max(1);
    let floor = MemoryFloor { bytes: defaults.floor_bytes.value };
    let refused = |refused: MemoryRefused| Error::KvMemory { reason: refused.to_string() };
    let memory = Memory::of(options)?;
    floor.admit(&memory, "weights", gguf.total_tensor_bytes()).map_err(refused)?;
    let model_digest = digest(&gguf, options)?;
    let device = backend(options, &environment)?;
    let layers = 0..spec.layers.len();
    let mut decoder = load_decoder(&gguf, spec, options, device, (layers, step_tokens), progress)?;
    let layout = Layout::new(&decoder, (step_tokens, step_texts), options.block_tokens)?;
    let bytes = layout.bytes() as u64;
    if let Some(limit) = options.kv_bytes.filter(|limit| *limit < bytes) {
        let reason = format!("a step of {step_tokens} tokens needs {bytes} bytes, the limit is {limit}");
        return Err(Error::KvMemory { reason });
    }
    let memory = memory.less(decoder.backend().memory());
    floor.admit(&memory, "keys and values of a step", bytes).map_err(refused)?;
    decoder.allocate_kv(layout.bytes())?;
    Ok(Encoder::new(decoder, tokenizer, layout, text_tokens, (model_digest, options.kv_type)))
}
