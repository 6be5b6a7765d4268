//! Tests of matrices with another order of columns.

use super::*;
use crate::backend::MatmulJob;

/// A matrix of the blocks of `ty` with these bytes.
fn blocks(backend: &mut CpuBackend, ty: GgmlType, (rows, cols): (usize, usize), bytes: &[u8]) -> MatrixId {
    let source = MatrixSource { ggml_type: ty.id(), rows, cols, experts: 1, bytes: &bytes };
    backend.create_matrix(source).unwrap()
}

fn job(matrix: MatrixId, out: BufferId) -> MatmulJob {
    MatmulJob { matrix, out, bias: None, scale: 1.0, accumulate: false }
}

/// Three matrices in one product: in their own order, and twice in another. Compares bit for bit with rows whose
/// values are in that order.
#[test]
fn columns_multiply_the_values_that_their_order_names() {
    let (rows, outputs, cols) = (5, 40, 96);
    let mut random = Random(7);
    let order: Vec<u32> = (0..cols as u32).map(|col| col * 35 % cols as u32).collect();
    let x = random.values(rows * cols);
    let in_order: Vec<f32> =
        x.chunks(cols).flat_map(|row| order.iter().map(|&col| row[col as usize])).collect();
    for ty in [GgmlType::Q8_0, GgmlType::BF16] {
        let bytes: Vec<u8> = (0..ty.row_bytes(cols).unwrap() * outputs).map(|i| (i * 7 % 61) as u8).collect();
        for mode in [ActivationMode::Int8, ActivationMode::F32] {
            on_every_isa(mode, |backend| {
                let (x, in_order) = (buffer(backend, cols, &x), buffer(backend, cols, &in_order));
                let [plain, first, second] = [(); 3].map(|()| blocks(backend, ty, (outputs, cols), &bytes));
                let outs = [(); 5].map(|()| buffer(backend, outputs, &vec![0.0; rows * outputs]));
                backend.matmul(x, &[job(plain, outs[0])]).unwrap();
                backend.matmul(in_order, &[job(plain, outs[1])]).unwrap();
                backend.set_order(first, &order).unwrap();
                backend.set_order(second, &order).unwrap();
                let jobs = [job(first, outs[2]), job(plain, outs[3]), job(second, outs[4])];
                backend.matmul(x, &jobs).unwrap();
                let [own, expected, first, beside, second] = outs.map(|out| values(backend, out));
                assert_eq!((&first, &second, &beside), (&expected, &expected, &own));
                assert_ne!(own, expected);
                own
            });
        }
    }
}

#[test]
fn an_order_names_every_column_once() {
    on_every_isa(ActivationMode::F32, |backend| {
        let matrix = matrix(backend, 1, 3, &[1.0; 6]);
        assert!(matches!(
            backend.set_order(matrix, &[0, 1]),
            Err(Error::Length { expected: 3, found: 2, .. })
        ));
        for order in [[0, 1, 1], [0, 1, 3]] {
            assert!(matches!(backend.set_order(matrix, &order), Err(Error::Order { cols: 3 })));
        }
        backend.set_order(matrix, &[2, 0, 1]).unwrap();
        vec![]
    });
}
