//! The tokens of a Whisper model, from its `tokenizer.json` and `config.json`.

use super::rules::Rules;
use crate::Error;
use metadata::{Array, Metadata, Strings, Value};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use text::tokenizer::Tokenizer;

/// Maximum bytes of each file.
const MAX_FILE: u64 = 64 << 20;
const SUPPRESSED: usize = 1 << 16;
/// Languages without spaces between words.
const UNSPACED: [&str; 6] = ["zh", "ja", "th", "lo", "my", "yue"];

pub(super) struct Words {
    tokenizer: Tokenizer,
    pub(super) rules: Rules,
    /// Tokens of languages, by language code.
    languages: BTreeMap<String, u32>,
    pub(super) start: u32,
    /// Token that precedes the prompt.
    pub(super) before: u32,
    pub(super) transcribe: u32,
    pub(super) translate: u32,
    pub(super) silence: u32,
    /// Layer and number of the decoder's heads whose attention follows the audio. Empty if not known.
    pub(super) alignment_heads: Vec<[usize; 2]>,
}

/// `config.json` of CTranslate2 or of Hugging Face, and the latter's `generation_config.json`.
#[derive(Default, Deserialize)]
pub(super) struct Config {
    alignment_heads: Option<Vec<[usize; 2]>>,
    #[serde(alias = "suppress_tokens")]
    suppress_ids: Option<Vec<u32>>,
    #[serde(alias = "begin_suppress_tokens")]
    suppress_ids_begin: Option<Vec<u32>>,
    /// Missing: the tokens between the start and the first task.
    lang_ids: Option<Vec<u32>>,
    /// The network's shape, in Hugging Face's file.
    pub(super) d_model: Option<usize>,
    pub(super) encoder_attention_heads: Option<u32>,
    pub(super) decoder_attention_heads: Option<u32>,
}

impl Config {
    /// Reads the files of a folder.
    ///
    /// # Errors
    /// [`Error::Artefact`] for a file that is not valid.
    pub(super) fn load(folder: &Path) -> Result<Self, Error> {
        let config: Self = read(&folder.join("config.json"))?;
        let generation = folder.join("generation_config.json");
        if !generation.is_file() {
            return Ok(config);
        }
        let generation: Self = read(&generation)?;
        Ok(Self {
            alignment_heads: generation.alignment_heads.or(config.alignment_heads),
            suppress_ids: generation.suppress_ids.or(config.suppress_ids),
            suppress_ids_begin: generation.suppress_ids_begin.or(config.suppress_ids_begin),
            ..config
        })
    }
}

#[derive(Deserialize)]
pub(super) struct File {
    pub(super) model: Bpe,
    #[serde(default)]
    pub(super) added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
pub(super) struct Bpe {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) vocab: HashMap<String, u32>,
    pub(super) merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Merge {
    Line(String),
    Pair(String, String),
}

#[derive(Deserialize)]
pub(super) struct Added {
    pub(super) id: u32,
    pub(super) content: String,
}

fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, Error> {
    let failed = |source| Error::Io { what: format!("cannot read {}", path.display()), source };
    let wrong = |reason: String| Error::Artefact { path: path.to_owned(), reason };
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    if bytes > MAX_FILE {
        return Err(wrong(format!("it has {bytes} bytes, the limit is {MAX_FILE}")));
    }
    let bytes = std::fs::read(path).map_err(failed)?;
    serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))
}

impl Words {
    /// Reads the files of a folder. `tokens` is the size of the network's vocabulary.
    ///
    /// # Errors
    /// [`Error::Artefact`] if the files are not valid.
    pub(super) fn load(folder: &Path, tokens: usize) -> Result<Self, Error> {
        let config = Config::load(folder)?;
        let path = folder.join("tokenizer.json");
        Self::new(read(&path)?, config, tokens).map_err(|reason| Error::Artefact { path, reason })
    }

