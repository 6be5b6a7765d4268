//! Rotary embeddings from metadata keys.

use std::f32::consts::TAU;

use super::decoder::Decoder;
use super::shape::limits;
use super::source::Source;
use crate::Error;
use crate::spec::{RopeFactors, RopeSpec, RopeStyle};

impl Decoder<'_> {
    /// The rotary embedding of `rope.freq_base` and `rope.scaling.*`: without scaling, linear, with a factor for each
    /// frequency, or YaRN (arXiv 2309.00071).
    pub(super) fn rope(&self, style: RopeStyle) -> Result<RopeSpec, Error> {
        let (source, plain) = (self.source, self.plain_rope(style)?);
        let freq_scale = match source.metadata().get::<&str>(&source.key("rope.scaling.type"))? {
            Some("yarn") => {
                let yarn = Yarn::read(source)?;
                return Ok(RopeSpec {
                    factors: Some(RopeFactors::Values(yarn.factors(plain.n_rot, plain.base))),
                    magnitude: yarn.magnitude(),
                    ..plain
                });
            }
            Some("longrope") => return self.long_rope(style),
            Some("none") => 1.0,
            // A factor without a type is linear; `rope.scale_linear` is the factor's older name.
            Some("linear") | None => {
                let factor = match source.positive_unless_zero("rope.scaling.factor")? {
                    Some(factor) => Some(factor),
                    None => source.positive_unless_zero("rope.scale_linear")?,
                };
                factor.map_or(1.0, f32::recip)
            }
            Some(other) => {
                return Err(source.refuse("rope.scaling.type", other, "none, linear, longrope or yarn"));
            }
        };
        let factors = source.optional_floats("rope_freqs.weight", &[plain.n_rot / 2])?;
        Ok(RopeSpec { freq_scale, factors: factors.map(RopeFactors::Tensor), ..plain })
    }

    /// Long factors if the context is longer than the original one, if there are factors. They are chosen once: a
    /// sequence's numbers must not change while it grows.
    pub(super) fn long_rope(&self, style: RopeStyle) -> Result<RopeSpec, Error> {
        let (source, plain) = (self.source, self.plain_rope(style)?);
        let factors = |name| source.optional_floats(name, &[plain.n_rot / 2]);
        let (short, long) = (factors("rope_factors_short.weight")?, factors("rope_factors_long.weight")?);
        let factors = match short.zip(long) {
            Some((short, long)) => {
                let key = "rope.scaling.original_context_length";
                let original = source.require_count(key, 1..=limits::CONTEXT)?;
                let is_long = self.shape.context_length > original;
                Some(RopeFactors::ByContext { short, long, original, is_long })
            }
            None => None,
        };
        let magnitude = source.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
        Ok(RopeSpec { factors, magnitude, ..plain })
    }

    /// Axes of the pairs by `rope.dimension_sections`: numbers of pairs of time, height and width. In these
    /// architectures they alternate while both have pairs left; otherwise they follow each other.
    fn axes(&self, pairs: usize) -> Result<Option<Vec<u8>>, Error> {
        const ALTERNATE: [&str; 2] = ["qwen3vl", "qwen3vlmoe"];
        let (source, key) = (self.source, "rope.dimension_sections");
        if !ALTERNATE.contains(&source.arch()) && source.arch() != "qwen2vl" {
            return Ok(None);
        }
        let sections = source.counts(key, 0..=limits::HEAD_DIM)?;
        let refuse = || source.refuse(key, format_args!("{sections:?}"), "counts of all pairs on three axes");
        let [time, height, width, ref rest @ ..] = sections[..] else { return Err(refuse()) };
        if rest.iter().any(|count| *count > 0) || time + height + width != pairs {
            return Err(refuse());
        }
        let axis = |pair: usize| match ALTERNATE.contains(&source.arch()) {
            true if pair % 3 == 1 && pair < 3 * height => 1,
            true if pair % 3 == 2 && pair < 3 * width => 2,
            true => 0,
            false => u8::from(pair >= time) + u8::from(pair >= time + height),
        };
        Ok(Some((0..pairs).map(axis).collect()))
    }

    pub(super) fn plain_rope(&self, style: RopeStyle) -> Result<RopeSpec, Error> {
        let base = self.source.positive("rope.freq_base")?.unwrap_or(10_000.0);
        // A key of Kvasir's, for checkpoints whose rows are not reordered.
        let style = match self.source.metadata().get(&self.source.key("rope.interleaved"))? {
            Some(true) => RopeStyle::Interleaved,
            Some(false) => RopeStyle::Half,
            None => style,
        };
        let n_rot = self.shape.dims.n_rot;
        let axes = self.axes(n_rot / 2)?;
        Ok(RopeSpec { style, n_rot, base, freq_scale: 1.0, factors: None, magnitude: 1.0, axes })
    }
}

