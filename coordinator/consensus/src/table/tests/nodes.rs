use super::*;
use proto::ids::Role;
use proto::join::TokenId;

const NOW: u64 = 2_000_000_000;
const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

/// A token of two uses within an hour.
fn token(id: u8) -> TokenRecord {
    TokenRecord {
        id: TokenId([id; 8]),
        sha256: [id; 32],
        role: Role::Worker,
        node: None,
        approval: false,
        uses: 2,
        created_unix_s: NOW,
        expires_unix_s: NOW + HOUR,
    }
}

fn certificate(serial: u8) -> CertificateRecord {
    CertificateRecord { serial: vec![serial; 16], ends_unix_s: NOW + 30 * DAY }
}

/// `name` with the key `key` joins by token `id` and gets a certificate with the serial number of the key.
fn admitted(id: u8, name: &str, key: u8) -> NodeAdmitted {
    NodeAdmitted {
        role: Role::Worker,
        node: node(name),
        by: AdmittedBy::Token(TokenId([id; 8]), [id; 32]),
        key: [key; 32],
        labels: vec![("zone".into(), "a".into())],
        certificate: Some(certificate(key)),
        now_unix_s: NOW,
    }
}

fn admit(admitted: NodeAdmitted) -> Change {
    Change::NodeAdmitted(Box::new(admitted))
}

fn approved(name: &str, key: u8) -> Change {
    let (role, node) = (Role::Worker, node(name));
    Change::NodeApproved(NodeApproved { role, node, key: [key; 32], now_unix_s: NOW })
}

fn removed(name: &str) -> Change {
    Change::NodeRemoved(NodeRemoved { role: Role::Worker, node: node(name), now_unix_s: NOW })
}

fn authority() -> Change {
    Change::AuthoritySet(AuthorityRecord { roots_pem: "roots".into(), sealed_key: vec![1, 2, 3] })
}

pub(super) fn every_change() -> Vec<Change> {
    vec![
        Change::JoinTokenIssued(TokenRecord { node: Some(node("w5")), ..token(3) }),
        Change::JoinTokenRevoked(TokenId([3; 8])),
        admit(admitted(3, "w5", 7)),
        approved("w5", 7),
        removed("w5"),
        authority(),
    ]
}

pub(super) fn client() -> Client {
    let mut client = Client::new();
    for name in ["c0", "c1", "c2"] {
        client.done(Change::LevelReported(LevelReported { node: node(name), level: Level::OWN }));
    }
    client
}

/// A table with each kind of record.
pub(super) fn joined() -> Client {
    let mut client = client();
    client.done(authority());
    client.done(Change::JoinTokenIssued(token(1)));
    client.done(admit(admitted(1, "w0", 10)));
    client.done(admit(admitted(1, "w1", 11)));
    client.done(removed("w1"));
    let waiting = NodeAdmitted { certificate: None, ..admitted(2, "w2", 12) };
    client.done(Change::JoinTokenIssued(TokenRecord { approval: true, ..token(2) }));
    client.done(admit(waiting));
    client
}

fn record<'a>(client: &'a Client, name: &str) -> Option<&'a NodeRecord> {
    client.table.nodes().nodes().get(&(Role::Worker, node(name)))
}

#[test]
fn a_table_with_nodes_is_read_as_it_is_written() {
    let client = joined();
    let bytes = client.table.to_bytes().unwrap();
    assert_eq!(Table::from_bytes(&bytes).unwrap(), client.table);
    // Without nodes nothing follows the table of level 1.
    let mut plain = client.table.clone();
    plain.nodes = std::sync::Arc::default();
    assert!(bytes.starts_with(&plain.to_bytes().unwrap()));
}

#[test]
fn a_member_of_an_earlier_build_keeps_nodes_out() {
    let mut client = Client::new();
    for change in every_change() {
        assert_eq!(client.refused(change), Refusal::LevelTooLow(Level(1)));
    }
}

