//! Settings of deployments that let requests wait less: a bounded search by hill climbing, each step judged by a
//! simulation of the same traffic.

use crate::Error;
use crate::fleet::{Fleet, Model};
use crate::simulation::{Outcome, Policy, simulate};
use crate::traffic::Arrival;
use consensus::table::{DeploymentSettings, MAX_DEPLOYED_REPLICAS};

/// Models whose settings are changed in one round: those whose requests wait longest.
const WIDTH: usize = 4;
/// Least gain of a change, as a share of the cost.
const LEAST_GAIN: f64 = 0.005;
/// Steps of all simulations of a search.
const MAX_STEPS: u64 = 50_000_000;
/// Shortest idle time that is proposed, in seconds.
const SHORTEST_IDLE_S: u32 = 60;
/// Idle times beyond this become 0: never.
const LONGEST_IDLE_S: u32 = 86_400;

/// The result of a search.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// The fleet with the proposed settings.
    pub fleet: Fleet,
    pub before: Outcome,
    pub after: Outcome,
    /// Number of simulations.
    pub evaluations: usize,
}

struct Search<'a> {
    traffic: &'a [Arrival],
    left: usize,
    steps: u64,
}

impl Search<'_> {
    /// `None` when the search must end.
    fn evaluate(&mut self, fleet: &Fleet) -> Result<Option<Outcome>, Error> {
        if self.left == 0 || self.steps >= MAX_STEPS {
            return Ok(None);
        }
        self.left -= 1;
        let outcome = simulate(fleet, self.traffic, Policy::Uses)?;
        self.steps += outcome.steps + self.traffic.len() as u64;
        Ok(Some(outcome))
    }
}

/// Searches with at most `evaluations` simulations, at least one.
///
/// # Errors
/// As [`simulate`].
pub fn propose(fleet: &Fleet, traffic: &[Arrival], evaluations: usize) -> Result<Proposal, Error> {
    let mut search = Search { traffic, left: evaluations.max(1), steps: 0 };
    let before = simulate(fleet, traffic, Policy::Uses)?;
    search.left -= 1;
    search.steps += before.steps + traffic.len() as u64;
    let (mut best, mut after) = (fleet.clone(), before.clone());
    let mut from = 0;
    let mut exhausted = false;
    while from < fleet.models.len() && !exhausted {
        let mut found: Option<(Fleet, Outcome)> = None;
        'round: for model in most_costly(&after).into_iter().skip(from).take(WIDTH) {
            for settings in moves(&best, model) {
                let changed = with(&best, model, settings);
                let Some(outcome) = search.evaluate(&changed)? else {
                    exhausted = true;
                    break 'round;
                };
                let limit = found.as_ref().map_or(after.cost * (1.0 - LEAST_GAIN), |(_, found)| found.cost);
                if outcome.cost < limit {
                    found = Some((changed, outcome));
                }
            }
        }
        match found {
            Some(found) => ((best, after), from) = (found, 0),
            None => from += WIDTH,
        }
    }
    trim(fleet, &mut search, &mut best, &mut after)?;
    let evaluations = evaluations.max(1) - search.left;
    Ok(Proposal { fleet: best, before, after, evaluations })
}

/// Takes back changes of single models that gain nothing any more.
fn trim(fleet: &Fleet, search: &mut Search<'_>, best: &mut Fleet, after: &mut Outcome) -> Result<(), Error> {
    for (model, original) in fleet.models.iter().enumerate() {
        if best.models[model].settings == original.settings {
            continue;
        }
        let back = with(best, model, original.settings.clone());
        let Some(outcome) = search.evaluate(&back)? else { return Ok(()) };
        if outcome.cost <= after.cost * (1.0 + LEAST_GAIN / 10.0) {
            (*best, *after) = (back, outcome);
        }
    }
    Ok(())
}

fn with(fleet: &Fleet, model: usize, settings: DeploymentSettings) -> Fleet {
    let mut fleet = fleet.clone();
    fleet.models[model].settings = settings;
    fleet
}

/// The models by the time that their requests wait in all, longest first.
fn most_costly(outcome: &Outcome) -> Vec<usize> {
    let mut costs: Vec<(f64, usize)> =
        outcome.models.iter().enumerate().map(|(index, model)| (model.cost, index)).collect();
    costs.sort_by(|a, b| b.0.total_cmp(&a.0));
    costs.into_iter().map(|(_, model)| model).collect()
}

/// Neighbouring settings of a model.
fn moves(fleet: &Fleet, model: usize) -> Vec<DeploymentSettings> {
    let Model { settings, costs, .. } = &fleet.models[model];
    let fits = |node: &&crate::fleet::Node| {
        node.memory >= costs.needed && settings.nodes.iter().all(|label| node.labels.contains(label))
    };
    let most = fleet.nodes.iter().filter(fits).count().min(usize::from(MAX_DEPLOYED_REPLICAS)) as u16;
    let changed = |change: &dyn Fn(&mut DeploymentSettings)| {
        let mut settings = settings.clone();
        change(&mut settings);
        settings
    };
    let mut moves = Vec::new();
    if settings.min < most {
        moves.push(changed(&|settings| {
            settings.min += 1;
            settings.max = settings.max.max(settings.min);
        }));
    }
    if settings.max < most {
        moves.push(changed(&|settings| settings.max += 1));
    }
    if settings.min > 0 {
        moves.push(changed(&|settings| settings.min -= 1));
    }
    if settings.max > settings.min.max(1) {
        moves.push(changed(&|settings| settings.max -= 1));
    }
    if settings.idle_s > 0 {
        let longer = settings.idle_s.saturating_mul(4);
        moves.push(changed(&|settings| settings.idle_s = if longer > LONGEST_IDLE_S { 0 } else { longer }));
        if settings.idle_s / 4 >= SHORTEST_IDLE_S {
            moves.push(changed(&|settings| settings.idle_s /= 4));
        }
    }
    moves.push(changed(&|settings| settings.pin = !settings.pin));
    moves
}
