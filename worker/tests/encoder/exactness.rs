//! The other texts of a step change no bit of a text's result.

use crate::{open, options};
use engine::encoder::{Encoder, Text};
use kernels::backend::KvType;
use kvasir_worker::load::EngineOptions;

/// Texts with lengths around block boundaries, with and without a second part.
fn texts() -> Vec<Text> {
    let mut state = 17u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let lengths = [1, 3, 15, 16, 17, 31, 40, 64, 65, 100, 150, 2, 90, 33, 48, 7];
    lengths
        .into_iter()
        .map(|len| {
            let tokens = (0..len).map(|_| 5 + next() % 340).collect();
            let second = (next() % 3 > 0).then(|| next() as usize % (len + 1));
            Text { tokens, second }
        })
        .collect()
}

/// The bits of all results, computed in the given groups.
fn bits(encoder: &mut Encoder, texts: &[Text], groups: &[Vec<usize>]) -> Vec<Vec<u32>> {
    let mut found = vec![Vec::new(); texts.len()];
    for group in groups {
        let together: Vec<&Text> = group.iter().map(|index| &texts[*index]).collect();
        assert_eq!(encoder.limits().fit(together.iter().map(|text| text.tokens.len())), group.len());
        let mut step = encoder.run(&together).unwrap();
        for (position, index) in group.iter().enumerate() {
            let values = [step.pooled(position).unwrap(), step.rows(position).unwrap().concat()].concat();
            assert!(values.iter().all(|value| value.is_finite()));
            found[*index] = values.iter().map(|value| value.to_bits()).collect();
        }
    }
    found
}

#[test]
fn batch_order_threads_and_block_size_change_no_bit() {
    let texts = texts();
    let all: Vec<usize> = (0..texts.len()).collect();
    let alone: Vec<Vec<usize>> = all.iter().map(|index| vec![*index]).collect();
    let backwards: Vec<usize> = all.iter().copied().rev().collect();
    let groupings = [vec![all.clone()], vec![backwards], all.chunks(5).map(<[usize]>::to_vec).collect()];
    for arch in ["bert", "bert-rerank"] {
        for kv_type in [KvType::F32, KvType::F16] {
            let base = EngineOptions { kv_type: kv_type.into(), chunk: Some(1024), ..options() };
            let expected = bits(&mut open(arch, &base), &texts, &alone);
            let variants = [
                base.clone(),
                EngineOptions { threads: Some(2), ..base.clone() },
                EngineOptions { block_tokens: 64, ..base.clone() },
            ];
            for (variant, options) in variants.iter().enumerate() {
                let mut encoder = open(arch, options);
                for (grouping, groups) in groupings.iter().enumerate() {
                    let found = bits(&mut encoder, &texts, groups);
                    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        assert!(
                            found == expected,
                            "{arch}, variant {variant}, grouping {grouping}, text {index}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn rows_of_the_second_part_have_segment_type_1() {
    let tokens: Vec<u32> = (5..45).collect();
    let mut encoder = open("bert-rerank", &options());
    let mut score = |second: Option<usize>| {
        let text = Text { tokens: tokens.clone(), second };
        encoder.run(&[&text]).unwrap().pooled(0).unwrap()
    };
    assert_ne!(score(None), score(Some(20)));
    assert_eq!(score(None), score(Some(tokens.len())), "a second part without tokens");
}
