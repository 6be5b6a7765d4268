//! Mixture of experts on a device, all but the products: which rows go to which experts, the gate between their
//! products, and the weighted sum.
//!
//! A *pair* is one row at one of its experts, numbered `row * used + rank`. Nothing of it comes to the host: products
//! read their experts from [`Routes::chosen`], one for each pair, or take the pairs of one expert together from
//! [`Routes::list`].

use super::rowwise::gate_code;
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch, source};
use crate::backend::GateActivation;
use crate::error::Error;

#[cfg(test)]
mod tests;

/// Most experts of a layer.
const MAX_EXPERTS: usize = 1024;

/// Rows that a block routes.
const ROUTE_ROWS: usize = 4;

/// The kernels of [`source::MOE`].
#[derive(Debug, Clone, Copy)]
pub struct MoeKernels {
    route: KernelId,
    expert_lists: KernelId,
    expert_gate: KernelId,
    expert_sum: KernelId,
}

/// Rows and experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShape {
    /// Rows of the step.
    pub rows: usize,
    pub experts: usize,
    /// Experts of a row.
    pub used: usize,
}

/// Where rows go. All arrays but the weights are of 32-bit numbers.
#[derive(Debug, Clone, Copy)]
pub struct Routes {
    /// `[pairs]`: the expert of each pair.
    pub chosen: DevicePtr,
    /// `[pairs]`, f32.
    pub weights: DevicePtr,
    /// `[experts + 1]`: first entry of each expert in `list`, and their number.
    pub starts: DevicePtr,
    /// `[pairs]`: pairs by expert, ascending.
    pub list: DevicePtr,
}

/// Per-expert factor and bias of a product; none multiplies by one and adds nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExpertScale {
    /// `[experts]`
    pub scale: Option<DevicePtr>,
    /// `[experts][width of the product]`
    pub bias: Option<DevicePtr>,
}

/// The products of gate and up, `scale * matrix x + bias` still to be done.
#[derive(Debug, Clone, Copy)]
pub enum GateUp {
    /// Two of `[pairs][ff]`.
    Separate { gate: DevicePtr, up: DevicePtr, gate_scale: ExpertScale, up_scale: ExpertScale },
    /// One of `[pairs][2 ff]`, gate first.
    Fused {
        gate_up: DevicePtr,
        /// Of both; the bias is `[experts][2 ff]`.
        scale: ExpertScale,
    },
}

/// The gate between the products of all pairs.
#[derive(Debug, Clone, Copy)]
pub struct ExpertGate {
    /// Products of gate and up.
    pub gate_up: GateUp,
    pub ff: usize,
    /// What the gate goes through.
    pub activation: GateActivation,
    /// `[pairs][ff]`
    pub inner: DevicePtr,
}

/// The weighted sum of the experts' results.
#[derive(Debug, Clone, Copy)]
pub struct ExpertSum {
    /// `[pairs][hidden]`: the products of the down matrices.
    pub down: DevicePtr,
    pub down_scale: ExpertScale,
    /// Width of a row.
    pub hidden: usize,
    pub scale: f32,
    /// Added to what stands in `out` instead of replacing it.
    pub accumulate: bool,
    /// `[rows][hidden]`
    pub out: DevicePtr,
}

impl MoeShape {
    /// # Errors
    /// [`Error::OutOfRange`] for more experts than there are, or than are served.
    pub fn check(&self) -> Result<(), Error> {
        if self.experts > MAX_EXPERTS {
            return Err(Error::OutOfRange { what: "experts", index: self.experts, len: MAX_EXPERTS });
        }
        if self.used == 0 || self.used > self.experts {
            return Err(Error::OutOfRange { what: "experts per row", index: self.used, len: self.experts });
        }
        Ok(())
    }

    /// Rows at experts.
    pub fn pairs(&self) -> usize {
        self.rows * self.used
    }
}

impl MoeKernels {
    /// Loads what was compiled of [`source::MOE`].
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for what was compiled of another source; what the device says.
    pub fn load(device: &mut dyn Device, compiled: &Compiled) -> Result<Self, CudaError> {
        let kernels = device.load(compiled, source::MOE.kernels)?;
        let [route, expert_lists, expert_gate, expert_sum] = kernels[..] else {
            return Err(CudaError::NoKernel {
                name: "route".into(),
                source_name: compiled.source_name.clone(),
            });
        };
        Ok(Self { route, expert_lists, expert_gate, expert_sum })
    }

    /// Fills [`Routes::chosen`] and [`Routes::weights`] from the router's logits `[rows][experts]`: the most probable
    /// experts of each row, the lower index first among equals, weighted by their probabilities over all experts, or
    /// over the chosen ones if `renormalise`. The shape has been checked.
    ///
    /// # Errors
    /// What the device says.
    pub fn route(
        &self,
        device: &mut dyn Device,
        shape: &MoeShape,
        logits: DevicePtr,
        renormalise: bool,
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
            shared_bytes: (ROUTE_ROWS * shape.experts * size_of::<f32>()) as u32,
            arguments: &[
                routes.chosen.into(),
                routes.weights.into(),
                logits.into(),
                number(shape.rows),
                number(shape.experts),
                number(shape.used),
                u32::from(renormalise).into(),
            ],
        })
    }

    /// Fills [`Routes::starts`] and [`Routes::list`] from [`Routes::chosen`].
    ///
    /// # Errors
    /// What the device says.
    pub fn lists(&self, device: &mut dyn Device, shape: &MoeShape, routes: &Routes) -> Result<(), CudaError> {
        let number = |n: usize| Argument::from(n as u32);
        let pointers = [routes.starts, routes.list, routes.chosen].map(Argument::from);
        let [starts, list, chosen] = pointers;
        device.launch(&Launch {
            kernel: self.expert_lists,
            grid: [1, 1, 1],
            block: [MAX_EXPERTS as u32, 1, 1],
            shared_bytes: 0,
            arguments: &[starts, list, chosen, number(shape.pairs()), number(shape.experts)],
        })
    }

    /// `inner[pair] = activation(gate) * up`, `[pairs][ff]`.
    ///
    /// # Errors
    /// What the device says.
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
        let mut arguments: Vec<Argument> = [inner, gate, up].map(Argument::from).to_vec();
        let affine = [gate_scale.scale, up_scale.scale, gate_scale.bias, up_scale.bias];
        arguments.extend(affine.map(|values| Argument::from(values.unwrap_or_default())));
        arguments.push(routes.chosen.into());
        arguments.extend([ff, stride, stride].map(|n| Argument::from(n as u32)));
        arguments.push(gate_code(activation).into());
        device.launch(&Launch {
            kernel: self.expert_gate,
            grid: [pairs as u32, ff.div_ceil(128) as u32, 1],
            block: [128, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        })
    }

    /// `out[row] (+)= scale * sum of weight * result`, in rank order.
    ///
    /// # Errors
    /// What the device says.
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
            grid: [shape.rows as u32, call.hidden.div_ceil(128) as u32, 1],
            block: [128, 1, 1],
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
