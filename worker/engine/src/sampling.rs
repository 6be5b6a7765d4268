//! Draws the next token from a row of logits.
//!
//! The order is that of vLLM: logit bias, penalties, minimum length, grammar mask, then greedy or
//! temperature, min-p, top-k, top-p and one draw. Draw `i` of a request depends only on (seed, i) and the
//! logits, so that another worker can draw the same token again. Log-probabilities are those of the raw
//! logits.

use kernels::ops::is_drawable;
use proto::message::{GenerateError, PromptLogprob, Sampling, Stop, TokenLogprobs};
use proto::stage::StageSample;
use std::collections::{HashMap, HashSet};

mod mask;
pub mod stop;
#[cfg(test)]
mod tests;

pub use mask::TokenMask;

/// Maximum number of entries of a logit bias.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Up to this temperature most tokens have no weight, whatever the other parameters are.
const COLD: f32 = 0.25;
/// Maximum number of alternatives with a reported log-probability.
pub const MAX_LOGPROBS: u8 = 20;

/// State of sampling: the parameters and the tokens drawn so far.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: Sampling,
    min_tokens: u32,
    /// Tokens that may not be drawn before `min_tokens`.
    ending: Vec<u32>,
    prompt: HashSet<u32>,
    counts: HashMap<u32, u32>,
    drawn: u32,
}

impl Sampler {
    /// Checks the parameters against `vocab`. `ending` are the tokens that end the generation.
    pub fn new(
        params: Sampling,
        stop: &Stop,
        prompt: &[u32],
        ending: Vec<u32>,
        vocab: usize,
    ) -> Result<Self, GenerateError> {
        check(&params, vocab)?;
        let prompt = match params.repetition_penalty == 1.0 {
            true => HashSet::new(),
            false => prompt.iter().copied().collect(),
        };
        Ok(Self { params, min_tokens: stop.min_tokens, ending, prompt, counts: HashMap::new(), drawn: 0 })
    }

    /// Whether the draw is the largest raw logit without any adjustment, so that a device can do it.
    pub fn is_plain_argmax(&self) -> bool {
        self.params.temperature == 0.0 && !self.depends_on_tokens()
    }

    /// Maximum number of tokens in the description that [`Self::sample`] returns.
    pub(crate) fn tokens_known(&self) -> usize {
        self.prompt.len() + self.counts.len() + self.params.logit_bias.len() + self.ending.len()
    }

    /// Everything that the next draw depends on except the logits of `row`, for the stage that has them.
    pub(crate) fn sample(&self, row: u32) -> StageSample {
        let p = &self.params;
        let repeats = p.repetition_penalty != 1.0;
        let counted = repeats || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0;
        StageSample {
            row,
            sampling: p.clone(),
            drawn: self.drawn,
            barred: if self.drawn < self.min_tokens { self.ending.clone() } else { Vec::new() },
            prompt: self.prompt.iter().copied().collect(),
            counts: if counted { self.counts.iter().map(|(t, n)| (*t, *n)).collect() } else { Vec::new() },
        }
    }

    /// A sampler for one draw from the description of `Sampler::sample`.
    pub fn of_sample(sample: StageSample, vocab: usize) -> Result<Self, GenerateError> {
        let StageSample { row: _, sampling, drawn, barred, prompt, counts } = sample;
        check(&sampling, vocab)?;
        Ok(Self {
            params: sampling,
            min_tokens: if barred.is_empty() { 0 } else { drawn.saturating_add(1) },
            ending: barred,
            prompt: prompt.into_iter().collect(),
            counts: counts.into_iter().collect(),
            drawn,
        })
    }

    /// The sampler's state after these tokens. The row of a draft token is sampled as if the draft tokens
    /// before it had been drawn one by one.
    pub(crate) fn ahead(&self, tokens: &[u32]) -> Self {
        let mut ahead = self.clone();
        tokens.iter().for_each(|&token| ahead.accept(token));
        ahead
    }

    /// Records a token that was drawn here, on a device, or by an earlier attempt.
    pub fn accept(&mut self, token: u32) {
        *self.counts.entry(token).or_insert(0) += 1;
        self.drawn += 1;
    }

    /// Draws from `logits`, which it modifies. Call [`Self::accept`] with the result. `None` if the row has
    /// NaN or infinite values, or if no token can be drawn.
    pub fn draw(&self, logits: &mut [f32]) -> Option<(u32, Option<TokenLogprobs>)> {
        self.draw_allowed(logits, None)
    }

    /// Like [`Self::draw`], limited to the tokens in `mask`.
    pub fn draw_allowed(
        &self,
        logits: &mut [f32],
        mask: Option<&TokenMask>,
    ) -> Option<(u32, Option<TokenLogprobs>)> {
        if !is_drawable(logits) {
            return None;
        }
        let raw = self.params.logprobs.map(|top| RawLogprobs::new(logits, usize::from(top)));
        self.adjust(logits, mask);
        let token = match self.params.temperature == 0.0 {
            true => argmax(logits),
            false => self.pick(logits),
        };
        Some((token, raw.map(|raw| raw.of(token))))
    }

