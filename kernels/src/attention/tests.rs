use std::num::{NonZeroU32, NonZeroUsize};

use proptest::prelude::*;

use super::write::{e4m3, rotate};
use super::*;
use crate::pool::{Pool, PoolConfig};
use crate::reference::attention::AttentionHead;

mod exactness;
mod spans;

/// Deterministic numbers in -1..1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// The nearest number of E4M3, ties to an even mantissa.
fn nearest_e4m3(x: f32) -> f32 {
    let step = 2f32.powi(x.abs().log2().floor().max(-6.0) as i32 - 3);
    ((x / step).round_ties_even() * step).clamp(-448.0, 448.0)
}

fn pool(threads: usize) -> Pool {
    Pool::new(PoolConfig::new(NonZeroUsize::new(threads).unwrap())).unwrap()
}

/// One sequence: all its keys, values and queries.
struct Sequence {
    q: Vec<Vec<f32>>,
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

/// A model's attention and some sequences.
struct World {
    shape: AttentionShape,
    sequences: Vec<Sequence>,
    scale: f32,
    softcap: Option<f32>,
    sinks: Option<Vec<f32>>,
    /// Positions of a sequence whose rows see each other.
    spans: Vec<(u32, std::ops::Range<u32>)>,
}

const LAYER_OFFSET: usize = 192;

impl World {
    fn new(shape: AttentionShape, lengths: &[usize], seed: u64) -> Self {
        let mut noise = Noise(seed);
        let layout = shape.layout;
        let sequences = lengths.iter().map(|len| {
            let mut rows = |width: usize| (0..*len).map(|_| noise.floats(width)).collect();
            Sequence {
                q: rows(shape.heads * layout.head_dim()),
                k: rows(layout.kv_heads() * layout.head_dim()),
                v: rows(layout.kv_heads() * layout.v_head_dim()),
            }
        });
        let sequences = sequences.collect();
        let scale = 3.0 / (layout.head_dim() as f32).sqrt();
        Self { shape, sequences, scale, softcap: None, sinks: None, spans: Vec::new() }
    }

    /// The span of a row, or an empty one.
    fn span(&self, row: QueryRow) -> (u32, u32) {
        let of = |(sequence, span): &&(u32, std::ops::Range<u32>)| {
            *sequence == row.sequence && span.contains(&row.position)
        };
        self.spans.iter().find(of).map_or((0, 0), |(_, span)| (span.start, span.end))
    }

    fn blocks(&self, sequence: usize) -> usize {
        self.sequences[sequence].k.len().div_ceil(self.shape.layout.block_tokens())
    }

    /// The value after storage in the cache's element type: the reference must use the same keys and values.
    fn stored(&self, x: &[f32], width: usize, ty: KvType, rotation: usize) -> Vec<f32> {
        let scale = |x: f32| half::f16::from_f32(x).to_f32();
        let largest = |xs: &[f32]| xs.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let q8 = |xs: &[f32]| {
            let scale = scale(largest(xs) / 127.0);
            xs.iter().map(|x| (x * (1.0 / scale)).round_ties_even() * scale).collect::<Vec<_>>()
        };
        let q4 = |xs: &[f32]| {
            let farthest = xs.iter().copied().reduce(|m, x| if x.abs() > m.abs() { x } else { m }).unwrap();
            let scale = scale(farthest / -8.0);
            xs.iter()
                .map(|x| (x * (1.0 / scale)).round_ties_even().clamp(-8.0, 7.0) * scale)
                .collect::<Vec<_>>()
        };
        let fp8 = |head: &[f32]| {
            let scale = scale(largest(head) / 448.0);
            head.iter().map(|x| nearest_e4m3(x * (1.0 / scale)) * scale).collect::<Vec<_>>()
        };
        match ty {
            KvType::F32 => x.to_vec(),
            KvType::F16 => x.iter().map(|x| half::f16::from_f32(*x).to_f32()).collect(),
            KvType::Q8_0 => x.chunks(width).flat_map(|head| head.chunks(32).flat_map(q8)).collect(),
            KvType::Fp8 => x.chunks(width).flat_map(fp8).collect(),
            KvType::Q4_0 => x
                .chunks(width)
                .flat_map(|head| {
                    let mut head = head.to_vec();
                    rotate(&mut head, rotation);
                    let mut stored: Vec<f32> = head.chunks(32).flat_map(q4).collect();
                    rotate(&mut stored, rotation);
                    stored
                })
                .collect(),
        }
    }

