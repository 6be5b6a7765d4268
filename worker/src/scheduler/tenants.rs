//! Turns of tenants: the waiting queue, and when a running sequence makes way for another tenant's.
//!
//! Tenants are compared by the tokens computed for each, by weight; the one with the fewest is admitted next, and within a
//! tenant the first to come. A tenant that comes, or comes back, begins where the least served of the present ones is:
//! it has saved nothing up, and what it has had before is not held against it for longer than the others need to catch up.
//!
//! Where a tenant waits because others hold what it needs, a running sequence is put back into the queue:
//! - for a place in the batch, while a tenant has more places than the waiting one would have then, by weight;
//! - for blocks, likewise, by the tokens whose blocks they hold;
//! - where there are more tenants than places, of the tenant that has been served [`QUANTUM`] tokens more.
//!
//! So it comes to an end when all have their part, and does not swing back. A sequence that was put back has to get on
//! before it is again ([`Sequence::may_yield`]): what is computed twice stays a part of what is computed.

use super::sequence::{Rank, Sequence, State};
use super::{Scheduler, plan::Draft};
use proto::message::TenantTurn;
use std::collections::{BTreeMap, HashMap};

/// Where there are more tenants than places, one keeps its place for so many tokens.
const QUANTUM: u32 = 64;
/// A sequence that has made way gets on by so many tokens before it does again, or by this part of what that costs.
const LEAST_PROGRESS: u32 = 16;
const PROGRESS_PART: u32 = 2;
/// Service is counted in parts of a token, for weights.
const SCALE: u64 = 1 << 10;

#[derive(Debug, Default)]
pub(super) struct Tenants {
    known: HashMap<u64, Tenant>,
    waiting: usize,
}

#[derive(Debug)]
struct Tenant {
    weight: u32,
    /// Parts of tokens computed for it over its weight, on top of where it began.
    served: u64,
    /// Its sequences, waiting ones included.
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

/// What a tenant has of the batch.
#[derive(Debug, Default, Clone, Copy)]
struct TenantShare {
    places: u64,
    tokens: u64,
}

impl Tenants {
    /// A tenant has one sequence more.
    pub(super) fn came(&mut self, turn: TenantTurn) {
        let level = self.known.values().filter(|tenant| tenant.live > 0).map(|tenant| tenant.served).min();
        let Some(level) = level else {
            // Nobody was there: what was counted is of no use any more.
            self.known.clear();
            self.known.insert(turn.tenant, Tenant::new(turn.weight, 0));
            return;
        };
        self.known.retain(|_, tenant| tenant.live > 0 || tenant.served > level);
        let tenant = self
            .known
            .entry(turn.tenant)
            .or_insert_with(|| Tenant { live: 0, ..Tenant::new(turn.weight, level) });
        tenant.weight = turn.weight.max(1);
        tenant.live += 1;
    }

    /// A tenant has one sequence less, which does not wait.
    pub(super) fn went(&mut self, tenant: u64) {
        if let Some(tenant) = self.known.get_mut(&tenant) {
            tenant.live -= 1;
        }
    }

    pub(super) fn queue(&mut self, tenant: u64, rank: Rank, slot: u32) {
        if let Some(tenant) = self.known.get_mut(&tenant) {
            self.waiting += usize::from(tenant.waiting.insert(rank, slot).is_none());
        }
    }

    pub(super) fn unqueue(&mut self, tenant: u64, rank: &Rank) {
        if let Some(tenant) = self.known.get_mut(&tenant) {
            self.waiting -= usize::from(tenant.waiting.remove(rank).is_some());
        }
    }

    /// So many tokens are computed for it.
    pub(super) fn serve(&mut self, tenant: u64, tokens: u32) {
        if let Some(tenant) = self.known.get_mut(&tenant) {
            tenant.served += u64::from(tokens) * SCALE / u64::from(tenant.weight);
        }
    }

    /// Whose turn it is, of those that wait.
    pub(super) fn next(&self) -> Option<Next> {
        let heads = self.known.iter().filter_map(|(&name, tenant)| {
            let (&rank, &slot) = tenant.waiting.first_key_value()?;
            Some((tenant.served, Next { tenant: name, rank, slot }))
        });
        heads.min_by_key(|(served, next)| (*served, next.rank)).map(|(_, next)| next)
    }

    /// Slots of all that wait.
    pub(super) fn slots(&self) -> impl Iterator<Item = &u32> {
        self.known.values().flat_map(|tenant| tenant.waiting.values())
    }

    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// How much it has been served; who has less goes first.
    pub(super) fn served(&self, tenant: u64) -> u64 {
        self.known.get(&tenant).map_or(0, |tenant| tenant.served)
    }

    /// As a sequence of it was submitted with.
    pub(super) fn turn(&self, tenant: u64) -> TenantTurn {
        TenantTurn { tenant, weight: self.known.get(&tenant).map_or(1, |known| known.weight) }
    }

    fn weight(&self, tenant: u64) -> u64 {
        self.known.get(&tenant).map_or(1, |tenant| tenant.weight.into())
    }