/// Frequencies with many rotations in the original context stay unchanged; those with less than one are
/// divided by the factor. Between the two betas (rotations per context) the divisor is a ramp over the
/// dimensions.
struct Yarn {
    factor: f32,
    original_context: usize,
    beta_fast: f32,
    beta_slow: f32,
    attention_factor: f32,
    /// Whether the ramp begins and ends at whole dimensions.
    truncate: bool,
}

impl Yarn {
    fn read(source: &Source<'_>) -> Result<Self, Error> {
        let (factor_key, fast_key) = ("rope.scaling.factor", "rope.scaling.yarn_beta_fast");
        let factor = source.require_positive(factor_key)?;
        if factor < 1.0 {
            return Err(source.refuse(factor_key, factor, "at least 1"));
        }
        let beta_fast = source.positive(fast_key)?.unwrap_or(32.0);
        let beta_slow = source.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0);
        if beta_fast < beta_slow {
            return Err(source.refuse(fast_key, beta_fast, format_args!("at least {beta_slow}")));
        }
        Ok(Self {
            factor,
            original_context: source
                .require_count("rope.scaling.original_context_length", 1..=limits::CONTEXT)?,
            beta_fast,
            beta_slow,
            attention_factor: source.positive("rope.scaling.attn_factor")?.unwrap_or(1.0),
            // A key of Kvasir's: GGUF has none, and its other readers round.
            truncate: source.metadata().get(&source.key("rope.scaling.yarn_truncate"))?.unwrap_or(true),
        })
    }

    /// Divisor of each frequency.
    fn factors(&self, n_rot: usize, base: f32) -> Vec<f32> {
        let last = n_rot.saturating_sub(1) as f32;
        let dimension = |turns: f32| {
            n_rot as f32 * (self.original_context as f32 / (turns * TAU)).ln() / (2.0 * base.ln())
        };
        let (mut low, mut high) = (dimension(self.beta_fast), dimension(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(last));
        let factor = |i: usize| {
            let ramp = ((i as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            (ramp / self.factor + (1.0 - ramp)).recip()
        };
        (0..n_rot / 2).map(factor).collect()
    }

    /// Factor of cosine and sine.
    fn magnitude(&self) -> f32 {
        self.attention_factor * (1.0 + 0.1 * self.factor.ln())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yarn_keeps_fast_frequencies_and_divides_slow_ones() {
        // The released 20B model: head width 64, base 150,000, 4,096 positions stretched 32 times.
        let yarn = Yarn {
            factor: 32.0,
            original_context: 4_096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.0,
            truncate: true,
        };
        let factors = yarn.factors(64, 150_000.0);
        assert_eq!(factors.len(), 32);
        assert!(factors[..=8].iter().all(|&factor| factor == 1.0), "{factors:?}");
        assert!(factors[9] > 1.0 && factors.is_sorted(), "{factors:?}");
        assert!(factors[17] < 32.0 && factors[18..].iter().all(|&factor| factor == 32.0), "{factors:?}");
        assert!((factors[13] - (0.5 / 32.0 + 0.5_f32).recip()).abs() < 1e-6, "{factors:?}");
        assert!((yarn.magnitude() - 1.346_573_6).abs() < 1e-6, "{}", yarn.magnitude());
    }
}
