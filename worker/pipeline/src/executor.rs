//! Runs steps over the ranks of a pipeline: the first layers here, the others on the downstream ranks.

use super::downstream_ranks::{DownstreamRanks, LastRankLogits, RankResult, Rest};
use engine::Error;
use engine::decoder::{Decoder, LayerState};
use engine::executor::{DecoderRows, Executor, KvBlocks, StepRequest, StepResult, StepRows};
use engine::scheduler::{Demand, Scheduler, StepLimits, StepPlan};
use engine::telemetry::StageCounts;
use kernels::backend::{AdapterId, MAX_DEFERRED_STEPS, NO_INDEX};
use kernels::ops::is_drawable;
use model::checkpoint::lora::LoraAdapter;
use std::path::Path;
use std::time::{Duration, Instant};

pub struct PipelineExecutor {
    /// The layers of the first rank.
    decoder: Decoder,
    downstream: DownstreamRanks,
    /// Time spent on rows that the last rank returned instead of computing their logits, before tokens are
    /// drawn from them.
    resumed: Option<Duration>,
}

impl PipelineExecutor {
    pub fn new(decoder: Decoder, downstream: DownstreamRanks) -> Self {
        Self { decoder, downstream, resumed: None }
    }

    /// The results of a step's rows.
    fn rows(&mut self, result: &mut RankResult) -> Result<StepRows, Error> {
        let Some((rows, residual)) = result.returned.take() else {
            let (argmax, samples) = (std::mem::take(&mut result.tokens), std::mem::take(&mut result.samples));
            return Ok(StepRows::Computed { argmax, samples, logits: std::mem::take(&mut result.logits) });
        };
        let since = Instant::now();
        self.decoder.resume_behind(&residual)?;
        self.resumed = None;
        if let Some(LastRankLogits { from, best }) = result.split {
            let from = from as usize;
            self.decoder.make_part(0, &(0..from))?;
            let own = best.then(|| self.decoder.best_of_part(0..from)).transpose()?;
            match (self.downstream.rest(since.elapsed())?, own) {
                (Rest::Logits(rest), _) => self.decoder.complete(0, from, &rest)?,
                (Rest::Best(..), None) => {
                    return Err(Error::Invariant("more than the best was wanted".to_owned()));
                }
                (Rest::Best(token, logit), Some((first, highest))) => {
                    // As with the whole row: ties go to the lowest token.
                    let token = if logit > highest { token } else { first };
                    let token = if is_drawable(&[highest, logit]) { token } else { NO_INDEX };
                    let argmax = vec![token];
                    return Ok(StepRows::Computed { argmax, samples: Vec::new(), logits: Vec::new() });
                }
            }
        } else {
            self.resumed = Some(since.elapsed());
        }
        Ok(StepRows::InDecoder(DecoderRows::Some(rows)))
    }
}

impl KvBlocks for PipelineExecutor {
    fn block_bytes(&self, group: usize) -> usize {
        self.downstream.block_bytes(group)
    }

    fn read_blocks(&mut self, blocks: &[(usize, u32)]) -> Result<Vec<Vec<u8>>, Error> {
        self.downstream.read_blocks(self.decoder.blocks(), blocks)
    }

    fn write_blocks(&mut self, pieces: &[(usize, u32, &[u8])]) -> Result<(), Error> {
        self.downstream.write_blocks(self.decoder.blocks(), pieces)
    }

    fn read_states(&mut self, slot: u32) -> Result<Vec<LayerState>, Error> {
        self.downstream.read_states(self.decoder.blocks(), slot)
    }
}

impl Executor for PipelineExecutor {
    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn decoder_mut(&mut self) -> &mut Decoder {
        &mut self.decoder
    }

    fn ranks(&self) -> usize {
        self.downstream.ranks()
    }

    fn limits(&mut self, demand: Demand) -> Option<StepLimits> {
        self.downstream.limits(demand)
    }

    fn submit(
        &mut self,
        scheduler: &Scheduler,
        plan: &StepPlan,
        request: StepRequest,
        _between_layers: &mut dyn FnMut(&mut dyn KvBlocks),
    ) -> Result<Option<StepResult>, Error> {
        self.downstream.run(&mut self.decoder, scheduler, plan, request)?;
        Ok(None)
    }

    fn load_adapter(&mut self, _adapter: &LoraAdapter, _path: &Path) -> Result<AdapterId, Error> {
        let reason = "a model on several workers gets its adapters at the start (--lora)".to_owned();
        Err(Error::Config { option: "lora", reason })
    }

    fn unload_adapter(&mut self, adapter: AdapterId) {
        self.decoder.unload_adapter(adapter);
        self.downstream.unload_adapter(adapter);
    }

    fn result(&mut self, wait: bool) -> Result<Option<StepResult>, Error> {
        let Some(mut result) = self.downstream.result(wait)? else { return Ok(None) };
        let rows = self.rows(&mut result)?;
        let RankResult { step, draft_tokens, draft_time, spent, .. } = result;
        Ok(Some(StepResult { step, rows, draft_tokens, draft_time, spent: Some(spent) }))
    }

    fn drawing_took(&mut self, took: Duration) {
        if let Some(resumed) = self.resumed.take() {
            self.downstream.head_took(resumed + took);
        }
    }

    fn accept(&mut self, step: u64, rows: &[usize]) -> Result<(), Error> {
        self.decoder.accept(rows)?;
        self.downstream.counted(step, rows);
        Ok(())
    }

    fn can_defer(&self) -> bool {
        self.downstream.max_steps() as usize <= MAX_DEFERRED_STEPS
    }

    fn is_lost(&self) -> bool {
        self.downstream.is_lost()
    }

    fn take_counts(&mut self) -> Option<StageCounts> {
        Some(self.downstream.take_counts())
    }
}
