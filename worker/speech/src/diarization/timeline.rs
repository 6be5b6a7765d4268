//! Segments of speakers, from the local speakers of overlapping windows and their clusters: as many speakers at a
//! time as the windows have on average, those with the most windows. As pyannote's pipeline.

use super::segmentation::{FRAME_FIELD, FRAME_STEP, FRAMES, LocalSpeakers, SPEAKERS, WINDOW};

/// Samples from one window to the next: one second.
pub(super) const STEP: usize = 16_000;

/// Speech of one speaker, in samples at 16 kHz.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) speaker: usize,
}

/// A window's speakers in each frame, and the cluster of each local speaker; `None` if it does not speak.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClusteredWindow<'a> {
    pub(super) frames: &'a [LocalSpeakers],
    pub(super) clusters: [Option<usize>; SPEAKERS],
}

/// First frame of a window in the whole recording.
fn first_frame(window: usize) -> usize {
    // No window begins in the middle between two frames.
    (2 * window * STEP + FRAME_STEP) / (2 * FRAME_STEP)
}

/// The middle of a frame, in samples.
fn middle(frame: usize) -> u64 {
    (frame * FRAME_STEP + FRAME_FIELD / 2) as u64
}

/// The turns of all clusters in order of their start, then of their cluster. At most `max` speakers speak at a
/// time. Nothing is after `end`.
pub(super) fn turns(windows: &[ClusteredWindow<'_>], clusters: usize, max: usize, end: u64) -> Vec<Turn> {
    let Some(last) = windows.len().checked_sub(1) else { return Vec::new() };
    let frames = (2 * (last * STEP + WINDOW) + FRAME_STEP) / (2 * FRAME_STEP) + 1;
    let frames = frames.max(first_frame(last) + FRAMES);
    // Number of windows of each frame, and of speakers in them; windows of each cluster.
    let (mut covered, mut speaking) = (vec![0u32; frames], vec![0u32; frames]);
    let mut activity = vec![0u32; frames * clusters];
    for (number, window) in windows.iter().enumerate() {
        for (frame, speakers) in (first_frame(number)..).zip(window.frames) {
            covered[frame] += 1;
            speaking[frame] += speakers.count();
            let mut active = [None; SPEAKERS];
            for speaker in (0..SPEAKERS).filter(|speaker| speakers.contains(*speaker)) {
                let cluster = window.clusters[speaker];
                // Two local speakers of one cluster count once.
                if !active.contains(&cluster) {
                    active[speaker] = cluster;
                }
            }
            for cluster in active.into_iter().flatten() {
                activity[frame * clusters + cluster] += 1;
            }
        }
    }
    let mut open: Vec<Option<usize>> = vec![None; clusters];
    let mut turns = Vec::new();
    let mut close = |cluster: usize, from: usize, to: usize| {
        let (start, end) = (middle(from).min(end), middle(to).min(end));
        if start < end {
            turns.push(Turn { start, end, speaker: cluster });
        }
    };
    for frame in 0..frames {
        // The mean of the windows, halves to even.
        let mean = f64::from(speaking[frame]) / f64::from(covered[frame].max(1));
        let count = (mean.round_ties_even() as usize).min(max).min(clusters);
        let activity = &activity[frame * clusters..(frame + 1) * clusters];
        let mut order: Vec<usize> = (0..clusters).collect();
        order.sort_by_key(|cluster| std::cmp::Reverse(activity[*cluster]));
        for (rank, cluster) in order.into_iter().enumerate() {
            match (open[cluster], rank < count) {
                (None, true) => open[cluster] = Some(frame),
                (Some(from), false) => {
                    close(cluster, from, frame);
                    open[cluster] = None;
                }
                (None, false) | (Some(_), true) => {}
            }
        }
    }
    for (cluster, from) in open.into_iter().enumerate() {
        if let Some(from) = from {
            close(cluster, from, frames - 1);
        }
    }
    turns.sort_by_key(|turn| (turn.start, turn.speaker));
    turns
}

/// Numbers the speakers so that those of an earlier report keep their numbers: the pair with the longest
/// common speech first. Others get the lowest free numbers, in order of their first turn. Free are the numbers
/// that no report had, from `used` on, which this moves.
pub(super) fn keep_numbers(before: &[Turn], turns: &mut [Turn], used: &mut usize) {
    let clusters = turns.iter().map(|turn| turn.speaker + 1).max().unwrap_or(0);
    let mut common = vec![0u64; clusters * *used];
    for turn in turns.iter() {
        for old in before.iter().filter(|old| old.start < turn.end && turn.start < old.end) {
            common[turn.speaker * *used + old.speaker] += turn.end.min(old.end) - turn.start.max(old.start);
        }
    }
    let mut pairs: Vec<usize> = (0..common.len()).filter(|pair| common[*pair] > 0).collect();
    pairs.sort_by_key(|pair| std::cmp::Reverse(common[*pair]));
    let mut numbers = vec![None; clusters];
    for pair in pairs {
        let (cluster, number) = (pair / *used, pair % *used);
        if numbers[cluster].is_none() && !numbers.contains(&Some(number)) {
            numbers[cluster] = Some(number);
        }
    }
    for turn in turns.iter_mut() {
        turn.speaker = *numbers[turn.speaker].get_or_insert_with(|| {
            *used += 1;
            *used - 1
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn turn(start: u64, end: u64, speaker: usize) -> Turn {
        Turn { start, end, speaker }
    }

    /// Frames in which these sets of local speakers speak, in ranges; nobody elsewhere.
    fn frames(spoken: &[(std::ops::Range<usize>, u8)]) -> Vec<LocalSpeakers> {
        let at = |frame| spoken.iter().find(|(range, _)| range.contains(&frame)).map_or(0, |(_, bits)| *bits);
        (0..FRAMES).map(|frame| LocalSpeakers::of(at(frame))).collect()
    }

    #[test]
    fn windows_vote_on_the_speakers_of_a_frame() {
        let early = frames(&[(100..200, 0b001), (200..300, 0b011)]);
        // One second later is 59 frames; local speakers are in another order.
        let late = frames(&[(41..141, 0b100), (141..241, 0b101)]);
        let windows = [
            ClusteredWindow { frames: &early, clusters: [Some(1), Some(0), None] },
            ClusteredWindow { frames: &late, clusters: [Some(0), None, Some(1)] },
        ];
        let all = turns(&windows, 2, 2, u64::MAX);
        assert_eq!(all, [turn(middle(100), middle(300), 1), turn(middle(200), middle(300), 0)]);
        let cut = turns(&windows, 2, 2, middle(250));
        assert_eq!(cut, [turn(middle(100), middle(250), 1), turn(middle(200), middle(250), 0)]);
        // Of two that are equally frequent the lower number speaks.
        let one = turns(&windows, 2, 1, u64::MAX);
        assert_eq!(one, [turn(middle(100), middle(200), 1), turn(middle(200), middle(300), 0)]);
        // Half of the windows is rounded to even: to nobody.
        let silent = frames(&[]);
        let half = [windows[0], ClusteredWindow { frames: &silent, clusters: [None; 3] }];
        assert_eq!(turns(&half, 2, 2, u64::MAX)[..1], [turn(middle(200), middle(300), 0)]);
        assert_eq!(turns(&[], 2, 2, 9), []);
        // Two local speakers of one cluster are one speaker.
        let same = [ClusteredWindow { frames: &early, clusters: [Some(0), Some(0), None] }];
        assert_eq!(turns(&same, 1, 9, u64::MAX), [turn(middle(100), middle(300), 0)]);
    }

    #[test]
    fn speakers_keep_their_numbers_from_report_to_report() {
        let mut used = 0;
        let mut first = [turn(0, 10, 3), turn(10, 30, 1)];
        keep_numbers(&[], &mut first, &mut used);
        assert_eq!((first, used), ([turn(0, 10, 0), turn(10, 30, 1)], 2));
        let mut second = [turn(0, 9, 1), turn(9, 30, 0), turn(30, 40, 2)];
        keep_numbers(&first, &mut second, &mut used);
        assert_eq!((second, used), ([turn(0, 9, 0), turn(9, 30, 1), turn(30, 40, 2)], 3));
        // A speaker that is split keeps the number for the longer part.
        let mut third = [turn(0, 9, 0), turn(9, 14, 1), turn(14, 30, 2)];
        keep_numbers(&second, &mut third, &mut used);
        assert_eq!((third, used), ([turn(0, 9, 0), turn(9, 14, 3), turn(14, 30, 1)], 4));
    }

    proptest! {
        #[test]
        fn turns_are_ordered_and_no_more_than_allowed_overlap(
            bits in prop::collection::vec(prop::collection::vec(0..7u8, 12), 1..5),
            clusters in prop::collection::vec(prop::array::uniform3(prop::option::of(0..4usize)), 5),
            max in 1..4usize,
        ) {
            let frames: Vec<Vec<LocalSpeakers>> = bits
                .iter()
                .map(|bits| (0..FRAMES).map(|frame| LocalSpeakers::of(bits[frame / 50])).collect())
                .collect();
            let windows: Vec<_> = frames
                .iter()
                .zip(clusters)
                .map(|(frames, clusters)| ClusteredWindow { frames, clusters })
                .collect();
            let turns = turns(&windows, 4, max, u64::MAX);
            prop_assert!(turns.is_sorted_by_key(|turn| turn.start));
            for turn in &turns {
                prop_assert!(turn.start < turn.end);
                let others = turns.iter().filter(|other| other.start <= turn.start && turn.start < other.end);
                prop_assert!(others.count() <= max);
            }
            for pair in turns.iter().flat_map(|a| turns.iter().map(move |b| (a, b))) {
                let (a, b) = pair;
                prop_assert!(a == b || a.speaker != b.speaker || a.end < b.start || b.end < a.start);
            }
        }
    }
}
