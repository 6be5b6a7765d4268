//! `kvasir prefix`: pins prefixes, which computes them ahead and protects them against eviction.

use crate::admin::{Admin, escape, word};
use crate::columns::columns;
use crate::config::Period;
use anyhow::Context;
use serde_json::{Value, json};
use std::path::PathBuf;

const PATH: &str = "/admin/v1/prefixes";

/// Pins, lists and drops prefixes.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir prefix pin --file system-prompt.txt --ttl 12h\n  kvasir prefix list\n  \
    kvasir prefix drop worker-0.1"
)]
pub(crate) struct Prefix {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    Pin(Pin),
    List(List),
    Drop(Drop),
}

/// Computes a prefix at every worker that serves the model, or at one, and protects it against eviction.
///
/// Only full units of 16 tokens are pinned, within each worker's budget for pins.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir prefix pin --text 'You are a helpful assistant.'\n  \
    kvasir prefix pin --messages chat.json --worker worker-0 --ttl 30m")]
struct Pin {
    #[command(flatten)]
    target: PinTarget,
    /// Time until the pin expires; 0s is until it is dropped.
    #[arg(long, value_name = "TIME", default_value = "1h")]
    ttl: Period,
    #[command(flatten)]
    admin: Admin,
}

/// The prefix to pin.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct PinTarget {
    /// The prefix as text.
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,
    /// File with the prefix as text.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// JSON file with the messages of a chat.
    #[arg(long, value_name = "FILE")]
    messages: Option<PathBuf>,
    /// JSON file with an array of token ids.
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
}

/// Lists pins with their remaining time, and each worker's budget.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir prefix list --json")]
struct List {
    #[command(flatten)]
    admin: Admin,
}

/// Removes a pin. The prefix stays cached until its memory is needed.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir prefix drop worker-0.1")]
struct Drop {
    /// Id of the pin, as listed by `kvasir prefix list`.
    id: String,
    #[command(flatten)]
    admin: Admin,
}

impl PinTarget {
    /// The request field for the target.
    fn field(&self) -> anyhow::Result<(&'static str, Value)> {
        let read = |path: &PathBuf| std::fs::read_to_string(path).with_context(|| path.display().to_string());
        let json = |path: &PathBuf| -> anyhow::Result<Value> {
            serde_json::from_str(&read(path)?).with_context(|| path.display().to_string())
        };
        match (&self.text, &self.file, &self.messages, &self.tokens) {
            (Some(text), ..) => Ok(("prompt", text.as_str().into())),
            (_, Some(path), ..) => Ok(("prompt", read(path)?.into())),
            (_, _, Some(path), _) => Ok(("messages", json(path)?)),
            (_, _, _, Some(path)) => Ok(("prompt", json(path)?)),
            _ => anyhow::bail!("one of --text, --file, --messages and --tokens is required"),
        }
    }
}

impl Prefix {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self.action {
            Action::Pin(Pin { target, ttl, admin }) => {
                let (name, value) = target.field()?;
                let body = json!({name: value, "ttl_s": ttl.0.as_secs()});
                let answer = admin.request("POST", PATH, &[], Some(&body))?;
                admin.show(&answer, table)
            }
            Action::List(List { admin }) => {
                let answer = admin.request("GET", PATH, &[], None)?;
                admin.show(&answer, table)
            }
            Action::Drop(Drop { id, admin }) => {
                admin.request("DELETE", &format!("{PATH}/{}", escape(&id)), &[], None)?;
                admin.show(&json!({"id": id}), |_| String::new())
            }
        }
    }
}

fn table(list: &Value) -> String {
    let mut rows =
        vec![["PIN", "WORKER", "TOKENS", "EXPIRES IN S", "PINNED", "BUDGET"].map(str::to_owned).to_vec()];
    let fields = ["id", "worker", "tokens", "expires_in_s", "pinned_bytes", "budget_bytes"];
    let entries = list.get("prefixes").and_then(Value::as_array).into_iter().flatten();
    rows.extend(entries.map(|entry| fields.map(|field| word(entry, field)).to_vec()));
    columns(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_prefix_is_text_messages_or_tokens() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            Some(path)
        };
        let none = || PinTarget { text: None, file: None, messages: None, tokens: None };
        let text = PinTarget { text: Some("a".into()), ..none() };
        assert_eq!(text.field().unwrap(), ("prompt", json!("a")));
        let from_file = PinTarget { file: file("t", "[1]"), ..none() };
        assert_eq!(from_file.field().unwrap(), ("prompt", json!("[1]")));
        let tokens = PinTarget { tokens: file("i", "[1, 2]"), ..none() };
        assert_eq!(tokens.field().unwrap(), ("prompt", json!([1, 2])));
        let messages = PinTarget { messages: file("m", "[{\"role\":\"user\"}]"), ..none() };
        assert_eq!(messages.field().unwrap(), ("messages", json!([{"role": "user"}])));
        let broken = PinTarget { messages: file("b", "{"), ..none() };
        assert!(format!("{:#}", broken.field().unwrap_err()).contains('b'));
    }

    #[test]
    fn the_table_shows_pins_with_and_without_an_end() {
        let text = table(&json!({"prefixes": [
            {"id": "w0.1", "worker": "w0", "tokens": 96, "expires_in_s": 3600, "pinned_bytes": 5, "budget_bytes": 9},
            {"id": "w1.4", "worker": "w1", "tokens": 96, "expires_in_s": null, "pinned_bytes": 5, "budget_bytes": 9},
        ]}));
        assert!(text.contains("w0.1") && text.contains("3600") && text.contains('-'), "{text}");
    }
}
