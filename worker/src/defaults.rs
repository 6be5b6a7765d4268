//! Defaults computed from the machine and the model, each with its reason. One pure function, so that
//! `--explain` prints what runs, and a table of cases can test it.

use std::ops::RangeInclusive;

pub(crate) const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Rows per second that one core computes, times the bytes of the weights. For int8 prefill, measured at
/// about 3,000 rows per second with two cores and 87 MB of weights, rounded down.
const ROW_BYTES_PER_CORE: u64 = 120_000_000_000;
/// Maximum time by which a prompt's chunk should delay the decoding sequences in its step.
const CHUNK_MILLIS: u64 = 250;
/// Range of a chunk's rows on a CPU.
const CPU_CHUNK: RangeInclusive<u64> = 64..=2048;
/// Range of a chunk's rows on a GPU. With fewer rows, matrix products are limited by reading the weights.
const GPU_CHUNK: RangeInclusive<u64> = 512..=2048;
/// Minimum average rows of an expert in a chunk on a GPU, up to the maximum chunk. A chunk reads nearly all
/// experts. With fewer rows for each, a GB10 (22 T multiply-adds and 240 GB per second, half a byte per weight)
/// spends more time on reading them than on multiplying.
const EXPERT_ROWS: u64 = 64;
/// A chunk is a multiple of this.
const CHUNK_STEP: u64 = 64;
/// Divisor of the memory after weights: a GPU's chunk uses at most that part for activations.
const ACTIVATIONS_DIVISOR: u64 = 8;
/// Maximum time that the rows of all sequences should add to a decode step on a GPU.
const DECODE_MILLIS: u64 = 50;
/// States of a sequence of maximum length: its own, and those at which other sequences can resume.
pub(crate) const STATES_PER_SEQUENCE: u64 = 9;
/// Length in tokens that concurrency is planned for.
pub(crate) const TOKENS_PER_SEQUENCE: u64 = 512;
/// Maximum rows of a decode step on a CPU. More rows do not improve utilization and only lengthen every step.
const MAX_SEQUENCES: u64 = 64;
/// Maximum rows of a decode step on a GPU, which reads its weights once for all of them.
const MAX_GPU_SEQUENCES: u64 = 256;
/// CPUs for each further lane of a weight download, see [`shipping_lanes`].
const CPUS_PER_LANE: usize = 4;
/// Maximum default number of lanes.
const MAX_LANES: usize = 8;

/// Resources of the machine, as this worker may use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Host {
    /// Total bytes of memory, or the control group's limit if it is lower.
    pub memory_total: u64,
    /// Bytes that can be allocated now.
    pub memory_available: u64,
    /// Threads that this worker will use.
    pub threads: u32,
    /// Number of workers that are started together on this machine, this one included.
    pub workers: u32,
    /// The GPU that computes. `None`: the CPU does. With a GPU, memory is the GPU's and `workers` are those
    /// that share it.
    pub gpu: Option<HostGpu>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostGpu {
    /// Multiply-adds per second that prompts reach.
    pub compute: u64,
    /// Whether it allocates from the host's memory.
    pub unified: bool,
}

impl Host {
    /// Whether a GPU allocates from the host's memory.
    pub fn unified_gpu(&self) -> bool {
        self.gpu.is_some_and(|gpu| gpu.unified)
    }

    /// This worker's share of the GPU's multiply-adds per second. `None` without a GPU.
    pub fn gpu_compute(&self) -> Option<u64> {
        self.gpu.map(|gpu| gpu.compute / u64::from(self.workers.max(1)))
    }
}

/// Resources that the model needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelNeeds {
    /// Bytes of weights that this worker has yet to allocate.
    pub weight_bytes: u64,
    /// Bytes of weights that a prompt row reads; of experts only those that the row uses.
    pub active_weight_bytes: u64,
    /// Multiply-adds of a prompt row.
    pub row_products: u64,
    /// Experts of a layer for each one that a row uses, rounded down; the layers' maximum. 1 without experts.
    pub experts_per_used: u64,
    /// Bytes of KV per token, summed over all layers.
    pub kv_bytes_per_token: u64,
    /// Bytes of recurrent state of one sequence, summed over all layers.
    pub state_bytes: u64,
    /// Bytes of activations per row of a step.
    pub activation_bytes_per_row: u64,
    /// Maximum tokens of a sequence.
    pub max_context: u32,
}

