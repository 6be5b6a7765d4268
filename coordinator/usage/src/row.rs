//! Accounts, counters, and the names of rows.

use proto::codec::bounded;
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Tenant and model of the account for usage beyond the limit of rows. No tenant has this name.
pub const OTHER: &str = "(other)";
/// Tenant of work that a worker reported and no request of this coordinator explains, such as work for a coordinator
/// that was lost. No tenant has this name.
pub const UNATTRIBUTED: &str = "(unattributed)";

/// Longest tenant or key id, in bytes.
const MAX_NAME: usize = 64;
/// Longest model id, in bytes.
const MAX_MODEL: usize = 128;
/// Most counters of a row, those of later versions included.
const MAX_COUNTERS: usize = 64;

/// Who pays for a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Account {
    pub tenant: Arc<str>,
    /// Key id. `None` for a caller without a key.
    pub key: Option<Arc<str>>,
    pub model: Arc<str>,
}

impl Account {
    pub(crate) fn other() -> Self {
        Self { tenant: OTHER.into(), key: None, model: OTHER.into() }
    }

    pub(crate) fn unattributed(model: &str) -> Self {
        Self { tenant: UNATTRIBUTED.into(), key: None, model: model.into() }
    }

    fn is_valid(&self) -> bool {
        let key = self.key.as_ref().map_or(0, |key| key.len());
        self.tenant.len() <= MAX_NAME && key <= MAX_NAME && self.model.len() <= MAX_MODEL
    }
}

/// A counter of a row. The discriminant is its position on the wire and on disk: only append.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Counter {
    /// Requests that have ended.
    Requests,
    /// Prompt tokens, including cached ones.
    PromptTokens,
    CachedTokens,
    /// Tokens that were delivered.
    GeneratedTokens,
    /// Tokens that were computed again, or computed and not delivered.
    RecomputedTokens,
    /// Device time, nanoseconds, without that of recomputed tokens.
    DeviceNs,
    RecomputedDeviceNs,
    /// Energy, microjoules, without that of recomputed tokens.
    EnergyUj,
    RecomputedEnergyUj,
    /// The part of the device time for which the energy is known.
    EnergyDeviceNs,
    /// Attempts at workers that have ended.
    Attempts,
    /// The attempts whose device time is known.
    TimedAttempts,
    /// Audio that was processed, milliseconds.
    AudioMs,
}

impl Counter {
    pub const ALL: [Self; 13] = [
        Self::Requests,
        Self::PromptTokens,
        Self::CachedTokens,
        Self::GeneratedTokens,
        Self::RecomputedTokens,
        Self::DeviceNs,
        Self::RecomputedDeviceNs,
        Self::EnergyUj,
        Self::RecomputedEnergyUj,
        Self::EnergyDeviceNs,
        Self::Attempts,
        Self::TimedAttempts,
        Self::AudioMs,
    ];
}

/// Amounts to be added to counters.
pub type Amounts = [(Counter, u64)];

/// The counters of a row; an absent one is 0. Counters of later versions are kept.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counters(
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_COUNTERS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_COUNTERS>"
    )]
    Vec<u64>,
);

impl Counters {
    pub fn get(&self, counter: Counter) -> u64 {
        self.0.get(counter as usize).copied().unwrap_or(0)
    }

    fn at(&mut self, index: usize) -> &mut u64 {
        if self.0.len() <= index {
            self.0.resize(index + 1, 0);
        }
        &mut self.0[index]
    }

    pub fn add(&mut self, amounts: &Amounts) {
        for (counter, amount) in amounts.iter().filter(|(_, amount)| *amount > 0) {
            let value = self.at(*counter as usize);
            *value = value.saturating_add(*amount);
        }
    }

    pub fn add_all(&mut self, other: &Self) {
        for (index, amount) in other.0.iter().enumerate() {
            let value = self.at(index);
            *value = value.saturating_add(*amount);
        }
    }

    /// Merges another state of the same row: the larger value of each counter.
    pub fn merge(&mut self, other: &Self) {
        for (index, amount) in other.0.iter().enumerate() {
            let value = self.at(index);
            *value = (*value).max(*amount);
        }
    }
}

/// One run of a coordinator process. Only it counts into its rows.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Owner {
    pub node: NodeId,
    /// Random number of the run.
    pub run: u64,
}

/// An hour or a day, in UTC, counted from 1970. Usage is counted into both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Period {
    Hour(u32),
    Day(u32),
}

/// Hours of a day.
pub(crate) const DAY_HOURS: u32 = 24;

impl Period {
    pub fn hour_of(unix_s: u64) -> u32 {
        u32::try_from(unix_s / 3600).unwrap_or(u32::MAX)
    }

    pub fn day_of(unix_s: u64) -> u32 {
        Self::hour_of(unix_s) / DAY_HOURS
    }

    /// Seconds from 1970 to the beginning.
    pub fn start_unix_s(self) -> u64 {
        match self {
            Self::Hour(hour) => u64::from(hour) * 3600,
            Self::Day(day) => u64::from(day) * 86_400,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RowKey {
    pub period: Period,
    pub account: Account,
}

impl RowKey {
    pub(crate) fn is_valid(&self) -> bool {
        self.account.is_valid()
    }
}

/// A row's counters, with the number of the owner's change that set them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    pub version: u64,
    pub counters: Counters,
}
