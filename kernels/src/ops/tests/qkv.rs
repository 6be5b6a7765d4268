//! Tests of the fused op between projections and attention.

use super::*;
use crate::aligned::AlignedBuf;
use crate::attention::{
    ArenaView, AttentionShape, BlockTable, KvLayout, KvType, QueryRow, StepPlan, Visible, kv_write,
};
use crate::backend::QueryGrowth;

const LAYER_OFFSET: usize = 64;
const ROWS: [QueryRow; 4] = [
    QueryRow { sequence: 0, position: 17 },
    QueryRow { sequence: 1, position: 0 },
    QueryRow { sequence: 0, position: 16 },
    QueryRow { sequence: 1, position: 1 },
];

/// Block numbers of the two sequences.
const BLOCKS: [&[u32]; 2] = [&[1, 3], &[0]];

/// A shape, its block tables and projections of [`ROWS`].
struct Case {
    shape: AttentionShape,
    tables: Vec<Vec<u32>>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| (((i + seed) * 37 % 101) as f32 - 50.0) / 20.0).collect()
}

impl Case {
    fn new(heads: usize, kv_heads: usize, dim: usize, v_dim: usize) -> Self {
        let layout = KvLayout::new(KvType::F16, 16, kv_heads, dim, v_dim).unwrap();
        let shape = AttentionShape { layout, heads, visible: Visible::Causal };
        let unit = layout.bytes().div_ceil(64) as u32;
        let tables = BLOCKS.map(|table| table.iter().map(|block| block * unit).collect()).to_vec();
        Self {
            shape,
            tables,
            q: numbers(ROWS.len() * heads * dim, 0),
            k: numbers(ROWS.len() * kv_heads * dim, 5),
            v: numbers(ROWS.len() * kv_heads * v_dim, 11),
        }
    }

    fn arena(&self) -> AlignedBuf<u8> {
        AlignedBuf::zeroed(LAYER_OFFSET + 4 * self.shape.layout.bytes().next_multiple_of(64))
    }

    fn plan(&self, rows: &[QueryRow], threads: usize) -> StepPlan {
        let placements: Vec<_> = self.tables.iter().map(|table| BlockTable::Paged(table)).collect();
        StepPlan::new(self.shape, rows, &placements, threads).unwrap()
    }

    /// The arena after `kv_write` of each row.
    fn written(&self, isa: Isa, k: &[f32], v: &[f32]) -> AlignedBuf<u8> {
        let layout = &self.shape.layout;
        let mut arena = self.arena();
        let (k_width, v_width) = (k.len() / ROWS.len(), v.len() / ROWS.len());
        for ((row, k), v) in ROWS.iter().zip(k.chunks(k_width)).zip(v.chunks(v_width)) {
            let block = self.tables[row.sequence as usize][row.position as usize / 16];
            let start = block as usize * 64 + LAYER_OFFSET;
            let block = &mut arena[start..start + layout.bytes()];
            kv_write(isa, layout, block, row.position as usize % 16, k, v).unwrap();
        }
        arena
    }
}

fn table(n_rot: usize) -> RopeTable {
    let params = RopeParams {
        style: RopeStyle::Half,
        n_rot,
        base: 1e4,
        freq_scale: 1.0,
        factors: None,
        magnitude: 1.5,
        axes: None,
    };
    let mut table = RopeTable::new(&params).unwrap();
    table.ensure(64);
    table
}

/// Norm and rope of whole rows, as separate ops.
fn norm_and_rope(
    isa: Isa,
    x: &[f32],
    dim: usize,
    norm: Option<RmsNorm<'_>>,
    table: Option<&RopeTable>,
) -> Vec<f32> {
    let mut x = x.to_vec();
    if let Some(norm) = norm {
        rms_norm_in_place(&pool(1), isa, norm, &mut x).unwrap();
    }
    if let Some(table) = table {
        let width = x.len() / ROWS.len();
        for (row, x) in ROWS.iter().zip(x.chunks_mut(width)) {
            rope(isa, table, row.position as usize, dim, x).unwrap();
        }
    }
    x
}

