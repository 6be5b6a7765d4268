//! `kvasir tenants`: limits of tenants, and cache groups.

use crate::access::Access;
use crate::admin::{escape, word};
use crate::columns::columns;
use crate::keys::Limits;
use serde_json::Value;
use std::io::Write;
use std::time::Duration;

const PATH: &str = "/admin/v1/tenants";
/// Coordinators accept or refuse a change within two seconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Lists tenants, sets their limits, lets them share cached prefixes, and removes them.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir tenants list\n  kvasir tenants set team-a --rpm 6000 --concurrency 64\n  kvasir tenants remove team-a\n\n\
    Tenants with the same --cache-group share cached prefixes. One of them can infer from the time of an answer whether\n\
    another one has sent the same prompt. A tenant without a group shares with no other tenant."
)]
pub(crate) struct Tenants {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    List(List),
    Set(Set),
    Remove(Remove),
}

/// Lists the tenants that have keys or limits.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir tenants list --json")]
struct List {
    #[command(flatten)]
    access: Access,
    /// Print the tenants as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Sets all limits and the cache group of a tenant. Omitted limits and an omitted group are removed.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir tenants set team-a --tpm 200000 --cache-group research")]
struct Set {
    /// Name of the tenant, which is created if it is new.
    #[arg(value_name = "NAME")]
    tenant: String,
    #[command(flatten)]
    limits: Limits,
    /// Name of the cache group; its tenants share cached prefixes [default: none].
    #[arg(long, value_name = "NAME")]
    cache_group: Option<String>,
    #[command(flatten)]
    access: Access,
}

/// Removes a tenant with its limits and its cache group, and revokes all its keys.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir tenants remove team-a")]
struct Remove {
    /// Name of the tenant.
    #[arg(value_name = "NAME")]
    tenant: String,
    #[command(flatten)]
    access: Access,
}

impl Tenants {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        match self.action {
            Action::List(List { access, json }) => {
                let tenants = access.json("GET", PATH, None, TIMEOUT)?;
                match json {
                    true => writeln!(out, "{tenants}")?,
                    false => write!(out, "{}", table(&tenants))?,
                }
            }
            Action::Set(Set { tenant, limits, cache_group, access }) => {
                let mut body = limits.json();
                body["cache_group"] = cache_group.into();
                access.json("PUT", &format!("{PATH}/{}", escape(&tenant)), Some(&body), TIMEOUT)?;
                writeln!(out, "the limits of {tenant} are set at all coordinators")?;
            }
            Action::Remove(Remove { tenant, access }) => {
                access.json("DELETE", &format!("{PATH}/{}", escape(&tenant)), None, TIMEOUT)?;
                writeln!(out, "{tenant} is removed at all coordinators, and its keys are revoked")?;
            }
        }
        Ok(())
    }
}

fn table(tenants: &Value) -> String {
    let head = ["TENANT", "RPM", "TPM", "CONCURRENCY", "CACHE GROUP"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for tenant in tenants.get("tenants").and_then(Value::as_array).into_iter().flatten() {
        rows.push(
            ["tenant", "rpm", "tpm", "concurrency", "cache_group"].map(|name| word(tenant, name)).to_vec(),
        );
    }
    columns(&rows)
}
