//! `kvasir logits`: logits of whole prompts as a safetensors file, for checks against references.

use crate::config::UsageError;
use crate::cpus;
use crate::local::{self, EngineArgs, LocalEngine};
use crate::lora::LoraArgs;
use crate::models::resolve_or_pull;
use crate::replica;
use crate::spec::SpecArg;
use anyhow::{Context, Result, bail};
use engine::decoder::LayerState;
use engine::engine::{EngineRequest, Sink};
use engine::kv_cache::BlockLayout;
use engine::speculation::SpeculativeMethod;
use kernels::ops::is_drawable;
use proto::ids::ModelId;
use proto::message::{GenerateError, GenerateFrame, Sampling, Stop, TenantShare};
use proto::stage::ActivationType;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use worker::load::{self, EngineOptions};

mod images;
use images::Prompt;

/// Writes the logits of every prompt token
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  kvasir logits smollm2-135m --tokens prompts.json --out logits.safetensors --greedy 32"
)]
pub(crate) struct Logits {
    /// Catalog name, https:// or hf:// address, or path to a .gguf or a Hugging Face folder
    model: String,
    /// JSON file: an array of arrays of token ids, run in order [default: `v{i}.ids` of --pixels]
    #[arg(long, value_name = "IDS.json", required_unless_present = "pixels")]
    tokens: Option<PathBuf>,
    /// Preprocessed images of the prompts: `v{i}.pixel_values` f32, and `v{i}.image_grid_thw` of models that see images
    /// of all sizes. Their rows take the places of the model's image tokens
    #[arg(long, value_name = "F.safetensors", conflicts_with_all = ["shards", "image"])]
    pixels: Option<PathBuf>,
    /// PNG, JPEG, WebP or GIF file whose rows take the places of the image tokens of all prompts; may be given several
    /// times. Also writes the tensors that --pixels reads
    #[arg(long, value_name = "FILE", conflicts_with = "shards")]
    image: Vec<PathBuf>,
    /// Output: `p{i}.logits` f32 `[n, vocab]`, `p{i}.cached` i32 `[1]` (rows of cached tokens are NaN),
    /// `p{i}.preemptions` i32 `[1]`
    #[arg(long, value_name = "F.safetensors")]
    out: PathBuf,
    /// Also generate N tokens greedily: `p{i}.greedy` i32 `[N]`
    #[arg(long, value_name = "N", default_value_t = 0)]
    greedy: u32,
    /// Admit all prompts at once
    #[arg(long)]
    together: bool,
    /// Prompt tokens computed per step; 0 is the whole prompt
    #[arg(long, value_name = "N", default_value_t = 512)]
    chunk: usize,
    /// Place each sequence's KV blocks consecutively and read no block table
    #[arg(long)]
    contiguous: bool,
    /// Place KV blocks in a random order drawn from SEED
    #[arg(long, value_name = "SEED", conflicts_with = "contiguous")]
    permuted: Option<u64>,
    /// Bytes of the KV cache; prompts that do not fit together are preempted and resumed [default: computed]
    #[arg(long, value_name = "BYTES")]
    kv_bytes: Option<u64>,
    /// Also write the recurrent states after each prompt: `p{i}.state.{l}.conv` f32 `[channels, taps]` and
    /// `p{i}.state.{l}.recurrent` f32 `[heads, rows, cols]`
    #[arg(long)]
    states: bool,
    /// Share no blocks between prompts
    #[arg(long)]
    no_prefix_cache: bool,
    /// Cut the layers into N ranges, each in its own process; at most as many as the model's layers allow
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    shards: u16,
    /// With --shards: element type of activations between processes; bf16 has half the bytes and changes results
    #[arg(long, value_enum, default_value = "f32")]
    wire: WireArg,
    /// Drafter of speculative decoding for --greedy: off, ngram,
    /// draft-mtp, draft-mtp:MODEL, draft:MODEL; the output does not depend on it.
    /// Also writes `p{i}.drafted` and `p{i}.accepted` i32 `[1]`
    #[arg(long, value_name = "SPEC", default_value = "off")]
    spec: SpecArg,
    #[command(flatten)]
    lora: LoraArgs,
    /// Names of adapters, or `base` for the model alone, which prompts use in turns [default: the first of --lora]
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', requires = "lora")]
    adapter: Vec<String>,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Element type of activations between the stages of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum WireArg {
    /// 32-bit floats, as computed.
    F32,
    /// Rounded to brain floats.
    Bf16,
}

impl From<WireArg> for ActivationType {
    fn from(arg: WireArg) -> Self {
        match arg {
            WireArg::F32 => Self::F32,
            WireArg::Bf16 => Self::Bf16,
        }
    }
}

/// Results for one prompt.
#[derive(Default)]
struct Collected {
    rows: Vec<f32>,
    cached: i32,
    preemptions: i32,
    drafted: i32,
    accepted: i32,
    greedy: Vec<i32>,
    states: Vec<LayerState>,
    failed: Option<String>,
    finished: bool,
}

struct Collector {
    vocab: usize,
    states: bool,
    prompt_len: usize,
    into: Arc<Mutex<Collected>>,
}

impl Sink for Collector {
    fn frame(&mut self, frame: GenerateFrame) -> bool {
        let mut into = self.into.lock().unwrap_or_else(PoisonError::into_inner);
        match frame {
            GenerateFrame::Started(started) => into.cached = started.cached_tokens as i32,
            GenerateFrame::Tokens(tokens) => into.greedy.extend(tokens.iter().map(|token| token.id as i32)),
            // Not requested.
            GenerateFrame::Prompt(_) => {}
            GenerateFrame::Finished(finished) => {
                into.preemptions = finished.preemptions as i32;
                into.drafted = finished.drafted_tokens as i32;
                into.accepted = finished.accepted_tokens as i32;
                into.finished = true;
            }
            GenerateFrame::Failed(error) => {
                into.failed.get_or_insert(error.to_string());
            }
        }
        true
    }

