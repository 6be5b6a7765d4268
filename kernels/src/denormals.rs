//! Treats denormal floats as zero, for arithmetic whose bits are not guaranteed.
//!
//! An operation on a denormal number takes a processor about a hundred cycles or more. Audio fades through
//! such numbers, and a recording may be full of them, so audio operations flush them to zero. Generation and
//! embeddings by this engine's kernels do not: their bits are guaranteed.

#![allow(unsafe_code)]

use std::marker::PhantomData;

/// While this value exists, the calling thread, and each thread that it starts, treats denormal operands as
/// zero and writes zero for denormal results. On processors other than x86-64 and aarch64 it does nothing.
#[derive(Debug)]
pub struct FlushDenormals {
    before: control::Word,
    /// Not `Send`: the value belongs to the thread that created it.
    _thread: PhantomData<*const ()>,
}

impl FlushDenormals {
    /// Enables flushing until the value is dropped.
    #[must_use]
    pub fn new() -> Self {
        let before = control::read();
        control::write(before | control::FLUSH);
        Self { before, _thread: PhantomData }
    }
}

impl Default for FlushDenormals {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for FlushDenormals {
    fn drop(&mut self) {
        control::write(control::read() & !control::FLUSH | self.before & control::FLUSH);
    }
}

#[cfg(target_arch = "x86_64")]
mod control {
    use std::arch::asm;

    pub(super) type Word = u32;
    /// MXCSR bits: flush to zero (results) and denormals are zeros (operands).
    pub(super) const FLUSH: Word = 1 << 15 | 1 << 6;

    pub(super) fn read() -> Word {
        let mut word = 0;
        // SAFETY: stores MXCSR into four bytes of this function.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        word
    }

    pub(super) fn write(word: Word) {
        // SAFETY: loads MXCSR from four bytes of this function. Only the two bits of FLUSH differ from the
        // value read: rounding and exceptions stay as the compiler expects them. Constants that the compiler
        // computed beforehand may be denormal; no user of this type relies on them.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod control {
    use std::arch::asm;

    pub(super) type Word = u64;
    /// FPCR bit: flush to zero, operands and results.
    pub(super) const FLUSH: Word = 1 << 24;

    pub(super) fn read() -> Word {
        let word;
        // SAFETY: reads a register that every process may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
        word
    }

    pub(super) fn write(word: Word) {
        // SAFETY: writes a register that every process may write. Only the bit of FLUSH differs from the
        // value read: rounding and exceptions stay as the compiler expects them.
        unsafe { asm!("msr fpcr, {}", in(reg) word, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod control {
    pub(super) type Word = u32;
    pub(super) const FLUSH: Word = 0;

    pub(super) fn read() -> Word {
        0
    }

    pub(super) fn write(_: Word) {}
}

/// Whether the calling thread treats denormal floats as zero.
pub fn are_flushed() -> bool {
    control::FLUSH != 0 && control::read() & control::FLUSH == control::FLUSH
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;

    /// Half of the smallest normal number, and a denormal number times a large one.
    fn products() -> (f32, f32) {
        (black_box(f32::MIN_POSITIVE) * black_box(0.5), black_box(1e-42f32) * black_box(1e30))
    }

    #[test]
    fn denormals_are_zero_while_the_guard_exists_and_in_threads_started_meanwhile() {
        let unflushed = products();
        assert!(unflushed.0 > 0.0 && unflushed.1 > 0.0 && !are_flushed());
        {
            let _outer = FlushDenormals::new();
            assert!(are_flushed());
            assert_eq!(products(), (0.0, 0.0));
            assert_eq!(std::thread::spawn(products).join().unwrap(), (0.0, 0.0));
            drop(FlushDenormals::new());
            assert_eq!(products(), (0.0, 0.0), "an inner one changes nothing for the outer one");
        }
        assert_eq!(products(), unflushed);
    }

    #[test]
    fn a_panic_ends_flushing() {
        let panicked = std::panic::catch_unwind(|| {
            let _flush = FlushDenormals::new();
            panic!("in the midst of it");
        });
        assert!(panicked.is_err() && !are_flushed());
    }
}
