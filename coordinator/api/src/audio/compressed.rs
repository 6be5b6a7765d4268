//! Recordings in compressed files: MP3, FLAC, Vorbis in Ogg, AAC in MP4 or ADTS, decoded by `symphonia` to the
//! mean of the channels as 16 bit integers.
//!
//! The bytes are a stranger's. Time and memory are bounded by the file's length and by the limits below; the
//! decoder's panics are errors. A damaged or cut off file is refused, not played in part.

use super::wav::{MAX_CHANNELS, Recording, wrong};
use super::{MAX_SECONDS, PIECE};
use crate::error::ApiError;
use proto::operation::Pcm;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use symphonia::core::audio::GenericAudioBufferRef;
use symphonia::core::codecs::audio::well_known::CODEC_ID_VORBIS;
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;

/// Most samples: [`MAX_SECONDS`] at 48 kHz.
const MAX_SAMPLES: u64 = MAX_SECONDS * 48_000;
/// Most packets without sound before the first sample, as of an MP3 that was cut out of another one.
const MAX_EMPTY: u64 = 64;
/// Samples that may be missing of those that the file tells: two frames of MP3, whose first ones need earlier
/// frames.
const MAX_MISSING: u64 = 2 * 1_152;
/// Most samples that an encoder of AAC adds at the start.
const MAX_DELAY: u64 = 8_192;
/// Most values of a Vorbis file's codebooks together. Usual files have 100,000; the header could claim a
/// thousand times as many with few bytes.
const MAX_CODEBOOKS: u64 = 1 << 22;
/// The start of Ogg's pages, and the length of their head.
const PAGE: &[u8] = b"OggS";
const PAGE_HEAD: usize = 27;
/// Length of Vorbis' first header.
const VORBIS_HEAD: usize = 30;

/// Whether the file begins like one that can be read.
pub(super) fn is_one(bytes: &[u8]) -> bool {
    let begins = |magic: &[u8]| bytes.starts_with(magic);
    // The sync word of MP3 and ADTS frames.
    let frame = matches!(bytes, [0xff, second, ..] if second & 0xe0 == 0xe0);
    frame || begins(b"ID3") || begins(b"fLaC") || begins(PAGE) || bytes.get(4..8) == Some(b"ftyp")
}

pub(super) fn read(bytes: &[u8]) -> Result<Recording, ApiError> {
    let failed = |_| Err(wrong("makes the decoder fail"));
    catch_unwind(AssertUnwindSafe(|| decode(bytes))).unwrap_or_else(failed)
}

fn fault(error: Error) -> ApiError {
    match error {
        Error::IoError(_) => wrong("is cut off"),
        Error::ResetRequired => wrong("has several streams, one after the other; one is supported"),
        error => wrong(format!("cannot be decoded: {error}")),
    }
}

fn decode(bytes: &[u8]) -> Result<Recording, ApiError> {
    if bytes.starts_with(PAGE) {
        check_pages(bytes)?;
    }
    let source = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let (format, metadata) = (FormatOptions::default(), MetadataOptions::default());
    let mut format =
        symphonia::default::get_probe().probe(&Hint::new(), source, format, metadata).map_err(fault)?;
    let track = format.default_track(TrackType::Audio).ok_or_else(|| wrong("has no sound"))?;
    let parameters = track.codec_params.as_ref().and_then(|parameters| parameters.audio());
    let parameters = parameters.ok_or_else(|| wrong("is of an unknown codec"))?;
    check_codebooks(parameters)?;
    let (id, expected) = (track.id, track.num_frames);
    if let (Some(rate), Some(samples)) = (parameters.sample_rate, expected) {
        check_length(samples, rate)?;
    }
    let options = AudioDecoderOptions::default();
    let mut decoder =
        symphonia::default::get_codecs().make_audio_decoder(parameters, &options).map_err(fault)?;
    let skip = encoder_delay(bytes).unwrap_or(0);
    let mut mono = Mono { skip, ..Mono::default() };
    let mut packets = 0;
    while let Some(packet) = format.next_packet().map_err(fault)? {
        packets += 1;
        if packets > bytes.len() {
            return Err(wrong("has more packets than bytes"));
        }
        if packet.track_id != id {
            continue;
        }
        match decoder.decode(&packet) {
            Ok(buffer) => mono.add(&buffer)?,
            Err(Error::DecodeError(_)) if mono.samples == 0 => mono.empty += 1,
            Err(error) => return Err(fault(error)),
        }
        if mono.empty > MAX_EMPTY {
            return Err(wrong(format!("has {MAX_EMPTY} packets without sound")));
        }
    }
    let Mono { sample_rate, samples, .. } = mono;
    match expected {
        Some(expected) if samples + skip + MAX_MISSING < expected => {
            Err(wrong(format!("is cut off: it has {samples} of {expected} samples")))
        }
        _ if samples == 0 => Err(wrong("has no samples")),
        _ => Ok(Recording { sample_rate, pieces: mono.pieces() }),
    }
}

