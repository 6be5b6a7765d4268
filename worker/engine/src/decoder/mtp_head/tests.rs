//! Compares every drafting round with an f64 reference of the equations.

use super::*;
use crate::test_models::{self, fixture};
use kernels::backend::{ActivationMode, KvType, StateExport};
use model::ModelFile;
use mtp_head_file::Block;
use reference::Reference;
use std::path::Path;

#[path = "../../../../tests/engine/mtp_head_file.rs"]
mod mtp_head_file;
mod reference;

const DRAFT_TOKENS: usize = 4;
/// Maximum difference between f32 and f64 of hidden states and logits, which are about 1.
const TOLERANCE: f64 = 2e-3;

/// A model with its MTP head, and one sequence with two state slots.
struct SingleSequence {
    decoder: Decoder,
    blocks: Vec<u32>,
    slots: [u32; 2],
    vocab: usize,
}

impl SingleSequence {
    fn new(path: &Path, positions: usize) -> Self {
        let mut decoder = test_models::load(path, (KvType::F32, ActivationMode::F32));
        let file = ModelFile::open(path).unwrap();
        let before: Vec<usize> = decoder.groups().iter().map(|group| group.block_bytes).collect();
        let spec = MtpHeadSpec::from_file(&file).unwrap().unwrap();
        decoder.load_mtp_head(&spec, &file, 3).unwrap();
        let bytes: Vec<usize> = decoder.groups().iter().map(|group| group.block_bytes).collect();
        assert!(before.iter().zip(&bytes).all(|(before, now)| before < now), "{before:?} {bytes:?}");
        let stride = (bytes[0] / UNIT) as u32;
        let count = positions.div_ceil(16) as u32;
        let state = (bytes[1] / UNIT) as u32;
        let slots = [count * stride, count * stride + state];
        decoder.allocate_kv((slots[1] + state) as usize * UNIT).unwrap();
        let vocab = decoder.spec().vocab;
        Self { decoder, blocks: (0..count).map(|at| at * stride).collect(), slots, vocab }
    }

    /// Computes tokens after `context`, with the state read from the first slot and written to the second.
    /// Returns the most likely next token of each, and their hidden states.
    fn step(&mut self, tokens: &[u32], context: usize, deferred: bool) -> (Vec<u32>, Vec<Vec<f32>>) {
        let sequence = StepSequence { rows: 0..tokens.len(), context, segment_start: None };
        let tables = [vec![BlockTable::Paged(&self.blocks)]];
        let read = (context > 0).then_some(self.slots[0]);
        let states = [StepState { read, write: self.slots[1], deferred, ..StepState::default() }];
        let input = StepInput { tokens, sequences: &[sequence], tables: &tables, states: &states };
        self.decoder.forward(&[], &input).unwrap();
        self.slots.reverse();
        let rows: Vec<u32> = (0..tokens.len() as u32).collect();
        let mut best = Vec::new();
        self.decoder.argmax(&rows, &mut best).unwrap();
        (best, self.decoder.hidden(&rows).unwrap())
    }
}

fn prompt(seed: u32, len: u32, vocab: usize) -> Vec<u32> {
    (0..len).map(|at| (seed * 7919 + at * at * 31 + at * 977) % vocab as u32).collect()
}

fn max_difference(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(got, expected)| (f64::from(*got) - expected).abs()).fold(0.0, f64::max)
}

fn rounds(path: &Path, chunks: &[usize], seed: u32) -> (usize, usize) {
    let mut alone = SingleSequence::new(path, 160);
    let mut reference = Reference::new(path);
    let tokens = prompt(seed, chunks.iter().sum::<usize>() as u32, alone.vocab);
    let (mut context, mut newest, mut hidden) = (0, 0, Vec::new());
    for len in chunks {
        let chunk = &tokens[context..context + len];
        let (best, rows) = alone.step(chunk, context, false);
        chunk.iter().zip(&rows).for_each(|(token, hidden)| reference.feed(*token, hidden));
        (context, newest, hidden) = (context + len, best[len - 1], rows[len - 1].clone());
    }
    let (mut right, mut all) = (0, 0);
    for round in 0..12 {
        let blocks = alone.blocks[..context.div_ceil(16)].to_vec();
        let tables = vec![BlockTable::Paged(&blocks)];
        let from = DraftFrom { token: newest, context, hidden: hidden.clone(), tables, most: DRAFT_TOKENS };
        let expected = reference.draft(newest, DRAFT_TOKENS);
        for (count, expected) in (1..).zip(&expected) {
            let drafted = alone.decoder.draft(std::slice::from_ref(&from), count).unwrap().remove(0);
            let case = format!("{}, round {round}, draft token {count}", path.display());
            assert!(max_difference(&drafted.hidden, &expected.hidden) < TOLERANCE, "{case}");
            let logits = alone.decoder.draft_logits(0).unwrap();
            assert!(max_difference(&logits, &expected.logits) < TOLERANCE, "{case}");
            let tokens: Vec<u32> = drafted.tokens;
            assert_eq!(tokens.last(), Some(&expected.token), "{case}, ahead by {}", expected.margin);
        }
        let draft_tokens: Vec<u32> = expected.iter().map(|draft_token| draft_token.token).collect();
        // Another sequence in the same block gets no draft tokens; in another block it gets the same ones.
        let elsewhere = DraftFrom { tables: vec![BlockTable::Paged(&blocks)], most: 2, ..from.clone() };
        let drafted = alone.decoder.draft(&[from.clone(), elsewhere], DRAFT_TOKENS).unwrap();
        assert_eq!(drafted[0].tokens, draft_tokens);
        let shares = !context.is_multiple_of(16);
        assert_eq!(drafted[1].tokens, draft_tokens[..if shares { 0 } else { 2 }]);
        let (best, rows) = alone.step(&[&[newest][..], &draft_tokens].concat(), context, true);
        let accepted =
            draft_tokens.iter().zip(&best).take_while(|(draft_token, drawn)| draft_token == drawn).count();
        alone.decoder.accept(&[accepted + 1]).unwrap();
        reference.feed(newest, &rows[0]);
        draft_tokens
            .iter()
            .zip(&rows[1..])
            .take(accepted)
            .for_each(|(token, row)| reference.feed(*token, row));
        (newest, hidden, context) = (best[accepted], rows[accepted].clone(), context + accepted + 1);
        (right, all) = (right + accepted, all + DRAFT_TOKENS);
    }
    (right, all)
}

