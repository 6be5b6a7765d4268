//! Loads drafters.

use super::{
    Arriving, EngineOptions, Memory, ModelFile, ModelSpec, backend, digest, environment, generates, host,
    load_decoder,
};
use crate::Error;
use engine::decoder::Decoder;
use engine::engine::DraftModel;
use engine::kv_cache::memory::MemoryFloor;
use engine::speculation::SpeculativeMethod;
use engine::weights::TensorSource;
use model::costs::{DrafterCosts, DrafterStage};
use model::spec::{AssistantSpec, MtpHeadSpec};
use pipeline::LastStageDrafter;
use pipeline::weight_distribution::Arrivals;
use proto::placement::{Drafter, OfferedDrafter};
use proto::stage::StageDrafter;
use std::path::Path;
use text::tokenizer::Tokenizer;

/// A loaded drafter.
pub(super) enum LoadedDrafter {
    Off,
    Ngrams,
    /// An MTP head or an assistant, which the decoder of this worker or of the last stage contains.
    InDecoder,
    DraftModel(Box<DraftModel>),
}

/// Rows of a drafter's largest step.
const ROWS: usize = 512;

/// The MTP head of the model in `file`, which has architecture `arch`.
///
/// # Errors
/// [`engine::Error::Config`] if the model has none.
pub(super) fn mtp_head(file: &ModelFile, arch: &str) -> Result<MtpHeadSpec, Error> {
    MtpHeadSpec::from_file(file)?.ok_or_else(|| {
        let reason = format!(
            "draft-mtp uses the model's own MTP head, and this {arch} has none \
             ({arch}.nextn_predict_layers is not there or 0); a drafter's file is named by draft-mtp:MODEL"
        );
        engine::Error::Config { option: "spec", reason }.into()
    })
}

/// Loads the drafter for the model in `decoder`, loaded from `file`, which uses `tokenizer` and decodes
/// `sequences` at once. Must be called before its arena of `arena_bytes` is allocated.
pub(super) fn load_drafter(
    options: &EngineOptions,
    file: &ModelFile,
    decoder: &mut Decoder,
    (tokenizer, sequences): (&Tokenizer, usize),
    (floor, arena_bytes): (MemoryFloor, u64),
) -> Result<LoadedDrafter, Error> {
    let admit = |purpose: &'static str, bytes: u64| {
        let memory = Memory::of(options)?.behind(decoder.backend().memory(), options)?;
        let admitted = floor.admit(&memory, purpose, bytes);
        Ok::<_, Error>(admitted.map_err(|refused| engine::Error::KvMemory { reason: refused.to_string() })?)
    };
    match &options.speculative_method {
        SpeculativeMethod::Off => Ok(LoadedDrafter::Off),
        SpeculativeMethod::Ngram => Ok(LoadedDrafter::Ngrams),
        SpeculativeMethod::MtpHead => {
            load_mtp_head(options, file, decoder, sequences)?;
            Ok(LoadedDrafter::InDecoder)
        }
        SpeculativeMethod::Assistant(path) => {
            let (drafter, spec) = assistant(path)?;
            admit("the drafter", drafter.total_tensor_bytes())?;
            load_assistant(options, (file, &drafter), &spec, decoder, sequences)?;
            Ok(LoadedDrafter::InDecoder)
        }
        SpeculativeMethod::Model(path) => {
            let (file, spec) = draft_model(path)?;
            check_vocabulary(
                path,
                &spec,
                &name_file_in_error(path, Tokenizer::from_metadata(file.metadata()))?,
                (&*decoder, tokenizer),
            )?;
            // The drafter's caches get a quarter of the model's.
            let cache_bytes = arena_bytes / 4;
            admit("the drafter", file.total_tensor_bytes() + cache_bytes)?;
            let arrivals = options.arrivals.as_ref().map(Arrivals::of_drafter);
            let options = EngineOptions { arrivals, ..options.clone() };
            let rows = ROWS.max(sequences);
            let layers = 0..spec.layers.len();
            let backend = backend(&options, &environment)?;
            let drafter =
                load_decoder((&file, false), spec, &options, backend, (layers, rows), &mut |_, _| {})?;
            let model = DraftModel::new(drafter, (options.block_tokens, rows), cache_bytes)?;
            Ok(LoadedDrafter::DraftModel(Box::new(model)))
        }
    }
}

