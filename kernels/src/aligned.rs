//! Buffers that start on a cache line, so that vector loads of whole lines never straddle two.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Bytes in a cache line, and in the widest vector register.
pub const CACHE_LINE: usize = 64;

/// Size of a transparent huge page. A buffer of several such pages is aligned to one, to reduce TLB misses.
const HUGE_PAGE: usize = 2 << 20;

mod sealed {
    /// Types that own nothing and for which all-zero bytes are a valid value.
    pub trait Plain: Copy + Send + Sync + 'static {}
    impl Plain for u8 {}
    impl Plain for i8 {}
    impl Plain for u16 {}
    impl Plain for i32 {}
    impl Plain for u32 {}
    impl Plain for f32 {}
}
pub(crate) use sealed::Plain;

/// A fixed-length buffer of plain numbers, initially zero, aligned to [`CACHE_LINE`]. For large buffers the
/// kernel is advised to use huge pages.
pub struct AlignedBuf<T: Plain> {
    ptr: NonNull<T>,
    len: usize,
}

// SAFETY: the buffer owns its memory exclusively and `Plain` types are `Send`.
unsafe impl<T: Plain> Send for AlignedBuf<T> {}
// SAFETY: shared access only reads, and `Plain` types are `Sync`.
unsafe impl<T: Plain> Sync for AlignedBuf<T> {}

impl<T: Plain> AlignedBuf<T> {
    /// Creates a buffer of `len` zeros. Aborts like `Vec` if memory is exhausted.
    ///
    /// # Panics
    /// If the size in bytes exceeds `isize::MAX`.
    pub fn zeroed(len: usize) -> Self {
        let Some(layout) = Self::layout(len) else {
            return Self { ptr: NonNull::dangling(), len: 0 };
        };
        // Fresh pages from the operating system are already zero, so a large buffer takes memory only as it
        // is used. This holds for the command's allocator, mimalloc. Rust's path to glibc writes the zeros
        // itself, on small pages, before `advise_huge_pages` is called.
        // SAFETY: `layout` has a size above zero; all-zero bytes are values of `T` (`Plain`).
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(raw.cast::<T>()) else { handle_alloc_error(layout) };
        if layout.align() == HUGE_PAGE {
            advise_huge_pages(raw, layout.size());
        }
        Self { ptr, len }
    }

    /// Makes the buffer at least `len` long. A buffer that is long enough keeps its memory and contents; a
    /// shorter one is replaced by zeros.
    pub fn grow(&mut self, len: usize) {
        if self.len < len {
            *self = Self::zeroed(len);
        }
    }

    /// `None` for an empty buffer.
    fn layout(len: usize) -> Option<Layout> {
        let bytes = Layout::array::<T>(len).expect("a buffer fits the address space").size();
        if bytes == 0 {
            return None;
        }
        let align = if bytes >= 2 * HUGE_PAGE { HUGE_PAGE } else { CACHE_LINE };
        Some(Layout::from_size_align(bytes, align).expect("a buffer fits the address space"))
    }
}

#[cfg(target_os = "linux")]
fn advise_huge_pages(start: *mut u8, bytes: usize) {
    // SAFETY: the range is one live allocation of this module; the advice changes no contents. A refusal
    // only costs speed, so the result is ignored.
    unsafe { libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_start: *mut u8, _bytes: usize) {}

impl<T: Plain> Drop for AlignedBuf<T> {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: allocated in `zeroed` with the same layout, and dropped once.
            unsafe { dealloc(self.ptr.as_ptr().cast(), layout) };
        }
    }
}

impl<T: Plain> Deref for AlignedBuf<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `ptr` owns `len` initialised values (or is dangling with a length of 0).
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Plain> AsRef<[T]> for AlignedBuf<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Plain> DerefMut for AlignedBuf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Plain> Default for AlignedBuf<T> {
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl<T: Plain> std::fmt::Debug for AlignedBuf<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{AlignedBuf, CACHE_LINE, HUGE_PAGE};

    #[test]
    fn buffers_start_on_a_line_and_are_zero() {
        for len in [1, 63, 4096] {
            let buf = AlignedBuf::<f32>::zeroed(len);
            assert_eq!(buf.as_ptr() as usize % CACHE_LINE, 0);
            assert_eq!(buf.len(), len);
            assert!(buf.iter().all(|&x| x == 0.0));
        }
        let large = AlignedBuf::<u8>::zeroed(2 * HUGE_PAGE + 5);
        assert_eq!(large.as_ptr() as usize % HUGE_PAGE, 0);
        assert!(large.iter().all(|&x| x == 0));
        assert!(AlignedBuf::<u8>::zeroed(0).is_empty());
    }

    #[test]
    fn growing_keeps_a_buffer_that_is_long_enough() {
        let mut buf = AlignedBuf::<i32>::zeroed(8);
        buf[3] = 7;
        buf.grow(4);
        assert_eq!((buf.len(), buf[3]), (8, 7));
        buf.grow(9);
        assert_eq!((buf.len(), buf[3]), (9, 0));
    }
}
