//! What a stage holds, read and filled by the first one. Blocks are named by number; nothing of an order is believed
//! but that the first stage orders it. The thread that computes does it, between two steps or two layers of one.

use crate::Error;
use crate::decoder::{Blocks, LayerState};
use crate::kv_cache::{NULL_OFFSET, Slabs};
use crate::pipeline::activations;
use proto::stage::ActivationType;
use proto::stage::blocks::{StageBlock, StageBlocksOrder, StageBlocksReport, StageLayerState};
use proto::transport::StageBlocksCall;
use tokio::sync::{mpsc, oneshot, watch};

/// Bytes that one order may move, and one block more.
const MAX_BYTES: usize = 64 << 20;

/// Something to be done with the blocks of a stage.
pub(super) type BlockTask = Box<dyn FnOnce(&mut Blocks<'_>) + Send>;

/// Takes orders for a stage's blocks.
#[derive(Debug, Clone)]
pub(super) struct BlockServer {
    errands: mpsc::UnboundedSender<BlockTask>,
    slabs: Slabs,
    /// Of each group; the last one may be that of states.
    block_bytes: Vec<usize>,
    /// The last step that it has been told the rows of which count.
    counted: watch::Receiver<u64>,
}

/// A block of this stage: group, offset, bytes.
type BlockPlace = (usize, u32, usize);

impl BlockServer {
    /// For blocks of these sizes in an arena that is cut so; also what the thread that computes has to do. It tells by
    /// `counted` the last step of which it has heard how many rows count.
    pub(super) fn new(
        slabs: Slabs,
        block_bytes: Vec<usize>,
        counted: watch::Receiver<u64>,
    ) -> (Self, mpsc::UnboundedReceiver<BlockTask>) {
        let (errands, to_do) = mpsc::unbounded_channel();
        (Self { errands, slabs, block_bytes, counted }, to_do)
    }

    /// Does what is ordered, until the first stage wants no more.
    pub(super) async fn serve(mut self, mut call: StageBlocksCall) {
        while let Ok(Some(order)) = call.next().await {
            let (report, bytes) = match self.obey(order, &mut call).await {
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

    /// Does one thing, and says what is answered to it.
    async fn obey(
        &mut self,
        order: StageBlocksOrder,
        call: &mut StageBlocksCall,
    ) -> Result<Option<(StageBlocksReport, Vec<u8>)>, Error> {
        match order {
            StageBlocksOrder::Read(blocks) => {
                let (places, all) = self.places(&blocks)?;
                let read = move |held: &mut Blocks<'_>| {
                    let mut bytes = Vec::with_capacity(all);
                    for (group, offset, _) in places {
                        bytes.extend_from_slice(&held.read(group, offset)?);
                    }
                    Ok(bytes)
                };
                let bytes = self.run(read).await?;
                Ok(Some((StageBlocksReport::Read(bytes.len() as u64), bytes)))
            }
            StageBlocksOrder::Write(blocks) => {
                let (places, all) = self.places(&blocks)?;
                let bytes = call.bytes(all).await?;
                let write = move |held: &mut Blocks<'_>| {
                    let mut left = bytes.as_slice();
                    for (group, offset, len) in places {
                        let Some((part, behind)) = left.split_at_checked(len) else { break };
                        held.write(group, offset, part)?;
                        left = behind;
                    }
                    Ok(())
                };
                self.run(write).await?;
                Ok(Some((StageBlocksReport::Written, Vec::new())))
            }
            StageBlocksOrder::Behind(step) => {
                // An error: the thread that computes has ended.
                let counted = self.counted.wait_for(|counted| *counted >= step).await;
                counted.map(|_| None).map_err(|_| Error::EngineStopped)
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

    /// Where these lie, those left out of which the stage holds nothing, and their bytes in all.
    fn places(&self, blocks: &[StageBlock]) -> Result<(Vec<BlockPlace>, usize), Error> {
        let (mut places, mut all) = (Vec::with_capacity(blocks.len()), 0);
        for block in blocks {
            let group = block.group as usize;
            let offset = self.offset(group, block.number)?;
            let bytes = self.block_bytes.get(group).copied().unwrap_or(0);
            if all > MAX_BYTES {
                return Err(Error::StageStep { reason: format!("more than {MAX_BYTES} bytes of blocks") });
            }
            if bytes > 0 {
                places.push((group, offset, bytes));
                all += bytes;
            }
        }
        Ok((places, all))
    }

    async fn run<T: Send + 'static>(
        &self,
        errand: impl FnOnce(&mut Blocks<'_>) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (done, result) = oneshot::channel();
        // Whoever does not wait any more has given the replica up.
        let errand = move |held: &mut Blocks<'_>| drop(done.send(errand(held)));
        self.errands.send(Box::new(errand)).map_err(|_| Error::EngineStopped)?;
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