fn load_mtp_head(
    options: &EngineOptions,
    file: &ModelFile,
    decoder: &mut Decoder,
    sequences: usize,
) -> Result<(), Error> {
    let spec = mtp_head(file, &decoder.spec().arch)?;
    Ok(with_source(options, file, |source| decoder.load_mtp_head(&spec, source, sequences))?)
}

/// Loads a drafter that reads the caches in the decoder. The first file is the model, the second the drafter.
fn load_assistant(
    options: &EngineOptions,
    (model, drafter): (&ModelFile, &ModelFile),
    spec: &AssistantSpec,
    decoder: &mut Decoder,
    rows: usize,
) -> Result<(), Error> {
    let arrivals = options.arrivals.as_ref().map(Arrivals::of_drafter);
    let of_drafter = EngineOptions { arrivals, ..options.clone() };
    Ok(with_source(options, model, |model| {
        with_source(&of_drafter, drafter, |drafter| decoder.load_assistant(spec, (drafter, model), rows))
    })?)
}

/// Opens a drafter that reads a model's caches.
fn assistant(path: &Path) -> Result<(ModelFile, AssistantSpec), Error> {
    let file = name_file_in_error(path, ModelFile::open(path))?;
    let spec = name_file_in_error(path, AssistantSpec::from_file(&file))?;
    Ok((file, spec))
}

/// Opens a draft model.
fn draft_model(path: &Path) -> Result<(ModelFile, ModelSpec), Error> {
    let file = name_file_in_error(path, ModelFile::open(path))?;
    let spec = name_file_in_error(path, ModelSpec::from_file(&file))?;
    generates(&spec)?;
    Ok((file, spec))
}

/// Converts an error in a drafter's file into one that names that file, so that it is not attributed to the
/// model. Errors of the shard store stay, since missing chunks can be fetched again.
fn name_file_in_error<T>(path: &Path, read: Result<T, impl Into<Error>>) -> Result<T, Error> {
    read.map_err(|error| match error.into() {
        error @ Error::Engine(engine::Error::Model(model::Error::Store(_))) => error,
        error => {
            engine::Error::Config { option: "spec", reason: format!("{}: {error}", path.display()) }.into()
        }
    })
}

/// Digest of a drafter's file.
pub(crate) fn digest_of(path: &Path, options: &EngineOptions) -> Result<[u8; 32], Error> {
    digest(&name_file_in_error(path, ModelFile::open(path))?, options)
}

/// Costs of the drafter `speculative_method` next to the model in `file`. `None` for drafters without costs.
///
/// # Errors
/// [`engine::Error::Config`] for a drafter of another model, or a model without an MTP head.
pub(super) fn costs(
    speculative_method: &SpeculativeMethod,
    (file, spec): (&ModelFile, &ModelSpec),
) -> Result<Option<DrafterCosts>, Error> {
    match speculative_method {
        SpeculativeMethod::Off | SpeculativeMethod::Ngram => Ok(None),
        SpeculativeMethod::MtpHead => {
            Ok(Some(DrafterCosts::of_mtp_head(&mtp_head(file, &spec.arch)?, file, spec)))
        }
        SpeculativeMethod::Assistant(path) => {
            let (drafter, assistant) = assistant(path)?;
            let costs = DrafterCosts::of_assistant(&assistant, &drafter, spec);
            costs.map(Some).ok_or_else(|| of_another_model(path))
        }
        SpeculativeMethod::Model(path) => {
            let (drafter, spec) = draft_model(path)?;
            Ok(Some(DrafterCosts::of_model(&spec, &drafter)))
        }
    }
}

/// The drafter that a worker of the pool registers with the model in `path`.
///
/// # Errors
/// Those of [`costs`].
pub(crate) fn offered(path: &Path, options: &EngineOptions) -> Result<Option<OfferedDrafter>, Error> {
    let file = ModelFile::open(path)?;
    let spec = ModelSpec::from_file(&file)?;
    let Some(costs) = costs(&options.speculative_method, (&file, &spec))? else { return Ok(None) };
    let drafter = match &options.speculative_method {
        SpeculativeMethod::Assistant(path) => Drafter::Assistant(digest_of(path, options)?),
        SpeculativeMethod::Model(path) => Drafter::Model(digest_of(path, options)?),
        SpeculativeMethod::Off | SpeculativeMethod::Ngram | SpeculativeMethod::MtpHead => Drafter::MtpHead,
    };
    let from_layer = match costs.stage {
        DrafterStage::First => spec.layers.len(),
        DrafterStage::Last { from_layer } => from_layer,
    };
    Ok(Some(OfferedDrafter {
        model_digest: digest(&file, options)?,
        drafter,
        from_layer: u32::try_from(from_layer).unwrap_or(u32::MAX),
        weight_bytes: costs.weight_bytes,
        reads_embedding: costs.reads_embedding,
        kv_elements: costs.kv_elements,
        state_elements: costs.state_elements,
    }))
}

