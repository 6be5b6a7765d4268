//! Tests of the cache without a scheduler: ids are made by hand, blocks are counted one by one.

use super::pool::{BlockAt, BlockPool};
use super::*;
use proto::block::BlockId;

const FULL: GroupKind = GroupKind::Full;

fn spec(groups: &[(GroupKind, u64)], block_tokens: u32, arena_bytes: u64) -> CacheSpec {
    let groups = groups.iter().map(|&(kind, block_bytes)| GroupSpec { kind, block_bytes }).collect();
    CacheSpec { groups, block_tokens, arena_bytes }
}

fn cache(groups: &[(GroupKind, u64)], block_tokens: u32, arena_bytes: u64) -> KvCache {
    KvCache::new(spec(groups, block_tokens, arena_bytes), BlockLayout::Paged).unwrap()
}

fn id(n: u8) -> BlockId {
    BlockId([n; 16])
}

fn tokens(units: &[u32]) -> Vec<u32> {
    units.iter().flat_map(|&unit| [unit; 16]).collect()
}

/// Computes a sequence in one completed step and closes it.
fn store(cache: &mut KvCache, ids: &[BlockId], tokens: &[u32], step: u64) {
    let mut sequence = cache.open(Some(id(0)));
    assert!(cache.extend(&mut sequence, tokens.len() as u32));
    cache.commit(&mut sequence, ids, tokens, tokens.len() as u32, step);
    cache.complete(step);
    cache.close(&mut sequence);
}

fn lookup(cache: &mut KvCache, ids: &[BlockId], tokens: &[u32]) -> (usize, HitStop) {
    let mut sequence = cache.open(Some(id(0)));
    let hit = cache.find(&sequence, ids, tokens, ids.len(), &|end| end);
    cache.close(&mut sequence);
    (hit.end(), hit.stop)
}

/// A forged or colliding id is never served.
#[test]
fn sec_forged_index() {
    let mut cache = cache(&[(FULL, 64)], 16, 64 * 100);
    let ids = [id(1), id(2), id(3)];
    store(&mut cache, &ids, &tokens(&[10, 20, 30]), 1);
    assert_eq!(lookup(&mut cache, &ids, &tokens(&[10, 20, 30])), (3, HitStop::PromptEnd));
    // The same id for other tokens.
    assert_eq!(lookup(&mut cache, &ids, &tokens(&[10, 21, 30])), (1, HitStop::Collision { token: 16 }));
    // The same tokens and id after another prefix.
    assert_eq!(
        lookup(&mut cache, &[id(1), id(3)], &tokens(&[10, 30])),
        (1, HitStop::Collision { token: 16 })
    );
    // A unit's id as a root: the scope shares nothing.
    let mut sequence = cache.open(Some(id(2)));
    assert!(!sequence.shares());
    cache.close(&mut sequence);
    // A sequence that computes such a unit does not share it, and the cached content stays.
    let held = cache.held_units();
    store(&mut cache, &[id(1), id(2), id(4)], &tokens(&[10, 21, 40]), 2);
    assert_eq!(cache.held_units(), held);
    assert_eq!(lookup(&mut cache, &ids, &tokens(&[10, 20, 30])), (3, HitStop::PromptEnd));
    cache.check_all(std::iter::empty(), std::iter::empty()).unwrap();
}

#[test]
fn groups_shorten_each_other_until_all_agree() {
    let sliding = |window| (GroupKind::Sliding { window }, 64);
    let mut cache = cache(&[(FULL, 64), sliding(33), sliding(49)], 16, 64 * 400);
    let ids: Vec<BlockId> = (1..=20).map(id).collect();
    let all = tokens(&(0..20).collect::<Vec<_>>());
    store(&mut cache, &ids, &all, 1);
    assert_eq!(lookup(&mut cache, &ids, &all).0, 20);
    // Units that single groups lose, and the longest prefix that all groups can then serve. The windows need
    // two and three units.
    let mut drop = |group: usize, unit: usize| {
        let node = cache.tree.node_of(ids[unit]).unwrap();
        let block = cache.tree.block_of(node, group).unwrap();
        cache.tree.remove_block(group, block);
        cache.pool.set_hashed(group, block, false);
        let mirrored = cache.tree.deepest_held(&ids);
        let (end, stop) = lookup(&mut cache, &ids, &all);
        assert_eq!(mirrored, end, "what the events say is not what is served");
        (end, stop.to_string())
    };
    assert_eq!(drop(0, 18), (18, "not_cached group=0 token=288".to_owned()));
    // Group 1 cannot continue at 17 or 18, group 2 can. The longest prefix for both is 16.
    assert_eq!(drop(1, 16), (16, "window_gone group=1 token=288".to_owned()));
    assert_eq!(drop(2, 14), (14, "window_gone group=2 token=256".to_owned()));
    assert_eq!(drop(1, 13), (13, "not_cached group=1 token=208".to_owned()));
    assert_eq!(drop(2, 0).0, 13);
    assert_eq!(drop(0, 5), (5, "not_cached group=0 token=80".to_owned()));
}

