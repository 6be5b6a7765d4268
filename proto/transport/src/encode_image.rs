//! One image to encode on one stream. The file goes to the encoder; frames and the values as raw bytes come back.

use super::streams::{FrameReader, FrameWriter, ask, next_request};
use crate::Error;
use proto::codec::Cap;
use proto::message::image_encoder::{EncodeImage, EncodeImageFrame, EncodeImageRefusal, EncodedImageHead};
use quinn::{RecvStream, SendStream};

const VALUE_BYTES: usize = size_of::<f32>();
/// Values that are converted and sent at once.
const PIECE_VALUES: usize = 1 << 16;

/// Asker's end. Dropping it before the last value tells the encoder that nothing more is needed.
#[derive(Debug)]
pub struct EncodeImageStream {
    frames: FrameReader<EncodeImageFrame>,
}

impl EncodeImageStream {
    pub(super) async fn start(
        send: SendStream,
        receive: RecvStream,
        image: &EncodeImage,
    ) -> Result<Self, Error> {
        Ok(Self { frames: ask(send, receive, Cap::Images, image).await? })
    }

    /// Returns the next frame. Cancel-safe.
    pub async fn next(&mut self) -> Result<EncodeImageFrame, Error> {
        self.frames.next().await?.ok_or(Error::StreamCut { what: "the answer of an image encoder" })
    }

    /// Appends the next values of a list that is to have `values`, after [`EncodeImageFrame::Encoded`]. Returns whether
    /// it is complete.
    pub async fn values(&mut self, values: usize, list: &mut Vec<f32>) -> Result<bool, Error> {
        let count = values.saturating_sub(list.len()).min(PIECE_VALUES);
        let mut bytes = Vec::with_capacity(count * VALUE_BYTES);
        self.frames.read_raw(count * VALUE_BYTES, &mut bytes).await?;
        list.extend(bytes.as_chunks::<VALUE_BYTES>().0.iter().map(|value| f32::from_le_bytes(*value)));
        Ok(list.len() >= values)
    }
}

/// Encoder's end: the image, and the sender of the reply.
#[derive(Debug)]
pub struct EncodeImageCall {
    pub image: EncodeImage,
    pub reply: EncodeImageReply,
}

impl EncodeImageCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let reader = FrameReader::new(receive, Cap::Images);
        let (image, frames) = next_request(send, reader, "an image to encode").await?;
        Ok(Self { image, reply: EncodeImageReply { frames } })
    }
}

/// Sends the encoder's reply. If it is dropped before the end, the asker sees a stream that was cut off.
#[derive(Debug)]
pub struct EncodeImageReply {
    frames: FrameWriter<EncodeImageFrame>,
}

impl EncodeImageReply {
    /// Tells the asker that the image is not encoded yet.
    pub async fn working(&mut self) -> Result<(), Error> {
        self.frames.write(&EncodeImageFrame::Working).await
    }

    /// Sends the lists of values, and waits until they have arrived. Fails with [`Error::StreamEnded`] once the asker
    /// needs them no more.
    pub async fn send(mut self, head: EncodedImageHead, lists: &[&[f32]]) -> Result<(), Error> {
        let fits = |(values, count)| count == lists.len() && lists.iter().all(|list| list.len() == values);
        if !head.lists().is_some_and(fits) {
            return Err(Error::Protocol(
                "the lists of an encoded image have other lengths than its head says",
            ));
        }
        self.frames.write(&EncodeImageFrame::Encoded(head)).await?;
        for piece in lists.iter().flat_map(|list| list.chunks(PIECE_VALUES)) {
            let bytes: Vec<u8> = piece.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.frames.write_raw(&bytes).await?;
        }
        let arrived = self.frames.stream().stopped();
        self.frames.finish();
        // An error means that the asker no longer reads, so it needs no values.
        let _ = arrived.await;
        Ok(())
    }

    /// Sends the reason why nothing follows.
    pub async fn fail(mut self, refusal: EncodeImageRefusal) -> Result<(), Error> {
        self.frames.write(&EncodeImageFrame::Failed(refusal)).await?;
        self.frames.finish();
        Ok(())
    }

    /// Resolves once the stream is no longer read: the asker has left, the connection is lost, or everything has
    /// arrived.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        self.frames.unread()
    }
}
