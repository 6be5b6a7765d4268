//! Memory for chunks that is used again and again: the pages of fresh memory have to be cleared first, which takes longer
//! than hashing what is put there.

use parking_lot::Mutex;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Where buffers go when they are dropped. Clones are the same place.
#[derive(Debug, Clone, Default)]
pub(super) struct Buffers(Arc<Mutex<Vec<Vec<u8>>>>);

/// Memory of [`Buffers`], with whatever was in it last.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    home: Buffers,
}

impl Buffers {
    /// One that was used before, or an empty one.
    pub(super) fn take(&self) -> Buffer {
        Buffer { bytes: self.0.lock().pop().unwrap_or_default(), home: self.clone() }
    }

    /// Gives back the memory of what is not in use.
    pub(super) fn clear(&self) {
        mem::take(&mut *self.0.lock());
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.home.0.lock().push(mem::take(&mut self.bytes));
    }
}

impl Deref for Buffer {
    type Target = Vec<u8>;
    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
