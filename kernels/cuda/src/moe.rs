//! Mixture of experts on a device, without the products: routing of rows to experts, the gate between the
//! products, and the weighted sum.
//!
//! A *pair* is one row at one of its experts, numbered `row * used + rank`. No pair is copied to the host.
//! Products read the expert of each pair from [`Routes::chosen`], or process groups of pairs of one expert from
//! [`Routes::groups`].

use super::matmul::{Activations, GROUP_TOKENS, Quantised, STAGED_TOKENS};
use super::pack::UNIT_COLS;
use super::rowwise::gate_code;
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch, source};
use kernels::Error;
use kernels::backend::{ExpertGroups, GateActivation};

#[cfg(test)]
mod tests;

/// Maximum number of experts of a layer.
const MAX_EXPERTS: usize = 1024;

/// Groups that a block of the kernel for prompts multiplies together.
const GROUPS_TOGETHER: usize = STAGED_TOKENS / GROUP_TOKENS;

/// Threads of a block that processes rows of values, and values of a thread.
const THREADS: usize = 128;
const VALUES: usize = 4;

/// Rows that one block routes.
const ROUTE_ROWS: usize = 4;

/// The kernels of [`source::MOE`].
#[derive(Debug, Clone, Copy)]
pub struct MoeKernels {
    route: KernelId,
    expert_lists: KernelId,
    expert_gate: KernelId,
    expert_sum: KernelId,
    head_lists: KernelId,
}

/// Rows and experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShape {
    /// Rows of the step.
    pub rows: usize,
    pub experts: usize,
    /// Experts per row.
    pub used: usize,
}

/// Routing of rows to experts. All arrays but the weights hold u32.
#[derive(Debug, Clone, Copy)]
pub struct Routes {
    /// `[pairs]`: the expert of each pair.
    pub chosen: DevicePtr,
    /// `[pairs]`, f32.
    pub weights: DevicePtr,
    /// `[MoeShape::groups]` of two u32: groups of up to 32 entries of `list`, see
    /// [`super::matmul::Experts::Listed`].
    pub groups: DevicePtr,
    /// `[pairs]`: pairs grouped by expert, in ascending order.
    pub list: DevicePtr,
}

/// Factor and bias per expert of a product. `None` multiplies by one or adds nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExpertScale {
    /// `[experts]`
    pub scale: Option<DevicePtr>,
    /// `[experts][width of the product]`
    pub bias: Option<DevicePtr>,
}

/// Products of gate and up, to which `scale * matrix x + bias` has not been applied yet.
#[derive(Debug, Clone, Copy)]
pub enum GateUp {
    /// Two arrays `[pairs][ff]`.
    Separate { gate: DevicePtr, up: DevicePtr, gate_scale: ExpertScale, up_scale: ExpertScale },
    /// One array `[pairs][2 ff]`, gate first.
    Fused {
        gate_up: DevicePtr,
        /// Factor and bias of both; the bias is `[experts][2 ff]`.
        scale: ExpertScale,
    },
}

/// Gate between the products of all pairs.
#[derive(Debug, Clone, Copy)]
pub struct ExpertGate {
    /// Products of gate and up.
    pub gate_up: GateUp,
    pub ff: usize,
    /// Activation function of the gate.
    pub activation: GateActivation,
    /// Destination: rows of `ff` values.
    pub inner: Activations,
}

/// Weighted sum of the experts' results.
#[derive(Debug, Clone, Copy)]
pub struct ExpertSum {
    /// `[pairs][hidden]`: the products of the down matrices.
    pub down: DevicePtr,
    pub down_scale: ExpertScale,
    /// Width of a row.
    pub hidden: usize,
    pub scale: f32,
    /// Whether the sum is added to `out` instead of replacing it.
    pub accumulate: bool,
    /// `[rows][hidden]`
    pub out: DevicePtr,
}

