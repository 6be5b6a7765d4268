//! What an operator wants to know of a model before it is pulled.

/// Bytes per second that a DGX Spark's memory gives to a kernel that does nothing but read.
const SPARK_BANDWIDTH: f64 = 233e9;

/// What a model needs and what is to be expected of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct About {
    /// The architecture, as GGUF files name it.
    pub arch: &'static str,
    /// Bytes of memory for the weights and what serving some sequences of 8,192 tokens takes beside them.
    pub memory: u64,
    /// Which machines it is for.
    pub hardware: &'static str,
    /// How fast one sequence decodes on a DGX Spark.
    pub speed: Speed,
}

/// Tokens per second of one sequence on a DGX Spark, and whose figure that is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Speed {
    /// Measured by others, with the engine that is named.
    Published {
        /// Tokens per second.
        tokens: f64,
        /// Engine, format and where it is published.
        source: &'static str,
    },
    /// No faster than the memory: each token reads all weights once.
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

    pub fn source(self) -> &'static str {
        match self {
            Self::Published { source, .. } => source,
            Self::Ceiling { .. } => "ceiling: 233 GB/s of memory over all weights",
            Self::Unknown => "not known",
        }
    }
}
