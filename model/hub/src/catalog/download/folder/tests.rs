use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::super::super::http::{Http, Request, Response};
use super::super::super::{Hub, PlainHttp};
use super::super::Hash;
use super::*;
use serde_json::{Value as Json, json};
use std::io::Write;

const COMMIT: &str = "0123456789012345678901234567890123456789";

/// A hub with one repository.
#[derive(Default, Clone)]
struct Repository {
    files: BTreeMap<String, Vec<u8>>,
    /// Whether the hub names the commit.
    commit: bool,
    /// Pages of the list. `None`: no list, as a plain file server.
    pages: Option<Vec<Json>>,
    requests: Rc<RefCell<Vec<Request>>>,
    /// A file that is cut after so many bytes, once.
    cut: Rc<RefCell<Option<(String, usize)>>>,
    /// Requests after which nothing answers.
    patience: Option<usize>,
}

/// A body that fails after its bytes.
struct Cut(io::Cursor<Vec<u8>>, bool);

impl Read for Cut {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self.0.read(to)? {
            0 if self.1 => Err(io::ErrorKind::UnexpectedEof.into()),
            got => Ok(got),
        }
    }
}

impl Http for Repository {
    fn get(&self, request: &Request) -> io::Result<Response> {
        self.requests.borrow_mut().push(request.clone());
        if self.patience.is_some_and(|patience| self.requests.borrow().len() > patience) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let target = request.url.target().to_owned();
        let mut head = Head { status: 200, headers: Vec::new() };
        let mut header = |name: &str, value: String| head.headers.push((name.into(), value));
        let (mut body, mut cut) = (None, false);
        if let Some(query) = target.strip_prefix("/api/models/o/r/tree/") {
            let number = query.split("cursor=").nth(1).map_or(0, |cursor| cursor.parse().unwrap());
            if let Some(pages) = &self.pages {
                body = Some(pages[number].to_string().into_bytes());
                if number + 1 < pages.len() {
                    let next = format!("/api/models/o/r/tree/x?cursor={}", number + 1);
                    header("link", format!("<https://huggingface.co{next}>; rel=\"next\""));
                }
            }
        } else if let Some((_, name)) = target.strip_prefix("/o/r/resolve/").and_then(|x| x.split_once('/')) {
            if self.commit {
                header("x-repo-commit", COMMIT.into());
            }
            if let Some(file) = self.files.get(name) {
                header("etag", format!("\"{name}\""));
                let from = request.from.unwrap_or(0) as usize;
                if from > 0 {
                    header("content-range", format!("bytes {from}-{}/{}", file.len() - 1, file.len()));
                }
                let upto = self.cut.borrow_mut().take_if(|(cut, _)| cut == name).map(|(_, upto)| upto);
                cut = upto.is_some();
                body = Some(file[from..upto.unwrap_or(file.len())].to_vec());
                header("content-length", (file.len() - from).to_string());
                if from > 0 {
                    head.status = 206;
                }
            }
        }
        let status = if body.is_some() { head.status } else { 404 };
        let body = Box::new(Cut(io::Cursor::new(body.unwrap_or_default()), cut));
        Ok(Response { head: Head { status, ..head }, body })
    }

    fn pause(&self, _: std::time::Duration) {}
}

fn sum(bytes: &[u8]) -> String {
    let mut hash = Hash::default();
    hash.write_all(bytes).unwrap();
    hash.hex()
}

fn weights(salt: u8) -> Vec<u8> {
    let mut bytes = 2_u64.to_le_bytes().to_vec();
    bytes.extend_from_slice(b"{}");
    bytes.extend((0..900_u32).map(|at| (at % 251) as u8 ^ salt));
    bytes
}

fn entry(path: &str, bytes: &[u8]) -> Json {
    let large = path.ends_with(".safetensors").then(|| json!({"oid": sum(bytes), "size": bytes.len()}));
    let size = if large.is_some() { 135 } else { bytes.len() };
    json!({"type": "file", "oid": "git", "size": size, "path": path, "lfs": large})
}

