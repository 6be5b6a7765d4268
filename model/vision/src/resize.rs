//! Antialiased resizing of 8 bit images as torchvision does it on a CPU: two passes, across and then down, with the
//! weights as 16 bit integers and a result of 8 bits after each. Pillow differs in the precision of the weights only.

#[cfg(test)]
mod tests;

use std::f64::consts::PI;

/// An image of three 8 bit channels, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rgb {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) bytes: Vec<u8>,
}

impl Rgb {
    pub(crate) fn filled(width: usize, height: usize, colour: [u8; 3]) -> Self {
        Self { width, height, bytes: colour.repeat(width * height) }
    }

    /// A part of the image.
    pub(crate) fn crop(&self, left: usize, top: usize, width: usize, height: usize) -> Self {
        let mut bytes = Vec::with_capacity(width * height * 3);
        for y in top..top + height {
            let start = (y * self.width + left) * 3;
            bytes.extend_from_slice(&self.bytes[start..start + width * 3]);
        }
        Self { width, height, bytes }
    }

    /// Copies `other` to a place where it fits.
    pub(crate) fn paste(&mut self, other: &Self, left: usize, top: usize) {
        for (y, row) in other.bytes.chunks_exact(other.width * 3).enumerate() {
            let start = ((top + y) * self.width + left) * 3;
            self.bytes[start..start + row.len()].copy_from_slice(row);
        }
    }
}

/// The values of `resample` in preprocessor_config.json.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filter {
    Lanczos,
    Bilinear,
    Bicubic,
}

impl Filter {
    fn support(self) -> f64 {
        match self {
            Self::Lanczos => 3.0,
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        let x = x.abs();
        let sinc = |x: f64| if x == 0.0 { 1.0 } else { (x * PI).sin() / (x * PI) };
        match self {
            Self::Lanczos if x < 3.0 => sinc(x) * sinc(x / 3.0),
            Self::Bilinear if x < 1.0 => 1.0 - x,
            // Keys' kernel with a = -0.5.
            Self::Bicubic if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0,
            _ => 0.0,
        }
    }
}

/// Weights of one direction: for each output the first input, and the weights from there on.
struct Weights {
    first: Vec<usize>,
    weights: Vec<Vec<i32>>,
    /// Fraction bits of the weights.
    bits: u32,
}

impl Weights {
    fn new(filter: Filter, from: usize, to: usize) -> Self {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let support = filter.support() * stretch;
        let mut first = Vec::with_capacity(to);
        let mut floats = Vec::with_capacity(to);
        let mut largest = 0.0_f64;
        for i in 0..to {
            let centre = scale * (i as f64 + 0.5);
            let start = (centre - support + 0.5).max(0.0) as usize;
            let end = ((centre + support + 0.5) as usize).min(from);
            let weights: Vec<f64> =
                (start..end).map(|j| filter.weight((j as f64 - centre + 0.5) / stretch)).collect();
            let sum: f64 = weights.iter().sum();
            let weights: Vec<f64> =
                weights.iter().map(|weight| if sum == 0.0 { *weight } else { weight / sum }).collect();
            largest = weights.iter().fold(largest, |most, weight| most.max(*weight));
            first.push(start);
            floats.push(weights);
        }
        // The most bits with which the largest weight fits into 16, at most 22.
        let mut bits = 0;
        while bits < 22 && 0.5 + largest * f64::from(1_u32 << (bits + 1)) < f64::from(1 << 15) {
            bits += 1;
        }
        let unit = f64::from(1_u32 << bits);
        let fixed = |weight: &f64| (weight * unit + 0.5_f64.copysign(*weight)) as i32;
        let weights = floats.iter().map(|weights| weights.iter().map(fixed).collect()).collect();
        Self { first, weights, bits }
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &[i32])> {
        self.first.iter().copied().zip(self.weights.iter().map(Vec::as_slice))
    }

    fn round(&self, sum: i32) -> u8 {
        (sum >> self.bits).clamp(0, 255) as u8
    }

    /// Half of a unit, so that the shift of [`round`](Self::round) rounds.
    fn half(&self) -> i32 {
        (1 << self.bits) >> 1
    }
}

/// The image with `width` times `height` pixels.
pub(crate) fn resize(image: Rgb, width: usize, height: usize, filter: Filter) -> Rgb {
    let mut image = image;
    if width != image.width {
        let weights = Weights::new(filter, image.width, width);
        let mut bytes = Vec::with_capacity(width * image.height * 3);
        for row in image.bytes.chunks_exact(image.width * 3) {
            for (first, weights_of) in weights.iter() {
                let mut sums = [weights.half(); 3];
                for (pixel, weight) in row[first * 3..].chunks_exact(3).zip(weights_of) {
                    for (sum, byte) in sums.iter_mut().zip(pixel) {
                        *sum += i32::from(*byte) * weight;
                    }
                }
                bytes.extend(sums.map(|sum| weights.round(sum)));
            }
        }
        image = Rgb { width, height: image.height, bytes };
    }
    if height != image.height {
        let weights = Weights::new(filter, image.height, height);
        let mut bytes = Vec::with_capacity(width * height * 3);
        let mut sums = vec![0; width * 3];
        for (first, weights_of) in weights.iter() {
            sums.fill(weights.half());
            for (row, weight) in image.bytes.chunks_exact(width * 3).skip(first).zip(weights_of) {
                for (sum, byte) in sums.iter_mut().zip(row) {
                    *sum += i32::from(*byte) * weight;
                }
            }
            bytes.extend(sums.iter().map(|sum| weights.round(*sum)));
        }
        image = Rgb { width, height, bytes };
    }
    image
}
