//! Encodes texts with a model in the ONNX format. Inputs: `input_ids`, `attention_mask` and, for models with
//! segment types, `token_type_ids`. Outputs: vectors of all tokens (`last_hidden_state`) or scores
//! (`logits`). Each text is computed separately, so no result depends on other texts.

use super::Text;
use crate::Error;
use crate::decoder::pool;
use model::spec::Pooling;
use proto::operation::Operation;
use speech::onnx::{NodeId, Onnx, Tensor, ValueOrView};
use std::path::Path;

pub(super) struct OnnxTexts {
    onnx: Onnx,
    ids: NodeId,
    mask: NodeId,
    types: Option<NodeId>,
    output: NodeId,
    /// How rows are pooled; `None` if the model returns scores.
    pooling: Option<Pooling>,
    /// Values of a row, or scores of a text.
    width: usize,
    /// Results of the last run, by text: its rows, or its scores as one row.
    computed: Vec<Vec<Vec<f32>>>,
}

impl OnnxTexts {
    /// Loads the model for `operation`. It returns `width` values for each token, or for each pair.
    pub(super) fn load(
        path: &Path,
        operation: Operation,
        (pooling, width): (Option<Pooling>, usize),
        (threads, cpus): (usize, Option<&[usize]>),
    ) -> Result<Self, Error> {
        let onnx = Onnx::load(path, threads, cpus)?;
        let output = match operation {
            Operation::Rerank => "logits",
            _ => "last_hidden_state",
        };
        Ok(Self {
            ids: onnx.node("input_ids")?,
            mask: onnx.node("attention_mask")?,
            types: onnx.find("token_type_ids"),
            output: onnx.node(output)?,
            onnx,
            pooling,
            width,
            computed: Vec::new(),
        })
    }

    pub(super) fn file_bytes(&self) -> usize {
        usize::try_from(self.onnx.file_bytes()).unwrap_or(usize::MAX)
    }

    /// Computes texts. [`Self::pooled`] and [`Self::rows`] return the results.
    pub(super) fn run(&mut self, texts: &[&Text]) -> Result<(), Error> {
        self.computed.clear();
        for text in texts {
            let rows = self.text(text)?;
            self.computed.push(rows);
        }
        Ok(())
    }

    fn text(&self, text: &Text) -> Result<Vec<Vec<f32>>, Error> {
        let len = text.tokens.len();
        let row = |values: Vec<i32>| Tensor::from_data(&[1, len], values).into();
        // The text was checked against the vocabulary, which is far below `i32::MAX`.
        let ids = text.tokens.iter().map(|id| id.cast_signed()).collect();
        let mut inputs: Vec<(NodeId, ValueOrView<'_>)> =
            vec![(self.ids, row(ids)), (self.mask, row(vec![1; len]))];
        if let Some(types) = self.types {
            let second = text.second.unwrap_or(len);
            inputs.push((types, row((0..len).map(|at| i32::from(at >= second)).collect())));
        }
        let [value] = self.onnx.run(inputs, [self.output])?;
        let (rows, values) = match self.pooling {
            Some(_) => value.into_shape_vec::<f32, 3>(),
            None => value.into_shape_vec::<f32, 2>().map(|([one, width], v)| ([one, 1, width], v)),
        }
        .map_err(|error| self.onnx.fault(error.to_string()))?;
        let expected = [1, if self.pooling.is_some() { len } else { 1 }, self.width];
        if rows != expected {
            return Err(self
                .onnx
                .fault(format!("it gives {rows:?} for a text, {expected:?} were expected"))
                .into());
        }
        Ok(values.chunks_exact(self.width).map(<[f32]>::to_vec).collect())
    }

    /// The pooled vector or the scores of text `index`.
    pub(super) fn pooled(&self, index: usize) -> Vec<f32> {
        match self.pooling {
            Some(pooling) => pool(&self.computed[index], pooling),
            None => self.computed[index].concat(),
        }
    }

    /// The vectors of the rows of text `index`.
    pub(super) fn rows(&self, index: usize) -> Result<Vec<Vec<f32>>, Error> {
        match self.pooling {
            Some(_) => Ok(self.computed[index].clone()),
            None => Err(self.onnx.fault("it gives scores, and no vectors of tokens").into()),
        }
    }
}
