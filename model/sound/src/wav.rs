//! WAV files of PCM.
//!
//! The crate `hound` refuses files that are read here: with an unknown length of the data, as ffmpeg writes to
//! a pipe, with padding after an odd chunk, or with 32 bit samples and a longer format chunk.

use crate::{Collector, Error, MAX_CHANNELS, PIECE, Recording, Taken, wrong};

/// Format number of integer PCM.
const INTEGERS: u16 = 1;
const FLOATS: u16 = 3;
/// The actual format is in the extension, at [`SUBFORMAT`].
const EXTENSIBLE: u16 = 0xFFFE;
const SUBFORMAT: usize = 24;
/// Data length in a file whose writer did not know it in advance: the data extends to the end of the file.
const UNKNOWN: u32 = u32::MAX;

pub(crate) fn read(bytes: &[u8], taken: Taken<'_>) -> Result<Recording, Error> {
    let (format, samples) = split(bytes)?;
    let Format { channels, sample_rate, kind, bits } = format;
    if !(1..=MAX_CHANNELS).contains(&channels) {
        return Err(wrong(format!("has {channels} channels; 1 to {MAX_CHANNELS} are supported")));
    }
    let sample: fn(&[u8]) -> f32 = match (kind, bits) {
        (INTEGERS, 16) => |b| f32::from(i16::from_le_bytes([b[0], b[1]])) / 32_768.0,
        (INTEGERS, 24) => |b| i32::from_le_bytes([0, b[0], b[1], b[2]]) as f32 / 2_147_483_648.0,
        (INTEGERS, 32) => |b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32 / 2_147_483_648.0,
        (FLOATS, 32) => |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        _ => return Err(format.other("integers of 16, 24 or 32 bits or floats of 32 are read")),
    };
    let width = usize::from(bits / 8);
    let frame = width * usize::from(channels);
    if !samples.len().is_multiple_of(frame) {
        return Err(wrong(format!("{} bytes are no whole number of samples of {frame}", samples.len())));
    }
    taken.check((samples.len() / frame) as u64, sample_rate)?;
    let mean = |frame: &[u8]| frame.chunks(width).map(sample).sum::<f32>() / f32::from(channels);
    let mut collector = Collector::new(sample_rate, (channels, bits) == (1, 16), taken);
    let mut mono = Vec::new();
    for block in samples.chunks(frame * PIECE) {
        mono.clear();
        mono.extend(block.chunks(frame).map(mean));
        collector.push(&mono)?;
    }
    Ok(collector.finish())
}

/// The format and the sample bytes of a file.
fn split(bytes: &[u8]) -> Result<(Format, &[u8]), Error> {
    let mut rest = match (bytes.get(..4), bytes.get(8..12), bytes.get(12..)) {
        (Some(b"RIFF"), Some(b"WAVE"), Some(rest)) => rest,
        _ => {
            return Err(wrong(
                "is no recording that is read: WAV, MP3, FLAC, Vorbis in Ogg, AAC in MP4 or ADTS",
            ));
        }
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
            return Ok((format.ok_or_else(|| wrong("has samples before their format"))?, chunk));
        }
        // Chunks begin at even offsets.
        rest = behind.get(end % 2..).unwrap_or_default();
    }
    Err(wrong("has no samples"))
}

#[derive(Debug, Clone, Copy)]
struct Format {
    channels: u16,
    sample_rate: u32,
    /// [`INTEGERS`], [`FLOATS`], or an unsupported format.
    kind: u16,
    bits: u16,
}

impl Format {
    fn read(chunk: &[u8]) -> Result<Self, Error> {
        let (channels, sample_rate, bits) = (half(chunk, 2)?, word(chunk, 4)?, half(chunk, 14)?);
        let kind = match half(chunk, 0)? {
            EXTENSIBLE => half(chunk, SUBFORMAT)?,
            format => format,
        };
        if sample_rate == 0 {
            return Err(wrong("has 0 samples per second"));
        }
        Ok(Self { channels, sample_rate, kind, bits })
    }

