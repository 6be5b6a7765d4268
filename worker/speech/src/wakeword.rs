//! Wake words with the networks of openWakeWord. Every 80 ms one network computes 8 rows of a mel spectrogram,
//! a second one a vector for the last 76 rows, and a third one for each word its probability from the last 16
//! or more vectors.
//!
//! As in openWakeWord, the vectors before the first frame are those of noise, and the first five frames have
//! probability 0. Its noise is random; here it is constant, so that equal sounds have equal results.

use crate::Error;
use crate::finite;
use crate::log_mel::RATE;
use crate::onnx::{NodeId, Onnx, Tensor, file_stem, onnx_files};
use crate::session::{AudioModel, Session, at_rate};
use crate::speech_rule::invalid;
use kernels::registry::Refusal;
use proto::operation::{
    HeardWord, MAX_FRAME_WINDOWS, MAX_WAKEWORDS, Operation, OperationError, OperationOptions,
    OperationOutput, WakewordOptions, WordWindow,
};
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Samples of a frame: 80 ms.
const FRAME: usize = 1280;
/// Samples before a frame that its spectrogram regards: three hops.
const CONTEXT: usize = 480;
/// Rows of the spectrogram, and values of a row, for one vector.
const ROWS: usize = 76;
const BANDS: usize = 32;
/// Rows of a frame.
const STEP: usize = 8;
/// Values of a vector.
const VALUES: usize = 96;
/// Samples of the noise before the first frame, and the vectors that it gives.
const NOISE: usize = 4 * RATE as usize;
const MAX_HISTORY: usize = 41;
/// Frames at the start of a session whose probability is 0.
const MUTED: u64 = 5;
const FULL_SCALE: f32 = 32_768.0;

const THRESHOLD: f32 = 0.5;
const DEBOUNCE_MS: u32 = 1000;
const MAX_MS: u32 = 60_000;

const MEL: &str = "melspectrogram";
const EMBEDDING: &str = "embedding_model";

pub(crate) struct Wakewords(Arc<Networks>);

struct Networks {
    mel: Stage,
    embedding: Stage,
    classifiers: Vec<Classifier>,
    /// The vectors before the first frame.
    noise: VecDeque<Vec<f32>>,
}

/// A network with one input and one output.
struct Stage {
    onnx: Onnx,
    input: NodeId,
    output: NodeId,
}

struct Classifier {
    stage: Stage,
    /// Vectors that it reads.
    history: usize,
    /// The word of each output; `None` for an output that stands for no word.
    words: Vec<Option<Arc<str>>>,
}

/// Whether a folder has the networks: both of the features, and at least one of a word.
///
/// # Errors
/// [`Refusal::Artefact`] with the missing file.
pub(crate) fn is_in(folder: &Path) -> Result<(), Refusal> {
    let refuse =
        |what: &str| Refusal::Artefact { reason: format!("there is no {what} in {}", folder.display()) };
    for name in [MEL, EMBEDDING] {
        if !folder.join(name).with_extension("onnx").is_file() {
            return Err(refuse(&format!("{name}.onnx")));
        }
    }
    classifiers(folder).next().map(drop).ok_or_else(|| refuse("ONNX file of a word"))
}

fn classifiers(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let others = [MEL, EMBEDDING, "silero_vad"];
    onnx_files(folder).into_iter().filter(move |path| !others.contains(&file_stem(path)))
}

impl Stage {
    /// Loads a network. One thread suffices for it.
    fn load(path: &Path) -> Result<Self, Error> {
        let onnx = Onnx::load(path, 1, None)?;
        let (input, output) = onnx.only_nodes()?;
        Ok(Self { onnx, input, output })
    }

    fn run(&self, shape: &[usize], values: Vec<f32>) -> Result<Vec<f32>, Error> {
        let input = Tensor::from_data(shape, values);
        let [output] = self.onnx.run(vec![(self.input, input.into())], [self.output])?;
        let output: Tensor<f32> =
            output.try_into().map_err(|_| self.onnx.fault("its output has another type than float"))?;
        let values = output.into_data();
        finite("values are", &values)?;
        Ok(values)
    }
}

