//! Blocks of a replica, as the first stage reads and writes them. Each stage has the part of a block that
//! belongs to its layers. The parts concatenated in the order of the layers are the block of a worker with
//! all layers, so snapshots, tiers and KV transfers do not depend on the layer ranges.
//!
//! Orders go to all stages at once, a few MiB at a time, and the caller waits for all of them. A stage that
//! fails or exceeds its time limit is lost. It may still execute the order later, so no step may be computed
//! afterwards.

use engine::Error;
use engine::decoder::{Blocks, LayerState};
use engine::executor::LostStage;
use engine::kv_cache::Slabs;
use futures::future::try_join_all;
use proto::stage::blocks::{MAX_BLOCKS, StageBlock, StageBlocksOrder, StageBlocksReport, StageLayerState};
use std::time::Duration;
use tokio::runtime::Handle;
use transport::StageBlocks;

/// Maximum bytes that one order moves, summed over all stages, not counting its last block.
const SLICE_BYTES: usize = 4 << 20;
/// Minimum bytes per second of a link between stages. Extends the time limit for long blocks.
const MIN_RATE: f64 = (16 << 20) as f64;

#[derive(Debug)]
pub(super) struct RemoteBlocks {
    runtime: Handle,
    /// Layout of the scheduler's cache.
    blocks: Slabs,
    /// Layout of the first stage's own arena.
    own: Slabs,
    state_group: Option<usize>,
    /// Bytes of a block's part, by stage and group. The first stage is included.
    bytes: Vec<Vec<usize>>,
    /// Links to the later stages.
    links: Vec<StageBlocks>,
    /// The last step whose accepted rows were sent to the stages, and the last one that a block order was
    /// made to wait for.
    counted: (u64, u64),
    lost: Option<Lost>,
}

/// A stage that failed to execute an order.
#[derive(Debug)]
struct Lost {
    stage: usize,
    /// The error, until it is reported once.
    error: Option<transport::Error>,
}

impl RemoteBlocks {
    pub(super) fn new(
        runtime: Handle,
        (blocks, own): (Slabs, Slabs),
        state_group: Option<usize>,
        bytes: Vec<Vec<usize>>,
        links: Vec<StageBlocks>,
    ) -> Self {
        Self { runtime, blocks, own, state_group, bytes, links, counted: (0, 0), lost: None }
    }

    /// Records that the accepted rows of `step` were sent to all stages on the stream of the steps. Later
    /// orders wait until a stage has applied them.
    pub(super) fn counted(&mut self, step: u64) {
        self.counted.0 = step;
    }

    /// Whether the next order must wait for accepted rows that the stages may not have applied yet.
    pub(super) fn waits(&self) -> bool {
        self.counted.0 > self.counted.1
    }

