//! Files of half a second of a rising tone at 16 kHz (`stereo.mp3`: of a fifth, at 44.1 kHz), made by ffmpeg.

use super::super::wav;
use super::*;
use proptest::prelude::*;
use std::f64::consts::TAU;
use std::time::Instant;

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

fn samples(recording: Recording) -> Vec<f32> {
    recording.pieces.into_iter().flat_map(Pcm::into_f32).collect()
}

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
    match wav::read_any(bytes) {
        Err(ApiError::InvalidField { field, reason }) if field == "body" => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_format_has_the_tone() {
    for (name, bytes) in FILES {
        let recording = wav::read(bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(recording.sample_rate, 16_000, "{name}");
        let samples = samples(recording);
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
    let stereo = wav::read_any(include_bytes!("stereo.mp3")).unwrap();
    assert_eq!(stereo.sample_rate, 44_100);
    let like = likeness(&samples(stereo), 44_100.0, 0);
    assert!(like > 0.99, "{like}");
}

#[test]
fn a_file_that_is_cut_off_or_damaged_is_refused() {
    for (name, bytes) in FILES {
        for cut in [12, bytes.len() / 3, bytes.len() / 2, bytes.len() - 40] {
            match wav::read_any(&bytes[..cut]) {
                Err(ApiError::InvalidField { field, .. }) => assert_eq!(field, "body", "{name} {cut}"),
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
        if let Ok(recording) = wav::read_any(&bytes) {
            prop_assert!(recording.samples() <= MAX_SAMPLES);
        }
        prop_assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
    }
}
