//! A device whose memory the host cannot address, and whose work runs late, as on a GPU.
//!
//! Handles are opaque numbers. Ops are only queued. The queue runs when the host reads something, and every
//! read is recorded.

use kernels::Error;
use kernels::backend::{
    ActivationMode, AttentionOp, Backend, BackendInfo, BlockTable, BufferId, ConvOp, DeltaNetOp, EmbedOp,
    ExpertGateUp, GateOp, GatedNormOp, HeadMatmulOp, HeadPart, HeadType, KvCopy, KvLayerId, KvShape, KvWrite,
    Mamba2Op, MatmulJob, MatrixId, MatrixSource, MemoryUse, MoeOp, Norm, QkvOp, RopeId, RopeSource,
    Selection, StateLayerId, StateShape, StepInput, StepSequence, StepState, VectorId,
};
use kernels::cpu::{CpuBackend, CpuConfig};
use kernels::pool::{Pool, PoolConfig};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

/// Turns the CPU's small numbers into opaque ones and back: it is its own inverse.
const SECRET: u32 = 0xa5c3_96e1;

/// The reads and writes of the host.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger {
    /// Rows of f32 copied to the host: (buffer, values).
    pub(crate) rows: Vec<(BufferId, usize)>,
    /// Tokens that the device drew.
    pub(crate) tokens: usize,
    /// Buffers that tokens were drawn from.
    pub(crate) drawn_from: Vec<BufferId>,
    /// Number of times that the host wrote activations.
    pub(crate) writes: usize,
    pub(crate) ops: usize,
}

/// The operations that the device refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refuses {
    Nothing,
    /// Weights of this ggml type, when they are uploaded.
    Type(u32),
    /// KV of layers with a sliding window.
    Windows,
    /// Attention, in the middle of a step.
    Attention,
}

type Command = Box<dyn FnOnce(&mut CpuBackend) -> Result<(), Error> + Send>;

pub(crate) struct OpaqueDevice {
    info: BackendInfo,
    device: CpuBackend,
    queue: Vec<Command>,
    refuses: Refuses,
    ledger: Arc<Mutex<Ledger>>,
}

/// Converts handles between the host's and the device's form.
trait Secret {
    fn turned(self) -> Self;
}

macro_rules! secret {
    ($($handle:ty),*) => {
        $(impl Secret for $handle {
            fn turned(self) -> Self {
                Self::new(self.number() ^ SECRET)
            }
        })*
    };
}

secret!(BufferId, MatrixId, VectorId, RopeId, KvLayerId, StateLayerId);

impl OpaqueDevice {
    pub(crate) fn new(activations: ActivationMode, refuses: Refuses) -> (Self, Arc<Mutex<Ledger>>) {
        let pool = Pool::new(PoolConfig::new(NonZeroUsize::MIN)).unwrap();
        let device = CpuBackend::new(CpuConfig::select(activations, |_| None).unwrap(), pool).unwrap();
        let ledger = Arc::new(Mutex::new(Ledger::default()));
        let info = BackendInfo { device: "opaque".to_owned(), ..device.info().clone() };
        (Self { info, device, queue: Vec::new(), refuses, ledger: ledger.clone() }, ledger)
    }

    fn push(&mut self, command: impl FnOnce(&mut CpuBackend) -> Result<(), Error> + Send + 'static) {
        self.queue.push(Box::new(command));
    }

    fn synchronise(&mut self) -> Result<(), Error> {
        self.ledger.lock().unwrap().ops += self.queue.len();
        self.queue.drain(..).try_for_each(|command| command(&mut self.device))
    }
}

fn norm(norm: &Norm) -> Norm {
    Norm { weight: norm.weight.map(Secret::turned), bias: norm.bias.map(Secret::turned), ..*norm }
}

/// The device's copy of a block table: the host may change its own as soon as the step is uploaded.
enum Table {
    Paged(Vec<u32>),
    Contiguous { first: u32, stride: u32 },
}

impl Table {
    fn uploaded(table: &BlockTable<'_>) -> Self {
        match *table {
            BlockTable::Paged(offsets) => Self::Paged(offsets.to_vec()),
            BlockTable::Contiguous { first, stride } => Self::Contiguous { first, stride },
        }
    }

