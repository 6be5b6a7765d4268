//! A slice that several threads write, each a different part of it.
#![allow(unsafe_code)]

use std::marker::PhantomData;

/// A mutable slice that threads may divide among themselves.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are returned only under the contract of `slice`, which forbids overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as above; the slice itself is borrowed exclusively.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// Elements `from..from + len`.
    ///
    /// # Panics
    /// If they are not inside the slice.
    ///
    /// # Safety
    /// No other part that is in use may overlap this one.
    #[expect(clippy::mut_from_ref, reason = "the contract is that parts do not overlap")]
    pub(crate) unsafe fn slice(&self, from: usize, len: usize) -> &mut [T] {
        assert!(from.checked_add(len).is_some_and(|end| end <= self.len), "{from} + {len} of {}", self.len);
        // SAFETY: inside the borrowed slice, and by the caller's contract not aliased.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}
