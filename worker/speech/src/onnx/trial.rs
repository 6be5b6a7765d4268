//! Tries a model file in another process before this one loads it.
//!
//! The runtime evaluates constants while it loads, in whatever size the file claims: a file of a kilobyte may
//! request a tensor of exabytes, which would end the process. So another process first loads the file and
//! runs it once, with limits of memory and CPU time. If that process is ended or panics, the file is refused.

use super::SUFFIX;
use rten::{DataType, Dimension, Model, RunOptions, ThreadPool, Value, ValueOrView, ValueType};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

/// Bytes of memory for a trial, plus [`MEMORY_OF_FILE`] times the file's bytes.
const MEMORY: u64 = 4 << 30;
const MEMORY_OF_FILE: u64 = 8;
/// Seconds of CPU time for a trial, plus one for each [`BYTES_OF_SECOND`] bytes of the file.
const SECONDS: u64 = 60;
const BYTES_OF_SECOND: u64 = 32 << 20;

/// Limits of the trial process, which it sets itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrialLimits {
    /// Bytes of address space.
    pub memory: u64,
    /// Seconds of CPU time.
    pub seconds: u64,
}

/// A command that takes the file as its last argument, sets the limits of [`limits`] and runs [`attempt`].
#[derive(Debug)]
pub struct Program {
    pub path: PathBuf,
    /// Arguments before the file.
    pub arguments: Vec<OsString>,
}

static PROGRAM: OnceLock<Program> = OnceLock::new();

/// Sets the program that tries all files of this process. Only the first call has an effect. Without a
/// program, files are loaded untried.
pub fn tried_by(program: Program) {
    PROGRAM.get_or_init(|| program);
}

/// Limits of the trial of a file.
pub fn limits(file: &Path) -> TrialLimits {
    // A missing file counts as empty.
    let bytes = std::fs::metadata(file).map_or(0, |file| file.len());
    TrialLimits {
        memory: MEMORY.saturating_add(bytes.saturating_mul(MEMORY_OF_FILE)),
        seconds: SECONDS + bytes / BYTES_OF_SECOND,
    }
}

/// Tries a file, if a trial program is set.
///
/// # Errors
/// Why the file must not be loaded here.
pub(super) fn tried(file: &Path) -> Result<(), String> {
    PROGRAM.get().map_or(Ok(()), |program| run(program, file))
}

fn run(program: &Program, file: &Path) -> Result<(), String> {
    let mut command = Command::new(&program.path);
    command.args(&program.arguments).arg(file);
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let status =
        status.map_err(|error| format!("it cannot be tried by {}: {error}", program.path.display()))?;
    let TrialLimits { memory, seconds } = limits(file);
    match status.success() {
        true => Ok(()),
        false => Err(format!(
            "loading it and running it once, by another process with {memory} bytes of memory and {seconds} s of a CPU, \
             ends that process ({status})"
        )),
    }
}

/// The trial process: it loads the file and runs it once with ones and zeros. Only termination matters; the
/// actual load reports errors in the file.
///
/// # Errors
/// If the file's extension is not `.onnx`. A file that cannot be loaded is not an error.
pub fn attempt(file: &Path) -> io::Result<()> {
    if file.extension().is_none_or(|extension| extension != SUFFIX) {
        return Err(io::Error::other(format!("a file is called *.{SUFFIX}")));
    }
    let Ok(bytes) = std::fs::read(file) else { return Ok(()) };
    let Ok(model) = super::load(file, &bytes) else { return Ok(()) };
    let inputs: Option<Vec<_>> =
        model.input_ids().iter().map(|id| Some((*id, values(&model, *id)?))).collect();
    if let Some(inputs) = inputs {
        let options = RunOptions::default().with_thread_pool(Some(Arc::new(ThreadPool::with_num_threads(1))));
        let _ = model.run(inputs, model.output_ids(), Some(options));
    }
    Ok(())
}

/// Ones for floats, of which some are divisors, and zeros for integers, in the input's shape; symbolic
/// dimensions are 1. `None` if the shape is unknown.
fn values(model: &Model, id: rten::NodeId) -> Option<ValueOrView<'static>> {
    let input = model.node_info(id)?;
    let dim = |dim: Dimension| match dim {
        Dimension::Fixed(size) => size,
        Dimension::Symbolic(_) => 1,
    };
    let shape: Vec<usize> = input.shape()?.into_iter().map(dim).collect();
    let len = shape.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim))?;
    match input.dtype()? {
        ValueType::Tensor(DataType::Float) => Value::from_shape(shape, vec![1f32; len]).ok(),
        ValueType::Tensor(DataType::Int32) => Value::from_shape(shape, vec![0i32; len]).ok(),
        _ => None,
    }
    .map(ValueOrView::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Program {
        Program { path: "/bin/sh".into(), arguments: vec!["-c".into(), script.into()] }
    }

    #[test]
    fn a_process_that_is_ended_or_fails_refuses_the_file() {
        let file = Path::new("/nonexistent/model.onnx");
        assert_eq!(run(&shell("test $0 = /nonexistent/model.onnx"), file), Ok(()));
        for script in ["exit 101", "kill -ABRT $$", "kill -XCPU $$"] {
            let why = run(&shell(script), file).unwrap_err();
            assert!(why.contains("4294967296 bytes") && why.contains("60 s"), "{why}");
        }
        let none = Program { path: "/nonexistent/program".into(), arguments: Vec::new() };
        assert!(run(&none, file).unwrap_err().contains("/nonexistent/program"));
    }

    #[test]
    fn networks_of_the_tests_are_tried() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/operations");
        let mut tried = 0;
        for folder in ["vad", "turn_detection"] {
            let files = std::fs::read_dir(fixtures.join(folder)).unwrap().map(|entry| entry.unwrap().path());
            for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "onnx")) {
                let model = Model::load_file(&file).unwrap();
                assert!(
                    model.input_ids().iter().all(|id| values(&model, *id).is_some()),
                    "{}",
                    file.display()
                );
                attempt(&file).unwrap();
                tried += 1;
            }
        }
        assert_eq!(tried, 2);
        attempt(Path::new("/nonexistent/model.onnx")).unwrap();
        assert!(attempt(Path::new("/nonexistent/model.gguf")).is_err());
    }
}
