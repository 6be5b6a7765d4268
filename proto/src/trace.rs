//! Traces: the spans of a request in all processes that worked on it, as W3C Trace Context and
//! OpenTelemetry define them.
//!
//! A [`Span`] is recorded when it is dropped. It goes into a bounded queue; a full queue drops it and never
//! blocks. The owner of a [`SpanQueue`] takes spans from the other end. Nothing is traced until a queue is
//! [`install`]ed, which happens only if an export target is configured; before that, each call costs one
//! atomic load. A span never contains prompts, texts, tokens, keys or salts.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime};

#[cfg(test)]
mod tests;

/// Header with which a client names the trace and the parent span of its request.
pub const TRACEPARENT_HEADER: &str = "traceparent";

/// Id of a trace; never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TraceId(pub [u8; 16]);

/// Id of a span within its trace; never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SpanId(pub [u8; 8]);

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Identifies a recorded span to its children. A request that carries one is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TraceContext {
    pub trace: TraceId,
    pub span: SpanId,
}

/// Parent span that a client outside names for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    pub context: TraceContext,
    /// Whether the client records the parent span.
    pub sampled: bool,
}

impl TraceParent {
    /// Parses a `traceparent` header. Returns `None` if it is malformed.
    pub fn parse(header: &str) -> Option<Self> {
        let (version, rest) = header.split_once('-')?;
        let [version] = from_hex(version)?;
        let (fields, more) = (rest.get(..52)?, rest.get(52..)?);
        let unknown = match version {
            0 => !more.is_empty(),
            255 => true,
            _ => !(more.is_empty() || more.starts_with('-')),
        };
        let mut fields = fields.split('-');
        let (trace, span, flags) = (fields.next()?, fields.next()?, fields.next()?);
        let context = TraceContext { trace: TraceId(from_hex(trace)?), span: SpanId(from_hex(span)?) };
        let [flags] = from_hex(flags)?;
        let invalid = context.trace.0 == [0; 16] || context.span.0 == [0; 8];
        (!unknown && !invalid && fields.next().is_none()).then_some(Self { context, sampled: flags & 1 == 1 })
    }
}

/// Decodes exactly `2 * N` lower-case hexadecimal digits; otherwise returns `None`.
fn from_hex<const N: usize>(digits: &str) -> Option<[u8; N]> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

/// Role of a span, as OpenTelemetry defines it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    Internal,
    /// Serves a call of another process.
    Server,
    /// Calls another process.
    Client,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Text(Cow<'static, str>),
    Texts(Vec<String>),
    Count(i64),
    Measure(f64),
    Measures(Vec<f64>),
}

impl From<&'static str> for Value {
    fn from(text: &'static str) -> Self {
        Self::Text(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text.into())
    }
}

impl From<Vec<String>> for Value {
    fn from(texts: Vec<String>) -> Self {
        Self::Texts(texts)
    }
}

impl From<u64> for Value {
    fn from(count: u64) -> Self {
        Self::Count(i64::try_from(count).unwrap_or(i64::MAX))
    }
}

impl From<u32> for Value {
    fn from(count: u32) -> Self {
        Self::Count(count.into())
    }
}

impl From<usize> for Value {
    fn from(count: usize) -> Self {
        Self::from(count as u64)
    }
}

impl From<f64> for Value {
    fn from(measure: f64) -> Self {
        Self::Measure(measure)
    }
}

impl From<Duration> for Value {
    fn from(time: Duration) -> Self {
        Self::Measure(time.as_secs_f64())
    }
}

impl From<Vec<f64>> for Value {
    fn from(measures: Vec<f64>) -> Self {
        Self::Measures(measures)
    }
}

/// Record of a span that has ended.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanRecord {
    pub context: TraceContext,
    /// The parent span. `None` for the root of a trace.
    pub parent: Option<SpanId>,
    /// Whether the parent span belongs to another process.
    pub remote: bool,
    pub kind: SpanKind,
    pub name: Cow<'static, str>,
    pub start: SystemTime,
    pub end: SystemTime,
    pub attributes: Vec<(&'static str, Value)>,
    /// Error text if the span failed.
    pub error: Option<Cow<'static, str>>,
}

