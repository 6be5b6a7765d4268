//! The committed images, with what Pillow and transformers make of them (tests/fixtures/images/make.py).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

pub(crate) fn fixtures() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/images/images.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub(crate) fn bytes(value: &Value) -> Vec<u8> {
    STANDARD.decode(value.as_str().unwrap()).unwrap()
}

/// The file of a committed image.
pub(crate) fn file(name: &str) -> Vec<u8> {
    let fixtures = fixtures();
    let files = fixtures["files"].as_array().unwrap();
    bytes(&files.iter().find(|file| file["name"] == name).unwrap()["file"])
}

pub(crate) fn worst(ours: &[u8], theirs: &[u8]) -> u8 {
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(theirs).map(|(ours, theirs)| ours.abs_diff(*theirs)).max().unwrap()
}
