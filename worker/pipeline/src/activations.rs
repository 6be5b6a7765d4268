//! Converts activations from and to bytes.

use proto::stage::ActivationType;

/// Encodes values in little endian. Bf16 rounds to nearest, ties to even.
pub fn encode(element: ActivationType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * element.bytes()];
    match element {
        ActivationType::F32 => {
            bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, x)| *out = x.to_le_bytes());
        }
        ActivationType::Bf16 => {
            let out = bytes.as_chunks_mut().0.iter_mut();
            out.zip(values).for_each(|(out, x)| *out = to_bf16(*x).to_le_bytes());
        }
    }
    bytes
}

/// Decodes the bytes of [`encode`] as they arrive, split at any byte.
#[derive(Debug)]
pub struct Gathered {
    element: ActivationType,
    values: Vec<f32>,
    /// The first bytes of an incomplete element.
    partial: [u8; 4],
    partial_len: usize,
}

impl Gathered {
    pub fn new(element: ActivationType) -> Self {
        Self { element, values: Vec::new(), partial: [0; 4], partial_len: 0 }
    }

    pub fn push(&mut self, mut bytes: &[u8]) {
        let width = self.element.bytes();
        if self.partial_len > 0 {
            let (end, rest) = bytes.split_at(bytes.len().min(width - self.partial_len));
            self.push_partial(end);
            bytes = rest;
            if self.partial_len == width {
                let partial = self.partial;
                self.decode(&partial[..width]);
                self.partial_len = 0;
            }
        }
        let (whole, rest) = bytes.split_at(bytes.len() / width * width);
        self.decode(whole);
        self.push_partial(rest);
    }

    /// Returns all elements since the last call.
    pub fn take(&mut self) -> Vec<f32> {
        self.partial_len = 0;
        std::mem::take(&mut self.values)
    }

    fn push_partial(&mut self, bytes: &[u8]) {
        self.partial.iter_mut().skip(self.partial_len).zip(bytes).for_each(|(into, byte)| *into = *byte);
        self.partial_len += bytes.len();
    }

    fn decode(&mut self, bytes: &[u8]) {
        match self.element {
            ActivationType::F32 => {
                self.values.extend(bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)));
            }
            ActivationType::Bf16 => {
                let wide = |x: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16);
                self.values.extend(bytes.as_chunks().0.iter().map(wide));
            }
        }
    }
}

fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // Rounding must not turn a NaN into an infinity.
        return (bits >> 16) as u16 | 0x40;
    }
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use ActivationType::{Bf16, F32};

    fn decode(element: ActivationType, bytes: &[u8], piece: usize) -> Vec<f32> {
        let mut gathered = Gathered::new(element);
        bytes.chunks(piece).for_each(|piece| gathered.push(piece));
        gathered.take()
    }

    #[test]
    fn f32_changes_no_bit_however_it_is_split() {
        let values = [0.0, -0.0, 1.5, f32::MIN_POSITIVE / 8.0, f32::MAX, f32::INFINITY, f32::NAN];
        for piece in 1..=30 {
            let back = decode(F32, &encode(F32, &values), piece);
            assert_eq!(back.len(), values.len());
            assert!(back.iter().zip(values).all(|(a, b)| a.to_bits() == b.to_bits()), "pieces of {piece}");
        }
    }

    #[test]
    fn brain_floats_round_to_nearest_even() {
        let bits = |value: u32| decode(Bf16, &encode(Bf16, &[f32::from_bits(value)]), 1)[0].to_bits();
        for (value, expected) in [
            (0x3f80_0000, 0x3f80_0000),
            (0x3f80_7fff, 0x3f80_0000),
            (0x3f80_8000, 0x3f80_0000),
            (0x3f81_8000, 0x3f82_0000),
            (0x3f80_8001, 0x3f81_0000),
            (0xbf80_8001, 0xbf81_0000),
            (0x7f7f_ffff, 0x7f80_0000),
            (0xff80_0000, 0xff80_0000),
        ] {
            assert_eq!(bits(value), expected, "{value:x}");
        }
        assert!(f32::from_bits(bits(0x7f80_0001)).is_nan());
    }
}
