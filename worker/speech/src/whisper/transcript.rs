//! Transcribes a recording in windows of thirty seconds. Each window starts where the text of the previous
//! one ended. The work is split into short steps, so that recordings take turns and a canceled one ends soon.
//!
//! Windows, features and the split into segments follow OpenAI's reference as implemented by
//! `faster-whisper`, at temperature 0 and without the text of the previous window. Without retries at a
//! higher temperature, that text could make a repeated sentence repeat forever.

use super::Whisper;
use super::network::{Cache, FRAMES, Memory};
use crate::Error;
use crate::log_mel::{FRAME, Spectrogram};
use kernels::ops::softmax;
use proto::operation::{Language, OperationOutput, SpokenText};

/// Tokens of one step.
const STEP: usize = 16;
/// A window may be silence if the probability of silence is above this.
const SILENCE: f32 = 0.6;
/// A window that may be silence is silence if the mean log-probability of its tokens is at most this.
const UNLIKELY: f32 = -1.0;
/// Frames of one timestamp step.
const TIME: usize = 2;

/// Validated options of a transcription.
#[derive(Debug, Clone)]
pub(super) struct Task {
    /// Token of the language. `None`: the most likely language of the first window.
    pub(super) language: Option<u32>,
    pub(super) task: u32,
    /// Tokens before the first window.
    pub(super) prompt: Vec<u32>,
    /// Samples per second of the positions in the output.
    pub(super) rate: u32,
}

/// A recording that is being transcribed.
pub(super) struct Transcript {
    task: Task,
    features: Spectrogram,
    /// Start of the current window in frames.
    seek: usize,
    window: Option<Window>,
}

/// A window that is being decoded.
struct Window {
    memory: Memory,
    cache: Cache,
    tokens: Vec<u32>,
    /// The last token, which the decoder has not processed yet.
    next: Option<u32>,
    /// Sum of the log-probabilities of all tokens and the end.
    logs: f32,
    silence: f32,
    max_tokens: usize,
}

/// A segment of a window: its tokens, and its position in the window in timestamp steps.
#[derive(Debug, Clone, PartialEq, Eq)]
struct WindowPart<'a> {
    tokens: &'a [u32],
    start: usize,
    end: usize,
}

impl Transcript {
    pub(super) fn new(task: Task, features: Spectrogram) -> Self {
        Self { task, features, seek: 0, window: None }
    }

    /// Runs one step. Returns whether more work is left.
    ///
    /// # Errors
    /// Errors of the network.
    pub(super) fn step(&mut self, whisper: &Whisper, out: &mut Vec<OperationOutput>) -> Result<bool, Error> {
        if let Some(window) = &mut self.window {
            if window.step(whisper)? {
                return Ok(true);
            }
            let window = self.window.take();
            self.close(whisper, window.as_ref(), out);
            return Ok(self.seek < self.features.content());
        }
        let size = self.size();
        if size == 0 {
            return Ok(false);
        }
        let Whisper { network, compute, .. } = whisper;
        let encoded = network.encode(compute, &self.features.window(self.seek, size, FRAMES))?;
        let memory = network.memory(compute, &encoded)?;
        if self.task.language.is_none() {
            let (language, detected) = likeliest(whisper, &memory)?;
            self.task.language = Some(language);
            out.push(OperationOutput::Language(detected));
        }
        let prompt = self.prompt(whisper);
        self.window = Some(Window::open(whisper, memory, &prompt)?);
        Ok(true)
    }

    /// Number of the window's frames with audio.
    fn size(&self) -> usize {
        self.features.content().saturating_sub(self.seek).min(FRAMES)
    }

    fn prompt(&self, whisper: &Whisper) -> Vec<u32> {
        let words = &whisper.words;
        let mut prompt = Vec::new();
        if self.seek == 0 && !self.task.prompt.is_empty() {
            let max_prompt = whisper.network.shape.context / 2 - 1;
            prompt.push(words.before);
            prompt.extend(&self.task.prompt[self.task.prompt.len().saturating_sub(max_prompt)..]);
        }
        prompt.push(words.start);
        prompt.extend(self.task.language);
        prompt.push(self.task.task);
        prompt
    }

    /// Outputs the window's segments and moves on to the next window.
    fn close(&mut self, whisper: &Whisper, window: Option<&Window>, out: &mut Vec<OperationOutput>) {
        let (from, size) = (self.seek, self.size());
        self.seek += size;
        let Some(window) = window else { return };
        let mean = window.logs / (window.tokens.len() + 1) as f32;
        if window.silence > SILENCE && mean <= UNLIKELY {
            return;
        }
        let (segments, consumed) = split_segments(&window.tokens, whisper.words.rules.first_time(), size);
        // Skip a window that makes no progress.
        self.seek = from + if consumed == 0 { size } else { consumed };
        let at = |frame: usize| {
            let samples = frame as u64 * FRAME as u64 * u64::from(self.task.rate);
            (samples + u64::from(super::RATE) / 2) / u64::from(super::RATE)
        };
        for WindowPart { tokens, start, end } in segments {
            let text = whisper.words.decode(tokens);
            if start == end || text.trim().is_empty() {
                continue;
            }
            out.push(OperationOutput::Text(SpokenText {
                text,
                start: at(from + start),
                end: at(from + end),
                window: at(from),
                tokens: tokens.to_vec(),
                mean_log: mean,
                silence: window.silence,
            }));
        }
    }
}

