//! Recordings as samples of one channel: reads WAV files and compressed ones, and resamples.
//!
//! The bytes are a stranger's. Time and memory are bounded by the file's length and the limit of the caller: samples
//! are resampled as they are decoded, and only the result is held.
//! Must not contain: operations, connections.

mod compressed;
mod resample;
mod wav;

pub use resample::{Resampler, dot};

use proto::operation::Pcm;
use std::ops::RangeInclusive;

/// Samples of a piece of a recording.
const PIECE: usize = 16_000;
/// Most channels of a file.
const MAX_CHANNELS: u16 = 8;
/// Sample rates of files that are resampled.
const RATES: RangeInclusive<u32> = 8_000..=192_000;
/// Highest sample rate at which a recording may have its whole length. At higher rates it must be shorter.
const FULL_RATE: u64 = 48_000;

/// A file that is not read. The text is its predicate, such as `is cut off`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It is damaged, or of a form that is not read.
    #[error("{0}")]
    Form(String),
    /// It has more sound than the caller takes.
    #[error("is {seconds} s long, the limit is {limit} s")]
    Long {
        seconds: u64,
        /// Longest recording, in seconds.
        limit: u64,
    },
    /// It has more samples than may be decoded.
    #[error("has more than {limit} samples, which is the limit")]
    Samples { limit: u64 },
}

fn wrong(why: impl Into<String>) -> Error {
    Error::Form(why.into())
}

/// The samples that a caller takes.
#[derive(Debug, Clone, Copy)]
pub struct Taken<'a> {
    /// Sample rates. A file of another rate is resampled to the last one.
    pub rates: &'a [u32],
    /// Longest recording, in seconds.
    pub seconds: u64,
}

impl Taken<'_> {
    fn check(self, samples: u64, rate: u32) -> Result<(), Error> {
        if !self.rates.contains(&rate) && !RATES.contains(&rate) {
            let (least, most) = (RATES.start(), RATES.end());
            return Err(wrong(format!("has {rate} samples per second; {least} to {most} are read")));
        }
        if samples > self.seconds.saturating_mul(rate.into()) {
            let seconds = samples / u64::from(rate.max(1));
            return Err(Error::Long { seconds, limit: self.seconds });
        }
        let limit = self.seconds.saturating_mul(FULL_RATE);
        if samples > limit { Err(Error::Samples { limit }) } else { Ok(()) }
    }
}

/// The mean of a file's channels.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// Samples per second, at least 1.
    pub sample_rate: u32,
    /// Pieces of 16,000 samples but for the last. 16 bit integers for a file of such, and for a compressed one.
    pub pieces: Vec<Pcm>,
}

impl Recording {
    /// Number of samples.
    pub fn samples(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }

    /// All samples, full scale 1.
    pub fn into_f32(self) -> Vec<f32> {
        self.pieces.into_iter().flat_map(Pcm::into_f32).collect()
    }
}

/// Reads a file: WAV of PCM, or MP3, FLAC, Vorbis in Ogg, AAC in MP4 or ADTS. The first bytes tell which.
///
/// # Errors
/// The fault of the file.
pub fn read(bytes: &[u8], taken: Taken<'_>) -> Result<Recording, Error> {
    let read = if compressed::is_one(bytes) { compressed::read } else { wav::read };
    let recording = read(bytes, taken)?;
    if recording.pieces.is_empty() { Err(wrong("has no samples")) } else { Ok(recording) }
}

/// Collects decoded samples as a recording.
struct Collector<'a> {
    taken: Taken<'a>,
    /// Whether the samples are kept as 16 bit integers.
    short: bool,
    /// Of the file.
    rate: u32,
    resampler: Resampler,
    /// Of the recording.
    sample_rate: u32,
    /// Samples of the file.
    samples: u64,
    pieces: Vec<Pcm>,
    /// Samples of the next piece.
    last: Vec<f32>,
}

impl<'a> Collector<'a> {
    /// For a file of `rate` samples per second, above 0.
    fn new(rate: u32, short: bool, taken: Taken<'a>) -> Self {
        let kept = taken.rates.contains(&rate);
        let sample_rate = taken.rates.last().copied().filter(|_| !kept).unwrap_or(rate);
        let resampler = Resampler::of_file(rate, sample_rate);
        Self { taken, short, rate, resampler, sample_rate, samples: 0, pieces: Vec::new(), last: Vec::new() }
    }

