//! Encoders: whole texts in, vectors or scores out.
//!
//! There is no scheduler and no prefix cache, because each row of a text attends to the whole text, so a text
//! is computed in one step. Several texts share a step. Each has its own range of an arena as large as the
//! largest step. The other texts of a step never change a text's result.

use crate::Error;
use crate::decoder::{CacheKind, Decoder};
use crate::share::DeviceShare;
use kernels::backend::{BlockTable, MemoryUse, StepInput, StepSequence};
use model::spec::{ModelSpec, OutputSpec, Pooling};
use proto::ids::ModelId;
use proto::message::GenerateError;
use proto::operation::Operation;
use proto::served_model::{ModelTask, ServedModel};
use speech::backends::KERNELS;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use text::Tokenizer;

mod onnx;
mod queue;
pub mod thread;

use onnx::OnnxTexts;

/// Alignment of offsets in the arena, in bytes.
const OFFSET_UNIT: usize = 64;

/// The tokens of a text, or of a pair of texts that are compared, including special tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    pub tokens: Vec<u32>,
    /// Index where the second text begins. Rows from there on have segment type 1 if the model has segment
    /// types; all others have type 0.
    pub second: Option<usize>,
}

/// Limits of a text and of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Size of the model's vocabulary.
    pub vocab: usize,
    /// Maximum tokens of a text; at most `step_tokens`.
    pub text_tokens: usize,
    /// Maximum tokens of a step.
    pub step_tokens: usize,
    /// Maximum texts of a step.
    pub step_texts: usize,
}

/// A loaded encoder.
pub struct Encoder {
    forward: Forward,
    tokenizer: Arc<Tokenizer>,
    limits: Limits,
    pooling: Option<Pooling>,
    row_width: usize,
    /// Description of the model, with a placeholder name.
    served: ServedModel,
    backend: &'static str,
    /// Dropped last: its memory is free only when all fields above are.
    share: Option<DeviceShare>,
}

enum Forward {
    Kernels(Box<KernelTexts>),
    Onnx(Box<OnnxTexts>),
}

struct KernelTexts {
    decoder: Decoder,
    layout: Layout,
    /// Whether the model has a second segment type.
    two_types: bool,
}

/// Where the texts of a step lie in the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    block_tokens: usize,
    step_tokens: usize,
    step_texts: usize,
    /// For each group: the offset of its first block and the distance of its blocks, in units of 64 bytes.
    groups: Vec<(u32, u32)>,
    bytes: usize,
}

/// A computed step, whose rows are still on the device.
pub struct EncodedStep<'a> {
    forward: &'a mut Forward,
    /// The rows of each text.
    rows: Vec<Range<usize>>,
}

/// How rows are pooled; `None` if the model returns scores.
fn pooling(spec: &ModelSpec) -> Option<Pooling> {
    match &spec.output {
        OutputSpec::Pooled(pooled) if pooled.classifier.is_none() => Some(pooled.pooling),
        _ => None,
    }
}

/// Task of the model with `spec`.
pub fn task(spec: &ModelSpec) -> ModelTask {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    match &spec.output {
        OutputSpec::Logits(_) => ModelTask::Generate,
        OutputSpec::Pooled(pooled) => match &pooled.classifier {
            None => ModelTask::Embed { width: number(spec.hidden) },
            Some(classifier) => ModelTask::Rerank { scores: number(classifier.scores()) },
        },
    }
}

impl Layout {
    /// Layout for steps of at most this many tokens and texts. Each text may leave a block partly unused.
    pub fn new(
        decoder: &Decoder,
        (step_tokens, step_texts): (usize, usize),
        block_tokens: usize,
    ) -> Result<Self, Error> {
        let blocks = step_tokens.div_ceil(block_tokens) + step_texts;
        let mut groups = Vec::with_capacity(decoder.groups().len());
        let mut bytes = 0usize;
        for group in decoder.groups() {
            if group.kind == CacheKind::State {
                let reason = "an encoder with recurrent layers is not served".to_owned();
                return Err(Error::Config { option: "model", reason });
            }
            let unit = |bytes: usize| {
                let reason = || format!("{bytes} bytes are more than the arena can be addressed");
                u32::try_from(bytes / OFFSET_UNIT).map_err(|_| Error::KvMemory { reason: reason() })
            };
            groups.push((unit(bytes)?, unit(group.block_bytes)?));
            bytes += group.block_bytes * blocks;
        }
        Ok(Self { block_tokens, step_tokens, step_texts, groups, bytes })
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `tables[group][text]`. The texts' blocks are consecutive.
    fn tables(&self, lengths: impl Iterator<Item = usize> + Clone) -> Vec<Vec<BlockTable<'static>>> {
        let table = |&(first, stride): &(u32, u32)| {
            let mut block = 0;
            let text_table = |len: usize| {
                let table = BlockTable::Contiguous { first: first + block as u32 * stride, stride };
                block += len.div_ceil(self.block_tokens);
                table
            };
            lengths.clone().map(text_table).collect()
        };
        self.groups.iter().map(table).collect()
    }
}

