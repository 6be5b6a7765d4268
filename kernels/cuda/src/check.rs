//! Comparison of every operation on a device with the same operation on the CPU. `kvasir gpu-check` runs it
//! on a GPU, the tests run it on the interpreter.

use super::Arch;
use kernels::Error;
use kernels::backend::{ActivationMode, Backend, BufferId, VectorId};
use kernels::quant::GgmlType;

mod caches;
mod cases;

#[cfg(test)]
mod tests;

/// Operations that the GPU backend has kernels for, by the names of [`Backend`].
pub const OPS: [&str; 23] = [
    "embed",
    "norm",
    "matmul",
    "use_adapters",
    "qkv",
    "attention",
    "conv",
    "delta_net",
    "mamba2",
    "accept",
    "gated_norm",
    "gate",
    "scale_rows",
    "scale",
    "add",
    "moe",
    "head_matmul",
    "place_heads",
    "gather_rows",
    "finish_logits",
    "argmax",
    "best",
    "copy_kv",
];

/// Creates a new backend for each group of cases, with this activation type for quantised matrices.
pub type Make<'a> = dyn FnMut(ActivationMode) -> Result<Box<dyn Backend>, Error> + 'a;

/// Runs the operations of a group of cases on a backend, with a name and values for each result.
type Group = fn(&mut Inputs<'_>) -> Result<(), Error>;

/// Result of one operation with one set of arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// Name of the operation in [`Backend`].
    pub op: &'static str,
    pub what: String,
    /// Difference between device and CPU, relative to the norm of the CPU's result.
    pub error: f64,
    /// Largest allowed difference.
    pub tolerance: f64,
}

impl Case {
    /// Whether the difference is within the tolerance.
    pub fn passed(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// Results of all comparisons.
#[derive(Debug, Default)]
pub struct Checked {
    /// Cases that ran on both backends.
    pub cases: Vec<Case>,
    /// Groups that the device or the CPU refused, with the reason.
    pub refused: Vec<String>,
}

impl Checked {
    /// Whether everything ran and is within its tolerance.
    pub fn passed(&self) -> bool {
        self.refused.is_empty() && self.cases.iter().all(Case::passed)
    }
}

/// Compares a device with `multiprocessors` multiprocessors with an oracle in all cases. Together the cases
/// use every kernel. `arch`: that of the device.
pub fn compare(device: &mut Make<'_>, oracle: &mut Make<'_>, multiprocessors: usize, arch: Arch) -> Checked {
    compare_types(&GgmlType::ALL, device, oracle, multiprocessors, arch)
}

/// Like [`compare`], with products of these types of weights alone.
fn compare_types(
    types: &[GgmlType],
    device: &mut Make<'_>,
    oracle: &mut Make<'_>,
    multiprocessors: usize,
    arch: Arch,
) -> Checked {
    let mut checked = Checked::default();
    let mut group = |name: &str, mode, run: &dyn Fn(&mut Inputs<'_>) -> Result<(), Error>| {
        checked.group(name, mode, device, oracle, run);
    };
    let int8 = ActivationMode::Int8;
    for &ty in types {
        if super::matmul::MatmulKernels::source(ty).is_ok() {
            group(&format!("products of {ty}"), int8, &|inputs| cases::products(inputs, ty, multiprocessors));
        }
        if super::matmul::reads_int8(ty) {
            let run = |inputs: &mut Inputs<'_>| cases::exact_products(inputs, ty);
            group(&format!("products of {ty} with f32"), ActivationMode::F32, &run);
        }
        if arch.has_block_scales() && super::source::matmul::scaled(ty).is_some() {
            group(&format!("products of {ty} with scaled blocks"), ActivationMode::Nvfp4, &|inputs| {
                cases::scaled_products(inputs, ty, multiprocessors)?;
                cases::scaled_experts(inputs, ty)
            });
        }
        if arch.has_group_products() && super::source::matmul::bf16(ty).is_some() {
            group(&format!("products of {ty} with bf16"), ActivationMode::Bf16, &|inputs| {
                cases::bf16_products(inputs, ty, multiprocessors)
            });
        }
    }
    let groups: [(&str, Group); 7] = [
        ("rows", cases::rows),
        ("gates", cases::gates),
        ("embeddings", cases::embeddings),
        ("experts", cases::experts),
        ("heads", cases::heads),
        ("orders of columns", cases::orders),
        ("adapters", cases::adapters),
    ];
    for (name, run) in groups {
        group(name, int8, &run);
    }
    for layer in caches::KV_LAYERS {
        group("attention", int8, &|inputs| caches::attention(inputs, layer));
    }
    for (layer, steps) in caches::long_layers() {
        group("long attention", int8, &|inputs| caches::long_attention(inputs, layer, steps));
    }
    group("attention over blocks in common", int8, &caches::shared_beginning);
    for inner in [64, 128, 256] {
        group("delta net", int8, &|inputs| caches::delta_net(inputs, inner));
        group("Mamba-2", int8, &|inputs| caches::mamba2(inputs, inner));
    }
    group("short convolution", int8, &caches::short_conv);
    checked
}

impl Checked {
    fn group(
        &mut self,
        name: &str,
        activations: ActivationMode,
        device: &mut Make<'_>,
        oracle: &mut Make<'_>,
        run: &dyn Fn(&mut Inputs<'_>) -> Result<(), Error>,
    ) {
        let mut outputs = |side: &str, make: &mut Make<'_>| {
            let mut outputs = Vec::new();
            let outcome = make(activations).and_then(|mut backend| {
                run(&mut Inputs { backend: backend.as_mut(), random: Random(1), outputs: &mut outputs })
            });
            if let Err(error) = outcome {
                self.refused.push(format!("{name}, {side}: {error}"));
            }
            outputs
        };
        let found = outputs("the device", device);
        let expected = outputs("the CPU", &mut |activations| match activations {
            // The inputs are values that these forms have.
            scaled if scaled.needs_block_scales() || scaled == ActivationMode::Bf16 => {
                oracle(ActivationMode::F32)
            }
            other => oracle(other),
        });
        self.cases.extend(found.iter().zip(&expected).map(|(found, expected)| found.case(expected)));
    }
}

struct Output {
    op: &'static str,
    what: String,
    tolerance: f64,
    values: Vec<f32>,
}

impl Output {
    fn case(&self, expected: &Self) -> Case {
        let Self { op, what, tolerance, .. } = self;
        Case {
            op,
            what: what.clone(),
            error: distance(&self.values, &expected.values),
            tolerance: *tolerance,
        }
    }
}

/// |found - expected| / |expected|. A NaN must be NaN on both sides.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let (mut apart, mut length) = (0.0, 0.0);
    for (found, expected) in found.iter().zip(expected) {
        if found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()) {
            length += if expected.is_finite() { f64::from(*expected).powi(2) } else { 0.0 };
            continue;
        }
        if !found.is_finite() || !expected.is_finite() {
            return f64::INFINITY;
        }
        apart += (f64::from(*found) - f64::from(*expected)).powi(2);
        length += f64::from(*expected).powi(2);
    }
    if apart == 0.0 { 0.0 } else { (apart / length.max(f64::MIN_POSITIVE)).sqrt() }
}