    pub(super) fn new(
        File { model, added_tokens }: File,
        config: Config,
        tokens: usize,
    ) -> Result<Self, String> {
        if let Some(kind) = model.kind.filter(|kind| kind != "BPE") {
            return Err(format!("it is of type {kind:?}, BPE is served"));
        }
        let mut texts = vec![None; tokens];
        let named = model.vocab.iter().map(|(text, id)| (text, *id, 1));
        for (text, id, kind) in named.chain(added_tokens.iter().map(|added| (&added.content, added.id, 3))) {
            let slot = texts
                .get_mut(id as usize)
                .ok_or_else(|| format!("token {id} is not of the {tokens} of the network"))?;
            *slot = Some((text.as_str(), kind));
        }
        let special = |text: &str| {
            let of = |added: &&Added| added.content == text && (added.id as usize) < tokens;
            added_tokens.iter().find(of).map(|added| added.id)
        };
        let need = |text: &str| special(text).ok_or_else(|| format!("it has no token {text}"));
        let end = need("<|endoftext|>")?;
        let [start, transcribe, translate] =
            [need("<|startoftranscript|>")?, need("<|transcribe|>")?, need("<|translate|>")?];
        let lang_ids = config.lang_ids.unwrap_or_else(|| (start + 1..transcribe.min(translate)).collect());
        let alignment_heads = config.alignment_heads.unwrap_or_default();
        let rules = Rules {
            end,
            no_times: need("<|notimestamps|>")?,
            suppressed: config.suppress_ids.unwrap_or_default(),
            suppressed_first: config.suppress_ids_begin.unwrap_or_default(),
        };
        let listed = [rules.suppressed.len(), rules.suppressed_first.len(), lang_ids.len()];
        if listed.iter().chain([&alignment_heads.len()]).any(|listed| *listed > SUPPRESSED) {
            return Err(format!("a list of config.json has more than {SUPPRESSED} entries"));
        }
        // One token for each step of 20 ms in a window, and one for its end.
        if rules.first_time() as usize + super::network::POSITIONS + 1 != tokens {
            let found = tokens.saturating_sub(rules.first_time() as usize);
            return Err(format!(
                "the network has {found} tokens for times, it must be {}",
                super::network::POSITIONS + 1
            ));
        }
        let language = |id: u32| {
            let (text, _) = texts.get(id as usize).copied().flatten()?;
            let code = text.strip_prefix("<|")?.strip_suffix("|>")?;
            Some((code.to_owned(), id))
        };
        let languages: Option<BTreeMap<_, _>> = lang_ids.iter().map(|id| language(*id)).collect();
        let languages = languages.ok_or("config.json lists a language that has no token")?;
        if languages.is_empty() {
            return Err("config.json lists no languages: models of English alone are not served".to_owned());
        }
        let silence = special("<|nospeech|>").map_or_else(|| need("<|nocaptions|>"), Ok)?;
        let names = (0u32..).zip(&texts).map(|(id, text)| match text {
            Some((text, _)) => (*text).to_owned(),
            None if rules.is_time(id) => format!("<|{:.2}|>", f64::from(id - rules.first_time()) * 0.02),
            None => format!("<|unused {id}|>"),
        });
        let merges = model.merges.iter().map(|merge| match merge {
            Merge::Line(line) => line.clone(),
            Merge::Pair(left, right) => format!("{left} {right}"),
        });
        let kinds = texts.iter().map(|text| text.map_or(3, |(_, kind)| kind)).collect();
        let metadata = Metadata::from_iter([
            ("tokenizer.ggml.model", Value::String("gpt2".to_owned())),
            ("tokenizer.ggml.pre", Value::String("gpt-2".to_owned())),
            ("tokenizer.ggml.tokens", Value::Array(Array::String(names.collect::<Strings>()))),
            ("tokenizer.ggml.merges", Value::Array(Array::String(merges.collect::<Strings>()))),
            ("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds))),
            ("tokenizer.ggml.eos_token_id", Value::U32(end)),
        ]);
        Ok(Self {
            tokenizer: Tokenizer::from_metadata(&metadata).map_err(|error| error.to_string())?,
            start,
            before: need("<|startofprev|>")?,
            transcribe,
            translate,
            silence,
            rules,
            languages,
            alignment_heads,
        })
    }

    /// The token of a language; `None` if the model does not have it.
    pub(super) fn language(&self, code: &str) -> Option<u32> {
        self.languages.get(code).copied()
    }

    /// All languages: code and token.
    pub(super) fn languages(&self) -> impl Iterator<Item = (&str, u32)> {
        self.languages.iter().map(|(code, token)| (code.as_str(), *token))
    }

    /// Whether a language writes spaces between words.
    pub(super) fn writes_spaces(&self, language: u32) -> bool {
        !UNSPACED.iter().any(|code| self.language(code) == Some(language))
    }

    /// The tokens of a prompt.
    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, false)
    }

    /// The text of tokens. Timestamps and other special tokens have none.
    pub(super) fn decode(&self, tokens: &[u32]) -> String {
        let text: Vec<u32> = tokens.iter().copied().filter(|token| *token < self.rules.end).collect();
        self.tokenizer.decode(&text, true)
    }
}
