//! Input features of Whisper's encoder: the logarithm of the power in 80 or more bands of the mel scale, for
//! every 10 ms. Windows (Hann) have 25 ms. The audio is padded by reflection at both ends, so that a frame is
//! at the center of its window. Bands are Slaney's. Values more than 80 dB below the loudest one are raised
//! to that level. For smart-turn, eight seconds are first normalized to mean 0 and variance 1; recordings are
//! used as they are. Networks of speakers take the power itself ([`LogMel::power`]).

use realfft::num_complex::Complex;
use realfft::{RealFftPlanner, RealToComplex};
use std::f64::consts::PI;
use std::ops::Range;
use std::sync::Arc;

pub(crate) const RATE: u32 = 16_000;
/// Samples of smart-turn's input: eight seconds.
pub(crate) const SAMPLES: usize = 8 * RATE as usize;
/// Bands of smart-turn's input.
pub(crate) const BANDS: usize = 80;
/// Frames of smart-turn's input, one for each hop.
pub(crate) const FRAMES: usize = SAMPLES / HOP;

/// Samples from one frame to the next.
pub(crate) const FRAME: usize = HOP;

const WINDOW: usize = 400;
const HOP: usize = 160;
/// Samples of silence appended to a recording, as in `faster-whisper`.
const BEHIND: usize = 160;
const BINS: usize = WINDOW / 2 + 1;
/// Minimum power.
const MIN_POWER: f64 = 1e-10;
/// Decades below the loudest band that are distinguished.
const DECADES: f64 = 8.0;
const VARIANCE_EPSILON: f64 = 1e-7;

/// Precomputed tables for the features.
pub(crate) struct LogMel {
    fft: Arc<dyn RealToComplex<f64>>,
    window: Vec<f64>,
    /// For each band: its first bin, and the weights from there on.
    bands: Vec<(usize, Vec<f64>)>,
}

/// The features of a recording.
pub(crate) struct Spectrogram {
    /// `[band][frame]`
    values: Vec<f32>,
    frames: usize,
    content: usize,
}

impl Spectrogram {
    /// Number of frames with audio. There is one more frame than these.
    pub(crate) fn content(&self) -> usize {
        self.content
    }

    /// `[band][frame]` of the `len` frames from `from` on, padded with zeros to `all` frames.
    pub(crate) fn window(&self, from: usize, len: usize, all: usize) -> Vec<f32> {
        let row = |row: &[f32]| {
            let content = row.iter().skip(from).take(len.min(all)).copied();
            content.chain(std::iter::repeat(0.0)).take(all).collect::<Vec<f32>>()
        };
        self.values.chunks(self.frames.max(1)).flat_map(row).collect()
    }
}

/// Slaney's scale: linear up to 1 kHz, logarithmic above.
fn to_mel(hertz: f64) -> f64 {
    if hertz < 1000.0 { 3.0 * hertz / 200.0 } else { 15.0 + (hertz / 1000.0).ln() * 27.0 / 6.4f64.ln() }
}

fn to_hertz(mel: f64) -> f64 {
    if mel < 15.0 { 200.0 * mel / 3.0 } else { 1000.0 * ((mel - 15.0) * 6.4f64.ln() / 27.0).exp() }
}

/// Triangles with evenly spaced corners on the mel scale, each of the same area.
fn bands(count: usize) -> Vec<(usize, Vec<f64>)> {
    let highest = f64::from(RATE) / 2.0;
    let corner = |n: usize| to_hertz(to_mel(highest) * n as f64 / (count + 1) as f64);
    let band = |n: usize| {
        let [low, top, high] = [corner(n), corner(n + 1), corner(n + 2)];
        let weight = |bin: usize| {
            let hertz = highest * bin as f64 / (BINS - 1) as f64;
            let (up, down) = ((hertz - low) / (top - low), (high - hertz) / (high - top));
            up.min(down).max(0.0) * 2.0 / (high - low)
        };
        let weights: Vec<f64> = (0..BINS).map(weight).collect();
        let first = weights.iter().position(|weight| *weight > 0.0).unwrap_or(0);
        let end = weights.iter().rposition(|weight| *weight > 0.0).map_or(first, |last| last + 1);
        (first, weights[first..end].to_vec())
    };
    (0..count).map(band).collect()
}