    /// Takes samples, full scale 1.
    fn push(&mut self, samples: &[f32]) -> Result<(), Error> {
        self.taken.check(self.samples + samples.len() as u64, self.rate)?;
        if let Some(at) = samples.iter().position(|sample| !sample.is_finite()) {
            return Err(wrong(format!("sample {} is not finite", self.samples + at as u64)));
        }
        self.samples += samples.len() as u64;
        self.resampler.push(samples, &mut self.last);
        let whole = self.last.len() - self.last.len() % PIECE;
        let (pieces, _) = self.last[..whole].as_chunks::<PIECE>();
        self.pieces.extend(pieces.iter().map(|piece| pcm(piece, self.short)));
        self.last.drain(..whole);
        Ok(())
    }

    fn finish(mut self) -> Recording {
        self.resampler.finish(&mut self.last);
        self.pieces.extend(self.last.chunks(PIECE).map(|piece| pcm(piece, self.short)));
        Recording { sample_rate: self.sample_rate, pieces: self.pieces }
    }
}

fn pcm(samples: &[f32], short: bool) -> Pcm {
    match short {
        // Saturates.
        true => Pcm::I16(samples.iter().map(|sample| (sample * 32_768.0).round() as i16).collect()),
        false => Pcm::F32(samples.to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::TAU;

    const TAKEN: Taken<'static> = Taken { rates: &[8_000, 16_000], seconds: 10 };

    fn collect(rate: u32, short: bool, samples: &[f32], chunk: usize) -> Recording {
        let mut collector = Collector::new(rate, short, TAKEN);
        samples.chunks(chunk).for_each(|piece| collector.push(piece).unwrap());
        collector.finish()
    }

    #[test]
    fn samples_of_a_taken_rate_are_kept_and_others_are_resampled() {
        let samples: Vec<f32> = (0..40_000).map(|n| f32::from(n as i16) / 32_768.0).collect();
        for (rate, chunk) in [(8_000, 777), (16_000, 40_000)] {
            for short in [true, false] {
                let kept = collect(rate, short, &samples, chunk);
                assert_eq!(kept.sample_rate, rate);
                assert_eq!(kept.pieces.iter().map(Pcm::len).collect::<Vec<_>>(), [16_000, 16_000, 8_000]);
                assert!(kept.pieces.iter().all(|piece| matches!(piece, Pcm::I16(_)) == short));
                assert_eq!((kept.samples(), kept.into_f32()), (40_000, samples.clone()));
            }
        }
        let tone = |rate: u32| -> Vec<f32> {
            let sample = |n: u32| (0.5 * (TAU * 440.0 * f64::from(n) / f64::from(rate)).sin()) as f32;
            (0..rate).map(sample).collect()
        };
        for rate in [11_025, 44_100, 48_000] {
            let resampled = collect(rate, true, &tone(rate), 1152);
            assert_eq!((resampled.sample_rate, resampled.samples()), (16_000, 16_000), "{rate}");
            let pairs = resampled.into_f32().into_iter().zip(tone(16_000));
            let worst = pairs.skip(100).take(15_800).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-3, "{rate}: {worst}");
        }
        assert_eq!(collect(44_100, true, &[], 1).samples(), 0);
    }

    #[test]
    fn too_much_sound_and_samples_that_are_not_finite_are_refused() {
        let push =
            |rate, samples: &[f32]| Collector::new(rate, false, TAKEN).push(samples).unwrap_err().to_string();
        assert_eq!(push(8_000, &[0.0; 80_001]), "is 10 s long, the limit is 10 s");
        assert_eq!(push(96_000, &[0.0; 480_001]), "has more than 480000 samples, which is the limit");
        assert_eq!(push(8_000, &[0.0, f32::NAN]), "sample 1 is not finite");
        assert_eq!(push(7_999, &[0.0]), "has 7999 samples per second; 8000 to 192000 are read");
        assert_eq!(push(192_001, &[0.0]), "has 192001 samples per second; 8000 to 192000 are read");
        assert_eq!(pcm(&[1.0, -1.0, 2.0], true), Pcm::I16(vec![i16::MAX, i16::MIN, i16::MAX]));
    }
}
