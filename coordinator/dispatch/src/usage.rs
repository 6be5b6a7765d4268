//! Counts what a request uses, while it is served: tokens as the client gets them, and its attempts.

use crate::Dispatch;
use ::usage::attempts::{Ended, PaidInput};
use ::usage::recorder::Recorder;
use ::usage::row::{Account, Counter};
use proto::ids::{ModelId, NodeId};
use proto::usage::AttemptId;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

impl Dispatch {
    /// The usage of tenants, keys and models.
    pub fn usage(&self) -> &Arc<Recorder> {
        &self.usage
    }
}

/// The account of a request. Choices of one prompt share it, because the prompt is paid for once.
#[derive(Debug, Clone)]
pub struct Payer {
    account: Account,
    prompt_paid: Arc<AtomicBool>,
}

impl Payer {
    /// `key`: the key id. `None` for a caller without a key.
    pub fn new(tenant: &Arc<str>, key: Option<&str>, model: &ModelId) -> Self {
        let account =
            Account { tenant: Arc::clone(tenant), key: key.map(Arc::from), model: model.as_str().into() };
        Self { account, prompt_paid: Arc::default() }
    }

    /// Returns `true` to the first caller.
    fn pay_prompt(&self) -> bool {
        !self.prompt_paid.swap(true, Ordering::Relaxed)
    }

    /// Counts the end of a request.
    pub fn request_ended(&self, usage: &Recorder) {
        usage.count(&self.account, &[(Counter::Requests, 1)]);
    }

    fn audio(&self, usage: &Recorder, milliseconds: u64) {
        usage.count(&self.account, &[(Counter::AudioMs, milliseconds)]);
    }
}

/// Counts one attempt at one worker. Dropping it ends the attempt: at the client's wish, unless it has failed.
#[derive(Debug)]
pub(super) struct AttemptMeter {
    usage: Arc<Recorder>,
    node: NodeId,
    id: AttemptId,
    payer: Payer,
    /// Tokens of the prompt.
    prompt: u64,
    started: Option<StartedInput>,
    /// `None`: the prompt is not paid for yet.
    paid: Option<PaidPrompt>,
    delivered: u64,
    failed: bool,
    /// The prefill worker that computed the prompt for this attempt. It is paid for with this attempt.
    prefill: Option<PrefillMeter>,
}

/// Counts the work of a prefill worker. Dropping it alone ends its attempt as a failed one.
#[derive(Debug)]
pub(super) struct PrefillMeter {
    usage: Arc<Recorder>,
    node: NodeId,
    id: AttemptId,
    /// Prompt tokens that it computed.
    computed: u64,
    input: PaidInput,
}

#[derive(Debug, Clone, Copy)]
struct StartedInput {
    cached: u64,
    /// The worker reports the count with the end.
    estimated: bool,
    /// The prompt was computed for another request, and this one continues from its end.
    forked: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PaidPrompt {
    /// By this attempt, which computed this many tokens of it.
    Here(u64),
    /// By another attempt or choice.
    Elsewhere,
}

impl AttemptMeter {
    /// An attempt that was sent to `node`. `prompt`: tokens of the prompt.
    pub(super) fn begin(
        usage: &Arc<Recorder>,
        node: &NodeId,
        id: AttemptId,
        payer: &Payer,
        prompt: usize,
    ) -> Self {
        usage.attempt_began(node, &id, &payer.account);
        Self {
            usage: Arc::clone(usage),
            node: node.clone(),
            id,
            payer: payer.clone(),
            prompt: prompt as u64,
            started: None,
            paid: None,
            delivered: 0,
            failed: false,
            prefill: None,
        }
    }

    /// The prompt was computed ahead by a prefill worker.
    pub(super) fn with_prefill(mut self, prefill: Option<PrefillMeter>) -> Self {
        self.prefill = prefill;
        self
    }

    pub(super) fn started(&mut self, cached: u32, computed: u32, estimated: bool) {
        let cached = u64::from(cached).min(self.prompt);
        self.started = Some(StartedInput { cached, estimated, forked: computed == 0 && !estimated });
    }

