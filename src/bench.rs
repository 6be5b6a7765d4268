//! `kvasir bench`: prefill, decode at depth and batched decode of one decoder, with a bandwidth probe in the
//! same run. Speed does not depend on the tokens, so they are arbitrary.

use crate::home;
use crate::lora::LoraArg;
use crate::models::resolve_or_pull;
use crate::numerics::{ActivationsArg, Device, KvTypeArg, StateTypeArg};
use anyhow::{Result, bail};
use clap::ValueEnum;
use cuda::Gpu;
use engine::decoder::{CacheGroup, CacheKind, Decoder};
use kernels::backend::{AdapterId, BlockTable, StepInput, StepSequence, StepState};
use kernels::bandwidth::BandwidthProbe;
use kernels::pool::{Pool, PoolConfig};
use serde::Serialize;
use std::time::Instant;
use worker::load::EngineOptions;

/// Measures prefill, decode at depth and batched decode
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  kvasir bench smollm2-135m -p 512,2048 -n 128 -d 0,4096 -b 1,8,32 -t 1 --json"
)]
pub(crate) struct Bench {
    /// Catalog name, https:// or hf:// address, or path to a .gguf or a Hugging Face folder
    model: String,
    /// Prefill lengths; 0 skips prefill
    #[arg(short = 'p', long, value_name = "N,..", value_delimiter = ',', default_value = "512,2048")]
    prefill: Vec<usize>,
    /// Tokens to decode per measurement; 0 skips decoding
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    decode: usize,
    /// Depths at which to decode
    #[arg(short = 'd', long, value_name = "N,..", value_delimiter = ',', default_value = "0")]
    depth: Vec<usize>,
    /// Batch sizes of decoding at depth 128, in addition to the single stream
    #[arg(short = 'b', long, value_name = "N,..", value_delimiter = ',')]
    batch: Vec<usize>,
    /// Compute threads
    #[arg(short = 't', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Device to compute on
    #[arg(long, value_enum, default_value = "auto", env = "KVASIR_DEVICE")]
    device: Device,
    /// Repetitions of each measurement
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5)]
    repeat: usize,
    /// Prompt tokens per step
    #[arg(long, value_name = "N", default_value_t = 512)]
    chunk: usize,
    /// Layout of KV blocks
    #[arg(long, value_enum, value_delimiter = ',', default_value = "paged")]
    placement: Vec<BlockLayoutArg>,
    /// Element type of the KV cache
    #[arg(long, value_enum, default_value = "f16")]
    kv_type: KvTypeArg,
    /// Element type of cached values, if another than that of keys
    #[arg(long, value_enum)]
    kv_type_v: Option<KvTypeArg>,
    /// Element type of recurrent states
    #[arg(long, value_enum, default_value = "f32")]
    state_type: StateTypeArg,
    /// With auto-bf16: the states of heads that forget within fewer tokens are stored as bf16 [default: 16]
    #[arg(long, value_name = "TOKENS")]
    state_tau: Option<u32>,
    /// Activation type that quantised matrices are multiplied with
    #[arg(long, value_enum, default_value = "int8")]
    activations: ActivationsArg,
    /// LoRA adapter in PEFT's layout, with its name; repeatable. Batches are then also measured with sequences that use
    /// all of them in turns
    #[arg(long, value_name = "NAME=DIR")]
    lora: Vec<LoraArg>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Layout of KV blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum BlockLayoutArg {
    /// Blocks scattered over the arena, found through the block table.
    Paged,
    /// Consecutive blocks; no table is read.
    Contiguous,
}

const BATCH_DEPTH: usize = 128;
const BLOCK_TOKENS: usize = 16;

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    threads: u16,
    isa: String,
    weight_bytes: usize,
    bandwidth_gbs: f64,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    test: &'static str,
    placement: BlockLayoutArg,
    /// Prompt length, or depth at the first decoded token.
    tokens: usize,
    batch: usize,
    /// Tokens per second over the whole batch: median, and (max - min) / median.
    tps: f64,
    spread: f64,
    /// Least bytes read per token (weights over batch, own KV), and the share of the probed bandwidth.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_token: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bandwidth_share: Option<f64>,
}

