//! The models that the API offers: what the coordinator needs of a model file, namely tokenizer, chat
//! template and defaults.

mod deployed;
mod facts;
mod images;

use arc_swap::ArcSwap;
pub use deployed::{Deployed, DeployedModel, LoadProgress};
pub use facts::ModelFacts;
use hub::catalog::{self, Verification};
pub use images::{Images, PlaceError, PromptWithImages, SeenImage};
use metadata::{Metadata, Value};
use model::checkpoint::{has_weights, tokenizer_metadata};
use model::costs::ModelCosts;
use model::header::ModelHeader;
use model::{ModelFile, ModelSpec};
use proto::ids::ModelId;
use proto::message::{TokenIds, TokenPart};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use text::Tokenizer;
use text::chat_template::{ChatTemplate, Prompt};
use text::cpu_time::CpuDeadline;
use text::dialect::Dialect;
use text::infill::Infill;
use text::sampling::SamplingDefaults;
use text::tokenizer::KnownPart;
pub use vision::limits::MAX_FILE_BYTES;

/// Memory of each model for the memo of tokenized texts.
const MEMO_BYTES: usize = 64 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelEntry {
    /// The model's name in the API; workers register it under the same name.
    pub id: ModelId,
    /// A GGUF file, any file of a split set, a safetensors checkpoint, or the folder of a Hugging Face
    /// repository. Read once at start, for tokenizer and chat template.
    pub path: PathBuf,
}

/// Why a model cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum ModelsError {
    /// The file cannot be used.
    #[error("model {id}: {source}")]
    File { id: ModelId, source: Box<dyn std::error::Error + Send + Sync> },
    /// Two entries have the same name.
    #[error("model {0} is configured twice")]
    Twice(ModelId),
}

/// A model as the API uses it.
#[derive(Debug)]
pub struct OfferedModel {
    pub id: ModelId,
    pub tokenizer: Tokenizer,
    /// `None` if the file has no usable template.
    pub template: Option<ChatTemplate>,
    /// How the model writes tool calls and reasoning.
    pub dialect: Arc<Dialect>,
    /// The model's preprocessing of images. `None`: it sees none. An error: the file has one that is not supported.
    images: Result<Option<Images>, vision::Error>,
    /// Its tokens for a gap between two texts. `None`: it has none.
    infill: Option<Infill>,
    /// Default sampling parameters.
    pub sampling: SamplingDefaults,
    /// Costs of the layers. `None` for a model that generates no text.
    pub costs: Option<ModelCosts>,
    /// The model's longest sequence, in tokens.
    pub context: usize,
    pub facts: ModelFacts,
    /// How the file was verified. `None` if it was not downloaded.
    pub verification: Option<Verification>,
    /// If set, texts of control tokens in chats become control tokens.
    raw_chats: bool,
    /// Digest of the chat templates and of the sampling defaults.
    prompting: [u8; 32],
    /// Time spent on tokenizing.
    tokenised: Tokenised,
}

/// Nanoseconds spent on tokenizing, and bytes tokenized.
#[derive(Debug, Default)]
struct Tokenised {
    nanos: AtomicU64,
    bytes: AtomicU64,
}

impl OfferedModel {
    fn of_metadata(
        id: ModelId,
        metadata: &Metadata,
        context: usize,
        raw_chats: bool,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let mut tokenizer = Tokenizer::from_metadata(metadata)?;
        let images = Images::of(metadata, &mut tokenizer);
        if let Err(error) = &images {
            tracing::warn!(model = %id, %error, "the model serves no images");
        }
        let infill = Infill::from_metadata(metadata, &mut tokenizer)?;
        let pairs = text::pairs::template(metadata, &tokenizer)?;
        let tokenizer = tokenizer.comparing(pairs).remembering(MEMO_BYTES);
        let template = ChatTemplate::from_metadata(metadata, &tokenizer).unwrap_or_else(|error| {
            // Completions need no template.
            tracing::warn!(model = %id, %error, "the model serves no chats: its template cannot be used");
            None
        });
        let defaults = catalog::find(id.name()).map_or(SamplingDefaults::PLAIN, |entry| entry.sampling);
        let sampling = defaults.or_file(metadata)?;
        let dialect = Arc::new(Dialect::of(template.as_ref(), &tokenizer));
        let prompting = prompting(metadata, &sampling);
        Ok(Self {
            id,
            tokenizer,
            template,
            dialect,
            images,
            infill,
            sampling,
            costs: None,
            context,
            facts: ModelFacts::of(metadata, std::iter::empty()),
            verification: None,
            raw_chats,
            prompting,
            tokenised: Tokenised::default(),
        })
    }