    fn reference(&self, sequence: usize, position: usize) -> Vec<f64> {
        let layout = &self.shape.layout;
        let (width, v_width) = (layout.head_dim(), layout.v_head_dim());
        let s = &self.sequences[sequence];
        let seen = match self.shape.visible {
            Visible::Causal => 0..position + 1,
            Visible::Window(w) => (position + 1).saturating_sub(w.get() as usize)..position + 1,
            Visible::Whole => 0..s.k.len(),
            Visible::Around(w) => {
                let w = w.get() as usize;
                (position + 1).saturating_sub(w)..(position + w).min(s.k.len())
            }
        };
        let row = QueryRow { sequence: sequence as u32, position: position as u32 };
        let seen = match self.span(row) {
            (0, 0) => seen,
            (from, to) => seen.start.min(from as usize)..seen.end.max(to as usize),
        };
        let types = layout.types();
        let k: Vec<_> =
            s.k[seen.clone()].iter().map(|k| self.stored(k, width, types.k, layout.rotation(true))).collect();
        let v: Vec<_> = match layout.is_latent() {
            true => k
                .iter()
                .map(|k| k.chunks(width).flat_map(|k| &k[width - v_width..]).copied().collect())
                .collect(),
            false => {
                s.v[seen].iter().map(|v| self.stored(v, v_width, types.v, layout.rotation(false))).collect()
            }
        };
        let group = self.shape.heads / layout.kv_heads();
        (0..self.shape.heads)
            .flat_map(|head| {
                let h = head / group;
                let keys: Vec<_> = k
                    .iter()
                    .zip(&v)
                    .map(|(k, v)| (&k[h * width..(h + 1) * width], &v[h * v_width..(h + 1) * v_width]))
                    .collect();
                AttentionHead {
                    q: &s.q[position][head * width..(head + 1) * width],
                    keys: &keys,
                    scale: self.scale,
                    softcap: self.softcap,
                    sink: self.sinks.as_ref().map(|sinks| sinks[head]),
                }
                .run()
            })
            .collect()
    }
}

/// An arena and the blocks of each sequence in it.
struct Memory {
    bytes: AlignedBuf<u8>,
    tables: Vec<Vec<u32>>,
    contiguous: Option<(u32, u32)>,
}

#[derive(Clone, Copy, PartialEq)]
enum BlockOrder {
    Contiguous,
    Paged,
    Permuted(u64),
}

impl Memory {
    /// Fills memory with NaN, then writes the first `lengths` positions of each sequence.
    fn new(world: &World, lengths: &[usize], block_order: BlockOrder, isa: Isa) -> Self {
        let layout = &world.shape.layout;
        let stride = (LAYER_OFFSET + layout.bytes()).next_multiple_of(64);
        let blocks: Vec<usize> = (0..world.sequences.len()).map(|s| world.blocks(s)).collect();
        let total: usize = blocks.iter().sum();
        let mut order: Vec<usize> = (0..total).collect();
        if let BlockOrder::Permuted(seed) = block_order {
            let mut noise = Noise(seed);
            for i in (1..total).rev() {
                order.swap(i, noise.below(i + 1));
            }
        }
        let mut next = order.into_iter().map(|block| (block * stride / 64) as u32);
        let tables: Vec<Vec<u32>> = blocks.iter().map(|n| next.by_ref().take(*n).collect()).collect();
        let mut bytes = AlignedBuf::zeroed(total * stride + 64);
        bytes.fill(0xff);
        let mut memory = Self {
            bytes,
            tables,
            contiguous: (block_order == BlockOrder::Contiguous).then_some((0, (stride / 64) as u32)),
        };
        for (s, len) in lengths.iter().enumerate() {
            memory.write(world, s, 0..*len, isa);
        }
        memory
    }

