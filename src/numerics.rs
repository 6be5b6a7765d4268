//! Flags that select a numeric class, shared by all commands that run a model.

use crate::config::ConfigError;
use engine::decoder::StateType;
use engine::scheduler::MAX_CONTEXT;
use kernels::backend::{KvType, KvTypes};
use serde::{Deserialize, Serialize};
use worker::load::DeviceChoice;

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum KvTypeArg {
    /// Half precision.
    F16,
    /// Single precision.
    F32,
    /// 8 bits with a scale per 32 values.
    #[value(name = "q8_0")]
    #[serde(rename = "q8_0")]
    Q8_0,
    /// 8-bit floats (E4M3) with a scale per head of a token.
    Fp8,
    /// 4 bits with a scale per 32 values, of heads that a Hadamard matrix has rotated.
    #[value(name = "q4_0")]
    #[serde(rename = "q4_0")]
    Q4_0,
}

/// Activation type that quantised matrices are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ActivationsArg {
    /// Activations quantised to 8 bits in blocks of 32.
    Int8,
    /// 32-bit float activations.
    F32,
    /// MXFP4 weights with 8-bit float activations (E4M3) that have a power of two for each 32, others as with int8. For
    /// GPUs of compute capability 12.0 and 12.1; not verified on a device.
    Mxfp8,
    /// Activations and weights rounded to bf16, for prompts on GPUs of compute capability 9.0 (H100, H200); not verified
    /// on a device.
    Bf16,
    /// As mxfp8, and NVFP4 weights with 4-bit float activations (E2M1) that have a scale for each 16. Not verified on a
    /// device, error not measured.
    Nvfp4,
}

impl From<KvTypeArg> for KvType {
    fn from(arg: KvTypeArg) -> Self {
        match arg {
            KvTypeArg::F16 => Self::F16,
            KvTypeArg::F32 => Self::F32,
            KvTypeArg::Q8_0 => Self::Q8_0,
            KvTypeArg::Fp8 => Self::Fp8,
            KvTypeArg::Q4_0 => Self::Q4_0,
        }
    }
}

impl KvTypeArg {
    /// The types of a cache with these keys. `values`: the type of values if it is another.
    pub(crate) fn with_values(self, values: Option<Self>) -> KvTypes {
        KvTypes { k: self.into(), v: values.unwrap_or(self).into() }
    }
}

impl From<ActivationsArg> for kernels::backend::ActivationMode {
    fn from(arg: ActivationsArg) -> Self {
        match arg {
            ActivationsArg::Int8 => Self::Int8,
            ActivationsArg::F32 => Self::F32,
            ActivationsArg::Mxfp8 => Self::Mxfp8,
            ActivationsArg::Bf16 => Self::Bf16,
            ActivationsArg::Nvfp4 => Self::Nvfp4,
        }
    }
}

/// Element type of recurrent states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum StateTypeArg {
    /// 32-bit floats.
    F32,
    /// bfloat16 for heads that forget within a few tokens, else 32-bit floats.
    AutoBf16,
}

impl StateTypeArg {
    /// Adds the memory, in tokens, below which a head's state is stored as bf16.
    pub(crate) fn with_tau(self, tau: Option<u32>) -> Result<StateType, ConfigError> {
        match (self, tau) {
            (Self::F32, None) => Ok(StateType::F32),
            (Self::F32, Some(tau)) => {
                Err(ConfigError::field("state_tau", tau, "only with state_type = auto-bf16"))
            }
            (Self::AutoBf16, tau) => match tau.unwrap_or(StateType::TAU) {
                tau @ 1..=StateType::MAX_TAU => Ok(StateType::AutoBf16 { tau }),
                tau => Err(ConfigError::field("state_tau", tau, format!("1 to {}", StateType::MAX_TAU))),
            },
        }
    }
}

/// The longest sequence that `--max-model-len` allows.
pub(crate) fn model_len(tokens: Option<u32>) -> Result<Option<usize>, ConfigError> {
    match tokens.map(|tokens| tokens as usize) {
        Some(tokens) if !(2..=MAX_CONTEXT).contains(&tokens) => {
            Err(ConfigError::field("max_model_len", tokens, format!("2 to {MAX_CONTEXT}")))
        }
        tokens => Ok(tokens),
    }
}

/// Device that a worker computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Device {
    /// A GPU if there is a usable one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// A GPU's kernels, interpreted on the CPU.
    #[cfg(feature = "ptx-sim")]
    #[value(name = "ptx-sim", hide = true)]
    #[serde(rename = "ptx-sim")]
    PtxSim,
}

impl Device {
    /// Resolves `auto` on this machine and gives the reason.
    pub(crate) fn chosen(choice: DeviceChoice, gpu: u32) -> Result<(Self, String), engine::Error> {
        let (choice, reason) = choice.resolve(gpu)?;
        let chosen = match choice {
            DeviceChoice::Cuda => Self::Cuda,
            #[cfg(feature = "ptx-sim")]
            DeviceChoice::PtxSim => Self::PtxSim,
            DeviceChoice::Auto | DeviceChoice::Cpu => Self::Cpu,
        };
        Ok((chosen, reason))
    }
}

impl From<Device> for DeviceChoice {
    fn from(arg: Device) -> Self {
        match arg {
            Device::Auto => Self::Auto,
            Device::Cpu => Self::Cpu,
            Device::Cuda => Self::Cuda,
            #[cfg(feature = "ptx-sim")]
            Device::PtxSim => Self::PtxSim,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    fn same_in_files_and_flags<T: ValueEnum + Serialize>() {
        for value in T::value_variants() {
            let flag = value.to_possible_value().unwrap().get_name().to_owned();
            assert_eq!(serde_json::to_value(value).unwrap(), flag);
        }
    }

    #[test]
    fn values_have_one_name() {
        same_in_files_and_flags::<KvTypeArg>();
        same_in_files_and_flags::<ActivationsArg>();
        same_in_files_and_flags::<StateTypeArg>();
        same_in_files_and_flags::<Device>();
    }

    #[test]
    fn tau_belongs_to_auto_bf16() {
        let (f32s, auto) = (StateTypeArg::F32, StateTypeArg::AutoBf16);
        assert_eq!(f32s.with_tau(None).unwrap(), StateType::F32);
        assert_eq!(auto.with_tau(None).unwrap(), StateType::AutoBf16 { tau: StateType::TAU });
        assert_eq!(auto.with_tau(Some(3)).unwrap(), StateType::AutoBf16 { tau: 3 });
        for (ty, tau) in [(f32s, 16), (auto, 0), (auto, StateType::MAX_TAU + 1)] {
            let refused = ty.with_tau(Some(tau)).unwrap_err().to_string();
            assert!(refused.contains("state_tau") && refused.contains(&tau.to_string()), "{refused}");
        }
    }
}
