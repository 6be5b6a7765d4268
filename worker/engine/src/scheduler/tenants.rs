//! Fairness between tenants: the order of the waiting queue, and when a running sequence yields to another
//! tenant.
//!
//! Tenants are compared by the tokens computed for them, divided by weight. The tenant with the fewest is
//! admitted next; within a tenant the order is priority, then arrival. A tenant that arrives or returns
//! starts at the level of the least served present tenant: it has no credit for idle time, and earlier
//! service counts only until the others have caught up.
//!
//! If a tenant waits because others hold what it needs, a running sequence returns to the queue:
//! - for a slot in the batch, if a tenant has more slots than the waiting one would have then, by weight
//! - for blocks, likewise, by the tokens whose blocks they hold
//! - if there are more tenants than batch slots, from a tenant that has been served [`QUANTUM`] tokens more
//!
//! Sequences in the background ([`TenantShare::is_background`]) are tenants of a lower class. A tenant of the upper
//! class is always admitted first, takes slots and blocks from the lower class at once, and never yields to it.
//!
//! So yielding ends when all tenants have their share, and does not oscillate. A sequence that was put back
//! must progress before it yields again ([`Sequence::may_yield`]), which bounds the recomputed share of the
//! work.

use super::sequence::{Rank, Sequence, State};
use super::{Scheduler, plan::StepBuilder};
use proto::message::TenantShare;
use std::collections::{BTreeMap, HashMap};

/// Number of tokens for which a tenant keeps its batch slot when there are more tenants than slots.
const QUANTUM: u32 = 64;
/// Minimum number of tokens that a sequence must progress before it yields again.
const MIN_PROGRESS: u32 = 16;
/// It must also progress by this fraction (one over it) of the tokens that yielding loses.
const PROGRESS_DIVISOR: u32 = 2;
/// Units of service per token, so that division by a weight keeps precision.
const SCALE: u64 = 1 << 10;

#[derive(Debug, Default)]
pub(super) struct Tenants {
    tenants: HashMap<u64, Tenant>,
    waiting: usize,
}

#[derive(Debug)]
struct Tenant {
    background: bool,
    weight: u32,
    /// Service: `SCALE` per computed token, divided by the weight, plus the level at which it started.
    served: u64,
    /// Number of its sequences, including waiting ones.
    live: usize,
    waiting: BTreeMap<Rank, u32>,
}

/// The next sequence to be admitted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Next {
    pub(super) tenant: u64,
    pub(super) rank: Rank,
    pub(super) slot: u32,
}

/// A tenant's share of the batch.
#[derive(Debug, Default, Clone, Copy)]
struct TenantUsage {
    slots: u64,
    tokens: u64,
}

impl Tenants {
    /// Counts one more sequence of a tenant.
    pub(super) fn add_sequence(&mut self, share: TenantShare) {
        // Only tenants of one class are compared.
        let class = share.is_background();
        let own = self.tenants.values().filter(|tenant| tenant.background == class && tenant.live > 0);
        let Some(level) = own.map(|tenant| tenant.served).min() else {
            // No tenant of the class has sequences: reset all of its counts.
            self.tenants.retain(|_, tenant| tenant.background != class);
            self.tenants.insert(share.tenant, Tenant::new(share, 0));
            return;
        };
        self.tenants
            .retain(|_, tenant| tenant.background != class || tenant.live > 0 || tenant.served > level);
        let tenant = self
            .tenants
            .entry(share.tenant)
            .or_insert_with(|| Tenant { live: 0, ..Tenant::new(share, level) });
        tenant.weight = share.weight.max(1);
        tenant.live += 1;
    }