    fn write(&mut self, world: &World, sequence: usize, positions: std::ops::Range<usize>, isa: Isa) {
        let layout = &world.shape.layout;
        for p in positions {
            let tokens = layout.block_tokens();
            let start = self.tables[sequence][p / tokens] as usize * 64 + LAYER_OFFSET;
            let block = &mut self.bytes[start..start + layout.bytes()];
            let s = &world.sequences[sequence];
            let v = if layout.is_latent() { &[][..] } else { &s.v[p] };
            kv_write(isa, layout, block, p % tokens, &s.k[p], v).unwrap();
        }
    }

    fn placements(&self) -> Vec<BlockTable<'_>> {
        let placement = |table: &'_ Vec<u32>| match self.contiguous {
            Some((_, stride)) => BlockTable::Contiguous { first: table[0], stride },
            None => BlockTable::Paged(&[]),
        };
        match self.contiguous {
            Some(_) => self.tables.iter().map(placement).collect(),
            None => self.tables.iter().map(|table| BlockTable::Paged(table)).collect(),
        }
    }
}

/// Runs one step and returns the result of each row.
fn step(world: &World, memory: &mut Memory, rows: &[QueryRow], pool: &Pool, isa: Isa) -> Vec<Vec<f32>> {
    let mut bytes = std::mem::take(&mut memory.bytes);
    let placements = memory.placements();
    let spans: Vec<_> = rows.iter().map(|row| world.span(*row)).collect();
    let plan = StepPlan::with_spans(world.shape, rows, &spans, &placements, pool.threads()).unwrap();
    let q: Vec<f32> = rows
        .iter()
        .flat_map(|row| world.sequences[row.sequence as usize].q[row.position as usize].iter().copied())
        .collect();
    let width = world.shape.heads * world.shape.layout.v_head_dim();
    let mut out = vec![f32::NAN; rows.len() * width];
    let view = ArenaView::new(&mut bytes).unwrap();
    let call = AttentionCall {
        arena: &view,
        layer_offset: LAYER_OFFSET,
        scale: world.scale,
        softcap: world.softcap,
        sinks: world.sinks.as_deref(),
    };
    let mut scratch = AttentionScratch::default();
    attention(pool, isa, &plan, &call, &q, &mut out, &mut scratch).unwrap();
    memory.bytes = bytes;
    out.chunks(width).map(<[f32]>::to_vec).collect()
}

fn rows_of(sequence: usize, positions: std::ops::Range<usize>) -> Vec<QueryRow> {
    positions.map(|p| QueryRow { sequence: sequence as u32, position: p as u32 }).collect()
}

fn assert_close(world: &World, rows: &[QueryRow], out: &[Vec<f32>]) {
    for (row, out) in rows.iter().zip(out) {
        let expected = world.reference(row.sequence as usize, row.position as usize);
        for (i, (got, expected)) in out.iter().zip(&expected).enumerate() {
            let error = (f64::from(*got) - expected).abs();
            assert!(error <= 3e-6, "row {row:?} element {i}: {got} is not {expected}");
        }
    }
}

fn shape(
    ty: impl Into<KvTypes>,
    tokens: usize,
    heads: usize,
    kv: usize,
    dims: (usize, usize),
    window: u32,
) -> AttentionShape {
    let layout = KvLayout::new(ty, tokens, kv, dims.0, dims.1).unwrap();
    AttentionShape {
        layout,
        heads,
        visible: NonZeroU32::new(window).map_or(Visible::Causal, Visible::Window),
    }
}

