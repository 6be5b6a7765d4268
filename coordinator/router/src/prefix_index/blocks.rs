//! A growing array in blocks of fixed size. Growth never moves existing elements, so it is never slow, and
//! its memory is known in advance.

use std::ops::{Index, IndexMut};

/// Blocks of `1 << SHIFT` elements.
#[derive(Debug)]
pub(super) struct Blocks<T, const SHIFT: u32> {
    blocks: Vec<Box<[T]>>,
}

impl<T: Clone, const SHIFT: u32> Blocks<T, SHIFT> {
    const BLOCK_BYTES: usize = size_of::<T>() << SHIFT;

    pub(super) fn new() -> Self {
        Self { blocks: Vec::new() }
    }

    pub(super) fn len(&self) -> u32 {
        (self.blocks.len() << SHIFT) as u32
    }

    /// Adds a block of clones of `value`.
    pub(super) fn grow(&mut self, value: T) {
        self.blocks.push(vec![value; 1 << SHIFT].into_boxed_slice());
    }

    pub(super) fn clear(&mut self) {
        self.blocks = Vec::new();
    }

    pub(super) fn bytes(&self) -> usize {
        self.blocks.len() * Self::BLOCK_BYTES + self.blocks.capacity() * size_of::<Box<[T]>>()
    }

    /// Upper bound of the bytes that [`grow`](Self::grow) allocates.
    pub(super) fn growth(&self) -> usize {
        Self::BLOCK_BYTES + (self.blocks.capacity() * 2).max(4) * size_of::<Box<[T]>>()
    }
}

impl<T, const SHIFT: u32> Index<u32> for Blocks<T, SHIFT> {
    type Output = T;
    #[inline]
    fn index(&self, index: u32) -> &T {
        &self.blocks[(index >> SHIFT) as usize][(index & ((1 << SHIFT) - 1)) as usize]
    }
}

impl<T, const SHIFT: u32> IndexMut<u32> for Blocks<T, SHIFT> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.blocks[(index >> SHIFT) as usize][(index & ((1 << SHIFT) - 1)) as usize]
    }
}