#[test]
fn a_state_shortens_the_hit_to_where_it_stands() {
    for order in [[FULL, GroupKind::State], [GroupKind::State, FULL]] {
        let state = order.iter().position(|&kind| kind == GroupKind::State).unwrap();
        let mut cache = cache(&order.map(|kind| (kind, 64)), 16, 64 * 100);
        let ids: Vec<BlockId> = (1..=10).map(id).collect();
        let all = tokens(&(0..10).collect::<Vec<_>>());
        let mut sequence = cache.open(Some(id(0)));
        assert!(cache.extend(&mut sequence, 160));
        cache.commit(&mut sequence, &ids, &all, 160, 1);
        for (unit, kind) in [(3, CheckpointKind::Spacing), (7, CheckpointKind::PromptEnd)] {
            let checkpoint = cache.keep_state(&mut sequence, unit, kind, 1, CheckpointPolicy::default());
            let Some(CheckpointSlot::Copied { held: (group, slot), .. }) = checkpoint else {
                panic!("{checkpoint:?}")
            };
            assert_eq!(group, state);
            cache.step_state(&mut sequence, false).unwrap();
            // As after the step has been computed.
            cache.end_hold(group, slot);
        }
        cache.complete(1);
        assert_eq!(cache.held_units(), 2);
        assert_eq!(lookup(&mut cache, &ids, &all), (7, HitStop::StateGone { token: 160 }));
        assert_eq!(lookup(&mut cache, &ids[..7], &all), (7, HitStop::PromptEnd));
        assert_eq!(lookup(&mut cache, &ids[..5], &all), (3, HitStop::StateGone { token: 80 }));
        assert_eq!(cache.tree.deepest_held(&ids), 7);
        // The KV before a state is as necessary as the state itself.
        let node = cache.tree.node_of(ids[4]).unwrap();
        let block = cache.tree.block_of(node, 1 - state).unwrap();
        cache.tree.remove_block(1 - state, block);
        cache.pool.set_hashed(1 - state, block, false);
        assert_eq!(lookup(&mut cache, &ids, &all), (3, HitStop::StateGone { token: 64 }));
        assert_eq!((cache.tree.deepest_held(&ids), cache.held_units()), (3, 1));
        assert_eq!(cache.tokens_shared(&sequence), 0);
        cache.close(&mut sequence);
        cache.check_all(std::iter::empty(), std::iter::empty()).unwrap();
    }
}

#[test]
fn a_sequence_gets_its_last_slot_back_from_its_own_checkpoint() {
    // Room for one slot and two blocks.
    let mut cache = cache(&[(FULL, 64), (GroupKind::State, 64)], 16, 64 * 3);
    let (ids, all) = ([id(1), id(2)], tokens(&[1, 2]));
    let mut sequence = cache.open(Some(id(0)));
    assert!(cache.extend(&mut sequence, 16));
    cache.commit(&mut sequence, &ids, &all, 16, 1);
    let policy = CheckpointPolicy::default();
    let checkpoint = cache.keep_state(&mut sequence, 1, CheckpointKind::Spacing, 1, policy);
    assert_eq!(checkpoint, Some(CheckpointSlot::Left));
    let first = cache.step_state(&mut sequence, false).unwrap();
    assert_eq!((first.read, first.held), (None, None));
    cache.complete(1);
    assert_eq!(cache.held_units(), 1);
    // One block more and no free slot: the sequence writes to its own checkpoint.
    assert!(cache.extend(&mut sequence, 32));
    assert_eq!(cache.held_units(), 0);
    cache.commit(&mut sequence, &ids, &all, 32, 2);
    let second = cache.step_state(&mut sequence, true).unwrap();
    assert_eq!((second.read, second.write, second.held), (Some(first.write), first.write, None));
    cache.complete(2);
    let check = |cache: &KvCache, sequence: &SequenceCache| {
        cache.check_all(std::iter::once(sequence), std::iter::empty())
    };
    assert_eq!(check(&cache, &sequence), Ok(()));
    let lost = sequence.state.current.take();
    assert_eq!(check(&cache, &sequence), Err(Broken::State { tokens: 32 }));
    sequence.state.current = lost;
    // When the sequence retires, its state stays as a checkpoint.
    cache.retire(&mut sequence);
    assert_eq!(lookup(&mut cache, &ids, &all), (2, HitStop::PromptEnd));
}

