//! Kokoro's network (82M, StyleTTS 2) in the ONNX format, as kokoro-onnx exports it, with its table of phonemes
//! and its voices, which are vectors of styles in an archive of numpy.

use super::Network;
use super::espeak::Phonemizer;
use super::text::Clause;
use crate::Error;
use crate::finite;
use crate::onnx::{NodeId, Onnx, Tensor};
use crate::torch_file::archive;
use serde::Deserialize;
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// The table of phonemes, beside the network.
pub(super) const VOCABULARY: &str = "vocab.json";
/// Samples per second, which is the network's.
const RATE: u32 = 24_000;
/// Most bytes of the table.
const MAX_VOCABULARY: u64 = 1 << 20;
/// Values of a style.
const STYLE: usize = 256;
/// Most styles of a voice, one for each number of phonemes.
const MAX_STYLES: usize = 1024;
const MAX_VOICES: usize = 1024;
/// Numbers of the network's table of phonemes.
const MAX_PHONEME: i32 = 177;

#[derive(Debug, Deserialize)]
struct Vocabulary {
    vocab: HashMap<char, i32>,
}

pub(super) struct Kokoro {
    onnx: Onnx,
    inputs: [NodeId; 3],
    output: NodeId,
    ids: HashMap<char, i32>,
    names: Vec<String>,
    /// Of each voice its styles, `[phonemes][STYLE]`.
    styles: Vec<Vec<f32>>,
    /// Of each voice its language.
    languages: Vec<Language>,
}

#[derive(Debug, Clone)]
struct Language {
    phonemizer: Phonemizer,
    rules: Rules,
}

/// Rules from espeak-ng's phonemes to the network's (misaki, `espeak.py`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rules {
    American,
    British,
    Others,
}

/// The language of a voice by its name, as Kokoro's: `af_heart` is American. Japanese and Chinese need
/// phonemes of other programs; those voices speak American English here.
fn language(name: &str) -> Result<Language, String> {
    let (voice, rules) = match name.chars().next() {
        Some('b') => ("en-gb", Rules::British),
        Some('e') => ("es", Rules::Others),
        Some('f') => ("fr-fr", Rules::Others),
        Some('h') => ("hi", Rules::Others),
        Some('i') => ("it", Rules::Others),
        Some('p') => ("pt-br", Rules::Others),
        _ => ("en-us", Rules::American),
    };
    Ok(Language { phonemizer: Phonemizer::new(voice, true)?, rules })
}

/// Replacements for English, the longest first.
const ENGLISH: [(&str, &str); 19] = [
    ("ʔˌn\u{329}", "ʔn"),
    ("a^ɪ", "I"),
    ("a^ʊ", "W"),
    ("d^ʒ", "ʤ"),
    ("e^ɪ", "A"),
    ("t^ʃ", "ʧ"),
    ("ɔ^ɪ", "Y"),
    ("ə^l", "ᵊl"),
    ("ʔn\u{329}", "ʔn"),
    ("ʲo", "jo"),
    ("ʲə", "jə"),
    ("e", "A"),
    ("ʲ", ""),
    ("ɚ", "əɹ"),
    ("r", "ɹ"),
    ("x", "k"),
    ("ç", "k"),
    ("ɐ", "ə"),
    ("ɬ", "l"),
];
const AMERICAN: [(&str, &str); 8] =
    [("o^ʊ", "O"), ("ɜːɹ", "ɜɹ"), ("ɜː", "ɜɹ"), ("ɪə", "iə"), ("ː", ""), ("o", "ɔ"), ("ɾ", "T"), ("ʔ", "t")];
const BRITISH: [(&str, &str); 6] =
    [("e^ə", "ɛː"), ("iə", "ɪə"), ("ə^ʊ", "Q"), ("o", "ɔ"), ("ɾ", "T"), ("ʔ", "t")];
const OTHERS: [(&str, &str); 11] = [
    ("a^ɪ", "I"),
    ("a^ʊ", "W"),
    ("d^z", "ʣ"),
    ("d^ʒ", "ʤ"),
    ("e^ɪ", "A"),
    ("o^ʊ", "O"),
    ("s^s", "S"),
    ("t^s", "ʦ"),
    ("t^ʃ", "ʧ"),
    ("ɔ^ɪ", "Y"),
    ("ə^ʊ", "Q"),
];

