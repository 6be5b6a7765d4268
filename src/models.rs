//! `kvasir models`: the catalog, the cache, what is in a file. And how MODEL becomes a file.

use crate::home;
use crate::progress::Bar;
use crate::shipped;
use crate::status::columns;
use anyhow::Context;
use model::ModelFile;
use model::catalog::{self, Entry, Listed, Store};
use model::inspect::Summary;
use model::shard::ChunkId;
use proto::ids::ModelId;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Lists, pulls, inspects and verifies models.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir models list\n  kvasir models pull smollm2-135m\n  \
    kvasir models inspect ./my-model.gguf")]
pub(crate) struct Models {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    List(List),
    Pull(Pull),
    Inspect(Inspect),
    Verify(Verify),
}

/// Shows the catalog and what of it is in the cache.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models list --json")]
struct List {
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Downloads a model of the catalog into the cache, checked, and prints its path.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models pull smollm2-135m")]
struct Pull {
    /// Name in the catalog.
    #[arg(value_parser = entry)]
    model: &'static Entry,
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
    /// Print the model's digest and nothing else, as `kvasir worker --from` takes it for MODEL.
    #[arg(long, conflicts_with = "json")]
    digest: bool,
}

/// Compares a pulled model with its pinned checksum.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models verify smollm2-135m")]
struct Verify {
    /// Name in the catalog.
    #[arg(value_parser = entry)]
    model: &'static Entry,
}

/// A catalog entry by name.
fn entry(name: &str) -> Result<&'static Entry, String> {
    let known = || catalog::CATALOG.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ");
    catalog::find(name).ok_or_else(|| format!("not in the catalog, which has {}", known()))
}

impl Models {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let store = Store::from_env()?;
        let mut out = std::io::stdout().lock();
        match self.action {
            Action::List(list) => {
                let text = if list.json { json_list(&store.list()) + "\n" } else { table(&store.list()) };
                write!(out, "{text}")?;
            }
            Action::Pull(pull) => {
                let path = store.pull(pull.model, &mut Bar::new())?;
                writeln!(out, "{}", path.display())?;
            }
            Action::Inspect(inspect) => {
                let file = ModelFile::open(resolve_or_pull(&inspect.model)?.path)?;
                if inspect.digest {
                    if let Some(digests) = home::digests() {
                        digests.fill(&file)?;
                    }
                    writeln!(out, "{}{}", shipped::DIGEST, ChunkId(file.digest()?))?;
                    return Ok(());
                }
                let summary = Summary::of(&file)?;
                if inspect.json {
                    writeln!(out, "{}", serde_json::to_string(&summary)?)?;
                } else {
                    write!(out, "{summary}")?;
                }
            }
            Action::Verify(verify) => {
                store.verify(verify.model, &mut Bar::new())?;
                writeln!(out, "{} is the pinned file", store.path(verify.model).display())?;
            }
        }
        Ok(())
    }
}

fn table(listed: &[Listed]) -> String {
    let mut rows = vec![["NAME", "SIZE", "HERE", "FILE"].map(str::to_owned).to_vec()];
    for model in listed {
        let size = format!("{} MiB", model.entry.bytes >> 20);
        let here = if model.present { "yes" } else { "no" };
        rows.push(vec![model.entry.name.into(), size, here.into(), model.path.display().to_string()]);
    }
    columns(&rows)
}

fn json_list(listed: &[Listed]) -> String {
    let models = listed.iter().map(|model| {
        serde_json::json!({
            "name": model.entry.name,
            "bytes": model.entry.bytes,
            "sha256": model.entry.sha256,
            "present": model.present,
            "path": model.path,
        })
    });
    serde_json::json!({"models": models.collect::<Vec<_>>()}).to_string()
}

/// A model as a file and its name in the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) path: PathBuf,
    pub(crate) id: ModelId,
}

/// The file behind MODEL: a name of the catalog, which is pulled on first use, or a path.
pub(crate) fn resolve_or_pull(model: &str) -> anyhow::Result<Resolved> {
    let store = Store::from_env()?;
    let resolved = store.resolve(model)?;
    let path = match resolved.entry {
        Some(entry) => {
            if !store.is_present(entry) {
                eprintln!("pulling {model} ({} MiB)", entry.bytes >> 20);
            }
            store.pull(entry, &mut Bar::new())?
        }
        None => resolved.path,
    };
    // Children of `up` do not run where the user typed a relative path.
    let path = path.canonicalize().with_context(|| path.display().to_string())?;
    Ok(Resolved { path, id: ModelId::new(resolved.id)? })
}

/// As [`resolve_or_pull`], but `ID=MODEL` gives the model another name in the API.
pub(crate) fn resolve_named(model: &str) -> anyhow::Result<Resolved> {
    match model.split_once('=') {
        Some((id, path)) if !Path::new(model).exists() => {
            Ok(Resolved { id: ModelId::new(id)?, ..resolve_or_pull(path)? })
        }
        _ => resolve_or_pull(model),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_catalog_is_listed_for_people_and_for_scripts() {
        let dir = tempfile::tempdir().unwrap();
        let listed = Store::at(dir.path()).list();
        let json: serde_json::Value = serde_json::from_str(&json_list(&listed)).unwrap();
        assert_eq!(json["models"].as_array().unwrap().len(), catalog::CATALOG.len());
        for model in catalog::CATALOG {
            assert!(table(&listed).contains(model.name));
        }
        assert_eq!(json["models"][0]["present"], false);
    }

    #[test]
    fn a_path_is_resolved_to_the_whole_path_and_its_stem() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tiny-f32.gguf");
        std::fs::write(&file, "").unwrap();
        let resolved = resolve_or_pull(file.to_str().unwrap()).unwrap();
        assert_eq!(resolved.id.as_str(), "tiny-f32");
        assert!(resolved.path.is_absolute());
        let named = resolve_named(&format!("mine={}", file.display())).unwrap();
        assert_eq!((named.id.as_str(), &named.path), ("mine", &resolved.path));
        assert!(resolve_or_pull("no-such-model").unwrap_err().to_string().contains("smollm2-135m"));
    }
}