impl LogMel {
    pub(crate) fn new(count: usize) -> Self {
        let window = (0..WINDOW).map(|n| 0.5 - 0.5 * (2.0 * PI * n as f64 / WINDOW as f64).cos()).collect();
        Self { fft: RealFftPlanner::new().plan_fft_forward(WINDOW), window, bands: bands(count) }
    }

    /// The features of exactly [`SAMPLES`] samples: `[BANDS, FRAMES]`, row-major.
    ///
    /// # Panics
    /// If the number of samples differs.
    pub(crate) fn features(&self, samples: &[f32]) -> Vec<f32> {
        assert_eq!(samples.len(), SAMPLES, "eight seconds");
        // One more frame would fit; it is left out.
        self.spectrogram(&reflected(&normalised(samples)), FRAMES)
    }

    /// The features of a recording of any length. A recording shorter than a frame has none.
    pub(crate) fn recording(&self, samples: &[f32]) -> Spectrogram {
        let content = samples.len() / HOP;
        if content == 0 {
            return Spectrogram { values: Vec::new(), frames: 0, content };
        }
        // Like `reflected`, but without a second copy, since a recording may have half an hour.
        let (half, len) = (WINDOW / 2, samples.len() + BEHIND);
        let at = |n: usize| samples.get(n).copied().map_or(0.0, f64::from);
        let before = (1..=half).rev().map(at);
        let behind = (len - 1 - half..len - 1).rev().map(at);
        let padded: Vec<f64> = before.chain((0..len).map(at)).chain(behind).collect();
        let frames = len / HOP;
        Spectrogram { values: self.spectrogram(&padded, frames), frames, content }
    }

    /// `[band][frame]` of the first frames of audio that is padded with half a window at both ends.
    fn spectrogram(&self, padded: &[f64], frames: usize) -> Vec<f32> {
        let mut logs = vec![0.0; self.bands.len() * frames];
        let mut loudest = f64::MIN;
        self.each_power(padded, frames, |at, band, power| {
            let log = power.max(MIN_POWER).log10();
            loudest = loudest.max(log);
            logs[band * frames + at] = log;
        });
        logs.into_iter().map(|log| ((log.max(loudest - DECADES) + 4.0) / 4.0) as f32).collect()
    }

    /// The power of these frames of audio that is `gain` times as loud and surrounded by silence:
    /// `[frame][band]`.
    pub(crate) fn power(&self, samples: &[f32], gain: f32, frames: Range<usize>) -> Vec<f32> {
        let (bands, half) = (self.bands.len(), WINDOW / 2);
        let end = frames.end.saturating_sub(1) * HOP + 2 * half;
        let at = |n: usize| n.checked_sub(half).and_then(|n| samples.get(n));
        let padded = (frames.start * HOP..end).map(|n| at(n).map_or(0.0, |sample| f64::from(sample * gain)));
        let padded: Vec<f64> = padded.collect();
        let mut powers = vec![0.0; frames.len() * bands];
        self.each_power(&padded, frames.len(), |at, band, power| powers[at * bands + band] = power as f32);
        powers
    }

    /// Passes the frame, the band and the power of all bands of the first frames to `each`.
    fn each_power(&self, padded: &[f64], frames: usize, mut each: impl FnMut(usize, usize, f64)) {
        let mut frame = self.fft.make_input_vec();
        let mut spectrum = self.fft.make_output_vec();
        let mut scratch = self.fft.make_scratch_vec();
        let mut power = [0.0; BINS];
        for (at, sound) in padded.windows(WINDOW).step_by(HOP).take(frames).enumerate() {
            for ((value, sample), weight) in frame.iter_mut().zip(sound).zip(&self.window) {
                *value = sample * weight;
            }
            let lengths = "the buffers are the plan's own";
            self.fft.process_with_scratch(&mut frame, &mut spectrum, &mut scratch).expect(lengths);
            for (power, Complex { re, im }) in power.iter_mut().zip(&spectrum) {
                *power = re * re + im * im;
            }
            for (band, (first, weights)) in self.bands.iter().enumerate() {
                let sum: f64 =
                    weights.iter().zip(&power[*first..]).map(|(weight, power)| weight * power).sum();
                each(at, band, sum);
            }
        }
    }
}

