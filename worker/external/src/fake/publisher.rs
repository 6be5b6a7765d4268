//! A publisher of KV events with a replay socket, over ZMTP.

use super::encode::{EventForm, encode_batch};
use crate::kv_events::CacheEvent;
use crate::zmtp::{Connection, SocketType};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tokio::task::AbortHandle;

/// How a publisher speaks.
#[derive(Debug, Clone, Copy)]
pub struct PublisherForm {
    pub events: EventForm,
    /// Messages of a replay begin with the topic.
    pub replay_topic: bool,
    /// Batches that the replay socket still has.
    pub kept: usize,
}

/// A publisher on two free ports of this machine.
#[derive(Debug, Clone)]
pub struct FakePublisher {
    address: String,
    replay: String,
    shared: Arc<Shared>,
    _tasks: Arc<Tasks>,
}

#[derive(Debug)]
struct Shared {
    form: PublisherForm,
    state: Mutex<Published>,
    live: broadcast::Sender<(u64, Bytes)>,
    /// Ends all connections.
    close: broadcast::Sender<()>,
}

#[derive(Debug, Default)]
struct Published {
    next: u64,
    kept: VecDeque<(u64, Bytes)>,
    /// Live messages that are not sent.
    lose: u32,
    run: u32,
}

#[derive(Debug)]
struct Tasks(Vec<AbortHandle>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

impl FakePublisher {
    /// # Errors
    ///
    /// If no port can be opened.
    pub async fn start(form: PublisherForm) -> io::Result<Self> {
        let (live, _) = broadcast::channel(1024);
        let (close, _) = broadcast::channel(1);
        let shared = Arc::new(Shared { form, state: Mutex::default(), live, close });
        let (publisher, router) =
            (TcpListener::bind("127.0.0.1:0").await?, TcpListener::bind("127.0.0.1:0").await?);
        let (address, replay) = (publisher.local_addr()?.to_string(), router.local_addr()?.to_string());
        let tasks = [(publisher, SocketType::Pub), (router, SocketType::Router)].map(|(listener, kind)| {
            let shared = Arc::clone(&shared);
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let shared = Arc::clone(&shared);
                    tokio::spawn(async move {
                        let mut close = shared.close.subscribe();
                        tokio::select! {
                            _ = serve(&shared, kind, stream) => {}
                            _ = close.recv() => {}
                        }
                    });
                }
            })
            .abort_handle()
        });
        Ok(Self { address, replay, shared, _tasks: Arc::new(Tasks(tasks.into())) })
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn replay_address(&self) -> &str {
        &self.replay
    }

    pub fn publish(&self, events: &[CacheEvent]) {
        self.publish_payload(|form, timestamp| encode_batch(form, timestamp, events));
    }

    /// Publishes a payload of any form.
    pub fn publish_payload(&self, payload: impl FnOnce(EventForm, f64) -> Vec<u8>) {
        let mut state = self.shared.state.lock();
        let sequence = state.next;
        state.next += 1;
        let timestamp = f64::from(state.run) * 1e6 + sequence as f64;
        let payload = Bytes::from(payload(self.shared.form.events, timestamp));
        state.kept.push_back((sequence, payload.clone()));
        if state.kept.len() > self.shared.form.kept {
            state.kept.pop_front();
        }
        match state.lose.checked_sub(1) {
            Some(left) => state.lose = left,
            None => drop(self.shared.live.send((sequence, payload))),
        }
    }

    /// The next `count` live messages are lost.
    pub fn lose(&self, count: u32) {
        self.shared.state.lock().lose = count;
    }

    /// Closes all connections. Batches published meanwhile are in the replay.
    pub fn disconnect(&self) {
        let _ = self.shared.close.send(());
    }

    /// The process was replaced: numbers begin again, nothing can be replayed.
    pub fn restart(&self) {
        let mut state = self.shared.state.lock();
        *state = Published { run: state.run + 1, ..Published::default() };
        drop(state);
        self.disconnect();
    }
}

async fn serve(shared: &Shared, kind: SocketType, mut stream: TcpStream) -> io::Result<()> {
    let mut live = shared.live.subscribe();
    let mut connection = Connection::new(kind, 1 << 20);
    let mut buffer = vec![0; 4096];
    let mut subscribed = false;
    loop {
        stream.write_all(&connection.take_output()).await?;
        tokio::select! {
            read = stream.read(&mut buffer) => {
                let read = read?;
                if read == 0 {
                    return Ok(());
                }
                connection.receive(&buffer[..read]);
                while let Some(message) = connection.next_message().map_err(io::Error::other)? {
                    match (kind, message.as_slice()) {
                        (SocketType::Pub, [subscription]) => subscribed = subscription.first() == Some(&1),
                        (SocketType::Router, [_, from]) => {
                            let from = from.as_ref().try_into().map(u64::from_be_bytes).map_err(io::Error::other)?;
                            replay(shared, &mut connection, from);
                        }
                        _ => {}
                    }
                }
            }
            message = live.recv(), if subscribed => {
                if let Ok((sequence, payload)) = message {
                    connection.send(&[b"", &sequence.to_be_bytes(), &payload]);
                }
            }
        }
    }
}

fn replay(shared: &Shared, connection: &mut Connection, from: u64) {
    let mut send = |sequence: u64, payload: &[u8]| match shared.form.replay_topic {
        true => connection.send(&[b"", b"", &sequence.to_be_bytes(), payload]),
        false => connection.send(&[b"", &sequence.to_be_bytes(), payload]),
    };
    for (sequence, payload) in shared.state.lock().kept.iter().filter(|(sequence, _)| *sequence >= from) {
        send(*sequence, payload);
    }
    send(u64::MAX, b"");
}