impl Encoder {
    /// Creates an encoder over a decoder whose arena is laid out as `layout`. Texts have at most
    /// `text_tokens`. `served` describes it; its name is a placeholder.
    pub fn new(
        decoder: Decoder,
        tokenizer: Arc<Tokenizer>,
        layout: Layout,
        text_tokens: usize,
        served: ServedModel,
    ) -> Self {
        let spec = decoder.spec();
        let Layout { step_tokens, step_texts, .. } = layout;
        let limits = Limits { vocab: spec.vocab, text_tokens, step_tokens, step_texts };
        let two_types = spec.embedding.token_types.as_ref().is_some_and(|types| types.rows > 1);
        Self {
            tokenizer,
            limits,
            pooling: pooling(spec),
            row_width: spec.hidden,
            served,
            backend: KERNELS,
            forward: Forward::Kernels(Box::new(KernelTexts { decoder, layout, two_types })),
            share: None,
        }
    }

    /// Creates an encoder over the ONNX file of a bundle whose model has this spec. `served` describes it;
    /// its name is a placeholder.
    pub fn of_onnx(
        file: &Path,
        operation: Operation,
        spec: &ModelSpec,
        tokenizer: Arc<Tokenizer>,
        limits: Limits,
        served: ServedModel,
        threads: (usize, Option<&[usize]>),
    ) -> Result<Self, Error> {
        let (pooling, row_width) = (pooling(spec), spec.hidden);
        let width = match task(spec) {
            ModelTask::Rerank { scores } => scores as usize,
            ModelTask::Embed { .. } | ModelTask::Generate | ModelTask::GenerateFromImages => row_width,
        };
        let forward = Forward::Onnx(OnnxTexts::load(file, operation, (pooling, width), threads)?.into());
        let backend = speech::onnx::NAME;
        Ok(Self { forward, tokenizer, limits, pooling, row_width, served, backend, share: None })
    }

    /// Computes its steps in the turns of `share`, which it keeps as long as it holds memory.
    pub fn with_share(self, share: DeviceShare) -> Self {
        Self { share: Some(share), ..self }
    }

    pub fn backend(&self) -> &'static str {
        self.backend
    }

    /// Limits of a text and of a step.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    pub fn task(&self) -> ModelTask {
        self.served.task
    }

    /// How rows are pooled; `None` if the model returns scores.
    pub fn pooling(&self) -> Option<Pooling> {
        self.pooling
    }

    /// Number of values of each row's vector.
    pub fn row_width(&self) -> usize {
        self.row_width
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Device memory in use; zero for other runtimes, where it is unknown.
    pub fn memory(&self) -> MemoryUse {
        match &self.forward {
            Forward::Kernels(kernels) => kernels.decoder.backend().memory(),
            Forward::Onnx(_) => MemoryUse::default(),
        }
    }

    /// Bytes of the weights in their file.
    pub(crate) fn source_bytes(&self) -> usize {
        match &self.forward {
            Forward::Kernels(kernels) => kernels.decoder.source_bytes(),
            Forward::Onnx(texts) => texts.file_bytes(),
        }
    }

    /// Must be called on the thread that will run steps.
    pub(crate) fn bind_thread(&self) {
        if let Forward::Kernels(kernels) = &self.forward {
            kernels.decoder.backend().bind_thread();
        }
    }

    /// Describes the model as the worker registers it.
    pub fn served(&self, id: ModelId) -> ServedModel {
        ServedModel { id, ..self.served.clone() }
    }

    /// Computes texts that fit one step ([`Limits::fit`]), each within the limits ([`Limits::check`]).
    pub fn run(&mut self, texts: &[&Text]) -> Result<EncodedStep<'_>, Error> {
        let mut rows = Vec::with_capacity(texts.len());
        let mut start = 0;
        for text in texts {
            rows.push(start..start + text.tokens.len());
            start += text.tokens.len();
        }
        match &mut self.forward {
            Forward::Kernels(kernels) => kernels.run(texts, &rows)?,
            Forward::Onnx(onnx) => onnx.run(texts)?,
        }
        Ok(EncodedStep { forward: &mut self.forward, rows })
    }
}

