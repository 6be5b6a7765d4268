//! `kvasir ca init|issue|rotate`: written files, refusals, and reloading, also while nodes run.

use crate::cluster::{any_port, authority, config, node, pair_of, until, with_timeout};
use crate::samples;
use kvasir_transport::Error;
use kvasir_transport::{CloseCode, Connection, Endpoint, EndpointConfig, Incoming};
use pki::ca::{Authority, Serial, load_identity, load_identity_files};
use pki::{CertificateError, Expected, Identity};
use proto::ids::Role;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

fn contents(directory: &Path) -> BTreeMap<String, (u32, String)> {
    let entries = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    let read = |entry: std::fs::DirEntry| {
        let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
        let text = std::fs::read_to_string(entry.path()).unwrap();
        (entry.file_name().into_string().unwrap(), (mode, text))
    };
    entries.map(read).collect()
}

#[test]
fn files_are_whole_private_and_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let (ca, nodes) = (dir.path().join("ca"), dir.path().join("w1"));
    authority("c").save(&ca).unwrap();
    let loaded = Authority::load(&ca).unwrap();
    assert_eq!(loaded.cluster().as_str(), "c");
    let issued = loaded.issue(Role::Worker, node("w1"), SystemTime::now()).unwrap();
    issued.save(&nodes).unwrap();

    let modes = |directory: &Path| -> Vec<(String, u32)> {
        contents(directory).into_iter().map(|(name, (mode, _))| (name, mode)).collect()
    };
    assert_eq!(modes(&ca), [("ca.crt".into(), 0o644), ("ca.key".into(), 0o600)]);
    assert_eq!(
        modes(&nodes),
        [("ca.crt".into(), 0o644), ("node.crt".into(), 0o644), ("node.key".into(), 0o600)]
    );

    let before = (contents(&ca), contents(&nodes));
    let error = authority("c").save(&ca).unwrap_err();
    assert!(matches!(error, pki::Error::WouldOverwrite { .. }), "{error:?}");
    // If one file exists, none is written.
    std::fs::remove_file(nodes.join("node.key")).unwrap();
    let error = issued.save(&nodes).unwrap_err();
    assert!(matches!(error, pki::Error::WouldOverwrite { .. }), "{error:?}");
    assert!(!nodes.join("node.key").exists());
    issued.save(&dir.path().join("again")).unwrap();
    assert_eq!((contents(&ca), contents(&dir.path().join("again"))), before);
}

#[tokio::test]
async fn nodes_of_a_saved_authority_join_each_other() {
    let dir = tempfile::tempdir().unwrap();
    authority("c").save(&dir.path().join("ca")).unwrap();
    for (role, name) in [(Role::Coordinator, "c1"), (Role::Worker, "w1")] {
        let ca = Authority::load(&dir.path().join("ca")).unwrap();
        ca.issue(role, node(name), SystemTime::now()).unwrap().save(&dir.path().join(name)).unwrap();
    }
    let coordinator = load_identity(&dir.path().join("c1")).unwrap();
    let (chain, key) = (dir.path().join("w1/node.crt"), dir.path().join("w1/node.key"));
    let worker = load_identity_files(&chain, &key, &dir.path().join("ca/ca.crt")).unwrap();
    assert_eq!(worker.name().to_string(), "spiffe://c/worker/w1");
    let loopback = crate::cluster::any_port();
    let coordinator = Endpoint::bind(loopback, &coordinator, config()).unwrap();
    let worker = Endpoint::bind(loopback, &worker, config()).unwrap();
    worker.connect(coordinator.address(), &Expected::node(Role::Coordinator, node("c1"))).await.unwrap();
}

/// A node certificate expires within a year: the same dial succeeds now and fails then.
#[tokio::test]
async fn certificates_expire_after_their_year() {
    let ca = authority("c");
    let day = Duration::from_secs(24 * 60 * 60);
    let loopback = crate::cluster::any_port();
    let issue =
        |role, name, issued: SystemTime| ca.issue(role, node(name), issued).unwrap().identity().unwrap();
    let coordinator = issue(Role::Coordinator, "c1", SystemTime::now());
    let coordinator = Endpoint::bind(loopback, &coordinator, config()).unwrap();
    for (age, joins) in [(319 * day, true), (366 * day, false)] {
        let worker = issue(Role::Worker, "w1", SystemTime::now() - age);
        let worker = Endpoint::bind(loopback, &worker, config()).unwrap();
        let result = worker.connect(coordinator.address(), &Expected::any(Role::Coordinator)).await;
        assert_eq!(result.is_ok(), joins, "{result:?}");
    }
}