/// A backend, random inputs that are the same for each backend, and the results.
struct Inputs<'a> {
    backend: &'a mut dyn Backend,
    random: Random,
    outputs: &'a mut Vec<Output>,
}

impl Inputs<'_> {
    /// Creates a buffer of random rows.
    fn rows(&mut self, rows: usize, cols: usize) -> Result<BufferId, Error> {
        let buffer = self.backend.create_buffer(rows, cols)?;
        let values = self.random.values(rows * cols);
        self.backend.write_rows(buffer, &values)?;
        Ok(buffer)
    }

    /// Creates a vector of random values.
    fn vector(&mut self, len: usize) -> Result<VectorId, Error> {
        let values = self.random.values(len);
        self.backend.create_vector(&values)
    }

    /// Adds a buffer's contents to the results as output of an operation.
    fn keep(
        &mut self,
        op: &'static str,
        what: impl Into<String>,
        tolerance: f64,
        (buffer, rows, cols): (BufferId, usize, usize),
    ) -> Result<(), Error> {
        let mut values = vec![0.0; rows * cols];
        for (row, values) in values.chunks_exact_mut(cols).enumerate() {
            self.backend.read_row(buffer, row, values)?;
        }
        self.outputs.push(Output { op, what: what.into(), tolerance, values });
        Ok(())
    }
}

/// Random numbers that are the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 31)
    }

    /// Returns a value in -1..1.
    fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }

    /// Returns values that MXFP8 has: at most four binary digits, within a few powers of two of each other.
    fn mxfp8_values(&mut self, len: usize) -> Vec<f32> {
        let mut value = || {
            let bits = self.next();
            let size = (8 + (bits >> 40 & 7)) as f32 / f32::from(8u8 << (bits >> 48 & 3));
            if bits >> 63 == 0 { size } else { -size }
        };
        (0..len).map(|_| value()).collect()
    }

    /// Returns values that NVFP4 has: the largest E2M1 in each block of 16, which is scaled by one of some powers of
    /// two.
    fn nvfp4_values(&mut self, len: usize) -> Vec<f32> {
        let mut scale = 1.0;
        let mut value = |i: usize| {
            let bits = self.next();
            if i.is_multiple_of(16) {
                scale = 1.0 / f32::from(1u8 << (bits >> 48 & 3));
                return 6.0 * scale;
            }
            let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][(bits >> 40 & 7) as usize] * scale;
            if bits >> 63 == 0 { size } else { -size }
        };
        (0..len).map(&mut value).collect()
    }

    /// Returns bytes of a weight format. One bit of each byte is zero, so that no scale or value of any
    /// format is infinite or NaN.
    fn weights(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8 & 0xbf).collect()
    }
}
