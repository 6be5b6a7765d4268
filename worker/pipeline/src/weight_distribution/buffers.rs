//! Reuses memory for chunks. The kernel must clear the pages of fresh memory, which takes longer than hashing
//! the data.

use parking_lot::Mutex;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A pool of buffers; dropped buffers return to it. Clones share the pool.
#[derive(Debug, Default)]
pub(super) struct Buffers<T>(Arc<Mutex<Vec<T>>>);

/// A buffer of [`Buffers`], with the contents of its last use.
#[derive(Debug)]
pub(super) struct Buffer<T: Default> {
    memory: T,
    home: Buffers<T>,
}

impl<T> Clone for Buffers<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: Default> Buffers<T> {
    /// Returns a used buffer, or an empty one.
    pub(super) fn take(&self) -> Buffer<T> {
        Buffer { memory: self.0.lock().pop().unwrap_or_default(), home: self.clone() }
    }

    /// Frees all unused buffers.
    pub(super) fn clear(&self) {
        mem::take(&mut *self.0.lock());
    }
}

impl<T: Default> Drop for Buffer<T> {
    fn drop(&mut self) {
        self.home.0.lock().push(mem::take(&mut self.memory));
    }
}

impl<T: Default> Deref for Buffer<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.memory
    }
}

impl<T: Default> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.memory
    }
}

impl AsRef<[u8]> for Buffer<Vec<u8>> {
    fn as_ref(&self) -> &[u8] {
        &self.memory
    }
}
