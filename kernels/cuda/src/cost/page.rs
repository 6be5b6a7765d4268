//! The page `docs/measurements/gpu-cost.md`: its text, and which of two pages has the slower kernels.

use super::bound::{DEPENDENT_GAP, GAP, Gpu, Limit};
use super::code::{ARITHMETIC_CYCLES, PRODUCT_CYCLES, SHARED_CYCLES, SLOW_CYCLES};
use super::{KernelCost, StepCost};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A row fails if its time or its instructions grow by more than this factor.
const ALLOWED: f64 = 1.05;
/// Kernels below this share of a step's time have no row.
const LEAST_SHARE: f64 = 0.03;
/// Columns of a kernel's row with its warp instructions and its time.
const COMPARED: [(usize, &str); 2] = [(6, "million warp instructions"), (9, "ms")];
const ALL: &str = "all";

/// Measured seconds of a step: GPU, model, step, file of the results. There are none yet.
const MEASURED: &[(&str, &str, &str, f64, &str)] = &[];

const HEAD: &str = include_str!("head.md");

/// Returns the page.
pub(super) fn render(gpus: &[Gpu], steps: &[StepCost]) -> String {
    let mut text = HEAD.to_owned();
    machines(&mut text, gpus).unwrap();
    summary(&mut text, gpus, steps).unwrap();
    for step in steps {
        kernels(&mut text, step).unwrap();
    }
    text
}

fn machines(text: &mut String, gpus: &[Gpu]) -> std::fmt::Result {
    let row = |text: &mut String, name: &str, of: &dyn Fn(&Gpu) -> String, source: &str| {
        let cells: Vec<String> = gpus.iter().map(of).collect();
        writeln!(text, "| {name} | {} | {source} |", cells.join(" | "))
    };
    let names: Vec<&str> = gpus.iter().map(|gpu| gpu.name).collect();
    writeln!(text, "\n## Machines\n\n| | {} | source |\n|---|---|---|---|", names.join(" | "))?;
    let guide = "CUDA C++ Programming Guide, compute capabilities 9.0 and 12.x";
    let sheet = "data sheets of H100 SXM and DGX Spark";
    row(text, "architecture", &|gpu| gpu.arch.to_string(), "")?;
    row(text, "multiprocessors (SMs)", &|gpu| gpu.multiprocessors.to_string(), sheet)?;
    row(
        text,
        "clock, GHz",
        &|gpu| digits(gpu.hertz / 1e9),
        "assumed under load: boost clock of H100 PCIe; GB10",
    )?;
    row(text, "memory, GB/s", &|gpu| digits(gpu.bandwidth / 1e9), sheet)?;
    row(text, "usable share of it", &|gpu| digits(gpu.usable), "assumed: copies of 3.0 TB/s; 240 GB/s")?;
    row(text, "L2 cache, MB", &|gpu| digits(gpu.l2_bytes / 1e6), "data sheet of H100; GB10: assumed")?;
    row(text, "shared memory of an SM, KiB", &|gpu| (gpu.shared_bytes >> 10).to_string(), guide)?;
    row(text, "warps of an SM", &|gpu| gpu.warps.to_string(), guide)?;
    row(text, "blocks of an SM", &|gpu| gpu.blocks.to_string(), guide)?;
    let lanes = "Hopper and RTX Blackwell white papers; two pipes by the documentation of Nsight Compute";
    row(text, "lanes of an SM that add, or multiply, integers", &|gpu| digits(gpu.integer_lanes), lanes)?;
    let products = "assumed: 62 % of H100's rate by the white paper, since `mma` is slower than `wgmma` (arXiv \
                    2402.13499); RTX Blackwell white paper";
    row(text, "8-bit products of an SM and cycle", &|gpu| digits(gpu.products[0]), products)?;
    row(text, "16-bit products of an SM and cycle", &|gpu| digits(gpu.products[1]), products)?;
    let scaled = "assumed: as 8-bit integers, with 4 bits twice that; 1 PFLOP of sparse FP4 by the data sheet of DGX \
                  Spark";
    let or_none = |rate: f64| if rate.is_finite() { digits(rate) } else { "none".into() };
    let name = "8-bit float products in blocks with scales, of an SM and cycle";
    row(text, name, &|gpu| or_none(gpu.products[2]), scaled)?;
    row(text, "the same with 4 bits", &|gpu| or_none(gpu.products[3]), scaled)?;
    let name = "16-bit products of warp groups, of an SM and cycle";
    row(text, name, &|gpu| or_none(gpu.products[4]), "Hopper white paper")?;
    row(text, "load from idle memory, us", &|gpu| digits(gpu.latency[0] * 1e6), "assumed")?;
    row(text, "load from busy memory, us", &|gpu| digits(gpu.latency[1] * 1e6), "assumed")?;
    row(text, "load from the L2 cache, cycles", &|gpu| digits(gpu.l2_cycles), "assumed")?;
    writeln!(
        text,
        "\nBoth have 65,536 registers in an SM, issue 4 instructions a cycle and have 16 lanes for special functions \
         and\n32 \
         for shared memory (the same guide). Assumed are the cycles until an instruction's result is there: arithmetic \
         {ARITHMETIC_CYCLES}, shared\nmemory {SHARED_CYCLES}, matrix products {PRODUCT_CYCLES}, shuffles and special \
         functions {SLOW_CYCLES}. Measurements of a device will replace the\nassumptions.\n\nAnother assumption is the gap \
         between two kernels of a graph: {} us, or {} us if the second one waits for the first\nitself, as all kernels of \
         the backend do (programmatic dependent launch). The second figure has no published source;\nllama.cpp's pull \
         request 22522 reports 376 instead of 332 tokens/s of gpt-oss-20b by these launches, 0.35 ms a step.",
        digits(GAP * 1e6),
        digits(DEPENDENT_GAP * 1e6)
    )
}

