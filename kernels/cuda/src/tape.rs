//! Tape of device operations, to replay them later.

use super::device::{GraphId, no_graphs, record};
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch};

#[cfg(test)]
mod tests;

/// One launch, copy or fill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Entry {
    /// See [`Launch`].
    Launch {
        kernel: KernelId,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        arguments: Box<[Argument]>,
    },
    /// See [`Device::copy`].
    Copy { from: DevicePtr, to: DevicePtr, bytes: usize },
    /// See [`Device::fill`].
    Fill { to: DevicePtr, value: u8, bytes: usize },
}

impl Entry {
    /// Copies a launch with its arguments.
    pub(super) fn launch(launch: &Launch<'_>) -> Self {
        let Launch { kernel, grid, block, shared_bytes, arguments } = *launch;
        Self::Launch { kernel, grid, block, shared_bytes, arguments: arguments.into() }
    }

    /// Executes the entry on a device.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn play(&self, device: &mut (impl Device + ?Sized)) -> Result<(), CudaError> {
        match self {
            Self::Launch { kernel, grid, block, shared_bytes, arguments } => device.launch(&Launch {
                kernel: *kernel,
                grid: *grid,
                block: *block,
                shared_bytes: *shared_bytes,
                arguments,
            }),
            Self::Copy { from, to, bytes } => device.copy(*from, *to, *bytes),
            Self::Fill { to, value, bytes } => device.fill(*to, *value, *bytes),
        }
    }
}

/// A device with a tape of its operations while taping is on. An operation that cannot be taped (a copy
/// from or to the host, a free) ends the tape: its entries run first, so that everything happens in order.
pub(super) struct Taped {
    device: Box<dyn Device>,
    tape: Option<Vec<Entry>>,
    frees: u64,
}

impl Taped {
    pub(super) fn new(device: Box<dyn Device>) -> Self {
        Self { device, tape: None, frees: 0 }
    }

    /// Returns the number of frees so far. A tape that was made at another count may refer to freed memory.
    pub(super) fn frees(&self) -> u64 {
        self.frees
    }

    /// Starts taping instead of running.
    pub(super) fn start_tape(&mut self) {
        self.tape = Some(Vec::new());
    }

    /// Ends taping and returns the entries, which have not run. Returns `None` if the tape has ended
    /// already and its entries have run.
    pub(super) fn take_tape(&mut self) -> Option<Vec<Entry>> {
        self.tape.take()
    }

    /// Records a tape as a graph.
    ///
    /// # Errors
    /// Errors of the device, which no longer records after an error.
    pub(super) fn graph_of(&mut self, tape: &[Entry]) -> Result<GraphId, CudaError> {
        let recorded =
            record(self.device.as_mut(), |device| tape.iter().try_for_each(|entry| entry.play(device)));
        recorded?.ok_or_else(no_graphs)
    }

    /// Ends the tape, if there is one, and runs its entries.
    fn catch_up(&mut self) -> Result<(), CudaError> {
        let tape = self.tape.take().unwrap_or_default();
        tape.iter().try_for_each(|entry| entry.play(self.device.as_mut()))
    }
}

impl Device for Taped {
    fn name(&self) -> &'static str {
        self.device.name()
    }

    fn multiprocessors(&self) -> usize {
        self.device.multiprocessors()
    }

    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        self.device.load(compiled, kernels)
    }

    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.device.allocate(bytes)
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        self.catch_up()?;
        self.frees += 1;
        self.device.free(ptr)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        self.catch_up()?;
        self.device.upload(to, bytes)
    }

    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        self.catch_up()?;
        self.device.download(from, out)
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        match &mut self.tape {
            Some(tape) => tape.push(Entry::Copy { from, to, bytes }),
            None => self.device.copy(from, to, bytes)?,
        }
        Ok(())
    }

    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        match &mut self.tape {
            Some(tape) => tape.push(Entry::Fill { to, value, bytes }),
            None => self.device.fill(to, value, bytes)?,
        }
        Ok(())
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError> {
        match &mut self.tape {
            Some(tape) => tape.push(Entry::launch(launch)),
            None => self.device.launch(launch)?,
        }
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.catch_up()?;
        self.device.synchronize()
    }

    fn begin_graph(&mut self) -> Result<(), CudaError> {
        self.catch_up()?;
        self.device.begin_graph()
    }

    fn end_graph(&mut self) -> Result<GraphId, CudaError> {
        self.device.end_graph()
    }

    fn replay(&mut self, graph: GraphId) -> Result<(), CudaError> {
        self.catch_up()?;
        self.device.replay(graph)
    }

    fn forget(&mut self, graph: GraphId) {
        self.device.forget(graph);
    }
}
