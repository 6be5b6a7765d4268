//! Constrains answers to a grammar: a JSON schema, tool calls, a regular expression or a Lark grammar. See
//! [decision 39](../../docs/decisions/0039-compile-grammars-on-workers.md).
//!
//! A grammar is compiled before its request is queued, on a thread of its own and within a CPU budget.
//! Another process first tries whether it stays within the budget ([`trial`]). Compiled grammars are cached.
//! A small pool of threads computes masks ([`Guide`]) while the step runs; the engine's thread only reads the
//! results.

use crate::Error;
use crate::progress::spawn;
use crate::telemetry::{GrammarMetrics, Refused};
use compile_queue::CompileQueue;
pub use guide::{Guide, Look, Waker};
use llguidance::{Matcher, ParserFactory};
use loosen::build;
use parking_lot::Mutex;
use pool::Pool;
use proto::block::BlockId;
use proto::message::{
    GenerateError, GrammarSpec, GrammarSyntax, MAX_GRAMMAR_BYTES, MAX_TRIGGER_BYTES, TenantShare,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use text::Tokenizer;
use tokio::sync::{OnceCell, oneshot};
use tokio::time::timeout;
use trial::Tried;
use vocabulary::Names;

mod compile_queue;
mod guide;
mod loosen;
mod pool;
pub mod trial;
mod vocabulary;

/// CPU time that a grammar may take to compile.
pub const COMPILE_TIME: Duration = Duration::from_millis(500);
/// Wall-clock time within which it must get that CPU time.
const CPU_WAIT: Duration = Duration::from_secs(5);
/// Time that a row may wait for its mask before its request is ended.
pub const MASK_TIME: Duration = Duration::from_secs(2);
/// Time that a request waits to be compiled.
const QUEUE_TIME: Duration = Duration::from_secs(5);
/// Maximum number of cached grammars, compiled or refused.
const MAX_CACHED: usize = 64;
/// Maximum nesting of a JSON schema.
pub const MAX_SCHEMA_DEPTH: usize = 32;

type Key = [u8; 32];
/// The result of compiling: the grammar's initial state, or a refusal.
type Outcome = Result<Arc<Compiled>, Refusal>;

/// The matcher that requests clone. The lock is only needed for cloning.
struct Compiled(Mutex<Matcher>);

#[derive(Debug, Clone)]
struct Refusal {
    cause: Refused,
    /// The field of the request that is wrong, if it is more specific than the whole grammar.
    field: Option<String>,
    reason: String,
}

/// Compiles the grammars of one model.
struct Compiler {
    factory: ParserFactory,
    names: Names,
}

/// All grammars of one model.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    pool: Arc<Pool>,
    metrics: GrammarMetrics,
    wake: Waker,
    /// Created with the first grammar.
    factory: OnceCell<Result<Arc<Compiler>, String>>,
    compile_queue: CompileQueue,
    cache: Mutex<GrammarCache>,
}

#[derive(Default)]
struct GrammarCache {
    grammars: HashMap<Key, (u64, Arc<OnceCell<Outcome>>)>,
    uses: u64,
}

impl Grammars {
    /// Calls `wake` whenever there is a new result.
    ///
    /// # Errors
    /// [`Error::Io`] if no thread can be started.
    pub fn new(tokenizer: Arc<Tokenizer>, metrics: GrammarMetrics, wake: Waker) -> Result<Self, Error> {
        let threads = (crate::cgroup::cpus().get() / 4).clamp(1, 4);
        Ok(Self {
            tokenizer,
            pool: Arc::new(Pool::start(threads)?),
            metrics,
            wake,
            factory: OnceCell::new(),
            compile_queue: CompileQueue::default(),
            cache: Mutex::default(),
        })
    }

