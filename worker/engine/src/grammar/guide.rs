//! The position of one generation in its grammar.
//!
//! The engine's thread passes drawn tokens to a guide and reads the mask of the next token. Other threads
//! compute the masks.

use super::pool::{Pool, RunningJob, Share};
use crate::sampling::TokenMask;
use crate::telemetry::GrammarMetrics;
use llguidance::{CancellationHandle, Matcher};
use parking_lot::Mutex;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;
use text::Tokenizer;
use text::dialect::is_mark;

#[derive(Debug, Clone)]
pub enum Look {
    Free,
    /// Only these tokens may be drawn.
    Mask(Arc<TokenMask>),
    /// The mask is not computed yet.
    Waits,
    /// No token may follow: the answer is complete.
    Over,
    /// Computing the mask failed.
    Failed(String),
}

/// Called when there is a new result to read.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// A generation's position in its grammar.
pub struct Guide {
    field: String,
    tokenizer: Arc<Tokenizer>,
    pool: Arc<Pool>,
    share: Share,
    metrics: GrammarMetrics,
    wake: Waker,
    trigger: Option<Trigger>,
    shared: Arc<Mutex<Shared>>,
    /// Ends the threads' work when the guide is dropped.
    cancellation: Option<CancellationHandle>,
}

impl Drop for Guide {
    fn drop(&mut self) {
        self.cancellation.iter().for_each(CancellationHandle::cancel);
    }
}

/// Text after which the grammar applies.
struct Trigger {
    text: Vec<u8>,
    /// The token of the text, if the text is a mark with a token of its own. Then only that token triggers.
    token: Option<u32>,
    /// The end of the emitted text; shorter than `text`.
    tail: Vec<u8>,
}

struct Shared {
    look: Look,
    /// `None` while another thread uses it.
    matcher: Option<Matcher>,
}

impl Guide {
    pub(super) fn new(
        matcher: Matcher,
        (field, trigger): (String, Option<String>),
        tokenizer: Arc<Tokenizer>,
        (pool, metrics, wake): (Arc<Pool>, GrammarMetrics, Waker),
        emitted: &[u32],
    ) -> Self {
        let matcher = matcher.into_cancellable();
        let cancellation = matcher.cancellation_handle();
        let trigger = trigger.map(|text| Trigger {
            token: match tokenizer.encode(&text, true)[..] {
                [token] if is_mark(&tokenizer, token) => Some(token),
                _ => None,
            },
            text: text.into_bytes(),
            tail: Vec::new(),
        });
        let shared = Arc::new(Mutex::new(Shared { look: Look::Free, matcher: Some(matcher) }));
        let share = Share::default();
        let mut guide = Self { field, tokenizer, pool, share, metrics, wake, trigger, shared, cancellation };
        let waits = guide.trigger.is_some();
        let mut tokens = Vec::new();
        let mut free = Ok(());
        for &token in emitted {
            match guide.note(token) {
                Noted::Nothing => {}
                Noted::Began(rest) => free = Err(rest),
                Noted::Token => tokens.push(token),
            }
        }
        match free {
            // The rest of the token that completed the trigger comes before the tokens that follow it.
            Err(rest) => guide.work(Take::Both(rest, tokens)),
            Ok(()) if !waits => guide.work(Take::Tokens(tokens)),
            Ok(()) => {}
        }
        guide
    }

    /// The field of the request that contains the grammar.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Whether the grammar constrains the next token, as far as is known.
    pub fn constrains(&self) -> bool {
        self.trigger.is_none()
    }

    /// Records a drawn token and starts to compute the next mask.
    pub fn accept(&mut self, token: u32) {
        match self.note(token) {
            Noted::Nothing => {}
            Noted::Began(rest) => self.work(Take::Both(rest, Vec::new())),
            Noted::Token => self.work(Take::Tokens(vec![token])),
        }
    }

    /// What may be drawn next.
    pub fn look(&self) -> Look {
        self.shared.lock().look.clone()
    }