/// R5: certificates and roots are replaced while streams stay open, and the replaced ones become invalid.
#[tokio::test]
async fn sec_rotate() {
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca");
    authority("c").save(&ca).unwrap();
    let at = |name: &str| dir.path().join(name);
    let nodes = [(Role::Coordinator, "c1"), (Role::Worker, "w1"), (Role::Worker, "w2")];
    for (role, name) in nodes {
        let ca = Authority::load(&ca).unwrap();
        ca.issue(role, node(name), SystemTime::now()).unwrap().save(&at(name)).unwrap();
    }
    let [c1, w1, w2] = nodes.map(|(_, name)| load_identity(&at(name)).unwrap());
    let bind = |identity| Endpoint::bind(any_port(), identity, config()).unwrap();
    let coordinator = bind(&c1);
    let pair = pair_of(coordinator, bind(&w1)).await;
    let expected = Expected::node(Role::Coordinator, node("c1"));
    let joins = async |worker: &Endpoint| {
        worker
            .connect(pair.coordinator.address(), &expected)
            .await
            .map(drop)
            .map_err(|error| error.to_string())
    };
    // A stream that stays open throughout.
    let mut events = pair.to_coordinator.open_kv_events().await.unwrap();
    let Incoming::KvEvents(mut receiver) = pair.to_worker.accept().await.unwrap() else {
        panic!("no events")
    };
    let mut sent = 0;
    let mut check_stream = async |step: &str| {
        sent += 1;
        let batch = samples::batch(sent);
        events.send(batch.clone()).await.unwrap();
        assert_eq!(with_timeout(step, receiver.next()).await.unwrap().unwrap(), batch, "{step}");
    };
    check_stream("before").await;

    let old = Authority::load(&ca).unwrap();
    old.successor(SystemTime::now()).unwrap().replace(&ca).unwrap();
    let new = Authority::load(&ca).unwrap();
    assert!(matches!(
        new.successor(SystemTime::now()),
        Err(pki::Error::Certificate(CertificateError::Rotating))
    ));
    let renew = |identity: &Identity, name: &str| identity.renew(&load_identity(&at(name)).unwrap());
    // All nodes trust both roots and keep their certificates.
    for (identity, name) in [(&c1, "c1"), (&w1, "w1")] {
        std::fs::copy(ca.join("ca.crt"), at(name).join("ca.crt")).unwrap();
        assert!(renew(identity, name).unwrap());
        assert!(!renew(identity, name).unwrap(), "it has that already");
    }
    joins(&pair.worker).await.unwrap();
    check_stream("both roots").await;
    // One node after the other presents a certificate of the new root, as listener and as dialer.
    for ((role, name), identity) in [nodes[0], nodes[1]].into_iter().zip([&c1, &w1]) {
        new.issue(role, node(name), SystemTime::now()).unwrap().replace(&at(name)).unwrap();
        assert!(renew(identity, name).unwrap());
        joins(&pair.worker).await.unwrap();
        check_stream(name).await;
    }
    // A node that has missed the rotation does not trust the new certificates.
    let outdated = bind(&w2);
    joins(&outdated).await.unwrap_err();
    std::fs::copy(ca.join("ca.crt"), at("w2").join("ca.crt")).unwrap();
    renew(&w2, "w2").unwrap();
    joins(&outdated).await.unwrap();
    // The old root is dropped.
    Authority::load(&ca).unwrap().alone().unwrap().unwrap().replace(&ca).unwrap();
    assert!(Authority::load(&ca).unwrap().alone().unwrap().is_none());
    for (identity, name) in [(&c1, "c1"), (&w1, "w1")] {
        std::fs::copy(ca.join("ca.crt"), at(name).join("ca.crt")).unwrap();
        renew(identity, name).unwrap();
    }
    joins(&pair.worker).await.unwrap();
    let refused = joins(&outdated).await.unwrap_err();
    assert!(refused.contains("refuses our certificate"), "{refused}");
    check_stream("after").await;
}

