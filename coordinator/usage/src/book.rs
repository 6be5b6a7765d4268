//! The rows of all coordinators.
//!
//! The rows of an owner change in numbered versions, and a coordinator knows all changes of an owner up to one version.
//! It sends that version for each owner to its peers, and they send what changed later. So a lost message is repaired
//! by the next one, and the rows of a lost coordinator spread on.

use crate::row::{Account, Amounts, Counters, DAY_HOURS, Owner, Period, Row, RowKey};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Most rows in one message: with the longest names about 0.4 MiB.
pub const MAX_MESSAGE_ROWS: usize = 1024;
/// Most owners in one message.
pub const MAX_MESSAGE_OWNERS: usize = 2048;

/// Limits of a book.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Rows of hours are kept for this many hours, and then until the end of the day (UTC).
    pub hours: u32,
    /// Rows of days are kept for this many days.
    pub days: u32,
    /// Most accounts of one hour at this coordinator. Further ones are counted for [`OTHER`](crate::row::OTHER).
    pub hour_accounts: usize,
    /// The same for a day.
    pub day_accounts: usize,
    /// Most rows of all coordinators. Beyond it the oldest are dropped early.
    pub rows: usize,
    /// Most accounts with totals of this run, for metrics.
    pub totals: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { hours: 72, days: 400, hour_accounts: 1024, day_accounts: 4096, rows: 100_000, totals: 200 }
    }
}

/// The last change of each owner up to which all changes are known.
pub type Versions = BTreeMap<Owner, u64>;

/// Rows of one owner that changed after one version, in the order of their versions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerRows {
    pub owner: Owner,
    pub after: u64,
    /// With `rows`, a receiver that knows all changes up to `after` knows all up to this version.
    pub upto: u64,
    pub rows: Vec<(RowKey, Row)>,
}

/// Changes of one owner for the disk. A row that is `None` was dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsaved {
    pub owner: Owner,
    /// `None` if the owner has no rows any more.
    pub version: Option<u64>,
    pub rows: Vec<(RowKey, Option<Row>)>,
}

/// Groups of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dimension {
    Tenant,
    Key,
    Model,
    Hour,
    Day,
}

impl Dimension {
    pub const ALL: [Self; 5] = [Self::Tenant, Self::Key, Self::Model, Self::Hour, Self::Day];

    pub fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Key => "key",
            Self::Model => "model",
            Self::Hour => "hour",
            Self::Day => "day",
        }
    }
}

/// The values of a query's dimensions; `None` for one by which it does not group.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Group {
    pub period: Option<Period>,
    pub tenant: Option<Arc<str>>,
    pub model: Option<Arc<str>>,
    /// The inner `None`: callers without a key.
    pub key: Option<Option<Arc<str>>>,
}

/// The result of a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The counted time begins here: the requested time, rounded down to an hour, or to a day where hours are no
    /// longer kept. Seconds since 1970.
    pub from_unix_s: u64,
    pub groups: BTreeMap<Group, Counters>,
}

#[derive(Debug, Default)]
struct Rows {
    /// All changes up to this version are known.
    version: u64,
    rows: HashMap<RowKey, Row>,
    by_version: BTreeMap<u64, RowKey>,
}

impl Rows {
    fn insert(&mut self, key: RowKey, row: Row) {
        if let Some(before) = self.rows.get(&key) {
            self.by_version.remove(&before.version);
        }
        self.by_version.insert(row.version, key.clone());
        self.rows.insert(key, row);
    }

    fn remove(&mut self, key: &RowKey) {
        if let Some(row) = self.rows.remove(key) {
            self.by_version.remove(&row.version);
        }
    }
}

/// The rows of all coordinators, as known here.
#[derive(Debug)]
pub struct Book {
    own: Owner,
    limits: Limits,
    owners: BTreeMap<Owner, Rows>,
    /// Own rows that have changed since the last [`Self::number_changes`].
    changed: HashSet<RowKey>,
    unsaved: BTreeMap<Owner, BTreeSet<RowKey>>,
    /// Number of own rows of each period.
    accounts: HashMap<Period, usize>,
    /// Usage of this run, whatever its time.
    totals: HashMap<Account, Counters>,
    /// Rows of earlier hours were dropped; the first hour of a day.
    first_hour: u32,
    /// Rows of earlier days were dropped.
    first_day: u32,
}

impl Book {
    pub fn new(own: Owner, limits: Limits) -> Self {
        let owners = BTreeMap::from([(own.clone(), Rows::default())]);
        Self {
            own,
            limits,
            owners,
            changed: HashSet::new(),
            unsaved: BTreeMap::new(),
            accounts: HashMap::new(),
            totals: HashMap::new(),
            first_hour: 0,
            first_day: 0,
        }
    }

    pub fn own(&self) -> &Owner {
        &self.own
    }

    /// Restores the rows of an earlier run from the disk.
    pub fn restore(&mut self, owner: Owner, version: u64, rows: Vec<(RowKey, Row)>) {
        let known = self.owners.entry(owner).or_default();
        known.version = known.version.max(version);
        rows.into_iter().for_each(|(key, row)| known.insert(key, row));
    }

