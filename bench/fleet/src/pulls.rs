//! Pulls as workers make and serve them (`worker/src/engine/kv_receive.rs`, `worker/src/service/peers.rs`), with time for
//! bytes and no bytes: what a holder is asked for waits until it is between two steps, then its link, then the step of
//! the worker that asked.

use proto::block::{BlockId, HASH_UNIT_TOKENS};
use std::sync::Arc;
use std::time::Duration;
use worker::scheduler::Scheduler;

/// Tokens that a pull must save at least, and the part of all that it brings.
const LEAST_GAIN: u32 = 32;
const GAIN_PART: u32 = 16;
/// What a pull is given: the time that computing takes, but not less or more than this.
const LEAST_PATIENCE: f64 = 1.0;
const MOST_PATIENCE: f64 = 10.0;

/// What pulls were measured to take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PullRates {
    /// Bytes per second from one worker to another.
    pub(crate) bytes_per_second: f64,
    /// Seconds besides, for round trips.
    pub(crate) overhead: f64,
    /// Bytes per second that an engine copies between two steps.
    pub(crate) copied_per_second: f64,
}

/// What is asked of a holder.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    /// Who is asked.
    pub(crate) holder: usize,
    /// Which pull of the worker that asks.
    pub(crate) pull: usize,
    /// The prefix.
    pub(crate) tokens: Arc<[u32]>,
    /// Leading tokens that are there.
    pub(crate) have: u32,
    /// When it is given up.
    pub(crate) until: Duration,
}

/// A request with where it may pull from.
#[derive(Debug, Clone)]
pub(crate) struct Pulling {
    /// Which request.
    pub(crate) request: usize,
    /// Its prompt.
    pub(crate) prompt: Arc<[u32]>,
    /// Who holds how many leading tokens of it.
    pub(crate) source: Option<(usize, u32)>,
}

/// Pulls of one worker.
#[derive(Debug, Default)]
pub(crate) struct Pulls {
    begun: usize,
    under_way: Vec<Pull>,
}

#[derive(Debug)]
struct Pull {
    id: usize,
    tokens: Arc<[u32]>,
    waiting: Vec<Pulling>,
    until: Duration,
    /// How deep the resume point is that has come; 0: nothing.
    brought: Option<u32>,
}

impl Pulls {
    /// Has a request wait for a pull, which may have to be asked for, or gives it back if none is worth it. `rate`:
    /// tokens per second that the worker computes.
    pub(crate) fn wait(
        &mut self,
        now: Duration,
        scheduler: &Scheduler,
        root: BlockId,
        asking: Pulling,
        rate: f64,
    ) -> (Option<Pulling>, Option<Asked>) {
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
        let until = now + Duration::from_secs_f64(computing.clamp(LEAST_PATIENCE, MOST_PATIENCE));
        let tokens: Arc<[u32]> = prefix[..depth].into();
        let asked = Asked { holder, pull: self.begun, tokens: Arc::clone(&tokens), have, until };
        let waiting = vec![Pulling { source: None, ..asking }];
        self.under_way.push(Pull { id: self.begun, tokens, waiting, until, brought: None });
        self.begun += 1;
        (None, Some(asked))
    }

    /// What a pull has brought.
    pub(crate) fn brought(&mut self, pull: usize, depth: u32) {
        if let Some(pull) = self.under_way.iter_mut().find(|other| other.id == pull) {
            pull.brought = Some(depth);
        }
    }

    /// Puts what has come into the cache; the requests that waited for it or for too long, and tokens copied.
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
    gain >= LEAST_GAIN && gain >= depth / GAIN_PART
}
