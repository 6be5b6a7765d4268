//! Requests for one prompt that come before it has been computed: the choices of one request (`n` > 1) above all.
//!
//! The first one leads and is computed. The others wait for the end of its prompt and go on from there as forks, each
//! with a first token of its own, drawn from the same logits. If the leader goes before that, the next one leads.
//! Where so many were announced as come at once, the leader does not end its prompt before they are here: whoever came
//! later would compute the end of it again.

use crate::scheduler::{SeqId, SequenceRequest};
use proto::block::BlockId;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests that wait for one leader at most; more are computed like any others.
const MAX_FOLLOWERS: usize = 256;
/// How long a leader that is done but for the last row waits for those that were announced with it. They were sent with
/// it, so that what is late by more has been lost on its way, or has gone to another worker.
const PATIENCE: Duration = Duration::from_millis(500);

type Prompt = (BlockId, Arc<[u32]>);

#[derive(Debug, Default)]
pub(super) struct Siblings {
    leaders: HashMap<Prompt, SeqId>,
    families: HashMap<SeqId, Family>,
    /// Those whose leader has gone.
    orphans: Vec<SequenceRequest>,
}

#[derive(Debug)]
struct Family {
    prompt: Prompt,
    followers: Vec<SequenceRequest>,
    /// How many were announced, and how many have come, the leader among them.
    announced: u32,
    come: u32,
    /// It waits for the others until then, if it does.
    gathers: Option<Instant>,
}

impl Siblings {
    /// Has the request, one of `together` that come at once, wait for the one that leads its prompt; gives it back to be
    /// computed if it leads itself.
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

    /// Whether the one that leads must not end its prompt yet.
    pub(super) fn awaits(&self, leader: SeqId) -> bool {
        self.families.get(&leader).is_some_and(|family| family.gathers.is_some())
    }

    /// Those that need not wait for others any more.
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

    /// Who waits for the end of this one's prompt; some of them may have been cancelled.
    pub(super) fn followers(&self, leader: SeqId) -> impl Iterator<Item = SeqId> {
        self.families.get(&leader).into_iter().flat_map(|family| &family.followers).map(|request| request.id)
    }

    /// The prompt has been computed: nobody waits for it any more.
    pub(super) fn part(&mut self, leader: SeqId) -> Vec<SequenceRequest> {
        let Some(Family { prompt, followers, .. }) = self.families.remove(&leader) else { return Vec::new() };
        self.leaders.remove(&prompt);
        followers
    }

    /// A request has gone: if it led, others have to.
    pub(super) fn gone(&mut self, id: SeqId) {
        let followers = self.part(id);
        self.orphans.extend(followers);
    }

    /// Those whose leader has gone since the last call, the one that waits longest first.
    pub(super) fn take_orphans(&mut self) -> Vec<SequenceRequest> {
        std::mem::take(&mut self.orphans)
    }

    pub(super) fn waiting(&self) -> usize {
        let followers: usize = self.families.values().map(|family| family.followers.len()).sum();
        followers + self.orphans.len()
    }
}
