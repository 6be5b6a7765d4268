//! `kvasir gpu-bench`: measures a GPU's speed for a worker's operations.

use crate::gpu_check;
use anyhow::{Result, bail};
use clap::ValueEnum;
use cuda::speed::{AttentionCase, DecodeShape, ProductCase, Speed};
use cuda::{Gpu, GpuInfo, Survey};
use kernels::backend::KvType;
use kernels::quant::GgmlType;
use serde_json::{Value, json};
use std::io::Write;
use std::time::{Duration, Instant};

/// Bytes copied to measure memory: many times the size of the caches.
const COPY_BYTES: usize = 1 << 30;
/// Timed runs of each row.
const RUNS: usize = 9;
/// Prompt rows computed at once.
const PROMPT_ROWS: usize = 512;

/// Measures a GPU: matrix products, attention over scattered blocks, decode steps of an 8B model with random weights
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  kvasir gpu-bench products --json\n\n\
    bench/gpu/run.py runs all parts and the other GPU checks, and writes a table.")]
pub(crate) struct GpuBench {
    /// Part to measure
    #[arg(value_enum)]
    part: BenchSection,
    /// Start no further row after this time
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    seconds: u64,
    /// Print one JSON object for each row, as soon as it is measured
    #[arg(long)]
    json: bool,
}

/// Rows that belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchSection {
    /// Large matrices with 1 to 8 tokens
    Products,
    /// One row of each sequence, over consecutive and over scattered blocks
    Attention,
    /// Steps of Llama 3.1 8B, Q4_K_M, with and without a CUDA graph
    Decode,
}

/// Prints rows while time is left.
struct Rows {
    json: bool,
    until: Instant,
    /// Bandwidth of copies in bytes per second, reads plus writes.
    copies: f64,
    failed: usize,
    skipped: usize,
}

impl GpuBench {
    /// Runs the command.
    pub(crate) fn run(self) -> Result<()> {
        let survey = Survey::take(true);
        let (info, compiler) = match survey.usable(0) {
            Ok(found) => found,
            Err(missing) => bail!("no usable GPU: {missing}"),
        };
        let until = Instant::now() + Duration::from_secs(self.seconds);
        let gpu = Gpu::open(info.ordinal)?;
        // Copies and rows use several times the size of the second-level cache.
        let spread = (8 * info.l2_bytes as usize).max(1 << 28);
        let speed = Speed::new(Box::new(gpu), gpu_check::compile(compiler, info.arch), spread, RUNS);
        let copies = speed.copies(COPY_BYTES)?;
        let mut rows = Rows { json: self.json, until, copies, failed: 0, skipped: 0 };
        rows.print(&json!({
            "part": "device",
            "name": info.name,
            "arch": info.arch.to_string(),
            "multiprocessors": info.multiprocessors,
            "copy_gbs": copies / 1e9,
        }))?;
        match self.part {
            BenchSection::Products => products(&speed, &mut rows)?,
            BenchSection::Attention => attention(&speed, &mut rows)?,
            BenchSection::Decode => decode(&speed, &info, &mut rows)?,
        }
        rows.print(&json!({"part": "end", "failed": rows.failed, "skipped": rows.skipped}))?;
        if rows.failed > 0 { bail!("{} rows could not be measured", rows.failed) } else { Ok(()) }
    }
}

