//! Kinds of streams, and frames on them: a 4-byte big-endian length, then that many bytes.

use crate::Error;
use bytes::{Buf, Bytes, BytesMut};
use futures::FutureExt;
use proto::codec::{self, Cap, CodecError};
use proto::ids::Role;
use quinn::{ReadError, RecvStream, SendStream, VarInt, WriteError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::marker::PhantomData;
use std::time::Duration;

const LENGTH_BYTES: usize = 4;
const FRAME_ROOM: usize = 64;
/// Most bytes read from QUIC at once, and most bytes by which a frame's buffer may exceed the received
/// data.
const READ_BYTES: usize = 64 * 1024;

/// First byte of every stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum StreamKind {
    /// RPC, worker to coordinator: [`CoordinatorApi`](crate::service::CoordinatorApi). Bidirectional.
    CoordinatorRpc = 0,
    /// RPC, coordinator to worker: [`WorkerApi`](crate::service::WorkerApi). Bidirectional.
    WorkerRpc = 1,
    /// One generation, coordinator to worker. Bidirectional.
    Generate = 2,
    /// KV events, worker to coordinator. Unidirectional.
    KvEvents = 3,
    /// Tensors, between any two nodes. Unidirectional.
    Bulk = 4,
    /// One KV snapshot, requested by a coordinator from a worker. Bidirectional.
    KvSnapshot = 5,
    /// One call to encode texts, coordinator to worker. Bidirectional.
    Encode = 6,
    /// One operation on sequences, coordinator to worker. Bidirectional.
    Sequence = 7,
    /// Frames of the coordinators' own protocol, coordinator to coordinator. Unidirectional.
    Group = 8,
    /// One pull of a prefix's resume point, worker to worker. Bidirectional.
    Pull = 9,
    /// A coordinator's index of one worker's prefixes, requested by another coordinator. Bidirectional.
    PeerIndex = 10,
    /// Control of one stage of a replica by its first stage, worker to worker. Bidirectional.
    Stage = 11,
    /// Steps and activations, from a stage to the next, worker to worker. Unidirectional.
    Activations = 12,
    /// One request for a model's manifest or for chunks, worker to worker. Bidirectional.
    Shard = 13,
    /// Lease of a stage by the first stage, worker to worker. Bidirectional.
    StageLease = 14,
    /// Contents of a stage's cache blocks, for the first stage, worker to worker. Bidirectional.
    StageBlocks = 15,
    /// One generation whose prompt may use a numbered prefix, coordinator to worker. Bidirectional.
    GenerateAfter = 16,
    /// Certificate revocation lists, between any two nodes; at most one per direction of a connection.
    /// Unidirectional.
    Revocations = 17,
    /// A session of an operation, coordinator to worker. Bidirectional.
    Operation = 18,
    /// Zeros to measure a path, between any two nodes. Bidirectional.
    Probe = 20,
    /// One generation whose prompt has images, coordinator to worker. Bidirectional.
    GenerateFromImages = 21,
    /// A session of an operation by a backend that the client has chosen, coordinator to worker. Bidirectional.
    OperationByBackend = 22,
    /// One generation whose prompt has images, with the workers that encode them, coordinator to worker. Bidirectional.
    GenerateWithEncoders = 23,
    /// One image to encode, worker to worker. Bidirectional.
    EncodeImage = 24,
    /// One generation with the log-probabilities of its prompt, coordinator to worker. Bidirectional.
    GenerateWithPromptLogprobs = 25,
    /// The hello; exactly one per connection, opened first, by the dialer. Bidirectional.
    Hello = 255,
}

