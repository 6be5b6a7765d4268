//! Selects the drafter of a model's replicas from the registrations of the workers that have the model's
//! file.

use model::costs::{DrafterCosts, DrafterStage, ModelCosts};
use proto::placement::{Capacity, Drafter, OfferedDrafter};
use std::borrow::Cow;

/// Upper bound of a drafter's registered bytes; larger numbers are clamped.
const MAX_BYTES: u64 = 1 << 50;
/// Upper bound of registered elements per position and per sequence.
const MAX_ELEMENTS: u64 = 1 << 24;

/// The drafter of the model with this digest. If workers have registered several, the smallest in their order
/// is used, so that all coordinators choose the same one.
pub(super) fn of<'a>(
    workers: impl Iterator<Item = (&'a Capacity, Option<&'a OfferedDrafter>)>,
    digest: &[u8; 32],
) -> Option<&'a OfferedDrafter> {
    let has = |capacity: &Capacity| capacity.files.iter().any(|file| file.digest == *digest);
    let offered = workers.filter_map(|(capacity, drafter)| {
        drafter.filter(|drafter| drafter.model_digest == *digest && has(capacity))
    });
    offered.min_by_key(|offered| offered.drafter)
}

/// The costs of the model with its drafter.
pub(super) fn with<'a>(costs: &'a ModelCosts, drafter: Option<&OfferedDrafter>) -> Cow<'a, ModelCosts> {
    match drafter {
        None => Cow::Borrowed(costs),
        Some(drafter) => Cow::Owned(costs.clone().with_drafter(taken(drafter))),
    }
}

fn taken(offered: &OfferedDrafter) -> DrafterCosts {
    DrafterCosts {
        stage: match offered.drafter {
            Drafter::Model(_) => DrafterStage::First,
            Drafter::MtpHead | Drafter::Assistant(_) => {
                DrafterStage::Last { from_layer: offered.from_layer as usize }
            }
        },
        weight_bytes: offered.weight_bytes.min(MAX_BYTES),
        reads_embedding: offered.reads_embedding,
        kv_elements: offered.kv_elements.min(MAX_ELEMENTS),
        state_elements: offered.state_elements.min(MAX_ELEMENTS),
    }
}
