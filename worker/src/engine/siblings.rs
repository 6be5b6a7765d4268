//! Requests with the same prompt that arrive before it has been computed, mainly the choices of one request
//! (`n` > 1).
//!
//! The first one leads and is computed. The others wait for the end of its prompt and continue from there as
//! forks, each with its own first token, drawn from the same logits. If the leader is removed before that,
//! the next one leads. If a number of requests is announced to arrive together, the leader does not finish
//! its prompt before they have arrived, because a later one would have to compute its end again.

use crate::scheduler::{SeqId, SequenceRequest};
use proto::block::BlockId;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of requests that wait for one leader. Further ones are computed like any others.
const MAX_FOLLOWERS: usize = 256;
/// Time for which a leader that has only its last row left waits for the announced requests. They were sent
/// together, so a request that is later than this was lost or went to another worker.
const PATIENCE: Duration = Duration::from_millis(500);

type Prompt = (BlockId, Arc<[u32]>);

#[derive(Debug, Default)]
pub(super) struct Siblings {
    leaders: HashMap<Prompt, SeqId>,
    families: HashMap<SeqId, Family>,
    /// Followers whose leader is gone.
    orphans: Vec<SequenceRequest>,
}

#[derive(Debug)]
struct Family {
    prompt: Prompt,
    followers: Vec<SequenceRequest>,
    /// Number of announced requests, including the leader.
    announced: u32,
    /// Number of requests that have arrived, including the leader.
    come: u32,
    /// The leader waits for the others until this instant; `None` if it does not wait.
    gathers: Option<Instant>,
}

impl Siblings {
    /// Lets a request, one of `together` that arrive together, wait for the leader of its prompt. Returns the
    /// request if it leads itself and must be computed.
    pub(super) fn join(
        &mut self,
        now: Instant,
        request: SequenceRequest,
        together: u32,
    ) -> Option<SequenceRequest> {
        let prompt: Prompt = (request.root, request.prompt[..].into());
        let family = self.leaders.get(&prompt).and_then(|leader| self.families.get_mut(leader));
        match family {
            Some(family) if family.followers.len() < MAX_FOLLOWERS => {
                family.followers.push(request);
                family.come += 1;
                None
            }
            Some(_) => Some(request),
            None => {
                self.leaders.insert(prompt.clone(), request.id);
                let family = Family {
                    prompt,
                    followers: Vec::new(),
                    announced: together,
                    come: 1,
                    gathers: (together > 1).then_some(now + PATIENCE),
                };
                self.families.insert(request.id, family);
                Some(request)
            }
        }
    }

    /// Whether the leader must not finish its prompt yet.
    pub(super) fn awaits(&self, leader: SeqId) -> bool {
        self.families.get(&leader).is_some_and(|family| family.gathers.is_some())
    }

    /// Leaders that no longer need to wait for others.
    pub(super) fn gathered(&mut self, now: Instant) -> Vec<SeqId> {
        let over = |family: &&mut Family| {
            family.gathers.is_some_and(|until| family.come >= family.announced || now >= until)
        };
        let gathered = self.families.iter_mut().map(|(id, family)| (*id, family)).filter(|(_, f)| over(f));
        gathered
            .map(|(id, family)| {
                family.gathers = None;
                id
            })
            .collect()
    }

    /// The sequences that wait for the end of the leader's prompt. Some may have been cancelled.
    pub(super) fn followers(&self, leader: SeqId) -> impl Iterator<Item = SeqId> {
        self.families.get(&leader).into_iter().flat_map(|family| &family.followers).map(|request| request.id)
    }

    /// Ends the waiting for a leader's prompt, and returns the followers.
    pub(super) fn part(&mut self, leader: SeqId) -> Vec<SequenceRequest> {
        let Some(Family { prompt, followers, .. }) = self.families.remove(&leader) else { return Vec::new() };
        self.leaders.remove(&prompt);
        followers
    }

    /// Removes a request. If it led, its followers become orphans.
    pub(super) fn gone(&mut self, id: SeqId) {
        let followers = self.part(id);
        self.orphans.extend(followers);
    }

    /// The orphans since the last call, the longest waiting first.
    pub(super) fn take_orphans(&mut self) -> Vec<SequenceRequest> {
        std::mem::take(&mut self.orphans)
    }

    pub(super) fn waiting(&self) -> usize {
        let followers: usize = self.families.values().map(|family| family.followers.len()).sum();
        followers + self.orphans.len()
    }
}
