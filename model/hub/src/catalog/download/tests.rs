use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::rc::Rc;
use std::time::Duration;

use super::super::http::{Head, Request, Response};
use super::*;

/// Response of the server to one request.
enum Play {
    /// Sends the file from the requested position up to byte `upto`, with its ETag.
    File {
        etag: &'static str,
        body: Vec<u8>,
        upto: usize,
    },
    /// Sends the whole file and ignores ranges.
    NoRange {
        body: Vec<u8>,
    },
    Status(u16),
    Redirect(&'static str),
    Unreachable,
}

/// Responds with one entry of its list per request and records the requests.
#[derive(Default)]
struct Server {
    plays: RefCell<VecDeque<Play>>,
    requests: Rc<RefCell<Vec<Request>>>,
    paused: Rc<Cell<Duration>>,
}

/// A body that fails after its bytes.
struct Cut<'a>(&'a [u8], bool);

impl Read for Cut<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self.0.read(to)? {
            0 if self.1 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => Ok(n),
        }
    }
}

impl Http for Server {
    fn get(&self, request: &Request) -> io::Result<Response> {
        self.requests.borrow_mut().push(request.clone());
        let play = self.plays.borrow_mut().pop_front().expect("no more requests than played");
        let mut head = Head { status: 200, headers: Vec::new() };
        let mut header = |name: &str, value: String| head.headers.push((name.into(), value));
        let (body, cut) = match play {
            Play::Unreachable => return Err(io::ErrorKind::ConnectionRefused.into()),
            Play::Status(status) => {
                head.status = status;
                (Vec::new(), false)
            }
            Play::Redirect(to) => {
                header("location", to.into());
                head.status = 302;
                (Vec::new(), false)
            }
            Play::NoRange { body } => {
                header("content-length", body.len().to_string());
                (body, false)
            }
            Play::File { etag, body, upto } => {
                let same = request.if_range.as_deref() == Some(etag);
                let from = request.from.filter(|_| same).unwrap_or(0) as usize;
                header("etag", etag.into());
                header("content-length", (body.len() - from).to_string());
                if from > 0 {
                    header("content-range", format!("bytes {from}-{}/{}", body.len() - 1, body.len()));
                    head.status = 206;
                }
                (body[from..upto.max(from)].to_vec(), upto < body.len())
            }
        };
        let body: &'static [u8] = body.leak();
        Ok(Response { head, body: Box::new(Cut(body, cut)) })
    }

    fn pause(&self, time: Duration) {
        self.paused.set(self.paused.get() + time);
    }
}

struct World {
    dir: tempfile::TempDir,
    network: Network,
    requests: Rc<RefCell<Vec<Request>>>,
    paused: Rc<Cell<Duration>>,
}

const ADDRESS: &str = "https://a.example/m.gguf";

fn world(plays: impl IntoIterator<Item = Play>) -> World {
    let server = Server { plays: RefCell::new(plays.into_iter().collect()), ..Server::default() };
    let (requests, paused) = (server.requests.clone(), server.paused.clone());
    let hub = Hub { token: Some("secret".into()), ..Hub::default() };
    let network = Network { http: Box::new(server), hub, plain: PlainHttp::Loopback };
    World { dir: tempfile::tempdir().unwrap(), network, requests, paused }
}

impl World {
    fn fetch(&self, address: &str, sha256: &[&str]) -> Result<Record, Error> {
        let sha256: Vec<String> = sha256.iter().map(|sha256| (*sha256).to_owned()).collect();
        let verification = if sha256.is_empty() { Verification::Unverified } else { Verification::Given };
        let address = Address::parse(address).unwrap();
        fetch(
            self.dir.path(),
            &address,
            ExpectedChecksums { sha256: &sha256, verification },
            &self.network,
            &mut (),
        )
    }

    fn files(&self) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = fs::read_dir(self.dir.path()).unwrap().map(name).collect();
        names.sort();
        names
    }

    /// Keeps the directory and replaces the server.
    fn then(self, plays: impl IntoIterator<Item = Play>) -> Self {
        Self { dir: self.dir, ..world(plays) }
    }
}

fn model(bytes: usize) -> Vec<u8> {
    GGUF.iter().copied().chain((0..bytes - 4).map(|at| (at * 31 % 251) as u8)).collect()
}