    /// Counts one sequence less of a tenant. The sequence must not be waiting.
    pub(super) fn remove_sequence(&mut self, tenant: u64) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.live -= 1;
        }
    }

    pub(super) fn queue(&mut self, tenant: u64, rank: Rank, slot: u32) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            self.waiting += usize::from(tenant.waiting.insert(rank, slot).is_none());
        }
    }

    pub(super) fn unqueue(&mut self, tenant: u64, rank: &Rank) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            self.waiting -= usize::from(tenant.waiting.remove(rank).is_some());
        }
    }

    /// Counts `tokens` computed tokens.
    pub(super) fn serve(&mut self, tenant: u64, tokens: u32) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.served += u64::from(tokens) * SCALE / u64::from(tenant.weight);
        }
    }

    /// The next sequence among those that wait.
    pub(super) fn next(&self) -> Option<Next> {
        let heads = self.tenants.iter().filter_map(|(&name, tenant)| {
            let (&rank, &slot) = tenant.waiting.first_key_value()?;
            Some(((tenant.background, tenant.served), Next { tenant: name, rank, slot }))
        });
        heads.min_by_key(|(order, next)| (*order, next.rank)).map(|(_, next)| next)
    }

    /// Whether a sequence waits that is not in the background.
    pub(super) fn waits(&self) -> bool {
        self.tenants.values().any(|tenant| !tenant.background && !tenant.waiting.is_empty())
    }

    /// Slots of all waiting sequences.
    pub(super) fn slots(&self) -> impl Iterator<Item = &u32> {
        self.tenants.values().flat_map(|tenant| tenant.waiting.values())
    }

    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// Service received so far. The lower value goes first.
    pub(super) fn served(&self, tenant: u64) -> u64 {
        self.tenants.get(&tenant).map_or(0, |tenant| tenant.served)
    }

    /// The tenant and its weight, as its sequences were submitted.
    pub(super) fn share_of(&self, tenant: u64) -> TenantShare {
        let weight =
            self.tenants.get(&tenant).map_or(1, |known| if known.background { 0 } else { known.weight });
        TenantShare { tenant, weight }
    }

    fn weight(&self, tenant: u64) -> u64 {
        self.tenants.get(&tenant).map_or(1, |tenant| tenant.weight.into())
    }

    /// Divides `rows` by weight among tenants. No tenant gets more than its demand. The others share
    /// the rest.
    pub(super) fn share_out(&self, mut rows: u32, demands: HashMap<u64, u32>) -> HashMap<u64, u32> {
        let mut demands: Vec<(u64, u32, u64)> =
            demands.into_iter().map(|(tenant, demand)| (tenant, demand, self.weight(tenant))).collect();
        // Tenants with the least demand by weight go first: the others share the rest.
        demands.sort_by(|(a, x, v), (b, y, w)| (u64::from(*x) * w, a).cmp(&(u64::from(*y) * v, b)));
        let mut weights: u64 = demands.iter().map(|(_, _, weight)| weight).sum();
        let share = |(tenant, demand, weight): (u64, u32, u64)| {
            let quota = (u64::from(rows) * weight).div_ceil(weights.max(1));
            let granted = demand.min(u32::try_from(quota).unwrap_or(u32::MAX));
            rows -= granted.min(rows);
            weights -= weight;
            (tenant, granted)
        };
        demands.into_iter().map(share).collect()
    }
}

impl Tenant {
    fn new(share: TenantShare, served: u64) -> Self {
        let (background, weight) = (share.is_background(), share.weight.max(1));
        Self { background, weight, served, live: 1, waiting: BTreeMap::new() }
    }
}

impl Sequence {
    /// Whether it has progressed enough since its admission to yield, if `lost` tokens must then be computed
    /// again.
    fn may_yield(&self, lost: u32) -> bool {
        self.in_flight.is_none()
            && (!self.has_yielded || self.progress() >= MIN_PROGRESS.max(lost / PROGRESS_DIVISOR))
    }

    /// Tokens computed since its admission that had not been computed before.
    fn progress(&self) -> u32 {
        self.reached.saturating_sub(self.reached_before)
    }
}

