//! Follows an engine's KV events over ZMQ and drives an [`EngineIndex`].
//!
//! The publisher sends `[topic, sequence, payload]` with the sequence as 8 bytes, big-endian. Its replay socket
//! takes the first wanted sequence and answers with one message a batch, then with the sequence -1 and an
//! empty payload. vLLM 0.32 and SGLang 0.5.23 repeat the topic in these messages; earlier versions do not. Run
//! against the publishers of both versions, over libzmq.

use crate::engine_index::{EngineIndex, IndexAction};
use crate::zmtp::{Connection, SocketType, ZmtpError};
use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use proto::event::KvEvent;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, interval, sleep, timeout};

/// Where an engine publishes KV events.
#[derive(Debug, Clone)]
pub struct KvEventSource {
    /// `host:port`.
    pub address: String,
    /// `host:port` of the replay socket.
    pub replay: Option<String>,
    pub topic: String,
}

/// Limits of a subscription.
#[derive(Debug, Clone, Copy)]
pub struct SubscriberLimits {
    /// For a connection with its handshake.
    pub connect: Duration,
    /// Between two messages of a replay.
    pub replay: Duration,
    /// Between two probes of the replay socket.
    pub probe: Duration,
    /// Pause before a lost connection is opened again; it doubles up to `max_pause`.
    pub pause: Duration,
    pub max_pause: Duration,
    /// Bytes of one message.
    pub max_message: usize,
}

impl Default for SubscriberLimits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            replay: Duration::from_secs(10),
            probe: Duration::from_secs(5),
            pause: Duration::from_millis(100),
            max_pause: Duration::from_secs(5),
            max_message: 64 << 20,
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum SubscriberError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Zmtp(#[from] ZmtpError),
    #[error("no data was received in time")]
    TimedOut,
    #[error("a message of {0} frames")]
    Frames(usize),
}

/// Follows the engine until the future is dropped. Calls `report` with every change of the held prefixes, in
/// order and with `index` locked. The caller registers requests at `index`.
pub async fn follow_kv_events(
    source: &KvEventSource,
    limits: &SubscriberLimits,
    index: &Mutex<EngineIndex>,
    mut report: impl FnMut(Vec<KvEvent>),
) {
    let mut pause = limits.pause;
    loop {
        let opened = Instant::now();
        let Err(error) = follow_connection(source, limits, index, &mut report).await;
        {
            let mut index = index.lock();
            index.disconnected();
            report_changes(&mut index, &mut report);
        }
        if opened.elapsed() > limits.max_pause {
            pause = limits.pause;
        }
        tracing::warn!(address = %source.address, %error, ?pause, "the KV event stream of the engine ended; reconnecting");
        sleep(pause).await;
        pause = (pause * 2).min(limits.max_pause);
    }
}

fn report_changes(index: &mut EngineIndex, report: &mut impl FnMut(Vec<KvEvent>)) {
    let events = index.take_events();
    if !events.is_empty() {
        report(events);
    }
}

/// What a replay task has read.
enum ReplayMessage {
    Batch(u64, Bytes),
    Ended,
    Failed(SubscriberError),
}

/// Ends a task when it is dropped.
struct RunningReplay {
    task: JoinHandle<()>,
    messages: mpsc::Receiver<ReplayMessage>,
}

