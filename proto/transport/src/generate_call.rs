//! One generation on one stream, the worker's end.

use super::prefixes::KeptPrefixes;
use super::streams::{FrameReader, FrameWriter, StreamCode, next_request, read_request};
use crate::Error;
use proto::codec::Cap;
use proto::message::image_encoder::ImageEncoders;
use proto::message::{GenerateFrame, GenerateRequest, PrefixNote, PromptImages, PromptLogprobs};
use quinn::{RecvStream, SendStream};

const WHAT: &str = "a generation's request";

/// Whether no frame follows.
pub(super) fn is_last(frame: &GenerateFrame) -> bool {
    match frame {
        GenerateFrame::Finished(_) | GenerateFrame::Failed(_) => true,
        GenerateFrame::Started(_) | GenerateFrame::Tokens(_) | GenerateFrame::Prompt(_) => false,
    }
}

/// Worker's end: a request, and the sender for its frames.
#[derive(Debug)]
pub struct GenerateCall {
    pub request: GenerateRequest,
    pub reply: GenerateReply,
}

impl GenerateCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let (request, frames) = read_request(send, receive, WHAT).await?;
        Ok(Self { request, reply: GenerateReply { frames, finished: false } })
    }

    /// Like [`read`](Self::read), for a prompt that may begin with a numbered prefix of an earlier one.
    pub(super) async fn read_after(
        send: SendStream,
        receive: RecvStream,
        kept: &KeptPrefixes,
    ) -> Result<Self, Error> {
        let (note, rest) = read_note(receive).await?;
        Self::read_noted(send, rest.retyped(Cap::GenerateRequest), note, kept).await
    }

    /// Like [`read_after`](Self::read_after), for a prompt with images, and with `encoders` for those with the workers
    /// that encode them.
    pub(super) async fn read_with_images(
        (send, receive): (SendStream, RecvStream),
        encoders: bool,
        kept: &KeptPrefixes,
    ) -> Result<Self, Error> {
        let (note, rest) = read_note(receive).await?;
        let mut frames = rest.retyped::<ImageEncoders>(Cap::Stream);
        let ImageEncoders(sources) = match encoders {
            true => frames.next().await?.ok_or(Error::StreamCut { what: WHAT })?,
            false => ImageEncoders::default(),
        };
        let mut images = frames.retyped::<PromptImages>(Cap::Images);
        let PromptImages(prompt_images) = images.next().await?.ok_or(Error::StreamCut { what: WHAT })?;
        let mut call = Self::read_noted(send, images.retyped(Cap::GenerateRequest), note, kept).await?;
        (call.request.images, call.request.encoders) = (prompt_images, sources);
        Ok(call)
    }

    /// Like [`read_after`](Self::read_after), for a request for the log-probabilities of its prompt.
    pub(super) async fn read_with_prompt_logprobs(
        send: SendStream,
        receive: RecvStream,
        kept: &KeptPrefixes,
    ) -> Result<Self, Error> {
        let (note, rest) = read_note(receive).await?;
        let mut frames = rest.retyped::<PromptLogprobs>(Cap::Stream);
        let logprobs = frames.next().await?.ok_or(Error::StreamCut { what: WHAT })?;
        let mut call = Self::read_noted(send, frames.retyped(Cap::GenerateRequest), note, kept).await?;
        call.request.prompt_logprobs = Some(logprobs);
        Ok(call)
    }

    async fn read_noted(
        send: SendStream,
        requests: FrameReader<GenerateRequest>,
        PrefixNote { after, keep }: PrefixNote,
        kept: &KeptPrefixes,
    ) -> Result<Self, Error> {
        let (mut request, mut frames) = next_request(send, requests, WHAT).await?;
        if let Some(after) = after {
            let Some(whole) = kept.whole(after, &request.prompt) else {
                frames.reset(StreamCode::UnknownPrefix);
                return Err(Error::Protocol(
                    "a prompt begins with a numbered prefix that is not known any more",
                ));
            };
            request.prompt = whole;
        }
        keep.into_iter().for_each(|keep| kept.keep(keep, &request.prompt));
        Ok(Self { request, reply: GenerateReply { frames, finished: false } })
    }
}

/// Reads the note that a stream begins with. Frames of other types follow.
async fn read_note(receive: RecvStream) -> Result<(PrefixNote, FrameReader<PrefixNote>), Error> {
    let mut notes = FrameReader::new(receive, Cap::GenerateRequest);
    let note = notes.next().await?.ok_or(Error::StreamCut { what: WHAT })?;
    Ok((note, notes))
}

/// Sends the frames of one generation. If it is dropped before the last frame, the coordinator sees a
/// stream that was cut off.
#[derive(Debug)]
pub struct GenerateReply {
    frames: FrameWriter<GenerateFrame>,
    finished: bool,
}

impl GenerateReply {
    /// Sends a frame. Waits while the coordinator reads more slowly. Fails with [`Error::StreamEnded`] once
    /// the coordinator has cancelled. The last frame of a generation also finishes the stream. If the
    /// future is dropped before it completes, the stream is unusable.
    pub async fn send(&mut self, frame: &GenerateFrame) -> Result<(), Error> {
        self.frames.write(frame).await?;
        if is_last(frame) {
            self.frames.finish();
            self.finished = true;
        }
        Ok(())
    }

    /// Whether the last frame was sent. It may still be in transit.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Resolves once the stream is no longer read: the coordinator has cancelled, the connection is lost, or
    /// everything up to the last frame has arrived.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        self.frames.unread()
    }
}
