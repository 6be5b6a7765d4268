//! Finds and runs the `kvasir` binary.

use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// The root of the workspace.
pub fn workspace() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.parent().unwrap_or(crate_dir).to_owned()
}

/// Directory of build products and logs: `CARGO_TARGET_DIR`, else `target/` in the workspace.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// The binary under test: `KVASIR_BIN`, else the newest of the release and the debug build.
pub fn kvasir() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os("KVASIR_BIN") {
        return Ok(PathBuf::from(named));
    }
    let built = ["release", "debug"].map(|profile| target().join(profile).join("kvasir"));
    let modified = |path: &PathBuf| Some((path.metadata().ok()?.modified().ok()?, path.clone()));
    let newest = built.iter().filter_map(modified).max();
    newest.map(|(_, path)| path).context("no kvasir binary: run `cargo build --release`, or set KVASIR_BIN")
}

/// A binary whose workers can interpret a GPU's kernels, with the feature `ptx-sim`: `KVASIR_SIM_BIN`, else the debug build.
pub fn simulating() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os("KVASIR_SIM_BIN") {
        return Ok(PathBuf::from(named));
    }
    let built = target().join("debug/kvasir");
    if !built.is_file() {
        bail!("no {}: run `cargo build --features ptx-sim`, or set KVASIR_SIM_BIN", built.display());
    }
    Ok(built)
}

/// `kvasir` with `arguments`, nothing on its stdin.
pub fn command(arguments: &[&str]) -> anyhow::Result<Command> {
    Ok(command_of(&kvasir()?, arguments))
}

/// A binary of another version with `arguments`, nothing on its stdin.
pub fn command_of(binary: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary);
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs `kvasir` to its end, with any exit code.
pub fn run(arguments: &[&str]) -> anyhow::Result<Output> {
    let output = command(arguments)?.output();
    output.with_context(|| format!("kvasir {}", arguments.join(" ")))
}

/// Runs `kvasir`, which must succeed, and returns its stdout.
pub fn stdout(arguments: &[&str]) -> anyhow::Result<String> {
    let output = run(arguments)?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("kvasir {} ended with {}:\n{stderr}", arguments.join(" "), output.status);
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Path of a catalog model, pulled if it is not in the cache yet.
pub fn catalog_model(name: &str) -> anyhow::Result<PathBuf> {
    let path = stdout(&["models", "pull", name])?;
    Ok(PathBuf::from(path.trim()))
}

/// Time limit for a node to become ready or respond; generous, for loaded machines.
pub const NODE_TIMEOUT: Duration = Duration::from_secs(60);
