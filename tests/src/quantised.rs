//! Tiny models with quantised matrices, generated on demand, since the oracle set has F32 files only.
//!
//! Reads and writes GGUF without Kvasir's code. Scales are powers of two, which are exact in f16: bitwise
//! comparisons need no optimal scales.

use anyhow::{Context, ensure};
use std::path::Path;

/// Weights that share a scale.
const BLOCK: usize = 32;
const ALIGNMENT: usize = 32;
const F32: u32 = 0;

/// How a matrix is stored.
#[derive(Debug, Clone, Copy)]
enum Format {
    Q4_0,
    Q8_0,
}

struct Tensor<'a> {
    name: &'a [u8],
    dims: Vec<u64>,
    ty: u32,
    data: Vec<u8>,
}

/// Writes `model`, a file of F32 weights, to `out` with its matrices alternately in Q8_0 and Q4_0. Norms,
/// biases, convolutions, routers and rows that are not whole blocks stay unchanged.
pub fn write(model: &Path, out: &Path) -> anyhow::Result<()> {
    let file = std::fs::read(model).with_context(|| model.display().to_string())?;
    let quantised = quantise(&file).with_context(|| model.display().to_string())?;
    std::fs::write(out, quantised).with_context(|| out.display().to_string())
}

fn quantise(file: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut at = Cursor { file, at: 0 };
    ensure!(at.take(4)? == b"GGUF" && at.u32()? == 3, "not a GGUF file of version 3");
    let (tensors, keys) = (at.u64()?, at.u64()?);
    for _ in 0..keys {
        at.string()?;
        let ty = at.u32()?;
        at.skip_value(ty)?;
    }
    let head = &file[..at.at];
    let infos = (0..tensors).map(|_| {
        let name = at.string()?;
        let dims = (0..at.u32()?).map(|_| at.u64()).collect::<anyhow::Result<Vec<u64>>>()?;
        Ok((name, dims, at.u32()?, at.u64()? as usize))
    });
    let infos: Vec<_> = infos.collect::<anyhow::Result<_>>()?;
    let first = at.at.next_multiple_of(ALIGNMENT);
    let mut formats = [Format::Q8_0, Format::Q4_0].into_iter().cycle();
    let mut written = Vec::with_capacity(infos.len());
    for (name, dims, ty, offset) in infos {
        ensure!(ty == F32, "{} is not F32", String::from_utf8_lossy(name));
        let bytes = dims.iter().product::<u64>() as usize * 4;
        let data = file.get(first + offset..).and_then(|rest| rest.get(..bytes)).context("cut short")?;
        let format = if is_matrix(name, &dims) { formats.next() } else { None };
        let tensor = match format {
            Some(format) => Tensor { name, dims, ty: format.number(), data: format.encode(data) },
            None => Tensor { name, dims, ty, data: data.to_vec() },
        };
        written.push(tensor);
    }
    ensure!(written.iter().any(|tensor| tensor.ty != F32), "nothing was quantised");
    Ok(assemble(head, &written))
}

fn is_matrix(name: &[u8], dims: &[u64]) -> bool {
    let plain = [&b"norm"[..], b"conv1d", b"ffn_gate_inp", b"position_embd", b"token_types"];
    dims.len() > 1
        && dims[0].is_multiple_of(BLOCK as u64)
        && name.ends_with(b".weight")
        && !plain.iter().any(|pattern| name.windows(pattern.len()).any(|window| window == *pattern))
}

