//! The portable instruction set: arrays, which the compiler maps to the target's instructions.

use half::f16;

use super::{Kernel, LANES, Simd};

/// Plain Rust. It also runs on aarch64, where sixteen lanes become four NEON registers.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

type Lanes = [f32; LANES];

#[inline(always)]
fn lanes(f: impl Fn(usize) -> f32) -> Lanes {
    std::array::from_fn(f)
}

/// Reduces by halves: lane i with lane i + 8, then + 4, + 2, + 1.
#[inline(always)]
fn tree(mut a: Lanes, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            a[i] = f(a[i], a[i + width]);
        }
        width /= 2;
    }
    a[0]
}

#[inline(always)]
fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn lesser(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

impl Simd for Scalar {
    type V = Lanes;
    // Four NEON registers per vector, of thirty-two. Other targets use the smallest tile.
    const ROWS: usize = if cfg!(target_arch = "aarch64") { 2 } else { 1 };
    const COLUMNS: usize = if cfg!(target_arch = "aarch64") { 2 } else { 1 };

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        [x; LANES]
    }
    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        lanes(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        lanes(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        lanes(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        lanes(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn abs(self, a: Lanes) -> Lanes {
        lanes(|i| a[i].abs())
    }
    #[inline(always)]
    fn fma(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        lanes(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        lanes(|i| greater(a[i], b[i]))
    }
    #[inline(always)]
    fn min(self, a: Lanes, b: Lanes) -> Lanes {
        lanes(|i| lesser(a[i], b[i]))
    }
    #[inline(always)]
    fn select_lt(self, a: Lanes, b: Lanes, yes: Lanes, no: Lanes) -> Lanes {
        lanes(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn any_gt(self, a: Lanes, b: Lanes) -> bool {
        a.iter().zip(&b).any(|(a, b)| a > b)
    }
    #[inline(always)]
    fn keep_lanes(self, a: Lanes, from: usize, to: usize, fill: Lanes) -> Lanes {
        lanes(|i| if (from..to).contains(&i) { a[i] } else { fill[i] })
    }
    #[inline(always)]
    fn shift_to_exponent(self, a: Lanes) -> Lanes {
        lanes(|i| f32::from_bits(a[i].to_bits() << 23))
    }
    #[inline(always)]
    fn swap_pairs(self, a: Lanes) -> Lanes {
        lanes(|i| a[i ^ 1])
    }
    #[inline(always)]
    fn reduce_add(self, a: Lanes) -> f32 {
        tree(a, |x, y| x + y)
    }
    #[inline(always)]
    fn reduce_max(self, a: Lanes) -> f32 {
        tree(a, greater)
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Lanes {
        // SAFETY: the caller gives sixteen readable f32.
        unsafe { p.cast::<Lanes>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> Lanes {
        // SAFETY: the caller gives n readable f32; lanes past n do not touch memory.
        lanes(|i| if i < n { unsafe { p.add(i).read_unaligned() } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store(self, a: Lanes, p: *mut f32) {
        // SAFETY: the caller gives sixteen writable f32.
        unsafe { p.cast::<Lanes>().write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn store_first(self, a: Lanes, p: *mut f32, n: usize) {
        for (i, x) in a.iter().enumerate().take(n) {
            // SAFETY: the caller gives n writable f32.
            unsafe { p.add(i).write_unaligned(*x) }
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Lanes {
        // SAFETY: the caller gives sixteen readable u16.
        lanes(|i| f16::from_bits(unsafe { p.add(i).read_unaligned() }).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(self, a: Lanes, p: *mut u16) {
        for (i, x) in a.iter().enumerate() {
            // SAFETY: the caller gives sixteen writable u16.
            unsafe { p.add(i).write_unaligned(f16::from_f32(*x).to_bits()) }
        }
    }
    #[inline(always)]
    unsafe fn splat_f16(self, p: *const u16) -> Lanes {
        // SAFETY: the caller gives one readable u16.
        [f16::from_bits(unsafe { p.read_unaligned() }).to_f32(); LANES]
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Lanes {
        // SAFETY: the caller gives sixteen readable u16.
        lanes(|i| f32::from_bits(u32::from(unsafe { p.add(i).read_unaligned() }) << 16))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, a: Lanes, p: *mut u16) -> Lanes {
        let rounded = a.map(|x| {
            let bits = x.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            if x.is_nan() { 0x7fc0 } else { rounded as u16 }
        });
        for (i, x) in rounded.iter().enumerate() {
            // SAFETY: the caller gives sixteen writable u16.
            unsafe { p.add(i).write_unaligned(*x) }
        }
        lanes(|i| f32::from_bits(u32::from(rounded[i]) << 16))
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Lanes {
        // SAFETY: the caller gives sixteen readable i8.
        lanes(|i| f32::from(unsafe { p.add(i).read() }))
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Lanes {
        lanes(|i| {
            // SAFETY: the caller gives sixteen readable bytes.
            let code = u16::from(unsafe { p.add(i).read() });
            f16::from_bits((code & 0x80) << 8 | (code & 0x7f) << 7).to_f32() * 256.0
        })
    }
    #[inline(always)]
    unsafe fn load_i4<const UPPER: bool>(self, p: *const u8) -> Lanes {
        lanes(|i| {
            // SAFETY: the caller gives sixteen readable bytes.
            let byte = unsafe { p.add(i).read() };
            f32::from(if UPPER { byte >> 4 } else { byte & 15 }) - 8.0
        })
    }
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
}
