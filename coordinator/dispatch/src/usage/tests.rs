use super::*;
use ::usage::book::Dimension;
use proptest::prelude::*;
use proto::block::BlockId;
use proto::ids::{Attempt, Epoch, RequestId};
use proto::usage::{UsageRecord, UsageReport};

/// How an attempt ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Finished,
    /// The worker is lost or declines, after it has drawn more tokens than have arrived.
    Lost {
        undelivered: u64,
    },
    /// The client leaves.
    Left {
        undelivered: u64,
    },
}

#[derive(Debug, Clone)]
struct AttemptPlan {
    /// Part of the prompt that a prefill worker computes ahead, in tenths; `None`: there is none.
    ahead: Option<u64>,
    /// Part of the prompt that is cached, in tenths.
    cached: u64,
    /// The prompt is another choice's.
    forked: bool,
    /// The worker computes the prompt to its end.
    starts: bool,
    /// Tokens that are computed again after a preemption.
    preempted: u64,
    delivered: u64,
    end: End,
    times: (u64, u64),
    energy: Option<u64>,
}

fn attempt() -> impl Strategy<Value = AttemptPlan> {
    let end = prop_oneof![
        3 => Just(End::Finished),
        3 => (0..4u64).prop_map(|undelivered| End::Lost { undelivered }),
        1 => (0..4u64).prop_map(|undelivered| End::Left { undelivered }),
    ];
    let prompt =
        (proptest::option::weighted(0.2, 0..=10u64), 0..10u64, any::<bool>(), prop::bool::weighted(0.8));
    let rest = (0..5u64, 0..6u64, end, (0..10_000u64, 0..10_000u64), proptest::option::of(0..1_000u64));
    (prompt, rest).prop_map(
        |((ahead, cached, forked, starts), (preempted, delivered, end, times, energy))| AttemptPlan {
            ahead,
            cached,
            forked,
            starts,
            preempted,
            delivered,
            end,
            times,
            energy,
        },
    )
}

#[derive(Debug, Clone)]
struct RequestPlan {
    tenant: usize,
    prompt: u64,
    choices: Vec<Vec<AttemptPlan>>,
}

fn request() -> impl Strategy<Value = RequestPlan> {
    let choices = prop::collection::vec(prop::collection::vec(attempt(), 1..4), 1..4);
    (0..3usize, 1..60u64, choices).prop_map(|(tenant, prompt, choices)| RequestPlan {
        tenant,
        prompt,
        choices,
    })
}

/// Sums of the work of all workers.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sums {
    tokens: u64,
    ns: u64,
    energy: u64,
}

struct Cluster {
    usage: Arc<Recorder>,
    workers: [NodeId; 2],
    records: [Vec<UsageRecord>; 2],
    sums: Sums,
}

impl Cluster {
    fn record(&mut self, worker: usize, record: UsageRecord) {
        self.sums.tokens += record.input_tokens + record.output_tokens;
        self.sums.ns += record.input_ns + record.output_ns;
        self.sums.energy += record.energy_uj;
        self.records[worker].push(record);
    }

    /// Reports what is there, and repeats a part of the last report.
    fn report(&mut self, worker: usize, repeated: usize) {
        let records = &self.records[worker];
        for first in [0, records.len().saturating_sub(repeated)] {
            let records = records[first..].to_vec();
            let report = UsageReport { epoch: Epoch(1), first: first as u64, records };
            self.usage.reported(&self.workers[worker], report);
        }
    }

    fn serve(&mut self, name: usize, plan: &RequestPlan) {
        let tenant: Arc<str> = format!("t{}", plan.tenant).into();
        let payer = Payer::new(&tenant, Some("key"), &ModelId::new("m").unwrap());
        for (choice, attempts) in (0u32..).zip(&plan.choices) {
            let mut emitted = 0;
            for (number, attempt) in (0u32..).zip(attempts) {
                let id = AttemptId {
                    request: RequestId::new(format!("r{name}")).unwrap(),
                    part: choice,
                    attempt: Attempt(number),
                    root: BlockId([3; 16]),
                };
                match self.attempt(plan.prompt, &payer, (choice, &id), attempt, &mut emitted) {
                    End::Lost { .. } => {}
                    End::Finished | End::Left { .. } => break,
                }
            }
        }
        payer.request_ended(&self.usage);
    }

