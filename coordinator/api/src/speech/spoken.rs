//! Writes audio as a body: WAV or bare samples, as they are or in server-sent events.

use super::{ApiError, Fields};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};

/// Sizes of a WAV file whose length is not known.
const UNKNOWN: u32 = u32::MAX;
/// Bytes of a sample.
const WIDTH: u16 = 2;

/// Samples of one channel, 16 bit integers, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// With a header. The length in it is unknown, since the audio is sent while it is computed.
    Wav,
    Pcm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Delivery {
    #[default]
    Audio,
    Sse,
}

/// The body so far.
#[derive(Debug)]
pub(super) struct Spoken {
    format: Format,
    delivery: Delivery,
    sample_rate: u32,
    started: bool,
    over: bool,
}

impl Format {
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        const NAME: &str = "response_format";
        let name: Option<String> = fields.get(NAME)?;
        match name.as_deref() {
            None | Some("wav") => Ok(Self::Wav),
            Some("pcm") => Ok(Self::Pcm),
            Some(other) => {
                let other: String = other.chars().take(64).collect();
                Err(fields.wrong(NAME, format!("{other:?} is not served, only wav and pcm")))
            }
        }
    }
}

impl Spoken {
    pub(super) fn new(format: Format, delivery: Delivery, sample_rate: u32) -> Self {
        Self { format, delivery, sample_rate, started: false, over: false }
    }

    pub(super) fn content_type(&self) -> &'static str {
        match (self.delivery, self.format) {
            (Delivery::Sse, _) => "text/event-stream",
            (Delivery::Audio, Format::Wav) => "audio/wav",
            (Delivery::Audio, Format::Pcm) => "audio/pcm",
        }
    }

    /// Whether nothing may follow.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    pub(super) fn audio(&mut self, samples: &[i16]) -> Vec<u8> {
        let mut bytes = match (self.started, self.format) {
            (false, Format::Wav) => header(self.sample_rate),
            _ => Vec::new(),
        };
        self.started = true;
        bytes.extend(samples.iter().flat_map(|sample| sample.to_le_bytes()));
        match self.delivery {
            Delivery::Audio => bytes,
            Delivery::Sse => event(&json!({"type": "speech.audio.delta", "audio": STANDARD.encode(bytes)})),
        }
    }

    /// Events after the last audio.
    pub(super) fn end(&mut self) -> Option<Vec<u8>> {
        self.over = true;
        // Speech costs no tokens.
        let usage = json!({"input_tokens": 0, "output_tokens": 0, "total_tokens": 0});
        let done = json!({"type": "speech.audio.done", "usage": usage});
        (self.delivery == Delivery::Sse).then(|| event(&done))
    }

    /// An event, or the error with which the body breaks off.
    pub(super) fn failed(&mut self, error: ApiError) -> Result<Vec<u8>, ApiError> {
        self.over = true;
        match self.delivery {
            Delivery::Audio => Err(error),
            Delivery::Sse => Ok(event(&json!({"type": "error", "error": error.body()["error"]}))),
        }
    }
}

fn event(data: &Value) -> Vec<u8> {
    format!("data: {data}\n\n").into_bytes()
}

/// The header of a WAV file of unknown length.
fn header(sample_rate: u32) -> Vec<u8> {
    let mut header = Vec::with_capacity(44);
    header.extend(b"RIFF");
    header.extend(UNKNOWN.to_le_bytes());
    header.extend(b"WAVEfmt ");
    header.extend(16u32.to_le_bytes());
    // PCM, one channel.
    header.extend([1u16, 1].iter().flat_map(|value| value.to_le_bytes()));
    header.extend(sample_rate.to_le_bytes());
    header.extend((sample_rate * u32::from(WIDTH)).to_le_bytes());
    header.extend([WIDTH, 8 * WIDTH].iter().flat_map(|value| value.to_le_bytes()));
    header.extend(b"data");
    header.extend(UNKNOWN.to_le_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audio_is_written_once_with_a_header() {
        let mut wav = Spoken::new(Format::Wav, Delivery::Audio, 22_050);
        assert_eq!(wav.content_type(), "audio/wav");
        let first = wav.audio(&[1, -2]);
        let header = b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0\x01\0\x22\x56\0\0\x44\xac\0\0\x02\0\x10\0data\xff\xff\xff\xff";
        assert_eq!(first, [&header[..], b"\x01\0\xfe\xff"].concat());
        assert_eq!(wav.audio(&[256]), b"\0\x01");
        assert_eq!((wav.end(), wav.is_over()), (None, true));
        let mut pcm = Spoken::new(Format::Pcm, Delivery::Audio, 22_050);
        assert_eq!((pcm.content_type(), pcm.audio(&[1])), ("audio/pcm", b"\x01\0".to_vec()));
        assert_eq!((pcm.failed(ApiError::WorkerLost), pcm.is_over()), (Err(ApiError::WorkerLost), true));
    }

    #[test]
    fn events_are_openais() {
        let mut sse = Spoken::new(Format::Pcm, Delivery::Sse, 22_050);
        assert_eq!(sse.content_type(), "text/event-stream");
        let read = |bytes: Vec<u8>| -> Value {
            let text = String::from_utf8(bytes).unwrap();
            serde_json::from_str(text.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap()).unwrap()
        };
        assert_eq!(read(sse.audio(&[1, -2])), json!({"type": "speech.audio.delta", "audio": "AQD+/w=="}));
        let failed = read(sse.failed(ApiError::WorkerLost).unwrap());
        assert_eq!((&failed["type"], &failed["error"]["code"]), (&json!("error"), &json!("worker_lost")));
        let usage = json!({"input_tokens": 0, "output_tokens": 0, "total_tokens": 0});
        assert_eq!(read(sse.end().unwrap()), json!({"type": "speech.audio.done", "usage": usage}));
    }
}