#[test]
fn free_blocks_are_reused_empty_first_and_then_the_oldest() {
    let spec = spec(&[(FULL, 64)], 16, 64 * 4);
    let mut pool = BlockPool::new(&spec, BlockLayout::Paged);
    let mut evicted = Vec::new();
    let blocks: Vec<u32> = (0..4).map(|_| pool.alloc(0, &mut evicted).unwrap()).collect();
    assert_eq!(pool.alloc(0, &mut evicted), None);
    for &block in &blocks[..3] {
        pool.set_hashed(0, block, true);
    }
    for &at in &[1, 3, 0, 2] {
        pool.release(0, blocks[at]);
    }
    // A hit takes block 1 out of the list and gives it back as the youngest.
    pool.retain(0, blocks[1]);
    pool.release(0, blocks[1]);
    // Demoted content is evicted before all other content and after empty blocks.
    pool.demote(0, blocks[2]);
    pool.demote(0, blocks[3]);
    assert_eq!(pool.recount(0).map(|count| count.free), Some(3));
    let order: Vec<u32> = (0..4).map(|_| pool.alloc(0, &mut evicted).unwrap()).collect();
    assert_eq!(order, [blocks[3], blocks[2], blocks[0], blocks[1]]);
    let lost: Vec<u32> = evicted.iter().map(|at| at.block).collect();
    assert_eq!(lost, [blocks[2], blocks[0], blocks[1]]);
}

#[test]
fn bytes_move_between_groups_oldest_content_first() {
    let spec = spec(&[(FULL, 64), (GroupKind::Sliding { window: 64 }, 128)], 16, 128 * 4);
    let mut pool = BlockPool::new(&spec, BlockLayout::Paged);
    let mut evicted = Vec::new();
    // Group 0 fills two slabs of two blocks, then group 1 the other two.
    let small: Vec<u32> = (0..4).map(|_| pool.alloc(0, &mut evicted).unwrap()).collect();
    let large: Vec<u32> = (0..2).map(|_| pool.alloc(1, &mut evicted).unwrap()).collect();
    assert_eq!(pool.used_bytes(), 128 * 4);
    assert!(!pool.fits(&[0, 1]) && !pool.fits(&[1, 0]));
    for &block in &small {
        pool.set_hashed(0, block, true);
    }
    pool.set_hashed(1, large[0], true);
    pool.release(0, small[0]);
    pool.release(1, large[0]);
    assert!(pool.fits(&[1, 1]) && pool.fits(&[3, 0]) && !pool.fits(&[2, 1]));
    pool.release(0, small[1]);
    // Group 1 owns a free block. Group 0's idle slab is older by the age of its first block.
    assert!(pool.fits(&[0, 2]) && !pool.fits(&[0, 3]));
    let taken = pool.alloc(1, &mut evicted).unwrap();
    assert_eq!(pool.offset(1, taken), pool.offset(0, small[0]).min(pool.offset(0, small[1])));
    assert_eq!(evicted, [small[0], small[1]].map(|block| BlockAt { group: 0, block }));
    // A slab without content whose blocks are all free belongs to no group.
    pool.release(1, taken);
    pool.release(1, large[1]);
    assert!(pool.fits(&[4, 1]) && pool.fits(&[0, 3]) && !pool.fits(&[5, 1]));
}

#[test]
fn slabs_waste_less_than_two_percent() {
    let sliding = GroupKind::Sliding { window: 512 };
    for (groups, arena) in [
        (vec![(FULL, 368_640)], 1u64 << 30),
        (vec![(FULL, 49_152), (sliding, 245_760)], 1 << 30),
        (vec![(FULL, 10_048), (sliding, 24_000), (sliding, 4_160)], 1 << 28),
        (vec![(FULL, 64_064), (sliding, 65_536)], 1 << 30),
        (vec![(FULL, 69_632), (sliding, 208_896), (sliding, 3_328)], 100 << 30),
        // A hybrid's slot weighs as much as a hundred blocks.
        (vec![(FULL, 196_608), (GroupKind::State, 19_574_784)], 4 << 30),
    ] {
        let spec = spec(&groups, 16, arena);
        let pool = BlockPool::new(&spec, BlockLayout::Paged);
        for (group, &(_, bytes)) in groups.iter().enumerate() {
            let used = pool.block_capacity(group) as u64 * bytes;
            assert!(used * 100 >= arena * 98, "{groups:?}: group {group} can use {used} of {arena}");
        }
    }
}

