//! Lets the group update the API's keys: neither crate imports the other.

use api::auth::Keys;
use consensus::table::Access;
use dispatch::quota::Spending;
use group::agreement::AccessControl;
use proto::ids::NodeId;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct ApiAccess(pub(crate) Arc<Keys>);

impl AccessControl for ApiAccess {
    fn agree(&self, access: &Arc<Access>) {
        self.0.agree(access);
    }

    fn settle(&self) {
        self.0.settle();
    }

    fn spending(&self) -> Option<Spending> {
        self.0.spending()
    }

    fn spent_elsewhere(&self, peer: &NodeId, spending: &Spending) {
        self.0.spent_elsewhere(peer, spending);
    }
}