    fn view(&self) -> BlockTable<'_> {
        match self {
            Self::Paged(offsets) => BlockTable::Paged(offsets),
            Self::Contiguous { first, stride } => BlockTable::Contiguous { first: *first, stride: *stride },
        }
    }
}

fn part(part: &HeadPart) -> HeadPart {
    HeadPart { buffer: part.buffer.turned(), ..*part }
}

impl Backend for OpaqueDevice {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn memory(&self) -> MemoryUse {
        self.device.memory()
    }

    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, Error> {
        self.device.create_buffer(rows, cols).map(Secret::turned)
    }

    fn create_matrix(&mut self, source: MatrixSource<'_>) -> Result<MatrixId, Error> {
        if self.refuses == Refuses::Type(source.ggml_type) {
            return Err(Error::Unsupported { what: "weights of this type" });
        }
        self.device.create_matrix(source).map(Secret::turned)
    }

    fn create_vector(&mut self, values: &[f32]) -> Result<VectorId, Error> {
        self.device.create_vector(values).map(Secret::turned)
    }

    fn set_order(&mut self, matrix: MatrixId, order: &[u32]) -> Result<(), Error> {
        self.device.set_order(matrix.turned(), order)
    }

    fn create_rope(&mut self, source: RopeSource) -> Result<RopeId, Error> {
        self.device.create_rope(source).map(Secret::turned)
    }

    fn kv_block_bytes(&self, shape: KvShape) -> Result<usize, Error> {
        self.device.kv_block_bytes(shape)
    }

    fn create_kv_layer(&mut self, group: usize, shape: KvShape, offset: usize) -> Result<KvLayerId, Error> {
        if self.refuses == Refuses::Windows && shape.window.is_some() {
            return Err(Error::Unsupported { what: "sliding windows" });
        }
        self.device.create_kv_layer(group, shape, offset).map(Secret::turned)
    }

    fn state_bytes(&self, shape: StateShape, heads: &[HeadType]) -> Result<usize, Error> {
        self.device.state_bytes(shape, heads)
    }

    fn create_state_layer(
        &mut self,
        shape: StateShape,
        heads: &[HeadType],
        offset: usize,
    ) -> Result<StateLayerId, Error> {
        self.device.create_state_layer(shape, heads, offset).map(Secret::turned)
    }

    fn read_state(
        &mut self,
        layer: StateLayerId,
        slot: u32,
        conv: &mut [f32],
        recurrent: &mut [f32],
    ) -> Result<(), Error> {
        self.synchronise()?;
        self.device.read_state(layer.turned(), slot, conv, recurrent)
    }

    fn read_arena(&mut self, from: u32, out: &mut [u8]) -> Result<(), Error> {
        self.synchronise()?;
        self.device.read_arena(from, out)
    }

    fn write_arena(&mut self, to: u32, bytes: &[u8]) -> Result<(), Error> {
        let bytes = bytes.to_vec();
        self.push(move |device| device.write_arena(to, &bytes));
        Ok(())
    }

    fn create_kv_arena(&mut self, bytes: usize, group_block_bytes: &[usize]) -> Result<(), Error> {
        self.device.create_kv_arena(bytes, group_block_bytes)
    }

    fn copy_kv(&mut self, copies: &[KvCopy]) -> Result<(), Error> {
        let copies = copies.to_vec();
        self.push(move |device| device.copy_kv(&copies));
        Ok(())
    }

    fn begin_step(&mut self, step: &StepInput<'_>) -> Result<(), Error> {
        let tokens = step.tokens.to_vec();
        let sequences: Vec<StepSequence> = step.sequences.to_vec();
        let upload = |tables: &Vec<BlockTable<'_>>| tables.iter().map(Table::uploaded).collect();
        let tables: Vec<Vec<Table>> = step.tables.iter().map(upload).collect();
        let states: Vec<StepState> = step.states.to_vec();
        self.push(move |device| {
            let views: Vec<Vec<BlockTable<'_>>> =
                tables.iter().map(|tables| tables.iter().map(Table::view).collect()).collect();
            device.begin_step(&StepInput {
                tokens: &tokens,
                sequences: &sequences,
                tables: &views,
                states: &states,
            })
        });
        Ok(())
    }