/// Number of spans by outcome since the queue was installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpanCounts {
    /// Exported by the queue's owner.
    pub exported: u64,
    /// Dropped because the queue was full.
    pub queue_full: u64,
    /// Taken out of the queue and then lost because the export failed.
    pub failed: u64,
}

impl SpanCounts {
    /// Returns each count with the name of its outcome.
    pub fn by_outcome(self) -> [(&'static str, u64); 3] {
        [("exported", self.exported), ("queue_full", self.queue_full), ("failed", self.failed)]
    }
}

#[derive(Debug, Default)]
struct Counters {
    exported: AtomicU64,
    queue_full: AtomicU64,
    failed: AtomicU64,
}

#[derive(Debug)]
struct Sink {
    queue: SyncSender<SpanRecord>,
    /// Share, 0 to 1, of requests without a parent that are recorded.
    ratio: f64,
    counters: Counters,
}

static SINK: OnceLock<Sink> = OnceLock::new();

/// Receiving end of this process's span queue.
#[derive(Debug)]
pub struct SpanQueue {
    spans: Receiver<SpanRecord>,
    sink: &'static Sink,
}

/// Starts tracing in this process. A share `ratio` (0 to 1) of the requests without a parent is recorded,
/// and every request whose parent is recorded. At most `capacity` spans wait in the queue; further spans
/// are dropped and counted. Returns `None` if a queue is installed already.
pub fn install(ratio: f64, capacity: usize) -> Option<SpanQueue> {
    let (queue, spans) = sync_channel(capacity);
    SINK.set(Sink { queue, ratio, counters: Counters::default() }).ok()?;
    Some(SpanQueue { spans, sink: SINK.get()? })
}

/// Returns the outcomes of this process's spans. All are 0 if no queue is installed.
pub fn counts() -> SpanCounts {
    let Some(Sink { counters, .. }) = SINK.get() else { return SpanCounts::default() };
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    SpanCounts {
        exported: read(&counters.exported),
        queue_full: read(&counters.queue_full),
        failed: read(&counters.failed),
    }
}

impl SpanQueue {
    /// Collects at most `max` spans and waits at most `limit` for them.
    pub fn take(&self, limit: Duration, max: usize) -> Vec<SpanRecord> {
        let until = Instant::now() + limit;
        let mut taken: Vec<SpanRecord> = Vec::new();
        while taken.len() < max {
            match self.spans.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(span) => taken.push(span),
                // The sender is in a static and is never dropped.
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        taken
    }

    /// Counts `spans` taken spans as exported or failed.
    pub fn record_export(&self, spans: usize, exported: bool) {
        let Counters { exported: well, failed, .. } = &self.sink.counters;
        let counter = if exported { well } else { failed };
        counter.fetch_add(spans as u64, Ordering::Relaxed);
    }
}

/// Span of a recorded request. It ends when it is dropped.
#[derive(Debug)]
pub struct Span {
    sink: &'static Sink,
    /// The same instant on the monotonic and on the wall clock.
    clocks: (Instant, SystemTime),
    end: Option<Instant>,
    record: SpanRecord,
}

/// Starts the span of a request that arrived from outside at `arrived`. `parent` returns its `traceparent`
/// header. Returns `None` if the request is not recorded.
pub fn receive<'a>(
    parent: impl FnOnce() -> Option<&'a str>,
    name: impl FnOnce() -> Cow<'static, str>,
    arrived: Instant,
) -> Option<Span> {
    let sink = SINK.get()?;
    let parent = parent().and_then(TraceParent::parse);
    let trace = match parent {
        Some(TraceParent { sampled: false, .. }) => return None,
        Some(TraceParent { context, .. }) => context.trace,
        None => sink.sample()?,
    };
    Some(sink.serve(trace, parent.map(|parent| parent.context.span), name(), arrived))
}

/// Starts a span for a call of another process, whose span is `parent`. Returns `None` if no queue is
/// installed.
pub fn follow(parent: TraceContext, name: &'static str, arrived: Instant) -> Option<Span> {
    Some(SINK.get()?.serve(parent.trace, Some(parent.span), name.into(), arrived))
}

/// Like [`follow`], for a `parent` in this process.
pub fn within(parent: TraceContext, kind: SpanKind, name: &'static str, start: Instant) -> Option<Span> {
    let mut span = follow(parent, name, start)?;
    (span.record.kind, span.record.remote) = (kind, false);
    Some(span)
}

impl Sink {
    /// Returns the id of a new trace, or `None` if the sampling ratio excludes it.
    fn sample(&self) -> Option<TraceId> {
        let (high, low) = (random(), random());
        let mut id = [0; 16];
        id[..8].copy_from_slice(&high.to_be_bytes());
        id[8..].copy_from_slice(&low.to_be_bytes());
        let recorded = (low as f64) <= self.ratio * 2f64.powi(64);
        recorded.then_some(TraceId(id))
    }

