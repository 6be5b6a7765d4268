//! The code planes and scales of each quantised format, for instruction sets whose kernels are compiled for
//! every combination.

/// Calls `$module::$kernel::<Codes, Scales>` for the format of the call. The caller must import its own
/// `codes` and `scales`.
macro_rules! by_format {
    ($ty:expr, $module:ident::$kernel:ident, $args:tt, $other:expr) => {
        match $ty {
            GgmlType::Q4_0 => $module::$kernel::<Bits4, F16<8>> $args,
            GgmlType::Q4_1 => $module::$kernel::<Bits4, F16Min> $args,
            GgmlType::Q5_0 => $module::$kernel::<Bits5, F16<16>> $args,
            GgmlType::Q5_1 => $module::$kernel::<Bits5, F16Min> $args,
            GgmlType::Q8_0 => $module::$kernel::<Bits8, F16<128>> $args,
            GgmlType::Q2_K => $module::$kernel::<Bits2, SixteenthsMin> $args,
            GgmlType::Q3_K => $module::$kernel::<Bits3, Sixteenths<4>> $args,
            GgmlType::Q4_K => $module::$kernel::<Bits4, SuperMin> $args,
            GgmlType::Q5_K => $module::$kernel::<Bits5, SuperMin> $args,
            GgmlType::Q6_K => $module::$kernel::<Bits6, Sixteenths<32>> $args,
            GgmlType::IQ4_NL => $module::$kernel::<Iq4, F16<128>> $args,
            GgmlType::IQ4_XS => $module::$kernel::<Iq4, Super> $args,
            GgmlType::MXFP4 => $module::$kernel::<E2m1, E8m0> $args,
            GgmlType::NVFP4 => $module::$kernel::<E2m1, Ue4m3> $args,
            GgmlType::FP8 => $module::$kernel::<Bits8, E4m3> $args,
            GgmlType::INT8 => $module::$kernel::<Bits8, F32<128>> $args,
            GgmlType::INT5 => $module::$kernel::<Bits5, F32<16>> $args,
            GgmlType::INT4 => $module::$kernel::<Bits4, F32<8>> $args,
            _ => $other,
        }
    };
}
pub(super) use by_format;
