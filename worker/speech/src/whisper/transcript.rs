//! Transcribes a recording in windows of thirty seconds. Each window starts where the text of the previous
//! one ended. The work is split into short steps, so that recordings take turns and a canceled one ends soon.
//!
//! Windows, features, the text before a window and the split into segments follow OpenAI's reference as
//! implemented by `faster-whisper`. With times of words, a window starts where the last word ended.

use super::Whisper;
use super::align::{Attention, Span, TimedWord, place_words, split_words, time_words};
use super::network::{FRAMES, Memory, POSITIONS};
use super::window::{Decoded, SILENCE, UNLIKELY, Window};
use crate::Error;
use crate::log_mel::{FRAME, Spectrogram};
use kernels::ops::softmax;
use proto::operation::{Language, OperationOutput, SpokenText, SpokenWord};

/// Frames of one timestamp step.
const TIME: usize = 2;
/// Frames per second.
const PER_SECOND: f64 = super::RATE as f64 / FRAME as f64;
/// A window that was decoded at a higher temperature is not the text before the next one.
const RESET: f32 = 0.5;
/// Most tokens of text that are kept for the next segment.
const MAX_TEXT: usize = 1 << 12;

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
    /// Whether words get times.
    pub(super) words: bool,
    /// 0: greedy, and higher temperatures for texts that are no good.
    pub(super) temperature: f32,
}

/// A recording that is being transcribed.
pub(super) struct Transcript {
    task: Task,
    features: Spectrogram,
    /// Seconds of audio before the features.
    offset: f64,
    /// Start of the current window in frames.
    seek: usize,
    window: Option<Window>,
    /// Tokens of the text before the current window.
    before: Vec<u32>,
    /// End of the last word, in seconds.
    last_speech: f64,
}

/// A segment of a window: its tokens, and its position in the window in frames.
#[derive(Debug, Clone, PartialEq, Eq)]
struct WindowPart<'a> {
    tokens: &'a [u32],
    start: usize,
    end: usize,
}

/// The segments of a window.
#[derive(Debug, PartialEq, Eq)]
struct Parts<'a> {
    parts: Vec<WindowPart<'a>>,
    /// Frames that are done. Audio after the last pair of timestamps is transcribed again.
    consumed: usize,
    /// No text follows the last timestamp.
    complete: bool,
}

impl Transcript {
    /// `skipped`: samples of audio before the features.
    pub(super) fn new(task: Task, features: Spectrogram, skipped: usize) -> Self {
        let (before, offset) = (task.prompt.clone(), skipped as f64 / f64::from(super::RATE));
        Self { task, features, offset, seek: 0, window: None, before, last_speech: 0.0 }
    }

    /// The tokens of the text, as the prompt of what follows.
    pub(super) fn into_text(mut self) -> Vec<u32> {
        self.before.drain(..self.before.len().saturating_sub(MAX_TEXT));
        self.before
    }

    /// Runs one step. Returns whether more work is left.
    ///
    /// # Errors
    /// Errors of the network.
    pub(super) fn step(&mut self, whisper: &Whisper, out: &mut Vec<OperationOutput>) -> Result<bool, Error> {
        if let Some(window) = &mut self.window {
            let Some(decoded) = window.step(whisper)? else { return Ok(true) };
            if let Some(window) = self.window.take() {
                self.close(whisper, &window.memory, &decoded, out)?;
            }
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
        let (prompt, seed) = (self.prompt(whisper), self.seek as u64);
        self.window = Some(Window::open(whisper, memory, &prompt, self.task.temperature, seed)?);
        Ok(true)
    }

    /// Number of the window's frames with audio.
    fn size(&self) -> usize {
        self.features.content().saturating_sub(self.seek).min(FRAMES)
    }

    /// The tokens that start a transcript.
    fn start(&self, whisper: &Whisper) -> impl Iterator<Item = u32> {
        [whisper.words.start].into_iter().chain(self.task.language).chain([self.task.task])
    }

    fn prompt(&self, whisper: &Whisper) -> Vec<u32> {
        let mut prompt = Vec::new();
        if !self.before.is_empty() {
            let max_prompt = whisper.network.shape.context / 2 - 1;
            prompt.push(whisper.words.before);
            prompt.extend(&self.before[self.before.len().saturating_sub(max_prompt)..]);
        }
        prompt.extend(self.start(whisper));
        prompt
    }

    /// Outputs the window's segments and moves on to the next window.
    fn close(
        &mut self,
        whisper: &Whisper,
        memory: &Memory,
        decoded: &Decoded,
        out: &mut Vec<OperationOutput>,
    ) -> Result<(), Error> {
        let (from, size) = (self.seek, self.size());
        self.seek += size;
        if decoded.silence > SILENCE && decoded.mean <= UNLIKELY {
            return Ok(());
        }
        let rules = &whisper.words.rules;
        let Parts { parts, consumed, complete } = split_segments(&decoded.tokens, rules.first_time(), size);
        let seconds = |frame: usize| frame as f64 / PER_SECOND;
        let text_of = |tokens: &[u32]| tokens.iter().filter(|token| **token < rules.end).count();
        let span = |part: &WindowPart<'_>| Span {
            start: seconds(from + part.start),
            end: seconds(from + part.end),
            tokens: text_of(part.tokens),
            words: Vec::new(),
        };
        let mut spans: Vec<Span> = parts.iter().map(span).collect();
        let mut end = from + consumed;
        if self.task.words {
            let words = self.align(whisper, memory, &parts, size)?;
            place_words(words, &mut spans, seconds(from), self.last_speech);
            let last = spans.iter().rev().find_map(|span| span.words.last().map(|word| word.end));
            if let Some(last) = last.or_else(|| spans.last().map(|span| span.end)) {
                self.last_speech = last;
                if !complete && last > seconds(from) {
                    end = (last * PER_SECOND).round_ties_even() as usize;
                }
            }
        }
        // Skip a window that makes no progress.
        self.seek = if end > from { end } else { from + size };
        let at = |seconds: f64| ((self.offset + seconds) * f64::from(self.task.rate)).round() as u64;
        for (WindowPart { tokens, .. }, span) in parts.iter().zip(spans) {
            let text = whisper.words.decode(tokens);
            if span.start == span.end || text.trim().is_empty() {
                continue;
            }
            self.before.extend(*tokens);
            let word = |TimedWord { text, start, end, probability, .. }| SpokenWord {
                text,
                start: at(start),
                end: at(end),
                probability,
            };
            out.push(OperationOutput::Text(SpokenText {
                text,
                start: at(span.start),
                end: at(span.end),
                window: at(seconds(from)),
                tokens: tokens.to_vec(),
                mean_log: decoded.mean,
                silence: decoded.silence,
                temperature: decoded.temperature,
                repetition: decoded.repetition,
                words: span.words.into_iter().map(word).collect(),
            }));
        }
        if decoded.temperature > RESET {
            self.before.clear();
        }
        Ok(())
    }

