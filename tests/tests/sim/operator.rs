//! An operator that adds, removes and replaces coordinators.

use crate::world::{Machine, World, seat};
use consensus::core::{ProposalResult, RaftRole};
use consensus::table::{Change, ClientId, Entry, OpenSession, Outcome, Request, SessionChange, Standing};
use kvasir_cluster_tests::random::Random;
use proto::ids::NodeId;

const NONCE: u64 = 1 << 60;
/// Microseconds until a change without a result is given up.
const GIVE_UP: u64 = 3_000_000;

#[derive(Debug)]
pub(crate) struct Operator {
    session: Option<ClientId>,
    seq: u64,
    /// The pending change and its start.
    doing: Option<(Change, u64)>,
    /// A change was given up and may still take effect.
    unsure: bool,
}

impl Operator {
    pub(crate) fn new() -> Self {
        Self { session: None, seq: 0, doing: None, unsure: false }
    }

    pub(crate) fn answered(&mut self, answer: &ProposalResult) {
        match (answer.request, &answer.outcome) {
            (Request::Open(NONCE), Outcome::Opened(client)) => self.session = Some(*client),
            (Request::Change(client, seq), _) if Some(client) == self.session && seq == self.seq => {
                // This change comes after all earlier ones, which can no longer take effect.
                (self.doing, self.unsure) = (None, false);
            }
            _ => {}
        }
    }

    /// Makes a request to the leader and returns the leader's name.
    pub(crate) fn act(&mut self, world: &mut World) -> Option<NodeId> {
        let now = world.now;
        self.unsure |= self.doing.take_if(|(_, since)| now > *since + GIVE_UP).is_some();
        let leads = |m: &Machine| m.core.as_ref().is_some_and(|core| core.status().role == RaftRole::Leader);
        let (name, _) = world.machines.iter().find(|(_, machine)| leads(machine))?;
        let name = name.clone();
        let entry = match (self.session, &self.doing) {
            (None, _) => Entry::OpenSession(OpenSession { nonce: NONCE }),
            (Some(client), Some((change, _))) => {
                Entry::Change(SessionChange { client, seq: self.seq, change: change.clone() })
            }
            (Some(client), None) => {
                let change = self.choose(world, &name)?;
                self.seq += 1;
                self.doing = Some((change.clone(), now));
                Entry::Change(SessionChange { client, seq: self.seq, change })
            }
        };
        let core = world.machines.get_mut(&name)?.core.as_mut()?;
        if core.propose(&entry).is_err() && self.session.is_some() {
            // The group is not ready for this change; another one follows later.
            self.unsure |= self.doing.take().is_some();
        }
        Some(name)
    }

    fn choose(&self, world: &mut World, leader: &NodeId) -> Option<Change> {
        let table = world.invariants.table().clone();
        for (name, standing) in table.coordinators() {
            let Some(incarnation) = standing.seat().map(|seat| seat.incarnation) else { continue };
            if incarnation != world.machines.get(name)?.incarnation {
                // Chosen by the operator, or requested by the coordinator itself.
                let removal =
                    if incarnation.0 % 2 == 0 { Change::CoordinatorRemoved } else { Change::CoordinatorLost };
                return Some(removal(name.clone()));
            }
            if matches!(standing, Standing::Learner(_)) && world.random.chance(700) {
                return Some(Change::LearnerPromoted(name.clone()));
            }
        }
        if world.calm {
            return None;
        }
        let voting = table.coordinators().iter().filter(|(_, s)| matches!(s, Standing::Voter(_)));
        let voters: Vec<&NodeId> = voting.map(|(name, _)| name).collect();
        let all = voters.len();
        match world.random.below(20) {
            // Adds a coordinator that is not a member.
            0..=2 if all < 5 => {
                let names: Vec<NodeId> = world.machines.keys().cloned().collect();
                let name = world.random.pick(&names)?;
                let seated = table.coordinators().get(name).is_some_and(|s| s.seat().is_some());
                let removed = match table.coordinators().get(name) {
                    Some(Standing::Removed(incarnation)) => {
                        *incarnation == world.machines.get(name)?.incarnation
                    }
                    _ => false,
                };
                if removed {
                    // A removed incarnation never returns.
                    world.wipe(name);
                    return None;
                }
                (!seated).then(|| Change::LearnerAdded(seat(name, world.machines[name].incarnation)))
            }
            3 if all > 1 => {
                let name = pick_other(&mut world.random, &voters, leader)?;
                Some(Change::CoordinatorRemoved(name))
            }
            // Wipes a disk while the other members are a majority.
            4 if all > 2 && !self.unsure => {
                let name = pick_other(&mut world.random, &voters, leader)?;
                world.wipe(&name);
                None
            }
            _ => None,
        }
    }
}

fn pick_other(random: &mut Random, names: &[&NodeId], not: &NodeId) -> Option<NodeId> {
    random.pick(names).copied().filter(|name| *name != not).cloned()
}
