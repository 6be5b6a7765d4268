//! Nodes without a certificate, and nodes that renew theirs.

use crate::bare::{dial_for, frame};
use crate::cluster::{any_port, authority, config, identity, node, until, with_timeout};
use kvasir_transport::join::{JoinBy, ask};
use kvasir_transport::{Endpoint, EndpointConfig, Error};
use pki::Identity;
use pki::ca::{Authority, NodeKey, Serial};
use pki::{Fingerprint, fingerprints};
use proto::ids::Role;
use proto::join::{JoinCredential, JoinRefusal, JoinReply, JoinRequest, NodeJoin, TokenId, TokenSecret};
use std::time::SystemTime;

fn coordinator(ca: &Authority) -> Endpoint {
    let config = EndpointConfig { joins: true, ..config() };
    Endpoint::bind(any_port(), &identity(ca, Role::Coordinator, "c0"), config).unwrap()
}

fn root(ca: &Authority) -> Fingerprint {
    fingerprints(ca.certificate_pem()).unwrap()[0]
}

fn join() -> JoinRequest {
    JoinRequest::Join(NodeJoin {
        credential: JoinCredential::Token(TokenId([1; 8]), TokenSecret([2; 32])),
        role: Role::Worker,
        node: node("w1"),
        request: NodeKey::new().unwrap().request().unwrap(),
        labels: Vec::new(),
    })
}

/// The certificate that the coordinator sees, and the dialer's reply.
async fn exchanged(
    coordinator: &Endpoint,
    by: JoinBy<'_>,
    request: &JoinRequest,
) -> (Option<kvasir_transport::join::Presented>, Result<JoinReply, Error>) {
    let target = coordinator.address().to_string();
    let serve = async {
        let call = coordinator.accept_join().await.unwrap();
        assert_eq!(call.request, *request);
        let presented = call.presented.clone();
        call.reply(&JoinReply::Pending).await.unwrap();
        presented
    };
    with_timeout("the exchange", async { tokio::join!(serve, ask(&target, by, request)) }).await
}

#[tokio::test]
async fn a_node_without_a_certificate_exchanges_one_request() {
    let ca = authority("c");
    let coordinator = coordinator(&ca);
    let (presented, reply) = exchanged(&coordinator, JoinBy::Root(root(&ca)), &join()).await;
    assert_eq!((presented, reply.unwrap()), (None, JoinReply::Pending));
    assert_eq!(coordinator.stats().accepted, 0, "it is no node yet");
}

#[tokio::test]
async fn a_node_that_renews_presents_its_certificate() {
    let ca = authority("c");
    let coordinator = coordinator(&ca);
    let issued = ca.issue(Role::Worker, node("w1"), SystemTime::now()).unwrap();
    let worker = issued.identity().unwrap();
    let request = JoinRequest::Renew(vec![1]);
    let (presented, reply) = exchanged(&coordinator, JoinBy::Identity(&worker), &request).await;
    reply.unwrap();
    let presented = presented.unwrap();
    assert_eq!((&presented.name, &presented.serial), (worker.name(), &issued.serial().unwrap()));
    let ends = worker.validities().unwrap().node.ends;
    assert_eq!(presented.ends_unix_s, ends.cast_unsigned());
}

#[tokio::test]
async fn sec_a_joining_node_trusts_only_a_coordinator_of_the_root_in_its_token() {
    let (ca, other) = (authority("c"), authority("c"));
    let coordinator = coordinator(&ca);
    let refused = |error: Error| match error {
        Error::PeerRefused { reason, .. } => reason,
        other => panic!("{other}"),
    };
    let target = coordinator.address().to_string();
    let error = ask(&target, JoinBy::Root(root(&other)), &join()).await.unwrap_err();
    assert!(refused(error).contains("the authority is not the one that the token names"));
    // A worker of the cluster, perhaps a stolen one, is no coordinator.
    let config = EndpointConfig { joins: true, ..config() };
    let worker = Endpoint::bind(any_port(), &identity(&ca, Role::Worker, "w9"), config).unwrap();
    let target = worker.address().to_string();
    let error = ask(&target, JoinBy::Root(root(&ca)), &join()).await.unwrap_err();
    assert!(refused(error).contains("role worker is not expected here"));
}

#[tokio::test]
async fn sec_a_stranger_gets_no_further_than_its_request() {
    let ca = authority("c");
    let coordinator = coordinator(&ca);
    // Without a certificate there is no connection between nodes.
    let connection = dial_for(coordinator.address(), None, "kvasir/1").await.unwrap();
    with_timeout("the refusal", connection.closed()).await;
    until("counting", || coordinator.stats().failed == 1).await;
    assert_eq!(coordinator.stats().accepted, 0);
    // A malformed or endless request ends the connection; a second stream is not read.
    for bytes in [vec![0xff; 100], frame(1 << 30, &[0]), frame(2, &[9, 9])] {
        let connection = dial_for(coordinator.address(), None, "kvasir-join/1").await.unwrap();
        let (mut send, mut receive) = connection.open_bi().await.unwrap();
        send.write_all(&bytes).await.unwrap();
        send.finish().unwrap();
        let reply = with_timeout("the refusal", receive.read_to_end(1000)).await;
        assert!(reply.is_err(), "{reply:?}");
    }
    until("counting", || coordinator.stats().failed == 4).await;
}

#[tokio::test]
async fn sec_nodes_that_take_nobody_in_do_not_speak_the_protocol() {
    let ca = authority("c");
    let plain = Endpoint::bind(any_port(), &identity(&ca, Role::Coordinator, "c0"), config()).unwrap();
    let error = ask(&plain.address().to_string(), JoinBy::Root(root(&ca)), &join()).await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
}

#[tokio::test]
async fn sec_a_revoked_or_foreign_certificate_renews_nothing() {
    let (ca, other) = (authority("c"), authority("c"));
    let now = SystemTime::now();
    let issued = ca.issue(Role::Worker, node("w1"), now).unwrap();
    let revoked: Vec<(Serial, i64)> = vec![(issued.serial().unwrap(), 1)];
    let list = ca.sign_list(revoked, now).unwrap();
    let own: Identity = identity(&ca, Role::Coordinator, "c0");
    own.learn_revoked(&list).unwrap();
    let config = EndpointConfig { joins: true, ..config() };
    let coordinator = Endpoint::bind(any_port(), &own, config).unwrap();
    let target = coordinator.address().to_string();
    let request = JoinRequest::Renew(vec![1]);
    let error = ask(&target, JoinBy::Identity(&issued.identity().unwrap()), &request).await.unwrap_err();
    assert!(matches!(&error, Error::Refused { reason, .. } if reason.contains("Revoked")), "{error}");
    // Of another authority: the dialer refuses first.
    let foreign = identity(&other, Role::Worker, "w1");
    ask(&target, JoinBy::Identity(&foreign), &request).await.unwrap_err();
}

#[test]
fn a_refusal_says_whether_to_ask_again() {
    assert!(JoinRefusal::NoQuorum.retryable() && JoinRefusal::TooMany(1).retryable());
    assert!(!JoinRefusal::UsedUp.retryable() && !JoinRefusal::NameTaken.retryable());
}
