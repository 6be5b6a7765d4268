//! `kvasir snapshot`: saves a sequence's caches to a file, and other operations on sequences.

use crate::admin::{Admin, escape, word};
use crate::columns::columns;
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

const PATH: &str = "/admin/v1/snapshots";

/// Saves, restores, forks, cuts and lists sequences. A sequence is named by its request's `x-request-id`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir snapshot save my-request --out my-request.kvsnap\n  \
    kvasir snapshot restore my-request.kvsnap --as again\n  kvasir snapshot list\n\n\
    ID is the request's header `x-request-id`, or the response's if the request had none. A sequence is known while\n\
    it is generated, and after its end until it is displaced by later ones.")]
pub(crate) struct Snapshot {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    Save(Save),
    Restore(Restore),
    Fork(Fork),
    Reset(Reset),
    List(List),
    Drop(Drop),
}

/// The selected sequence.
#[derive(clap::Args)]
struct Named {
    /// Id of the request: its header `x-request-id`.
    id: String,
    /// Index of the choice, for a request with `n` > 1 or several prompts.
    #[arg(long, value_name = "N")]
    choice: Option<u32>,
}

/// Saves a sequence's caches to a file, or at its worker.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir snapshot save my-request --out my-request.kvsnap\n  \
    kvasir snapshot save my-request --keep disk")]
struct Save {
    #[command(flatten)]
    sequence: Named,
    /// File to write; it must not exist.
    #[arg(long, value_name = "FILE", required_unless_present = "keep")]
    out: Option<PathBuf>,
    /// Keep the snapshot at the worker instead: in its memory, or on its disk, where it outlives the process.
    #[arg(long, value_enum, conflicts_with = "out")]
    keep: Option<Medium>,
    #[command(flatten)]
    admin: Admin,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Medium {
    Memory,
    Disk,
}

/// Restores a saved sequence's caches. A request that continues it computes only its new tokens.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir snapshot restore my-request.kvsnap\n  \
    kvasir snapshot restore --kept my-request --worker worker-1")]
struct Restore {
    /// File written by `save --out`.
    #[arg(required_unless_present = "kept")]
    file: Option<PathBuf>,
    /// Id of the sequence of a snapshot that a worker keeps; with `--worker` it is restored there.
    #[arg(long, value_name = "ID", conflicts_with = "file")]
    kept: Option<String>,
    /// Index of the choice.
    #[arg(long, value_name = "N")]
    choice: Option<u32>,
    /// Id of the restored sequence [default: the snapshot's; for a file a new one].
    #[arg(long = "as", value_name = "ID")]
    name: Option<String>,
    #[command(flatten)]
    admin: Admin,
}

/// Creates another sequence at the same position, which shares all blocks of this one.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir snapshot fork my-request --as what-if")]
struct Fork {
    #[command(flatten)]
    sequence: Named,
    /// Id of the fork [default: a new one].
    #[arg(long = "as", value_name = "ID")]
    name: Option<String>,
    #[command(flatten)]
    admin: Admin,
}

/// Truncates a sequence to its first tokens and frees the rest.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir snapshot reset my-request --keep 1024")]
struct Reset {
    #[command(flatten)]
    sequence: Named,
    /// Number of tokens to keep.
    #[arg(long, value_name = "N")]
    keep: u32,
    #[command(flatten)]
    admin: Admin,
}

/// Lists known sequences and the snapshots that workers keep.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir snapshot list --json")]
struct List {
    #[command(flatten)]
    admin: Admin,
}

/// Forgets a sequence's id and deletes the snapshot that a worker keeps of it.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir snapshot drop my-request")]
struct Drop {
    #[command(flatten)]
    sequence: Named,
    #[command(flatten)]
    admin: Admin,
}

impl Named {
    fn path(&self, action: &str) -> String {
        format!("{PATH}/{}{action}", escape(&self.id))
    }

