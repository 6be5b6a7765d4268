//! The table of requests. A request enters it when it is submitted and leaves it through [`Engine::remove`],
//! whatever it waits for and for whatever reason it ends.

use super::guided::Guided;
use super::images::Encoding;
use super::kv_receive::TransferResult;
use super::prompt_logprobs::PromptScores;
use super::resume::SequenceKey;
use super::tiering::{TierLoad, Tiering};
use super::trace::Traced;
use super::{Engine, Sink};
use crate::Error;
use crate::images::IMAGE_ID;
use crate::pull::Source;
use crate::sampling::Sampler;
use crate::sampling::stop::{Ending, OutputText};
use crate::scheduler::{Rejected, SeqId, SequenceInfo, SequenceRequest};
use crate::telemetry::{FinishedLabel, Reason, Refused};
use crate::usage::RequestUsage;
use kernels::backend::AdapterId;
use proto::block::BlockId;
use proto::message::{FinishReason, Finished, GenerateError, GenerateFrame, Sampling, Stop};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct Request {
    pub(super) state: RequestState,
    pub(super) key: Option<SequenceKey>,
    pub(super) root: BlockId,
    pub(super) adapter: Option<AdapterId>,
    pub(super) sampler: Sampler,
    /// The grammar of the output, if any.
    pub(super) guide: Option<Guided>,
    /// Nothing drafts tokens for it: drafters do not see images.
    pub(super) has_images: bool,
    pub(super) text: OutputText,
    pub(super) sink: Box<dyn Sink>,
    pub(super) prompt_len: usize,
    pub(super) all_logits: bool,
    /// Log-probabilities of its prompt, if they are requested.
    pub(super) scores: Option<PromptScores>,
    pub(super) states: bool,
    pub(super) started: bool,
    pub(super) received: Instant,
    pub(super) deadline: Option<Duration>,
    pub(super) last_token: Option<Instant>,
    pub(super) transfer: Option<TransferResult>,
    pub(super) traced: Option<Traced>,
    pub(super) usage: Option<Arc<RequestUsage>>,
}

/// Place of a request in the engine. A waiting state holds the [`SequenceRequest`] until it is scheduled.
pub(super) enum RequestState {
    /// `leader` computes an equal prompt, from whose end this request continues.
    WaitingForLeader { leader: SeqId, request: SequenceRequest },
    /// Its images are being encoded.
    EncodingImages(Box<Encoding>),
    /// Files of a tier that hold a prefix are being read.
    LoadingTier(TierLoad),
    /// Another worker sends a prefix. `source` may have more than that transfer brings.
    ReceivingKv { request: SequenceRequest, source: Option<Box<dyn Source>> },
    /// Queued or running in the scheduler.
    Scheduled,
}

/// Why a request leaves the engine.
pub(super) enum Removal {
    Finished(Ending, Instant),
    /// The client is gone, or another one cancelled the request.
    Cancelled,
    /// The deadline passed, this long after the request was received.
    DeadlineExceeded(Duration),
    /// A row from which it draws has NaN or infinite values. Everything cached on its path is forgotten.
    NotFinite,
    /// The mask of its grammar cannot be computed, for this reason.
    NoMask(String),
    /// An image cannot be encoded, for this reason.
    BadImage(String),
    /// No tower encodes its images.
    NoEncoder(String),
    /// The scheduler refused it.
    Rejected(Rejected),
}

impl RequestState {
    fn is_waiting(&self) -> bool {
        !matches!(self, Self::Scheduled)
    }
}

