//! Speech for a text: sentences become phonemes by espeak-ng ([`espeak`]), and these become audio by a network
//! in the ONNX format ([`piper`], [`kokoro`]).
//!
//! A session takes no audio. It speaks its text when it is finished, piece by piece: a sentence, or a part of
//! one if that has many phonemes. The first piece is short, so that its audio comes early.

mod espeak;
mod kokoro;
mod piper;
mod text;

use crate::Error;
use crate::onnx::onnx_files;
use crate::session::{AudioModel, Session};
use crate::speech_rule::invalid;
pub(crate) use espeak::available;
use kernels::registry::Refusal;
use kokoro::Kokoro;
use piper::Piper;
use proto::operation::{
    MAX_FRAME_SAMPLES, MAX_SPEECH_CHARS, Operation, OperationError, OperationOptions, OperationOutput, Pcm,
    SPEECH_SPEEDS, SpeakOptions,
};
use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use text::{Clause, sentences};

/// Maximum number of open sessions, which wait for each other.
const MAX_SESSIONS: u32 = 32;
/// Maximum number of threads; more gain little.
const MAX_THREADS: usize = 8;
/// Most phonemes of a piece. Attention's memory grows with their square.
const MAX_PIECE: usize = 400;
/// A sentence with more phonemes begins with a piece of fewer, if it is the first one of a text.
const FIRST_PIECE: usize = 100;

/// A network with one or several voices.
trait Network: Send + Sync {
    /// Samples per second of its audio.
    fn rate(&self) -> u32;

    /// The names of its voices, at least one.
    fn names(&self) -> &[String];

    /// The phonemes of a clause for a voice, without its mark. Empty if it has nothing to be spoken.
    ///
    /// # Errors
    /// [`Error::Program`] if they cannot be made.
    fn phonemes(&self, clause: &Clause, voice: usize) -> Result<String, Error>;

    /// The audio of phonemes, at most [`MAX_PIECE`] of them, full scale 1. `voice` is an index of the names.
    ///
    /// # Errors
    /// Errors of the model.
    fn speak(&self, phonemes: &str, voice: usize, speed: f32) -> Result<Vec<f32>, Error>;

    /// Samples of silence between sentences.
    fn pause(&self) -> usize;
}

/// A model that sessions share.
pub(crate) struct Voices(Arc<dyn Network>);

/// The files of a folder.
enum Files {
    Piper { network: PathBuf },
    Kokoro { network: PathBuf, voices: PathBuf },
}

fn files(folder: &Path) -> Result<Files, Refusal> {
    let refuse = |reason: String| Err(Refusal::Artefact { reason });
    match onnx_files(folder).as_slice() {
        [network] if piper::settings(network).is_file() => Ok(Files::Piper { network: network.clone() }),
        [network] if network.with_file_name(kokoro::VOCABULARY).is_file() => match kokoro::voices(folder) {
            Some(voices) => Ok(Files::Kokoro { network: network.clone(), voices }),
            None => refuse(format!("there is no *.npz in {}", folder.display())),
        },
        [network] => refuse(format!("there is no {}", piper::settings(network).display())),
        [] => refuse(format!("there is no *.onnx in {}", folder.display())),
        _ => refuse(format!("there is more than one *.onnx in {}", folder.display())),
    }
}

/// Checks that a folder has all files of a model.
pub(crate) fn is_in(folder: &Path) -> Result<(), Refusal> {
    files(folder).map(drop)
}

/// Reads a file of at most `most` bytes.
fn read(path: &Path, most: u64) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(most + 1).read_to_end(&mut bytes));
    read.map_err(|source| Error::Io { what: format!("cannot read {}", path.display()), source })?;
    match bytes.len() as u64 > most {
        true => {
            Err(Error::Artefact { path: path.to_owned(), reason: format!("it has more than {most} bytes") })
        }
        false => Ok(bytes),
    }
}

impl Voices {
    /// Loads the network of a folder, on a process that can run `cpus` threads at a time. It runs on half of
    /// these, because other work is more urgent.
    ///
    /// # Errors
    /// [`Error::Artefact`] for a file that is not valid; I/O errors.
    pub(crate) fn load(folder: &Path, cpus: NonZeroUsize) -> Result<Self, Error> {
        let threads = (cpus.get() / 2).clamp(1, MAX_THREADS);
        let files = files(folder)
            .map_err(|refusal| Error::Artefact { path: folder.to_owned(), reason: refusal.to_string() })?;
        Ok(Self(match files {
            Files::Piper { network } => Arc::new(Piper::load(&network, threads)?),
            Files::Kokoro { network, voices } => Arc::new(Kokoro::load(&network, &voices, threads)?),
        }))
    }
}

