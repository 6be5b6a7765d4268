use super::*;
use crate::step::{KvGroup, Step, StepLayout, StepLimits};
use crate::tests::sim::{Sim, assert_near, bits, numbers};
use kernels::attention::{BlockTable, Visible};
use kernels::backend::{KvTypes, StepInput};
use kernels::reference::attention::AttentionHead;
use std::num::NonZeroU32;

/// Bytes of each block before the layer's own part.
const LAYER_OFFSET: usize = 192;

const SHAPE: KvShape = KvShape {
    heads: 8,
    kv_heads: 2,
    head_dim: 64,
    v_head_dim: 64,
    latent: false,
    block_tokens: 16,
    kv_type: KvTypes::both(KvType::F16),
    window: None,
    causal: true,
};

/// A layer of a model, and sequences with their own query, key and value at every position.
struct Case {
    shape: KvShape,
    sinks: Option<Vec<f32>>,
    block: KvBlock,
    lengths: Vec<usize>,
    /// Blocks have another order in the arena than in the sequences.
    tables: Vec<Vec<u32>>,
    arena: Vec<u8>,
}

impl Case {
    fn new(shape: KvShape, lengths: &[usize]) -> Self {
        Self::with_common_start(shape, lengths, &vec![0; lengths.len()])
    }

    /// Each sequence starts with this number of the first one's keys and values, in its own blocks.
    fn with_common_start(shape: KvShape, lengths: &[usize], first: &[usize]) -> Self {
        let block = KvBlock::new(&shape).unwrap();
        let stride = LAYER_OFFSET + block.bytes();
        let blocks: Vec<usize> = lengths.iter().map(|len| len.div_ceil(shape.block_tokens)).collect();
        let total: usize = blocks.iter().sum();
        // Unwritten keys are NaN, because no kernel may read them.
        let mut arena = vec![0xff; total * stride];
        let mut next = 0;
        let tables = lengths.iter().zip(&blocks).enumerate().map(|(sequence, (len, blocks))| {
            let blocks_in_order = (0..*blocks).map(|i| (next + i) * 7 % total.max(1));
            let blocks_in_order: Vec<usize> = match total % 7 {
                0 => (next..next + blocks).rev().collect(),
                _ => blocks_in_order.collect(),
            };
            next += blocks;
            for position in 0..*len {
                let sequence = if position < first[sequence] { 0 } else { sequence };
                let at = blocks_in_order[position / shape.block_tokens] * stride + LAYER_OFFSET;
                let k = numbers(key_seed(sequence), position << 12, shape.kv_heads * shape.head_dim);
                let v = numbers(value_seed(sequence), position << 12, shape.kv_heads * shape.v_head_dim);
                block.put(&mut arena[at..][..block.bytes()], position % shape.block_tokens, &k, &v);
            }
            blocks_in_order.iter().map(|index| (index * stride / 64) as u32).collect()
        });
        let tables = tables.collect();
        Self { shape, sinks: None, block, lengths: lengths.to_vec(), tables, arena }
    }

    fn q(&self, sequence: usize, position: usize) -> Vec<f32> {
        numbers(30 + sequence as u64, position << 12, self.shape.heads * self.shape.head_dim)
    }

    /// Returns the expected output of a row.
    fn expected(&self, sequence: usize, position: usize) -> Vec<f64> {
        let KvShape { heads, kv_heads, head_dim, v_head_dim, block_tokens, window, causal, .. } = self.shape;
        let start = window.map_or(0, |window| (position + 1).saturating_sub(window));
        let end = match (causal, window) {
            (true, _) => position + 1,
            (false, window) => {
                window.map_or(usize::MAX, |window| position + window).min(self.lengths[sequence])
            }
        };
        let cached: Vec<_> = (start..end)
            .map(|key| {
                let at = self.tables[sequence][key / block_tokens] as usize * 64 + LAYER_OFFSET;
                self.block.get(&self.arena[at..][..self.block.bytes()], key % block_tokens)
            })
            .collect();
        let q = self.q(sequence, position);
        let head = |head: usize| {
            let kv_head = head / (heads / kv_heads);
            let keys: Vec<(&[f32], &[f32])> = cached
                .iter()
                .map(|(k, v)| {
                    (&k[kv_head * head_dim..][..head_dim], &v[kv_head * v_head_dim..][..v_head_dim])
                })
                .collect();
            let (q, sink) = (&q[head * head_dim..][..head_dim], self.sinks.as_ref().map(|sinks| sinks[head]));
            AttentionHead { q, keys: &keys, scale: 0.3, softcap: None, sink }.run()
        };
        (0..heads).flat_map(head).collect()
    }

