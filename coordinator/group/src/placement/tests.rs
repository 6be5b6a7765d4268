use super::*;
use model::ModelSpec;
use model::costs::{DrafterCosts, TensorSize};
use model::spec::{
    AttentionSpec, EmbeddingSpec, KvSpec, LayerSpec, LinearSpec, LogitsSpec, MixerSpec, NormKind, NormSpec,
    OutputSpec, OwnKvSpec,
};
use proptest::prelude::*;

/// A layer of attention only, with its own KV or that of `source`.
fn layer(index: usize, source: Option<usize>) -> LayerSpec {
    let linear = |name: &str| LinearSpec::new(format!("{index}.{name}"), 1, 1);
    let own = || OwnKvSpec { k: linear("k"), v: None, k_norm: None, v_norm: None };
    LayerSpec {
        mixer_norm: None,
        mixer: MixerSpec::Attention(AttentionSpec {
            causal: true,
            window: None,
            heads: 1,
            kv_heads: 1,
            head_dim: 1,
            v_head_dim: 1,
            q: linear("q"),
            q_norm: None,
            kv: source.map_or_else(|| KvSpec::Own(own()), |layer| KvSpec::Shared { layer }),
            rope: None,
            scale: 1.0,
            q_growth: None,
            softcap: None,
            sinks: None,
            gate: None,
            o: linear("o"),
        }),
        parallel_mixer: None,
        mixer_post_norm: None,
        mixer_out_norm: None,
        parallel: false,
        ffn_norm: None,
        ffn: Vec::new(),
        ffn_post_norm: None,
        ffn_out_norm: None,
        per_layer: None,
        output_scale: None,
        residual_scale: 1.0,
    }
}

/// A model whose layers weigh `weights` bytes, with embedding and head tied in one tensor of `table` bytes.
/// From `shared` on, each layer reads the KV of the layer before it.
fn model(weights: &[u64], table: u64, shared: Option<usize>) -> ModelCosts {
    let source = |index: usize| shared.filter(|first| index >= *first).map(|first| first - 1);
    let spec = ModelSpec {
        arch: "test".to_owned(),
        vocab: 1,
        hidden: 1,
        context_length: 1024,
        embedding: EmbeddingSpec {
            tensor: "table".to_owned(),
            scale: 1.0,
            positions: None,
            token_types: None,
            norm: None,
        },
        per_layer_input: None,
        layers: (0..weights.len()).map(|index| layer(index, source(index))).collect(),
        output: OutputSpec::Logits(LogitsSpec {
            norm: NormSpec { kind: NormKind::Rms, weight: None, bias: None, eps: 0.0, width: 1 },
            linear: LinearSpec::new("table", 1, 1),
            softcap: None,
            scale: 1.0,
        }),
        images_see_ahead: false,
    };
    ModelCosts::new(&spec, |name| {
        let bytes = match name.split_once('.') {
            None => table,
            Some((index, "q")) => weights[index.parse::<usize>().unwrap()],
            Some(_) => 0,
        };
        Some(TensorSize { elements: bytes, bytes })
    })
}

fn worker(name: usize, memory: u64, speed: f64) -> Worker {
    Worker { name: format!("w{name}"), memory, bandwidth: speed, compute: speed * 100.0 }
}

/// Every choice of `count` items, in every order.
fn arrangements(items: &[usize], count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for &first in items {
        let rest: Vec<usize> = items.iter().copied().filter(|item| *item != first).collect();
        for mut tail in arrangements(&rest, count - 1) {
            tail.insert(0, first);
            all.push(tail);
        }
    }
    all
}

/// Every way to cut the layers into `count` ranges at allowed places.
fn all_cuts(model: &ModelCosts, count: usize) -> Vec<Vec<Range<usize>>> {
    let cuts = model.cuts();
    let mut all = Vec::new();
    for mask in 0u32..1 << cuts.len() {
        if mask.count_ones() as usize + 1 != count {
            continue;
        }
        let chosen = cuts.iter().enumerate().filter(|(bit, _)| mask >> bit & 1 == 1).map(|(_, cut)| *cut);
        let bounds: Vec<usize> = std::iter::once(0).chain(chosen).chain([model.layers()]).collect();
        all.push(bounds.windows(2).map(|pair| pair[0]..pair[1]).collect());
    }
    all
}

