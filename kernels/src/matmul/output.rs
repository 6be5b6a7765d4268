//! The output of products, and the epilogue that is applied before storing.
#![allow(unsafe_code)]

use super::PANEL_ROWS;
use std::marker::PhantomData;

/// Operations on a product before it is stored: `out = [out +] (product * scale + bias[row])`.
#[derive(Debug, Clone, Copy)]
pub struct Epilogue<'a> {
    /// Factor of the whole matrix, for formats with a separate scale tensor; otherwise 1.
    pub scale: f32,
    /// One value per output row.
    pub bias: Option<&'a [f32]>,
    /// If true, adds to the output instead of replacing it.
    pub accumulate: bool,
}

impl Epilogue<'static> {
    /// Replace the output by the bare product.
    pub const STORE: Self = Self { scale: 1.0, bias: None, accumulate: false };
    /// Add the bare product to the output.
    pub const ADD: Self = Self { scale: 1.0, bias: None, accumulate: true };
}

/// A row-major `[m][ld]` f32 output that several threads may fill in parallel, each its own columns (matrix
/// rows).
#[derive(Debug, Clone, Copy)]
pub struct SharedOut<'a> {
    start: *mut f32,
    m: usize,
    ld: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: the constructor's contract makes concurrent writes disjoint.
unsafe impl Send for SharedOut<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedOut<'_> {}

impl<'a> SharedOut<'a> {
    /// An output of `m` rows (tokens), `ld` values apart. A product with a matrix of `n <= ld` rows writes
    /// `start[token * ld + row]` for `token < m` and `row < n`.
    ///
    /// # Safety
    /// - `start` must be valid for reads and writes of `m * ld` initialised values for `'a` (in the last row,
    ///   only the `n` values that products write), and nothing else may access the written values while a
    ///   product runs.
    /// - Two products that run at the same time on handles to the same memory must have disjoint ranges of
    ///   panels (or write disjoint memory for another reason).
    pub unsafe fn new(start: *mut f32, m: usize, ld: usize) -> Self {
        Self { start, m, ld, owner: PhantomData }
    }

    /// Rows (tokens).
    pub fn rows(&self) -> usize {
        self.m
    }

    /// Values from one row to the next.
    pub fn ld(&self) -> usize {
        self.ld
    }

    /// Prefetches the cache lines that will receive the lanes of one panel. Rows are often a power of two of
    /// bytes apart, and a store that must first fetch its line delays the stores behind it.
    #[inline]
    pub(super) fn prefetch(&self, token: usize, first_row: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            let line = self.start.wrapping_add(token * self.ld + first_row);
            // SAFETY: hints, which may name any address.
            unsafe {
                _mm_prefetch::<_MM_HINT_ET0>(line.cast());
                _mm_prefetch::<_MM_HINT_ET0>(line.wrapping_add(PANEL_ROWS - 1).cast());
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            let line = self.start.wrapping_add(token * self.ld + first_row);
            // SAFETY: hints, which may name any address.
            unsafe {
                std::arch::asm!(
                    "prfm pstl1keep, [{first}]", "prfm pstl1keep, [{last}]",
                    first = in(reg) line, last = in(reg) line.wrapping_add(PANEL_ROWS - 1),
                    options(nostack, preserves_flags, readonly)
                );
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = (token, first_row);
    }

    /// Stores those lanes of one panel that are rows of the matrix.
    ///
    /// # Safety
    /// `token < m`, `first_row + rows <= ld`, `rows <= 16`, a bias is longer than the last row, and the
    /// constructor's contract holds.
    pub(super) unsafe fn store(
        &self,
        epilogue: &Epilogue<'_>,
        token: usize,
        first_row: usize,
        rows: usize,
        lanes: &[f32; PANEL_ROWS],
    ) {
        let mut values = lanes.map(|lane| lane * epilogue.scale);
        if let Some(bias) = epilogue.bias {
            for (value, bias) in values.iter_mut().zip(&bias[first_row..first_row + rows]) {
                *value += bias;
            }
        }
        // SAFETY: in bounds by this function's contract; exclusive by the constructor's.
        let out =
            unsafe { std::slice::from_raw_parts_mut(self.start.add(token * self.ld + first_row), rows) };
        if let Ok(out) = <&mut [f32; PANEL_ROWS]>::try_from(&mut *out) {
            // All panels except the last: avoids a call to copy a few bytes.
            *out = if epilogue.accumulate { std::array::from_fn(|r| out[r] + values[r]) } else { values };
        } else if epilogue.accumulate {
            out.iter_mut().zip(&values).for_each(|(out, value)| *out += value);
        } else {
            out.copy_from_slice(&values[..rows]);
        }
    }
}
