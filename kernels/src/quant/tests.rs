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
    for ty in GgmlType::ALL {
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
    assert_eq!(facts.len(), GgmlType::ALL.len());
    for ty in GgmlType::ALL {
        let facts = &facts[ty.name()];
        assert_eq!(GgmlType::from_id(facts["type_id"].as_u64().unwrap() as u32), Ok(ty));
        assert_eq!(facts["block"], ty.block_len());
        assert_eq!(facts["block_bytes"], ty.block_bytes());
    }
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
