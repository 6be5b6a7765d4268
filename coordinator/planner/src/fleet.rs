//! The virtual fleet: nodes with their memory and rates, and deployed models with their costs.

use crate::Error;
use consensus::table::DeploymentSettings;
use proto::deployment::ModelSource;
use proto::ids::{ModelId, NodeId};
use proto::served_model::BUILT_IN;
use std::collections::{BTreeMap, BTreeSet};

/// Most nodes of a fleet.
pub const MAX_NODES: usize = 1024;
/// Most models of a fleet; the limit of the coordinators' table.
pub const MAX_MODELS: usize = consensus::table::MAX_MODELS;

/// A worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub name: NodeId,
    /// `key=value`.
    pub labels: BTreeSet<String>,
    /// Bytes for the models that are loaded or pinned.
    pub memory: u64,
    /// Bytes of weights and caches that steps read, per second.
    pub bandwidth: f64,
    /// Multiply-adds per second.
    pub compute: f64,
    /// Bytes per second of a load from disk.
    pub read: f64,
    /// Bytes per second of a load whose files are in memory.
    pub copy: f64,
    /// Bytes per second between this node and another one.
    pub link: f64,
    /// Bytes of files that stay in host memory after they were read; pinned files are extra.
    pub page_cache: u64,
    /// Seconds of a load besides reading or copying.
    pub load_overhead: f64,
    /// Models whose files are here at the beginning. `None`: all.
    pub files: Option<BTreeSet<ModelId>>,
}

/// Costs of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Bytes of the files.
    pub bytes: u64,
    /// Bytes that the loaded model takes of a node's memory.
    pub needed: u64,
    /// Bytes that a step with prompt rows reads.
    pub layer_bytes: f64,
    /// Bytes that a step without prompt rows reads.
    pub token_bytes: f64,
    /// Bytes of keys and values of one token.
    pub kv_bytes: f64,
    /// Multiply-adds of a row with the layers' matrices.
    pub products: f64,
    /// Multiply-adds of a row with the head's matrix; only decoded rows need it.
    pub head_products: f64,
    /// Multiply-adds of a row for each token before it.
    pub attention: f64,
}

/// A deployed model.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    pub name: ModelId,
    pub source: ModelSource,
    pub settings: DeploymentSettings,
    pub costs: Costs,
}

/// Nodes by name, and models by name.
#[derive(Debug, Clone, PartialEq)]
pub struct Fleet {
    pub nodes: Vec<Node>,
    pub models: Vec<Model>,
    /// Seconds after which a request that waits for a load is refused.
    pub load_wait: f64,
}

impl Fleet {
    /// Sorts nodes and models by name.
    ///
    /// # Errors
    /// Names the field, the value and its limit.
    pub fn new(mut nodes: Vec<Node>, mut models: Vec<Model>, load_wait: f64) -> Result<Self, Error> {
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        models.sort_by(|a, b| a.name.cmp(&b.name));
        let count = |field: &str, found: usize, max: usize| match (1..=max).contains(&found) {
            true => Ok(()),
            false => Err(Error::field(field, found, format!("must be 1 to {max}"))),
        };
        count("node", nodes.len(), MAX_NODES)?;
        count("models", models.len(), MAX_MODELS)?;
        if let Some([twin, _]) = nodes.array_windows().find(|[a, b]| a.name == b.name) {
            return Err(Error::field("node.name", &twin.name, "is there twice"));
        }
        seconds("load_wait", load_wait)?;
        nodes.iter().try_for_each(|node| node.check(&models))?;
        models.iter().try_for_each(Model::check)?;
        for model in &models {
            let has = |node: &Node| node.files.as_ref().is_none_or(|files| files.contains(&model.name));
            if !nodes.iter().any(has) {
                return Err(Error::NoFiles { model: model.name.to_string() });
            }
        }
        Ok(Self { nodes, models, load_wait })
    }

    /// The index of each model.
    pub fn index(&self) -> BTreeMap<&str, usize> {
        self.models.iter().enumerate().map(|(index, model)| (model.name.as_str(), index)).collect()
    }
}

/// Seconds of a setting: 0 to a year.
fn seconds(field: &str, value: f64) -> Result<(), Error> {
    match (0.0..=366.0 * 86_400.0).contains(&value) {
        true => Ok(()),
        false => Err(Error::field(field, value, "must be 0 s to 366 days")),
    }
}

/// A rate or an amount above 0.
fn positive(field: impl Fn() -> String, value: f64) -> Result<(), Error> {
    match (1.0..=1e18).contains(&value) {
        true => Ok(()),
        false => Err(Error::field(field(), value, "must be 1 to 1e18")),
    }
}

impl Node {
    fn check(&self, models: &[Model]) -> Result<(), Error> {
        let field = |name: &str| format!("node {}: {name}", self.name);
        for (name, value) in [
            ("memory", self.memory as f64),
            ("bandwidth", self.bandwidth),
            ("compute", self.compute),
            ("read", self.read),
            ("copy", self.copy),
            ("link", self.link),
        ] {
            positive(|| field(name), value)?;
        }
        seconds(&field("load_overhead"), self.load_overhead)?;
        let known = |file: &&ModelId| models.iter().any(|model| model.name == **file);
        match self.files.iter().flatten().find(|file| !known(file)) {
            Some(file) => Err(Error::field(field("files"), file, "is not in models")),
            None => Ok(()),
        }
    }
}

impl Model {
    fn check(&self) -> Result<(), Error> {
        let field = |name: &str| format!("models.{}: {name}", self.name);
        if let Err((name, value, rule)) = self.settings.check() {
            return Err(Error::field(field(name), value, rule));
        }
        if self.settings.shards != 1 {
            let limit = "must be 1: models over several workers are not simulated";
            return Err(Error::field(field("shards"), self.settings.shards, limit));
        }
        if self.settings.engine != BUILT_IN {
            let limit = format!("must be {BUILT_IN}: engines of other projects are not simulated");
            return Err(Error::field(field("engine"), &self.settings.engine, limit));
        }
        let Costs { bytes, needed, layer_bytes, token_bytes, kv_bytes, products, head_products, attention } =
            self.costs;
        for (name, value) in [
            ("bytes", bytes as f64),
            ("needed_bytes", needed as f64),
            ("layer_bytes", layer_bytes),
            ("token_bytes", token_bytes),
            ("products", products),
        ] {
            positive(|| field(name), value)?;
        }
        for (name, value) in
            [("kv_bytes", kv_bytes), ("head_products", head_products), ("attention", attention)]
        {
            if !(0.0..=1e18).contains(&value) {
                return Err(Error::field(field(name), value, "must be 0 to 1e18"));
            }
        }
        Ok(())
    }
}