/// Normalizes to mean 0 and variance 1.
fn normalised(samples: &[f32]) -> Vec<f64> {
    let count = samples.len() as f64;
    let mean = (samples.iter().map(|sample| f64::from(*sample)).sum::<f64>() / count) as f32;
    let squares = samples.iter().map(|sample| f64::from(*sample - mean).powi(2)).sum::<f64>();
    let scale = ((squares / count) as f32 + VARIANCE_EPSILON as f32).sqrt();
    samples.iter().map(|sample| f64::from((*sample - mean) / scale)).collect()
}

/// Pads with half a window at both ends, mirrored at the first and the last sample.
fn reflected(samples: &[f64]) -> Vec<f64> {
    let half = WINDOW / 2;
    let before = samples[1..=half].iter().rev();
    let behind = samples[samples.len() - 1 - half..samples.len() - 1].iter().rev();
    before.chain(samples).chain(behind).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tone_is_loudest_in_its_band_at_all_times() {
        // With even phase, so that mirroring continues the tone.
        let tone: Vec<f32> =
            (0..SAMPLES).map(|n| (2.0 * PI * 1000.0 * n as f64 / f64::from(RATE)).cos() as f32).collect();
        let features = LogMel::new(BANDS).features(&tone);
        let of = |band: usize, frame: usize| features[band * FRAMES + frame];
        // 1 kHz is mel 15 of 45.2 up to 8 kHz: the corner with this index is the peak of the band before.
        let expected = (15.0 / to_mel(8000.0) * (BANDS + 1) as f64).round() as usize - 1;
        for frame in [0, 1, FRAMES / 2, FRAMES - 1] {
            let best = (0..BANDS).max_by(|a, b| of(*a, frame).total_cmp(&of(*b, frame))).unwrap();
            assert_eq!(best, expected, "frame {frame}");
        }
    }

    #[test]
    fn features_depend_on_neither_silence_nor_loudness_where_they_should_not() {
        let mel = LogMel::new(BANDS);
        let silence = mel.features(&vec![0.0; SAMPLES]);
        assert!(silence.iter().all(|value| *value == silence[0]), "all at the floor");
        assert_eq!(silence[0], ((MIN_POWER.log10() + 4.0) / 4.0) as f32);
        let sound: Vec<f32> = (0..SAMPLES).map(|n| ((n * n % 977) as f32 / 977.0 - 0.5) * 0.25).collect();
        let louder: Vec<f32> = sound.iter().map(|sample| sample * 4.0 + 0.25).collect();
        for (a, b) in mel.features(&sound).iter().zip(mel.features(&louder)) {
            assert!((a - b).abs() < 1e-3, "{a} {b}");
        }
    }

    #[test]
    fn a_recording_has_a_frame_every_ten_milliseconds_and_zero_padding() {
        let mel = LogMel::new(BANDS);
        assert_eq!(mel.recording(&[0.5; 159]).content(), 0);
        let short = mel.recording(&[0.5; 160]);
        assert_eq!((short.content(), short.frames), (1, 2));
        let sound: Vec<f32> = (0..16_000).map(|n| ((n * n % 977) as f32 / 977.0 - 0.5) * 0.25).collect();
        let all = mel.recording(&sound);
        assert_eq!((all.content(), all.frames, all.values.len()), (100, 101, 101 * BANDS));
        let window = all.window(90, 10, 40);
        assert_eq!(window.len(), 40 * BANDS);
        for (band, row) in window.chunks(40).enumerate() {
            assert_eq!(row[..10], all.values[band * 101 + 90..band * 101 + 100]);
            assert!(row[10..].iter().all(|value| *value == 0.0));
        }
    }

    #[test]
    fn bands_cover_all_bins_except_both_ends() {
        let bands = bands(BANDS);
        let covered = |bin: usize| bands.iter().any(|(first, w)| (*first..first + w.len()).contains(&bin));
        assert!((1..BINS - 1).all(covered));
        assert!(bands.iter().all(|(_, weights)| !weights.is_empty()));
    }
}