    /// Counts usage at this coordinator.
    pub fn count(&mut self, now_unix_s: u64, account: &Account, amounts: &Amounts) {
        if amounts.iter().all(|(_, amount)| *amount == 0) {
            return;
        }
        let (hour, day) = (Period::hour_of(now_unix_s), Period::day_of(now_unix_s));
        for (period, limit) in
            [(Period::Hour(hour), self.limits.hour_accounts), (Period::Day(day), self.limits.day_accounts)]
        {
            self.count_in(period, limit, account, amounts);
        }
        let room = self.totals.len() < self.limits.totals;
        match self.totals.get_mut(account) {
            Some(total) => total.add(amounts),
            None if room => self.totals.entry(account.clone()).or_default().add(amounts),
            None => self.totals.entry(Account::other()).or_default().add(amounts),
        }
    }

    fn count_in(&mut self, period: Period, limit: usize, account: &Account, amounts: &Amounts) {
        let Self { own, owners, accounts, changed, .. } = self;
        let rows = &mut owners.entry(own.clone()).or_default().rows;
        let mut key = RowKey { period, account: account.clone() };
        if !rows.contains_key(&key) {
            let known = accounts.entry(period).or_default();
            if *known >= limit {
                key.account = Account::other();
            }
            if !rows.contains_key(&key) {
                *known += 1;
            }
        }
        let empty = || Row { version: 0, counters: Counters::default() };
        rows.entry(key.clone()).or_insert_with(empty).counters.add(amounts);
        changed.insert(key);
    }

    /// Gives the changed own rows their versions. Only then are they sent and saved.
    pub fn number_changes(&mut self) {
        let Some(rows) = self.owners.get_mut(&self.own) else { return };
        let unsaved = self.unsaved.entry(self.own.clone()).or_default();
        for key in self.changed.drain() {
            let Some(row) = rows.rows.get_mut(&key) else { continue };
            rows.version += 1;
            rows.by_version.remove(&row.version);
            row.version = rows.version;
            rows.by_version.insert(row.version, key.clone());
            unsaved.insert(key);
        }
    }

    /// The versions up to which all changes are known here.
    pub fn versions(&self) -> Versions {
        let known = self.owners.iter().filter(|(_, rows)| rows.version > 0);
        known.map(|(owner, rows)| (owner.clone(), rows.version)).take(MAX_MESSAGE_OWNERS).collect()
    }

    /// The rows that a peer lacks, at most [`MAX_MESSAGE_ROWS`].
    pub fn changes_after(&self, known: &Versions) -> Vec<OwnerRows> {
        let mut room = MAX_MESSAGE_ROWS;
        let mut changes = Vec::new();
        for (owner, rows) in &self.owners {
            let after = known.get(owner).copied().unwrap_or(0);
            if rows.version <= after || room == 0 {
                continue;
            }
            let later = rows.by_version.range(after.saturating_add(1)..).take(room);
            let later = later.filter_map(|(_, key)| Some((key.clone(), rows.rows.get(key)?.clone())));
            let sent: Vec<(RowKey, Row)> = later.collect();
            let cut = sent.len() == room;
            let upto = sent.last().filter(|_| cut).map_or(rows.version, |(_, row)| row.version);
            room -= sent.len();
            changes.push(OwnerRows { owner: owner.clone(), after, upto, rows: sent });
        }
        changes
    }

    /// Adds rows that a peer has sent. Rows of this run, and changes whose predecessors are not known here, are
    /// ignored.
    pub fn merge(&mut self, now_unix_s: u64, changes: Vec<OwnerRows>) {
        self.expire(now_unix_s);
        for OwnerRows { owner, after, upto, rows } in changes.into_iter().take(MAX_MESSAGE_OWNERS) {
            let version = self.owners.get(&owner).map_or(0, |known| known.version);
            let in_range =
                |(key, row): &(RowKey, Row)| after < row.version && row.version <= upto && key.is_valid();
            if owner == self.own || after > version || upto <= version || !rows.iter().all(in_range) {
                continue;
            }
            let (first_hour, first_day) = (self.first_hour, self.first_day);
            let kept = |key: &RowKey| match key.period {
                Period::Hour(hour) => hour >= first_hour,
                Period::Day(day) => day >= first_day,
            };
            let known = self.owners.entry(owner.clone()).or_default();
            let unsaved = self.unsaved.entry(owner).or_default();
            for (key, mut row) in rows.into_iter().take(MAX_MESSAGE_ROWS).filter(|(key, _)| kept(key)) {
                if let Some(before) = known.rows.get(&key) {
                    row.counters.merge(&before.counters);
                    row.version = row.version.max(before.version);
                }
                unsaved.insert(key.clone());
                known.insert(key, row);
            }
            known.version = upto;
        }
        self.make_room();
    }

    /// Drops rows that are too old.
    pub fn expire(&mut self, now_unix_s: u64) {
        let hour = Period::hour_of(now_unix_s).saturating_sub(self.limits.hours) / DAY_HOURS * DAY_HOURS;
        let day = Period::day_of(now_unix_s).saturating_sub(self.limits.days);
        self.drop_before(hour, day);
        self.make_room();
    }

