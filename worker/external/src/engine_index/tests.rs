use super::*;
use crate::fake::{EventForm, RunningBlocks, SimulatedCache, encode_batch};
use crate::kv_events::{EngineHash, EngineMedium, StoredBlocks};
use crate::salt::salt_of;
use proptest::prelude::*;
use proto::block::{ClusterKey, HASH_UNIT_TOKENS};
use proto::event::Medium;
use std::collections::{HashMap, HashSet};

fn key() -> UnitKey {
    ClusterKey([3; 32]).units()
}

fn root(number: u8) -> BlockId {
    BlockId([number; 16])
}

/// What a coordinator holds after the events.
#[derive(Debug, Default)]
struct Consumer {
    held: HashMap<BlockId, Medium>,
}

impl Consumer {
    fn apply(&mut self, events: Vec<KvEvent>) {
        for event in events {
            match event {
                KvEvent::Stored { units, medium, .. } => {
                    for unit in units {
                        assert_eq!(self.held.insert(unit, medium), None, "{unit} is stored twice");
                    }
                }
                KvEvent::Removed { units, medium } => {
                    for unit in units {
                        assert_eq!(self.held.remove(&unit), Some(medium), "{unit} was not held");
                    }
                }
                KvEvent::Cleared => self.held.clear(),
                KvEvent::ResumePoint { .. } => panic!("engines report no resume points"),
            }
        }
    }

    fn units(&self) -> HashSet<BlockId> {
        self.held.keys().copied().collect()
    }
}

/// An engine with its publisher, a network, an index and a consumer.
struct World {
    form: EventForm,
    salted: bool,
    roots: Vec<BlockId>,
    /// Roots that have sent a request.
    known: HashSet<BlockId>,
    cache: SimulatedCache,
    running: Vec<RunningBlocks>,
    index: EngineIndex,
    consumer: Consumer,
    next: u64,
    kept: VecDeque<(u64, Bytes)>,
    most_kept: usize,
    run: u32,
    connected: bool,
    /// Messages on their way.
    network: VecDeque<(u64, Bytes)>,
    /// The replay socket does not answer.
    broken_replay: bool,
    replay: bool,
}

impl World {
    fn new(
        form: EventForm,
        block: usize,
        blocks: usize,
        roots: u8,
        salted: bool,
        kept: usize,
        replay: bool,
    ) -> Self {
        let engine = if form.is_vllm() { EngineKind::Vllm } else { EngineKind::Sglang };
        Self {
            form,
            salted,
            roots: (1..=roots).map(root).collect(),
            known: HashSet::new(),
            cache: SimulatedCache::new(block, blocks, !form.is_vllm()),
            running: Vec::new(),
            index: EngineIndex::new(key(), IndexConfig::new(engine, replay)),
            consumer: Consumer::default(),
            next: 0,
            kept: VecDeque::new(),
            most_kept: kept,
            run: 0,
            connected: false,
            network: VecDeque::new(),
            broken_replay: false,
            replay,
        }
    }

    fn begin(&mut self, root: usize, tokens: &[u32]) {
        let root = self.roots[root % self.roots.len()];
        self.known.insert(root);
        self.index.register(root, tokens, self.salted);
        let salt = self.salted.then(|| salt_of(root));
        // Two tokens are output, the last of which is not computed.
        let tokens: Vec<u32> = tokens.iter().copied().chain([9]).collect();
        if let Some(mut running) = self.cache.begin(salt.as_deref(), &tokens, tokens.len() - 1) {
            self.publish();
            self.cache.store(&mut running, tokens.len());
            self.running.push(running);
        }
        self.publish();
    }

    fn finish(&mut self, which: usize) {
        if !self.running.is_empty() {
            let running = self.running.swap_remove(which % self.running.len());
            self.cache.finish(running);
        }
    }

    fn publish(&mut self) {
        let events = self.cache.take_events();
        if !events.is_empty() {
            self.publish_batch(&events);
        }
    }

    fn publish_batch(&mut self, events: &[CacheEvent]) {
        let timestamp = f64::from(self.run) * 1e6 + self.next as f64;
        let payload = Bytes::from(encode_batch(self.form, timestamp, events));
        self.kept.push_back((self.next, payload.clone()));
        if self.kept.len() > self.most_kept {
            self.kept.pop_front();
        }
        if self.connected {
            self.network.push_back((self.next, payload));
        }
        self.next += 1;
    }

