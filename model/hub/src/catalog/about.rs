//! Memory needs, target hardware and expected speed of catalog models.

/// Memory bandwidth of a DGX Spark in bytes per second, for a kernel that only reads.
const SPARK_BANDWIDTH: f64 = 233e9;

/// Requirements and expected speed of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct About {
    /// Architecture name as in GGUF files.
    pub arch: &'static str,
    /// Bytes of memory for the weights and for serving some sequences of 8,192 tokens.
    pub memory: u64,
    /// Hardware that the model is meant for.
    pub hardware: &'static str,
    /// Decode speed of one sequence on a DGX Spark.
    pub speed: Speed,
}

/// Tokens per second of one sequence on a DGX Spark, and the source of the number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Speed {
    /// Published by others, for the engine named in `source`.
    Published {
        tokens: f64,
        /// Engine, number format and place of publication.
        source: &'static str,
    },
    /// Upper bound from memory bandwidth: each token reads all weights once.
    Ceiling {
        /// Bytes of the weights.
        bytes: u64,
    },
    Unknown,
}

impl Speed {
    pub fn tokens_per_second(self) -> Option<f64> {
        match self {
            Self::Published { tokens, .. } => Some(tokens),
            Self::Ceiling { bytes } => Some(SPARK_BANDWIDTH / bytes as f64),
            Self::Unknown => None,
        }
    }

    /// Tokens per second with memory of another bandwidth, in bytes per second, since decoding reads the weights.
    /// `share` is the share of the bandwidth that is reached where only the ceiling is known.
    pub fn at(self, bandwidth: f64, share: f64) -> Option<f64> {
        let share = if matches!(self, Self::Ceiling { .. }) { share } else { 1.0 };
        self.tokens_per_second().map(|tokens| tokens * share * bandwidth / SPARK_BANDWIDTH)
    }

    pub fn source(self) -> &'static str {
        match self {
            Self::Published { source, .. } => source,
            Self::Ceiling { .. } => "ceiling: 233 GB/s of memory over all weights",
            Self::Unknown => "unknown",
        }
    }
}