fn sum(body: &[u8]) -> String {
    let mut hash = Hash::default();
    hash.write_all(body).unwrap();
    hash.hex()
}

fn whole(body: &[u8]) -> Play {
    Play::File { etag: "\"1\"", body: body.into(), upto: body.len() }
}

#[test]
fn a_download_is_whole_recorded_and_not_repeated() {
    let body = model(1000);
    let world = world([whole(&body)]);
    let record = world.fetch(ADDRESS, &[]).unwrap();
    assert_eq!(record.verification, Verification::Unverified);
    assert_eq!(record.files, [RecordedFile { name: "m.gguf".into(), bytes: 1000, sha256: sum(&body) }]);
    assert_eq!(fs::read(world.dir.path().join("m.gguf")).unwrap(), body);
    assert_eq!(world.files(), [".lock", "download.json", "m.gguf"]);
    assert_eq!(
        world.fetch(ADDRESS, &[]).unwrap(),
        record,
        "from the record: the server would not answer again"
    );
    assert_eq!(Record::read(world.dir.path()), Some(record));
    assert_eq!(world.requests.borrow()[0].bearer, None, "the hub's token is the hub's");
    // A checksum given later verifies the existing file, or is reported as a mismatch.
    assert_eq!(world.fetch(ADDRESS, &[&sum(&body)]).unwrap().verification, Verification::Given);
    let error = world.fetch(ADDRESS, &[&"0".repeat(64)]).unwrap_err();
    assert!(matches!(&error, Error::Catalog(CatalogError::Digest { bytes: 1000, .. })), "{error}");
}

#[test]
fn a_cut_connection_is_gone_on_with() {
    let body = model(1000);
    let cut = |upto| Play::File { etag: "\"1\"", body: body.clone(), upto };
    let world = world([cut(300), Play::Unreachable, Play::Status(503), cut(700), whole(&body)]);
    let record = world.fetch(ADDRESS, &[&sum(&body)]).unwrap();
    assert_eq!((record.bytes(), record.verification), (1000, Verification::Given));
    let from: Vec<_> = world.requests.borrow().iter().map(|request| request.from).collect();
    assert_eq!(from, [None, Some(300), Some(300), Some(300), Some(700)]);
    assert_eq!(world.paused.get(), Duration::from_secs(1 + 2 + 4 + 1));
    assert_eq!(fs::read(world.dir.path().join("m.gguf")).unwrap(), body);
}

#[test]
fn a_download_of_an_earlier_process_is_resumed() {
    let body = model(1000);
    let failing = || (0..6).map(|_| Play::Unreachable);
    let first =
        world([Play::File { etag: "\"1\"", body: body.clone(), upto: 400 }].into_iter().chain(failing()));
    let error = first.fetch(ADDRESS, &[]).unwrap_err();
    assert!(error.to_string().contains("attempts failed"), "{error}");
    assert_eq!(first.files(), [".lock", "m.gguf.part", "m.gguf.part.json"]);
    // Bytes after the recorded length are dropped: they may not have reached the disk.
    let mut partial = File::options().append(true).open(first.dir.path().join("m.gguf.part")).unwrap();
    partial.write_all(b"after the last mark").unwrap();
    let second = first.then([whole(&body)]);
    assert_eq!(second.fetch(ADDRESS, &[]).unwrap().files[0].sha256, sum(&body));
    assert_eq!(second.requests.borrow()[0].from, Some(400));
}

#[test]
fn a_file_that_has_changed_starts_over() {
    let (old, new) = (model(1000), model(1200));
    let world = world([
        Play::File { etag: "\"old\"", body: old, upto: 400 },
        Play::File { etag: "\"new\"", body: new.clone(), upto: 1200 },
    ]);
    assert_eq!(world.fetch(ADDRESS, &[]).unwrap().files[0].sha256, sum(&new));
    assert_eq!(world.requests.borrow()[1].if_range.as_deref(), Some("\"old\""));
}

#[test]
fn a_server_without_ranges_sends_all_of_it_again() {
    let body = model(1000);
    let cut = Play::File { etag: "\"1\"", body: body.clone(), upto: 400 };
    let world = world([cut, Play::NoRange { body: body.clone() }]);
    assert_eq!(world.fetch(ADDRESS, &[&sum(&body)]).unwrap().bytes(), 1000);
}

