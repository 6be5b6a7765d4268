//! Divides a long recording at pauses, so that several workers transcribe its parts, and joins their texts.

use proto::operation::{Pcm, SpokenText};
use sound::Recording;

/// Aim for the length of a part, in seconds: two of the model's windows.
const PART_S: u64 = 60;
/// A part may end this many seconds earlier, in the quietest moment.
const SEARCH_S: u64 = 20;
/// Moments per second, whose loudness is compared.
const MOMENTS: u64 = 10;

/// A part of a recording.
#[derive(Debug, PartialEq)]
pub(super) struct Part {
    /// Samples before it.
    pub(super) start: u64,
    pub(super) pieces: Vec<Pcm>,
}

/// The parts of a recording, in order.
pub(super) fn divide(recording: &Recording) -> Vec<Part> {
    let rate = u64::from(recording.sample_rate);
    let moment = (rate / MOMENTS).max(1);
    let samples = recording.samples();
    let loudness = loudness(recording, moment);
    let mut parts = Vec::new();
    let mut start = 0;
    while start < samples {
        let aim = start + PART_S * rate;
        let end = match samples > aim {
            false => samples,
            true => {
                let moments = (aim - SEARCH_S * rate) / moment..aim / moment;
                let energy = |at: &u64| loudness.get(*at as usize).copied().unwrap_or(0.0);
                // The last one of the quietest moments; within it, its middle.
                let quiet = moments.rev().min_by(|a, b| energy(a).total_cmp(&energy(b)));
                quiet.map_or(aim, |at| at * moment + moment / 2)
            }
        };
        parts.push(Part { start, pieces: cut(&recording.pieces, start, end) });
        start = end;
    }
    parts
}

/// The energy of each moment of `moment` samples.
fn loudness(recording: &Recording, moment: u64) -> Vec<f64> {
    let mut all = Vec::new();
    let mut at = 0;
    let mut add = |sample: f64| {
        let number = (at / moment) as usize;
        if number == all.len() {
            all.push(0.0);
        }
        all[number] += sample * sample;
        at += 1;
    };
    for piece in &recording.pieces {
        match piece {
            Pcm::F32(samples) => samples.iter().for_each(|sample| add(f64::from(*sample) * 32_768.0)),
            Pcm::I16(samples) => samples.iter().for_each(|sample| add(f64::from(*sample))),
        }
    }
    all
}

/// The samples from `start` to `end`.
fn cut(pieces: &[Pcm], start: u64, end: u64) -> Vec<Pcm> {
    let mut before = 0;
    let mut found = Vec::new();
    for piece in pieces {
        let length = piece.len() as u64;
        // At most the piece's length.
        let within = |position: u64| position.saturating_sub(before).min(length) as usize;
        let of = within(start)..within(end);
        if !of.is_empty() {
            found.push(match piece {
                Pcm::F32(samples) => Pcm::F32(samples[of].to_vec()),
                Pcm::I16(samples) => Pcm::I16(samples[of].to_vec()),
            });
        }
        before += length;
    }
    found
}

/// Moves a part's texts to their positions in the recording.
pub(super) fn placed(mut texts: Vec<SpokenText>, start: u64) -> Vec<SpokenText> {
    for text in &mut texts {
        let words = text.words.iter_mut().flat_map(|word| [&mut word.start, &mut word.end]);
        let own = [&mut text.start, &mut text.end, &mut text.window];
        own.into_iter().chain(words).for_each(|position| *position += start);
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A recording at 100 Hz, loud but for these tenths of a second.
    fn recording(seconds: u64, quiet: &[u64]) -> Recording {
        let sample = |at: u64| if quiet.contains(&(at / 10)) { 1 } else { 1000 + (at % 7) as i16 };
        let all: Vec<i16> = (0..seconds * 100).map(sample).collect();
        Recording {
            sample_rate: 100,
            pieces: all.chunks(777).map(|piece| Pcm::I16(piece.to_vec())).collect(),
        }
    }

    fn bounds(parts: &[Part]) -> Vec<(u64, u64)> {
        let length = |part: &Part| part.pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
        parts.iter().map(|part| (part.start, part.start + length(part))).collect()
    }

    #[test]
    fn a_recording_is_divided_in_its_pauses() {
        // Pauses at 30 s, which is too early, 50 s and 97 s.
        let whole = recording(130, &[300, 500, 970]);
        let parts = divide(&whole);
        assert_eq!(bounds(&parts), [(0, 5_005), (5_005, 9_705), (9_705, 13_000)]);
        let samples =
            |pieces: &[Pcm]| -> Vec<f32> { pieces.iter().cloned().flat_map(Pcm::into_f32).collect() };
        let joined: Vec<f32> = parts.iter().flat_map(|part| samples(&part.pieces)).collect();
        assert_eq!(joined, samples(&whole.pieces));
        assert_eq!(bounds(&divide(&recording(60, &[]))), [(0, 6_000)], "short enough");
        assert!(divide(&recording(0, &[])).is_empty());
        // Of equally quiet moments the last one, so that parts are long.
        let silence = Recording { sample_rate: 100, pieces: vec![Pcm::F32(vec![0.0; 12_100])] };
        assert_eq!(bounds(&divide(&silence)), [(0, 5_995), (5_995, 11_985), (11_985, 12_100)]);
    }
}
