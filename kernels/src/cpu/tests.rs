//! Tests of the op vocabulary on every instruction set, against plain definitions.

use super::*;
use crate::Isa;
use crate::backend::{MatrixBytes, StepSequence};
use crate::pool::PoolConfig;
use std::borrow::Cow;
use std::num::NonZeroUsize;

mod adapters;
mod attend;
mod deferred;
mod heads;
mod moe;
mod orders;
mod recurrent;
mod rowwise;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 ^ self.0 >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32
    }

    /// Between -1 and 1.
    fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next() as f32 / (1_u64 << 31) as f32 - 1.0).collect()
    }
}

fn device(isa: Isa, activations: ActivationMode, threads: usize) -> CpuBackend {
    let config = CpuConfig { matmul: isa, attention: isa, rows: isa, activations };
    let pool = Pool::new(PoolConfig::new(NonZeroUsize::new(threads).unwrap())).unwrap();
    CpuBackend::new(config, pool).unwrap()
}

/// Runs `f` on every instruction set, with one thread and with three, and checks that the bits are equal.
fn on_every_isa(activations: ActivationMode, f: impl Fn(&mut CpuBackend) -> Vec<f32>) -> Vec<f32> {
    let expected = f(&mut device(Isa::Scalar, activations, 1));
    for isa in Isa::available() {
        for threads in [1, 3] {
            let got = f(&mut device(isa, activations, threads));
            assert_eq!(bits(&got), bits(&expected), "{isa}, {threads} threads");
        }
    }
    expected
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn assert_close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1.0), "element {i}: {got} is not {expected}");
    }
}

/// Creates a buffer with these rows.
fn buffer(backend: &mut CpuBackend, cols: usize, values: &[f32]) -> BufferId {
    let id = backend.create_buffer(values.len() / cols, cols).unwrap();
    backend.write_rows(id, values).unwrap();
    id
}

fn values(backend: &CpuBackend, id: BufferId) -> Vec<f32> {
    backend.buffers[id.0 as usize].values().to_vec()
}

/// Creates `experts` matrices of F32.
fn matrix(backend: &mut CpuBackend, experts: usize, cols: usize, values: &[f32]) -> MatrixId {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let rows = values.len() / cols / experts;
    let ggml_type = GgmlType::F32.id();
    backend.create_matrix(MatrixSource { ggml_type, rows, cols, experts, bytes: &bytes }).unwrap()
}

/// A tensor whose second half cannot be read.
#[derive(Debug)]
struct Half(Vec<u8>);

impl MatrixBytes for Half {
    fn size(&self) -> usize {
        self.0.len()
    }

    fn part(&self, range: Range<usize>) -> Result<Cow<'_, [u8]>, Error> {
        let refused = Error::Read { reason: "half is missing".to_owned() };
        self.0[..self.0.len() / 2].get(range).map(Cow::Borrowed).ok_or(refused)
    }
}

#[test]
fn bytes_that_cannot_be_read_are_an_error_and_no_matrix() {
    let mut backend = device(Isa::detect(), ActivationMode::F32, 2);
    let half = Half(vec![0; 64 * 64 * 4]);
    let source = MatrixSource { ggml_type: GgmlType::F32.id(), rows: 64, cols: 64, experts: 1, bytes: &half };
    let refused = Err(Error::Read { reason: "half is missing".to_owned() });
    assert_eq!(backend.create_matrix(source), refused);
    assert_eq!(backend.pack_matrix(source, &|_, _| {}), refused.map(|_| ()));
    assert_eq!(backend.memory().weights, 0);
    assert!(matches!(
        backend.create_matrix(MatrixSource { rows: 63, ..source }),
        Err(Error::Length { what: "tensor bytes", .. })
    ));
}

/// A step of whole sequences of these lengths, without attention.
fn begin(backend: &mut CpuBackend, tokens: &[u32], sequences: &[StepSequence]) -> Result<(), Error> {
    backend.begin_step(&StepInput { tokens, sequences, tables: &[], states: &[] })
}

