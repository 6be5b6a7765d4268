//! Whole kernels, as NVRTC compiled them for both architectures.

use crate::{Launch, Limits, Machine, RunError};

/// `texts/sample.cu`, compiled for each architecture.
const TEXTS: [&str; 2] = [include_str!("texts/sample.sm_90.ptx"), include_str!("texts/sample.sm_121a.ptx")];

struct Sample {
    machine: Machine,
    module: crate::ModuleRef,
}

impl Sample {
    fn each(mut test: impl FnMut(Self)) {
        for (seed, text) in TEXTS.into_iter().enumerate() {
            let mut machine = Machine::new(Limits::GB10, seed as u64);
            let module = machine.load(text).unwrap();
            test(Self { machine, module });
        }
    }

    fn run(
        &mut self,
        name: &str,
        blocks: u32,
        threads: u32,
        shared_bytes: u32,
        arguments: &[u64],
    ) -> Result<crate::Counts, RunError> {
        let kernel = self.machine.kernel(self.module, name).unwrap();
        let (grid, block) = ([blocks, 1, 1], [threads, 1, 1]);
        self.machine.launch(&Launch { kernel, grid, block, shared_bytes, arguments })
    }

    fn upload(&mut self, words: &[u32]) -> u64 {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let at = self.machine.allocate(bytes.len()).unwrap();
        self.machine.write(at, &bytes).unwrap();
        at
    }

