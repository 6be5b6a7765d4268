//! The bounded queue in front of the workers. Tenants are ordered by the tokens that each was served. Within
//! a tenant it is first come, first served, with a head start for higher priority.
//!
//! The bounds are in requests and in prompt tokens, since tokens determine the computing time; tenants are
//! counted in tokens for the same reason. This is pure state: the caller passes the time and decides what can
//! be placed.
//!
//! Invariants: two tenants that always have requests waiting get tokens in proportion to their weights
//! ([`TenantWeights`]), to within the length of one request. Within its tenant, a request is overtaken only
//! by requests whose higher priority outweighs their later arrival ([`rank`]), and by a bounded number of the
//! same priority that can be placed better ([`Queue::drain`]). So no request waits forever.

mod weights;

pub use weights::{BadWeight, TenantWeights};

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Shortest `Retry-After`.
const RETRY_MIN: Duration = Duration::from_secs(1);
/// Longest `Retry-After`.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// The priority of requests that wait for the fleet's idle time. Clients cannot request it.
pub const BACKGROUND: i32 = i32::MAX;
/// A request of the priority [`BACKGROUND`] is overtaken by those that arrive within this time.
const BACKGROUND_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// Largest absolute value of a priority.
pub const MAX_PRIORITY: i32 = 100;
/// A request that is more urgent by 1 overtakes requests that arrived less than this before it.
const PRIORITY_STEP: Duration = Duration::from_secs(1);

/// Requests at the head of a lane that are considered for a better placement than the first.
const LOOKED_AT: usize = 4;
/// A request that was overtaken this often from behind is not overtaken again.
const MAX_OVERTAKEN: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    pub requests: usize,
    /// Prompt tokens of all waiting requests.
    pub tokens: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{requests} requests with {tokens} prompt tokens are waiting")]
pub struct QueueFull {
    pub requests: usize,
    /// Prompt tokens of these requests.
    pub tokens: u64,
}

/// The waiting requests of one tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantView {
    pub tenant: String,
    pub requests: usize,
    /// Prompt tokens of these requests.
    pub tokens: u64,
}

pub trait Waiting {
    /// The model, or another target. A request that cannot be placed holds back only requests of its own kind.
    type Kind: Eq + Clone + std::fmt::Debug;
    fn kind(&self) -> Self::Kind;
    /// Prompt tokens.
    fn tokens(&self) -> u64;
    /// The request is dropped after this instant.
    fn deadline(&self) -> Instant;
    /// Position among the tenant's requests: the earliest goes first. See [`rank`].
    fn rank(&self) -> Instant;
    /// Priority among the tenant's requests; lower goes first.
    fn priority(&self) -> i32;
}

/// The result of offering a request for placement.
#[derive(Debug)]
pub enum PlacementOutcome<T> {
    /// Placed or refused.
    Done,
    /// The request cannot be placed now.
    Blocked(T),
    /// The request can be placed, but should wait if another one can be placed instead.
    Deferrable(T),
}

/// The rank of a request from its arrival and priority (lower is more urgent). All requests gain urgency at
/// the same rate by waiting, so that the order of two never changes.
pub fn rank(arrived: Instant, priority: i32) -> Instant {
    if priority == BACKGROUND {
        return arrived + BACKGROUND_WAIT;
    }
    let steps = (priority.clamp(-MAX_PRIORITY, MAX_PRIORITY) + MAX_PRIORITY).unsigned_abs();
    arrived + PRIORITY_STEP * steps
}

/// Position in a lane: requests put back come first, then by rank, then by arrival.
type LanePosition = (Option<Instant>, u64);

#[derive(Debug)]
struct Lane<T: Waiting> {
    tenant: String,
    /// None is empty.
    kinds: Vec<KindQueue<T>>,
    /// Tokens served from this lane, divided by the tenant's weight, plus the level at which the lane began.
    served: u64,
    weight: u64,
    /// Whether nothing in the lane can be placed in this pass.
    blocked: bool,
}

/// A tenant's waiting requests of one kind.
#[derive(Debug)]
struct KindQueue<T: Waiting> {
    kind: T::Kind,
    items: BTreeMap<LanePosition, Item<T>>,
    /// Whether none of them can be placed in this pass.
    blocked: bool,
}

impl<T: Waiting> Lane<T> {
    /// Tokens divided by the tenant's weight, in thousandths of a token. The largest weight is 1,000.
    fn share(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(1_000) / self.weight
    }
}

#[derive(Debug)]
struct Item<T> {
    inner: T,
    /// How many requests behind it were placed before it.
    overtaken: u8,
}

