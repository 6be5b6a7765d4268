//! Loading what guesses for a model.

use super::{
    Arriving, EngineOptions, Memory, ModelFile, ModelSpec, backend, digest, environment, generates, host,
    load_decoder,
};
use crate::Error;
use crate::decoder::Decoder;
use crate::engine::DraftModel;
use crate::kv_cache::memory::MemoryFloor;
use crate::speculation::Guesses;
use crate::weights::TensorSource;
use model::spec::{AppendedSpec, AssistantSpec};
use model::tokenizer::Tokenizer;
use proto::stage::StageDrafterV1;
use std::path::Path;

/// Who guesses, ready to do so.
pub(super) enum Guesser {
    Nobody,
    Ngrams,
    /// The decoder's own block or assistant, or a model.
    Drafter(Option<Box<DraftModel>>),
}

/// Rows of a drafter's largest step.
const ROWS: usize = 512;

/// The block behind the last layer of the model in `file`, of architecture `arch`, which guesses.
///
/// # Errors
/// [`Error::Config`] where there is none.
pub(super) fn appended(file: &ModelFile, arch: &str) -> Result<AppendedSpec, Error> {
    AppendedSpec::from_file(file)?.ok_or_else(|| {
        let reason = format!(
            "draft-mtp without a file has the model's own block guess, and this {arch} has none \
             ({arch}.nextn_predict_layers is not there or 0); a drafter's file is named by draft-mtp:MODEL"
        );
        Error::Config { option: "spec", reason }
    })
}

/// Loads who guesses for the model in `decoder`, which is that of `file`, has its tokenizer and decodes so many sequences at
/// once; before its arena of `arena_bytes` is allocated.
pub(super) fn guesser(
    options: &EngineOptions,
    file: &ModelFile,
    decoder: &mut Decoder,
    (tokenizer, sequences): (&Tokenizer, usize),
    (floor, arena_bytes): (MemoryFloor, u64),
) -> Result<Guesser, Error> {
    let admit = |what: &'static str, bytes: u64| {
        let memory = Memory::of(options)?.behind(decoder.backend().memory(), options)?;
        let admitted = floor.admit(&memory, what, bytes);
        admitted.map_err(|refused| Error::KvMemory { reason: refused.to_string() })
    };
    match &options.guesses {
        Guesses::Off => Ok(Guesser::Nobody),
        Guesses::Ngram => Ok(Guesser::Ngrams),
        Guesses::Appended => {
            load_appended(options, file, decoder, sequences)?;
            Ok(Guesser::Drafter(None))
        }
        Guesses::Assistant(path) => {
            let drafter = ModelFile::open(path)?;
            let spec = AssistantSpec::from_file(&drafter)?;
            admit("the drafter", drafter.total_tensor_bytes())?;
            with_source(options, file, |source| {
                decoder.load_assistant(&spec, (&drafter, source), sequences)
            })?;
            Ok(Guesser::Drafter(None))
        }
        Guesses::Model(path) => {
            let file = ModelFile::open(path)?;
            let spec = ModelSpec::from_file(&file)?;
            generates(&spec)?;
            check_vocabulary(
                path,
                &spec,
                &Tokenizer::from_metadata(file.metadata())?,
                (&*decoder, tokenizer),
            )?;
            // Its caches are a small part of what the model's own may take.
            let cache_bytes = arena_bytes / 4;
            admit("the drafter", file.total_tensor_bytes() + cache_bytes)?;
            let options = EngineOptions { arrivals: None, ..options.clone() };
            let rows = ROWS.max(sequences);
            let layers = 0..spec.layers.len();
            let backend = backend(&options, &environment)?;
            let drafter = load_decoder(&file, spec, &options, backend, (layers, rows), &mut |_, _| {})?;
            let model = DraftModel::new(drafter, (options.block_tokens, rows), cache_bytes)?;
            Ok(Guesser::Drafter(Some(Box::new(model))))
        }
    }
}

fn load_appended(
    options: &EngineOptions,
    file: &ModelFile,
    decoder: &mut Decoder,
    sequences: usize,
) -> Result<(), Error> {
    let spec = appended(file, &decoder.spec().arch)?;
    with_source(options, file, |source| decoder.load_appended(&spec, source, sequences))
}

