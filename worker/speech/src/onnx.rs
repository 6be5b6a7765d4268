//! Runs models in the ONNX format with rten: pure Rust, CPU only. The backend's name is `onnx`.

mod constants;
mod rewrite;
mod sizes;
pub mod trial;

use crate::Error;
pub(crate) use constants::{Constants, constants};
use kernels::denormals::FlushDenormals;
use kernels::registry::Refusal;
use rten::{Dimension, Model, RunOptions, ThreadPool, Value};
pub use rten::{NodeId, ValueOrView};
pub use rten_tensor::Tensor;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The backend's name, in the environment and in logs.
pub const NAME: &str = "onnx";
/// Rank of the backend: lower than this engine's own kernels.
pub const RANK: i32 = 10;
const SUFFIX: &str = "onnx";

/// A loaded model. Runs may overlap; they share the thread pool that it was loaded with.
pub struct Onnx {
    path: PathBuf,
    bytes: u64,
    model: Model,
    threads: Arc<ThreadPool>,
}

impl Onnx {
    /// Loads a model whose runs use `threads` threads, on these CPUs if any are given.
    ///
    /// # Errors
    /// [`Error::Artefact`] if the file is not a model or has an unknown operator. System errors of the
    /// threads.
    pub fn load(path: &Path, threads: usize, cpus: Option<&[usize]>) -> Result<Self, Error> {
        let fault = |reason: String| Error::Artefact { path: path.to_owned(), reason };
        let file = std::fs::read(path);
        let file =
            file.map_err(|source| Error::Io { what: format!("cannot read {}", path.display()), source })?;
        sizes::check(&file, path.parent().unwrap_or(Path::new(""))).map_err(fault)?;
        let bytes = file.len() as u64;
        trial::tried(path).map_err(fault)?;
        let model = load(path, &file).map_err(fault)?;
        let threads = Arc::new(started_on(threads, cpus)?);
        Ok(Self { path: path.to_owned(), bytes, model, threads })
    }

    pub fn file_bytes(&self) -> u64 {
        self.bytes
    }

    /// An input or output by name.
    ///
    /// # Errors
    /// [`Error::Artefact`] if the model has none of this name.
    pub fn node(&self, name: &str) -> Result<NodeId, Error> {
        self.find(name).ok_or_else(|| self.fault(format!("it has no {name:?}")))
    }

    /// An input or output by name, or `None`.
    pub fn find(&self, name: &str) -> Option<NodeId> {
        let mut ends = self.model.input_ids().iter().chain(self.model.output_ids());
        self.model.find_node(name).filter(|node| ends.any(|end| end == node))
    }

    /// The only input and the only output.
    ///
    /// # Errors
    /// [`Error::Artefact`] if the model has more or fewer.
    pub fn only_nodes(&self) -> Result<(NodeId, NodeId), Error> {
        match (self.model.input_ids(), self.model.output_ids()) {
            ([input], [output]) => Ok((*input, *output)),
            (inputs, outputs) => {
                let found = format!("{} inputs and {} outputs", inputs.len(), outputs.len());
                Err(self.fault(format!("it has {found}, must be one of each")))
            }
        }
    }

    /// Name of an input or output.
    pub fn name(&self, node: NodeId) -> Option<&str> {
        self.model.node_info(node)?.name()
    }

    /// Shape of an input or output by the file; `None` for a size that varies.
    pub fn shape(&self, node: NodeId) -> Option<Vec<Option<usize>>> {
        let shape = self.model.node_info(node)?.shape()?;
        let fixed = |size: Dimension| match size {
            Dimension::Fixed(size) => Some(size),
            Dimension::Symbolic(_) => None,
        };
        Some(shape.into_iter().map(fixed).collect())
    }

    /// Runs the model and returns these outputs.
    ///
    /// # Errors
    /// [`Error::Artefact`] if the model does not accept the inputs.
    pub fn run<const N: usize>(
        &self,
        inputs: Vec<(NodeId, ValueOrView<'_>)>,
        outputs: [NodeId; N],
    ) -> Result<[Value; N], Error> {
        let options = RunOptions::default().with_thread_pool(Some(Arc::clone(&self.threads)));
        let values = self.model.run_n(inputs, outputs, Some(options));
        values.map_err(|error| self.fault(error.to_string()))
    }

    /// Error for a model that does not behave as expected.
    pub fn fault(&self, reason: impl Into<String>) -> Error {
        Error::Artefact { path: self.path.clone(), reason: reason.into() }
    }
}

/// Loads a file with these bytes, which were checked.
fn load(path: &Path, file: &[u8]) -> Result<Model, String> {
    let model = match rewrite::rewritten(file)? {
        Some(rewritten) => Model::load(rewritten),
        None => Model::load_file(path),
    };
    model.map_err(|error| error.to_string())
}

/// Starts threads that flush denormal floats to zero. They inherit this, and their CPUs, from the thread that
/// starts them.
fn started_on(threads: usize, cpus: Option<&[usize]>) -> Result<ThreadPool, Error> {
    let set = cpus.map(|cpus| {
        let mut set = CpuSet::new();
        for cpu in cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU) {
            set.set(*cpu);
        }
        set
    });
    let start = move || -> std::io::Result<ThreadPool> {
        let _flush = FlushDenormals::new();
        set.map_or(Ok(()), |set| sched_setaffinity(None, &set))?;
        Ok(ThreadPool::with_num_threads(threads))
    };
    let started = std::thread::spawn(start).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let context =
        || cpus.map_or("cannot start threads".to_owned(), |cpus| format!("cannot run on CPUs {cpus:?}"));
    started.map_err(|source| Error::Io { what: context(), source })
}

/// The ONNX files of a folder in the order of their names.
pub(crate) fn onnx_files(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_onnx = |path: &PathBuf| path.extension().is_some_and(|end| end == SUFFIX) && path.is_file();
    let mut files: Vec<_> = files.filter(is_onnx).collect();
    files.sort();
    files
}

/// Name of a file without its extension; empty if it is not UTF-8.
pub(crate) fn file_stem(path: &Path) -> &str {
    path.file_stem().and_then(|name| name.to_str()).unwrap_or_default()
}

/// The only file of `dir` whose name starts with `begins` and ends with `.onnx`.
///
/// # Errors
/// [`Refusal::Artefact`] if there is none, or more than one.
pub fn the_file(dir: &Path, begins: &str) -> Result<PathBuf, Refusal> {
    let fits = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(begins) && name.ends_with(".onnx")) && path.is_file()
    };
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files = files.filter(fits);
    let refuse = |problem: &str| Refusal::Artefact {
        reason: format!("{problem} {begins}*.onnx in {}", dir.display()),
    };
    match (files.next(), files.next()) {
        (Some(path), None) => Ok(path),
        (None, _) => Err(refuse("there is no")),
        (Some(_), Some(_)) => Err(refuse("there is more than one")),
    }
}
