//! Budgets of every kernel: registers, shared memory, instructions, as listed in `budgets.txt`.
//!
//! Most causes of slow kernels show in the machine code, without a device: spilled registers, narrow loads,
//! unused tensor cores.

use super::super::source::{self, Source};
use super::super::{Arch, Compiled, Compiler};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// (bytes of stack and spills per thread, accesses to them) that a compiler other than the checked one may
/// use.
const FEW_SPILLS: (u32, u32) = (16, 4);

const REGISTERS: u32 = 65_536;

const BUDGETS: &str = include_str!("../budgets.txt");

/// One line of the table.
#[derive(Debug, PartialEq)]
struct Budget<'a> {
    source: &'a str,
    kernel: &'a str,
    /// `None` for all of [`Arch::CHECKED`].
    arch: Option<&'a str>,
    registers: u32,
    /// Bytes of stack and spills.
    local: u32,
    shared: u32,
    wide_loads: u32,
    /// Prefixes of instructions that the kernel must contain.
    instructions: Vec<&'a str>,
}

/// Cost of a kernel, from the compiler's log and the disassembly.
#[derive(Debug, Default, PartialEq)]
struct Cost {
    registers: u32,
    shared: u32,
    /// Bytes of stack and spills.
    local: u32,
    /// Maximum number of threads of a block.
    threads: u32,
    /// Count of each instruction.
    instructions: BTreeMap<String, u32>,
}

impl<'a> Budget<'a> {
    /// Parses all lines, each with the name of its source.
    fn table(text: &'a str) -> Vec<Self> {
        let mut source = "";
        let mut budgets = Vec::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                Some(name) => source = name,
                None => budgets.push(Self::parse(source, line).unwrap_or_else(|| panic!("{line}"))),
            }
        }
        budgets
    }

    fn parse(source: &'a str, line: &'a str) -> Option<Self> {
        let mut columns = line.split_whitespace();
        let kernel = columns.next()?;
        let arch = columns.next().filter(|arch| *arch != "*");
        let registers = columns.next()?;
        let (registers, local) = registers.split_once('+').unwrap_or((registers, "0"));
        let (registers, local) = (registers.parse().ok()?, local.parse().ok()?);
        let mut number = || columns.next()?.parse().ok();
        let (shared, wide_loads) = (number()?, number()?);
        let instructions = columns.filter(|name| *name != "-").collect();
        Some(Self { source, kernel, arch, registers, local, shared, wide_loads, instructions })
    }

    fn is_for(&self, source: &Source, kernel: &str, arch: Arch) -> bool {
        matches(self.source, source.name)
            && matches(self.kernel, kernel)
            && self.arch.is_none_or(|of| of == arch.to_string())
    }

    /// Returns the parts of `cost` that exceed the budget. The budgets apply to the checked compiler.
    /// Another compiler may use more registers, as long as equally many blocks run on a multiprocessor.
    fn broken_by(&self, cost: &Cost, checked: bool) -> Vec<String> {
        let mut broken = Vec::new();
        let fewer = cost.blocks(cost.registers) < cost.blocks(self.registers);
        if cost.registers > self.registers && (checked || fewer) {
            broken.push(format!("{} registers, {} are allowed", cost.registers, self.registers));
        }
        if cost.shared > self.shared {
            broken.push(format!("{} bytes of shared memory, {} are allowed", cost.shared, self.shared));
        }
        let local = cost.count(|name| name.starts_with("LDL") || name.starts_with("STL"));
        let few = if checked { (0, 0) } else { FEW_SPILLS };
        // An access is of at least one register.
        let (max_local, max_accesses) = (self.local + few.0, self.local / 4 + few.1);
        if cost.local > max_local || local > max_accesses {
            broken.push(format!(
                "{} bytes of stack and spills, {local} accesses to local memory; {max_local} bytes are allowed",
                cost.local
            ));
        }
        if cost.wide_loads() < self.wide_loads {
            broken.push(format!("{} loads of 16 bytes, {} are meant", cost.wide_loads(), self.wide_loads));
        }
        for start in &self.instructions {
            if cost.count(|name| name.starts_with(start)) == 0 {
                broken.push(format!("no {start}"));
            }
        }
        broken
    }
}

impl Cost {
    /// Returns the blocks whose registers fit a multiprocessor, with `registers` per thread.
    fn blocks(&self, registers: u32) -> u32 {
        REGISTERS / (registers.next_multiple_of(8) * self.threads.max(32)).max(1)
    }

    fn count(&self, which: impl Fn(&str) -> bool) -> u32 {
        self.instructions.iter().filter(|(name, _)| which(name)).map(|(_, count)| count).sum()
    }