    /// Whether a stage is lost. No step may be computed then.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    pub(super) fn take_lost(&mut self) -> Option<LostStage> {
        let Lost { stage, error } = self.lost.as_mut()?;
        let source = error.take().unwrap_or(transport::Error::Protocol("the stage was lost earlier"));
        Some(LostStage { stage: *stage, source })
    }

    /// Bytes of a block, summed over all parts.
    pub(super) fn block_bytes(&self, group: usize) -> usize {
        self.bytes.iter().filter_map(|stage| stage.get(group)).sum()
    }

    /// Reads blocks, named by group and offset in the scheduler's cache.
    pub(super) fn read(
        &mut self,
        mut first: Blocks<'_>,
        blocks: &[(usize, u32)],
        limit: Duration,
    ) -> Result<Vec<Vec<u8>>, Error> {
        self.check_not_lost()?;
        let mut pieces = Vec::with_capacity(blocks.len());
        for slice in self.slices(blocks, |block| block.0) {
            let order = StageBlocksOrder::Read(self.numbers(slice.iter().copied())?);
            let limit = limit.saturating_add(self.travel(slice.iter().map(|block| block.0)));
            self.send_order(|_| (&order, Vec::new()), limit)?;
            let from = pieces.len();
            for &(group, offset) in slice {
                let mut piece = first.read(group, self.own_offset(group, offset)?)?;
                piece.reserve_exact(self.block_bytes(group).saturating_sub(piece.len()));
                pieces.push(piece);
            }
            for stage in 1..self.bytes.len() {
                let lengths: Vec<usize> = slice.iter().map(|(group, _)| self.bytes[stage][*group]).collect();
                let all: usize = lengths.iter().sum();
                let bytes = self.receive(stage, limit, async |link| match link.report().await? {
                    StageBlocksReport::Read(bytes) if bytes == all as u64 => link.bytes(all).await,
                    other => Err(refused(other)),
                })?;
                let mut left = bytes.as_slice();
                for (piece, length) in pieces.iter_mut().skip(from).zip(lengths) {
                    // `bytes` is as long as all parts together.
                    let Some((part, behind)) = left.split_at_checked(length) else { break };
                    piece.extend_from_slice(part);
                    left = behind;
                }
            }
        }
        Ok(pieces)
    }

    /// Writes blocks with bytes that [`RemoteBlocks::read`] returned, here or on another worker.
    pub(super) fn write(
        &mut self,
        mut first: Blocks<'_>,
        pieces: &[(usize, u32, &[u8])],
        limit: Duration,
    ) -> Result<(), Error> {
        self.check_not_lost()?;
        if let Some((group, _, bytes)) =
            pieces.iter().find(|piece| piece.2.len() != self.block_bytes(piece.0))
        {
            return Err(Error::Invariant(format!("{} bytes for a block of group {group}", bytes.len())));
        }
        for slice in self.slices(pieces, |piece| piece.0) {
            let blocks = slice.iter().map(|(group, offset, _)| (*group, *offset));
            let order = StageBlocksOrder::Write(self.numbers(blocks)?);
            let limit = limit.saturating_add(self.travel(slice.iter().map(|piece| piece.0)));
            let of_stage = |stage: usize| {
                let mut bytes = Vec::new();
                for (group, _, piece) in slice {
                    let before: usize = self.bytes[..stage].iter().map(|bytes| bytes[*group]).sum();
                    bytes.extend_from_slice(&piece[before..before + self.bytes[stage][*group]]);
                }
                bytes
            };
            let payloads: Vec<Vec<u8>> = (1..self.bytes.len()).map(of_stage).collect();
            let mut payloads = payloads.into_iter();
            self.send_order(|_| (&order, payloads.next().unwrap_or_default()), limit)?;
            for (group, offset, piece) in slice {
                first.write(*group, self.own_offset(*group, *offset)?, &piece[..self.bytes[0][*group]])?;
            }
            for stage in 1..self.bytes.len() {
                self.receive(stage, limit, async |link| match link.report().await? {
                    StageBlocksReport::Written => Ok(()),
                    other => Err(refused(other)),
                })?;
            }
        }
        Ok(())
    }

    /// Reads the recurrent states in a slot, in the order of the layers.
    pub(super) fn states(
        &mut self,
        mut first: Blocks<'_>,
        slot: u32,
        limit: Duration,
    ) -> Result<Vec<LayerState>, Error> {
        self.check_not_lost()?;
        let Some(group) = self.state_group else { return Ok(Vec::new()) };
        let limit = limit.saturating_add(self.travel(std::iter::once(group)));
        let order = StageBlocksOrder::States(self.number(group, slot)?);
        self.send_order(|_| (&order, Vec::new()), limit)?;
        let mut states = first.states(self.own_offset(group, slot)?)?;
        for stage in 1..self.bytes.len() {
            let downstream = self.receive(stage, limit, async |link| match link.report().await? {
                StageBlocksReport::States(shapes) => {
                    let mut states = Vec::with_capacity(shapes.len());
                    for shape in shapes {
                        states.push(state(link, shape).await?);
                    }
                    Ok(states)
                }
                other => Err(refused(other)),
            })?;
            states.extend(downstream);
        }
        Ok(states)
    }

    fn check_not_lost(&self) -> Result<(), Error> {
        match &self.lost {
            None => Ok(()),
            Some(lost) => Err(Error::StageStep { reason: format!("stage {} is lost", lost.stage) }),
        }
    }

    fn number(&self, group: usize, offset: u32) -> Result<u32, Error> {
        let lost = || Error::Invariant(format!("group {group} has no block at offset {offset}"));
        self.blocks.number(group, offset).ok_or_else(lost)
    }

    fn numbers(&self, blocks: impl Iterator<Item = (usize, u32)>) -> Result<Vec<StageBlock>, Error> {
        let numbered =
            |(group, offset)| Ok(StageBlock { group: group as u32, number: self.number(group, offset)? });
        blocks.map(numbered).collect()
    }

    fn own_offset(&self, group: usize, offset: u32) -> Result<u32, Error> {
        let lost = || Error::Invariant(format!("group {group} has no block at offset {offset}"));
        self.own.offset(group, self.number(group, offset)?).ok_or_else(lost)
    }

    /// Maximum travel time of one block of each of these groups, all stages together.
    fn travel(&self, groups: impl Iterator<Item = usize>) -> Duration {
        let bytes: usize = groups.map(|group| self.block_bytes(group)).sum();
        Duration::try_from_secs_f64(bytes as f64 / MIN_RATE).unwrap_or(Duration::MAX)
    }

    /// Splits blocks into orders of limited size.
    fn slices<'a, T>(&self, blocks: &'a [T], group: impl Fn(&T) -> usize) -> Vec<&'a [T]> {
        let (mut slices, mut rest) = (Vec::new(), blocks);
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = rest.iter().take(MAX_BLOCKS).take_while(|block| {
                let before = bytes;
                bytes += self.block_bytes(group(block));
                before < SLICE_BYTES
            });
            let (slice, behind) = rest.split_at(fits.count());
            slices.push(slice);
            rest = behind;
        }
        slices
    }

    /// Sends an order to all later stages, each with its own payload.
    fn send_order<'a>(
        &mut self,
        mut order: impl FnMut(usize) -> (&'a StageBlocksOrder, Vec<u8>),
        limit: Duration,
    ) -> Result<(), Error> {
        let behind = self.waits().then_some(StageBlocksOrder::Behind(self.counted.0));
        self.counted.1 = self.counted.0;
        let sends = (1..).zip(&mut self.links).map(|(stage, link)| {
            let ((order, bytes), behind) = (order(stage), &behind);
            let sent = async move {
                if let Some(behind) = behind {
                    link.order(behind, Vec::new()).await?;
                }
                link.order(order, bytes).await
            };
            async move { within(limit, sent).await.map_err(|error| (stage, error)) }
        });
        let sent = self.runtime.block_on(try_join_all(sends));
        sent.map(drop).map_err(|(stage, error)| self.lose(stage, error))
    }

    /// Receives a stage's response to the last order.
    fn receive<T>(
        &mut self,
        stage: usize,
        limit: Duration,
        answer: impl AsyncFnOnce(&mut StageBlocks) -> Result<T, transport::Error>,
    ) -> Result<T, Error> {
        let Some(link) = self.links.get_mut(stage - 1) else {
            return Err(Error::Invariant(format!("there is no stage {stage}")));
        };
        let received = self.runtime.block_on(within(limit, answer(link)));
        received.map_err(|error| self.lose(stage, error))
    }

    fn lose(&mut self, stage: usize, error: transport::Error) -> Error {
        let reason = format!("stage {stage} has not moved its part of blocks: {error}");
        self.lost = Some(Lost { stage, error: Some(error) });
        Error::StageStep { reason }
    }
}