impl Rules {
    fn apply(self, spoken: &str) -> String {
        let replace = |text: String, rules: &[(&str, &str)]| {
            rules.iter().fold(text, |text, (old, new)| text.replace(old, new))
        };
        let english = |text: &str| {
            let text = replace(text.to_owned(), &ENGLISH).replace('\u{303}', "");
            // A syllable without a vowel begins with a short one.
            let mut marked = String::with_capacity(text.len());
            for c in text.chars() {
                match (c, marked.pop()) {
                    ('\u{329}', Some(before)) if !before.is_whitespace() => marked.extend(['ᵊ', before]),
                    ('\u{329}', before) => marked.extend(before),
                    (c, before) => marked.extend(before.into_iter().chain([c])),
                }
            }
            marked
        };
        let text = match self {
            Self::American => replace(english(spoken), &AMERICAN),
            Self::British => replace(english(spoken), &BRITISH),
            Self::Others => replace(spoken.to_owned(), &OTHERS).replace('-', ""),
        };
        text.replace('^', "")
    }
}

impl Kokoro {
    /// Loads the network of a file, the table beside it, and the voices of an archive.
    ///
    /// # Errors
    /// [`Error::Artefact`] for files that are not valid; I/O errors.
    pub(super) fn load(network: &Path, voices: &Path, threads: usize) -> Result<Self, Error> {
        let path = network.with_file_name(VOCABULARY);
        let fault = |reason: String| Error::Artefact { path: path.clone(), reason };
        let text = super::read(&path, MAX_VOCABULARY)?;
        let Vocabulary { vocab: ids } =
            serde_json::from_slice(&text).map_err(|error| fault(error.to_string()))?;
        if let Some((phoneme, id)) = ids.iter().find(|(_, id)| !(1..=MAX_PHONEME).contains(*id)) {
            return Err(fault(format!("phoneme {phoneme:?} is {id}, it must be 1 to {MAX_PHONEME}")));
        }
        let fault = |reason: String| Error::Artefact { path: voices.to_owned(), reason };
        let (names, styles): (Vec<_>, Vec<_>) = read_voices(voices).map_err(fault)?.into_iter().unzip();
        let languages = names.iter().map(|name: &String| language(name)).collect::<Result<_, _>>();
        let languages = languages.map_err(fault)?;
        let onnx = Onnx::load(network, threads, None)?;
        let inputs = [onnx.node("tokens")?, onnx.node("style")?, onnx.node("speed")?];
        let output = onnx.node("audio")?;
        Ok(Self { onnx, inputs, output, ids, names, styles, languages })
    }
}

/// The archive of voices of a folder, if there is exactly one.
pub(super) fn voices(folder: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut archives = files.filter(|path| path.extension().is_some_and(|end| end == "npz"));
    archives.next().filter(|_| archives.next().is_none())
}

/// The voices of an archive in the order of their names.
fn read_voices(path: &Path) -> Result<Vec<(String, Vec<f32>)>, String> {
    let file = File::open(path).map_err(archive::io_fault)?;
    let len = file.metadata().map_err(archive::io_fault)?.len();
    let members = archive::members(&file, len)?.ok_or("it is no archive of numpy")?;
    if members.is_empty() || members.len() > MAX_VOICES {
        return Err(format!("it has {} voices, it must have 1 to {MAX_VOICES}", members.len()));
    }
    let mut voices = Vec::with_capacity(members.len());
    for (member, span) in members {
        let name = member.strip_suffix(".npy").unwrap_or(&member).to_owned();
        if span.len > (MAX_STYLES * STYLE * 4 + 1024) as u64 {
            return Err(format!("voice {name} has {} bytes", span.len));
        }
        let bytes = archive::read(&file, archive::member(&file, len, &member, span)?)?;
        let styles = array(&bytes).ok_or(format!("voice {name} is no array of {STYLE} floats a row"))?;
        voices.push((name, styles));
    }
    voices.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(voices)
}

/// The values of an array of numpy of little-endian floats whose last axis has [`STYLE`] values. All of them
/// are finite.
fn array(bytes: &[u8]) -> Option<Vec<f32>> {
    let rest = bytes.strip_prefix(b"\x93NUMPY\x01\x00")?;
    let (len, rest) = rest.split_first_chunk()?;
    let (header, values) = rest.split_at_checked(usize::from(u16::from_le_bytes(*len)))?;
    let header = std::str::from_utf8(header).ok()?;
    let is_of = |part: &str| header.contains(part);
    let rows = format!(", {STYLE})");
    if !is_of("'descr': '<f4'") || !is_of("'fortran_order': False") || !is_of(&rows) {
        return None;
    }
    let (values, torn) = values.as_chunks::<4>();
    let values: Vec<f32> = values.iter().map(|value| f32::from_le_bytes(*value)).collect();
    let whole = torn.is_empty() && !values.is_empty() && values.len().is_multiple_of(STYLE);
    (whole && values.iter().all(|value| value.is_finite())).then_some(values)
}

impl Network for Kokoro {
    fn rate(&self) -> u32 {
        RATE
    }

    fn names(&self) -> &[String] {
        &self.names
    }

    fn phonemes(&self, clause: &Clause, voice: usize) -> Result<String, Error> {
        let Language { phonemizer, rules } = &self.languages[voice];
        let phonemes = rules.apply(&phonemizer.phonemes(clause)?);
        // Those that the network has no number for are left out.
        Ok(phonemes.chars().filter(|phoneme| self.ids.contains_key(phoneme)).collect())
    }

