//! A grammar is tried by another process before it is compiled in this one.
//!
//! Compiling some takes time and memory without a bound that the library sees to: that of all strings of fifty patterns at
//! once, in two kilobytes of schema, takes a hundred megabytes a second for as long as it is let. A thread cannot be
//! stopped; a process can. What has come to an end there in time comes to an end here, too: the same library builds the
//! same automata from the same text. Only the vocabulary is another, which has bearing on masks alone, whose steps are
//! limited.

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

/// Most of what a process that tries reads: a grammar, and the names of tokens.
const MAX_TASK: u64 = 16 * MAX_GRAMMAR_BYTES as u64;

/// A command that does [`attempt`] with its input, and that a signal ends when it has had [`super::COMPILE_TIME`] of a CPU.
#[derive(Debug)]
pub struct Program {
    pub path: PathBuf,
    pub arguments: Vec<OsString>,
}

/// Of this process, which serves requests of others.
static PROGRAM: OnceLock<Program> = OnceLock::new();

/// From now on all grammars of this process are tried by this program first. Only the first call counts. Without one they
/// are compiled untried: for processes whose grammars are their own.
pub fn tried_by(program: Program) {
    PROGRAM.get_or_init(|| program);
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Tried {
    /// There is no program to try it with.
    Untried,
    /// It has ended; whether the grammar can be used is another question.
    Ended,
    /// It was ended for what it took.
    TooMuch,
    /// It has not had the time of a CPU to tell: others had it.
    Unfinished,
    /// It could not be tried.
    Failed(String),
}

#[derive(Serialize, Deserialize)]
struct Task {
    syntax: GrammarSyntax,
    text: String,
    names: Names,
}

/// Tries a grammar of a model with tokens of these names. Takes [`CPU_WAIT`] at most, and the calling thread.
pub(super) fn attempted(syntax: GrammarSyntax, text: &str, names: &Names) -> Tried {
    let Some(program) = PROGRAM.get() else { return Tried::Untried };
    let task = Task { syntax, text: text.to_owned(), names: names.clone() };
    match serde_json::to_vec(&task).map_err(io::Error::from).and_then(|task| run(program, task, CPU_WAIT)) {
        Ok(tried) => tried,
        Err(error) => Tried::Failed(format!("{}: {error}", program.path.display())),
    }
}

fn run(program: &Program, task: Vec<u8>, patience: Duration) -> io::Result<Tried> {
    let mut command = Command::new(&program.path);
    command.args(&program.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = Ended(command.spawn()?);
    let (input, output) = (child.0.stdin.take(), child.0.stdout.take());
    let (told, ended) = channel();
    spawn("kvasir-trial", move || {
        // One that ends before it has read all of it is told by how it ended.
        drop(input.map(|mut input| input.write_all(&task)));
        let closed = output.map(|mut output| io::copy(&mut output, &mut io::sink()));
        // Whoever waited may have gone.
        let _ = told.send(closed.is_some());
    })
    .map_err(|error| io::Error::other(error.to_string()))?;
    if ended.recv_timeout(patience).is_err() {
        return Ok(Tried::Unfinished);
    }
    let status = child.0.wait()?;
    Ok(match status.code() {
        Some(0) => Tried::Ended,
        Some(code) => Tried::Failed(format!("it ends with {code}")),
        // By a signal: that of its time, or of memory that ran out.
        None => Tried::TooMuch,
    })
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Fails where it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the other process does with its input.
///
/// # Errors
/// What cannot be read, or is no task. How the grammar turns out is none.
pub fn attempt(input: impl Read) -> io::Result<()> {
    let mut task = Vec::new();
    input.take(MAX_TASK).read_to_end(&mut task)?;
    let Task { syntax, text, names } = serde_json::from_slice(&task)?;
    let factory = vocabulary::stand_in(&names).map_err(io::Error::other)?;
    // Only that it ends is asked for.
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
    fn a_process_that_goes_on_is_ended_and_how_it_ends_is_told() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let task = || vec![b'x'; 1 << 20];
        let tried = |script: &str| run(&shell(script), task(), PATIENCE).unwrap();
        assert_eq!(tried("cat > /dev/null"), Tried::Ended);
        assert_eq!(tried("exit 0"), Tried::Ended, "it need not read");
        assert_eq!(tried("exit 3"), Tried::Failed("it ends with 3".into()));
        assert_eq!(tried("kill -PROF $$"), Tried::TooMuch);
        // Who is kept from the CPUs has not taken too much of them.
        let since = Instant::now();
        let stopped = run(&shell("kill -STOP $$"), task(), Duration::from_millis(200)).unwrap();
        assert_eq!(stopped, Tried::Unfinished);
        assert!(since.elapsed() < PATIENCE / 6, "{:?}", since.elapsed());
        let none = Program { path: "/nonexistent/program".into(), arguments: Vec::new() };
        assert!(run(&none, Vec::new(), PATIENCE).is_err());
    }

    #[test]
    fn what_is_tried_is_built_from_the_same_names() {
        let names =
            Names { tokens: 300, named: vec![(258, "<tool>".into()), (259, "</s>".into())], ends: vec![259] };
        let task = |text: &str| {
            let task = Task { syntax: GrammarSyntax::Lark, text: text.to_owned(), names: names.clone() };
            serde_json::to_vec(&task).unwrap()
        };
        let factory = vocabulary::stand_in(&names).unwrap();
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
