//! The part of the file of `kvasir apply` that only `kvasir plan --fleet` reads: nodes, and costs of models.

use crate::config::{ByteSize, Period};
use serde::Deserialize;

/// `[[node]]`: one worker, or `count` equal ones.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeEntry {
    /// With `count`, `-0`, `-1` and so on follow.
    pub(crate) name: String,
    pub(crate) count: Option<u32>,
    /// `--memory` of the worker.
    pub(crate) memory: ByteSize,
    /// Bytes per second that steps read.
    pub(crate) bandwidth: ByteSize,
    /// Multiply-adds per second.
    pub(crate) compute: f64,
    /// Bytes per second of a load from disk.
    pub(crate) read: ByteSize,
    /// The same for files that are in memory; by default as from disk.
    pub(crate) copy: Option<ByteSize>,
    /// Bytes per second between workers; by default as from disk.
    pub(crate) link: Option<ByteSize>,
    /// Host memory for files that were read; by default as much as `memory`.
    pub(crate) page_cache: Option<ByteSize>,
    /// Time of a load besides reading.
    pub(crate) load_overhead: Option<Period>,
    #[serde(default)]
    pub(crate) labels: Vec<String>,
    /// Models whose files are there at the beginning; by default all.
    pub(crate) files: Option<Vec<String>>,
}

/// `[models.NAME.costs]`, for a model whose file is not on this machine.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CostsEntry {
    /// Bytes of the files.
    pub(crate) bytes: ByteSize,
    /// Bytes of a worker's memory that the loaded model takes.
    pub(crate) needed_bytes: ByteSize,
    /// Multiply-adds of a prompt row, without attention.
    pub(crate) products: f64,
    /// Those of the output head, for decoded rows.
    #[serde(default)]
    pub(crate) head_products: f64,
    /// Multiply-adds of a row for each token before it.
    #[serde(default)]
    pub(crate) attention: f64,
    /// Bytes that a step of decoding reads; by default all bytes of the files.
    pub(crate) token_bytes: Option<ByteSize>,
    /// Bytes of keys and values of one token.
    #[serde(default)]
    pub(crate) kv_bytes: f64,
}
