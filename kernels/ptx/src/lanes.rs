//! Values of a warp: one per lane, side by side, so that a loop over the lanes compiles to vector
//! instructions.

pub(crate) const LANES: usize = 32;
pub(crate) const ALL: u32 = u32::MAX;

/// 32-bit values; narrower ones are zero-extended.
pub(crate) type V32 = [u32; LANES];
/// 64-bit values.
pub(crate) type V64 = [u64; LANES];

/// Makes a function of warps from a function of lanes: `lanes!(|a: V32, b: V32| -> V32 { a.wrapping_add(b)
/// })`.
macro_rules! lanes {
    (|$($a:ident: $t:ty),+| -> $r:ty { $e:expr }) => {{
        fn of_a_warp($($a: &$t,)+ out: &mut $r) {
            for lane in 0..$crate::lanes::LANES {
                $(let $a = $a[lane];)+
                out[lane] = $e;
            }
        }
        of_a_warp as fn($(&$t,)+ &mut $r)
    }};
}

/// Makes a function that returns the mask of the lanes for which a condition holds.
macro_rules! compare {
    (|$a:ident: $t:ty, $b:ident| $e:expr) => {{
        fn of_a_warp($a: &$t, $b: &$t) -> u32 {
            let mut mask = 0;
            for lane in 0..$crate::lanes::LANES {
                let ($a, $b) = ($a[lane], $b[lane]);
                mask |= u32::from($e) << lane;
            }
            mask
        }
        of_a_warp as fn(&$t, &$t) -> u32
    }};
}

pub(crate) use {compare, lanes};

/// Returns the lanes of a mask, lowest first.
pub(crate) fn each(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (lane < LANES).then_some(lane)
    })
}