/// A value and its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explained<T> {
    pub value: T,
    pub reason: String,
}

/// The result of [`defaults`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defaults {
    /// Bytes of host memory that must stay free.
    pub floor_bytes: Explained<u64>,
    /// Rows of one prompt per step.
    pub chunk: Explained<u32>,
    pub max_seqs: Explained<usize>,
    /// Rows per step.
    pub max_batch_tokens: Explained<u32>,
    /// Bytes of the KV arena; a multiple of 1 MiB. 0: the model does not fit.
    pub arena_bytes: Explained<u64>,
}

/// Computes the defaults of a worker.
pub fn defaults(host: Host, model: ModelNeeds) -> Defaults {
    let floor_bytes = floor(host);
    let workers = u64::from(host.workers.max(1));
    let usable = host.memory_available.saturating_sub(floor_bytes.value) / workers;
    let per_token = model.kv_bytes_per_token.max(1);

    // The arena's size determines the useful number of sequences, and their rows determine the activations.
    // Concurrency is planned from the memory before activations.
    let room = usable.saturating_sub(model.weight_bytes);
    let chunk = chunk(host, model, room);
    let max_sequences = max_sequences(host, model);
    let states = STATES_PER_SEQUENCE.saturating_mul(model.state_bytes);
    let fit = room / per_token.saturating_mul(TOKENS_PER_SEQUENCE).saturating_add(model.state_bytes);
    let max_seqs = fit.clamp(1, max_sequences) as usize;
    let max_batch_tokens = chunk.value.saturating_add(max_seqs as u32);
    let activations = u64::from(max_batch_tokens).saturating_mul(model.activation_bytes_per_row);
    // A tenth is left for memory that is not counted: queues, tables, the prefix tree, buffers.
    let left = room.saturating_sub(activations) / 10 * 9;
    let longest = u64::from(model.max_context).saturating_mul(per_token).saturating_add(states);
    let max_arena = (max_seqs as u64).saturating_mul(longest);
    let max_arena = max_arena.div_ceil(MIB).saturating_mul(MIB);
    let cap = arena_cap(host);
    let arena = left.min(max_arena).min(cap) / MIB * MIB;
    let share = if workers > 1 { format!(", shared by {workers} workers") } else { String::new() };
    let arena_reason = if arena == max_arena {
        format!("{max_seqs} sequences of {} tokens at {per_token} bytes per token", model.max_context)
    } else if cap <= left {
        format!("a quarter of this machine's {}{share}", human(host.memory_total))
    } else {
        format!(
            "90 % of what {} available leave above the floor{share}, after {} of weights and {} of activations",
            human(host.memory_available),
            human(model.weight_bytes),
            human(activations),
        )
    };
    Defaults {
        floor_bytes,
        max_seqs: Explained {
            value: max_seqs,
            reason: match host.gpu {
                _ if fit <= max_sequences => {
                    format!("memory for {fit} sequences of {TOKENS_PER_SEQUENCE} tokens")
                }
                None => "64 rows fill the matrix units; more only lengthens every step".to_owned(),
                Some(_) => format!(
                    "about {DECODE_MILLIS} ms of this GPU at {} million multiply-adds per row, between \
                     {MAX_SEQUENCES} and {MAX_GPU_SEQUENCES}",
                    model.row_products / 1_000_000
                ),
            },
        },
        max_batch_tokens: Explained {
            value: max_batch_tokens,
            reason: format!(
                "one chunk of {} rows beside one row for each of {max_seqs} sequences",
                chunk.value
            ),
        },
        chunk,
        arena_bytes: Explained { value: arena, reason: arena_reason },
    }
}

/// Maximum bytes of the KV arena. A host also runs other work; a GPU is assumed to be dedicated, even if it
/// shares the host's memory.
pub(crate) fn arena_cap(host: Host) -> u64 {
    match host.gpu {
        Some(_) => u64::MAX,
        None => host.memory_total / 4 / u64::from(host.workers.max(1)),
    }
}

/// Maximum number of sequences that are computed at a time if memory allows.
pub(crate) fn max_sequences(host: Host, model: ModelNeeds) -> u64 {
    let Some(compute) = host.gpu_compute() else { return MAX_SEQUENCES };
    let rows = (compute / 1000).saturating_mul(DECODE_MILLIS) / model.row_products.max(1);
    rows.clamp(MAX_SEQUENCES, MAX_GPU_SEQUENCES) / 32 * 32
}

