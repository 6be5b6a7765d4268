//! Machine code of a kernel: instructions, basic blocks, the time of one warp.
//!
//! Machine code does not tell the runs of its blocks. The interpreter counts those of the PTX, and both
//! name the lines of the CUDA source. A load, store, product, shuffle or barrier of a line is the same instruction in
//! both, so that these give a basic block's count; without one, all instructions of its lines do.

use ptx::{Executed, Listed};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::RangeInclusive;

/// Instructions that are the same in PTX and in machine code, with the pipe that runs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Class {
    GlobalLoad,
    GlobalStore,
    /// To shared memory, past the registers.
    CopyAsync,
    SharedLoad,
    SharedStore,
    IntegerProduct,
    FloatProduct,
    Dot,
    Shuffle,
    Special,
    Barrier,
    /// No anchor: floating point.
    Float,
    /// No anchor: bits and integers without multiplications, fast conversions, moves.
    Integer,
    /// No anchor: multiplications of integers, which the pipe of floating point does.
    Multiply,
    /// No anchor: slow conversions and counts of bits, which the pipe of special functions does.
    Convert,
    /// No anchor: branches, uniform registers and the rest.
    Other,
}

impl Class {
    /// Whether PTX and machine code have equally many.
    fn anchors(self) -> bool {
        !matches!(self, Self::Float | Self::Integer | Self::Multiply | Self::Convert | Self::Other)
    }

    /// Whether the compiler never removes or repeats one.
    fn is_exact(self) -> bool {
        use Class::{Barrier, Dot, FloatProduct, IntegerProduct, Shuffle};
        matches!(self, Barrier | Dot | FloatProduct | IntegerProduct | Shuffle)
    }

    fn of_machine_code(name: &str) -> Self {
        let base = name.split('.').next().unwrap_or(name);
        match base {
            "LDG" | "LD" => Self::GlobalLoad,
            "STG" | "ST" => Self::GlobalStore,
            "LDGSTS" => Self::CopyAsync,
            "LDS" | "LDSM" => Self::SharedLoad,
            "STS" => Self::SharedStore,
            "IMMA" => Self::IntegerProduct,
            "HMMA" | "HGMMA" | "QMMA" | "OMMA" => Self::FloatProduct,
            "IDP" => Self::Dot,
            "SHFL" => Self::Shuffle,
            "MUFU" => Self::Special,
            "BAR" => Self::Barrier,
            "IMAD" | "IMUL" => Self::Multiply,
            "I2F" | "F2I" | "F2F" | "FRND" | "POPC" | "FLO" => Self::Convert,
            "FADD" | "FMUL" | "FFMA" | "FMNMX" | "FSETP" | "FSEL" | "FADD2" | "FMUL2" | "FFMA2" | "HADD2"
            | "HMUL2" | "HFMA2" | "HMNMX2" | "FMNMX3" => Self::Float,
            _ if base.starts_with('U')
                || base.starts_with('B')
                || matches!(
                    base,
                    "EXIT"
                        | "NOP"
                        | "WARPSYNC"
                        | "S2R"
                        | "S2UR"
                        | "CS2R"
                        | "LDC"
                        | "LDCU"
                        | "DEPBAR"
                        | "LDGDEPBAR"
                        | "WARPGROUP"
                        | "CCTL"
                        | "ERRBAR"
                        | "MEMBAR"
                        | "CALL"
                        | "RET"
                ) =>
            {
                Self::Other
            }
            _ => Self::Integer,
        }
    }

    fn of_ptx(instruction: &str) -> Option<Self> {
        let mut words = instruction.split_whitespace();
        let opcode = words.find(|word| !word.starts_with('@'))?.trim_end_matches(';');
        let mut parts = opcode.split('.');
        let (base, rest) = (parts.next()?, opcode);
        let space = |name: &str| rest.split('.').any(|part| part == name);
        Some(match base {
            "ld" if space("shared") => Self::SharedLoad,
            "ld" if space("param") || space("const") || space("local") => return None,
            "ld" => Self::GlobalLoad,
            "st" if space("shared") => Self::SharedStore,
            "st" if space("param") || space("local") => return None,
            "st" => Self::GlobalStore,
            "ldmatrix" => Self::SharedLoad,
            "cp" if space("async") && space("global") => Self::CopyAsync,
            "mma" if space("s32") => Self::IntegerProduct,
            "mma" => Self::FloatProduct,
            "wgmma" if space("mma_async") => Self::FloatProduct,
            "dp4a" => Self::Dot,
            "shfl" => Self::Shuffle,
            "ex2" | "lg2" | "rcp" | "rsqrt" | "sin" | "cos" | "tanh" | "sqrt" => Self::Special,
            "bar" | "barrier" => Self::Barrier,
            _ => return None,
        })
    }
}

