//! R1, R2, R6: which nodes may connect, with which role and under which name. A dialer and a listener
//! present each certificate of the table; neither checks its peer.

use crate::bare::{self, Gullible, Root, Shown, leaf, provider};
use crate::cluster::{any_port, authority, config, endpoint, node, pair, until, with_timeout};
use crate::samples;
use kvasir_transport::Error;
use kvasir_transport::service::{CoordinatorApi, deadline};
use kvasir_transport::{Connection, Endpoint, EndpointConfig, Incoming, VersionRange};
use pki::{CertificateError, Expected, Identity};
use proto::event::PeerIndexAsk;
use proto::ids::{Epoch, Role};
use proto::shard::ShippingReport;
use proto::worker::{CertificateReport, LoadReport, Refusal, Register, Registered};
use quinn::crypto::rustls::QuicClientConfig;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rcgen::{Issuer, KeyUsagePurpose, SanType};
use std::sync::Arc;
use std::time::Duration;
use tarpc::context::Context;

fn spoilt(uri: &str, spoil: impl FnOnce(&mut CertificateParams)) -> CertificateParams {
    let mut params = leaf(uri);
    spoil(&mut params);
    params
}

fn with_intermediate(root: &Root, is_ca: IsCa, uri: &str) -> Shown {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = is_ca;
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.distinguished_name.push(DnType::CommonName, "intermediate");
    let intermediate = params.signed_by(&key, &root.issuer).unwrap();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().unwrap();
    Shown { chain: vec![leaf(uri).signed_by(&key, &issuer).unwrap(), intermediate], key }
}

/// Returns (defect, chain) pairs. `role` is the role that the other side expects.
fn bad_certificates(root: &Root, role: &str) -> Vec<(&'static str, Shown)> {
    use rcgen::date_time_ymd as day;
    let uri = format!("spiffe://c/{role}/n1");
    let other_role = if role == "worker" { "coordinator" } else { "worker" };
    let sign = |params: CertificateParams| root.sign(&params);
    let self_signed = {
        let key = KeyPair::generate().unwrap();
        Shown { chain: vec![leaf(&uri).self_signed(&key).unwrap()], key }
    };
    let wrong_key = Shown { key: KeyPair::generate().unwrap(), ..sign(leaf(&uri)) };
    let usable_for = |usage: ExtendedKeyUsagePurpose| spoilt(&uri, |p| p.extended_key_usages = vec![usage]);
    vec![
        ("other CA", Root::new().sign(&leaf(&uri))),
        ("self-signed", self_signed),
        ("expired", sign(spoilt(&uri, |p| p.not_after = day(2020, 1, 1)))),
        ("not yet valid", sign(spoilt(&uri, |p| p.not_before = day(2090, 1, 1)))),
        ("wrong cluster", sign(leaf(&format!("spiffe://d/{role}/n1")))),
        ("wrong role", sign(leaf(&format!("spiffe://c/{other_role}/n1")))),
        ("unknown role", sign(leaf("spiffe://c/admin/n1"))),
        (
            "URI in a DNS name",
            sign(spoilt(&uri, |p| {
                p.subject_alt_names = vec![SanType::DnsName("c.worker.n1".try_into().unwrap())];
            })),
        ),
        (
            "e-mail name",
            sign(spoilt(&uri, |p| {
                p.subject_alt_names = vec![SanType::Rfc822Name(uri.as_str().try_into().unwrap())];
            })),
        ),
        (
            "CN only",
            sign(spoilt(&uri, |p| {
                p.subject_alt_names.clear();
                p.distinguished_name.push(DnType::CommonName, uri.as_str());
            })),
        ),
        (
            "two URIs",
            sign(spoilt(&uri, |p| {
                p.subject_alt_names.push(SanType::URI("spiffe://c/worker/n2".try_into().unwrap()));
            })),
        ),
        ("no key usage", sign(spoilt(&uri, |p| p.key_usages.clear()))),
        (
            "usage for the other side",
            sign(usable_for(if role == "worker" {
                ExtendedKeyUsagePurpose::ServerAuth
            } else {
                ExtendedKeyUsagePurpose::ClientAuth
            })),
        ),
        ("a CA as node", sign(spoilt(&uri, |p| p.is_ca = IsCa::Ca(BasicConstraints::Unconstrained)))),
        ("signed by a node", with_intermediate(root, IsCa::ExplicitNoCa, &uri)),
        ("key of another", wrong_key),
    ]
}