/// A decoder and the block tables of its sequences.
struct Stage {
    decoder: Decoder,
    tables: Tables,
    /// Positions reserved per sequence.
    capacity: usize,
    rows_limit: usize,
    adapters: Vec<AdapterId>,
    /// The sequences of the next steps use the adapters in turns.
    uses_adapters: bool,
}

/// Cache locations of sequences of equal length.
struct Tables {
    /// Block tables, scattered and consecutive, of each group of keys and values.
    paged: Vec<GroupTable>,
    /// First slot of recurrent state and the distance of slots, in units of 64 bytes.
    state: Option<(u32, u32)>,
}

struct GroupTable {
    /// Units of 64 bytes; sequence s owns entries `s * blocks ..`.
    scattered: Vec<u32>,
    first: u32,
    stride: u32,
}

impl Bench {
    /// Runs the command.
    pub(crate) fn run(self) -> Result<()> {
        if self.chunk == 0 || self.repeat == 0 {
            bail!("--chunk and --repeat are at least 1");
        }
        let longest_prompt = self.prefill.iter().copied().max().unwrap_or(0);
        let deepest = self.depth.iter().copied().max().unwrap_or(0) + self.decode;
        let widest = self.batch.iter().copied().max().unwrap_or(1).max(1);
        let single = longest_prompt.max(deepest).max(1);
        let batched = BATCH_DEPTH + self.decode;
        let blocks = |tokens: usize| tokens.div_ceil(BLOCK_TOKENS);
        let needed = blocks(single).max(widest * blocks(batched));
        let options = EngineOptions {
            threads: Some(usize::from(self.threads)),
            kv_type: self.kv_type.with_values(self.kv_type_v),
            state_type: self.state_type.with_tau(self.state_tau)?,
            activations: self.activations.into(),
            block_tokens: BLOCK_TOKENS,
            max_rows: Some(self.chunk.max(widest)),
            device: self.device.into(),
            cubins: home::cubins(),
            ..EngineOptions::default()
        };
        let path = resolve_or_pull(&self.model)?.path;
        worker::generator::require_built_in()?;
        let mut decoder = worker::load::decoder(&path, &options, &mut |_, _| {})?;
        let (tables, arena_bytes) = Tables::new(decoder.groups(), needed, widest);
        decoder.allocate_kv(arena_bytes)?;
        let mut adapters = Vec::new();
        for LoraArg(source) in &self.lora {
            let adapter = worker::load::read_adapter(&path, &source.name, &source.path)?;
            adapters.push(decoder.load_adapter(&adapter)?);
        }
        let rows_limit = self.chunk;
        let mut stage = Stage { decoder, tables, capacity: 0, rows_limit, adapters, uses_adapters: false };
        let mut probe = self.probe(&stage.decoder.backend().info().device)?;
        let mut bandwidth = vec![probe(3)?];
        let mut rows = Vec::new();
        // Placements alternate inside every measurement, so that drift affects both equally.
        for &tokens in self.prefill.iter().filter(|tokens| **tokens > 0) {
            rows.extend(self.measure("prefill", tokens, 1, &mut stage)?);
        }
        if self.decode > 0 {
            for &depth in &self.depth {
                rows.extend(self.measure("decode", depth, 1, &mut stage)?);
                bandwidth.push(probe(1)?);
            }
            for &batch in &self.batch {
                rows.extend(self.measure("batch", BATCH_DEPTH, batch, &mut stage)?);
            }
        }
        bandwidth.push(probe(3)?);
        bandwidth.sort_by(f64::total_cmp);
        let bandwidth = bandwidth[bandwidth.len() / 2];
        for row in &mut rows {
            row.bandwidth_share = row.bytes_per_token.map(|bytes| bytes * row.tps / bandwidth);
        }
        let report = Report {
            model: self.model.clone(),
            threads: self.threads,
            isa: stage.decoder.backend().info().isa.clone(),
            weight_bytes: stage.decoder.weight_bytes_per_token(),
            bandwidth_gbs: bandwidth / 1e9,
            rows,
        };
        self.print(&report)
    }

