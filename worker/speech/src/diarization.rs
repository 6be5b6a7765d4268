//! Diarization: who speaks when. A network segments windows of ten seconds into up to three local speakers
//! ([`segmentation`]), another one computes a vector for the voice of each, the voices of all windows are
//! clustered ([`cluster`]), and the windows vote on the speakers of each moment ([`timeline`]). The parts and
//! their rules are those of pyannote.audio 3.

mod cluster;
mod segmentation;
#[cfg(test)]
mod tests;
mod timeline;

use crate::Error;
use crate::compute::Compute;
use crate::session::{AudioModel, Session};
use crate::speaker::{SpeakerNetwork, resemblyzer};
use crate::speech_rule::invalid;
use cluster::{ClusterLimits, closest, clusters};
use kernels::registry::Refusal;
use proto::operation::{
    DiarizationOptions, MAX_FRAME_SEGMENTS, Operation, OperationError, OperationOptions, OperationOutput,
    SpeakerSegment, SpeakerSegments,
};
use segmentation::{FRAMES, LocalSpeakers, SPEAKERS, Segmentation, WINDOW};
use sound::Resampler;
use std::num::NonZeroUsize;
use std::ops::{Range, RangeInclusive};
use std::path::Path;
use std::sync::Arc;
use timeline::{ClusteredWindow, STEP, Turn, keep_numbers, turns};

/// Sample rate of the networks.
const RATE: u32 = 16_000;
/// Accepted sample rates. Audio is resampled to [`RATE`].
const RATES: RangeInclusive<u32> = 8_000..=192_000;
/// Maximum seconds of a session. All of its voices are compared with each other.
const MAX_SECONDS: u64 = 1_800;
/// Maximum number of open sessions. Each may have 6 MB of voices, and 120 MB while these are clustered.
const MAX_SESSIONS: u32 = 16;
/// Maximum number of threads.
const MAX_THREADS: usize = 8;
/// Windows that are segmented together.
const BATCH: usize = 8;
/// Maximum of the options that count speakers.
const MAX_SPEAKERS: u32 = 100;
/// Distance of the centroids of two voices up to which they are one speaker. Between that of one voice of
/// espeak-ng in different sentences (0.46 at most) and that of most pairs of its voices (0.63 to 0.99).
const THRESHOLD: f32 = 0.6;
/// Samples, 0.4 s, of a speaker alone that a vector needs. With fewer, speech together with others counts too.
const MIN_ALONE: usize = 6_400;
/// File of the segmentation network.
const SEGMENTATION: &str = "pytorch_model.bin";

/// Checks that a folder has both networks.
///
/// # Errors
/// [`Refusal::Artefact`] if one is missing.
pub(crate) fn is_in(folder: &Path) -> Result<(), Refusal> {
    match folder.join(SEGMENTATION).is_file() {
        true => resemblyzer::is_in(folder),
        false => {
            Err(Refusal::Artefact { reason: format!("there is no {SEGMENTATION} in {}", folder.display()) })
        }
    }
}

struct Networks {
    segmentation: Segmentation,
    voices: Box<dyn SpeakerNetwork>,
    compute: Compute,
}

/// The networks, which sessions share.
pub(crate) struct Diarization(Arc<Networks>);

impl Diarization {
    /// Loads the networks of a folder, for half of the `cpus` threads that this process can run
    /// at a time, because other work is more urgent.
    ///
    /// # Errors
    /// [`Error::Artefact`] for a file that is not valid; I/O errors.
    pub(crate) fn load(folder: &Path, cpus: NonZeroUsize) -> Result<Self, Error> {
        let threads = NonZeroUsize::new((cpus.get() / 2).min(MAX_THREADS)).unwrap_or(NonZeroUsize::MIN);
        let segmentation = Segmentation::load(&folder.join(SEGMENTATION))?;
        let voices = Box::new(resemblyzer::load(folder, cpus)?);
        Ok(Self(Arc::new(Networks { segmentation, voices, compute: Compute::new(threads)? })))
    }
}

