//! In how many bits recurrent states are kept.

use kernels::backend::HeadType;

/// How the heads of recurrent layers keep their states. Convolutions' inputs are f32 in any case.
///
/// Rounding a state after each token adds an error of up to one part in 512, and each following token shrinks what is
/// there of it by the head's decay. So a head that forgets fast keeps little of it, and one that forgets slowly would
/// add up hundreds. The decay of a token depends on the token; what the weights fix is its value where the token's own
/// part is zero: `exp(a softplus(dt_bias))`, which is e^-1 after `1 / (-a softplus(dt_bias))` tokens. That is a
/// head's *memory* here: the middle of what it does, not a bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StateType {
    /// All heads in f32.
    #[default]
    F32,
    /// Heads with a memory of less than `tau` tokens in bfloat16, all others in f32.
    AutoBf16 {
        /// Tokens; see [`StateType::TAU`].
        tau: u32,
    },
}

/// Version of the layout of slots that hold bfloat16, so that a later one is not taken for it.
const FORMAT: u32 = 1;

impl StateType {
    /// The `tau` for who names none: errors add up over so few tokens that their sum stays near that of one.
    pub const TAU: u32 = 16;

    /// The largest `tau` that makes sense: with a longer memory a token's decay is less than the rounding, and a
    /// state would never fade.
    pub const MAX_TAU: u32 = 256;

    /// The type of each head, by its memory.
    pub(super) fn heads(self, memory: &[f32]) -> Vec<HeadType> {
        let narrow = |memory: f32| match self {
            Self::F32 => false,
            Self::AutoBf16 { tau } => memory < tau as f32,
        };
        memory.iter().map(|memory| if narrow(*memory) { HeadType::Bf16 } else { HeadType::F32 }).collect()
    }

    /// What it adds to a numeric class; nothing where all heads are f32.
    pub(crate) fn class(self) -> Option<String> {
        match self {
            Self::F32 => None,
            Self::AutoBf16 { tau } => Some(format!("state-bf16.{FORMAT}-tau{tau}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_forget_within_tau_are_narrow() {
        // softplus(0) = ln 2: memories of 1, 10 and 100 tokens, and of all.
        let a = [1.0, 0.1, 0.01, 0.0].map(|rate: f32| -rate / std::f32::consts::LN_2);
        let memory = crate::weights::head_memory(&a, &[0.0; 4]);
        for (memory, want) in memory.iter().zip([1.0, 10.0, 100.0, f32::INFINITY]) {
            assert!((memory / want - 1.0).abs() < 1e-6 || *memory == want, "{memory} is not {want}");
        }
        let (wide, narrow) = (HeadType::F32, HeadType::Bf16);
        assert_eq!(StateType::F32.heads(&memory), [wide; 4]);
        assert_eq!(StateType::AutoBf16 { tau: 16 }.heads(&memory), [narrow, narrow, wide, wide]);
        assert_eq!(StateType::AutoBf16 { tau: 1 }.heads(&[f32::NAN, 0.5, 1.0]), [wide, narrow, wide]);
    }
}
