//! `kvasir coordinators`: manages the members of the coordinators' group.

use crate::access::Access;
use crate::admin::{escape, word};
use crate::status::columns;
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;

const PATH: &str = "/admin/v1/coordinators";
/// An added coordinator has half a minute to catch up.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Lists, adds and removes coordinators of a group, and hands leadership over.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir coordinators list\n  kvasir coordinators add c3=10.0.0.4:7000\n  \
    kvasir coordinators remove c1\n  kvasir coordinators transfer c2\n\n\
    A coordinator that has lost its data directory is another member than before: `remove` it and `add` it again.\n\
    One that is added must run, with a data directory and with --peers naming it and the members of the group.\n\
    Any coordinator can be asked. Changes go one at a time, and none that would leave the group without a majority\n\
    that is there is made."
)]
pub(crate) struct Coordinators {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    List(List),
    Add(Add),
    Remove(Remove),
    Transfer(Transfer),
}

/// How the cluster is reached and the group is shown.
#[derive(clap::Args)]
struct Asked {
    #[command(flatten)]
    access: Access,
    /// Print the group as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Shows who takes part, who votes and who leads.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir coordinators list --json")]
struct List {
    #[command(flatten)]
    asked: Asked,
}

/// Adds a coordinator: it follows, catches up, and then votes.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir coordinators add c3=10.0.0.4:7000")]
struct Add {
    /// Its name and its QUIC address.
    #[arg(value_name = "NAME=HOST:PORT", value_parser = named)]
    coordinator: (String, String),
    #[command(flatten)]
    asked: Asked,
}

/// Removes a coordinator from the group; its process goes on until it is ended.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir coordinators remove c1")]
struct Remove {
    /// Its name.
    name: String,
    #[command(flatten)]
    asked: Asked,
}

/// Hands leadership to a coordinator.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir coordinators transfer c2")]
struct Transfer {
    /// Its name.
    name: String,
    #[command(flatten)]
    asked: Asked,
}

fn named(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(name, quic)| !name.is_empty() && quic.contains(':'));
    let (name, quic) = pair.ok_or("it must be NAME=HOST:PORT")?;
    Ok((name.to_owned(), quic.to_owned()))
}

impl Coordinators {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self.action {
            Action::List(List { asked }) => asked.show(),
            Action::Add(Add { coordinator: (id, quic), asked }) => {
                asked.access.json("POST", PATH, Some(&json!({"id": id, "quic": quic})), TIMEOUT)?;
                asked.show()
            }
            Action::Remove(Remove { name, asked }) => {
                asked.access.json("DELETE", &format!("{PATH}/{}", escape(&name)), None, TIMEOUT)?;
                asked.done(&format!("{name} is no member any more"))
            }
            Action::Transfer(Transfer { name, asked }) => {
                asked.access.json("POST", &format!("{PATH}/{}/lead", escape(&name)), None, TIMEOUT)?;
                asked.done(&format!("{name} leads"))
            }
        }
    }
}

impl Asked {
    fn show(&self) -> anyhow::Result<()> {
        let group = self.access.json("GET", PATH, None, TIMEOUT)?;
        let mut out = std::io::stdout().lock();
        if self.json {
            writeln!(out, "{group}")?
        } else {
            write!(out, "{}", table(&group))?
        }
        Ok(())
    }

    /// Prints `words` or the group. The contacted coordinator may no longer be a member.
    fn done(&self, words: &str) -> anyhow::Result<()> {
        if self.json {
            return self.show();
        }
        writeln!(std::io::stdout().lock(), "{words}")?;
        Ok(())
    }
}

fn table(group: &Value) -> String {
    let head = ["COORDINATOR", "QUIC", "ROLE", "HERE", "LEVEL"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for member in group.get("coordinators").and_then(Value::as_array).into_iter().flatten() {
        let is = |name| member.get(name) == Some(&Value::Bool(true));
        let role = match (member.get("id") == group.get("leader"), is("votes")) {
            (true, _) => "leader",
            (false, true) => "voter",
            (false, false) => "learner",
        };
        let here = match (is("here"), is("another_life")) {
            (_, true) => "wiped: remove it, then add it",
            (true, false) => "yes",
            (false, false) => "no",
        };
        rows.push(vec![
            word(member, "id"),
            word(member, "quic"),
            role.into(),
            here.into(),
            word(member, "level"),
        ]);
    }
    let mut text = columns(&rows);
    if group.get("agreed") != Some(&Value::Bool(true)) {
        text += "no majority has confirmed this: it is what was agreed on last\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_tells_who_leads_and_who_was_wiped() {
        let member = |id: &str, votes: bool, here: bool, another_life: bool| json!({"id": id, "quic": "h:1", "votes": votes, "here": here, "another_life": another_life, "level": 1});
        let members = [
            member("c0", true, true, false),
            member("c1", true, false, true),
            member("c2", true, false, false),
            member("c3", false, true, false),
        ];
        let text = table(&json!({"agreed": true, "leader": "c0", "coordinators": members}));
        let words: Vec<Vec<&str>> =
            text.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[0], ["c0", "h:1", "leader", "yes", "1"]);
        assert_eq!(words[1][2..4], ["voter", "wiped:"]);
        assert_eq!(words[2][2..4], ["voter", "no"]);
        assert_eq!(words[3][2..4], ["learner", "yes"]);
        assert!(!text.contains("majority"));
        assert!(table(&json!({"agreed": false})).contains("majority"));
    }

    #[test]
    fn who_is_added_has_a_name_and_a_place() {
        assert_eq!(named("c3=10.0.0.4:7000"), Ok(("c3".into(), "10.0.0.4:7000".into())));
        for wrong in ["c3", "=10.0.0.4:7000", "c3=10.0.0.4"] {
            assert!(named(wrong).is_err(), "{wrong}");
        }
    }
}