fn summary(text: &mut String, gpus: &[Gpu], steps: &[StepCost]) -> std::fmt::Result {
    writeln!(
        text,
        "\n## Predicted steps\n\nThe floor is the time in which the memory delivers the weights, keys and values at the \
         bandwidth of the data\nsheet. No kernel reaches it, because copies do not reach that bandwidth: the share of \
         the floor ends at the usable\nshare ({}). The share of the usable floor is that of the time at the usable \
         bandwidth.\n\n\
         | GPU | model | step | launches | read, GB | floor, ms | predicted, ms | tokens/s | of floor, % | of usable \
         floor, % | limits, % of time | device, ms |\n|---|---|---|---|---|---|---|---|---|---|---|---|",
        gpus.iter()
            .map(|gpu| format!("{} % on {}", digits(100.0 * gpu.usable), gpu.name))
            .collect::<Vec<_>>()
            .join(", ")
    )?;
    for step in steps {
        let seconds = step.seconds();
        let mut limits: BTreeMap<Limit, f64> = BTreeMap::from([(Limit::Gap, step.gaps)]);
        for kernel in &step.kernels {
            *limits.entry(kernel.by()).or_default() += kernel.seconds();
        }
        let mut limits: Vec<_> = limits.into_iter().collect();
        limits.sort_by(|a, b| b.1.total_cmp(&a.1));
        let limits: Vec<String> = limits
            .iter()
            .take(3)
            .map(|(limit, time)| format!("{limit} {:.0}", 100.0 * time / seconds))
            .collect();
        let name = step.step.to_string();
        let measured =
            MEASURED.iter().find(|found| (found.0, found.1, found.2) == (step.gpu.name, step.model, &name));
        let measured =
            measured.map_or_else(String::new, |found| format!("[{}]({})", digits(found.3 * 1e3), found.4));
        writeln!(
            text,
            "| {} | {} | {name} | {} | {} | {} | {} | {} | {:.0} | {:.0} | {} | {measured} |",
            step.gpu.name,
            step.model,
            step.launches(),
            digits(step.bytes / 1e9),
            digits(step.floor() * 1e3),
            digits(seconds * 1e3),
            digits(step.step.tokens() as f64 / seconds),
            100.0 * step.floor() / seconds,
            100.0 * step.floor() / (seconds * step.gpu.usable),
            limits.join(", "),
        )?;
    }
    Ok(())
}