/// Each type for both, and types apart.
const TYPES: [KvTypes; 8] = [
    KvTypes::both(KvType::F32),
    KvTypes::both(KvType::F16),
    KvTypes::both(KvType::Q8_0),
    KvTypes::both(KvType::Fp8),
    KvTypes::both(KvType::Q4_0),
    KvTypes { k: KvType::Q8_0, v: KvType::Q4_0 },
    KvTypes { k: KvType::F16, v: KvType::Fp8 },
    KvTypes { k: KvType::Q4_0, v: KvType::F32 },
];

/// All 256 codes, the middles between neighbours, and values next to these.
#[test]
fn e4m3_is_the_nearest_value() {
    for isa in Isa::available() {
        let codes: Vec<u8> = (0..=255).filter(|code| code & 0x7f != 0x7f).chain([0, 0]).collect();
        let mut values = Vec::new();
        for sixteen in codes.as_chunks::<16>().0 {
            struct Load<'a>(&'a [u8; 16], &'a mut Vec<f32>);
            impl crate::simd::Kernel for Load<'_> {
                type Output = ();
                fn run<S: crate::simd::Simd>(self, s: S) {
                    let mut out = [0.0; 16];
                    // SAFETY: sixteen bytes.
                    s.put(unsafe { s.load_e4m3(self.0.as_ptr()) }, &mut out);
                    self.1.extend(out);
                }
            }
            dispatch(isa, Load(sixteen, &mut values));
        }
        for (code, value) in codes.iter().zip(&values) {
            assert_eq!(nearest_e4m3(*value), *value, "{isa}: {code}");
            assert_eq!(e4m3(*value), *code, "{isa}: {value}");
        }
        let largest = values.iter().copied().fold(0.0, f32::max);
        assert_eq!((largest, values[1], values[0x38]), (448.0, 2f32.powi(-9), 1.0));
        values.sort_by(f32::total_cmp);
        for pair in values.windows(2) {
            let middle = pair[0].midpoint(pair[1]);
            for x in [middle, middle.next_down(), middle.next_up()] {
                let found = values[values.iter().position(|v| e4m3(*v) == e4m3(x)).unwrap()];
                assert_eq!(found, nearest_e4m3(x), "{x}");
            }
        }
    }
}

#[test]
fn a_rotation_is_the_hadamard_matrix_and_its_own_inverse() {
    for len in [1, 2, 8, 64, 512] {
        let row = Noise(len as u64).floats(2 * len);
        let mut turned = row.clone();
        rotate(&mut turned, len);
        for (run, turned) in row.chunks(len).zip(turned.chunks(len)) {
            for (i, found) in turned.iter().enumerate() {
                let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                let sum: f64 = run.iter().enumerate().map(|(j, x)| f64::from(*x) * sign(j)).sum();
                assert!((f64::from(*found) - sum / (len as f64).sqrt()).abs() < 1e-5);
            }
        }
        rotate(&mut turned, len);
        assert!(row.iter().zip(&turned).all(|(a, b)| (a - b).abs() < 1e-6));
    }
    let of = |dims: (usize, usize)| {
        let layout = shape(KvType::Q4_0, 16, 1, 1, dims, 0).layout;
        [layout.rotation(true), layout.rotation(false)]
    };
    assert_eq!([of((64, 128)), of((96, 80)), of((9, 576))], [[64, 128], [32, 16], [1, 64]]);
    let latent = shape(KvType::Q4_0, 16, 1, 1, (576, 512), 0).layout.latent().unwrap();
    assert_eq!(latent.rotation(true), 64);
    assert_eq!(shape(KvType::Q8_0, 16, 1, 1, (64, 64), 0).layout.rotation(true), 1);
}

