//! Cost of the kernels: the least time of a model's step on a GPU, from the machine code.
//!
//! The backend runs a step on a device that notes the launches and interprets some blocks of each ([`trace`]). The
//! machine code of the launched kernels tells what a warp then issues and waits for ([`code`]). [`bound`] makes a time
//! of that, [`page`] the page `docs/measurements/gpu-cost.md`, which a test compares.

mod bound;
mod code;
mod models;
mod page;
#[cfg(test)]
mod tests;
mod trace;

use crate::tests::{compiled, gate};
use crate::{Compiler, source};
use bound::{Bound, DEPENDENT_GAP, GAP, Gpu, Limit, Resources};
use code::{Class, Code, Run};
use models::{
    GPT_OSS_120B, GPT_OSS_120B_MXFP8, LLAMA_8B, LLAMA_8B_BF16, LLAMA_8B_NVFP4, LLAMA_8B_W4A4, Model,
    QWEN3_30B_A3B, Step,
};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use trace::{Launched, Trace};

const GPUS: [Gpu; 2] = [Gpu::GB10, Gpu::H100];

const STEPS: [(Model, Step); 25] = [
    (LLAMA_8B, Step { batch: 1, rows: 1, context: 0 }),
    (LLAMA_8B, Step { batch: 8, rows: 1, context: 0 }),
    (LLAMA_8B, Step { batch: 64, rows: 1, context: 0 }),
    (LLAMA_8B, Step { batch: 1, rows: 2048, context: 0 }),
    (LLAMA_8B, Step { batch: 1, rows: 1, context: 32_768 }),
    (LLAMA_8B, Step { batch: 1, rows: 2048, context: 30_720 }),
    (LLAMA_8B_BF16, Step { batch: 1, rows: 1, context: 0 }),
    (LLAMA_8B_BF16, Step { batch: 8, rows: 1, context: 0 }),
    (LLAMA_8B_BF16, Step { batch: 64, rows: 1, context: 0 }),
    (LLAMA_8B_BF16, Step { batch: 1, rows: 2048, context: 0 }),
    (LLAMA_8B_NVFP4, Step { batch: 1, rows: 1, context: 0 }),
    (LLAMA_8B_NVFP4, Step { batch: 1, rows: 2048, context: 0 }),
    (LLAMA_8B_W4A4, Step { batch: 1, rows: 1, context: 0 }),
    (LLAMA_8B_W4A4, Step { batch: 1, rows: 2048, context: 0 }),
    (GPT_OSS_120B, Step { batch: 1, rows: 1, context: 0 }),
    (GPT_OSS_120B, Step { batch: 8, rows: 1, context: 0 }),
    (GPT_OSS_120B, Step { batch: 1, rows: 2048, context: 0 }),
    (GPT_OSS_120B, Step { batch: 1, rows: 8192, context: 0 }),
    (GPT_OSS_120B_MXFP8, Step { batch: 1, rows: 1, context: 0 }),
    (GPT_OSS_120B_MXFP8, Step { batch: 8, rows: 1, context: 0 }),
    (GPT_OSS_120B_MXFP8, Step { batch: 1, rows: 2048, context: 0 }),
    (GPT_OSS_120B_MXFP8, Step { batch: 1, rows: 8192, context: 0 }),
    (QWEN3_30B_A3B, Step { batch: 1, rows: 1, context: 0 }),
    (QWEN3_30B_A3B, Step { batch: 8, rows: 1, context: 0 }),
    (QWEN3_30B_A3B, Step { batch: 1, rows: 2048, context: 0 }),
];

/// Cost of a step.
struct StepCost {
    gpu: Gpu,
    model: &'static str,
    step: Step,
    /// Bytes of weights, keys and values.
    bytes: f64,
    /// Seconds between kernels.
    gaps: f64,
    /// Longest first.
    kernels: Vec<KernelCost>,
}

/// Cost of a kernel's launches in a step.
struct KernelCost {
    name: String,
    launches: usize,
    resources: Resources,
    /// Blocks of a multiprocessor at once; of the longest launches, as the bytes in flight.
    resident: u32,
    in_flight: f64,
    /// Warp instructions.
    issued: f64,
    /// Those of them that are matrix products or dot products.
    products: f64,
    /// Multiplications of matrix products.
    multiplications: f64,
    /// Seconds by what limits them.
    times: BTreeMap<Limit, f64>,
    /// Seconds of the longest launches.
    longest: f64,
}

impl StepCost {
    fn seconds(&self) -> f64 {
        self.gaps + self.kernels.iter().map(KernelCost::seconds).sum::<f64>()
    }

