use proptest::prelude::*;

use super::*;

/// The results of every operation on one set of lanes, as bits.
struct Everything {
    a: [f32; LANES],
    b: [f32; LANES],
    c: [f32; LANES],
    n: usize,
    m: usize,
}

impl Kernel for Everything {
    type Output = Vec<u32>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<u32> {
        let (a, b, c) = (s.chunk(&self.a), s.chunk(&self.b), s.chunk(&self.c));
        let (mut halves, mut narrow) = ([0u16; LANES], [0u16; LANES]);
        let bytes: [i8; LANES] = std::array::from_fn(|i| (self.a[i] * 100.0) as i8);
        // SAFETY: sixteen elements each.
        let (rounded, brain) =
            unsafe { (s.store_bf16(a, narrow.as_mut_ptr()), s.load_bf16(narrow.as_ptr())) };
        // SAFETY: as above.
        let (half, byte, one) = unsafe {
            s.store_f16(a, halves.as_mut_ptr());
            (s.load_f16(halves.as_ptr()), s.load_i8(bytes.as_ptr()), s.splat_f16(halves.as_ptr().add(3)))
        };
        let vectors = [
            s.add(a, b),
            s.sub(a, b),
            s.mul(a, b),
            s.div(a, b),
            s.abs(a),
            s.fma(a, b, c),
            s.max(a, b),
            s.min(a, b),
            s.select_lt(a, b, c, a),
            s.keep_lanes(a, self.n.min(self.m), self.n.max(self.m), b),
            s.swap_pairs(a),
            s.tail(&self.a[..self.n]),
            s.shift_to_exponent(a),
            half,
            byte,
            one,
            rounded,
            brain,
            exp(s, a),
            silu(s, a),
            gelu_tanh(s, a),
            softcap(s, a, s.splat(5.0), s.splat(0.2)),
            softplus(s, a),
        ];
        let mut out: Vec<u32> = Vec::new();
        for vector in vectors {
            let mut lanes = [0.0; LANES];
            s.put(vector, &mut lanes);
            out.extend(lanes.map(f32::to_bits));
        }
        let mut short = [9.0; LANES];
        s.put_tail(a, &mut short[..self.n]);
        out.extend(short.map(f32::to_bits));
        out.extend(halves.map(u32::from));
        out.extend(narrow.map(u32::from));
        out.extend([s.reduce_add(a).to_bits(), s.reduce_max(a).to_bits(), u32::from(s.any_gt(a, b))]);
        out
    }
}

fn number() -> impl Strategy<Value = f32> {
    prop_oneof![-2.0f32..2.0, -100.0f32..100.0, Just(0.0), Just(-0.0), Just(f32::NEG_INFINITY), Just(7e4)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_isa_gives_the_same_bits(
        a in prop::array::uniform16(number()),
        b in prop::array::uniform16(-3.0f32..3.0),
        c in prop::array::uniform16(number()),
        n in 0..=LANES,
        m in 0..=LANES,
    ) {
        let run = |isa| dispatch(isa, Everything { a, b, c, n, m });
        let expected = run(Isa::Scalar);
        for isa in Isa::available() {
            for (i, (got, expected)) in run(isa).iter().zip(&expected).enumerate() {
                let (got, expected) = (f32::from_bits(*got), f32::from_bits(*expected));
                let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
                prop_assert!(same, "{isa}, vector {} lane {}: {got} is not {expected}", i / LANES, i % LANES);
            }
        }
    }
}

struct Apply<F>(F, f32);

/// A function of one number, on vectors.
trait Function {
    fn at<S: Simd>(&self, s: S, x: S::V) -> S::V;
}

macro_rules! function {
    ($name:ident, $s:ident, $x:ident, $value:expr) => {
        #[derive(Clone, Copy)]
        struct $name;
        impl Function for $name {
            #[inline(always)]
            fn at<S: Simd>(&self, $s: S, $x: S::V) -> S::V {
                $value
            }
        }
    };
}

function!(Exp, s, x, exp(s, x));
function!(Silu, s, x, silu(s, x));
function!(Gelu, s, x, gelu_tanh(s, x));
function!(Softplus, s, x, softplus(s, x));
function!(GeluErf, s, x, gelu_erf(s, x));
function!(Sigmoid, s, x, sigmoid(s, x));
function!(Clamped, s, x, clamped_swiglu(s, x, s.splat(0.5)));
function!(Cap, s, x, softcap(s, x, s.splat(30.0), s.splat(1.0 / 30.0)));

impl<F: Function> Kernel for Apply<F> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        s.reduce_max(self.0.at(s, s.splat(self.1)))
    }
}