fn products(speed: &Speed, rows: &mut Rows) -> Result<()> {
    const SHAPES: [(usize, usize); 4] = [(4096, 4096), (14_336, 4096), (4096, 14_336), (128_256, 4096)];
    use GgmlType::{F16, MXFP4, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    // The most important rows come first, in case time runs out.
    for tokens in [1, 2, 4, 8] {
        for ty in [Q4_K, Q6_K, Q8_0, Q4_0, MXFP4, F16, Q5_K] {
            for (outputs, cols) in SHAPES {
                let case = ProductCase { ty, rows: outputs, cols, tokens };
                let of = json!({"part": "products", "type": ty.name(), "rows": outputs, "cols": cols, "tokens": tokens});
                rows.measure(of, |copies| {
                    let found = speed.product(&case)?;
                    let rate = found.bytes as f64 / found.seconds;
                    Ok(json!({"us": found.seconds * 1e6, "gbs": rate / 1e9, "of_copy": rate / copies}))
                })?;
            }
        }
    }
    Ok(())
}

fn attention(speed: &Speed, rows: &mut Rows) -> Result<()> {
    for (kv_type, heads, kv_heads, block_tokens, batch) in [
        (KvType::F16, 32, 8, 16, 1),
        (KvType::F16, 32, 8, 16, 8),
        (KvType::Q8_0, 32, 8, 16, 8),
        (KvType::F16, 32, 8, 64, 8),
        (KvType::F16, 32, 32, 16, 1),
        (KvType::F16, 16, 2, 16, 32),
        (KvType::F32, 32, 8, 16, 8),
    ] {
        for context in [512, 4096, 16_384, 32_768] {
            let case = AttentionCase { kv_type, heads, kv_heads, width: 128, block_tokens, context, batch };
            let of = json!({
                "part": "attention",
                "kv_type": kv_type.name(),
                "heads": heads,
                "kv_heads": kv_heads,
                "block_tokens": block_tokens,
                "batch": batch,
                "context": context,
            });
            rows.measure(of, |copies| {
                let found = speed.attention(&case)?;
                let rate = found.bytes as f64 / found.paged;
                Ok(json!({
                    "contiguous_us": found.contiguous * 1e6,
                    "paged_us": found.paged * 1e6,
                    "ratio": found.paged / found.contiguous,
                    "shared_us": found.shared.map(|seconds| seconds * 1e6),
                    "gbs": rate / 1e9,
                    "of_copy": rate / copies,
                }))
            })?;
        }
    }
    Ok(())
}

fn decode(speed: &Speed, info: &GpuInfo, rows: &mut Rows) -> Result<()> {
    let threads = engine::cgroup::cpus().get();
    let mut model = speed.model(info.arch, DecodeShape::LLAMA_8B, (PROMPT_ROWS, 40_000), threads)?;
    for (batch, context, prompt) in [
        (1, 511, 1),
        (1, 4095, 1),
        (8, 511, 1),
        (1, 0, PROMPT_ROWS),
        (1, 4096, PROMPT_ROWS),
        (1, 32_767, 1),
        (32, 511, 1),
        (1, 16_384, PROMPT_ROWS),
    ] {
        let of = json!({"part": "decode", "batch": batch, "context": context, "rows": prompt});
        rows.measure(of, |copies| {
            let found = model.step(batch, context, prompt)?;
            let min_seconds = (found.weight_bytes + found.kv_bytes) as f64 / copies;
            Ok(json!({
                "weight_bytes": found.weight_bytes,
                "kv_bytes": found.kv_bytes,
                "eager_ms": found.eager * 1e3,
                "graph_ms": found.graph * 1e3,
                "tokens_per_second": (batch * prompt) as f64 / found.graph,
                "of_floor": min_seconds / found.graph,
            }))
        })?;
    }
    Ok(())
}

impl Rows {
    /// Measures a row if time is left, and prints its parameters with the result or the error.
    fn measure(
        &mut self,
        mut row: Value,
        measure: impl FnOnce(f64) -> Result<Value, kernels::Error>,
    ) -> Result<()> {
        if Instant::now() >= self.until {
            self.skipped += 1;
            return Ok(());
        }
        let found = measure(self.copies).unwrap_or_else(|error| {
            self.failed += 1;
            json!({"error": error.to_string()})
        });
        if let (Value::Object(row), Value::Object(found)) = (&mut row, found) {
            row.extend(found);
        }
        self.print(&row)
    }

    fn print(&self, row: &Value) -> Result<()> {
        let mut out = std::io::stdout().lock();
        match (self.json, row) {
            (false, Value::Object(row)) => writeln!(out, "{}", in_words(row))?,
            _ => writeln!(out, "{row}")?,
        }
        Ok(out.flush()?)
    }
}

/// Formats `key value` pairs, numbers with four digits.
fn in_words(row: &serde_json::Map<String, Value>) -> String {
    let value = |value: &Value| match value {
        Value::Number(number) if number.is_f64() => {
            let number = number.as_f64().unwrap_or(f64::NAN);
            let digits = 3 - (number.abs().log10().floor() as i32).clamp(0, 3);
            format!("{number:.0$}", digits.unsigned_abs() as usize)
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    row.iter().map(|(key, found)| format!("{key} {}", value(found))).collect::<Vec<_>>().join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_printed_in_words() {
        let row = json!({"part": "products", "tokens": 1, "us": 12.3456, "gbs": 4321.9, "of_copy": 0.87654});
        let Value::Object(row) = row else { unreachable!() };
        assert_eq!(in_words(&row), "part products  tokens 1  us 12.35  gbs 4322  of_copy 0.877");
    }

    #[test]
    fn a_row_that_fails_or_comes_too_late_is_counted() {
        let deadline = Instant::now() + Duration::from_secs(3600);
        let mut rows = Rows { json: true, until: deadline, copies: 1.0, failed: 0, skipped: 0 };
        rows.measure(json!({"part": "decode"}), |_| Err(kernels::Error::EmptyWindow)).unwrap();
        rows.measure(json!({"part": "decode"}), |copies| Ok(json!({"copies": copies}))).unwrap();
        rows.until = Instant::now();
        rows.measure(json!({"part": "decode"}), |_| unreachable!()).unwrap();
        assert_eq!((rows.failed, rows.skipped), (1, 1));
    }
    /// Output of `bench/gpu/run.py` for the results of a partly failed run.
    #[test]
    fn the_table_of_a_run_is_as_it_was_seen() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/gpu");
        let run = |arguments: &[&str]| {
            let mut python = std::process::Command::new("python3");
            python.arg(folder.join("run.py")).args(arguments).current_dir(&folder).output().unwrap()
        };
        let rendered = run(&["--render", "sample.json"]);
        assert!(rendered.status.success(), "{}", String::from_utf8_lossy(&rendered.stderr));
        let seen = std::fs::read_to_string(folder.join("sample.md")).unwrap();
        assert_eq!(String::from_utf8(rendered.stdout).unwrap(), seen);
        let wrong = run(&["--only", "speed"]);
        assert_eq!(wrong.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&wrong.stderr).contains("no part speed"));
        let invented = std::fs::read_to_string(folder.join("sample.json")).unwrap();
        assert!(invented.lines().nth(1).unwrap().contains("invented") && seen.contains("**Invented**"));
    }

    /// Device time must not be wasted: the run works without git, network and GPU, and with an executable
    /// that hangs.
    #[test]
    fn a_run_keeps_to_its_limits_and_leaves_its_results() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/gpu");
        let dir = tempfile::tempdir().unwrap();
        let kvasir = dir.path().join("kvasir");
        let hangs =
            "#!/bin/sh\n[ \"$CUDA_VISIBLE_DEVICES\" = -1 ] && echo '{}' && exit 1\nexec /bin/sleep 600\n";
        std::fs::write(&kvasir, hangs).unwrap();
        std::fs::set_permissions(&kvasir, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let out = dir.path().join("results");
        // The interpreter's own path, because with an empty PATH nothing else is found, including git.
        let python = std::process::Command::new("python3");
        let python = { python }.args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
        let run = std::process::Command::new(String::from_utf8(python.stdout).unwrap().trim())
            .env("PATH", "/nonexistent")
            .arg(folder.join("run.py"))
            .args(["--only", "check,variants,decode", "--limit", "check=1", "--limit", "decode=1", "--bin"])
            .args([dir.path(), std::path::Path::new("--out"), &out])
            .output()
            .unwrap();
        assert_eq!(run.status.code(), Some(1), "{}", String::from_utf8_lossy(&run.stderr));
        let results: Vec<_> = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(results.len(), 2, "{results:?}");
        let json = results.iter().find(|path| path.extension().is_some_and(|end| end == "json")).unwrap();
        let report: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
        assert_eq!(report["commit"], "an unknown commit");
        for section in ["check", "decode"] {
            assert_eq!(report["parts"][section]["status"], "failed");
            assert!(report["parts"][section]["why"].as_str().unwrap().contains("more than 1 s"), "{report}");
        }
        assert_eq!(report["parts"]["variants"]["status"], "skipped");
        let missing = std::process::Command::new("python3")
            .arg(folder.join("run.py"))
            .args(["--bin", "/nonexistent", "--out"])
            .arg(&out)
            .output()
            .unwrap();
        assert_eq!(missing.status.code(), Some(2));
    }

    /// Every change that `variants.py` makes to the products still matches their source.
    #[test]
    fn variants_of_products_fit_the_sources() {
        let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/gpu/variants.py");
        let checked = std::process::Command::new("python3").arg(script).arg("--check").output().unwrap();
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    }
}
