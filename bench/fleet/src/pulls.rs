//! KV transfers as workers make and serve them (`worker/engine/src/engine/kv_receive.rs`,
//! `worker/src/service/peers.rs`), with simulated time and no data. A transfer waits for the holder's gap
//! between two steps, then for its link, then for the requesting worker's step.

use engine::scheduler::Scheduler;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use std::sync::Arc;
use std::time::Duration;

/// Fewest tokens that a pull must save.
const MIN_GAIN: u32 = 32;
/// A pull must also save this part of the prefix: 1 / `GAIN_DIVISOR`.
const GAIN_DIVISOR: u32 = 16;
/// Shortest timeout of a pull in seconds. The timeout is the time for computing the tokens, within limits.
const MIN_TIMEOUT: f64 = 1.0;
/// Longest timeout of a pull in seconds.
const MAX_TIMEOUT: f64 = 10.0;

/// Measured times of pulls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PullRates {
    /// Bytes per second between two workers.
    pub(crate) bytes_per_second: f64,
    /// Additional seconds, for round trips.
    pub(crate) overhead: f64,
    /// Bytes per second that an engine copies between two steps.
    pub(crate) copied_per_second: f64,
}

/// A request to a holder.
#[derive(Debug, Clone)]
pub(crate) struct PullRequest {
    pub(crate) holder: usize,
    /// Number of the requesting worker's pull.
    pub(crate) pull: usize,
    /// The prefix.
    pub(crate) tokens: Arc<[u32]>,
    /// Leading tokens that the worker already has.
    pub(crate) have: u32,
    /// Timeout.
    pub(crate) until: Duration,
}

/// A request with the source that it may pull from.
#[derive(Debug, Clone)]
pub(crate) struct Pulling {
    pub(crate) request: usize,
    pub(crate) prompt: Arc<[u32]>,
    /// Holder, and the number of leading tokens that it holds.
    pub(crate) source: Option<(usize, u32)>,
}

/// Pulls of one worker.
#[derive(Debug, Default)]
pub(crate) struct Pulls {
    started: usize,
    under_way: Vec<Pull>,
}

#[derive(Debug)]
struct Pull {
    id: usize,
    tokens: Arc<[u32]>,
    waiting: Vec<Pulling>,
    until: Duration,
    /// Depth of the resume point that arrived; 0 if none.
    brought: Option<u32>,
}

impl Pulls {
    /// Makes a request wait for a pull, which may have to be requested, or returns it if no pull is worth it.
    /// `rate` is the worker's prefill rate in tokens per second.
    pub(crate) fn wait(
        &mut self,
        now: Duration,
        scheduler: &Scheduler,
        root: BlockId,
        asking: Pulling,
        rate: f64,
    ) -> (Option<Pulling>, Option<PullRequest>) {
        let prefix = &asking.prompt[..units(asking.prompt.len() - 1)];
        let here = || scheduler.resume_point(root, prefix).map_or(0, |point| point.tokens);
        if asking.source.is_none() && self.under_way.is_empty() {
            return (Some(asking), None);
        }
        let have = here();
        let shares = |pull: &&mut Pull| {
            let common = prefix.iter().zip(&*pull.tokens).take_while(|(a, b)| a == b).count();
            worthwhile(have, units(common) as u32)
        };
        if let Some(pull) = self.under_way.iter_mut().find(shares) {
            pull.waiting.push(asking);
            return (None, None);
        }
        let Some((holder, tokens)) = asking.source else { return (Some(asking), None) };
        let depth = units(prefix.len().min(tokens as usize));
        if !worthwhile(have, depth as u32) {
            return (Some(asking), None);
        }
        let computing = f64::from(depth as u32 - have) / rate.max(1.0);
        let until = now + Duration::from_secs_f64(computing.clamp(MIN_TIMEOUT, MAX_TIMEOUT));
        let tokens: Arc<[u32]> = prefix[..depth].into();
        let request = PullRequest { holder, pull: self.started, tokens: Arc::clone(&tokens), have, until };
        let waiting = vec![Pulling { source: None, ..asking }];
        self.under_way.push(Pull { id: self.started, tokens, waiting, until, brought: None });
        self.started += 1;
        (None, Some(request))
    }

    /// A pull has arrived.
    pub(crate) fn brought(&mut self, pull: usize, depth: u32) {
        if let Some(pull) = self.under_way.iter_mut().find(|other| other.id == pull) {
            pull.brought = Some(depth);
        }
    }

    /// Puts arrived prefixes into the cache. Returns the requests whose pull arrived or timed out, and the
    /// tokens copied.
    pub(crate) fn end(
        &mut self,
        now: Duration,
        scheduler: &mut Scheduler,
        root: BlockId,
    ) -> (Vec<Pulling>, u32) {
        let (mut freed, mut copied) = (Vec::new(), 0);
        self.under_way.retain_mut(|pull| {
            let Some(depth) = pull.brought.or((now >= pull.until).then_some(0)) else { return true };
            let prefix = &pull.tokens[..depth as usize];
            let have = scheduler.resume_point(root, prefix).map_or(0, |point| point.tokens);
            if worthwhile(have, depth) {
                let restore = scheduler.begin_restore(depth);
                copied += restore
                    .filter(|(id, _)| scheduler.end_restore(*id, Some((root, prefix))))
                    .map_or(0, |_| depth);
            }
            freed.append(&mut pull.waiting);
            false
        });
        (freed, copied)
    }
}

fn units(tokens: usize) -> usize {
    tokens / HASH_UNIT_TOKENS * HASH_UNIT_TOKENS
}

fn worthwhile(have: u32, depth: u32) -> bool {
    let gain = depth.saturating_sub(have);
    gain >= MIN_GAIN && gain >= depth / GAIN_DIVISOR
}