/// Largest error relative to the larger of the value and `min_magnitude`, over a dense sweep.
fn worst<F: Function + Copy>(
    f: F,
    from: f32,
    to: f32,
    min_magnitude: f64,
    expected: impl Fn(f64) -> f64,
) -> f64 {
    const STEPS: usize = 200_000;
    (0..=STEPS)
        .map(|i| {
            let x = from + (to - from) * (i as f32 / STEPS as f32);
            let expected = expected(f64::from(x));
            (f64::from(dispatch(Isa::detect(), Apply(f, x))) - expected).abs()
                / expected.abs().max(min_magnitude)
        })
        .fold(0.0, f64::max)
}

#[test]
fn functions_are_accurate() {
    use crate::reference::{recurrent, rows};
    assert!(worst(Exp, -87.0, 88.0, 0.0, f64::exp) < 2e-7);
    assert!(worst(Silu, -80.0, 80.0, 1e-30, |x| rows::silu(x as f32)) < 4e-7);
    assert!(worst(Gelu, -9.0, 30.0, 1e-3, |x| rows::gelu_tanh(x as f32)) < 3e-6);
    assert!(worst(Softplus, -87.0, 100.0, 0.0, recurrent::softplus) < 3e-7);
    // Relative to the value itself even far into the tail, where 1 + erf would have no precision left.
    assert!(worst(GeluErf, -2.0, 30.0, 0.0, |x| rows::gelu_erf(x as f32)) < 5e-7);
    assert!(worst(GeluErf, -5.0, -2.0, 0.0, |x| rows::gelu_erf(x as f32)) < 2e-6);
    assert!(worst(GeluErf, -13.0, 30.0, 1.0, |x| rows::gelu_erf(x as f32)) < 2e-7);
    assert!(worst(Sigmoid, -80.0, 80.0, 0.0, |x| rows::sigmoid(x as f32)) < 4e-7);
    assert!(worst(Clamped, -40.0, 40.0, 1e-2, |x| rows::clamped_swiglu(x as f32, 0.5)) < 1e-6);
    assert!(worst(Cap, -300.0, 300.0, 1e-6, |x| 30.0 * (x / 30.0).tanh()) < 1e-6);
}

/// Stores a number as bfloat16. Returns the stored number and its bits.
struct Narrow(f32);

impl Kernel for Narrow {
    type Output = (f32, u16);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, u16) {
        let mut bits = [0; LANES];
        // SAFETY: sixteen elements.
        let stored = unsafe { s.store_bf16(s.splat(self.0), bits.as_mut_ptr()) };
        (s.reduce_max(stored), bits[LANES - 1])
    }
}

#[test]
fn bfloat16_is_rounded_to_nearest_even() {
    // Upper halves in steps of 7, with lower halves below, at and above the middle between two neighbours.
    for (high, low) in
        (0..=u16::MAX).step_by(7).flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001].map(|low| (high, low)))
    {
        let x = f32::from_bits(u32::from(high) << 16 | low);
        let expected = half::bf16::from_f32(x);
        for isa in Isa::available() {
            let (stored, bits) = dispatch(isa, Narrow(x));
            let same = bits == expected.to_bits() && stored.to_bits() == expected.to_f32().to_bits();
            assert!(same || x.is_nan() && bits == 0x7fc0 && stored.is_nan(), "{isa}: {x:e} is {bits:x}");
        }
    }
}

#[test]
fn exp_at_its_ends() {
    let at = |x| dispatch(Isa::detect(), Apply(Exp, x));
    assert_eq!(at(0.0), 1.0);
    for x in [f32::NEG_INFINITY, -1e30, -87.1] {
        assert_eq!(at(x).to_bits(), 0);
    }
    assert!(at(f32::INFINITY).is_finite() && at(f32::INFINITY) > 1e38);
    assert!(at(f32::NAN).is_nan());
}