impl MoeShape {
    /// # Errors
    /// [`Error::OutOfRange`] if a row uses 0 experts or more than there are, or if there are more than 1,024.
    pub fn check(&self) -> Result<(), Error> {
        if self.experts > MAX_EXPERTS {
            return Err(Error::OutOfRange { what: "experts", index: self.experts, len: MAX_EXPERTS });
        }
        if self.used == 0 || self.used > self.experts {
            return Err(Error::OutOfRange { what: "experts per row", index: self.used, len: self.experts });
        }
        Ok(())
    }

    /// Returns the number of pairs.
    pub fn pairs(&self) -> usize {
        self.rows * self.used
    }

    /// Returns the maximum number of groups: each expert may have one that is not full. A multiple of four.
    pub fn groups(&self) -> usize {
        (self.pairs() / GROUP_TOKENS + self.pairs().min(self.experts)).next_multiple_of(GROUPS_TOGETHER)
    }
}

/// Returns the number of groups of `rows` rows at each of `heads` heads, rounded up to a multiple of four.
pub fn head_groups(rows: usize, heads: usize) -> usize {
    (rows.div_ceil(GROUP_TOKENS) * heads).next_multiple_of(GROUPS_TOGETHER)
}

/// The choice of experts: see [`kernels::backend::Selection`].
#[derive(Debug, Clone, Copy)]
pub struct Router {
    pub logits: DevicePtr,
    /// `[experts]`.
    pub bias: Option<DevicePtr>,
    pub sigmoid: bool,
    pub groups: Option<ExpertGroups>,
    pub renormalise: bool,
}

impl MoeKernels {
    /// Loads the compiled [`source::MOE`].
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for another compiled source; errors of the device.
    pub fn load(device: &mut dyn Device, compiled: &Compiled) -> Result<Self, CudaError> {
        let kernels = device.load(compiled, source::MOE.kernels)?;
        let [route, expert_lists, expert_gate, expert_sum, head_lists] = kernels[..] else {
            return Err(CudaError::NoKernel {
                name: "route".into(),
                source_name: compiled.source_name.clone(),
            });
        };
        Ok(Self { route, expert_lists, expert_gate, expert_sum, head_lists })
    }

