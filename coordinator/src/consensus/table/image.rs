//! A table as bytes. Each version is a struct of its own that never changes (the golden bytes tell). A table that holds
//! nothing of what a version brought is written in the one before it, so that members of a build that knows no more can
//! read it.

use super::access::Access;
use super::{
    KeyScopeV1, KeyV1, ModelCondemnedV1, ModelPlanV1, OperatorPlanV1, ReplicaPlanV1, Roster, Sessions,
    Standing, Table, TenantV1,
};
use proto::block::TenantSalt;
use proto::codec::{Cap, CodecError, decode, encode};
use proto::ids::{ModelId, NodeId, TenantId};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;

#[derive(Serialize, Deserialize)]
enum Image<'a> {
    V1(ImageV1<'a>),
    /// With replicas of several stages.
    V2(ImageV2<'a>),
    /// With scopes of keys and groups of tenants.
    V3(ImageV3<'a>),
    /// With operators' plans.
    V4(ImageV4<'a>),
}

#[derive(Serialize, Deserialize)]
struct ImageV1<'a> {
    applied: u64,
    workers: Cow<'a, Roster>,
    coordinators: Cow<'a, BTreeMap<NodeId, Standing>>,
    models: Cow<'a, BTreeMap<ModelId, ModelPlanV1>>,
    tenants: Cow<'a, BTreeMap<TenantId, TenantV1>>,
    keys: Cow<'a, BTreeMap<[u8; 32], KeyV1>>,
    policy: u64,
    sessions: Cow<'a, Sessions>,
}

#[derive(Serialize, Deserialize)]
struct ImageV2<'a> {
    first: ImageV1<'a>,
    replicas: Cow<'a, BTreeMap<u64, ReplicaPlanV1>>,
    condemned: Cow<'a, BTreeMap<[u8; 32], ModelCondemnedV1>>,
}

#[derive(Serialize, Deserialize)]
struct ImageV3<'a> {
    second: ImageV2<'a>,
    scopes: Cow<'a, BTreeMap<[u8; 32], KeyScopeV1>>,
    sharing: Cow<'a, BTreeMap<TenantId, TenantId>>,
    groups: Cow<'a, BTreeMap<TenantId, TenantSalt>>,
}

#[derive(Serialize, Deserialize)]
struct ImageV4<'a> {
    third: ImageV3<'a>,
    operators: Cow<'a, BTreeMap<ModelId, OperatorPlanV1>>,
}

impl Table {
    /// As bytes, the same for equal tables.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CodecError> {
        let access = &*self.access;
        let first = ImageV1 {
            applied: self.applied,
            workers: Cow::Borrowed(&self.workers),
            coordinators: Cow::Borrowed(&self.coordinators),
            models: Cow::Borrowed(&self.models),
            tenants: Cow::Borrowed(&access.tenants),
            keys: Cow::Borrowed(&access.keys),
            policy: self.policy,
            sessions: Cow::Borrowed(&self.sessions),
        };
        let second = |first| ImageV2 {
            first,
            replicas: Cow::Borrowed(&self.replicas),
            condemned: Cow::Borrowed(&self.condemned),
        };
        let third = |first| ImageV3 {
            second: second(first),
            scopes: Cow::Borrowed(&access.scopes),
            sharing: Cow::Borrowed(&access.sharing),
            groups: Cow::Borrowed(&access.groups),
        };
        let image = if !self.operators.is_empty() {
            Image::V4(ImageV4 { third: third(first), operators: Cow::Borrowed(&self.operators) })
        } else if !access.scopes.is_empty() || !access.groups.is_empty() {
            Image::V3(third(first))
        } else if !self.replicas.is_empty() || !self.condemned.is_empty() {
            Image::V2(second(first))
        } else {
            Image::V1(first)
        };
        encode(&image, Cap::Control)
    }

    /// From the bytes of [`to_bytes`](Self::to_bytes).
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CodecError> {
        let second = |first| ImageV2 { first, replicas: Cow::default(), condemned: Cow::default() };
        let third = |second| ImageV3 {
            second,
            scopes: Cow::default(),
            sharing: Cow::default(),
            groups: Cow::default(),
        };
        let fourth = |third| ImageV4 { third, operators: Cow::default() };
        let ImageV4 { third, operators } = match decode(bytes, Cap::Control)? {
            Image::V1(first) => fourth(third(second(first))),
            Image::V2(second) => fourth(third(second)),
            Image::V3(third) => fourth(third),
            Image::V4(image) => image,
        };
        let ImageV3 { second: ImageV2 { first, replicas, condemned }, scopes, sharing, groups } = third;
        let access = Access {
            tenants: first.tenants.into_owned(),
            keys: first.keys.into_owned(),
            scopes: scopes.into_owned(),
            sharing: sharing.into_owned(),
            groups: groups.into_owned(),
        };
        Ok(Self {
            applied: first.applied,
            workers: first.workers.into_owned(),
            coordinators: first.coordinators.into_owned(),
            models: first.models.into_owned(),
            access: access.into(),
            policy: first.policy,
            sessions: first.sessions.into_owned(),
            replicas: replicas.into_owned(),
            condemned: condemned.into_owned(),
            operators: operators.into_owned(),
        })
    }
}