/// Cycles from the issue of a load to its result: from memory, from the L2 cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct Latencies {
    pub(super) memory: f64,
    pub(super) cache: f64,
}

/// Rounds of the estimate of the blocks' counts.
const ROUNDS: usize = 20;

/// Products of 16-bit floats of a multiprocessor in a cycle by `wgmma`.
pub(super) const GROUP_PRODUCTS: f64 = 2048.0;
/// Machine code of `wgmma`.
const GROUP_PRODUCT: &str = "HGMMA";

/// Cycles from the issue of an instruction to its result.
pub(super) const SHARED_CYCLES: f64 = 30.0;
pub(super) const PRODUCT_CYCLES: f64 = 33.0;
pub(super) const SLOW_CYCLES: f64 = 22.0;
pub(super) const ARITHMETIC_CYCLES: f64 = 5.0;

#[derive(Debug)]
struct Instruction {
    class: Class,
    predicated: bool,
    name: String,
    line: String,
    writes: Vec<u16>,
    reads: Vec<u16>,
    /// Bytes that a warp moves from global memory.
    bytes: u32,
    /// Multiplications of a matrix product.
    products: f64,
    /// Number left in flight by a wait for asynchronous copies.
    keeps: Option<usize>,
    /// Whether a product of a warp group is the last of those that are waited for together.
    ends_group: bool,
    /// Index of the instruction that a branch goes to.
    target: Option<usize>,
}

/// A kernel's machine code.
#[derive(Debug)]
pub(super) struct Code {
    instructions: Vec<Instruction>,
    /// First instruction of each basic block.
    blocks: Vec<usize>,
}

/// The work of a warp of a launch, on average.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Work {
    /// Issued instructions of each class.
    pub(super) issued: BTreeMap<Class, f64>,
    /// Multiplications of matrix products: of integers, of floats of 16, 8 and 4 bits, of warp groups.
    pub(super) products: [f64; 5],
    /// Cycles from start to end, if nothing else ran on the multiprocessor.
    pub(super) cycles: f64,
    /// Most bytes of global memory in flight.
    pub(super) in_flight: f64,
}

impl Work {
    pub(super) fn total(&self) -> f64 {
        self.issued.values().sum()
    }

    pub(super) fn of(&self, classes: &[Class]) -> f64 {
        classes.iter().filter_map(|class| self.issued.get(class)).sum()
    }
}

/// Returns the code of each kernel in a disassembly with lines (`nvdisasm -c -g`).
pub(super) fn read(disassembly: &str) -> HashMap<String, Code> {
    let mut kernels = HashMap::new();
    for section in disassembly.split("\n.text.").skip(1) {
        let Some((name, body)) = section.split_once(":\n") else { continue };
        kernels.insert(name.to_owned(), Code::read(body));
    }
    kernels
}

impl Code {
    fn read(body: &str) -> Self {
        let (mut instructions, mut labels, mut line) = (Vec::new(), HashMap::new(), String::new());
        let mut targets = Vec::new();
        for text in body.lines().map(str::trim) {
            if let Some(location) = text.strip_prefix("//## File \"") {
                let (file, rest) = location.split_once('"').unwrap_or((location, ""));
                let number: String = rest.chars().filter(char::is_ascii_digit).collect();
                line = format!("{}:{number}", file.rsplit('/').next().unwrap_or(file));
            } else if text.starts_with("$__internal") {
                // The slow paths of divisions and roots, for arguments that no step has.
                break;
            } else if let Some(label) = text.strip_suffix(':') {
                labels.insert(label.to_owned(), instructions.len());
            } else if let Some((_, instruction)) = text.split_once("*/") {
                let instruction = instruction.split(';').next().unwrap_or_default().trim();
                if instruction.is_empty() {
                    continue;
                }
                targets.push(
                    instruction
                        .split_once("`(")
                        .and_then(|(_, rest)| rest.split_once(')'))
                        .map(|(to, _)| to.to_owned()),
                );
                instructions.push(Instruction::read(instruction, &line));
            } else if text.starts_with(".section") {
                break;
            }
        }
        let mut blocks = vec![0];
        for (index, target) in targets.iter().enumerate() {
            let jumps = instructions[index].name.starts_with("BRA");
            let to = target.as_ref().filter(|_| jumps).and_then(|label| labels.get(label).copied());
            instructions[index].target = to;
            blocks.extend(to);
            if jumps || matches!(instructions[index].name.as_str(), "EXIT" | "BSYNC") {
                blocks.push(index + 1);
            }
        }
        blocks.retain(|block| *block < instructions.len());
        blocks.sort_unstable();
        blocks.dedup();
        Self { instructions, blocks }
    }

