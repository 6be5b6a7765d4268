//! Models on several workers: loads the first stage with its engine, and the layer ranges of later stages.

use super::{
    EngineOptions, LoadedModel, Memory, ModelFile, ModelSpec, Plan, Prepared, Progress, assemble, backend,
    base_class, drafter, environment, generates, hosted, load_decoder, plan, plan_for, prepare_on, spec_of,
};
use crate::Error;
use crate::defaults::{MIB, STATES_PER_SEQUENCE, TOKENS_PER_SEQUENCE, arena_cap, max_sequences};
use engine::decoder::Decoder;
use engine::kv_cache::memory::MemoryFloor;
use engine::speculation::SpeculativeMethod;
use kernels::backend::BackendInfo;
use model::costs::{KvSize, ModelCosts};
use pipeline::{Replica, stage_ranges};
use proto::stage::StageDrafter;
use std::ops::Range;
use std::path::Path;

/// Loads the first stage of a model whose other layers are on `replica`'s workers, and its engine, for use in
/// one process with a fixed key. Blocks while the other stages load, so it must not be called on a thread of
/// the replica's runtime.
///
/// # Errors
/// [`Error::Shards`] if the model cannot be cut into that many ranges,
/// [`engine::Error::StageLost`] if another stage refuses or fails.
pub fn open_replica(
    path: &Path,
    options: &EngineOptions,
    replica: Replica,
    progress: &mut Progress<'_>,
) -> Result<LoadedModel, Error> {
    check_options(options)?;
    assemble(prepare_on(path, options, backend(options, &environment)?, Some(replica), progress)?)
}

/// Refuses options that do not work with several stages.
fn check_options(options: &EngineOptions) -> Result<(), Error> {
    if options.block_layout == engine::kv_cache::BlockLayout::Contiguous {
        let reason = "consecutive blocks require that all layers are in one process".to_owned();
        return Err(engine::Error::Config { option: "contiguous", reason }.into());
    }
    Ok(())
}

/// Like [`open_replica`], but without a key, which arrives later. The caches of all stages together get at
/// most `cache_bytes`.
pub(crate) fn prepare_replica(
    path: &Path,
    options: &EngineOptions,
    replica: Replica,
    cache_bytes: u64,
) -> Result<Prepared, Error> {
    check_options(options)?;
    let plan = plan(path, options)?;
    let (needs, host) = (plan.needs, plan.host);
    // As in `defaults`, summed over all stages: no more than is useful, and no more than the cap of each
    // machine.
    let max_sequences = max_sequences(host, needs);
    let longest = u64::from(needs.max_context).saturating_mul(needs.kv_bytes_per_token);
    let states = STATES_PER_SEQUENCE.saturating_mul(needs.state_bytes);
    let useful =
        longest.saturating_add(states).saturating_mul(max_sequences).div_ceil(MIB).saturating_mul(MIB);
    let quarters = arena_cap(host).saturating_mul(replica.stages() as u64);
    let kv_bytes = options.kv_bytes.unwrap_or(useful.min(quarters)).min(cache_bytes) / MIB * MIB;
    let short =
        TOKENS_PER_SEQUENCE.saturating_mul(needs.kv_bytes_per_token).saturating_add(needs.state_bytes);
    let fit = (kv_bytes / short.max(1)).clamp(1, max_sequences) as usize;
    let options = EngineOptions {
        kv_bytes: Some(kv_bytes),
        max_sequences: options.max_sequences.or(Some(fit)),
        ..options.clone()
    };
    // A replica of one stage is loaded like any other model.
    let replica = (replica.stages() > 1).then_some(replica);
    prepare_on(path, &options, backend(&options, &environment)?, replica, &mut |_, _| {})
}

/// Bytes that a layer range takes in steps of `rows` rows, without its caches. Without `rows`: in those of a first stage.
pub(crate) fn range_bytes(
    path: &Path,
    options: &EngineOptions,
    layers: Range<usize>,
    rows: Option<usize>,
) -> Result<u64, Error> {
    let file = ModelFile::open(path)?;
    let spec = spec_of(&file, options)?;
    check_range(&spec, &layers)?;
    let Plan { needs, defaults, .. } = plan_for(&file, &spec, options)?;
    let first = || {
        let chunk = options.chunk.unwrap_or(defaults.chunk.value as usize);
        options.max_rows.unwrap_or(defaults.max_batch_tokens.value as usize).max(chunk)
    };
    Ok(hosted::range_bytes((&file, &spec), &needs, layers, rows.unwrap_or_else(first)))
}

