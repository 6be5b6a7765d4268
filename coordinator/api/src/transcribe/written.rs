//! Writes a transcript in each response format.

use super::Task;
use super::form::Format;
use crate::languages;
use proto::operation::{SpokenText, SpokenWord};
use serde::Serialize;
use std::fmt::Write;

const JSON: &str = "application/json";
const PLAIN: &str = "text/plain; charset=utf-8";
const VTT: &str = "text/vtt; charset=utf-8";
/// Frames of features per second, the unit of window positions.
const FRAMES: f64 = 100.0;

/// The text of a recording.
#[derive(Debug)]
pub(super) struct Transcript {
    pub(super) task: Task,
    pub(super) language: String,
    /// Samples per second, the unit of positions.
    pub(super) sample_rate: u32,
    /// In seconds.
    pub(super) duration: f64,
    pub(super) texts: Vec<SpokenText>,
}

#[derive(Debug, Serialize)]
pub(super) struct Usage {
    r#type: &'static str,
    seconds: u64,
}

/// The usage of a recording of this length in seconds.
pub(super) fn usage(duration: f64) -> Usage {
    Usage { r#type: "duration", seconds: duration.ceil() as u64 }
}

#[derive(Debug, Serialize)]
struct Short {
    text: String,
    usage: Usage,
}

#[derive(Debug, Serialize)]
struct Verbose<'a> {
    task: &'static str,
    language: &'a str,
    duration: f64,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    segments: Option<Vec<Segment<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    words: Option<Vec<Word<'a>>>,
    usage: Usage,
}

#[derive(Debug, Serialize)]
struct Word<'a> {
    word: &'a str,
    start: f64,
    end: f64,
}

#[derive(Debug, Serialize)]
struct Segment<'a> {
    id: usize,
    seek: u64,
    start: f64,
    end: f64,
    text: &'a str,
    tokens: &'a [u32],
    temperature: f32,
    avg_logprob: f32,
    compression_ratio: f32,
    no_speech_prob: f32,
}

impl Transcript {
    /// Content type and body of the response.
    pub(super) fn render(&self, format: Format) -> (&'static str, String) {
        match format {
            Format::Json => (JSON, json(&Short { text: self.text(), usage: self.usage() })),
            Format::Verbose { segments, words } => (JSON, json(&self.verbose(segments, words))),
            Format::Text => (PLAIN, self.text() + "\n"),
            Format::Srt => (PLAIN, self.captions("", ',', true)),
            Format::Vtt => (VTT, self.captions("WEBVTT\n\n", '.', false)),
        }
    }

    fn text(&self) -> String {
        let all: String = self.texts.iter().map(|spoken| spoken.text.as_str()).collect();
        all.trim().to_owned()
    }

    fn usage(&self) -> Usage {
        usage(self.duration)
    }

    /// A position in seconds, rounded to milliseconds.
    fn seconds(&self, at: u64) -> f64 {
        self.millis(at) as f64 / 1000.0
    }

    fn millis(&self, at: u64) -> u64 {
        let rate = u64::from(self.sample_rate.max(1));
        (at.saturating_mul(1000) + rate / 2) / rate
    }