#[test]
fn sec_a_token_is_refused_after_use_after_its_time_for_another_role_or_name_and_with_another_secret() {
    let mut client = client();
    client.done(Change::JoinTokenIssued(TokenRecord { uses: 1, ..token(1) }));
    let secret = AdmittedBy::Token(TokenId([1; 8]), [9; 32]);
    let refused = |client: &mut Client, admitted| client.refused(admit(admitted));
    assert_eq!(
        refused(&mut client, NodeAdmitted { by: secret, ..admitted(1, "w0", 1) }),
        Refusal::UnknownToken
    );
    assert_eq!(refused(&mut client, admitted(2, "w0", 1)), Refusal::UnknownToken);
    let role = NodeAdmitted { role: Role::Coordinator, ..admitted(1, "w0", 1) };
    assert_eq!(refused(&mut client, role), Refusal::TokenRole(Role::Worker));
    for late in [NOW + HOUR, NOW + DAY - 1] {
        let late = NodeAdmitted { now_unix_s: late, ..admitted(1, "w0", 1) };
        assert_eq!(refused(&mut client, late), Refusal::TokenExpired);
    }
    client.done(admit(admitted(1, "w0", 1)));
    // The thief has another key.
    assert_eq!(refused(&mut client, admitted(1, "w1", 2)), Refusal::TokenUsedUp);
    assert_eq!(refused(&mut client, admitted(1, "w0", 2)), Refusal::NameTaken);
    client.done(Change::JoinTokenIssued(TokenRecord { node: Some(node("w7")), ..token(3) }));
    assert_eq!(refused(&mut client, admitted(3, "w0", 2)), Refusal::TokenNode(node("w7")));
    client.done(Change::JoinTokenRevoked(TokenId([3; 8])));
    assert_eq!(refused(&mut client, admitted(3, "w7", 2)), Refusal::UnknownToken);
}

#[test]
fn a_node_whose_reply_was_lost_asks_again_without_spending_another_use() {
    let mut client = client();
    client.done(Change::JoinTokenIssued(TokenRecord { uses: 1, ..token(1) }));
    client.done(admit(admitted(1, "w0", 1)));
    client.done(admit(NodeAdmitted { certificate: Some(certificate(2)), ..admitted(1, "w0", 1) }));
    assert_eq!(record(&client, "w0").unwrap().certificates, [certificate(1), certificate(2)]);
}

#[test]
fn sec_a_node_that_must_be_approved_gets_no_certificate_before() {
    let mut client = client();
    client.done(Change::JoinTokenIssued(TokenRecord { approval: true, uses: 1, ..token(1) }));
    assert_eq!(client.refused(admit(admitted(1, "w0", 1))), Refusal::NotApproved);
    let asks = |key| admit(NodeAdmitted { certificate: None, ..admitted(1, "w0", key) });
    client.done(asks(1));
    client.done(asks(1));
    assert_eq!(record(&client, "w0").unwrap().state, NodeState::Waiting);
    assert_eq!(client.refused(admit(admitted(1, "w0", 1))), Refusal::NotApproved);
    assert_eq!(client.refused(asks(2)), Refusal::AnotherKeyWaits);
    assert_eq!(client.refused(approved("w0", 2)), Refusal::Unknown(Kind::WaitingNode));
    client.done(approved("w0", 1));
    assert_eq!(client.refused(approved("w0", 1)), Refusal::Unknown(Kind::WaitingNode));
    assert_eq!(client.refused(admit(admitted(1, "w0", 2))), Refusal::AnotherKeyWaits);
    client.done(asks(1));
    assert_eq!(record(&client, "w0").unwrap().state, NodeState::Approved);
    // The approval came late.
    client.done(admit(NodeAdmitted { now_unix_s: NOW + 2 * HOUR, ..admitted(1, "w0", 1) }));
    assert_eq!(record(&client, "w0").unwrap().state, NodeState::Joined);
    // A refused node has no record.
    client.done(Change::JoinTokenIssued(TokenRecord { approval: true, ..token(2) }));
    client.done(admit(NodeAdmitted { certificate: None, ..admitted(2, "w1", 3) }));
    client.done(removed("w1"));
    assert_eq!(record(&client, "w1"), None);
}