    fn note(&mut self, token: u32) -> Noted {
        let Some(trigger) = &mut self.trigger else { return Noted::Token };
        if let Some(mark) = trigger.token {
            if mark != token {
                return Noted::Nothing;
            }
            self.trigger = None;
            return Noted::Began(Vec::new());
        }
        trigger.tail.extend_from_slice(self.tokenizer.token_bytes(token));
        let found = trigger.tail.windows(trigger.text.len()).position(|window| window == trigger.text);
        match found {
            Some(at) => {
                let rest = trigger.tail.split_off(at + trigger.text.len());
                self.trigger = None;
                Noted::Began(rest)
            }
            None => {
                let overlap = trigger.text.len().saturating_sub(1).min(trigger.tail.len());
                trigger.tail.drain(..trigger.tail.len() - overlap);
                Noted::Nothing
            }
        }
    }

    /// Starts to consume `take` and to compute the next mask on another thread.
    fn work(&mut self, take: Take) {
        let matcher = {
            let mut shared = self.shared.lock();
            match shared.matcher.take() {
                Some(matcher) => {
                    shared.look = Look::Waits;
                    matcher
                }
                // The grammar has ended or failed; further tokens change nothing.
                None => return,
            }
        };
        let (shared, wake, metrics) =
            (Arc::clone(&self.shared), Arc::clone(&self.wake), self.metrics.clone());
        let job = move |running: RunningJob| {
            let since = Instant::now();
            let mut matcher = matcher;
            let look = next(&mut matcher, &take);
            metrics.mask_seconds.0.observe(since.elapsed().as_secs_f64());
            let continues = matches!(look, Look::Mask(_));
            // Charge the share before the request can submit its next job.
            drop(running);
            {
                let mut shared = shared.lock();
                shared.matcher = continues.then_some(matcher);
                shared.look = look;
            }
            wake();
        };
        self.pool.run(&self.share, Box::new(job));
    }
}

/// Effect of a token.
enum Noted {
    /// The grammar does not apply yet.
    Nothing,
    /// The grammar applies from here on; these bytes already belong to it.
    Began(Vec<u8>),
    /// The token is inside the grammar.
    Token,
}

/// Input that the matcher must consume.
enum Take {
    Tokens(Vec<u32>),
    /// Bytes that are the end of a token, and then tokens.
    Both(Vec<u8>, Vec<u32>),
}

fn next(matcher: &mut Matcher, take: &Take) -> Look {
    let tokens = match take {
        Take::Tokens(tokens) => tokens,
        Take::Both(bytes, tokens) => {
            let spelled = match matcher.tok_env() {
                Ok(env) => env.tok_trie().greedy_tokenize(bytes),
                Err(error) => return Look::Failed(plain(&error)),
            };
            // The rest of the token that completed the trigger does not match the grammar, so the text was
            // not a trigger.
            match matcher.validate_tokens(&spelled) {
                Ok(valid) if valid == spelled.len() => {}
                _ => return Look::Free,
            }
            if let Err(error) = matcher.consume_tokens(&spelled) {
                return Look::Failed(plain(&error));
            }
            tokens
        }
    };
    if let Err(error) = matcher.consume_tokens(tokens) {
        return Look::Failed(plain(&error));
    }
    if matcher.is_stopped() {
        return match matcher.get_error() {
            Some(error) => Look::Failed(first_line(&error)),
            None => Look::Over,
        };
    }
    match matcher.compute_mask() {
        Ok(mask) => {
            let mask = TokenMask::new(mask.as_slice().to_vec());
            match mask.is_empty() {
                true => Look::Failed("nothing may follow".to_owned()),
                false => Look::Mask(Arc::new(mask)),
            }
        }
        Err(error) => Look::Failed(plain(&error)),
    }
}

/// The library's error message without its internal state.
pub(super) fn plain(error: &impl Display) -> String {
    first_line(&error.to_string())
}

fn first_line(text: &str) -> String {
    const MAX_CHARS: usize = 300;
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("it cannot be used");
    line.chars().take(MAX_CHARS).collect()
}