impl StreamKind {
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::CoordinatorRpc,
            Self::WorkerRpc,
            Self::Generate,
            Self::KvEvents,
            Self::Bulk,
            Self::KvSnapshot,
            Self::Encode,
            Self::Sequence,
            Self::Group,
            Self::Pull,
            Self::PeerIndex,
            Self::Stage,
            Self::Activations,
            Self::Shard,
            Self::StageLease,
            Self::StageBlocks,
            Self::GenerateAfter,
            Self::Revocations,
            Self::Operation,
            Self::Probe,
            Self::GenerateFromImages,
            Self::OperationByBackend,
            Self::GenerateWithEncoders,
            Self::EncodeImage,
            Self::GenerateWithPromptLogprobs,
            Self::Hello,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }

    /// Whether a node of role `opener` may open such a stream to one of role `acceptor`.
    pub fn allowed(self, opener: Role, acceptor: Role) -> bool {
        match self {
            Self::CoordinatorRpc | Self::KvEvents => (opener, acceptor) == (Role::Worker, Role::Coordinator),
            Self::WorkerRpc
            | Self::Generate
            | Self::GenerateAfter
            | Self::GenerateFromImages
            | Self::GenerateWithEncoders
            | Self::GenerateWithPromptLogprobs
            | Self::KvSnapshot
            | Self::Encode
            | Self::Sequence
            | Self::Operation
            | Self::OperationByBackend => (opener, acceptor) == (Role::Coordinator, Role::Worker),
            Self::Pull
            | Self::EncodeImage
            | Self::Stage
            | Self::Activations
            | Self::StageLease
            | Self::StageBlocks => (opener, acceptor) == (Role::Worker, Role::Worker),
            // A coordinator needs the manifests, with the tokenizers, of models that are deployed.
            Self::Shard => acceptor == Role::Worker,
            Self::Group | Self::PeerIndex => (opener, acceptor) == (Role::Coordinator, Role::Coordinator),
            Self::Bulk | Self::Revocations | Self::Probe => true,
            Self::Hello => false,
        }
    }
}

/// Reason why the peer stopped or reset a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum StreamCode {
    /// The reader needs no more data. Dropping a stream sends this code too.
    #[error("cancelled")]
    Cancelled,
    /// This version does not know the kind byte.
    #[error("unknown stream kind")]
    UnknownKind,
    /// The opener's role may not open a stream of this kind.
    #[error("this role may not open such a stream")]
    Forbidden,
    /// A frame is too long or malformed.
    #[error("malformed frame")]
    Malformed,
    /// The prompt refers to a numbered prefix that the worker no longer has.
    #[error("unknown prefix")]
    UnknownPrefix,
    /// A code of a later version.
    #[error("code {0}")]
    Other(u64),
}

impl StreamCode {
    pub(super) fn to_wire(self) -> VarInt {
        match self {
            Self::Cancelled => VarInt::from_u32(0),
            Self::UnknownKind => VarInt::from_u32(1),
            Self::Forbidden => VarInt::from_u32(2),
            Self::Malformed => VarInt::from_u32(3),
            Self::UnknownPrefix => VarInt::from_u32(4),
            Self::Other(code) => VarInt::from_u64(code).unwrap_or(VarInt::MAX),
        }
    }

    pub(super) fn from_wire(code: VarInt) -> Self {
        match code.into_inner() {
            0 => Self::Cancelled,
            1 => Self::UnknownKind,
            2 => Self::Forbidden,
            3 => Self::Malformed,
            4 => Self::UnknownPrefix,
            other => Self::Other(other),
        }
    }
}

pub(super) fn write_error(error: WriteError) -> Error {
    match error {
        WriteError::Stopped(code) => Error::StreamEnded(StreamCode::from_wire(code)),
        WriteError::ConnectionLost(reason) => lost(&reason),
        WriteError::ClosedStream => Error::Protocol("write on a closed stream"),
        WriteError::ZeroRttRejected => Error::Protocol("0-RTT is not used"),
    }
}

pub(super) fn read_error(error: ReadError) -> Error {
    match error {
        ReadError::Reset(code) => Error::StreamEnded(StreamCode::from_wire(code)),
        ReadError::ConnectionLost(reason) => lost(&reason),
        ReadError::ClosedStream => Error::StreamCut { what: "read on a closed stream" },
        ReadError::IllegalOrderedRead => Error::Protocol("unordered read"),
        ReadError::ZeroRttRejected => Error::Protocol("0-RTT is not used"),
    }
}

