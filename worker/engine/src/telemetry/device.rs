//! Metrics of the compute device.

use cuda::check::OPS;
use kernels::backend::{BackendInfo, StepCounts};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OpLabel {
    pub op: &'static str,
    /// The device: `cpu`, `cuda`.
    pub device: String,
    /// Instruction set or compute capability.
    pub isa: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LaunchedLabel {
    pub launched: Launched,
}

/// How the kernels of a step's layers were launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case on the wire")]
pub enum Launched {
    singly,
    recorded,
    replayed,
}

#[derive(Debug, Default)]
pub struct DeviceMetrics {
    /// 1 for each op, labeled with the device that computes it.
    pub ops: Family<OpLabel, Gauge>,
    /// Steps, on a device that records graphs.
    pub steps: Family<LaunchedLabel, Counter>,
    /// Number of recorded graphs.
    pub graphs: Gauge,
}

impl DeviceMetrics {
    /// Sets all ops. A backend computes all ops or refuses the model.
    pub(crate) fn covers(&self, info: &BackendInfo) {
        for op in OPS {
            let label = OpLabel { op, device: info.device.clone(), isa: info.isa.clone() };
            self.ops.get_or_create(&label).set(1);
        }
    }

    pub(crate) fn update(&self, counts: StepCounts) {
        let StepCounts { called, recorded, replayed, kept } = counts;
        self.graphs.set(kept as i64);
        for (launched, to) in
            [(Launched::singly, called), (Launched::recorded, recorded), (Launched::replayed, replayed)]
        {
            let counter = self.steps.get_or_create(&LaunchedLabel { launched });
            counter.inc_by(to.saturating_sub(counter.get()));
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "kvasir_device_ops",
            "1 for each op, with the device that computes it",
            self.ops.clone(),
        );
        registry.register(
            "kvasir_device_steps",
            "Steps of a GPU, by the way of launching their kernels",
            self.steps.clone(),
        );
        registry.register("kvasir_device_graphs", "CUDA graphs of recorded steps", self.graphs.clone());
    }
}
