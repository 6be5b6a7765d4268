//! Helpers for buffers of tests on the interpreter.

use crate::source::Source;
use crate::{Arch, Compiled, Device, DevicePtr, SimDevice};

/// An interpreter for kernels of one architecture.
pub(crate) struct Sim {
    pub(crate) arch: Arch,
    pub(crate) device: SimDevice,
}

impl Sim {
    pub(crate) fn new(arch: Arch) -> Self {
        Self { arch, device: SimDevice::new(ptx::Limits::GB10, 1) }
    }

    /// Returns one for each checked architecture.
    pub(crate) fn each() -> impl Iterator<Item = Self> {
        Arch::CHECKED.into_iter().map(Self::new)
    }

    pub(crate) fn compiled(&self, source: &Source) -> &'static Compiled {
        super::compiled(source, self.arch)
    }

    /// Uploads bytes.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> DevicePtr {
        let start = self.device.allocate(bytes.len()).unwrap();
        self.device.upload(start, bytes).unwrap();
        start
    }

    pub(crate) fn values(&mut self, values: &[f32]) -> DevicePtr {
        self.bytes(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    pub(crate) fn numbers(&mut self, numbers: &[u32]) -> DevicePtr {
        self.bytes(&numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Allocates memory whose bytes are NaN in every format.
    pub(crate) fn room(&mut self, bytes: usize) -> DevicePtr {
        self.bytes(&vec![0xff; bytes])
    }

    pub(crate) fn read(&mut self, from: DevicePtr, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.device.download(from, &mut out).unwrap();
        out
    }

    pub(crate) fn read_values(&mut self, from: DevicePtr, count: usize) -> Vec<f32> {
        self.read(from, 4 * count).as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
    }

    pub(crate) fn read_numbers(&mut self, from: DevicePtr, count: usize) -> Vec<u32> {
        self.read(from, 4 * count).as_chunks::<4>().0.iter().map(|x| u32::from_le_bytes(*x)).collect()
    }
}

/// Returns a pseudo-random number in -1..1 for an index.
pub(crate) fn number(seed: u64, index: usize) -> f32 {
    let mut x = (seed << 40 ^ index as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ x >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Returns `count` numbers from index `first` on.
pub(crate) fn numbers(seed: u64, first: usize, count: usize) -> Vec<f32> {
    (first..first + count).map(|index| number(seed, index)).collect()
}

/// Returns the bits of each value, for exact comparisons.
pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Asserts that `||got - expected|| <= tolerance ||expected||`.
#[track_caller]
pub(crate) fn assert_near(got: &[f32], expected: &[f64], tolerance: f64, label: &str) {
    assert_eq!(got.len(), expected.len(), "{label}");
    let error = got.iter().zip(expected).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum::<f64>().sqrt();
    let norm = expected.iter().map(|w| w * w).sum::<f64>().sqrt();
    assert!(error <= tolerance * norm, "{label}: {:e} of {norm}", error / norm);
}
