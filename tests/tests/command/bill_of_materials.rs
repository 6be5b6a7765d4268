//! The bill of materials that images carry: every crate of the lock, as it is locked.

use kvasir_cluster_tests::binary;
use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;

#[test]
fn it_has_every_crate_of_the_lock_and_tells_what_is_linked() {
    let script = binary::workspace().join("deploy/images/sbom.py");
    let output = Command::new("python3").arg(script).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let bill: Value = serde_json::from_slice(&output.stdout).unwrap();
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
        let field = |name: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(&format!("{name} = ")))?;
            Some(line.trim_matches('"').to_owned())
        };
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