    fn wants_logits(&self) -> bool {
        true
    }

    fn wants_states(&self) -> bool {
        self.states
    }

    fn states(&mut self, states: Vec<LayerState>) {
        self.into.lock().unwrap_or_else(PoisonError::into_inner).states = states;
    }

    fn logits(&mut self, position: usize, row: &[f32]) {
        if position < self.prompt_len {
            let mut into = self.into.lock().unwrap_or_else(PoisonError::into_inner);
            if !is_drawable(row) {
                into.failed.get_or_insert(format!("token {position}: {}", GenerateError::NotFinite));
            }
            into.rows[position * self.vocab..(position + 1) * self.vocab].copy_from_slice(row);
        }
    }
}

impl Logits {
    /// Runs the command.
    pub(crate) fn run(self) -> Result<()> {
        let path = resolve_or_pull(&self.model)?.path;
        let shards = usize::from(self.shards);
        let speculative_method = self.spec.speculative_method()?;
        if shards > 1 {
            self.check_shards(&path, &speculative_method, shards)?;
        }
        let prompts = self.token_ids()?;
        let adapters = self.adapters()?;
        let mut options = self.engine.options()?;
        self.lora.apply(&mut options);
        options.chunk = Some(self.chunk);
        options.speculative_method = speculative_method;
        if self.contiguous {
            options.block_layout = BlockLayout::Contiguous;
        }
        if let Some(seed) = self.permuted {
            options.block_layout = BlockLayout::Permuted { seed };
        }
        options.kv_bytes = self.kv_bytes;
        options.prefix_cache = !self.no_prefix_cache;
        let prompts = self.prompts(&path, &options, prompts)?;
        let longest =
            prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0) + self.greedy as usize;
        let at_once = if self.together { prompts.len() } else { 1 };
        options.max_rows = (self.chunk == 0).then_some((longest * at_once).max(512));
        // Dropped after the engine, which uses these processes.
        let mut _processes = None;
        let mut local = if shards == 1 {
            local::open_with(&path, |path, progress| load::open(path, &options, progress))?
        } else {
            let threads = options.threads.unwrap_or_else(|| (cpus::capacity() / shards).max(1));
            options.threads = Some(threads);
            options.workers = shards;
            let (processes, replica) = replica::start(
                &path,
                shards,
                (&self.engine, &options.speculative_method),
                threads,
                self.wire.into(),
            )?;
            _processes = Some(processes);
            local::open_with(&path, |path, progress| load::open_replica(path, &options, replica, progress))?
        };
        let vocab = local.engine.decoder().spec().vocab;
        let mut collected = Vec::with_capacity(prompts.len());
        for (prompt, adapter) in prompts.iter().zip(adapters.iter().cycle()) {
            collected.push(self.submit(&mut local, prompt, adapter.as_ref(), vocab));
            if !self.together {
                local.run_to_end()?;
            }
        }
        local.run_to_end()?;
        self.write(&prompts, vocab, &collected)
    }

