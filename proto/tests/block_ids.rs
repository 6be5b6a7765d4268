//! Block identity: golden vectors, and uniqueness of ids over scopes and prefixes.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use kvasir_proto::block::{BlockId, ClusterKey, HASH_UNIT_TOKENS, Scope, TenantSalt};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::collections::HashMap;

const GOLDEN: &str = include_str!("golden/block_ids.txt");

#[test]
fn golden_vectors() {
    let key = ClusterKey(std::array::from_fn(|i| i as u8));
    let mut lines = Vec::new();
    let scopes: [(u8, [&[u8]; 3]); 3] = [
        (0, [b"", b"", b""]),
        (7, [&[0xaa; 32], &[0xbb; 32], b""]),
        (7, [&[0xaa; 32], &[0xbb; 32], b"adapter-1"]),
    ];
    for (salt, [model_digest, tokenizer_digest, adapter]) in scopes {
        let salt = TenantSalt([salt; 32]);
        let root = key.root(Scope { salt: &salt, model_digest, tokenizer_digest, adapter });
        lines.push(format!("root {root}"));
        // 40 tokens: two units and a rest that has no id. Once with ids below 2^24, as in vocabularies, and
        // once above.
        for factor in [10_007u32, 1_000_003] {
            let tokens: Vec<u32> = (0..40u32).map(|i| i * i * factor).collect();
            lines.extend(key.chain(root, &tokens).iter().map(|id| format!("unit {id}")));
        }
    }
    let golden: Vec<&str> = GOLDEN.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(lines, golden, "\n{}", lines.join("\n"));
}

/// Inputs of an id.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Tuple {
    Root { key: u8, salt: u8, fields: [Vec<u8>; 3] },
    Unit { key: u8, parent: BlockId, tokens: [u32; HASH_UNIT_TOKENS] },
}

impl Tuple {
    fn id(&self) -> BlockId {
        match self {
            Self::Root { key, salt, fields: [model_digest, tokenizer_digest, adapter] } => {
                let salt = TenantSalt([*salt; 32]);
                ClusterKey([*key; 32]).root(Scope { salt: &salt, model_digest, tokenizer_digest, adapter })
            }
            Self::Unit { key, parent, tokens } => ClusterKey([*key; 32]).unit(*parent, tokens),
        }
    }
}

/// Uses few symbols, so that concatenations of different fields often coincide.
fn tuple() -> impl Strategy<Value = Tuple> {
    let field = || vec(prop_oneof![Just(0u8), Just(1), Just(b'k')], 0..4);
    let root = (0u8..2, 0u8..2, [field(), field(), field()]).prop_map(|(key, salt, fields)| Tuple::Root {
        key,
        salt,
        fields,
    });
    // Includes tokens with equal leading bits, and both packed forms.
    let token = prop_oneof![8 => 0u32..2, 1 => Just(1 << 23), 1 => Just(1 << 24), 1 => Just(1 << 24 | 1)];
    let unit = (0u8..2, 0u8..3, prop::array::uniform16(token))
        .prop_map(|(key, parent, tokens)| Tuple::Unit { key, parent: BlockId([parent; 16]), tokens });
    prop_oneof![root, unit]
}

/// T1: for 10,000 random tuples, equal ids imply equal tuples, across both kinds of id.
#[test]
fn sec_hash_domains() {
    let mut seen: HashMap<BlockId, Tuple> = HashMap::new();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let many = vec(tuple(), 10_000);
    let tuples = many.new_tree(&mut runner).unwrap().current();
    for tuple in tuples {
        let id = tuple.id();
        assert_eq!(id, tuple.id(), "an id depends on its tuple only");
        if let Some(other) = seen.insert(id, tuple.clone()) {
            assert_eq!(other, tuple, "two tuples share id {id}");
        }
    }
    assert!(seen.len() > 4_000, "the shuffles are too alike to prove anything: {}", seen.len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_chain_names_every_full_unit_and_is_a_prefix_of_longer_chains(
        tokens in vec(any::<u32>(), 0..200), cut: prop::sample::Index, root: [u8; 16],
    ) {
        let key = ClusterKey([3; 32]);
        let whole = key.chain(BlockId(root), &tokens);
        prop_assert_eq!(whole.len(), tokens.len() / HASH_UNIT_TOKENS);
        let prefix = key.chain(BlockId(root), &tokens[..cut.index(tokens.len() + 1)]);
        prop_assert_eq!(&whole[..prefix.len()], &prefix[..]);
    }

    #[test]
    fn one_changed_token_changes_every_later_id(tokens in vec(any::<u32>(), 64..65), at in 0usize..64) {
        let key = ClusterKey([3; 32]);
        let mut changed = tokens.clone();
        changed[at] = !changed[at];
        let (a, b) = (key.chain(BlockId([0; 16]), &tokens), key.chain(BlockId([0; 16]), &changed));
        let unit = at / HASH_UNIT_TOKENS;
        prop_assert_eq!(&a[..unit], &b[..unit]);
        prop_assert!(a[unit..].iter().zip(&b[unit..]).all(|(a, b)| a != b));
    }
}
