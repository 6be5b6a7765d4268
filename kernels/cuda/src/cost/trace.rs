//! A device that notes the launches of a step and interprets some blocks of each.

use crate::matmul::{GROUP_TOKENS, Quantised, STAGED_TOKENS};
use crate::{Compiled, CudaError, Device, DevicePtr, KernelId, Launch};
use ptx::{KernelRef, Limits, Listed, Machine, Sample};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// Warp instructions after which no further block of a launch is interpreted.
const SAMPLED_INSTRUCTIONS: u64 = 60_000;
/// The same for attention of prompts, whose blocks have unequal numbers of keys.
const SAMPLED_PROMPTS: u64 = 2_000_000;
/// The same for groups of tokens of experts, many of which are empty.
const SAMPLED_EXPERTS: u64 = 2_000_000;

/// A distinct launch of a step.
#[derive(Debug, Clone)]
pub(super) struct Launched {
    pub(super) source: String,
    pub(super) kernel: String,
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    /// Dynamic shared memory.
    pub(super) shared_bytes: u32,
    pub(super) sample: Sample,
    /// Weights, keys and values: bytes that no earlier launch of the step has brought to the cache.
    pub(super) cold: f64,
    /// Activations.
    pub(super) warm: f64,
    /// Launches of a step.
    pub(super) times: usize,
}

impl Launched {
    pub(super) fn blocks(&self) -> f64 {
        self.grid.iter().map(|&n| f64::from(n)).product()
    }

    pub(super) fn warps(&self) -> f64 {
        f64::from(self.threads.div_ceil(32))
    }
}

/// Launches since the last [`Trace::take`].
pub(super) struct Trace {
    machine: Machine,
    multiprocessors: usize,
    kernels: Vec<(String, String, KernelRef)>,
    launched: Vec<Launched>,
    known: HashMap<(KernelId, [u32; 3], Vec<u64>), usize>,
    /// Bytes of keys and values that the next launch of attention reads.
    pub(super) kv_bytes: f64,
    /// Whether the next allocations are of weights, keys and values.
    pub(super) allocates_cold: bool,
    /// Addresses of weights, keys and values.
    cold: Vec<Range<u64>>,
}

impl Trace {
    pub(super) fn new(multiprocessors: usize) -> Arc<Mutex<Self>> {
        let limits = Limits { memory_bytes: 1 << 40, ..Limits::GB10 };
        Arc::new(Mutex::new(Self {
            machine: Machine::new(limits, 1),
            multiprocessors,
            kernels: Vec::new(),
            launched: Vec::new(),
            known: HashMap::new(),
            kv_bytes: 0.0,
            allocates_cold: false,
            cold: Vec::new(),
        }))
    }

    pub(super) fn take(&mut self) -> Vec<Launched> {
        self.known.clear();
        std::mem::take(&mut self.launched)
    }

    pub(super) fn listing(&self, launched: &Launched) -> Vec<Listed> {
        let of = self
            .kernels
            .iter()
            .find(|(source, name, _)| *source == launched.source && *name == launched.kernel);
        self.machine.listing(of.unwrap().2)
    }

    /// Whether weights, keys or values are at an address.
    pub(super) fn is_cold(&self, address: u64) -> bool {
        self.cold.iter().any(|range| range.contains(&address))
    }

    fn numbers(&self, at: u64, count: usize) -> Vec<u32> {
        let mut bytes = vec![0; 4 * count];
        self.machine.read(at, &mut bytes).unwrap();
        bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
    }

    /// Spreads the rows of a step over the experts: the router gets random logits, from zeroes the same experts would
    /// be chosen for all.
    fn scatter(&mut self, arguments: &[u64]) {
        let (logits, values) = (arguments[2], arguments[4] * arguments[5]);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        let bytes: Vec<u8> = (0..values).flat_map(|_| next().to_le_bytes()).collect();
        self.machine.write(logits, &bytes).unwrap();
    }