    fn restart(&mut self) {
        self.running.clear();
        self.cache.restart();
        (self.next, self.run) = (0, self.run + 1);
        self.kept.clear();
        self.disconnect();
    }

    fn disconnect(&mut self) {
        if self.connected {
            self.connected = false;
            self.network.clear();
            self.index.disconnected();
            self.settle_consumer();
            assert!(self.consumer.held.is_empty(), "without a connection nothing counts as held");
        }
    }

    fn connect(&mut self) {
        if !self.connected {
            self.connected = true;
            self.index.connected();
        }
    }

    fn deliver(&mut self) {
        while let Some((sequence, payload)) = self.network.pop_front() {
            self.index.message(sequence, payload);
        }
    }

    /// Answers one requested replay.
    fn act(&mut self) -> bool {
        let Some(IndexAction::Replay { from }) = self.index.next_action() else { return false };
        assert!(self.replay);
        if self.broken_replay {
            self.index.replay_failed();
            return true;
        }
        for (sequence, payload) in self.kept.iter().filter(|(sequence, _)| *sequence >= from) {
            self.index.replayed(*sequence, payload);
        }
        self.index.replay_ended();
        true
    }

    fn settle_consumer(&mut self) {
        let events = self.index.take_events();
        self.consumer.apply(events);
    }

    /// Everything arrives, and a probe finds what was lost without a successor.
    fn settle(&mut self) {
        self.connect();
        self.deliver();
        while self.act() {}
        self.index.probe();
        while self.act() {}
        self.settle_consumer();
    }

    /// The units of all chains that the engine could serve.
    fn expected(&self) -> HashSet<BlockId> {
        let mut units = HashSet::new();
        for (salt, tokens) in self.cache.hittable() {
            for &root in &self.known {
                if salt.is_none() || salt == Some(salt_of(root)) {
                    units.extend(key().chain(root, &tokens));
                }
            }
        }
        units
    }

    fn check(&mut self) {
        self.connect();
        if !self.replay {
            // Without a replay the successor tells that a message was lost.
            self.publish_batch(&[]);
        }
        self.settle();
        let (held, expected) = (self.consumer.units(), self.expected());
        assert_eq!(held.len(), self.index.held_units());
        if self.index.exact() {
            assert_eq!(held, expected);
        } else {
            assert!(held.is_subset(&expected), "an inexact index names what the engine does not hold");
        }
    }

    /// Tokens that the router expects of a prompt, and that the engine serves.
    fn predicted_and_actual(&mut self, root: usize, block: usize, prompt: &[u32]) -> Option<(usize, usize)> {
        let root = self.roots[root % self.roots.len()];
        let held =
            key().chain(root, prompt).iter().take_while(|unit| self.consumer.held.contains_key(unit)).count();
        let salt = self.salted.then(|| salt_of(root));
        let running = self.cache.begin(salt.as_deref(), prompt, prompt.len())?;
        let actual = running.cached_tokens();
        self.cache.finish(running);
        // As the router: at least one token of a prompt is computed, and blocks are hit as a whole.
        let usable = (held * HASH_UNIT_TOKENS).min(prompt.len().saturating_sub(1)) / block * block;
        Some((usable, actual))
    }
}

#[derive(Debug, Clone)]
enum Step {
    Begin { root: usize, stem: u8, length: usize, end: u32 },
    Finish(usize),
    Clear,
    Restart,
    Disconnect,
    Connect,
    Deliver,
    LoseNext,
    Probe,
    BreakReplay(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0usize..3, 0u8..3, 1usize..120, 0u32..3)
            .prop_map(|(root, stem, length, end)| Step::Begin { root, stem, length, end }),
        10 => (0usize..8).prop_map(Step::Finish),
        1 => Just(Step::Clear),
        1 => Just(Step::Restart),
        1 => Just(Step::Disconnect),
        2 => Just(Step::Connect),
        6 => Just(Step::Deliver),
        2 => Just(Step::LoseNext),
        2 => Just(Step::Probe),
        1 => any::<bool>().prop_map(Step::BreakReplay),
    ]
}

/// Prompts with a common stem that part at its end.
fn prompt(stem: u8, length: usize, end: u32) -> Vec<u32> {
    (0..length as u32).map(|at| u32::from(stem) * 1000 + at).chain([5000 + end; 5]).collect()
}

