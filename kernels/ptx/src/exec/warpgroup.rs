//! Matrix products of four warps. Each warp has 16 rows of the first factor and of the sums. A product reads and writes
//! when it is waited for, however long that takes, and its factors must not change before.

use super::matrix::{ROWS, all_lanes, value};
use super::{Block, Run};
use crate::FaultKind;
use crate::lanes::{ALL, V32};
use crate::op::GroupProduct;
use crate::shared::Accessor;
use crate::warp::{PendingProduct, Warp};

/// Bytes of a row of the second factor that a product reads.
const ROW_BYTES: usize = 32;
/// Bytes that are read at once; swizzling keeps them together.
const CHUNK: usize = 16;
/// Rows of a group that a descriptor's stride leads to.
const GROUP_ROWS: usize = 8;

impl Block<'_> {
    pub(super) fn group_product(&mut self, warp: &mut Warp, product: &GroupProduct, mask: u32) -> Run<()> {
        all_lanes("wgmma.mma_async", mask)?;
        let descriptor = warp.v64(product.b)[0];
        if warp.v64(product.b).iter().any(|lane| *lane != descriptor) {
            return Err((FaultKind::Invalid { what: "descriptors that differ between lanes".into() }, 0));
        }
        let accessor = self.accessor(warp);
        let second = self.second_factor(descriptor, product.columns, accessor)?;
        let group = warp.products.groups;
        let first = product.a.iter().map(|&register| *warp.v32(register)).collect();
        let pending =
            PendingProduct { group, product: product.clone(), pc: warp.pc, descriptor, first, second };
        warp.products.pending.push(pending);
        Ok(())
    }

    /// Completes all products except those of the last `keep` groups.
    pub(super) fn group_wait(&mut self, warp: &mut Warp, keep: u32, mask: u32) -> Run<()> {
        all_lanes("wgmma.wait_group", mask)?;
        let before = warp.products.groups.saturating_sub(keep);
        let (done, pending) = std::mem::take(&mut warp.products.pending)
            .into_iter()
            .partition(|p: &PendingProduct| p.group < before);
        warp.products.pending = pending;
        for PendingProduct { product, pc, descriptor, first, second, .. } in done {
            let now = self.second_factor(descriptor, product.columns, Accessor { warp: warp.index, pc })?;
            let kept = product.a.iter().zip(&first).all(|(&register, value)| warp.v32(register) == value);
            if now != second || !kept {
                let place = self.source_location(pc);
                let what = format!("a factor of the product at {place} changed before it was waited for");
                return Err((FaultKind::Invalid { what }, 0));
            }
            add_product(warp, &product, &first, &second);
        }
        Ok(())
    }

    /// Reads the second factor, `[columns][32]` bytes.
    fn second_factor(&mut self, descriptor: u64, columns: usize, accessor: Accessor) -> Run<Vec<u8>> {
        let field = |at: u32| (descriptor >> at & 0x3fff) << 4;
        let (start, leading, stride) = (field(0), field(16), field(32));
        let swizzled = match descriptor >> 62 {
            0 => false,
            1 => true,
            mode => return Err((FaultKind::Invalid { what: format!("swizzling of mode {mode}") }, 0)),
        };
        let known = 0x3fff | 0x3fff << 16 | 0x3fff << 32 | 3 << 62;
        if descriptor & !known != 0 {
            let what = format!("the descriptor {descriptor:#x} has other fields than addresses and mode");
            return Err((FaultKind::Invalid { what }, 0));
        }
        let mut bytes = Vec::with_capacity(columns * ROW_BYTES);
        for column in 0..columns {
            let (group, row) = ((column / GROUP_ROWS) as u64, (column % GROUP_ROWS) as u64);
            for chunk in 0..(ROW_BYTES / CHUNK) as u64 {
                let address = match swizzled {
                    true => {
                        let plain = start + group * stride + 128 * row + 16 * chunk;
                        plain ^ (plain >> 7 & 7) << 4
                    }
                    false => start + group * stride + leading * chunk + 16 * row,
                };
                let read = self.shared.read_asynchronously(address, CHUNK, accessor);
                match read {
                    Ok(read) => bytes.extend_from_slice(read),
                    Err(wrong) => return Err(self.wrong(wrong, 0)),
                }
            }
        }
        Ok(bytes)
    }
}

/// Adds a product to its sums: exact products, added in 64 bits and rounded once.
fn add_product(warp: &mut Warp, product: &GroupProduct, first: &[V32], second: &[u8]) {
    let GroupProduct { d, factor, .. } = product;
    let each = factor.in_register();
    let depth = 8 * each;
    let words = |row: &[u8]| -> Vec<f64> {
        let words = row.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        words.flat_map(|word| (0..each).map(move |i| value(*factor, word, i))).collect()
    };
    let second: Vec<Vec<f64>> = second.chunks_exact(ROW_BYTES).map(words).collect();
    let mut rows = vec![[0.0; 64]; ROWS];
    for (r, register) in first.iter().enumerate() {
        for (lane, &word) in register.iter().enumerate() {
            for i in 0..each {
                rows[lane / 4 + 8 * (r % 2)][lane % 4 * each + i + r / 2 * 4 * each] =
                    value(*factor, word, i);
            }
        }
    }
    for (i, &register) in d.iter().enumerate() {
        let old = *warp.v32(register);
        let new: V32 = std::array::from_fn(|lane| {
            let (row, column) = (lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
            let dot: f64 = rows[row][..depth].iter().zip(&second[column]).map(|(a, b)| a * b).sum();
            ((dot + f64::from(f32::from_bits(old[lane]))) as f32).to_bits()
        });
        warp.set32(register, &new, ALL);
    }
}
