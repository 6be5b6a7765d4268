//! Benchmarks on the interpreter. Times mean nothing there; bytes and outcomes are checked.

use super::*;
use crate::tests::compiled;
use crate::{Arch, SimDevice};
use kernels::attention::KvType;
use kernels::backend::Backend;
use kernels::quant::GgmlType;

fn speed(arch: Arch) -> Speed {
    let device = Box::new(SimDevice::new(ptx::Limits::GB10, 1));
    Speed::new(device, Arc::new(move |source| Ok(compiled(source, arch).clone())), 100_000, 1)
}

#[test]
fn copies_and_products_are_measured() {
    let speed = speed(Arch::SM_90);
    assert!(speed.copies(1 << 20).unwrap() > 0.0);
    for (ty, tokens) in [(GgmlType::Q4_K, 1), (GgmlType::F16, 2)] {
        let case = ProductCase { ty, rows: 64, cols: 256, tokens };
        let found = speed.product(&case).unwrap();
        assert_eq!(found.bytes, 64 * ty.row_bytes(256).unwrap());
        assert!(found.seconds > 0.0);
    }
    let none = ProductCase { ty: GgmlType::IQ2_S, rows: 64, cols: 256, tokens: 1 };
    assert!(matches!(speed.product(&none), Err(Error::NoMatmul { .. })));
}

#[test]
fn attention_is_measured_over_contiguous_paged_and_shared_blocks() {
    let case = AttentionCase {
        kv_type: KvType::F16,
        heads: 2,
        kv_heads: 1,
        width: 32,
        block_tokens: 16,
        context: 70,
        batch: 2,
    };
    let found = speed(Arch::SM_90).attention(&case).unwrap();
    assert_eq!(found.bytes, 2 * 80 * 2 * 32 * 2);
    assert!(found.contiguous > 0.0 && found.paged > 0.0 && found.shared.is_none());
    let found = speed(Arch::SM_90).attention(&AttentionCase { context: 513, ..case }).unwrap();
    assert!(found.shared.unwrap() > 0.0);
    assert_eq!(found.bytes, 2 * 528 * 2 * 32 * 2);
}

#[test]
fn steps_of_a_random_model_are_measured() {
    let shape =
        DecodeShape { layers: 2, hidden: 256, heads: 4, kv_heads: 2, head_dim: 64, ff: 512, vocab: 300 };
    let speed = speed(Arch::SM_121A);
    let mut model = speed.model(Arch::SM_121A, shape, (6, 64), 1).unwrap();
    let single = model.step(2, 20, 1).unwrap();
    // The second layer uses more bits for two matrices.
    let (narrow, wide) = (256 * (256 + 128 + 256 + 2 * 512), 256 * (128 + 512));
    let layers = (2 * narrow + wide) * 144 / 256 + wide * 210 / 256;
    assert_eq!(single.weight_bytes, layers + 320 * 210);
    assert_eq!(single.kv_bytes, 2 * 2 * 16 * 2 * 2 * 2 * 64 * 2);
    assert!(single.eager > 0.0 && single.graph > 0.0);
    let prompt = model.step(2, 0, 3).unwrap();
    assert_eq!(prompt.weight_bytes, layers);
    assert!(matches!(model.step(2, 60, 1), Err(Error::OutOfRange { .. })));
    // The residual stream of random weights must stay finite, because NaN would change the measured speed.
    let mut row = vec![0.0; 256];
    let x = model.ops.buffers.x;
    model.backend.read_row(x, 0, &mut row).unwrap();
    assert!(row.iter().all(|x: &f32| x.is_finite()) && row.iter().any(|x| *x != 0.0), "{row:?}");
}
