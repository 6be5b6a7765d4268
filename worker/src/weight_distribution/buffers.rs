//! Memory for chunks that is used again and again: the pages of fresh memory have to be cleared first, which takes longer
//! than hashing what is put there.

use parking_lot::Mutex;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Where buffers go when they are dropped. Clones are the same place.
#[derive(Debug, Default)]
pub(super) struct Buffers<T>(Arc<Mutex<Vec<T>>>);

/// Memory of [`Buffers`], with whatever was in it last.
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
    /// One that was used before, or an empty one.
    pub(super) fn take(&self) -> Buffer<T> {
        Buffer { memory: self.0.lock().pop().unwrap_or_default(), home: self.clone() }
    }

    /// Gives back the memory of what is not in use.
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
