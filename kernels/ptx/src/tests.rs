//! Tests of each opcode with values computed by hand, and of each check with a kernel that violates it.

mod bits;
mod control;
mod convert;
mod faults;
mod float;
mod integer;
mod memory;
mod sample;
mod tensor;
mod warp;
mod warpgroup;

use crate::{Counts, Launch, Limits, Machine, RunError};

/// Head of every PTX text.
const HEAD: &str = ".version 9.0\n.target sm_90\n.address_size 64\n";

/// A machine with one module and its kernel `k`, ready to launch.
struct Rig {
    machine: Machine,
    kernel: crate::KernelRef,
}

impl Rig {
    /// Creates a rig from a PTX text without its head.
    fn new(text: &str) -> Self {
        Self::with(text, Limits::HOPPER, 1)
    }

    fn with(text: &str, limits: Limits, seed: u64) -> Self {
        let mut machine = Machine::new(limits, seed);
        let module = machine.load(&format!("{HEAD}{text}")).unwrap();
        let kernel = machine.kernel(module, "k").unwrap();
        Self { machine, kernel }
    }

    /// Launches one block of `threads`.
    fn launch(&mut self, threads: u32, arguments: &[u64]) -> Result<Counts, RunError> {
        self.launch_grid(1, threads, 0, arguments)
    }

    fn launch_grid(
        &mut self,
        blocks: u32,
        threads: u32,
        shared_bytes: u32,
        arguments: &[u64],
    ) -> Result<Counts, RunError> {
        let (grid, block) = ([blocks, 1, 1], [threads, 1, 1]);
        self.machine.launch(&Launch { kernel: self.kernel, grid, block, shared_bytes, arguments })
    }

    fn upload<const N: usize>(&mut self, values: impl IntoIterator<Item = [u8; N]>) -> u64 {
        let bytes: Vec<u8> = values.into_iter().flatten().collect();
        let at = self.machine.allocate(bytes.len()).unwrap();
        self.machine.write(at, &bytes).unwrap();
        at
    }

    fn words(&self, at: u64, count: usize) -> Vec<u32> {
        let mut bytes = vec![0; 4 * count];
        self.machine.read(at, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn doubles(&self, at: u64, count: usize) -> Vec<u64> {
        let mut bytes = vec![0; 8 * count];
        self.machine.read(at, &mut bytes).unwrap();
        bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

/// Runs a body on rows of inputs, all in one warp. Returns for each row the register that `result` names:
/// `%y` (64 bits), `%d` (32), `%h` (16) or `%q` (a predicate). A row's values are in `%x0`..`%x3` (64
/// bits), `%a0`..`%a3` (their low 32 bits) and `%h0`..`%h3` (their low 16 bits).
fn results(result: &str, body: &str, rows: &[Vec<u64>]) -> Vec<u64> {
    assert!(rows.len() <= 32, "one row a lane");
    let store = match result {
        "%y" => "",
        "%d" => "cvt.u64.u32 %y, %d;",
        "%h" => "cvt.u64.u16 %y, %h;",
        _ => "selp.b64 %y, 1, 0, %q;",
    };
    let text = format!(
        ".visible .entry k(.param .u64 from, .param .u64 to) {{
            .reg .b64 %x<4>, %y, %p0, %p1, %at; .reg .b32 %a<4>, %d, %t, %t0, %t1; .reg .b16 %h<4>, %h; .reg .pred %q, %q1;
            ld.param.u64 %p0, [from]; ld.param.u64 %p1, [to];
            mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 32; add.s64 %at, %at, %p0;
            ld.global.v2.u64 {{%x0, %x1}}, [%at]; ld.global.v2.u64 {{%x2, %x3}}, [%at+16];
            cvt.u32.u64 %a0, %x0; cvt.u32.u64 %a1, %x1; cvt.u32.u64 %a2, %x2; cvt.u32.u64 %a3, %x3;
            cvt.u16.u64 %h0, %x0; cvt.u16.u64 %h1, %x1; cvt.u16.u64 %h2, %x2; cvt.u16.u64 %h3, %x3;
            {body}
            {store}
            mul.wide.u32 %at, %t, 8; add.s64 %at, %at, %p1; st.global.u64 [%at], %y; ret; }}"
    );
    let mut rig = Rig::new(&text);
    let padded = rows.iter().flat_map(|row| (0..4).map(|i| row.get(i).copied().unwrap_or(0).to_le_bytes()));
    let from = rig.upload(padded);
    let to = rig.machine.allocate(8 * rows.len()).unwrap();
    rig.launch(rows.len() as u32, &[from, to]).unwrap();
    rig.doubles(to, rows.len())
}

/// Each row ends with the expected result.
fn table32(body: &str, rows: &[&[u32]]) {
    table("%d", body, rows.iter().map(|row| row.iter().map(|&v| u64::from(v)).collect()).collect());
}

fn table16(body: &str, rows: &[&[u32]]) {
    table("%h", body, rows.iter().map(|row| row.iter().map(|&v| u64::from(v)).collect()).collect());
}

fn table64(body: &str, rows: &[&[u64]]) {
    table("%y", body, rows.iter().map(|row| row.to_vec()).collect());
}

/// Each row ends with 1 or 0.
fn table_pred(body: &str, rows: &[&[u32]]) {
    table("%q", body, rows.iter().map(|row| row.iter().map(|&v| u64::from(v)).collect()).collect());
}

/// Float inputs and results, compared bit by bit.
fn table_f32(body: &str, rows: &[&[f32]]) {
    table("%d", body, rows.iter().map(|row| row.iter().map(|&v| u64::from(v.to_bits())).collect()).collect());
}

fn table(result: &str, body: &str, rows: Vec<Vec<u64>>) {
    let out = results(result, body, &rows);
    for (row, out) in rows.iter().zip(out) {
        let (expected, inputs) = row.split_last().unwrap();
        assert_eq!(out, *expected, "{body} of {inputs:#x?} is {out:#x}, not {expected:#x}");
    }
}

/// Returns the reason why a body is refused.
fn refused(body: &str) -> String {
    let text = format!(
        "{HEAD}.visible .entry k(.param .u64 p) {{
            .reg .b64 %x<4>; .reg .b32 %a<4>; .reg .b16 %h<4>; .reg .pred %q;
            {body}
            ret; }}"
    );
    Machine::new(Limits::HOPPER, 0).load(&text).unwrap_err().to_string()
}