#[test]
fn agrees_with_the_reference_for_every_head_width_type_and_isa() {
    let one = pool(1);
    for (i, dims) in
        [(16, 16), (24, 24), (32, 32), (64, 64), (80, 80), (128, 128), (256, 256), (40, 72), (9, 5)]
            .into_iter()
            .enumerate()
    {
        for ty in TYPES {
            let (heads, kv) = [(1, 1), (3, 1), (6, 2), (8, 2)][i % 4];
            let tokens = [16, 32, 64][i % 3];
            let world = World::new(shape(ty, tokens, heads, kv, dims, 0), &[150, 37], i as u64);
            let mut rows = rows_of(0, 126..150);
            rows.extend(rows_of(1, 35..37));
            let mut first = None;
            for isa in Isa::available() {
                let mut memory = Memory::new(&world, &[150, 37], BlockOrder::Permuted(7), isa);
                let out = step(&world, &mut memory, &rows, &one, isa);
                match &first {
                    None => assert_close(&world, &rows, &out),
                    Some(first) => assert_eq!(first, &out, "{isa} differs"),
                }
                first.get_or_insert(out);
            }
        }
    }
}

#[test]
fn values_of_a_latent_cache_are_the_ends_of_its_keys() {
    let one = pool(1);
    for (i, (heads, kv, dims)) in
        [(4, 1, (48, 32)), (16, 1, (80, 64)), (6, 2, (40, 24)), (1, 1, (33, 9)), (3, 1, (576, 512))]
            .into_iter()
            .enumerate()
    {
        for ty in TYPES {
            let paged = shape(ty, [16, 32, 64][i % 3], heads, kv, dims, 0);
            let latent = AttentionShape { layout: paged.layout.latent().unwrap(), ..paged };
            let v_bytes = latent.layout.bytes() * (dims.0 + dims.1) / dims.0;
            assert!(
                ![KvTypes::both(KvType::F32), KvTypes::both(KvType::F16)].contains(&ty)
                    || paged.layout.bytes() == v_bytes
            );
            let world = World::new(latent, &[150, 37], i as u64);
            let mut rows = rows_of(0, 126..150);
            rows.extend(rows_of(1, 36..37));
            let mut first = None;
            for isa in Isa::available() {
                let mut memory = Memory::new(&world, &[150, 37], BlockOrder::Permuted(7), isa);
                let out = step(&world, &mut memory, &rows, &one, isa);
                let alone = step(&world, &mut memory, &rows[..1], &pool(2), isa);
                assert_eq!(alone[0], out[0], "a row alone");
                match &first {
                    None => assert_close(&world, &rows, &out),
                    Some(first) => assert_eq!(first, &out, "{isa} differs"),
                }
                first.get_or_insert(out);
            }
        }
    }
    let wide = shape(KvType::F16, 16, 1, 1, (16, 24), 0).layout.latent();
    assert!(matches!(wide, Err(Error::KvLayout { .. })));
}

#[test]
fn windows_softcap_and_sinks_agree_with_the_reference() {
    let one = pool(1);
    for window in [1, 7, 130, 1025] {
        let mut world = World::new(shape(KvType::F16, 16, 4, 2, (32, 32), window), &[1300], 5);
        world.softcap = (window == 7).then_some(2.0);
        world.sinks = (window != 1).then(|| vec![0.5, -2.0, 3.0, 40.0]);
        let rows = rows_of(0, 1280..1300);
        let mut memory = Memory::new(&world, &[1300], BlockOrder::Paged, Isa::detect());
        let out = step(&world, &mut memory, &rows, &one, Isa::detect());
        assert_close(&world, &rows, &out);
        assert_close(&world, &rows[..1], &step(&world, &mut memory, &rows[..1], &one, Isa::detect()));
    }
}