#[tokio::test]
async fn sec_join_as_dialer() {
    let root = Root::new();
    let coordinator = Endpoint::bind(any_port(), &root.identity("coordinator", "c1"), config()).unwrap();
    let mut rows: Vec<(&str, Option<Shown>)> = vec![("no certificate", None)];
    rows.extend(bad_certificates(&root, "worker").into_iter().map(|(wrong, shown)| (wrong, Some(shown))));
    for (tried, (wrong, shown)) in rows.iter().enumerate() {
        let connection = bare::dial(coordinator.address(), shown.as_ref()).await;
        let reason = with_timeout(wrong, connection.closed()).await;
        let quinn::ConnectionError::ConnectionClosed(close) = reason else {
            panic!("{wrong}: {reason}");
        };
        let code = u64::from(close.error_code);
        assert!((0x100..0x200).contains(&code), "{wrong}: refused by TLS, not by {close}");
        until("counting", || coordinator.stats().failed == tried as u64 + 1).await;
        assert_eq!(coordinator.stats().accepted, 0, "{wrong}");
    }
}

#[tokio::test]
async fn sec_join_as_listener() {
    let root = Root::new();
    let worker = Endpoint::bind(any_port(), &root.identity("worker", "w1"), config()).unwrap();
    for (wrong, shown) in bad_certificates(&root, "coordinator") {
        let listener = bare::listen(&shown);
        let address = listener.local_addr().unwrap();
        let error = worker.connect(address, &Expected::any(Role::Coordinator)).await.unwrap_err();
        assert!(matches!(error, Error::PeerRefused { .. }), "{wrong}: {error:?}");
        assert!(!error.retryable(), "{wrong}");
    }
}

#[tokio::test]
async fn sec_join_right_certificates() {
    let root = Root::new();
    let direct = root.identity("worker", "w1");
    let chained = with_intermediate(&root, IsCa::Ca(BasicConstraints::Unconstrained), "spiffe://c/worker/w1")
        .identity(&root);
    for identity in [direct, chained] {
        let coordinator = Endpoint::bind(any_port(), &root.identity("coordinator", "c1"), config()).unwrap();
        let worker = Endpoint::bind(any_port(), &identity, config()).unwrap();
        let expected = Expected::node(Role::Coordinator, node("c1"));
        let dialed = worker.connect(coordinator.address(), &expected).await.unwrap();
        let accepted = with_timeout("joining", coordinator.accept()).await.unwrap();
        assert_eq!(accepted.peer().to_string(), "spiffe://c/worker/w1");
        assert_eq!(dialed.peer().to_string(), "spiffe://c/coordinator/c1");
        let newest = VersionRange::CURRENT.max;
        assert_eq!((dialed.version(), accepted.version()), (newest, newest));
        assert_eq!((dialed.peer_epoch(), accepted.peer_epoch()), (Epoch(1), Epoch(1)));
    }
}

/// During a rotation, old and new nodes trust both roots.
#[tokio::test]
async fn two_roots_while_one_replaces_the_other() {
    let (old, new) = (Root::new(), Root::new());
    let roots = old.certificate.pem() + &new.certificate.pem();
    let both = |root: &Root, uri: &str| {
        let shown = root.sign(&leaf(uri));
        let key = shown.key.serialize_pem();
        Identity::from_pem(shown.chain[0].pem().as_bytes(), key.as_bytes(), roots.as_bytes()).unwrap()
    };
    let coordinator = Endpoint::bind(any_port(), &both(&old, "spiffe://c/coordinator/c1"), config()).unwrap();
    for (root, uri) in [(&old, "spiffe://c/worker/w1"), (&new, "spiffe://c/worker/w2")] {
        let worker = Endpoint::bind(any_port(), &both(root, uri), config()).unwrap();
        let joined = worker.connect(coordinator.address(), &Expected::any(Role::Coordinator)).await.unwrap();
        assert_eq!(with_timeout("joining", coordinator.accept()).await.unwrap().peer().to_string(), uri);
        drop(joined);
    }
}

#[tokio::test]
async fn a_dialer_learns_that_it_is_refused() {
    let root = Root::new();
    let coordinators_only = EndpointConfig::new(Epoch(1), [Role::Coordinator]);
    let closed = Endpoint::bind(any_port(), &root.identity("coordinator", "c1"), coordinators_only).unwrap();
    let worker = Endpoint::bind(any_port(), &root.identity("worker", "w1"), config()).unwrap();
    let error = worker.connect(closed.address(), &Expected::any(Role::Coordinator)).await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    let someone_else = Expected::node(Role::Coordinator, node("c2"));
    let error = worker.connect(closed.address(), &someone_else).await.unwrap_err();
    assert!(error.to_string().contains("node c1 answered instead of c2"), "{error}");
}

