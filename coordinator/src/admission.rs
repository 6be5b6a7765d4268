//! The bounded queue in front of the workers: tenants by the tokens that each has been served, and within a tenant
//! first come first served, with a head start for what is more urgent.
//!
//! Bounded in requests and in prompt tokens, because tokens are what takes time; tenants are counted in them for the
//! same reason. Pure state: the caller says when and decides what can be placed.
//!
//! Invariants: two tenants that always have requests waiting get tokens in proportion to their weights
//! ([`TenantWeights`]), to within the length of one request; what waits is overtaken, within its tenant, only by what came at most so much
//! later as the difference in urgency allows ([`rank`]), and by a few more of its own priority that can be placed better
//! ([`Queue::drain`]), so nothing waits for ever.

mod weights;

pub use weights::{BadWeight, TenantWeights};

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Longest and shortest `Retry-After`.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// The most and the least urgent priority, apart from the sign.
pub const MAX_PRIORITY: i32 = 100;
/// Who is more urgent by one overtakes who came earlier by less than this.
const PRIORITY_STEP: Duration = Duration::from_secs(1);

/// How many of a lane are looked at for one that can be placed better than the first.
const LOOKED_AT: usize = 4;
/// What has been overtaken so often by what stood behind it is overtaken no more.
const MAX_OVERTAKEN: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    pub requests: usize,
    /// Prompt tokens of these requests.
    pub tokens: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{requests} requests with {tokens} prompt tokens are waiting")]
pub struct QueueFull {
    pub requests: usize,
    /// Their prompt tokens.
    pub tokens: u64,
}

/// What waits of one tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantView {
    pub tenant: String,
    pub requests: usize,
    /// Their prompt tokens.
    pub tokens: u64,
}

pub trait Waiting {
    /// Prompt tokens that it brings.
    fn tokens(&self) -> u64;
    /// When it is worth nothing any more.
    fn deadline(&self) -> Instant;
    /// Its place among its tenant's: the earlier the sooner. See [`rank`].
    fn rank(&self) -> Instant;
    /// How urgent it is among its tenant's; lower goes first.
    fn priority(&self) -> i32;
}

/// What becomes of something that is offered.
#[derive(Debug)]
pub enum Offered<T> {
    Taken,
    /// It cannot be placed just now.
    Stuck(T),
    /// It can be placed, and had better wait if another can be placed in its stead.
    Yields(T),
}

/// The rank of a request that came at `arrived` with a priority, of which lower is more urgent: everybody grows more
/// urgent by waiting, so that the order of two never changes.
pub fn rank(arrived: Instant, priority: i32) -> Instant {
    let steps = (priority.clamp(-MAX_PRIORITY, MAX_PRIORITY) + MAX_PRIORITY).unsigned_abs();
    arrived + PRIORITY_STEP * steps
}

/// Where something stands in its lane: what was put back first, then by rank, then as it came.
type LanePosition = (Option<Instant>, u64);

#[derive(Debug)]
struct Lane<T> {
    tenant: String,
    items: BTreeMap<LanePosition, Item<T>>,
    /// Tokens taken from here over the tenant's weight, on top of what the others had when the tenant came.
    served: u64,
    weight: u64,
    /// Nothing of it can be placed just now.
    blocked: bool,
}

impl<T> Lane<T> {
    /// Tokens over the tenant's weight, in thousandths of a token. The largest weight is 1,000.
    fn share(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(1_000) / self.weight
    }
}

#[derive(Debug)]
struct Item<T> {
    inner: T,
    /// How many that stand behind it were placed before it.
    overtaken: u8,
}

#[derive(Debug)]
pub struct Queue<T> {
    limits: QueueLimits,
    weights: TenantWeights,
    /// Tenants that have something waiting, or have been served more than the others.
    lanes: Vec<Lane<T>>,
    requests: usize,
    tokens: u64,
    /// What the lane from which was taken last had been served before: where a new lane begins.
    level: u64,
    arrivals: u64,
}

impl<T: Waiting> Queue<T> {
    /// An empty queue.
    pub fn new(limits: QueueLimits, weights: TenantWeights) -> Self {
        Self { limits, weights, lanes: Vec::new(), requests: 0, tokens: 0, level: 0, arrivals: 0 }
    }

    /// Whether `requests` more with `tokens` in all would fit. An empty queue takes anything: what is too
    /// long for the model has been refused before.
    pub fn check(&self, requests: usize, tokens: u64) -> Result<(), QueueFull> {
        let fits = self.requests.saturating_add(requests) <= self.limits.requests
            && self.tokens.saturating_add(tokens) <= self.limits.tokens;
        if fits || self.requests == 0 {
            return Ok(());
        }
        Err(QueueFull { requests: self.requests, tokens: self.tokens })
    }

    /// Puts it into the tenant's lane, by its rank.
    pub fn push(&mut self, tenant: &str, item: T) {
        let rank = Some(item.rank());
        self.insert(tenant, rank, item);
    }

    /// Puts back at the head of the tenant's lane what had been taken out; the tenant was not served with it.
    pub fn push_back_first(&mut self, tenant: &str, item: T) {
        let tokens = item.tokens();
        let lane = self.insert(tenant, None, item);
        lane.served = lane.served.saturating_sub(lane.share(tokens));
    }