impl Window {
    fn open(whisper: &Whisper, memory: Memory, prompt: &[u32]) -> Result<Self, Error> {
        let Whisper { network, compute, words, .. } = whisper;
        let mut cache = network.cache();
        let start = prompt.iter().position(|token| *token == words.start).unwrap_or(0);
        let last = prompt.len().saturating_sub(1);
        let rows = network.decode(compute, &memory, &mut cache, prompt, &[start, last])?;
        let [mut at_start, mut at_last] = <[Vec<f32>; 2]>::try_from(rows).unwrap_or_default();
        softmax(compute.isa, &mut at_start);
        let silence = at_start.get(words.silence as usize).copied().unwrap_or(0.0);
        let chosen = words.rules.next_token(compute.isa, &mut at_last, &[]);
        let context = network.shape.context;
        // The last token of the prompt counts as the first of the generated positions.
        let max_tokens = (context / 2).min(context - last);
        let next = Some(chosen.token);
        Ok(Self { memory, cache, tokens: vec![chosen.token], next, logs: chosen.log, silence, max_tokens })
    }

    /// Generates some tokens. Returns whether more may follow.
    fn step(&mut self, whisper: &Whisper) -> Result<bool, Error> {
        let Whisper { network, compute, words, .. } = whisper;
        for _ in 0..STEP {
            let full = self.tokens.len() >= self.max_tokens || self.cache.tokens() >= network.shape.context;
            let Some(next) = self.next.filter(|_| !full) else { return Ok(false) };
            let rows = network.decode(compute, &self.memory, &mut self.cache, &[next], &[0])?;
            let mut logits = rows.into_iter().next().unwrap_or_default();
            let chosen = words.rules.next_token(compute.isa, &mut logits, &self.tokens);
            self.logs += chosen.log;
            if chosen.token == words.rules.end {
                self.next = None;
                return Ok(false);
            }
            self.tokens.push(chosen.token);
            self.next = Some(chosen.token);
        }
        Ok(true)
    }
}

/// The most likely spoken language.
fn likeliest(whisper: &Whisper, memory: &Memory) -> Result<(u32, Language), Error> {
    let Whisper { network, compute, words, .. } = whisper;
    let rows = network.decode(compute, memory, &mut network.cache(), &[words.start], &[0])?;
    let logits = rows.into_iter().next().unwrap_or_default();
    let all: Vec<(&str, u32)> = words.languages().collect();
    let mut shares: Vec<f32> = all
        .iter()
        .map(|(_, token)| logits.get(*token as usize).copied().unwrap_or(f32::NEG_INFINITY))
        .collect();
    softmax(compute.isa, &mut shares);
    let best = (0..shares.len()).max_by(|a, b| shares[*a].total_cmp(&shares[*b]).then(b.cmp(a))).unwrap_or(0);
    let (code, token) = all[best];
    Ok((token, Language { code: code.to_owned(), probability: shares[best] }))
}

/// Splits the tokens at pairs of timestamps. Also returns how many of the window's `size` frames are done;
/// audio after the last pair is transcribed again.
fn split_segments(window_tokens: &[u32], first_time: u32, size: usize) -> (Vec<WindowPart<'_>>, usize) {
    let is_time = |token: &u32| *token >= first_time;
    let step = |token: u32| token.saturating_sub(first_time) as usize;
    let ends_alone = matches!(window_tokens, [.., text, time] if !is_time(text) && is_time(time));
    let mut cuts: Vec<usize> = (1..window_tokens.len())
        .filter(|at| is_time(&window_tokens[*at]) && is_time(&window_tokens[*at - 1]))
        .collect();
    if cuts.is_empty() {
        let last =
            window_tokens.iter().rev().find(|token| is_time(token)).filter(|last| **last != first_time);
        let end = last.map_or(size, |last| step(*last) * TIME);
        return (vec![WindowPart { tokens: window_tokens, start: 0, end }], size);
    }
    if ends_alone {
        cuts.push(window_tokens.len());
    }
    let mut segments = Vec::with_capacity(cuts.len());
    let mut from = 0;
    for cut in cuts {
        let tokens = &window_tokens[from..cut];
        if let [first, .., last] | [first @ last] = tokens {
            segments.push(WindowPart { tokens, start: step(*first) * TIME, end: step(*last) * TIME });
        }
        from = cut;
    }
    let consumed = match ends_alone {
        // No text follows the last timestamp.
        true => size,
        false => step(window_tokens[from - 1]) * TIME,
    };
    (segments, consumed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Timestamps are the tokens from 100 on.
    fn cut(tokens: &[u32]) -> (Vec<(Vec<u32>, usize, usize)>, usize) {
        let (segments, consumed) = split_segments(tokens, 100, 2500);
        (
            segments
                .into_iter()
                .map(|segment| (segment.tokens.to_vec(), segment.start, segment.end))
                .collect(),
            consumed,
        )
    }

    #[test]
    fn a_window_without_pairs_is_one_part_up_to_its_last_timestamp() {
        assert_eq!(cut(&[100, 1, 2, 150]), (vec![(vec![100, 1, 2, 150], 0, 100)], 2500));
        assert_eq!(cut(&[100, 1, 2]), (vec![(vec![100, 1, 2], 0, 2500)], 2500), "as long as the window");
        assert_eq!(cut(&[]), (vec![(vec![], 0, 2500)], 2500));
    }

    #[test]
    fn pairs_split_a_window_and_its_unfinished_rest_is_repeated() {
        let tokens = [100, 1, 150, 150, 2, 200, 210, 3];
        let segments = vec![(vec![100, 1, 150], 0, 100), (vec![150, 2, 200], 100, 200)];
        assert_eq!(cut(&tokens), (segments, 200));
    }

    #[test]
    fn a_single_timestamp_at_the_end_completes_the_window() {
        let tokens = [100, 1, 150, 150, 2, 200];
        let segments = vec![(vec![100, 1, 150], 0, 100), (vec![150, 2, 200], 100, 200)];
        assert_eq!(cut(&tokens), (segments, 2500));
    }
}
