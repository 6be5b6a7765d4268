//! Sources for each weight type: the definition of the type, then the common text.

use super::Source;
use kernels::quant::GgmlType;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Sources of quantised types, with the bits, levels, offset and scaling that `format.cuh` expects.
macro_rules! quantised {
    ($($source:ident $name:literal $bits:literal $levels:ident $offset:literal $scaling:ident,)*) => {
        $(
            #[doc = concat!("Products with ", stringify!($source), ".")]
            pub const $source: Source = Source {
                name: concat!($name, ".cu"),
                text: concat!(
                    "#define NAME(kernel) ", $name, "_##kernel\n",
                    "#define BITS ", $bits, "\n",
                    "#define LEVELS ", stringify!($levels), "\n",
                    "#define OFFSET ", $offset, "\n",
                    "#define SCALING ", stringify!($scaling), "\n",
                    "#line 1 \"format.cuh\"\n",
                    include_str!("../matmul/format.cuh"),
                    "#line 1 \"product.cuh\"\n",
                    include_str!("../matmul/product.cuh"),
                    "#line 1 \"exact.cuh\"\n",
                    include_str!("../matmul/exact.cuh"),
                    "#line 1 \"quantised.cu\"\n",
                    include_str!("../matmul/quantised.cu"),
                ),
                kernels: &[
                    concat!($name, "_embed"),
                    concat!($name, "_mul_1"),
                    concat!($name, "_mul_4"),
                    concat!($name, "_mul_8"),
                    concat!($name, "_mul_32"),
                    concat!($name, "_mul_128"),
                    concat!($name, "_exact_2"),
                ],
            };
        )*

        fn of_quantised(ty: GgmlType) -> Option<&'static Source> {
            match ty {
                $(GgmlType::$source => Some(&$source),)*
                GgmlType::FP8 => Some(&FP8),
                _ => None,
            }
        }

        #[cfg(test)]
        mod tests {
            use kernels::quant::{Bits, GgmlType, Levels, Scaling, Scheme};

            #[test]
            fn sources_match_the_quantisation_schemes() {
                $({
                    let ty = GgmlType::$source;
                    let scheme = Scheme::of(ty).unwrap();
                    let bits = match scheme.bits {
                        Bits::Two => 2,
                        Bits::Three => 3,
                        Bits::Four => 4,
                        Bits::Five => 5,
                        Bits::Six => 6,
                        Bits::Eight => 8,
                    };
                    assert_eq!(bits, $bits, "{ty}");
                    // Levels of codebooks and of 8 bits are stored directly.
                    let plain = scheme.levels == Levels::Plain;
                    assert_eq!(plain, stringify!($levels) == "PLAIN");
                    assert_eq!(if plain && bits < 8 { scheme.offset } else { 0 }, $offset, "{ty}");
                    let scaling = match scheme.scaling {
                        Scaling::F32 => "F32",
                        Scaling::F16 => "F16",
                        Scaling::F16Min => "F16_MIN",
                        Scaling::E8m0 => "E8M0",
                        Scaling::Super => "SUPER",
                        Scaling::SuperMin => "SUPER_MIN",
                        Scaling::Sixteenths if ty == GgmlType::Q3_K => "SIXTEENTHS_PACKED",
                        Scaling::Sixteenths => "SIXTEENTHS",
                        Scaling::SixteenthsMin => "SIXTEENTHS_MIN",
                        Scaling::Ue4m3 => "UE4M3",
                    };
                    assert_eq!(scaling, stringify!($scaling), "{ty}");
                })*
            }
        }
    };
}

/// Products with FP8. The levels are no integers, so there are no products with 8-bit activations.
pub const FP8: Source = Source {
    name: "fp8.cu",
    text: concat!(
        "#define NAME(kernel) fp8_##kernel\n",
        "#define BITS 8\n",
        "#define LEVELS E4M3\n",
        "#define OFFSET 0\n",
        "#define SCALING F32\n",
        "#line 1 \"format.cuh\"\n",
        include_str!("../matmul/format.cuh"),
        "#line 1 \"product.cuh\"\n",
        include_str!("../matmul/product.cuh"),
        "#line 1 \"exact.cuh\"\n",
        include_str!("../matmul/exact.cuh"),
        "#line 1 \"floats.cu\"\n",
        include_str!("../matmul/floats.cu"),
    ),
    kernels: &["fp8_embed", "fp8_mul_1", "fp8_mul_4"],
};

