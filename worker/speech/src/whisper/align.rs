//! Times of words, from the attention of some heads to the audio: normalized, smoothed by a median filter,
//! averaged, and followed by dynamic time warping, as in OpenAI's reference and `faster-whisper`. Sans-IO.

use kernels::Isa;
use kernels::ops::softmax;

/// Width of the median filter, in positions of 20 ms.
const FILTER: usize = 7;
/// Positions of the encoder per second.
const PER_SECOND: f64 = 50.0;
/// Longest median duration of a word, in seconds.
const MAX_MEDIAN: f64 = 0.7;
/// Marks that end a sentence.
const SENTENCE_ENDS: &str = ".。!！?？";
/// Punctuation that belongs to the following word.
const BEFORE_WORDS: &str = "\"'“¿([{-";
/// Punctuation that belongs to the word before it.
const AFTER_WORDS: &str = "\"'.。,，!！?？:：”)]}、";

/// Mean attention of heads: `[token][position]`.
pub(super) struct Attention {
    isa: Isa,
    /// Positions with audio.
    positions: usize,
    sums: Vec<f32>,
    heads: usize,
}

/// A word and its times in seconds, from the start of the window.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TimedWord {
    pub(super) text: String,
    /// Number of its tokens.
    pub(super) tokens: usize,
    pub(super) start: f64,
    pub(super) end: f64,
    /// Mean probability of its tokens.
    pub(super) probability: f32,
}

/// A segment whose words get times; in seconds.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Span {
    pub(super) start: f64,
    pub(super) end: f64,
    /// Number of its tokens of text.
    pub(super) tokens: usize,
    pub(super) words: Vec<TimedWord>,
}

impl Attention {
    pub(super) fn new(isa: Isa, positions: usize) -> Self {
        Self { isa, positions, sums: Vec::new(), heads: 0 }
    }

    /// Adds the scores of a head, `[token][position]` before the softmax, of `all` positions.
    pub(super) fn add(&mut self, scores: &[f32], all: usize) {
        let n = self.positions.min(all);
        if n == 0 {
            return;
        }
        let mut weights: Vec<f32> = scores.chunks(all).flat_map(|row| &row[..n]).copied().collect();
        weights.chunks_mut(n).for_each(|row| softmax(self.isa, row));
        normalize_columns(&mut weights, n);
        weights.chunks_mut(n).for_each(smooth);
        match self.heads {
            0 => self.sums = weights,
            _ => self.sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight),
        }
        self.heads += 1;
    }

    /// For each of the tokens from `first` to the last but one, the seconds at which it starts.
    pub(super) fn starts(&self, first: usize) -> Vec<f64> {
        let rows: Vec<&[f32]> = self.sums.chunks(self.positions.max(1)).collect();
        let rows = rows.get(first..rows.len().saturating_sub(1)).unwrap_or_default();
        warp(rows).into_iter().map(|position| position as f64 / PER_SECOND).collect()
    }
}

/// Mean 0 and variance 1 in each column.
fn normalize_columns(weights: &mut [f32], columns: usize) {
    let rows = (weights.len() / columns) as f32;
    let mut means = vec![0.0f32; columns];
    for row in weights.chunks(columns) {
        means.iter_mut().zip(row).for_each(|(mean, weight)| *mean += weight / rows);
    }
    let mut variances = vec![0.0f32; columns];
    for row in weights.chunks(columns) {
        for ((variance, mean), weight) in variances.iter_mut().zip(&means).zip(row) {
            *variance += (weight - mean).powi(2) / rows;
        }
    }
    for row in weights.chunks_mut(columns) {
        for ((weight, mean), variance) in row.iter_mut().zip(&means).zip(&variances) {
            // A column of equal values says nothing about tokens.
            *weight = if *variance > 0.0 { (*weight - mean) / variance.sqrt() } else { 0.0 };
        }
    }
}

/// Replaces each value by the median of its neighborhood. Rows are mirrored at both ends.
fn smooth(row: &mut [f32]) {
    let half = FILTER / 2;
    if row.len() <= half {
        return;
    }
    let last = row.len() - 1;
    let before = row.to_vec();
    for (at, value) in row.iter_mut().enumerate() {
        let mut near: [f32; FILTER] = std::array::from_fn(|n| {
            let at = (at + n).abs_diff(half);
            before[if at > last { 2 * last - at } else { at }]
        });
        near.sort_unstable_by(f32::total_cmp);
        *value = near[half];
    }
}