    /// Returns the kernels' output for some positions of some sequences, in one step.
    fn run(&self, sim: &mut Sim, step_parts: &[(usize, Range<usize>)], scratch_bytes: usize) -> Vec<f32> {
        self.run_on(sim, step_parts, scratch_bytes, 1)
    }

    /// As [`Self::run`] on a device with this number of multiprocessors.
    fn run_on(
        &self,
        sim: &mut Sim,
        step_parts: &[(usize, Range<usize>)],
        scratch_bytes: usize,
        multiprocessors: usize,
    ) -> Vec<f32> {
        let compiled = sim.compiled(AttentionKernels::source(&self.shape).unwrap());
        let mut kernels = AttentionKernels::load(&mut sim.device, compiled, self.shape).unwrap();
        kernels.multiprocessors = multiprocessors;
        let (mut sequences, mut tables, mut q, mut rows) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let garbage = |table: &Vec<u32>| table.iter().copied().chain([0xdead_beef; 3]).collect::<Vec<_>>();
        let with_tails: Vec<_> = self.tables.iter().map(garbage).collect();
        for (sequence, positions) in step_parts {
            let next = rows + positions.len();
            sequences.push(StepSequence { rows: rows..next, context: positions.start, segment_start: None });
            tables.push(BlockTable::Paged(&with_tails[*sequence]));
            q.extend(positions.clone().flat_map(|position| self.q(*sequence, position)));
            rows = next;
        }
        let visible = match (self.shape.causal, self.shape.window) {
            (false, _) => Visible::Whole,
            (true, None) => Visible::Causal,
            (true, Some(window)) => Visible::Window(NonZeroU32::new(window as u32).unwrap()),
        };
        let bytes = LAYER_OFFSET + self.block.bytes();
        let limits = StepLimits { rows, sequences: step_parts.len(), exports: 0, table_entries: 1000 };
        let group = KvGroup { block_tokens: self.shape.block_tokens, bytes, visible };
        let mut step = Step::new(StepLayout::new(limits, &[group]));
        let tokens = vec![0; rows];
        let (sequences, tables) = (&sequences[..], &[tables][..]);
        step.fill(&StepInput { tokens: &tokens, sequences, tables, states: &[] }, self.arena.len()).unwrap();
        let at = sim.bytes(step.bytes());
        let out_len = rows * self.shape.heads * self.shape.v_head_dim;
        let call = AttentionCall {
            q: sim.values(&q),
            out: sim.room(4 * out_len),
            scratch: sim.room(scratch_bytes),
            arena: sim.bytes(&self.arena),
            step: &step.layout().at(at),
            sequences: step.sequences(),
            group: 0,
            layer_offset: LAYER_OFFSET,
            sinks: self.sinks.as_ref().map(|sinks| sim.values(sinks)),
            scale: 0.3,
        };
        kernels.launch(&mut sim.device, &call, scratch_bytes).unwrap();
        sim.read_values(call.out, out_len)
    }

    /// Compares some rows with the definition and returns the kernels' output.
    fn check(&self, sim: &mut Sim, step_parts: &[(usize, Range<usize>)]) -> Vec<f32> {
        let got = self.run(sim, step_parts, 1 << 20);
        let rows =
            step_parts.iter().flat_map(|(sequence, rows)| rows.clone().map(move |row| (*sequence, row)));
        let expected: Vec<f64> =
            rows.flat_map(|(sequence, position)| self.expected(sequence, position)).collect();
        assert_near(&got, &expected, 2e-5, &format!("{:?} for {}: {step_parts:?}", self.shape, sim.arch));
        got
    }
}