    fn attempt(
        &mut self,
        prompt: u64,
        payer: &Payer,
        (choice, id): (u32, &AttemptId),
        plan: &AttemptPlan,
        emitted: &mut u64,
    ) -> End {
        let worker = id.attempt.0 as usize % 2;
        let record = |input, cached, output, times: (u64, u64)| UsageRecord {
            id: id.clone(),
            model: ModelId::new("m").unwrap(),
            input_tokens: input,
            cached_tokens: cached,
            output_tokens: output,
            input_ns: times.0,
            output_ns: times.1,
            energy_uj: plan.energy.unwrap_or(0),
            energy_ns: plan.energy.map_or(0, |_| times.0 + times.1),
        };
        let mut prefill = None;
        let ahead = plan.ahead.map(|tenths| (prompt * tenths / 10).max(1)).filter(|_| *emitted == 0);
        if let Some(computed) = ahead {
            let mut meter = PrefillMeter::begin(&self.usage, &self.workers[1 - worker], id.clone(), payer);
            meter.computed(computed as u32);
            prefill = Some(meter);
            self.record(1 - worker, record(computed, prompt - computed, 1, plan.times));
        }
        let node = self.workers[worker].clone();
        let meter = AttemptMeter::begin(&self.usage, &node, id.clone(), payer, prompt as usize);
        let mut meter = meter.with_prefill(prefill);
        let forked = plan.forked && choice > 0 && *emitted == 0 && ahead.is_none();
        // Of a prompt, at least one token is computed; what a prefill worker has computed is cached.
        let cached = match forked {
            true => prompt,
            false => (prompt * plan.cached / 10).max(ahead.unwrap_or(0)).min(prompt - 1),
        };
        let input = if forked { 0 } else { prompt - cached + *emitted + plan.preempted };
        if !plan.starts && !forked {
            // It ends somewhere in its prompt.
            self.record(worker, record(input / 2, cached, 0, (plan.times.0, 0)));
            if !matches!(plan.end, End::Left { .. }) {
                meter.failed();
                return End::Lost { undelivered: 0 };
            }
            return plan.end;
        }
        meter.started(cached as u32, (prompt - cached) as u32, false);
        if plan.delivered > 0 {
            meter.delivered(plan.delivered as usize);
            *emitted += plan.delivered;
        }
        let undelivered = match plan.end {
            End::Finished => {
                meter.finished(None);
                0
            }
            End::Lost { undelivered } => {
                meter.failed();
                undelivered
            }
            End::Left { undelivered } => undelivered,
        };
        self.record(worker, record(input, cached, plan.delivered + undelivered, plan.times));
        plan.end
    }
}

fn cluster() -> Cluster {
    let node = |name: &str| NodeId::new(name).unwrap();
    Cluster {
        usage: Arc::new(Recorder::new(node("c"), 1)),
        workers: [node("w1"), node("w2")],
        records: Default::default(),
        sums: Sums::default(),
    }
}