    /// Fills [`Routes::chosen`] and [`Routes::weights`] from the router's logits `[rows][experts]`; ties go to the
    /// lower index. The caller has checked the shape.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn route(
        &self,
        device: &mut dyn Device,
        shape: &MoeShape,
        router: &Router,
        routes: &Routes,
    ) -> Result<(), CudaError> {
        let number = |n: usize| Argument::from(n as u32);
        if shape.rows == 0 {
            return Ok(());
        }
        device.launch(&Launch {
            kernel: self.route,
            grid: [shape.rows.div_ceil(ROUTE_ROWS) as u32, 1, 1],
            block: [128, 1, 1],
            shared_bytes: (2 * ROUTE_ROWS * shape.experts * size_of::<f32>()) as u32,
            arguments: &[
                routes.chosen.into(),
                routes.weights.into(),
                router.logits.into(),
                router.bias.unwrap_or_default().into(),
                number(shape.rows),
                number(shape.experts),
                number(shape.used),
                u32::from(router.renormalise).into(),
                u32::from(router.sigmoid).into(),
                number(router.groups.map_or(0, |groups| groups.count)),
                number(router.groups.map_or(0, |groups| groups.used)),
                u32::from(router.groups.is_some_and(|groups| groups.two_best)).into(),
            ],
        })
    }

    /// Fills [`Routes::groups`] and [`Routes::list`] from [`Routes::chosen`].
    ///
    /// # Errors
    /// Errors of the device.
    pub fn lists(&self, device: &mut dyn Device, shape: &MoeShape, routes: &Routes) -> Result<(), CudaError> {
        let number = |n: usize| Argument::from(n as u32);
        let [groups, list, chosen] = [routes.groups, routes.list, routes.chosen].map(Argument::from);
        device.launch(&Launch {
            kernel: self.expert_lists,
            grid: [1, 1, 1],
            block: [MAX_EXPERTS as u32, 1, 1],
            shared_bytes: 0,
            arguments: &[
                groups,
                list,
                chosen,
                number(shape.pairs()),
                number(shape.experts),
                number(shape.groups()),
            ],
        })
    }

    /// Fills the routes of heads, each of which is an expert of every row: [`Routes::chosen`], [`head_groups`] of
    /// [`Routes::groups`], and [`Routes::list`].
    ///
    /// # Errors
    /// Errors of the device.
    pub fn heads(
        &self,
        device: &mut dyn Device,
        rows: usize,
        heads: usize,
        [chosen, groups, list]: [DevicePtr; 3],
    ) -> Result<(), CudaError> {
        let number = |n: usize| Argument::from(n as u32);
        device.launch(&Launch {
            kernel: self.head_lists,
            grid: [(rows * heads).div_ceil(128) as u32, 1, 1],
            block: [128, 1, 1],
            shared_bytes: 0,
            arguments: &[chosen.into(), groups.into(), list.into(), number(rows), number(heads)],
        })
    }

    /// `inner[pair] = activation(gate) * up`.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn gate(
        &self,
        device: &mut dyn Device,
        pairs: usize,
        call: &ExpertGate,
        routes: &Routes,
    ) -> Result<(), CudaError> {
        let ExpertGate { gate_up, ff, activation, inner } = *call;
        if pairs == 0 {
            return Ok(());
        }
        let (gate, up, gate_scale, up_scale, stride) = match gate_up {
            GateUp::Separate { gate, up, gate_scale, up_scale } => (gate, up, gate_scale, up_scale, ff),
            GateUp::Fused { gate_up, scale } => {
                let half = ff * size_of::<f32>();
                let up_scale = ExpertScale { bias: scale.bias.map(|bias| bias.offset(half)), ..scale };
                (gate_up, gate_up.offset(half), scale, up_scale, 2 * ff)
            }
        };
        let (none, padded) = (DevicePtr::default(), ff.next_multiple_of(UNIT_COLS));
        let (inner, quantised, form, cols) = match inner {
            Activations::F32(inner) => (inner, none, Quantised::Int8, ff),
            Activations::Int8(quantised) => (none, quantised, Quantised::Int8, padded),
            Activations::Mxfp8(quantised) => (none, quantised, Quantised::Mxfp8, padded),
            Activations::Bf16(quantised) => (none, quantised, Quantised::Bf16, padded),
            Activations::Nvfp4(_) => {
                return Err(CudaError::Invalid { what: "gated values in NVFP4".into() });
            }
        };
        let mut arguments: Vec<Argument> =
            vec![inner.into(), quantised.into(), form.code().into(), gate.into(), up.into()];
        let affine = [gate_scale.scale, up_scale.scale, gate_scale.bias, up_scale.bias];
        arguments.extend(affine.map(|values| Argument::from(values.unwrap_or_default())));
        arguments.push(routes.chosen.into());
        arguments.extend([ff, stride, stride].map(|n| Argument::from(n as u32)));
        arguments.push(gate_code(activation).into());
        device.launch(&Launch {
            kernel: self.expert_gate,
            grid: [pairs as u32, cols.div_ceil(VALUES * THREADS) as u32, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        })
    }

    /// `out[row] (+)= scale * sum of weight * result`, summed in rank order.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn sum(
        &self,
        device: &mut dyn Device,
        shape: &MoeShape,
        call: &ExpertSum,
        routes: &Routes,
    ) -> Result<(), CudaError> {
        if shape.rows == 0 {
            return Ok(());
        }
        device.launch(&Launch {
            kernel: self.expert_sum,
            grid: [shape.rows as u32, call.hidden.div_ceil(VALUES * THREADS) as u32, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            arguments: &[
                call.out.into(),
                call.down.into(),
                routes.weights.into(),
                routes.chosen.into(),
                call.down_scale.scale.unwrap_or_default().into(),
                call.down_scale.bias.unwrap_or_default().into(),
                (call.hidden as u32).into(),
                (shape.used as u32).into(),
                call.scale.into(),
                u32::from(call.accumulate).into(),
            ],
        })
    }
}