    fn words(&self, at: u64, count: usize) -> Vec<u32> {
        let mut bytes = vec![0; 4 * count];
        self.machine.read(at, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

#[test]
fn norms_of_rows() {
    Sample::each(|mut sample| {
        let (rows, width) = (3usize, 200usize);
        let x: Vec<f32> = (0..rows * width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0).collect();
        let from = sample.upload(&x.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
        let to = sample.machine.allocate(4 * x.len()).unwrap();
        let eps = 1e-5f32;
        sample.run("rms_norm", 3, 96, 4 * 200, &[from, to, 200, eps.to_bits().into()]).unwrap();
        let y = sample.words(to, x.len());
        for (row, out) in x.chunks(width).zip(y.chunks(width)) {
            let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / width as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            for (&v, &out) in row.iter().zip(out) {
                let expected = f64::from(v) * scale;
                assert!((f64::from(f32::from_bits(out)) - expected).abs() < 1e-6 * expected.abs().max(1.0));
            }
        }
        // Too little shared memory for the row, and one row too many.
        let short = sample.run("rms_norm", 3, 96, 4 * 100, &[from, to, 200, 0]).unwrap_err().to_string();
        assert!(
            short.contains("shared memory are out of bounds") && short.contains("sample.cu:13"),
            "{short}"
        );
        let far = sample.run("rms_norm", 4, 96, 4 * 200, &[from, to, 200, 0]).unwrap_err().to_string();
        assert!(far.contains("global memory are out of bounds") && far.contains("block [3, 0, 0]"), "{far}");
    });
}

#[test]
fn products_with_a_vector() {
    Sample::each(|mut sample| {
        let (rows, quads) = (8usize, 40usize);
        let bytes =
            |count: usize, step: usize| -> Vec<u8> { (0..count).map(|i| (i * step % 251) as u8).collect() };
        let (weights, x) = (bytes(rows * quads * 16, 7), bytes(quads * 16, 13));
        let words = |bytes: &[u8]| -> Vec<u32> {
            bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let (from, with) = (sample.upload(&words(&weights)), sample.upload(&words(&x)));
        let to = sample.machine.allocate(4 * rows).unwrap();
        let counts = sample.run("gemv_s8", 2, 128, 0, &[from, with, to, quads as u64]).unwrap();
        assert_eq!(
            (counts.global_read, counts.global_written),
            ((2 * rows * quads * 16) as u64, (4 * rows) as u64)
        );
        let expected: Vec<u32> = weights
            .chunks(quads * 16)
            .map(|row| {
                row.iter().zip(&x).map(|(&w, &v)| i32::from(w as i8) * i32::from(v as i8)).sum::<i32>() as u32
            })
            .collect();
        assert_eq!(sample.words(to, rows), expected);
    });
}

#[test]
fn calls_loops_tables_and_atomics() {
    fn collatz(mut n: i32) -> i32 {
        let mut count = 0;
        while n != 1 {
            n = if n % 2 == 0 { n / 2 } else { 3 * n + 1 };
            count += 1;
        }
        count
    }
    Sample::each(|mut sample| {
        let x: Vec<i32> = (0..192).map(|i| 1 + i * 29 % 173).collect();
        let expected: Vec<i32> = x
            .iter()
            .map(|&n| {
                let value = collatz(n + (n & 7));
                match n % 5 {
                    0 => value + [1, 10, 100, 1000][(n & 3) as usize],
                    1 => value * 3,
                    2 => value - 7,
                    3 => value ^ n,
                    _ => -value,
                }
            })
            .collect();
        let from = sample.upload(&x.iter().map(|&v| v as u32).collect::<Vec<_>>());
        let to = sample.machine.allocate(4 * x.len()).unwrap();
        let total = sample.machine.allocate(4).unwrap();
        sample.run("branches", 3, 64, 0, &[from, to, total]).unwrap();
        let out: Vec<i32> = sample.words(to, x.len()).into_iter().map(|v| v as i32).collect();
        assert_eq!(out, expected);
        assert_eq!(sample.words(total, 1)[0] as i32, expected.iter().sum::<i32>());
    });
}

/// Some blocks of a grid run the instructions of as many launches of one block.
#[test]
fn blocks_of_a_grid_are_sampled() {
    Sample::each(|mut sample| {
        let (rows, width) = (1000u32, 200usize);
        let from = sample.machine.allocate_zeroed(4 * width * rows as usize).unwrap();
        let to = sample.machine.allocate(4 * width * rows as usize).unwrap();
        let kernel = sample.machine.kernel(sample.module, "rms_norm").unwrap();
        let arguments = [from, to, width as u64, 1e-5f32.to_bits().into()];
        let mut of = |rows, instructions| {
            let (grid, block, shared_bytes) = ([rows, 1, 1], [96, 1, 1], 4 * width as u32);
            let launch = Launch { kernel, grid, block, shared_bytes, arguments: &arguments };
            sample.machine.sample(&launch, instructions).unwrap()
        };
        let one = of(1, u64::MAX);
        assert_eq!(one.blocks, 1);
        let some = of(rows, 10 * one.counts.warp_instructions);
        assert_eq!((some.blocks, some.counts.warp_instructions), (10, 10 * one.counts.warp_instructions));
        for (one, some) in one.executed.iter().zip(&some.executed) {
            assert_eq!((10 * one.warps, 10 * one.lanes), (some.warps, some.lanes));
        }
        let reads = one.executed.iter().filter(|executed| (from..to).contains(&executed.address)).count();
        assert!(reads > 0);
        // The blocks are spread over the grid.
        let written = |row: u64| sample.machine.is_written(to + row * 4 * width as u64, 4 * width).unwrap();
        for quarter in 0..4 {
            assert!((quarter * 250..(quarter + 1) * 250).any(written), "{quarter}");
        }
        let listing = sample.machine.listing(kernel);
        assert_eq!(listing.len(), one.executed.len());
        assert!(listing.iter().any(|listed| listed.instruction.starts_with("ld.global")));
        assert!(listing.iter().any(|listed| listed.source_line == "sample.cu:13"));
    });
}

/// Zeroes that count as written, also after a copy of bytes that do not.
#[test]
fn zeroes_are_written() {
    let mut machine = Machine::new(Limits::GB10, 1);
    let zeroes = machine.allocate_zeroed(300).unwrap();
    let unwritten = machine.allocate(64).unwrap();
    assert!(machine.is_written(zeroes, 300).unwrap());
    machine.copy(unwritten, zeroes + 64, 64).unwrap();
    assert!(machine.is_written(zeroes, 64).unwrap() && machine.is_written(zeroes + 128, 172).unwrap());
    assert!(!machine.is_written(zeroes + 64, 1).unwrap());
    let mut bytes = [1; 64];
    machine.read(zeroes, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 64]);
    let free = machine.allocate_zeroed(Limits::GB10.memory_bytes as usize).unwrap_err();
    assert!(matches!(free, RunError::OutOfMemory { .. }));
}
