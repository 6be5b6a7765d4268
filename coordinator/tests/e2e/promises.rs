//! Checks that the tests named in docs/security.md exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const IDS: [&str; 34] = [
    "R1", "R2", "R3", "R4", "R5", "R6", "A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "A9", "T1", "T2",
    "T3", "T4", "T5", "G1", "G2", "G3", "G4", "P1", "P2", "P3", "L1", "L2", "L3", "N1", "N2", "S1", "S2",
];

fn root() -> &'static Path {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own)
}

/// All Rust and Python sources.
fn sources() -> Vec<(PathBuf, String)> {
    let mut open: Vec<PathBuf> =
        ["src", "proto", "model", "kernels", "worker", "coordinator", "tests", "bench"]
            .iter()
            .map(|directory| root().join(directory))
            .collect();
    let mut found = Vec::new();
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() && path.file_name().is_some_and(|name| name != "target" && name != "fixtures") {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "py") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path.strip_prefix(root()).unwrap().to_owned(), text));
            }
        }
    }
    found
}

#[test]
fn every_promise_of_security_names_tests_that_exist() {
    let page = fs::read_to_string(root().join("docs/security.md")).unwrap();
    let sources = sources();
    let functions: BTreeSet<&str> = sources
        .iter()
        .flat_map(|(_, text)| text.lines())
        .filter_map(|line| {
            let line = line.trim_start().trim_start_matches("async ");
            line.strip_prefix("fn ").or_else(|| line.strip_prefix("def "))?.split('(').next()
        })
        .collect();
    assert!(functions.len() > 1_000, "{}", functions.len());
    let mut promised = BTreeSet::new();
    for line in page.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, id, _, tests, _] = cells.as_slice() else { continue };
        if !id.starts_with(|first: char| first.is_ascii_uppercase()) {
            continue;
        }
        promised.insert(*id);
        let named: Vec<&str> =
            tests.split('`').skip(1).step_by(2).filter(|name| !name.contains(' ')).collect();
        assert!(!named.is_empty(), "{id} names no test");
        for name in named {
            assert!(functions.contains(name), "{id}: there is no test {name}");
        }
    }
    let missing: Vec<&&str> = IDS.iter().filter(|id| !promised.contains(**id)).collect();
    assert!(missing.is_empty(), "docs/security.md says nothing of {missing:?}");
}

/// Outside of the compute kernels, unsafe code is in these files only: the workspace denies it elsewhere.
#[test]
fn sec_unsafe_is_listed() {
    const LISTED: [&str; 16] = [
        "bench/index/src/heap.rs",
        "coordinator/router/tests/index_bytes.rs",
        "model/src/mmap.rs",
        "model/src/shard/mapped.rs",
        "model/src/shard/packed.rs",
        "model/src/shard/tensor_memory.rs",
        "proto/transport/tests/alloc_guard.rs",
        "src/allocator.rs",
        "src/try_grammar.rs",
        "src/try_onnx.rs",
        "src/up/child.rs",
        "tests/fuzz/driver.rs",
        "tests/src/signal.rs",
        "tests/src/testnet/host.rs",
        "tests/src/testnet/switch.rs",
        "worker/engine/src/memory.rs",
    ];
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    assert!(manifest.lines().any(|line| line.replace(' ', "") == "unsafe_code=\"deny\""), "it is not denied");
    let allow = concat!("allow(", "unsafe_code");
    let allowing: Vec<String> = sources()
        .into_iter()
        .filter(|(path, text)| !path.starts_with("kernels") && text.contains(allow))
        .map(|(path, _)| path.display().to_string())
        .filter(|path| !LISTED.contains(&path.as_str()))
        .collect();
    assert!(allowing.is_empty(), "unsafe code where it is not listed: {allowing:?}");
}

/// Secrets cannot be printed: their types have a `Debug` without content.
#[test]
fn sec_no_secret_has_words() {
    let secrets = [
        format!("{:?}", proto::block::ClusterKey([0xab; 32])),
        format!("{:?}", proto::block::TenantSalt([0xab; 32])),
    ];
    for shown in secrets {
        assert!(!shown.contains("171") && !shown.contains("ab"), "{shown}");
    }
    let authority =
        pki::ca::Authority::new(proto::ids::ClusterName::new("c").unwrap(), std::time::SystemTime::now())
            .unwrap();
    let node = proto::ids::NodeId::new("n").unwrap();
    let issued = authority.issue(proto::ids::Role::Worker, node, std::time::SystemTime::now()).unwrap();
    for shown in
        [format!("{authority:?}"), format!("{issued:?}"), format!("{:?}", issued.identity().unwrap())]
    {
        assert!(!shown.contains("PRIVATE"), "{shown}");
    }
}
