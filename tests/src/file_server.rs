//! A file server for download tests: ranges, ETags, and connections cut on request.

use crate::fixtures::sha256;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Serves a directory until the process ends.
#[derive(Debug)]
pub struct FileServer {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    dir: PathBuf,
    /// Bytes of a body after which the connection is cut; `u64::MAX` for never.
    cut_after: AtomicU64,
    requests: Mutex<Vec<Request>>,
}

/// A received request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Path and query.
    pub target: String,
    /// First byte requested.
    pub from: Option<u64>,
}

impl FileServer {
    /// Listens on a port of the loopback interface.
    ///
    /// # Errors
    /// I/O errors.
    pub fn start(dir: &Path) -> io::Result<Self> {
        Self::start_on(Ipv4Addr::LOCALHOST.into(), dir)
    }

    /// Listens on a port of an interface that other hosts can reach.
    ///
    /// # Errors
    /// I/O errors.
    pub fn start_on(ip: std::net::IpAddr, dir: &Path) -> io::Result<Self> {
        let listener = TcpListener::bind((ip, 0))?;
        let address = listener.local_addr()?;
        let state =
            State { dir: dir.into(), cut_after: AtomicU64::new(u64::MAX), requests: Mutex::default() };
        let state = Arc::new(state);
        let served = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = served.clone();
                // A client that disconnects is not a server error.
                std::thread::spawn(move || state.answer(stream).ok());
            }
        });
        Ok(Self { address, state })
    }

    /// `http://` and the listen address.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Cuts each later body after `bytes` bytes.
    pub fn cut_after(&self, bytes: u64) {
        self.state.cut_after.store(bytes, Ordering::Relaxed);
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.state.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl State {
    fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        let target = first.split(' ').nth(1).unwrap_or_default().to_owned();
        let (mut from, mut if_range) = (None, None);
        for line in lines {
            let line = line?;
            if line.is_empty() {
                break;
            }
            let Some((name, value)) = line.split_once(": ") else { continue };
            match name.to_ascii_lowercase().as_str() {
                "range" => from = value.trim_start_matches("bytes=").trim_end_matches('-').parse().ok(),
                "if-range" => if_range = Some(value.to_owned()),
                _ => {}
            }
        }
        let path = self.dir.join(target.split('?').next().unwrap_or_default().trim_start_matches('/'));
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(Request { target, from });
        let Ok(mut file) = File::open(path) else {
            return write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
        };
        let metadata = file.metadata()?;
        let length = metadata.len();
        let changed = metadata.modified()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let etag = format!("\"{length}-{}\"", changed.as_nanos());
        let same = if_range.is_none_or(|expected| expected == etag);
        let from = from.filter(|from| same && *from < length).unwrap_or(0);
        let (status, range) = match from {
            0 => ("200 OK", String::new()),
            _ => ("206 Partial Content", format!("Content-Range: bytes {from}-{}/{length}\r\n", length - 1)),
        };
        let left = length - from;
        write!(stream, "HTTP/1.1 {status}\r\nETag: {etag}\r\n{range}Content-Length: {left}\r\n\r\n")?;
        file.seek(SeekFrom::Start(from))?;
        io::copy(&mut file.take(left.min(self.cut_after.load(Ordering::Relaxed))), &mut stream)?;
        Ok(())
    }
}

/// Adds `folder` to a served directory as the repository `name` of a hub, with the hub's list of its files.
///
/// # Errors
/// I/O errors.
pub fn add_repository(served: &Path, name: &str, folder: &Path) -> anyhow::Result<()> {
    let files = served.join(name).join("resolve/main");
    let list = served.join("api/models").join(name).join("tree");
    std::fs::create_dir_all(&files)?;
    std::fs::create_dir_all(&list)?;
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_file() {
            std::fs::copy(&path, files.join(&name))?;
            let bytes = std::fs::metadata(&path)?.len();
            let mut entry = serde_json::json!({"type": "file", "oid": "", "size": bytes, "path": name});
            if name.ends_with(".safetensors") {
                entry["lfs"] = serde_json::json!({"oid": sha256(&path)?, "size": bytes});
            }
            entries.push(entry);
        }
    }
    std::fs::write(list.join("main"), serde_json::to_vec(&entries)?)?;
    Ok(())
}