    fn wide_loads(&self) -> u32 {
        self.count(|name| name.starts_with("LDG") && name.contains(".128"))
    }

    /// Formats the cost as a line of the table.
    fn row(&self, kernel: &str, arch: Arch) -> String {
        let tensor: Vec<_> = ["HMMA", "HGMMA", "IMMA", "QMMA", "OMMA"]
            .into_iter()
            .filter(|start| self.count(|name| name.starts_with(start)) > 0)
            .collect();
        let tensor = if tensor.is_empty() { "-".into() } else { tensor.join(" ") };
        let local = if self.local == 0 { String::new() } else { format!("+{}", self.local) };
        format!("{kernel} {arch} {}{local} {} {} {tensor}", self.registers, self.shared, self.wide_loads())
    }
}

/// Whether a name is that of a budget, whose `*` at the beginning is for any text.
fn matches(pattern: &str, name: &str) -> bool {
    pattern.strip_prefix('*').map_or(pattern == name, |end| name.ends_with(end))
}

/// Returns the number before `unit` in a line of the compiler's log.
fn before(line: &str, unit: &str) -> u32 {
    let words: Vec<_> = line
        .split(unit)
        .next()
        .filter(|head| head.len() < line.len())
        .map_or(vec![], |head| head.split_whitespace().collect());
    words.last().and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// Reads registers and memory of each kernel from the compiler's log.
fn read_log(log: &str) -> BTreeMap<String, Cost> {
    let mut costs: BTreeMap<String, Cost> = BTreeMap::new();
    let mut kernel = None;
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            kernel = rest.split('\'').next().map(str::to_owned);
        }
        let Some(cost) = kernel.clone().map(|kernel| costs.entry(kernel).or_default()) else { continue };
        cost.local += before(line, " bytes stack frame")
            + before(line, " bytes spill stores")
            + before(line, " bytes spill loads");
        cost.registers = cost.registers.max(before(line, " registers"));
        cost.shared = cost.shared.max(before(line, " bytes smem"));
    }
    costs
}

/// Returns the most threads per block that a kernel's PTX declares, or 1,024 without a declaration.
fn threads(ptx: &str, kernel: &str) -> u32 {
    let entry = ptx.split(&format!(".entry {kernel}(")).nth(1).and_then(|rest| rest.split('{').next());
    let limit = entry.and_then(|entry| entry.split(".maxntid ").nth(1));
    limit
        .and_then(|limit| limit.split([',', '\n']).next())
        .and_then(|limit| limit.trim().parse().ok())
        .unwrap_or(1024)
}

/// Counts each kernel's instructions in a disassembly.
fn read_disassembly(text: &str, costs: &mut BTreeMap<String, Cost>) {
    let mut kernel = None;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix(".text.").and_then(|rest| rest.strip_suffix(':')) {
            kernel = Some(name.to_owned());
        }
        let (Some(kernel), Some((_, instruction))) = (&kernel, line.split_once("*/")) else { continue };
        let name = instruction.split_whitespace().find(|word| !word.starts_with('@'));
        if let (Some(name), Some(cost)) = (name, costs.get_mut(kernel)) {
            *cost.instructions.entry(name.trim_end_matches(';').to_owned()).or_default() += 1;
        }
    }
}

/// Returns registers, static shared memory and spills of each kernel.
pub(crate) fn resources(compiled: &Compiled) -> BTreeMap<String, [u32; 3]> {
    let costs = read_log(&compiled.log).into_iter();
    costs.map(|(kernel, cost)| (kernel, [cost.registers, cost.shared, cost.local])).collect()
}

/// Runs `nvdisasm`, which is next to NVRTC or on the path. Instructions follow the lines of their source.
pub(crate) fn disassemble(compiler: &Compiler, compiled: &Compiled) -> String {
    let next_to_nvrtc = Path::new(&compiler.found_at()).with_file_name("bin").join("nvdisasm");
    let program = if next_to_nvrtc.is_file() { next_to_nvrtc } else { "nvdisasm".into() };
    // Several tests disassemble the same kernels at once.
    static FILES: AtomicUsize = AtomicUsize::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let file = std::env::temp_dir().join(format!("kvasir-{}-{number}.cubin", std::process::id()));
    std::fs::write(&file, &compiled.cubin).unwrap();
    let output = Command::new(&program).args(["-c", "-ndf", "-g"]).arg(&file).output();
    std::fs::remove_file(&file).unwrap();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}; run `./test setup`", program.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn costs(compiler: &Compiler, source: &Source, arch: Arch) -> BTreeMap<String, Cost> {
    let compiled = super::compiled(source, arch);
    let mut costs = read_log(&compiled.log);
    costs.iter_mut().for_each(|(kernel, cost)| cost.threads = threads(&compiled.ptx, kernel));
    read_disassembly(&disassemble(compiler, compiled), &mut costs);
    costs
}