impl Classifier {
    fn load(path: &Path) -> Result<Self, Error> {
        let stage = Stage::load(path)?;
        let onnx = &stage.onnx;
        let history = match onnx.shape(stage.input).as_deref() {
            Some([_, Some(history), Some(VALUES)]) if (1..=MAX_HISTORY).contains(history) => *history,
            _ => {
                let rule = format!("its input has not the shape [1, 1 to {MAX_HISTORY}, {VALUES}]");
                return Err(onnx.fault(rule));
            }
        };
        let outputs = match onnx.shape(stage.output).as_deref() {
            Some([_, Some(outputs)]) if (1..=MAX_WAKEWORDS).contains(outputs) => *outputs,
            _ => return Err(onnx.fault(format!("its output has not the shape [1, 1 to {MAX_WAKEWORDS}]"))),
        };
        let words = match outputs {
            1 => vec![Some(word_of(path).into())],
            // openWakeWord's training writes the words of several outputs into the output's name.
            _ => {
                let named: Option<BTreeMap<usize, String>> =
                    onnx.name(stage.output).and_then(|name| serde_json::from_str(name).ok());
                let named = named.ok_or_else(|| onnx.fault("the name of its output has no words"))?;
                (0..outputs).map(|at| named.get(&at).map(|word| Arc::from(word.as_str()))).collect()
            }
        };
        Ok(Self { stage, history, words })
    }

    /// The probability of each output.
    fn probabilities(&self, vectors: &VecDeque<Vec<f32>>) -> Result<Vec<f32>, Error> {
        let last = vectors.iter().skip(vectors.len() - self.history);
        let values = self.stage.run(&[1, self.history, VALUES], last.flatten().copied().collect())?;
        match values.len() == self.words.len() {
            true => Ok(values),
            false => Err(self.stage.onnx.fault("its output has another shape")),
        }
    }
}

/// The word of a file: its name without extension and version, `hey_jarvis_v0.1.onnx`.
fn word_of(path: &Path) -> String {
    let name = file_stem(path);
    let is_version = |version: &str| {
        !version.is_empty() && version.chars().all(|letter| letter.is_ascii_digit() || letter == '.')
    };
    let word =
        name.rsplit_once("_v").filter(|(_, version)| is_version(version)).map_or(name, |(word, _)| word);
    word.to_owned()
}

impl Wakewords {
    /// Loads all networks of a folder.
    pub(crate) fn load(folder: &Path) -> Result<Self, Error> {
        let stage = |name: &str| Stage::load(&folder.join(name).with_extension("onnx"));
        let (mel, embedding) = (stage(MEL)?, stage(EMBEDDING)?);
        let classifiers = classifiers(folder).map(|path| Classifier::load(&path));
        let classifiers = classifiers.collect::<Result<Vec<_>, _>>()?;
        let mut networks = Networks { mel, embedding, classifiers, noise: VecDeque::new() };
        let words: Vec<_> = networks.words().collect();
        let fault = |reason: String| Error::Artefact { path: folder.to_owned(), reason };
        if words.len() > MAX_WAKEWORDS {
            return Err(fault(format!("it has {} words, at most {MAX_WAKEWORDS}", words.len())));
        }
        if let Some(word) = words.iter().enumerate().find(|(at, word)| words[..*at].contains(word)) {
            return Err(fault(format!("it has the word {:?} twice", word.1)));
        }
        let rows = networks.rows(&noise())?;
        let rows = rows.as_chunks::<BANDS>().0;
        for window in rows.windows(ROWS).step_by(STEP) {
            let vector = networks.vector(window.iter())?;
            networks.noise.push_back(vector);
        }
        if networks.noise.len() != MAX_HISTORY {
            return Err(networks.mel.onnx.fault("four seconds have another number of rows"));
        }
        Ok(Self(Arc::new(networks)))
    }
}

/// Noise as loud as openWakeWord's: -1000 to 999, by a linear congruential generator.
fn noise() -> Vec<f32> {
    let mut state = 0u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 16) % 2000) as f32 - 1000.0
    };
    (0..NOISE).map(|_| next()).collect()
}

impl Networks {
    fn words(&self) -> impl Iterator<Item = &Arc<str>> {
        self.classifiers.iter().flat_map(|classifier| classifier.words.iter().flatten())
    }