/// The path through `[token][position]` with the largest sum that starts at the first token and position,
/// ends at the last ones and never goes back. Returns the first position of each token.
fn warp(rows: &[&[f32]]) -> Vec<usize> {
    let (n, m) = (rows.len(), rows.first().map_or(0, |row| row.len()));
    if n == 0 || m == 0 {
        return vec![0; n];
    }
    let width = m + 1;
    let mut costs = vec![f32::INFINITY; (n + 1) * width];
    // Where the path comes from: 0 diagonally, 1 from the token before, 2 from the position before.
    let mut from = vec![2u8; (n + 1) * width];
    costs[0] = 0.0;
    from[..width].fill(2);
    (1..=n).for_each(|i| from[i * width] = 1);
    for j in 1..=m {
        for i in 1..=n {
            let diagonal = costs[(i - 1) * width + j - 1];
            let token = costs[(i - 1) * width + j];
            let position = costs[i * width + j - 1];
            let (cost, step) = if diagonal < token && diagonal < position {
                (diagonal, 0)
            } else if token < diagonal && token < position {
                (token, 1)
            } else {
                (position, 2)
            };
            costs[i * width + j] = cost - rows[i - 1][j - 1];
            from[i * width + j] = step;
        }
    }
    let mut starts = vec![0; n];
    let (mut i, mut j) = (n, m);
    while i > 0 && j > 0 {
        starts[i - 1] = j - 1;
        match from[i * width + j] {
            0 => (i, j) = (i - 1, j - 1),
            1 => i -= 1,
            _ => j -= 1,
        }
    }
    starts
}

/// Splits tokens of text into words. `decode` returns the text of tokens.
///
/// Without `spaces`, for languages that write none, each character is a word.
pub(super) fn split_words(
    tokens: &[u32],
    spaces: bool,
    decode: impl Fn(&[u32]) -> String,
) -> Vec<(String, usize)> {
    let mut words: Vec<(String, usize)> = Vec::new();
    for (text, count) in split_characters(tokens, decode) {
        let alone = text.starts_with(' ') || is_punctuation(text.trim());
        match words.last_mut().filter(|_| spaces && !alone) {
            Some((word, tokens)) => {
                word.push_str(&text);
                *tokens += count;
            }
            None => words.push((text, count)),
        }
    }
    words
}

fn is_punctuation(text: &str) -> bool {
    r##"!"#$%&'()*+,-./:;<=>?@[\]^_`{|}~"##.contains(text)
}

/// Splits tokens where their text has whole characters.
fn split_characters(tokens: &[u32], decode: impl Fn(&[u32]) -> String) -> Vec<(String, usize)> {
    let all: Vec<char> = decode(tokens).chars().collect();
    let (mut parts, mut from, mut chars) = (Vec::new(), 0, 0);
    for at in 0..tokens.len() {
        let text = decode(&tokens[from..=at]);
        let broken = text.chars().position(|c| c == char::REPLACEMENT_CHARACTER);
        // The whole text may have such a character itself.
        if broken.is_none_or(|at| all.get(chars + at) == Some(&char::REPLACEMENT_CHARACTER)) {
            chars += text.chars().count();
            parts.push((text, at + 1 - from));
            from = at + 1;
        }
    }
    parts
}

/// Gives times to words. `starts` has the start of each token and of the end behind them, `shares` the
/// probability of each token.
pub(super) fn time_words(words: Vec<(String, usize)>, starts: &[f64], shares: &[f32]) -> Vec<TimedWord> {
    let mut timed = Vec::with_capacity(words.len());
    let mut from = 0;
    for (text, tokens) in words {
        let of = from..from + tokens;
        from = of.end;
        let (Some(start), Some(end), Some(shares)) =
            (starts.get(of.start), starts.get(of.end), shares.get(of))
        else {
            break;
        };
        let sum: f64 = shares.iter().map(|share| f64::from(*share)).sum();
        let probability = (sum / tokens as f64) as f32;
        timed.push(TimedWord { text, tokens, start: *start, end: *end, probability });
    }
    timed
}

