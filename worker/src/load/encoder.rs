//! From a model file to an encoder.

use super::hosted::{Admitted, HostedLoad, bytes_of};
use super::text_backends::{TextModel, load_encoder};
use super::{
    EngineOptions, Memory, Plan, Progress, backend, describe, digest, environment, load_decoder, plan_for,
    spec_of,
};
use crate::Error;
use crate::defaults::Defaults;
use engine::encoder::{Encoder, Layout, Limits, task};
use engine::kv_cache::memory::{MemoryFloor, MemoryRefused};
use engine::scheduler::MAX_CONTEXT;
use kernels::isa::Isa;
use model::ModelFile;
use model::spec::ModelSpec;
use proto::block::HASH_UNIT_TOKENS;
use proto::ids::ModelId;
use proto::message::MAX_ENCODED_WIDTH;
use proto::operation::Operation;
use proto::served_model::{BUILT_IN, ModelTask, ServedModel};
use std::path::Path;
use std::sync::Arc;
use text::tokenizer::Tokenizer;

/// Placeholder name, until the encoder is served under another one.
fn nameless() -> Result<ModelId, Error> {
    Ok(ModelId::new("model").map_err(transport::Error::from)?)
}

/// Loads an encoder with the backend that the environment and the files next to the model select
/// (`text_backends.rs`). The options `chunk` and `max_sequences` limit the tokens and texts of a step,
/// `kv_bytes` limits keys and values. Options for prefixes and placement are ignored.
pub fn encoder(path: &Path, options: &EngineOptions, progress: &mut Progress<'_>) -> Result<Encoder, Error> {
    let operation = match super::task(path)? {
        ModelTask::Embed { .. } => Operation::Embed,
        ModelTask::Rerank { .. } => Operation::Rerank,
        ModelTask::Generate | ModelTask::GenerateFromImages => {
            let instead = "`kvasir run` and `kvasir up` let it";
            return Err(Error::WrongTask { does: "generates text and has no vectors", instead });
        }
    };
    super::refuse_adapters(options, "a model that encodes texts")?;
    let model = TextModel { path: path.to_owned(), options: options.clone() };
    load_encoder(operation, &model, environment, progress)
}

/// What all backends need of a model.
struct Read {
    file: ModelFile,
    spec: ModelSpec,
    tokenizer: Arc<Tokenizer>,
    defaults: Defaults,
    limits: Limits,
    /// Reserved memory of a shared device.
    admitted: Option<Admitted>,
}

impl Read {
    fn new(path: &Path, options: &EngineOptions) -> Result<Self, Error> {
        let file = ModelFile::open(path)?;
        let spec = spec_of(&file, options)?;
        if let ModelTask::Embed { width } | ModelTask::Rerank { scores: width } = task(&spec)
            && !(1..=MAX_ENCODED_WIDTH).contains(&width)
        {
            let reason =
                format!("the model returns {width} values for a text, must be 1 to {MAX_ENCODED_WIDTH}");
            return Err(engine::Error::Config { option: "model", reason }.into());
        }
        let tokenizer = Tokenizer::from_metadata(file.metadata())?;
        let template = text::pairs::template(file.metadata(), &tokenizer)?;
        let tokenizer = Arc::new(tokenizer.comparing(template));
        let plan = plan_for(&file, &spec, options)?;
        let admit = |hosted: &HostedLoad| hosted.admit(bytes_of(&file, &spec, &plan, options));
        let admitted = options.hosted.as_ref().map(admit).transpose()?;
        let Plan { defaults, .. } = plan;
        let positions = spec.embedding.positions.as_ref().map_or(usize::MAX, |table| table.rows);
        let text_tokens = spec.context_length.min(positions).min(MAX_CONTEXT);
        let step_tokens = options.chunk.unwrap_or(defaults.chunk.value as usize).max(text_tokens);
        let step_texts = options.max_sequences.unwrap_or(defaults.max_seqs.value).max(1);
        let limits = Limits { vocab: spec.vocab, text_tokens, step_tokens, step_texts };
        Ok(Self { file, spec, tokenizer, defaults, limits, admitted })
    }
}

