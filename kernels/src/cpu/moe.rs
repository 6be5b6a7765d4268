//! Mixture of experts: route, gate and up of all experts, activation, down, weighted sum in rank order.
//!
//! A *slot* is one row at one of its experts. Slots are numbered by expert, then by row. The output of an
//! expert is therefore a range of slots, and its input a list of rows that the products read in place.
//! Experts pass through the stages together, each stage in one parallel region. A group has as many experts
//! as keep their inner values in the caches.
//!
//! A row's result depends on that row only: each slot is a row of a batch-invariant product, and the sum runs
//! over the row's experts from the most to the least probable.

use super::CpuBackend;
use super::product::{self, Product};
use super::rows::{Buffer, SharedRows};
use super::rowwise::gating;
use crate::Error;
use crate::Isa;
use crate::backend::{ExpertGateUp, ExpertGroups, MatrixId, MoeOp, Selection, VectorId};
use crate::disjoint::Disjoint;
use crate::matmul::{Activations, Epilogue, MatmulKernels, PackedMatrix};
use crate::ops;
use std::ops::Range;

/// Bytes of inner values per thread: its share must fit into a part of an L2 cache.
const INNER_BYTES: usize = 1 << 19;

/// Buffers that grow to the largest call and are never shrunk.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    routes: Routes,
    /// Gate and up side by side, `[slots of some experts][2 ff]`.
    gate_up: Buffer,
    /// `[slots of some experts][ff]`
    inner: Buffer,
    /// `[slots][hidden]`
    down: Buffer,
}

pub(super) fn run(backend: &mut CpuBackend, op: &MoeOp) -> Result<(), Error> {
    let mut scratch = std::mem::take(&mut backend.moe);
    let result = scratch.run(backend, op);
    backend.moe = scratch;
    result
}

impl Scratch {
    /// Bytes of the f32 values.
    pub(super) fn bytes(&self) -> usize {
        [&self.gate_up, &self.inner, &self.down].map(Buffer::bytes).iter().sum()
    }

    fn run(&mut self, backend: &mut CpuBackend, op: &MoeOp) -> Result<(), Error> {
        let rows = backend.buffers[op.router.0 as usize].rows();
        let width = backend.buffers[op.out.0 as usize].cols();
        self.routes.find(backend, op)?;
        self.down.fit(self.routes.slots(), width)?;
        let slot_bytes = 3 * op.ff.max(1) * size_of::<f32>();
        let max_slots = INNER_BYTES * backend.pool.threads() / slot_bytes;
        let mut from = 0;
        while from < self.routes.experts() {
            let experts = self.routes.some_experts(from, max_slots);
            from = experts.end;
            self.gate_up(backend, op, experts.clone())?;
            self.activate(backend, op)?;
            self.down(backend, op, experts)?;
        }
        self.combine(backend, op, rows)
    }

    fn gate_up(&mut self, backend: &mut CpuBackend, op: &MoeOp, experts: Range<usize>) -> Result<(), Error> {
        let ff = op.ff;
        let projections: &[ExpertMatrices] = match op.gate_up {
            ExpertGateUp::Separate { gate, up, gate_scale, up_scale, gate_bias, up_bias } => &[
                ExpertMatrices { matrix: gate, scale: gate_scale, bias: gate_bias, columns: 0..ff },
                ExpertMatrices { matrix: up, scale: up_scale, bias: up_bias, columns: ff..2 * ff },
            ],
            ExpertGateUp::Fused { gate_up, scale, bias } => {
                &[ExpertMatrices { matrix: gate_up, scale, bias, columns: 0..2 * ff }]
            }
        };
        let int8 = projections.iter().any(|projection| projection.reads_int8(backend));
        let x = &mut backend.buffers[op.x.0 as usize];
        if int8 {
            x.quantize(&backend.pool, backend.kernels)?;
        }
        let x = &backend.buffers[op.x.0 as usize];
        let all = Activations::new(x.rows(), x.cols(), x.values(), int8.then_some(&x.quantized))?;
        let of_experts = self.routes.slots_of(experts.clone());
        self.gate_up.fit(of_experts.len(), 2 * ff)?;
        let out = self.gate_up.share();
        let mut products = Vec::with_capacity(projections.len() * experts.len());
        for (expert, slots) in self.routes.by_expert(experts) {
            let input = all.listed(&self.routes.rows[slots.clone()])?;
            let slots = slots.start - of_experts.start..slots.end - of_experts.start;
            for projection in projections {
                products.push(projection.product(
                    backend,
                    &self.routes,
                    expert,
                    input,
                    out,
                    slots.clone(),
                )?);
            }
        }
        product::run(&backend.pool, backend.kernels, backend.config.activations, &products)
    }