fn lost(reason: &quinn::ConnectionError) -> Error {
    Error::ConnectionLost { peer: "the peer".into(), reason: reason.to_string() }
}

/// Awaits `future` for at most `limit`.
pub(super) async fn within<T>(
    what: &'static str,
    limit: Duration,
    future: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(limit, future).await {
        Ok(result) => result,
        Err(_) => Err(Error::Timeout { what, limit_ms: limit.as_millis().try_into().unwrap_or(u64::MAX) }),
    }
}

/// Appends a frame. Appends nothing if encoding fails.
fn put_frame<T: Serialize>(item: &T, cap: Cap, bytes: &mut Vec<u8>) -> Result<(), Error> {
    let start = bytes.len();
    bytes.extend_from_slice(&[0; LENGTH_BYTES]);
    if let Err(error) = codec::encode_into(item, cap, bytes) {
        bytes.truncate(start);
        return Err(error.into());
    }
    // Caps are far below 4 GiB.
    let len = u32::try_from(bytes.len() - start - LENGTH_BYTES).unwrap_or(u32::MAX);
    if let Some(head) = bytes.split_at_mut(start).1.first_chunk_mut() {
        *head = len.to_be_bytes();
    }
    Ok(())
}

/// Writes frames that hold one `T` each.
#[derive(Debug)]
pub(super) struct FrameWriter<T> {
    stream: SendStream,
    cap: Cap,
    /// Bytes to send before the next frame; empty except at the beginning.
    buffer: Vec<u8>,
    item: PhantomData<fn(&T)>,
}

impl<T: Serialize> FrameWriter<T> {
    pub(super) fn new(stream: SendStream, cap: Cap) -> Self {
        Self { stream, cap, buffer: Vec::new(), item: PhantomData }
    }

    /// Creates the writer of a stream on which nothing has been sent, not even its kind. The kind is sent
    /// with the first frame, which has about `bytes` bytes.
    pub(super) fn opening(stream: SendStream, kind: StreamKind, cap: Cap, bytes: usize) -> Self {
        let mut buffer = Vec::with_capacity(1 + LENGTH_BYTES + bytes.min(cap.bytes()));
        buffer.push(kind as u8);
        Self { stream, cap, buffer, item: PhantomData }
    }

    /// Inserts a frame of another type before the first.
    pub(super) fn preceded_by<U: Serialize>(mut self, item: &U, cap: Cap) -> Result<Self, Error> {
        put_frame(item, cap, &mut self.buffer)?;
        Ok(self)
    }

    /// Sends one frame. Waits while the peer's window is full. If the future is dropped before it
    /// completes, half a frame may have been sent, and the stream is unusable.
    pub(super) async fn write(&mut self, item: &T) -> Result<(), Error> {
        let mut bytes = std::mem::take(&mut self.buffer);
        bytes.reserve(FRAME_ROOM);
        if let Err(error) = put_frame(item, self.cap, &mut bytes) {
            self.buffer = bytes;
            return Err(error);
        }
        // Passed on without a copy.
        self.stream.write_chunk(bytes.into()).await.map_err(write_error)
    }

    /// Sends one frame and the raw bytes after it in one call to QUIC, which takes them without a copy, so
    /// that they leave together. Returns the number of bytes. If the future is dropped before it completes,
    /// the stream is unusable.
    pub(super) async fn write_with(&mut self, item: &T, raw: Bytes) -> Result<usize, Error> {
        let mut frame = vec![0; LENGTH_BYTES];
        codec::encode_into(item, self.cap, &mut frame)?;
        let len = u32::try_from(frame.len() - LENGTH_BYTES).unwrap_or(u32::MAX);
        if let Some(head) = frame.first_chunk_mut() {
            *head = len.to_be_bytes();
        }
        let bytes = frame.len() + raw.len();
        self.stream.write_all_chunks(&mut [Bytes::from(frame), raw]).await.map_err(write_error)?;
        Ok(bytes)
    }