/// Sources of types whose blocks have scales that tensor cores apply, with the scaling that `format.cuh` expects.
macro_rules! scaled {
    ($($source:ident $ty:ident $name:literal $scaling:ident,)*) => {
        $(
            #[doc = concat!("Products of ", stringify!($ty), " on tensor cores that multiply blocks with scales.")]
            pub const $source: Source = Source {
                name: concat!($name, "_scaled.cu"),
                text: concat!(
                    "#define NAME(kernel) ", $name, "_##kernel\n",
                    "#define BITS 4\n",
                    "#define LEVELS E2M1\n",
                    "#define OFFSET 0\n",
                    "#define SCALING ", stringify!($scaling), "\n",
                    "#line 1 \"format.cuh\"\n",
                    include_str!("../matmul/format.cuh"),
                    "#line 1 \"product.cuh\"\n",
                    include_str!("../matmul/product.cuh"),
                    "#line 1 \"scaled.cu\"\n",
                    include_str!("../matmul/scaled.cu"),
                ),
                kernels: &[
                    concat!($name, "_scaled_1"),
                    concat!($name, "_scaled_8"),
                    concat!($name, "_scaled_32"),
                    concat!($name, "_scaled_128"),
                ],
            };
        )*

        /// Returns the source of a type's products on tensor cores that multiply blocks with scales, or `None` if it
        /// has none.
        pub fn scaled(ty: GgmlType) -> Option<&'static Source> {
            match ty {
                $(GgmlType::$ty => Some(&$source),)*
                _ => None,
            }
        }
    };
}

scaled! {
    MXFP4_SCALED MXFP4 "mxfp4" E8M0,
    NVFP4_SCALED NVFP4 "nvfp4" UE4M3,
}

/// Returns the source of a type's products with bf16 activations, which is made once, or `None` if it has none.
pub fn bf16(ty: GgmlType) -> Option<&'static Source> {
    static MADE: Mutex<BTreeMap<&str, &'static Source>> = Mutex::new(BTreeMap::new());
    let source = of(ty).filter(|_| ty != GgmlType::F32)?;
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    Some(made.entry(source.name).or_insert_with(|| {
        // The definition of the type, without its kernels.
        let definition = source.text.rsplit_once("#line 1").map_or("", |(definition, _)| definition);
        let (file, pairs) = match ty {
            GgmlType::F16 | GgmlType::BF16 => ("plain_pairs.cuh", include_str!("../matmul/plain_pairs.cuh")),
            _ => ("quantised_pairs.cuh", include_str!("../matmul/quantised_pairs.cuh")),
        };
        let products = include_str!("../matmul/bf16_products.cu");
        let text = format!("{definition}#line 1 \"{file}\"\n{pairs}#line 1 \"bf16_products.cu\"\n{products}");
        let ty = source.name.trim_end_matches(".cu");
        let kernels =
            ["bf16_1", "bf16_8", "bf16_32", "bf16_128"].map(|kernel| &*format!("{ty}_{kernel}").leak());
        let name = format!("{ty} with bf16.cu").leak();
        Box::leak(Box::new(Source { name, text: text.leak(), kernels: Box::leak(Box::new(kernels)) }))
    }))
}

macro_rules! plain {
    ($($source:ident $name:literal $element:ident,)*) => {
        $(
            #[doc = concat!("Products with ", stringify!($source), ".")]
            pub const $source: Source = Source {
                name: concat!($name, ".cu"),
                text: concat!(
                    "#define NAME(kernel) ", $name, "_##kernel\n",
                    "#define ELEMENT ", stringify!($element), "\n",
                    "#include \"prelude.cuh\"\n",
                    "#line 1 \"product.cuh\"\n",
                    include_str!("../matmul/product.cuh"),
                    "#line 1 \"plain.cu\"\n",
                    include_str!("../matmul/plain.cu"),
                ),
                kernels: &[
                    concat!($name, "_embed"),
                    concat!($name, "_mul_1"),
                    concat!($name, "_mul_4"),
                ],
            };
        )*

        /// Returns the source of a type, or `None` if it has no matmul.
        pub fn of(ty: GgmlType) -> Option<&'static Source> {
            match ty {
                $(GgmlType::$source => Some(&$source),)*
                _ => of_quantised(ty),
            }
        }
    };
}

quantised! {
    Q4_0 "q4_0" 4 PLAIN 8 F16,
    Q4_1 "q4_1" 4 PLAIN 0 F16_MIN,
    Q5_0 "q5_0" 5 PLAIN 16 F16,
    Q5_1 "q5_1" 5 PLAIN 0 F16_MIN,
    Q8_0 "q8_0" 8 PLAIN 0 F16,
    Q2_K "q2_k" 2 PLAIN 0 SIXTEENTHS_MIN,
    Q3_K "q3_k" 3 PLAIN 4 SIXTEENTHS_PACKED,
    Q4_K "q4_k" 4 PLAIN 0 SUPER_MIN,
    Q5_K "q5_k" 5 PLAIN 0 SUPER_MIN,
    Q6_K "q6_k" 6 PLAIN 32 SIXTEENTHS,
    IQ4_NL "iq4_nl" 4 IQ4 0 F16,
    IQ4_XS "iq4_xs" 4 IQ4 0 SUPER,
    MXFP4 "mxfp4" 4 E2M1 0 E8M0,
    NVFP4 "nvfp4" 4 E2M1 0 UE4M3,
    INT8 "int8" 8 PLAIN 0 F32,
    INT5 "int5" 5 PLAIN 16 F32,
    INT4 "int4" 4 PLAIN 8 F32,
}

plain! {
    F32 "f32" AN_F32,
    F16 "f16" AN_F16,
    BF16 "bf16" A_BF16,
}
