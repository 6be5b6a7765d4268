//! Transfers of a worker's prefixes between coordinators. A transfer belongs to one membership: it ends when
//! the worker leaves or joins again.

use super::{Action, WorkerPool};
use crate::prefix_index::peer::{Export, Import, PeerError};
use crate::slot::Slot;
use proto::codec::CodecError;
use proto::ids::{Epoch, NodeId};

/// An export of a worker's prefixes to a peer.
#[derive(Debug)]
pub struct PeerExport {
    follows: Membership,
    export: Export,
}

/// An import of a worker's prefixes from a peer.
#[derive(Debug)]
pub struct PeerImport {
    follows: Membership,
    node: NodeId,
    epoch: Epoch,
    import: Import,
}

impl PeerImport {
    /// Whether the index holds a part of the transfer; see [`Import::has_started`].
    pub fn has_started(&self) -> bool {
        self.import.has_started()
    }
}

/// One worker's time in a slot, from join to leave.
#[derive(Debug, Clone, Copy)]
struct Membership {
    slot: Slot,
    join: u64,
}

impl WorkerPool {
    pub(in crate::balancer) fn export(&self, node: &NodeId, epoch: Epoch, after: u64) -> Option<PeerExport> {
        let follows = self.membership(node, epoch)?;
        let export = Export::new(&self.index, follows.slot, node.clone(), after)?;
        Some(PeerExport { follows, export })
    }

    pub(in crate::balancer) fn exported(
        &self,
        export: &mut PeerExport,
    ) -> Result<Option<Vec<u8>>, CodecError> {
        if !self.is_current(export.follows) {
            return Ok(None);
        }
        export.export.next(&self.index)
    }

    /// Also returns the number of the worker's last event known here.
    pub(in crate::balancer) fn import(&self, node: &NodeId, epoch: Epoch) -> Option<(PeerImport, u64)> {
        let follows = self.membership(node, epoch)?;
        let after = self.index.stream(follows.slot)?.applied;
        let import = Import::new(follows.slot, node.clone(), epoch);
        Some((PeerImport { follows, node: node.clone(), epoch, import }, after))
    }

    pub(in crate::balancer) fn imported(
        &mut self,
        import: &mut PeerImport,
        frame: &[u8],
    ) -> Result<Option<Action>, PeerError> {
        if !self.is_current(import.follows) {
            return Err(PeerError::Left(import.node.clone()));
        }
        let need = import.import.take(&mut self.index, frame)?;
        let fetch = |need| Action::Fetch { node: import.node.clone(), epoch: import.epoch, need };
        Ok(need.map(fetch))
    }

    fn membership(&self, node: &NodeId, epoch: Epoch) -> Option<Membership> {
        let member = self.table.member(node).filter(|member| member.register.epoch == epoch)?;
        let join = self.loads[member.slot.index()].as_ref()?.join;
        Some(Membership { slot: member.slot, join })
    }

    fn is_current(&self, Membership { slot, join }: Membership) -> bool {
        self.loads[slot.index()].as_ref().is_some_and(|load| load.join == join)
    }
}
