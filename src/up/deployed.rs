//! Further models of `kvasir up`: deployments of its cluster, one replica of each.

use crate::access::Access;
use crate::config::ConfigError;
use crate::deploy::path_of;
use crate::models::{self, Resolved};
use anyhow::Context;
use proto::ids::ModelId;
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;

/// Coordinators accept or refuse a change within two seconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Finds or downloads the files. `own`: the model that the workers start with.
pub(super) fn resolve(names: &[String], own: &ModelId) -> anyhow::Result<Vec<Resolved>> {
    let mut found: Vec<Resolved> = Vec::new();
    for name in names {
        let model = models::resolve_or_pull(name)?;
        if model.id == *own || found.iter().any(|other| other.id == model.id) {
            return Err(ConfigError::field("deploy", name, format!("{} is there twice", model.id)).into());
        }
        models::require_weights(&model.path)?;
        ::worker::load::task(&model.path).with_context(|| model.path.display().to_string())?;
        found.push(model);
    }
    Ok(found)
}

/// Deploys the models. Settings that an earlier run or an operator gave them stay.
pub(super) async fn deploy(ops: SocketAddr, models: Vec<Resolved>) -> anyhow::Result<()> {
    let access = Access { ops: Some(ops.to_string()), ..Access::default() };
    let deploy = move || {
        models.iter().try_for_each(|Resolved { id, path }| {
            let file = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
            let body = json!({"file": file, "min": 1, "reread": true});
            access
                .json("PUT", &path_of(id.as_str()), Some(&body), TIMEOUT)
                .with_context(|| id.to_string())?;
            Ok(())
        })
    };
    tokio::task::spawn_blocking(deploy).await.context("the deployment was cut off")?
}