    /// Tokens have reached the client. They pay for the prompt, if no other attempt did.
    pub(super) fn delivered(&mut self, tokens: usize) {
        // A fork pays only if the request whose prompt it shares does not.
        if !self.started.is_some_and(|started| started.forked) {
            self.pay();
        }
        self.delivered += tokens as u64;
        self.usage.count(&self.payer.account, &[(Counter::GeneratedTokens, tokens as u64)]);
    }

    /// The attempt has ended well. `cached`: the count, if the start had an estimate.
    pub(super) fn finished(&mut self, cached: Option<u32>) {
        if let (Some(started), Some(cached)) = (&mut self.started, cached) {
            started.cached = u64::from(cached).min(self.prompt);
        }
        self.pay();
    }

    /// The whole input was computed, and the client gets the result.
    pub(super) fn encoded(&mut self) {
        self.started(0, 1, false);
        self.pay();
    }

    /// The attempt was lost, declined or refused. What is unpaid is computed again, or for nobody.
    pub(super) fn failed(&mut self) {
        self.failed = true;
    }

    /// Audio was processed for the client.
    pub(super) fn audio(&self, seconds: f64) {
        self.payer.audio(&self.usage, (seconds * 1e3).round() as u64);
    }

    /// The request has ended with this attempt.
    pub(super) fn request_ended(&self) {
        if !self.failed {
            self.payer.request_ended(&self.usage);
        }
    }

    fn pay(&mut self) {
        let Some(started) = self.started.filter(|_| self.paid.is_none()) else { return };
        if !self.payer.pay_prompt() {
            self.paid = Some(PaidPrompt::Elsewhere);
            return;
        }
        // This worker's cache has the blocks that the prefill worker computed for this request.
        let ahead = self.prefill.as_ref().map_or(0, |prefill| prefill.computed);
        let cached = started.cached.saturating_sub(ahead);
        self.paid = Some(PaidPrompt::Here(self.prompt.saturating_sub(cached).saturating_sub(ahead)));
        self.usage.count(&self.payer.account, &[(Counter::PromptTokens, self.prompt)]);
        if !started.estimated {
            self.usage.count(&self.payer.account, &[(Counter::CachedTokens, cached)]);
        }
    }
}

impl Drop for AttemptMeter {
    fn drop(&mut self) {
        if self.delivered > 0 {
            self.pay();
        }
        let (input, ahead) = match (self.paid, self.failed) {
            (Some(PaidPrompt::Here(computed)), _) => {
                let ahead = self.prefill.as_ref().map_or(0, |prefill| prefill.computed);
                (PaidInput::Tokens(computed), PaidInput::Tokens(ahead))
            }
            (None, true) if self.delivered == 0 => (PaidInput::Nothing, PaidInput::Nothing),
            (Some(PaidPrompt::Elsewhere), _) | (None, true) => (PaidInput::Tokens(0), PaidInput::Tokens(0)),
            (None, false) => (PaidInput::AsComputed, PaidInput::AsComputed),
        };
        if let (Some(PaidPrompt::Here(_)), Some(StartedInput { cached, estimated: true, .. })) =
            (self.paid, self.started)
        {
            self.usage.count(&self.payer.account, &[(Counter::CachedTokens, cached)]);
        }
        if let Some(prefill) = &mut self.prefill {
            prefill.input = ahead;
        }
        self.usage.count(&self.payer.account, &[(Counter::Attempts, 1)]);
        self.usage.attempt_ended(&self.node, &self.id, Ended { input, delivered: self.delivered });
    }
}

impl PrefillMeter {
    pub(super) fn begin(usage: &Arc<Recorder>, node: &NodeId, id: AttemptId, payer: &Payer) -> Self {
        usage.attempt_began(node, &id, &payer.account);
        usage.count(&payer.account, &[(Counter::Attempts, 1)]);
        Self { usage: Arc::clone(usage), node: node.clone(), id, computed: 0, input: PaidInput::Nothing }
    }

    /// The worker has computed this many tokens of the prompt.
    pub(super) fn computed(&mut self, tokens: u32) {
        self.computed = tokens.into();
    }
}

impl Drop for PrefillMeter {
    fn drop(&mut self) {
        let ended = Ended { input: self.input, delivered: 0 };
        self.usage.attempt_ended(&self.node, &self.id, ended);
    }
}

#[cfg(test)]
mod tests;