impl Repository {
    /// A sharded checkpoint with files that a model does not need.
    fn sharded() -> Self {
        let map =
            json!({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}});
        let files: [(&str, Vec<u8>); 10] = [
            ("config.json", b"{\"model_type\": \"qwen3\"}".into()),
            ("tokenizer.json", b"{}".into()),
            ("1_Pooling/config.json", b" {}".into()),
            ("chat_template.jinja", b"<{{ x }}".into()),
            ("model.safetensors.index.json", map.to_string().into()),
            ("m-1.safetensors", weights(1)),
            ("m-2.safetensors", weights(2)),
            ("README.md", b"#".into()),
            ("pytorch_model.bin", b"x".into()),
            ("original/m-3.safetensors", weights(3)),
        ];
        let files = files.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
        let mut repository = Self { files, commit: true, ..Self::default() };
        repository.list();
        repository
    }

    /// Makes the list of the files, in two pages.
    fn list(&mut self) {
        let entries: Vec<Json> = self.files.iter().map(|(name, bytes)| entry(name, bytes)).collect();
        let (first, second) = entries.split_at(entries.len() / 2);
        let folder = json!({"type": "directory", "oid": "git", "size": 0, "path": "original"});
        self.pages = Some(vec![Json::from([first, &[folder]].concat()), Json::from(second)]);
    }

    fn without(mut self, names: &[&str]) -> Self {
        for name in names {
            self.files.remove(*name);
        }
        if self.pages.is_some() {
            self.list();
        }
        self
    }

    fn with(mut self, name: &str, bytes: &[u8]) -> Self {
        self.files.insert(name.to_owned(), bytes.into());
        if self.pages.is_some() {
            self.list();
        }
        self
    }

    fn pull(&self, dir: &Path, address: &str) -> Result<Record, Error> {
        let hub = Hub { token: Some("secret".into()), ..Hub::default() };
        let network = Network { http: Box::new(self.clone()), hub, plain: PlainHttp::Loopback };
        fetch(dir, &Address::parse(address).unwrap(), &network, &mut ())
    }

    fn refusal(&self) -> String {
        let dir = tempfile::tempdir().unwrap();
        self.pull(dir.path(), "hf://o/r").unwrap_err().to_string()
    }

    fn targets(&self) -> Vec<String> {
        self.requests.borrow().iter().map(|request| request.url.target().to_owned()).collect()
    }
}

fn files(dir: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        match entry.path().is_dir() {
            true => names.extend(files(&entry.path()).into_iter().map(|inner| format!("{name}/{inner}"))),
            false => names.push(name),
        }
    }
    names.sort();
    names
}

const PULLED: [&str; 10] = [
    ".lock",
    "1_Pooling/config.json",
    "README.md",
    "chat_template.jinja",
    "config.json",
    "download.json",
    "m-1.safetensors",
    "m-2.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
];

#[test]
fn the_files_of_a_model_arrive_from_one_commit_and_are_not_asked_for_again() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Repository::sharded();
    let record = hub.pull(dir.path(), "hf://o/r").unwrap();
    assert_eq!(files(dir.path()), PULLED);
    assert_eq!(fs::read(dir.path().join("m-2.safetensors")).unwrap(), weights(2));
    let folder = record.folder.as_ref().unwrap();
    assert_eq!((folder.commit.as_deref(), folder.complete), (Some(COMMIT), true));
    assert_eq!(record.verification, Verification::Unverified);
    assert!(record.is_complete(dir.path(), &Address::parse("hf://o/r").unwrap()));
    assert!(!record.is_complete(dir.path(), &Address::parse("hf://o/r@v2").unwrap()));
    let targets = hub.targets();
    assert_eq!(targets[0], "/o/r/resolve/main/config.json");
    assert!(
        targets[1..].iter().all(|target| target.contains(COMMIT) || target.contains("cursor")),
        "{targets:?}"
    );
    assert!(hub.requests.borrow().iter().all(|request| request.bearer.is_some()));
    assert_eq!(hub.pull(dir.path(), "hf://o/r").unwrap(), record);
    assert_eq!(hub.targets().len(), targets.len());
    super::super::verify(dir.path(), &record, &mut ()).unwrap();
    // An older program reads the record as that of an address that it does not know.
    let text = fs::read_to_string(dir.path().join("download.json")).unwrap();
    assert!(text.contains("\"address\":\"hf://o/r\",\"files\":["), "{text}");
    fs::remove_file(dir.path().join("1_Pooling/config.json")).unwrap();
    assert!(!record.is_complete(dir.path(), &Address::parse("hf://o/r").unwrap()));
    assert_eq!(hub.pull(dir.path(), "hf://o/r").unwrap().files.len(), record.files.len());
}

