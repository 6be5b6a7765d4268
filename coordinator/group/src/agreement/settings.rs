//! Settings that must be equal on all coordinators of a group. Each sends the others digests of its own. The
//! odd one out reports this, is not ready, and accepts no workers, since their block ids could depend on
//! another cluster key.

use dispatch::random::random_u64;
use proto::block::ClusterKey;
use proto::ids::{ModelId, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// The cluster key. Block ids, salts and workers depend on it.
const CLUSTER_KEY: &str = "cluster_key";
/// Whether client text can become control tokens.
const RAW_CHATS: &str = "raw_chats";
const WEIGHTS: &str = "tenant_weights";
/// Prefix of the setting of a model's chat template and sampling defaults; the model's name follows.
const PROMPTING: &str = "chat template and sampling defaults of ";
/// Coordinators that started within this time count as equally old.
const STARTED_TOGETHER: Duration = Duration::from_secs(2);
/// Maximum of settings in a message; longer messages are ignored.
const MAX_SETTINGS: usize = 1024;

/// The settings of a coordinator as keyed digests. A digest does not reveal its setting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SettingDigests {
    /// Uptime of the sender in milliseconds. If equally many disagree, the newcomer is the odd one.
    pub up_ms: u64,
    /// Random per process; orders equally old coordinators.
    pub draw: u64,
    /// Expiry of its certificate in Unix seconds; 0 if unknown.
    pub certificate_ends: i64,
    pub settings: Vec<SettingDigest>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SettingDigest {
    pub name: String,
    pub digest: [u8; 16],
    /// The sender has found that its own value is the odd one.
    pub odd: bool,
}

/// Digests of the offered models, by model name.
#[derive(Debug, Default)]
pub struct ModelDigests {
    pub tokenizers: HashMap<ModelId, [u8; 32]>,
    /// Digests of chat templates and sampling defaults.
    pub prompting: HashMap<ModelId, [u8; 32]>,
}

/// The compared settings of this coordinator.
#[derive(Debug, Clone)]
pub struct OwnSettings {
    started: Instant,
    draw: u64,
    settings: Vec<SettingDigest>,
}

impl OwnSettings {
    /// Computes the digests of the start parameters. `keys` has a line for each configured API key. The order
    /// of keys and weights does not matter.
    pub fn new(
        key: &ClusterKey,
        models: &ModelDigests,
        raw_chats: bool,
        keys: &[String],
        weights: &[String],
    ) -> Self {
        // The digest is keyed by the cluster key itself, so that equal values of other keys cannot be
        // recognized.
        let digest = |name: &str, value: &[u8]| {
            let mut hash = blake3::Hasher::new_keyed(&key.0);
            hash.update(name.as_bytes()).update(&[0]).update(value);
            let mut digest = [0; 16];
            hash.finalize_xof().fill(&mut digest);
            digest
        };
        let open = |name: &str, value: &[u8]| {
            let mut digest = [0; 16];
            blake3::Hasher::new_derive_key("kvasir setting of a coordinator 1")
                .update(name.as_bytes())
                .update(&[0])
                .update(value)
                .finalize_xof()
                .fill(&mut digest);
            digest
        };
        let mut settings = vec![SettingDigest {
            name: CLUSTER_KEY.into(),
            digest: digest(CLUSTER_KEY, b"kvasir"),
            odd: false,
        }];
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        let list = |name: &str, lines: String| SettingDigest {
            name: name.into(),
            digest: open(name, lines.as_bytes()),
            odd: false,
        };
        settings.push(list("keys", keys.join("\n")));
        settings.push(list(RAW_CHATS, raw_chats.to_string()));
        let mut weights = weights.to_vec();
        weights.sort_unstable();
        settings.push(list(WEIGHTS, weights.join("\n")));
        let mut names: Vec<&str> = models.tokenizers.keys().map(ModelId::as_str).collect();
        names.sort_unstable();
        settings.push(list("models", names.join("\n")));
        for (prefix, digests) in [("tokenizer of ", &models.tokenizers), (PROMPTING, &models.prompting)] {
            let mut digests: Vec<_> = digests.iter().collect();
            digests.sort_unstable();
            settings.extend(digests.iter().map(|(id, of_model)| {
                let name = format!("{prefix}{id}");
                SettingDigest { digest: open(&name, *of_model), name, odd: false }
            }));
        }
        Self { started: Instant::now(), draw: random_u64(), settings }
    }

    /// The message to the other coordinators. `odd` names the settings in which this one differs from the
    /// group.
    pub(super) fn digests(&self, certificate_ends: i64, odd: &[String]) -> SettingDigests {
        let up_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let settings = self.settings.iter().cloned();
        let settings =
            settings.map(|setting| SettingDigest { odd: odd.contains(&setting.name), ..setting }).collect();
        SettingDigests { up_ms, draw: self.draw, certificate_ends, settings }
    }
}

/// A setting on which the coordinators disagree, as seen from one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    pub setting: String,
    /// The coordinators whose digest differs from the majority's. In a tie the longest-running coordinator
    /// decides.
    pub odd: Vec<NodeId>,
    /// Whether this coordinator is among these.
    pub own: bool,
    /// Whether an odd coordinator must not serve. `false` for settings that operators change at one
    /// coordinator after the other: the lists of API keys, models and tenant weights, and chat templates and
    /// sampling defaults.
    pub binding: bool,
}

