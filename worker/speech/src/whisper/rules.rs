//! Selects the next token: the rules of OpenAI's reference for transcripts with timestamps. Sans-IO.

use kernels::Isa;
use kernels::ops::{argmax, log_softmax};

/// Maximum value of the first timestamp, in steps of 20 ms.
const MAX_INITIAL: u32 = 50;

/// Special tokens of the rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rules {
    /// Ends the text. Tokens below it are text.
    pub(super) end: u32,
    pub(super) no_times: u32,
    pub(super) suppressed: Vec<u32>,
    pub(super) suppressed_first: Vec<u32>,
}

/// The selected token, and the logarithm of its probability among the allowed tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ChosenToken {
    pub(super) token: u32,
    pub(super) log: f32,
}

/// Draws tokens at a temperature above 0. Equal seeds give equal draws.
#[derive(Debug, Clone)]
pub(super) struct Sampler {
    pub(super) temperature: f32,
    state: u64,
}

impl Sampler {
    pub(super) fn new(temperature: f32, seed: u64) -> Self {
        Self { temperature, state: seed }
    }

    /// A number in 0 to 1, without 1 (SplitMix64).
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws a token by its log-probability.
    fn draw(&mut self, logs: &[f32]) -> usize {
        let best = logs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |log: f32| (f64::from(log - best) / f64::from(self.temperature)).exp();
        let weights: Vec<f64> = logs.iter().map(|log| weight(*log)).collect();
        let mut left = self.uniform() * weights.iter().sum::<f64>();
        for (token, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            left -= weight;
            if left < 0.0 {
                return token;
            }
        }
        // The subtractions are rounded.
        weights.iter().rposition(|weight| *weight > 0.0).unwrap_or(0)
    }
}

impl Rules {
    /// The token of timestamp 0. Each following token is 20 ms later.
    pub(super) fn first_time(&self) -> u32 {
        self.no_times + 1
    }

    /// Whether a token is a timestamp.
    pub(super) fn is_time(&self, token: u32) -> bool {
        token >= self.first_time()
    }

    /// Selects the token that follows the tokens `previous` in this window: the most likely one without a
    /// sampler. Overwrites `logits`.
    pub(super) fn next_token(
        &self,
        isa: Isa,
        logits: &mut [f32],
        previous: &[u32],
        sampler: Option<&mut Sampler>,
    ) -> ChosenToken {
        let first_time = (self.first_time() as usize).min(logits.len());
        let end = (self.end as usize).min(logits.len());
        for token in self.suppressed.iter().chain([&self.no_times]) {
            forbid(logits, *token as usize..*token as usize + 1);
        }
        match previous {
            [] => {
                for token in &self.suppressed_first {
                    forbid(logits, *token as usize..*token as usize + 1);
                }
                // A window starts with a timestamp near its beginning.
                forbid(logits, 0..first_time);
                forbid(logits, first_time + MAX_INITIAL as usize + 1..logits.len());
            }
            [.., last] => {
                let after_time = self.is_time(*last);
                let after_two =
                    after_time && previous.iter().rev().nth(1).is_none_or(|token| self.is_time(*token));
                if after_two {
                    forbid(logits, first_time..logits.len());
                } else if after_time {
                    // A timestamp that ends a text is followed by the next text's timestamp, or by the end.
                    forbid(logits, 0..end);
                }
                // Timestamps do not decrease.
                if let Some(latest) = previous.iter().rev().find(|token| self.is_time(**token)) {
                    forbid(logits, first_time..*latest as usize);
                }
                if !after_two && times_win(isa, logits, first_time) {
                    forbid(logits, 0..first_time);
                }
            }
        }
        let best = argmax(isa, logits);
        log_softmax(isa, logits);
        let token = sampler.map_or(best, |sampler| sampler.draw(logits));
        ChosenToken { token: token as u32, log: logits.get(token).copied().unwrap_or(f32::NEG_INFINITY) }
    }
}

fn forbid(logits: &mut [f32], tokens: std::ops::Range<usize>) {
    let end = tokens.end.min(logits.len());
    if let Some(logits) = logits.get_mut(tokens.start.min(end)..end) {
        logits.fill(f32::NEG_INFINITY);
    }
}

