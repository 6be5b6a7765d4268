//! Decodes a window of thirty seconds: greedily first, then by draws at higher temperatures as long as the
//! text repeats itself or is unlikely, as OpenAI's reference and `faster-whisper` do. Draws are seeded, so
//! equal audio has the same text.

use super::Whisper;
use super::network::{Cache, Memory};
use super::rules::Sampler;
use crate::Error;
use kernels::ops::softmax;

/// Tokens of one step.
const STEP: usize = 16;
/// Temperatures after the first one, which is 0.
const HIGHER: [f32; 5] = [0.2, 0.4, 0.6, 0.8, 1.0];
/// Draws at a temperature above 0, of which the most likely one counts.
const DRAWS: u64 = 5;
/// A text repeats itself if it is compressed by more than this.
const REPETITIVE: f32 = 2.4;
/// A text is unlikely if the mean log-probability of its tokens is below this.
pub(super) const UNLIKELY: f32 = -1.0;
/// A window may be silence if the probability of silence is above this.
pub(super) const SILENCE: f32 = 0.6;
/// Compression level: zlib's default.
const LEVEL: u8 = 6;

/// A window that is being decoded.
pub(super) struct Window {
    pub(super) memory: Memory,
    /// The decoder's state after the prompt, and the logits of the first token.
    prompt: Cache,
    logits: Vec<f32>,
    silence: f32,
    max_tokens: usize,
    seed: u64,
    temperature: f32,
    /// Temperatures that are left.
    higher: &'static [f32],
    draws: Vec<Draw>,
    refused: Vec<Decoded>,
}

/// The text of a window.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Decoded {
    pub(super) tokens: Vec<u32>,
    /// Mean log-probability of the tokens and the end.
    pub(super) mean: f32,
    pub(super) silence: f32,
    pub(super) temperature: f32,
    /// zlib's compression ratio.
    pub(super) repetition: f32,
}

/// A text that is being decoded.
struct Draw {
    cache: Cache,
    tokens: Vec<u32>,
    /// The last token, which the decoder has not processed yet. `None` at the end.
    next: Option<u32>,
    /// Sum of the log-probabilities of all tokens and the end.
    logs: f32,
    sampler: Option<Sampler>,
}

impl Window {
    /// Reads a prompt. `seed` is for draws. The first `temperature` is followed by higher ones if it is 0.
    ///
    /// # Errors
    /// Errors of the network.
    pub(super) fn open(
        whisper: &Whisper,
        memory: Memory,
        prompt: &[u32],
        temperature: f32,
        seed: u64,
    ) -> Result<Self, Error> {
        let Whisper { network, compute, words, .. } = whisper;
        let mut cache = network.cache();
        let start = prompt.iter().position(|token| *token == words.start).unwrap_or(0);
        let last = prompt.len().saturating_sub(1);
        let rows = network.decode(compute, &memory, &mut cache, prompt, &[start, last])?;
        let [mut at_start, logits] = <[Vec<f32>; 2]>::try_from(rows).unwrap_or_default();
        softmax(compute.isa, &mut at_start);
        let silence = at_start.get(words.silence as usize).copied().unwrap_or(0.0);
        let context = network.shape.context;
        let mut window = Self {
            memory,
            prompt: cache,
            logits,
            silence,
            // The last token of the prompt counts as the first of the generated positions.
            max_tokens: (context / 2).min(context - last),
            seed,
            temperature,
            higher: if temperature > 0.0 { &[] } else { &HIGHER },
            draws: Vec::new(),
            refused: Vec::new(),
        };
        window.begin(whisper);
        Ok(window)
    }

    /// Selects the first tokens at the window's temperature.
    fn begin(&mut self, whisper: &Whisper) {
        let draws = if self.temperature > 0.0 { DRAWS } else { 1 };
        let first = |draw: u64| {
            let seed = self.seed.wrapping_mul(DRAWS).wrapping_add(draw)
                ^ u64::from(self.temperature.to_bits()) << 32;
            let mut sampler = (self.temperature > 0.0).then(|| Sampler::new(self.temperature, seed));
            let isa = whisper.compute.isa;
            let chosen = whisper.words.rules.next_token(isa, &mut self.logits.clone(), &[], sampler.as_mut());
            let tokens = vec![chosen.token];
            Draw { cache: self.prompt.clone(), tokens, next: Some(chosen.token), logs: chosen.log, sampler }
        };
        self.draws = (0..draws).map(first).collect();
    }

    /// Generates some tokens. Returns the text when it is complete.
    ///
    /// # Errors
    /// Errors of the network.
    pub(super) fn step(&mut self, whisper: &Whisper) -> Result<Option<Decoded>, Error> {
        for _ in 0..STEP {
            if !self.extend(whisper)? {
                return Ok(self.end(whisper));
            }
        }
        Ok(None)
    }

