//! ZMTP 3.0 with the NULL mechanism, as far as a subscriber and a requester need it. Without sockets.
//!
//! Protocol: <https://rfc.zeromq.org/spec/23/>. libzmq speaks 3.1 and falls back to 3.0. Written here because
//! the one crate in pure Rust (`zeromq`) has no limit on the length of a frame.

use bytes::{Buf, Bytes, BytesMut};

/// Most frames of a message.
const MAX_FRAMES: usize = 8;
/// Most bytes of a command. Commands carry a few names.
const MAX_COMMAND: usize = 4 << 10;

const GREETING: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ZmtpError {
    #[error("the peer does not speak ZMTP 3")]
    NotZmtp,
    #[error("the peer's mechanism is {0:?}, not NULL")]
    Mechanism(String),
    #[error("the peer refused the connection: {0}")]
    Refused(String),
    #[error("an invalid frame or command")]
    Invalid,
    #[error("a message has more than {0} bytes")]
    TooLong(usize),
}

/// What this side of a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketType {
    Sub,
    Dealer,
    #[cfg(any(test, feature = "fake"))]
    Pub,
    #[cfg(any(test, feature = "fake"))]
    Router,
}

impl SocketType {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Sub => b"SUB",
            Self::Dealer => b"DEALER",
            #[cfg(any(test, feature = "fake"))]
            Self::Pub => b"PUB",
            #[cfg(any(test, feature = "fake"))]
            Self::Router => b"ROUTER",
        }
    }
}

/// One side of a connection. Bytes from the peer go in, messages and bytes for the peer come out.
#[derive(Debug)]
pub(crate) struct Connection {
    input: BytesMut,
    output: BytesMut,
    state: State,
    max_message: usize,
    frames: Vec<Bytes>,
    message_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Greeting,
    Ready,
    Open,
}

impl Connection {
    /// A connection whose messages have at most `max_message` bytes.
    pub(crate) fn new(socket: SocketType, max_message: usize) -> Self {
        let mut output = BytesMut::new();
        let mut greeting = [0u8; GREETING];
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10] = 3;
        greeting[12..16].copy_from_slice(b"NULL");
        output.extend_from_slice(&greeting);
        let mut ready = b"\x05READY".to_vec();
        for (name, value) in [(&b"Socket-Type"[..], socket.name()), (b"Identity", b"")] {
            ready.push(name.len() as u8);
            ready.extend_from_slice(name);
            ready.extend_from_slice(&(value.len() as u32).to_be_bytes());
            ready.extend_from_slice(value);
        }
        push_frame(&mut output, COMMAND, &ready);
        Self {
            input: BytesMut::new(),
            output,
            state: State::Greeting,
            max_message,
            frames: Vec::new(),
            message_bytes: 0,
        }
    }

    /// Whether the peer has accepted the connection.
    pub(crate) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    pub(crate) fn receive(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// Bytes to send to the peer.
    pub(crate) fn take_output(&mut self) -> Bytes {
        self.output.split().freeze()
    }

    pub(crate) fn send(&mut self, frames: &[&[u8]]) {
        for (position, frame) in frames.iter().enumerate() {
            let more = if position + 1 < frames.len() { MORE } else { 0 };
            push_frame(&mut self.output, more, frame);
        }
    }

    /// Subscribes to messages whose first frame begins with `topic`.
    pub(crate) fn subscribe(&mut self, topic: &[u8]) {
        let mut body = vec![1];
        body.extend_from_slice(topic);
        push_frame(&mut self.output, 0, &body);
    }

    /// The next complete message.
    pub(crate) fn next_message(&mut self) -> Result<Option<Vec<Bytes>>, ZmtpError> {
        if self.state == State::Greeting {
            if self.input.len() < GREETING {
                // The signature's last bytes tell other protocols apart before the whole greeting is there.
                let foreign = self.input.first().is_some_and(|&byte| byte != 0xff);
                return if foreign { Err(ZmtpError::NotZmtp) } else { Ok(None) };
            }
            self.read_greeting()?;
        }
        loop {
            let Some((flags, body)) = self.next_frame()? else { return Ok(None) };
            if flags & COMMAND != 0 {
                self.command(&body)?;
                continue;
            }
            if self.state != State::Open {
                return Err(ZmtpError::Invalid);
            }
            self.message_bytes += body.len();
            if self.frames.len() == MAX_FRAMES {
                return Err(ZmtpError::Invalid);
            }
            self.frames.push(body);
            if flags & MORE == 0 {
                self.message_bytes = 0;
                return Ok(Some(std::mem::take(&mut self.frames)));
            }
        }
    }

    fn read_greeting(&mut self) -> Result<(), ZmtpError> {
        let greeting = self.input.split_to(GREETING);
        if greeting[0] != 0xff || greeting[9] != 0x7f || greeting[10] < 3 {
            return Err(ZmtpError::NotZmtp);
        }
        let mechanism = greeting[12..32].split(|&byte| byte == 0).next().unwrap_or_default();
        if mechanism != b"NULL" {
            return Err(ZmtpError::Mechanism(String::from_utf8_lossy(mechanism).into_owned()));
        }
        self.state = State::Ready;
        Ok(())
    }

    /// Flags and body of the next frame, once it is complete.
    fn next_frame(&mut self) -> Result<Option<(u8, Bytes)>, ZmtpError> {
        let Some(&flags) = self.input.first() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(ZmtpError::Invalid);
        }
        let (head, length) = match flags & LONG {
            0 => match self.input.get(1) {
                Some(&length) => (2, u64::from(length)),
                None => return Ok(None),
            },
            _ => match self.input.get(1..9).and_then(|bytes| bytes.try_into().ok()) {
                Some(bytes) => (9, u64::from_be_bytes(bytes)),
                None => return Ok(None),
            },
        };
        let limit = match flags & COMMAND {
            0 => self.max_message.saturating_sub(self.message_bytes),
            _ => MAX_COMMAND,
        };
        let length = usize::try_from(length).ok().filter(|&length| length <= limit);
        let length = length.ok_or(ZmtpError::TooLong(self.max_message))?;
        if self.input.len() < head + length {
            return Ok(None);
        }
        self.input.advance(head);
        Ok(Some((flags, self.input.split_to(length).freeze())))
    }

    fn command(&mut self, body: &[u8]) -> Result<(), ZmtpError> {
        let (&length, rest) = body.split_first().ok_or(ZmtpError::Invalid)?;
        let (name, data) = rest.split_at_checked(length.into()).ok_or(ZmtpError::Invalid)?;
        match (name, self.state) {
            (b"READY", State::Ready) => self.state = State::Open,
            (b"ERROR", _) => {
                let reason = data.get(1..).unwrap_or_default();
                return Err(ZmtpError::Refused(String::from_utf8_lossy(reason).chars().take(100).collect()));
            }
            (b"PING", State::Open) => {
                // A time to live of two bytes, then a context that the answer repeats.
                let mut pong = b"\x04PONG".to_vec();
                pong.extend_from_slice(data.get(2..).unwrap_or_default());
                push_frame(&mut self.output, COMMAND, &pong);
            }
            (_, State::Open) => {}
            _ => return Err(ZmtpError::Invalid),
        }
        Ok(())
    }
}

