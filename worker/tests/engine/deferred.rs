//! Draft tokens: several rows of a sequence in one step, of which the accepted number is known only
//! afterwards.

use crate::harness::{options, path, prompt};
use engine::decoder::{CacheKind, Decoder};
use kernels::backend::{BlockTable, MAX_DEFERRED_ROWS, StepInput, StepSequence, StepState};
use kvasir_worker::load;

const MODELS: [&str; 6] = [
    "tiny/qwen35/qwen35-f32",
    "tiny/qwen3next/qwen3next-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "hf/falcon_h1",
    "hf/lfm2_moe",
    "tiny/granitehybrid/granitehybrid-f32+bf16",
];
/// Position of the sequence; not a power of two, and not on a block boundary.
const CONTEXT: usize = 21;
const POSITIONS: usize = CONTEXT + MAX_DEFERRED_ROWS + 2;

/// A decoder with the blocks and slots of one sequence.
struct Stage {
    decoder: Decoder,
    /// For each KV group, its blocks as offset / 64.
    blocks: Vec<Vec<u32>>,
    first_slot: u32,
    slot: u32,
}

impl Stage {
    fn new(model: &str) -> Self {
        let options = options(model);
        let mut decoder = load::decoder(&path(model), &options, &mut |_, _| {}).unwrap();
        let (mut end, mut blocks, mut slots) = (0, Vec::new(), (0, 0));
        for group in decoder.groups() {
            let stride = (group.block_bytes / 64) as u32;
            let count = match group.kind {
                CacheKind::State => {
                    slots = (end, stride);
                    2
                }
                CacheKind::Full | CacheKind::Sliding(_) => {
                    let count = POSITIONS.div_ceil(options.block_tokens) as u32;
                    blocks.push((0..count).map(|block| end + block * stride).collect());
                    count
                }
            };
            end += count * stride;
        }
        decoder.allocate_kv(end as usize * 64).unwrap();
        let (first_slot, slot) = slots;
        Self { decoder, blocks, first_slot, slot }
    }

    /// The logits of `tokens` after `context` positions, as bits.
    fn step(
        &mut self,
        tokens: &[u32],
        context: usize,
        read: Option<u32>,
        write: u32,
        deferred: bool,
    ) -> Vec<Vec<u32>> {
        let offset = |slot| self.first_slot + slot * self.slot;
        let state = StepState { read: read.map(offset), write: offset(write), exports: Vec::new(), deferred };
        let sequence = StepSequence { rows: 0..tokens.len(), context, segment_start: None };
        let tables: Vec<_> = self.blocks.iter().map(|blocks| vec![BlockTable::Paged(blocks)]).collect();
        let step = StepInput { tokens, sequences: &[sequence], tables: &tables, states: &[state] };
        self.decoder.forward(&[], &step).unwrap();
        let rows: Vec<u32> = (0..tokens.len() as u32).collect();
        let mut all = Vec::new();
        self.decoder
            .logits(&rows, &mut |_, row| all.push(row.iter().map(|x| x.to_bits()).collect()))
            .unwrap();
        all
    }
}

#[test]
fn any_number_of_draft_tokens_can_be_rejected() {
    for model in MODELS {
        let mut stage = Stage::new(model);
        let tokens = prompt(5, POSITIONS);
        let expected: Vec<_> = (0..POSITIONS)
            .map(|at| stage.step(&tokens[at..=at], at, (at > 0).then_some(0), 0, false).remove(0))
            .collect();
        stage.step(&tokens[..CONTEXT], 0, None, 0, false);
        for rows in 1..=MAX_DEFERRED_ROWS {
            for accepted in 0..=rows {
                let case = format!("{model}: {accepted} of {rows}");
                // The first `accepted` draft tokens are correct, the others are wrong.
                let mut draft_tokens = tokens[CONTEXT..CONTEXT + rows].to_vec();
                draft_tokens[accepted..].iter_mut().for_each(|token| *token = (*token + 7) % 256);
                let seen = stage.step(&draft_tokens, CONTEXT, Some(0), 1, true);
                assert!(seen[..accepted] == expected[CONTEXT..CONTEXT + accepted], "{case}: while drafting");
                assert!(seen.get(accepted).is_none_or(|row| *row != expected[CONTEXT + accepted]), "{case}");
                stage.decoder.accept(&[accepted]).unwrap();
                for at in CONTEXT + accepted..CONTEXT + accepted + 2 {
                    let next = stage.step(&tokens[at..=at], at, Some(1), 1, false).remove(0);
                    assert!(next == expected[at], "{case}: position {at}");
                }
            }
        }
        assert!(stage.decoder.accept(&[1]).is_err(), "{model}: nothing is deferred");
    }
}
