//! `kvasir run`: generates one completion in this process. Only the completion goes to stdout.

use crate::local::{self, EngineArgs};
use crate::lora::LoraArgs;
use crate::models::{Resolved, resolve_or_pull};
use crate::spec::SpecArg;
use anyhow::{Context, Result, bail};
use dispatch::models::{ModelEntry, Models, PromptWithImages, SeenImage};
use engine::engine::{EngineImage, EngineRequest, ImageSource};
use engine::images::PlacedImage;
use proto::message::{Finished, GenerateFrame, Sampling, Stop, TenantShare};
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use text::chat_template::{ChatTemplate, Content, Message, Part};
use worker::load::EngineOptions;

/// Streams a completion in one process, without a cluster
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    kvasir run smollm2-135m -p \"The capital of France is\" -n 16\n  \
    kvasir run ./Qwen2.5-VL-3B-Instruct --chat --image cat.jpg -p \"What is this?\"")]
pub(crate) struct Run {
    /// Catalog name, https:// or hf:// address, or path to a .gguf or a Hugging Face folder
    model: String,
    /// The prompt
    #[arg(short, long, value_name = "TEXT")]
    prompt: String,
    /// Most tokens to generate
    #[arg(short = 'n', long = "max-tokens", value_name = "N", default_value_t = 128)]
    max_tokens: u32,
    /// Sampling temperature; 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Draw from the K most likely tokens; 0 is off
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: u32,
    /// Draw from the most likely tokens whose probabilities sum to P; 1 is off
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Draw from tokens with at least P times the highest probability; 0 is off
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f32,
    /// Penalty for tokens of prompt and output; 1 is off
    #[arg(long, value_name = "F", default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Penalty for tokens of the output; 0 is off
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_hyphen_values = true)]
    presence_penalty: f32,
    /// Penalty for each occurrence of a token in the output; 0 is off
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_hyphen_values = true)]
    frequency_penalty: f32,
    /// Seed of sampling; the same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Stop string, which ends the completion and is not printed; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Apply the model's chat template, with the prompt as the user's message
    #[arg(long, conflicts_with = "raw")]
    chat: bool,
    /// PNG, JPEG, WebP or GIF file that the user's message begins with; may be given several times
    #[arg(long, value_name = "F", requires = "chat")]
    image: Vec<PathBuf>,
    /// Add no special tokens to the prompt and parse none in it
    #[arg(long)]
    raw: bool,
    /// Drafter of speculative decoding: off, ngram (the tokens that followed the last ones earlier), draft-mtp
    /// (the MTP head in the model's own file), draft-mtp:MODEL (a drafter made for the model), draft:MODEL
    /// (a smaller model with the same vocabulary); the output does not depend on it
    #[arg(long, value_name = "SPEC", default_value = "off", env = "KVASIR_SPEC")]
    spec: SpecArg,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(Default)]
struct Outcome {
    first_token: Option<Instant>,
    finished: Option<(Finished, Instant)>,
    failed: Option<String>,
}

impl Run {
    /// Runs the command.
    pub(crate) fn run(self) -> Result<()> {
        let mut options =
            EngineOptions { speculative_method: self.spec.speculative_method()?, ..self.engine.options()? };
        self.lora.apply(&mut options);
        let Resolved { path, id } = resolve_or_pull(&self.model)?;
        let mut local =
            local::open_with(&path, |path, progress| worker::load::open(path, &options, progress))?;
        let (prompt, images) = match self.image.is_empty() {
            true => (self.prompt_ids(&local)?, Vec::new()),
            false => self.prompt_with_images(ModelEntry { id, path })?,
        };
        let prompt_len = prompt.len();
        let outcome = Arc::new(Mutex::new(Outcome::default()));
        let (root, adapter) = local.with_adapter(self.lora.names().next());
        let submitted = Instant::now();
        local.submit(EngineRequest {
            name: None,
            root,
            adapter,
            tenant: TenantShare::of_root(root),
            prompt,
            images,
            emitted: Vec::new(),
            prompt_logprobs: None,
            sampling: Sampling {
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                repetition_penalty: self.repetition_penalty,
                presence_penalty: self.presence_penalty,
                frequency_penalty: self.frequency_penalty,
                seed: self.seed,
                ..Sampling::default()
            },
            stop: Stop { max_tokens: self.max_tokens, strings: self.stop.clone(), ..Stop::default() },
            deadline: None,
            pull: None,
            together: 1,
            guide: None,
            sink: Box::new(printer(outcome.clone())),
        });
        local.run_to_end()?;
        let outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = &outcome.failed {
            bail!("{reason}");
        }
        let Some((finished, end)) = &outcome.finished else { bail!("the completion did not finish") };
        println!();
        let first = outcome.first_token.unwrap_or(*end);
        let prefill = first.duration_since(submitted).as_secs_f64();
        let decode = end.duration_since(first).as_secs_f64();
        let decoded = finished.completion_tokens.saturating_sub(1);
        eprintln!(
            "prompt {prompt_len} tokens in {prefill:.3} s ({:.0} t/s), {} tokens generated{}{}",
            prompt_len as f64 / prefill.max(1e-9),
            finished.completion_tokens,
            if decoded > 0 {
                format!(" ({:.1} t/s after the first)", f64::from(decoded) / decode.max(1e-9))
            } else {
                String::new()
            },
            match (&self.spec, finished.drafted_tokens) {
                (SpecArg::Off, _) => String::new(),
                (_, drafted) => format!(", {} of {drafted} draft tokens accepted", finished.accepted_tokens),
            },
        );
        Ok(())
    }