#[test]
fn every_round_equals_the_equations() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = [
        ("qwen35", Block::Random),
        ("qwen35moe", Block::Whole),
        ("qwen3next", Block::Random),
        ("qwen35", Block::Telling),
    ];
    for (arch, block) in blocks {
        let path = mtp_head_file::write(arch, block, folder.path());
        let (mut right, mut all) = (0, 0);
        for (seed, chunks) in [&[5][..], &[1, 30, 9], &[48], &[16, 1, 1, 13]].into_iter().enumerate() {
            let counts = rounds(&path, chunks, seed as u32);
            (right, all) = (right + counts.0, all + counts.1);
        }
        assert_eq!(right > all / 8, block == Block::Telling, "{arch}, {block:?}: {right} of {all}");
        assert!(right < all, "{arch}, {block:?}: none was wrong");
    }
}

/// The hidden state in a slot is that of the last accepted row.
#[test]
fn the_saved_hidden_state_is_that_of_the_last_accepted_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = mtp_head_file::write("qwen35", Block::Random, folder.path());
    let past = |alone: &mut SingleSequence, slot: u32| {
        let width = alone.decoder.spec().hidden;
        let at = alone.decoder.mtp_head.as_ref().unwrap().past_at;
        let mut bytes = vec![0; width * 4];
        alone.decoder.backend.read_arena(slot + at, &mut bytes).unwrap();
        bytes
    };
    let mut alone = SingleSequence::new(&path, 64);
    let tokens = prompt(3, 20, alone.vocab);
    // One token at a time.
    let mut expected = Vec::new();
    for (context, token) in tokens.iter().enumerate() {
        alone.step(&[*token], context, false);
        let slot = alone.slots[0];
        expected.push(past(&mut alone, slot));
    }
    assert!(expected.windows(2).all(|pair| pair[0] != pair[1]));
    // With an export in the middle, then as draft tokens of which some are accepted.
    for accepted in 0..=6 {
        let mut alone = SingleSequence::new(&path, 64);
        let export = alone.slots[0];
        let sequence = StepSequence { rows: 0..14, context: 0, segment_start: None };
        let tables = [vec![BlockTable::Paged(&alone.blocks)]];
        let exports = vec![StateExport { row: 8, slot: export }];
        let states = [StepState { read: None, write: alone.slots[1], exports, deferred: false }];
        let input =
            StepInput { tokens: &tokens[..14], sequences: &[sequence], tables: &tables, states: &states };
        alone.decoder.forward(&[], &input).unwrap();
        assert_eq!(past(&mut alone, export), expected[8]);
        alone.slots.reverse();
        let slot = alone.slots[0];
        assert_eq!(past(&mut alone, slot), expected[13]);
        alone.step(&tokens[14..], 14, true);
        alone.decoder.accept(&[accepted]).unwrap();
        let slot = alone.slots[0];
        assert_eq!(past(&mut alone, slot), expected[13 + accepted]);
    }
}

#[test]
fn unusable_mtp_heads_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = mtp_head_file::write("qwen35", Block::Random, folder.path());
    let file = ModelFile::open(&path).unwrap();
    let spec = MtpHeadSpec::from_file(&file).unwrap().unwrap();
    let llama = fixture("tiny/llama/llama-f32.gguf");
    let mut decoder = test_models::load(&llama, (KvType::F16, ActivationMode::Int8));
    let refused = decoder.load_mtp_head(&spec, &file, 4);
    assert!(matches!(refused, Err(Error::Config { option: "spec", .. })), "{refused:?}");
    for other in ["tiny/qwen35/qwen35-f32.gguf", "tiny/llama/llama-f32.gguf"] {
        let file = ModelFile::open(fixture(other)).unwrap();
        assert_eq!(MtpHeadSpec::from_file(&file).unwrap(), None, "{other}");
    }
}
