//! Recordings in compressed files: MP3, FLAC, Vorbis in Ogg, AAC in MP4 or ADTS, decoded by `symphonia` to the
//! mean of the channels as 16 bit integers.
//!
//! Time and memory are bounded by the file's length and by the limits below; the decoder's panics are errors. A
//! damaged or cut off file is refused, not played in part. Its packets are counted before any is decoded, since a
//! file of a few kilobytes can have hours of silence.

use crate::{Collector, Error, MAX_CHANNELS, Recording, Taken, wrong};
use memchr::memmem;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use symphonia::core::audio::GenericAudioBufferRef;
use symphonia::core::codecs::audio::well_known::{CODEC_ID_FLAC, CODEC_ID_VORBIS};
use symphonia::core::codecs::audio::{AudioCodecId, AudioCodecParameters, AudioDecoderOptions};
use symphonia::core::errors::Error as Fault;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;
use symphonia::core::units::TimeBase;

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
/// Longest header of a frame of ADTS.
const ADTS_HEADER: usize = 9;
/// The start of Ogg's pages, and the length of their head.
const PAGE: &[u8] = b"OggS";
const PAGE_HEAD: usize = 27;
/// Length of Vorbis' first header.
const VORBIS_HEAD: usize = 30;

/// Whether the file begins like one that can be read.
pub(crate) fn is_one(bytes: &[u8]) -> bool {
    let begins = |magic: &[u8]| bytes.starts_with(magic);
    // The sync word of MP3 and ADTS frames.
    let frame = matches!(bytes, [0xff, second, ..] if second & 0xe0 == 0xe0);
    frame || begins(b"ID3") || begins(b"fLaC") || begins(PAGE) || bytes.get(4..8) == Some(b"ftyp")
}

pub(crate) fn read(bytes: &[u8], taken: Taken<'_>) -> Result<Recording, Error> {
    let failed = |_| Err(wrong("makes the decoder fail"));
    catch_unwind(AssertUnwindSafe(|| decode(bytes, taken))).unwrap_or_else(failed)
}

fn fault(error: Fault) -> Error {
    match error {
        Fault::IoError(_) => wrong("is cut off"),
        Fault::ResetRequired => wrong("has several streams, one after the other; one is supported"),
        error => wrong(format!("cannot be decoded: {error}")),
    }
}

/// The packets of a file.
fn open(bytes: &[u8]) -> Result<Box<dyn FormatReader + '_>, Error> {
    let source = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let (format, metadata) = (FormatOptions::default(), MetadataOptions::default());
    symphonia::default::get_probe().probe(&Hint::new(), source, format, metadata).map_err(fault)
}

fn decode(bytes: &[u8], taken: Taken<'_>) -> Result<Recording, Error> {
    if bytes.starts_with(PAGE) {
        check_pages(bytes)?;
    }
    let mut format = open(bytes)?;
    let track = format.default_track(TrackType::Audio).ok_or_else(|| wrong("has no sound"))?;
    let parameters = track.codec_params.as_ref().and_then(|parameters| parameters.audio());
    let parameters = parameters.ok_or_else(|| wrong("is of an unknown codec"))?;
    check_codebooks(parameters)?;
    let (id, expected) = (track.id, track.num_frames);
    let rate = parameters.sample_rate.unwrap_or(0);
    if rate > 0 {
        taken.check(expected.unwrap_or(0), rate)?;
    }
    let unit = track.time_base.filter(|_| rate > 0);
    check_packets(bytes, (id, parameters.codec), (unit, rate), taken)?;
    let options = AudioDecoderOptions::default();
    let mut decoder =
        symphonia::default::get_codecs().make_audio_decoder(parameters, &options).map_err(fault)?;
    let skip = encoder_delay(bytes).unwrap_or(0);
    let mut mono = Mono { skip, ..Mono::default() };
    while let Some(packet) = format.next_packet().map_err(fault)? {
        if packet.track_id != id {
            continue;
        }
        match decoder.decode(&packet) {
            Ok(buffer) => mono.add(&buffer, taken)?,
            Err(Fault::DecodeError(_)) if mono.samples() == 0 => mono.empty += 1,
            Err(error) => return Err(fault(error)),
        }
        if mono.empty > MAX_EMPTY {
            return Err(wrong(format!("has {MAX_EMPTY} packets without sound")));
        }
    }
    let samples = mono.samples();
    match (expected, mono.collector) {
        (Some(expected), _) if samples + skip + MAX_MISSING < expected => {
            Err(wrong(format!("is cut off: it has {samples} of {expected} samples")))
        }
        (_, Some(collector)) => Ok(collector.finish()),
        (_, None) => Err(wrong("has no samples")),
    }
}