    fn activate(&mut self, backend: &CpuBackend, op: &MoeOp) -> Result<(), Error> {
        let (ff, isa, gating) = (op.ff, backend.config.rows, gating(op.activation));
        let down = &backend.matrices[op.down.0 as usize];
        let int8 = MatmulKernels::reads_int8(down.ty(), backend.config.activations);
        self.inner.fit(self.gate_up.rows(), ff)?;
        let gate_up = &self.gate_up;
        self.inner.fill(&backend.pool, int8.then_some(backend.kernels), |slot, out| {
            let (gate, up) = gate_up.row(slot)?.split_at(ff);
            ops::gated_row(isa, gating, gate, up, out)
        })
    }

    fn down(&mut self, backend: &CpuBackend, op: &MoeOp, experts: Range<usize>) -> Result<(), Error> {
        let columns = 0..self.down.cols();
        let projection =
            ExpertMatrices { matrix: op.down, scale: op.down_scale, bias: op.down_bias, columns };
        let int8 = projection.reads_int8(backend);
        let (inner, out) = (&self.inner, self.down.share());
        let all = Activations::new(inner.rows(), op.ff, inner.values(), int8.then_some(&inner.quantized))?;
        let first = self.routes.slots_of(experts.clone()).start;
        let mut products = Vec::with_capacity(experts.len());
        for (expert, slots) in self.routes.by_expert(experts) {
            let input = all.run(slots.start - first..slots.end - first)?;
            products.push(projection.product(backend, &self.routes, expert, input, out, slots)?);
        }
        product::run(&backend.pool, backend.kernels, backend.config.activations, &products)
    }

    /// Writes the weighted sums, in rank order.
    fn combine(&mut self, backend: &mut CpuBackend, op: &MoeOp, rows: usize) -> Result<(), Error> {
        let isa = backend.config.rows;
        let out = &mut backend.buffers[op.out.0 as usize];
        match op.accumulate {
            false => out.set_shape(rows, out.cols())?,
            true => out.check_rows(rows)?,
        }
        let (routes, down) = (&self.routes, &self.down);
        out.change(&backend.pool, |row, out| {
            let ranks = row * op.used..(row + 1) * op.used;
            let expert_outputs = routes.chosen[ranks.clone()].iter().zip(&routes.slot_of[ranks]);
            let expert_outputs: Result<Vec<(&[f32], f32)>, Error> =
                expert_outputs.map(|(choice, slot)| Ok((down.row(*slot as usize)?, choice.weight))).collect();
            ops::weighted_sum(isa, &expert_outputs?, op.scale, op.accumulate, out)
        })
    }
}

/// The experts of each row.
#[derive(Debug, Default)]
struct Routes {
    /// `[rows][used]`, the most probable first.
    chosen: Vec<RoutedExpert>,
    /// Slot of each entry of `chosen`.
    slot_of: Vec<u32>,
    /// Row of each slot.
    rows: Vec<u32>,
    /// First slot of each expert, then the number of slots.
    starts: Vec<u32>,
}

/// An expert of a row.
#[derive(Debug, Clone, Copy, Default)]
struct RoutedExpert {
    expert: u32,
    weight: f32,
}

impl Routes {
    fn find(&mut self, backend: &CpuBackend, op: &MoeOp) -> Result<(), Error> {
        let router = &backend.buffers[op.router.0 as usize];
        let (rows, experts, used) = (router.rows(), router.cols(), op.used);
        if used == 0 || used > experts {
            return Err(Error::OutOfRange { what: "experts per row", index: used, len: experts });
        }
        let x_rows = backend.buffers[op.x.0 as usize].rows();
        if x_rows != rows {
            return Err(Error::Length { what: "rows of the router", expected: x_rows, found: rows });
        }
        let Selection { sigmoid, bias, groups } = op.selection;
        let bias = bias.map(|bias| backend.vectors[bias.0 as usize].as_slice());
        if let Some(bias) = bias.filter(|bias| bias.len() != experts) {
            return Err(Error::Length {
                what: "biases of the experts",
                expected: experts,
                found: bias.len(),
            });
        }
        groups.map_or(Ok(()), |groups| groups.check(experts, used))?;
        self.chosen.clear();
        self.chosen.resize(rows * used, RoutedExpert::default());
        let (isa, chosen) = (backend.config.rows, Disjoint::new(&mut self.chosen));
        backend.pool.for_each_range(rows, 8, &|range| {
            let (mut scores, mut ranked) = (Vec::with_capacity(experts), Vec::with_capacity(experts));
            for row in range {
                scores.clear();
                scores.extend_from_slice(&router.values()[row * experts..][..experts]);
                match sigmoid {
                    true => ops::sigmoid(isa, &mut scores),
                    false => ops::softmax(isa, &mut scores),
                }
                ranked.clear();
                match bias {
                    Some(bias) => ranked.extend(scores.iter().zip(bias).map(|(score, bias)| score + bias)),
                    None => ranked.extend_from_slice(&scores),
                }
                if let Some(groups) = groups {
                    leave_best_groups(isa, groups, &mut ranked);
                }
                // SAFETY: every row is visited once.
                #[allow(unsafe_code, reason = "disjoint rows")]
                let chosen = unsafe { chosen.slice(row * used, used) };
                let mut best = ops::top_k(isa, &ranked, used);
                best.iter_mut().for_each(|(expert, score)| *score = scores[*expert]);
                choose(&best, op.renormalise, chosen);
            }
        });
        self.number(experts, used);
        Ok(())
    }