/// All replicas of `count` stages, whether they fit or not.
fn all_replicas(placement: &Placement<'_>, count: usize) -> Vec<Replica> {
    let everyone: Vec<usize> = (0..placement.workers.len()).collect();
    let mut all = Vec::new();
    for ranges in all_cuts(placement.model, count) {
        for workers in arrangements(&everyone, count) {
            let stage = |(worker, range): (usize, &Range<usize>)| {
                placement.stage(worker, range.clone(), &placement.model.range(range.clone()))
            };
            all.push(Replica { stages: workers.into_iter().zip(&ranges).map(stage).collect() });
        }
    }
    all
}

fn missing(placement: &Placement<'_>, replica: &Replica) -> u64 {
    replica.stages.iter().map(|stage| stage.needs.missing(&placement.workers[stage.worker])).sum()
}

/// (slowest stage, sum of squares of all stages).
fn times(replica: &Replica) -> (f64, f64) {
    let each = replica.stages.iter().map(|stage| stage.times.request);
    (each.clone().fold(0.0, f64::max), each.map(|time| time * time).sum())
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_cut_and_no_choice_of_workers_is_better(
        weights in prop::collection::vec(1u64..2_000, 1..7),
        table in 0u64..3_000,
        shared in prop::option::of(1usize..7),
        workers in prop::collection::vec((500u64..9_000, prop::sample::select(vec![100.0, 150.0, 700.0])), 1..5),
        shards in prop::option::of(1usize..5),
        context in 1u64..200,
    ) {
        let model = model(&weights, table, shared.filter(|first| *first < weights.len()));
        let workers: Vec<Worker> =
            workers.iter().enumerate().map(|(name, (memory, speed))| worker(name, *memory, *speed)).collect();
        let placement = Placement { model: &model, workload: Workload::of_context(context), workers: &workers };
        let max = max_shards(&model).min(workers.len());
        let counts = shards.map_or(1..=max, |requested| requested..=requested);
        let found = placement.place(shards, 1);
        if shards.is_some_and(|requested| requested > max_shards(&model)) {
            let refused =
                matches!(found, Err(PlacementError::Shards { max, .. }) if max == max_shards(&model));
            prop_assert!(refused, "{found:?}");
            return Ok(());
        }
        if shards.is_some_and(|requested| requested > workers.len()) {
            let refused = matches!(found, Err(PlacementError::Workers { .. }));
            prop_assert!(refused, "{found:?}");
            return Ok(());
        }
        let fitting = counts.clone().map(|count| {
            let mut all = all_replicas(&placement, count);
            all.retain(|replica| missing(&placement, replica) == 0);
            all
        });
        match (found, fitting.into_iter().find(|all| !all.is_empty())) {
            (Ok(found), Some(all)) => {
                let [found] = found.as_slice() else { panic!("one replica") };
                prop_assert_eq!(found.stages.len(), all[0].stages.len(), "the fewest stages");
                prop_assert!(all.contains(found), "{:?} is one of them", found);
                let slowest = all.iter().map(|replica| times(replica).0).fold(f64::INFINITY, f64::min);
                let fastest = all.iter().filter(|replica| times(replica).0 <= slowest);
                let least = fastest.map(|replica| times(replica).1);
                let least = least.fold(f64::INFINITY, f64::min);
                prop_assert!(close(times(found).0, slowest), "{:?} {slowest}", times(found));
                prop_assert!(close(times(found).1, least), "{:?} {least}", times(found));
            }
            (Err(PlacementError::DoesNotFit { missing: lacks, worker_needs, worker_has, .. }), None) => {
                let all = counts.flat_map(|count| all_replicas(&placement, count));
                prop_assert_eq!(Some(lacks), all.map(|replica| missing(&placement, &replica)).min());
                prop_assert!(worker_needs > worker_has);
            }
            (found, all) => prop_assert!(false, "{found:?} where {} fit", all.map_or(0, |all| all.len())),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, ..ProptestConfig::default() })]

    #[test]
    fn many_unlike_workers_are_placed_within_the_search_limits(
        speeds in prop::collection::vec(100u32..1_000, 30..40),
        shards in 1usize..5,
        max in 25usize..30,
    ) {
        let model = model(&[100; 30], 50, None);
        let speed = |(name, speed): (usize, &u32)| worker(name, 100_000 + name as u64, f64::from(*speed));
        let workers: Vec<Worker> = speeds.iter().enumerate().map(speed).collect();
        let placement = Placement { model: &model, workload: Workload::of_context(64), workers: &workers };
        let found = placement.place(Some(shards), 2).unwrap();
        let stages = found.iter().flat_map(|replica| &replica.stages);
        let used: std::collections::HashSet<_> = stages.map(|stage| stage.worker).collect();
        prop_assert_eq!(used.len(), 2 * shards, "no worker serves twice");
        for replica in &found {
            let ranges: Vec<_> = replica.stages.iter().map(|stage| stage.layers.clone()).collect();
            let ends = ranges.windows(2).all(|pair| pair[0].end == pair[1].start && !pair[0].is_empty());
            prop_assert!(ends && ranges[0].start == 0 && ranges[shards - 1].end == 30, "{ranges:?}");
        }
        prop_assert_eq!(placement.place(Some(max), 1).unwrap()[0].stages.len(), max);
    }
}