#[test]
fn the_fused_op_equals_its_parts() {
    let case = Case::new(4, 2, 24, 40);
    let weight: Vec<f32> = (0..24).map(|i| 1.0 + i as f32 / 10.0).collect();
    let table = table(16);
    let norm = RmsNorm { width: 24, weight: Some(&weight), eps: 1e-6 };
    // A norm over the whole row instead of each head.
    let row_weight = numbers(96, 2);
    let whole = RmsNorm { width: 96, weight: Some(&row_weight), eps: 1e-6 };
    let plain = RmsNorm { width: 40, weight: None, eps: 1e-6 };
    for (q_norm, k_norm, v_norm, rotate) in [
        (Some(norm), None, None, true),
        (None, Some(norm), Some(plain), true),
        (Some(whole), Some(norm), Some(plain), false),
        (None, None, None, false),
    ] {
        let rope = rotate.then_some(&table);
        let step =
            QkvStep { layer_offset: LAYER_OFFSET, q_norm, k_norm, v_norm, rope, axes: &[], q_growth: None };
        for isa in Isa::available() {
            let expected_q = norm_and_rope(isa, &case.q, 24, q_norm, rope);
            let expected_k = norm_and_rope(isa, &case.k, 24, k_norm, rope);
            let expected_v = norm_and_rope(isa, &case.v, 40, v_norm, None);
            let expected = case.written(isa, &expected_k, &expected_v);
            for threads in [1, 3] {
                let mut arena = case.arena();
                let (mut q, mut k, mut v) = (case.q.clone(), case.k.clone(), case.v.clone());
                let mut view = ArenaView::new(&mut arena).unwrap();
                let kv = KeysValues { k: &mut k, v: Some(&mut v) };
                let qkv = Qkv { q: &mut q, kv: Some(kv) };
                let plan = case.plan(&ROWS, threads);
                norm_rope_write(&pool(threads), isa, &plan, &step, &mut view, qkv).unwrap();
                assert_eq!((&q, &k, &v), (&expected_q, &expected_k, &expected_v));
                assert_eq!(&arena[..], &expected[..]);
            }
        }
    }
}

#[test]
fn queries_grow_with_their_position() {
    let case = Case::new(4, 2, 24, 24);
    let growth = QueryGrowth { beta: 0.3, every: 2 };
    let (q_growth, plan) = (Some(growth), case.plan(&ROWS, 1));
    let step = QkvStep {
        layer_offset: 0,
        q_norm: None,
        k_norm: None,
        v_norm: None,
        rope: None,
        axes: &[],
        q_growth,
    };
    let factor = |row: &QueryRow| 1.0 + 0.3 * (1.0 + f64::from(row.position / 2)).ln();
    let width = case.q.len() / ROWS.len();
    for isa in Isa::available() {
        let (mut arena, mut q) = (case.arena(), case.q.clone());
        let mut view = ArenaView::new(&mut arena).unwrap();
        norm_rope_write(&pool(1), isa, &plan, &step, &mut view, Qkv { q: &mut q, kv: None }).unwrap();
        for (row, (q, before)) in ROWS.iter().zip(q.chunks(width).zip(case.q.chunks(width))) {
            for (q, before) in q.iter().zip(before) {
                let expected = factor(row) * f64::from(*before);
                assert!((f64::from(*q) - expected).abs() <= 1e-6 * expected.abs(), "{q} is not {expected}");
            }
        }
    }
}