    /// Refuses flags that do not work with several shards, before any process is started.
    fn check_shards(&self, path: &Path, speculative_method: &SpeculativeMethod, shards: usize) -> Result<()> {
        let refuse = |other, reason| Err(UsageError { flag: "--shards", other, reason }.into());
        if self.contiguous {
            return refuse("--contiguous", "consecutive blocks require that all layers are in one process");
        }
        Ok(load::check_shards(path, speculative_method, shards)?)
    }

    fn token_ids(&self) -> Result<Vec<Vec<u32>>> {
        let (path, prompts) = match (&self.tokens, &self.pixels) {
            (Some(path), _) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                let prompts = serde_json::from_str(&text).with_context(|| {
                    format!("{}: expected an array of arrays of token ids", path.display())
                })?;
                (path, prompts)
            }
            (None, Some(path)) => (path, images::prompts(path)?),
            (None, None) => bail!("--tokens is missing"),
        };
        if prompts.is_empty() {
            bail!("{}: no prompts", path.display());
        }
        Ok(prompts)
    }

    /// The prompts with their images.
    fn prompts(&self, path: &Path, options: &EngineOptions, prompts: Vec<Vec<u32>>) -> Result<Vec<Prompt>> {
        if let Some(pixels) = &self.pixels {
            return images::with_pixels(&mut images::open(path, options)?, prompts, pixels);
        }
        if self.image.is_empty() {
            return Ok(prompts.into_iter().map(Prompt::from).collect());
        }
        let vision = images::open(path, options)?;
        prompts.into_iter().map(|tokens| images::with_files(&vision, tokens, &self.image)).collect()
    }

    /// The adapters that the prompts use in turns.
    fn adapters(&self) -> Result<Vec<Option<ModelId>>> {
        if self.adapter.is_empty() {
            return Ok(vec![self.lora.names().next().cloned()]);
        }
        let named = |name: &String| match self.lora.names().find(|given| given.as_str() == name) {
            Some(given) => Ok(Some(given.clone())),
            None if name == "base" => Ok(None),
            None => bail!("--adapter {name}: no --lora has this name"),
        };
        self.adapter.iter().map(named).collect()
    }

    fn submit(
        &self,
        local: &mut LocalEngine,
        prompt: &Prompt,
        adapter: Option<&ModelId>,
        vocab: usize,
    ) -> Arc<Mutex<Collected>> {
        let (root, adapter) = local.with_adapter(adapter);
        let rows = vec![f32::NAN; prompt.tokens.len() * vocab];
        let into = Arc::new(Mutex::new(Collected { rows, ..Collected::default() }));
        local.submit(EngineRequest {
            name: None,
            root,
            adapter,
            tenant: TenantShare::of_root(root),
            prompt: prompt.tokens.clone(),
            images: prompt.images.clone(),
            emitted: Vec::new(),
            prompt_logprobs: None,
            sampling: Sampling::default(),
            stop: Stop { max_tokens: self.greedy.max(1), ignore_eos: true, ..Stop::default() },
            deadline: None,
            pull: None,
            together: 1,
            guide: None,
            sink: Box::new(Collector {
                vocab,
                states: self.states,
                prompt_len: prompt.tokens.len(),
                into: into.clone(),
            }),
        });
        into
    }

    fn write(&self, prompts: &[Prompt], vocab: usize, collected: &[Arc<Mutex<Collected>>]) -> Result<()> {
        let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
        for (i, (prompt, collected)) in prompts.iter().zip(collected).enumerate() {
            let collected = collected.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(reason) = &collected.failed {
                bail!("prompt {i} ({} tokens): {reason}", prompt.tokens.len());
            }
            if !collected.finished {
                bail!("prompt {i} ({} tokens): did not finish", prompt.tokens.len());
            }
            let floats = collected.rows.iter().flat_map(|value| value.to_le_bytes()).collect();
            tensors.push((format!("p{i}.logits"), Dtype::F32, vec![prompt.tokens.len(), vocab], floats));
            tensors.extend(prompt.pixels.iter().flat_map(|pixels| pixels.tensors(i)));
            let mut counts = vec![("cached", collected.cached), ("preemptions", collected.preemptions)];
            if self.spec != SpecArg::Off {
                counts.extend([("drafted", collected.drafted), ("accepted", collected.accepted)]);
            }
            for (name, count) in counts {
                tensors.push((format!("p{i}.{name}"), Dtype::I32, vec![1], count.to_le_bytes().to_vec()));
            }
            for state in &collected.states {
                let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
                let name = |field: &str| format!("p{i}.state.{}.{field}", state.layer);
                tensors.push((name("conv"), Dtype::F32, state.conv_shape.to_vec(), bytes(&state.conv)));
                let shape = state.recurrent_shape.to_vec();
                if state.recurrent.is_empty() {
                    continue;
                }
                tensors.push((name("recurrent"), Dtype::F32, shape, bytes(&state.recurrent)));
            }
            if self.greedy > 0 {
                let ids = collected.greedy.iter().flat_map(|id| id.to_le_bytes()).collect();
                tensors.push((format!("p{i}.greedy"), Dtype::I32, vec![collected.greedy.len()], ids));
            }
        }
        let mut views = Vec::with_capacity(tensors.len());
        for (name, dtype, shape, bytes) in &tensors {
            views.push((name.clone(), TensorView::new(*dtype, shape.clone(), bytes)?));
        }
        serialize_to_file(views, None, &self.out)
            .with_context(|| format!("cannot write {}", self.out.display()))
    }
}

