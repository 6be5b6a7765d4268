//! What a device is asked for, kept to be asked for again.

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
    /// A launch, with arguments of its own.
    pub(super) fn launch(launch: &Launch<'_>) -> Self {
        let Launch { kernel, grid, block, shared_bytes, arguments } = *launch;
        Self::Launch { kernel, grid, block, shared_bytes, arguments: arguments.into() }
    }

    /// Asks a device for it.
    ///
    /// # Errors
    /// What the device says.
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

/// A device, and a tape of what it is asked for while one is wanted. What cannot be taped (copies from and to the host,
/// memory that is given back) ends the tape: what is on it is run first, so that everything happens in its order.
pub(super) struct Taped {
    device: Box<dyn Device>,
    tape: Option<Vec<Entry>>,
    frees: u64,
}

impl Taped {
    pub(super) fn new(device: Box<dyn Device>) -> Self {
        Self { device, tape: None, frees: 0 }
    }

    /// How often memory was given back. Whatever was taped at another count may name memory that is gone.
    pub(super) fn frees(&self) -> u64 {
        self.frees
    }

    /// Tapes from here on instead of running.
    pub(super) fn start_tape(&mut self) {
        self.tape = Some(Vec::new());
    }

    /// What was asked for since, which has not been run; none if the tape has ended, and all was run.
    pub(super) fn take_tape(&mut self) -> Option<Vec<Entry>> {
        self.tape.take()
    }

    /// A graph of a tape.
    ///
    /// # Errors
    /// What the device says, which records no longer then.
    pub(super) fn graph_of(&mut self, tape: &[Entry]) -> Result<GraphId, CudaError> {
        let recorded =
            record(self.device.as_mut(), |device| tape.iter().try_for_each(|entry| entry.play(device)));
        recorded?.ok_or_else(no_graphs)
    }

    /// Runs what is on the tape, if there is one, and ends it.
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
