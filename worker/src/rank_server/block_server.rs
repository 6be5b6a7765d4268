//! Lets the first stage read and write this stage's blocks. Blocks are named by number. Every order is
//! checked. The compute thread executes it, between two steps or between two layers of a step.

use engine::Error;
use engine::decoder::{Blocks, LayerState};
use engine::kv_cache::{NULL_OFFSET, Slabs};
use pipeline::activations;
use proto::stage::ActivationType;
use proto::stage::blocks::{StageBlock, StageBlocksOrder, StageBlocksReport, StageLayerState};
use tokio::sync::{mpsc, oneshot, watch};
use transport::StageBlocksCall;

/// Maximum bytes that one order moves, not counting its last block.
const MAX_BYTES: usize = 64 << 20;

/// A task for the compute thread, which owns the blocks.
pub(super) type BlockTask = Box<dyn FnOnce(&mut Blocks<'_>) + Send>;

/// Receives orders for a stage's blocks.
#[derive(Debug, Clone)]
pub(super) struct BlockServer {
    tasks: mpsc::UnboundedSender<BlockTask>,
    slabs: Slabs,
    /// Bytes of a block, by group. The last group may be that of recurrent states.
    block_bytes: Vec<usize>,
    /// The last step whose accepted rows have been applied.
    counted: watch::Receiver<u64>,
}

/// A block of this stage: group, offset, bytes.
type BlockLocation = (usize, u32, usize);

impl BlockServer {
    /// Creates a server for blocks of these sizes, by group, in an arena laid out as `slabs`. Returns also
    /// the receiver of its tasks, for the compute thread. That thread publishes in `counted` the last step
    /// whose accepted rows it has applied.
    pub(super) fn new(
        slabs: Slabs,
        block_bytes: Vec<usize>,
        counted: watch::Receiver<u64>,
    ) -> (Self, mpsc::UnboundedReceiver<BlockTask>) {
        let (tasks, tasks_rx) = mpsc::unbounded_channel();
        (Self { tasks, slabs, block_bytes, counted }, tasks_rx)
    }

    /// Executes orders until the first stage closes the stream or one fails.
    pub(super) async fn serve(mut self, mut call: StageBlocksCall) {
        while let Ok(Some(order)) = call.next().await {
            let (report, bytes) = match self.execute(order, &mut call).await {
                Ok(Some(done)) => done,
                Ok(None) => continue,
                Err(error) => (StageBlocksReport::Failed(error.to_string()), Vec::new()),
            };
            let failed = matches!(report, StageBlocksReport::Failed(_));
            if call.report(&report, bytes).await.is_err() || failed {
                return;
            }
        }
    }

    /// Executes an order and returns the report with its payload. `None`: the order has no report.
    async fn execute(
        &mut self,
        order: StageBlocksOrder,
        call: &mut StageBlocksCall,
    ) -> Result<Option<(StageBlocksReport, Vec<u8>)>, crate::Error> {
        match order {
            StageBlocksOrder::Read(blocks) => {
                let (locations, all) = self.locate(&blocks)?;
                let read = move |held: &mut Blocks<'_>| {
                    let mut bytes = Vec::with_capacity(all);
                    for (group, offset, _) in locations {
                        bytes.extend_from_slice(&held.read(group, offset)?);
                    }
                    Ok(bytes)
                };
                let bytes = self.run(read).await?;
                Ok(Some((StageBlocksReport::Read(bytes.len() as u64), bytes)))
            }
            StageBlocksOrder::Write(blocks) => {
                let (locations, all) = self.locate(&blocks)?;
                let bytes = call.bytes(all).await?;
                let write = move |held: &mut Blocks<'_>| {
                    let mut left = bytes.as_slice();
                    for (group, offset, len) in locations {
                        let Some((block, rest)) = left.split_at_checked(len) else { break };
                        held.write(group, offset, block)?;
                        left = rest;
                    }
                    Ok(())
                };
                self.run(write).await?;
                Ok(Some((StageBlocksReport::Written, Vec::new())))
            }
            StageBlocksOrder::Behind(step) => {
                // The wait fails if the compute thread has ended.
                let counted = self.counted.wait_for(|counted| *counted >= step).await;
                Ok(counted.map(|_| None).map_err(|_| Error::EngineStopped)?)
            }
            StageBlocksOrder::States(number) => {
                let group = self.block_bytes.len().saturating_sub(1);
                let offset = self.offset(group, number)?;
                let states = self.run(move |held| held.states(offset)).await?;
                let shapes = states.iter().map(shape).collect();
                let values = states.iter().flat_map(|state| [&state.conv, &state.recurrent]);
                let bytes = values.flat_map(|values| activations::encode(ActivationType::F32, values));
                Ok(Some((StageBlocksReport::States(shapes), bytes.collect())))
            }
        }
    }

    fn offset(&self, group: usize, number: u32) -> Result<u32, Error> {
        let offset = self.slabs.offset(group, number).filter(|offset| *offset != NULL_OFFSET);
        offset.ok_or_else(|| Error::StageStep { reason: format!("group {group} has no block {number}") })
    }

    /// Offsets of these blocks, and their total bytes. Blocks of groups in which this stage stores nothing
    /// are left out.
    fn locate(&self, blocks: &[StageBlock]) -> Result<(Vec<BlockLocation>, usize), Error> {
        let (mut locations, mut all) = (Vec::with_capacity(blocks.len()), 0);
        for block in blocks {
            let group = block.group as usize;
            let offset = self.offset(group, block.number)?;
            let bytes = self.block_bytes.get(group).copied().unwrap_or(0);
            if all > MAX_BYTES {
                return Err(Error::StageStep { reason: format!("more than {MAX_BYTES} bytes of blocks") });
            }
            if bytes > 0 {
                locations.push((group, offset, bytes));
                all += bytes;
            }
        }
        Ok((locations, all))
    }

    async fn run<T: Send + 'static>(
        &self,
        task: impl FnOnce(&mut Blocks<'_>) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (done, result) = oneshot::channel();
        // If the receiver is gone, the replica was given up.
        let task = move |held: &mut Blocks<'_>| drop(done.send(task(held)));
        self.tasks.send(Box::new(task)).map_err(|_| Error::EngineStopped)?;
        result.await.map_err(|_| Error::EngineStopped)?
    }
}

fn shape(state: &LayerState) -> StageLayerState {
    StageLayerState {
        layer: state.layer as u32,
        conv: state.conv_shape.map(|length| length as u32),
        recurrent: state.recurrent_shape.map(|length| length as u32),
    }
}