/// Memory that must stay free for the rest of the machine, and on a GPU for what is not planned: its context,
/// kernels and graphs.
pub fn floor(host: Host) -> Explained<u64> {
    let total = host.memory_total;
    if host.unified_gpu() {
        let value = (12 * GIB).max(total / 10).min(total / 2);
        let reason = "a machine whose GPU shares its memory locks up when it runs out: 12 GiB or a tenth";
        return Explained { value, reason: reason.to_owned() };
    }
    let value = (512 * MIB).max(total / 20).min(total / 4);
    Explained { value, reason: format!("512 MiB or a twentieth of {}, at most a quarter", human(total)) }
}

/// Number of UDP sockets for weight downloads, for a worker on a machine where `workers` workers share `cpus`
/// CPUs.
///
/// At full speed a lane uses two CPUs, one that reads the socket and one that decrypts. Hashing, writing and
/// loading use further CPUs. With three CPUs or fewer, a second lane has no CPU left. From eight lanes on, a
/// link of 200 Gbit/s is no longer limited by the lanes alone.
pub fn shipping_lanes(cpus: usize, workers: usize) -> Explained<usize> {
    let cpus = cpus / workers.max(1);
    let value = (1 + cpus / CPUS_PER_LANE).min(MAX_LANES);
    let reason = match value {
        1 => format!("{cpus} CPUs have enough to do with one"),
        MAX_LANES => {
            format!("one for each {CPUS_PER_LANE} of {cpus} CPUs and one more, at most {MAX_LANES}")
        }
        _ => format!("one for each {CPUS_PER_LANE} of {cpus} CPUs and one more"),
    };
    Explained { value, reason }
}

fn chunk(host: Host, model: ModelNeeds, room: u64) -> Explained<u32> {
    let within = |rows: u64, limits: &RangeInclusive<u64>| {
        (rows / CHUNK_STEP * CHUNK_STEP).clamp(*limits.start(), *limits.end())
    };
    let limits = |limits: RangeInclusive<u64>| format!("between {} and {}", limits.start(), limits.end());
    let Some(compute) = host.gpu_compute() else {
        let threads = host.threads.max(1);
        let rows_per_second =
            u64::from(threads).saturating_mul(ROW_BYTES_PER_CORE) / model.active_weight_bytes.max(1);
        let rows = rows_per_second.saturating_mul(CHUNK_MILLIS) / 1000;
        let reason = format!(
            "about {CHUNK_MILLIS} ms of {threads} threads at {} of weights per row, {}",
            human(model.active_weight_bytes),
            limits(CPU_CHUNK)
        );
        return Explained { value: within(rows, &CPU_CHUNK) as u32, reason };
    };
    let timed = (compute / 1000).saturating_mul(CHUNK_MILLIS) / model.row_products.max(1);
    let shared = EXPERT_ROWS.saturating_mul(model.experts_per_used);
    let rows = within(timed.max(shared), &GPU_CHUNK);
    let fit = room / ACTIVATIONS_DIVISOR / model.activation_bytes_per_row.max(1);
    if fit < rows {
        let value = (fit / CHUNK_STEP * CHUNK_STEP).max(CHUNK_STEP);
        let reason = format!(
            "activations, {} KiB a row, in an eighth of the {} behind the weights",
            model.activation_bytes_per_row / 1024,
            human(room)
        );
        return Explained { value: value as u32, reason };
    }
    let reason = if rows > within(timed, &GPU_CHUNK) {
        format!(
            "{EXPERT_ROWS} rows for an expert of which a row uses one in {}, {}",
            model.experts_per_used,
            limits(GPU_CHUNK)
        )
    } else {
        format!(
            "about {CHUNK_MILLIS} ms of this GPU at {} million multiply-adds per row, {}",
            model.row_products / 1_000_000,
            limits(GPU_CHUNK)
        )
    };
    Explained { value: rows as u32, reason }
}