    /// The error for an unsupported format.
    fn other(self, read: &str) -> Error {
        match self.kind {
            INTEGERS => wrong(format!("has samples of {} bit integers; {read}", self.bits)),
            FLOATS => wrong(format!("has samples of {} bit floats; {read}", self.bits)),
            kind => wrong(format!("is compressed (format {kind}); PCM is read")),
        }
    }
}

fn half(bytes: &[u8], at: usize) -> Result<u16, Error> {
    let bytes = bytes
        .get(at..)
        .and_then(|bytes| bytes.first_chunk())
        .ok_or_else(|| wrong("ends within its format"))?;
    Ok(u16::from_le_bytes(*bytes))
}

fn word(bytes: &[u8], at: usize) -> Result<u32, Error> {
    let bytes = bytes
        .get(at..)
        .and_then(|bytes| bytes.first_chunk())
        .ok_or_else(|| wrong("ends within its format"))?;
    Ok(u32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proto::operation::Pcm;

    const TAKEN: Taken<'static> = Taken { rates: &[20, 8_000, 44_100, 16_000], seconds: 1_800 };

    fn read(bytes: &[u8]) -> Result<Recording, Error> {
        super::read(bytes, TAKEN)
    }

    fn chunk(name: &[u8; 4], length: u32, body: &[u8]) -> Vec<u8> {
        [&name[..], &length.to_le_bytes(), body].concat()
    }

    fn format(format: u16, channels: u16, rate: u32, bits: u16) -> Vec<u8> {
        let align = channels * bits / 8;
        let fields: [&[u8]; 6] = [
            &format.to_le_bytes(),
            &channels.to_le_bytes(),
            &rate.to_le_bytes(),
            &(rate * u32::from(align)).to_le_bytes(),
            &align.to_le_bytes(),
            &bits.to_le_bytes(),
        ];
        fields.concat()
    }

    fn file(chunks: &[Vec<u8>]) -> Vec<u8> {
        let body = chunks.concat();
        [&b"RIFF"[..], &(body.len() as u32 + 4).to_le_bytes(), b"WAVE", &body].concat()
    }

    fn with(fmt: &[u8], data: &[u8]) -> Vec<u8> {
        file(&[chunk(b"fmt ", fmt.len() as u32, fmt), chunk(b"data", data.len() as u32, data)])
    }

    fn reason_of(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    #[test]
    fn integer_and_float_samples_are_read() {
        let recording = read(&with(&format(1, 1, 16_000, 16), &[1, 0, 0xff, 0xff])).unwrap();
        assert_eq!(recording, Recording { sample_rate: 16_000, pieces: vec![Pcm::I16(vec![1, -1])] });
        let floats: Vec<u8> = [0.25f32, -0.5].iter().flat_map(|x| x.to_le_bytes()).collect();
        let recording = read(&with(&format(3, 1, 8_000, 32), &floats)).unwrap();
        assert_eq!(recording, Recording { sample_rate: 8_000, pieces: vec![Pcm::F32(vec![0.25, -0.5])] });
        // The form of newer writers: the format number is in the first bytes of a GUID.
        let mut extensible = format(EXTENSIBLE, 1, 16_000, 16);
        extensible
            .extend([22, 0, 16, 0, 4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 16, 0, 128, 0, 0, 170, 0, 56, 155, 113]);
        assert_eq!(read(&with(&extensible, &[1, 0])).unwrap().pieces, [Pcm::I16(vec![1])]);
    }

    #[test]
    fn several_channels_become_their_mean_and_other_widths_floats() {
        let samples = |channels, bits, kind, bytes: &[u8]| {
            read(&with(&format(kind, channels, 44_100, bits), bytes)).unwrap().into_f32()
        };
        assert_eq!(samples(2, 16, INTEGERS, &[0, 64, 0, 0, 0, 128, 0, 128]), [0.25, -1.0]);
        assert_eq!(samples(1, 24, INTEGERS, &[0, 0, 64, 0, 0, 128]), [0.5, -1.0]);
        assert_eq!(samples(1, 32, INTEGERS, &[0, 0, 0, 64]), [0.5]);
        let floats: Vec<u8> = [0.5f32, -0.25].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(samples(2, 32, FLOATS, &floats), [0.125]);
        let error_of = |channels, bits, kind, bytes: &[u8]| {
            reason_of(&with(&format(kind, channels, 8_000, bits), bytes))
        };
        assert!(error_of(9, 16, INTEGERS, &[]).contains("9 channels"));
        assert!(error_of(0, 16, INTEGERS, &[]).contains("0 channels"));
        assert!(error_of(2, 16, INTEGERS, &[0; 6]).contains("no whole number"));
        assert!(error_of(1, 8, INTEGERS, &[0; 6]).contains("8 bit integers"));
        assert!(error_of(1, 0, INTEGERS, &[0; 6]).contains("0 bit integers"));
        assert!(error_of(1, 16, 85, &[0; 6]).contains("format 85"));
        assert!(error_of(1, 32, FLOATS, &f32::NAN.to_le_bytes()).contains("not finite"));
    }

    #[test]
    fn a_recording_is_split_in_order_and_has_a_limit() {
        let samples: Vec<i16> = (0..40_000).map(|n| n as i16).collect();
        let bytes: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
        let recording = read(&with(&format(1, 1, 16_000, 16), &bytes)).unwrap();
        assert_eq!(recording.pieces.iter().map(Pcm::len).collect::<Vec<_>>(), [16_000, 16_000, 8_000]);
        assert_eq!(recording.samples(), 40_000);
        let whole = recording.pieces.into_iter().flat_map(|piece| match piece {
            Pcm::I16(samples) => samples,
            Pcm::F32(_) => vec![],
        });
        assert_eq!(whole.collect::<Vec<i16>>(), samples);
        let reason = reason_of(&with(&format(1, 1, 20, 16), &bytes));
        assert!(reason.contains("2000 s long, the limit is 1800"), "{reason}");
    }

    #[test]
    fn other_chunks_are_skipped_and_an_unknown_length_means_the_rest() {
        let fmt = format(1, 1, 16_000, 16);
        let odd = [chunk(b"LIST", 3, b"abc"), vec![0]].concat();
        let chunks = [odd, chunk(b"fmt ", 16, &fmt), chunk(b"data", UNKNOWN, &[1, 0, 2, 0])];
        assert_eq!(read(&file(&chunks)).unwrap().pieces, [Pcm::I16(vec![1, 2])]);
        assert_eq!(read(&with(&fmt, &[])).unwrap().samples(), 0);
        assert_eq!(crate::read(&with(&fmt, &[]), TAKEN), Err(wrong("has no samples")));
    }

    #[test]
    fn unsupported_formats_are_named_in_the_error() {
        let fmt = format(1, 1, 16_000, 16);
        for (bytes, why) in [
            (b"RIFX something else".to_vec(), "no recording that is read: WAV, MP3"),
            (vec![], "no recording that is read"),
            (with(&format(3, 1, 16_000, 64), &[0; 8]), "64 bit floats"),
            (with(&format(7, 1, 8_000, 8), &[0; 8]), "format 7"),
            (with(&format(1, 1, 0, 16), &[0; 2]), "0 samples per second"),
            (with(&format(1, 1, 192_001, 16), &[0; 2]), "192001 samples per second"),
            (with(&fmt, &[0; 3]), "no whole number of samples"),
            (with(&fmt[..10], &[0; 2]), "within its format"),
            (file(&[chunk(b"data", 2, &[0; 2])]), "before their format"),
            (file(&[chunk(b"fmt ", 16, &fmt)]), "no samples"),
            (file(&[chunk(b"fmt ", 16, &fmt), chunk(b"data", 9, &[0; 2])]), "within a chunk"),
            (with(&format(3, 1, 8_000, 32), &f32::INFINITY.to_le_bytes()), "not finite"),
        ] {
            let reason = reason_of(&bytes);
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
            // Reading always ends, and returns no more samples than the file has.
            if let Ok(recording) = read(&flipped) {
                prop_assert!(recording.samples() <= whole.len() as u64);
            }
        }
    }
}
