//! `kvasir coordinators`: manages the members of the coordinators' group.

use crate::access::Access;
use crate::admin::{escape, word};
use crate::columns::columns;
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;

const PATH: &str = "/admin/v1/coordinators";
/// An added coordinator has half a minute to catch up.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Lists, adds and removes coordinators of a group, and transfers leadership.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir coordinators list\n  kvasir coordinators add c3=10.0.0.4:7000\n  \
    kvasir coordinators remove c1\n  kvasir coordinators transfer c2\n\n\
    A coordinator that has lost its data directory counts as a new member: `remove` it and `add` it again.\n\
    A coordinator to add must be running, with a data directory and with itself and all members in --peers.\n\
    Every coordinator accepts these commands. Changes are made one at a time. A change that would leave the group\n\
    without a reachable majority is refused."
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

/// The contacted coordinator and the output format.
#[derive(clap::Args)]
struct GroupOptions {
    #[command(flatten)]
    access: Access,
    /// Print the group as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Lists the coordinators of the group, with voters and leader.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir coordinators list --json")]
struct List {
    #[command(flatten)]
    options: GroupOptions,
}

/// Adds a coordinator: it replicates the log as a learner, and votes once it has caught up.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir coordinators add c3=10.0.0.4:7000")]
struct Add {
    /// Name and QUIC address of the coordinator.
    #[arg(value_name = "NAME=HOST:PORT", value_parser = named)]
    coordinator: (String, String),
    #[command(flatten)]
    options: GroupOptions,
}

/// Removes a coordinator from the group; its process keeps running until it is stopped.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir coordinators remove c1")]
struct Remove {
    /// Name of the coordinator.
    name: String,
    #[command(flatten)]
    options: GroupOptions,
}

/// Transfers leadership to a coordinator.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir coordinators transfer c2")]
struct Transfer {
    /// Name of the coordinator.
    name: String,
    #[command(flatten)]
    options: GroupOptions,
}

fn named(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(name, quic)| !name.is_empty() && quic.contains(':'));
    let (name, quic) = pair.ok_or("must be NAME=HOST:PORT")?;
    Ok((name.to_owned(), quic.to_owned()))
}

impl Coordinators {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self.action {
            Action::List(List { options }) => options.show(),
            Action::Add(Add { coordinator: (id, quic), options }) => {
                options.access.json("POST", PATH, Some(&json!({"id": id, "quic": quic})), TIMEOUT)?;
                options.show()
            }
            Action::Remove(Remove { name, options }) => {
                options.access.json("DELETE", &format!("{PATH}/{}", escape(&name)), None, TIMEOUT)?;
                options.done(&format!("{name} is not a member any more"))
            }
            Action::Transfer(Transfer { name, options }) => {
                options.access.json("POST", &format!("{PATH}/{}/lead", escape(&name)), None, TIMEOUT)?;
                options.done(&format!("{name} is the leader"))
            }
        }
    }
}

impl GroupOptions {
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
            (_, true) => "wiped: remove and add it again",
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
        text += "no majority has confirmed this group; it is the last known state\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_the_leader_and_wiped_members() {
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
    fn an_added_coordinator_needs_a_name_and_an_address() {
        assert_eq!(named("c3=10.0.0.4:7000"), Ok(("c3".into(), "10.0.0.4:7000".into())));
        for wrong in ["c3", "=10.0.0.4:7000", "c3=10.0.0.4"] {
            assert!(named(wrong).is_err(), "{wrong}");
        }
    }
}
