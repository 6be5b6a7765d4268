//! Log-probabilities of prompts. Each row of a prompt gives that of the next token; rows are read as steps compute
//! them, a few at a time, so a prompt's logits are never held together.

use super::Engine;
use super::request::Removal;
use crate::sampling::prompt_logprob;
use crate::scheduler::{SeqId, StepPlan};
use proto::message::{
    FinishReason, GenerateError, GenerateFrame, MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, PromptLogprob,
    PromptLogprobs,
};
use std::time::Instant;

/// Maximum number of tokens in a frame.
const FRAME_TOKENS: usize = 512;

/// The log-probabilities of a prompt, as far as they are computed.
pub(super) struct PromptScores {
    prompt: Vec<u32>,
    top: usize,
    /// Position of the token whose log-probability comes next. Rows before it were read before a preemption.
    next: usize,
    /// Log-probabilities that were not sent yet.
    ready: Vec<PromptLogprob>,
}

impl PromptScores {
    /// Whether the row at this position gives a log-probability that is missing.
    pub(super) fn needs(&self, position: usize) -> bool {
        (self.next..self.prompt.len()).contains(&(position + 1))
    }

    /// Reads the row at `position`. Returns whether its values are finite.
    pub(super) fn read(&mut self, position: usize, row: &[f32]) -> bool {
        let Some(&token) = self.prompt.get(position + 1).filter(|_| position + 1 == self.next) else {
            return true;
        };
        let Some(logprob) = prompt_logprob(row, token, self.top) else { return false };
        self.ready.push(logprob);
        self.next += 1;
        true
    }
}

impl Engine {
    /// Checks a request for the log-probabilities of its prompt.
    pub(super) fn prompt_scores(
        &self,
        requested: Option<PromptLogprobs>,
        prompt: &[u32],
        has_images: bool,
    ) -> Result<Option<PromptScores>, GenerateError> {
        let Some(requested) = requested else { return Ok(None) };
        let refuse =
            |reason: String| Err(GenerateError::InvalidField { field: "prompt_logprobs".to_owned(), reason });
        let top = usize::from(requested.top);
        let entries = requested.entries(prompt.len());
        if top > MAX_LOGPROBS {
            return refuse(format!("{top} alternatives, at most {MAX_LOGPROBS}"));
        }
        if entries > MAX_PROMPT_LOGPROBS {
            return refuse(format!("{entries} entries, at most {MAX_PROMPT_LOGPROBS}"));
        }
        if has_images {
            return refuse("rows of images have no log-probabilities".to_owned());
        }
        if self.executor.ranks() > 1 {
            let reason = "the model's layers are on several workers, which send no logits of whole prompts";
            return Err(GenerateError::Unsupported {
                field: "prompt_logprobs".to_owned(),
                reason: reason.to_owned(),
            });
        }
        Ok(Some(PromptScores { prompt: prompt.to_vec(), top, next: 1, ready: Vec::new() }))
    }

    /// Sends the log-probabilities that a step has given.
    pub(super) fn send_prompt_logprobs(&mut self, plan: &StepPlan) {
        for sequence in &plan.sequences {
            let Some(request) = self.requests.get_mut(&sequence.id) else { continue };
            let Some(scores) = &mut request.scores else { continue };
            let mut ready = std::mem::take(&mut scores.ready);
            let mut received = true;
            while received && !ready.is_empty() {
                let rest = ready.split_off(ready.len().min(FRAME_TOKENS));
                received = request.sink.frame(GenerateFrame::Prompt(std::mem::replace(&mut ready, rest)));
            }
            if !received {
                self.cancel(sequence.id);
            }
        }
    }

    /// Ends a request that wanted nothing but the log-probabilities of its prompt.
    pub(super) fn finish_scored(&mut self, now: Instant, id: SeqId) {
        let Some(request) = self.requests.get_mut(&id).filter(|request| request.scores.is_some()) else {
            return;
        };
        let ending = request.text.end(FinishReason::Length, None);
        self.start(id);
        self.remove(id, Removal::Finished(ending, now));
    }
}