    fn verbose(&self, segments: bool, words: bool) -> Verbose<'_> {
        let all = || self.texts.iter().enumerate().map(|(id, spoken)| self.segment(id, spoken)).collect();
        let timed =
            || self.texts.iter().flat_map(|spoken| &spoken.words).map(|word| self.word(word)).collect();
        Verbose {
            task: match self.task {
                Task::Transcribe => "transcribe",
                Task::Translate => "translate",
            },
            language: languages::name(&self.language),
            duration: self.duration,
            text: self.text(),
            segments: segments.then(all),
            words: words.then(timed),
            usage: self.usage(),
        }
    }

    fn word<'a>(&self, word: &'a SpokenWord) -> Word<'a> {
        Word { word: word.text.trim(), start: self.seconds(word.start), end: self.seconds(word.end) }
    }

    fn segment<'a>(&self, id: usize, spoken: &'a SpokenText) -> Segment<'a> {
        Segment {
            id,
            seek: (self.seconds(spoken.window) * FRAMES).round() as u64,
            start: self.seconds(spoken.start),
            end: self.seconds(spoken.end),
            text: &spoken.text,
            tokens: &spoken.tokens,
            temperature: spoken.temperature,
            avg_logprob: spoken.mean_log,
            compression_ratio: spoken.repetition,
            no_speech_prob: spoken.silence,
        }
    }

    fn captions(&self, head: &str, point: char, numbered: bool) -> String {
        let mut out = head.to_owned();
        let time = |at: u64| {
            let millis = self.millis(at);
            let (hours, minutes, seconds) = (millis / 3_600_000, millis / 60_000 % 60, millis / 1000 % 60);
            format!("{hours:02}:{minutes:02}:{seconds:02}{point}{:03}", millis % 1000)
        };
        for (n, spoken) in self.texts.iter().enumerate() {
            if numbered {
                let _never = writeln!(out, "{}", n + 1);
            }
            // The arrow of a time line must not occur in the text.
            let text = spoken.text.trim().replace("-->", "->");
            let _never = writeln!(out, "{} --> {}\n{text}\n", time(spoken.start), time(spoken.end));
        }
        out
    }
}

/// Serializing numbers and texts cannot fail.
fn json(answer: &impl Serialize) -> String {
    serde_json::to_string(answer).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn transcript() -> Transcript {
        let spoken = |text: &str, start, end, window| SpokenText {
            text: text.into(),
            start,
            end,
            window,
            tokens: vec![50_364, 7],
            mean_log: -0.25,
            silence: 0.125,
            temperature: 0.2,
            repetition: 1.5,
            words: vec![SpokenWord { text: text.into(), start, end, probability: 0.5 }],
        };
        Transcript {
            task: Task::Transcribe,
            language: "en".into(),
            sample_rate: 8_000,
            duration: 3_725.5,
            texts: vec![
                spoken(" One.", 0, 20_000, 0),
                spoken(" Two --> three.", 20_000, 29_804_012, 240_000),
            ],
        }
    }

    #[test]
    fn every_response_format_is_written_correctly() {
        let render = |format| transcript().render(format);
        let usage = json!({"type": "duration", "seconds": 3726});
        let (kind, body) = render(Format::Json);
        let value: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((kind, value), (JSON, json!({"text": "One. Two --> three.", "usage": usage})));
        assert_eq!(render(Format::Text), (PLAIN, "One. Two --> three.\n".to_owned()));
        let captions =
            "1\n00:00:00,000 --> 00:00:02,500\nOne.\n\n2\n00:00:02,500 --> 01:02:05,502\nTwo -> three.\n\n";
        assert_eq!(render(Format::Srt), (PLAIN, captions.to_owned()));
        let captions = "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nOne.\n\n00:00:02.500 --> 01:02:05.502\nTwo -> three.\n\n";
        assert_eq!(render(Format::Vtt), (VTT, captions.to_owned()));
        let (_, body) = render(Format::Verbose { segments: true, words: false });
        let value: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((&value["task"], &value["language"]), (&json!("transcribe"), &json!("english")));
        let segment = &value["segments"][1];
        assert_eq!(
            (&segment["id"], &segment["seek"], &segment["start"], &segment["end"]),
            (&json!(1), &json!(3000), &json!(2.5), &json!(3725.502))
        );
        assert_eq!(segment["tokens"], json!([50_364, 7]));
        assert_eq!((&segment["compression_ratio"], &segment["temperature"]), (&json!(1.5), &json!(0.2)));
        assert!(value.get("words").is_none());
        let (_, body) = render(Format::Verbose { segments: false, words: true });
        let value: Value = serde_json::from_str(&body).unwrap();
        assert!(value.get("segments").is_none());
        assert_eq!(value["words"][0], json!({"word": "One.", "start": 0.0, "end": 2.5}));
        let silent = Transcript { texts: vec![], ..transcript() };
        assert_eq!(silent.render(Format::Text).1, "\n");
    }
}