/// R1: a node with a revoked certificate loses its connections and gets no new ones, at nodes that were
/// given the list and at nodes that received it from peers.
#[tokio::test]
async fn sec_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let ca = authority("c");
    ca.save(dir.path()).unwrap();
    let issue = |role, name| {
        let issued = ca.issue_recorded(dir.path(), role, node(name), SystemTime::now()).unwrap();
        issued.identity().unwrap()
    };
    let list = || std::fs::read(dir.path().join("ca.crl")).unwrap();
    let revoke = |serials: &[Serial]| ca.revoke(dir.path(), serials, SystemTime::now()).unwrap();
    let all = EndpointConfig { accepts: vec![Role::Worker, Role::Coordinator], ..config() };
    let bind = |identity: &Identity| Endpoint::bind(any_port(), identity, all.clone()).unwrap();
    let given = issue(Role::Coordinator, "c1");
    let (c1, c2, w1) =
        (bind(&given), bind(&issue(Role::Coordinator, "c2")), bind(&issue(Role::Worker, "w1")));
    let stolen = bind(&issue(Role::Worker, "w2"));
    // c1 - c2 - w1; the node to be revoked is connected to each of them.
    let (to_c1, to_c2) = (Expected::any(Role::Coordinator), Expected::any(Role::Coordinator));
    let to_w1 = Expected::any(Role::Worker);
    let stays =
        [c1.connect(c2.address(), &to_c2).await.unwrap(), w1.connect(c2.address(), &to_c2).await.unwrap()];
    let accepted = [c2.accept().await.unwrap(), c2.accept().await.unwrap()];
    let open = [
        stolen.connect(c1.address(), &to_c1).await.unwrap(),
        stolen.connect(c2.address(), &to_c2).await.unwrap(),
        stolen.connect(w1.address(), &to_w1).await.unwrap(),
    ];
    let held = [c1.accept().await.unwrap(), c2.accept().await.unwrap(), w1.accept().await.unwrap()];

    // A list of another authority and a malformed list are refused and change nothing.
    let other = tempfile::tempdir().unwrap();
    authority("c").save(other.path()).unwrap();
    let serials = Authority::issued(dir.path(), Role::Worker, &node("w2")).unwrap();
    Authority::load(other.path()).unwrap().revoke(other.path(), &serials, SystemTime::now()).unwrap();
    let error = given.revoke(&std::fs::read(other.path().join("ca.crl")).unwrap()).unwrap_err();
    assert!(error.to_string().contains("signed by none"), "{error}");
    given.revoke(b"nonsense").unwrap_err();
    assert!(open.iter().chain(&stays).all(|connection| !connection.is_closed()));

    assert_eq!((serials.len(), revoke(&serials)), (1, 1));
    let first = list();
    assert!(given.revoke(&first).unwrap());
    assert!(!given.revoke(&first).unwrap(), "it knows that already");
    for connection in &open {
        with_timeout("closing", connection.closed()).await;
        assert!(connection.was_closed_for(CloseCode::Revoked));
    }
    for (node, to) in [(&c1, &to_c1), (&c2, &to_c2), (&w1, &to_w1)] {
        until("counting", || node.stats().revoked == 1).await;
        let refused = stolen.connect(node.address(), to).await.unwrap_err();
        assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
        // Nor do the nodes dial the revoked node.
        let refused = node.connect(stolen.address(), &Expected::any(Role::Worker)).await.unwrap_err();
        assert!(refused.to_string().contains("Revoked"), "{refused}");
    }
    assert!(held.iter().all(Connection::is_closed));
    assert!(stays.iter().chain(&accepted).all(|connection| !connection.is_closed()));

    // A new certificate for the same node is valid, nodes that connect later get the list, and lists add
    // up.
    bind(&issue(Role::Worker, "w2")).connect(w1.address(), &to_w1).await.unwrap();
    std::fs::remove_file(dir.path().join("ca.crl")).unwrap();
    let revoked_later = issue(Role::Worker, "w3");
    assert_eq!(revoke(&Authority::issued(dir.path(), Role::Worker, &node("w3")).unwrap()), 1);
    assert!(given.revoke(&list()).unwrap());
    let newcomer_identity = issue(Role::Coordinator, "c3");
    let newcomer = bind(&newcomer_identity);
    let _joined = newcomer.connect(c2.address(), &to_c2).await.unwrap();
    with_timeout("being told", newcomer_identity.more_revoked_than(1)).await;
    for revoked in [&stolen, &bind(&revoked_later)] {
        let refused = revoked.connect(newcomer.address(), &to_c1).await.unwrap_err();
        assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
    }

    // The authority's successor revokes certificates of its predecessor.
    let new = ca.successor(SystemTime::now()).unwrap();
    new.replace(dir.path()).unwrap();
    assert_eq!(new.revoke(dir.path(), &serials, SystemTime::now()).unwrap(), 2);
    let issued = new.issue(Role::Coordinator, node("c4"), SystemTime::now()).unwrap();
    issued.save(&dir.path().join("c4")).unwrap();
    std::fs::write(dir.path().join("c4/ca.crl"), list()).unwrap();
    let newest = bind(&load_identity(&dir.path().join("c4")).unwrap());
    // The node has the list from the start and does not dial the revoked node.
    let refused = newest.connect(stolen.address(), &Expected::any(Role::Worker)).await.unwrap_err();
    assert!(refused.to_string().contains("Revoked"), "{refused}");
    // A node that does not trust the new root yet takes over the list once it does.
    let old = |name: &str, role| {
        ca.issue(role, node(name), SystemTime::now()).unwrap().save(&dir.path().join(name)).unwrap();
    };
    old("c5", Role::Coordinator);
    old("w5", Role::Worker);
    let trusting = |name: &str| {
        std::fs::copy(dir.path().join("ca.crt"), dir.path().join(name).join("ca.crt")).unwrap();
        load_identity(&dir.path().join(name)).unwrap()
    };
    let slow = load_identity(&dir.path().join("w5")).unwrap();
    std::fs::write(dir.path().join("c5/ca.crl"), list()).unwrap();
    let (knows, learns) = (bind(&trusting("c5")), bind(&slow));
    let _joined = learns.connect(knows.address(), &to_c1).await.unwrap();
    let refuses_revoked = async || {
        let dialed = learns.connect(stolen.address(), &Expected::any(Role::Worker)).await;
        dialed.is_err_and(|error| error.to_string().contains("Revoked"))
    };
    assert!(!refuses_revoked().await);
    assert!(slow.renew(&trusting("w5")).unwrap());
    with_timeout("being told again", slow.more_revoked_than(0)).await;
    assert!(refuses_revoked().await);
    // An unreadable list is an error.
    std::fs::write(dir.path().join("c4/ca.crl"), "nonsense").unwrap();
    load_identity(&dir.path().join("c4")).unwrap_err();
}

