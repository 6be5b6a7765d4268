//! Streams between the stages of a replica: control (bidirectional) and activations (unidirectional).

use super::driver::{Driver, Handover};
use super::streams::{FrameReader, FrameWriter, StreamCode};
use crate::Error;
use bytes::Bytes;
use proto::codec::Cap;
use proto::stage::{StageFeed, StageFrame, StageOrder, StageReport};
use quinn::{RecvStream, SendStream};
use std::sync::Arc;

mod blocks;

pub use blocks::{StageBlocks, StageBlocksCall};

/// First stage's end of a control stream.
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

/// Sends orders to a stage. Dropping it ends the replica for that stage.
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
    /// Returns the next report. A report of failure becomes [`Error::StageFailed`].
    pub async fn next(&mut self) -> Result<StageReport, Error> {
        match self.frames.next().await?.ok_or(Error::StreamCut { what: "a stage's reports" })? {
            StageReport::Failed(failure) => Err(Error::StageFailed(failure)),
            report => Ok(report),
        }
    }

    /// Reads one row of `width` values that follows [`StageReport::Drawn`].
    pub async fn row(&mut self, width: usize) -> Result<Vec<f32>, Error> {
        let mut bytes = Vec::new();
        let mut append = |part: &[u8]| bytes.extend_from_slice(part);
        self.frames.read_raw_with(width * size_of::<f32>(), &mut append).await?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

/// Stage's end of a control stream.
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
    /// Returns the next order. Fails if the first stage is lost or has closed the stream. Cancel-safe.
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
    /// Returns the handover that sends written data at once.
    pub fn handover(&self) -> Handover {
        self.handover.clone()
    }

    /// Sends a report and the rows that it announces, f32 little endian, and no others. If the future is
    /// dropped before it completes, the stream is unusable.
    pub async fn send(&mut self, report: &StageReport, rows: Vec<u8>) -> Result<(), Error> {
        self.frames.write_with(report, Bytes::from(rows)).await.map(drop)
    }

    /// Closes the stream and waits until the first stage has received everything, or is lost.
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

    /// Returns the handover that sends written data at once.
    pub fn handover(&self) -> Handover {
        self.handover.clone()
    }

    /// Sends a step and the residual stream of its rows in one write. Returns the number of bytes.
    pub async fn send(&mut self, step: &StageFrame, activations: Vec<u8>) -> Result<usize, Error> {
        self.frames.write_with(step, Bytes::from(activations)).await
    }

    /// Resolves once the stage stops reading.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        self.frames.unread()
    }
}

/// Receives steps and activations from the previous stage.
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

    /// Returns the next step, or `None` at a clean end. Passes its activations, `row_bytes` for each row,
    /// to `sink` in pieces as they arrive. Fails if the step has more than `max_rows` rows. Cancel-safe
    /// until `sink` is called for the first time; after that, dropping the future loses the step.
    pub async fn next(
        &mut self,
        row_bytes: usize,
        max_rows: usize,
        sink: &mut (dyn FnMut(&[u8]) + Send),
    ) -> Result<Option<StageFrame>, Error> {
        let Some(step) = self.frames.next().await? else { return Ok(None) };
        let rows = step.rows();
        if rows > max_rows {
            return Err(Error::Protocol("a step has more rows than the agreed maximum"));
        }
        self.frames.read_raw_with(rows * row_bytes, sink).await?;
        Ok(Some(step))
    }
}
