//! Speech to text with Whisper's network, on this engine's own kernels. Its files are those of CTranslate2
//! ([`file`]), of Hugging Face or of whisper.cpp ([`named`]).

mod align;
mod file;
mod named;
mod network;
mod rules;
mod source;
mod transcript;
mod vocabulary;
mod window;
mod words;

use crate::Error;
use crate::bundle::Bundle;
use crate::compute::Compute;
use crate::log_mel::LogMel;
pub(crate) use crate::log_mel::RATE;
use crate::session::{AudioModel, Session};
use crate::speech_rule::invalid;
use file::Weights;
use kernels::denormals::FlushDenormals;
use kernels::registry::Refusal;
use named::{Named, Vocabulary};
use network::Network;
use proto::operation::{Operation, OperationError, OperationOptions, OperationOutput, TranscribeOptions};
use sound::Resampler;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use transcript::{Task, Transcript};
use words::{Config, Words};

/// Weights in CTranslate2's and in Hugging Face's form, with [`BESIDE`].
const CTRANSLATE2: &str = "model.bin";
const SAFETENSORS: &str = "model.safetensors";
const BESIDE: [&str; 2] = ["config.json", "tokenizer.json"];
/// Accepted sample rates. Audio is resampled to [`RATE`].
const RATES: std::ops::RangeInclusive<u32> = 8_000..=192_000;
/// Maximum seconds of a recording.
const MAX_SECONDS: u64 = 1_800;
/// Maximum number of open recordings. Each may have 115 MB of samples and as much of features.
const MAX_SESSIONS: u32 = 8;
/// Maximum bytes of a prompt. Only its last tokens are used.
const MAX_PROMPT: usize = 16 << 10;
/// Maximum number of threads; more gain little.
const MAX_THREADS: usize = 8;

pub(crate) struct Whisper {
    network: Network,
    words: Words,
    mel: LogMel,
    compute: Compute,
    /// Layer and number of the decoder's heads that align words.
    heads: Vec<[usize; 2]>,
}

/// A model that sessions share.
pub(crate) struct Shared(Arc<Whisper>);

/// The files of a model.
#[derive(Debug, PartialEq, Eq)]
enum Form {
    CTranslate2(PathBuf),
    HuggingFace(PathBuf),
    /// Of whisper.cpp.
    Ggml(PathBuf),
}

/// Checks that a folder has all files of a model.
pub(crate) fn is_in(folder: &Path) -> Result<(), Refusal> {
    form(folder).map(drop)
}

/// The form of the model in a folder.
fn form(folder: &Path) -> Result<Form, Refusal> {
    let there = |name: &str| Some(folder.join(name)).filter(|path| path.is_file());
    let is_ggml = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("ggml") && name.ends_with(".bin") && path.is_file()
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let ggml: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_ggml).collect();
    let wrong = |reason| Err(Refusal::Artefact { reason });
    let form = match (there(CTRANSLATE2), there(SAFETENSORS), &ggml[..]) {
        (Some(path), None, []) => Form::CTranslate2(path),
        (None, Some(path), []) => Form::HuggingFace(path),
        (None, None, [path]) => return Ok(Form::Ggml(path.clone())),
        (None, None, []) => {
            let names = format!("{CTRANSLATE2}, {SAFETENSORS} or ggml-*.bin");
            return wrong(format!("there is no {names} in {}", folder.display()));
        }
        _ => return wrong(format!("there are several models in {}", folder.display())),
    };
    match BESIDE.into_iter().find(|name| there(name).is_none()) {
        None => Ok(form),
        Some(name) => wrong(format!("there is no {name} in {}", folder.display())),
    }
}

