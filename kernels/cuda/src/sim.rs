//! A simulated device: interprets the PTX of kernels on the CPU.

use super::device::GraphId;
use super::tape::Entry;
use super::{Compiled, CudaError, Device, DevicePtr, KernelId, Launch};
use ptx::{KernelRef, Limits, Machine, RunError};

/// Runs kernels from their PTX and checks every memory access. A kernel's fault is returned by the launch
/// itself.
#[derive(Debug)]
pub struct SimDevice {
    machine: Machine,
    kernels: Vec<KernelRef>,
    /// Entries of the graph that is being recorded.
    recording: Option<Vec<Entry>>,
    graphs: Vec<Option<Vec<Entry>>>,
}

impl SimDevice {
    /// Creates an empty device with the given limits. The seed determines the order of blocks and warps.
    pub fn new(limits: Limits, seed: u64) -> Self {
        let machine = Machine::new(limits, seed);
        Self { machine, kernels: Vec::new(), recording: None, graphs: Vec::new() }
    }

    /// Refuses operations that a graph cannot contain, like the driver.
    fn unrecorded(&self, operation: &str) -> Result<(), CudaError> {
        match &self.recording {
            None => Ok(()),
            Some(_) => Err(CudaError::Invalid { what: format!("{operation} while a graph is recorded") }),
        }
    }

    fn graph(&mut self, graph: GraphId) -> Option<&mut Option<Vec<Entry>>> {
        self.graphs.get_mut(graph.0 as usize)
    }

    /// Returns the interpreter, for counts and coverage.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the interpreter's reference to a kernel.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a kernel of another device.
    pub fn kernel(&self, kernel: KernelId) -> Result<KernelRef, CudaError> {
        let kernel_ref = self.kernels.get(kernel.0 as usize).copied();
        kernel_ref.ok_or_else(|| CudaError::Invalid { what: "a kernel of another device".into() })
    }
}

impl From<RunError> for CudaError {
    fn from(error: RunError) -> Self {
        match error {
            RunError::OutOfMemory { requested, free } => Self::OutOfMemory { requested, free },
            other => Self::Invalid { what: other.to_string() },
        }
    }
}

impl Device for SimDevice {
    /// A name of its own, because the host computes exactly what a GPU approximates.
    fn name(&self) -> &'static str {
        "ptx-sim"
    }

    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        self.unrecorded("a module is loaded")?;
        let source_name = &compiled.source_name;
        let module = self
            .machine
            .load(&compiled.ptx)
            .map_err(|error| CudaError::Invalid { what: format!("{source_name}: {error}") })?;
        let mut out = Vec::with_capacity(kernels.len());
        for &name in kernels {
            let kernel = self
                .machine
                .kernel(module, name)
                .ok_or_else(|| CudaError::NoKernel { name: name.into(), source_name: source_name.clone() })?;
            out.push(KernelId(self.kernels.len() as u32));
            self.kernels.push(kernel);
        }
        Ok(out)
    }

    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.unrecorded("memory is taken")?;
        Ok(DevicePtr(self.machine.allocate(bytes)?))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        self.unrecorded("memory is given back")?;
        Ok(self.machine.free(ptr.0)?)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        self.unrecorded("bytes are uploaded")?;
        Ok(self.machine.write(to.0, bytes)?)
    }

    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        self.unrecorded("bytes are downloaded")?;
        Ok(self.machine.read(from.0, out)?)
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        if let Some(recording) = &mut self.recording {
            recording.push(Entry::Copy { from, to, bytes });
            return Ok(());
        }
        Ok(self.machine.copy(from.0, to.0, bytes)?)
    }

    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        if let Some(recording) = &mut self.recording {
            recording.push(Entry::Fill { to, value, bytes });
            return Ok(());
        }
        Ok(self.machine.fill(to.0, value, bytes)?)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError> {
        if let Some(recording) = &mut self.recording {
            recording.push(Entry::launch(launch));
            return Ok(());
        }
        let arguments: Vec<u64> = launch.arguments.iter().map(|argument| argument.0).collect();
        self.machine.launch(&ptx::Launch {
            kernel: self.kernel(launch.kernel)?,
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            arguments: &arguments,
        })?;
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.unrecorded("the host waits")
    }

    fn begin_graph(&mut self) -> Result<(), CudaError> {
        self.unrecorded("a graph is begun")?;
        self.recording = Some(Vec::new());
        Ok(())
    }

    fn end_graph(&mut self) -> Result<GraphId, CudaError> {
        let none = || CudaError::Invalid { what: "no graph is recorded".into() };
        let recorded = self.recording.take().ok_or_else(none)?;
        let index = self.graphs.iter().position(Option::is_none).unwrap_or(self.graphs.len());
        match self.graphs.get_mut(index) {
            Some(free) => *free = Some(recorded),
            None => self.graphs.push(Some(recorded)),
        }
        Ok(GraphId(index as u32))
    }

    fn replay(&mut self, graph: GraphId) -> Result<(), CudaError> {
        self.unrecorded("a graph is run")?;
        let missing = || CudaError::Invalid { what: format!("graph {} is not known", graph.0) };
        let entries = self.graph(graph).and_then(Option::take).ok_or_else(missing)?;
        let ran = entries.iter().try_for_each(|entry| entry.play(self));
        self.graphs[graph.0 as usize] = Some(entries);
        ran
    }

    fn forget(&mut self, graph: GraphId) {
        if let Some(slot) = self.graph(graph) {
            *slot = None;
        }
    }
}