impl Engine {
    /// Checks a request and replays the tokens that were already sent. Returns the ending as well if they
    /// were all. `scored`: the log-probabilities of its prompt are requested.
    pub(super) fn prepare(
        &self,
        prompt: &[u32],
        emitted: &[u32],
        sampling: Sampling,
        stop: Stop,
        (has_images, scored): (bool, bool),
    ) -> Result<(Sampler, OutputText, Option<Ending>), GenerateError> {
        let vocab = self.executor.decoder().spec().vocab;
        let refuse = |field: &str, reason: String| {
            Err(GenerateError::InvalidField { field: field.to_owned(), reason })
        };
        if prompt.is_empty() {
            return refuse("prompt", "it is empty".to_owned());
        }
        if prompt.len() >= self.max_model_len {
            return Err(GenerateError::ContextLength {
                need: prompt.len() as u64 + 1,
                limit: self.max_model_len as u64,
            });
        }
        if stop.max_tokens == 0 && !scored {
            // Nothing would ever end the request.
            return refuse("max_tokens", "it is 0".to_owned());
        }
        // Rows of images have been checked before.
        let words = prompt.iter().filter(|token| **token < IMAGE_ID || !has_images);
        if let Some(token) = words.chain(emitted).find(|token| **token as usize >= vocab) {
            return refuse("prompt", format!("token {token} is outside the vocabulary of {vocab}"));
        }
        let mut text = OutputText::new(self.tokenizer.clone(), stop.clone())?;
        let mut sampler = Sampler::new(sampling, &stop, prompt, text.ending_tokens(), vocab)?;
        let mut ending = None;
        for &token in emitted {
            if ending.is_some() {
                return refuse("emitted", format!("token {token} follows the one that ends the generation"));
            }
            sampler.accept(token);
            ending = text.push(token).1;
        }
        Ok((sampler, text, ending))
    }

