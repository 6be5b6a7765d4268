//! Speed of a device: copies, products, attention, and a whole decode step of a synthetic model.
//!
//! The benchmarks run a worker's kernels with a worker's launches, on random weights and caches of real
//! shapes. A measurement goes through far more memory than the device's caches hold, as a model does.
//! Launches are recorded as a graph if the device supports graphs, so that the times exclude the host. In
//! tests everything also runs on the interpreter with tiny shapes; the times mean nothing there.

use super::device::{GraphId, record};
use super::source::Source;
use super::{Compiled, CudaError, Device, DevicePtr, KernelId, Launch};
use kernels::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

mod attention;
mod decode;
pub(crate) mod ops;
mod product;
#[cfg(test)]
mod tests;

pub use attention::{AttentionCase, AttentionSpeed};
pub use decode::{DecodeModel, DecodeShape, DecodeSpeed};
pub use product::{ProductCase, ProductSpeed};

/// Compiles a source for the measured device.
pub type CompileShared = Arc<dyn Fn(&Source) -> Result<Compiled, CudaError> + Send + Sync>;

/// Random bytes that the host generates; the device repeats them.
const RANDOM_BYTES: usize = 4 << 20;

/// A device with several users, which make one call at a time.
#[derive(Clone)]
struct SharedDevice(Arc<Mutex<Box<dyn Device>>>);

pub struct Speed {
    device: SharedDevice,
    compile: CompileShared,
    /// Bytes that a measurement goes through before it reuses the first ones.
    spread: usize,
    /// Timed runs of each measurement; the median is the result.
    runs: usize,
}

/// Device memory of one measurement, freed after it.
struct DeviceBuffers {
    device: SharedDevice,
    all: Vec<DevicePtr>,
}

/// Work to time: only launches.
type Work<'a> = &'a mut dyn FnMut(&mut dyn Device) -> Result<(), Error>;

impl Speed {
    /// Creates a benchmark of `device`. `spread` must be far more than its caches hold. Each result is the
    /// median of `runs` runs.
    pub fn new(device: Box<dyn Device>, compile: CompileShared, spread: usize, runs: usize) -> Self {
        Self { device: SharedDevice(Arc::new(Mutex::new(device))), compile, spread, runs: runs.max(1) }
    }

    /// Measures the bytes per second that device-to-device copies of `bytes` read and write.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn copies(&self, bytes: usize) -> Result<f64, Error> {
        let mut held = self.held();
        let (from, to) = (held.random(bytes)?, held.room(bytes)?);
        let mut copy = |device: &mut dyn Device| Ok(device.copy(from, to, bytes)?);
        let seconds = self.time(&mut [&mut copy])?;
        Ok(2.0 * bytes as f64 / seconds[0])
    }

    fn held(&self) -> DeviceBuffers {
        DeviceBuffers { device: self.device.clone(), all: Vec::new() }
    }

    fn compiled(&self, source: &Source) -> Result<Compiled, CudaError> {
        (self.compile)(source)
    }

    /// Returns the seconds of one run of each work, the median of several. The works take turns, so that
    /// changes of the device's state affect all alike.
    fn time(&self, works: &mut [Work<'_>]) -> Result<Vec<f64>, Error> {
        let mut device = self.device.clone();
        let mut graphs: Vec<Option<GraphId>> = Vec::new();
        for work in works.iter_mut() {
            // One-time work happens here and is not recorded.
            work(&mut device)?;
            device.synchronize()?;
            graphs.push(record(&mut device, work)?);
        }
        let mut seconds = vec![Vec::new(); works.len()];
        for run in 0..=self.runs {
            for ((work, graph), seconds) in works.iter_mut().zip(&graphs).zip(&mut seconds) {
                let taken = self.timed(|| match graph {
                    Some(graph) => Ok(device.replay(*graph)?),
                    None => work(&mut device),
                })?;
                // The first run brings the device to its clock.
                if run > 0 {
                    seconds.push(taken);
                }
            }
        }
        graphs.into_iter().flatten().for_each(|graph| device.forget(graph));
        Ok(seconds.into_iter().map(median).collect())
    }

    /// Returns the median seconds of several runs, after an untimed one.
    fn seconds(&self, mut run: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
        self.timed(&mut run)?;
        let seconds: Result<Vec<f64>, Error> = (0..self.runs).map(|_| self.timed(&mut run)).collect();
        Ok(median(seconds?))
    }

    /// Returns the seconds until the device has done the work of `run`.
    fn timed(&self, run: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
        let started = Instant::now();
        run()?;
        self.device.clone().synchronize()?;
        Ok(started.elapsed().as_secs_f64())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl DeviceBuffers {
    fn room(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        let start = self.device.allocate(bytes)?;
        self.all.push(start);
        Ok(start)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<DevicePtr, CudaError> {
        let start = self.room(bytes.len())?;
        self.device.upload(start, bytes)?;
        Ok(start)
    }

    /// Allocates memory filled with [`random_bytes`].
    fn random(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        let start = self.room(bytes)?;
        let mut done = bytes.min(RANDOM_BYTES);
        self.device.upload(start, &random_bytes(done))?;
        while done < bytes {
            let next = done.min(bytes - done);
            self.device.copy(start, start.offset(done), next)?;
            done += next;
        }
        Ok(start)
    }
}

impl Drop for DeviceBuffers {
    fn drop(&mut self) {
        for start in &self.all {
            // A device that cannot free memory reports that at its next call.
            self.device.free(*start).ok();
        }
    }
}

/// Returns bytes that are neither infinite nor NaN in any format, because one bit of each byte is zero.
fn random_bytes(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 56) as u8 & 0xbf
    };
    (0..len).map(|_| next()).collect()
}

/// Returns random f32 values in -1..1, as bytes.
fn random_values(len: usize) -> Vec<u8> {
    let value = |pair: &[u8]| f32::from(i16::from_le_bytes([pair[0], pair[1] << 1])) / 32_768.0;
    random_bytes(2 * len).chunks_exact(2).flat_map(|pair| value(pair).to_ne_bytes()).collect()
}

impl SharedDevice {
    fn lock(&self) -> MutexGuard<'_, Box<dyn Device>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for SharedDevice {
    fn name(&self) -> &'static str {
        self.lock().name()
    }

    fn multiprocessors(&self) -> usize {
        self.lock().multiprocessors()
    }

    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        self.lock().load(compiled, kernels)
    }

    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.lock().allocate(bytes)
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        self.lock().free(ptr)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        self.lock().upload(to, bytes)
    }

    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        self.lock().download(from, out)
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.lock().copy(from, to, bytes)
    }

    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.lock().fill(to, value, bytes)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError> {
        self.lock().launch(launch)
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.lock().synchronize()
    }

    fn begin_graph(&mut self) -> Result<(), CudaError> {
        self.lock().begin_graph()
    }

    fn end_graph(&mut self) -> Result<GraphId, CudaError> {
        self.lock().end_graph()
    }

    fn replay(&mut self, graph: GraphId) -> Result<(), CudaError> {
        self.lock().replay(graph)
    }

    fn forget(&mut self, graph: GraphId) {
        self.lock().forget(graph);
    }
}