    fn adjust(&self, logits: &mut [f32], mask: Option<&TokenMask>) {
        let p = &self.params;
        for &(token, bias) in &p.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if p.repetition_penalty != 1.0 {
            let drawn = self.counts.keys().filter(|token| !self.prompt.contains(token));
            for &token in self.prompt.iter().chain(drawn) {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = if *logit > 0.0 {
                        *logit / p.repetition_penalty
                    } else {
                        *logit * p.repetition_penalty
                    };
                }
            }
        }
        if p.presence_penalty != 0.0 || p.frequency_penalty != 0.0 {
            for (&token, &count) in &self.counts {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit -= p.frequency_penalty * count as f32 + p.presence_penalty;
                }
            }
        }
        let mut bars = Vec::new();
        if self.drawn < self.min_tokens {
            for &token in &self.ending {
                if let Some(logit) = logits.get_mut(token as usize) {
                    bars.push((token, *logit));
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        if let Some(mask) = mask {
            mask.apply(logits, &bars);
        }
    }

    fn pick(&self, logits: &[f32]) -> u32 {
        let weights = Weights::new(&self.params, logits.iter().copied());
        let candidates = weights.candidates((0..).zip(logits.iter().copied()));
        self.choose(candidates).unwrap_or_else(|| argmax(logits))
    }

    /// Whether [`Self::draw_of_best`] can succeed: a filter excludes all but a few tokens.
    pub(crate) fn draws_of_few(&self) -> bool {
        let p = &self.params;
        let filtered = p.top_k > 0 || p.min_p > 0.0 || p.temperature <= COLD;
        p.temperature > 0.0 && filtered && !self.depends_on_tokens()
    }

    /// Draws from the largest logits of a row, given with their tokens. Ties are in order of the lowest
    /// tokens, and NaN comes before all other values. `None` if these logits do not determine the draw or are
    /// not finite: then use [`Self::draw`].
    pub(crate) fn draw_of_best(&self, best: &[(u32, f32)]) -> Option<u32> {
        let p = &self.params;
        if !self.draws_of_few() || best.iter().any(|(_, logit)| logit.is_nan() || *logit == f32::INFINITY) {
            return None;
        }
        let weights = Weights::new(p, best.iter().map(|(_, logit)| *logit));
        let candidates = weights.candidates(best.iter().copied());
        // All other logits are at most as large as this one.
        let min = best.iter().map(|(_, logit)| *logit).fold(f32::INFINITY, f32::min);
        let others = weights.of(min);
        let decided = match others {
            None => true,
            Some(others) => {
                let mut heaviest: Vec<f64> = candidates.iter().map(|(_, weight)| *weight).collect();
                heaviest.sort_unstable_by(|a, b| b.total_cmp(a));
                let last = (p.top_k as usize).checked_sub(1).and_then(|last| heaviest.get(last));
                last.is_some_and(|last| *last > others)
            }
        };
        if decided { self.choose(candidates) } else { None }
    }

    /// Whether a draw depends on more than the logits and the order of the most likely tokens.
    fn depends_on_tokens(&self) -> bool {
        let p = &self.params;
        !(p.logit_bias.is_empty()
            && p.repetition_penalty == 1.0
            && p.presence_penalty == 0.0
            && p.frequency_penalty == 0.0
            && p.logprobs.is_none()
            && (self.drawn >= self.min_tokens || self.ending.is_empty()))
    }

    /// Draws among tokens with weights. `None` if there are none.
    fn choose(&self, mut candidates: Vec<(u32, f64)>) -> Option<u32> {
        let p = &self.params;
        // Heaviest first, ties by token: the same order with every combination of filters.
        let heavier = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let top_k = p.top_k as usize;
        if top_k > 0 && top_k < candidates.len() {
            candidates.select_nth_unstable_by(top_k - 1, heavier);
            candidates.truncate(top_k);
        }
        if p.top_p < 1.0 {
            candidates.sort_unstable_by(heavier);
            let budget = f64::from(p.top_p) * candidates.iter().map(|&(_, w)| w).sum::<f64>();
            let mut mass = 0.0;
            // A token stays if the tokens before it do not fill the budget. The first always stays.
            let keep = candidates
                .iter()
                .take_while(|&&(_, w)| {
                    let before = mass;
                    mass += w;
                    before < budget
                })
                .count();
            candidates.truncate(keep.max(1));
        } else {
            candidates.sort_unstable_by_key(|&(token, _)| token);
        }
        let total: f64 = candidates.iter().map(|&(_, w)| w).sum();
        let mut rest = uniform(p.seed, u64::from(self.drawn)) * total;
        for &(token, w) in &candidates {
            rest -= w;
            if rest < 0.0 {
                return Some(token);
            }
        }
        candidates.last().map(|&(token, _)| token)
    }
}

/// Weights of the logits of a row.
struct Weights {
    max: f32,
    inverse: f64,
    /// Minimum logit. A weight below exp(-50) of the best token's cannot change a draw of 53 bits; most
    /// tokens of a vocabulary are below it.
    cut: f32,
    min_weight: f64,
}

impl Weights {
    /// For a row whose largest logit is among `logits`.
    fn new(p: &Sampling, logits: impl Iterator<Item = f32>) -> Self {
        let max = logits.fold(f32::NEG_INFINITY, f32::max);
        let inverse = 1.0 / f64::from(p.temperature);
        Self { max, inverse, cut: max - 50.0 * p.temperature, min_weight: f64::from(p.min_p) }
    }

    /// Weight of a logit, or `None` if its token is not drawn. All smaller logits then also give `None`.
    fn of(&self, logit: f32) -> Option<f64> {
        let weight = (f64::from(logit - self.max) * self.inverse).exp();
        (logit >= self.cut && weight >= self.min_weight).then_some(weight)
    }

    /// The tokens that may be drawn, with their weights.
    fn candidates(&self, logits: impl Iterator<Item = (u32, f32)>) -> Vec<(u32, f64)> {
        logits.filter_map(|(token, logit)| Some((token, self.of(logit)?))).collect()
    }
}

/// Data for log-probabilities, taken from the raw row before it is modified.
struct RawLogprobs {
    logits: Vec<f32>,
    log_sum: f64,
    top: Vec<(u32, f32)>,
}

impl RawLogprobs {
    fn new(logits: &[f32], top: usize) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        let log_sum = f64::from(max) + sum.ln();
        let mut best: Vec<(u32, f32)> = logits.iter().enumerate().map(|(t, &l)| (t as u32, l)).collect();
        let better = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let top = top.min(best.len());
        if top > 0 {
            best.select_nth_unstable_by(top - 1, better);
        }
        best.truncate(top);
        best.sort_unstable_by(better);
        for entry in &mut best {
            entry.1 = (f64::from(entry.1) - log_sum) as f32;
        }
        Self { logits: logits.to_vec(), log_sum, top: best }
    }

    fn of(self, token: u32) -> TokenLogprobs {
        let logit = self.logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        TokenLogprobs { chosen: (f64::from(logit) - self.log_sum) as f32, top: self.top }
    }
}