impl Whisper {
    /// Loads the model of a folder, for `threads` threads.
    ///
    /// # Errors
    /// [`Error::Artefact`] for a file that is not valid; I/O errors.
    pub(crate) fn load(folder: &Path, threads: NonZeroUsize) -> Result<Self, Error> {
        let compute = Compute::new(threads)?;
        let form = form(folder)
            .map_err(|refusal| Error::Artefact { path: folder.to_owned(), reason: refusal.to_string() })?;
        let (network, words) = match form {
            Form::CTranslate2(path) => {
                let network = Network::load(&mut Weights::open(&path)?, threads.get())?;
                let words = Words::load(folder, network.shape.tokens)?;
                (network, words)
            }
            Form::HuggingFace(path) => {
                let Config { d_model, encoder_attention_heads, decoder_attention_heads, .. } =
                    Config::load(folder)?;
                let heads = [encoder_attention_heads, decoder_attention_heads].map(Option::unwrap_or_default);
                let mut weights = Named::safetensors(&path, heads, d_model.unwrap_or_default())?;
                let network = Network::load(&mut weights, threads.get())?;
                let words = Words::load(folder, network.shape.tokens)?;
                (network, words)
            }
            Form::Ggml(path) => {
                let (mut weights, Vocabulary { tokens, size }) = Named::ggml(&path)?;
                let network = Network::load(&mut weights, threads.get())?;
                // Of this file only the heads that align words count.
                let config = match folder.join(BESIDE[0]).is_file() {
                    true => Config::load(folder)?,
                    false => Config::default(),
                };
                let words = vocabulary::words(&tokens, size, config)
                    .map_err(|reason| Error::Artefact { path: path.clone(), reason })?;
                (network, words)
            }
        };
        let mel = LogMel::new(network.shape.bands);
        let heads = alignment_heads(&words.alignment_heads, network.decoder_heads())
            .map_err(|reason| Error::Artefact { path: folder.join(BESIDE[0]), reason })?;
        Ok(Self { network, words, mel, compute, heads })
    }
}

/// The heads that align words, in the order of their layers. Without a list these are all of the upper half
/// of the layers, as in OpenAI's reference.
fn alignment_heads(listed: &[[usize; 2]], [layers, heads]: [usize; 2]) -> Result<Vec<[usize; 2]>, String> {
    if let Some([layer, head]) = listed.iter().find(|[layer, head]| *layer >= layers || *head >= heads) {
        return Err(format!(
            "alignment_heads has head {head} of layer {layer}, of {heads} heads of {layers} layers"
        ));
    }
    let mut chosen = match listed {
        [] => (layers / 2..layers).flat_map(|layer| (0..heads).map(move |head| [layer, head])).collect(),
        listed => listed.to_vec(),
    };
    chosen.sort_unstable();
    chosen.dedup();
    Ok(chosen)
}

/// Encodes the first thirty seconds of audio with the encoder of a bundle's model: 1500 vectors,
/// concatenated. For comparisons with other programs. This process can run `cpus` threads at a time.
///
/// # Errors
/// Errors of the model; [`Error::Config`] for a sample rate that is not accepted.
pub fn encode_speech(
    bundle: &Bundle,
    rate: u32,
    sound: &[f32],
    cpus: NonZeroUsize,
) -> Result<Vec<f32>, Error> {
    if !RATES.contains(&rate) {
        let reason = format!("{rate}, it must be {} to {}", RATES.start(), RATES.end());
        return Err(Error::Config { option: "sample_rate", reason });
    }
    let _flush = FlushDenormals::new();
    let Shared(whisper) = Shared::load(&bundle.folder(Operation::Asr), cpus)?;
    let (mut resampled, mut resampler) = (Vec::new(), Resampler::new(rate, RATE));
    resampler.push(sound, &mut resampled);
    resampler.finish(&mut resampled);
    let features = whisper.mel.recording(&resampled);
    let window = features.window(0, features.content(), network::FRAMES);
    match features.content() {
        0 => Ok(Vec::new()),
        _ => {
            let encoded = whisper.network.encode(&whisper.compute, &window)?;
            crate::finite("vectors are", &encoded)?;
            Ok(encoded)
        }
    }
}

impl Shared {
    /// Loads the model of a folder, on a process that can run `cpus` threads at a time. It runs on half of
    /// these, because other work is more urgent.
    pub(crate) fn load(folder: &Path, cpus: NonZeroUsize) -> Result<Self, Error> {
        let threads = NonZeroUsize::new((cpus.get() / 2).min(MAX_THREADS)).unwrap_or(NonZeroUsize::MIN);
        Ok(Self(Arc::new(Whisper::load(folder, threads)?)))
    }
}