/// Whether all timestamps together are more likely than any other token.
fn times_win(isa: Isa, logits: &[f32], first_time: usize) -> bool {
    let mut logs = logits.to_vec();
    log_softmax(isa, &mut logs);
    let (texts, times) = logs.split_at(first_time);
    let best = texts.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = times.iter().map(|log| f64::from(*log).exp()).sum();
    sum.ln() > f64::from(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text 0 to 9, the end 10, two more, no timestamps 13, timestamps from 14 on.
    fn rules() -> Rules {
        Rules { end: 10, no_times: 13, suppressed: vec![3, 11], suppressed_first: vec![4, 10] }
    }

    fn logits(high: &[(usize, f32)]) -> Vec<f32> {
        let mut logits = vec![0.0; 100];
        high.iter().for_each(|(token, value)| logits[*token] = *value);
        logits
    }

    fn token_after(high: &[(usize, f32)], before: &[u32]) -> u32 {
        rules().next_token(Isa::detect(), &mut logits(high), before, None).token
    }

    #[test]
    fn a_window_begins_with_an_early_timestamp() {
        assert_eq!(token_after(&[(5, 9.0), (20, 1.0)], &[]), 20);
        assert_eq!(token_after(&[(70, 9.0), (64, 1.0)], &[]), 64, "the last that may be first");
        assert_eq!(token_after(&[(10, 9.0)], &[]), 14, "of equals the first");
    }

    #[test]
    fn suppressed_tokens_are_never_selected() {
        assert_eq!(token_after(&[(3, 90.0), (11, 80.0), (13, 70.0), (5, 60.0)], &[14, 6]), 5);
        assert_eq!(token_after(&[(4, 60.0)], &[14]), 4, "only not first");
    }

    #[test]
    fn timestamps_come_in_pairs_and_do_not_decrease() {
        // One timestamp, the first: text follows, or the end.
        assert_eq!(token_after(&[(20, 90.0), (5, 9.0)], &[14]), 5);
        // After a timestamp that ends a text: a timestamp that is not lower, or the end.
        assert_eq!(token_after(&[(5, 90.0), (19, 80.0), (20, 9.0)], &[14, 5, 20]), 20);
        assert_eq!(token_after(&[(5, 90.0), (10, 89.0)], &[14, 5, 20]), 10);
        // Two timestamps: text follows.
        assert_eq!(token_after(&[(30, 90.0), (6, 9.0)], &[14, 5, 20, 20]), 6);
    }

    #[test]
    fn timestamps_win_by_their_total_probability() {
        // None of the 86 timestamps is as likely as the text, but their sum is.
        let together: Vec<(usize, f32)> = (14..100).map(|token| (token, 5.0)).chain([(6, 9.0)]).collect();
        assert_eq!(token_after(&together, &[14, 5]), 14);
        let less: Vec<(usize, f32)> = (14..100).map(|token| (token, 4.0)).chain([(6, 9.0)]).collect();
        assert_eq!(token_after(&less, &[14, 5]), 6);
    }

    #[test]
    fn the_probability_is_relative_to_allowed_tokens() {
        let ChosenToken { token, log } =
            rules().next_token(Isa::detect(), &mut logits(&[(3, 50.0)]), &[], None);
        // 51 timestamps are equally likely.
        assert!(token == 14 && (log + 51f32.ln()).abs() < 1e-5, "{token} {log}");
    }

    #[test]
    fn draws_have_the_probabilities_of_their_temperature() {
        let draws = |temperature| {
            let mut sampler = Sampler::new(temperature, 7);
            let mut counts = [0u32; 4];
            for _ in 0..20_000 {
                counts[sampler.draw(&[f32::NEG_INFINITY, 0.1f32.ln(), 0.3f32.ln(), 0.6f32.ln()])] += 1;
            }
            counts.map(|count| f64::from(count) / 20_000.0)
        };
        let near = |found: [f64; 4], expected: [f64; 4]| {
            found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 0.01)
        };
        assert!(near(draws(1.0), [0.0, 0.1, 0.3, 0.6]), "{:?}", draws(1.0));
        // Squares of the probabilities.
        assert!(near(draws(0.5), [0.0, 0.01 / 0.46, 0.09 / 0.46, 0.36 / 0.46]), "{:?}", draws(0.5));
        assert_eq!(draws(0.001), [0.0, 0.0, 0.0, 1.0]);
        assert_eq!(draws(1.0), draws(1.0), "equal seeds");
    }
}
