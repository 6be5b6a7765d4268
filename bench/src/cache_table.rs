//! Cache bytes of one sequence, compared with engines that treat all layers alike.

use anyhow::{Context, Result, bail};
use clap::Parser;
use model::spec::ModelSpec;
use model::{ModelFile, spec::AttentionSpec};
use std::path::PathBuf;

/// Bytes of an element of keys and values (f16).
const KV_BYTES: usize = 2;
/// Bytes of an element of a recurrent state (f32).
const STATE_BYTES: usize = 4;
/// Tokens of a block.
const BLOCK: usize = 16;
/// Most checkpoints of a sequence, besides its working state.
const CHECKPOINTS: usize = 8;

/// Prints a Markdown table of cache bytes per sequence
#[derive(Debug, Parser)]
#[command(
    after_help = "Example:\n  cargo run -p kvasir-bench --bin cache-table -- tests/fixtures/tiny/*/*-f32.gguf"
)]
struct Arguments {
    /// Models; only their shapes are read
    #[arg(required = true)]
    models: Vec<PathBuf>,
    /// Lengths of the sequence in tokens
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "4096,32768")]
    tokens: Vec<usize>,
}

/// Cache bytes of one sequence.
#[derive(Debug, PartialEq)]
struct Bytes {
    /// Kvasir: full layers keep everything, windows their window, recurrent layers one state.
    live: usize,
    /// The same with all checkpoints of the policy.
    with_checkpoints: usize,
    /// A uniform cache: every attention layer keeps everything, whatever its window.
    uniform: usize,
    /// A state at every block boundary, windows kept whole.
    dense: usize,
}

fn kv(attention: &AttentionSpec) -> usize {
    attention.cache_width() * KV_BYTES
}

/// Distances of checkpoints for a new prompt: 16, 32, 48, 64, 96, 128, ...
fn checkpoints(tokens: usize) -> usize {
    let spaced = (0..).map(|power| 16usize << power).take_while(|at| *at <= tokens).count();
    let between = (0..).map(|power| 48usize << power).take_while(|at| *at <= tokens).count();
    (spaced + between).min(CHECKPOINTS)
}

fn bytes(spec: &ModelSpec, tokens: usize) -> Bytes {
    let tokens = tokens.next_multiple_of(BLOCK);
    let (mut held, mut uniform, mut state) = (0, 0, 0);
    for layer in &spec.layers {
        if let Some(attention) = layer.attention() {
            // A window that does not end at a block boundary needs one more block.
            let window = |window: usize| (window - 1).next_multiple_of(BLOCK) + BLOCK;
            held += kv(attention) * attention.window.map_or(tokens, |w| tokens.min(window(w)));
            uniform += kv(attention) * tokens;
        }
        state += layer.state_elements() * STATE_BYTES;
    }
    Bytes {
        live: held + state,
        with_checkpoints: held + state * (1 + checkpoints(tokens)),
        uniform: uniform + state,
        dense: uniform + state * tokens / BLOCK,
    }
}

fn human(bytes: usize) -> String {
    match bytes as f64 {
        bytes if bytes >= 1e9 => format!("{:.2} GB", bytes / 1e9),
        bytes if bytes >= 1e6 => format!("{:.1} MB", bytes / 1e6),
        bytes => format!("{:.0} kB", bytes / 1e3),
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    println!(
        "| model | tokens | a live sequence | with its checkpoints | uniform KV cache | a state at every block |"
    );
    println!("|---|---|---|---|---|---|");
    for path in &arguments.models {
        let file = ModelFile::open(path).with_context(|| path.display().to_string())?;
        let spec = ModelSpec::from_file(&file).with_context(|| path.display().to_string())?;
        let Some(stem) = path.file_stem() else { bail!("{} has no name", path.display()) };
        for &tokens in &arguments.tokens {
            let found = bytes(&spec, tokens);
            let times = |other: usize| format!("{} ({:.1}x)", human(other), other as f64 / found.live as f64);
            println!(
                "| {} ({}) | {tokens} | {} | {} | {} | {} |",
                stem.to_string_lossy(),
                spec.arch,
                human(found.live),
                times(found.with_checkpoints),
                times(found.uniform),
                times(found.dense),
            );
        }
    }
    Ok(())
}
