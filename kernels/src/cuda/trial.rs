//! What tests of kernels share: a device that interprets the PTX of one architecture, and its memory.

use super::source::Source;
use super::{Arch, Compiled, Compiler, Device, DevicePtr, SimDevice};
use ptx::Limits;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

/// A device of tests.
pub(super) struct Trial {
    pub(super) arch: Arch,
    pub(super) device: SimDevice,
}

impl Trial {
    /// One of each architecture that kernels are checked for.
    pub(super) fn each() -> impl Iterator<Item = Self> {
        Arch::CHECKED.into_iter().map(Self::new)
    }

    /// One of an architecture.
    pub(super) fn new(arch: Arch) -> Self {
        let limits = if arch == Arch::SM_90 { Limits::HOPPER } else { Limits::GB10 };
        Self { arch, device: SimDevice::new(limits, 1) }
    }

    /// A source, compiled once for all tests of the process.
    pub(super) fn compiled(&self, source: &'static Source) -> Arc<Compiled> {
        static CACHE: Mutex<BTreeMap<(&str, String), Slot>> = Mutex::new(BTreeMap::new());
        let slot = CACHE.lock().unwrap().entry((source.name, self.arch.to_string())).or_default().clone();
        let compile = || Arc::new(Compiler::find().unwrap().compile(source, self.arch).unwrap());
        slot.get_or_init(compile).clone()
    }

    /// Memory with these bytes.
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> DevicePtr {
        let ptr = self.device.allocate(bytes.len().max(1)).unwrap();
        self.device.upload(ptr, bytes).unwrap();
        ptr
    }

    /// Memory with these values.
    pub(super) fn floats(&mut self, values: &[f32]) -> DevicePtr {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        self.bytes(&bytes)
    }

    /// Memory full of NaN.
    pub(super) fn poisoned(&mut self, values: usize) -> DevicePtr {
        self.bytes(&vec![0xff; values * size_of::<f32>()])
    }

    /// Values from the device.
    pub(super) fn read(&mut self, ptr: DevicePtr, values: usize) -> Vec<f32> {
        self.read_words(ptr, values).into_iter().map(f32::from_bits).collect()
    }

    /// 32-bit numbers from the device.
    pub(super) fn read_words(&mut self, ptr: DevicePtr, words: usize) -> Vec<u32> {
        let bytes = self.read_bytes(ptr, words * size_of::<u32>());
        bytes.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect()
    }

    /// Bytes from the device.
    pub(super) fn read_bytes(&mut self, ptr: DevicePtr, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.device.download(ptr, &mut bytes).unwrap();
        bytes
    }
}

type Slot = Arc<OnceLock<Arc<Compiled>>>;

/// Numbers in -1..1 that look random, each by its own place.
pub(super) fn number(seed: u64, index: usize) -> f32 {
    let mut x = (seed << 40 ^ index as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ x >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// `count` of them from `first` on.
pub(super) fn numbers(seed: u64, first: usize, count: usize) -> Vec<f32> {
    (first..first + count).map(|index| number(seed, index)).collect()
}

/// The same numbers, bit for bit.
pub(super) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Whether `||got - want|| <= tolerance ||want||`.
#[track_caller]
pub(super) fn assert_near(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let error = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum::<f64>().sqrt();
    let norm = want.iter().map(|w| w * w).sum::<f64>().sqrt();
    assert!(error <= tolerance * norm, "{what}: {:e} of {norm}", error / norm);
}
