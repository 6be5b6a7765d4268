//! Runs a session: forwards audio to the worker and results to the client, until one side or a limit ends it.

use super::Opened;
use super::event::{Control, Event};
use super::references::References;
use crate::error::ApiError;
use crate::limits::{MAX_CONTROL_BYTES, MESSAGE_BURST, MESSAGES_PER_SECOND};
use crate::operations::{self, Encoding, seconds};
use crate::spans;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use proto::operation::{MAX_FRAME_SAMPLES, Operation, OperationError, OperationInput, OperationOutput};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, sleep_until, timeout, timeout_at};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Bytes, Error, Message};
use transport::{OperationSender, OperationStream};

/// Time for the client to complete the upgrade.
const UPGRADE_LIMIT: Duration = Duration::from_secs(10);
/// Interval of pings to the client.
const PING_EVERY: Duration = Duration::from_secs(20);
/// A client without any message for this long is considered gone.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// A worker that reads nothing for this long, or does not finish, is considered lost. Longer than the limit
/// of a client that does not read, since such a client stalls the worker too. A transcript has the time of a
/// request.
const STALL_LIMIT: Duration = Duration::from_secs(60);
/// Time to wait for the worker's reason after the worker ended the session.
const REASON_LIMIT: Duration = Duration::from_secs(5);
/// Time limit of sending the last messages.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// Time for which the client's data is read and discarded after the end. Without it, the client could get a
/// connection reset instead of the last messages.
const LINGER_LIMIT: Duration = Duration::from_secs(2);
/// Most bytes that are read and discarded after the end.
const LINGER_BYTES: usize = 4 << 20;
/// Bytes per read from the client.
const READ_BYTES: usize = 16 << 10;

type Socket = WebSocketStream<TokioIo<Upgraded>>;
type Sink = SplitSink<Socket, Message>;

/// Why a session ended.
#[derive(Debug)]
enum Ended {
    Finished,
    /// The client closed it.
    Left,
    Disconnected,
    /// The worker ended it.
    Failed(OperationError),
    Lost,
    /// The client sent an invalid message.
    Invalid(ApiError, CloseCode),
    /// The client sent nothing for too long.
    Idle,
    /// It reached the longest duration.
    Overlong,
    GoingAway,
    /// The key was revoked or has expired.
    Revoked,
}

