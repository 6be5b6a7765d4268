//! One call to encode texts on one stream. The request goes to the worker; a head frame and then the values
//! as raw bytes come back.

use super::streams::{FrameWriter, ask, read_request};
use crate::Error;
use proto::codec::Cap;
use proto::message::{EncodeReply, EncodeRequest, EncodedHead, GenerateError, MAX_ENCODED_WIDTH};
use quinn::{RecvStream, SendStream};

const VALUE_BYTES: usize = size_of::<f32>();

pub(super) async fn call(
    send: SendStream,
    receive: RecvStream,
    request: &EncodeRequest,
) -> Result<Result<Vec<Vec<f32>>, GenerateError>, Error> {
    let mut frames = ask(send, receive, Cap::GenerateRequest, request).await?;
    match frames.next().await?.ok_or(Error::StreamCut { what: "the answer to an encode call" })? {
        EncodeReply::Failed(error) => Ok(Err(error)),
        EncodeReply::Encoded(EncodedHead { texts, width }) => {
            if texts as usize != request.texts.len() || !(1..=MAX_ENCODED_WIDTH).contains(&width) {
                return Err(Error::Protocol("an encode call's answer does not match its request"));
            }
            let mut encoded = Vec::with_capacity(request.texts.len());
            let mut bytes = Vec::new();
            for _ in 0..texts {
                bytes.clear();
                frames.read_raw(width as usize * VALUE_BYTES, &mut bytes).await?;
                let (values, _) = bytes.as_chunks::<VALUE_BYTES>();
                encoded.push(values.iter().map(|value| f32::from_le_bytes(*value)).collect());
            }
            Ok(Ok(encoded))
        }
    }
}

/// Worker's end: the texts, and the replier for their values.
#[derive(Debug)]
pub struct EncodeCall {
    pub request: EncodeRequest,
    pub reply: EncodeReplier,
}

impl EncodeCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let (request, frames) = read_request(send, receive, "an encode call's request").await?;
        Ok(Self { request, reply: EncodeReplier { frames } })
    }
}

/// Sends the worker's single reply. If it is dropped before, the coordinator sees a stream that was cut
/// off.
#[derive(Debug)]
pub struct EncodeReplier {
    frames: FrameWriter<EncodeReply>,
}

impl EncodeReplier {
    /// Sends the values of all texts in the request's order, all of equal length, and waits until they have
    /// arrived. Fails with [`Error::StreamEnded`] once the coordinator has cancelled.
    pub async fn send(mut self, encoded: &[Vec<f32>]) -> Result<(), Error> {
        let width = encoded.first().map_or(0, Vec::len);
        if encoded.iter().any(|values| values.len() != width) {
            return Err(Error::Protocol("encoded texts differ in width"));
        }
        let head = EncodedHead {
            texts: u32::try_from(encoded.len()).unwrap_or(u32::MAX),
            width: u32::try_from(width).unwrap_or(u32::MAX),
        };
        self.frames.write(&EncodeReply::Encoded(head)).await?;
        for values in encoded {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.frames.write_raw(&bytes).await?;
        }
        let arrived = self.frames.stream().stopped();
        self.frames.finish();
        // An error means that the coordinator no longer reads, so it needs no values.
        let _ = arrived.await;
        Ok(())
    }

    /// Sends an error in place of the values.
    pub async fn fail(mut self, error: GenerateError) -> Result<(), Error> {
        self.frames.write(&EncodeReply::Failed(error)).await?;
        self.frames.finish();
        Ok(())
    }

    /// Resolves once the stream is no longer read: the coordinator has cancelled or the connection is lost.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        self.frames.unread()
    }
}