    fn range(&self, block: usize) -> std::ops::Range<usize> {
        self.blocks[block]..self.blocks.get(block + 1).copied().unwrap_or(self.instructions.len())
    }

    /// Returns what a warp does, if it runs each basic block as often as [`Self::frequencies`] says.
    pub(super) fn work(&self, frequencies: &[f64], run: &Run<'_>, latencies: Latencies) -> Work {
        // A loop that prefetches to the L2 cache finds there what it loads, if an iteration takes that long.
        let fetching = self.fetching();
        let mut waits = latencies.cache;
        let (mut cycles, mut in_flight) = self.cycles(run, latencies, (&fetching, waits));
        if let Some(range) = &fetching {
            let inside = (0..self.blocks.len()).filter(|&block| range.contains(&self.blocks[block]));
            let (turns, spent) = inside.fold((0.0, 0.0), |(turns, spent): (f64, f64), block| {
                let head = self.blocks[block] == *range.start();
                (if head { frequencies[block] } else { turns }, spent + frequencies[block] * cycles[block])
            });
            if turns > 0.0 {
                waits = waits.max(latencies.memory - spent / turns);
                (cycles, in_flight) = self.cycles(run, latencies, (&fetching, waits));
            }
        }
        let mut work = Work { in_flight, ..Work::default() };
        for (block, frequency) in frequencies.iter().enumerate() {
            for instruction in &self.instructions[self.range(block)] {
                *work.issued.entry(instruction.class).or_default() += frequency;
                let kind = match instruction.class {
                    Class::FloatProduct if instruction.name.starts_with("OMMA") => 3,
                    Class::FloatProduct if instruction.name.starts_with("QMMA") => 2,
                    Class::FloatProduct if instruction.name.starts_with(GROUP_PRODUCT) => 4,
                    Class::FloatProduct => 1,
                    _ => 0,
                };
                work.products[kind] += frequency * instruction.products;
            }
            work.cycles += frequency * cycles[block];
        }
        work
    }

    /// Returns how often a warp runs each basic block.
    pub(super) fn frequencies(&self, run: &Run<'_>) -> Vec<f64> {
        let anchors: Vec<Vec<(&str, Class)>> =
            (0..self.blocks.len()).map(|block| self.anchors(block, run)).collect();
        let sums = |frequencies: &[f64]| {
            let mut sums: HashMap<(&str, Class), f64> = HashMap::new();
            for (frequency, anchors) in frequencies.iter().zip(&anchors) {
                anchors.iter().for_each(|key| *sums.entry(*key).or_default() += frequency);
            }
            sums
        };
        let copies = sums(&vec![1.0; anchors.len()]);
        let middle = |mut known: Vec<f64>| {
            known.sort_by(f64::total_cmp);
            known.get(known.len() / 2).copied()
        };
        let mut frequencies: Vec<f64> = (0..anchors.len())
            .map(|block| {
                let known =
                    anchors[block].iter().map(|key| run.anchors.get(key).unwrap_or(&0.0) / copies[key]);
                let instructions = self.instructions[self.range(block)].iter();
                let lines =
                    instructions.filter_map(|instruction| run.lines.get(instruction.line.as_str()).copied());
                middle(known.collect()).or_else(|| middle(lines.collect())).unwrap_or(0.0)
            })
            .collect();
        // The compiler copies instructions of a line to blocks that run differently often. The most likely counts of
        // blocks, given the sums over the copies and the loops, by expectation maximisation.
        let loops = self.loops();
        for _ in 0..ROUNDS {
            let sums = sums(&frequencies);
            for (frequency, anchors) in frequencies.iter_mut().zip(&anchors) {
                let found = anchors.iter().filter(|key| sums[key] > 0.0);
                let (sum, count) = found.fold((0.0, 0.0), |(sum, count), key| {
                    (sum + run.anchors.get(key).unwrap_or(&0.0) / sums[key], count + 1.0)
                });
                if count > 0.0 {
                    *frequency *= sum / count;
                }
            }
            // A block outside of loops runs once. In a loop it runs no more often than a block whose count is known.
            let mut most: HashMap<Option<usize>, f64> = HashMap::from([(None, 1.0)]);
            for (block, frequency) in frequencies.iter().enumerate() {
                if loops[block].is_some() && anchors[block].iter().any(|(_, class)| class.is_exact()) {
                    let most = most.entry(loops[block]).or_default();
                    *most = most.max(*frequency);
                }
            }
            for (frequency, of) in frequencies.iter_mut().zip(&loops) {
                *frequency = frequency.min(most.get(of).copied().unwrap_or(f64::INFINITY));
            }
        }
        frequencies
    }