impl Scheduler {
    /// Returns at most one sequence per step to the queue, if the tenant whose turn it is waits for batch
    /// slots or blocks of which another tenant has more than its share.
    pub(super) fn yield_one_sequence(&mut self, builder: &mut StepBuilder) {
        let Some(next) = self.tenants.next().filter(|_| self.alone.is_none()) else { return };
        let full = self.running.len() >= self.config.max_seqs;
        if !full && self.short_of_blocks != Some(next.tenant) {
            return;
        }
        if self.yield_background(next, full, builder) {
            return;
        }
        let background = self.get(next.slot).is_some_and(Sequence::is_background);
        let mut shares: HashMap<u64, TenantUsage> = HashMap::new();
        let class = self.running.iter().filter_map(|&slot| self.get(slot));
        for sequence in class.filter(|sequence| sequence.is_background() == background) {
            let share = shares.entry(sequence.tenant).or_default();
            share.slots += 1;
            share.tokens += u64::from(sequence.cache.len());
        }
        let own = shares.remove(&next.tenant).unwrap_or_default();
        let needed_tokens = self.get(next.slot).map_or(0, |sequence| u64::from(self.ahead(sequence)));
        let weight = self.tenants.weight(next.tenant);
        let has_more = |(tenant, share): &(&u64, &TenantUsage)| {
            let (has, would_have) =
                if full { (share.slots, own.slots + 1) } else { (share.tokens, own.tokens + needed_tokens) };
            has * weight > would_have * self.tenants.weight(**tenant)
        };
        // The tenant with the largest share by weight.
        let by_share = |(a, x): &(&u64, &TenantUsage), (b, y): &(&u64, &TenantUsage)| {
            let has = |share: &TenantUsage| if full { share.slots } else { share.tokens };
            (has(x) * self.tenants.weight(**b), **a).cmp(&(has(y) * self.tenants.weight(**a), **b))
        };
        let largest = shares.iter().filter(has_more).max_by(by_share).map(|(&tenant, _)| tenant);
        let victim = match largest {
            Some(tenant) => self.cheapest_to_yield(tenant, 0, full),
            None if full && own.slots == 0 => {
                let served = |tenant: &u64| self.tenants.served(*tenant);
                let most_served = shares.keys().copied().max_by_key(|tenant| (served(tenant), *tenant));
                let due = served(&next.tenant) + u64::from(QUANTUM) * SCALE / weight;
                most_served
                    .filter(|tenant| served(tenant) >= due)
                    .and_then(|tenant| self.cheapest_to_yield(tenant, QUANTUM, full))
            }
            None => None,
        };
        let Some(slot) = victim else { return };
        if let Some(sequence) = self.sequences[slot as usize].as_mut() {
            sequence.has_yielded = true;
        }
        self.counters.yields += 1;
        self.put_back(slot, builder);
    }

    /// Returns sequences of the background to the queue, if the sequence in turn is not in the background: one for a
    /// slot in the batch, as many as hold its tokens for blocks. Returns whether there was one.
    fn yield_background(&mut self, next: Next, full: bool, builder: &mut StepBuilder) -> bool {
        let Some(sequence) = self.get(next.slot).filter(|sequence| !sequence.is_background()) else {
            return false;
        };
        let mut needed = if full { 1 } else { self.ahead(sequence) };
        let mut yielded = false;
        // The youngest first: it has the least to lose.
        for slot in self.running.clone().into_iter().rev() {
            let may = |s: &&Sequence| {
                s.is_background() && s.state == State::Running && s.in_flight.is_none() && s.cache.holds_any()
            };
            let Some(held) = self.get(slot).filter(may).map(|sequence| sequence.cache.len()) else {
                continue;
            };
            self.counters.yields += 1;
            self.put_back(slot, builder);
            yielded = true;
            needed = needed.saturating_sub(if full { 1 } else { held });
            if needed == 0 {
                break;
            }
        }
        yielded
    }

    /// Among the sequences of a tenant that may yield and have progressed by at least `progress` tokens, the
    /// slot of the one that loses the fewest tokens; ties go to the youngest. `keeps` means that blocks are
    /// not short, so that its prefix is still cached when it returns.
    fn cheapest_to_yield(&self, tenant: u64, progress: u32, keeps: bool) -> Option<u32> {
        let keeps = keeps && self.config.prefix_cache;
        let own = self.running.iter().filter_map(|&slot| Some((slot, self.get(slot)?)));
        let own =
            own.filter(|(_, s)| s.tenant == tenant && s.state == State::Running && s.progress() >= progress);
        let lost = own.map(|(slot, s)| (s.cache.len() - self.cache.tokens_shared(&s.cache), s, slot));
        let may = lost.filter(|(lost, sequence, _)| sequence.may_yield(if keeps { 0 } else { *lost }));
        may.min_by_key(|(lost, s, _)| (*lost, std::cmp::Reverse(s.rank))).map(|(_, _, slot)| slot)
    }
}
