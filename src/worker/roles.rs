//! Uses of a worker besides generating with its own model: replicas of several workers, images of other workers.

use super::WorkerSettings;
use crate::config::{ByteSize, ConfigError};
use crate::plan::compute;
use crate::role::RoleArg;
use crate::spec::SpecArg;
use worker::load::{self, TowerPlace};
use worker::service::PoolOffer;

impl WorkerSettings {
    /// Whether it only encodes images.
    pub(super) fn only_encodes(&self) -> bool {
        self.role == Some(RoleArg::Encode)
    }

    /// Refuses settings that are of no use for the role encode.
    pub(super) fn check_role(&self) -> Result<(), ConfigError> {
        if !self.only_encodes() {
            return Ok(());
        }
        if self.model.is_none() {
            return Err(ConfigError::missing("model", "the role encode needs a model that sees images"));
        }
        let drafter = self.spec.as_ref().filter(|spec| **spec != SpecArg::Off);
        let without = [
            ("pool", (self.pool == Some(true)).then(|| "true".to_owned())),
            ("http", self.http.map(|http| http.to_string())),
            ("from", self.from.as_ref().map(|from| from.join(","))),
            ("lora", self.lora.as_ref().map(|lora| format!("{} adapters", lora.len()))),
            ("spec", drafter.map(|_| "a drafter".to_owned())),
            ("vision_tower", (self.vision_tower == Some(false)).then(|| "false".to_owned())),
        ];
        match without.into_iter().find_map(|(field, value)| Some((field, value?))) {
            Some((field, value)) => Err(ConfigError::field(field, value, "not with the role encode")),
            None => Ok(()),
        }
    }

    pub(super) fn vision_tower(&self) -> TowerPlace {
        match (self.only_encodes(), self.vision_tower) {
            (true, _) => TowerPlace::Alone,
            (false, Some(false)) => TowerPlace::Elsewhere,
            (false, Some(true) | None) => TowerPlace::Here,
        }
    }

    /// Resources for replicas of several workers; `None` if it is not in a pool.
    pub(super) fn offer(&self) -> anyhow::Result<Option<PoolOffer>> {
        if self.pool != Some(true) {
            return Ok(None);
        }
        let bytes = |size: Option<ByteSize>| size.map_or(0, |size| size.0);
        Ok(Some(PoolOffer {
            memory: bytes(self.memory),
            bandwidth: bytes(self.bandwidth),
            compute: compute(&load::host(&self.options()?)?) as u64,
        }))
    }
}
