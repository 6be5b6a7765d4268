//! Which token may be said next, and which is: the rules of OpenAI's reference for answers with times, at temperature 0.
//! Sans-IO.

use kernels::Isa;
use kernels::ops::{argmax, log_softmax};

/// The first time that is said is at most so many steps of 20 ms from the beginning.
const MAX_INITIAL: u32 = 50;

/// The tokens that the rules speak of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rules {
    /// Ends the text. Tokens below it are text.
    pub(super) end: u32,
    pub(super) no_times: u32,
    pub(super) suppressed: Vec<u32>,
    pub(super) suppressed_first: Vec<u32>,
}

/// The token that is said, and the logarithm of its probability among those that may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ChosenToken {
    pub(super) token: u32,
    pub(super) log: f32,
}

impl Rules {
    /// The token of time 0; each after it is 20 ms later.
    pub(super) fn first_time(&self) -> u32 {
        self.no_times + 1
    }

    /// Whether a token is a time.
    pub(super) fn is_time(&self, token: u32) -> bool {
        token >= self.first_time()
    }

    /// The next token behind those that were `said` in this window. `logits` are worn out by it.
    pub(super) fn say(&self, isa: Isa, logits: &mut [f32], said: &[u32]) -> ChosenToken {
        let first_time = (self.first_time() as usize).min(logits.len());
        let end = (self.end as usize).min(logits.len());
        for token in self.suppressed.iter().chain([&self.no_times]) {
            forbid(logits, *token as usize..*token as usize + 1);
        }
        match said {
            [] => {
                for token in &self.suppressed_first {
                    forbid(logits, *token as usize..*token as usize + 1);
                }
                // It begins with a time, not far from the beginning.
                forbid(logits, 0..first_time);
                forbid(logits, first_time + MAX_INITIAL as usize + 1..logits.len());
            }
            [.., last] => {
                let after_time = self.is_time(*last);
                let after_two =
                    after_time && said.iter().rev().nth(1).is_none_or(|token| self.is_time(*token));
                if after_two {
                    forbid(logits, first_time..logits.len());
                } else if after_time {
                    // A time that ends what was said is followed by the next one's, or by the end.
                    forbid(logits, 0..end);
                }
                // Times do not go back.
                if let Some(latest) = said.iter().rev().find(|token| self.is_time(**token)) {
                    forbid(logits, first_time..*latest as usize);
                }
                if !after_two && times_win(isa, logits, first_time) {
                    forbid(logits, 0..first_time);
                }
            }
        }
        let token = argmax(isa, logits);
        log_softmax(isa, logits);
        ChosenToken { token: token as u32, log: logits.get(token).copied().unwrap_or(f32::NEG_INFINITY) }
    }
}

fn forbid(logits: &mut [f32], tokens: std::ops::Range<usize>) {
    let end = tokens.end.min(logits.len());
    if let Some(logits) = logits.get_mut(tokens.start.min(end)..end) {
        logits.fill(f32::NEG_INFINITY);
    }
}

/// Whether all times together are likelier than any other token.
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

    /// Text 0 to 9, the end 10, two more, no times 13, times from 14 on.
    fn rules() -> Rules {
        Rules { end: 10, no_times: 13, suppressed: vec![3, 11], suppressed_first: vec![4, 10] }
    }

    fn logits(high: &[(usize, f32)]) -> Vec<f32> {
        let mut logits = vec![0.0; 100];
        high.iter().for_each(|(token, value)| logits[*token] = *value);
        logits
    }

    fn said(high: &[(usize, f32)], before: &[u32]) -> u32 {
        rules().say(Isa::detect(), &mut logits(high), before).token
    }

    #[test]
    fn it_begins_with_an_early_time() {
        assert_eq!(said(&[(5, 9.0), (20, 1.0)], &[]), 20);
        assert_eq!(said(&[(70, 9.0), (64, 1.0)], &[]), 64, "the last that may be first");
        assert_eq!(said(&[(10, 9.0)], &[]), 14, "of equals the first");
    }

    #[test]
    fn what_is_suppressed_is_never_said() {
        assert_eq!(said(&[(3, 90.0), (11, 80.0), (13, 70.0), (5, 60.0)], &[14, 6]), 5);
        assert_eq!(said(&[(4, 60.0)], &[14]), 4, "only not first");
    }

    #[test]
    fn times_come_in_pairs_and_do_not_go_back() {
        // One time, the first: text follows, or the end.
        assert_eq!(said(&[(20, 90.0), (5, 9.0)], &[14]), 5);
        // Behind a time that ends a text: a time not before it, or the end.
        assert_eq!(said(&[(5, 90.0), (19, 80.0), (20, 9.0)], &[14, 5, 20]), 20);
        assert_eq!(said(&[(5, 90.0), (10, 89.0)], &[14, 5, 20]), 10);
        // Two times: text.
        assert_eq!(said(&[(30, 90.0), (6, 9.0)], &[14, 5, 20, 20]), 6);
    }

    #[test]
    fn times_win_together() {
        // 86 of them, of which none is as likely as the text: all together are.
        let together: Vec<(usize, f32)> = (14..100).map(|token| (token, 5.0)).chain([(6, 9.0)]).collect();
        assert_eq!(said(&together, &[14, 5]), 14);
        let less: Vec<(usize, f32)> = (14..100).map(|token| (token, 4.0)).chain([(6, 9.0)]).collect();
        assert_eq!(said(&less, &[14, 5]), 6);
    }

    #[test]
    fn the_probability_is_among_those_that_may_be() {
        let ChosenToken { token, log } = rules().say(Isa::detect(), &mut logits(&[(3, 50.0)]), &[]);
        // 51 times are equally likely.
        assert!(token == 14 && (log + 51f32.ln()).abs() < 1e-5, "{token} {log}");
    }
}