    /// Returns the bytes of weights and of activations of a product. The arguments are those of `product.cuh`.
    fn product_bytes(&self, name: &str, grid: [u32; 3], arguments: &[u64]) -> (f64, f64) {
        let [tile_bytes, experts, groups, _, _, share, tokens, cols, _] = arguments[21..30] else {
            panic!("{name} has {} arguments", arguments.len())
        };
        let matrices = match (experts, groups) {
            (0, 0) => 1,
            (experts, 0) => self.numbers(experts, tokens as usize).iter().collect::<BTreeSet<_>>().len(),
            (_, groups) => {
                let together = if name.ends_with("_128") { STAGED_TOKENS / GROUP_TOKENS } else { 1 };
                let groups = self.numbers(groups, 2 * grid[0] as usize * together);
                let used = groups.iter().skip(1).step_by(2).filter(|group| *group & 255 > 0);
                used.map(|group| group >> 8).collect::<BTreeSet<_>>().len()
            }
        };
        let int8 = !name.contains("exact")
            && !["f32_", "f16_", "bf16_", "fp8_"].iter().any(|ty| name.starts_with(ty));
        let row = match int8 {
            _ if name.contains("_bf16_") => Quantised::Bf16.row_bytes(cols as usize),
            true if name.starts_with("mxfp4_scaled_") => Quantised::Mxfp8.row_bytes(cols as usize),
            true if name.starts_with("nvfp4_scaled_") => Quantised::Nvfp4.row_bytes(cols as usize),
            true => Quantised::Int8.row_bytes(cols as usize),
            false => 4 * cols as usize,
        };
        let (mut tiles, mut outputs) = (0, 0);
        for matrix in arguments[..21].chunks(7) {
            tiles += matrix[1].div_ceil(32);
            outputs += matrix[1] * (1 + matrix[4]);
        }
        let warm = (tokens / share) as usize * row + (outputs * tokens * 4) as usize;
        ((tiles * tile_bytes) as f64 * matrices as f64, warm as f64)
    }
}

fn is_product(kernel: &str) -> bool {
    ["_mul_", "_exact_", "_scaled_", "_bf16_"].iter().any(|part| kernel.contains(part))
}

/// The trace as the device of a backend.
pub(super) struct Tracer(pub(super) Arc<Mutex<Trace>>);

impl Tracer {
    fn trace(&self) -> MutexGuard<'_, Trace> {
        self.0.lock().unwrap()
    }
}

impl Device for Tracer {
    fn multiprocessors(&self) -> usize {
        self.trace().multiprocessors
    }

    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        let mut trace = self.trace();
        let module = trace.machine.load(&compiled.ptx).unwrap();
        let mut numbers = Vec::new();
        for name in kernels {
            let kernel = trace.machine.kernel(module, name).unwrap();
            numbers.push(KernelId(trace.kernels.len() as u32));
            trace.kernels.push((compiled.source_name.clone(), (*name).to_owned(), kernel));
        }
        Ok(numbers)
    }

    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        let mut trace = self.trace();
        let at = trace.machine.allocate_zeroed(bytes)?;
        if trace.allocates_cold {
            trace.cold.push(at..at + bytes as u64);
        }
        Ok(DevicePtr(at))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        Ok(self.trace().machine.free(ptr.0)?)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        Ok(self.trace().machine.write(to.0, bytes)?)
    }

    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        Ok(self.trace().machine.read(from.0, out)?)
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        Ok(self.trace().machine.copy(from.0, to.0, bytes)?)
    }

    /// Does nothing: memory is zero already, and an arena is larger than this machine's memory.
    fn fill(&mut self, _: DevicePtr, value: u8, _: usize) -> Result<(), CudaError> {
        assert_eq!(value, 0);
        Ok(())
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError> {
        let mut trace = self.trace();
        let arguments: Vec<u64> = launch.arguments.iter().map(|argument| argument.0).collect();
        // Launches of attention differ in their rows only, if they are equally large.
        let attends = trace.kernels[launch.kernel.0 as usize].0.contains("attention");
        let key = (
            launch.kernel,
            launch.grid,
            if attends { vec![trace.kv_bytes as u64] } else { arguments.clone() },
        );
        if let Some(&index) = trace.known.get(&key) {
            trace.launched[index].times += 1;
            return Ok(());
        }
        let (source, kernel, kernel_ref) = trace.kernels[launch.kernel.0 as usize].clone();
        let instructions = match kernel.as_str() {
            "route" => {
                trace.scatter(&arguments);
                u64::MAX
            }
            "expert_lists" => u64::MAX,
            "attend_prompt" => SAMPLED_PROMPTS,
            _ if is_product(&kernel) && arguments[23] > 0 => SAMPLED_EXPERTS,
            _ => SAMPLED_INSTRUCTIONS,
        };
        let Launch { grid, block, shared_bytes, .. } = *launch;
        let launch = ptx::Launch { kernel: kernel_ref, grid, block, shared_bytes, arguments: &arguments };
        let sample = trace.machine.sample(&launch, instructions)?;
        let blocks: f64 = grid.iter().map(|&n| f64::from(n)).product();
        let moved = (sample.counts.global_read + sample.counts.global_written) as f64;
        let all = moved / sample.blocks as f64 * blocks;
        let (cold, warm) = match kernel.as_str() {
            name if is_product(name) => trace.product_bytes(name, grid, &arguments),
            name if name.starts_with("attend_") => (trace.kv_bytes, 0.0),
            _ => (0.0, all),
        };
        let index = trace.launched.len();
        let threads = block.iter().product();
        trace.launched.push(Launched {
            source,
            kernel,
            grid,
            threads,
            shared_bytes,
            sample,
            cold,
            warm,
            times: 1,
        });
        trace.known.insert(key, index);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        Ok(())
    }
}
