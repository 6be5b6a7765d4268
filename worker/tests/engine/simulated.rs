//! The engine on the CUDA backend with an interpreter, kernel for kernel as on a GPU. Another test checks
//! that it continues the small models of every layer kind like their references (`kvasir logits --device
//! ptx-sim`).

use crate::harness::{QUANT, Request, TINY, open, open_on, options, prompt, submit, together};
use cuda::{
    Arch, Compiled, Compiler, CubinCache, CudaBackend, CudaConfig, CudaError, Device, DevicePtr, KernelId,
    Launch, SimDevice, source,
};
use engine::engine::thread::{EXIT_DEVICE_LOST, EngineHandle};
use engine::speculation::Speculation;
use kernels::backend::Backend;
use kvasir_worker::load::EngineOptions;
use proto::message::Sampling;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

mod saved;

/// Interpreting is slow: little memory, and few rows per step.
pub(crate) fn small(model: &str) -> EngineOptions {
    EngineOptions { max_rows: Some(64), max_sequences: Some(4), kv_bytes: Some(2 << 20), ..options(model) }
}

pub(crate) fn simulated(arch: Arch, options: &EngineOptions) -> Box<dyn Backend> {
    simulated_on(Box::new(SimDevice::new(ptx::Limits::GB10, 1)), arch, options)
}

fn simulated_on(device: Box<dyn Device>, arch: Arch, options: &EngineOptions) -> Box<dyn Backend> {
    let compiler = Compiler::find().unwrap();
    // Cached among the build outputs, because compiling takes longer than everything else here.
    let cache = CubinCache::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/cubins"));
    let compile = Box::new(move |source: &source::Source| cache.compile(&compiler, source, arch));
    let config = CudaConfig { arch, activations: options.activations, threads: 1 };
    Box::new(CudaBackend::new(device, config, compile).unwrap())
}

/// With 8-bit activations and several sequences at a time that share a prefix, one of which draws from the
/// best logits. Steps are recorded and replayed.
#[test]
fn quantised_models_continue_as_on_the_cpu() {
    for (model, arch) in QUANT.into_iter().zip(Arch::CHECKED) {
        let options = small(model);
        let shared = prompt(3, 33);
        let mut requests = [(4, 3), (5, 9), (6, 4)].map(|(seed, len)| {
            Request::greedy([shared.clone(), prompt(seed, len)].concat(), 6).tokens_only()
        });
        requests[2].sampling = Sampling { temperature: 0.8, top_k: 8, seed: 5, ..Sampling::default() };
        let mut engine = open_on(model, &options, simulated(arch, &options));
        let mut cpu = open(model, &options);
        for _ in 0..2 {
            let (found, expected) = (together(&mut engine, &requests), together(&mut cpu, &requests));
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.tokens, expected.tokens, "{model} for {arch}");
                assert_eq!(found.cached(), expected.cached(), "{model} for {arch}");
            }
        }
        let counts = engine.decoder().backend().step_counts();
        assert!(counts.recorded > 0 && counts.replayed > counts.recorded, "{model} for {arch}: {counts:?}");
    }
}

/// Draft tokens are ordinary rows there too, and recurrent layers follow the accepted ones. The tokens are
/// those without draft tokens.
#[test]
fn draft_tokens_change_no_token() {
    for (model, arch) in [QUANT[0], "tiny/qwen35/qwen35-f32"].into_iter().zip(Arch::CHECKED) {
        let options = small(model);
        // Among three tokens some draft tokens are accepted with every model.
        let biased = |seed: u64, temperature| Request {
            sampling: Sampling {
                temperature,
                seed,
                logit_bias: vec![(10, 100.0), (11, 100.0), (12, 100.0)],
                ..Sampling::default()
            },
            ..Request::greedy(prompt(seed, 30).iter().map(|token| 10 + token % 3).collect(), 10).tokens_only()
        };
        let requests =
            [biased(3, 0.0), biased(5, 1.0), Request::greedy(prompt(6, 4).repeat(3), 10).tokens_only()];
        let expected = together(&mut open_on(model, &options, simulated(arch, &options)), &requests);
        let mut engine = open_on(model, &options, simulated(arch, &options))
            .with_speculation(Speculation::ngram().always(4));
        let got = together(&mut engine, &requests);
        for (expected, got) in expected.iter().zip(&got) {
            assert_eq!(expected.tokens, got.tokens, "{model} for {arch}");
        }
        let (all, right) = (engine.metrics().drafted.get(), engine.metrics().accepted.get());
        assert!(all > right && right > 0, "{model} for {arch}: {right} of {all}");
        engine.check().unwrap();
    }
}

/// A GPU that fails after `launches` launches and from then on.
struct Losing {
    device: SimDevice,
    launches: usize,
}

impl Losing {
    fn lost(&self) -> Result<(), CudaError> {
        let lost = CudaError::Lost { call: "cuLaunchKernel", status: "CUDA_ERROR_ILLEGAL_ADDRESS".into() };
        if self.launches > 0 { Ok(()) } else { Err(lost) }
    }
}

impl Device for Losing {
    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        self.device.load(compiled, kernels)
    }

    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.lost()?;
        self.device.allocate(bytes)
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        self.lost()?;
        self.device.free(ptr)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        self.lost()?;
        self.device.upload(to, bytes)
    }

    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        self.lost()?;
        self.device.download(from, out)
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.lost()?;
        self.device.copy(from, to, bytes)
    }

    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.lost()?;
        self.device.fill(to, value, bytes)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError> {
        if self.launches == 1 {
            println!("\n{LOST}");
        }
        self.launches = self.launches.saturating_sub(1);
        self.lost()?;
        self.device.launch(launch)
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.lost()
    }
}

const LOST: &str = "the GPU is lost now";
/// Set in the child process that loses its GPU.
const LOSES: &str = "KVASIR_TEST_LOSES_ITS_GPU";

/// The test starts itself as a child process.
#[test]
fn a_lost_gpu_ends_the_process_soon_with_a_code_of_its_own() {
    if std::env::var_os(LOSES).is_some() {
        let options = small(TINY[0]);
        let device = Losing { device: SimDevice::new(ptx::Limits::GB10, 1), launches: 100 };
        let device = simulated_on(Box::new(device), Arch::SM_90, &options);
        let mut engine = open_on(TINY[0], &options, device);
        let _submitted = submit(&mut engine, &Request::greedy(prompt(1, 5), 1000).tokens_only());
        let _engine = EngineHandle::start(engine, Duration::from_secs(600)).unwrap();
        // The thread's channels leave tokens that end a park.
        loop {
            std::thread::park();
        }
    }
    let name = "simulated::a_lost_gpu_ends_the_process_soon_with_a_code_of_its_own";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(LOSES, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line == LOST), "it has not lost it");
    let lost = Instant::now();
    assert_eq!(child.wait().unwrap().code(), Some(EXIT_DEVICE_LOST));
    assert!(lost.elapsed() < 3 * Duration::from_secs(2), "{:?}", lost.elapsed());
}