fn assemble(head: &[u8], tensors: &[Tensor<'_>]) -> Vec<u8> {
    let mut file = head.to_vec();
    let mut offset = 0;
    for tensor in tensors {
        file.extend((tensor.name.len() as u64).to_le_bytes());
        file.extend(tensor.name);
        file.extend((tensor.dims.len() as u32).to_le_bytes());
        file.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
        file.extend(tensor.ty.to_le_bytes());
        file.extend((offset as u64).to_le_bytes());
        offset += tensor.data.len().next_multiple_of(ALIGNMENT);
    }
    for tensor in tensors {
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend(&tensor.data);
    }
    file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
    file
}

impl Format {
    /// Type number in GGUF.
    fn number(self) -> u32 {
        match self {
            Self::Q4_0 => 2,
            Self::Q8_0 => 8,
        }
    }

    fn encode(self, floats: &[u8]) -> Vec<u8> {
        let values: Vec<f32> = floats.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        values.as_chunks::<BLOCK>().0.iter().flat_map(|block| self.block(block)).collect()
    }

    fn block(self, values: &[f32; BLOCK]) -> Vec<u8> {
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let steps = match self {
            Self::Q4_0 => 7.0,
            Self::Q8_0 => 127.0,
        };
        // Within the exponents of a normal f16.
        let exponent = (largest / steps).log2().ceil().clamp(-14.0, 15.0);
        let scale = exponent.exp2();
        let level = |value: f32| (value / scale).round().clamp(-steps, steps) as i8;
        let mut bytes = (((exponent as i32 + 15) << 10) as u16).to_le_bytes().to_vec();
        match self {
            Self::Q8_0 => bytes.extend(values.iter().map(|value| level(*value) as u8)),
            Self::Q4_0 => {
                let (low, high) = values.split_at(BLOCK / 2);
                let nibble = |value: f32| (level(value) + 8) as u8;
                bytes.extend(low.iter().zip(high).map(|(low, high)| nibble(*low) | nibble(*high) << 4));
            }
        }
        bytes
    }
}

struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> anyhow::Result<&'a [u8]> {
        let taken = self.file.get(self.at..).and_then(|rest| rest.get(..len)).context("cut short")?;
        self.at += len;
        Ok(taken)
    }

    fn u32(&mut self) -> anyhow::Result<u32> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into()?))
    }

    fn u64(&mut self) -> anyhow::Result<u64> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into()?))
    }

    fn string(&mut self) -> anyhow::Result<&'a [u8]> {
        let len = self.u64()?;
        self.take(len.try_into()?)
    }

    fn skip_value(&mut self, ty: u32) -> anyhow::Result<()> {
        match ty {
            0 | 1 | 7 => drop(self.take(1)?),
            2 | 3 => drop(self.take(2)?),
            4..=6 => drop(self.take(4)?),
            8 => drop(self.string()?),
            9 => {
                let (ty, len) = (self.u32()?, self.u64()?);
                for _ in 0..len {
                    self.skip_value(ty)?;
                }
            }
            10..=12 => drop(self.take(8)?),
            ty => anyhow::bail!("a key of type {ty}"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::unwrap_used, reason = "a panic in a test is its report")]
    fn a_block_is_what_its_values_were_to_half_a_step() {
        let values: [f32; BLOCK] = std::array::from_fn(|i| (i as f32 - 11.0) * 0.013);
        let decoded = |format: Format| -> Vec<f32> {
            let bytes = format.block(&values);
            let scale = ((i32::from(u16::from_le_bytes([bytes[0], bytes[1]]) >> 10) - 15) as f32).exp2();
            let level = |i: usize| match format {
                Format::Q8_0 => i32::from(bytes[2 + i] as i8),
                Format::Q4_0 => i32::from(bytes[2 + i % 16] >> (i / 16 * 4) & 15) - 8,
            };
            assert!(scale <= 2.0 * 0.26 / if matches!(format, Format::Q8_0) { 127.0 } else { 7.0 });
            (0..BLOCK).map(|i| level(i) as f32 * scale).collect()
        };
        for (format, worst) in [(Format::Q8_0, 0.0021), (Format::Q4_0, 0.033)] {
            let far = |(a, b): (&f32, &f32)| (a - b).abs() > worst;
            let decoded = decoded(format);
            assert!(!values.iter().zip(&decoded).any(far), "{format:?}: {decoded:?}");
        }
        assert_eq!(Format::Q4_0.block(&[0.0; BLOCK]).len(), 18);
        assert_eq!(Format::Q8_0.block(&[0.0; BLOCK]).len(), 34);
    }
}