impl AudioModel for Shared {
    fn open(&self, rate: u32, options: &OperationOptions) -> Result<Box<dyn Session>, OperationError> {
        if !RATES.contains(&rate) {
            let (from, to) = (RATES.start(), RATES.end());
            return Err(invalid("sample_rate", format!("{rate}, it must be {from} to {to}")));
        }
        let options = match options {
            OperationOptions::Default => TranscribeOptions::default(),
            OperationOptions::Transcribe(options) => options.clone(),
            _ => return Err(invalid("options", format!("{} has none of these", Operation::Asr))),
        };
        let words = &self.0.words;
        let language = |code: &String| {
            let codes = || words.languages().map(|(code, _)| code).collect::<Vec<_>>().join(", ");
            let unknown = || invalid("language", format!("{code:?}, it must be one of {}", codes()));
            words.language(code).ok_or_else(unknown)
        };
        if options.prompt.len() > MAX_PROMPT {
            let reason = format!("it has {} bytes, the limit is {MAX_PROMPT}", options.prompt.len());
            return Err(invalid("prompt", reason));
        }
        if !(0.0..=1.0).contains(&options.temperature) {
            return Err(invalid("temperature", format!("{}, it must be 0 to 1", options.temperature)));
        }
        let prompt = match options.prompt.trim() {
            "" => Vec::new(),
            prompt => words.encode(&format!(" {prompt}")),
        };
        let task = Task {
            language: options.language.as_ref().map(language).transpose()?,
            task: if options.translate { words.translate } else { words.transcribe },
            prompt,
            rate,
            words: options.words,
            temperature: options.temperature,
        };
        let resampler = Resampler::new(rate, RATE);
        Ok(Box::new(Recording {
            whisper: Arc::clone(&self.0),
            prompt: task.prompt.clone(),
            task,
            resampler,
            sound: Vec::new(),
            before: 0,
            transcript: None,
        }))
    }

    fn max_sessions(&self) -> u32 {
        MAX_SESSIONS
    }
}

struct Recording {
    whisper: Arc<Whisper>,
    task: Task,
    /// The session's prompt.
    prompt: Vec<u32>,
    resampler: Resampler,
    /// The audio since the last segment, at [`RATE`].
    sound: Vec<f32>,
    /// Number of samples before that.
    before: usize,
    transcript: Option<Transcript>,
}

impl Session for Recording {
    fn window(&self) -> u32 {
        (network::FRAMES * crate::log_mel::FRAME) as u32
    }

    fn max_samples(&self) -> u64 {
        MAX_SECONDS * u64::from(self.task.rate)
    }

    fn push(&mut self, samples: &[f32], _: &mut Vec<OperationOutput>) -> Result<(), Error> {
        self.resampler.push(samples, &mut self.sound);
        Ok(())
    }

    fn segment(&mut self, _: bool, _: &mut Vec<OperationOutput>) -> Result<(), Error> {
        // Later audio must continue where the audio was cut, not after the silence that is appended here.
        let len = self.sound.len();
        self.resampler.clone().finish(&mut self.sound);
        let features = self.whisper.mel.recording(&self.sound);
        self.sound.clear();
        self.transcript = Some(Transcript::new(self.task.clone(), features, self.before));
        self.before += len;
        Ok(())
    }

    fn continue_segment(&mut self, out: &mut Vec<OperationOutput>) -> Result<bool, Error> {
        let Some(transcript) = &mut self.transcript else { return Ok(false) };
        let more = transcript.step(&self.whisper, out)?;
        if !more && let Some(transcript) = self.transcript.take() {
            // The next segment continues the text.
            self.task.prompt = transcript.into_text();
        }
        Ok(more)
    }

    fn reset(&mut self) {
        self.sound.clear();
        self.before = 0;
        self.task.prompt.clone_from(&self.prompt);
        self.resampler = Resampler::new(self.task.rate, RATE);
        self.transcript = None;
    }
}