    fn launches(&self) -> usize {
        self.kernels.iter().map(|kernel| kernel.launches).sum()
    }

    /// Seconds in which the memory delivers the weights, keys and values.
    fn floor(&self) -> f64 {
        self.bytes / self.gpu.bandwidth
    }
}

impl KernelCost {
    fn seconds(&self) -> f64 {
        self.times.values().sum()
    }

    /// The limit of the kernel for most of its time.
    fn by(&self) -> Limit {
        let most = self.times.iter().max_by(|a, b| a.1.total_cmp(b.1));
        most.map_or(Limit::Latency, |(limit, _)| *limit)
    }
}

/// Machine code and resources of the sources of one architecture.
struct Codes {
    compiler: Compiler,
    gpu: Gpu,
    read: HashMap<String, HashMap<String, (Code, Resources)>>,
}

impl Codes {
    fn new(gpu: Gpu) -> Self {
        Self { compiler: Compiler::find().unwrap(), gpu, read: HashMap::new() }
    }

    fn of(&mut self, source_name: &str, kernel: &str) -> &(Code, Resources) {
        let Self { compiler, gpu, read } = self;
        let source = || source::all(gpu.arch).find(|source| source.name == source_name).unwrap();
        let kernels = read.entry(source_name.to_owned()).or_insert_with(|| {
            let compiled = compiled(source(), gpu.arch);
            let mut resources = gate::resources(compiled);
            let codes = code::read(&gate::disassemble(compiler, compiled)).into_iter();
            codes
                .map(|(name, code)| {
                    let [registers, shared, spills] = resources.remove(&name).unwrap();
                    (name, (code, Resources { registers, shared, spills }))
                })
                .collect()
        });
        &kernels[kernel]
    }
}

fn cost(codes: &mut Codes, model: &Model, step: Step) -> StepCost {
    let gpu = codes.gpu;
    let (all, trace) = model.trace(step, gpu.arch, gpu.multiprocessors);
    let bytes = all.iter().map(|launched| launched.cold * launched.times as f64).sum();
    let gap = |launched: &Launched| {
        let listing = trace.lock().unwrap().listing(launched);
        let waits = listing.iter().any(|listed| listed.instruction.starts_with("griddepcontrol.wait"));
        if waits { DEPENDENT_GAP } else { GAP }
    };
    let gaps = all.iter().map(|launched| gap(launched) * launched.times as f64).sum();
    let mut kernels: Vec<KernelCost> = Vec::new();
    for launched in &all {
        let (code, resources) = codes.of(&launched.source, &launched.kernel);
        let priced = priced(&gpu, launched, &trace, code, resources);
        match kernels.iter_mut().find(|kernel| kernel.name == priced.name) {
            Some(kernel) => kernel.add(priced),
            None => kernels.push(priced),
        }
    }
    kernels.sort_by(|a, b| b.seconds().total_cmp(&a.seconds()));
    StepCost { gpu, model: model.name, step, bytes, gaps, kernels }
}

/// Returns the cost of all launches that are like this one.
fn priced(
    gpu: &Gpu,
    launched: &Launched,
    trace: &Arc<Mutex<Trace>>,
    code: &Code,
    resources: &Resources,
) -> KernelCost {
    let trace = trace.lock().unwrap();
    let listing = trace.listing(launched);
    let sampled = launched.sample.blocks as f64 * launched.warps();
    let run = Run::new(&listing, &launched.sample.executed, sampled, |address| trace.is_cold(address));
    let (bound, work) = Bound::of(gpu, resources, launched, code, &run);
    let times = launched.times as f64;
    let warps = launched.blocks() * launched.warps() * times;
    KernelCost {
        name: launched.kernel.clone(),
        launches: launched.times,
        resources: *resources,
        resident: bound.resident,
        in_flight: bound.in_flight,
        issued: work.total() * warps,
        products: work.of(&[Class::IntegerProduct, Class::FloatProduct, Class::Dot]) * warps,
        multiplications: work.products.iter().sum::<f64>() * warps,
        times: BTreeMap::from([(bound.by, bound.seconds * times)]),
        longest: bound.seconds * times,
    }
}

impl KernelCost {
    fn add(&mut self, other: Self) {
        if other.longest > self.longest {
            (self.longest, self.resident, self.in_flight) = (other.longest, other.resident, other.in_flight);
        }
        self.launches += other.launches;
        self.issued += other.issued;
        self.products += other.products;
        self.multiplications += other.multiplications;
        for (limit, seconds) in other.times {
            *self.times.entry(limit).or_default() += seconds;
        }
    }
}
