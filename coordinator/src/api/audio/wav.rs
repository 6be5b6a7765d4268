//! WAV files of one channel, as they are sent in a body: 16 bit or 32 bit floats. Nothing is converted: a rate that a
//! model does not take is its worker's to refuse.

use crate::api::error::ApiError;
use crate::api::operations::Encoding;
use proto::operation::Pcm;

/// Formats, by the numbers that files have for them.
const INTEGERS: u16 = 1;
const FLOATS: u16 = 3;
/// What it is stands behind the rest of the format.
const EXTENSIBLE: u16 = 0xFFFE;
/// Where that is.
const SUBFORMAT: usize = 24;
/// Length of the samples in a file whose writer did not know it when it began: all that comes.
const UNKNOWN: u32 = u32::MAX;

/// What was recorded.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Recording {
    /// Samples per second; above 0.
    pub(super) sample_rate: u32,
    pub(super) pcm: Pcm,
}

/// Reads a file.
pub(super) fn read(bytes: &[u8]) -> Result<Recording, ApiError> {
    let mut rest = match (bytes.get(..4), bytes.get(8..12), bytes.get(12..)) {
        (Some(b"RIFF"), Some(b"WAVE"), Some(rest)) => rest,
        _ => return Err(wrong("is no WAV file")),
    };
    let mut format = None;
    while let Some((head, body)) = rest.split_at_checked(8) {
        let length = word(head, 4)?;
        let is_data = head.starts_with(b"data");
        let end = match length {
            UNKNOWN if is_data => body.len(),
            length => length as usize,
        };
        let (chunk, behind) = body.split_at_checked(end).ok_or_else(|| wrong("ends within a chunk"))?;
        if head.starts_with(b"fmt ") {
            format = Some(Format::read(chunk)?);
        }
        if is_data {
            let Format { sample_rate, encoding } =
                format.ok_or_else(|| wrong("has samples before their format"))?;
            let pcm = encoding.decode(chunk).map_err(|error| wrong(error.to_string()))?;
            return Ok(Recording { sample_rate, pcm });
        }
        // Chunks begin at even places.
        rest = behind.get(end % 2..).unwrap_or_default();
    }
    Err(wrong("has no samples"))
}

#[derive(Debug, Clone, Copy)]
struct Format {
    sample_rate: u32,
    encoding: Encoding,
}

impl Format {
    fn read(chunk: &[u8]) -> Result<Self, ApiError> {
        let (channels, sample_rate, bits) = (half(chunk, 2)?, word(chunk, 4)?, half(chunk, 14)?);
        let format = match half(chunk, 0)? {
            EXTENSIBLE => half(chunk, SUBFORMAT)?,
            format => format,
        };
        if channels != 1 {
            return Err(wrong(format!("has {channels} channels; one is heard")));
        }
        if sample_rate == 0 {
            return Err(wrong("has 0 samples per second"));
        }
        let encoding = match (format, bits) {
            (INTEGERS, 16) => Encoding::S16le,
            (FLOATS, 32) => Encoding::F32le,
            (INTEGERS | FLOATS, bits) => {
                let kind = if format == FLOATS { "floats" } else { "integers" };
                return Err(wrong(format!(
                    "has samples of {bits} bit {kind}; 16 bit integers or 32 bit floats are read"
                )));
            }
            (format, _) => return Err(wrong(format!("is compressed (format {format}); PCM is read"))),
        };
        Ok(Self { sample_rate, encoding })
    }
}

fn half(bytes: &[u8], at: usize) -> Result<u16, ApiError> {
    let bytes = bytes
        .get(at..)
        .and_then(|bytes| bytes.first_chunk())
        .ok_or_else(|| wrong("ends within its format"))?;
    Ok(u16::from_le_bytes(*bytes))
}

fn word(bytes: &[u8], at: usize) -> Result<u32, ApiError> {
    let bytes = bytes
        .get(at..)
        .and_then(|bytes| bytes.first_chunk())
        .ok_or_else(|| wrong("ends within its format"))?;
    Ok(u32::from_le_bytes(*bytes))
}