#[test]
fn a_removed_or_replaced_node_has_its_certificates_revoked() {
    let mut client = client();
    client.done(Change::JoinTokenIssued(TokenRecord { node: Some(node("w0")), ..token(1) }));
    client.done(admit(admitted(1, "w0", 1)));
    let presented = |serial| AdmittedBy::Certificate(certificate(serial));
    let renews = |by, key, serial| {
        admit(NodeAdmitted { by, certificate: Some(certificate(serial)), ..admitted(9, "w0", key) })
    };
    client.done(renews(presented(1), 1, 2));
    // A token for this name replaces the node: its disk may be lost.
    client.done(admit(admitted(1, "w0", 3)));
    let serials = |client: &Client| client.table.nodes().revoked().keys().map(|s| s[0]).collect::<Vec<_>>();
    assert_eq!(serials(&client), [1, 2]);
    assert_eq!(client.refused(renews(presented(2), 1, 4)), Refusal::Revoked);
    client.done(removed("w0"));
    assert_eq!(serials(&client), [1, 2, 3]);
    assert_eq!(client.refused(removed("w0")), Refusal::Unknown(Kind::Node));
    // They are forgotten long after their end.
    let later = TokenRecord { created_unix_s: NOW + 31 * DAY, expires_unix_s: NOW + 40 * DAY, ..token(5) };
    client.done(Change::JoinTokenIssued(later.clone()));
    assert_eq!(serials(&client), [1, 2, 3]);
    client.done(Change::JoinTokenIssued(TokenRecord { created_unix_s: NOW + 32 * DAY, ..later }));
    assert_eq!(serials(&client), [0_u8; 0]);
}

#[test]
fn a_node_with_a_certificate_from_elsewhere_is_recorded_when_it_renews() {
    let mut client = client();
    let by = AdmittedBy::Certificate(certificate(1));
    client.done(admit(NodeAdmitted { by, ..admitted(9, "w0", 2) }));
    let record = record(&client, "w0").unwrap();
    assert_eq!((&record.by, record.state), (&JoinedBy::Certificate, NodeState::Joined));
    assert_eq!(record.certificates, [certificate(1), certificate(2)]);
}

#[test]
fn a_service_account_replaces_the_node_that_it_runs_on() {
    let mut client = client();
    let by = || AdmittedBy::ServiceAccount("system:serviceaccount:a:b".into());
    client.done(admit(NodeAdmitted { by: by(), ..admitted(9, "w0", 1) }));
    client.done(admit(NodeAdmitted { by: by(), ..admitted(9, "w0", 2) }));
    assert_eq!(record(&client, "w0").unwrap().certificates, [certificate(2)]);
    assert!(client.table.nodes().revoked().contains_key(&certificate(1).serial));
}

#[test]
fn tokens_nodes_and_certificates_are_bounded() {
    let mut client = client();
    for n in 0..MAX_TOKENS as u64 {
        let id = TokenId(n.to_be_bytes());
        client.done(Change::JoinTokenIssued(TokenRecord { id, ..token(1) }));
    }
    assert_eq!(client.refused(Change::JoinTokenIssued(token(255))), Refusal::Full(Kind::Token));
    let by = || AdmittedBy::ServiceAccount("a".into());
    for serial in 0..16 {
        client.done(admit(NodeAdmitted {
            by: by(),
            certificate: Some(certificate(serial)),
            ..admitted(9, "w0", 1)
        }));
    }
    let more = NodeAdmitted { by: by(), certificate: Some(certificate(99)), ..admitted(9, "w0", 1) };
    assert_eq!(client.refused(admit(more)), Refusal::Full(Kind::Certificate));
    let long = vec![("k".repeat(64), String::new())];
    let long = NodeAdmitted { by: by(), labels: long, ..admitted(9, "w1", 2) };
    assert_eq!(client.refused(admit(long)), Refusal::TooLarge);
}

/// A build of level 1 would skip the nodes, and its snapshots would not have them.
#[test]
fn a_coordinator_of_a_lower_level_is_not_added_once_there_are_nodes() {
    let mut client = client();
    let of_level = |level: Level, name: &str| Change::LearnerAdded(GroupMember { level, ..seat(name, 1) });
    client.done(of_level(Level(1), "c3"));
    client.done(Change::CoordinatorRemoved(node("c3")));
    client.done(authority());
    assert_eq!(client.refused(of_level(Level(1), "c4")), Refusal::LevelTooLow(Level(1)));
    client.done(of_level(Level::OWN, "c4"));
}