impl AudioModel for Voices {
    fn open(&self, rate: u32, options: &OperationOptions) -> Result<Box<dyn Session>, OperationError> {
        let OperationOptions::Speak(options) = options else {
            return Err(invalid("options", format!("{} needs a text", Operation::Tts)));
        };
        let SpeakOptions { input, voice, speed } = options;
        if rate != 0 {
            return Err(invalid("sample_rate", format!("{rate}, it must be 0: the voice's own")));
        }
        let chars = input.chars().count();
        if chars > MAX_SPEECH_CHARS {
            return Err(invalid(
                "input",
                format!("it has {chars} characters, the limit is {MAX_SPEECH_CHARS}"),
            ));
        }
        let names = self.0.names();
        let index = |voice: &String| {
            let unknown = || invalid("voice", format!("{voice:?}, it must be one of {}", names.join(", ")));
            names.iter().position(|name| name == voice).ok_or_else(unknown)
        };
        let voice = voice.as_ref().map_or(Ok(0), index)?;
        let speed = speed.unwrap_or(1.0);
        if !SPEECH_SPEEDS.contains(&speed) {
            let (from, to) = (SPEECH_SPEEDS.start(), SPEECH_SPEEDS.end());
            return Err(invalid("speed", format!("{speed}, it must be {from} to {to}")));
        }
        let sentences = VecDeque::from(sentences(input));
        if sentences.is_empty() {
            return Err(invalid("input", "it has no letter and no digit".to_owned()));
        }
        let (text, network) = (input.clone(), Arc::clone(&self.0));
        Ok(Box::new(Speech { network, text, voice, speed, sentences, pieces: VecDeque::new(), first: true }))
    }

    fn max_sessions(&self) -> u32 {
        MAX_SESSIONS
    }
}

/// Phonemes that the network speaks at once.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    phonemes: String,
    /// A pause follows, if it is not the last piece.
    ends_sentence: bool,
}

struct Speech {
    network: Arc<dyn Network>,
    text: String,
    voice: usize,
    speed: f32,
    /// The rest of the text.
    sentences: VecDeque<Vec<Clause>>,
    /// The rest of the sentence before.
    pieces: VecDeque<Piece>,
    /// Nothing has been spoken.
    first: bool,
}

impl Session for Speech {
    fn window(&self) -> u32 {
        0
    }

    fn rate(&self) -> Option<u32> {
        Some(self.network.rate())
    }

    fn max_samples(&self) -> u64 {
        0
    }

    fn push(&mut self, _: &[f32], _: &mut Vec<OperationOutput>) -> Result<(), Error> {
        Ok(())
    }

    fn segment(&mut self, _: bool, _: &mut Vec<OperationOutput>) -> Result<(), Error> {
        Ok(())
    }

    fn continue_segment(&mut self, out: &mut Vec<OperationOutput>) -> Result<bool, Error> {
        while self.pieces.is_empty() {
            let Some(clauses) = self.sentences.pop_front() else { return Ok(false) };
            let mut parts = Vec::with_capacity(clauses.len());
            for clause in &clauses {
                let phonemes = self.network.phonemes(clause, self.voice)?;
                if !phonemes.is_empty() {
                    parts.push(phonemes + clause.stop.mark());
                }
            }
            self.pieces = pieces(&parts, if self.first { FIRST_PIECE } else { MAX_PIECE });
        }
        let Some(Piece { phonemes, ends_sentence }) = self.pieces.pop_front() else { return Ok(false) };
        let mut audio = self.network.speak(&phonemes, self.voice, self.speed)?;
        self.first = false;
        let more = !self.pieces.is_empty() || !self.sentences.is_empty();
        if more && ends_sentence {
            audio.resize(audio.len() + (self.network.pause() as f32 / self.speed) as usize, 0.0);
        }
        let frames = audio.chunks(MAX_FRAME_SAMPLES);
        out.extend(frames.map(|frame| OperationOutput::Audio(Pcm::I16(frame.iter().map(integer).collect()))));
        Ok(more)
    }

    fn reset(&mut self) {
        self.sentences = sentences(&self.text).into();
        self.pieces.clear();
        self.first = true;
    }
}

/// A sample as an integer of 16 bits, as Piper rounds it.
fn integer(sample: &f32) -> i16 {
    (sample.clamp(-1.0, 1.0) * 32_767.0) as i16
}

/// Joins the clauses of a sentence to pieces: the first one of `first` phonemes at most if there are more, and
/// others of [`MAX_PIECE`]. A longer clause is cut, at a space if it has one.
fn pieces(clauses: &[String], first: usize) -> VecDeque<Piece> {
    let mut pieces: VecDeque<Piece> = VecDeque::new();
    let mut open = String::new();
    let mut limit = match clauses.iter().map(|clause| clause.chars().count() + 1).sum::<usize>() {
        all if all <= first + 1 => MAX_PIECE,
        _ => first,
    };
    let mut end = |open: &mut String, limit: &mut usize| {
        if !open.is_empty() {
            pieces.push_back(Piece { phonemes: std::mem::take(open), ends_sentence: false });
            *limit = MAX_PIECE;
        }
    };
    for clause in clauses {
        let len = clause.chars().count();
        if !open.is_empty() && open.chars().count() + 1 + len > limit {
            end(&mut open, &mut limit);
        }
        let mut rest = clause.as_str();
        while let Some((cut, _)) = rest.char_indices().nth(MAX_PIECE) {
            let (start, next) = match rest[..cut].rsplit_once(' ') {
                Some((start, _)) if !start.is_empty() => (start, start.len() + 1),
                _ => (&rest[..cut], cut),
            };
            open.push_str(start);
            end(&mut open, &mut limit);
            rest = &rest[next..];
        }
        if !open.is_empty() {
            open.push(' ');
        }
        open.push_str(rest);
    }
    end(&mut open, &mut limit);
    if let Some(last) = pieces.back_mut() {
        last.ends_sentence = true;
    }
    pieces
}

#[cfg(test)]
mod tests;