fn run_step(world: &mut World, step: Step) {
    match step {
        Step::Begin { root, stem, length, end } => world.begin(root, &prompt(stem, length, end)),
        Step::Finish(which) => world.finish(which),
        Step::Clear if world.running.is_empty() => {
            world.cache.clear();
            world.publish();
        }
        Step::Clear => {}
        Step::Restart => world.restart(),
        Step::Disconnect => world.disconnect(),
        Step::Connect => world.connect(),
        Step::Deliver => {
            world.deliver();
            world.act();
        }
        Step::LoseNext => drop(world.network.pop_front()),
        Step::Probe => world.index.probe(),
        Step::BreakReplay(broken) => world.broken_replay = broken,
    }
    world.settle_consumer();
}

const BLOCKS: [usize; 10] = [1, 4, 10, 16, 24, 32, 48, 64, 100, 528];

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn the_named_units_are_those_that_the_engine_holds(
        form in prop::sample::select(EventForm::ALL.to_vec()),
        block in prop::sample::select(BLOCKS.to_vec()),
        room in 60usize..600,
        roots in 1u8..4,
        salts in any::<bool>(),
        replay in any::<bool>(),
        kept in prop::sample::select(vec![1usize, 5, 1000]),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        // Engines without salts in their events are the next test's.
        let salted = salts && form.has_salts();
        let mut world = World::new(form, block, room / block + 2, roots, salted, kept, replay);
        world.connect();
        world.settle();
        for step in steps {
            run_step(&mut world, step);
        }
        world.broken_replay = false;
        world.check();
        // Nothing is lost from here on, and a whole replay is kept: after a restart the index is exact.
        world.most_kept = 1000;
        world.restart();
        world.begin(0, &prompt(0, 100, 0));
        world.check();
        prop_assert!(world.index.exact() || !replay);
        for stem in 0..3 {
            if world.index.exact() && block.is_multiple_of(16) {
                let found = world.predicted_and_actual(0, block, &prompt(stem, 100, 1));
                if let Some((predicted, actual)) = found {
                    prop_assert_eq!(predicted, actual);
                }
            }
        }
    }

    #[test]
    fn without_salts_in_events_no_root_gets_anothers_chain(
        block in prop::sample::select(BLOCKS.to_vec()),
        room in 60usize..600,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut world = World::new(EventForm::VllmArrays, block, room / block + 2, 3, true, 1000, true);
        world.connect();
        world.settle();
        for step in steps {
            run_step(&mut world, step);
        }
        world.broken_replay = false;
        world.settle();
        prop_assert!(world.consumer.units().is_subset(&world.expected()));
    }

    #[test]
    fn a_loss_is_repaired_by_the_replay(
        block in prop::sample::select(vec![16usize, 32, 528]),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let mut world = World::new(EventForm::VllmMaps, block, 300 / block + 2, 2, true, 100_000, true);
        for step in steps {
            if !matches!(step, Step::BreakReplay(_)) {
                run_step(&mut world, step);
            }
        }
        world.check();
        prop_assert!(world.index.exact(), "{:?}", world.index.inexact());
    }
}

fn stored(parent: Option<u128>, hashes: &[u128], tokens: &[u32], block: u32) -> CacheEvent {
    CacheEvent::Stored(StoredBlocks {
        hashes: hashes.iter().map(|&hash| EngineHash(hash)).collect(),
        parent: parent.map(EngineHash),
        tokens: tokens.to_vec(),
        block_size: block,
        medium: EngineMedium::Device,
        adapter: false,
        salt: parent.is_none().then(|| salt_of(root(1))),
        other_inputs: false,
        group: Some(0),
        partial_attention: false,
    })
}

fn removed(hashes: &[u128]) -> CacheEvent {
    let hashes = hashes.iter().map(|&hash| EngineHash(hash)).collect();
    CacheEvent::Removed { hashes, medium: EngineMedium::Device, group: Some(0) }
}

/// An index of a vLLM that publishes these events as batches from 0 on.
struct Direct {
    index: EngineIndex,
    consumer: Consumer,
    next: u64,
}

impl Direct {
    fn new(config: IndexConfig) -> Self {
        let mut index = EngineIndex::new(key(), config);
        index.connected();
        Self { index, consumer: Consumer::default(), next: 0 }
    }

    fn publish(&mut self, events: &[CacheEvent]) {
        let payload = encode_batch(EventForm::VllmMaps, self.next as f64, events);
        self.index.message(self.next, payload.into());
        self.next += 1;
        self.consumer.apply(self.index.take_events());
    }

    fn units(&self) -> HashSet<BlockId> {
        self.consumer.units()
    }
}