/// Files are replaced one at a time: files that do not match, or belong to another node, change nothing.
#[tokio::test]
async fn an_unusable_certificate_renews_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let ca = authority("c");
    let save = |name: &str, directory: &str| {
        let directory = dir.path().join(directory);
        ca.issue(Role::Worker, node(name), SystemTime::now()).unwrap().save(&directory).unwrap();
        directory
    };
    let (own, next, other) = (save("w1", "own"), save("w1", "next"), save("w2", "other"));
    let identity = load_identity(&own).unwrap();
    std::fs::copy(next.join("node.key"), own.join("node.key")).unwrap();
    let error = identity.renew(&load_identity(&own).unwrap()).unwrap_err();
    assert!(matches!(error, pki::Error::Tls(_)), "{error:?}");
    let error = identity.renew(&load_identity(&other).unwrap()).unwrap_err();
    assert!(matches!(error, pki::Error::Certificate(CertificateError::OtherName { .. })), "{error:?}");
    assert!(!format!("{identity:?}").contains("PRIVATE"));
    Endpoint::bind(any_port(), &identity, config()).unwrap();
    std::fs::copy(next.join("node.crt"), own.join("node.crt")).unwrap();
    assert!(identity.renew(&load_identity(&own).unwrap()).unwrap());
}

#[test]
fn missing_and_broken_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = load_identity(dir.path()).unwrap_err();
    assert!(error.to_string().contains("node.crt"), "{error}");
    let error = Authority::load(dir.path()).unwrap_err();
    assert!(error.to_string().contains("ca.crt"), "{error}");
    authority("c").save(dir.path()).unwrap();
    let error = |key: &str| {
        std::fs::write(dir.path().join("ca.key"), key).unwrap();
        Authority::load(dir.path()).unwrap_err()
    };
    assert!(matches!(error("nonsense"), pki::Error::Generate(_)));
    let other = rcgen::KeyPair::generate().unwrap().serialize_pem();
    assert!(matches!(error(&other), pki::Error::Certificate(CertificateError::OtherKey)));
    // A node's files are not an authority.
    let nodes = dir.path().join("w1");
    authority("c").issue(Role::Worker, node("w1"), SystemTime::now()).unwrap().save(&nodes).unwrap();
    std::fs::rename(nodes.join("node.crt"), nodes.join("ca.crt")).unwrap();
    std::fs::rename(nodes.join("node.key"), nodes.join("ca.key")).unwrap();
    let error = Authority::load(&nodes).unwrap_err();
    assert!(matches!(error, pki::Error::Certificate(CertificateError::NotCa)), "{error:?}");
}