fn human(bytes: u64) -> String {
    if bytes >= GIB {
        format!("{:.1} GiB", bytes as f64 / GIB as f64)
    } else {
        format!("{} MiB", bytes / MIB)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMOLLM2: ModelNeeds = ModelNeeds {
        weight_bytes: 87 * MIB,
        active_weight_bytes: 87 * MIB,
        row_products: 106_000_000,
        experts_per_used: 1,
        kv_bytes_per_token: 23_040,
        state_bytes: 0,
        activation_bytes_per_row: 64 * 1024,
        max_context: 8192,
    };
    const EIGHT_B: ModelNeeds = ModelNeeds {
        weight_bytes: 4700 * MIB,
        active_weight_bytes: 4700 * MIB,
        row_products: 7_000_000_000,
        experts_per_used: 1,
        kv_bytes_per_token: 131_072,
        state_bytes: 0,
        activation_bytes_per_row: 512 * 1024,
        max_context: 131_072,
    };

    /// gpt-oss-120b, MXFP4: 4 of 128 experts.
    const OSS_120B: ModelNeeds = ModelNeeds {
        weight_bytes: 66_000 * MIB,
        active_weight_bytes: 2_900 * MIB,
        row_products: 5_000_000_000,
        experts_per_used: 32,
        kv_bytes_per_token: 73_728,
        state_bytes: 0,
        activation_bytes_per_row: 900 * 1024,
        max_context: 131_072,
    };
    /// Qwen3-30B-A3B, Q4_K_M: 8 of 128 experts.
    const A3B: ModelNeeds = ModelNeeds {
        weight_bytes: 19_500 * MIB,
        active_weight_bytes: 1_700 * MIB,
        row_products: 3_000_000_000,
        experts_per_used: 16,
        kv_bytes_per_token: 98_304,
        state_bytes: 0,
        activation_bytes_per_row: 440 * 1024,
        max_context: 131_072,
    };
    const H100: HostGpu = HostGpu { compute: 49_658_400_000_000, unified: false };
    const GB10: HostGpu = HostGpu { compute: 22_000_000_000_000, unified: true };
    const SMALL: HostGpu = HostGpu { compute: 3_000_000_000_000, unified: false };

    fn host(total: u64, threads: u32, workers: u32) -> Host {
        Host { memory_total: total, memory_available: total / 10 * 9, threads, workers, gpu: None }
    }

    /// `available` of `total` GiB. One thread, so that a GPU's values cannot depend on the CPU's.
    fn gpu(total: u64, available: u64, workers: u32, gpu: HostGpu) -> Host {
        let (memory_total, memory_available) = (total * GIB, available * GIB);
        Host { memory_total, memory_available, threads: 1, workers, gpu: Some(gpu) }
    }

    #[test]
    fn table() {
        // (host, model) -> (floor MiB, chunk, max_seqs, max_batch_tokens, arena MiB)
        let cases = [
            ((host(23 * GIB, 2, 1), SMOLLM2), (1177, 640, 64, 704, 5888)),
            ((host(23 * GIB, 1, 2), SMOLLM2), (1177, 320, 64, 384, 2944)),
            ((host(2 * GIB, 2, 1), SMOLLM2), (512, 640, 64, 704, 512)),
            ((host(GIB, 1, 1), SMOLLM2), (256, 320, 51, 371, 256)),
            ((host(16 * GIB, 8, 1), EIGHT_B), (819, 64, 64, 128, 4096)),
            ((host(6 * GIB, 8, 1), EIGHT_B), (512, 64, 4, 68, 255)),
            ((host(4 * GIB, 8, 1), EIGHT_B), (512, 64, 1, 65, 0)),
            ((gpu(128, 115, 1, GB10), EIGHT_B), (13107, 768, 128, 896, 89554)),
            ((gpu(128, 115, 1, GB10), A3B), (13107, 1792, 256, 2048, 75845)),
            ((gpu(128, 115, 2, GB10), A3B), (13107, 1024, 160, 1184, 29085)),
            ((gpu(128, 115, 1, GB10), OSS_120B), (13107, 2048, 192, 2240, 33015)),
            ((gpu(128, 115, 2, GB10), EIGHT_B), (13107, 512, 64, 576, 42604)),
            ((gpu(80, 79, 1, H100), EIGHT_B), (4096, 1728, 256, 1984, 63997)),
            ((gpu(80, 79, 1, H100), A3B), (4096, 2048, 256, 2304, 50679)),
            ((gpu(80, 79, 1, H100), OSS_120B), (4096, 1536, 256, 1792, 8302)),
            ((gpu(80, 79, 2, H100), EIGHT_B), (4096, 832, 160, 992, 29883)),
            ((gpu(80, 79, 1, H100), SMOLLM2), (4096, 2048, 256, 2304, 46080)),
            ((gpu(8, 7, 1, SMALL), EIGHT_B), (512, 448, 30, 478, 1545)),
            ((gpu(6, 5, 1, SMALL), EIGHT_B), (512, 64, 1, 65, 0)),
            ((host(0, 0, 0), SMOLLM2), (0, 320, 1, 321, 0)),
        ];
        for ((host, model), expected) in cases {
            let d = defaults(host, model);
            let actual = (
                d.floor_bytes.value / MIB,
                d.chunk.value,
                d.max_seqs.value,
                d.max_batch_tokens.value,
                d.arena_bytes.value / MIB,
            );
            assert_eq!(actual, expected, "{host:?}");
        }
    }

    #[test]
    fn lanes_for_weights() {
        // (CPUs, workers) -> lanes
        let cases = [
            ((0, 0), 1),
            ((1, 1), 1),
            ((2, 1), 1),
            ((3, 1), 1),
            ((4, 1), 2),
            ((7, 1), 2),
            ((8, 1), 3),
            ((20, 1), 6),
            ((27, 1), 7),
            ((28, 1), 8),
            ((192, 1), 8),
            ((usize::MAX, 1), 8),
            // Workers share the CPUs.
            ((20, 2), 3),
            ((20, 4), 2),
            ((20, 8), 1),
            ((4, 8), 1),
        ];
        for ((cpus, workers), lanes) in cases {
            let explained = shipping_lanes(cpus, workers);
            assert_eq!(explained.value, lanes, "{cpus} CPUs, {workers} workers: {}", explained.reason);
        }
        assert_eq!(shipping_lanes(20, 1).reason, "one for each 4 of 20 CPUs and one more");
        assert_eq!(shipping_lanes(2, 1).reason, "2 CPUs have enough to do with one");
    }

    #[test]
    fn all_workers_of_a_machine_stay_above_the_floor() {
        for total_mib in (64..40_000).step_by(777) {
            for workers in 1..5 {
                for (model, gpu) in
                    [(SMOLLM2, None), (EIGHT_B, None), (SMOLLM2, Some(H100)), (EIGHT_B, Some(GB10))]
                {
                    let host = Host { gpu, ..host(total_mib * MIB, 2, workers) };
                    let d = defaults(host, model);
                    if d.arena_bytes.value > 0 {
                        let rows = u64::from(d.max_batch_tokens.value);
                        let each =
                            d.arena_bytes.value + model.weight_bytes + rows * model.activation_bytes_per_row;
                        let left = host.memory_available - each * u64::from(workers);
                        assert!(left >= d.floor_bytes.value, "{host:?}: {d:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn reasons_name_the_figures() {
        let d = defaults(host(6 * GIB, 8, 1), EIGHT_B);
        assert_eq!(
            d.arena_bytes.reason,
            "90 % of what 5.4 GiB available leave above the floor, after 4.6 GiB of weights and 34 MiB of activations"
        );
        let d = defaults(gpu(80, 79, 1, H100), EIGHT_B);
        assert_eq!(
            (d.chunk.reason.as_str(), d.max_seqs.reason.as_str()),
            (
                "about 250 ms of this GPU at 7000 million multiply-adds per row, between 512 and 2048",
                "about 50 ms of this GPU at 7000 million multiply-adds per row, between 64 and 256",
            )
        );
        let d = defaults(gpu(128, 115, 1, GB10), OSS_120B);
        assert_eq!(
            d.chunk.reason,
            "64 rows for an expert of which a row uses one in 32, between 512 and 2048"
        );
        let d = defaults(gpu(8, 7, 1, SMALL), EIGHT_B);
        assert_eq!(
            d.chunk.reason,
            "activations, 512 KiB a row, in an eighth of the 1.9 GiB behind the weights"
        );
        let d = defaults(host(23 * GIB, 1, 2), SMOLLM2);
        assert_eq!(d.arena_bytes.reason, "a quarter of this machine's 23.0 GiB, shared by 2 workers");
        let d = defaults(host(64 * GIB, 2, 1), SMOLLM2);
        assert_eq!(d.arena_bytes.reason, "64 sequences of 8192 tokens at 23040 bytes per token");
    }
}
