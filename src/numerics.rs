//! How numbers are held and multiplied: the flags that choose a numeric class, the same wherever a model runs.

use serde::{Deserialize, Serialize};

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
}

/// What quantised matrices are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ActivationsArg {
    /// Rows quantised to 8 bits in blocks of 32.
    Int8,
    /// Rows as they are.
    F32,
}

impl From<KvTypeArg> for kernels::backend::KvType {
    fn from(arg: KvTypeArg) -> Self {
        match arg {
            KvTypeArg::F16 => Self::F16,
            KvTypeArg::F32 => Self::F32,
            KvTypeArg::Q8_0 => Self::Q8_0,
        }
    }
}

impl From<ActivationsArg> for kernels::backend::ActivationMode {
    fn from(arg: ActivationsArg) -> Self {
        match arg {
            ActivationsArg::Int8 => Self::Int8,
            ActivationsArg::F32 => Self::F32,
        }
    }
}

/// What a worker computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Device {
    /// The best that is there.
    Auto,
    /// The CPU.
    Cpu,
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
        same_in_files_and_flags::<Device>();
    }
}
