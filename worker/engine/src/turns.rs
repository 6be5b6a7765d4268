//! Turns of several models on one device. The model with the fewest computed tokens for its weight has the next step.
//! A model that was idle continues from the present minimum, so it gets no credit for that time.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the device waits for a model that said it would compute again. Its thread sends frames and plans in between.
const RESERVED_FOR: Duration = Duration::from_millis(2);
/// Scale of virtual time: a token of a model with weight 1.
const TOKEN: u128 = 1 << 32;

/// A model in [`TurnOrder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemberId(u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemberState {
    Idle,
    Waiting,
    /// Its last step has ended, and it will compute again. Its place is kept until this instant.
    Reserved(Instant),
    Computing,
}

#[derive(Debug)]
struct Member {
    id: MemberId,
    weight: u32,
    /// Tokens by weight, in virtual time.
    virtual_time: u128,
    state: MemberState,
}

/// Result of [`TurnOrder::next`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextTurn {
    Begins(MemberId),
    /// A model with a kept place is next; its place ends at this instant.
    WaitUntil(Instant),
    /// The device computes, or no model waits.
    Nothing,
}

/// Decides whose turn it is. No clock, no threads.
#[derive(Debug, Default)]
pub struct TurnOrder {
    members: Vec<Member>,
    next_id: u64,
    /// The virtual time at which the last step began.
    now: u128,
}

impl TurnOrder {
    /// Adds a model. A weight of 0 counts as 1.
    pub fn join(&mut self, weight: u32) -> MemberId {
        let id = MemberId(self.next_id);
        self.next_id += 1;
        self.members.push(Member {
            id,
            weight: weight.max(1),
            virtual_time: self.now,
            state: MemberState::Idle,
        });
        id
    }

    pub fn leave(&mut self, id: MemberId) {
        self.members.retain(|member| member.id != id);
    }

    fn member(&mut self, id: MemberId) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.id == id)
    }

    /// A weight of 0 counts as 1.
    pub fn set_weight(&mut self, id: MemberId, weight: u32) {
        if let Some(member) = self.member(id) {
            member.weight = weight.max(1);
        }
    }

    /// The model has a step to compute.
    pub fn request(&mut self, id: MemberId, now: Instant) {
        let least = self.now;
        let Some(member) = self.member(id) else { return };
        let keeps_place = matches!(member.state, MemberState::Reserved(until) if now < until);
        if !keeps_place {
            member.virtual_time = member.virtual_time.max(least);
        }
        member.state = MemberState::Waiting;
    }

    /// The model has nothing to compute.
    pub fn withdraw(&mut self, id: MemberId) {
        if let Some(member) = self.member(id) {
            member.state = MemberState::Idle;
        }
    }

    /// The next step, if one can begin.
    pub fn next(&mut self, now: Instant) -> NextTurn {
        if self.members.iter().any(|member| member.state == MemberState::Computing) {
            return NextTurn::Nothing;
        }
        for member in &mut self.members {
            if matches!(member.state, MemberState::Reserved(until) if until <= now) {
                member.state = MemberState::Idle;
            }
        }
        let waits = self.members.iter().any(|member| member.state == MemberState::Waiting);
        let candidates = self.members.iter_mut().filter(|member| member.state != MemberState::Idle);
        match candidates.min_by_key(|member| (member.virtual_time, member.id)) {
            Some(member) => match member.state {
                MemberState::Reserved(until) if waits => NextTurn::WaitUntil(until),
                MemberState::Waiting => {
                    member.state = MemberState::Computing;
                    self.now = self.now.max(member.virtual_time);
                    NextTurn::Begins(member.id)
                }
                _ => NextTurn::Nothing,
            },
            None => NextTurn::Nothing,
        }
    }

    fn computes(&self, id: MemberId) -> bool {
        self.members.iter().any(|member| member.id == id && member.state == MemberState::Computing)
    }

    /// The model's step has ended. `again`: it has another one to compute and will request it soon.
    pub fn end(&mut self, id: MemberId, tokens: u64, again: bool, now: Instant) {
        let Some(member) = self.member(id) else { return };
        member.virtual_time += u128::from(tokens.max(1)) * TOKEN / u128::from(member.weight);
        member.state = match again {
            true => MemberState::Reserved(now + RESERVED_FOR),
            false => MemberState::Idle,
        };
    }
}

/// The turns of a device. Cheap to clone.
#[derive(Clone, Default)]
pub struct Turns(Arc<Gate>);

#[derive(Default)]
struct Gate {
    order: Mutex<TurnOrder>,
    changed: Condvar,
}

/// A model's place in the turns. Dropping it leaves them.
pub struct Turn {
    gate: Arc<Gate>,
    id: MemberId,
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Turns").field(&*self.0.order.lock()).finish()
    }
}

impl std::fmt::Debug for Turn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Turn").field(&self.id).finish()
    }
}

impl Turns {
    /// A place for a model. A weight of 0 counts as 1.
    pub fn join(&self, weight: u32) -> Turn {
        let id = self.0.order.lock().join(weight);
        Turn { gate: Arc::clone(&self.0), id }
    }
}

impl Turn {
    /// Blocks until it is this model's turn.
    pub fn begin(&self) {
        let mut order = self.gate.order.lock();
        order.request(self.id, Instant::now());
        loop {
            let next = order.next(Instant::now());
            if matches!(next, NextTurn::Begins(_)) {
                self.gate.changed.notify_all();
            }
            if order.computes(self.id) {
                return;
            }
            match next {
                NextTurn::WaitUntil(until) => drop(self.gate.changed.wait_until(&mut order, until)),
                NextTurn::Begins(_) | NextTurn::Nothing => self.gate.changed.wait(&mut order),
            }
        }
    }

    /// Ends the step. `again`: the model has another one to compute.
    pub fn end(&self, tokens: u64, again: bool) {
        self.gate.order.lock().end(self.id, tokens, again, Instant::now());
        self.gate.changed.notify_all();
    }

    /// The model has nothing to compute after all: gives up a kept place.
    pub fn withdraw(&self) {
        self.gate.order.lock().withdraw(self.id);
        self.gate.changed.notify_all();
    }

    /// A weight of 0 counts as 1.
    pub fn set_weight(&self, weight: u32) {
        self.gate.order.lock().set_weight(self.id, weight);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.gate.order.lock().leave(self.id);
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
