//! Comparison of the page with the code, and the model on kernels whose cost is known.

use super::*;
use crate::Arch;
use crate::source::Source;
use crate::{Device, Launch};
use kernels::backend::ActivationMode;
use std::path::Path;
use trace::Tracer;

/// `UPDATE_DOCS=1` writes the page, unless a kernel got worse; `UPDATE_DOCS=worse` writes it then, too.
#[test]
fn the_page_is_what_the_machine_code_gives_and_no_kernel_gets_worse() {
    let of = |gpu: Gpu| {
        let mut codes = Codes::new(gpu);
        let has = |model: &Model| match model.activations {
            ActivationMode::Mxfp8 | ActivationMode::Nvfp4 => gpu.arch.has_block_scales(),
            ActivationMode::Bf16 => gpu.arch.has_group_products(),
            ActivationMode::Int8 | ActivationMode::F32 => true,
        };
        let steps = STEPS.iter().filter(|(model, _)| has(model));
        let costs = steps.map(|(model, step)| {
            let cost = cost(&mut codes, model, *step);
            check(model, &cost);
            cost
        });
        costs.collect::<Vec<_>>()
    };
    let steps: Vec<StepCost> = std::thread::scope(|scope| {
        let running = GPUS.map(|gpu| scope.spawn(move || of(gpu)));
        running.into_iter().flat_map(|running| running.join().unwrap()).collect()
    });
    let rendered = page::render(&GPUS, &steps);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/measurements/gpu-cost.md");
    let mut written = std::fs::read_to_string(&path).unwrap_or_default();
    let update = std::env::var("UPDATE_DOCS").unwrap_or_default();
    let worse = page::worse(&written, &rendered).join("\n");
    assert!(worse.is_empty() || update == "worse", "\n{worse}\nUPDATE_DOCS=worse accepts this");
    if !update.is_empty() {
        std::fs::write(&path, &rendered).unwrap();
        written.clone_from(&rendered);
    }
    // Another compiler makes other machine code.
    let checked = Compiler::find().unwrap().version() == (13, 0);
    assert!(
        !checked || written == rendered,
        "gpu-cost.md differs from the code: UPDATE_DOCS=1 writes it again"
    );
}

/// Compares what a step reads and multiplies with the model's shape.
fn check(model: &Model, cost: &StepCost) {
    let kv = (cost.step.batch * (cost.step.context + cost.step.rows)) as f64 * model.kv_bytes_of_all_layers();
    let weights = model.weights(cost.step);
    let within = |what: &str, found: f64, from: f64, to: f64| {
        let name = format!("{}, {}, {}", cost.gpu.name, cost.model, cost.step);
        assert!((from..=to).contains(&found), "{name}: {found:e} {what}, {from:e} to {to:e} by the shape");
    };
    if let Some(bytes) = weights.bytes {
        // A long prompt reads its keys and values several times.
        let again = if cost.step.rows > 1 { 100.0 } else { 1.0 };
        within("bytes", cost.bytes, bytes, 1.001 * bytes + again * kv);
    }
    if cost.step.rows > 1 {
        // Partial tiles of tokens are computed whole.
        let products = |kernel: &&KernelCost| {
            ["_mul_", "_scaled_", "_bf16_"].iter().any(|part| kernel.name.contains(part))
        };
        let found: f64 = cost.kernels.iter().filter(products).map(|kernel| kernel.multiplications).sum();
        within("multiplications", found, 0.95 * weights.multiplications, 1.6 * weights.multiplications);
    }
}

/// A kernel with `turns` turns of a loop that loads `words` times 16 bytes and waits for them.
fn looped(words: usize, turns: u64) -> (KernelCost, f64) {
    let text = format!(
        r#"extern "C" __global__ void looped(const uint4 *x, unsigned *y, unsigned n) {{
            unsigned sum = 0;
            #pragma unroll 1
            for (unsigned i = 0; i < n; i++) {{
                #pragma unroll
                for (int k = 0; k < {words}; k++) {{
                    uint4 v = x[(i * {words} + k) * blockDim.x + threadIdx.x];
                    sum = __dp4a((int)v.x, (int)v.y, (int)(sum ^ v.z ^ v.w));
                }}
            }}
            y[blockIdx.x * blockDim.x + threadIdx.x] = sum;
        }}"#
    );
    let source = Source { name: "looped.cu", text: text.leak(), kernels: &["looped"] };
    let source = Source { name: format!("looped {words}.cu").leak(), ..source };
    let (gpu, trace) = (Gpu::H100, Trace::new(Gpu::H100.multiprocessors));
    let mut device = Tracer(trace.clone());
    let compiled = compiled(&source, Arch::SM_90);
    let kernel = device.load(compiled, source.kernels).unwrap()[0];
    trace.lock().unwrap().allocates_cold = true;
    let x = device.allocate(16 * 128 * words * turns as usize).unwrap();
    trace.lock().unwrap().allocates_cold = false;
    let y = device.allocate(4 * 128 * 132).unwrap();
    let arguments = [x.into(), y.into(), (turns as u32).into()];
    let (grid, block) = ([132, 1, 1], [128, 1, 1]);
    device.launch(&Launch { kernel, grid, block, shared_bytes: 0, arguments: &arguments }).unwrap();
    let launched = trace.lock().unwrap().take().remove(0);
    let code = &code::read(&gate::disassemble(&Compiler::find().unwrap(), compiled))["looped"];
    let [registers, shared, spills] = gate::resources(compiled)["looped"];
    let cost = priced(&gpu, &launched, &trace, code, &Resources { registers, shared, spills });
    let dots = cost.products / (launched.blocks() * launched.warps());
    (cost, dots)
}

#[test]
fn loads_that_wait_for_each_other_cost_their_latency_and_loads_together_are_in_flight() {
    let (one, dots) = looped(1, 20);
    assert!((dots - 20.0).abs() < 0.5, "{dots}");
    let (four, dots) = looped(4, 20);
    assert!((dots - 80.0).abs() < 1.0, "{dots}");
    // 20 waits for memory, of 0.35 us to an idle one; with four loads at a time as many.
    let waits = 20.0 * Gpu::H100.latency[0];
    for cost in [&one, &four] {
        assert_eq!(cost.by(), Limit::Latency);
        assert!((waits..1.3 * waits).contains(&cost.seconds()), "{} s", cost.seconds());
    }
    // Four warps of 32 lanes.
    assert!((one.in_flight - 4.0 * 512.0).abs() < 1.0 && (four.in_flight - 16.0 * 512.0).abs() < 1.0);
    // Twice the turns are twice the cost: the gate sees it.
    let (twice, _) = looped(1, 40);
    assert!((1.8..2.2).contains(&(twice.seconds() / one.seconds())));
    assert!(twice.issued > 1.8 * one.issued);
}

#[test]
fn blocks_of_a_multiprocessor_are_limited_by_registers_shared_memory_and_warps() {
    let (launched, trace) = LLAMA_8B.trace(STEPS[0].1, Arch::SM_121A, 48);
    drop(trace);
    let launched = launched.iter().find(|launched| launched.threads == 256).unwrap();
    for (registers, shared, blocks) in
        [(128, 1024, 2), (129, 1024, 1), (64, 1024, 4), (32, 1024, 6), (32, 48 << 10, 2), (32, 50 << 10, 1)]
    {
        let resources = Resources { registers, shared, spills: 0 };
        assert_eq!(Gpu::GB10.resident(&resources, launched), blocks, "{registers} {shared}");
    }
}