#[test]
fn a_pull_that_is_cut_or_ends_is_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Repository::sharded();
    hub.cut.replace(Some(("m-1.safetensors".into(), 300)));
    let dying = Repository { patience: Some(8), ..hub.clone() };
    let error = dying.pull(dir.path(), "hf://o/r").unwrap_err().to_string();
    assert!(error.contains("attempts failed"), "{error}");
    assert!(files(dir.path()).contains(&"m-1.safetensors.part".to_owned()), "{:?}", files(dir.path()));
    // The commit is remembered: the branch may have moved since.
    let moved = Repository { commit: false, requests: Rc::default(), ..hub };
    let record = moved.pull(dir.path(), "hf://o/r").unwrap();
    assert_eq!(files(dir.path()), PULLED);
    assert_eq!(record.files.len(), 8);
    assert!(moved.targets().iter().all(|target| target.contains(COMMIT) || target.contains("cursor")));
    let from: Vec<u64> = moved.requests.borrow().iter().filter_map(|request| request.from).collect();
    assert_eq!(from, [300]);
    let requested = moved.targets().iter().filter(|target| target.ends_with("config.json")).count();
    assert_eq!(requested, 0, "what is here is not requested again: {:?}", moved.targets());
}

#[test]
fn a_server_without_a_list_is_asked_by_name() {
    let mut hub = Repository::sharded();
    (hub.pages, hub.commit) = (None, false);
    let dir = tempfile::tempdir().unwrap();
    let record = hub.pull(dir.path(), "hf://o/r@v1").unwrap();
    assert_eq!(files(dir.path()), PULLED);
    assert!(hub.targets().iter().skip(2).all(|target| target.starts_with("/o/r/resolve/v1/")));
    assert_eq!(record.folder.unwrap().commit, None);
    let single = hub.without(&["model.safetensors.index.json"]).with("model.safetensors", &weights(4));
    let dir = tempfile::tempdir().unwrap();
    single.pull(dir.path(), "hf://o/r").unwrap();
    assert!(dir.path().join("model.safetensors").exists() && !dir.path().join("m-1.safetensors").exists());
    let none = single.without(&["model.safetensors"]).refusal();
    assert!(none.contains("it has no model.safetensors"), "{none}");
}

#[test]
fn a_repository_that_is_no_folder_says_what_to_do() {
    let sharded = Repository::sharded();
    let weights =
        ["m-1.safetensors", "m-2.safetensors", "original/m-3.safetensors", "model.safetensors.index.json"];
    let pickles = sharded.clone().without(&weights);
    let text = pickles.refusal();
    assert!(text.contains("pickles (pytorch_model.bin)") && text.contains("safetensors"), "{text}");
    let gguf = pickles.clone().without(&["config.json"]).with("q/m-Q4.gguf", b"GGUF");
    assert!(gguf.refusal().ends_with("name one of them, such as hf://o/r/q/m-Q4.gguf"), "{}", gguf.refusal());
    let empty = Repository { pages: Some(vec![json!([])]), ..Repository::default() };
    assert!(empty.refusal().contains("it has no config.json"), "{}", empty.refusal());
    let missing = sharded.clone().without(&["m-2.safetensors"]);
    assert!(missing.refusal().contains("it has no m-2.safetensors"), "{}", missing.refusal());
    let page = sharded.with("m-2.safetensors", b"<html>please log in</html>");
    assert!(
        page.refusal().contains(&format!("hf://o/r@{COMMIT}/m-2.safetensors is not a safetensors file")),
        "{}",
        page.refusal()
    );
    let page = Repository::sharded().with("config.json", b"<html>please log in</html>");
    assert!(page.refusal().contains("hf://o/r/config.json is not a JSON file"), "{}", page.refusal());
}

