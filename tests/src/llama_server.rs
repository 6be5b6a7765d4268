//! A real llama.cpp server, from a Python package.

use crate::binary;
use anyhow::{Context, ensure};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A running server. Killed when dropped.
pub struct LlamaServer {
    process: Child,
    port: u16,
}

/// Program and arguments of a server with this model on this port of the loopback interface.
pub fn command(model: &Path, port: u16) -> anyhow::Result<Vec<PathBuf>> {
    let python = binary::target().join("engines-venv/bin/python");
    ensure!(python.exists(), "{} is missing: run `./test setup`", python.display());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/llama_server.py");
    Ok(vec![python, script, model.to_owned(), port.to_string().into()])
}

/// A command in which `{model}` and `{port}` stand for the model's file and the server's port.
pub fn placeholder_command() -> anyhow::Result<String> {
    let command = shell_command(Path::new("MODEL"), 0)?;
    Ok(command.replace("'MODEL' '0'", "{model} {port}"))
}

/// The same as one line for a shell.
pub fn shell_command(model: &Path, port: u16) -> anyhow::Result<String> {
    let words = command(model, port)?;
    let words: Vec<String> = words.iter().map(|word| format!("'{}'", word.display())).collect();
    Ok(format!("exec {}", words.join(" ")))
}

impl LlamaServer {
    /// Starts a server and waits until it listens.
    pub fn start(model: &Path, port: u16) -> anyhow::Result<Self> {
        let command = command(model, port)?;
        let (program, arguments) = command.split_first().context("no program")?;
        let mut process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().context("no stdout")?).read_line(&mut line)?;
        let server = Self { process, port };
        ensure!(line.contains(&port.to_string()), "it does not listen: {line:?}");
        Ok(server)
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn kill(&mut self) {
        // Both fail only if the process has already exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for LlamaServer {
    fn drop(&mut self) {
        self.kill();
    }
}