    /// Returns the instructions from the target of each branch backwards to the branch.
    fn all_loops(&self) -> impl Iterator<Item = RangeInclusive<usize>> {
        let back = |(index, found): (usize, &Instruction)| {
            Some(found.target.filter(|target| *target <= index)?..=index)
        };
        self.instructions.iter().enumerate().filter_map(back)
    }

    /// Returns for each basic block the first instruction of the innermost loop around it.
    fn loops(&self) -> Vec<Option<usize>> {
        let around = |first: &usize| {
            let around = self.all_loops().filter(|range| range.contains(first));
            around.min_by_key(|range| range.end() - range.start()).map(|range| *range.start())
        };
        self.blocks.iter().map(around).collect()
    }

    /// Returns the largest loop that prefetches.
    fn fetching(&self) -> Option<RangeInclusive<usize>> {
        let fetches = |range: &RangeInclusive<usize>| {
            self.instructions[range.clone()].iter().any(Instruction::prefetches)
        };
        self.all_loops().filter(fetches).max_by_key(|range| range.end() - range.start())
    }

    /// Returns the anchors of a basic block: those that the compiler neither removes nor repeats, or else the loads and
    /// stores. A predicated one stands for a branch around it, and counts if it ran.
    fn anchors(&self, block: usize, run: &Run<'_>) -> Vec<(&str, Class)> {
        let ran = |key: &(&str, Class)| run.anchors.get(key).is_some_and(|times| *times > 0.0);
        let all = self.instructions[self.range(block)].iter().filter_map(|found| {
            let key = (found.line.as_str(), found.class);
            (found.class.anchors() && (!found.predicated || ran(&key))).then_some(key)
        });
        let exact: Vec<_> = all.clone().filter(|(_, class)| class.is_exact()).collect();
        if exact.is_empty() { all.collect() } else { exact }
    }

    /// Returns the cycles of a warp in each basic block, and the most bytes in flight. Instructions are issued in
    /// order, one a cycle, when their operands are there. The body of a loop is run twice, and the second run counts.
    /// Loads in the loop `fetching` take `fetched` cycles from memory.
    fn cycles(
        &self,
        run: &Run<'_>,
        latencies: Latencies,
        (fetching, fetched): (&Option<RangeInclusive<usize>>, f64),
    ) -> (Vec<f64>, f64) {
        let mut warp = Warp::default();
        let mut cycles = vec![0.0; self.blocks.len()];
        let mut repeated = vec![false; self.blocks.len()];
        let mut block = 0;
        while block < self.blocks.len() {
            let started = warp.now;
            let range = self.range(block);
            for (index, instruction) in range.clone().zip(&self.instructions[range.clone()]) {
                let is_fetched = fetching.as_ref().is_some_and(|range| range.contains(&index));
                let latency = match run.cold.contains(instruction.line.as_str()) || instruction.prefetches() {
                    true if is_fetched && !instruction.prefetches() => fetched,
                    true => latencies.memory,
                    false => latencies.cache,
                };
                warp.issue(instruction, latency);
            }
            cycles[block] = warp.now - started;
            let back = self.instructions[range.end - 1].target.filter(|target| *target < range.end);
            let head = back.and_then(|target| self.blocks.binary_search(&target).ok());
            block = match head {
                Some(head) if !repeated[block] => {
                    repeated[block] = true;
                    head
                }
                _ => block + 1,
            };
        }
        (cycles, warp.most)
    }
}

