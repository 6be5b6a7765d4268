//! Fairness between tenants: no tenant waits for all requests of another, and nothing is computed again and
//! again.

use super::simulator::*;
use crate::kv_cache::CacheSpec;
use crate::scheduler::{SchedulerConfig, SeqId};
use proptest::prelude::*;
use proto::block::BlockId;
use proto::message::TenantShare;
use std::collections::BTreeMap;

/// A simulation in which tenant `n` has the root `n`.
struct TenantSim {
    sim: Sim,
    tenants: BTreeMap<SeqId, u64>,
    prompts: u32,
}

impl TenantSim {
    fn new(config: SchedulerConfig, spec: CacheSpec) -> Self {
        Self { sim: Sim::new(config, spec), tenants: BTreeMap::new(), prompts: 0 }
    }

    fn submit(&mut self, tenant: u64, weight: u32, prompt: u32, max_new: u32) -> SeqId {
        self.prompts += 1;
        let first = self.prompts * 10_000;
        self.sim.tenant = Some(TenantShare { tenant, weight });
        let root = BlockId([tenant as u8; 16]);
        let id = self.sim.submit(root, (first..first + prompt).collect(), max_new).unwrap();
        self.tenants.insert(id, tenant);
        id
    }

    fn submit_all(&mut self, count: usize, tenant: u64, weight: u32, prompt: u32, max_new: u32) {
        for _ in 0..count {
            self.submit(tenant, weight, prompt, max_new);
        }
    }

    /// Steps until the sequence has ended. Returns their number.
    fn until_done(&mut self, id: SeqId) -> u32 {
        let mut steps = 0;
        while !self.sim.done.contains_key(&id) {
            assert!(self.sim.step(), "nothing to do, and {id:?} has not ended");
            steps += 1;
        }
        steps
    }

    fn run(&mut self, steps: u32) {
        (0..steps).for_each(|_| assert!(self.sim.step()));
    }

    /// Tokens that a tenant's sequences have drawn so far.
    fn drawn(&self, tenant: u64) -> usize {
        let all = self.sim.live.iter().chain(&self.sim.done);
        all.filter(|(id, _)| self.tenants[id] == tenant).map(|(_, client)| client.output.len()).sum()
    }
}

fn with_slots(max_seqs: usize) -> SchedulerConfig {
    SchedulerConfig { max_seqs, ..chunked(64) }
}

#[test]
fn a_request_does_not_wait_for_what_another_tenant_has_queued() {
    for (spec, again) in [(full(16, 4_000), 40), (hybrid(16, 400, 4_000), 130)] {
        let mut simulation = TenantSim::new(with_slots(8), spec);
        simulation.submit_all(64, 1, 1, 20, 100);
        simulation.run(30);
        let waits: Vec<u32> = (0..20)
            .map(|_| {
                let id = simulation.submit(2, 1, 20, 4);
                simulation.until_done(id)
            })
            .collect();
        // In the first step a sequence of the other tenant yields: its rows are dropped, and none is
        // admitted. The next four steps produce the four tokens; the first of them also computes the prompt.
        // A sequence that may yield always exists: at most one of eight yields in five steps, and it may
        // yield again after 16 tokens.
        assert_eq!(waits, [5; 20]);
        // A sequence that yields finds its prefix cached except for the tokens of a unit. With recurrent
        // layers it resumes from a state.
        let counters = simulation.sim.scheduler.stats().counters;
        assert!((1..=20).contains(&counters.yields), "{counters:?}");
        assert!(counters.recomputed_tokens <= again * counters.yields, "{counters:?}");
        simulation.sim.run();
        simulation.sim.check();
    }
}

#[test]
fn batch_slots_are_shared_by_weight_and_then_kept() {
    let mut simulation = TenantSim::new(with_slots(8), full(16, 4_000));
    simulation.submit_all(40, 1, 1, 20, 400);
    simulation.run(20);
    simulation.submit_all(40, 2, 3, 20, 400);
    simulation.run(20);
    let yields = simulation.sim.scheduler.stats().counters.yields;
    assert_eq!(yields, 6, "two places are left to the first tenant");
    let (one, two) = (simulation.drawn(1), simulation.drawn(2));
    simulation.run(300);
    assert_eq!(simulation.sim.scheduler.stats().counters.yields, yields);
    let ratio = (simulation.drawn(2) - two) as f64 / (simulation.drawn(1) - one) as f64;
    assert!((2.5..3.5).contains(&ratio), "{ratio}");
}

#[test]
fn every_tenant_runs_when_tenants_outnumber_slots() {
    let mut simulation = TenantSim::new(with_slots(2), full(16, 4_000));
    for tenant in 1..=6 {
        simulation.submit_all(4, tenant, 1, 20, 500);
    }
    simulation.run(1_200);
    let drawn: Vec<usize> = (1..=6).map(|tenant| simulation.drawn(tenant)).collect();
    let (min, max) = (drawn.iter().min().unwrap(), drawn.iter().max().unwrap());
    assert!(*min > 250 && max - min <= 200, "{drawn:?}");
    let counters = simulation.sim.scheduler.stats().counters;
    assert!(counters.recomputed_tokens < counters.generated_tokens / 4, "{counters:?}");
}