    /// Shares out `rows` by weight among tenants that want so many each; nobody gets more than it wants, and what one
    /// leaves the others get.
    pub(super) fn share_out(&self, mut rows: u32, wants: HashMap<u64, u32>) -> HashMap<u64, u32> {
        let mut wants: Vec<(u64, u32, u64)> =
            wants.into_iter().map(|(tenant, want)| (tenant, want, self.weight(tenant))).collect();
        // Those that want least by their weight first: what they leave is the others'.
        wants.sort_by(|(a, x, v), (b, y, w)| (u64::from(*x) * w, a).cmp(&(u64::from(*y) * v, b)));
        let mut weights: u64 = wants.iter().map(|(_, _, weight)| weight).sum();
        let share = |(tenant, want, weight): (u64, u32, u64)| {
            let part = (u64::from(rows) * weight).div_ceil(weights.max(1));
            let gets = want.min(u32::try_from(part).unwrap_or(u32::MAX));
            rows -= gets.min(rows);
            weights -= weight;
            (tenant, gets)
        };
        wants.into_iter().map(share).collect()
    }
}

impl Tenant {
    fn new(weight: u32, served: u64) -> Self {
        Self { weight: weight.max(1), served, live: 1, waiting: BTreeMap::new() }
    }
}

impl Sequence {
    /// Whether it has got on far enough since it was admitted to make way, at the cost of computing `lost` tokens again.
    fn may_yield(&self, lost: u32) -> bool {
        self.in_flight.is_none()
            && (!self.has_yielded || self.progress() >= LEAST_PROGRESS.max(lost / PROGRESS_PART))
    }

    /// Tokens computed since it was admitted that had not been before.
    fn progress(&self) -> u32 {
        self.reached.saturating_sub(self.reached_before)
    }
}

impl Scheduler {
    /// Puts a sequence back into the queue, if the tenant whose turn it is waits for what others have too much of: at most
    /// one a step.
    pub(super) fn make_way(&mut self, draft: &mut Draft) {
        let Some(next) = self.tenants.next().filter(|_| self.alone.is_none()) else { return };
        let full = self.running.len() >= self.config.max_seqs;
        if !full && self.short_of_blocks != Some(next.tenant) {
            return;
        }
        let mut parts: HashMap<u64, TenantShare> = HashMap::new();
        for sequence in self.running.iter().filter_map(|&slot| self.get(slot)) {
            let part = parts.entry(sequence.tenant).or_default();
            part.places += 1;
            part.tokens += u64::from(sequence.cache.len());
        }
        let own = parts.remove(&next.tenant).unwrap_or_default();
        let wants = self.get(next.slot).map_or(0, |sequence| u64::from(self.ahead(sequence)));
        let weight = self.tenants.weight(next.tenant);
        let has_more = |(tenant, part): &(&u64, &TenantShare)| {
            let (has, would_have) =
                if full { (part.places, own.places + 1) } else { (part.tokens, own.tokens + wants) };
            has * weight > would_have * self.tenants.weight(**tenant)
        };
        // The one that has most by its weight.
        let by_part = |(a, x): &(&u64, &TenantShare), (b, y): &(&u64, &TenantShare)| {
            let has = |part: &TenantShare| if full { part.places } else { part.tokens };
            (has(x) * self.tenants.weight(**b), **a).cmp(&(has(y) * self.tenants.weight(**a), **b))
        };
        let rich = parts.iter().filter(has_more).max_by(by_part).map(|(&tenant, _)| tenant);
        let victim = match rich {
            Some(tenant) => self.least_lost(tenant, 0, full),
            None if full && own.places == 0 => {
                let served = |tenant: &u64| self.tenants.served(*tenant);
                let most = parts.keys().copied().max_by_key(|tenant| (served(tenant), *tenant));
                let due = served(&next.tenant) + u64::from(QUANTUM) * SCALE / weight;
                most.filter(|tenant| served(tenant) >= due)
                    .and_then(|tenant| self.least_lost(tenant, QUANTUM, full))
            }
            None => None,
        };
        let Some(slot) = victim else { return };
        if let Some(sequence) = self.sequences[slot as usize].as_mut() {
            sequence.has_yielded = true;
        }
        self.counters.yields += 1;
        self.put_back(slot, draft);
    }

    /// The sequence of a tenant that may make way and loses least by it, the youngest of several, of those that have got on
    /// by `progress` tokens. `keeps`: there are blocks enough, so that it finds itself cached when it comes back.
    fn least_lost(&self, tenant: u64, progress: u32, keeps: bool) -> Option<u32> {
        let keeps = keeps && self.config.prefix_cache;
        let own = self.running.iter().filter_map(|&slot| Some((slot, self.get(slot)?)));
        let own =
            own.filter(|(_, s)| s.tenant == tenant && s.state == State::Running && s.progress() >= progress);
        let lost = own.map(|(slot, s)| (s.cache.len() - self.cache.tokens_shared(&s.cache), s, slot));
        let may = lost.filter(|(lost, sequence, _)| sequence.may_yield(if keeps { 0 } else { *lost }));
        may.min_by_key(|(lost, s, _)| (*lost, std::cmp::Reverse(s.rank))).map(|(_, _, slot)| slot)
    }
}
