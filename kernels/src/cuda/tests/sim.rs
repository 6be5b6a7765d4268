//! Buffers of tests on the interpreter.

use crate::cuda::source::Source;
use crate::cuda::{Arch, Compiled, Device, DevicePtr, SimDevice};

/// An interpreter for what is compiled for one architecture.
pub(crate) struct Sim {
    pub(crate) arch: Arch,
    pub(crate) device: SimDevice,
}

impl Sim {
    pub(crate) fn new(arch: Arch) -> Self {
        Self { arch, device: SimDevice::new(ptx::Limits::GB10, 1) }
    }

    pub(crate) fn compiled(&self, source: &Source) -> &'static Compiled {
        super::compiled(source, self.arch)
    }

    /// A copy of some bytes on the device.
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

    /// Bytes that are not a number, whatever reads them.
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