/// Executed PTX instructions, for a warp on average.
pub(super) struct Run<'a> {
    /// Anchors of each line.
    anchors: HashMap<(&'a str, Class), f64>,
    /// An instruction of each line.
    lines: HashMap<&'a str, f64>,
    /// Lines that load weights, keys or values.
    cold: HashSet<&'a str>,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        listing: &'a [Listed],
        executed: &[Executed],
        warps: f64,
        is_cold: impl Fn(u64) -> bool,
    ) -> Self {
        let (mut anchors, mut cold): (HashMap<_, f64>, _) = (HashMap::new(), HashSet::new());
        let mut lines: HashMap<&str, (f64, f64)> = HashMap::new();
        for (listed, executed) in listing.iter().zip(executed) {
            let (line, times) = (listed.source_line.as_str(), executed.warps as f64 / warps);
            let all = lines.entry(line).or_default();
            *all = (all.0 + times, all.1 + 1.0);
            if let Some(class) = Class::of_ptx(&listed.instruction) {
                *anchors.entry((line, class)).or_default() += times;
            }
            if is_cold(executed.address) {
                cold.insert(line);
            }
        }
        Self {
            anchors,
            cold,
            lines: lines.into_iter().map(|(line, (times, count))| (line, times / count)).collect(),
        }
    }
}

/// A warp that issues instructions in order.
#[derive(Debug, Default)]
struct Warp {
    now: f64,
    ready: HashMap<u16, f64>,
    /// Loads and copies in flight: the end of each and its bytes.
    flying: VecDeque<(f64, f64)>,
    /// Ends of the closed groups of copies.
    groups: VecDeque<f64>,
    /// End of the open group.
    open: f64,
    /// Ends of the closed groups of products of the warp's group, and of its last product.
    products: VecDeque<f64>,
    multiplied: f64,
    most: f64,
}

impl Warp {
    fn issue(&mut self, instruction: &Instruction, memory: f64) {
        let needed = instruction.reads.iter().chain(&instruction.writes);
        let ready = needed.filter_map(|register| self.ready.get(register)).copied().fold(0.0, f64::max);
        self.now = (self.now + 1.0).max(ready);
        if let Some(keeps) = instruction.keeps {
            let groups = match instruction.name.starts_with("WARPGROUP") {
                true => &mut self.products,
                false => &mut self.groups,
            };
            while groups.len() > keeps {
                self.now = self.now.max(groups.pop_front().unwrap_or(0.0));
            }
        }
        if instruction.name.starts_with(GROUP_PRODUCT) {
            // The other three warps of the group multiply at the same time.
            let cycles = 4.0 * instruction.products / GROUP_PRODUCTS;
            self.multiplied = self.now.max(self.multiplied) + cycles;
            if instruction.ends_group {
                self.products.push_back(self.multiplied);
            }
            return;
        }
        let latency = match instruction.class {
            Class::GlobalLoad | Class::CopyAsync => memory,
            Class::SharedLoad => SHARED_CYCLES,
            Class::IntegerProduct | Class::FloatProduct => PRODUCT_CYCLES,
            Class::Shuffle | Class::Special => SLOW_CYCLES,
            _ if instruction.name.starts_with("S2R") || instruction.name.starts_with("LDC") => SLOW_CYCLES,
            _ => ARITHMETIC_CYCLES,
        };
        let end = self.now + latency;
        for register in &instruction.writes {
            self.ready.insert(*register, end);
        }
        match instruction.class {
            Class::CopyAsync => self.open = self.open.max(end),
            _ if instruction.name == "LDGDEPBAR" => self.groups.push_back(std::mem::take(&mut self.open)),
            _ => {}
        }
        if instruction.bytes > 0 {
            self.flying.push_back((end, f64::from(instruction.bytes)));
        }
        while self.flying.front().is_some_and(|(end, _)| *end <= self.now) {
            self.flying.pop_front();
        }
        self.most = self.most.max(self.flying.iter().map(|(_, bytes)| bytes).sum());
    }
}

/// Bytes that a prefetch brings to the L2 cache.
const LINE_BYTES: u32 = 128;

fn is_prefetch(name: &str) -> bool {
    name.starts_with("CCTL") && name.contains("PF2")
}

impl Instruction {
    fn prefetches(&self) -> bool {
        is_prefetch(&self.name)
    }