    /// Compiles the `grammar` of a request under `root`, unless it is cached. Returns a guide for a
    /// generation that has already emitted the tokens `emitted`. Tenants compile in turns.
    ///
    /// # Errors
    /// [`GenerateError::InvalidField`] names the request's field. [`GenerateError::QueueFull`] if too many
    /// grammars are being compiled or there is not enough CPU time.
    pub async fn guide(
        &self,
        root: BlockId,
        tenant: TenantShare,
        grammar: GrammarSpec,
        emitted: &[u32],
    ) -> Result<Guide, GenerateError> {
        check(&grammar)?;
        let cell = self.cache.lock().cell(key(root, &grammar));
        // Later requests wait for the first one; if it is cancelled, the next one compiles.
        let outcome = cell.get_or_try_init(|| self.compile(tenant, &grammar)).await?.clone();
        let GrammarSpec { field, trigger, .. } = grammar;
        match outcome {
            Ok(compiled) => {
                // A deep clone does not share regex states, so requests do not wait for each other.
                let matcher = compiled.0.lock().deep_clone();
                let services = (Arc::clone(&self.pool), self.metrics.clone(), Arc::clone(&self.wake));
                Ok(Guide::new(matcher, (field, trigger), Arc::clone(&self.tokenizer), services, emitted))
            }
            Err(Refusal { cause, field: nested, reason }) => {
                self.metrics.refused(cause);
                Err(GenerateError::InvalidField { field: nested.unwrap_or(field), reason })
            }
        }
    }

    /// Compiles a grammar that is not cached.
    async fn compile(&self, tenant: TenantShare, grammar: &GrammarSpec) -> Result<Outcome, GenerateError> {
        let compiler = self.factory.get_or_try_init(|| async {
            let tokenizer = Arc::clone(&self.tokenizer);
            let make = move || {
                let factory = vocabulary::factory(&tokenizer)?;
                Ok(Arc::new(Compiler { factory, names: vocabulary::names(&tokenizer) }))
            };
            run_on_thread(make).await.ok_or(GenerateError::Internal)
        });
        let compiler = compiler.await?.as_ref().map_err(|error| {
            tracing::error!(error, "grammars are not available: the vocabulary cannot be used");
            GenerateError::Internal
        })?;
        let permit = timeout(QUEUE_TIME, self.compile_queue.permit(tenant)).await;
        let Ok(Some(permit)) = permit else { return Err(GenerateError::QueueFull) };
        let too_much = || {
            let reason = format!("compiling takes more than {} ms of CPU time", COMPILE_TIME.as_millis());
            Refusal { cause: Refused::time, field: None, reason }
        };
        let (syntax, text) = (grammar.syntax, grammar.text.clone());
        // The process and the thread go on if the caller is cancelled, so the permit is held until they end.
        let permit = Arc::new(permit);
        let tried = {
            let (compiler, text, permit) = (Arc::clone(compiler), text.clone(), Arc::clone(&permit));
            run_on_thread(move || {
                let _permit = permit;
                trial::try_grammar(syntax, &text, &compiler.names)
            })
            .await
        };
        // A grammar that compiled there also compiles here. Only without a trial is it limited by wall-clock
        // time.
        let (limit, on_timeout) = match tried {
            Some(Tried::Ended) => (CPU_WAIT, Err(GenerateError::QueueFull)),
            Some(Tried::Untried) => (COMPILE_TIME, Ok(Err(too_much()))),
            Some(Tried::TooMuch) => return Ok(Err(too_much())),
            // The cause is the machine's load and not the grammar, so nothing is cached.
            Some(Tried::Unfinished) => return Err(GenerateError::QueueFull),
            Some(Tried::Failed(error)) => {
                tracing::error!(error, "cannot start the trial process of a grammar; the request fails");
                return Err(GenerateError::Internal);
            }
            None => return Err(GenerateError::Internal),
        };
        let compiler = Arc::clone(compiler);
        let compiled = run_on_thread(move || {
            let _permit = permit;
            build(&compiler.factory, syntax, &text)
        });
        match timeout(limit, compiled).await {
            Ok(Some(Ok(matcher))) => {
                self.metrics.compiled.inc();
                Ok(Ok(Arc::new(Compiled(Mutex::new(matcher)))))
            }
            Ok(Some(Err(loosen::Refused { field, reason }))) => {
                Ok(Err(Refusal { cause: Refused::invalid, field, reason }))
            }
            Ok(None) => Err(GenerateError::Internal),
            Err(_) => on_timeout,
        }
    }
}