    /// Sends an encoded frame.
    pub(super) async fn write_bytes(&mut self, frame: &[u8]) -> Result<(), Error> {
        let (message, len, cap) = (std::any::type_name::<T>(), frame.len(), self.cap.bytes());
        if len > cap {
            return Err(CodecError::TooLong { message, len, cap }.into());
        }
        let head = u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes();
        self.stream.write_all(&head).await.map_err(write_error)?;
        self.stream.write_all(frame).await.map_err(write_error)
    }

    /// Sends raw bytes whose length the previous frame announced.
    pub(super) async fn write_raw(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.stream.write_all(bytes).await.map_err(write_error)
    }

    /// Closes the stream; no more frames follow.
    pub(super) fn finish(&mut self) {
        // Fails only if the stream is already finished or reset.
        let _ = self.stream.finish();
    }

    pub(super) fn reset(&mut self, code: StreamCode) {
        let _ = self.stream.reset(code.to_wire());
    }

    pub(super) fn stream(&self) -> &SendStream {
        &self.stream
    }

    /// Resolves once the stream is no longer read: the peer has left it, the connection is lost, or everything has
    /// arrived.
    pub(super) fn unread(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.stream.stopped();
        async move {
            let _ = stopped.await;
        }
    }

    /// Continues with frames of another type.
    pub(super) fn retyped<U: Serialize>(self, cap: Cap) -> FrameWriter<U> {
        FrameWriter { stream: self.stream, cap, buffer: self.buffer, item: PhantomData }
    }
}

