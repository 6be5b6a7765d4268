//! Search over all cuts and choices of workers, by dynamic programming over (workers used, layers placed).

use super::{Placement, Replica, Stage};
use std::cmp::Ordering;
use std::collections::HashMap;

/// Maximum of distinct choices of workers. With this many, a model of a hundred layers takes about a second.
/// Above it, workers keep their order.
const MAX_CHOICES: usize = 1 << 9;
/// Maximum of workers considered when they keep their order, for the same reason.
const MAX_ORDERED: usize = 24;

/// Workers with equal capacities.
struct Kind {
    /// Indices of the workers; they are interchangeable.
    workers: Vec<usize>,
}

/// How the next worker is chosen.
enum Order {
    /// Any kind with an unused worker. A state counts the used workers of each kind, in mixed radix.
    Any,
    /// Workers by falling speed, with some skipped. A state counts the workers already passed.
    Given,
}

/// The table of candidate stages.
pub(super) struct Search<'a> {
    placement: &'a Placement<'a>,
    kinds: Vec<Kind>,
    order: Order,
    /// Layers at which stages may begin or end, including 0 and the number of layers.
    bounds: Vec<usize>,
    /// The stage for each kind and pair of bounds. The first worker of a kind stands for all of them.
    stages: Vec<Stage>,
}

/// The best chain of stages from a bound to the end.
#[derive(Clone, Copy)]
struct Best {
    cost: f64,
    kind: usize,
    end: usize,
}

impl<'a> Search<'a> {
    /// A search over the workers `free`, for replicas of up to `min_stages` stages or more.
    pub(super) fn new(placement: &'a Placement<'a>, free: &[usize], min_stages: usize) -> Self {
        let mut bounds = vec![0];
        bounds.extend(placement.model.cuts());
        bounds.push(placement.model.layers());
        let (kinds, order) = kinds(placement, free, min_stages);
        let costs: HashMap<(usize, usize), _> = pairs(bounds.len())
            .map(|(from, to)| ((from, to), placement.model.range(bounds[from]..bounds[to])))
            .collect();
        let empty = placement.model.range(0..0);
        let mut stages = Vec::with_capacity(kinds.len() * bounds.len() * bounds.len());
        for kind in &kinds {
            for from in 0..bounds.len() {
                for to in 0..bounds.len() {
                    let costs = costs.get(&(from, to)).unwrap_or(&empty);
                    stages.push(placement.stage(kind.workers[0], bounds[from]..bounds[to], costs));
                }
            }
        }
        Self { placement, kinds, order, bounds, stages }
    }

    /// The replica of `count` stages with the fastest slowest stage. Ties are broken by the sum of squared
    /// times, which balances the other stages.
    pub(super) fn fastest(&self, count: usize) -> Option<Replica> {
        let fits = |stage: &Stage| stage.needs.missing(&self.placement.workers[stage.worker]) == 0;
        let time = |stage: &Stage| fits(stage).then_some(stage.times.request);
        let slowest = self.solve(count, &time, f64::max)?;
        let bound = slowest.stages.iter().map(|stage| stage.times.request).fold(0.0, f64::max);
        let squared = |stage: &Stage| time(stage).filter(|time| *time <= bound).map(|time| time * time);
        self.solve(count, &squared, |a, b| a + b)
    }

    /// The replica of `count` stages that lacks the fewest bytes in total.
    pub(super) fn nearest(&self, count: usize) -> Option<Replica> {
        let missing = |stage: &Stage| Some(stage.needs.missing(&self.placement.workers[stage.worker]) as f64);
        self.solve(count, &missing, |a, b| a + b)
    }

    /// The cheapest chain of `count` stages over all layers. A stage with cost `None` is excluded.
    fn solve(
        &self,
        count: usize,
        cost: &dyn Fn(&Stage) -> Option<f64>,
        join: fn(f64, f64) -> f64,
    ) -> Option<Replica> {
        let costs: Vec<Option<f64>> = self.stages.iter().map(cost).collect();
        let mut solver = Solver { search: self, costs, join, memo: HashMap::new() };
        solver.best(0, 0, count)?;
        let mut used = vec![0; self.kinds.len()];
        let (mut state, mut from, mut left) = (0, 0, count);
        let mut stages = Vec::with_capacity(count);
        while left > 0 {
            let Best { kind, end, .. } = solver.best(state, from, left)?;
            let mut stage = self.stages[self.index(kind, from, end)].clone();
            stage.worker = self.kinds[kind].workers[used[kind]];
            stages.push(stage);
            used[kind] += 1;
            (state, from, left) = (self.after(state, kind)?, end, left - 1);
        }
        Some(Replica { stages })
    }

