//! Sizes common to all architectures, read and checked.

use super::source::Source;
use crate::Error;
use metadata::{KeyError, Strings};

/// Largest accepted hyper-parameters. The product of any two fits 64 bits.
pub(super) mod limits {
    pub(in super::super) const LAYERS: usize = 1 << 10;
    pub(in super::super) const CONTEXT: usize = 1 << 30;
    pub(in super::super) const WIDTH: usize = 1 << 24;
    pub(in super::super) const VOCAB: usize = 1 << 24;
    pub(in super::super) const HEADS: usize = 1 << 14;
    pub(in super::super) const HEAD_DIM: usize = 1 << 14;
    pub(in super::super) const EXPERTS: usize = 1 << 16;
    pub(in super::super) const CONV_TAPS: usize = 1 << 8;
    pub(in super::super) const LABELS: usize = 1 << 16;
}

pub(super) const EMBEDDING: &str = "token_embd.weight";

pub(super) struct Shape {
    /// Layers that a token passes through.
    pub(super) layers: usize,
    /// Blocks of the file: the layers, then MTP blocks. Per-layer lists have this length.
    pub(super) blocks: usize,
    pub(super) hidden: usize,
    pub(super) vocab: usize,
    pub(super) context_length: usize,
    pub(super) heads: Vec<usize>,
    pub(super) kv_heads: Vec<usize>,
    pub(super) dims: HeadDims,
}

/// Widths of a query/key head, of a value head, and of the part that rotates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadDims {
    pub(super) k: usize,
    pub(super) v: usize,
    pub(super) n_rot: usize,
}

/// Differences between architectures in counting layers and heads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counting {
    /// Blocks after the last layer.
    pub(super) mtp_blocks: usize,
    /// 0 if a layer without key/value heads has no attention, else 1.
    pub(super) min_kv_heads: usize,
}

impl Default for Counting {
    fn default() -> Self {
        Self { mtp_blocks: 0, min_kv_heads: 1 }
    }
}

impl Shape {
    pub(super) fn read(source: &Source<'_>, counting: Counting) -> Result<Self, Error> {
        let blocks = source.require_count("block_count", 1 + counting.mtp_blocks..=limits::LAYERS)?;
        let hidden = source.require_count("embedding_length", 1..=limits::WIDTH)?;
        let (heads, kv_heads) = heads(source, blocks, counting.min_kv_heads)?;
        Ok(Self {
            layers: blocks - counting.mtp_blocks,
            blocks,
            hidden,
            vocab: vocab(source, hidden)?,
            context_length: source.require_count("context_length", 1..=limits::CONTEXT)?,
            dims: HeadDims::read(source, "", default_head_dim(source, hidden, &heads))?,
            heads,
            kv_heads,
        })
    }

    /// Inner width of each layer's feed-forward.
    pub(super) fn feed_forward_lengths(&self, source: &Source<'_>) -> Result<Vec<usize>, Error> {
        let key = "feed_forward_length";
        source
            .layer_counts(key, self.blocks, 1..=limits::WIDTH)?
            .ok_or_else(|| KeyError::Missing { key: source.key(key) }.into())
    }
}

impl HeadDims {
    /// Reads the widths from keys that end in `suffix`; `default` is the head width.
    pub(super) fn read(
        source: &Source<'_>,
        suffix: &str,
        default: impl Fn() -> Result<usize, Error>,
    ) -> Result<Self, Error> {
        let dim = |key: &str| match source.count(&format!("{key}{suffix}"), 1..=limits::HEAD_DIM)? {
            Some(dim) => Ok(dim),
            None => default(),
        };
        let k = dim("attention.key_length")?;
        let v = dim("attention.value_length")?;
        let key = format!("rope.dimension_count{suffix}");
        let n_rot = source.count(&key, 1..=limits::HEAD_DIM)?.unwrap_or(k);
        if !n_rot.is_multiple_of(2) || n_rot > k {
            return Err(source.refuse(&key, n_rot, format_args!("an even number up to {k}")));
        }
        Ok(Self { k, v, n_rot })
    }
}

/// Query heads and key/value heads of every block.
fn heads(source: &Source<'_>, blocks: usize, min: usize) -> Result<(Vec<usize>, Vec<usize>), Error> {
    let (key, kv_key) = ("attention.head_count", "attention.head_count_kv");
    let heads = source
        .layer_counts(key, blocks, 1..=limits::HEADS)?
        .ok_or_else(|| KeyError::Missing { key: source.key(key) })?;
    let kv_heads = source.layer_counts(kv_key, blocks, min..=limits::HEADS)?.unwrap_or_else(|| heads.clone());
    let divides = |heads: usize, kv_heads: usize| kv_heads == 0 || heads.is_multiple_of(kv_heads);
    match heads.iter().zip(&kv_heads).find(|(heads, kv_heads)| !divides(**heads, **kv_heads)) {
        Some((heads, kv_heads)) => {
            Err(source.refuse(kv_key, kv_heads, format_args!("a divisor of the {heads} heads")))
        }
        None => Ok((heads, kv_heads)),
    }
}

/// The head width if no key specifies it.
fn default_head_dim(
    source: &Source<'_>,
    hidden: usize,
    heads: &[usize],
) -> impl Fn() -> Result<usize, Error> {
    move || match heads.first() {
        Some(&heads) if hidden.is_multiple_of(heads) => Ok(hidden / heads),
        _ => Err(source.refuse(
            "embedding_length",
            hidden,
            "a multiple of attention.head_count, as there is no attention.key_length",
        )),
    }
}

/// Rows of the embedding: at least the number of tokens.
fn vocab(source: &Source<'_>, hidden: usize) -> Result<usize, Error> {
    let vocab = match source.dims(EMBEDDING)? {
        [_, rows] => usize::try_from(*rows).ok().filter(|&rows| rows <= limits::VOCAB),
        _ => None,
    };
    // If the shape gives no vocabulary size, the check against the limit reports it.
    let vocab = vocab.unwrap_or(limits::VOCAB);
    source.tensor(EMBEDDING, &[hidden, vocab])?;
    let tokens: Option<&Strings> = source.metadata().get("tokenizer.ggml.tokens")?;
    match tokens.map(Strings::len).filter(|&tokens| tokens > vocab) {
        Some(tokens) => Err(Error::HyperParameter {
            key: "tokenizer.ggml.tokens".to_owned(),
            found: format!("a list of {tokens}"),
            needs: format!("at most the {vocab} rows of {EMBEDDING}"),
        }),
        None => Ok(vocab),
    }
}