    /// Rows of the spectrogram of these samples, whose full scale is 32,768.
    fn rows(&self, samples: &[f32]) -> Result<Vec<f32>, Error> {
        let values = self.mel.run(&[1, samples.len()], samples.to_vec())?;
        match values.len().is_multiple_of(BANDS) {
            true => Ok(values.into_iter().map(|value| value / 10.0 + 2.0).collect()),
            false => Err(self.mel.onnx.fault("its output has another shape")),
        }
    }

    fn vector<'a>(&self, rows: impl Iterator<Item = &'a [f32; BANDS]>) -> Result<Vec<f32>, Error> {
        let vector = self.embedding.run(&[1, ROWS, BANDS, 1], rows.flatten().copied().collect())?;
        match vector.len() {
            VALUES => Ok(vector),
            _ => Err(self.embedding.onnx.fault("its output has another shape")),
        }
    }
}

impl AudioModel for Wakewords {
    fn open(&self, rate: u32, options: &OperationOptions) -> Result<Box<dyn Session>, OperationError> {
        at_rate(rate, &[RATE])?;
        let options = match options {
            OperationOptions::Default => WakewordOptions::default(),
            OperationOptions::Wakeword(options) => options.clone(),
            _ => return Err(invalid("options", format!("{} has none of these", Operation::Wakeword))),
        };
        let threshold = options.threshold.unwrap_or(THRESHOLD);
        if !(0.0..=1.0).contains(&threshold) {
            return Err(invalid("threshold", format!("{threshold}, it must be 0 to 1")));
        }
        let debounce = options.debounce_ms.unwrap_or(DEBOUNCE_MS);
        if debounce > MAX_MS {
            return Err(invalid("debounce_ms", format!("{debounce}, the limit is {MAX_MS}")));
        }
        let is_known = |word: &&String| !self.0.words().any(|known| **known == ***word);
        if let Some(word) = options.words.iter().find(is_known) {
            let known: Vec<&str> = self.0.words().map(|word| &**word).collect();
            let known = known.join(", ");
            return Err(invalid("words", format!("{word:?} is none of the model's words: {known}")));
        }
        let listens =
            |word: &str| options.words.is_empty() || options.words.iter().any(|other| other == word);
        let heard = |word: &Option<Arc<str>>| {
            word.as_ref()
                .filter(|word| listens(word))
                .map(|word| Listening { word: Arc::clone(word), last: None })
        };
        let words = self.0.classifiers.iter().map(|classifier| classifier.words.iter().map(heard).collect());
        let mut session = WakewordSession {
            words: words.collect(),
            networks: Arc::clone(&self.0),
            threshold,
            debounce: (u64::from(debounce) * u64::from(RATE) / 1000).div_ceil(FRAME as u64),
            report_windows: options.windows,
            sound: Vec::new(),
            context: 0,
            rows: VecDeque::new(),
            vectors: VecDeque::new(),
            frames: 0,
        };
        session.reset();
        Ok(Box::new(session))
    }
}

/// A word that a session listens for.
struct Listening {
    word: Arc<str>,
    /// The frame in which it was last reported.
    last: Option<u64>,
}

struct WakewordSession {
    networks: Arc<Networks>,
    /// For each classifier and each of its outputs.
    words: Vec<Vec<Option<Listening>>>,
    threshold: f32,
    /// Frames after a word in which it is not reported again.
    debounce: u64,
    report_windows: bool,
    /// The last samples of the previous frame, followed by an incomplete frame. Full scale is 32,768.
    sound: Vec<f32>,
    /// Number of these last samples.
    context: usize,
    /// The last [`ROWS`] rows.
    rows: VecDeque<[f32; BANDS]>,
    /// The last [`MAX_HISTORY`] vectors.
    vectors: VecDeque<Vec<f32>>,
    frames: u64,
}