impl Ended {
    fn reason(&self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Left => "left",
            Self::Disconnected => "gone",
            Self::Failed(OperationError::Draining) => "draining",
            Self::Failed(OperationError::Idle { .. }) | Self::Idle => "idle_timeout",
            Self::Failed(OperationError::InvalidField { .. }) | Self::Invalid(..) => "invalid",
            Self::Failed(OperationError::TooLong { .. }) | Self::Overlong => "max_duration",
            Self::Failed(_) => "failed",
            Self::Lost => "worker_lost",
            Self::GoingAway => "going_away",
            Self::Revoked => "key_revoked",
        }
    }

    /// The error that the client gets. `None` for a regular end.
    fn error(&self, opened: &Opened) -> Option<ApiError> {
        Some(match self {
            Self::Finished | Self::Left | Self::Disconnected | Self::GoingAway => return None,
            Self::Failed(OperationError::Draining) => return None,
            Self::Failed(error) => operations::failed(opened.operation, error.clone()),
            Self::Lost => ApiError::WorkerLost,
            Self::Invalid(error, _) => error.clone(),
            Self::Idle | Self::Overlong => ApiError::DeadlineExceeded,
            Self::Revoked => ApiError::InvalidApiKey,
        })
    }

    fn code(&self) -> CloseCode {
        match self {
            Self::Finished | Self::Left | Self::Disconnected => CloseCode::Normal,
            Self::GoingAway => CloseCode::Away,
            Self::Failed(OperationError::Draining) => CloseCode::Restart,
            Self::Failed(OperationError::InvalidField { .. }) => CloseCode::Invalid,
            Self::Failed(OperationError::Idle { .. } | OperationError::TooLong { .. }) => CloseCode::Policy,
            Self::Failed(_) | Self::Lost => CloseCode::Error,
            Self::Invalid(_, code) => *code,
            Self::Idle | Self::Overlong | Self::Revoked => CloseCode::Policy,
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    /// Samples sent to the worker.
    samples: AtomicU64,
    /// Start of the current wait for the client. `None` while not waiting.
    waiting_since: Mutex<Option<Instant>>,
    references: Mutex<References>,
    segments: Mutex<Segments>,
}

/// Segments that the worker computes. A client that waits for them is not idle.
#[derive(Debug, Default)]
struct Segments {
    pending: u32,
    /// Time at which the last one was complete.
    complete: Option<Instant>,
}

impl Segments {
    /// The end of an idle client that has sent its last message at `last`.
    fn idle_end(&self, last: Instant, idle: Duration, stall: Duration) -> Instant {
        match self.pending {
            0 => self.complete.map_or(last, |complete| complete.max(last)) + idle,
            _ => last + stall.max(idle),
        }
    }
}

pub(super) struct Session;

impl Session {
    /// Runs a session to its end, starting with the upgrade of the connection.
    pub(super) async fn run(mut opened: Opened, upgrade: OnUpgrade) {
        let shared = Shared::default();
        let state = Arc::clone(&opened.state);
        let counting = state.metrics.operations().session(opened.operation);
        let ended = match timeout(UPGRADE_LIMIT, upgrade).await {
            Ok(Ok(upgraded)) => exchange(&mut opened, upgraded, &shared).await,
            Ok(Err(_)) | Err(_) => Ended::Disconnected,
        };
        let samples = shared.samples.load(Ordering::Relaxed);
        let (reason, node) = (ended.reason(), &opened.node);
        tracing::info!(session = %opened.id, operation = %opened.operation, %node, samples, reason, "a session has ended");
        let heard = seconds(samples, opened.reply.sample_rate);
        counting.ended(reason, heard);
        opened.seat.audio(heard);
        if let Some(mut span) = opened.trace.take() {
            spans::session_ended(&mut span, samples, reason, ended.error(&opened).map(|error| error.code()));
        }
    }
}

async fn exchange(opened: &mut Opened, upgraded: Upgraded, shared: &Shared) -> Ended {
    let max_bytes = MAX_FRAME_SAMPLES * opened.encoding.width();
    let config = WebSocketConfig::default()
        .max_message_size(Some(max_bytes))
        .max_frame_size(Some(max_bytes))
        .read_buffer_size(READ_BYTES)
        // Messages are sent immediately; at most one is buffered.
        .write_buffer_size(0)
        .accept_unmasked_frames(false);
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, Some(config)).await;
    let (mut sink, mut stream) = socket.split();
    let started = Instant::now();
    let session_limits = &opened.state.realtime;
    let worker_idle_ms = opened.reply.idle_timeout_ms;
    let idle = session_limits.idle.min(Duration::from_millis(if worker_idle_ms == 0 {
        u64::MAX
    } else {
        worker_idle_ms
    }));
    let greeted = sink.send(opened_message(opened, idle)).await.is_ok();
    let ended = match opened.streams.take().filter(|_| greeted) {
        None => Ended::Disconnected,
        Some((mut sender, mut answers)) => {
            tokio::select! {
                // The worker's last message takes precedence over other reasons.
                biased;
                ended = forward_results(&mut sink, &mut answers, opened.cosine, shared) => ended,
                ended = forward_input(&mut stream, &mut sender, (opened, idle), shared) => ended,
                () = opened.connection.closing() => Ended::GoingAway,
                () = opened.caller.revoked() => Ended::Revoked,
                () = sleep_until(started + session_limits.longest) => Ended::Overlong,
            }
        }
    };
    let ended = match ended {
        // The worker stopped without waiting for the session.
        Ended::Lost if opened.seat.cut() => Ended::Failed(OperationError::Draining),
        ended => ended,
    };
    if !matches!(ended, Ended::Disconnected) {
        let samples = shared.samples.load(Ordering::Relaxed);
        let closing = send_close(&mut sink, &ended, ended.error(opened), samples);
        if timeout(CLOSE_LIMIT, closing).await.is_ok()
            && let Ok(socket) = sink.reunite(stream)
        {
            linger(socket).await;
        }
    }
    ended
}

