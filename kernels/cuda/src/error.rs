//! Errors between a kernel's source and its result.

/// Failures of libraries, compilers and devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library is missing on this machine.
    #[error("cannot find {library}; tried {}", looked_for.join(", "))]
    Missing {
        /// For example `NVRTC`.
        library: &'static str,
        /// Files and folders, in the order in which they were tried.
        looked_for: Vec<String>,
    },
    /// A library has an unsupported version.
    #[error("{library} has version {found}; {required} is required")]
    Version {
        /// For example `NVRTC`.
        library: &'static str,
        found: String,
        required: &'static str,
    },
    /// The compiler refused a source.
    #[error("{source_name} does not compile for {arch}: {log}")]
    Compile { source_name: String, arch: String, log: String },
    /// A call of a library failed.
    #[error("{call}: {status}")]
    Call { call: &'static str, status: String },
    /// The device is unusable for this process: a kernel's fault ended the context, or the hardware failed.
    /// Every later call returns this error again.
    #[error("the GPU is lost to this process: {call}: {status}")]
    Lost { call: &'static str, status: String },
    /// A module does not have this kernel.
    #[error("no kernel {name} in {source_name}")]
    NoKernel {
        name: String,
        /// The compiled source that was searched.
        source_name: String,
    },
    /// The device has too little free memory.
    #[error("cannot allocate {requested} bytes of device memory ({free} free)")]
    OutOfMemory {
        /// Bytes requested.
        requested: usize,
        /// Bytes left.
        free: usize,
    },
    /// An access outside the allocated memory, or a launch that the device cannot execute.
    #[error("{what}")]
    Invalid {
        /// The request, and why it is refused.
        what: String,
    },
}

impl From<CudaError> for kernels::Error {
    fn from(error: CudaError) -> Self {
        let reason = error.to_string();
        if matches!(error, CudaError::Lost { .. }) {
            Self::DeviceLost { reason }
        } else {
            Self::Device { reason }
        }
    }
}
