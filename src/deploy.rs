//! `kvasir models deploy` and its siblings: deployed models of a cluster.

use crate::access::Access;
use crate::admin::{escape, word};
use crate::columns::columns;
use crate::config::Period;
use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

const PATH: &str = "/admin/v1/deployments";
/// Coordinators accept or refuse a change within two seconds.
const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn path_of(model: &str) -> String {
    format!("{PATH}/{}", escape(model))
}

/// Least and most replicas, `MIN:MAX` or `N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Replicas {
    pub(crate) min: u16,
    pub(crate) max: u16,
}

impl FromStr for Replicas {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        let number = |part: &str| part.parse().map_err(|_| format!("{text:?} is not MIN:MAX or N"));
        Ok(Self { min: number(min)?, max: number(max)? })
    }
}

/// Settings of a deployment. What is not given stays as it is.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Settings {
    /// Replicas that stay ready, and most replicas; 0:1 loads the model when it is asked for [default: 0:1].
    #[arg(long, value_name = "MIN:MAX")]
    replicas: Option<Replicas>,
    /// A replica above MIN without a request for this time goes to sleep; 0s: never [default: 10m].
    #[arg(long, value_name = "TIME")]
    idle: Option<Period>,
    /// Keep the weights in host memory while the model sleeps, as long as the room is not needed.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pin: Option<bool>,
    /// Labels that a worker must have, separated by commas.
    #[arg(long, value_name = "KEY=VALUE,..", value_delimiter = ',')]
    nodes: Option<Vec<String>>,
    /// Longest sequence in tokens; 0 is the model's own limit.
    #[arg(long, value_name = "N")]
    context: Option<u32>,
    /// Weight in the turns of a device that several models share, 1 to 1000; models of lower priority lose their room
    /// first [default: 1].
    #[arg(long, value_name = "N")]
    priority: Option<u32>,
    /// Workers of a replica, each with a range of the layers: for a model that one worker has no room for [default: 1].
    #[arg(long, value_name = "N")]
    shards: Option<u16>,
    /// Engine that computes the model: kvasir, vllm, sglang or llama-server; one of another project on workers that start
    /// its servers [default: kvasir].
    #[arg(long, value_name = "NAME")]
    engine: Option<String>,
    /// Share of requests that a new version gets first, such as 5%. It is rolled back if more of its requests fail or
    /// if they start more slowly.
    #[arg(long, value_name = "PERCENT")]
    canary: Option<Percent>,
}

/// A share of requests, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Percent(u16);

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').unwrap_or(text).parse::<f64>().ok();
        let permille = number.map(|percent| (percent * 10.0).round()).filter(|p| (1.0..=1000.0).contains(p));
        permille.map(|permille| Self(permille as u16)).ok_or_else(|| format!("{text:?} is not 0.1% to 100%"))
    }
}

impl Settings {
    fn json(&self) -> Map<String, Value> {
        let mut body = Map::new();
        let mut set = |field: &str, value: Option<Value>| {
            value.into_iter().for_each(|value| drop(body.insert(field.to_owned(), value)));
        };
        set("min", self.replicas.map(|replicas| replicas.min.into()));
        set("max", self.replicas.map(|replicas| replicas.max.into()));
        set("idle_s", self.idle.map(|idle| idle.0.as_secs().into()));
        set("pin", self.pin.map(Into::into));
        set("nodes", self.nodes.as_ref().map(|nodes| json!(nodes)));
        set("context", self.context.map(Into::into));
        set("priority", self.priority.map(Into::into));
        set("shards", self.shards.map(Into::into));
        set("engine", self.engine.as_deref().map(Into::into));
        set("canary", self.canary.map(|Percent(permille)| json!({"permille": permille})));
        body
    }
}

/// Deploys a model: the workers of the cluster load it when it is asked for. Deploying it again rolls out a new version.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir models deploy chat --from smollm2-135m --ops 127.0.0.1:9090\n  \
    kvasir models deploy chat --file /models/chat-v2.gguf --canary 5%\n  \
    kvasir models deploy big --file /models/big.gguf --replicas 1:2 --nodes gpu=gb10 --idle 30m")]