/// Reads frames that hold one `T` each.
#[derive(Debug)]
pub(super) struct FrameReader<T> {
    stream: RecvStream,
    cap: Cap,
    buffer: BytesMut,
    item: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> FrameReader<T> {
    pub(super) fn new(stream: RecvStream, cap: Cap) -> Self {
        Self { stream, cap, buffer: BytesMut::new(), item: PhantomData }
    }

    /// Returns the next frame, or `None` at a clean end. Cancel-safe. A frame that does not decode is
    /// consumed, so the caller may continue after an unknown variant.
    pub(super) async fn next(&mut self) -> Result<Option<T>, Error> {
        let Some(len) = self.next_frame().await? else { return Ok(None) };
        let decoded = codec::decode(self.buffer.get(..len).unwrap_or_default(), self.cap);
        self.buffer.advance(len);
        Ok(Some(decoded?))
    }

    /// Returns the bytes of the next frame, or `None` at a clean end. Cancel-safe.
    pub(super) async fn next_bytes(&mut self) -> Result<Option<Bytes>, Error> {
        Ok(self.next_frame().await?.map(|len| self.buffer.split_to(len).freeze()))
    }

    /// Returns the length of the next frame, or `None` at a clean end. The buffer then begins with the
    /// whole frame. The caller must remove it before the next await.
    async fn next_frame(&mut self) -> Result<Option<usize>, Error> {
        if !self.fill(LENGTH_BYTES).await? {
            return Ok(None);
        }
        let Some(head) = self.buffer.first_chunk::<LENGTH_BYTES>() else {
            return Err(Error::StreamCut { what: "frame length" });
        };
        let len = u32::from_be_bytes(*head) as usize;
        if len > self.cap.bytes() {
            let message = std::any::type_name::<T>();
            return Err(CodecError::TooLong { message, len, cap: self.cap.bytes() }.into());
        }
        self.fill(LENGTH_BYTES + len).await?;
        self.buffer.advance(LENGTH_BYTES);
        Ok(Some(len))
    }

    /// Reads exactly `len` raw bytes and appends them to `out` as they arrive.
    pub(super) async fn read_raw(&mut self, len: usize, out: &mut Vec<u8>) -> Result<(), Error> {
        let mut missing = len;
        while missing > 0 {
            if self.buffer.is_empty() && !self.fill(1).await? {
                return Err(Error::StreamCut { what: "raw bytes" });
            }
            let part = self.buffer.split_to(self.buffer.len().min(missing));
            out.extend_from_slice(&part);
            missing -= part.len();
        }
        Ok(())
    }

    /// Reads exactly `len` raw bytes and passes them to `sink` as they arrive. Only bytes that arrived with
    /// the previous frame are copied.
    pub(super) async fn read_raw_with(
        &mut self,
        len: usize,
        sink: &mut (dyn FnMut(&[u8]) + Send),
    ) -> Result<(), Error> {
        let part = self.buffer.split_to(self.buffer.len().min(len));
        sink(&part);
        let mut missing = len - part.len();
        while missing > 0 {
            let chunk = self.stream.read_chunk(missing, true).await.map_err(read_error)?;
            let chunk = chunk.ok_or(Error::StreamCut { what: "raw bytes" })?;
            sink(&chunk.bytes);
            missing -= chunk.bytes.len();
        }
        Ok(())
    }

    /// Returns at least one and at most `max` raw bytes without a copy. `max` must not be 0.
    pub(super) async fn read_some(&mut self, max: usize) -> Result<Bytes, Error> {
        if !self.buffer.is_empty() {
            return Ok(self.buffer.split_to(self.buffer.len().min(max)).freeze());
        }
        let chunk = self.stream.read_chunk(max, true).await.map_err(read_error)?;
        chunk.map(|chunk| chunk.bytes).ok_or(Error::StreamCut { what: "raw bytes" })
    }

    /// Reads until `len` bytes are buffered. Returns `false` if the stream ends before the first byte. The
    /// buffer grows with the received bytes, never with a claimed length.
    async fn fill(&mut self, len: usize) -> Result<bool, Error> {
        while self.buffer.len() < len {
            match self.stream.read_chunk(READ_BYTES, true).await.map_err(read_error)? {
                Some(chunk) => self.buffer.extend_from_slice(&chunk.bytes),
                None if self.buffer.is_empty() => return Ok(false),
                None => return Err(Error::StreamCut { what: "end inside a frame" }),
            }
        }
        Ok(true)
    }

    /// Reads the end of the stream if it has arrived, when no more frames are expected. Dropping a stream
    /// before its end was read would send a stop to the peer, which is a wasted packet if the peer has
    /// finished.
    pub(super) fn take_end(&mut self) {
        if self.buffer.is_empty() {
            // Any further data is ignored.
            let _ = self.stream.read_chunk(1, true).now_or_never();
        }
    }

    /// Continues with frames of another type.
    pub(super) fn retyped<U: DeserializeOwned>(self, cap: Cap) -> FrameReader<U> {
        FrameReader { stream: self.stream, cap, buffer: self.buffer, item: PhantomData }
    }

    pub(super) fn stop(&mut self, code: StreamCode) {
        // Fails only if the stream is already at its end.
        let _ = self.stream.stop(code.to_wire());
    }
}

/// Sends the only request on a stream and returns the reader of its reply.
pub(super) async fn ask<R: Serialize, A: DeserializeOwned>(
    send: SendStream,
    receive: RecvStream,
    cap: Cap,
    request: &R,
) -> Result<FrameReader<A>, Error> {
    let mut writer = FrameWriter::new(send, cap);
    writer.write(request).await?;
    writer.finish();
    Ok(FrameReader::new(receive, Cap::Stream))
}

/// Reads the only request on a stream and returns it with the writer of its reply. A request that does not
/// decode ends the stream in both directions.
pub(super) async fn read_request<R: DeserializeOwned, A: Serialize>(
    send: SendStream,
    receive: RecvStream,
    what: &'static str,
) -> Result<(R, FrameWriter<A>), Error> {
    next_request(send, FrameReader::new(receive, Cap::GenerateRequest), what).await
}

/// Like [`read_request`], after other frames may have been read.
pub(super) async fn next_request<R: DeserializeOwned, A: Serialize>(
    send: SendStream,
    mut requests: FrameReader<R>,
    what: &'static str,
) -> Result<(R, FrameWriter<A>), Error> {
    let mut answer = FrameWriter::new(send, Cap::Stream);
    match requests.next().await {
        Ok(Some(request)) => {
            requests.take_end();
            Ok((request, answer))
        }
        Ok(None) => Err(Error::StreamCut { what }),
        Err(error) => {
            answer.reset(StreamCode::Malformed);
            requests.stop(StreamCode::Malformed);
            Err(error)
        }
    }
}