/// The latest message of each coordinator, including this one.
#[derive(Debug, Default)]
pub(super) struct Compared(BTreeMap<NodeId, (Instant, SettingDigests)>);

impl Compared {
    pub(super) fn insert(&mut self, node: &NodeId, received: SettingDigests) {
        if received.settings.len() <= MAX_SETTINGS {
            self.0.insert(node.clone(), (Instant::now(), received));
        }
    }

    /// Whether all of these coordinators have sent their settings.
    pub(super) fn has_all(&self, nodes: &[NodeId]) -> bool {
        nodes.iter().all(|node| self.0.contains_key(node))
    }

    /// Drops the messages of coordinators that are not in `nodes`.
    pub(super) fn keep(&mut self, nodes: &[NodeId], own: &NodeId) {
        self.0.retain(|node, _| node == own || nodes.contains(node));
    }

    pub(super) fn certificate_ends(&self, node: &NodeId) -> Option<i64> {
        self.0.get(node).map(|(_, received)| received.certificate_ends).filter(|ends| *ends != 0)
    }

    /// The differences, by setting. A coordinator without a setting (such as a model) does not differ in it.
    pub(super) fn differences(&self, own: &NodeId) -> Vec<Difference> {
        let mut by_setting: BTreeMap<&str, BTreeMap<[u8; 16], Vec<&NodeId>>> = BTreeMap::new();
        for (node, (_, received)) in &self.0 {
            for SettingDigest { name, digest, .. } in &received.settings {
                by_setting.entry(name).or_default().entry(*digest).or_default().push(node);
            }
        }
        let now = Instant::now();
        let up = |(at, received): &(Instant, SettingDigests)| {
            Duration::from_millis(received.up_ms).saturating_add(now.saturating_duration_since(*at))
        };
        let oldest = self.0.values().map(up).max().unwrap_or_default();
        let age = |node: &&NodeId| {
            let entry = self.0.get(*node)?;
            // Clocks and the network are inexact, so a random number orders coordinators that started
            // together. Their age difference is constant while they run, and so is the result.
            Some((up(entry) + STARTED_TOGETHER >= oldest, entry.1.draw))
        };
        let mut differences = Vec::new();
        for (setting, groups) in by_setting {
            // A coordinator that reports itself as odd has compared with more peers than this one.
            let is_sure = |nodes: &[&NodeId]| {
                let reports_odd = |node: &&&NodeId| {
                    let received = self.0.get(**node).filter(|_| **node != own);
                    received.is_some_and(|(_, received)| {
                        received.settings.iter().any(|s| s.name == setting && s.odd)
                    })
                };
                !nodes.iter().any(|node| reports_odd(&node))
            };
            let right = groups
                .iter()
                .max_by_key(|(_, nodes)| (nodes.len(), is_sure(nodes), nodes.iter().filter_map(age).max()));
            let Some((right, _)) = right.filter(|_| groups.len() > 1) else { continue };
            let others = groups.iter().filter(|(digest, _)| *digest != right);
            let odd: Vec<NodeId> = others.flat_map(|(_, nodes)| nodes.iter().copied().cloned()).collect();
            differences.push(Difference {
                setting: setting.to_owned(),
                own: odd.contains(own),
                binding: !matches!(setting, "keys" | "models" | WEIGHTS) && !setting.starts_with(PROMPTING),
                odd,
            });
        }
        differences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    fn own(key: u8, tokenizer: u8, keys: &[&str]) -> OwnSettings {
        made(key, tokenizer, 0, false, keys)
    }

    fn made(key: u8, tokenizer: u8, template: u8, raw_chats: bool, keys: &[&str]) -> OwnSettings {
        let of_model = |digest: u8| HashMap::from([(ModelId::new("m").unwrap(), [digest; 32])]);
        let models = ModelDigests { tokenizers: of_model(tokenizer), prompting: of_model(template) };
        let keys: Vec<String> = keys.iter().map(|tenant| format!("00 {tenant} false")).collect();
        OwnSettings::new(&ClusterKey([key; 32]), &models, raw_chats, &keys, &[])
    }

    fn compared<const N: usize>(all: [(&str, u64, OwnSettings); N]) -> Compared {
        let mut compared = Compared::default();
        for (name, up_ms, own) in all {
            compared.insert(&node(name), SettingDigests { up_ms, ..own.digests(0, &[]) });
        }
        compared
    }

    #[test]
    fn the_same_settings_do_not_differ_whatever_their_order() {
        let all = compared([("a", 1, own(1, 1, &["x", "y"])), ("b", 2, own(1, 1, &["y", "x"]))]);
        assert_eq!(all.differences(&node("a")), []);
    }

    #[test]
    fn the_differing_coordinator_reports_itself() {
        let all = || {
            let right = || own(1, 1, &[]);
            compared([("a", 0, right()), ("b", 90_000, own(2, 1, &[])), ("c", 0, right())])
        };
        let expected =
            |own| Difference { setting: CLUSTER_KEY.into(), odd: vec![node("b")], own, binding: true };
        assert_eq!(all().differences(&node("b")), [expected(true)]);
        assert_eq!(all().differences(&node("c")), [expected(false)]);
    }

    #[test]
    fn the_newcomer_of_two_is_odd() {
        let all = compared([("a", 9_000, own(1, 1, &[])), ("b", 1_000, own(2, 1, &[]))]);
        assert_eq!(all.differences(&node("a"))[0].odd, [node("b")]);
        // Of two that started together exactly one is odd, and both agree on which.
        let all = compared([("a", 1_000, own(1, 1, &[])), ("b", 1_000, own(2, 1, &[]))]);
        let [a, b] = ["a", "b"].map(|name| all.differences(&node(name)));
        assert_eq!((a[0].odd.len(), &a[0].odd), (1, &b[0].odd));
        assert_ne!(a[0].own, b[0].own);
    }

    /// Which of two is odd does not depend on their uptime.
    #[test]
    fn the_odd_coordinator_does_not_change_with_time() {
        let (older, newer) = (own(1, 1, &[]), own(2, 1, &[]));
        for apart in [0, 400, 1_900, 2_100, 60_000] {
            let odd = |up: u64| {
                let all = compared([("a", up + apart, older.clone()), ("b", up, newer.clone())]);
                all.differences(&node("a"))[0].odd.clone()
            };
            let first = odd(0);
            assert!((0..100).all(|tenth| odd(tenth * 100) == first), "{apart} ms");
            assert!(apart < 2_000 || first == [node("b")], "{apart} ms");
        }
    }

    #[test]
    fn a_coordinator_that_reports_itself_as_odd_is_odd() {
        let received = own(2, 1, &[]).digests(0, &[CLUSTER_KEY.to_owned()]);
        let mut all = compared([("a", 0, own(1, 1, &[]))]);
        all.insert(&node("b"), SettingDigests { up_ms: 9_000_000, ..received });
        assert_eq!(all.differences(&node("a"))[0].odd, [node("b")]);
    }

    #[test]
    fn another_tokenizer_of_a_model_binds_and_lists_that_are_being_changed_do_not() {
        let all = compared([
            ("a", 9_000, own(1, 1, &["x"])),
            ("b", 9_000, own(1, 1, &["x"])),
            ("c", 0, own(1, 2, &[])),
        ]);
        let found = all.differences(&node("c"));
        let found: Vec<_> = found.iter().map(|d| (d.setting.as_str(), d.binding, d.own)).collect();
        assert_eq!(found, [("keys", false, true), ("tokenizer of m", true, true)]);
    }

    #[test]
    fn raw_chats_is_binding_and_another_template_is_reported() {
        let all = compared([
            ("a", 9_000, made(1, 1, 1, false, &[])),
            ("b", 9_000, made(1, 1, 1, false, &[])),
            ("c", 0, made(1, 1, 2, true, &[])),
        ]);
        let found = all.differences(&node("c"));
        let found: Vec<_> = found.iter().map(|d| (d.setting.as_str(), d.binding, d.own)).collect();
        let template = "chat template and sampling defaults of m";
        assert_eq!(found, [(template, false, true), ("raw_chats", true, true)]);
    }

    #[test]
    fn a_digest_depends_on_the_key_and_does_not_reveal_it() {
        let message = own(7, 1, &[]).digests(0, &[]);
        assert!(message.settings.iter().all(|setting| setting.digest != [7; 16]));
        assert_eq!(message.settings[0].digest, own(7, 9, &["z"]).digests(0, &[]).settings[0].digest);
        assert_ne!(message.settings[0].digest, own(8, 1, &[]).digests(0, &[]).settings[0].digest);
    }

    #[test]
    fn a_coordinator_that_has_left_is_not_compared() {
        let mut all = compared([("a", 0, own(1, 1, &[])), ("b", 9_000, own(2, 1, &[]))]);
        assert!(all.has_all(&[node("a"), node("b")]) && !all.has_all(&[node("c")]));
        all.keep(&[], &node("a"));
        assert_eq!(all.differences(&node("a")), []);
    }
}
