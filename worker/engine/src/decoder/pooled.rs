//! An encoder's output for a text: one vector, or scores.

use super::{Decoder, job};
use crate::Error;
use crate::weights::Head;
use kernels::backend::{GateActivation, GateOp};
use model::spec::{OutputSpec, PooledSpec, PoolerActivation, Pooling};
use std::ops::Range;

impl Decoder {
    /// The vectors of these rows of the last step, after the last layer.
    pub fn row_vectors(&mut self, rows: Range<usize>) -> Result<Vec<Vec<f32>>, Error> {
        let mut vectors = Vec::with_capacity(rows.len());
        for row in rows {
            let mut vector = vec![0f32; self.spec.hidden];
            self.backend.read_row(self.buffers.x, row, &mut vector)?;
            vectors.push(vector);
        }
        Ok(vectors)
    }

    /// The pooled vector of one text's rows in the last step, or its scores if the model has a classifier.
    pub fn pooled(&mut self, rows: Range<usize>) -> Result<Vec<f32>, Error> {
        let OutputSpec::Pooled(spec) = &self.spec.output else { return Err(Error::NoOutputHead) };
        let pooling = spec.pooling;
        // Read only the rows that pooling uses.
        let picked = match pooling {
            Pooling::Mean => rows,
            Pooling::First => rows.start..(rows.start + 1).min(rows.end),
            Pooling::Last => rows.end.saturating_sub(1).max(rows.start)..rows.end,
        };
        let vectors = self.row_vectors(picked)?;
        self.classify(pool(&vectors, pooling))
    }

    fn classify(&mut self, vector: Vec<f32>) -> Result<Vec<f32>, Error> {
        let Some(Head::Pooled { classifier }) = &self.weights.head else { return Err(Error::NoOutputHead) };
        let Some(classifier) = classifier else { return Ok(vector) };
        let OutputSpec::Pooled(PooledSpec { classifier: Some(spec), .. }) = &self.spec.output else {
            return Err(Error::NoOutputHead);
        };
        let (backend, b) = (self.backend.as_mut(), &self.buffers);
        backend.write_rows(b.picked, &vector)?;
        let mut input = b.picked;
        if let Some(dense) = &classifier.dense {
            backend.matmul(b.picked, &[job(dense, b.picked_normed, false)])?;
            match spec.activation {
                PoolerActivation::Tanh => {
                    let mut inner = vector;
                    backend.read_row(b.picked_normed, 0, &mut inner)?;
                    inner.iter_mut().for_each(|value| *value = value.tanh());
                    backend.write_rows(b.picked_normed, &inner)?;
                }
                PoolerActivation::GeluErf => {
                    let activation = GateActivation::GeluErf;
                    backend.gate(&GateOp { gate: b.picked_normed, up: None, up_from: 0, activation })?;
                }
            }
            if let Some(norm) = &classifier.norm {
                backend.norm(b.picked_normed, norm, b.picked_normed)?;
            }
            input = b.picked_normed;
        }
        backend.matmul(input, &[job(&classifier.out, b.logits, false)])?;
        let mut out = vec![0f32; spec.out.rows];
        backend.read_row(b.logits, 0, &mut out)?;
        match (spec.difference, &out[..]) {
            (true, [yes, no, ..]) => Ok(vec![yes - no]),
            _ => Ok(out),
        }
    }
}

/// One vector of the vectors of a text's rows; summed in f64, in the order of the rows.
pub(crate) fn pool(rows: &[Vec<f32>], pooling: Pooling) -> Vec<f32> {
    let picked = match pooling {
        Pooling::Mean => rows,
        Pooling::First => &rows[..rows.len().min(1)],
        Pooling::Last => &rows[rows.len().saturating_sub(1)..],
    };
    let mut sums = vec![0f64; rows.first().map_or(0, Vec::len)];
    for row in picked {
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
    }
    let count = picked.len().max(1) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}
