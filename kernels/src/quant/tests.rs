use super::{GgmlType, dequantize};
use crate::error::Error;
use safetensors::SafeTensors;
use std::path::Path;

fn vectors() -> Vec<u8> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/quant/vectors");
    std::fs::read(dir.join("vectors.safetensors")).expect("the fixtures are part of the repository")
}

#[test]
fn every_format_dequantises_to_the_oracle_bit_for_bit() {
    let file = vectors();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    for ty in GgmlType::ALL.into_iter().filter(|ty| ty.is_of_gguf()) {
        let bytes = tensors.tensor(&format!("{ty}.bytes")).unwrap();
        let expected: Vec<u32> = tensors
            .tensor(&format!("{ty}.f32"))
            .unwrap()
            .data()
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        let mut out = vec![0.0; expected.len()];
        dequantize(ty, bytes.data(), &mut out).unwrap();
        let differing = out.iter().zip(&expected).filter(|(x, e)| x.to_bits() != **e).count();
        assert_eq!(differing, 0, "{ty}");
    }
}

#[test]
fn ids_and_block_shapes_match_the_oracle() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/quant/vectors");
    let text = std::fs::read_to_string(dir.join("vectors.json")).unwrap();
    let facts: serde_json::Value = serde_json::from_str(&text).unwrap();
    let facts = facts.as_object().unwrap();
    assert_eq!(facts.len(), GgmlType::ALL.into_iter().filter(|ty| ty.is_of_gguf()).count());
    for ty in GgmlType::ALL.into_iter().filter(|ty| ty.is_of_gguf()) {
        let facts = &facts[ty.name()];
        assert_eq!(GgmlType::from_id(facts["type_id"].as_u64().unwrap() as u32), Ok(ty));
        assert_eq!(facts["block"], ty.block_len());
        assert_eq!(facts["block_bytes"], ty.block_bytes());
    }
}

#[test]
fn formats_with_f32_scales_follow_their_definition() {
    let scale = 0.37f32.to_le_bytes();
    let check = |ty: GgmlType, codes: &[u8], expected: fn(usize) -> f32| {
        let mut out = [0.0; 32];
        dequantize(ty, &[&scale, codes].concat(), &mut out).unwrap();
        let expected: Vec<f32> = (0..32).map(|i| 0.37 * expected(i)).collect();
        assert_eq!(out[..], expected, "{ty}");
    };
    let nibbles: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
    check(GgmlType::INT4, &nibbles, |i| if i < 16 { i as f32 - 8.0 } else { 23.0 - i as f32 });
    let fifths = [&0xffff_0000u32.to_le_bytes()[..], &nibbles].concat();
    check(GgmlType::INT5, &fifths, |i| if i < 16 { i as f32 - 16.0 } else { 31.0 - i as f32 });
    let bytes: Vec<u8> = (0..32).map(|i| (4 * i - 60i32) as u8).collect();
    check(GgmlType::INT8, &bytes, |i| 4.0 * i as f32 - 60.0);
    // 1, 1.125, 1.25, ...
    let bytes: Vec<u8> = (0..32).map(|i| (0x38 + i % 8) | ((i / 16) << 7)).collect();
    check(GgmlType::FP8, &bytes, |i| (1.0 + (i % 8) as f32 / 8.0) * if i < 16 { 1.0 } else { -1.0 });
}

#[test]
fn wrong_sizes_are_refused() {
    assert_eq!(GgmlType::from_id(4), Err(Error::UnknownType { id: 4 }));
    let mut out = [0.0; 40];
    let partial = Error::PartialBlock { ty: "Q4_0", block: 32, cols: 40 };
    assert_eq!(dequantize(GgmlType::Q4_0, &[0; 18], &mut out), Err(partial));
    let short = Error::Length { what: "quantised bytes", expected: 18, found: 17 };
    assert_eq!(dequantize(GgmlType::Q4_0, &[0; 17], &mut out[..32]), Err(short));
}