impl Drop for RunningReplay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn follow_connection(
    source: &KvEventSource,
    limits: &SubscriberLimits,
    index: &Mutex<EngineIndex>,
    report: &mut impl FnMut(Vec<KvEvent>),
) -> Result<std::convert::Infallible, SubscriberError> {
    let mut socket = Socket::connect(&source.address, SocketType::Sub, limits).await?;
    socket.connection.subscribe(source.topic.as_bytes());
    socket.flush().await?;
    index.lock().connected();
    let mut probes = interval(limits.probe);
    probes.reset();
    let mut replay: Option<RunningReplay> = None;
    loop {
        let action = {
            let mut index = index.lock();
            report_changes(&mut index, report);
            index.next_action()
        };
        if let Some(IndexAction::Replay { from }) = action {
            replay = Some(start_replay(source, *limits, from));
        }
        let replayed = async {
            match &mut replay {
                Some(replay) => replay.messages.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            message = socket.message() => {
                let (sequence, payload) = split_message(message?)?;
                index.lock().message(sequence, payload);
            }
            message = replayed => {
                let mut index = index.lock();
                match message {
                    Some(ReplayMessage::Batch(sequence, payload)) => index.replayed(sequence, &payload),
                    Some(ReplayMessage::Ended) => {
                        replay = None;
                        index.replay_ended();
                    }
                    Some(ReplayMessage::Failed(error)) => {
                        tracing::warn!(address = %source.address, %error, "a replay of KV events failed");
                        replay = None;
                        index.replay_failed();
                    }
                    None => {
                        replay = None;
                        index.replay_failed();
                    }
                }
            }
            _ = probes.tick() => index.lock().probe(),
        }
    }
}

/// Sequence and payload of a message: the last two frames.
fn split_message(mut frames: Vec<Bytes>) -> Result<(u64, Bytes), SubscriberError> {
    let count = frames.len();
    let (Some(payload), Some(sequence)) = (frames.pop(), frames.pop()) else {
        return Err(SubscriberError::Frames(count));
    };
    let sequence = sequence.as_ref().try_into().map_err(|_| SubscriberError::Zmtp(ZmtpError::Invalid))?;
    Ok((u64::from_be_bytes(sequence), payload))
}

fn start_replay(source: &KvEventSource, limits: SubscriberLimits, from: u64) -> RunningReplay {
    let (sender, messages) = mpsc::channel(16);
    let address = source.replay.clone();
    let task = tokio::spawn(async move {
        let last = match run_replay(address, &limits, from, &sender).await {
            Ok(()) => ReplayMessage::Ended,
            Err(error) => {
                // The index asks again at once.
                sleep(limits.pause).await;
                ReplayMessage::Failed(error)
            }
        };
        let _ = sender.send(last).await;
    });
    RunningReplay { task, messages }
}

async fn run_replay(
    address: Option<String>,
    limits: &SubscriberLimits,
    from: u64,
    sender: &mpsc::Sender<ReplayMessage>,
) -> Result<(), SubscriberError> {
    let address = address.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))?;
    let mut socket = Socket::connect(&address, SocketType::Dealer, limits).await?;
    socket.connection.send(&[b"", &from.to_be_bytes()]);
    socket.flush().await?;
    loop {
        let message =
            timeout(limits.replay, socket.message()).await.map_err(|_| SubscriberError::TimedOut)?;
        let (sequence, payload) = split_message(message?)?;
        if sequence == u64::MAX {
            return Ok(());
        }
        if sender.send(ReplayMessage::Batch(sequence, payload)).await.is_err() {
            return Ok(());
        }
    }
}

/// A TCP connection that speaks ZMTP.
struct Socket {
    stream: TcpStream,
    connection: Connection,
    buffer: BytesMut,
}

impl Socket {
    /// Connects and completes the handshake.
    async fn connect(
        address: &str,
        kind: SocketType,
        limits: &SubscriberLimits,
    ) -> Result<Self, SubscriberError> {
        let open = async {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let connection = Connection::new(kind, limits.max_message);
            let mut socket = Self { stream, connection, buffer: BytesMut::with_capacity(64 << 10) };
            socket.flush().await?;
            while !socket.connection.is_open() {
                // A publisher sends nothing before it has read a subscription.
                if socket.connection.next_message()?.is_some() {
                    return Err(ZmtpError::Invalid.into());
                }
                if !socket.connection.is_open() {
                    socket.read().await?;
                }
            }
            Ok(socket)
        };
        timeout(limits.connect, open).await.map_err(|_| SubscriberError::TimedOut)?
    }

    async fn flush(&mut self) -> Result<(), SubscriberError> {
        let output = self.connection.take_output();
        Ok(self.stream.write_all(&output).await?)
    }

    /// The next message. Cancel-safe: what was read stays in the connection.
    async fn message(&mut self) -> Result<Vec<Bytes>, SubscriberError> {
        loop {
            let message = self.connection.next_message()?;
            self.flush().await?;
            if let Some(message) = message {
                return Ok(message);
            }
            self.read().await?;
        }
    }

    async fn read(&mut self) -> Result<(), SubscriberError> {
        self.buffer.clear();
        if self.stream.read_buf(&mut self.buffer).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        self.connection.receive(&self.buffer);
        Ok(())
    }
}

/// Starts [`follow_kv_events`] as a task. Aborting the task ends it.
pub fn spawn_kv_follower(
    source: KvEventSource,
    limits: SubscriberLimits,
    index: Arc<Mutex<EngineIndex>>,
    report: impl FnMut(Vec<KvEvent>) + Send + 'static,
) -> JoinHandle<()> {
    tokio::spawn(async move { follow_kv_events(&source, &limits, &index, report).await })
}
