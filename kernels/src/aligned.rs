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
    /// Start and bytes of the mapping that it is in. `None`: it is the allocator's.
    mapping: Option<(NonNull<u8>, usize)>,
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
            return Self { ptr: NonNull::dangling(), len: 0, mapping: None };
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
        Self { ptr, len, mapping: None }
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

impl AlignedBuf<u8> {
    /// Creates a buffer of `len` zeros in a mapping of its own: pages take memory once they are written, until
    /// [`discard`](Self::discard) or the end of the buffer gives them back to the system at once.
    pub fn reserved(len: usize) -> Self {
        if len < 2 * HUGE_PAGE {
            return Self::zeroed(len);
        }
        let Some(bytes) = len.checked_add(HUGE_PAGE) else { return Self::zeroed(len) };
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: a new private mapping at an address of the kernel's choice touches no memory that exists.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        let Some(start) = NonNull::new(start.cast::<u8>()).filter(|_| start != libc::MAP_FAILED) else {
            return Self::zeroed(len);
        };
        let skipped = start.as_ptr().align_offset(HUGE_PAGE).min(HUGE_PAGE);
        // SAFETY: the mapping has `len + HUGE_PAGE` bytes, of which less than `HUGE_PAGE` are skipped.
        let ptr = unsafe { start.add(skipped) };
        advise_huge_pages(ptr.as_ptr(), len);
        Self { ptr, len, mapping: Some((start, bytes)) }
    }

    /// Gives the memory of all whole pages in a range back to the system if the buffer is
    /// [`reserved`](Self::reserved). The range's contents are then unspecified.
    pub fn discard(&mut self, range: std::ops::Range<usize>) {
        if self.mapping.is_none() || range.start >= range.end || range.end > self.len {
            return;
        }
        // SAFETY: sysconf has no preconditions.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(HUGE_PAGE);
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if start < end {
            // SAFETY: whole pages inside this private anonymous mapping, which `self` borrows exclusively; they read
            // as zeros afterwards, which are values. A refusal changes nothing.
            unsafe { libc::madvise(self.ptr.as_ptr().add(start).cast(), end - start, libc::MADV_DONTNEED) };
        }
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
        if let Some((start, bytes)) = self.mapping {
            // SAFETY: mapped in `reserved` with these bytes, and unmapped once. Nothing else refers to it.
            unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
        } else if let Some(layout) = Self::layout(self.len) {
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
    fn discarded_pages_are_zero_and_the_others_stay() {
        let mut buf = AlignedBuf::<u8>::reserved(3 * HUGE_PAGE + 17);
        assert_eq!((buf.len(), buf.as_ptr() as usize % HUGE_PAGE), (3 * HUGE_PAGE + 17, 0));
        assert!(buf.iter().all(|&x| x == 0));
        buf.fill(7);
        buf.discard(HUGE_PAGE - 1..2 * HUGE_PAGE + 1);
        assert!(buf[..HUGE_PAGE].iter().all(|&x| x == 7));
        assert!(buf[HUGE_PAGE..2 * HUGE_PAGE].iter().all(|&x| x == 0));
        assert!(buf[2 * HUGE_PAGE..].iter().all(|&x| x == 7));
        let end = buf.len();
        buf.discard(end - 1..end + 1);
        let mut small = AlignedBuf::<u8>::reserved(100);
        small.fill(7);
        small.discard(0..100);
        assert!(small.iter().all(|&x| x == 7), "it has no mapping of its own");
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