/// The limits of the number of speakers, and the threshold, of a session's options.
fn limits(options: &DiarizationOptions) -> Result<ClusterLimits, OperationError> {
    let DiarizationOptions { num_speakers, min_speakers, max_speakers, threshold } = options;
    let counts =
        [("num_speakers", num_speakers), ("min_speakers", min_speakers), ("max_speakers", max_speakers)];
    for (field, value) in counts {
        if let Some(value) = value.filter(|value| !(1..=MAX_SPEAKERS).contains(value)) {
            return Err(invalid(field, format!("{value}, it must be 1 to {MAX_SPEAKERS}")));
        }
    }
    if num_speakers.is_some() && (min_speakers.is_some() || max_speakers.is_some()) {
        let reason = "it cannot be combined with min_speakers or max_speakers".to_owned();
        return Err(invalid("num_speakers", reason));
    }
    let min = num_speakers.or(*min_speakers).unwrap_or(1) as usize;
    let max = num_speakers.or(*max_speakers).map_or(usize::MAX, |max| max as usize);
    if min > max {
        return Err(invalid("min_speakers", format!("{min}, it must be at most max_speakers ({max})")));
    }
    let threshold = threshold.unwrap_or(THRESHOLD);
    match (0.0..=2.0).contains(&threshold) {
        true => Ok(ClusterLimits { threshold: f64::from(threshold), min, max }),
        false => Err(invalid("threshold", format!("{threshold}, it must be 0 to 2"))),
    }
}

impl AudioModel for Diarization {
    fn open(&self, rate: u32, options: &OperationOptions) -> Result<Box<dyn Session>, OperationError> {
        if !RATES.contains(&rate) {
            let (from, to) = (RATES.start(), RATES.end());
            return Err(invalid("sample_rate", format!("{rate}, it must be {from} to {to}")));
        }
        let limits = match options {
            OperationOptions::Default => limits(&DiarizationOptions::default())?,
            OperationOptions::Diarization(options) => limits(options)?,
            _ => return Err(invalid("options", format!("{} has none of these", Operation::Diarization))),
        };
        Ok(Box::new(DiarizationSession {
            networks: Arc::clone(&self.0),
            limits,
            rate,
            resampler: Resampler::new(rate, RATE),
            audio: Vec::new(),
            received: 0,
            windows: Vec::new(),
            reported: Vec::new(),
            used_numbers: 0,
        }))
    }

    fn max_sessions(&self) -> u32 {
        MAX_SESSIONS
    }
}

/// A window that has been computed.
struct LocalWindow {
    frames: Vec<LocalSpeakers>,
    /// The vectors of the local speakers that speak.
    voices: [Option<Vec<f32>>; SPEAKERS],
}

impl LocalWindow {
    fn speaks(&self, speaker: usize) -> bool {
        self.frames.iter().any(|frame| frame.contains(speaker))
    }
}

struct DiarizationSession {
    networks: Arc<Networks>,
    limits: ClusterLimits,
    rate: u32,
    resampler: Resampler,
    /// Audio at [`RATE`] from the start of the next window.
    audio: Vec<f32>,
    /// Samples since the last reset, at the session's rate.
    received: u64,
    windows: Vec<LocalWindow>,
    /// The turns of the last report.
    reported: Vec<Turn>,
    /// Numbers that speakers of any report had.
    used_numbers: usize,
}

/// The samples of a window in which frames of `is_used` lie.
fn pieces(is_used: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut pieces: Vec<Range<usize>> = Vec::new();
    // Frames share the window evenly.
    let start = |frame: usize| (frame * WINDOW).div_ceil(FRAMES);
    for frame in (0..FRAMES).filter(|frame| is_used(*frame)) {
        match pieces.last_mut() {
            Some(last) if last.end == start(frame) => last.end = start(frame + 1),
            _ => pieces.push(start(frame)..start(frame + 1)),
        }
    }
    pieces
}

impl Networks {
    /// Computes windows of [`WINDOW`] samples.
    fn windows(&self, windows: &[&[f32]]) -> Result<Vec<LocalWindow>, Error> {
        let segmented = self.segmentation.speakers(&self.compute, windows)?;
        let local = |(frames, audio): (Vec<LocalSpeakers>, &&[f32])| {
            let mut voices = [const { None }; SPEAKERS];
            for (speaker, voice) in voices.iter_mut().enumerate() {
                *voice = self.voice(&frames, speaker, audio)?;
            }
            Ok(LocalWindow { frames, voices })
        };
        segmented.into_iter().zip(windows).map(local).collect()
    }