#[test]
fn rows_that_see_their_whole_sequence_or_around_them_agree_with_the_reference_on_every_isa() {
    for (i, dims) in [(32, 32), (64, 64), (24, 40), (9, 5)].into_iter().enumerate() {
        // Types apart differ from others only in how a row's keys and values are read, which other tests cover.
        for ty in TYPES.into_iter().filter(|types| types.k == types.v) {
            let around = |w| NonZeroU32::new(w).map_or(Visible::Whole, Visible::Around);
            let visible = around([0, 70, 3, 9][i]);
            let shape = AttentionShape { visible, ..shape(ty, 16, 4, [1, 2, 4][i % 3], dims, 0) };
            // Lengths on both sides of group, tile and split borders. One decides whether work is cut by rows
            // or by splits; once is enough, because an emulated processor takes a minute for it.
            let longest = if i < 2 && ty == KvTypes::both(KvType::F16) { 1100 } else { 200 };
            let lengths = [1, 7, 8, 37, 129, longest];
            let mut world = World::new(shape, &lengths, i as u64);
            world.sinks = (i == 1).then(|| vec![0.5, -2.0, 3.0, 4.0]);
            let rows: Vec<_> = lengths.iter().enumerate().flat_map(|(s, len)| rows_of(s, 0..*len)).collect();
            let mut first: Option<Vec<Vec<f32>>> = None;
            for isa in Isa::available() {
                let mut memory = Memory::new(&world, &lengths, BlockOrder::Permuted(7), isa);
                for threads in [1, 3] {
                    let out = step(&world, &mut memory, &rows, &pool(threads), isa);
                    match &first {
                        None => {
                            let some: Vec<usize> = (0..rows.len()).step_by(13).collect();
                            let (rows, out): (Vec<_>, Vec<_>) =
                                some.iter().map(|row| (rows[*row], out[*row].clone())).unzip();
                            assert_close(&world, &rows, &out);
                        }
                        Some(first) => assert_eq!(first, &out, "{isa} with {threads} threads differs"),
                    }
                    first.get_or_insert(out);
                }
                // The sequence alone, and with its rows in another order.
                let whole = first.as_ref().unwrap();
                let alone = step(&world, &mut memory, &rows_of(4, 0..129), &pool(1), isa);
                assert_eq!(alone, whole[53..182]);
                let turned: Vec<_> = rows_of(3, 0..37).into_iter().rev().collect();
                let out = step(&world, &mut memory, &turned, &pool(1), isa);
                assert!(out.iter().rev().eq(&whole[16..53]));
            }
        }
    }
}

#[test]
fn a_part_of_a_sequence_is_refused_without_causality() {
    let shape = AttentionShape { visible: Visible::Whole, ..shape(KvType::F16, 16, 1, 1, (8, 8), 0) };
    let placements = [BlockTable::Paged(&[0, 8]), BlockTable::Paged(&[16])];
    let plan = |rows: &[QueryRow]| StepPlan::new(shape, rows, &placements, 1).map(|plan| plan.rows());
    assert_eq!(plan(&rows_of(0, 0..20)), Ok(20));
    let missing = |sequence, position| Err(Error::PartialSequence { sequence, position });
    assert_eq!(plan(&rows_of(0, 1..20)), missing(0, 0));
    assert_eq!(plan(&[rows_of(0, 0..3), rows_of(1, 0..2), rows_of(1, 3..5)].concat()), missing(1, 2));
    assert_eq!(plan(&rows_of(0, 0..33)), Err(Error::MissingBlock { sequence: 0, block: 2 }));
}

