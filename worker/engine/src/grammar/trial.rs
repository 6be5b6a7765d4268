//! Tries a grammar in another process before it is compiled in this one.
//!
//! For some grammars the library's time and memory are unbounded: an automaton for all strings that match
//! fifty patterns at once, from 2 KiB of schema, allocates a hundred MB a second without end. A thread cannot
//! be stopped; a process can. A grammar that compiles there in time also compiles here, because the same
//! library builds the same automata from the same text. Only the vocabulary differs. It affects only masks,
//! whose steps are limited.

use super::CPU_WAIT;
use super::loosen::build;
use super::vocabulary::{self, Names};
use crate::progress::spawn;
use proto::message::{GrammarSyntax, MAX_GRAMMAR_BYTES};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Maximum bytes that the other process reads: a grammar and the names of tokens.
const MAX_TASK: u64 = 16 * MAX_GRAMMAR_BYTES as u64;

/// A command that runs [`attempt`] on its standard input. It must be ended by a signal once it has used
/// [`super::COMPILE_TIME`] of CPU time.
#[derive(Debug)]
pub struct Program {
    pub path: PathBuf,
    pub arguments: Vec<OsString>,
}

/// The trial program of this process.
static PROGRAM: OnceLock<Program> = OnceLock::new();

/// Sets the program that tries all grammars of this process. Only the first call has an effect. Without a
/// program, grammars are compiled untried; that is only for processes that compile their own grammars.
pub fn tried_by(program: Program) {
    PROGRAM.get_or_init(|| program);
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Tried {
    /// There is no trial program.
    Untried,
    /// The trial ended in time. Whether the grammar is valid is not known.
    Ended,
    /// The trial was ended because it used too much time or memory.
    TooMuch,
    /// The trial did not get enough CPU time to finish.
    Unfinished,
    /// The trial could not be run.
    Failed(String),
}

#[derive(Serialize, Deserialize)]
struct Task {
    syntax: GrammarSyntax,
    text: String,
    names: Names,
}

/// Tries a grammar of a model with these token names. Blocks the calling thread for at most [`CPU_WAIT`].
pub(super) fn try_grammar(syntax: GrammarSyntax, text: &str, names: &Names) -> Tried {
    let Some(program) = PROGRAM.get() else { return Tried::Untried };
    let task = Task { syntax, text: text.to_owned(), names: names.clone() };
    match serde_json::to_vec(&task).map_err(io::Error::from).and_then(|task| run(program, task, CPU_WAIT)) {
        Ok(tried) => tried,
        Err(error) => Tried::Failed(format!("{}: {error}", program.path.display())),
    }
}

fn run(program: &Program, task: Vec<u8>, timeout: Duration) -> io::Result<Tried> {
    let mut command = Command::new(&program.path);
    command.args(&program.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = Ended(command.spawn()?);
    let (input, output) = (child.0.stdin.take(), child.0.stdout.take());
    let (ended_tx, ended_rx) = channel();
    spawn("kvasir-trial", move || {
        // A child may end before it has read everything. The write then fails, and the exit status counts.
        drop(input.map(|mut input| input.write_all(&task)));
        let closed = output.map(|mut output| io::copy(&mut output, &mut io::sink()));
        // The receiver is gone if the wait timed out.
        let _ = ended_tx.send(closed.is_some());
    })
    .map_err(|error| io::Error::other(error.to_string()))?;
    if ended_rx.recv_timeout(timeout).is_err() {
        return Ok(Tried::Unfinished);
    }
    let status = child.0.wait()?;
    Ok(match status.code() {
        Some(0) => Tried::Ended,
        Some(code) => Tried::Failed(format!("it ends with {code}")),
        // Ended by a signal: CPU time or memory ran out.
        None => Tried::TooMuch,
    })
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Fails if the child has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the trial process does with its input.
///
/// # Errors
/// Input that cannot be read or is not a task. A grammar that does not compile is not an error.
pub fn attempt(input: impl Read) -> io::Result<()> {
    let mut task = Vec::new();
    input.take(MAX_TASK).read_to_end(&mut task)?;
    let Task { syntax, text, names } = serde_json::from_slice(&task)?;
    let factory = vocabulary::byte_factory(&names).map_err(io::Error::other)?;
    // Only termination matters; the result is ignored.
    drop(build(&factory, syntax, &text));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn shell(script: &str) -> Program {
        Program { path: "/bin/sh".into(), arguments: vec!["-c".into(), script.into()] }
    }

    #[test]
    fn a_process_that_continues_is_killed_and_its_end_is_reported() {
        const TIMEOUT: Duration = Duration::from_secs(60);
        let task = || vec![b'x'; 1 << 20];
        let tried = |script: &str| run(&shell(script), task(), TIMEOUT).unwrap();
        assert_eq!(tried("cat > /dev/null"), Tried::Ended);
        assert_eq!(tried("exit 0"), Tried::Ended, "it need not read");
        assert_eq!(tried("exit 3"), Tried::Failed("it ends with 3".into()));
        assert_eq!(tried("kill -PROF $$"), Tried::TooMuch);
        // A process that gets no CPU time has not used too much of it.
        let since = Instant::now();
        let stopped = run(&shell("kill -STOP $$"), task(), Duration::from_millis(200)).unwrap();
        assert_eq!(stopped, Tried::Unfinished);
        assert!(since.elapsed() < TIMEOUT / 6, "{:?}", since.elapsed());
        let none = Program { path: "/nonexistent/program".into(), arguments: Vec::new() };
        assert!(run(&none, Vec::new(), TIMEOUT).is_err());
    }

    #[test]
    fn a_trial_uses_the_same_token_names() {
        let names =
            Names { tokens: 300, named: vec![(258, "<tool>".into()), (259, "</s>".into())], ends: vec![259] };
        let task = |text: &str| {
            let task = Task { syntax: GrammarSyntax::Lark, text: text.to_owned(), names: names.clone() };
            serde_json::to_vec(&task).unwrap()
        };
        let factory = vocabulary::byte_factory(&names).unwrap();
        for (text, good) in [
            ("start: <tool> \"x\"", true),
            ("start: <[258]> \"x\"", true),
            ("start: <other> \"x\"", false),
            ("start: <[300]> \"x\"", false),
        ] {
            assert_eq!(build(&factory, GrammarSyntax::Lark, text).is_ok(), good, "{text}");
            attempt(task(text).as_slice()).unwrap();
        }
        assert!(attempt(&b"{"[..]).is_err());
    }
}