#[test]
fn an_identity_without_a_node_certificate_does_not_load() {
    let root = Root::new();
    let load = |params: &CertificateParams| {
        let shown = root.sign(params);
        let (chain, key) = (shown.chain[0].pem(), shown.key.serialize_pem());
        Identity::from_pem(chain.as_bytes(), key.as_bytes(), root.certificate.pem().as_bytes()).unwrap_err()
    };
    let uri = "spiffe://c/worker/w1";
    assert_eq!(load(&spoilt(uri, |p| p.subject_alt_names.clear())), CertificateError::NoUri);
    assert_eq!(load(&spoilt(uri, |p| p.key_usages.clear())), CertificateError::KeyUsage);
    let error = Identity::from_pem(b"", b"", b"").unwrap_err();
    assert_eq!(error, CertificateError::ChainLength { found: 0 });
    let shown = root.sign(&leaf(uri));
    let pem = shown.chain[0].pem();
    let error = Identity::from_pem(pem.as_bytes(), b"no key", pem.as_bytes()).unwrap_err();
    assert_eq!(error, CertificateError::NoKey);
}

#[tokio::test]
async fn versions_that_do_not_overlap_are_reported_to_both() {
    let ca = authority("c");
    let speaks = |min, max| EndpointConfig { versions: VersionRange { min, max }, ..config() };
    let coordinator = endpoint(&ca, Role::Coordinator, "c1", speaks(3, 4));
    for (ours, outcome) in
        [(speaks(1, 2), None), (speaks(5, 9), None), (speaks(1, 3), Some(3)), (speaks(4, 9), Some(4))]
    {
        let range = ours.versions;
        let worker = endpoint(&ca, Role::Worker, "w1", ours);
        let before = coordinator.stats();
        let result = worker.connect(coordinator.address(), &Expected::any(Role::Coordinator)).await;
        match (result, outcome) {
            (Ok(connection), Some(version)) => assert_eq!(connection.version(), version),
            (Err(Error::VersionMismatch { ours, theirs, peer }), None) => {
                assert_eq!((ours, theirs), (range, VersionRange { min: 3, max: 4 }));
                assert_eq!(peer.node, node("c1"));
                until("counting", || coordinator.stats().failed == before.failed + 1).await;
            }
            (result, outcome) => panic!("{range}: {result:?} instead of {outcome:?}"),
        }
    }
}

/// R2 applies to the hello too: its node id must be the certificate's.
#[tokio::test]
async fn sec_spoof_hello() {
    let root = Root::new();
    let coordinator = Endpoint::bind(any_port(), &root.identity("coordinator", "c1"), config()).unwrap();
    let shown = root.sign(&leaf("spiffe://c/worker/w2"));
    let connection = bare::dial(coordinator.address(), Some(&shown)).await;
    bare::hello(&connection, "w1").await;
    let reason = with_timeout("closing", connection.closed()).await;
    assert!(matches!(reason, quinn::ConnectionError::ApplicationClosed(_)), "{reason}");
    until("counting", || coordinator.stats().spoofed == 1).await;
    assert_eq!(coordinator.stats().accepted, 0);
}

#[derive(Clone)]
struct Checks(Connection);

impl CoordinatorApi for Checks {
    async fn register(self, _: Context, request: Register) -> Result<Registered, Refusal> {
        let node = request.worker.node;
        match self.0.require_node(&node) {
            Ok(()) => Ok(samples::registered()),
            Err(_) => Err(Refusal::NotYourName { claimed: node }),
        }
    }

    async fn shipping(self, _: Context, _: ShippingReport) {}
    async fn certificate(self, _: Context, _: CertificateReport) {}

    async fn report(self, _: Context, _: LoadReport) -> Result<(), Refusal> {
        Ok(())
    }

    async fn usage(self, _: Context, _: proto::usage::UsageReport) {}
    async fn encoder(self, _: Context, _: proto::message::image_encoder::EncoderReport) {}

    async fn adapters(self, _: Context, _: proto::adapter::AdapterReport) -> Result<(), Refusal> {
        Ok(())
    }

    async fn host(self, _: Context, _: proto::deployment::HostReport) -> Result<(), Refusal> {
        Ok(())
    }
}

