//! Golden bytes of every message in this build's protocol version. From the tag v0.1.0 on, a line of
//! `proto/tests/golden/wire.txt` changes only with a new protocol version; a new variant adds a line.

use crate::samples::{self, Samples};
use proto::codec::CodecError;
use std::collections::BTreeMap;

const GOLDEN: &str = include_str!("../../../tests/golden/wire.txt");

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

fn golden() -> BTreeMap<&'static str, &'static str> {
    let lines = GOLDEN.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split_once(' ').unwrap()).collect()
}

#[test]
fn every_shipped_form_is_still_written_and_read() {
    let golden = golden();
    let mut missing = String::new();
    let mut seen = 0;
    for Samples { name, cap, bytes, recode, .. } in samples::all() {
        for (variant, bytes) in bytes.iter().enumerate() {
            let key = format!("{name}/{variant}");
            match golden.get(key.as_str()) {
                Some(shipped) => {
                    assert_eq!(hex(bytes), *shipped, "{key} is written in another form than shipped");
                    let again = recode(&unhex(shipped), cap).unwrap_or_else(|e| panic!("{key}: {e}"));
                    assert_eq!(hex(&again), *shipped, "{key} changes when read and written");
                    seen += 1;
                }
                None => missing += &format!("{key} {}\n", hex(bytes)),
            }
        }
    }
    assert!(missing.is_empty(), "append to proto/tests/golden/wire.txt:\n{missing}");
    assert_eq!(seen, golden.len(), "wire.txt has lines for which there is no sample");
}

#[test]
fn samples_cover_every_variant_and_the_next_one_is_unknown() {
    for Samples { name, cap, bytes, recode, .. } in
        samples::all().into_iter().filter(|samples| samples.is_enum)
    {
        for (variant, bytes) in bytes.iter().enumerate() {
            assert_eq!(usize::from(bytes[0]), variant, "{name}: samples stand in the order of variants");
        }
        let next = bytes.len() as u64;
        let unknown = recode(&[bytes.len() as u8, 0, 0, 0, 0, 0, 0, 0], cap).unwrap_err();
        assert!(
            matches!(unknown, CodecError::UnknownVariant { index, .. } if index == next),
            "{name}: variant {next} gives {unknown:?}; is a sample missing?"
        );
    }
}

#[test]
fn every_truncation_and_every_extra_byte_is_refused() {
    for Samples { name, cap, bytes, recode, .. } in samples::all() {
        for bytes in bytes {
            for len in 0..bytes.len() {
                let error = recode(&bytes[..len], cap).unwrap_err();
                assert!(matches!(error, CodecError::CutShort { .. }), "{name} cut to {len}: {error:?}");
            }
            let mut longer = bytes.clone();
            longer.push(0);
            let error = recode(&longer, cap).unwrap_err();
            assert!(matches!(error, CodecError::Trailing { extra: 1, .. }), "{name}: {error:?}");
        }
    }
}
