//! Which part of a worker's work for an attempt belongs to the tenant.
//!
//! The coordinator knows what the client got from an attempt ([`Ended`]); the worker knows what the attempt cost
//! ([`UsageRecord`]). Whichever arrives later settles the attempt. A tenant pays for each token once: the rest of the
//! tokens, with its share of the time and energy, was computed again, or for nobody.

use crate::row::{Account, Counter};
use proto::ids::{Epoch, NodeId};
use proto::usage::{AttemptId, UsageRecord, UsageReport};
use std::collections::{HashMap, VecDeque};

/// An ended attempt without a record for this long was made by a worker that reports none, or that was lost.
const RECORD_LIMIT_S: u64 = 60;
/// Most attempts that wait for their record.
const MAX_PENDING: usize = 1 << 16;
/// Most workers whose last record is remembered.
const MAX_WORKERS: usize = 1 << 12;

/// The tenant's part of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ended {
    /// Computed prompt tokens for which the tenant pays.
    pub input: PaidInput,
    /// Output tokens that reached the client.
    pub delivered: u64,
}

/// Computed prompt tokens for which a tenant pays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PaidInput {
    /// This many, already counted. 0 if another attempt was paid for.
    Tokens(u64),
    /// Nothing, not of the output either: the attempt was lost or refused.
    Nothing,
    /// The tokens that the worker computed; they are counted with its record, and the cached ones too: the request
    /// ended at the client's wish before its first token.
    AsComputed,
}

impl Default for PaidInput {
    fn default() -> Self {
        Self::Tokens(0)
    }
}

/// Amounts for an account.
pub type Charge = (Account, Vec<(Counter, u64)>);

#[derive(Debug)]
struct Pending {
    account: Account,
    ended: Option<(u64, Ended)>,
    record: Option<UsageRecord>,
}

/// Attempts that have not been settled. Those at instances are the worker's, which reports for all of them.
#[derive(Debug, Default)]
pub struct Attempts {
    pending: HashMap<(NodeId, AttemptId), VecDeque<Pending>>,
    count: usize,
    /// Ends in the order of time, for expiry.
    ends: VecDeque<(u64, NodeId, AttemptId)>,
    /// Epoch of each worker, and the number of its next record.
    next: HashMap<NodeId, (Epoch, u64)>,
}

impl Attempts {
    /// An attempt was sent to a worker.
    pub fn began(&mut self, node: &NodeId, id: &AttemptId, account: &Account) {
        if self.count >= MAX_PENDING {
            return;
        }
        let pending = Pending { account: account.clone(), ended: None, record: None };
        self.pending.entry((node.to_worker(), id.clone())).or_default().push_back(pending);
        self.count += 1;
    }

    /// An attempt has ended for the client.
    pub fn ended(&mut self, now_s: u64, node: &NodeId, id: &AttemptId, ended: Ended) -> Option<Charge> {
        let key = (node.to_worker(), id.clone());
        let all = self.pending.get_mut(&key)?;
        let at = all.iter().position(|pending| pending.ended.is_none())?;
        match all[at].record.take() {
            Some(record) => {
                let account = self.remove(&key, at)?.account;
                Some(settle(account, &record, ended))
            }
            None => {
                all[at].ended = Some((now_s, ended));
                self.ends.push_back((now_s, key.0, key.1));
                None
            }
        }
    }

    /// A worker has reported. Records that were reported before are left out.
    pub fn reported(&mut self, node: &NodeId, report: UsageReport) -> Vec<Charge> {
        let UsageReport { epoch, first, records } = report;
        let node = &node.to_worker();
        if self.next.len() >= MAX_WORKERS && !self.next.contains_key(node) {
            self.next.clear();
        }
        let next = self.next.entry(node.clone()).or_insert((epoch, 0));
        if epoch > next.0 {
            *next = (epoch, 0);
        }
        let end = first.saturating_add(records.len() as u64);
        if epoch < next.0 || end <= next.1 {
            return Vec::new();
        }
        let known = usize::try_from(next.1.saturating_sub(first)).unwrap_or(usize::MAX);
        next.1 = end;
        let new = records.into_iter().skip(known);
        new.filter_map(|record| self.record(node, record)).collect()
    }