    /// Creates a server span. Its parent, if any, belongs to another process.
    fn serve(
        &'static self,
        trace: TraceId,
        parent: Option<SpanId>,
        name: Cow<'static, str>,
        arrived: Instant,
    ) -> Span {
        let clocks = (Instant::now(), SystemTime::now());
        let start = clocks.1 - clocks.0.saturating_duration_since(arrived);
        let record = SpanRecord {
            context: TraceContext { trace, span: SpanId::random() },
            parent,
            remote: parent.is_some(),
            kind: SpanKind::Server,
            name,
            start,
            end: start,
            attributes: Vec::new(),
            error: None,
        };
        Span { sink: self, clocks, end: None, record }
    }
}

impl SpanId {
    fn random() -> Self {
        Self(random().to_be_bytes())
    }
}

/// Returns a random number that is not zero, from the keys that the operating system gave to this thread.
fn random() -> u64 {
    RandomState::new().build_hasher().finish().max(1)
}

impl Span {
    /// Returns the context that children of this span refer to.
    pub fn context(&self) -> TraceContext {
        self.record.context
    }

    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.record.attributes.push((key, value.into()));
    }

    pub fn fail(&mut self, error: impl Into<Cow<'static, str>>) {
        self.record.error = Some(error.into());
    }

    pub fn rename(&mut self, name: impl Into<Cow<'static, str>>) {
        self.record.name = name.into();
    }

    /// Starts an internal child span that began at `start`.
    pub fn child(&self, name: &'static str, start: Instant) -> Self {
        self.below(SpanKind::Internal, name, start)
    }

    /// Starts a client child span, for a call of another process that began at `start`.
    pub fn call(&self, name: &'static str, start: Instant) -> Self {
        self.below(SpanKind::Client, name, start)
    }

    /// Records an internal child span from `start` until now.
    pub fn part(&self, name: &'static str, start: Instant) {
        drop(self.child(name, start));
    }

    fn below(&self, kind: SpanKind, name: &'static str, start: Instant) -> Self {
        let at = self.wall_time(start);
        let record = SpanRecord {
            context: TraceContext { span: SpanId::random(), ..self.record.context },
            parent: Some(self.record.context.span),
            remote: false,
            kind,
            name: name.into(),
            start: at,
            end: at,
            attributes: Vec::new(),
            error: None,
        };
        Self { sink: self.sink, clocks: self.clocks, end: None, record }
    }

    pub fn end(mut self, at: Instant) {
        self.end = Some(at);
    }

    fn wall_time(&self, moment: Instant) -> SystemTime {
        let (then, wall) = self.clocks;
        match moment.checked_duration_since(then) {
            Some(after) => wall + after,
            None => wall - then.saturating_duration_since(moment),
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let end = self.wall_time(self.end.unwrap_or_else(Instant::now));
        self.record.end = end.max(self.record.start);
        let empty =
            SpanRecord { attributes: Vec::new(), name: Cow::Borrowed(""), error: None, ..self.record };
        let record = std::mem::replace(&mut self.record, empty);
        if self.sink.queue.try_send(record).is_err() {
            self.sink.counters.queue_full.fetch_add(1, Ordering::Relaxed);
        }
    }
}