/// The part of a replica's caches that a layer range has, of `cache_bytes` in total.
pub(crate) fn range_cache(
    path: &Path,
    options: &EngineOptions,
    layers: Range<usize>,
    cache_bytes: u64,
) -> Result<u64, Error> {
    let file = ModelFile::open(path)?;
    let spec = spec_of(&file, options)?;
    check_range(&spec, &layers)?;
    let costs = ModelCosts::of_file(&spec, &file);
    let share = |layers: Range<usize>| {
        let range = costs.range(layers);
        let elements = range.kv_bytes(spec.context_length as u64, 1, KvSize::F16) + 8 * range.state_elements;
        u128::from(elements)
    };
    let (own, all) = (share(layers), share(0..spec.layers.len()).max(1));
    Ok(u64::try_from(u128::from(cache_bytes) * own / all).unwrap_or(u64::MAX))
}

fn check_range(spec: &ModelSpec, layers: &Range<usize>) -> Result<(), Error> {
    if layers.is_empty() || layers.end > spec.layers.len() {
        let reason = format!("layers {layers:?} cannot be cut out of {}", spec.layers.len());
        return Err(engine::Error::StageStep { reason }.into());
    }
    Ok(())
}

/// Checks that the model in a file can be cut into `shards` layer ranges with this drafter.
///
/// # Errors
/// [`Error::Shards`] if not; [`Error::WrongTask`] for a model that does not generate text;
/// [`engine::Error::Config`] for a drafter of another model.
pub fn check_shards(path: &Path, speculative_method: &SpeculativeMethod, shards: usize) -> Result<(), Error> {
    let spec = ModelSpec::from_file(&ModelFile::open(path)?)?;
    generates(&spec)?;
    stage_ranges(&spec, drafter::from_layer(speculative_method, &spec)?, shards)?;
    Ok(())
}

/// Loads a layer range and its drafter if the numeric class is `class`. Returns the actual class; the decoder
/// is `None` if it differs.
///
/// # Errors
/// [`engine::Error::StageStep`] for a range that cannot be cut out, [`engine::Error::Config`] for a drafter
/// that does not fit.
pub(crate) fn stage(
    path: &Path,
    options: &EngineOptions,
    layers: Range<usize>,
    (class, drafter): (&str, Option<StageDrafter>),
) -> Result<(String, Option<Decoder>), Error> {
    let gguf = ModelFile::open(path)?;
    let spec = spec_of(&gguf, options)?;
    generates(&spec)?;
    let cuts = spec.cut_points();
    let ends = |layer: usize| layer == spec.layers.len() || cuts.contains(&layer);
    if layers.is_empty() || !cuts.contains(&layers.start) || !ends(layers.end) {
        let reason = format!("layers {layers:?} cannot be cut out of {}", spec.layers.len());
        return Err(engine::Error::StageStep { reason }.into());
    }
    let backend = backend(options, &environment)?;
    let own = self::class(backend.info(), &gguf.digest()?, &spec, options);
    if own != class {
        return Ok((own, None));
    }
    let rows = options.max_rows.unwrap_or(1);
    let mut decoder = load_decoder((&gguf, false), spec, options, backend, (layers, rows), &mut |_, _| {})?;
    if let Some(drafter) = drafter {
        drafter::load_at_last_stage(drafter, options, &gguf, &mut decoder)?;
    }
    Ok((own, Some(decoder)))
}

/// Checks that there is memory for a stage's caches before they are allocated.
pub(crate) fn admit_kv(path: &Path, options: &EngineOptions, bytes: u64) -> Result<(), Error> {
    let floor = MemoryFloor { bytes: plan(path, options)?.defaults.floor_bytes.value };
    let admitted = floor.admit(&Memory::of(options)?, "a stage's KV cache", bytes);
    Ok(admitted.map_err(|refused| engine::Error::KvMemory { reason: refused.to_string() })?)
}

/// The numeric class that all stages of a replica must share. It contains the requested state type, because
/// which heads actually get the narrower type is decided layer by layer.
pub(super) fn class(
    info: &BackendInfo,
    model_digest: &[u8; 32],
    spec: &ModelSpec,
    options: &EngineOptions,
) -> String {
    let class = base_class(info, model_digest, spec, options.kv_type);
    match options.state_type.class() {
        Some(state) => format!("{class}/{state}"),
        None => class,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_of_another_numeric_class_is_not_loaded() {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
        let options = EngineOptions { threads: Some(1), max_rows: Some(8), ..EngineOptions::default() };
        for arch in ["llama", "granitehybrid", "gemma4"] {
            let path = tiny.join(arch).join(format!("{arch}-f32.gguf"));
            let spec = ModelSpec::from_file(&ModelFile::open(&path).unwrap()).unwrap();
            let layers = spec.cut_points()[0]..spec.layers.len();
            let (class, other) = stage(&path, &options, layers.clone(), ("another", None)).unwrap();
            assert!(other.is_none(), "{arch}: a stage of class {class}");
            let (_, own) = stage(&path, &options, layers.clone(), (&class, None)).unwrap();
            assert_eq!(own.unwrap().spec().arch, spec.arch);
        }
    }
}
