//! Compares every drafting round of the oracle set's assistant with the reference.

use super::*;
use crate::test_models::{self, fixture};
use kernels::backend::{ActivationMode, KvType};
use model::ModelFile;
use safetensors::SafeTensors;
use std::path::PathBuf;

const DRAFT_TOKENS: usize = 4;

fn file(name: &str) -> PathBuf {
    fixture("tiny").join(name)
}

/// A target model with its assistant, and one sequence.
struct Pair {
    decoder: Decoder,
    blocks: Vec<Vec<u32>>,
}

impl Pair {
    fn new(positions: usize) -> Self {
        let target = file("gemma4/gemma4-f32.gguf");
        let mut decoder = test_models::load(&target, (KvType::F32, ActivationMode::F32));
        let assistant = ModelFile::open(file("gemma4-assistant/gemma4-assistant-f32.gguf")).unwrap();
        let spec = AssistantSpec::from_file(&assistant).unwrap();
        decoder.load_assistant(&spec, (&assistant, &assistant), 4).unwrap();
        let (mut end, mut blocks) = (0, Vec::new());
        let count = positions.div_ceil(16) as u32;
        for stride in decoder.block_strides() {
            blocks.push((0..count).map(|block| end + block * stride).collect());
            end += count * stride;
        }
        decoder.allocate_kv(end as usize * 64).unwrap();
        Self { decoder, blocks }
    }

    /// The blocks of the first `positions`.
    fn tables(blocks: &[Vec<u32>], positions: usize) -> Vec<BlockTable<'_>> {
        blocks.iter().map(|blocks| BlockTable::Paged(&blocks[..positions.div_ceil(16)])).collect()
    }

    /// Computes tokens after `context`; returns the most likely next token of each.
    fn step(&mut self, tokens: &[u32], context: usize) -> Vec<u32> {
        let sequence = StepSequence { rows: 0..tokens.len(), context, segment_start: None };
        let tables = Self::tables(&self.blocks, context + tokens.len());
        let tables: Vec<_> = tables.into_iter().map(|table| vec![table]).collect();
        let input = StepInput { tokens, sequences: &[sequence], tables: &tables, states: &[] };
        self.decoder.forward(&[], &input).unwrap();
        let rows: Vec<u32> = (0..tokens.len() as u32).collect();
        let mut best = Vec::new();
        self.decoder.argmax(&rows, &mut best).unwrap();
        best
    }
}

fn doubles(file: &SafeTensors<'_>, name: &str) -> Vec<f64> {
    let data = file.tensor(name).unwrap().data().to_vec();
    data.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

fn max_difference(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(got, expected)| (f64::from(*got) - expected).abs()).fold(0.0, f64::max)
}

#[test]
fn every_round_equals_the_reference() {
    let bytes = std::fs::read(file("gemma4-assistant/ref.safetensors")).unwrap();
    let reference = SafeTensors::deserialize(&bytes).unwrap();
    let text = std::fs::read_to_string(file("gemma4-assistant/ref.json")).unwrap();
    let recorded: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (mut rounds, mut accepted) = (0, 0);
    for (prompt, recorded) in recorded["rounds"].as_array().unwrap().iter().enumerate() {
        let ids = reference.tensor(&format!("p{prompt}.ids")).unwrap().data().to_vec();
        let ids: Vec<u32> = ids.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let mut pair = Pair::new(256);
        let mut newest = pair.step(&ids, 0).pop().unwrap();
        let (mut context, mut row) = (ids.len(), ids.len() as u32 - 1);
        let mut output = vec![newest];
        for (round, recorded) in recorded.as_array().unwrap().iter().enumerate() {
            let case = format!("p{prompt}.r{round}");
            let number = |key: &str| recorded[key].as_u64().unwrap() as usize;
            assert_eq!((context, newest as usize), (number("pos"), number("last_token")), "{case}");
            let hidden = pair.decoder.hidden(&[row]).unwrap().remove(0);
            let tables = Pair::tables(&pair.blocks, context);
            let from =
                DraftFrom { token: newest, context, hidden: hidden.clone(), tables, most: DRAFT_TOKENS };
            let in_reference = reference.tensor(&format!("{case}.h_in")).is_ok();
            if in_reference {
                assert!(
                    max_difference(&hidden, &doubles(&reference, &format!("{case}.h_in"))) < 1e-3,
                    "{case}"
                );
                let logits = doubles(&reference, &format!("{case}.draft_logits"));
                let out = doubles(&reference, &format!("{case}.h_out"));
                for count in 1..=DRAFT_TOKENS {
                    let drafted = pair.decoder.draft(std::slice::from_ref(&from), count).unwrap().remove(0);
                    let width = drafted.hidden.len();
                    let expected = &out[(count - 1) * width..count * width];
                    assert!(max_difference(&drafted.hidden, expected) < 1e-3, "{case}, draft token {count}");
                    let got = pair.decoder.draft_logits(0).unwrap();
                    let expected = &logits[(count - 1) * got.len()..count * got.len()];
                    assert!(max_difference(&got, expected) < 3e-3, "{case}, draft token {count}");
                }
            }
            // Next to another sequence, the draft tokens are the same.
            let drafted = pair.decoder.draft(&[from.clone(), from], DRAFT_TOKENS).unwrap();
            assert_eq!(drafted[0], drafted[1], "{case}");
            let draft_tokens = drafted[0].tokens.clone();
            let expected: Vec<u32> = serde_json::from_value(recorded["drafts"].clone()).unwrap();
            assert_eq!(draft_tokens, expected, "{case}");
            let drawn = pair.step(&[&[newest][..], &draft_tokens].concat(), context);
            let right = draft_tokens
                .iter()
                .zip(&drawn)
                .take_while(|(draft_token, drawn)| draft_token == drawn)
                .count();
            assert_eq!((right, drawn[right] as usize), (number("accepted"), number("bonus")), "{case}");
            output.extend(&drawn[..=right]);
            (newest, context, row) = (drawn[right], context + right + 1, right as u32);
            (rounds, accepted) = (rounds + 1, accepted + right);
        }
        let greedy = reference.tensor(&format!("p{prompt}.greedy")).unwrap().data().to_vec();
        let greedy: Vec<u32> = greedy.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let same = output.len().min(greedy.len());
        assert_eq!(output[..same], greedy[..same], "p{prompt}");
    }
    let count = |key: &str| recorded[key].as_u64().unwrap() as usize;
    assert_eq!((rounds, accepted), (count("n_rounds"), count("n_accepted")));
}

#[test]
fn a_drafter_of_another_model_is_refused() {
    let assistant = ModelFile::open(file("gemma4-assistant/gemma4-assistant-f32.gguf")).unwrap();
    let spec = AssistantSpec::from_file(&assistant).unwrap();
    for other in ["llama/llama-f32.gguf", "gemma3/gemma3-f32.gguf"] {
        let mut decoder = test_models::load(&file(other), (KvType::F16, ActivationMode::Int8));
        let refused = decoder.load_assistant(&spec, (&assistant, &assistant), 4);
        assert!(matches!(refused, Err(Error::Config { option: "spec", .. })), "{other}: {refused:?}");
    }
    assert!(AssistantSpec::from_file(&ModelFile::open(file("gemma4/gemma4-f32.gguf")).unwrap()).is_err());
}