impl GrammarCache {
    /// Returns the cell of this key. If the cache is full, removes the entry that was unused for longest,
    /// refused grammars first. So refused grammars never displace used ones.
    fn cell(&mut self, key: Key) -> Arc<OnceCell<Outcome>> {
        self.uses += 1;
        if !self.grammars.contains_key(&key) && self.grammars.len() >= MAX_CACHED {
            let refused = |cell: &OnceCell<Outcome>| matches!(cell.get(), Some(Err(_)));
            let oldest = self.grammars.iter().min_by_key(|(_, (used, cell))| (!refused(cell), *used));
            let oldest = oldest.map(|(key, _)| *key);
            oldest.map(|key| self.grammars.remove(&key));
        }
        let uses = self.uses;
        let (used, cell) = self.grammars.entry(key).or_default();
        *used = uses;
        Arc::clone(cell)
    }
}

/// Runs long work on its own thread. `None` if the work ends without a result.
async fn run_on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    // The send fails if the caller is gone.
    spawn("kvasir-compile", move || drop(reply.send(work()))).ok()?;
    answer.await.ok()
}

/// Key of a grammar. It contains the root, so that compile times reveal nothing about other tenants'
/// requests.
fn key(root: BlockId, grammar: &GrammarSpec) -> Key {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&root.0).update(&[grammar.syntax as u8]).update(grammar.text.as_bytes());
    *hasher.finalize().as_bytes()
}

/// Cheap checks. They include what an honest coordinator would not send.
fn check(grammar: &GrammarSpec) -> Result<(), GenerateError> {
    let refuse = |reason: String| {
        let field: String = grammar.field.chars().take(128).collect();
        Err(GenerateError::InvalidField { field, reason })
    };
    let GrammarSpec { syntax, text, trigger, .. } = grammar;
    if text.len() > MAX_GRAMMAR_BYTES {
        return refuse(format!("has {} bytes, at most {MAX_GRAMMAR_BYTES}", text.len()));
    }
    if let Some(trigger) = trigger.as_ref().filter(|t| t.is_empty() || t.len() > MAX_TRIGGER_BYTES) {
        return refuse(format!("waits for {} bytes, 1 to {MAX_TRIGGER_BYTES}", trigger.len()));
    }
    if *syntax == GrammarSyntax::JsonSchema && depth(text) > MAX_SCHEMA_DEPTH {
        return refuse(format!("is nested deeper than {MAX_SCHEMA_DEPTH}"));
    }
    Ok(())
}

/// Nesting depth of a JSON text.
fn depth(text: &str) -> usize {
    let (mut depth, mut deepest, mut quoted, mut escaped) = (0usize, 0, false, false);
    for byte in text.bytes() {
        match (quoted, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => quoted = !quoted,
            (false, b'{' | b'[') => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            (false, b'}' | b']') => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_grammars_do_not_displace_used_ones() {
        let mut cache = GrammarCache::default();
        let key = |n: usize| *blake3::hash(&n.to_le_bytes()).as_bytes();
        for n in 0..MAX_CACHED {
            cache.cell(key(n));
        }
        for n in MAX_CACHED..3 * MAX_CACHED {
            let refusal = Refusal { cause: Refused::time, field: None, reason: String::new() };
            assert!(cache.cell(key(n)).set(Err(refusal)).is_ok());
            assert_eq!(cache.grammars.len(), MAX_CACHED);
        }
        // The first refused grammar displaced an unused one.
        let left = (0..MAX_CACHED).filter(|n| cache.grammars.contains_key(&key(*n))).count();
        assert_eq!(left, MAX_CACHED - 1);
        cache.cell(key(3 * MAX_CACHED));
        assert!((1..MAX_CACHED).all(|n| cache.grammars.contains_key(&key(n))), "the refused one went");
    }
}