fn without_replay() -> IndexConfig {
    IndexConfig::new(EngineKind::Vllm, false)
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count).collect()
}

fn chain(tokens: &[u32]) -> HashSet<BlockId> {
    key().chain(root(1), tokens).into_iter().collect()
}

#[test]
fn a_block_behind_an_evicted_one_is_not_held_until_that_returns() {
    let mut direct = Direct::new(without_replay());
    direct.publish(&[stored(None, &[1, 2, 3], &tokens(96), 32)]);
    assert_eq!(direct.units(), chain(&tokens(96)));
    assert!(direct.index.exact());
    direct.publish(&[removed(&[2])]);
    assert_eq!(direct.units(), chain(&tokens(32)));
    direct.publish(&[stored(Some(1), &[2], &tokens(64)[32..], 32)]);
    assert_eq!(direct.units(), chain(&tokens(96)));
    direct.publish(&[removed(&[1, 3, 2])]);
    assert!(direct.units().is_empty());
    assert_eq!(direct.index.blocks(), 0);
}

#[test]
fn a_block_is_held_until_its_last_copy_is_removed() {
    let mut direct = Direct::new(without_replay());
    direct.publish(&[stored(None, &[1], &tokens(16), 16), stored(None, &[1], &tokens(16), 16)]);
    direct.publish(&[removed(&[1])]);
    assert_eq!(direct.units(), chain(&tokens(16)));
    direct.publish(&[removed(&[1])]);
    assert!(direct.units().is_empty());
}

#[test]
fn a_unit_of_two_blocks_is_held_while_one_of_them_is() {
    let mut direct = Direct::new(without_replay());
    let (a, b): (Vec<u32>, Vec<u32>) = ((24..48).collect(), (24..40).chain([7; 8]).collect());
    direct.publish(&[stored(None, &[1, 2], &tokens(48), 24), stored(Some(1), &[3], &b, 24)]);
    assert_eq!(a.len(), 24);
    assert_eq!(direct.units().len(), 4);
    direct.publish(&[removed(&[2])]);
    let both: Vec<u32> = tokens(24).into_iter().chain(b).collect();
    assert_eq!(direct.units(), chain(&both));
}

#[test]
fn the_slowest_block_of_a_prefix_decides_its_medium() {
    let mut direct = Direct::new(without_replay());
    let on = |event, medium| match event {
        CacheEvent::Stored(blocks) => CacheEvent::Stored(StoredBlocks { medium, ..blocks }),
        CacheEvent::Removed { hashes, group, .. } => CacheEvent::Removed { hashes, medium, group },
        event => event,
    };
    direct.publish(&[stored(None, &[1, 2], &tokens(32), 16)]);
    direct.publish(&[on(stored(None, &[1], &tokens(16), 16), EngineMedium::Host), removed(&[1])]);
    assert!(direct.consumer.held.values().all(|&medium| medium == Medium::Host));
    assert_eq!(direct.units(), chain(&tokens(32)));
    direct.publish(&[stored(None, &[1], &tokens(16), 16)]);
    assert!(direct.consumer.held.values().all(|&medium| medium == Medium::Device));
    direct.publish(&[on(stored(Some(2), &[3], &[1; 16], 16), EngineMedium::Elsewhere)]);
    assert_eq!(direct.units().len(), 2);
    direct.publish(&[CacheEvent::AllCleared]);
    assert_eq!((direct.units().len(), direct.index.inexact()), (0, Some(Inexact::OtherTiers)));
}

#[test]
fn a_gap_without_a_replay_forgets_everything_until_the_cache_is_cleared() {
    let mut direct = Direct::new(without_replay());
    direct.publish(&[stored(None, &[1], &tokens(16), 16)]);
    direct.next += 1;
    direct.publish(&[stored(None, &[9], &[5; 16], 16)]);
    assert_eq!(direct.units(), chain(&[5; 16]));
    assert_eq!(direct.index.inexact(), Some(Inexact::Gap));
    direct.publish(&[CacheEvent::AllCleared]);
    assert!(direct.index.exact() && direct.units().is_empty());
}

#[test]
fn an_unknown_event_forgets_everything() {
    let mut direct = Direct::new(without_replay());
    direct.publish(&[stored(None, &[1], &tokens(16), 16)]);
    direct.index.message(1, Bytes::from_static(b"\x92\x00\x91\x91\xaeBlockTruncated"));
    direct.consumer.apply(direct.index.take_events());
    assert!(direct.units().is_empty());
    assert_eq!(direct.index.inexact(), Some(Inexact::InvalidEvent));
    assert_eq!(direct.index.stats().invalid, 1);
}