impl KernelTexts {
    /// Computes texts. `rows` are their rows in the step.
    fn run(&mut self, texts: &[&Text], rows: &[Range<usize>]) -> Result<(), Error> {
        let tokens: Vec<u32> = texts.iter().flat_map(|text| text.tokens.iter().copied()).collect();
        let sequence = |(text, rows): (&&Text, &Range<usize>)| {
            let segment_start = text.second.filter(|_| self.two_types);
            StepSequence { rows: rows.clone(), context: 0, segment_start }
        };
        let sequences: Vec<_> = texts.iter().zip(rows).map(sequence).collect();
        let tables = self.layout.tables(texts.iter().map(|text| text.tokens.len()));
        let input = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &[] };
        self.decoder.forward(&[], &input)?;
        Ok(())
    }
}

impl EncodedStep<'_> {
    /// The pooled vector or the scores of text `index`.
    ///
    /// # Panics
    /// If `index` is out of range.
    pub fn pooled(&mut self, index: usize) -> Result<Vec<f32>, Error> {
        match self.forward {
            Forward::Kernels(kernels) => kernels.decoder.pooled(self.rows[index].clone()),
            Forward::Onnx(texts) => Ok(texts.pooled(index)),
        }
    }

    /// The vectors of the rows of text `index` after the last layer.
    ///
    /// # Panics
    /// If `index` is out of range.
    pub fn rows(&mut self, index: usize) -> Result<Vec<Vec<f32>>, Error> {
        match self.forward {
            Forward::Kernels(kernels) => kernels.decoder.row_vectors(self.rows[index].clone()),
            Forward::Onnx(texts) => texts.rows(index),
        }
    }
}

impl Limits {
    /// Checks that a text can be encoded.
    pub fn check(&self, text: &Text) -> Result<(), GenerateError> {
        let refuse = |reason: String| Err(GenerateError::InvalidField { field: "input".to_owned(), reason });
        let len = text.tokens.len();
        if len == 0 {
            return refuse("it has no tokens".to_owned());
        }
        if len > self.text_tokens {
            return Err(GenerateError::ContextLength { need: len as u64, limit: self.text_tokens as u64 });
        }
        if let Some(token) = text.tokens.iter().find(|token| **token as usize >= self.vocab) {
            return refuse(format!("token {token} is outside the vocabulary of {}", self.vocab));
        }
        match text.second {
            Some(second) if second > len => {
                refuse(format!("the second text begins at {second} of {len} tokens"))
            }
            _ => Ok(()),
        }
    }

    /// How many leading texts of these lengths fit one step together. At least one if there is any, since no
    /// text is longer than a step.
    pub fn fit(&self, lengths: impl Iterator<Item = usize>) -> usize {
        let mut tokens = 0;
        lengths
            .take(self.step_texts)
            .take_while(|len| {
                tokens += len;
                tokens <= self.step_tokens
            })
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { vocab: 100, text_tokens: 8, step_tokens: 20, step_texts: 4 };

    fn text(tokens: &[u32], second: Option<usize>) -> Text {
        Text { tokens: tokens.to_vec(), second }
    }

    #[test]
    fn texts_outside_the_limits_are_refused_by_name() {
        assert_eq!(LIMITS.check(&text(&[99; 8], Some(8))), Ok(()));
        let long = LIMITS.check(&text(&[1; 9], None));
        assert_eq!(long, Err(GenerateError::ContextLength { need: 9, limit: 8 }));
        for (wrong, expected) in [
            (text(&[], None), "no tokens"),
            (text(&[1, 100], None), "token 100"),
            (text(&[1, 2], Some(3)), "begins at 3"),
        ] {
            match LIMITS.check(&wrong) {
                Err(GenerateError::InvalidField { field, reason }) => {
                    assert!(field == "input" && reason.contains(expected), "{reason}");
                }
                other => panic!("{wrong:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_step_takes_texts_in_order_while_they_fit() {
        let fit = |lengths: &[usize]| LIMITS.fit(lengths.iter().copied());
        assert_eq!(fit(&[]), 0);
        assert_eq!(fit(&[8, 8, 4]), 3);
        assert_eq!(fit(&[8, 8, 5, 1]), 2, "what comes later does not overtake");
        assert_eq!(fit(&[1; 9]), 4);
    }

    #[test]
    fn the_blocks_of_a_step_are_consecutive() {
        let groups = vec![(0, 10), (1000, 3)];
        let layout = Layout { block_tokens: 16, step_tokens: 40, step_texts: 4, groups, bytes: 0 };
        let tables = layout.tables([5, 16, 17, 1].into_iter());
        let firsts = |group: &[BlockTable<'_>]| -> Vec<u32> {
            let first = |table: &BlockTable<'_>| match table {
                BlockTable::Contiguous { first, .. } => *first,
                BlockTable::Paged(_) => panic!("not contiguous"),
            };
            group.iter().map(first).collect()
        };
        assert_eq!(firsts(&tables[0]), [0, 10, 20, 40]);
        assert_eq!(firsts(&tables[1]), [1000, 1003, 1006, 1012]);
    }
}