pub(crate) struct Deploy {
    /// Name of the model in the API.
    name: String,
    /// Path of the model's file or folder on the workers. A worker without it gets it from another one.
    #[arg(long, value_name = "PATH", required_unless_present = "from", conflicts_with = "from")]
    file: Option<PathBuf>,
    /// Catalog name, or an https:// or hf:// address, which one worker downloads.
    #[arg(long, value_name = "NAME|URL")]
    from: Option<String>,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    access: Access,
}

/// Removes a deployment: running requests end normally, then the workers unload the model.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models undeploy chat --ops 127.0.0.1:9090")]
pub(crate) struct Undeploy {
    /// Name of the deployed model.
    name: String,
    #[command(flatten)]
    access: Access,
}

/// Changes the settings of a deployment.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models set chat --replicas 1:3 --ops 127.0.0.1:9090")]
pub(crate) struct Set {
    /// Name of the deployed model.
    name: String,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    access: Access,
}

/// Makes the version that is being rolled out the active one.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models promote chat --ops 127.0.0.1:9090")]
pub(crate) struct Promote {
    /// Name of the deployed model.
    name: String,
    #[command(flatten)]
    access: Access,
}

/// Ends a rollout; without one, rolls out the version before the active one.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models rollback chat --ops 127.0.0.1:9090")]
pub(crate) struct Rollback {
    /// Name of the deployed model.
    name: String,
    #[command(flatten)]
    access: Access,
}

impl Deploy {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let mut body = self.settings.json();
        match (&self.file, &self.from) {
            (Some(file), _) => {
                let path = std::path::absolute(file).with_context(|| file.display().to_string())?;
                let path = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
                body.insert("file".into(), path.into());
            }
            (None, Some(from)) => drop(body.insert("fetch".into(), from.as_str().into())),
            (None, None) => bail!("give --file or --from"),
        }
        body.insert("reread".into(), true.into());
        self.access.json("PUT", &path_of(&self.name), Some(&body.into()), TIMEOUT)?;
        eprintln!("deployed {}; `kvasir models list --deployed` shows how far it is", self.name);
        Ok(())
    }
}

impl Undeploy {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        self.access.json("DELETE", &path_of(&self.name), None, TIMEOUT)?;
        eprintln!("undeployed {}", self.name);
        Ok(())
    }
}

impl Set {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let body = self.settings.json();
        ensure!(!body.is_empty(), "give at least one setting to change");
        // Without a source, the coordinator refuses a model that is not deployed.
        self.access.json("PUT", &path_of(&self.name), Some(&body.into()), TIMEOUT)?;
        eprintln!("changed {}", self.name);
        Ok(())
    }
}

impl Promote {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        self.access.json("POST", &format!("{}/promote", path_of(&self.name)), Some(&json!({})), TIMEOUT)?;
        eprintln!("promoted the new version of {}", self.name);
        Ok(())
    }
}

impl Rollback {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        self.access.json("POST", &format!("{}/rollback", path_of(&self.name)), Some(&json!({})), TIMEOUT)?;
        eprintln!("rolled back {}", self.name);
        Ok(())
    }
}

/// The deployments of the cluster.
pub(crate) fn list(access: &Access) -> anyhow::Result<Vec<Value>> {
    let answer = access.json("GET", PATH, None, TIMEOUT)?;
    Ok(answer.get("deployments").and_then(Value::as_array).cloned().unwrap_or_default())
}

/// Prints the deployments, one line each, or as one line of JSON.
pub(crate) fn print(access: &Access, json: bool, out: &mut impl Write) -> anyhow::Result<()> {
    let deployments = list(access)?;
    if json {
        writeln!(out, "{}", json!({"deployments": deployments}))?;
        return Ok(());
    }
    write!(out, "{}", table(&deployments))?;
    Ok(())
}

