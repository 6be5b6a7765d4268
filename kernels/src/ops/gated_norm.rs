//! RMS norm together with a silu gate.

use super::norm::{Rms, RmsNorm, for_each_row};
use crate::attention::check_len;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{self, Kernel, LANES, Simd, dispatch};

/// Order of an RMS norm and a silu gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateOrder {
    /// `norm(x silu(gate))`
    GateFirst,
    /// `norm(x) silu(gate)`
    NormFirst,
}

/// Norms and gates each run of `x` in place; `gate` has the length of `x`.
///
/// # Errors
/// [`Error::Length`] if `x` is not a whole number of runs, or `gate` or the weight has another length.
pub fn gated_norm(
    pool: &Pool,
    isa: Isa,
    norm: RmsNorm<'_>,
    order: GateOrder,
    x: &mut [f32],
    gate: &[f32],
) -> Result<(), Error> {
    norm.check(x.len())?;
    check_len("gate", x.len(), gate.len())?;
    let width = norm.width;
    for_each_row(pool, x.len() / width, width, x, |run, x| {
        let gate = &gate[run * width..(run + 1) * width];
        dispatch(isa, GatedRun { norm: norm.of_run(run), order, x, gate });
    });
    Ok(())
}

struct GatedRun<'a> {
    norm: RmsNorm<'a>,
    order: GateOrder,
    x: &'a mut [f32],
    gate: &'a [f32],
}

impl Kernel for GatedRun<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { norm, order, x, gate } = self;
        if order == GateOrder::GateFirst {
            apply(s, x, gate);
        }
        Rms { norm, x: &mut *x }.run(s);
        if order == GateOrder::NormFirst {
            apply(s, x, gate);
        }
    }
}

/// `x *= silu(gate)`
#[inline(always)]
fn apply<S: Simd>(s: S, x: &mut [f32], gate: &[f32]) {
    let (xs, x_rest) = x.as_chunks_mut::<LANES>();
    let (gates, gate_rest) = gate.as_chunks::<LANES>();
    for (x, gate) in xs.iter_mut().zip(gates) {
        s.put(s.mul(s.chunk(x), simd::silu(s, s.chunk(gate))), x);
    }
    s.put_tail(s.mul(s.tail(x_rest), simd::silu(s, s.tail(gate_rest))), x_rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::PoolConfig;
    use crate::reference::rows::{rms_norm, silu};
    use proptest::prelude::*;
    use std::num::NonZeroUsize;

    /// `norm(x silu(gate))` or `norm(x) silu(gate)` of one run.
    fn reference(norm: RmsNorm<'_>, order: GateOrder, x: &[f32], gate: &[f32]) -> Vec<f64> {
        let gates = gate.iter().map(|gate| silu(*gate));
        match order {
            GateOrder::GateFirst => {
                let gated: Vec<f32> =
                    x.iter().zip(gates).map(|(x, gate)| (f64::from(*x) * gate) as f32).collect();
                rms_norm(&gated, norm.weight, norm.eps)
            }
            GateOrder::NormFirst => {
                rms_norm(x, norm.weight, norm.eps).iter().zip(gates).map(|(x, gate)| x * gate).collect()
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_gated_norm_matches_the_reference(
            x in prop::collection::vec((-4.0f32..4.0, -6.0f32..6.0), 1..80),
            runs in 1..4usize,
            per_row in any::<bool>(),
            gate_first in any::<bool>(),
        ) {
            let (x, gate): (Vec<f32>, Vec<f32>) = x.into_iter().unzip();
            let width = x.len();
            let (x, gate) = (x.repeat(runs), gate.repeat(runs));
            let weight: Vec<f32> = (0..x.len()).map(|i| 0.5 + (i % 37) as f32 / 20.0).collect();
            let weight = &weight[..if per_row { x.len() } else { width }];
            let norm = RmsNorm { width, weight: Some(weight), eps: 1e-5 };
            let order = if gate_first { GateOrder::GateFirst } else { GateOrder::NormFirst };
            let run = |isa, threads| {
                let pool = Pool::new(PoolConfig::new(NonZeroUsize::new(threads).unwrap())).unwrap();
                let mut out = x.clone();
                gated_norm(&pool, isa, norm, order, &mut out, &gate).unwrap();
                out
            };
            let out = run(Isa::Scalar, 1);
            for isa in Isa::available() {
                prop_assert_eq!(run(isa, 2), &out[..]);
            }
            for (i, out) in out.chunks(width).enumerate() {
                let range = i * width..(i + 1) * width;
                let norm = RmsNorm { weight: Some(if per_row { &weight[range.clone()] } else { weight }), ..norm };
                let expected = reference(norm, order, &x[range.clone()], &gate[range]);
                for (out, expected) in out.iter().zip(expected) {
                    let error = (f64::from(*out) - expected).abs();
                    prop_assert!(error <= 4e-6 * expected.abs().max(1.0), "{} is not {}", out, expected);
                }
            }
        }
    }

    #[test]
    fn other_lengths_are_refused() {
        let pool = Pool::new(PoolConfig::new(NonZeroUsize::MIN)).unwrap();
        let norm = RmsNorm { width: 4, weight: Some(&[1.0; 4]), eps: 1e-5 };
        let run = |norm, x: usize, gate: usize| {
            gated_norm(&pool, Isa::Scalar, norm, GateOrder::NormFirst, &mut vec![1.0; x], &vec![1.0; gate])
        };
        assert_eq!(run(norm, 8, 8), Ok(()));
        for result in
            [run(norm, 8, 4), run(norm, 6, 6), run(RmsNorm { weight: Some(&[1.0; 3]), ..norm }, 8, 8)]
        {
            assert!(matches!(result, Err(Error::Length { .. })), "{result:?}");
        }
    }
}