    fn embed(&mut self, op: &EmbedOp) -> Result<(), Error> {
        let op = EmbedOp { table: op.table.turned(), out: op.out.turned(), ..*op };
        self.push(move |device| device.embed(&op));
        Ok(())
    }

    fn norm(&mut self, x: BufferId, by: &Norm, out: BufferId) -> Result<(), Error> {
        let by = norm(by);
        self.push(move |device| device.norm(x.turned(), &by, out.turned()));
        Ok(())
    }

    fn matmul(&mut self, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error> {
        let job = |job: &MatmulJob| MatmulJob {
            matrix: job.matrix.turned(),
            out: job.out.turned(),
            bias: job.bias.map(Secret::turned),
            ..*job
        };
        let jobs: Vec<MatmulJob> = jobs.iter().map(job).collect();
        self.push(move |device| device.matmul(x.turned(), &jobs));
        Ok(())
    }

    fn head_matmul(&mut self, op: &HeadMatmulOp) -> Result<(), Error> {
        let op = HeadMatmulOp { x: op.x.turned(), matrix: op.matrix.turned(), out: part(&op.out), ..*op };
        self.push(move |device| device.head_matmul(&op));
        Ok(())
    }

    fn place_heads(&mut self, x: BufferId, heads: usize, out: &HeadPart) -> Result<(), Error> {
        let out = part(out);
        self.push(move |device| device.place_heads(x.turned(), heads, &out));
        Ok(())
    }

    fn qkv(&mut self, op: &QkvOp) -> Result<(), Error> {
        let write = |kv: KvWrite| KvWrite {
            k: kv.k.turned(),
            v: kv.v.turned(),
            k_norm: kv.k_norm.as_ref().map(norm),
            v_norm: kv.v_norm.as_ref().map(norm),
        };
        let op = QkvOp {
            q: op.q.turned(),
            q_norm: op.q_norm.as_ref().map(norm),
            kv: op.kv.map(write),
            rope: op.rope.map(Secret::turned),
            q_growth: op.q_growth,
            layer: op.layer.turned(),
        };
        self.push(move |device| device.qkv(&op));
        Ok(())
    }

    fn attention(&mut self, op: &AttentionOp) -> Result<(), Error> {
        if self.refuses == Refuses::Attention {
            return Err(Error::Unsupported { what: "attention" });
        }
        let op = AttentionOp {
            q: op.q.turned(),
            out: op.out.turned(),
            sinks: op.sinks.map(Secret::turned),
            layer: op.layer.turned(),
            ..*op
        };
        self.push(move |device| device.attention(&op));
        Ok(())
    }

    fn conv(&mut self, op: &ConvOp) -> Result<(), Error> {
        let op = ConvOp {
            x: op.x.turned(),
            weight: op.weight.turned(),
            bias: op.bias.map(Secret::turned),
            layer: op.layer.turned(),
            ..*op
        };
        self.push(move |device| device.conv(&op));
        Ok(())
    }

    fn delta_net(&mut self, op: &DeltaNetOp) -> Result<(), Error> {
        let op = DeltaNetOp {
            qkv: op.qkv.turned(),
            beta: op.beta.turned(),
            alpha: op.alpha.turned(),
            a: op.a.turned(),
            dt_bias: op.dt_bias.turned(),
            out: op.out.turned(),
            layer: op.layer.turned(),
            ..*op
        };
        self.push(move |device| device.delta_net(&op));
        Ok(())
    }

    fn mamba2(&mut self, op: &Mamba2Op) -> Result<(), Error> {
        let op = Mamba2Op {
            xbc: op.xbc.turned(),
            dt: op.dt.turned(),
            a: op.a.turned(),
            d: op.d.turned(),
            dt_bias: op.dt_bias.turned(),
            out: op.out.turned(),
            layer: op.layer.turned(),
            ..*op
        };
        self.push(move |device| device.mamba2(&op));
        Ok(())
    }

    fn accept(&mut self, rows: &[usize]) -> Result<(), Error> {
        let rows = rows.to_vec();
        self.push(move |device| device.accept(&rows));
        Ok(())
    }

    fn gated_norm(&mut self, op: &GatedNormOp) -> Result<(), Error> {
        let op = GatedNormOp { x: op.x.turned(), gate: op.gate.turned(), norm: norm(&op.norm), ..*op };
        self.push(move |device| device.gated_norm(&op));
        Ok(())
    }

    fn gate(&mut self, op: &GateOp) -> Result<(), Error> {
        let op = GateOp { gate: op.gate.turned(), up: op.up.map(Secret::turned), ..*op };
        self.push(move |device| device.gate(&op));
        Ok(())
    }

    fn scale_rows(&mut self, x: BufferId, gate: BufferId) -> Result<(), Error> {
        self.push(move |device| device.scale_rows(x.turned(), gate.turned()));
        Ok(())
    }

    fn scale(&mut self, x: BufferId, factor: f32) -> Result<(), Error> {
        self.push(move |device| device.scale(x.turned(), factor));
        Ok(())
    }

    fn add(&mut self, x: BufferId, y: BufferId, by: Option<&Norm>, scale: f32) -> Result<(), Error> {
        let by = by.map(norm);
        self.push(move |device| device.add(x.turned(), y.turned(), by.as_ref(), scale));
        Ok(())
    }

    fn moe(&mut self, op: &MoeOp) -> Result<(), Error> {
        let gate_up = match op.gate_up {
            ExpertGateUp::Separate { gate, up, gate_scale, up_scale, gate_bias, up_bias } => {
                ExpertGateUp::Separate {
                    gate: gate.turned(),
                    up: up.turned(),
                    gate_scale: gate_scale.map(Secret::turned),
                    up_scale: up_scale.map(Secret::turned),
                    gate_bias: gate_bias.map(Secret::turned),
                    up_bias: up_bias.map(Secret::turned),
                }
            }
            ExpertGateUp::Fused { gate_up, scale, bias } => ExpertGateUp::Fused {
                gate_up: gate_up.turned(),
                scale: scale.map(Secret::turned),
                bias: bias.map(Secret::turned),
            },
        };
        let op = MoeOp {
            x: op.x.turned(),
            router: op.router.turned(),
            out: op.out.turned(),
            gate_up,
            down: op.down.turned(),
            down_scale: op.down_scale.map(Secret::turned),
            down_bias: op.down_bias.map(Secret::turned),
            selection: Selection { bias: op.selection.bias.map(Secret::turned), ..op.selection },
            ..*op
        };
        self.push(move |device| device.moe(&op));
        Ok(())
    }

    fn gather_rows(&mut self, x: BufferId, rows: &[u32], out: BufferId) -> Result<(), Error> {
        let rows = rows.to_vec();
        self.push(move |device| device.gather_rows(x.turned(), &rows, out.turned()));
        Ok(())
    }

    fn finish_logits(&mut self, x: BufferId, scale: f32, softcap: Option<f32>) -> Result<(), Error> {
        self.push(move |device| device.finish_logits(x.turned(), scale, softcap));
        Ok(())
    }

    fn argmax(&mut self, x: BufferId, out: &mut Vec<u32>) -> Result<(), Error> {
        self.synchronise()?;
        self.device.argmax(x.turned(), out)?;
        let mut ledger = self.ledger.lock().unwrap();
        ledger.tokens += out.len();
        ledger.drawn_from.push(x);
        Ok(())
    }

    fn read_row(&mut self, x: BufferId, row: usize, out: &mut [f32]) -> Result<(), Error> {
        self.synchronise()?;
        self.ledger.lock().unwrap().rows.push((x, out.len()));
        self.device.read_row(x.turned(), row, out)
    }

    fn write_rows(&mut self, x: BufferId, values: &[f32]) -> Result<(), Error> {
        self.ledger.lock().unwrap().writes += 1;
        let values = values.to_vec();
        self.push(move |device| device.write_rows(x.turned(), &values));
        Ok(())
    }
}