    /// A probe of the memory that the device reads. It returns bytes per second, the median of the given
    /// number of repetitions.
    fn probe(&self, device: &str) -> Result<Box<dyn FnMut(usize) -> Result<f64>>> {
        if device == "cuda" {
            let mut gpu = Gpu::open(0)?;
            return Ok(Box::new(move |_| Ok(gpu.copy_bandwidth()?)));
        }
        let threads =
            std::num::NonZeroUsize::new(usize::from(self.threads)).unwrap_or(std::num::NonZeroUsize::MIN);
        let pool = Pool::new(PoolConfig::new(threads))?;
        let probe = BandwidthProbe::new();
        Ok(Box::new(move |times| Ok(probe.median(&pool, times))))
    }

    fn measure(
        &self,
        test: &'static str,
        tokens: usize,
        batch: usize,
        stage: &mut Stage,
    ) -> Result<Vec<Row>> {
        // With and without adapters alternate too.
        let with_adapters = [false, true].into_iter().take(match test {
            "batch" if !stage.adapters.is_empty() => 2,
            _ => 1,
        });
        let of_placement = |&placement| with_adapters.clone().map(move |adapters| (placement, adapters));
        let cases: Vec<(BlockLayoutArg, bool)> = self.placement.iter().flat_map(of_placement).collect();
        let mut rates: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
        stage.capacity = if test == "prefill" { tokens } else { tokens + self.decode };
        for round in 0..=self.repeat {
            for (which, &(placement, adapters)) in cases.iter().enumerate() {
                stage.uses_adapters = adapters;
                let rate = match test {
                    "prefill" => {
                        let start = Instant::now();
                        stage.prefill(placement, 1, tokens)?;
                        let last = (tokens - 1) % self.chunk;
                        stage.draw(&[last as u32])?;
                        tokens as f64 / start.elapsed().as_secs_f64()
                    }
                    _ => {
                        if round == 0 {
                            stage.prefill(placement, batch, tokens)?;
                        }
                        let start = Instant::now();
                        for step in 0..self.decode {
                            stage.decode(placement, batch, tokens + step)?;
                        }
                        (self.decode * batch) as f64 / start.elapsed().as_secs_f64()
                    }
                };
                // The first round is a warm-up.
                if round > 0 {
                    rates[which].push(rate);
                }
            }
        }
        stage.uses_adapters = false;
        let rows = cases.iter().zip(rates).map(|(&(placement, adapters), mut rates)| {
            let test = if adapters { "lora" } else { test };
            rates.sort_by(f64::total_cmp);
            let tps = rates[rates.len() / 2];
            let spread = (rates[rates.len() - 1] - rates[0]) / tps;
            let middle = tokens + self.decode / 2;
            let kv = stage.decoder.cache_bytes_moved(middle) as f64;
            let weights = stage.decoder.weight_bytes_per_token() as f64 / batch as f64;
            let bytes_per_token = (test != "prefill").then_some(weights + kv);
            Row { test, placement, tokens, batch, tps, spread, bytes_per_token, bandwidth_share: None }
        });
        Ok(rows.collect())
    }

    fn print(&self, report: &Report) -> Result<()> {
        if self.json {
            println!("{}", serde_json::to_string(report)?);
            return Ok(());
        }
        println!(
            "{}, {} thread(s), {}, {:.1} MB of weights per token, memory read at {:.1} GB/s in this run",
            report.model,
            report.threads,
            report.isa,
            report.weight_bytes as f64 / 1e6,
            report.bandwidth_gbs
        );
        println!(
            "{:<8} {:<10} {:>7} {:>6} {:>10} {:>8} {:>10}",
            "test", "placement", "tokens", "batch", "t/s", "spread", "bandwidth"
        );
        for row in &report.rows {
            let share =
                row.bandwidth_share.map_or_else(String::new, |share| format!("{:.0} %", share * 100.0));
            println!(
                "{:<8} {:<10} {:>7} {:>6} {:>10.1} {:>7.1}% {:>10}",
                row.test,
                format!("{:?}", row.placement).to_lowercase(),
                row.tokens,
                row.batch,
                row.tps,
                row.spread * 100.0,
                share
            );
        }
        Ok(())
    }
}

impl Stage {
    /// Computes `tokens` positions of each sequence, `rows_limit` rows per step.
    fn prefill(&mut self, placement: BlockLayoutArg, batch: usize, tokens: usize) -> Result<()> {
        let chunk = (self.rows_limit / batch).max(1);
        for context in (0..tokens).step_by(chunk) {
            self.step(placement, batch, context, chunk.min(tokens - context))?;
        }
        Ok(())
    }