    fn record(&mut self, node: &NodeId, record: UsageRecord) -> Option<Charge> {
        let key = (node.clone(), record.id.clone());
        let waiting = self.pending.get_mut(&key);
        let at = waiting.as_ref().and_then(|all| all.iter().position(|pending| pending.record.is_none()));
        let (Some(all), Some(at)) = (waiting, at) else {
            let account = Account::unattributed(record.model.as_str());
            let ended =
                Ended { input: PaidInput::Tokens(record.input_tokens), delivered: record.output_tokens };
            return Some(settle(account, &record, ended));
        };
        match all[at].ended {
            Some((_, ended)) => {
                let account = self.remove(&key, at)?.account;
                Some(settle(account, &record, ended))
            }
            None => {
                all[at].record = Some(record);
                None
            }
        }
    }

    /// Gives up attempts whose record did not arrive in time.
    pub fn expire(&mut self, now_s: u64) {
        while let Some((at, ..)) = self.ends.front() {
            if now_s.saturating_sub(*at) < RECORD_LIMIT_S && self.ends.len() <= MAX_PENDING {
                return;
            }
            let Some((at, node, id)) = self.ends.pop_front() else { return };
            let key = (node, id);
            let late = |pending: &Pending| pending.ended.is_some_and(|(ended, _)| ended <= at);
            if let Some(index) = self.pending.get(&key).and_then(|all| all.iter().position(late)) {
                self.remove(&key, index);
            }
        }
    }

    /// Number of attempts that have not been settled.
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn remove(&mut self, key: &(NodeId, AttemptId), at: usize) -> Option<Pending> {
        let all = self.pending.get_mut(key)?;
        let removed = all.remove(at);
        if all.is_empty() {
            self.pending.remove(key);
        }
        self.count = self.count.saturating_sub(usize::from(removed.is_some()));
        removed
    }
}

/// Divides an amount in the ratio of `part` to `whole`. Of an amount without tokens, all is the first part.
fn divide(amount: u64, part: u64, whole: u64) -> (u64, u64) {
    if part >= whole {
        return (amount, 0);
    }
    // Less than `amount`, so it fits.
    let first = (u128::from(amount) * u128::from(part) / u128::from(whole)) as u64;
    (first, amount - first)
}

/// The tenant's tokens, time and energy, and the rest. Each sum is that of the record.
fn settle(account: Account, record: &UsageRecord, ended: Ended) -> Charge {
    let input = match ended.input {
        PaidInput::Tokens(tokens) => tokens.min(record.input_tokens),
        PaidInput::AsComputed => record.input_tokens,
        PaidInput::Nothing => 0,
    };
    let output = ended.delivered.min(record.output_tokens);
    let ((input_ns, input_again_ns), (output_ns, output_again_ns)) = match ended.input {
        PaidInput::Nothing => ((0, record.input_ns), (0, record.output_ns)),
        PaidInput::Tokens(_) | PaidInput::AsComputed => (
            divide(record.input_ns, input, record.input_tokens),
            divide(record.output_ns, output, record.output_tokens),
        ),
    };
    let (paid_ns, again_ns) =
        (input_ns.saturating_add(output_ns), input_again_ns.saturating_add(output_again_ns));
    let again = (record.input_tokens - input).saturating_add(record.output_tokens - output);
    let mut amounts = vec![
        (Counter::RecomputedTokens, again),
        (Counter::DeviceNs, paid_ns),
        (Counter::RecomputedDeviceNs, again_ns),
        (Counter::TimedAttempts, 1),
    ];
    let all_ns = paid_ns.saturating_add(again_ns);
    let (energy, energy_again) = divide(record.energy_uj, paid_ns, all_ns);
    amounts.extend([
        (Counter::EnergyUj, energy),
        (Counter::RecomputedEnergyUj, energy_again),
        (Counter::EnergyDeviceNs, divide(record.energy_ns, paid_ns, all_ns).0),
    ]);
    if ended.input == PaidInput::AsComputed {
        let cached = record.cached_tokens;
        amounts.push((Counter::PromptTokens, record.input_tokens.saturating_add(cached)));
        amounts.push((Counter::CachedTokens, cached));
    }
    (account, amounts)
}

#[cfg(test)]
mod tests;
