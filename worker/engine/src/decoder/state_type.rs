//! Element types of recurrent states.

use kernels::backend::HeadType;

/// Element type of the states of recurrent heads. Convolution inputs are always f32.
///
/// Rounding a state after each token adds an error of up to one part in 512, and the head's decay shrinks
/// earlier errors with each following token. So a head that forgets fast keeps little error, and one that
/// forgets slowly accumulates hundreds of errors. The decay depends on the token. The weights determine its
/// value if the token's own contribution is zero: `exp(a softplus(dt_bias))`, which reaches e^-1 after
/// `1 / (-a softplus(dt_bias))` tokens. This is the head's *memory*: a typical value, not a bound.
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

/// Version of the layout of slots with bfloat16 states. It is part of the numeric class.
const FORMAT: u32 = 1;

impl StateType {
    /// The default `tau`. Over so few tokens, the accumulated error stays close to a single rounding error.
    pub const TAU: u32 = 16;

    /// Maximum `tau`. With a longer memory, the decay of a token is smaller than the rounding, so a state
    /// would never fade.
    pub const MAX_TAU: u32 = 256;

    /// The element type of each head, by its memory in tokens.
    pub(super) fn heads(self, memory: &[f32]) -> Vec<HeadType> {
        let narrow = |memory: f32| match self {
            Self::F32 => false,
            Self::AutoBf16 { tau } => memory < tau as f32,
        };
        memory.iter().map(|memory| if narrow(*memory) { HeadType::Bf16 } else { HeadType::F32 }).collect()
    }

    /// Part of the numeric class; `None` if all heads are f32.
    pub fn class(self) -> Option<String> {
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
        // softplus(0) = ln 2: memories of 1, 10 and 100 tokens, and an infinite one.
        let a = [1.0, 0.1, 0.01, 0.0].map(|rate: f32| -rate / std::f32::consts::LN_2);
        let memory = crate::weights::head_memory(&a, &[0.0; 4]);
        for (memory, expected) in memory.iter().zip([1.0, 10.0, 100.0, f32::INFINITY]) {
            assert!(
                (memory / expected - 1.0).abs() < 1e-6 || *memory == expected,
                "{memory} is not {expected}"
            );
        }
        let (wide, narrow) = (HeadType::F32, HeadType::Bf16);
        assert_eq!(StateType::F32.heads(&memory), [wide; 4]);
        assert_eq!(StateType::AutoBf16 { tau: 16 }.heads(&memory), [narrow, narrow, wide, wide]);
        assert_eq!(StateType::AutoBf16 { tau: 1 }.heads(&[f32::NAN, 0.5, 1.0]), [wide, narrow, wide]);
    }
}
