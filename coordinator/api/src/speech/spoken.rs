//! Writes audio as a body: WAV, FLAC or bare samples, as they are or in server-sent events.

use super::flac::Flac;
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
    Flac,
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
    /// Of the format FLAC.
    flac: Option<Flac>,
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
            Some("flac") => Ok(Self::Flac),
            Some(other) => {
                let other: String = other.chars().take(64).collect();
                Err(fields.wrong(NAME, format!("{other:?} is not served, only wav, flac and pcm")))
            }
        }
    }
}

impl Spoken {
    pub(super) fn new(format: Format, delivery: Delivery, sample_rate: u32) -> Result<Self, ApiError> {
        let flac = match format {
            Format::Flac => Some(Flac::new(sample_rate).ok_or(ApiError::Internal)?),
            Format::Wav | Format::Pcm => None,
        };
        Ok(Self { format, delivery, sample_rate, flac, started: false, over: false })
    }

    pub(super) fn content_type(&self) -> &'static str {
        match (self.delivery, self.format) {
            (Delivery::Sse, _) => "text/event-stream",
            (Delivery::Audio, Format::Wav) => "audio/wav",
            (Delivery::Audio, Format::Pcm) => "audio/pcm",
            (Delivery::Audio, Format::Flac) => "audio/flac",
        }
    }

    /// Whether nothing may follow.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// May be empty: FLAC has whole frames.
    pub(super) fn audio(&mut self, samples: &[i16]) -> Result<Vec<u8>, ApiError> {
        let first = !std::mem::replace(&mut self.started, true);
        let mut bytes = match &self.flac {
            _ if !first => Vec::new(),
            Some(flac) => flac.header().ok_or(ApiError::Internal)?,
            None if self.format == Format::Wav => header(self.sample_rate),
            None => Vec::new(),
        };
        match &mut self.flac {
            Some(flac) => bytes.extend(flac.write(samples).ok_or(ApiError::Internal)?),
            None => bytes.extend(samples.iter().flat_map(|sample| sample.to_le_bytes())),
        }
        Ok(self.delivered(bytes))
    }

    /// Audio that waited, and events after the last audio.
    pub(super) fn end(&mut self) -> Result<Vec<u8>, ApiError> {
        self.over = true;
        let last =
            self.flac.as_mut().map_or_else(|| Some(Vec::new()), Flac::finish).ok_or(ApiError::Internal)?;
        let mut bytes = self.delivered(last);
        if self.delivery == Delivery::Sse {
            // Speech costs no tokens.
            let usage = json!({"input_tokens": 0, "output_tokens": 0, "total_tokens": 0});
            bytes.extend(event(&json!({"type": "speech.audio.done", "usage": usage})));
        }
        Ok(bytes)
    }

    fn delivered(&self, bytes: Vec<u8>) -> Vec<u8> {
        match self.delivery {
            Delivery::Sse if !bytes.is_empty() => {
                event(&json!({"type": "speech.audio.delta", "audio": STANDARD.encode(bytes)}))
            }
            Delivery::Sse | Delivery::Audio => bytes,
        }
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
    use proto::operation::Pcm;
    use sound::Taken;

    #[test]
    fn audio_is_written_once_with_a_header() {
        let mut wav = Spoken::new(Format::Wav, Delivery::Audio, 22_050).unwrap();
        assert_eq!(wav.content_type(), "audio/wav");
        let first = wav.audio(&[1, -2]).unwrap();
        let header = b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0\x01\0\x22\x56\0\0\x44\xac\0\0\x02\0\x10\0data\xff\xff\xff\xff";
        assert_eq!(first, [&header[..], b"\x01\0\xfe\xff"].concat());
        assert_eq!(wav.audio(&[256]).unwrap(), b"\0\x01");
        assert_eq!((wav.end(), wav.is_over()), (Ok(Vec::new()), true));
        let mut pcm = Spoken::new(Format::Pcm, Delivery::Audio, 22_050).unwrap();
        assert_eq!((pcm.content_type(), pcm.audio(&[1])), ("audio/pcm", Ok(b"\x01\0".to_vec())));
        assert_eq!((pcm.failed(ApiError::WorkerLost), pcm.is_over()), (Err(ApiError::WorkerLost), true));
    }

    #[test]
    fn flac_decodes_to_the_same_samples() {
        let noise = (0..10_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 18) as i16 - 8192);
        let tone = (0..9_000).map(|at| (f64::from(at) * 0.05).sin() * 30_000.0).map(|sample| sample as i16);
        let samples: Vec<i16> = noise.chain(tone).chain([i16::MIN, i16::MAX]).chain([0; 5_000]).collect();
        for cuts in [vec![samples.len()], vec![1, 4096, 4095, 8192, 3, 1000]] {
            let mut spoken = Spoken::new(Format::Flac, Delivery::Audio, 22_050).unwrap();
            let (mut file, mut rest) = (Vec::new(), &samples[..]);
            for cut in cuts {
                let (now, later) = rest.split_at(cut);
                file.extend(spoken.audio(now).unwrap());
                rest = later;
            }
            file.extend(spoken.audio(rest).unwrap());
            file.extend(spoken.end().unwrap());
            assert!(file.starts_with(b"fLaC") && file.len() < 2 * samples.len());
            let decoded = sound::read(&file, Taken { rates: &[22_050], seconds: 60 }).unwrap();
            let heard = decoded.pieces.iter().flat_map(|piece| match piece {
                Pcm::I16(samples) => samples.clone(),
                Pcm::F32(_) => panic!("FLAC has integers"),
            });
            assert_eq!((decoded.sample_rate, heard.collect::<Vec<i16>>()), (22_050, samples.clone()));
        }
    }

    #[test]
    fn events_are_openais() {
        let mut sse = Spoken::new(Format::Pcm, Delivery::Sse, 22_050).unwrap();
        assert_eq!(sse.content_type(), "text/event-stream");
        let read = |bytes: Vec<u8>| -> Value {
            let text = String::from_utf8(bytes).unwrap();
            serde_json::from_str(text.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap()).unwrap()
        };
        let first = read(sse.audio(&[1, -2]).unwrap());
        assert_eq!(first, json!({"type": "speech.audio.delta", "audio": "AQD+/w=="}));
        let failed = read(sse.failed(ApiError::WorkerLost).unwrap());
        assert_eq!((&failed["type"], &failed["error"]["code"]), (&json!("error"), &json!("worker_lost")));
        let usage = json!({"input_tokens": 0, "output_tokens": 0, "total_tokens": 0});
        assert_eq!(read(sse.end().unwrap()), json!({"type": "speech.audio.done", "usage": usage}));
    }
}