fn kernels(text: &mut String, step: &StepCost) -> std::fmt::Result {
    writeln!(
        text,
        "\n## {}: {}, {}\n\n| kernel | launches | registers | shared, B | spills, B | blocks of an SM | warp \
         instructions, M | products and dots, M | in flight in an SM, KB | ms | limit |\n\
         |---|---|---|---|---|---|---|---|---|---|---|",
        step.gpu.name, step.model, step.step
    )?;
    let seconds = step.seconds();
    for kernel in step.kernels.iter().filter(|kernel| kernel.seconds() >= LEAST_SHARE * seconds) {
        let KernelCost { name, launches, resources, resident, issued, products, in_flight, .. } = kernel;
        writeln!(
            text,
            "| `{name}` | {launches} | {} | {} | {} | {resident} | {} | {} | {} | {} | {} |",
            resources.registers,
            resources.shared,
            resources.spills,
            digits(issued / 1e6),
            digits(products / 1e6),
            digits(in_flight / 1e3),
            digits(kernel.seconds() * 1e3),
            kernel.by(),
        )?;
    }
    let sum = |of: fn(&KernelCost) -> f64| digits(step.kernels.iter().map(of).sum::<f64>() / 1e6);
    writeln!(
        text,
        "| {ALL} | {} | | | | | {} | {} | | {} | |",
        step.launches(),
        sum(|kernel| kernel.issued),
        sum(|kernel| kernel.products),
        digits(seconds * 1e3),
    )
}

/// Formats a number with four digits.
fn digits(value: f64) -> String {
    // An empty sum is -0.
    let value = value + 0.0;
    let whole = value.abs().max(1e-9).log10().floor() as i32;
    let text = format!("{value:.*}", (3 - whole).clamp(0, 4) as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Compared columns of each kernel, by the heading of its table and its name.
fn rows(page: &str) -> BTreeMap<(&str, &str), [f64; 2]> {
    let (mut heading, mut rows) = ("", BTreeMap::new());
    for line in page.lines() {
        if let Some(text) = line.strip_prefix("## ") {
            heading = text;
        }
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let number = |(column, _): (usize, &str)| cells.get(column)?.parse().ok();
        if cells.len() == 11
            && let (Some(issued), Some(ms)) = (number(COMPARED[0]), number(COMPARED[1]))
        {
            rows.insert((heading, cells[0]), [issued, ms]);
        }
    }
    rows
}

/// Returns the steps and kernels of `new` that are more than 5 % worse than in `old`. A kernel may get worse where
/// that makes the step faster.
pub(super) fn worse(old: &str, new: &str) -> Vec<String> {
    let (old, new) = (rows(old), rows(new));
    let time = |rows: &BTreeMap<(&str, &str), [f64; 2]>, heading| rows.get(&(heading, ALL)).map(|row| row[1]);
    let mut found = Vec::new();
    for (key @ (heading, kernel), now) in &new {
        let Some(before) = old.get(key) else { continue };
        if *kernel != ALL && time(&new, heading) < time(&old, heading) {
            continue;
        }
        for ((before, now), (_, unit)) in before.iter().zip(now).zip(COMPARED) {
            if *now > before * ALLOWED {
                found.push(format!("{heading}, {kernel}: {now} {unit}, {before} before"));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "## GB10: A, batch 1\n\n| `a` | 3 | 8 | 0 | 0 | 2 | 100 | 0 | 5 | 10 | memory |\n\
                        | all | 3 | | | | | 200 | 0 | | 20 | |\n";

    #[test]
    fn a_kernel_that_gets_worse_by_more_than_a_twentieth_is_found() {
        assert!(worse(PAGE, PAGE).is_empty());
        let slower = PAGE.replace("| 10 |", "| 10.51 |");
        assert_eq!(worse(PAGE, &slower), ["GB10: A, batch 1, `a`: 10.51 ms, 10 before"]);
        assert!(worse(&slower, PAGE).is_empty());
        assert!(worse(PAGE, &PAGE.replace("| 10 |", "| 10.49 |")).is_empty());
        let longer = worse(PAGE, &PAGE.replace("| 200 |", "| 211 |").replace("| 100 |", "| 106 |"));
        assert_eq!(longer.len(), 2, "{longer:?}");
        // A kernel with the work of another one, in a faster step.
        assert!(worse(PAGE, &slower.replace("| 20 |", "| 19 |")).is_empty());
        assert_eq!(worse(PAGE, &PAGE.replace("| 20 |", "| 22 |")).len(), 1);
        // A kernel of another name is judged by the step.
        assert!(worse(PAGE, &slower.replace("`a`", "`b`")).is_empty());
    }

    #[test]
    fn numbers_have_four_digits() {
        for (value, text) in
            [(0.0, "0"), (0.123_46, "0.1235"), (1.0, "1"), (19.926_1, "19.93"), (12_345.6, "12346")]
        {
            assert_eq!(digits(value), text);
        }
    }
}
