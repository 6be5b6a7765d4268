//! NVIDIA GPUs: kernels in CUDA C++ that NVRTC compiles for the present device, and the backend that runs
//! them.
//!
//! The sources (`*.cu`) include nothing but [`source::HEADERS`], so that no CUDA headers
//! are needed. A [`Device`] loads compiled sources: the driver loads the CUBIN, the interpreter of the
//! tests loads the PTX.
//!
//! Invariants: outputs equal those of the CPU within the bounds of [`check`], and a row's result depends only on
//! that row and its own context. Every call returns a status that is checked: a lost device is an error of every
//! later call, never a wrong number. This crate never contains the choice between devices.

mod arch;
pub mod attention;
mod backend;
pub mod check;
mod device;
mod driver;
mod error;
pub mod kv;
mod library;
mod lora;
pub mod matmul;
pub mod moe;
pub mod nvml;
mod nvrtc;
mod pack;
pub mod qkv;
pub mod recurrent;
pub mod rowwise;
pub mod sampling;
#[cfg(any(test, feature = "ptx-sim"))]
mod sim;
pub mod source;
pub mod speed;
pub mod step;
mod survey;
mod tape;

#[cfg(test)]
mod cost;
#[cfg(test)]
mod tests;

pub use arch::Arch;
pub use backend::{Compile, CudaBackend, CudaConfig};
pub use device::{Argument, Device, DevicePtr, GraphId, KernelId, Launch, record};
pub use driver::{Gpu, GpuInfo, driver_version, gpus, pci_address};
pub use error::CudaError;
pub use matmul::quantised_row_bytes;
pub use nvrtc::{Compiled, Compiler, CubinCache};
pub use pack::{TILE_ROWS, TiledShape, UNIT_COLS};
#[cfg(any(test, feature = "ptx-sim"))]
pub use sim::SimDevice;
pub use survey::Survey;
