//! Attention of single rows over contiguous blocks, over blocks in random order, and over blocks that
//! several sequences share.

use super::{Speed, Work, random_values};
use crate::attention::{AttentionCall, AttentionKernels, SPLIT};
use crate::step::{KvGroup, Step, StepLayout, StepLimits};
use crate::{Device, DevicePtr};
use kernels::Error;
use kernels::attention::{BlockTable, OFFSET_UNIT, Visible};
use kernels::backend::{KvShape, KvType, StepInput, StepSequence};

/// Maximum number of layers of a cache, which are the launches of one graph.
const MAX_LAYERS: usize = 64;

/// Decoding sequences of equal length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionCase {
    pub kv_type: KvType,
    pub heads: usize,
    pub kv_heads: usize,
    pub width: usize,
    pub block_tokens: usize,
    /// Positions of each sequence, including the new one.
    pub context: usize,
    pub batch: usize,
}

/// Times of one layer's attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpeed {
    /// Bytes of keys and values, each read once.
    pub bytes: usize,
    /// Seconds with contiguous blocks.
    pub contiguous: f64,
    /// Seconds with blocks in random order.
    pub paged: f64,
    /// Seconds if all sequences share the blocks of the first one up to the last split. `None` if there is
    /// no such split or only one sequence.
    pub shared: Option<f64>,
}

impl Speed {
    /// Runs more layers than the device's caches hold, one after the other.
    ///
    /// # Errors
    /// As [`AttentionKernels::source`]; errors of the compiler or the device.
    pub fn attention(&self, case: &AttentionCase) -> Result<AttentionSpeed, Error> {
        let AttentionCase { kv_type, heads, kv_heads, width, block_tokens, context, batch } = *case;
        let (head_dim, v_head_dim, window, causal) = (width, width, None, true);
        let shape = KvShape {
            heads,
            kv_heads,
            head_dim,
            v_head_dim,
            latent: false,
            block_tokens,
            kv_type: kv_type.into(),
            window,
            causal,
        };
        let (mut held, mut device) = (self.held(), self.device.clone());
        let compiled = self.compiled(AttentionKernels::source(&shape)?)?;
        let kernels = AttentionKernels::load(&mut device, &compiled, shape)?;
        let (blocks, layer_bytes) = (context.div_ceil(block_tokens), kernels.block().bytes());
        let bytes = batch * blocks * layer_bytes;
        let layers = self.spread.div_ceil(bytes.max(1)).clamp(2, MAX_LAYERS);
        let (stride, arena_bytes) = (layers * layer_bytes, layers * bytes);
        let arena = held.random(arena_bytes)?;

        let in_order: Vec<usize> = (0..batch * blocks).collect();
        let mut in_none = in_order.clone();
        shuffle(&mut in_none);
        let sequences: Vec<StepSequence> = (0..batch)
            .map(|row| StepSequence { rows: row..row + 1, context: context - 1, segment_start: None })
            .collect();
        let limits = StepLimits { rows: batch, sequences: batch, exports: 0, table_entries: batch * blocks };
        let group = KvGroup { block_tokens, bytes: stride, visible: Visible::Causal };
        let tokens = vec![0; batch];
        let mut steps = Vec::new();
        let mut orders = vec![in_order, in_none];
        let common = context.saturating_sub(1) / SPLIT * SPLIT / block_tokens;
        if batch > 1 && common > 0 {
            let mut shared = orders[1].clone();
            let (first, others) = shared.split_at_mut(blocks);
            others.chunks_mut(blocks).for_each(|other| other[..common].copy_from_slice(&first[..common]));
            orders.push(shared);
        }
        for order in orders {
            let offsets: Vec<u32> = order.iter().map(|block| (block * stride / OFFSET_UNIT) as u32).collect();
            let tables = [offsets.chunks(blocks).map(BlockTable::Paged).collect()];
            let mut step = Step::new(StepLayout::new(limits, &[group]));
            let input = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &[] };
            step.fill(&input, arena_bytes)?;
            steps.push(step.layout().at(held.bytes(step.bytes())?));
        }

        let q = held.bytes(&random_values(batch * heads * width))?;
        let out = held.room(4 * batch * heads * width)?;
        let scratch_bytes = kernels.scratch_bytes(context);
        let scratch = held.room(scratch_bytes)?;
        let run = |device: &mut dyn Device, step| -> Result<(), Error> {
            for layer in 0..layers {
                let call = AttentionCall {
                    q,
                    out,
                    scratch,
                    arena,
                    step,
                    sequences: &sequences,
                    group: 0,
                    layer_offset: layer * layer_bytes,
                    sinks: None::<DevicePtr>,
                    scale: 1.0 / (width as f32).sqrt(),
                };
                kernels.launch(device, &call, scratch_bytes)?;
            }
            Ok(())
        };
        let run = &run;
        let mut runs: Vec<_> =
            steps.iter().map(|step| move |device: &mut dyn Device| run(device, step)).collect();
        let mut works: Vec<Work<'_>> = runs.iter_mut().map(|run| run as Work<'_>).collect();
        let seconds = self.time(&mut works)?;
        let each = |seconds: f64| seconds / layers as f64;
        let shared = seconds.get(2).copied().map(each);
        Ok(AttentionSpeed { bytes, contiguous: each(seconds[0]), paged: each(seconds[1]), shared })
    }
}

/// Shuffles numbers, in the same way on every machine.
fn shuffle(values: &mut [usize]) {
    let mut state = 1_u64;
    for left in (1..values.len()).rev() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        values.swap(left, (state >> 33) as usize % (left + 1));
    }
}
