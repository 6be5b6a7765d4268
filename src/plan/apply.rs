//! Sends an operator's plan to a cluster, and withdraws it.

use super::Plan;
use super::workers::{self, LayersOf};
use crate::admin::escape;
use crate::config::ConfigError;
use anyhow::{Result, bail};
use proto::ids::ModelId;
use serde_json::{Value, json};
use std::time::Duration;

const PATH: &str = "/admin/v1/plans";
/// Coordinators accept or refuse a change within two seconds.
const CHANGE_LIMIT: Duration = Duration::from_secs(10);

impl Plan {
    /// The plan to send.
    pub(super) fn requested_plan(&self) -> Result<Value> {
        let file = self.workers_file.as_deref();
        let file =
            file.ok_or_else(|| ConfigError::missing("workers_file", "--apply sends the plan of this file"))?;
        let explicit = workers::read(file)?.explicit;
        if explicit.is_empty() {
            let reason = "no worker has `layers`, so there is no plan to apply".to_owned();
            return Err(ConfigError::File { path: file.display().to_string(), reason }.into());
        }
        self.check_counts(&explicit)?;
        Ok(body(&explicit))
    }

    /// Sends a plan for a model without a local file; its speed cannot be predicted.
    pub(super) fn send_unseen(&self, plan: &Value) -> Result<()> {
        let Ok(id) = ModelId::new(self.model()) else {
            let limit = "must be a model file, or a name that the cluster serves";
            return Err(ConfigError::field("model", self.model(), limit).into());
        };
        self.send(&id, plan)?;
        match self.json {
            true => {
                println!("{}", json!({"model": id.as_str(), "replicas": plan["replicas"], "applied": true}))
            }
            false => eprintln!("{id} is not a file on this machine, so no speed is predicted"),
        }
        Ok(())
    }

    /// Sends the plan.
    pub(super) fn send(&self, id: &ModelId, plan: &Value) -> Result<()> {
        self.access.json("PUT", &of(id.as_str()), Some(plan), CHANGE_LIMIT).map(drop)
    }

    pub(super) fn print_applied(&self, id: &str) {
        if !self.json {
            println!(
                "the plan of {id} is accepted; `kvasir status` shows which of its replicas serve, and what the others wait for"
            );
        }
    }

    /// Withdraws the plan, so that the coordinators plan the model themselves.
    pub(super) fn withdraw(&self) -> Result<()> {
        let id = crate::models::resolve_here(self.model())?.map(|here| here.id.to_string());
        let id = id.unwrap_or_else(|| self.model().to_owned());
        let answer = self.access.send("DELETE", &of(&id), None, CHANGE_LIMIT)?.text()?;
        if answer.status == 404 {
            bail!("there is no operator's plan of {id}");
        }
        answer.success()?;
        match self.json {
            true => println!("{}", json!({"model": id, "withdrawn": true})),
            false => println!("the plan of {id} is withdrawn; the coordinators plan it again"),
        }
        Ok(())
    }
}

fn of(id: &str) -> String {
    format!("{PATH}/{}", escape(id))
}

fn body(explicit: &[Vec<LayersOf>]) -> Value {
    let stage = |(worker, layers): &LayersOf| json!({"worker": worker, "layers": [layers.start, layers.end]});
    let replica = |ranges: &Vec<LayersOf>| ranges.iter().map(stage).collect::<Vec<_>>();
    json!({"replicas": explicit.iter().map(replica).collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_replica_is_listed_with_its_workers_in_order() {
        let of = |name: &str, layers| (name.to_owned(), layers);
        let explicit = [vec![of("w1", 0..2), of("w0", 2..3)], vec![of("w2", 0..3)]];
        let expected = json!({"replicas": [
            [{"worker": "w1", "layers": [0, 2]}, {"worker": "w0", "layers": [2, 3]}],
            [{"worker": "w2", "layers": [0, 3]}],
        ]});
        assert_eq!(body(&explicit), expected);
        assert_eq!(super::of("a b"), "/admin/v1/plans/a%20b");
    }
}
