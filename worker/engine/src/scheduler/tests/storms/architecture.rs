//! Storms over the caches of every architecture: the groups of each tiny model of the oracle set, with its
//! windows and its sizes of blocks and states.

use super::*;
use crate::decoder::CacheGroup;
use crate::test_models::load;
use kernels::backend::{ActivationMode, KvType};
use std::path::Path;

/// Number of storms per architecture unless the environment sets another.
const CASES: u64 = 200;

/// The groups of an architecture's tiny model, in blocks of 16 tokens.
fn groups(arch: &str) -> Vec<GroupSpec> {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny");
    let path = tiny.join(arch).join(format!("{arch}-f32.gguf"));
    let decoder = load(&path, (KvType::F16, ActivationMode::Int8));
    decoder.groups().iter().map(CacheGroup::spec).collect()
}

/// A small cache of these groups.
fn cramped(groups: &[GroupSpec], rng: &mut Rng) -> CacheSpec {
    let block_tokens = rng.pick(&[16, 16, 32, 64]);
    let scaled = |group: &GroupSpec| match group.kind {
        GroupKind::State => *group,
        _ => GroupSpec { block_bytes: group.block_bytes * u64::from(block_tokens) / 16, ..*group },
    };
    let groups: Vec<GroupSpec> = groups.iter().map(scaled).collect();
    let one_of_each: u64 = groups.iter().map(|group| group.block_bytes).sum();
    let arena_bytes = one_of_each * (4 + rng.below(40));
    CacheSpec { groups, block_tokens, arena_bytes }
}

/// A family number per architecture, so that the storms over equal caches differ.
fn family(arch: &str) -> u64 {
    arch.bytes().fold(1, |family: u64, byte| family * 31 % 0xffff_fffb + u64::from(byte))
}

fn storm_over(arch: &str) {
    let groups = groups(arch);
    let recurrent = groups.iter().any(|group| group.kind == GroupKind::State);
    let seen = storms(family(arch), CASES, &|rng| cramped(&groups, rng));
    println!("{arch}: {groups:?}, {seen:?}");
    if env_number("SEED").is_some() {
        return;
    }
    let common = [
        seen.preemptions,
        seen.evictions,
        seen.hits,
        seen.waits,
        seen.copies,
        seen.aborts,
        seen.predicted_hits,
        seen.forks,
        seen.pins,
        seen.restores,
        seen.cancels,
    ];
    let states = [seen.checkpoints, seen.checkpoints_skipped, seen.exports, seen.states_gone];
    assert!(common.iter().all(|&n| n >= 10), "{arch}: {seen:?}");
    assert!(!recurrent || states.iter().all(|&n| n >= 10), "{arch}: {seen:?}");
}

macro_rules! architectures {
    ($($name:ident: $arch:literal),* $(,)?) => {$(
        #[test]
        fn $name() {
            storm_over($arch);
        }
    )*};
}

architectures! {
    gemma3: "gemma3",
    gemma4: "gemma4",
    gemma4moe: "gemma4moe",
    gpt_oss: "gpt-oss",
    granitehybrid: "granitehybrid",
    granitehybrid_dense: "granitehybrid-dense",
    llama: "llama",
    llama3rope: "llama3rope",
    qwen2: "qwen2",
    qwen2moe: "qwen2moe",
    qwen3: "qwen3",
    qwen35: "qwen35",
    qwen35moe: "qwen35moe",
    qwen3moe: "qwen3moe",
    qwen3next: "qwen3next",
}

/// Regression: the rest of a prefix was in part of a block and had to be copied, but no slot was free for the
/// state after it. The sequence then had no row in the step, so the step was empty and the copy was never
/// made.
#[test]
fn a_copy_is_planned_only_with_a_row_behind_it() {
    let groups = groups("qwen35moe");
    storm(Rng(family("qwen35moe") << 32 | 1637), &|rng| cramped(&groups, rng), &mut Seen::default());
}