#[test]
fn a_sequence_that_holds_all_blocks_yields_without_restarting_forever() {
    let mut simulation = TenantSim::new(with_slots(8), full(16, 40));
    let long = simulation.submit(1, 1, 400, 200);
    simulation.run(40);
    for _ in 0..30 {
        let id = simulation.submit(2, 1, 100, 4);
        simulation.until_done(id);
    }
    simulation.until_done(long);
    let counters = simulation.sim.scheduler.stats().counters;
    assert!(counters.yields > 0, "{counters:?}");
    // The recomputed tokens are bounded by the computed ones.
    assert!(counters.recomputed_tokens < 4 * 600, "{counters:?}");
    simulation.sim.check();
}

#[test]
fn a_long_prompt_leaves_rows_to_another_tenants() {
    let config = SchedulerConfig { max_batch_tokens: 64, chunk: 64, ..SchedulerConfig::default() };
    let mut simulation = TenantSim::new(config, full(16, 4_000));
    simulation.submit_all(3, 1, 1, 3_000, 10);
    simulation.run(3);
    let id = simulation.submit(2, 1, 64, 2);
    // One step to be admitted, two for its prompt next to the other's, and one for its last token.
    assert!(simulation.until_done(id) <= 5);
    assert_eq!(simulation.drawn(1), 0);
}

/// Steps of a request that arrives while a batch of `background` sequences with weight 0 runs.
fn steps_beside(config: SchedulerConfig, spec: CacheSpec, background: usize) -> (u32, TenantSim) {
    let mut simulation = TenantSim::new(config, spec);
    simulation.submit_all(background, 9, 0, 100, 60);
    if background > 0 {
        simulation.run(12);
    }
    let steps = [(1, 70), (2, 130)].map(|(tenant, prompt)| {
        let id = simulation.submit(tenant, 1, prompt, 8);
        simulation.until_done(id)
    });
    (steps.iter().sum(), simulation)
}

#[test]
fn the_background_costs_a_request_at_most_a_step() {
    for (slots, blocks) in [(8, 4_000), (2, 4_000), (8, 40)] {
        let run = |background| steps_beside(with_slots(slots), full(16, blocks), background);
        let (alone, _) = run(0);
        let (beside, mut simulation) = run(30);
        assert!(beside <= alone + 2, "{slots} slots, {blocks} blocks: {beside} steps instead of {alone}");
        assert!(simulation.drawn(9) > 0);
        // A sequence that gave way ends as it would have.
        simulation.sim.run();
        assert!(simulation.sim.live.is_empty());
        assert_eq!(simulation.drawn(9), 30 * 60);
        simulation.sim.check();
    }
}

#[test]
fn the_background_runs_beside_sequences_that_decode_and_in_idle_time() {
    let mut simulation = TenantSim::new(with_slots(8), full(16, 4_000));
    let long = simulation.submit(1, 1, 20, 200);
    simulation.run(5);
    simulation.submit_all(20, 9, 0, 30, 20);
    simulation.until_done(long);
    assert_eq!(simulation.drawn(9), 20 * 20, "all of it ran beside one that decodes");
    let counters = simulation.sim.scheduler.stats().counters;
    assert_eq!((counters.yields, counters.preemptions), (0, 0), "{counters:?}");
}

#[test]
fn an_idle_tenant_gains_no_credit() {
    let mut simulation = TenantSim::new(with_slots(4), full(16, 4_000));
    let first = simulation.submit(2, 1, 20, 1);
    simulation.until_done(first);
    simulation.submit_all(40, 1, 1, 20, 200);
    simulation.run(300);
    simulation.submit_all(40, 2, 1, 20, 200);
    let before = simulation.drawn(1);
    simulation.run(200);
    let (one, two) = (simulation.drawn(1) - before, simulation.drawn(2));
    assert!(one.abs_diff(two) < 120, "{one} and {two}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 48, ..ProptestConfig::default() })]

    /// For any requests of any tenants: all end with the tokens that they would have had alone, in about as
    /// many steps as there are tokens.
    #[test]
    fn every_sequence_ends_as_it_would_alone(
        requests in proptest::collection::vec((0u64..5, 1u32..200, 1u32..60, 0u32..12), 1..60),
        weights in proptest::collection::vec(0u32..5, 5),
        (max_seqs, blocks, chunk) in (1usize..6, 20u64..60, prop_oneof![Just(7u32), Just(16), Just(64)]),
        recurrent: bool,
    ) {
        let config = SchedulerConfig { max_seqs, chunk, max_batch_tokens: 64, ..SchedulerConfig::default() };
        let spec = if recurrent { hybrid(16, 12, blocks) } else { full(16, blocks) };
        let mut simulation = TenantSim::new(config, spec);
        let (mut tokens, mut steps) = (0, 0);
        for (tenant, prompt, max_new, pause) in requests {
            simulation.submit(tenant, weights[tenant as usize], prompt, max_new);
            tokens += prompt + max_new;
            steps += (0..pause).filter(|_| simulation.sim.step()).count();
        }
        while simulation.sim.step() {
            steps += 1;
            prop_assert!(steps < 20 * tokens as usize, "it does not come to an end");
        }
        prop_assert!(simulation.sim.live.is_empty());
        simulation.sim.check();
    }
}