/// Median duration of the words of a window, at most [`MAX_MEDIAN`].
fn median_duration(words: &[TimedWord]) -> f64 {
    let mut durations: Vec<f64> =
        words.iter().map(|word| word.end - word.start).filter(|duration| *duration != 0.0).collect();
    durations.sort_unstable_by(f64::total_cmp);
    let middle = durations.len() / 2;
    let median = match durations.len() {
        0 => 0.0,
        len if len % 2 == 0 => f64::midpoint(durations[middle - 1], durations[middle]),
        _ => durations[middle],
    };
    median.min(MAX_MEDIAN)
}

/// Distributes the words of a window that starts at `offset` seconds to its segments, which then start and
/// end with their words. Words that are much longer than others, before or after a pause, are cut.
/// `last_speech` is the end of the last word before.
pub(super) fn place_words(mut words: Vec<TimedWord>, spans: &mut [Span], offset: f64, mut last_speech: f64) {
    let median = median_duration(&words);
    let longest = median * 2.0;
    if median > 0.0 {
        for at in 1..words.len() {
            if words[at].end - words[at].start > longest {
                if SENTENCE_ENDS.contains(&words[at].text) {
                    words[at].end = words[at].start + longest;
                } else if SENTENCE_ENDS.contains(&words[at - 1].text) {
                    words[at].start = words[at].end - longest;
                }
            }
        }
    }
    merge_punctuation(&mut words);
    let mut words = words.into_iter().peekable();
    for span in spans {
        let mut tokens = 0;
        while tokens < span.tokens
            && let Some(word) = words.next()
        {
            tokens += word.tokens;
            if !word.text.is_empty() {
                let (start, end) = (hundredths(offset + word.start), hundredths(offset + word.end));
                span.words.push(TimedWord { start, end, ..word });
            }
        }
        span.bound(last_speech, median);
        if !span.words.is_empty() {
            last_speech = span.end;
        }
    }
}

/// Rounds to hundredths.
fn hundredths(seconds: f64) -> f64 {
    (seconds * 100.0).round_ties_even() / 100.0
}

impl Span {
    fn bound(&mut self, last_speech: f64, median: f64) {
        let longest = median * 2.0;
        if let [first, rest @ ..] = &mut self.words[..] {
            let long = |words: f64, from: f64, to: f64| to - from > words * longest;
            let two = rest.first().is_some_and(|second| long(2.0, first.start, second.end));
            if first.end - last_speech > median * 4.0 && (long(1.0, first.start, first.end) || two) {
                if let Some(second) = rest.first_mut().filter(|second| long(1.0, second.start, second.end)) {
                    let boundary = (second.end / 2.0).max(second.end - longest);
                    (first.end, second.start) = (boundary, boundary);
                }
                first.start = (first.end - longest).max(0.0);
            }
            // A first word that starts long before the segment starts with it.
            if self.start < first.end && self.start - 0.5 > first.start {
                first.start = (first.end - median).min(self.start).max(0.0);
            } else {
                self.start = first.start;
            }
        }
        if let Some(last) = self.words.last_mut() {
            if self.end > last.start && self.end + 0.5 < last.end {
                last.end = (last.start + median).max(self.end);
            } else {
                self.end = last.end;
            }
        }
    }
}

/// Joins punctuation and the word to which it belongs. The emptied words stay, without tokens.
fn merge_punctuation(words: &mut [TimedWord]) {
    fn take(word: &mut TimedWord) -> (String, usize) {
        (std::mem::take(&mut word.text), std::mem::take(&mut word.tokens))
    }
    let mut following = words.len().saturating_sub(1);
    for at in (0..following).rev() {
        let text = &words[at].text;
        if text.starts_with(' ') && BEFORE_WORDS.contains(text.trim()) {
            let (text, tokens) = take(&mut words[at]);
            words[following].text.insert_str(0, &text);
            words[following].tokens += tokens;
        } else {
            following = at;
        }
    }
    let mut previous = 0;
    for at in 1..words.len() {
        if !words[previous].text.ends_with(' ') && AFTER_WORDS.contains(&words[at].text) {
            let (text, tokens) = take(&mut words[at]);
            words[previous].text.push_str(&text);
            words[previous].tokens += tokens;
        } else {
            previous = at;
        }
    }
}

#[cfg(test)]
mod tests;
