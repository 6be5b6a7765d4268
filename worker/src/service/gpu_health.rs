//! Reads the health of the GPUs on a thread of its own, since calls of a broken driver may never return.

use cuda::CudaError;
use cuda::nvml::Nvml;
use engine::telemetry::{GPU_HEALTH_EVERY, GpuHealthMetrics};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

/// Ends the thread when it is dropped. A thread inside a call that hangs stays until the process ends.
#[derive(Debug)]
pub(super) struct GpuWatch {
    _end: Sender<()>,
}

impl GpuWatch {
    /// Reads into `metrics` until the watch is dropped: the GPU with this ordinal of the driver, or all of the
    /// machine.
    pub(super) fn start(metrics: GpuHealthMetrics, gpu: Option<u32>) -> Self {
        let (end, ended) = channel();
        let thread = std::thread::Builder::new().name("kvasir-nvml".into());
        if let Err(error) = thread.spawn(move || watch(&metrics, gpu, &ended)) {
            tracing::warn!(%error, "cannot start the thread that reads the GPU's health");
        }
        Self { _end: end }
    }
}

fn watch(metrics: &GpuHealthMetrics, gpu: Option<u32>, ended: &Receiver<()>) {
    let nvml = match gpu.map(cuda::pci_address).transpose().and_then(Nvml::open) {
        Ok(nvml) => nvml,
        Err(error @ CudaError::Missing { .. }) => {
            tracing::debug!(%error, "the health of GPUs is not exported");
            return;
        }
        Err(error) => {
            tracing::warn!(%error, "the health of GPUs cannot be read and is not exported");
            return;
        }
    };
    let mut failed = false;
    loop {
        let begun = Instant::now();
        match nvml.read() {
            Ok(gpus) => {
                failed = false;
                metrics.set(begun, gpus);
            }
            Err(error) => {
                // Once for each failure that lasts. The last values become too old and are not exported.
                if !std::mem::replace(&mut failed, true) {
                    tracing::warn!(%error, "the health of GPUs cannot be read");
                }
            }
        }
        if ended.recv_timeout(GPU_HEALTH_EVERY) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}