#[derive(Debug)]
pub struct Queue<T: Waiting> {
    limits: QueueLimits,
    weights: TenantWeights,
    /// Lanes of tenants that have waiting requests, or were served more than the others.
    lanes: Vec<Lane<T>>,
    requests: usize,
    tokens: u64,
    /// `served` of the lane that was last taken from, before that: where a new lane begins.
    level: u64,
    arrivals: u64,
}

impl<T: Waiting> Queue<T> {
    pub fn new(limits: QueueLimits, weights: TenantWeights) -> Self {
        Self { limits, weights, lanes: Vec::new(), requests: 0, tokens: 0, level: 0, arrivals: 0 }
    }

    /// Whether `requests` more with `tokens` in total would fit. An empty queue accepts any request: the ones
    /// too long for the model were refused before.
    pub fn check(&self, requests: usize, tokens: u64) -> Result<(), QueueFull> {
        let fits = self.requests.saturating_add(requests) <= self.limits.requests
            && self.tokens.saturating_add(tokens) <= self.limits.tokens;
        if fits || self.requests == 0 {
            return Ok(());
        }
        Err(QueueFull { requests: self.requests, tokens: self.tokens })
    }

    /// Inserts a request into the tenant's lane by its rank.
    pub fn push(&mut self, tenant: &str, item: T) {
        let rank = Some(item.rank());
        self.insert(tenant, rank, item);
    }

    /// Puts a request that was taken out back to the head of the tenant's lane and takes back its share.
    pub fn push_back_first(&mut self, tenant: &str, item: T) {
        let tokens = item.tokens();
        let lane = self.insert(tenant, None, item);
        lane.served = lane.served.saturating_sub(lane.share(tokens));
    }

    /// Offers requests of the least served lane to `place`, repeatedly, until nothing can be placed. The
    /// second argument of `place` is whether the request may yield to another.
    ///
    /// The first request of the lane is offered first. If it is stuck or yields, the requests of its kind behind it
    /// are offered, as far as they may overtake it: the next few of the same priority, and none once it was
    /// overtaken `MAX_OVERTAKEN` times. If none of them can be placed without yielding too, the first one
    /// that can be placed is. Then the lane's other kinds follow. A lane of which nothing can be placed is skipped;
    /// the others go on.
    pub fn drain(&mut self, mut place: impl FnMut(T, bool) -> PlacementOutcome<T>) {
        let next = |lanes: &[Lane<T>]| {
            let open = lanes.iter().enumerate().filter(|(_, lane)| !lane.blocked && !lane.kinds.is_empty());
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
        for lane in &mut self.lanes {
            lane.blocked = false;
            lane.kinds.iter_mut().for_each(|kind| kind.blocked = false);
        }
        self.forget();
    }

    /// Removes and returns all requests for which `leaves` is true, in the order of lanes.
    pub fn remove(&mut self, mut leaves: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut out = Vec::new();
        for lane in &mut self.lanes {
            for KindQueue { items, .. } in &mut lane.kinds {
                let leaving = items.extract_if(.., |_, item| leaves(&item.inner));
                out.extend(leaving.map(|(_, item)| item.inner));
            }
            lane.kinds.retain(|kind| !kind.items.is_empty());
        }
        self.forget();
        self.requests -= out.len();
        self.tokens -= out.iter().map(Waiting::tokens).sum::<u64>();
        out
    }

    /// Removes and returns the requests past their deadline.
    pub fn expire(&mut self, now: Instant) -> Vec<T> {
        self.remove(|item| item.deadline() <= now)
    }

    /// The tenants with waiting requests.
    pub fn tenants(&self) -> impl Iterator<Item = TenantView> {
        self.lanes.iter().filter(|lane| !lane.kinds.is_empty()).map(|lane| TenantView {
            tenant: lane.tenant.clone(),
            requests: lane.kinds.iter().map(|kind| kind.items.len()).sum(),
            tokens: lane.items().map(Waiting::tokens).sum(),
        })
    }

    /// The place of a request among those of its tenant, from 1, and their number.
    pub fn place(&self, is_it: impl Fn(&T) -> bool) -> Option<(usize, usize)> {
        self.lanes.iter().find_map(|lane| {
            let positions = || lane.kinds.iter().flat_map(|kind| &kind.items);
            let (own, _) = positions().find(|(_, item)| is_it(&item.inner))?;
            let before = positions().filter(|(position, _)| *position < own).count();
            Some((before + 1, positions().count()))
        })
    }

    pub fn requests(&self) -> usize {
        self.requests
    }

    /// The kinds of all waiting requests; one that several tenants wait for comes several times.
    pub fn kinds(&self) -> impl Iterator<Item = (&T::Kind, usize)> {
        let kinds = self.lanes.iter().flat_map(|lane| &lane.kinds);
        kinds.map(|kind| (&kind.kind, kind.items.len()))
    }

    /// Prompt tokens of all waiting requests.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Removes lanes that are empty and were served no more than a new one would begin with.
    fn forget(&mut self) {
        if self.lanes.iter().all(|lane| lane.kinds.is_empty()) {
            self.lanes.clear();
        }
        self.lanes.retain(|lane| !lane.kinds.is_empty() || lane.served > self.level);
    }

    fn insert(&mut self, tenant: &str, rank: Option<Instant>, item: T) -> &mut Lane<T> {
        self.requests += 1;
        self.tokens += item.tokens();
        self.arrivals += 1;
        let at = self.lanes.iter().position(|lane| lane.tenant == tenant).unwrap_or_else(|| {
            let (weight, kinds) = (self.weights.of(tenant).into(), Vec::new());
            let tenant = tenant.to_owned();
            self.lanes.push(Lane { tenant, kinds, served: self.level, weight, blocked: false });
            self.lanes.len() - 1
        });
        let lane = &mut self.lanes[at];
        lane.insert((rank, self.arrivals), item);
        lane
    }
}

impl<T: Waiting> Lane<T> {
    fn items(&self) -> impl Iterator<Item = &T> {
        self.kinds.iter().flat_map(|kind| kind.items.values()).map(|item| &item.inner)
    }

