//! `make-model`: a GGUF of a real model's shape with random weights, for speed at realistic size.
//!
//! Speed does not depend on the values. Scales are small and recurrent states decay, so that activations stay
//! finite; the vocabulary is one that every engine can load, its texts mean nothing.

use anyhow::{Context, Result};
use clap::Parser;
use model::gguf::writer::Writer;
use quant::Quant;
use random::Random;
use shapes::{Plan, Shape};
use std::io::BufWriter;
use std::path::PathBuf;

mod quant;
mod random;
mod shapes;

/// Writes a GGUF of a real model's shape with random weights
#[derive(Parser)]
#[command(
    after_help = "Example:\n  make-model --shape qwen3-0.6b --quant q4-k-m --out target/qwen3-0.6b-q4_k_m.gguf"
)]
struct Args {
    /// Model whose dimensions are used
    #[arg(long, value_enum, default_value = "qwen3-0.6b")]
    shape: Shape,
    /// Type of the weights
    #[arg(long, value_enum)]
    quant: Quant,
    /// The file to write
    #[arg(long)]
    out: PathBuf,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let Plan { metadata, tensors } = args.shape.plan(args.quant);
    let mut writer = Writer::new(metadata)?;
    for (name, ty, dims) in &tensors {
        writer.tensor(name, *ty, dims)?;
    }
    let file =
        std::fs::File::create(&args.out).with_context(|| format!("cannot create {}", args.out.display()))?;
    let mut random = Random::new();
    writer.write(&mut BufWriter::new(file), |info| {
        random.tensor(info.name(), info.ty(), info.bytes() as usize)
    })?;
    Ok(())
}