/// Loads something of the model in `file`, parts of which may still be on their way.
fn with_source<T>(options: &EngineOptions, file: &ModelFile, load: impl FnOnce(&dyn TensorSource) -> T) -> T {
    match &options.arrivals {
        None => load(file),
        Some(arrivals) => load(&Arriving { file, arrivals }),
    }
}

/// Who guesses at the last stage of a replica, and the layer from which on all must be there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Elsewhere {
    pub(crate) drafter: StageDrafterV1,
    pub(crate) from_layer: usize,
}

/// The layer of the model with `spec` from which on all must be where `guesses` are made; none where no layer need be there.
///
/// # Errors
/// [`Error::Config`] for a drafter of another model.
pub(super) fn from_layer(guesses: &Guesses, spec: &ModelSpec) -> Result<Option<usize>, Error> {
    let Guesses::Assistant(path) = guesses else { return Ok(None) };
    let assistant = AssistantSpec::from_file(&ModelFile::open(path)?)?;
    match assistant.from_layer(spec) {
        Some(layer) => Ok(Some(layer)),
        None => {
            let reason = format!("{} is a drafter for layers that this model has not", path.display());
            Err(Error::Config { option: "spec", reason })
        }
    }
}

/// What the other stages of the model with `spec` are told of who guesses; none where that is this stage's to do.
///
/// # Errors
/// As [`from_layer`].
pub(super) fn elsewhere(
    options: &EngineOptions,
    (file, spec): (&ModelFile, &ModelSpec),
    sequences: usize,
) -> Result<Option<Elsewhere>, Error> {
    let drafter = match &options.guesses {
        Guesses::Assistant(path) => {
            StageDrafterV1::Assistant { digest: digest(&ModelFile::open(path)?, options)? }
        }
        Guesses::Appended => {
            appended(file, &spec.arch)?;
            StageDrafterV1::Appended { sequences: u32::try_from(sequences).unwrap_or(u32::MAX) }
        }
        Guesses::Off | Guesses::Ngram | Guesses::Model(_) => return Ok(None),
    };
    let from_layer = from_layer(&options.guesses, spec)?.unwrap_or(spec.layers.len());
    Ok(Some(Elsewhere { drafter, from_layer }))
}

/// Loads who guesses at the last stage, of which `file` is the model; before its arena is allocated.
///
/// # Errors
/// [`Error::Config`] where that is not what this worker was told to guess with, or does not go with the stage's layers.
pub(super) fn at_last_stage(
    drafter: StageDrafterV1,
    options: &EngineOptions,
    file: &ModelFile,
    decoder: &mut Decoder,
) -> Result<(), Error> {
    let wanted = match drafter {
        StageDrafterV1::Assistant { digest } => digest,
        StageDrafterV1::Appended { sequences } => {
            return load_appended(options, file, decoder, sequences as usize);
        }
    };
    let unknown = |has: &str| {
        let wanted: String = wanted.iter().map(|byte| format!("{byte:02x}")).collect();
        let reason = format!(
            "the replica's drafter is blake3:{wanted}, and this worker {has}: start it with the same --spec as the first \
             stage"
        );
        Error::Config { option: "spec", reason }
    };
    let Guesses::Assistant(path) = &options.guesses else { return Err(unknown("has none")) };
    let own = ModelFile::open(path)?;
    if digest(&own, options)? != wanted {
        return Err(unknown("has another"));
    }
    let spec = AssistantSpec::from_file(&own)?;
    let floor = MemoryFloor { bytes: crate::defaults::floor(host(options)?).value };
    let memory = Memory::of(options)?;
    let admitted = floor.admit(&memory, "the drafter", own.total_tensor_bytes());
    admitted.map_err(|refused| Error::KvMemory { reason: refused.to_string() })?;
    with_source(options, file, |source| decoder.load_assistant(&spec, (&own, source), usize::MAX))
}

/// Refuses a drafter whose tokens are others.
fn check_vocabulary(
    path: &Path,
    spec: &ModelSpec,
    own: &Tokenizer,
    (decoder, tokenizer): (&Decoder, &Tokenizer),
) -> Result<(), Error> {
    let (vocab, wanted) = (spec.vocab, decoder.spec().vocab);
    if vocab == wanted && own.digest() == tokenizer.digest() {
        return Ok(());
    }
    let reason = format!(
        "{} has another vocabulary ({vocab} tokens) than the model it is to guess for ({wanted})",
        path.display()
    );
    Err(Error::Config { option: "spec", reason })
}