/// Loads an encoder from the bundle's ONNX file for the operation. `path` provides the tokenizer, the limits
/// and the meaning of the values.
pub(super) fn onnx_encoder(
    path: &Path,
    file: &Path,
    operation: Operation,
    options: &EngineOptions,
) -> Result<Encoder, Error> {
    let Read { file: gguf, spec, tokenizer, defaults, limits, admitted } = Read::new(path, options)?;
    let floor = MemoryFloor { bytes: defaults.floor_bytes.value };
    let bytes = std::fs::metadata(file).map_or(0, |file| file.len());
    let refused = |refused: MemoryRefused| engine::Error::KvMemory { reason: refused.to_string() };
    floor.admit(&Memory::of(options)?, "weights", bytes).map_err(refused)?;
    let (model_digest, runs) = (digest(&gguf, options)?, file_digest(file)?);
    let hex = |digest: &[u8; 32]| digest[..8].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let served = ServedModel {
        id: nameless()?,
        model_digest,
        tokenizer_digest: tokenizer.digest(),
        max_model_len: limits.text_tokens as u32,
        layers: (0, spec.layers.len() as u32),
        numeric_class: format!("{}/cpu/{}/onnx-{}", hex(&model_digest), Isa::detect().name(), hex(&runs)),
        engine: BUILT_IN.to_owned(),
        hit_tokens: HASH_UNIT_TOKENS as u32,
        block_tokens: options.block_tokens as u32,
        task: task(&spec),
    };
    let threads = options.threads.unwrap_or_else(|| engine::cgroup::cpus().get());
    let threads = (threads, options.cpus.as_deref());
    let encoder = Encoder::of_onnx(file, operation, &spec, tokenizer, limits, served, threads)?;
    Ok(match admitted {
        // The runtime's own memory is not known.
        Some(admitted) => encoder.with_share(admitted.keep()),
        None => encoder,
    })
}

fn file_digest(path: &Path) -> Result<[u8; 32], Error> {
    let mut hasher = blake3::Hasher::new();
    let read = std::fs::File::open(path).and_then(|file| hasher.update_reader(file).map(drop));
    read.map_err(|source| engine::Error::Io { what: format!("cannot read {}", path.display()), source })?;
    Ok(hasher.finalize().into())
}

/// Loads an encoder that runs on this engine's own kernels.
pub(super) fn kernel_encoder(
    path: &Path,
    options: &EngineOptions,
    progress: &mut Progress<'_>,
) -> Result<Encoder, Error> {
    let Read { file: gguf, spec, tokenizer, defaults, limits, admitted } = Read::new(path, options)?;
    let Limits { text_tokens, step_tokens, step_texts, .. } = limits;
    let floor = MemoryFloor { bytes: defaults.floor_bytes.value };
    let refused = |refused: MemoryRefused| engine::Error::KvMemory { reason: refused.to_string() };
    let memory = Memory::of(options)?;
    floor.admit(&memory, "weights", gguf.total_tensor_bytes()).map_err(refused)?;
    let hashing = options.digests.as_ref().map(|cache| cache.begin(&gguf)).transpose()?;
    let device = backend(options, &environment)?;
    let layers = 0..spec.layers.len();
    let mut decoder = load_decoder((&gguf, true), spec, options, device, (layers, step_tokens), progress)?;
    hashing.map(|hashing| hashing.finish(&gguf)).transpose()?;
    let model_digest = gguf.digest()?;
    let layout = Layout::new(&decoder, (step_tokens, step_texts), options.block_tokens)?;
    let bytes = layout.bytes() as u64;
    if let Some(limit) = options.kv_bytes.filter(|limit| *limit < bytes) {
        let reason = format!("a step of {step_tokens} tokens needs {bytes} bytes, the limit is {limit}");
        return Err(engine::Error::KvMemory { reason }.into());
    }
    let memory = memory.behind(decoder.backend().memory(), options)?;
    floor.admit(&memory, "keys and values of a step", bytes).map_err(refused)?;
    decoder.allocate_kv(layout.bytes())?;
    let (digests, lengths) = ((model_digest, tokenizer.digest()), (text_tokens, options.block_tokens));
    let served = describe(nameless()?, &decoder, digests, lengths, options.kv_type);
    let share = admitted.map(|admitted| admitted.settle(decoder.backend().memory()));
    let encoder = Encoder::new(decoder, tokenizer, layout, text_tokens, served);
    Ok(match share {
        Some(share) => encoder.with_share(share),
        None => encoder,
    })
}
