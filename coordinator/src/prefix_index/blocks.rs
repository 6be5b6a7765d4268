//! A growing array in blocks of fixed size: growth never moves what is there, so it never stalls anyone for
//! long, and what it takes is known before it is taken.

use std::ops::{Index, IndexMut};

/// `1 << SHIFT` elements a block.
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

    /// Bytes that [`grow`](Self::grow) takes at its highest.
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
