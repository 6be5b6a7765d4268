//! The side of API keys and limits that the agreement uses.

use consensus::table::Access;
use dispatch::quota::Spending;
use proto::ids::NodeId;
use std::sync::Arc;

/// API keys, tenants and limits in force at this coordinator. The layer that authenticates callers implements
/// it.
pub trait AccessControl: std::fmt::Debug + Send + Sync {
    /// Replaces the agreed keys, tenants and limits. Never called with an older table after a newer one.
    fn agree(&self, access: &Arc<Access>);
    /// Marks the agreed keys as known: a majority confirmed them.
    fn settle(&self);
    /// Quota spent at this coordinator, as sent to the others. `None` if no quota was spent.
    fn spending(&self) -> Option<Spending>;
    /// Counts what another coordinator spent.
    fn spent_elsewhere(&self, peer: &NodeId, spending: &Spending);
}