#[test]
fn the_arena_is_read_and_written_in_bounds_only() {
    let mut backend = device(Isa::detect(), ActivationMode::Int8, 1);
    backend.create_kv_arena(1024, &[128]).unwrap();
    let bytes: Vec<u8> = (0..200).collect();
    backend.write_arena(3, &bytes).unwrap();
    let mut read = vec![0; 200];
    backend.read_arena(3, &mut read).unwrap();
    assert_eq!(read, bytes);
    let copy = |from, to| KvCopy { group: 0, from, to };
    backend.copy_kv(&[copy(3, 9), copy(9, 14)]).unwrap();
    backend.read_arena(14, &mut read[..128]).unwrap();
    assert_eq!(read[..128], bytes[..128]);
    // Access up to the last byte is allowed, beyond it is not.
    assert_eq!(backend.write_arena(15, &[1; 64]), Ok(()));
    assert_eq!(backend.read_arena(16, &mut []), Ok(()));
    let outside = |end| Err(Error::OutsideArena { end, len: 1024 });
    assert_eq!(backend.write_arena(15, &[1; 65]), outside(1025));
    assert_eq!(backend.read_arena(16, &mut [0]), outside(1025));
    assert_eq!(backend.copy_kv(&[copy(0, 15)]), outside(1088));
    let far = u64::from(u32::MAX) * 64 + 64;
    assert_eq!(backend.read_arena(u32::MAX, &mut read[..64]), outside(far));
    let group = KvCopy { group: 1, from: 0, to: 0 };
    assert_eq!(backend.copy_kv(&[group]), Err(Error::OutOfRange { what: "KV group", index: 1, len: 1 }));
}

#[test]
fn a_part_of_a_product_equals_that_part_of_the_whole_product() {
    let mut random = Random(7);
    let (rows, cols, outputs) = (3, 64, 150);
    let (weights, x) = (random.values(outputs * cols), random.values(rows * cols));
    for threads in [1, 3] {
        let mut backend = device(Isa::detect(), ActivationMode::F32, threads);
        let matrix = matrix(&mut backend, 1, cols, &weights);
        let input = buffer(&mut backend, cols, &x);
        let out = backend.create_buffer(rows, outputs).unwrap();
        let job = MatmulJob { matrix, out, bias: None, scale: 0.5, accumulate: false };
        backend.matmul(input, &[job]).unwrap();
        let whole = values(&backend, out);
        assert!(backend.serves_parts());
        // Parts that end inside panels and at their edges, an empty part, and the last panel, which is not
        // whole.
        for range in [0..150, 0..16, 16..32, 5..20, 63..64, 40..40, 140..150] {
            backend.write_rows(out, &vec![f32::NAN; rows * outputs]).unwrap();
            backend.matmul_part(input, &job, range.clone()).unwrap();
            let got = values(&backend, out);
            for row in 0..rows {
                let of = |all: &[f32]| bits(&all[row * outputs..][range.clone()]);
                assert_eq!(of(&got), of(&whole), "row {row}, {range:?}");
            }
        }
        backend.write_rows(out, &whole).unwrap();
        backend.write_part(out, 1, 148, &[1.0, 2.0]).unwrap();
        let (mut tail, best) = ([0.0; 5], |range: Range<usize>| {
            let of = &whole[range.clone()];
            let highest = of.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            (range.start + of.iter().position(|x| *x == highest).unwrap(), highest)
        });
        backend.read_part(out, 0, 145, &mut tail).unwrap();
        assert_eq!(bits(&tail), bits(&whole[145..150]));
        let (index, value) = best(10..140);
        assert_eq!(backend.best_of_part(out, 0, 10..140).unwrap(), (index as u32, value));
        assert!(backend.best_of_part(out, 0, 10..10).is_err());
        assert!(backend.read_part(out, 0, 146, &mut tail).is_err());
        let mut expected = whole.clone();
        expected[outputs + 148..2 * outputs].copy_from_slice(&[1.0, 2.0]);
        assert_eq!(bits(&values(&backend, out)), bits(&expected));
        assert!(backend.write_part(out, 1, 149, &[1.0, 2.0]).is_err());
        assert!(backend.write_part(out, rows, 0, &[1.0]).is_err());
    }
}

#[test]
fn the_sequences_of_a_step_must_cover_its_tokens() {
    let mut backend = device(Isa::detect(), ActivationMode::Int8, 1);
    let sequence = |rows| StepSequence { rows, context: 0, segment_start: None };
    assert_eq!(begin(&mut backend, &[1, 2, 3], &[sequence(0..1), sequence(1..3)]), Ok(()));
    for ranges in [[0..1, 1..2], [0..2, 1..3], [1..3, 0..1], [0..3, 3..4]] {
        let sequences = ranges.map(sequence);
        let result = begin(&mut backend, &[1, 2, 3], &sequences);
        assert!(matches!(result, Err(Error::Length { .. })), "{sequences:?}");
    }
}