    pub(super) fn set_state(&mut self, id: SeqId, state: RequestState) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.state = state;
        }
    }

    /// Ends the waiting of a request and returns its previous state. The caller schedules it or lets it wait
    /// again. `None` if the request was removed.
    pub(super) fn take_state(&mut self, id: SeqId) -> Option<RequestState> {
        let request = self.requests.get_mut(&id)?;
        Some(std::mem::replace(&mut request.state, RequestState::Scheduled))
    }

    /// Checks that the tables of waiting requests name exactly the requests that wait.
    pub(super) fn check_waiting(&self) -> Result<(), Error> {
        let mut waiting = [const { Vec::new() }; 4];
        for (id, request) in &self.requests {
            match request.state {
                RequestState::WaitingForLeader { .. } => waiting[0].push(*id),
                RequestState::LoadingTier(_) => waiting[1].push(*id),
                RequestState::ReceivingKv { .. } => waiting[2].push(*id),
                RequestState::EncodingImages(_) => waiting[3].push(*id),
                RequestState::Scheduled => {}
            }
        }
        let loading = self.tiering.as_ref().map_or(&[][..], Tiering::loading);
        let receiving = self.kv_receiver.waiting();
        let tables = [self.equal_prompts.waiting(), loading.to_vec(), receiving, self.images.waiting()];
        for (mut states, mut table) in waiting.into_iter().zip(tables) {
            states.sort_unstable();
            table.sort_unstable();
            if states != table {
                return Err(Error::Invariant(format!(
                    "requests waiting: {states:?}; listed in the tables: {table:?}"
                )));
            }
        }
        Ok(())
    }

    /// Number of requests that wait outside the scheduler.
    pub(super) fn waiting_outside_scheduler(&self) -> usize {
        self.requests.values().filter(|request| request.state.is_waiting()).count()
    }

    /// Removes a request from every table, counts its end and sends its last frame. Its blocks become free
    /// after the step in flight. Does nothing if the request does not exist.
    pub(super) fn remove(&mut self, id: SeqId, removal: Removal) {
        let spoiled = matches!(removal, Removal::NotFinite);
        match spoiled {
            true => self.forget_stored(id),
            false => self.remember_live(id),
        }
        let Some(mut request) = self.requests.remove(&id) else { return };
        let info = match spoiled {
            true => self.scheduler.remove_spoiled(id),
            false => self.scheduler.remove(id),
        };
        let leader = match std::mem::replace(&mut request.state, RequestState::Scheduled) {
            RequestState::WaitingForLeader { leader, .. } => Some(leader),
            RequestState::LoadingTier(load) => {
                self.drop_tier_load(id, &load);
                None
            }
            RequestState::ReceivingKv { .. } => {
                self.kv_receiver.remove(id);
                None
            }
            RequestState::EncodingImages(_) => {
                self.images.remove(id);
                None
            }
            RequestState::Scheduled => None,
        };
        self.equal_prompts.remove(id, leader);
        self.free_adapters();
        self.end(request, removal, info);
    }

    fn end(&self, mut request: Request, removal: Removal, info: Option<SequenceInfo>) {
        let failure = match removal {
            Removal::Finished(ending, now) => {
                self.metrics.e2e.0.observe(now.saturating_duration_since(request.received).as_secs_f64());
                let completion_tokens = request.text.generated();
                if let Some(traced) = &mut request.traced {
                    traced.finished(
                        ending.reason,
                        completion_tokens,
                        info.map_or(0, |info| info.preemptions),
                    );
                }
                self.finish(&mut *request.sink, ending, completion_tokens, info);
                return;
            }
            Removal::Cancelled => {
                self.count_end(Reason::abort);
                request.fail("cancelled");
                return;
            }
            Removal::DeadlineExceeded(age) => {
                self.count_end(Reason::error);
                request.fail("deadline_exceeded");
                GenerateError::DeadlineExceeded { after_ms: age.as_millis() as u64 }
            }
            Removal::NotFinite => {
                tracing::error!("a request failed: {}", GenerateError::NotFinite);
                self.count_end(Reason::error);
                request.fail("not_finite");
                GenerateError::NotFinite
            }
            Removal::NoMask(reason) => {
                self.metrics.grammars.refused(Refused::mask);
                self.count_end(Reason::error);
                request.fail("grammar");
                let field =
                    request.guide.as_ref().map_or_else(String::new, |guided| guided.field().to_owned());
                GenerateError::InvalidField { field, reason }
            }
            Removal::BadImage(reason) => {
                request.fail("images");
                GenerateError::InvalidField { field: "images".to_owned(), reason }
            }
            Removal::NoEncoder(reason) => {
                self.count_end(Reason::error);
                request.fail("no_encoder");
                GenerateError::NoEncoder { reason }
            }
            Removal::Rejected(rejected) => {
                request.fail("refused");
                rejection(rejected)
            }
        };
        request.sink.frame(GenerateFrame::Failed(failure));
    }

    /// Counts the end of a generation and sends its last frame.
    pub(super) fn finish(
        &self,
        sink: &mut dyn Sink,
        ending: Ending,
        completion_tokens: u32,
        info: Option<SequenceInfo>,
    ) {
        self.count_end(match ending.reason {
            FinishReason::Stop => Reason::stop,
            FinishReason::Length => Reason::length,
            FinishReason::Cancelled => Reason::abort,
        });
        sink.frame(GenerateFrame::Finished(Finished {
            reason: ending.reason,
            matched: ending.matched,
            tail: ending.tail,
            completion_tokens,
            cached_tokens: None,
            preemptions: info.map_or(0, |info| info.preemptions),
            drafted_tokens: info.map_or(0, |info| info.drafted_tokens),
            accepted_tokens: info.map_or(0, |info| info.accepted_tokens),
        }));
    }

    fn count_end(&self, finished_reason: Reason) {
        self.metrics.finished.get_or_create(&FinishedLabel { finished_reason }).inc();
    }
}

fn rejection(rejected: Rejected) -> GenerateError {
    match rejected {
        Rejected::TooLong { need, limit } => GenerateError::ContextLength { need, limit },
        Rejected::QueueFull { .. } => GenerateError::QueueFull,
        Rejected::EmptyPrompt => {
            GenerateError::InvalidField { field: "prompt".to_owned(), reason: rejected.to_string() }
        }
        Rejected::Span { .. } => {
            GenerateError::InvalidField { field: "images".to_owned(), reason: rejected.to_string() }
        }
        Rejected::Duplicate(_) => GenerateError::Internal,
    }
}
