//! `kvasir tokenize`: prints the tokens of a text.

use crate::models;
use anyhow::Context;
use model::ModelFile;
use std::io::Write;
use text::Tokenizer;

/// Prints the token ids of a text.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir tokenize smollm2-135m --text 'Hello, world!' --json")]
pub(crate) struct Tokenize {
    /// Catalog name, https:// or hf:// address, or path of a .gguf file or a Hugging Face folder.
    model: String,
    /// Text to tokenize.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    text: String,
    /// Parse special tokens in the text, such as <|im_start|>; without this flag they are ordinary text.
    #[arg(long)]
    special: bool,
    /// Add the model's beginning-of-sequence token and, if the vocabulary ends every text with one (`[SEP]` of
    /// encoders), its end-of-sequence token.
    #[arg(long)]
    bos: bool,
    /// Print {"ids":[...]} instead of one token with its text per line.
    #[arg(long)]
    json: bool,
}

impl Tokenize {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let model = models::resolve_or_pull(&self.model)?;
        let file = ModelFile::open(&model.path)?;
        let tokenizer = Tokenizer::from_metadata(file.metadata())?;
        let mut ids = tokenizer.encode(&self.text, self.special);
        if self.bos {
            ids.insert(0, tokenizer.bos().context("the model has no beginning-of-sequence token")?);
            ids.extend(tokenizer.eos().filter(|_| tokenizer.adds_eos()));
        }
        let mut out = std::io::stdout().lock();
        if self.json {
            writeln!(out, "{}", serde_json::json!({"ids": ids}))?;
        } else {
            for id in ids {
                writeln!(out, "{id:>8}  {:?}", tokenizer.decode(&[id], false))?;
            }
        }
        Ok(())
    }
}