fn check_length(samples: u64, rate: u32) -> Result<(), ApiError> {
    if samples > MAX_SECONDS.saturating_mul(rate.into()) {
        let seconds = samples / u64::from(rate.max(1));
        return Err(wrong(format!("is {seconds} s long, the limit is {MAX_SECONDS} s")));
    }
    match samples > MAX_SAMPLES {
        true => Err(wrong(format!("has more than {MAX_SAMPLES} samples, which is the limit"))),
        false => Ok(()),
    }
}

/// The mean of the channels, in messages of [`PIECE`] samples.
#[derive(Default)]
struct Mono {
    sample_rate: u32,
    channels: usize,
    samples: u64,
    pieces: Vec<Pcm>,
    last: Vec<i16>,
    buffer: Vec<f32>,
    /// Packets without sound.
    empty: u64,
    /// Samples to leave out at the start.
    skip: u64,
}

impl Mono {
    fn add(&mut self, decoded: &GenericAudioBufferRef<'_>) -> Result<(), ApiError> {
        let (rate, channels) = (decoded.spec().rate(), decoded.spec().channels().count());
        if decoded.frames() == 0 {
            self.empty += 1;
            return Ok(());
        }
        if self.channels == 0 {
            if !(1..=usize::from(MAX_CHANNELS)).contains(&channels) || rate == 0 {
                let rule = format!("1 to {MAX_CHANNELS} channels are supported");
                return Err(wrong(format!("has {channels} channels at {rate} Hz; {rule}")));
            }
            (self.sample_rate, self.channels) = (rate, channels);
        }
        if (rate, channels) != (self.sample_rate, self.channels) {
            return Err(wrong("changes its sample rate or number of channels"));
        }
        check_length(self.samples + decoded.frames() as u64, rate)?;
        let mut buffer = std::mem::take(&mut self.buffer);
        decoded.copy_to_vec_interleaved(&mut buffer);
        let left_out = self.skip.min(decoded.frames() as u64);
        self.skip -= left_out;
        for frame in buffer.chunks_exact(channels).skip(left_out as usize) {
            let mean = frame.iter().sum::<f32>() / channels as f32;
            if !mean.is_finite() {
                return Err(wrong(format!("sample {} is not finite", self.samples)));
            }
            // Saturates.
            self.last.push((mean * 32_768.0).round() as i16);
            self.samples += 1;
            if self.last.len() == PIECE {
                self.pieces.push(Pcm::I16(std::mem::replace(&mut self.last, Vec::with_capacity(PIECE))));
            }
        }
        self.buffer = buffer;
        Ok(())
    }

    fn pieces(mut self) -> Vec<Pcm> {
        if !self.last.is_empty() {
            self.pieces.push(Pcm::I16(self.last));
        }
        self.pieces
    }
}

/// Checks that all pages of an Ogg file are complete: the decoder passes over the rest of one that is not.
fn check_pages(mut bytes: &[u8]) -> Result<(), ApiError> {
    while !bytes.is_empty() {
        let length = bytes.get(PAGE_HEAD - 1).and_then(|segments| {
            let table = bytes.get(PAGE_HEAD..PAGE_HEAD + usize::from(*segments))?;
            Some(PAGE_HEAD + table.len() + table.iter().map(|length| usize::from(*length)).sum::<usize>())
        });
        bytes = length.and_then(|length| bytes.get(length..)).ok_or_else(|| wrong("is cut off"))?;
        if !PAGE.starts_with(bytes.get(..PAGE.len()).unwrap_or_default()) {
            return Err(wrong("has bytes that are no page of Ogg"));
        }
    }
    Ok(())
}

