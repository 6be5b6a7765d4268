//! `kvasir models`: the catalog, the cache, what is in a file. And how MODEL becomes a file.

use anyhow::{Context, bail};
use model::Gguf;
use model::inspect::Summary;
use proto::ids::ModelId;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Lists, pulls, inspects and verifies models.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir models list\n  kvasir models inspect ./my-model.gguf")]
pub(crate) struct Models {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    Inspect(Inspect),
}

/// Shows what a model file says: architecture, layers, tensors, tokenizer.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models inspect smollm2-135m --json")]
struct Inspect {
    /// Catalog name or path of a .gguf file.
    model: String,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

impl Models {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        match self.action {
            Action::Inspect(inspect) => {
                let file = Gguf::open(resolve_or_pull(&inspect.model)?.path)?;
                let summary = Summary::of(&file)?;
                if inspect.json {
                    writeln!(out, "{}", serde_json::to_string(&summary)?)?;
                } else {
                    write!(out, "{summary}")?;
                }
            }
        }
        Ok(())
    }
}

/// A model as a file and its name in the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) path: PathBuf,
    pub(crate) id: ModelId,
}

/// The file behind MODEL: a path, or a name of the catalog, which is pulled on first use.
pub(crate) fn resolve_or_pull(model: &str) -> anyhow::Result<Resolved> {
    let path = Path::new(model);
    if path.exists() {
        let stem =
            path.file_stem().and_then(|stem| stem.to_str()).context("a file name that is not UTF-8")?;
        let path = path.canonicalize().with_context(|| model.to_owned())?;
        return Ok(Resolved { path, id: ModelId::new(stem)? });
    }
    bail!("{model}: no such file, and no such name in the catalog");
}