/// R2: a worker that uses another node's id is refused and counted, and loses its connection.
#[tokio::test]
async fn sec_spoof_from() {
    let nodes = pair().await;
    let served = nodes.to_worker.clone();
    tokio::spawn(async move {
        while let Ok(incoming) = served.accept().await {
            if let Incoming::CoordinatorRpc(rpc) = incoming {
                tokio::spawn(rpc.serve(Checks(served.clone())));
            }
        }
    });
    let api = nodes.to_coordinator.coordinator_api().await.unwrap();
    let limit = Duration::from_secs(10);
    let accepted = api.register(deadline(limit), samples::register("w1")).await.unwrap();
    assert_eq!(accepted, Ok(samples::registered()));
    assert_eq!(nodes.coordinator.stats().spoofed, 0);
    let spoofed = api.register(deadline(limit), samples::register("w2")).await;
    assert!(!matches!(spoofed, Ok(Ok(_))), "{spoofed:?}");
    with_timeout("closing", nodes.to_coordinator.closed()).await;
    assert_eq!(nodes.coordinator.stats().spoofed, 1);
    assert!(nodes.to_worker.is_closed());
}

/// R1: the role decides which streams a node may open. A worker opens every stream that only a coordinator
/// may open.
#[tokio::test]
async fn a_role_opens_only_its_own_streams() {
    let nodes = pair().await;
    let api = nodes.to_coordinator.worker_api().await.unwrap();
    let limit = Duration::from_secs(10);
    with_timeout("refusing RPC", api.drain(deadline(limit))).await.unwrap_err();
    let error = with_timeout("refusing a snapshot", nodes.to_coordinator.kv_snapshot()).await.unwrap_err();
    assert!(matches!(error, Error::StreamEnded(_)), "{error:?}");
    let stream = nodes.to_coordinator.open_generate(&samples::request()).await;
    // The refusal may arrive before or after the request is written.
    if let Ok(mut stream) = stream {
        let error = with_timeout("refusing a generation", stream.next()).await.unwrap().unwrap_err();
        assert!(matches!(error, Error::StreamEnded(_)), "{error:?}");
    }
    let group = nodes.to_coordinator.open_group::<u64>().await;
    if let Ok(mut group) = group {
        // Refused, whether the frame is written first or not.
        let _ = group.send(&1).await;
    }
    let request = PeerIndexAsk { node: nodes.to_worker.peer().node.clone(), epoch: Epoch(1), after: 0 };
    if let Ok(mut index) = nodes.to_coordinator.open_peer_index(&request).await {
        let error = with_timeout("refusing an index", index.next()).await.unwrap_err();
        assert!(matches!(error, Error::StreamEnded(_)), "{error:?}");
    }
    until("counting", || nodes.coordinator.stats().streams_refused == 5).await;
    // The connection stays usable.
    nodes.to_coordinator.open_kv_events().await.unwrap().send(samples::batch(1)).await.unwrap();
    let incoming = with_timeout("accepting", nodes.to_worker.accept()).await.unwrap();
    assert!(matches!(incoming, Incoming::KvEvents(_)), "{incoming:?}");
}

/// R6: neither early data nor a resumed session bypasses the certificate check.
#[tokio::test]
async fn sec_0rtt_off() {
    let root = Root::new();
    let coordinator = Endpoint::bind(any_port(), &root.identity("coordinator", "c1"), config()).unwrap();
    let shown = root.sign(&leaf("spiffe://c/worker/w1"));
    let (chain, key) = shown.der();
    let mut config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Gullible))
        .with_client_auth_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec!["kvasir/1".into()];
    config.enable_early_data = true;
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).unwrap()));
    let bare = quinn::Endpoint::client(any_port()).unwrap();
    for _ in 0..2 {
        let connecting = bare.connect_with(config.clone(), coordinator.address(), "any").unwrap();
        let connecting = match connecting.into_0rtt() {
            Ok(_) => panic!("the listener has handed out a ticket for early data"),
            Err(connecting) => connecting,
        };
        let connection = connecting.await.unwrap();
        // The listener would send a ticket with its first data.
        with_timeout("hello", bare::hello(&connection, "w1")).await;
    }
    assert_eq!(coordinator.stats().failed, 0);
}

#[tokio::test]
async fn another_alpn_is_refused() {
    let ca = authority("c");
    let coordinator = endpoint(&ca, Role::Coordinator, "c1", config());
    let builder = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Gullible));
    let mut config = builder.with_no_client_auth();
    config.alpn_protocols = vec!["h3".into()];
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).unwrap()));
    let bare = quinn::Endpoint::client(any_port()).unwrap();
    let connecting = bare.connect_with(config, coordinator.address(), "any").unwrap();
    with_timeout("refusing", connecting).await.unwrap_err();
}