    /// The words of a window of `size` frames, with times from its start.
    fn align(
        &self,
        whisper: &Whisper,
        memory: &Memory,
        parts: &[WindowPart<'_>],
        size: usize,
    ) -> Result<Vec<TimedWord>, Error> {
        let Whisper { network, compute, words, heads, .. } = whisper;
        let texts = parts.iter().flat_map(|part| part.tokens).copied();
        let texts: Vec<u32> = texts.filter(|token| *token < words.rules.end).collect();
        if texts.is_empty() {
            return Ok(Vec::new());
        }
        let mut tokens: Vec<u32> = self.start(whisper).collect();
        let start = tokens.len();
        tokens.push(words.rules.no_times);
        tokens.extend(&texts);
        tokens.push(words.rules.end);
        let mut attention = Attention::new(compute.isa, size / TIME);
        let mut add = |scores: Vec<f32>| attention.add(&scores, POSITIONS);
        let predicted = (start + 1, words.rules.end);
        let shares = network.attention(compute, memory, &tokens, predicted, heads, &mut add)?;
        let spaces = self.task.language.is_none_or(|language| words.writes_spaces(language));
        let split = split_words(&texts, spaces, |tokens| words.decode(tokens));
        Ok(time_words(split, &attention.starts(start), &shares))
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

/// Splits the tokens of a window of `size` frames at pairs of timestamps.
fn split_segments(window_tokens: &[u32], first_time: u32, size: usize) -> Parts<'_> {
    let is_time = |token: &u32| *token >= first_time;
    let step = |token: u32| token.saturating_sub(first_time) as usize;
    let complete = matches!(window_tokens, [.., text, time] if !is_time(text) && is_time(time));
    let mut cuts: Vec<usize> = (1..window_tokens.len())
        .filter(|at| is_time(&window_tokens[*at]) && is_time(&window_tokens[*at - 1]))
        .collect();
    if cuts.is_empty() {
        let last =
            window_tokens.iter().rev().find(|token| is_time(token)).filter(|last| **last != first_time);
        let end = last.map_or(size, |last| step(*last) * TIME);
        let parts = vec![WindowPart { tokens: window_tokens, start: 0, end }];
        return Parts { parts, consumed: size, complete };
    }
    if complete {
        cuts.push(window_tokens.len());
    }
    let mut parts = Vec::with_capacity(cuts.len());
    let mut from = 0;
    for cut in cuts {
        let tokens = &window_tokens[from..cut];
        if let [first, .., last] | [first @ last] = tokens {
            parts.push(WindowPart { tokens, start: step(*first) * TIME, end: step(*last) * TIME });
        }
        from = cut;
    }
    let consumed = if complete { size } else { step(window_tokens[from - 1]) * TIME };
    Parts { parts, consumed, complete }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Timestamps are the tokens from 100 on.
    fn cut(tokens: &[u32]) -> (Vec<(Vec<u32>, usize, usize)>, usize) {
        let Parts { parts, consumed, .. } = split_segments(tokens, 100, 2500);
        (
            parts.into_iter().map(|segment| (segment.tokens.to_vec(), segment.start, segment.end)).collect(),
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
