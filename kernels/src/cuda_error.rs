//! What can go wrong between a kernel's source and its result.

/// Failures of libraries, compilers and devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library that is not on this machine.
    #[error("no {library} here; looked for {}", looked_for.join(", "))]
    Missing {
        /// Such as `NVRTC`.
        library: &'static str,
        /// Files and folders, in the order in which they were tried.
        looked_for: Vec<String>,
    },
    /// A library of a version that is not served.
    #[error("{library} is version {found}; {wanted} is needed")]
    Version {
        /// Such as `NVRTC`.
        library: &'static str,
        found: String,
        wanted: &'static str,
    },
    /// The compiler refused a source.
    #[error("{source_name} does not compile for {arch}: {log}")]
    Compile { source_name: String, arch: String, log: String },
    /// A call of a library failed.
    #[error("{call}: {status}")]
    Call { call: &'static str, status: String },
    /// The device can do nothing more for this process: a kernel went wrong in a way that ends the context, or the
    /// hardware failed. Every later call says so again.
    #[error("the GPU is lost to this process: {call}: {status}")]
    Lost { call: &'static str, status: String },
    /// A kernel that a module does not have.
    #[error("no kernel {name} in {source_name}")]
    NoKernel {
        name: String,
        /// The source that was searched.
        source_name: String,
    },
    /// Memory that is not there.
    #[error("no {wanted} bytes of device memory left ({free} free)")]
    OutOfMemory {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes left.
        free: usize,
    },
    /// An access outside of what was allocated, or a launch that the device cannot do.
    #[error("{what}")]
    Invalid {
        /// What was asked for and why it cannot be.
        what: String,
    },
}