#[test]
fn permuted_layout_is_another_order_of_the_same_blocks() {
    let order = |block_layout| {
        let spec = spec(&[(FULL, 64)], 16, 64 * 100);
        let mut pool = BlockPool::new(&spec, block_layout);
        let order: Vec<u32> = (0..100).map(|_| pool.alloc(0, &mut Vec::new()).unwrap()).collect();
        order
    };
    let plain = order(BlockLayout::Paged);
    assert!(plain.is_sorted());
    let mut permuted = order(BlockLayout::Permuted { seed: 1 });
    assert_eq!(permuted, order(BlockLayout::Permuted { seed: 1 }));
    assert_ne!(permuted, order(BlockLayout::Permuted { seed: 2 }));
    assert_ne!(permuted, plain);
    permuted.sort_unstable();
    assert_eq!(permuted, plain);
}

#[test]
fn impossible_caches_are_refused() {
    let good = spec(&[(FULL, 64)], 16, 64);
    assert_eq!(good.validate(), Ok(()));
    let refused = |change: fn(&mut CacheSpec)| {
        let mut spec = good.clone();
        change(&mut spec);
        KvCache::new(spec, BlockLayout::Paged).unwrap_err()
    };
    assert_eq!(refused(|s| s.groups.clear()), SpecError::Groups(0));
    assert_eq!(refused(|s| s.groups = vec![s.groups[0]; 9]), SpecError::Groups(9));
    assert_eq!(refused(|s| s.block_tokens = 48), SpecError::BlockTokens(48));
    let state = GroupSpec { kind: GroupKind::State, block_bytes: 64 };
    let states = CacheSpec { groups: vec![state; 2], arena_bytes: 128, ..good.clone() };
    assert_eq!(states.validate(), Err(SpecError::States(2)));
    assert_eq!(refused(|s| s.groups[0].block_bytes = 0), SpecError::BlockBytes { group: 0, bytes: 0 });
    assert_eq!(refused(|s| s.groups[0].block_bytes = 96), SpecError::BlockBytes { group: 0, bytes: 96 });
    assert_eq!(refused(|s| s.groups[0].kind = GroupKind::Sliding { window: 0 }), SpecError::Window(0));
    let max = u64::from(u32::MAX) * 64;
    assert_eq!(refused(|s| s.arena_bytes = 63), SpecError::Arena { bytes: 63, min: 64, max });
    assert_eq!(refused(|s| s.arena_bytes = 1 << 40), SpecError::Arena { bytes: 1 << 40, min: 64, max });
}

#[test]
fn the_checker_detects_every_broken_invariant() {
    let mut cache = cache(&[(FULL, 64)], 16, 64 * 100);
    let mut sequence = cache.open(Some(id(0)));
    assert!(cache.extend(&mut sequence, 64));
    cache.commit(&mut sequence, &[id(1), id(2), id(3), id(4)], &tokens(&[1, 2, 3, 4]), 64, 1);
    let check = |cache: &KvCache, sequence: &SequenceCache| {
        cache.check_all(std::iter::once(sequence), std::iter::empty())
    };
    assert_eq!(check(&cache, &sequence), Ok(()));
    let block = sequence.tables[0].blocks[1];

    cache.pool.retain(0, block);
    assert_eq!(cache.check(), Err(Broken::References { pool: 5, sequences: 4, steps: 0, pins: 0 }));
    cache.entries += 1;
    assert_eq!(cache.check(), Ok(()));
    assert_eq!(check(&cache, &sequence), Err(Broken::Block { group: 0, block, counted: 2, held: 1 }));
    cache.pool.release(0, block);
    cache.entries -= 1;

    cache.tree.remove_block(0, block);
    assert_eq!(check(&cache, &sequence), Err(Broken::Cached { group: 0, block }));
    cache.pool.set_hashed(0, block, false);
    assert_eq!(check(&cache, &sequence), Ok(()));

    let lost = sequence.tables[0].blocks.pop();
    assert_eq!(check(&cache, &sequence), Err(Broken::FreeList { group: 0 }));
    sequence.tables[0].blocks.extend(lost);
    cache.close(&mut sequence);
    cache.check_all(std::iter::empty(), std::iter::empty()).unwrap();
}