#[test]
fn shapes_and_placements_that_attention_cannot_serve_are_refused() {
    assert!(matches!(KvLayout::new(KvType::F16, 48, 1, 64, 64), Err(Error::KvLayout { .. })));
    assert!(matches!(KvLayout::new(KvType::F16, 16, 1, 0, 64), Err(Error::KvLayout { .. })));
    let attention_shape = shape(KvType::F16, 16, 4, 2, (64, 64), 0);
    let row = |position| QueryRow { sequence: 0, position };
    let table = [4, NO_BLOCK, 400];
    let placements = [BlockTable::Paged(&table)];
    let plan =
        |rows: &[QueryRow]| StepPlan::new(attention_shape, rows, &placements, 1).map(|plan| plan.rows());
    assert_eq!(plan(&[row(15)]), Ok(1));
    assert_eq!(plan(&[row(16)]), Err(Error::MissingBlock { sequence: 0, block: 1 }));
    let other = QueryRow { sequence: 1, position: 0 };
    assert_eq!(plan(&[other]), Err(Error::OutOfRange { what: "sequence", index: 1, len: 1 }));
    let uneven = AttentionShape { heads: 5, ..attention_shape };
    assert!(matches!(StepPlan::new(uneven, &[], &placements, 1), Err(Error::HeadGroups { .. })));
    // A window that starts after the missing block.
    let windowed =
        AttentionShape { visible: Visible::Window(NonZeroU32::new(4).unwrap()), ..attention_shape };
    let plan = StepPlan::new(windowed, &[row(40)], &placements, 1).unwrap();
    let mut bytes = AlignedBuf::zeroed(400 * 64 + attention_shape.layout.bytes() - 1);
    let arena = ArenaView::new(&mut bytes).unwrap();
    let call = AttentionCall { arena: &arena, layer_offset: 0, scale: 1.0, softcap: None, sinks: None };
    let (q, mut out) = (vec![0.0; 256], vec![0.0; 256]);
    let mut scratch = AttentionScratch::default();
    let result = attention(&pool(1), Isa::Scalar, &plan, &call, &q, &mut out, &mut scratch);
    assert!(matches!(result, Err(Error::OutsideArena { .. })), "{result:?}");
    let result = attention(&pool(1), Isa::Scalar, &plan, &call, &q[1..], &mut out, &mut scratch);
    assert!(matches!(result, Err(Error::Length { what: "attention q", .. })), "{result:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_step_agrees_with_the_reference(
        seed in any::<u64>(),
        ty in 0..TYPES.len(),
        dims in (1..100usize, 1..100usize),
        group in 1..5usize,
        kv in 1..3usize,
        window in prop_oneof![Just(0), 1..200u32],
        isa in 0..3usize,
        lengths in prop::collection::vec(1..300usize, 1..4),
    ) {
        let available = Isa::available();
        let isa = available[isa.min(available.len() - 1)];
        let world = World::new(shape(TYPES[ty], 32, group * kv, kv, dims, window), &lengths, seed);
        let mut noise = Noise(seed);
        let mut rows = Vec::new();
        for (s, len) in lengths.iter().enumerate() {
            rows.extend(rows_of(s, noise.below(*len).max(len.saturating_sub(20))..*len));
        }
        let mut memory = Memory::new(&world, &lengths, BlockOrder::Permuted(seed), isa);
        let out = step(&world, &mut memory, &rows, &pool(1), isa);
        assert_close(&world, &rows, &out);
    }
}

#[test]
fn an_offset_beyond_the_address_space_is_outside_the_arena() {
    let attention_shape = shape(KvType::F16, 16, 1, 1, (8, 8), 1);
    let placements = [BlockTable::Contiguous { first: u32::MAX, stride: u32::MAX }];
    let rows = [QueryRow { sequence: 0, position: u32::MAX }];
    let plan = StepPlan::new(attention_shape, &rows, &placements, 1).unwrap();
    let mut bytes = AlignedBuf::zeroed(4096);
    let arena = ArenaView::new(&mut bytes).unwrap();
    let call = AttentionCall { arena: &arena, layer_offset: 0, scale: 1.0, softcap: None, sinks: None };
    let result = attention(
        &pool(1),
        Isa::Scalar,
        &plan,
        &call,
        &[0.0; 8],
        &mut [0.0; 8],
        &mut AttentionScratch::default(),
    );
    assert!(matches!(result, Err(Error::OutsideArena { .. })), "{result:?}");
}