fn opened_message(opened: &Opened, idle: Duration) -> Message {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let worker = &opened.reply;
    text(&Event::Opened {
        session: opened.id.as_str(),
        operation: opened.operation.name(),
        model: worker.model.as_str(),
        worker: opened.node.as_str(),
        backend: &worker.backend,
        encoding: opened.encoding.name(),
        sample_rate: worker.sample_rate,
        window: worker.window,
        idle_timeout_ms: millis(idle),
        max_duration_ms: millis(opened.state.realtime.longest),
    })
}

fn text(event: &Event<'_>) -> Message {
    // Serializing numbers and texts cannot fail.
    Message::text(serde_json::to_string(event).unwrap_or_default())
}

/// Forwards the worker's output to the client.
async fn forward_results(
    sink: &mut Sink,
    answers: &mut OperationStream,
    cosine: Option<f32>,
    shared: &Shared,
) -> Ended {
    let mut pings = interval_at(Instant::now() + PING_EVERY, PING_EVERY);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            answer = answers.next() => match answer {
                Ok(OperationOutput::Finished { .. }) => return Ended::Finished,
                Ok(OperationOutput::Failed(error)) => return Ended::Failed(error),
                Ok(output) => {
                    if let OperationOutput::Segmented { .. } = output {
                        let mut segments = shared.segments.lock();
                        segments.pending = segments.pending.saturating_sub(1);
                        segments.complete = Some(Instant::now());
                    }
                    let scores = match &output {
                        OperationOutput::Speaker(voice) => shared.references.lock().scores(voice, cosine),
                        _ => Ok(Vec::new()),
                    };
                    match scores.map(|scores| Event::of(&output, scores)) {
                        Ok(Some(event)) => text(&event),
                        // A second opening is an error.
                        Ok(None) => return Ended::Failed(OperationError::Internal),
                        Err(error) => return Ended::Invalid(error, CloseCode::Policy),
                    }
                }
                Err(error) => {
                    tracing::info!(%error, "a session was cut off by its worker");
                    return Ended::Lost;
                }
            },
            _ = pings.tick() => {
                if shared.waiting_since.lock().is_some_and(|since| since.elapsed() > SILENCE_LIMIT) {
                    return Ended::Disconnected;
                }
                Message::Ping(Bytes::new())
            }
        };
        if sink.send(message).await.is_err() {
            return Ended::Disconnected;
        }
    }
}