    fn speak(&self, phonemes: &str, voice: usize, speed: f32) -> Result<Vec<f32>, Error> {
        let ids = phonemes.chars().filter_map(|phoneme| self.ids.get(&phoneme).copied());
        let tokens: Vec<i32> = [0].into_iter().chain(ids).chain([0]).collect();
        // The style depends on the number of phonemes.
        let styles = &self.styles[voice];
        let row = (tokens.len() - 2).clamp(1, styles.len() / STYLE) - 1;
        let style = styles[row * STYLE..(row + 1) * STYLE].to_vec();
        let [input, styled, fast] = self.inputs;
        let inputs = vec![
            (input, Tensor::from_data(&[1, tokens.len()], tokens).into()),
            (styled, Tensor::from_data(&[1, STYLE], style).into()),
            (fast, Tensor::from_data(&[1], vec![speed]).into()),
        ];
        let [audio] = self.onnx.run(inputs, [self.output])?;
        let Some(audio) = audio.into_tensor::<f32>() else {
            return Err(self.onnx.fault("its output has another type"));
        };
        let audio = audio.into_data();
        finite("samples are", &audio)?;
        Ok(audio)
    }

    /// Its audio begins and ends with silence.
    fn pause(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// espeak-ng's phonemes with ties, and those of misaki 0.9.4 (`EspeakFallback`).
    const OF_MISAKI: [(Rules, &str, &str); 7] = [
        (Rules::American, "həlˈo^ʊ wˈɜːld", "həlˈO wˈɜɹld"),
        (Rules::American, "ðə bˈɑːɾə^l ʌv wˈɔːɾɚɹ ɪz lˈɪɾə^l", "ðə bˈɑTᵊl ʌv wˈɔTəɹɹ ɪz lˈɪTᵊl"),
        (Rules::American, "d^ʒˈʌd^ʒ nˈe^ɪt^ʃɚ bˈɔ^ɪ", "ʤˈʌʤ nˈAʧəɹ bˈY"),
        (Rules::American, "ɐ bˈʌʔn̩ ɪnðə mˈa^ʊntɪn", "ə bˈʌtn ɪnðə mˈWntɪn"),
        (Rules::British, "həlˈə^ʊ wˈɜːld", "həlˈQ wˈɜːld"),
        (Rules::British, "ðə bˈɒtə^l ɒv wˈɔːtəɹ ɪz lˈɪtə^l", "ðə bˈɒtᵊl ɒv wˈɔːtəɹ ɪz lˈɪtᵊl"),
        (Rules::British, "ɡˌə^ʊɪŋ ɐɹˈa^ʊnd", "ɡˌQɪŋ əɹˈWnd"),
    ];

    #[test]
    fn phonemes_become_those_of_misaki() {
        for (rules, spoken, expected) in OF_MISAKI {
            assert_eq!(rules.apply(spoken), expected, "{spoken}");
        }
        assert_eq!(Rules::American.apply("ɹˈɪðn\u{329}"), "ɹˈɪðᵊn");
        assert_eq!(Rules::Others.apply("d^ʒa^ɪ-s^s"), "ʤIS");
        let of = |name: &str| language(name).unwrap().rules;
        assert_eq!(
            [of("af_heart"), of("bm_lewis"), of("ff_siwis")],
            [Rules::American, Rules::British, Rules::Others]
        );
        assert_eq!(of("jf_alpha"), Rules::American);
    }

    fn numpy(kind: &str, shape: &str, values: &[f32]) -> Vec<u8> {
        let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        bytes
    }

    #[test]
    fn only_whole_arrays_of_styles_are_read() {
        let values: Vec<f32> = (0..2 * STYLE).map(|value| value as f32).collect();
        let good = numpy("<f4", "(2, 1, 256)", &values);
        assert_eq!(array(&good).as_deref(), Some(&values[..]));
        for bad in [
            numpy("<f8", "(2, 1, 256)", &values),
            numpy("<f4", "(2, 1, 128)", &values),
            numpy("<f4", "(2, 1, 256)", &values[1..]),
            numpy("<f4", "(0, 1, 256)", &[]),
            numpy("<f4", "(1, 1, 256)", &[f32::NAN; STYLE]),
        ] {
            assert_eq!(array(&bad), None);
        }
        for cut in 0..good.len() {
            assert_eq!(
                array(&good[..cut]).map(|values| values.len()),
                (cut == good.len() - 4 * STYLE).then_some(STYLE)
            );
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("voices.npz");
        for text in [&b""[..], b"PK\x03\x04", &good] {
            std::fs::write(&path, text).unwrap();
            assert!(read_voices(&path).is_err());
        }
    }
}