    /// Offers to `place` what the lane that has been served least has to offer, again and again until nothing can be
    /// placed. `place` is told whether what it is offered may yield to another.
    ///
    /// That is the first of the lane. If it is stuck, or yields, those behind it are offered, as far as they may overtake
    /// it: the next few of the same priority, and none once it has been overtaken so often. If none of them can be placed
    /// without yielding too, the first that could be is. A lane of which nothing can be placed waits, the others go on.
    pub fn drain(&mut self, mut place: impl FnMut(T, bool) -> Offered<T>) {
        let next = |lanes: &[Lane<T>]| {
            let open = lanes.iter().enumerate().filter(|(_, lane)| !lane.blocked && !lane.items.is_empty());
            open.min_by_key(|(_, lane)| lane.served).map(|(at, _)| at)
        };
        while let Some(at) = next(&self.lanes) {
            let lane = &mut self.lanes[at];
            let Some(tokens) = lane.offer(&mut place) else {
                lane.blocked = true;
                continue;
            };
            self.level = lane.served;
            lane.served += lane.share(tokens);
            self.requests -= 1;
            self.tokens -= tokens;
        }
        self.lanes.iter_mut().for_each(|lane| lane.blocked = false);
        self.forget();
    }

    /// Takes out all that `leaves` says, in the order of lanes.
    pub fn remove(&mut self, mut leaves: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut out = Vec::new();
        for lane in &mut self.lanes {
            let gone: Vec<LanePosition> =
                lane.items.iter().filter(|(_, item)| leaves(&item.inner)).map(|(place, _)| *place).collect();
            out.extend(gone.iter().filter_map(|place| lane.items.remove(place)).map(|item| item.inner));
        }
        self.forget();
        self.requests -= out.len();
        self.tokens -= out.iter().map(Waiting::tokens).sum::<u64>();
        out
    }

    /// Takes out what has passed its deadline.
    pub fn expire(&mut self, now: Instant) -> Vec<T> {
        self.remove(|item| item.deadline() <= now)
    }

    /// The tenants that have something waiting.
    pub fn tenants(&self) -> impl Iterator<Item = TenantView> {
        self.lanes.iter().filter(|lane| !lane.items.is_empty()).map(|lane| TenantView {
            tenant: lane.tenant.clone(),
            requests: lane.items.len(),
            tokens: lane.items.values().map(|item| item.inner.tokens()).sum(),
        })
    }

    pub fn requests(&self) -> usize {
        self.requests
    }

    /// Prompt tokens that wait.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Tenants who have nothing waiting, and no more than what a new one would begin with.
    fn forget(&mut self) {
        if self.lanes.iter().all(|lane| lane.items.is_empty()) {
            self.lanes.clear();
        }
        self.lanes.retain(|lane| !lane.items.is_empty() || lane.served > self.level);
    }

    fn insert(&mut self, tenant: &str, rank: Option<Instant>, item: T) -> &mut Lane<T> {
        self.requests += 1;
        self.tokens += item.tokens();
        self.arrivals += 1;
        let at = self.lanes.iter().position(|lane| lane.tenant == tenant).unwrap_or_else(|| {
            let (weight, items) = (self.weights.of(tenant).into(), BTreeMap::new());
            let tenant = tenant.to_owned();
            self.lanes.push(Lane { tenant, items, served: self.level, weight, blocked: false });
            self.lanes.len() - 1
        });
        let lane = &mut self.lanes[at];
        lane.items.insert((rank, self.arrivals), Item { inner: item, overtaken: 0 });
        lane
    }
}

impl<T: Waiting> Lane<T> {
    /// Places one of the first; how many tokens that brings.
    fn offer(&mut self, place: &mut impl FnMut(T, bool) -> Offered<T>) -> Option<u64> {
        let first = self.items.first_key_value().map(|(_, item)| item.inner.priority())?;
        let places: Vec<LanePosition> = self.items.keys().take(LOOKED_AT).copied().collect();
        let mut yielded = None;
        for (passed, at) in places.iter().enumerate() {
            let Some(Item { inner, overtaken }) = self.items.remove(at) else { break };
            let (tokens, same) = (inner.tokens(), inner.priority() == first);
            let offered = if same { place(inner, true) } else { Offered::Stuck(inner) };
            let back = match offered {
                Offered::Taken => {
                    self.overtake(&places[..passed]);
                    return Some(tokens);
                }
                Offered::Stuck(inner) => inner,
                Offered::Yields(inner) => {
                    yielded = yielded.or(Some(passed));
                    inner
                }
            };
            self.items.insert(*at, Item { inner: back, overtaken });
            if overtaken >= MAX_OVERTAKEN || !same {
                break;
            }
        }
        let (before, at) = places.split_at_checked(yielded?)?;
        let at = at.first()?;
        let Item { inner, overtaken } = self.items.remove(at)?;
        let tokens = inner.tokens();
        match place(inner, false) {
            Offered::Taken => {
                self.overtake(before);
                Some(tokens)
            }
            Offered::Stuck(inner) | Offered::Yields(inner) => {
                self.items.insert(*at, Item { inner, overtaken });
                None
            }
        }
    }

    fn overtake(&mut self, places: &[LanePosition]) {
        for place in places {
            if let Some(item) = self.items.get_mut(place) {
                item.overtaken += 1;
            }
        }
    }
}

/// When to come back: the time in which workers that compute `rate` tokens per second get through `tokens`.
pub fn retry_after(tokens: u64, rate: f64) -> Duration {
    let seconds = if rate > 0.0 { tokens as f64 / rate } else { 0.0 };
    Duration::try_from_secs_f64(seconds.ceil()).unwrap_or(RETRY_MAX).clamp(RETRY_MIN, RETRY_MAX)
}

#[cfg(test)]
mod tests;
