//! Requests with the same prompt that arrive before it has been computed, mainly the choices of one request
//! (`n` > 1).
//!
//! The first one leads and is computed. The others follow: they wait for the end of its prompt and continue
//! from there as forks, each with its own first token, drawn from the same logits. If the leader is removed
//! before that, the next one leads. If a number of requests is announced to arrive together, the leader does
//! not finish its prompt before they have arrived, because a later one would have to compute its end again.

use crate::scheduler::SeqId;
use proto::block::BlockId;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of requests that wait for one leader. Further ones are computed like any others.
const MAX_FOLLOWERS: usize = 256;
/// Time from a leader's arrival for which its last row waits for the announced requests. They were sent
/// together, so a request that is later than this was lost or went to another worker.
const GATHER_TIMEOUT: Duration = Duration::from_millis(500);

type Prompt = (BlockId, Arc<[u32]>);

#[derive(Debug, Default)]
pub(super) struct EqualPrompts {
    leaders: HashMap<Prompt, SeqId>,
    groups: HashMap<SeqId, Group>,
    /// Followers whose leader was removed, the longest waiting first.
    orphans: Vec<SeqId>,
}

/// A leader and the requests that wait for it.
#[derive(Debug)]
struct Group {
    prompt: Prompt,
    followers: Vec<SeqId>,
    /// Number of announced requests, including the leader.
    announced: u32,
    /// Number of requests that have arrived, including the leader.
    arrived: u32,
    /// The leader waits for the others until this instant; `None` if it does not wait.
    gathers_until: Option<Instant>,
}

impl EqualPrompts {
    /// Adds a request, one of `together` that arrive together. Returns the leader that it has to wait for, or
    /// `None` if it must be computed.
    pub(super) fn join(
        &mut self,
        now: Instant,
        id: SeqId,
        (root, prompt): (BlockId, &[u32]),
        together: u32,
    ) -> Option<SeqId> {
        let prompt: Prompt = (root, prompt.into());
        if let Some(&leader) = self.leaders.get(&prompt) {
            let group = self.groups.get_mut(&leader)?;
            if group.followers.len() >= MAX_FOLLOWERS {
                return None;
            }
            group.followers.push(id);
            group.arrived += 1;
            return Some(leader);
        }
        self.leaders.insert(prompt.clone(), id);
        let gathers_until = (together > 1).then_some(now + GATHER_TIMEOUT);
        let group = Group { prompt, followers: Vec::new(), announced: together, arrived: 1, gathers_until };
        self.groups.insert(id, group);
        None
    }

    /// Whether the leader must not finish its prompt yet.
    pub(super) fn is_gathering(&self, leader: SeqId) -> bool {
        self.groups.get(&leader).is_some_and(|group| group.gathers_until.is_some())
    }

    /// Leaders that no longer need to wait for others.
    pub(super) fn take_gathered(&mut self, now: Instant) -> Vec<SeqId> {
        let mut gathered = Vec::new();
        for (leader, group) in &mut self.groups {
            if group.gathers_until.is_some_and(|until| group.arrived >= group.announced || now >= until) {
                group.gathers_until = None;
                gathered.push(*leader);
            }
        }
        gathered
    }

    /// The requests that wait for the end of the leader's prompt.
    pub(super) fn followers(&self, leader: SeqId) -> &[SeqId] {
        self.groups.get(&leader).map_or(&[], |group| &group.followers)
    }

    /// Dissolves a leader's group and returns the followers.
    pub(super) fn take_followers(&mut self, leader: SeqId) -> Vec<SeqId> {
        let Some(Group { prompt, followers, .. }) = self.groups.remove(&leader) else { return Vec::new() };
        self.leaders.remove(&prompt);
        followers
    }

    /// Removes a request, which waits for `leader` if that is not `None`. If it leads, its followers become
    /// orphans.
    pub(super) fn remove(&mut self, id: SeqId, leader: Option<SeqId>) {
        if let Some(leader) = leader {
            if let Some(group) = self.groups.get_mut(&leader) {
                group.followers.retain(|follower| *follower != id);
            }
            self.orphans.retain(|orphan| *orphan != id);
        }
        let followers = self.take_followers(id);
        self.orphans.extend(followers);
    }

    /// All requests that wait: followers and orphans.
    pub(super) fn waiting(&self) -> Vec<SeqId> {
        let followers = self.groups.values().flat_map(|group| &group.followers);
        followers.chain(&self.orphans).copied().collect()
    }

    /// The orphans since the last call, the longest waiting first.
    pub(super) fn take_orphans(&mut self) -> Vec<SeqId> {
        std::mem::take(&mut self.orphans)
    }
}