    fn index(&self, kind: usize, from: usize, to: usize) -> usize {
        let bounds = self.bounds.len();
        (kind * bounds + from) * bounds + to
    }

    /// The state after a stage on `kind`; `None` if that kind may not come next.
    fn after(&self, state: usize, kind: usize) -> Option<usize> {
        match self.order {
            Order::Given => (kind >= state).then_some(kind + 1),
            Order::Any => {
                let radix = |kind: &Kind| kind.workers.len() + 1;
                let weight: usize = self.kinds.iter().take(kind).map(radix).product();
                let used = state / weight % radix(&self.kinds[kind]);
                (used < self.kinds[kind].workers.len()).then_some(state + weight)
            }
        }
    }
}

/// One search: the stages' costs, how costs combine, and memoized results.
struct Solver<'a> {
    search: &'a Search<'a>,
    costs: Vec<Option<f64>>,
    join: fn(f64, f64) -> f64,
    memo: HashMap<(usize, usize, usize), Option<Best>>,
}

impl Solver<'_> {
    /// The cheapest `left` stages from bound `from` to the last layer. Recursion depth is the number of
    /// stages.
    fn best(&mut self, state: usize, from: usize, left: usize) -> Option<Best> {
        if let Some(found) = self.memo.get(&(state, from, left)) {
            return *found;
        }
        let last = self.search.bounds.len() - 1;
        let mut best: Option<Best> = None;
        for kind in 0..self.search.kinds.len() {
            let Some(after) = self.search.after(state, kind) else { continue };
            // The last stage ends with the model; earlier stages leave a layer range for each later one.
            let ends = if left == 1 { last..=last } else { from + 1..=(last + 1).saturating_sub(left) };
            for end in ends {
                let Some(own) = self.costs[self.search.index(kind, from, end)] else { continue };
                let cost = match left {
                    1 => own,
                    _ => match self.best(after, end, left - 1) {
                        Some(rest) => (self.join)(own, rest.cost),
                        None => continue,
                    },
                };
                if best.is_none_or(|best| cost.total_cmp(&best.cost) == Ordering::Less) {
                    best = Some(Best { cost, kind, end });
                }
            }
        }
        self.memo.insert((state, from, left), best);
        best
    }
}

fn pairs(bounds: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bounds).flat_map(move |from| (from + 1..bounds).map(move |to| (from, to)))
}

/// Groups workers with equal capacities. If there are too many choices, each worker is its own kind, fastest
/// first, and the slowest are left out.
fn kinds(placement: &Placement<'_>, free: &[usize], min_stages: usize) -> (Vec<Kind>, Order) {
    let of = |worker: usize| &placement.workers[worker];
    let equal = |a: usize, b: usize| {
        let (a, b) = (of(a), of(b));
        (a.memory, a.bandwidth, a.compute) == (b.memory, b.bandwidth, b.compute)
    };
    let mut kinds: Vec<Kind> = Vec::new();
    for &worker in free {
        match kinds.iter_mut().find(|kind| equal(kind.workers[0], worker)) {
            Some(kind) => kind.workers.push(worker),
            None => kinds.push(Kind { workers: vec![worker] }),
        }
    }
    let choices = kinds.iter().try_fold(1usize, |product, kind| product.checked_mul(kind.workers.len() + 1));
    if choices.is_some_and(|choices| choices <= MAX_CHOICES) {
        return (kinds, Order::Any);
    }
    let whole = placement.model.range(0..placement.model.layers());
    let time = |worker: &usize| placement.times(of(*worker), &whole).request;
    let mut sorted = free.to_vec();
    sorted.sort_by(|a, b| time(a).total_cmp(&time(b)));
    sorted.truncate(min_stages.max(MAX_ORDERED));
    (sorted.into_iter().map(|worker| Kind { workers: vec![worker] }).collect(), Order::Given)
}