/// Checks the number of packets, those of formats whose reader passes over damage, and the length of the track by
/// the times of its packets, if their unit is known.
fn check_packets(
    bytes: &[u8],
    (track, codec): (u32, AudioCodecId),
    (unit, rate): (Option<TimeBase>, u32),
    taken: Taken<'_>,
) -> Result<(), Error> {
    let mut format = open(bytes)?;
    let (mut packets, mut length) = (0, 0u64);
    let flac = codec == CODEC_ID_FLAC;
    // Frames without a container, which the reader looks for.
    let bare = !bytes.starts_with(PAGE) && bytes.get(4..8) != Some(b"ftyp");
    // The end of the last packet, in bytes and in samples.
    let (mut at, mut end) = (0, 0);
    while let Some(packet) = format.next_packet().map_err(fault)? {
        packets += 1;
        if packets > bytes.len() {
            return Err(wrong("has more packets than bytes"));
        }
        if packet.track_id != track {
            continue;
        }
        length = length.saturating_add(packet.dur.get());
        if bare {
            let damaged = || wrong(format!("is damaged behind sample {end}"));
            let gap = memmem::find(&bytes[at..], &packet.data).ok_or_else(damaged)?;
            if packets > 1 && !is_between(&bytes[at..at + gap]) || flac && packet.pts.get() != end {
                return Err(damaged());
            }
            at += gap + packet.data.len();
            end = packet.pts.get().saturating_add_unsigned(packet.dur.get());
        }
    }
    if flac && bare && !(at == bytes.len() || bytes[at..].starts_with(b"TAG")) {
        return Err(wrong(format!("is damaged behind sample {end}")));
    }
    let samples = |unit: TimeBase| {
        let ticks = u128::from(length) * u128::from(unit.numer.get()) * u128::from(rate);
        u64::try_from(ticks / u128::from(unit.denom.get())).unwrap_or(u64::MAX)
    };
    taken.check(unit.map_or(0, samples), rate)
}

/// Whether bytes between two frames are no damage: the header of ADTS, or a tag.
fn is_between(gap: &[u8]) -> bool {
    let tag = |name: &&[u8]| memmem::find(gap, name).is_some();
    let header = gap.len() <= ADTS_HEADER && gap.first().is_none_or(|first| *first == 0xff);
    header || [&b"Xing"[..], b"Info", b"VBRI", b"ID3"].iter().any(tag)
}

/// The mean of the channels.
#[derive(Default)]
struct Mono<'a> {
    channels: usize,
    /// `None` before the first sample.
    collector: Option<Collector<'a>>,
    buffer: Vec<f32>,
    /// Packets without sound.
    empty: u64,
    /// Samples to leave out at the start.
    skip: u64,
}

impl<'a> Mono<'a> {
    fn samples(&self) -> u64 {
        self.collector.as_ref().map_or(0, |collector| collector.samples)
    }

    fn add(&mut self, decoded: &GenericAudioBufferRef<'_>, taken: Taken<'a>) -> Result<(), Error> {
        let (rate, channels) = (decoded.spec().rate(), decoded.spec().channels().count());
        if decoded.frames() == 0 {
            self.empty += 1;
            return Ok(());
        }
        if self.collector.is_none() && (!(1..=usize::from(MAX_CHANNELS)).contains(&channels) || rate == 0) {
            let rule = format!("1 to {MAX_CHANNELS} channels are supported");
            return Err(wrong(format!("has {channels} channels at {rate} Hz; {rule}")));
        }
        let collector = self.collector.get_or_insert_with(|| {
            self.channels = channels;
            Collector::new(rate, true, taken)
        });
        if (rate, channels) != (collector.rate, self.channels) {
            return Err(wrong("changes its sample rate or number of channels"));
        }
        decoded.copy_to_vec_interleaved(&mut self.buffer);
        let left_out = self.skip.min(decoded.frames() as u64);
        self.skip -= left_out;
        let frames = self.buffer.chunks_exact(channels).skip(left_out as usize);
        let mono: Vec<f32> = frames.map(|frame| frame.iter().sum::<f32>() / channels as f32).collect();
        collector.push(&mono)
    }
}

/// Checks that all pages of an Ogg file are complete: the decoder passes over the rest of one that is not.
fn check_pages(mut bytes: &[u8]) -> Result<(), Error> {
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
fn check_codebooks(parameters: &AudioCodecParameters) -> Result<(), Error> {
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