/// Forwards the client's messages to the worker.
async fn forward_input(
    stream: &mut SplitStream<Socket>,
    sender: &mut OperationSender,
    (opened, idle): (&Opened, Duration),
    shared: &Shared,
) -> Ended {
    let mut rate_limit = MessageRateLimit::new(Instant::now());
    let mut last_message = Instant::now();
    let mut finishing = None;
    let stall = match opened.operation {
        Operation::Asr => STALL_LIMIT.max(opened.state.request_timeout),
        _ => STALL_LIMIT,
    };
    loop {
        shared.waiting_since.lock().get_or_insert_with(Instant::now);
        let idle_end = || shared.segments.lock().idle_end(last_message, idle, stall);
        let until = finishing.unwrap_or_else(idle_end);
        let message = match timeout_at(until, stream.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(Some(Err(error))) => return ended_by(&error),
            Ok(None) => return Ended::Disconnected,
            Err(_) if finishing.is_some() => return Ended::Lost,
            Err(_) if idle_end() > Instant::now() => continue,
            Err(_) => return Ended::Idle,
        };
        *shared.waiting_since.lock() = None;
        sleep(rate_limit.take(Instant::now())).await;
        let input = match message {
            Message::Binary(bytes) => decode_audio(opened.encoding, &bytes),
            Message::Text(text) => match decode_control(&text) {
                ControlFlow::Continue(Control::Segment) => ControlFlow::Continue(OperationInput::Segment),
                ControlFlow::Continue(Control::Reset) => ControlFlow::Continue(OperationInput::Reset),
                ControlFlow::Continue(Control::Finish) => ControlFlow::Continue(OperationInput::Finish),
                ControlFlow::Continue(Control::Reference { name, embedding }) => {
                    if opened.operation != Operation::Speaker {
                        let rule = "a reference is for sessions of the operation speaker";
                        return Ended::Invalid(ApiError::field("message", rule), CloseCode::Unsupported);
                    }
                    if let Err(error) = shared.references.lock().add(name, embedding) {
                        return Ended::Invalid(error, CloseCode::Policy);
                    }
                    last_message = Instant::now();
                    continue;
                }
                ControlFlow::Break(ended) => ControlFlow::Break(ended),
            },
            // The library answers pings.
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => continue,
            Message::Close(_) => return Ended::Left,
        };
        let input = match input {
            ControlFlow::Continue(input) => input,
            ControlFlow::Break(ended) => return ended,
        };
        if finishing.is_some() {
            let rule = "arrived after the end of the session";
            return Ended::Invalid(ApiError::field("message", rule), CloseCode::Policy);
        }
        if let OperationInput::Segment = input {
            shared.segments.lock().pending += 1;
        }
        match timeout(stall, sender.send(&input)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => {
                // The reason arrives in the other direction.
                sleep(REASON_LIMIT).await;
                return Ended::Lost;
            }
            Err(_) => return Ended::Lost,
        }
        last_message = Instant::now();
        match input {
            OperationInput::Samples(pcm) => {
                shared.samples.fetch_add(pcm.len() as u64, Ordering::Relaxed);
            }
            OperationInput::Finish => finishing = Some(last_message + stall),
            OperationInput::Segment | OperationInput::Reset | OperationInput::Close => {}
        }
    }
}

fn decode_audio(encoding: Encoding, bytes: &[u8]) -> ControlFlow<Ended, OperationInput> {
    match encoding.decode(bytes) {
        Ok(pcm) => ControlFlow::Continue(OperationInput::Samples(pcm)),
        Err(error) => ControlFlow::Break(Ended::Invalid(error, CloseCode::Invalid)),
    }
}

fn decode_control(text: &str) -> ControlFlow<Ended, Control> {
    if text.len() > MAX_CONTROL_BYTES {
        let error = ApiError::field("message", format!("a text has at most {MAX_CONTROL_BYTES} bytes"));
        return ControlFlow::Break(Ended::Invalid(error, CloseCode::Size));
    }
    match Control::read(text) {
        Ok(control) => ControlFlow::Continue(control),
        Err(error) => ControlFlow::Break(Ended::Invalid(error, CloseCode::Unsupported)),
    }
}

/// The end of a session whose connection failed or sent an invalid message.
fn ended_by(error: &Error) -> Ended {
    let invalid = |rule: String, code| Ended::Invalid(ApiError::field("message", rule), code);
    match error {
        Error::Capacity(_) => {
            invalid(format!("a message has at most {MAX_FRAME_SAMPLES} samples"), CloseCode::Size)
        }
        Error::Utf8(_) => invalid("a text is not UTF-8".into(), CloseCode::Invalid),
        Error::Protocol(
            tokio_tungstenite::tungstenite::error::ProtocolError::ResetWithoutClosingHandshake,
        ) => Ended::Disconnected,
        Error::Protocol(error) => invalid(error.to_string(), CloseCode::Protocol),
        _ => Ended::Disconnected,
    }
}