fn push_frame(output: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => output.extend_from_slice(&[flags, length]),
        Err(_) => {
            output.extend_from_slice(&[flags | LONG]);
            output.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    output.extend_from_slice(body);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pair(max: usize) -> (Connection, Connection) {
        (Connection::new(SocketType::Sub, max), Connection::new(SocketType::Pub, max))
    }

    /// Moves bytes in both directions, in pieces, until none are left.
    fn exchange(a: &mut Connection, b: &mut Connection, piece: usize) -> Vec<Vec<Bytes>> {
        let mut messages = Vec::new();
        loop {
            let (to_b, to_a) = (a.take_output(), b.take_output());
            if to_a.is_empty() && to_b.is_empty() {
                return messages;
            }
            for chunk in to_b.chunks(piece) {
                b.receive(chunk);
                while b.next_message().unwrap().is_some() {}
            }
            for chunk in to_a.chunks(piece) {
                a.receive(chunk);
                messages.extend(std::iter::from_fn(|| a.next_message().unwrap()));
            }
        }
    }

    proptest! {
        #[test]
        fn messages_arrive_whole_whatever_the_pieces_are(
            piece in 1usize..300,
            messages in prop::collection::vec(prop::collection::vec(prop::collection::vec(any::<u8>(), 0..400), 1..4), 0..5),
        ) {
            let (mut subscriber, mut publisher) = pair(10_000);
            prop_assert!(exchange(&mut subscriber, &mut publisher, piece).is_empty());
            prop_assert!(subscriber.is_open() && publisher.is_open());
            for message in &messages {
                let frames: Vec<&[u8]> = message.iter().map(Vec::as_slice).collect();
                publisher.send(&frames);
            }
            prop_assert_eq!(exchange(&mut subscriber, &mut publisher, piece), messages);
        }

        #[test]
        fn any_input_is_refused_or_waited_for(input in prop::collection::vec(any::<u8>(), 0..200)) {
            let (mut subscriber, _) = pair(1000);
            let mut greeting = Connection::new(SocketType::Pub, 1000).take_output().to_vec();
            greeting.extend(input);
            subscriber.receive(&greeting);
            while let Ok(Some(_)) = subscriber.next_message() {}
        }
    }

    #[test]
    fn a_long_frame_is_refused_before_it_arrives() {
        let (mut subscriber, mut publisher) = pair(1000);
        exchange(&mut subscriber, &mut publisher, 100);
        subscriber.receive(b"\x02\0\0\0\0\0\0\x03\xe9");
        assert_eq!(subscriber.next_message(), Err(ZmtpError::TooLong(1000)));
        let (mut subscriber, mut publisher) = pair(1000);
        exchange(&mut subscriber, &mut publisher, 100);
        publisher.send(&[&[0; 600], &[0; 600]]);
        subscriber.receive(&publisher.take_output());
        assert_eq!(subscriber.next_message(), Err(ZmtpError::TooLong(1000)));
    }

    #[test]
    fn other_protocols_are_recognised_at_once() {
        let (mut subscriber, _) = pair(1000);
        subscriber.receive(b"HTTP/1.1 400 Bad Request\r\n");
        assert_eq!(subscriber.next_message(), Err(ZmtpError::NotZmtp));
    }

    #[test]
    fn a_ping_is_answered_with_its_context() {
        let (mut subscriber, mut publisher) = pair(1000);
        exchange(&mut subscriber, &mut publisher, 100);
        subscriber.receive(b"\x04\x09\x04PING\0\x0aab");
        assert_eq!(subscriber.next_message(), Ok(None));
        assert_eq!(&subscriber.take_output()[..], b"\x04\x07\x04PONGab");
    }
}