#[test]
fn values_may_be_the_keys_before_norm_and_rope() {
    let case = Case::new(4, 2, 24, 24);
    let weight = numbers(24, 3);
    let table = table(24);
    let k_norm = Some(RmsNorm { width: 24, weight: Some(&weight), eps: 1e-6 });
    for v_norm in [None, Some(RmsNorm { width: 24, weight: None, eps: 1e-6 })] {
        let step = QkvStep {
            layer_offset: LAYER_OFFSET,
            q_norm: None,
            k_norm,
            v_norm,
            rope: Some(&table),
            axes: &[],
            q_growth: None,
        };
        for isa in Isa::available() {
            let expected_k = norm_and_rope(isa, &case.k, 24, k_norm, Some(&table));
            let expected_v = norm_and_rope(isa, &case.k, 24, v_norm, None);
            let mut arena = case.arena();
            let (mut q, mut k) = (case.q.clone(), case.k.clone());
            let mut view = ArenaView::new(&mut arena).unwrap();
            let qkv = Qkv { q: &mut q, kv: Some(KeysValues { k: &mut k, v: None }) };
            norm_rope_write(&pool(2), isa, &case.plan(&ROWS, 2), &step, &mut view, qkv).unwrap();
            assert_eq!(k, expected_k);
            assert_eq!(&arena[..], &case.written(isa, &expected_k, &expected_v)[..]);
        }
    }
    // If key and value heads differ in width, the keys cannot be the values.
    let case = Case::new(4, 2, 24, 40);
    let step = QkvStep {
        layer_offset: 0,
        q_norm: None,
        k_norm: None,
        v_norm: None,
        rope: None,
        axes: &[],
        q_growth: None,
    };
    let mut arena = case.arena();
    let (mut q, mut k) = (case.q.clone(), case.k.clone());
    let mut view = ArenaView::new(&mut arena).unwrap();
    let qkv = Qkv { q: &mut q, kv: Some(KeysValues { k: &mut k, v: None }) };
    let result = norm_rope_write(&pool(1), Isa::Scalar, &case.plan(&ROWS, 1), &step, &mut view, qkv);
    assert!(matches!(result, Err(Error::Length { .. })), "{result:?}");
}

#[test]
fn a_layer_that_reads_another_s_cache_writes_nothing() {
    let case = Case::new(4, 2, 24, 24);
    let table = table(24);
    let q_norm = Some(RmsNorm { width: 24, weight: None, eps: 1e-6 });
    let step = QkvStep {
        layer_offset: LAYER_OFFSET,
        q_norm,
        k_norm: None,
        v_norm: None,
        rope: Some(&table),
        axes: &[],
        q_growth: None,
    };
    for isa in Isa::available() {
        let mut arena = case.arena();
        arena.fill(7);
        let mut q = case.q.clone();
        let mut view = ArenaView::new(&mut arena).unwrap();
        let qkv = Qkv { q: &mut q, kv: None };
        norm_rope_write(&pool(2), isa, &case.plan(&ROWS, 2), &step, &mut view, qkv).unwrap();
        assert_eq!(q, norm_and_rope(isa, &case.q, 24, q_norm, Some(&table)));
        assert!(arena.iter().all(|byte| *byte == 7));
    }
}

#[test]
fn two_rows_cannot_write_one_slot() {
    let case = Case::new(2, 1, 24, 24);
    let plan = case.plan(&[ROWS[0], ROWS[0]], 1);
    let mut arena = case.arena();
    let mut view = ArenaView::new(&mut arena).unwrap();
    let step = QkvStep {
        layer_offset: 0,
        q_norm: None,
        k_norm: None,
        v_norm: None,
        rope: None,
        axes: &[],
        q_growth: None,
    };
    let (mut q, mut k) = (numbers(2 * 48, 0), numbers(2 * 24, 0));
    let mut v = k.clone();
    let qkv = Qkv { q: &mut q, kv: Some(KeysValues { k: &mut k, v: Some(&mut v) }) };
    let result = norm_rope_write(&pool(1), Isa::Scalar, &plan, &step, &mut view, qkv);
    assert!(matches!(result, Err(Error::OverlappingWrites { .. })));
}