impl WakewordSession {
    /// Computes all complete frames of the held samples.
    fn frames(&mut self, out: &mut Vec<OperationOutput>) -> Result<(), Error> {
        let mut windows = Vec::new();
        while self.sound.len() >= self.context + FRAME {
            let end = self.context + FRAME;
            let rows = self.networks.rows(&self.sound[..end])?;
            self.rows.extend(rows.as_chunks::<BANDS>().0);
            self.rows.drain(..self.rows.len().saturating_sub(ROWS));
            self.sound.drain(..end - CONTEXT);
            self.context = CONTEXT;
            let vector = self.networks.vector(self.rows.iter())?;
            self.vectors.push_back(vector);
            self.vectors.drain(..self.vectors.len().saturating_sub(MAX_HISTORY));
            let words = self.heard(&mut windows)?;
            // In order of time: frames up to the word, then the word.
            if !words.is_empty() || windows.len() >= MAX_FRAME_WINDOWS - MAX_WAKEWORDS {
                send_windows(&mut windows, out);
            }
            out.extend(words.into_iter().map(OperationOutput::Wakeword));
            self.frames += 1;
        }
        send_windows(&mut windows, out);
        Ok(())
    }

    /// The words that the last frame completes.
    fn heard(&mut self, windows: &mut Vec<WordWindow>) -> Result<Vec<HeardWord>, Error> {
        let (start, at) = (self.frames * FRAME as u64, (self.frames + 1) * FRAME as u64);
        let mut heard = Vec::new();
        for (classifier, words) in self.networks.classifiers.iter().zip(&mut self.words) {
            if words.iter().all(Option::is_none) {
                continue;
            }
            let probabilities = classifier.probabilities(&self.vectors)?;
            for (listening, probability) in words.iter_mut().zip(probabilities) {
                let Some(Listening { word, last }) = listening else { continue };
                let probability = if self.frames < MUTED { 0.0 } else { probability };
                let word = word.to_string();
                if self.report_windows {
                    windows.push(WordWindow { start, word: word.clone(), probability });
                }
                let rests = last.is_some_and(|last| self.frames - last <= self.debounce);
                if self.frames >= MUTED && probability >= self.threshold && !rests {
                    *last = Some(self.frames);
                    heard.push(HeardWord { word, at, probability });
                }
            }
        }
        Ok(heard)
    }
}

fn send_windows(windows: &mut Vec<WordWindow>, out: &mut Vec<OperationOutput>) {
    if !windows.is_empty() {
        out.push(OperationOutput::WordWindows(std::mem::take(windows)));
    }
}

impl Session for WakewordSession {
    fn window(&self) -> u32 {
        FRAME as u32
    }

    fn push(&mut self, samples: &[f32], out: &mut Vec<OperationOutput>) -> Result<(), Error> {
        let scaled = |sample: &f32| (sample * FULL_SCALE).clamp(-FULL_SCALE, FULL_SCALE - 1.0);
        self.sound.extend(samples.iter().map(scaled));
        self.frames(out)
    }

    fn segment(&mut self, last: bool, out: &mut Vec<OperationOutput>) -> Result<(), Error> {
        if last && self.sound.len() > self.context {
            self.sound.resize(self.context + FRAME, 0.0);
            self.frames(out)?;
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.sound.clear();
        self.context = 0;
        self.rows = std::iter::repeat_n([1.0; BANDS], ROWS).collect();
        self.vectors = self.networks.noise.clone();
        self.frames = 0;
        self.words.iter_mut().flatten().flatten().for_each(|listening| listening.last = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_the_name_of_its_file_without_a_version() {
        for (file, word) in [
            ("hey_jarvis_v0.1.onnx", "hey_jarvis"),
            ("alexa.onnx", "alexa"),
            ("my_voice.onnx", "my_voice"),
            ("ok_v2.onnx", "ok"),
            ("ok_v.onnx", "ok_v"),
        ] {
            assert_eq!(word_of(Path::new(file)), word);
        }
    }

    #[test]
    fn noise_fills_its_range_evenly() {
        let noise = noise();
        assert!(noise.iter().all(|value| (-1000.0..=999.0).contains(value)));
        let mean = noise.iter().sum::<f32>() / noise.len() as f32;
        let square = noise.iter().map(|value| value * value).sum::<f32>() / noise.len() as f32;
        assert!(mean.abs() < 10.0 && (square.sqrt() - 577.4).abs() < 5.0, "{mean} {square}");
    }
}