#[test]
fn cache_groups_beside_full_attention_are_never_exact() {
    let mut direct = Direct::new(without_replay());
    let CacheEvent::Stored(blocks) = stored(None, &[1], &tokens(16), 16) else { unreachable!() };
    let window = StoredBlocks { group: Some(1), partial_attention: true, ..blocks.clone() };
    direct.publish(&[CacheEvent::Stored(blocks), CacheEvent::Stored(window)]);
    assert_eq!(direct.units(), chain(&tokens(16)));
    assert_eq!(direct.index.inexact(), Some(Inexact::CacheGroups));
    direct.publish(&[CacheEvent::Removed {
        hashes: vec![EngineHash(1)],
        medium: EngineMedium::Device,
        group: Some(1),
    }]);
    assert_eq!(direct.units(), chain(&tokens(16)));
}

#[test]
fn chains_of_images_and_of_strangers_are_not_named() {
    let mut direct = Direct::new(without_replay());
    let CacheEvent::Stored(blocks) = stored(None, &[1], &tokens(16), 16) else { unreachable!() };
    let stranger = StoredBlocks { salt: Some("stranger".into()), ..blocks.clone() };
    let adapter = StoredBlocks { salt: None, adapter: true, hashes: vec![EngineHash(2)], ..blocks };
    direct.publish(&[CacheEvent::Stored(stranger), CacheEvent::Stored(adapter)]);
    assert!(direct.units().is_empty() && direct.index.exact());
    direct.publish(&[removed(&[1, 2])]);
    assert_eq!(direct.index.blocks(), 0);
}

#[test]
fn a_full_index_refuses_blocks_and_is_not_exact() {
    let mut direct = Direct::new(IndexConfig { max_blocks: 4, ..without_replay() });
    direct.publish(&[stored(None, &[1, 2, 3, 4, 5], &tokens(80), 16)]);
    assert_eq!(direct.units(), chain(&tokens(48)));
    assert_eq!((direct.index.inexact(), direct.index.stats().refused), (Some(Inexact::Full), 1));
    direct.publish(&[removed(&[5, 4, 3, 2, 1])]);
    assert_eq!((direct.index.blocks(), direct.units().len()), (0, 0));
}

#[test]
fn hashes_that_contradict_themselves_are_not_believed() {
    let mut direct = Direct::new(without_replay());
    direct.publish(&[stored(None, &[1], &tokens(16), 16), stored(None, &[1], &[5; 16], 16)]);
    assert!(direct.units().is_empty());
    direct.publish(&[stored(Some(7), &[8], &tokens(16), 16), stored(Some(8), &[7], &tokens(16), 16)]);
    assert_eq!(direct.index.inexact(), Some(Inexact::InvalidEvent));
    direct.publish(&[stored(Some(3), &[3], &tokens(16), 16)]);
    assert_eq!(direct.index.blocks(), 0);
}

#[test]
fn a_chain_of_an_engine_without_salts_is_named_by_its_registered_prompt() {
    let form = EventForm::VllmArrays;
    let mut index = EngineIndex::new(key(), without_replay());
    index.connected();
    let publish = |index: &mut EngineIndex, sequence: u64, events: &[CacheEvent]| {
        index.message(sequence, encode_batch(form, sequence as f64, events).into());
        index.take_events();
    };
    // The prompt is shorter than the block, which contains tokens of the answer.
    index.register(root(1), &tokens(10), true);
    publish(&mut index, 0, &[stored(None, &[1], &tokens(16), 16)]);
    assert_eq!((index.held_units(), index.exact()), (1, true));
    // The same beginning under another root is another chain of the engine.
    index.register(root(2), &tokens(10), true);
    assert_eq!(index.held_units(), 1);
    publish(&mut index, 1, &[stored(None, &[2], &tokens(16), 16)]);
    assert_eq!((index.held_units(), index.exact()), (2, true));
    // A third and a fourth one cannot be told apart.
    index.register(root(3), &tokens(10), true);
    index.register(root(4), &tokens(10), true);
    publish(&mut index, 2, &[stored(None, &[3], &tokens(16), 16)]);
    assert_eq!((index.held_units(), index.inexact()), (2, Some(Inexact::AmbiguousRoot)));
    publish(&mut index, 3, &[removed(&[3])]);
    assert!(index.exact());
}
