//! Serialization of the table.

use super::access::Access;
use super::deployments::Deployments;
use super::nodes::Nodes;
use super::{
    KeyRecord, KeyScope, Level, ModelBlocked, ModelPlan, OperatorPlan, ReplicaPlan, Roster, Sessions,
    Standing, Table, TenantRecord,
};
use proto::block::TenantSalt;
use proto::codec::{Cap, CodecError, decode, decode_prefix, encode, encode_into};
use proto::ids::{ModelId, NodeId, TenantId};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;

#[derive(Serialize, Deserialize)]
struct Image<'a> {
    applied: u64,
    workers: Cow<'a, Roster>,
    coordinators: Cow<'a, BTreeMap<NodeId, Standing>>,
    models: Cow<'a, BTreeMap<ModelId, ModelPlan>>,
    tenants: Cow<'a, BTreeMap<TenantId, TenantRecord>>,
    keys: Cow<'a, BTreeMap<[u8; 32], KeyRecord>>,
    policy: u64,
    sessions: Cow<'a, Sessions>,
    replicas: Cow<'a, BTreeMap<u64, ReplicaPlan>>,
    blocked: Cow<'a, BTreeMap<[u8; 32], ModelBlocked>>,
    scopes: Cow<'a, BTreeMap<[u8; 32], KeyScope>>,
    sharing: Cow<'a, BTreeMap<TenantId, TenantId>>,
    groups: Cow<'a, BTreeMap<TenantId, TenantSalt>>,
    operators: Cow<'a, BTreeMap<ModelId, OperatorPlan>>,
}

impl Table {
    /// Encodes the table. Equal tables have equal bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CodecError> {
        let access = &*self.access;
        let image = Image {
            applied: self.applied,
            workers: Cow::Borrowed(&self.workers),
            coordinators: Cow::Borrowed(&self.coordinators),
            models: Cow::Borrowed(&self.models),
            tenants: Cow::Borrowed(&access.tenants),
            keys: Cow::Borrowed(&access.keys),
            policy: self.policy,
            sessions: Cow::Borrowed(&self.sessions),
            replicas: Cow::Borrowed(&self.replicas),
            blocked: Cow::Borrowed(&self.blocked),
            scopes: Cow::Borrowed(&access.scopes),
            sharing: Cow::Borrowed(&access.sharing),
            groups: Cow::Borrowed(&access.groups),
            operators: Cow::Borrowed(&self.operators),
        };
        let mut bytes = encode(&image, Cap::Control)?;
        // Builds before level 2 read no further.
        if self.used_level() >= Level(2) {
            encode_into(&*self.nodes, Cap::Control, &mut bytes)?;
        }
        if *self.deployments != Deployments::default() {
            encode_into(&*self.deployments, Cap::Control, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Decodes the bytes of [`to_bytes`](Self::to_bytes).
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CodecError> {
        let (image, rest): (Image<'_>, _) = decode_prefix(bytes, Cap::Control)?;
        let (nodes, rest): (Nodes, _) =
            if rest.is_empty() { Default::default() } else { decode_prefix(rest, Cap::Control)? };
        let deployments = if rest.is_empty() { Deployments::default() } else { decode(rest, Cap::Control)? };
        let access = Access {
            tenants: image.tenants.into_owned(),
            keys: image.keys.into_owned(),
            scopes: image.scopes.into_owned(),
            sharing: image.sharing.into_owned(),
            groups: image.groups.into_owned(),
        };
        Ok(Self {
            applied: image.applied,
            workers: image.workers.into_owned(),
            coordinators: image.coordinators.into_owned(),
            models: image.models.into_owned(),
            access: access.into(),
            policy: image.policy,
            sessions: image.sessions.into_owned(),
            replicas: image.replicas.into_owned(),
            blocked: image.blocked.into_owned(),
            operators: image.operators.into_owned(),
            nodes: nodes.into(),
            deployments: deployments.into(),
        })
    }
}