/// Sends the reason of the end.
async fn send_close(
    sink: &mut Sink,
    ended: &Ended,
    error: Option<ApiError>,
    samples: u64,
) -> Result<(), Error> {
    if matches!(ended, Ended::Left) {
        // The library queued the reply to the close frame; this sends it.
        return sink.close().await;
    }
    if let Some(error) = error {
        let mut body = error.body();
        sink.feed(text(&Event::Error { error: body["error"].take() })).await?;
    }
    let reason = ended.reason();
    sink.feed(text(&Event::Closed { reason, samples })).await?;
    sink.send(Message::Close(Some(CloseFrame { code: ended.code(), reason: reason.into() }))).await
}

/// Closes the sending direction and waits for the client to close its own.
async fn linger(mut socket: Socket) {
    let stream = socket.get_mut();
    let rest = async {
        stream.shutdown().await?;
        let mut budget = LINGER_BYTES;
        let mut buffer = vec![0; READ_BYTES];
        while budget > 0 {
            match stream.read(&mut buffer).await? {
                0 => break,
                read => budget = budget.saturating_sub(read),
            }
        }
        std::io::Result::Ok(())
    };
    // The result does not matter: the session has ended.
    let _ = timeout(LINGER_LIMIT, rest).await;
}

/// Limits the rate of a client's messages. A faster client is read at this rate, and is slowed down by TCP.
#[derive(Debug)]
struct MessageRateLimit {
    /// Messages that may be read immediately. Negative: messages owed.
    level: f64,
    at: Instant,
}

impl MessageRateLimit {
    fn new(now: Instant) -> Self {
        Self { level: MESSAGE_BURST, at: now }
    }

    /// The time to wait before the next message.
    fn take(&mut self, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + since * MESSAGES_PER_SECOND).min(MESSAGE_BURST) - 1.0;
        self.at = now;
        Duration::from_secs_f64((-self.level).max(0.0) / MESSAGES_PER_SECOND)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn messages_are_taken_at_a_pace() {
        let start = Instant::now();
        let mut rate_limit = MessageRateLimit::new(start);
        let burst = MESSAGE_BURST as u32;
        for _ in 0..burst {
            assert_eq!(rate_limit.take(Instant::now()), Duration::ZERO);
        }
        let more = 3 * MESSAGES_PER_SECOND as u32;
        for _ in 0..more {
            sleep(rate_limit.take(Instant::now())).await;
        }
        let took = start.elapsed().as_secs_f64();
        assert!((2.99..3.7).contains(&took), "{took}");
        // A sender at exactly this rate never waits.
        sleep(Duration::from_secs(10)).await;
        for _ in 0..more {
            sleep(Duration::from_secs_f64(1.0 / MESSAGES_PER_SECOND)).await;
            assert_eq!(rate_limit.take(Instant::now()), Duration::ZERO);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_waits_for_a_segment_is_not_idle() {
        let [idle, stall] = [30, 600].map(Duration::from_secs);
        let last = Instant::now();
        let mut segments = Segments::default();
        assert_eq!(segments.idle_end(last, idle, stall), last + idle);
        segments.pending = 1;
        assert_eq!(segments.idle_end(last, idle, stall), last + stall);
        let complete = last + Duration::from_secs(100);
        segments = Segments { pending: 0, complete: Some(complete) };
        assert_eq!(segments.idle_end(last, idle, stall), complete + idle);
        assert_eq!(segments.idle_end(complete + idle, idle, stall), complete + idle + idle);
    }

    #[test]
    fn each_reason_of_the_end_has_its_close_code() {
        let code = |ended: Ended| u16::from(ended.code());
        assert_eq!(code(Ended::Finished), 1000);
        assert_eq!(code(Ended::GoingAway), 1001);
        assert_eq!(code(Ended::Lost), 1011);
        assert_eq!(code(Ended::Failed(OperationError::Draining)), 1012);
        assert_eq!(code(Ended::Idle), 1008);
        assert_eq!(Ended::Failed(OperationError::Draining).reason(), "draining");
    }
}