/// The deployments, one line each.
pub(crate) fn table(deployments: &[Value]) -> String {
    let mut rows = vec![
        ["MODEL", "STATE", "REPLICAS", "ENGINE", "WORKERS", "IDLE", "VERSION", "REASON"]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows.extend(deployments.iter().map(row));
    columns(&rows)
}

fn row(deployment: &Value) -> Vec<String> {
    let text = |field: &str| word(deployment, field);
    let number = |field: &str| deployment[field].as_u64().unwrap_or(0);
    let progress =
        deployment["progress"].as_f64().map(|percent| format!(" {percent:.0} %")).unwrap_or_default();
    let eta = deployment["eta_s"].as_f64().map(|eta| format!(", {eta:.0} s left")).unwrap_or_default();
    let versions = deployment["versions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let active = versions.iter().find(|version| version["active"] == true).unwrap_or(&Value::Null);
    let workers = active["workers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ready =
        workers.iter().filter(|worker| worker["state"] == "ready").map(|worker| word(worker, "worker"));
    let ready: Vec<String> = ready.collect();
    let idle = match number("idle_s") {
        0 => "never".to_owned(),
        seconds => Period(Duration::from_secs(seconds)).to_string(),
    };
    let version = match deployment["rollout"].as_object() {
        Some(rollout) => match rollout.get("canary").and_then(|canary| canary["permille"].as_u64()) {
            Some(permille) => format!("{}, canary {:.1} %", digest(active), permille as f64 / 10.0),
            None => format!("{}, another is rolled out", digest(active)),
        },
        None => digest(active),
    };
    vec![
        text("model"),
        format!("{}{progress}{eta}", text("state")),
        format!("{}:{}", number("min"), number("max")),
        text("engine"),
        if ready.is_empty() { "-".to_owned() } else { ready.join(",") },
        idle,
        version,
        text("reason"),
    ]
}

/// The first digits of a version's digest.
fn digest(version: &Value) -> String {
    version["digest"].as_str().map_or("-".to_owned(), |digest| digest.chars().take(12).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_are_a_range_or_a_number() {
        assert_eq!("1:3".parse(), Ok(Replicas { min: 1, max: 3 }));
        assert_eq!("2".parse(), Ok(Replicas { min: 2, max: 2 }));
        for wrong in ["", ":", "1:", "a", "1:2:3", "-1", "70000"] {
            assert!(wrong.parse::<Replicas>().unwrap_err().contains("MIN:MAX"), "{wrong}");
        }
    }

    #[test]
    fn shares_are_percent() {
        assert_eq!("5%".parse(), Ok(Percent(50)));
        assert_eq!("0.1".parse(), Ok(Percent(1)));
        for wrong in ["0", "0.01%", "101%", "x", "NaN"] {
            assert!(wrong.parse::<Percent>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_settings_that_are_given_are_sent() {
        assert!(Settings::default().json().is_empty());
        let settings = Settings { replicas: "0:2".parse().ok(), pin: Some(false), ..Settings::default() };
        assert_eq!(Value::Object(settings.json()), json!({"min": 0, "max": 2, "pin": false}));
    }

    #[test]
    fn a_line_tells_state_and_place() {
        let deployment = json!({
            "model": "chat", "state": "loading", "progress": 43.0, "eta_s": 12.0, "min": 0, "max": 2, "idle_s": 600,
            "engine": "vllm", "reason": "", "rollout": {"version": 9, "canary": {"permille": 50}},
            "versions": [{"active": true, "digest": "ab".repeat(32), "workers": [
                {"worker": "w0", "state": "ready"}, {"worker": "w1", "state": "loading"}]}],
        });
        let expected = [
            "chat",
            "loading 43 %, 12 s left",
            "0:2",
            "vllm",
            "w0",
            "600s",
            "abababababab, canary 5.0 %",
            "",
        ];
        assert_eq!(row(&deployment), expected);
    }
}