fn wrong(why: impl Into<String>) -> ApiError {
    ApiError::field("body", why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunk(name: &[u8; 4], length: u32, body: &[u8]) -> Vec<u8> {
        [&name[..], &length.to_le_bytes(), body].concat()
    }

    fn format(format: u16, channels: u16, rate: u32, bits: u16) -> Vec<u8> {
        let align = channels * bits / 8;
        let parts: [&[u8]; 6] = [
            &format.to_le_bytes(),
            &channels.to_le_bytes(),
            &rate.to_le_bytes(),
            &(rate * u32::from(align)).to_le_bytes(),
            &align.to_le_bytes(),
            &bits.to_le_bytes(),
        ];
        parts.concat()
    }

    fn file(chunks: &[Vec<u8>]) -> Vec<u8> {
        let body = chunks.concat();
        [&b"RIFF"[..], &(body.len() as u32 + 4).to_le_bytes(), b"WAVE", &body].concat()
    }

    fn with(fmt: &[u8], data: &[u8]) -> Vec<u8> {
        file(&[chunk(b"fmt ", fmt.len() as u32, fmt), chunk(b"data", data.len() as u32, data)])
    }

    fn told(bytes: &[u8]) -> String {
        match read(bytes) {
            Err(ApiError::InvalidField { field, reason }) if field == "body" => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn both_kinds_of_samples_are_read() {
        let recording = read(&with(&format(1, 1, 16_000, 16), &[1, 0, 0xff, 0xff])).unwrap();
        assert_eq!(recording, Recording { sample_rate: 16_000, pcm: Pcm::I16(vec![1, -1]) });
        let floats: Vec<u8> = [0.25f32, -0.5].iter().flat_map(|x| x.to_le_bytes()).collect();
        let recording = read(&with(&format(3, 1, 8_000, 32), &floats)).unwrap();
        assert_eq!(recording, Recording { sample_rate: 8_000, pcm: Pcm::F32(vec![0.25, -0.5]) });
        // As newer writers put it: the format stands in the first bytes of a GUID.
        let mut extensible = format(EXTENSIBLE, 1, 16_000, 16);
        extensible
            .extend([22, 0, 16, 0, 4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 16, 0, 128, 0, 0, 170, 0, 56, 155, 113]);
        assert_eq!(read(&with(&extensible, &[1, 0])).unwrap().pcm, Pcm::I16(vec![1]));
    }

    #[test]
    fn other_chunks_are_passed_over_and_an_unknown_length_is_the_rest() {
        let fmt = format(1, 1, 16_000, 16);
        let odd = [chunk(b"LIST", 3, b"abc"), vec![0]].concat();
        let chunks = [odd, chunk(b"fmt ", 16, &fmt), chunk(b"data", UNKNOWN, &[1, 0, 2, 0])];
        assert_eq!(read(&file(&chunks)).unwrap().pcm, Pcm::I16(vec![1, 2]));
        let nothing = read(&with(&fmt, &[])).unwrap();
        assert!(nothing.pcm.is_empty());
    }

    #[test]
    fn what_is_not_read_is_named() {
        let fmt = format(1, 1, 16_000, 16);
        for (bytes, why) in [
            (b"ID3 something else".to_vec(), "no WAV file"),
            (vec![], "no WAV file"),
            (with(&format(1, 2, 16_000, 16), &[0; 4]), "2 channels"),
            (with(&format(1, 1, 16_000, 24), &[0; 3]), "24 bit integers"),
            (with(&format(3, 1, 16_000, 64), &[0; 8]), "64 bit floats"),
            (with(&format(7, 1, 8_000, 8), &[0; 8]), "format 7"),
            (with(&format(1, 1, 0, 16), &[0; 2]), "0 samples per second"),
            (with(&fmt, &[0; 3]), "no whole number of samples"),
            (with(&fmt[..10], &[0; 2]), "within its format"),
            (file(&[chunk(b"data", 2, &[0; 2])]), "before their format"),
            (file(&[chunk(b"fmt ", 16, &fmt)]), "no samples"),
            (file(&[chunk(b"fmt ", 16, &fmt), chunk(b"data", 9, &[0; 2])]), "within a chunk"),
            (with(&format(3, 1, 8_000, 32), &f32::INFINITY.to_le_bytes()), "not finite"),
        ] {
            let reason = told(&bytes);
            assert!(reason.contains(why), "{reason} is not {why}");
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..60) {
            let whole = with(&format(1, 1, 16_000, 16), &bytes[..bytes.len() & !1]);
            prop_assert!(read(&whole).is_ok());
            let torn = &whole[..whole.len().min(cut)];
            if cut < whole.len() {
                prop_assert!(read(torn).is_err());
            }
            let mut flipped = whole.clone();
            for (at, byte) in bytes.iter().take(20).enumerate() {
                flipped[at * 3 % 44] ^= byte;
            }
            // Either way: it ends, and gives no more than there was.
            if let Ok(recording) = read(&flipped) {
                prop_assert!(recording.pcm.len() <= whole.len());
            }
        }
    }
}