/// R6: limits on open connections hold, and a closed connection frees its slot.
#[tokio::test]
async fn connections_are_limited() {
    let ca = authority("c");
    for limits in [
        EndpointConfig { max_connections: 1, ..config() },
        EndpointConfig { max_connections_per_ip: 1, ..config() },
    ] {
        let coordinator = endpoint(&ca, Role::Coordinator, "c1", limits);
        let worker = endpoint(&ca, Role::Worker, "w1", config());
        let expected = Expected::any(Role::Coordinator);
        let first = worker.connect(coordinator.address(), &expected).await.unwrap();
        let accepted = with_timeout("joining", coordinator.accept()).await.unwrap();
        worker.connect(coordinator.address(), &expected).await.unwrap_err();
        assert_eq!(coordinator.stats().over_limit, 1);
        drop((first, accepted));
        worker.connect(coordinator.address(), &expected).await.unwrap();
    }
}

/// R6: under load a dialer must prove its address first, and then joins.
#[tokio::test]
async fn addresses_are_validated_under_load() {
    let ca = authority("c");
    let wary = EndpointConfig { retry_from_handshakes: 0, ..config() };
    let coordinator = endpoint(&ca, Role::Coordinator, "c1", wary);
    let worker = endpoint(&ca, Role::Worker, "w1", config());
    worker.connect(coordinator.address(), &Expected::any(Role::Coordinator)).await.unwrap();
    until("counting", || coordinator.stats().accepted == 1).await;
    assert_eq!(coordinator.stats().retried, 1);
}

/// R6: a node that is flooded with initial packets, some forged and some malformed, still accepts nodes,
/// and keeps no state of the flood.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_quic_flood() {
    let ca = authority("c");
    let coordinator = endpoint(&ca, Role::Coordinator, "c1", config());
    let target = coordinator.address();
    let flood = std::thread::spawn(move || {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        for n in 0..20_000u32 {
            let mut packet = vec![n as u8; 1_200];
            if n % 4 != 0 {
                // A long header of version 1 with two connection ids of eight bytes: an Initial packet with
                // a random rest.
                packet[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
                packet[6..10].copy_from_slice(&n.to_le_bytes());
                packet[14] = 8;
            }
            // The kernel drops what exceeds its buffer, as on a real link.
            let _lost = socket.send_to(&packet, target);
        }
    });
    let expected = Expected::any(Role::Coordinator);
    let mut joined = 0;
    while !flood.is_finished() || joined == 0 {
        let worker = endpoint(&ca, Role::Worker, "w1", config());
        let connection = with_timeout("joining under a flood", async {
            loop {
                if let Ok(connection) = worker.connect(target, &expected).await {
                    return connection;
                }
            }
        })
        .await;
        let accepted = with_timeout("accepting", coordinator.accept()).await.unwrap();
        assert_eq!(accepted.peer().node, node("w1"));
        joined += 1;
        drop(connection);
    }
    flood.join().unwrap();
    assert_eq!(coordinator.stats().accepted, joined);
}

/// A further socket of a node dials as that node and accepts no connections.
#[tokio::test]
async fn another_socket_dials_as_the_node_and_accepts_no_connections() {
    let ca = authority("c");
    let [w1, w2] = ["w1", "w2"].map(|name| endpoint(&ca, Role::Worker, name, config()));
    let another = w2.another().unwrap();
    assert_eq!(another.name(), w2.name());
    assert_ne!(another.address(), w2.address());
    // Both sockets authenticate as the same node.
    for dials in [&w2, &another] {
        let expected = Expected::node(Role::Worker, node("w1"));
        let (ours, theirs) = with_timeout("joining", async {
            tokio::join!(dials.connect(w1.address(), &expected), w1.accept())
        })
        .await;
        let (_ours, theirs) = (ours.unwrap(), theirs.unwrap());
        assert_eq!((theirs.peer(), theirs.remote_address()), (w2.name(), dials.address()));
    }
    let brief = EndpointConfig { handshake_timeout: Duration::from_millis(300), ..config() };
    let w3 = endpoint(&ca, Role::Worker, "w3", brief);
    w3.connect(another.address(), &Expected::any(Role::Worker)).await.unwrap_err();
    assert!(with_timeout("saying so", another.accept()).await.is_none());
    // The further socket outlives the endpoint that created it.
    drop(w2);
    let expected = Expected::node(Role::Worker, node("w1"));
    with_timeout("dialling", another.connect(w1.address(), &expected)).await.unwrap();
}