fn key_seed(sequence: usize) -> u64 {
    10 + sequence as u64
}

fn value_seed(sequence: usize) -> u64 {
    20 + sequence as u64
}

/// Last rows of sequences that end near the end of a block, in one step.
#[test]
fn decoding_rows_see_their_own_sequences() {
    let shapes = [
        SHAPE,
        KvShape {
            kv_type: KvType::Q8_0.into(),
            heads: 3,
            kv_heads: 1,
            head_dim: 40,
            v_head_dim: 24,
            ..SHAPE
        },
        KvShape { kv_type: KvType::F32.into(), heads: 2, block_tokens: 32, head_dim: 20, ..SHAPE },
        KvShape { heads: 16, kv_heads: 1, head_dim: 96, v_head_dim: 128, block_tokens: 64, ..SHAPE },
    ];
    for mut sim in Sim::each() {
        for shape in shapes {
            let lengths = [1, shape.block_tokens - 1, shape.block_tokens, shape.block_tokens + 1];
            let step_parts: Vec<_> = lengths.iter().enumerate().map(|(i, len)| (i, len - 1..*len)).collect();
            Case::new(shape, &lengths).check(&mut sim, &step_parts);
        }
    }
}

#[test]
fn wide_heads_and_groups_of_all_sizes() {
    for mut sim in Sim::each() {
        for (heads, kv_heads, head_dim, v_head_dim, kv_type) in [
            (1, 1, 256, 256, KvTypes::both(KvType::F16)),
            (8, 1, 512, 320, KvTypes::both(KvType::Q8_0)),
            (8, 1, 128, 80, KvTypes::both(KvType::F16)),
            (4, 1, 72, 64, KvTypes::both(KvType::Fp8)),
            (3, 1, 100, 128, KvTypes { k: KvType::F16, v: KvType::Fp8 }),
            (2, 1, 64, 64, KvTypes { k: KvType::Q8_0, v: KvType::F32 }),
        ] {
            let shape = KvShape { heads, kv_heads, head_dim, v_head_dim, kv_type, ..SHAPE };
            Case::new(shape, &[37]).check(&mut sim, &[(0, 36..37)]);
        }
    }
}

#[test]
fn windows_sinks_and_encoders() {
    for mut sim in Sim::each() {
        let windowed = KvShape { window: Some(7), ..SHAPE };
        let mut case = Case::new(windowed, &[20, 3]);
        case.sinks = Some(numbers(5, 0, 8).iter().map(|x| 3.0 * x).collect());
        case.check(&mut sim, &[(0, 18..20), (1, 2..3)]);
        let encoder = KvShape { causal: false, heads: 2, ..SHAPE };
        Case::new(encoder, &[9, 1]).check(&mut sim, &[(0, 0..9), (1, 0..1)]);
        for kv_type in [KvType::F32, KvType::F16] {
            let around = KvShape { window: Some(4), kv_type: kv_type.into(), ..encoder };
            Case::new(around, &[13, 1]).check(&mut sim, &[(0, 0..13), (1, 0..1)]);
        }
    }
}

/// Whole blocks of rows, several splits, and scratch memory for few rows at a time: none of these changes a
/// bit.
#[test]
fn a_row_does_not_depend_on_the_rows_computed_with_it() {
    let small = KvShape { heads: 2, kv_heads: 1, head_dim: 16, v_head_dim: 16, block_tokens: 64, ..SHAPE };
    let end = 2 * SPLIT + 5;
    for (window, arch) in [(None, 0), (Some(SPLIT + 3), 1)] {
        let mut sim = Sim::each().nth(arch).unwrap();
        let shape = KvShape { window, ..small };
        let case = Case::new(shape, &[end, 70, SPLIT + 1]);
        let rows = [(0, end - 7..end), (1, 69..70), (2, SPLIT - 2..SPLIT + 1)];
        let together = case.check(&mut sim, &rows);
        let width = shape.heads * shape.v_head_dim;
        let mut alone = Vec::new();
        for (sequence, positions) in rows {
            for position in positions {
                alone.extend(case.run(&mut sim, &[(sequence, position..position + 1)], 1 << 12));
            }
        }
        assert_eq!(alone.len(), 11 * width);
        assert_eq!(bits(&alone), bits(&together));
        let cut = [(1, 69..70), (0, end - 7..end - 3), (2, SPLIT - 1..SPLIT + 1)];
        let cut = case.run(&mut sim, &cut, 3 * 2 * 18 * 4 * 2);
        assert_eq!(bits(&cut[..width]), bits(&together[7 * width..8 * width]));
        assert_eq!(bits(&cut[width..5 * width]), bits(&together[..4 * width]));
        assert_eq!(bits(&cut[5 * width..]), bits(&together[9 * width..]));
    }
}

