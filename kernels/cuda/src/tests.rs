//! Tests that need NVRTC and no GPU.

use super::{Arch, Compiled, Compiler, CubinCache, Device, Launch, SimDevice, source};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

pub(crate) mod gate;
pub(crate) mod hole;
pub(crate) mod sim;

/// Returns a compiled source. Each is compiled once per process and cached in the target folder, because
/// compiling all sources takes half a minute.
pub(crate) fn compiled(source: &source::Source, arch: Arch) -> &'static Compiled {
    static COMPILED: Mutex<BTreeMap<String, &'static OnceLock<Compiled>>> = Mutex::new(BTreeMap::new());
    let cell = {
        let mut all = COMPILED.lock().unwrap();
        *all.entry(format!("{} {arch}", source.name)).or_insert_with(|| Box::leak(Box::default()))
    };
    cell.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/cubins");
        CubinCache::new(folder).compile(&Compiler::find().unwrap(), source, arch).unwrap()
    })
}

/// Sources with bf16 activations that are checked each time. `./test matrices` checks those of all types.
const SAMPLED: [&str; 4] =
    ["bf16 with bf16.cu", "fp8 with bf16.cu", "q2_k with bf16.cu", "q4_k with bf16.cu"];

/// Runs `work` for every source and every checked architecture, on as many threads as there are CPUs.
fn each_compiled<T: Send>(work: impl Fn(&'static source::Source, Arch) -> T + Sync) -> Vec<T> {
    let whole = std::env::var_os("KVASIR_WHOLE_MATRIX").is_some();
    let of = |source: &&source::Source| {
        whole || !source.name.ends_with(" with bf16.cu") || SAMPLED.contains(&source.name)
    };
    let jobs = Arch::CHECKED
        .into_iter()
        .flat_map(|arch| source::all(arch).filter(of).map(move |source| (source, arch)));
    let jobs = Mutex::new(jobs.collect::<Vec<_>>().into_iter());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = || jobs.lock().unwrap().next();
    let all = || std::iter::from_fn(next).map(|(source, arch)| work(source, arch)).collect::<Vec<_>>();
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(all)).collect();
        running.into_iter().flat_map(|running| running.join().unwrap()).collect()
    })
}

#[test]
fn every_source_compiles_for_every_checked_architecture() {
    let checked = each_compiled(|source, arch| {
        let compiled = compiled(source, arch);
        assert!(compiled.cubin.starts_with(b"\x7fELF"), "{}", compiled.log);
        for kernel in source.kernels {
            let (_, text) = compiled.ptx.split_once(&format!(".entry {kernel}(")).unwrap_or_default();
            let body = text.split(".entry ").next().unwrap_or_default();
            // The driver starts kernels early that do.
            assert!(body.contains("griddepcontrol.wait;"), "{kernel} in {} waits for none", source.name);
        }
    });
    assert!(checked.len() > 60);
}

/// Runs `scale` of `rowwise.cu` on the interpreter, from source to result.
#[test]
fn a_kernel_runs_from_its_source_on_the_interpreter() {
    for arch in Arch::CHECKED {
        let mut device = SimDevice::new(ptx::Limits::GB10, 1);
        let scale = device.load(compiled(&source::ROWWISE, arch), &["scale"]).unwrap()[0];
        let values: Vec<f32> = (0..1000u16).map(f32::from).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let x = device.allocate(bytes.len()).unwrap();
        device.upload(x, &bytes).unwrap();
        let arguments = [x.into(), 1.5f32.into(), 0.0f32.into(), 1000u64.into()];
        let launch = Launch {
            kernel: scale,
            grid: [4, 1, 1],
            block: [256, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        };
        device.launch(&launch).unwrap();
        let mut out = vec![0; bytes.len()];
        device.download(x, &mut out).unwrap();
        let out: Vec<f32> = out.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert!(out.iter().zip(&values).all(|(out, value)| *out == value * 1.5), "{out:?}");
        // A count that is one too large reads past the end, and the message contains the source location.
        let arguments = [x.into(), 1.5f32.into(), 0.0f32.into(), 1001u64.into()];
        let fault = device.launch(&Launch { arguments: &arguments, ..launch }).unwrap_err().to_string();
        assert!(fault.contains("0 bytes past the end") && fault.contains("rowwise.cu:"), "{fault}");
    }
}
