//! `kvasir keys`: manages API keys.

use crate::access::Access;
use crate::admin::{escape, word};
use crate::columns::columns;
use crate::config::Period;
use serde_json::{Value, json};
use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const PATH: &str = "/admin/v1/keys";
/// Coordinators accept or refuse a change within two seconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Creates, lists and revokes the API keys of a cluster.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir keys create --tenant team-a --rpm 600 --expires 90d\n  kvasir keys list\n  \
    kvasir keys revoke 3f1c09ab77e2d454\n\n\
    Every coordinator accepts these commands. All of them accept a key once it is created, and none once it is revoked.\n\
    From its first key on, a cluster requires a key of every client, also on its own machine and after the last key\n\
    is revoked. `kvasir tenants` sets the limits of tenants and the groups that share cached prefixes."
)]
pub(crate) struct Keys {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    Create(Create),
    List(List),
    Revoke(Revoke),
}

/// Limits of a key or a tenant.
#[derive(clap::Args)]
pub(crate) struct Limits {
    /// Requests per minute [default: no limit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rpm: Option<u32>,
    /// Prompt and generated tokens per minute [default: no limit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    tpm: Option<u64>,
    /// Concurrent requests [default: no limit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Option<u32>,
}

impl Limits {
    /// JSON for the coordinator's API.
    pub(crate) fn json(&self) -> Value {
        json!({"rpm": self.rpm, "tpm": self.tpm, "concurrency": self.concurrency})
    }
}

/// Creates a key and prints it. The key is not stored and cannot be shown again.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir keys create --tenant team-a --models qwen3 --concurrency 8 --expires 24h"
)]
struct Create {
    /// Tenant of the key. Tenants share no cached prefixes unless they are in one cache group.
    #[arg(long, value_name = "NAME")]
    tenant: String,
    /// Models that the key allows, separated by commas [default: all].
    #[arg(long, value_name = "ID,..", value_delimiter = ',')]
    models: Vec<String>,
    #[command(flatten)]
    limits: Limits,
    /// Lifetime of the key, such as 90d [default: unlimited].
    #[arg(long, value_name = "TIME")]
    expires: Option<Period>,
    /// Also allow /admin/v1 on the ops port.
    #[arg(long)]
    admin: bool,
    #[command(flatten)]
    access: Access,
    /// Print the key as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Lists the keys without their secrets.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir keys list --json")]
struct List {
    #[command(flatten)]
    access: Access,
    /// Print the keys as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Revokes a key: no coordinator accepts it any more, and its queued requests are refused.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir keys revoke 3f1c09ab77e2d454")]
struct Revoke {
    /// Id of the key or a unique beginning of it, as listed by `kvasir keys list`.
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    access: Access,
}

impl Keys {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        match self.action {
            Action::Create(create) => {
                let made = create.access.json("POST", PATH, Some(&create.body()), TIMEOUT)?;
                match create.json {
                    true => writeln!(out, "{made}")?,
                    false => {
                        eprintln!(
                            "created key {} of tenant {}; it cannot be shown again:",
                            word(&made, "id"),
                            create.tenant
                        );
                        writeln!(out, "{}", word(&made, "key"))?;
                    }
                }
            }
            Action::List(List { access, json }) => {
                let keys = access.json("GET", PATH, None, TIMEOUT)?;
                let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
                match json {
                    true => writeln!(out, "{keys}")?,
                    false => write!(out, "{}", table(&keys, now))?,
                }
            }
            Action::Revoke(Revoke { id, access }) => {
                access.json("DELETE", &format!("{PATH}/{}", escape(&id)), None, TIMEOUT)?;
                writeln!(out, "key {id} is revoked")?;
            }
        }
        Ok(())
    }
}

impl Create {
    fn body(&self) -> Value {
        let mut body = self.limits.json();
        body["tenant"] = self.tenant.as_str().into();
        body["models"] = self.models.clone().into();
        body["admin"] = self.admin.into();
        body["expires_s"] = self.expires.map(|period| period.millis().div_ceil(1000)).into();
        body
    }
}

fn table(keys: &Value, now: u64) -> String {
    let head = ["ID", "TENANT", "MODELS", "RPM", "TPM", "CONCURRENCY", "ENDS", "FROM"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for key in keys.get("keys").and_then(Value::as_array).into_iter().flatten() {
        let models = key.get("models").and_then(Value::as_array).into_iter().flatten();
        let models = models.filter_map(Value::as_str).collect::<Vec<_>>().join(",");
        let admin = key.get("admin") == Some(&Value::Bool(true));
        rows.push(vec![
            word(key, "id"),
            word(key, "tenant") + if admin { " (admin)" } else { "" },
            if models.is_empty() { "all".into() } else { models },
            word(key, "rpm"),
            word(key, "tpm"),
            word(key, "concurrency"),
            ends(key.get("expires_unix_s").and_then(Value::as_u64), now),
            word(key, "from"),
        ]);
    }
    columns(&rows)
}

fn ends(at: Option<u64>, now: u64) -> String {
    match at.map(|at| at.saturating_sub(now)) {
        None => "never".into(),
        Some(0) => "ended".into(),
        Some(s) if s < 3_600 => format!("in {}m", s.div_ceil(60)),
        Some(s) if s < 172_800 => format!("in {}h", s / 3_600),
        Some(s) => format!("in {}d", s / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_listed_with_what_they_open_and_until_when() {
        let key = |id: &str, models: &[&str], expires: Option<u64>| {
            json!({"id": id, "tenant": "a", "admin": id == "2", "models": models, "rpm": 60, "tpm": null,
                   "concurrency": null, "expires_unix_s": expires, "from": "cluster"})
        };
        let keys = [key("1", &["m", "n"], Some(1_000)), key("2", &[], None), key("3", &[], Some(1_000_000))];
        let text = table(&json!({"keys": keys}), 1_000);
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[1], ["1", "a", "m,n", "60", "-", "-", "ended", "cluster"]);
        assert_eq!(words[2], ["2", "a", "(admin)", "all", "60", "-", "-", "never", "cluster"]);
        assert_eq!(words[3][6..8], ["in", "11d"]);
    }
}