/// Loads a part of the model in `file`, whose chunks may still be arriving.
fn with_source<T>(options: &EngineOptions, file: &ModelFile, load: impl FnOnce(&dyn TensorSource) -> T) -> T {
    match &options.arrivals {
        None => load(file),
        Some(arrivals) => load(&Arriving { file, arrivals }),
    }
}

/// First layer of the model with `spec` that must be at the stage that drafts. `None` if no layer must be
/// there.
///
/// # Errors
/// [`engine::Error::Config`] for a drafter of another model.
pub(super) fn from_layer(
    speculative_method: &SpeculativeMethod,
    spec: &ModelSpec,
) -> Result<Option<usize>, Error> {
    let SpeculativeMethod::Assistant(path) = speculative_method else { return Ok(None) };
    let (_, assistant) = assistant(path)?;
    assistant.from_layer(spec).map(Some).ok_or_else(|| of_another_model(path))
}

fn of_another_model(path: &Path) -> Error {
    let reason = format!("{} is a drafter for layers that this model does not have", path.display());
    engine::Error::Config { option: "spec", reason }.into()
}

/// The drafter that the last stage of the model with `spec` must load. `None` if the first stage drafts.
///
/// # Errors
/// Those of [`from_layer`].
pub(super) fn last_stage_drafter(
    options: &EngineOptions,
    (file, spec): (&ModelFile, &ModelSpec),
    sequences: usize,
) -> Result<Option<LastStageDrafter>, Error> {
    let drafter = match &options.speculative_method {
        SpeculativeMethod::Assistant(path) => StageDrafter::Assistant { digest: digest_of(path, options)? },
        SpeculativeMethod::MtpHead => {
            mtp_head(file, &spec.arch)?;
            StageDrafter::MtpHead { sequences: u32::try_from(sequences).unwrap_or(u32::MAX) }
        }
        SpeculativeMethod::Off | SpeculativeMethod::Ngram | SpeculativeMethod::Model(_) => return Ok(None),
    };
    let from_layer = from_layer(&options.speculative_method, spec)?.unwrap_or(spec.layers.len());
    Ok(Some(LastStageDrafter { drafter, from_layer }))
}

/// Loads the drafter at the last stage of the model in `file`, before the arena is allocated. `options` name
/// the drafter's file, if it has one.
///
/// # Errors
/// [`engine::Error::Config`] if the drafter does not fit the stage's layers.
pub(super) fn load_at_last_stage(
    drafter: StageDrafter,
    options: &EngineOptions,
    file: &ModelFile,
    decoder: &mut Decoder,
) -> Result<(), Error> {
    if let StageDrafter::MtpHead { sequences } = drafter {
        return load_mtp_head(options, file, decoder, sequences as usize);
    }
    let SpeculativeMethod::Assistant(path) = &options.speculative_method else {
        let reason = "this stage runs the drafter, but has no drafter file".to_owned();
        return Err(engine::Error::Invariant(reason).into());
    };
    let (own, spec) = assistant(path)?;
    let floor = MemoryFloor { bytes: crate::defaults::floor(host(options)?).value };
    let memory = Memory::of(options)?;
    let admitted = floor.admit(&memory, "the drafter", own.total_tensor_bytes());
    admitted.map_err(|refused| engine::Error::KvMemory { reason: refused.to_string() })?;
    load_assistant(options, (file, &own), &spec, decoder, usize::MAX)
}

/// Refuses a drafter with another vocabulary or tokenizer.
fn check_vocabulary(
    path: &Path,
    spec: &ModelSpec,
    own: &Tokenizer,
    (decoder, tokenizer): (&Decoder, &Tokenizer),
) -> Result<(), Error> {
    let (vocab, expected) = (spec.vocab, decoder.spec().vocab);
    if vocab == expected && own.digest() == tokenizer.digest() {
        return Ok(());
    }
    let reason = format!(
        "the vocabulary of the drafter {} ({vocab} tokens) differs from the model's ({expected})",
        path.display()
    );
    Err(engine::Error::Config { option: "spec", reason }.into())
}