#[test]
fn every_kernel_keeps_to_its_budget() {
    let compiler = Compiler::find().unwrap();
    let budgets = Budget::table(BUDGETS);
    let checked = compiler.version() == (13, 0);
    let mut report = String::new();
    for budget in &budgets {
        let of = Arch::CHECKED
            .into_iter()
            .flat_map(source::all)
            .find(|source| matches(budget.source, source.name));
        let exists = of.is_some_and(|source| source.kernels.iter().any(|name| matches(budget.kernel, name)));
        assert!(exists, "there is no kernel {} in {} any more", budget.kernel, budget.source);
    }
    for (source, arch, costs) in
        super::each_compiled(|source, arch| (source, arch, costs(&compiler, source, arch)))
    {
        for kernel in source.kernels {
            let cost = &costs[*kernel];
            assert!(cost.count(|_| true) > 0, "no machine code of {kernel} found");
            let mut own = budgets.iter().filter(|budget| budget.is_for(source, kernel, arch));
            match (own.next(), own.next()) {
                (Some(budget), None) => {
                    for broken in budget.broken_by(cost, checked) {
                        writeln!(report, "[{}] {kernel} for {arch}: {broken}", source.name).unwrap();
                    }
                }
                (None, _) => {
                    let row = cost.row(kernel, arch);
                    writeln!(report, "[{}] no budget; it takes: {row}", source.name).unwrap();
                }
                (Some(_), Some(_)) => {
                    writeln!(report, "[{}] {kernel} for {arch}: two budgets", source.name).unwrap();
                }
            }
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

/// With another compiler, registers beyond a budget count only if fewer blocks fit.
#[test]
fn registers_of_another_compiler_count_by_the_blocks_that_fit() {
    for (registers, allowed, threads, fewer) in [
        (137, 128, 256, true),
        (148, 144, 256, false),
        (101, 96, 256, false),
        (164, 160, 128, false),
        (129, 128, 128, true),
        (130, 120, 32, true),
    ] {
        let cost = Cost { registers, threads, ..Cost::default() };
        let line = format!("a * {allowed} 0 0 -");
        let budget = Budget::parse("a.cu", &line).unwrap();
        assert_eq!(budget.broken_by(&cost, false).len(), usize::from(fewer), "{registers} {threads}");
        assert_eq!(budget.broken_by(&cost, true).len(), 1);
    }
    let ptx = ".visible .entry a(\n.param\n)\n.maxntid 256, 1, 1\n.minnctapersm 2\n{\n}\n.entry b(\n)\n.maxntid 128\n{}";
    assert_eq!((threads(ptx, "a"), threads(ptx, "b"), threads(ptx, "c")), (256, 128, 1024));
}

/// A kernel with a stack, narrow loads and shared memory. The gate must report all of it.
#[test]
fn a_kernel_beyond_its_budget_is_reported() {
    let source = Source {
        name: "beyond.cu",
        text: r#"
            extern "C" __global__ void beyond(const float *x, float *y, int n) {
                __shared__ float t[64];
                t[threadIdx.x & 63] = x[threadIdx.x];
                __syncthreads();
                float local[64];
                for (int i = 0; i < 64; i++) local[i] = x[i];
                float sum = 0;
                for (int i = 0; i < n; i++) sum += local[(i * 7) & 63] * t[i & 63];
                y[0] = sum;
            }"#,
        kernels: &["beyond"],
    };
    let compiler = Compiler::find().unwrap();
    for arch in Arch::CHECKED {
        let cost = &costs(&compiler, &source, arch)["beyond"];
        let budget = Budget::parse("beyond.cu", "beyond * 8 128 1 IMMA").unwrap();
        let broken = budget.broken_by(cost, true).join("\n");
        for reason in
            ["registers, 8", "256 bytes of shared", "256 bytes of stack", "0 loads of 16", "no IMMA"]
        {
            assert!(broken.contains(reason), "{reason} in {broken}");
        }
        let local = cost.count(|name| name.starts_with("LDL") || name.starts_with("STL"));
        assert!(local > 0 && cost.count(|name| name.starts_with("LDG")) > 0, "{cost:?}");
        let row = cost.row("beyond", arch);
        let own = Budget::parse("beyond.cu", &row).unwrap();
        assert!(own.is_for(&source, "beyond", arch) && own.broken_by(cost, true).is_empty(), "{row}");
        let less = Budget { local: cost.local - 4, ..own };
        assert_eq!(less.broken_by(cost, true).len(), 1, "{row}");
    }
}