    /// The tokens of `text`, with special tokens parsed. If `bos` is set, the tokens that begin every text of the
    /// model, mostly BOS, are prepended unless the text begins with them.
    pub fn tokens(&self, text: &str, bos: bool) -> Vec<u32> {
        self.tokenize(text, &[], bos).0
    }

    /// Like [`tokens`](Self::tokens), with the known parts of the prompt.
    pub fn prompt(&self, text: &str, bos: bool) -> TokenIds {
        to_token_ids(self.tokenize(text, &[], bos))
    }

    /// The tokens of a text of which nothing becomes control tokens.
    pub fn plain(&self, text: &str) -> Vec<u32> {
        self.tokenize(text, std::slice::from_ref(&(0..text.len())), false).0
    }

    /// The prompt for what is between two texts. `None`: the model has no tokens for a gap. `bos`: as in
    /// [`tokens`](Self::tokens).
    pub fn infill(&self, before: &[u32], after: &str, bos: bool) -> Option<TokenIds> {
        let prompt = self.infill?.prompt(before, &self.plain(after));
        let begin = if bos { self.tokenizer.before() } else { &[] };
        Some([begin, &prompt].concat().into())
    }

    /// The tokens of a chat. Only the template's own text becomes control tokens, unless `raw_chats` is set.
    pub fn chat(&self, prompt: &Prompt, bos: bool) -> TokenIds {
        let quoted = if self.raw_chats { &[][..] } else { &prompt.quoted };
        to_token_ids(self.tokenize(&prompt.text, quoted, bos))
    }

    /// Like [`prompt`](Self::prompt), with the limits of [`Tokenizer::encode_prompt_shortly`].
    pub fn prompt_shortly(&self, text: &str, bos: bool, deadline: &CpuDeadline) -> Option<TokenIds> {
        self.tokenize_within(text, &[], bos, Some(deadline)).map(to_token_ids)
    }

    /// Like [`chat`](Self::chat), with the limits of [`Tokenizer::encode_prompt_shortly`].
    pub fn chat_shortly(&self, prompt: &Prompt, bos: bool, deadline: &CpuDeadline) -> Option<TokenIds> {
        let quoted = if self.raw_chats { &[][..] } else { &prompt.quoted };
        self.tokenize_within(&prompt.text, quoted, bos, Some(deadline)).map(to_token_ids)
    }

    fn tokenize(&self, text: &str, quoted: &[Range<usize>], bos: bool) -> (Vec<u32>, Vec<KnownPart>) {
        // `None` occurs only with a time limit.
        self.tokenize_within(text, quoted, bos, None).unwrap_or_default()
    }

    fn tokenize_within(
        &self,
        text: &str,
        quoted: &[Range<usize>],
        bos: bool,
        deadline: Option<&CpuDeadline>,
    ) -> Option<(Vec<u32>, Vec<KnownPart>)> {
        let started = Instant::now();
        let (mut tokens, mut parts) = match deadline {
            Some(deadline) => self.tokenizer.encode_prompt_shortly(text, quoted, deadline)?,
            None => self.tokenizer.encode_prompt(text, quoted),
        };
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.tokenised.nanos.fetch_add(nanos, Ordering::Relaxed);
        self.tokenised.bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
        let before = self.tokenizer.before();
        if bos && !tokens.starts_with(before) {
            tokens.splice(0..0, before.iter().copied());
            parts.iter_mut().for_each(|part| part.end += before.len());
            match *before {
                [only] => parts.insert(0, KnownPart::lone(only)),
                // Only one token has a name.
                _ => parts.clear(),
            }
        }
        Some((tokens, parts))
    }

