//! Files of half a second of a rising tone at 16 kHz (`stereo.mp3`: of a fifth, at 44.1 kHz), made by ffmpeg.

use super::*;
use proptest::prelude::*;
use std::f64::consts::TAU;
use std::time::Instant;
use symphonia::core::checksum::{Crc8Ccitt, Crc16Ansi};
use symphonia::core::io::Monitor;

const FILES: [(&str, &[u8]); 5] = [
    ("flac", include_bytes!("tone.flac")),
    ("mp3", include_bytes!("tone.mp3")),
    ("ogg", include_bytes!("tone.ogg")),
    ("m4a", include_bytes!("tone.m4a")),
    ("aac", include_bytes!("tone.aac")),
];
const RATE: f64 = 16_000.0;
/// Samples of the tone.
const SAMPLES: usize = 8_000;

const TAKEN: Taken<'static> = Taken { rates: &[44_100, 16_000], seconds: 1_800 };

/// The tone, `seconds` after its begin.
fn tone(seconds: f64) -> f64 {
    0.5 * (TAU * (200.0 + 200.0 * seconds * RATE / SAMPLES as f64) * seconds).sin()
}

/// The cosine of samples and the tone that starts at sample `from`.
fn likeness(samples: &[f32], rate: f64, from: usize) -> f64 {
    let pairs =
        samples[from..].iter().enumerate().map(|(at, sample)| (f64::from(*sample), tone(at as f64 / rate)));
    let (dot, a, b) = pairs.fold((0.0, 0.0, 0.0), |(dot, a, b), (x, y)| (dot + x * y, a + x * x, b + y * y));
    dot / (a * b).sqrt()
}

fn reason(bytes: &[u8]) -> String {
    crate::read(bytes, TAKEN).map(|recording| recording.samples()).unwrap_err().to_string()
}

#[test]
fn each_format_has_the_tone() {
    for (name, bytes) in FILES {
        let recording = crate::read(bytes, TAKEN).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(recording.sample_rate, 16_000, "{name}");
        let samples = recording.into_f32();
        // ADTS does not tell how many samples the encoder has put before the first one.
        let (start, longest) = if name == "aac" { (1024, SAMPLES + 3 * 1024) } else { (0, SAMPLES + 1024) };
        assert!((SAMPLES..=longest).contains(&samples.len()), "{name}: {} samples", samples.len());
        let like = likeness(&samples[..start + SAMPLES], RATE, start);
        println!("{name}: {} samples, cosine {like}", samples.len());
        assert!(like > 0.99, "{name}: {like}");
        if name == "flac" {
            let exact = |at: usize| (tone(at as f64 / RATE) * 32_768.0).round() / 32_768.0;
            assert!(samples.iter().enumerate().all(|(at, sample)| f64::from(*sample) == exact(at)));
        }
    }
    let stereo = crate::read(include_bytes!("stereo.mp3"), TAKEN).unwrap();
    assert_eq!(stereo.sample_rate, 44_100);
    let like = likeness(&stereo.into_f32(), 44_100.0, 0);
    assert!(like > 0.99, "{like}");
}

#[test]
fn a_file_that_is_cut_off_or_damaged_is_refused() {
    for (name, bytes) in FILES {
        for cut in [12, bytes.len() / 3, bytes.len() / 2, bytes.len() - 40] {
            match crate::read(&bytes[..cut], TAKEN) {
                Err(Error::Form(_)) => {}
                // The last packets of MP3 may be missing. Packets of ADTS do not tell how many there are.
                Ok(recording) => {
                    let missing = SAMPLES as u64 - recording.samples().min(SAMPLES as u64);
                    assert!(
                        name == "aac" || name == "mp3" && missing <= MAX_MISSING,
                        "{name} {cut}: {missing}"
                    );
                }
                other => panic!("{name} {cut}: {other:?}"),
            }
        }
    }
    let said = reason(b"ID3 and what follows");
    assert!(said.contains("cannot be decoded") && said.contains("id3v2"), "{said}");
    assert!(reason(b"fLaC").contains("cut off"));
    assert!(reason(&[0xff; 64]).contains("cannot be decoded"), "{}", reason(&[0xff; 64]));
    let mut long = FILES[0].1.to_vec();
    // The number of samples in FLAC's first block, 36 bits.
    long[21] |= 0x0f;
    let said = reason(&long);
    assert!(said.contains("s long, the limit is 1800 s"), "{said}");
}

/// A file of FLAC with frames of silence and no number of samples.
fn silence(rate: u32, frames: u8) -> Vec<u8> {
    const BLOCK: [u8; 2] = u16::MAX.to_be_bytes();
    let mut file = b"fLaC\x80\0\0\x22".to_vec();
    file.extend([BLOCK, BLOCK].concat());
    file.extend([0; 6]);
    // One channel of 16 bits.
    file.extend((u64::from(rate) << 44 | 15 << 36).to_be_bytes());
    file.extend([0; 16]);
    for number in 0..frames {
        // The length of the block is behind the number. The subframe is constant.
        let mut frame = vec![0xff, 0xf8, 0x70, 0x08, number, 0xff, 0xfe];
        let mut sum = Crc8Ccitt::new(0);
        sum.process_buf_bytes(&frame);
        frame.extend([sum.crc(), 0, 0, 0]);
        let mut sum = Crc16Ansi::new(0);
        sum.process_buf_bytes(&frame);
        frame.extend(sum.crc().to_be_bytes());
        file.extend(frame);
    }
    file
}