    /// The voice of a local speaker: from frames without others, if there are enough.
    fn voice(
        &self,
        frames: &[LocalSpeakers],
        speaker: usize,
        audio: &[f32],
    ) -> Result<Option<Vec<f32>>, Error> {
        let alone = |frame: usize| frames[frame].contains(speaker) && frames[frame].count() == 1;
        let enough = (FRAMES * MIN_ALONE).div_ceil(WINDOW);
        let used = match (0..FRAMES).filter(|frame| alone(*frame)).count() > enough {
            true => pieces(alone),
            false => pieces(|frame| frames[frame].contains(speaker)),
        };
        let used: Vec<&[f32]> = used.into_iter().map(|piece| &audio[piece]).collect();
        if used.is_empty() { Ok(None) } else { self.voices.embed(&used).map(Some) }
    }
}

impl DiarizationSession {
    /// The turns of all windows, and of the audio after them.
    fn turns(&self, end: u64, rest: Option<&LocalWindow>) -> Vec<Turn> {
        let windows: Vec<&LocalWindow> = self.windows.iter().chain(rest).collect();
        let voices: Vec<&[f32]> =
            windows.iter().flat_map(|window| window.voices.iter().flatten()).map(Vec::as_slice).collect();
        let (assigned, means) = clusters(&voices, self.limits);
        let count = assigned.iter().max().map_or(1, |last| last + 1);
        let clustered: Vec<ClusteredWindow<'_>> = windows
            .iter()
            .map(|window| {
                let cluster = |speaker: usize| match &window.voices[speaker] {
                    _ if !window.speaks(speaker) => None,
                    Some(voice) if count > 1 => Some(closest(voice, &means)),
                    // Speech without a voice belongs to the first speaker.
                    Some(_) | None => Some(0),
                };
                ClusteredWindow { frames: &window.frames, clusters: std::array::from_fn(cluster) }
            })
            .collect();
        turns(&clustered, count, self.limits.max, end)
    }

    /// Samples at the session's rate.
    fn at_own_rate(&self, samples: u64) -> u64 {
        (samples * u64::from(self.rate) / u64::from(RATE)).min(self.received)
    }
}

impl Session for DiarizationSession {
    fn window(&self) -> u32 {
        (WINDOW as u64 * u64::from(self.rate) / u64::from(RATE)) as u32
    }

    fn max_samples(&self) -> u64 {
        MAX_SECONDS * u64::from(self.rate)
    }

    fn push(&mut self, samples: &[f32], _: &mut Vec<OperationOutput>) -> Result<(), Error> {
        self.received += samples.len() as u64;
        self.resampler.push(samples, &mut self.audio);
        while self.audio.len() >= WINDOW {
            let starts = (0..=self.audio.len() - WINDOW).step_by(STEP).take(BATCH);
            let windows: Vec<&[f32]> = starts.map(|start| &self.audio[start..start + WINDOW]).collect();
            let done = self.networks.windows(&windows)?;
            self.audio.drain(..done.len() * STEP);
            self.windows.extend(done);
        }
        Ok(())
    }

    fn segment(&mut self, _: bool, out: &mut Vec<OperationOutput>) -> Result<(), Error> {
        // Later audio must continue where the audio was cut.
        let mut audio = self.audio.clone();
        self.resampler.clone().finish(&mut audio);
        let end = (self.windows.len() * STEP + audio.len()) as u64;
        let is_covered = audio.is_empty() || !self.windows.is_empty() && audio.len() <= WINDOW - STEP;
        let rest = match is_covered {
            true => None,
            false => {
                audio.resize(WINDOW.max(audio.len()), 0.0);
                self.networks.windows(&[&audio[..WINDOW]])?.pop()
            }
        };
        let mut turns = self.turns(end, rest.as_ref());
        keep_numbers(&self.reported, &mut turns, &mut self.used_numbers);
        let segment = |turn: &Turn| SpeakerSegment {
            start: self.at_own_rate(turn.start),
            end: self.at_own_rate(turn.end),
            speaker: turn.speaker as u32,
        };
        let segments: Vec<SpeakerSegment> = turns.iter().map(segment).collect();
        let frames = segments.len().div_ceil(MAX_FRAME_SEGMENTS).max(1);
        out.extend((1..=frames).map(|frame| {
            let first = (frame - 1) * MAX_FRAME_SEGMENTS;
            let segments = segments[first..].iter().take(MAX_FRAME_SEGMENTS).copied().collect();
            OperationOutput::Speakers(SpeakerSegments { segments, more: frame < frames })
        }));
        self.reported = turns;
        Ok(())
    }

    fn reset(&mut self) {
        self.resampler = Resampler::new(self.rate, RATE);
        self.audio.clear();
        self.received = 0;
        self.windows.clear();
        self.reported.clear();
        self.used_numbers = 0;
    }
}