    /// The time spent on tokenizing so far, and the number of bytes.
    pub fn tokenised(&self) -> (Duration, u64) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (Duration::from_nanos(get(&self.tokenised.nanos)), get(&self.tokenised.bytes))
    }
}

fn prompting(metadata: &Metadata, sampling: &SamplingDefaults) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    let mut text = |text: &str| {
        hash.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    };
    for (key, value) in metadata.iter() {
        if let (true, Value::String(template)) = (key.starts_with("tokenizer.chat_template"), value) {
            text(key);
            text(template);
        }
    }
    text(&format!("{sampling:?}"));
    hash.finalize().into()
}

fn to_token_ids((tokens, parts): (Vec<u32>, Vec<KnownPart>)) -> TokenIds {
    let part = |KnownPart { name, end }| TokenPart { name, end };
    TokenIds::from_parts(tokens, parts.into_iter().map(part).collect())
}

/// All models of the API: those of the configuration, and deployed ones.
#[derive(Debug)]
pub struct Models {
    configured: Vec<Arc<OfferedModel>>,
    deployed: ArcSwap<Deployed>,
    /// Whether deployed models may be missing, because the agreed table has not been read since the start.
    incomplete: AtomicBool,
    raw_chats: bool,
}

impl Models {
    /// Reads the model files. `raw_chats`: whether texts of control tokens in chats become control tokens.
    pub fn open(entries: &[ModelEntry], raw_chats: bool) -> Result<Self, ModelsError> {
        let mut configured: Vec<Arc<OfferedModel>> = Vec::with_capacity(entries.len());
        let downloads = catalog::Store::from_env().ok();
        for ModelEntry { id, path } in entries {
            if configured.iter().any(|m| m.id == *id) {
                return Err(ModelsError::Twice(id.clone()));
            }
            let file = |source| ModelsError::File { id: id.clone(), source };
            let opened = match ModelFile::open(path) {
                Ok(opened) => Some(opened),
                // A folder has what makes text of a model that an engine of another project may serve.
                Err(error) if path.is_dir() => {
                    if has_weights(path) {
                        tracing::warn!(model = %id, %error, "only engines of other projects can serve this model");
                    }
                    None
                }
                Err(error) => return Err(file(error.into())),
            };
            let metadata = match &opened {
                Some(opened) => opened.metadata().clone(),
                None => tokenizer_metadata(path).map_err(|error| file(error.into()))?,
            };
            // Tokenizer and template suffice to offer the model; workers refuse a model that they cannot
            // compute.
            let spec = opened.as_ref().and_then(|opened| ModelSpec::from_file(opened).ok());
            let generates = spec.as_ref().filter(|spec| spec.logits().is_some());
            let costs =
                generates.zip(opened.as_ref()).map(|(spec, opened)| ModelCosts::of_file(spec, opened));
            let verification = downloads.as_ref().and_then(|store| store.verification(path));
            let context = spec.map_or(0, |spec| spec.context_length);
            let tensors = opened.iter().flat_map(ModelFile::tensors);
            let facts = ModelFacts::of(&metadata, tensors);
            let offered =
                OfferedModel::of_metadata(id.clone(), &metadata, context, raw_chats).map_err(file)?;
            configured.push(Arc::new(OfferedModel { costs, facts, verification, ..offered }));
        }
        Ok(Self { configured, deployed: ArcSwap::default(), incomplete: AtomicBool::new(false), raw_chats })
    }

