//! The kernels' sources.

/// What every source may include, by the name `prelude.cuh`.
pub const PRELUDE: &str = include_str!("prelude.cuh");

/// One file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Its name, as in messages.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
    /// `extern "C"` kernels in it.
    pub kernels: &'static [&'static str],
}

/// Per row: sums, scalings, activations.
pub const ROWWISE: Source =
    Source { name: "rowwise.cu", text: include_str!("rowwise.cu"), kernels: &["scale"] };

/// All of them.
pub const ALL: &[Source] = &[ROWWISE];
