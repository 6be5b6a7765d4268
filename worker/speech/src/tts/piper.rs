//! Voices of Piper: a VITS network in the ONNX format, beside its settings in `NAME.onnx.json`.

use super::Network;
use super::espeak::Phonemizer;
use super::text::Clause;
use crate::Error;
use crate::finite;
use crate::onnx::{NodeId, Onnx, Tensor};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use unicode_normalization::UnicodeNormalization;

/// Most bytes of the settings.
const MAX_SETTINGS: u64 = 1 << 20;
/// Sample rates of voices.
const RATES: std::ops::RangeInclusive<u32> = 8_000..=48_000;
/// Most numbers that a phoneme becomes.
const MAX_IDS: usize = 8;
/// Marks of the begin and the end, and what is between all phonemes.
const BEGIN: char = '^';
const END: char = '$';
const PAD: char = '_';
/// Seconds of silence after a sentence, as Piper's program inserts.
const PAUSE: f32 = 0.2;
/// Below this peak, audio is silence and is not made louder.
const SILENCE: f32 = 1e-8;

#[derive(Debug, Deserialize)]
struct Settings {
    audio: Audio,
    espeak: Espeak,
    inference: Inference,
    #[serde(default = "espeak_type")]
    phoneme_type: String,
    phoneme_id_map: HashMap<String, Vec<i32>>,
    num_speakers: u32,
    #[serde(default)]
    speaker_id_map: BTreeMap<String, i32>,
    #[serde(default)]
    dataset: String,
}

#[derive(Debug, Deserialize)]
struct Audio {
    sample_rate: u32,
}

#[derive(Debug, Deserialize)]
struct Espeak {
    voice: String,
}

/// Factors of the network's noise and of the length of the phonemes.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Inference {
    noise_scale: f32,
    length_scale: f32,
    noise_w: f32,
}

fn espeak_type() -> String {
    "espeak".to_owned()
}

pub(super) struct Piper {
    onnx: Onnx,
    inputs: [NodeId; 3],
    /// Which speaker, for a network of several.
    speaker: Option<NodeId>,
    output: NodeId,
    phonemizer: Phonemizer,
    ids: HashMap<char, Vec<i32>>,
    inference: Inference,
    rate: u32,
    names: Vec<String>,
    speakers: Vec<i32>,
}

/// The settings beside a network.
pub(super) fn settings(network: &Path) -> PathBuf {
    let mut path = network.as_os_str().to_owned();
    path.push(".json");
    path.into()
}

impl Piper {
    /// # Errors
    /// [`Error::Artefact`] for files that are not valid; I/O errors.
    pub(super) fn load(network: &Path, threads: usize) -> Result<Self, Error> {
        let path = settings(network);
        let fault = |reason: String| Error::Artefact { path: path.clone(), reason };
        let text = super::read(&path, MAX_SETTINGS)?;
        let settings: Settings = serde_json::from_slice(&text).map_err(|error| fault(error.to_string()))?;
        let Settings { audio: Audio { sample_rate: rate }, inference, num_speakers, .. } = settings;
        if settings.phoneme_type != espeak_type() {
            let found = &settings.phoneme_type;
            return Err(fault(format!("phoneme_type is {found:?}, only \"espeak\" is supported")));
        }
        if !RATES.contains(&rate) {
            let (from, to) = (RATES.start(), RATES.end());
            return Err(fault(format!("sample_rate is {rate}, it must be {from} to {to}")));
        }
        let scales = [inference.noise_scale, inference.length_scale, inference.noise_w];
        if !scales.iter().all(|scale| (0.0..=4.0).contains(scale)) || inference.length_scale < 0.1 {
            return Err(fault(format!(
                "{inference:?} is not of 0 to 4, with a length_scale of 0.1 at least"
            )));
        }
        let ids = ids(settings.phoneme_id_map).map_err(fault)?;
        let phonemizer = Phonemizer::new(&settings.espeak.voice, false).map_err(fault)?;
        let own = match settings.dataset.is_empty() {
            true => crate::onnx::file_stem(network).to_owned(),
            false => settings.dataset,
        };
        let (names, speakers) = match num_speakers {
            0 | 1 => (vec![own], vec![0]),
            _ => settings.speaker_id_map.into_iter().unzip(),
        };
        if names.is_empty() {
            return Err(fault("speaker_id_map is empty".to_owned()));
        }
        let onnx = Onnx::load(network, threads, None)?;
        let inputs = [onnx.node("input")?, onnx.node("input_lengths")?, onnx.node("scales")?];
        let speaker = (num_speakers > 1).then(|| onnx.node("sid")).transpose()?;
        let output = onnx.node("output")?;
        Ok(Self { onnx, inputs, speaker, output, phonemizer, ids, inference, rate, names, speakers })
    }

