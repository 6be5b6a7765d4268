//! `kvasir tenants`: limits of tenants, and cache groups.

use crate::access::Access;
use crate::admin::{escape, word};
use crate::keys::Limits;
use crate::status::columns;
use serde_json::Value;
use std::io::Write;
use std::time::Duration;

const PATH: &str = "/admin/v1/tenants";
/// Coordinators accept or refuse a change within two seconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Lists tenants, limits what they may ask for, and lets them share what is cached.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir tenants list\n  kvasir tenants set team-a --rpm 6000 --concurrency 64\n\n\
    Tenants with the same --cache-group share what is cached: one can tell from the time that an answer takes whether\n\
    another has asked for the same. Without a group a tenant shares with nobody."
)]
pub(crate) struct Tenants {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    List(List),
    Set(Set),
}

/// Shows the tenants that have keys or limits.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir tenants list --json")]
struct List {
    #[command(flatten)]
    access: Access,
    /// Print them as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Sets all limits of a tenant and its group; what is left out is no limit, and no group.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir tenants set team-a --tpm 200000 --cache-group research")]
struct Set {
    /// Which tenant; a new one is made.
    #[arg(value_name = "NAME")]
    tenant: String,
    #[command(flatten)]
    limits: Limits,
    /// Those of the same group share what is cached [default: nobody].
    #[arg(long, value_name = "NAME")]
    cache_group: Option<String>,
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
                let mut wanted = limits.json();
                wanted["cache_group"] = cache_group.into();
                access.json("PUT", &format!("{PATH}/{}", escape(&tenant)), Some(&wanted), TIMEOUT)?;
                writeln!(out, "these are the limits of {tenant} at all coordinators")?;
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