    /// The version of a deployed model, from its file's metadata.
    ///
    /// # Errors
    ///
    /// If the metadata has no usable tokenizer.
    pub fn version(
        &self,
        id: ModelId,
        header: &ModelHeader,
        context: usize,
    ) -> Result<OfferedModel, Box<dyn std::error::Error + Send + Sync>> {
        let spec = ModelSpec::from_header(header).ok().filter(|spec| spec.logits().is_some());
        let costs = spec.map(|spec| ModelCosts::of_header(&spec, header));
        Ok(OfferedModel {
            costs,
            facts: ModelFacts::of(header.metadata(), header.tensors()),
            ..OfferedModel::of_metadata(id, header.metadata(), context, self.raw_chats)?
        })
    }

    /// The model of this name. Of a deployed model, the version that serves; `model@digest` names one version.
    pub fn get(&self, id: &str) -> Option<Arc<OfferedModel>> {
        let configured = self.configured.iter().find(|m| m.id.as_str() == id);
        configured.cloned().or_else(|| self.deployed.load().get(id))
    }

    /// Like [`get`](Self::get), but of a model with a canary, the version of this request. `share` returns a number that
    /// is equal for all requests of a conversation.
    pub fn choose(&self, id: &str, share: impl FnOnce() -> u64) -> Option<Arc<OfferedModel>> {
        let configured = self.configured.iter().find(|m| m.id.as_str() == id);
        configured.cloned().or_else(|| self.deployed.load().choose(id, share))
    }

    /// The model if there is exactly one.
    pub fn only(&self) -> Option<Arc<OfferedModel>> {
        match (self.configured.as_slice(), self.deployed.load().names().as_slice()) {
            ([model], []) => Some(Arc::clone(model)),
            ([], [name]) => self.get(name),
            _ => None,
        }
    }

    /// All models and all versions of deployed ones, in configured order.
    pub fn iter(&self) -> impl Iterator<Item = Arc<OfferedModel>> + use<> {
        self.configured.clone().into_iter().chain(self.deployed.load().versions())
    }

    /// The models of the configuration.
    pub fn configured(&self) -> &[Arc<OfferedModel>] {
        &self.configured
    }

    /// The deployed models, as this coordinator knows them.
    pub fn deployed(&self) -> Arc<Deployed> {
        self.deployed.load_full()
    }

    pub fn set_deployed(&self, deployed: Deployed) {
        self.deployed.store(Arc::new(deployed));
    }

    /// Whether deployed models may be missing. A model that is not found may then exist.
    pub fn is_incomplete(&self) -> bool {
        self.incomplete.load(Ordering::Acquire)
    }

    pub fn set_incomplete(&self, incomplete: bool) {
        self.incomplete.store(incomplete, Ordering::Release);
    }

    /// Digests of the chat templates and sampling defaults. Coordinators that differ in them turn the same
    /// request into different prompts.
    pub fn prompting_digests(&self) -> HashMap<ModelId, [u8; 32]> {
        self.configured.iter().map(|m| (m.id.clone(), m.prompting)).collect()
    }

    /// Digests of the tokenizers. A worker that registers one of these models must have the same digest.
    pub fn tokenizer_digests(&self) -> HashMap<ModelId, [u8; 32]> {
        self.configured.iter().map(|m| (m.id.clone(), m.tokenizer.digest())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// A name that is not plain matches no model, whatever it would be as a path.
        #[test]
        fn sec_model_name(
            name in r"[a-zA-Z0-9._/%\\\x00\u{2024}\u{ff0e} -]{0,100}",
            trick in prop::sample::select(vec!["", "../", "..%2f", "%2e%2e/", "/etc/passwd", "\0", "\u{2024}\u{2024}/", "\\"]),
        ) {
            let models = Models::open(&[], false).unwrap();
            let name = format!("{trick}{name}");
            prop_assert!(models.get(&name).is_none());
            let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
            let ok = (1..=ModelId::MAX_LEN).contains(&name.len()) && name.bytes().all(plain);
            prop_assert_eq!(ModelId::new(name).is_ok(), ok);
        }
    }
}