    /// Drops the oldest rows while there are too many: first a day's hours, then days.
    fn make_room(&mut self) {
        let rows = |book: &Self| book.owners.values().map(|rows| rows.rows.len()).sum::<usize>();
        while rows(self) > self.limits.rows {
            let periods = || self.owners.values().flat_map(|rows| rows.rows.keys()).map(|key| key.period);
            let hours = periods().filter_map(|period| match period {
                Period::Hour(hour) => Some(hour / DAY_HOURS),
                Period::Day(_) => None,
            });
            let days = periods().filter_map(|period| match period {
                Period::Day(day) => Some(day),
                Period::Hour(_) => None,
            });
            let (oldest, latest) = (hours.clone().min(), hours.max());
            match (oldest, days.min()) {
                (Some(oldest), _) if Some(oldest) != latest => {
                    self.drop_before((oldest + 1) * DAY_HOURS, 0);
                }
                (_, Some(day)) => self.drop_before(0, day + 1),
                (Some(oldest), None) => self.drop_before((oldest + 1) * DAY_HOURS, 0),
                (None, None) => return,
            }
            tracing::warn!(limit = self.limits.rows, "too many rows of usage: the oldest are dropped");
        }
    }

    fn drop_before(&mut self, hour: u32, day: u32) {
        if hour <= self.first_hour && day <= self.first_day {
            return;
        }
        self.first_hour = self.first_hour.max(hour);
        self.first_day = self.first_day.max(day);
        let (first_hour, first_day) = (self.first_hour, self.first_day);
        let is_old = |period: Period| match period {
            Period::Hour(hour) => hour < first_hour,
            Period::Day(day) => day < first_day,
        };
        for (owner, rows) in &mut self.owners {
            let old: Vec<RowKey> = rows.rows.keys().filter(|key| is_old(key.period)).cloned().collect();
            for key in old {
                rows.remove(&key);
                self.changed.remove(&key);
                self.unsaved.entry(owner.clone()).or_default().insert(key);
            }
        }
        self.accounts.retain(|period, _| !is_old(*period));
        let own = &self.own;
        self.owners.retain(|owner, rows| owner == own || !rows.rows.is_empty());
    }

    /// Takes the changes since the last call.
    pub fn take_unsaved(&mut self) -> Vec<Unsaved> {
        let unsaved = std::mem::take(&mut self.unsaved).into_iter().filter(|(_, keys)| !keys.is_empty());
        let of = |(owner, keys): (Owner, BTreeSet<RowKey>)| {
            let known = self.owners.get(&owner);
            let row = |key: RowKey| {
                let row = known.and_then(|rows| rows.rows.get(&key)).cloned();
                (key, row)
            };
            Unsaved {
                version: known.map(|rows| rows.version),
                rows: keys.into_iter().map(row).collect(),
                owner,
            }
        };
        unsaved.map(of).collect()
    }

    /// Takes back changes that could not be saved.
    pub fn not_saved(&mut self, unsaved: Vec<Unsaved>) {
        for Unsaved { owner, rows, .. } in unsaved {
            self.unsaved.entry(owner).or_default().extend(rows.into_iter().map(|(key, _)| key));
        }
    }

    /// The usage of this run, by account.
    pub fn totals(&self) -> &HashMap<Account, Counters> {
        &self.totals
    }

    /// The usage since `since_unix_s` at all coordinators, by groups.
    pub fn query(&self, since_unix_s: u64, by: &[Dimension]) -> Answer {
        let by = |dimension| by.contains(&dimension);
        let first_hour = Period::Hour(self.first_hour);
        // Whole days before the hours that are kept.
        let in_days = since_unix_s < first_hour.start_unix_s() || by(Dimension::Day);
        let in_days = in_days && !by(Dimension::Hour);
        let since_hour = Period::hour_of(since_unix_s).max(self.first_hour);
        let since_day = Period::day_of(since_unix_s).max(self.first_day);
        let only_days = by(Dimension::Day);
        let counts = |period: Period| match period {
            Period::Hour(hour) => !only_days && hour >= since_hour,
            Period::Day(day) => {
                in_days && day >= since_day && (only_days || day < self.first_hour / DAY_HOURS)
            }
        };
        let from = if in_days { Period::Day(since_day) } else { Period::Hour(since_hour) };
        let mut groups: BTreeMap<Group, Counters> = BTreeMap::new();
        for (key, row) in self.owners.values().flat_map(|rows| &rows.rows) {
            if !counts(key.period) {
                continue;
            }
            let Account { tenant, key: key_id, model } = &key.account;
            let group = Group {
                period: (by(Dimension::Hour) || by(Dimension::Day)).then_some(key.period),
                tenant: by(Dimension::Tenant).then(|| Arc::clone(tenant)),
                model: by(Dimension::Model).then(|| Arc::clone(model)),
                key: by(Dimension::Key).then(|| key_id.clone()),
            };
            groups.entry(group).or_default().add_all(&row.counters);
        }
        Answer { from_unix_s: from.start_unix_s(), groups }
    }
}

#[cfg(test)]
mod tests;