/// The samples before the recording's start, which the edit list of an MP4 file with one track tells.
fn encoder_delay(file: &[u8]) -> Option<u64> {
    let tracks = atoms(atoms(file).find(|(kind, _)| *kind == b"moov")?.1);
    let mut tracks = tracks.filter(|(kind, _)| *kind == b"trak").map(|(_, body)| body);
    let (track, None) = (tracks.next()?, tracks.next()) else { return None };
    let within = |body, name: &[u8; 4]| atoms(body).find(|(kind, _)| *kind == name).map(|(_, body)| body);
    let list = within(within(track, b"edts")?, b"elst")?;
    // Version, flags, number of entries; of the first one: duration, start in the medium.
    let start = match list.first()? {
        0 => i64::from(i32::from_be_bytes(*list.get(12..)?.first_chunk()?)),
        _ => i64::from_be_bytes(*list.get(16..)?.first_chunk()?),
    };
    // An encoder adds a few packets. Another list is none of an encoder.
    u64::try_from(start).ok().filter(|start| *start <= MAX_DELAY)
}

/// The boxes of MP4 in `bytes`: name and content.
fn atoms(mut bytes: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    std::iter::from_fn(move || {
        let (size, kind) = (u32::from_be_bytes(*bytes.first_chunk()?), bytes.get(4..8)?);
        let (head, size) = match size {
            0 => (8, bytes.len()),
            1 => (16, usize::try_from(u64::from_be_bytes(*bytes.get(8..)?.first_chunk()?)).ok()?),
            size => (8, size as usize),
        };
        let body = bytes.get(head..size)?;
        bytes = &bytes[size..];
        Some((kind, body))
    })
}

/// Checks the size of the tables that a Vorbis decoder makes of the header.
fn check_codebooks(parameters: &AudioCodecParameters) -> Result<(), ApiError> {
    if parameters.codec != CODEC_ID_VORBIS {
        return Ok(());
    }
    let setup = parameters.extra_data.as_deref().and_then(|data| data.get(VORBIS_HEAD..)).unwrap_or_default();
    match codebook_values(setup) {
        Some(values) if values > MAX_CODEBOOKS => {
            Err(wrong(format!("has codebooks of more than {MAX_CODEBOOKS} values, which is the limit")))
        }
        // The decoder reports a header that is cut off.
        _ => Ok(()),
    }
}

/// The number of values of all codebooks of a Vorbis setup header; of a longer one, of those that exceed the
/// limit. `None` if the header is cut off.
fn codebook_values(setup: &[u8]) -> Option<u64> {
    let mut bits = Bits { bytes: setup.strip_prefix(b"\x05vorbis")?, at: 0 };
    let mut values = 0;
    for _ in 0..=bits.take(8)? {
        let _sync = bits.take(24)?;
        let (dimensions, entries) = (bits.take(16)?, bits.take(24)?);
        if bits.take(1)? == 1 {
            // Ordered by length: the number of entries of each length.
            bits.take(5)?;
            let mut entry = 0;
            while entry < entries {
                entry += bits.take(u32::BITS - (entries - entry).leading_zeros())?;
            }
        } else {
            let sparse = bits.take(1)? == 1;
            for _ in 0..entries {
                if !sparse || bits.take(1)? == 1 {
                    bits.take(5)?;
                }
            }
        }
        let table = u64::from(entries) * u64::from(dimensions);
        let lookup = bits.take(4)?;
        values += if lookup == 0 { entries.into() } else { table };
        if values > MAX_CODEBOOKS {
            return Some(values);
        }
        if lookup != 0 {
            bits.take(32)?;
            bits.take(32)?;
            let width = bits.take(4)? + 1;
            bits.take(1)?;
            let stored = if lookup == 1 { root(entries, dimensions) } else { table };
            bits.skip(stored * u64::from(width))?;
        }
    }
    Some(values)
}

/// The largest number whose power is at most `entries`.
fn root(entries: u32, dimensions: u32) -> u64 {
    let fits = |number: u64| number.checked_pow(dimensions).is_some_and(|power| power <= entries.into());
    (1..=u64::from(entries)).take_while(|number| dimensions > 0 && fits(*number)).last().unwrap_or(0)
}

/// Bits of a Vorbis header, the lowest of a byte first.
struct Bits<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Bits<'_> {
    fn take(&mut self, count: u32) -> Option<u32> {
        let mut value = 0;
        for bit in 0..count {
            let byte = self.bytes.get(self.at / 8)?;
            value |= u32::from(byte >> (self.at % 8) & 1) << bit;
            self.at += 1;
        }
        Some(value)
    }

    fn skip(&mut self, count: u64) -> Option<()> {
        self.at = self.at.checked_add(usize::try_from(count).ok()?)?;
        Some(())
    }
}

#[cfg(test)]
mod tests;