/// Tests of the flag that interprets GPU kernels, with the oracle's small models.
#[cfg(feature = "ptx-sim")]
#[cfg(test)]
mod tests {
    use crate::{Cli, Command};
    use clap::Parser;
    use safetensors::SafeTensors;
    use std::path::{Path, PathBuf};

    fn numbers(file: &SafeTensors<'_>, name: &str) -> Vec<u64> {
        let tensor = file.tensor(name).unwrap();
        let width = tensor.data().len() / tensor.shape().iter().product::<usize>();
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        tensor.data().chunks_exact(width).map(number).collect()
    }

    fn fixtures() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
    }

    /// Compares the continuation of a tiny model's first prompt with its reference.
    fn continued_as_the_reference(arch: &str) {
        let folder = fixtures().join("tiny").join(arch);
        compare(&folder, &folder.join(format!("{arch}-f32.gguf")), usize::MAX, None);
    }

    /// The same for a Hugging Face folder, for a few tokens.
    fn folder_continued_as_the_reference(name: &str) {
        let folder = fixtures().join("hf").join(name);
        compare(&folder, &folder, 8, None);
    }

    /// The same for a tiny model with an adapter.
    fn adapter_continued_as_the_reference(name: &str) {
        let (arch, adapter) = name.split_once('/').unwrap();
        let folder = fixtures().join("hf").join(format!("lora-{arch}")).join(adapter);
        let model = fixtures().join("tiny").join(arch).join(format!("{arch}-f32.gguf"));
        compare(&folder, &model, 8, Some(&format!("a={}", folder.display())));
    }

    fn compare(folder: &Path, model: &Path, tokens: usize, lora: Option<&str>) {
        let bytes = std::fs::read(folder.join("ref.safetensors")).unwrap();
        let reference = SafeTensors::deserialize(&bytes).unwrap();
        let (ids, mut greedy) = (numbers(&reference, "p0.ids"), numbers(&reference, "p0.greedy"));
        greedy.truncate(tokens);
        let count = greedy.len().to_string();
        let mut flags = vec!["--greedy", &count, "--chunk", "64", "--activations", "f32"];
        lora.iter().for_each(|lora| flags.extend(["--lora", lora]));
        let bytes = interpreted(model, &ids, &flags).unwrap();
        let name = folder.display();
        assert_eq!(numbers(&SafeTensors::deserialize(&bytes).unwrap(), "p0.greedy"), greedy, "{name}");
    }

    /// Runs the command on the interpreter, or on the device that `flags` select, and returns its output.
    fn interpreted(model: &Path, ids: &[u64], flags: &[&str]) -> anyhow::Result<Vec<u8>> {
        let scratch = tempfile::tempdir().unwrap();
        let (tokens, out) = (scratch.path().join("ids.json"), scratch.path().join("out.safetensors"));
        std::fs::write(&tokens, serde_json::to_string(&[&ids]).unwrap()).unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let (model, tokens, file) = (text(model), text(&tokens), text(&out));
        let mut command = vec!["kvasir", "logits", &model, "--tokens", &tokens, "--out", &file];
        if !flags.contains(&"--device") {
            command.extend(["--device", "ptx-sim"]);
        }
        command.extend(["--threads", "1", "--kv-bytes", "2097152", "--kv-type", "f32"]);
        command.extend(flags);
        let Command::Logits(logits) = Cli::try_parse_from(command).unwrap().command else {
            panic!("another command");
        };
        logits.run()?;
        Ok(std::fs::read(&out).unwrap())
    }

    /// Activations in scaled blocks: the same bits in any chunk, near those of f32.
    fn same_bits_in_any_chunk(model: &str, class: &str, most: f64) {
        let folder = fixtures().join("hf").join(model);
        let bytes = std::fs::read(folder.join("ref.safetensors")).unwrap();
        let ids = numbers(&SafeTensors::deserialize(&bytes).unwrap(), "p0.ids");
        let logits = |activations, chunk| -> Vec<f32> {
            let bytes =
                interpreted(&folder, &ids, &["--activations", activations, "--chunk", chunk]).unwrap();
            let bits = numbers(&SafeTensors::deserialize(&bytes).unwrap(), "p0.logits");
            bits.iter().map(|bits| f32::from_bits(*bits as u32)).collect()
        };
        let [whole, parts, exact] = [(class, "64"), (class, "3"), ("f32", "64")].map(|(a, b)| logits(a, b));
        assert!(whole == parts, "logits in one chunk and in several");
        let norm =
            |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let apart =
            norm(&mut whole.iter().zip(&exact).map(|(x, y)| x - y)) / norm(&mut exact.iter().copied());
        assert!((1e-5..most).contains(&apart), "{apart}");
        let refused = interpreted(&folder, &ids, &["--activations", class, "--device", "cpu"]).unwrap_err();
        let text = format!("{refused:#}");
        assert!(text.contains("activations = mxfp8") && text.contains("12.1"), "{text}");
    }

    #[test]
    fn mxfp8_activations() {
        same_bits_in_any_chunk("fmt-mxfp4-gptoss", "mxfp8", 0.1);
    }

    #[test]
    fn nvfp4_activations() {
        same_bits_in_any_chunk("fmt-nvfp4-ct", "nvfp4", 0.5);
    }

    macro_rules! each {
        ($compare:ident: $($name:ident: $arch:literal,)*) => {
            $(#[test]
            fn $name() {
                $compare($arch);
            })*
        };
    }

    each! {
        folder_continued_as_the_reference:
        fp8: "fmt-fp8-block-ct",
        awq: "fmt-awq-gemm",
        nvfp4: "fmt-nvfp4-ct",
        mxfp4_experts: "fmt-mxfp4-gptoss",
        latent_attention: "deepseek_v3",
        short_convolutions: "lfm2_moe",
        attention_beside_mamba2: "falcon_h1",
    }

    each! {
        adapter_continued_as_the_reference:
        adapter: "llama/adapter-r4-qv",
    }

    each! {
        continued_as_the_reference:
        full_attention: "llama",
        experts: "qwen3moe",
        windows: "gemma3",
        windows_with_sinks: "gpt-oss",
        shared_keys_and_values: "gemma4",
        delta_nets: "qwen35",
        mamba2: "granitehybrid",
    }
}
