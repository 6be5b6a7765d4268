//! Measures the read bandwidth of memory, so that a measured speed can be compared with the bandwidth of the
//! same run.
#![allow(unsafe_code, reason = "wide loads")]

use crate::isa::Isa;
use crate::pool::Pool;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Bytes that one measurement reads: far more than any cache.
const PROBE_BYTES: usize = 1 << 30;

/// A buffer, and the instruction set to read it with.
#[derive(Debug)]
pub struct BandwidthProbe {
    words: Vec<u64>,
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "elsewhere there is one way to read")
    )]
    isa: Isa,
}

impl BandwidthProbe {
    /// Allocates the buffer (1 GiB).
    pub fn new() -> Self {
        // Writes the values, so that the pages are allocated.
        Self { words: (0..PROBE_BYTES as u64 / 8).collect(), isa: Isa::detect() }
    }

    /// Reads the buffer once with all threads of `pool`. Returns bytes per second.
    pub fn measure(&self, pool: &Pool) -> f64 {
        let threads = pool.threads();
        let share = self.words.len().div_ceil(threads);
        let total = AtomicU64::new(0);
        let start = Instant::now();
        pool.run(&|thread| {
            let words = self.words.chunks(share).nth(thread).unwrap_or(&[]);
            total.fetch_add(self.sum(words), Ordering::Relaxed);
        });
        let seconds = start.elapsed().as_secs_f64();
        // The sum is used, so that the compiler keeps the reads.
        std::hint::black_box(total.into_inner());
        PROBE_BYTES as f64 / seconds
    }

    /// Median of `n` measurements.
    pub fn median(&self, pool: &Pool, n: usize) -> f64 {
        let mut all: Vec<f64> = (0..n.max(1)).map(|_| self.measure(pool)).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    }

    fn sum(&self, words: &[u64]) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.isa == Isa::Avx512 {
            // SAFETY: `Isa::detect` found AVX-512F on this machine.
            return unsafe { sum_avx512(words) };
        }
        #[cfg(target_arch = "x86_64")]
        if self.isa == Isa::Avx2 {
            // SAFETY: `Isa::detect` found AVX2 on this machine.
            return unsafe { sum_avx2(words) };
        }
        words.iter().fold(0, |sum: u64, word| sum.wrapping_add(*word))
    }
}

impl Default for BandwidthProbe {
    fn default() -> Self {
        Self::new()
    }
}

/// Sums with eight independent 64-byte accumulators.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(words: &[u64]) -> u64 {
    use std::arch::x86_64::{
        _mm512_add_epi64, _mm512_loadu_si512, _mm512_reduce_add_epi64, _mm512_setzero_si512,
    };
    let (lines, tail) = words.as_chunks::<64>();
    let mut sums = [_mm512_setzero_si512(); 8];
    for line in lines {
        for (lane, sum) in sums.iter_mut().enumerate() {
            // SAFETY: lane * 8 + 8 <= 64 words of `line`; unaligned loads are allowed.
            let words = unsafe { _mm512_loadu_si512(line.as_ptr().add(lane * 8).cast()) };
            *sum = _mm512_add_epi64(*sum, words);
        }
    }
    let mut total = 0u64;
    for sum in sums {
        total = total.wrapping_add(_mm512_reduce_add_epi64(sum) as u64);
    }
    tail.iter().fold(total, |sum, word| sum.wrapping_add(*word))
}

/// Sums with eight independent 32-byte accumulators. Prefetches every cache line, like the products with one
/// token: without prefetching, Zen 3 reads a seventh less.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(words: &[u64]) -> u64 {
    use crate::aligned::CACHE_LINE;
    use std::arch::x86_64::{
        _MM_HINT_T1, _mm_prefetch, _mm256_add_epi64, _mm256_loadu_si256, _mm256_setzero_si256,
        _mm256_storeu_si256,
    };
    const AHEAD: usize = 8192;
    let (chunks, tail) = words.as_chunks::<32>();
    let mut sums = [_mm256_setzero_si256(); 8];
    for chunk in chunks {
        for line in (0..size_of_val(chunk)).step_by(CACHE_LINE) {
            // A hint, which may name any address.
            _mm_prefetch::<_MM_HINT_T1>(chunk.as_ptr().wrapping_byte_add(AHEAD + line).cast());
        }
        for (lane, sum) in sums.iter_mut().enumerate() {
            // SAFETY: lane * 4 + 4 <= 32 words of `chunk`; unaligned loads are allowed.
            let words = unsafe { _mm256_loadu_si256(chunk.as_ptr().add(lane * 4).cast()) };
            *sum = _mm256_add_epi64(*sum, words);
        }
    }
    let mut words = [0u64; 32];
    for (words, sum) in words.as_chunks_mut::<4>().0.iter_mut().zip(sums) {
        // SAFETY: four words are 32 bytes.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), sum) };
    }
    words.iter().chain(tail).fold(0, |sum, word| sum.wrapping_add(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_once() {
        let words: Vec<u64> = (0..1003).map(|word: u64| word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let sum = |slice: &[u64]| slice.iter().fold(0u64, |sum, word| sum.wrapping_add(*word));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let probe = BandwidthProbe { words: words.clone(), isa };
            for slice in [&probe.words[..], &probe.words[1..130], &probe.words[..31], &[]] {
                assert_eq!(probe.sum(slice), sum(slice), "{isa}, {} words", slice.len());
            }
        }
    }
}