    /// Adds a token to each unfinished draw. Returns whether there was one.
    fn extend(&mut self, whisper: &Whisper) -> Result<bool, Error> {
        let Whisper { network, compute, words, .. } = whisper;
        let (max_tokens, context) = (self.max_tokens, network.shape.context);
        let mut open: Vec<(u32, &mut Draw)> = Vec::with_capacity(self.draws.len());
        for draw in &mut self.draws {
            let full = draw.tokens.len() >= max_tokens || draw.cache.tokens() >= context;
            if let Some(next) = draw.next.filter(|_| !full) {
                open.push((next, draw));
            }
        }
        if open.is_empty() {
            return Ok(false);
        }
        let mut sequences: Vec<(&mut Cache, &[u32])> =
            open.iter_mut().map(|(next, draw)| (&mut draw.cache, std::slice::from_ref(next))).collect();
        let all = network.decode_each(compute, &self.memory, &mut sequences)?;
        for ((_, draw), mut logits) in open.into_iter().zip(all) {
            let sampler = draw.sampler.as_mut();
            let chosen = words.rules.next_token(compute.isa, &mut logits, &draw.tokens, sampler);
            draw.logs += chosen.log;
            draw.next = (chosen.token != words.rules.end).then_some(chosen.token);
            draw.tokens.extend(draw.next);
        }
        Ok(true)
    }

    /// Ends an attempt: returns the most likely text, or begins anew at a higher temperature.
    fn end(&mut self, whisper: &Whisper) -> Option<Decoded> {
        let score = |draw: &Draw| draw.logs / draw.tokens.len() as f32;
        let draws = std::mem::take(&mut self.draws).into_iter();
        let Draw { tokens, logs, .. } = draws.reduce(|best, draw| match score(&draw) > score(&best) {
            true => draw,
            false => best,
        })?;
        let decoded = Decoded {
            mean: logs / (tokens.len() + 1) as f32,
            silence: self.silence,
            temperature: self.temperature,
            repetition: repetition(&whisper.words.decode(&tokens)),
            tokens,
        };
        if decoded.is_good() {
            return Some(decoded);
        }
        self.refused.push(decoded);
        let Some((next, higher)) = self.higher.split_first() else {
            return best(std::mem::take(&mut self.refused), self.temperature);
        };
        (self.temperature, self.higher) = (*next, higher);
        self.begin(whisper);
        None
    }
}

impl Decoded {
    /// Whether a higher temperature is not needed.
    fn is_good(&self) -> bool {
        let unlikely = self.mean < UNLIKELY;
        let silent = self.silence > SILENCE && unlikely;
        silent || !(self.repetition > REPETITIVE || unlikely)
    }
}

/// The most likely of the refused texts, those that repeat themselves only if all do. It has the last
/// temperature.
fn best(refused: Vec<Decoded>, temperature: f32) -> Option<Decoded> {
    let all_repeat = refused.iter().all(|decoded| decoded.repetition > REPETITIVE);
    let eligible = refused.into_iter().filter(|decoded| all_repeat || decoded.repetition <= REPETITIVE);
    let best = eligible.reduce(|best, decoded| if decoded.mean > best.mean { decoded } else { best })?;
    Some(Decoded { temperature, ..best })
}

/// zlib's compression ratio of a text. Repeated text has a high ratio.
fn repetition(text: &str) -> f32 {
    let text = text.trim().as_bytes();
    text.len() as f32 / miniz_oxide::deflate::compress_to_vec_zlib(text, LEVEL).len() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(mean: f32, silence: f32, repetition: f32) -> Decoded {
        Decoded { tokens: vec![], mean, silence, temperature: 0.0, repetition }
    }

    #[test]
    fn repeated_and_unlikely_texts_are_refused_but_silence_is_not() {
        for (mean, silence, repetition, good) in [
            (-0.5, 0.1, 1.2, true),
            (-0.5, 0.1, 2.5, false),
            (-0.5, 0.9, 2.5, false),
            (-1.5, 0.1, 1.2, false),
            (-1.5, 0.7, 1.2, true),
            (-1.5, 0.7, 2.5, true),
            (-1.0, 0.6, 2.4, true),
        ] {
            assert_eq!(decoded(mean, silence, repetition).is_good(), good, "{mean} {silence} {repetition}");
        }
    }

    #[test]
    fn of_refused_texts_the_likeliest_without_repetition_is_taken() {
        let all = [decoded(-0.1, 0.0, 9.0), decoded(-1.4, 0.0, 1.0), decoded(-1.2, 0.0, 2.4)];
        let found = best(all.to_vec(), 1.0).unwrap();
        assert_eq!((found.mean, found.temperature), (-1.2, 1.0));
        let all = [decoded(-0.3, 0.0, 9.0), decoded(-0.2, 0.0, 5.0)];
        assert_eq!(best(all.to_vec(), 1.0).unwrap().mean, -0.2, "all repeat themselves");
    }

    #[test]
    fn repeated_text_has_a_high_compression_ratio() {
        assert!(repetition(&" so it goes".repeat(40)) > 10.0);
        assert!(repetition(" Two, three.") < 1.0, "too short to compress");
    }
}