    /// The network's input. Phonemes without a number are left out.
    fn input(&self, phonemes: &str) -> Vec<i32> {
        let [begin, end, pad] =
            [BEGIN, END, PAD].map(|mark| self.ids.get(&mark).map_or(&[][..], Vec::as_slice));
        let known = phonemes.nfd().filter_map(|phoneme| self.ids.get(&phoneme));
        let mut input = [begin, pad].concat();
        for ids in known {
            input.extend_from_slice(ids);
            input.extend_from_slice(pad);
        }
        input.extend_from_slice(end);
        input
    }

    /// The network's audio, not yet scaled.
    fn run(&self, phonemes: &str, voice: usize, inference: Inference) -> Result<Vec<f32>, Error> {
        let ids = self.input(phonemes);
        let len = ids.len();
        let Inference { noise_scale, length_scale, noise_w } = inference;
        let [input, lengths, scales] = self.inputs;
        let mut inputs = vec![
            (input, Tensor::from_data(&[1, len], ids).into()),
            (lengths, Tensor::from_data(&[1], vec![len as i32]).into()),
            (scales, Tensor::from_data(&[3], vec![noise_scale, length_scale, noise_w]).into()),
        ];
        if let Some(speaker) = self.speaker {
            inputs.push((speaker, Tensor::from_data(&[1], vec![self.speakers[voice]]).into()));
        }
        let [audio] = self.onnx.run(inputs, [self.output])?;
        let Some(audio) = audio.into_tensor::<f32>() else {
            return Err(self.onnx.fault("its output has another type"));
        };
        let audio = audio.into_data();
        finite("samples are", &audio)?;
        Ok(audio)
    }
}

/// The numbers of each phoneme, which is one character.
fn ids(map: HashMap<String, Vec<i32>>) -> Result<HashMap<char, Vec<i32>>, String> {
    let mut ids = HashMap::with_capacity(map.len());
    for (phoneme, numbers) in map {
        if numbers.len() > MAX_IDS {
            return Err(format!("phoneme {phoneme:?} has {} numbers, at most {MAX_IDS}", numbers.len()));
        }
        // Others are sounds of several letters, which Piper has for few languages.
        if let (Some(only), None) = (phoneme.chars().next(), phoneme.chars().nth(1)) {
            ids.insert(only, numbers);
        }
    }
    match [BEGIN, END, PAD].iter().find(|mark| !ids.contains_key(mark)) {
        None => Ok(ids),
        Some(mark) => Err(format!("phoneme_id_map has no {mark:?}")),
    }
}

impl Network for Piper {
    fn rate(&self) -> u32 {
        self.rate
    }

    fn names(&self) -> &[String] {
        &self.names
    }

    fn phonemes(&self, clause: &Clause, _: usize) -> Result<String, Error> {
        self.phonemizer.phonemes(clause)
    }

    fn speak(&self, phonemes: &str, voice: usize, speed: f32) -> Result<Vec<f32>, Error> {
        let length_scale = self.inference.length_scale / speed;
        let mut audio = self.run(phonemes, voice, Inference { length_scale, ..self.inference })?;
        // As loud as possible, as Piper does.
        let peak = audio.iter().fold(0.0f32, |peak, sample| peak.max(sample.abs()));
        let scale = if peak < SILENCE { 0.0 } else { 1.0 / peak };
        audio.iter_mut().for_each(|sample| *sample *= scale);
        Ok(audio)
    }

    fn pause(&self) -> usize {
        (PAUSE * self.rate as f32) as usize
    }
}
