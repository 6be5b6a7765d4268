//! Benchmark of the interpreter: lane instructions per second on one core. Run `cargo bench -p kvasir-ptx`.

use kvasir_ptx::{Launch, Limits, Machine, RunError};
use std::error::Error;
use std::time::Instant;

const TEXT: &str = include_str!("../src/tests/texts/sample.sm_90.ptx");

fn main() -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    for _ in 0..20 {
        Machine::new(Limits::HOPPER, 0).load(TEXT)?;
    }
    println!("load: {:.2} ms for {} KiB", start.elapsed().as_secs_f64() * 50.0, TEXT.len() >> 10);
    let mut machine = Machine::new(Limits::HOPPER, 0);
    let module = machine.load(TEXT)?;
    let zeros = |machine: &mut Machine, bytes: usize| -> Result<u64, RunError> {
        let at = machine.allocate(bytes)?;
        machine.fill(at, 0x11, bytes)?;
        Ok(at)
    };
    let (x, y) = (zeros(&mut machine, 64 << 20)?, zeros(&mut machine, 64 << 20)?);
    let eps = 1e-5f32.to_bits().into();
    for (name, blocks, shared_bytes, arguments) in [
        ("rms_norm", 32, 4 * 4096, vec![x, y, 4096, eps]),
        ("gemv_s8", 512, 0, vec![x, y, y + (32 << 20), 256]),
        ("branches", 64, 0, vec![x, y, y + (32 << 20)]),
    ] {
        let kernel = machine.kernel(module, name).ok_or("no such kernel")?;
        if name == "branches" {
            let numbers: Vec<u8> = (0..64 * 256u32).flat_map(|i| (i + 1).to_le_bytes()).collect();
            machine.write(x, &numbers)?;
        }
        let launch =
            Launch { kernel, grid: [blocks, 1, 1], block: [256, 1, 1], shared_bytes, arguments: &arguments };
        machine.launch(&launch)?;
        let start = Instant::now();
        let counts = machine.launch(&launch)?;
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{name}: {:.0} M a second ({} M in {:.1} ms)",
            counts.lane_instructions as f64 / seconds / 1e6,
            counts.lane_instructions / 1_000_000,
            seconds * 1e3
        );
    }
    Ok(())
}
