//! Lets the group update the API's keys, and the API write to the group's audit log: neither crate imports the other.

use api::auth::Keys;
use api::lora::AuditLog;
use consensus::table::Access;
use dispatch::quota::Spending;
use group::agreement::AccessControl;
use group::audit::{Audit, Record};
use proto::ids::NodeId;
use std::net::IpAddr;
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

#[derive(Debug)]
pub(crate) struct ApiAudit(pub(crate) Arc<Audit>);

impl AuditLog for ApiAudit {
    fn note(&self, who: &str, from: Option<IpAddr>, what: &str, on: &str, result: &str) {
        self.0.note(&Record { who, from, what, on, result });
    }
}
