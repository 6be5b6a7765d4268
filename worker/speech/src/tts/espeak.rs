//! Phonemes by espeak-ng, whose program runs in another process.
//!
//! Its library is under the GPL and is not linked. The process gets one clause at a time on its standard
//! input; its time and output are limited.

use super::text::Clause;
use crate::Error;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const PROGRAM: &str = "espeak-ng";
/// Time for a clause. A clause of 4,096 letters takes 0.1 s.
const TIME: Duration = Duration::from_secs(10);
/// Most bytes of phonemes of a clause.
const MAX_OUTPUT: u64 = 256 << 10;
/// Interval at which the end of a process that has closed its output is awaited.
const POLL: Duration = Duration::from_millis(1);

/// A language of espeak-ng.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Phonemizer {
    voice: String,
    /// Whether the letters of one sound are tied by `^`.
    tied: bool,
}

/// Checks that the program runs.
///
/// # Errors
/// The missing part.
pub(crate) fn available() -> Result<(), String> {
    let missing = |reason: String| {
        format!("the program {PROGRAM}, which makes the phonemes of a text, cannot be used: {reason}")
    };
    let mut command = Command::new(PROGRAM);
    command.arg("--version");
    let output = run(command, &[]).map_err(missing)?;
    match output.to_lowercase().contains("espeak") {
        true => Ok(()),
        false => Err(missing("it does not say its version".to_owned())),
    }
}

impl Phonemizer {
    /// A voice is a name such as `en-us`.
    ///
    /// # Errors
    /// If this is no name of a voice.
    pub(super) fn new(voice: &str, tied: bool) -> Result<Self, String> {
        let in_name = |c: char| c.is_ascii_alphanumeric() || "-_+".contains(c);
        match !voice.is_empty() && voice.len() <= 32 && !voice.starts_with('-') && voice.chars().all(in_name)
        {
            true => Ok(Self { voice: voice.to_owned(), tied }),
            false => Err(format!("{voice:?} is not the name of a voice of {PROGRAM}")),
        }
    }

    /// The phonemes of a clause in the International Phonetic Alphabet, words separated by spaces. Empty if it
    /// has nothing to be spoken.
    pub(super) fn phonemes(&self, clause: &Clause) -> Result<String, Error> {
        let mut command = Command::new(PROGRAM);
        // Quiet, phonemes only, UTF-8.
        command.args(["-q", "--ipa", "-b", "1", "-v", &self.voice, "--stdin"]);
        if self.tied {
            command.arg("--tie=^");
        }
        let output = run(command, clause.text.as_bytes());
        let output = output.map_err(|reason| Error::Program { program: PROGRAM, reason })?;
        // The program starts a line where it sees a new clause.
        let words = without_flags(&output);
        Ok(words.split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

/// Removes the names of languages that surround words of another language: `(en)`.
fn without_flags(phonemes: &str) -> String {
    let mut kept = String::with_capacity(phonemes.len());
    let mut rest = phonemes;
    while let Some((before, flag)) = rest.split_once('(') {
        kept.push_str(before);
        match flag.split_once(')') {
            Some((name, after)) if !name.is_empty() => rest = after,
            _ => {
                kept.push('(');
                rest = flag;
            }
        }
    }
    kept + rest
}

/// Runs a program with this input and returns its output.
fn run(mut command: Command, input: &[u8]) -> Result<String, String> {
    let end = Instant::now() + TIME;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let (done, output) = channel();
    let (mut stdin, stdout) = stdin.zip(stdout).ok_or("it has no pipes")?;
    let input = input.to_owned();
    // Both threads end with the process.
    std::thread::spawn(move || {
        // A program that does not read its input says why by its status.
        let _ = stdin.write_all(&input);
    });
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = stdout.take(MAX_OUTPUT + 1).read_to_end(&mut bytes);
        // The receiver is gone after the time is over.
        let _ = done.send(read.map(|_| bytes));
    });
    let read = output.recv_timeout(TIME);
    let too_long = matches!(&read, Ok(Ok(bytes)) if bytes.len() as u64 > MAX_OUTPUT);
    let status = loop {
        if too_long || read.is_err() || Instant::now() >= end {
            // It may have ended by itself.
            let _ = child.kill();
        }
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => std::thread::sleep(POLL),
            Err(error) => return Err(error.to_string()),
        }
    };
    let bytes = match read {
        _ if too_long => return Err(format!("it wrote more than {MAX_OUTPUT} bytes")),
        Err(_) => return Err(format!("it took more than {} s", TIME.as_secs())),
        Ok(Err(error)) => return Err(error.to_string()),
        Ok(Ok(bytes)) => bytes,
    };
    match status.success() {
        true => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        false => Err(format!("it ended with {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_process_is_limited_and_its_failure_reported() {
        assert_eq!(run(shell("cat"), b"said").as_deref(), Ok("said"));
        assert!(run(shell("exit 3"), &[7; 1 << 20]).unwrap_err().contains('3'));
        assert!(run(shell("yes"), b"").unwrap_err().contains("262144 bytes"));
        let missing = run(Command::new("/nonexistent/espeak-ng"), b"").unwrap_err();
        assert!(missing.contains("No such file"), "{missing}");
    }

    #[test]
    fn names_of_voices_are_checked_and_flags_removed() {
        for name in ["", "-q", "../en", "en us", "en/us", &"x".repeat(33)] {
            assert!(Phonemizer::new(name, false).is_err(), "{name:?}");
        }
        assert!(Phonemizer::new("en-us", false).is_ok());
        assert_eq!(without_flags("(en)hˈaʊs(de) da () (x"), "hˈaʊs da () (x");
    }
}
