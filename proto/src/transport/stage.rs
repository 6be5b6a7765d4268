//! Streams between the stages of a replica: control, both ways, and activations, one way.

use super::driver::{Driver, Handover};
use super::streams::{FrameReader, FrameWriter, StreamCode};
use crate::Error;
use crate::codec::Cap;
use crate::stage::{StageFeed, StageFrame, StageOrder, StageReport};
use bytes::Bytes;
use quinn::{RecvStream, SendStream};
use std::sync::Arc;

mod blocks;

pub use blocks::{StageBlocks, StageBlocksCall};

/// The first stage's end of a control stream.
#[derive(Debug)]
pub struct StageControl {
    pub orders: StageOrders,
    pub reports: StageReports,
}

impl StageControl {
    pub(super) fn new(send: SendStream, receive: RecvStream) -> Self {
        Self {
            orders: StageOrders { frames: FrameWriter::new(send, Cap::Stream) },
            reports: StageReports { frames: FrameReader::new(receive, Cap::Stream) },
        }
    }
}

/// Sends orders to a stage. Dropping it tells the stage that the replica is no more.
#[derive(Debug)]
pub struct StageOrders {
    frames: FrameWriter<StageOrder>,
}

impl StageOrders {
    pub async fn send(&mut self, order: &StageOrder) -> Result<(), Error> {
        self.frames.write(order).await
    }
}

#[derive(Debug)]
pub struct StageReports {
    frames: FrameReader<StageReport>,
}

impl StageReports {
    /// The next report; [`Error::StageFailed`] is the stage's own word too.
    pub async fn next(&mut self) -> Result<StageReport, Error> {
        match self.frames.next().await?.ok_or(Error::StreamCut { what: "a stage's reports" })? {
            StageReport::Failed(failure) => Err(Error::StageFailed(failure)),
            report => Ok(report),
        }
    }

    /// One row of `width` values that follow [`StageReport::Drawn`].
    pub async fn row(&mut self, width: usize) -> Result<Vec<f32>, Error> {
        let mut bytes = Vec::new();
        let mut append = |part: &[u8]| bytes.extend_from_slice(part);
        self.frames.read_raw_with(width * size_of::<f32>(), &mut append).await?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

/// A stage's end of a control stream.
#[derive(Debug)]
pub struct StageCall {
    pub orders: StageOrderReceiver,
    pub reporter: StageReporter,
}

impl StageCall {
    pub(super) fn new(send: SendStream, receive: RecvStream, driver: &Arc<Driver>) -> Self {
        Self {
            orders: StageOrderReceiver { frames: FrameReader::new(receive, Cap::Stream) },
            reporter: StageReporter {
                frames: FrameWriter::new(send, Cap::Stream),
                handover: Handover::new(driver),
            },
        }
    }
}

/// Receives the first stage's orders.
#[derive(Debug)]
pub struct StageOrderReceiver {
    frames: FrameReader<StageOrder>,
}

impl StageOrderReceiver {
    /// The next order; an error when the first stage is gone, or sends no more. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<StageOrder, Error> {
        self.frames.next().await?.ok_or(Error::StreamCut { what: "the first stage's orders" })
    }
}

#[derive(Debug)]
pub struct StageReporter {
    frames: FrameWriter<StageReport>,
    handover: Handover,
}

impl StageReporter {
    /// Has what is written sent at once.
    pub fn handover(&self) -> Handover {
        self.handover.clone()
    }

    /// Sends a report and the rows, f32 little endian, of which it says that they follow; no others may. When the
    /// future is dropped halfway the stream is unusable.
    pub async fn send(&mut self, report: &StageReport, rows: Vec<u8>) -> Result<(), Error> {
        self.frames.write_with(report, Bytes::from(rows)).await.map(drop)
    }

    /// Says that nothing follows, and waits until the first stage has it, or is gone.
    pub async fn finish(&mut self) {
        self.frames.finish();
        let _ = self.frames.stream().stopped().await;
    }
}

/// Sends steps and activations to the next stage.
#[derive(Debug)]
pub struct ActivationSender {
    frames: FrameWriter<StageFrame>,
    handover: Handover,
}

impl ActivationSender {
    pub(super) async fn start(
        send: SendStream,
        driver: &Arc<Driver>,
        feed: &StageFeed,
    ) -> Result<Self, Error> {
        let mut head = FrameWriter::new(send, Cap::Stream);
        head.write(feed).await?;
        Ok(Self { frames: head.retyped(Cap::Control), handover: Handover::new(driver) })
    }

    /// Has what is written sent at once.
    pub fn handover(&self) -> Handover {
        self.handover.clone()
    }

    /// Sends a step and the residual stream of its rows at once. Returns how many bytes that is.
    pub async fn send(&mut self, step: &StageFrame, activations: Vec<u8>) -> Result<usize, Error> {
        self.frames.write_with(step, Bytes::from(activations)).await
    }

    /// Resolves once the stage reads no more.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.frames.stream().stopped();
        async move {
            let _ = stopped.await;
        }
    }
}

/// Receives steps and activations of the stage before.
#[derive(Debug)]
pub struct ActivationReceiver {
    pub feed: StageFeed,
    frames: FrameReader<StageFrame>,
}

impl ActivationReceiver {
    pub(super) async fn read(receive: RecvStream) -> Result<Self, Error> {
        let mut head = FrameReader::new(receive, Cap::Stream);
        match head.next().await {
            Ok(Some(feed)) => Ok(Self { feed, frames: head.retyped(Cap::Control) }),
            Ok(None) => Err(Error::StreamCut { what: "the head of activations" }),
            Err(error) => {
                head.stop(StreamCode::Malformed);
                Err(error)
            }
        }
    }

    /// The next step; its activations, `row_bytes` for each of its rows, of which there must be at most `max_rows`, go
    /// to `sink` piece by piece as they arrive. `None` at a clean end. A future that is dropped loses nothing before
    /// `sink` is called, and the step afterwards.
    pub async fn next(
        &mut self,
        row_bytes: usize,
        max_rows: usize,
        sink: &mut (dyn FnMut(&[u8]) + Send),
    ) -> Result<Option<StageFrame>, Error> {
        let Some(step) = self.frames.next().await? else { return Ok(None) };
        let rows = step.rows();
        if rows > max_rows {
            return Err(Error::Protocol("a step of more rows than were agreed on"));
        }
        self.frames.read_raw_with(rows * row_bytes, sink).await?;
        Ok(Some(step))
    }
}