#[test]
fn hours_of_silence_in_a_small_file_are_refused_before_they_are_decoded() {
    let read = crate::read(&silence(8_000, 4), TAKEN).unwrap();
    assert_eq!((read.sample_rate, read.samples()), (16_000, 4 * 2 * 65_535));
    // A second: 65,535 samples.
    let file = silence(65_535, 101);
    assert!(file.len() < 2_000);
    let taken = Taken { seconds: 100, ..TAKEN };
    assert_eq!(crate::read(&file, taken), Err(Error::Long { seconds: 101, limit: 100 }));
    let taken = Taken { seconds: 101, ..TAKEN };
    assert_eq!(crate::read(&file, taken), Err(Error::Samples { limit: 101 * 48_000 }));
    assert!(reason(&silence(655_350, 2)).contains("has 655350 samples per second"));
}

#[test]
fn damage_of_a_frame_and_missing_frames_are_found() {
    let file = silence(8_000, 4);
    let frame = (file.len() - 42) / 4;
    for at in [42 + 9, 42 + 2 * frame + 9, file.len() - 1] {
        let mut file = file.clone();
        file[at] ^= 1;
        assert!(reason(&file).contains("is damaged"), "{at}: {}", reason(&file));
    }
    let missing = [&file[..42 + frame], &file[42 + 2 * frame..]].concat();
    assert_eq!(reason(&missing), "is damaged behind sample 65535");
    // Half a second of frames, several times; those of the MP3 are behind a tag and a frame with the length.
    for (name, one) in [("mp3", &FILES[1].1[200..]), ("aac", FILES[4].1)] {
        let long = one.repeat(8);
        let read = crate::read(&long, TAKEN).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(read.samples() >= 8 * SAMPLES as u64, "{name}");
        let middle = long.len() / 2 + 500;
        let damaged = [&long[..middle], &long[middle + 100..]].concat();
        assert!(reason(&damaged).contains("is damaged behind sample"), "{name}: {}", reason(&damaged));
    }
}

/// A Vorbis setup header with `books` ordered codebooks of as many values as the decoder takes.
fn bomb(books: u8) -> Vec<u8> {
    let mut bits: Vec<bool> = Vec::new();
    let mut put = |value: u64, count: u32| bits.extend((0..count).map(|bit| value >> bit & 1 == 1));
    put(u64::from(books) - 1, 8);
    for _ in 0..books {
        put(0x56_4342, 24);
        put(32, 16);
        put(1 << 17, 24);
        put(1, 1);
        put(16, 5);
        // All entries have 17 bits.
        put(1 << 17, 18);
        put(1, 4);
        put(0, 64);
        put(0, 4);
        put(0, 1);
        // One value, whose power with 32 dimensions is at most the number of entries.
        put(0, 1);
    }
    let byte = |bits: &[bool]| bits.iter().rev().fold(0u8, |byte, bit| byte << 1 | u8::from(*bit));
    [b"\x05vorbis".to_vec(), bits.chunks(8).map(byte).collect()].concat()
}

#[test]
fn codebooks_that_are_larger_than_their_bytes_are_counted() {
    assert_eq!(codebook_values(&bomb(1)), Some(1 << 22));
    let header = bomb(200);
    assert!(header.len() < 5_000);
    assert!(codebook_values(&header).is_some_and(|values| values > MAX_CODEBOOKS));
    assert_eq!(codebook_values(&header[..20]), None, "cut off");
    // The real one's.
    let ogg = FILES[2].1;
    let at = ogg.windows(7).position(|bytes| bytes == b"\x05vorbis").unwrap();
    let values = codebook_values(&ogg[at..]).unwrap();
    assert!((1_000..1_000_000).contains(&values), "{values}");
    assert_eq!((root(1 << 17, 32), root(26, 3), root(27, 3), root(5, 1), root(5, 0)), (1, 2, 3, 5, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Whatever comes is read or refused, and soon.
    #[test]
    fn damage_ends_with_an_error_or_samples(
        file in 0usize..5,
        cut in 0usize..14_000,
        changes in proptest::collection::vec((0usize..14_000, any::<u8>()), 0..12),
    ) {
        let mut bytes = FILES[file].1.to_vec();
        bytes.truncate(cut.max(4));
        let length = bytes.len();
        for (at, byte) in changes {
            bytes[at % length] = byte;
        }
        let started = Instant::now();
        if let Ok(recording) = crate::read(&bytes, TAKEN) {
            prop_assert!(recording.samples() <= 1_800 * 48_000);
        }
        prop_assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
    }
}