/// A prompt's rows, in the kernel for prompts: they are near the definition, and have the bits of the kernel for one
/// split and of single rows, however the prompt is cut. The kernel for prompts needs no scratch memory.
#[test]
fn a_prompt_has_the_bits_of_single_rows() {
    const END: usize = 2 * SPLIT + 40;
    const MANY: usize = usize::MAX;
    let window = |window| KvShape { window: Some(window), ..SHAPE };
    let shapes = [
        SHAPE,
        KvShape { heads: 5, kv_heads: 1, head_dim: 96, v_head_dim: 128, block_tokens: 64, ..SHAPE },
        KvShape { heads: 2, kv_heads: 2, head_dim: 128, v_head_dim: 75, ..window(SPLIT + 3) },
        KvShape { heads: 4, kv_heads: 1, head_dim: 256, v_head_dim: 200, block_tokens: 32, ..SHAPE },
        KvShape { heads: 16, kv_heads: 1, head_dim: 24, v_head_dim: 8, ..window(70) },
        KvShape { heads: 1, kv_heads: 1, head_dim: 40, v_head_dim: 56, ..SHAPE },
    ];
    for mut sim in Sim::each() {
        for shape in shapes {
            let mut case = Case::new(shape, &[END, 70]);
            case.sinks = Some(numbers(5, 0, shape.heads).iter().map(|x| 3.0 * x).collect());
            let width = shape.heads * shape.v_head_dim;
            let step = [(0, END - 41..END), (1, 3..70)];
            let what = format!("{shape:?} for {}", sim.arch);
            let prompt = case.run(&mut sim, &step, 0);
            let expected: Vec<f64> = [(0, END - 41), (0, END - 1), (1, 3), (1, 69)]
                .into_iter()
                .flat_map(|(sequence, position)| case.expected(sequence, position))
                .collect();
            let row = |row: usize| &prompt[row * width..(row + 1) * width];
            assert_near(&[row(0), row(40), row(41), row(107)].concat(), &expected, 2e-5, &what);
            let splits = case.run_on(&mut sim, &step, 1 << 20, MANY);
            assert_eq!(bits(&prompt), bits(&splits), "{what}");
            // Tiles begin with other rows.
            let cut = case.run(&mut sim, &[(1, 10..70), (0, END - 30..END)], 0);
            let same = [&prompt[(41 + 7) * width..], &prompt[11 * width..41 * width]].concat();
            assert_eq!(bits(&cut), bits(&same), "{what}");
            for at in [0, 17, 40] {
                let position = END - 41 + at;
                let alone = case.run(&mut sim, &[(0, position..position + 1)], 1 << 16);
                assert_eq!(bits(&alone), bits(row(at)), "row {position}, {what}");
            }
        }
        // Rows that see all of their sequence, and more of them than a step of the search for groups takes.
        let whole = KvShape { heads: 1, kv_heads: 1, causal: false, ..SHAPE };
        let case = Case::new(whole, &[SPLIT + 9, 66]);
        let step = [(0, 0..SPLIT + 9), (1, 0..66)];
        let prompt = case.run(&mut sim, &step, 0);
        assert_near(&prompt[..64], &case.expected(0, 0), 2e-5, "the first row of a whole text");
        assert_eq!(bits(&prompt), bits(&case.run_on(&mut sim, &step, 1 << 20, MANY)));
    }
}