    fn insert(&mut self, position: LanePosition, item: T) {
        let kind = item.kind();
        let at = self.kinds.iter().position(|known| known.kind == kind).unwrap_or_else(|| {
            self.kinds.push(KindQueue { kind, items: BTreeMap::new(), blocked: false });
            self.kinds.len() - 1
        });
        self.kinds[at].items.insert(position, Item { inner: item, overtaken: 0 });
    }

    /// Places one of the first requests and returns its tokens. `None` if none can be placed.
    fn offer(&mut self, place: &mut impl FnMut(T, bool) -> PlacementOutcome<T>) -> Option<u64> {
        loop {
            let open = self.kinds.iter().enumerate().filter(|(_, kind)| !kind.blocked);
            let (at, _) = open.min_by_key(|(_, kind)| kind.items.keys().next())?;
            let offered = self.kinds[at].offer(place);
            if self.kinds[at].items.is_empty() {
                self.kinds.remove(at);
            } else if offered.is_none() {
                self.kinds[at].blocked = true;
            }
            if offered.is_some() {
                return offered;
            }
        }
    }
}

impl<T: Waiting> KindQueue<T> {
    /// Places one of the first requests and returns its tokens. `None` if none can be placed.
    fn offer(&mut self, place: &mut impl FnMut(T, bool) -> PlacementOutcome<T>) -> Option<u64> {
        let first = self.items.first_key_value().map(|(_, item)| item.inner.priority())?;
        let positions: Vec<LanePosition> = self.items.keys().take(LOOKED_AT).copied().collect();
        let mut yielded = None;
        for (passed, at) in positions.iter().enumerate() {
            let Some(Item { inner, overtaken }) = self.items.remove(at) else { break };
            let (tokens, same) = (inner.tokens(), inner.priority() == first);
            let offered = if same { place(inner, true) } else { PlacementOutcome::Blocked(inner) };
            let back = match offered {
                PlacementOutcome::Done => {
                    self.overtake(&positions[..passed]);
                    return Some(tokens);
                }
                PlacementOutcome::Blocked(inner) => inner,
                PlacementOutcome::Deferrable(inner) => {
                    yielded = yielded.or(Some(passed));
                    inner
                }
            };
            self.items.insert(*at, Item { inner: back, overtaken });
            if overtaken >= MAX_OVERTAKEN || !same {
                break;
            }
        }
        let (before, at) = positions.split_at_checked(yielded?)?;
        let at = at.first()?;
        let Item { inner, overtaken } = self.items.remove(at)?;
        let tokens = inner.tokens();
        match place(inner, false) {
            PlacementOutcome::Done => {
                self.overtake(before);
                Some(tokens)
            }
            PlacementOutcome::Blocked(inner) | PlacementOutcome::Deferrable(inner) => {
                self.items.insert(*at, Item { inner, overtaken });
                None
            }
        }
    }

    fn overtake(&mut self, positions: &[LanePosition]) {
        for position in positions {
            if let Some(item) = self.items.get_mut(position) {
                item.overtaken += 1;
            }
        }
    }
}

/// The `Retry-After` of a backlog: the time in which workers that compute `rate` tokens per second compute
/// `tokens`.
pub fn retry_after(tokens: u64, rate: f64) -> Duration {
    let seconds = if rate > 0.0 { tokens as f64 / rate } else { 0.0 };
    Duration::try_from_secs_f64(seconds.ceil()).unwrap_or(RETRY_MAX).clamp(RETRY_MIN, RETRY_MAX)
}

#[cfg(test)]
mod tests;
