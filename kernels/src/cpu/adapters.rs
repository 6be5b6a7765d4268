//! Adapters: low-rank additions to the products of some rows.

use super::{CpuBackend, rows, try_each};
use crate::Error;
use crate::backend::{AdapterId, BufferId, LowRankSource, MatmulJob};
use crate::ops::LowRank;
use std::collections::HashMap;
use std::ops::Range;

/// The loaded adapters, and those of the rows of the running step.
#[derive(Debug, Default)]
pub(super) struct Adapters {
    /// By the number of the matrix that they add to.
    loaded: Vec<Option<HashMap<u32, LowRank>>>,
    /// Of the next step.
    next: Vec<(Range<usize>, AdapterId)>,
    /// Rows of the step with an adapter, rows with the same one together.
    rows: Vec<(usize, AdapterId)>,
    step_rows: usize,
}

impl Adapters {
    fn get(&self, id: AdapterId) -> Result<&HashMap<u32, LowRank>, Error> {
        let found = self.loaded.get(id.0 as usize).and_then(Option::as_ref);
        found.ok_or(Error::OutOfRange { what: "adapter", index: id.0 as usize, len: self.loaded.len() })
    }

    pub(super) fn bytes(&self) -> usize {
        self.loaded.iter().flatten().flat_map(HashMap::values).map(LowRank::bytes).sum()
    }

    pub(super) fn unload(&mut self, id: AdapterId) {
        if let Some(adapter) = self.loaded.get_mut(id.0 as usize) {
            *adapter = None;
        }
    }

    pub(super) fn use_for(&mut self, rows: &[(Range<usize>, AdapterId)]) -> Result<(), Error> {
        self.next.clear();
        rows.iter().try_for_each(|(_, id)| self.get(*id).map(|_| ()))?;
        self.next.extend_from_slice(rows);
        Ok(())
    }

    pub(super) fn begin(&mut self, rows: usize) -> Result<(), Error> {
        self.step_rows = rows;
        self.rows.clear();
        for (range, id) in self.next.drain(..) {
            if range.end > rows {
                return Err(Error::OutOfRange { what: "row with an adapter", index: range.end, len: rows });
            }
            self.rows.extend(range.map(|row| (row, id)));
        }
        self.rows.sort_unstable_by_key(|(row, id)| (id.0, *row));
        Ok(())
    }
}

/// See [`crate::backend::Backend::load_adapter`].
pub(super) fn load(backend: &mut CpuBackend, parts: &[LowRankSource<'_>]) -> Result<AdapterId, Error> {
    let mut adapter = HashMap::with_capacity(parts.len());
    for LowRankSource { matrix, rank, scale, a, b } in parts {
        let (index, len) = (matrix.0 as usize, backend.matrices.len());
        let found = backend.matrices.get(index).ok_or(Error::OutOfRange { what: "matrix", index, len })?;
        let addition = LowRank::new(*rank, (found.rows(), found.cols()), *scale, a, b)?;
        if adapter.insert(matrix.0, addition).is_some() {
            return Err(Error::Unsupported { what: "two additions of an adapter to one matrix" });
        }
    }
    let loaded = &mut backend.adapters.loaded;
    let free = loaded.iter().position(Option::is_none).unwrap_or(loaded.len());
    if free == loaded.len() {
        loaded.push(None);
    }
    loaded[free] = Some(adapter);
    Ok(AdapterId(free as u32))
}

/// Adds what the adapters of the step's rows add to these products.
pub(super) fn add(backend: &mut CpuBackend, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error> {
    let adapters = &backend.adapters;
    if adapters.rows.is_empty() || backend.buffers[x.0 as usize].rows() != adapters.step_rows {
        return Ok(());
    }
    let mut additions: Vec<(usize, usize, &LowRank)> = Vec::new();
    for (number, job) in jobs.iter().enumerate() {
        for (row, id) in &adapters.rows {
            let found = adapters.get(*id)?.get(&job.matrix.0);
            additions.extend(found.map(|addition| (number, *row, addition)));
        }
    }
    if additions.is_empty() {
        return Ok(());
    }
    let ids: Vec<usize> = jobs.iter().map(|job| job.out.0 as usize).collect();
    let (x, outs) = rows::shares(&mut backend.buffers, x.0 as usize, &ids)?;
    let isa = backend.config.rows;
    try_each(&backend.pool, additions.len(), |index| {
        let (number, row, addition) = additions[index];
        // SAFETY: every row of an output is visited once, since a row has one adapter and a matrix one addition.
        #[allow(unsafe_code, reason = "disjoint rows")]
        let out = unsafe { outs[number].row(row) };
        addition.add_row(isa, x.row(row)?, out)
    })
}