#[test]
fn hostile_lists_and_indexes_are_refused() {
    for name in [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        ".x.safetensors",
        "download.json",
        "a b.safetensors",
    ] {
        let index = json!({"weight_map": {"a": name}}).to_string();
        let hub = Repository::sharded().with("model.safetensors.index.json", index.as_bytes());
        let text = hub.refusal();
        assert!(
            text.contains("model.safetensors.index.json names the file") && text.contains(name),
            "{text}"
        );
    }
    let many: serde_json::Map<String, Json> =
        (0..5000).map(|at| (at.to_string(), format!("{at}.safetensors").into())).collect();
    let many = json!({"weight_map": many}).to_string();
    let text = Repository::sharded().with("model.safetensors.index.json", many.as_bytes()).refusal();
    assert!(text.contains("names 5000 files, at most 4096"), "{text}");
    for index in ["{}", "[]", "{\"weight_map\": 1}"] {
        let text = Repository::sharded().with("model.safetensors.index.json", index.as_bytes()).refusal();
        assert!(text.contains("model.safetensors.index.json cannot be read"), "{text}");
    }
    let listing = |change: &dyn Fn(&mut Json)| {
        let mut hub = Repository::sharded();
        for entry in hub.pages.iter_mut().flatten().flat_map(|page| page.as_array_mut().unwrap()) {
            change(entry);
        }
        hub.refusal()
    };
    let is = |entry: &Json, path: &str| entry["path"] == path;
    let huge = listing(&|entry| {
        if is(entry, "m-1.safetensors") {
            entry["lfs"]["size"] = u64::MAX.into();
        }
    });
    assert!(huge.contains("m-1.safetensors has 18446744073709551615 bytes"), "{huge}");
    let full = listing(&|entry| {
        if is(entry, "m-1.safetensors") {
            entry["lfs"]["size"] = (1_u64 << 43).into();
        }
    });
    assert!(full.contains("the download needs 8388608 MiB"), "{full}");
    let small = listing(&|entry| {
        if is(entry, "tokenizer.json") {
            entry["size"] = (65_u64 << 20).into();
        }
    });
    assert!(small.contains("tokenizer.json has 68157440 bytes, at most 67108864"), "{small}");
    let wrong = listing(&|entry| {
        if is(entry, "m-2.safetensors") {
            entry["lfs"]["oid"] = format!("sha256:{}", "0".repeat(64)).into();
        }
    });
    assert!(wrong.contains(&sum(&weights(2))) && wrong.contains("expected 0000"), "{wrong}");
    let length = listing(&|entry| {
        if is(entry, "m-2.safetensors") {
            entry["lfs"]["size"] = 911.into();
        }
    });
    assert!(length.contains("the file has 910 bytes on the server, expected 911"), "{length}");
    let endless = Repository { pages: Some(vec![json!([]); 1002]), ..Repository::sharded() };
    assert!(endless.refusal().contains("more than 100000 files or 1000 pages"), "{}", endless.refusal());
    for page in [json!({}), json!([{"type": "file"}]), json!([{"type": 1, "path": "x"}])] {
        let text = Repository { pages: Some(vec![page]), ..Repository::sharded() }.refusal();
        assert!(text.contains("its list of files cannot be read"), "{text}");
    }
}

#[test]
fn links_to_the_next_page_are_read() {
    for (header, next) in [
        ("<https://a/b?c=1>; rel=\"next\"", Some("https://a/b?c=1")),
        ("</x>; rel=\"prev\", </y>; rel=\"next\"", Some("/y")),
        ("</x>; rel=\"prev\"", None),
        ("rel=\"next\"", None),
        ("", None),
    ] {
        assert_eq!(next_link(header), next, "{header}");
    }
}
