//! Memory of a model whose weights a server of another project holds.

use super::ExternalEngineError;
use crate::Error;
use crate::load::{EngineOptions, HostedLoad, model_digest};
use engine::scheduler::MAX_CONTEXT;
use external::EngineKind;
use model::costs::{KvSize, ModelCosts};
use model::{ModelFile, ModelSpec};
use proto::deployment::ModelFacts;
use proto::served_model::ModelTask;
use std::path::Path;
use text::tokenizer::Tokenizer;

/// Estimate of what a server takes beside weights and caches: its runtime, buffers of a step, the tokenizer.
const SERVER_BYTES: u64 = 512 << 20;
/// The cache takes at most this part of the budget, whatever the model's longest sequence.
const CACHE_DIVISOR: u64 = 4;

/// Memory and length of a model at a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ServerNeeds {
    /// Tokens of the longest sequence.
    pub(crate) context: u32,
    /// Bytes of its keys and values, as f16.
    pub(crate) cache_bytes: u64,
    /// Bytes of the whole server.
    pub(crate) bytes: u64,
}

impl ServerNeeds {
    /// `stated`: bytes of a server, as the operator knows them.
    fn of(file: &ModelFile, spec: &ModelSpec, budget: u64, stated: Option<u64>) -> Self {
        let costs = ModelCosts::of_file(spec, file).range(0..spec.layers.len());
        let cache = |tokens: u64| costs.kv_token_bytes(tokens, KvSize::F16);
        let most = budget / CACHE_DIVISOR;
        let (mut context, mut too_long) = (0, spec.context_length.min(MAX_CONTEXT) as u64 + 1);
        while too_long - context > 1 {
            let middle = context + (too_long - context) / 2;
            if cache(middle) <= most { context = middle } else { too_long = middle }
        }
        let (context, cache_bytes) = (context.max(1), cache(context.max(1)));
        let estimate = file.total_tensor_bytes().saturating_add(cache_bytes).saturating_add(SERVER_BYTES);
        Self { context: context as u32, cache_bytes, bytes: stated.unwrap_or(estimate) }
    }
}

/// Content of the model in a file, and what a server of it needs. See [`ServerNeeds`] for `stated`.
pub(crate) fn server_facts(
    path: &Path,
    options: &EngineOptions,
    (kind, stated): (EngineKind, Option<u64>),
) -> Result<(ModelFacts, ServerNeeds), Error> {
    let file = ModelFile::open(path)?;
    let mut spec = ModelSpec::from_file(&file)?;
    if spec.logits().is_none() {
        // Kvasir's engine may serve it: this is no fault of the files.
        return Err(ExternalEngineError::Encodes { kind }.into());
    }
    let facts = ModelFacts {
        digest: model_digest(path, options)?,
        tokenizer_digest: Tokenizer::from_metadata(file.metadata())?.digest(),
        task: ModelTask::Generate,
        context: spec.context_length.min(MAX_CONTEXT) as u32,
        needed_bytes: 0,
    };
    options.max_model_len.into_iter().for_each(|tokens| spec.limit_context(tokens));
    let budget = options.hosted.as_ref().and_then(HostedLoad::limit).unwrap_or(u64::MAX);
    let needs = ServerNeeds::of(&file, &spec, budget, stated);
    let facts = ModelFacts { needed_bytes: needs.bytes, ..facts };
    Ok((facts, needs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_of_a_server_has_the_longest_sequence_that_a_quarter_of_the_budget_holds() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/llama/llama-f32.gguf");
        let file = ModelFile::open(path).unwrap();
        let spec = ModelSpec::from_file(&file).unwrap();
        let own = spec.context_length as u32;
        let wide = ServerNeeds::of(&file, &spec, 1 << 40, None);
        assert_eq!(wide.context, own);
        assert_eq!(wide.bytes, file.total_tensor_bytes() + wide.cache_bytes + SERVER_BYTES);
        let narrow = ServerNeeds::of(&file, &spec, 2 * wide.cache_bytes, None);
        assert_eq!((narrow.context, narrow.cache_bytes), (own / 2, wide.cache_bytes / 2));
        assert_eq!(ServerNeeds::of(&file, &spec, 0, None).context, 1);
        assert_eq!(ServerNeeds { bytes: 7, ..wide }, ServerNeeds::of(&file, &spec, 1 << 40, Some(7)));
    }
}