    fn read(text: &str, line: &str) -> Self {
        let mut text = text;
        let predicated = text.starts_with('@');
        if predicated {
            text = text.split_once(' ').map_or("", |(_, rest)| rest.trim_start());
        }
        let (name, operands) = text.split_once(' ').unwrap_or((text, ""));
        let class = Class::of_machine_code(name);
        let operands: Vec<&str> = operands.split(',').map(str::trim).collect();
        let wide = match () {
            () if name.contains(".128") || name.contains(".x4") || name.ends_with(".4") => 4,
            () if name.contains(".64") || name.contains(".WIDE") || name.contains(".2") => 2,
            () => 1,
        };
        let bytes = match class {
            Class::GlobalLoad | Class::CopyAsync => match wide {
                1 if name.contains(".U8") || name.contains(".S8") => 32,
                1 if name.contains(".U16") || name.contains(".S16") => 64,
                wide => 128 * wide,
            },
            _ if is_prefetch(name) => LINE_BYTES * 32,
            _ => 0,
        };
        let product = matches!(class, Class::IntegerProduct | Class::FloatProduct);
        let of_group = name.starts_with(GROUP_PRODUCT);
        let stores =
            matches!(class, Class::GlobalStore | Class::SharedStore | Class::CopyAsync | Class::Barrier)
                || ["RED", "BRA", "EXIT", "DEPBAR", "CCTL", "BSSY", "BSYNC"]
                    .iter()
                    .any(|start| name.starts_with(start));
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        // The sums of a group's product are there when it was waited for.
        let dependent = operands.iter().enumerate().filter(|(index, _)| !of_group || *index == 1);
        for (index, operand) in dependent {
            for (register, pair) in registers(operand) {
                let first = writes.is_empty() && !stores && !of_group && !operand.contains('[');
                let is_destination = first && index <= 1 && !operand.contains("desc");
                let count = match (product, is_destination) {
                    (true, _) if index == 2 => 2,
                    // Scales.
                    (true, _) if index > 3 => 1,
                    (true, _) => 4,
                    (false, true) => wide,
                    (false, false) if pair || operand.contains('[') => {
                        if pair {
                            2
                        } else {
                            1
                        }
                    }
                    (false, false) if stores => wide,
                    (false, false) => 1,
                };
                let list = if is_destination { &mut writes } else { &mut reads };
                list.extend((0..count as u16).map(|next| register + next));
            }
        }
        let products = if product { multiplications(name) } else { 0.0 };
        let ends_group = of_group && operands.iter().any(|operand| operand.starts_with("gsb"));
        let keeps = (name.starts_with("DEPBAR") || name.starts_with("WARPGROUP.DEPBAR")).then(|| {
            let last = operands.iter().rev().find_map(|operand| operand.strip_prefix("0x"));
            last.and_then(|number| usize::from_str_radix(number, 16).ok()).unwrap_or(0)
        });
        let (name, line, bytes) = (name.to_owned(), line.to_owned(), bytes);
        Self {
            class,
            predicated,
            name,
            line,
            writes,
            reads,
            bytes,
            products,
            keeps,
            ends_group,
            target: None,
        }
    }
}

/// Returns a warp's multiplications of a product by its shape: `IMMA.16832` has 16 x 8 x 32, `HGMMA.64x128x16` a quarter
/// of its numbers.
fn multiplications(name: &str) -> f64 {
    if name.starts_with(GROUP_PRODUCT) {
        let shape = name.split('.').find(|part| part.contains('x')).unwrap_or("0");
        return shape.split('x').map(|n| n.parse().unwrap_or(0.0)).product::<f64>() / 4.0;
    }
    let shape = name.split('.').find(|part| part.starts_with("168")).unwrap_or("1680");
    16.0 * 8.0 * shape[3..].parse::<f64>().unwrap_or(0.0)
}

/// Returns the vector registers of an operand, and whether each is one of a pair.
fn registers(operand: &str) -> Vec<(u16, bool)> {
    let mut found = Vec::new();
    let bytes = operand.as_bytes();
    for (at, _) in operand.match_indices('R') {
        let before = at.checked_sub(1).map(|at| bytes[at]);
        if before.is_some_and(|byte| byte.is_ascii_alphanumeric()) {
            continue;
        }
        let digits: String = operand[at + 1..].chars().take_while(char::is_ascii_digit).collect();
        if let Ok(register) = digits.parse() {
            found.push((register, operand[at + 1 + digits.len()..].starts_with(".64")));
        }
    }
    found
}