#[test]
fn equal_layers_on_equal_workers_are_cut_evenly_but_for_the_head() {
    let workers: Vec<Worker> = (0..3).map(|name| worker(name, 1 << 20, 100.0)).collect();
    let place = |table| {
        let model = model(&[100; 12], table, None);
        let placement = Placement { model: &model, workload: Workload::of_context(64), workers: &workers };
        let found = placement.place(Some(3), 1).unwrap();
        found[0].stages.iter().map(|stage| stage.layers.len()).collect::<Vec<_>>()
    };
    assert_eq!(place(0), [4, 4, 4]);
    let [first, second, last] = place(4_000)[..] else { panic!("three stages") };
    assert!(
        last < first && first.abs_diff(second) <= 1,
        "the head costs its stage time: {first} {second} {last}"
    );
}

#[test]
fn rates_follow_from_the_stages() {
    let model = model(&[100; 4], 0, None);
    let workers = [worker(0, 1 << 20, 100.0), worker(1, 1 << 20, 100.0)];
    let placement = Placement { model: &model, workload: Workload::of_context(64), workers: &workers };
    let [one] = &placement.place(Some(1), 1).unwrap()[..] else { panic!("one replica") };
    let [two] = &placement.place(Some(2), 1).unwrap()[..] else { panic!("one replica") };
    assert!(close(two.prefill_rate(), 2.0 * one.prefill_rate()));
    assert!(close(two.decode_rate(), one.decode_rate()), "one sequence is in one stage at a time");
    assert!(close(two.pipelined_decode_rate(), 2.0 * one.decode_rate()));
}

#[test]
fn a_partial_placement_reports_how_many_replicas_fit() {
    let model = model(&[1_000; 4], 0, None);
    let workers: Vec<Worker> = (0..3).map(|name| worker(name, 4_000, 100.0)).collect();
    let placement = Placement { model: &model, workload: Workload::of_context(16), workers: &workers };
    let error = placement.place(None, 2).unwrap_err();
    let PlacementError::Replicas { requested: 2, made: 1, reason } = &error else { panic!("{error}") };
    assert!(matches!(**reason, PlacementError::DoesNotFit { worker_has: 4_000, .. }), "{reason}");
    let error = Placement { workers: &[], ..placement }.place(None, 1).unwrap_err();
    assert_eq!(error, PlacementError::NoWorkers);
}

#[test]
fn a_worker_without_a_speed_is_refused() {
    let model = model(&[1], 0, None);
    for speed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let workers = [worker(0, 1 << 20, speed)];
        let placement = Placement { model: &model, workload: Workload::of_context(16), workers: &workers };
        let error = placement.place(None, 1).unwrap_err();
        assert!(matches!(error, PlacementError::WorkerSpeed { field: "bandwidth", .. }), "{error}");
    }
}

#[test]
fn an_operators_plan_is_used_unchanged_or_refused_with_a_reason() {
    let model = model(&[100; 6], 10, Some(4));
    let workers = [worker(0, 1 << 20, 100.0), worker(1, 1 << 20, 1.0), worker(2, 300, 100.0)];
    let placement = Placement { model: &model, workload: Workload::of_context(16), workers: &workers };
    let explicit = |ranges: &[(&str, Range<usize>)]| {
        let ranges: Vec<_> = ranges.iter().map(|(name, range)| ((*name).to_owned(), range.clone())).collect();
        placement.explicit(&ranges).map(|replica| replica.stages.len()).map_err(|error| match error {
            PlacementError::Explicit(error) => error,
            other => panic!("{other}"),
        })
    };
    let name = |name: &str| name.to_owned();
    assert_eq!(explicit(&[("w1", 0..3), ("w0", 3..6)]), Ok(2));
    assert_eq!(explicit(&[("w0", 0..6)]), Ok(1));
    assert_eq!(explicit(&[("w9", 0..6)]), Err(ExplicitError::UnknownWorker(name("w9"))));
    assert_eq!(explicit(&[("w0", 0..3), ("w0", 3..6)]), Err(ExplicitError::WorkerTwice(name("w0"))));
    assert_eq!(explicit(&[("w0", 0..0)]), Err(ExplicitError::Empty { worker: name("w0"), start: 0, end: 0 }));
    let gap = ExplicitError::Gap { worker: name("w1"), expected: 2, found: 3 };
    assert_eq!(explicit(&[("w0", 0..2), ("w1", 3..6)]), Err(gap));
    assert_eq!(explicit(&[("w0", 0..5)]), Err(ExplicitError::End { end: 5, layers: 6 }));
    assert_eq!(explicit(&[("w0", 0..7)]), Err(ExplicitError::End { end: 7, layers: 6 }));
    assert_eq!(explicit(&[]), Err(ExplicitError::End { end: 0, layers: 6 }));
    let cut = ExplicitError::Cut { at: 4, drafter_from: None, cuts: vec![1, 2, 3] };
    assert_eq!(explicit(&[("w0", 0..4), ("w1", 4..6)]), Err(cut));
    let Err(ExplicitError::Memory { start: 3, end: 6, memory: 300, .. }) =
        explicit(&[("w0", 0..3), ("w2", 3..6)])
    else {
        panic!("300 bytes do not hold three layers of 100 and their keys")
    };
}