    /// The prompt that a coordinator makes of such a chat.
    fn prompt_with_images(&self, entry: ModelEntry) -> Result<(Vec<u32>, Vec<EngineImage>)> {
        let models = Models::open(std::slice::from_ref(&entry), false)?;
        let model = models.get(entry.id.as_str()).context("the model has no name")?;
        let template = model.template.as_ref().context("this model has no usable chat template")?;
        let read = |path: &PathBuf| -> Result<(Arc<[u8]>, Arc<SeenImage>)> {
            let file = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            let seen = model.images()?.see(&file).with_context(|| path.display().to_string())?;
            Ok((file.into(), seen))
        };
        let (files, seen): (Vec<_>, Vec<_>) =
            self.image.iter().map(read).collect::<Result<Vec<_>>>()?.into_iter().unzip();
        let parts = (0..files.len()).map(Part::Image).chain([Part::Text(self.prompt.as_str().into())]);
        let content = Some(Content::Parts(parts.collect()));
        let message = Message { content, ..Message::new("user", "") };
        let prompt = template.render_marked(&[message], None, true, &serde_json::Map::new())?;
        let PromptWithImages { tokens, runs } = model.chat_with_images(&prompt, &seen, true)?;
        let images = files.into_iter().zip(seen).zip(runs).map(|((file, seen), runs)| EngineImage {
            place: PlacedImage { runs, digest: seen.digest },
            source: ImageSource::File(file),
        });
        Ok((tokens.to_vec(), images.collect()))
    }

    fn prompt_ids(&self, local: &local::LocalEngine) -> Result<Vec<u32>> {
        let tokenizer = &local.tokenizer;
        if self.raw {
            return Ok(tokenizer.encode(&self.prompt, false));
        }
        let mut ids = if self.chat {
            let template = ChatTemplate::from_metadata(&local.metadata, tokenizer)?
                .context("this model has no chat template; omit --chat")?;
            let message = Message::new("user", self.prompt.as_str());
            let prompt = template.render_marked(&[message], None, true, &serde_json::Map::new())?;
            tokenizer.encode_prompt(&prompt.text, &prompt.quoted).0
        } else {
            tokenizer.encode(&self.prompt, true)
        };
        if !ids.starts_with(tokenizer.before()) {
            ids.splice(0..0, tokenizer.before().iter().copied());
        }
        Ok(ids)
    }
}

/// Prints text once it can no longer change.
fn printer(outcome: Arc<Mutex<Outcome>>) -> impl FnMut(GenerateFrame) -> bool + Send {
    move |frame| {
        let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let print = |text: &str| {
            let mut out = std::io::stdout().lock();
            out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
        };
        match frame {
            GenerateFrame::Started(_) | GenerateFrame::Prompt(_) => true,
            GenerateFrame::Tokens(tokens) => {
                outcome.first_token.get_or_insert_with(Instant::now);
                tokens.iter().all(|token| print(&token.text))
            }
            GenerateFrame::Finished(finished) => {
                let printed = print(&finished.tail);
                outcome.finished = Some((finished, Instant::now()));
                printed
            }
            GenerateFrame::Failed(error) => {
                outcome.failed = Some(error.to_string());
                true
            }
        }
    }
}