proptest! {
    /// The sum over tenants, with what was recomputed, is the sum over workers: tokens, time and energy.
    #[test]
    fn the_sum_over_tenants_is_the_sum_over_workers(
        requests in prop::collection::vec(request(), 1..12),
        repeated in 0..9usize,
        early in any::<bool>(),
    ) {
        let mut cluster = cluster();
        for (name, plan) in requests.iter().enumerate() {
            cluster.serve(name, plan);
            if early {
                cluster.report(name % 2, repeated);
            }
        }
        cluster.report(0, repeated);
        cluster.report(1, repeated);
        let groups = cluster.usage.query(0, &[Dimension::Tenant]).groups;
        let sum = |counter| groups.values().map(|counters| counters.get(counter)).sum::<u64>();
        let tenants = Sums {
            tokens: sum(Counter::PromptTokens) - sum(Counter::CachedTokens)
                + sum(Counter::GeneratedTokens)
                + sum(Counter::RecomputedTokens),
            ns: sum(Counter::DeviceNs) + sum(Counter::RecomputedDeviceNs),
            energy: sum(Counter::EnergyUj) + sum(Counter::RecomputedEnergyUj),
        };
        prop_assert_eq!(tenants, cluster.sums);
        prop_assert_eq!(sum(Counter::Attempts), sum(Counter::TimedAttempts));
        prop_assert_eq!(sum(Counter::Requests), requests.len() as u64);
        let delivered: u64 = requests.iter().map(delivered).sum();
        prop_assert_eq!(sum(Counter::GeneratedTokens), delivered);
    }
}

/// Tokens that reach the client.
fn delivered(plan: &RequestPlan) -> u64 {
    let mut sum = 0;
    for (choice, attempts) in plan.choices.iter().enumerate() {
        let mut emitted = 0;
        for attempt in attempts {
            let ahead = attempt.ahead.is_some() && emitted == 0;
            let forked = attempt.forked && choice > 0 && emitted == 0 && !ahead;
            let started = attempt.starts || forked;
            emitted += if started { attempt.delivered } else { 0 };
            match attempt.end {
                End::Finished if started => break,
                End::Left { .. } => break,
                End::Finished | End::Lost { .. } => {}
            }
        }
        sum += emitted;
    }
    sum
}

fn totals(usage: &Recorder) -> impl Fn(Counter) -> u64 {
    let totals = usage.totals();
    assert_eq!(totals.len(), 1, "{totals:?}");
    let counters = totals.into_values().next().unwrap_or_default();
    move |counter| counters.get(counter)
}

#[test]
fn choices_pay_for_their_prompt_once() {
    let plan = |forked| AttemptPlan {
        ahead: None,
        cached: 5,
        forked,
        starts: true,
        preempted: 0,
        delivered: 3,
        end: End::Finished,
        times: (10, 10),
        energy: None,
    };
    let mut cluster = cluster();
    let request = RequestPlan {
        tenant: 0,
        prompt: 20,
        choices: vec![vec![plan(false)], vec![plan(true)], vec![plan(false)]],
    };
    cluster.serve(0, &request);
    cluster.report(0, 0);
    let total = totals(&cluster.usage);
    assert_eq!(total(Counter::PromptTokens), 20);
    assert_eq!(total(Counter::CachedTokens), 10);
    assert_eq!(total(Counter::GeneratedTokens), 9);
    assert_eq!(total(Counter::RecomputedTokens), 10, "the third choice computed the prompt again");
    assert_eq!(total(Counter::EnergyDeviceNs), 0);
}

#[test]
fn a_replay_is_not_paid_for() {
    let plan = |delivered, end| AttemptPlan {
        ahead: None,
        cached: 0,
        forked: false,
        starts: true,
        preempted: 0,
        delivered,
        end,
        times: (1_000, 500),
        energy: Some(150),
    };
    let mut cluster = cluster();
    let attempts = vec![plan(4, End::Lost { undelivered: 1 }), plan(2, End::Finished)];
    cluster.serve(0, &RequestPlan { tenant: 0, prompt: 20, choices: vec![attempts] });
    cluster.report(0, 0);
    cluster.report(1, 0);
    let total = totals(&cluster.usage);
    assert_eq!((total(Counter::PromptTokens), total(Counter::GeneratedTokens)), (20, 6));
    assert_eq!(total(Counter::RecomputedTokens), 1 + 24, "a lost token, and the replay of prompt and tokens");
    assert_eq!(total(Counter::DeviceNs), (1_000 + 400) + 500);
    assert_eq!(total(Counter::RecomputedDeviceNs), 100 + 1_000);
    assert_eq!(total(Counter::EnergyUj) + total(Counter::RecomputedEnergyUj), 300);
}