    fn query(&self) -> [(&'static str, Option<String>); 1] {
        choice(self.choice)
    }
}

fn choice(choice: Option<u32>) -> [(&'static str, Option<String>); 1] {
    [("choice", choice.map(|choice| choice.to_string()))]
}

impl Snapshot {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self.action {
            Action::Save(command) => command.run(),
            Action::Restore(command) => command.run(),
            Action::Fork(Fork { sequence, name, admin }) => {
                let body = json!({ "as": name });
                let answer =
                    admin.request("POST", &sequence.path("/fork"), &sequence.query(), Some(&body))?;
                admin.show(&answer, stands)
            }
            Action::Reset(Reset { sequence, keep, admin }) => {
                let body = json!({ "keep": keep });
                let answer =
                    admin.request("POST", &sequence.path("/reset"), &sequence.query(), Some(&body))?;
                admin.show(&answer, stands)
            }
            Action::List(List { admin }) => {
                let answer = admin.request("GET", PATH, &[], None)?;
                admin.show(&answer, table)
            }
            Action::Drop(Drop { sequence, admin }) => {
                admin.request("DELETE", &sequence.path(""), &sequence.query(), None)?;
                admin.show(&json!({"id": sequence.id}), |_| String::new())
            }
        }
    }
}

impl Save {
    fn run(self) -> anyhow::Result<()> {
        let Self { sequence, out, keep, admin } = self;
        if let Some(medium) = keep {
            let medium = match medium {
                Medium::Memory => "memory",
                Medium::Disk => "disk",
            };
            let body = json!({"id": sequence.id, "medium": medium});
            let answer = admin.request("POST", PATH, &sequence.query(), Some(&body))?;
            return admin.show(&answer, |snapshot| {
                let [bytes, worker, medium] = ["bytes", "worker", "medium"].map(|name| word(snapshot, name));
                format!("{worker} keeps {bytes} bytes ({medium})\n")
            });
        }
        let path = out.context("--out FILE or --keep is required")?;
        let bytes = download(&admin, &sequence, &path)?;
        let answer =
            json!({"id": sequence.id, "choice": sequence.choice.unwrap_or(0), "file": path, "bytes": bytes});
        admin.show(&answer, |_| format!("wrote {bytes} bytes to {}\n", path.display()))
    }
}

/// Downloads to a temporary file and renames it when complete.
fn download(admin: &Admin, sequence: &Named, path: &Path) -> anyhow::Result<u64> {
    ensure!(!path.exists(), "{} already exists", path.display());
    let unfinished = path.with_added_extension("unfinished");
    let named = || unfinished.display().to_string();
    let written = proto::directory::create_private(&unfinished).with_context(named).and_then(|mut file| {
        let bytes = admin.download(&sequence.path(""), &sequence.query(), &mut file)?;
        file.flush().and_then(|()| file.sync_all()).with_context(named)?;
        std::fs::rename(&unfinished, path).with_context(|| path.display().to_string())?;
        Ok(bytes)
    });
    if written.is_err() {
        // The partial file is useless; the original error is reported.
        let _ = std::fs::remove_file(&unfinished);
    }
    written
}

impl Restore {
    fn run(self) -> anyhow::Result<()> {
        let Self { file, kept, choice: nth, name, admin } = self;
        let answer = match (file, kept) {
            (Some(path), _) => {
                let named = || path.display().to_string();
                let mut file = File::open(&path).with_context(named)?;
                let length = file.metadata().with_context(named)?.len();
                let [choice] = choice(nth);
                admin.upload(PATH, &[choice, ("id", name)], &mut file, length)?
            }
            (None, Some(id)) => {
                let body = json!({ "as": name });
                let path = format!("{PATH}/{}/restore", escape(&id));
                admin.request("POST", &path, &choice(nth), Some(&body))?
            }
            (None, None) => anyhow::bail!("FILE or --kept ID is required"),
        };
        admin.show(&answer, stands)
    }
}

/// Text for the location of a sequence.
fn stands(sequence: &Value) -> String {
    let [id, worker, tokens, cached] = ["id", "worker", "tokens", "cached"].map(|name| word(sequence, name));
    format!("{id} at {worker}: {tokens} tokens, {cached} of them cached\n")
}

fn table(list: &Value) -> String {
    let rows = |list: &Value, kind: &str, head: &[&str], fields: &[&str]| {
        let mut rows: Vec<Vec<String>> = vec![head.iter().map(|cell| (*cell).to_owned()).collect()];
        let entries = list.get(kind).and_then(Value::as_array).into_iter().flatten();
        rows.extend(entries.map(|entry| fields.iter().map(|field| word(entry, field)).collect()));
        columns(&rows)
    };
    let sequences = rows(
        list,
        "sequences",
        &["SEQUENCE", "CHOICE", "WORKER", "TOKENS", "CACHED", "LIVE"],
        &["id", "choice", "worker", "tokens", "cached", "live"],
    );
    let snapshots = rows(
        list,
        "snapshots",
        &["SNAPSHOT", "CHOICE", "WORKER", "BYTES", "WHERE"],
        &["id", "choice", "worker", "bytes", "medium"],
    );
    format!("{sequences}\n{snapshots}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_show_what_there_is() {
        let list = json!({
            "sequences": [{"id": "r1", "choice": 0, "worker": "worker-0", "tokens": 40, "cached": 32, "live": false}],
            "snapshots": [{"id": "r2", "choice": 1, "worker": "worker-1", "bytes": 70_000, "medium": "disk", "new": 1}],
        });
        let text = table(&list);
        for expected in ["SEQUENCE", "r1", "worker-0", "40", "32", "r2", "70000", "disk"] {
            assert!(text.contains(expected), "{expected} not in\n{text}");
        }
        assert_eq!(stands(&list["sequences"][0]), "r1 at worker-0: 40 tokens, 32 of them cached\n");
    }
}