/// Sequences whose caches begin with the same blocks read these once, for as many rows at a time as a tile
/// has room for. Their rows have the same bits as with copies of those blocks.
#[test]
fn a_common_beginning_of_sequences_is_read_once() {
    const LONG: usize = 2 * SPLIT;
    let shape = KvShape { heads: 4, kv_heads: 1, block_tokens: 64, ..SHAPE };
    let lengths = [LONG + 70, LONG + 3, SPLIT + 9, 30, LONG + 3, LONG + 70, LONG + 1, SPLIT];
    // The last one ends with the split, so that it sees no whole split that it shares.
    let first = [0, LONG, SPLIT, 0, LONG, LONG + 64, LONG, SPLIT - 64];
    for mut sim in Sim::each() {
        let mut case = Case::with_common_start(shape, &lengths, &first);
        let step_parts: Vec<_> = lengths.iter().enumerate().map(|(i, len)| (i, len - 1..*len)).collect();
        let read = |case: &Case, sim: &mut Sim, scratch| {
            let before = sim.device.machine().counts().global_read;
            let found = bits(&case.run(sim, &step_parts, scratch));
            (found, (sim.device.machine().counts().global_read - before) as usize)
        };
        let (own, all) = read(&case, &mut sim, 1 << 20);
        for (sequence, positions) in first.iter().enumerate() {
            let blocks = positions / shape.block_tokens;
            let (beginning, tables) = case.tables.split_at_mut(1);
            if sequence > 0 {
                tables[sequence - 1][..blocks].copy_from_slice(&beginning[0][..blocks]);
            }
        }
        let (shared, less) = read(&case, &mut sim, 1 << 20);
        assert_eq!(shared, own);
        // Five sequences share two splits; four of them are processed together. The sixth sequence of the
        // first split is processed with the fifth.
        let split = SPLIT / shape.block_tokens * case.block.bytes();
        assert!(all - less >= 7 * split && all - less < 8 * split, "{all} and {less}, {split} each");
        case.check(&mut sim, &step_parts);
        // Split into launches in the middle of rows that share blocks.
        let (cut, _) = read(&case, &mut sim, 3 * 4 * 3 * 66 * 4);
        assert_eq!(cut, own);
    }
}

/// Lane instructions for each byte of keys and values, counted in PTX, of which a quarter never becomes
/// machine code. More than about five make an H200 compute-bound instead of memory-bound; a GB10 has time
/// for sixty.
#[test]
fn decoding_is_within_the_instruction_budget() {
    let mut sim = Sim::each().next().unwrap();
    let mut found = Vec::new();
    for (kv_type, budget) in [(KvType::F16, 2.2), (KvType::Q8_0, 19.0)] {
        let shape = KvShape {
            kv_type: kv_type.into(),
            heads: 4,
            kv_heads: 1,
            head_dim: 128,
            v_head_dim: 128,
            ..SHAPE
        };
        let case = Case::new(shape, &[SPLIT]);
        let before = sim.device.machine().counts().lane_instructions;
        case.run(&mut sim, &[(0, SPLIT - 1..SPLIT)], 1 << 12);
        let instructions = sim.device.machine().counts().lane_instructions - before;
        let bytes = SPLIT / shape.block_tokens * case.block.bytes();
        found.push((kv_type.name(), instructions as f64 / bytes as f64, budget));
    }
    assert!(found.iter().all(|(_, found, budget)| found <= budget), "{found:.2?}");
}

#[test]
fn unsupported_shapes_are_refused() {
    let refused = |shape: KvShape| AttentionKernels::source(&shape).unwrap_err();
    assert_eq!(refused(KvShape { window: Some(0), ..SHAPE }), Error::EmptyWindow);
    let window = refused(KvShape { window: Some(3), causal: false, head_dim: 65, ..SHAPE });
    assert!(matches!(window, Error::Unsupported { .. }));
    assert!(matches!(refused(KvShape { head_dim: 513, ..SHAPE }), Error::KvLayout { .. }));
}