    /// Computes one position of each sequence and samples the next token.
    fn decode(&mut self, placement: BlockLayoutArg, batch: usize, context: usize) -> Result<()> {
        self.step(placement, batch, context, 1)?;
        self.draw(&(0..batch as u32).collect::<Vec<_>>())
    }

    fn draw(&mut self, rows: &[u32]) -> Result<()> {
        let mut best = Vec::with_capacity(rows.len());
        Ok(self.decoder.argmax(rows, &mut best)?)
    }

    fn step(&mut self, placement: BlockLayoutArg, batch: usize, context: usize, rows: usize) -> Result<()> {
        let vocab = self.decoder.spec().vocab;
        let tokens: Vec<u32> =
            (0..batch * rows).map(|i| ((i * 7919 + context * 13 + 11) % vocab) as u32).collect();
        let sequence =
            |s: usize| StepSequence { rows: s * rows..(s + 1) * rows, context, segment_start: None };
        let sequences: Vec<StepSequence> = (0..batch).map(sequence).collect();
        let tables = self.tables.of(placement, batch, self.capacity.div_ceil(BLOCK_TOKENS));
        let states = self.tables.states(batch, context);
        let input = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &states };
        if self.uses_adapters {
            let adapters = self.adapters.iter().copied().cycle();
            let of_rows: Vec<_> =
                sequences.iter().map(|sequence| sequence.rows.clone()).zip(adapters).collect();
            self.decoder.use_adapters(&of_rows)?;
        }
        Ok(self.decoder.forward(&[], &input)?)
    }
}

impl Tables {
    /// Tables with `blocks` blocks for every group and states for `sequences` sequences; also their size in
    /// bytes.
    fn new(groups: &[CacheGroup], blocks: usize, sequences: usize) -> (Self, usize) {
        let order = scattered(blocks);
        let (mut end, mut paged, mut state) = (0usize, Vec::new(), None);
        for group in groups {
            let (first, stride) = ((end / 64) as u32, (group.block_bytes / 64) as u32);
            if group.kind == CacheKind::State {
                state = Some((first, stride));
                end += group.block_bytes * sequences;
            } else {
                let scattered = order.iter().map(|block| first + block * stride).collect();
                paged.push(GroupTable { scattered, first, stride });
                end += group.block_bytes * blocks;
            }
        }
        (Self { paged, state }, end)
    }

    fn of(&self, placement: BlockLayoutArg, batch: usize, blocks: usize) -> Vec<Vec<BlockTable<'_>>> {
        let groups = self.paged.iter();
        groups
            .map(|group| (0..batch).map(|sequence| group.table(placement, sequence, blocks)).collect())
            .collect()
    }

    /// Every sequence continues in its own slot, from zeros at position 0.
    fn states(&self, batch: usize, context: usize) -> Vec<StepState> {
        let Some((first, stride)) = self.state else { return Vec::new() };
        let state = |sequence: usize| {
            let slot = first + sequence as u32 * stride;
            StepState {
                read: (context > 0).then_some(slot),
                write: slot,
                exports: Vec::new(),
                deferred: false,
            }
        };
        (0..batch).map(state).collect()
    }
}

impl GroupTable {
    /// Block table of a sequence that owns `blocks` blocks.
    fn table(&self, placement: BlockLayoutArg, sequence: usize, blocks: usize) -> BlockTable<'_> {
        let from = sequence * blocks;
        match placement {
            BlockLayoutArg::Paged => BlockTable::Paged(&self.scattered[from..from + blocks]),
            BlockLayoutArg::Contiguous => {
                BlockTable::Contiguous { first: self.first + from as u32 * self.stride, stride: self.stride }
            }
        }
    }
}

/// Block numbers in an order that defeats prefetchers: a walk with a step coprime to their number.
fn scattered(blocks: usize) -> Vec<u32> {
    let coprime = |step: &usize| {
        let (mut a, mut b) = (*step, blocks);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a == 1
    };
    let step = (blocks * 5 / 8 + 1..).find(coprime).unwrap_or(1);
    (0..blocks).map(|i| (i * step % blocks) as u32).collect()
}
