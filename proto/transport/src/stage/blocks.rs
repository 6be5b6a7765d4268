//! Stream on which the first stage of a replica reads and writes the cache blocks of another stage.

use crate::Error;
use crate::streams::{FrameReader, FrameWriter, StreamCode};
use bytes::Bytes;
use proto::codec::Cap;
use proto::stage::StageFeed;
use proto::stage::blocks::{StageBlocksOrder, StageBlocksReport};
use quinn::{RecvStream, SendStream};

/// First stage's end. It is unusable after one of its futures was dropped before it completed.
#[derive(Debug)]
pub struct StageBlocks {
    orders: FrameWriter<StageBlocksOrder>,
    reports: FrameReader<StageBlocksReport>,
}

impl StageBlocks {
    pub(crate) async fn start(
        send: SendStream,
        receive: RecvStream,
        feed: &StageFeed,
    ) -> Result<Self, Error> {
        let mut head = FrameWriter::new(send, Cap::Stream);
        head.write(feed).await?;
        Ok(Self { orders: head.retyped(Cap::Control), reports: FrameReader::new(receive, Cap::Control) })
    }

    /// Sends an order and the bytes that belong to it.
    pub async fn order(&mut self, order: &StageBlocksOrder, bytes: Vec<u8>) -> Result<(), Error> {
        self.orders.write_with(order, Bytes::from(bytes)).await.map(drop)
    }

    /// Returns the report of the oldest order without a report.
    pub async fn report(&mut self) -> Result<StageBlocksReport, Error> {
        self.reports.next().await?.ok_or(Error::StreamCut { what: "a stage's blocks" })
    }

    /// Reads `len` of the bytes that follow a report.
    pub async fn bytes(&mut self, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.reports.read_raw_with(len, &mut |part| bytes.extend_from_slice(part)).await?;
        Ok(bytes)
    }
}

#[derive(Debug)]
pub struct StageBlocksCall {
    pub feed: StageFeed,
    orders: FrameReader<StageBlocksOrder>,
    reports: FrameWriter<StageBlocksReport>,
}

impl StageBlocksCall {
    pub(crate) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let mut head = FrameReader::new(receive, Cap::Stream);
        match head.next().await {
            Ok(Some(feed)) => {
                let reports = FrameWriter::new(send, Cap::Control);
                Ok(Self { feed, orders: head.retyped(Cap::Control), reports })
            }
            Ok(None) => Err(Error::StreamCut { what: "the head of a stream of blocks" }),
            Err(error) => {
                head.stop(StreamCode::Malformed);
                Err(error)
            }
        }
    }

    /// Returns the next order, or `None` at a clean end.
    pub async fn next(&mut self) -> Result<Option<StageBlocksOrder>, Error> {
        self.orders.next().await
    }

    /// Reads the `len` bytes that follow an order. The caller knows the length from the order.
    pub async fn bytes(&mut self, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.orders.read_raw_with(len, &mut |part| bytes.extend_from_slice(part)).await?;
        Ok(bytes)
    }

    /// Sends the report of the oldest order without a report.
    pub async fn report(&mut self, report: &StageBlocksReport, bytes: Vec<u8>) -> Result<(), Error> {
        self.reports.write_with(report, Bytes::from(bytes)).await.map(drop)
    }
}