/// A drafter at the last stage that reads the caches of `from_layer`.
fn drafter(from_layer: usize, weight_bytes: u64) -> DrafterCosts {
    let stage = DrafterStage::Last { from_layer };
    DrafterCosts { stage, weight_bytes, reads_embedding: false, kv_elements: 0, state_elements: 0 }
}

#[test]
fn a_drafters_bytes_decide_the_worker_of_the_last_stage() {
    let plain = model(&[1000; 4], 0, None);
    let workload = Workload::of_context(16);
    // The larger worker is slower.
    let workers = [worker(0, 4_000, 100.0), worker(1, 20_000, 50.0)];
    let place = |model: &ModelCosts| {
        let placed = Placement { model, workload, workers: &workers }.place(Some(2), 1).unwrap().remove(0);
        let last = placed.stages.last().unwrap().clone();
        (last.worker, last.needs)
    };
    let with = plain.clone().with_drafter(drafter(4, 9_000));
    let (at, needs) = place(&with);
    assert_eq!((at, needs.drafter_weights, needs.drafter_caches), (1, 9_000, 0));
    let (_, needs) = place(&plain);
    assert_eq!(needs.drafter(), 0);
    // The drafter's KV and states count once per sequence.
    let keeps = DrafterCosts { kv_elements: 2, state_elements: 3, ..drafter(4, 9_000) };
    let workload = Workload { sequences: 5, ..workload };
    let with = plain.clone().with_drafter(keeps);
    let placement = Placement { model: &with, workload, workers: &workers };
    let placed = placement.place(Some(2), 1).unwrap().remove(0);
    let needs = placed.stages[1].needs;
    assert_eq!(needs.drafter_caches, 5 * (16 * 2 * 2) + 5 * 2 * (3 * 4));
}

#[test]
fn a_drafter_that_does_not_fit_is_refused_with_its_bytes_and_layers() {
    let plain = model(&[1000; 4], 0, None);
    let workers = [worker(0, 8_000, 100.0), worker(1, 8_000, 100.0)];
    let workload = Workload::of_context(16);
    let with = plain.clone().with_drafter(drafter(2, 9_000));
    let placement = Placement { model: &with, workload, workers: &workers };
    let error = placement.place(Some(2), 1).unwrap_err();
    let PlacementError::DoesNotFit { drafter_bytes, missing, .. } = &error else { panic!("{error}") };
    assert!(*drafter_bytes == 9_000 && *missing > 0, "{error}");
    assert!(error.to_string().contains("the drafter takes 9000 of what worker"), "{error}");
    assert!(Placement { model: &plain, ..placement }.place(Some(2), 1).is_ok());
    // More than one cut lies after the layer.
    assert_eq!(max_shards(&with), 3);
    let error = check_shards(&with, 4).unwrap_err().to_string();
    assert!(error.contains("at most 3") && error.contains("the caches of layer 2"), "{error}");
    let cut = |at: usize| [("w0".to_owned(), 0..at), ("w1".to_owned(), at..4)];
    let error = placement.explicit(&cut(3)).unwrap_err().to_string();
    assert!(error.contains("layer 3: the drafter reads the caches of layer 2"), "{error}");
    let error = placement.explicit(&cut(2)).unwrap_err().to_string();
    assert!(
        error.contains("worker w1 needs") && error.contains("the drafter takes 9000 of these"),
        "{error}"
    );
}
