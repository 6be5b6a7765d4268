//! The images' bill of materials lists every crate of the lock file as locked, and deny.toml's rules hold for
//! them.

use kvasir_cluster_tests::binary;
use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;

fn bill() -> Value {
    let script = binary::workspace().join("deploy/images/sbom.py");
    let output = Command::new("python3").arg(script).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A field of a package in Cargo.lock.
fn field(package: &str, name: &str) -> Option<String> {
    let line = package.lines().find_map(|line| line.strip_prefix(&format!("{name} = ")))?;
    Some(line.trim_matches('"').to_owned())
}

#[test]
fn it_has_every_crate_of_the_lock_and_marks_linked_ones() {
    let bill = bill();
    assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    let found: BTreeMap<(String, String), &Value> = bill["components"]
        .as_array()
        .unwrap()
        .iter()
        .map(|crate_| {
            let text = |key: &str| crate_[key].as_str().unwrap().to_owned();
            ((text("name"), text("version")), crate_)
        })
        .collect();
    let lock = std::fs::read_to_string(binary::workspace().join("Cargo.lock")).unwrap();
    let mut locked = 0;
    for package in lock.split("[[package]]").skip(1) {
        let field = |name| field(package, name);
        let key = (field("name").unwrap(), field("version").unwrap());
        let listed = found.get(&key).unwrap_or_else(|| panic!("{key:?} is missing"));
        if let Some(checksum) = field("checksum") {
            assert_eq!(listed["hashes"][0]["content"], checksum, "{key:?}");
            assert!(listed["licenses"][0]["expression"].is_string(), "{key:?}");
        }
        locked += 1;
    }
    assert_eq!(locked, found.len(), "nothing that is not locked");
    let scope = |name: &str| {
        let (_, listed) = found.iter().find(|((found, _), _)| found == name).unwrap();
        listed["scope"].as_str().unwrap().to_owned()
    };
    for linked in ["kvasir-worker", "rustls", "webpki-roots", "tokio"] {
        assert_eq!(scope(linked), "required", "{linked}");
    }
    for not_linked in ["proptest", "kvasir-cluster-tests"] {
        assert_eq!(scope(not_linked), "excluded", "{not_linked}");
    }
}

/// Checks of `cargo deny check bans licenses sources`, as far as the lock file and the crates contain the
/// information.
#[test]
fn sec_supply_chain() {
    let text = std::fs::read_to_string(binary::workspace().join("deny.toml")).unwrap();
    let rules: toml::Table = toml::from_str(&text).unwrap();
    let allowed: Vec<_> =
        rules["licenses"]["allow"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect();
    let banned: Vec<(&str, Option<&str>)> = rules["bans"]["deny"]
        .as_array()
        .unwrap()
        .iter()
        .map(|ban| {
            let named = ban["crate"].as_str().unwrap();
            named.split_once(":<").map_or((named, None), |(name, below)| (name, Some(below)))
        })
        .collect();
    let lock = std::fs::read_to_string(binary::workspace().join("Cargo.lock")).unwrap();
    for package in lock.split("[[package]]").skip(1) {
        let (name, version) = (field(package, "name").unwrap(), field(package, "version").unwrap());
        match field(package, "source") {
            None => assert!(name.starts_with("kvasir"), "{name} is neither ours nor a registry's"),
            Some(source) => {
                assert_eq!(source, "registry+https://github.com/rust-lang/crates.io-index", "{name}");
                assert!(field(package, "checksum").is_some(), "{name}");
            }
        }
        let ban = banned.iter().find(|(banned, below)| {
            *banned == name && below.is_none_or(|below| numbers(&version) < numbers(below))
        });
        assert_eq!(ban, None, "{name} {version}");
    }
    for component in bill()["components"].as_array().unwrap() {
        if let Some(licence) = component["licenses"][0]["expression"].as_str() {
            assert!(is_allowed(licence, &allowed), "{}: {licence}", component["name"]);
        }
    }
}

/// A version's numbers, for ordering.
fn numbers(version: &str) -> Vec<u64> {
    let core = version.split(['-', '+']).next().unwrap_or(version);
    core.split('.').map(|number| number.parse().unwrap()).collect()
}

/// Whether the allowed licences satisfy an SPDX expression.
fn is_allowed(expression: &str, allowed: &[&str]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let found = either(&mut words, allowed);
    assert_eq!(words.next(), None, "{expression}");
    found
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn either(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    let mut found = both(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        found |= both(words, allowed);
    }
    found
}

fn both(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    let mut found = single(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        found &= single(words, allowed);
    }
    found
}

fn single(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    match words.next() {
        Some("(") => {
            let found = either(words, allowed);
            assert_eq!(words.next(), Some(")"));
            found
        }
        // An exception extends a licence, and is allowed only by its full name.
        Some(licence) if words.next_if_eq(&"WITH").is_some() => {
            let named = format!("{licence} WITH {}", words.next().unwrap());
            allowed.contains(&named.as_str())
        }
        Some(licence) => allowed.contains(&licence),
        None => panic!("an expression that ends too early"),
    }
}

#[test]
fn licences_are_read_as_spdx_has_them() {
    let allowed = ["MIT", "ISC"];
    for enough in ["MIT", "GPL-3.0 OR MIT", "MIT AND ISC", "(GPL-3.0 OR ISC) AND MIT", "A WITH b OR ISC"] {
        assert!(is_allowed(enough, &allowed), "{enough}");
    }
    for refused in ["GPL-3.0", "MIT AND GPL-3.0", "MIT WITH x", "MIT AND (GPL-3.0 OR A)", "A OR B AND MIT"] {
        assert!(!is_allowed(refused, &allowed), "{refused}");
    }
}