#[test]
fn another_file_than_the_given_one_is_refused_and_removed() {
    let world = world([whole(&model(1000))]);
    let error = world.fetch(ADDRESS, &[&"0".repeat(64)]).unwrap_err();
    assert!(error.to_string().contains(&sum(&model(1000))), "{error}");
    assert_eq!(world.files(), [".lock"], "nothing that could be taken for the model");
    let error = world.fetch(ADDRESS, &["a", "b"]).unwrap_err();
    assert!(matches!(error, Error::Catalog(CatalogError::Checksums { given: 2, files: 1, .. })), "{error}");
}

#[test]
fn a_page_is_no_model() {
    for body in [b"<html>please log in</html>".to_vec(), b"GG".to_vec(), Vec::new()] {
        let world = world([whole(&body)]);
        let error = world.fetch(ADDRESS, &[]).unwrap_err();
        assert!(matches!(error, Error::Catalog(CatalogError::NoModel { .. })), "{error}");
        assert_eq!(world.files(), [".lock"]);
    }
}

#[test]
fn a_set_comes_file_by_file_and_a_complete_file_is_kept() {
    let (one, two) = (model(500), model(600));
    let set = "hf://o/r/b-00002-of-00002.gguf";
    let first = world([whole(&one), Play::Status(404)]);
    let error = first.fetch(set, &[]).unwrap_err();
    assert!(error.to_string().contains("b-00002-of-00002.gguf"), "{error}");
    assert!(
        !Record::read(first.dir.path()).unwrap().is_complete(first.dir.path(), &Address::parse(set).unwrap())
    );
    let second = first.then([Play::Redirect("https://cdn.example/x"), whole(&two)]);
    let record = second.fetch(set, &[&sum(&one), &sum(&two)]).unwrap();
    assert_eq!((record.files.len(), record.bytes()), (2, 1100));
    assert!(record.is_complete(second.dir.path(), &Address::parse(set).unwrap()));
    let requests = second.requests.borrow();
    assert_eq!(requests[0].url.target(), "/o/r/resolve/main/b-00002-of-00002.gguf");
    assert_eq!((requests[0].bearer.as_deref(), requests[1].bearer.as_deref()), (Some("secret"), None));
    verify(second.dir.path(), &record, &mut ()).unwrap();
    fs::write(second.dir.path().join("b-00001-of-00002.gguf"), model(501)).unwrap();
    assert!(!record.is_complete(second.dir.path(), &Address::parse(set).unwrap()));
    let error = verify(second.dir.path(), &record, &mut ()).unwrap_err();
    assert!(matches!(error, Error::Catalog(CatalogError::Digest { bytes: 501, .. })), "{error}");
}

#[test]
fn a_full_disk_is_reported_before_the_download() {
    struct Huge;
    impl Http for Huge {
        fn get(&self, _: &Request) -> io::Result<Response> {
            let headers = vec![("content-length".to_owned(), (1u64 << 43).to_string())];
            Ok(Response { head: Head { status: 200, headers }, body: Box::new(io::empty()) })
        }
    }
    let world = World { network: Network { http: Box::new(Huge), ..world([]).network }, ..world([]) };
    let error = world.fetch(ADDRESS, &[]).unwrap_err();
    assert!(
        matches!(error, Error::Catalog(CatalogError::NoRoom { needed, .. }) if needed == 1 << 43),
        "{error}"
    );
}

#[test]
fn damaged_notes_are_passed_over() {
    let body = model(1000);
    let world = world([whole(&body)]);
    fs::write(world.dir.path().join("download.json"), "{\"files\":").unwrap();
    fs::write(world.dir.path().join("m.gguf.part"), "GG").unwrap();
    fs::write(
        world.dir.path().join("m.gguf.part.json"),
        r#"{"have":5,"total":1000,"validator":"\"1\"","told":null}"#,
    )
    .unwrap();
    assert_eq!(world.fetch(ADDRESS, &[]).unwrap().files[0].sha256, sum(&body));
    assert_eq!(world.requests.borrow()[0].from, None, "less is here than the note says");
}