    fn number(&mut self, experts: usize, used: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        for choice in &self.chosen {
            self.starts[choice.expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        self.rows.clear();
        self.rows.resize(self.chosen.len(), 0);
        self.slot_of.clear();
        let mut next = self.starts.clone();
        for (index, choice) in self.chosen.iter().enumerate() {
            let slot = &mut next[choice.expert as usize];
            self.slot_of.push(*slot);
            self.rows[*slot as usize] = (index / used) as u32;
            *slot += 1;
        }
    }

    fn slots(&self) -> usize {
        self.rows.len()
    }

    fn experts(&self) -> usize {
        self.starts.len() - 1
    }

    fn slots_of(&self, experts: Range<usize>) -> Range<usize> {
        self.starts[experts.start] as usize..self.starts[experts.end] as usize
    }

    /// The range of experts from `from` on that have at most `slots` slots together; at least one expert.
    fn some_experts(&self, from: usize, slots: usize) -> Range<usize> {
        let end = self.starts[from] as usize + slots;
        let fit = self.starts[from + 1..].iter().take_while(|start| **start as usize <= end).count();
        from..from + fit.max(1)
    }

    /// The experts that have rows, with their slots.
    fn by_expert(&self, experts: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let with_slots = experts.map(|expert| (expert, self.slots_of(expert..expert + 1)));
        with_slots.filter(|(_, slots)| !slots.is_empty())
    }
}

/// Sets the scores of all but the best groups to minus infinity. Ties go to the lower group.
fn leave_best_groups(isa: Isa, groups: ExpertGroups, scores: &mut [f32]) {
    let size = scores.len() / groups.count;
    let score = |group: &[f32]| {
        let best = ops::top_k(isa, group, if groups.two_best { 2 } else { 1 });
        best.iter().map(|(_, score)| score).sum::<f32>()
    };
    let of_groups: Vec<f32> = scores.chunks(size).map(score).collect();
    let kept = ops::top_k(isa, &of_groups, groups.used);
    for (number, group) in scores.chunks_mut(size).enumerate() {
        if !kept.iter().any(|(kept, _)| *kept == number) {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// Fills `chosen` with the weights of a row's best experts. The weights are NaN if the row's logits are not
/// numbers.
fn choose(best: &[(usize, f32)], renormalise: bool, chosen: &mut [RoutedExpert]) {
    let total: f32 = if renormalise { best.iter().map(|(_, p)| p).sum() } else { 1.0 };
    chosen.fill(RoutedExpert { expert: 0, weight: f32::NAN });
    for (choice, &(expert, p)) in chosen.iter_mut().zip(best) {
        *choice = RoutedExpert { expert: expert as u32, weight: p / total };
    }
}

/// Matrices of all experts, and the columns of the buffer that receive their products.
struct ExpertMatrices {
    matrix: MatrixId,
    /// `[experts]`
    scale: Option<VectorId>,
    /// `[experts][columns]`
    bias: Option<VectorId>,
    columns: Range<usize>,
}

impl ExpertMatrices {
    fn matrix<'a>(&self, backend: &'a CpuBackend) -> &'a PackedMatrix {
        &backend.matrices[self.matrix.0 as usize]
    }

    fn reads_int8(&self, backend: &CpuBackend) -> bool {
        MatmulKernels::reads_int8(self.matrix(backend).ty(), backend.config.activations)
    }

    /// The product of one expert, with its slots as output.
    fn product<'a>(
        &self,
        backend: &'a CpuBackend,
        routes: &Routes,
        expert: usize,
        activations: Activations<'a>,
        out: SharedRows<'a>,
        slots: Range<usize>,
    ) -> Result<Product<'a>, Error> {
        let (len, experts) = (self.columns.len(), routes.experts());
        let matrix = self.matrix(backend);
        if matrix.rows() != len {
            return Err(Error::Length { what: "rows of an expert", expected: len, found: matrix.rows() });
        }
        let of_expert = |id: Option<VectorId>, len: usize| {
            let Some(id) = id else { return Ok(None) };
            let vector = backend.vectors[id.0 as usize].as_slice();
            let (expected, found) = (experts * len, vector.len());
            if expected != found {
                return Err(Error::Length { what: "values of all experts", expected, found });
            }
            Ok(Some(&vector[expert * len..][..len]))
        };
        let scale = of_expert(self.scale, 1)?.map_or(1.0, |scale| scale[0]);
        let bias = of_expert(self.bias, len)?;
        // SAFETY: slots of different experts are different rows, and parts of one expert different columns.
        #[allow(unsafe_code, reason = "disjoint parts of one buffer")]
        let out = unsafe { out.output(slots, self.columns.clone()) };
        let epilogue = Epilogue { scale, bias, accumulate: false };
        Ok(Product { view: matrix.view(expert)?, activations, out, epilogue })
    }
}