async fn within<T>(
    limit: Duration,
    future: impl Future<Output = Result<T, transport::Error>>,
) -> Result<T, transport::Error> {
    let timed_out =
        |_| Err(transport::Error::Timeout { what: "moving blocks", limit_ms: limit.as_millis() as u64 });
    tokio::time::timeout(limit, future).await.unwrap_or_else(timed_out)
}

fn refused(report: StageBlocksReport) -> transport::Error {
    match report {
        StageBlocksReport::Failed(reason) => {
            transport::Error::StageFailed(proto::stage::StageFailure::Step { reason })
        }
        _ => transport::Error::Protocol("a stage reports something else of its blocks"),
    }
}

async fn state(link: &mut StageBlocks, shape: StageLayerState) -> Result<LayerState, transport::Error> {
    let conv_shape = shape.conv.map(|length| length as usize);
    let recurrent_shape = shape.recurrent.map(|length| length as usize);
    let conv = floats(link, &conv_shape).await?;
    let recurrent = floats(link, &recurrent_shape).await?;
    Ok(LayerState { layer: shape.layer as usize, conv, conv_shape, recurrent, recurrent_shape })
}

async fn floats(link: &mut StageBlocks, shape: &[usize]) -> Result<Vec<f32>, transport::Error> {
    let bytes = shape.iter().try_fold(size_of::<f32>(), |bytes, length| bytes.checked_mul(*length));
    // The buffer grows as bytes arrive, so a false length costs no memory.
    let bytes = bytes.ok_or(transport::Error::Protocol("a state that is larger than any memory"))?;
    let bytes = link.bytes(bytes).await?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}