/// The log-probability of a prompt's token after `row`, and of the `top` best ones. `None` if the row has NaN or
/// infinite values.
pub(crate) fn prompt_logprob(row: &[f32], token: u32, top: usize) -> Option<PromptLogprob> {
    if !is_drawable(row) {
        return None;
    }
    let logit = row.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let rank = 1 + row.iter().filter(|other| **other > logit).count() as u32;
    let TokenLogprobs { chosen, top } = RawLogprobs::new(row, top).of(token);
    Some(PromptLogprob { logprob: chosen, rank, top })
}

fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0usize;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

/// Uniform in [0, 1) from (seed, index): two rounds of the SplitMix64 finaliser over the pair (Steele et al.
/// 2014).
fn uniform(seed: u64, index: u64) -> f64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let bits =
        mix(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15))
            .wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

fn check(p: &Sampling, vocab: usize) -> Result<(), GenerateError> {
    let refuse =
        |field: &str, reason: String| Err(GenerateError::InvalidField { field: field.to_owned(), reason });
    let number = |field: &str, value: f32, low: f32, high: f32| match (low..=high).contains(&value) {
        true => Ok(()),
        false => refuse(field, format!("{value} is outside {low} to {high}")),
    };
    number("temperature", p.temperature, 0.0, 100.0)?;
    number("top_p", p.top_p, f32::MIN_POSITIVE, 1.0)?;
    number("min_p", p.min_p, 0.0, 1.0)?;
    number("repetition_penalty", p.repetition_penalty, 0.01, 100.0)?;
    number("presence_penalty", p.presence_penalty, -2.0, 2.0)?;
    number("frequency_penalty", p.frequency_penalty, -2.0, 2.0)?;
    if p.logit_bias.len() > MAX_LOGIT_BIAS {
        return refuse("logit_bias", format!("{} entries, at most {MAX_LOGIT_BIAS}", p.logit_bias.len()));
    }
    for &(token, bias) in &p.logit_bias {
        if token as usize >= vocab {
            return refuse("logit_bias", format!("token {token} is outside the vocabulary of {vocab}"));
        }
        number("logit_bias", bias, -100.0, 100.0)?;
    }
    if p.logprobs.is_some_and(|top| top > MAX_LOGPROBS) {
        return refuse("logprobs", format!("{:?}, at most {MAX_LOGPROBS}", p.logprobs));
    }
    Ok(())
}
