//! Tests of the cases themselves: the CPU agrees with itself, and errors are detected.

use super::{Case, Checked, OPS, compare, compare_types, distance};
use crate::source::{self, Source};
use crate::tests::compiled;
use crate::{
    Arch, Compiled, CudaBackend, CudaConfig, CudaError, Device, DevicePtr, KernelId, Launch, SimDevice,
};
use kernels::Error;
use kernels::backend::{ActivationMode, Backend};
use kernels::cpu::{CpuBackend, CpuConfig};
use kernels::pool::{Pool, PoolConfig};
use kernels::quant::GgmlType;
use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

pub(crate) fn cpu(activations: ActivationMode) -> Result<Box<dyn Backend>, Error> {
    let config = CpuConfig::select(activations, |_| None).unwrap();
    Ok(Box::new(CpuBackend::new(config, Pool::new(PoolConfig::new(NonZeroUsize::MIN))?)?))
}

#[test]
fn every_op_is_compared_and_the_cpu_agrees_with_itself() {
    let checked = compare(&mut cpu, &mut cpu, 1, Arch::of(8, 0));
    assert_eq!(checked.refused, Vec::<String>::new());
    assert!(checked.passed() && checked.cases.iter().all(|case| case.error == 0.0));
    for op in OPS {
        assert!(checked.cases.iter().any(|case| case.op == op), "{op}");
    }
}

/// Launched kernels as (source name, kernel).
type Launched = Arc<Mutex<BTreeSet<(String, String)>>>;

/// The interpreter, which records the kernels that it runs.
struct Watched {
    device: SimDevice,
    names: Vec<(String, String)>,
    launched: Launched,
}

impl Device for Watched {
    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        self.names.extend(kernels.iter().map(|kernel| (compiled.source_name.clone(), (*kernel).to_owned())));
        self.device.load(compiled, kernels)
    }

    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.device.allocate(bytes)
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        self.device.free(ptr)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        self.device.upload(to, bytes)
    }

    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        self.device.download(from, out)
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.device.copy(from, to, bytes)
    }

    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.device.fill(to, value, bytes)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError> {
        self.launched.lock().unwrap().insert(self.names[launch.kernel.0 as usize].clone());
        self.device.launch(launch)
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.device.synchronize()
    }
}

/// Types of weights in the sample for `sm_90a`: one of each kind of product. `./test matrices` checks all.
const SAMPLED: [GgmlType; 4] = [GgmlType::F16, GgmlType::Q8_0, GgmlType::Q4_K, GgmlType::IQ2_XXS];

/// Runs the code of a GPU on the interpreter: all results agree with the CPU, and with all `types` every kernel runs.
fn assert_as_the_cpu(arch: Arch, types: &[GgmlType]) {
    let launched = Launched::default();
    let mut device = |activations| -> Result<Box<dyn Backend>, Error> {
        let config = CudaConfig { arch, activations, threads: 1 };
        let (names, launched) = (Vec::new(), launched.clone());
        let device = Watched { device: SimDevice::new(ptx::Limits::GB10, 1), names, launched };
        let compile = Box::new(move |source: &Source| Ok(compiled(source, arch).clone()));
        Ok(Box::new(CudaBackend::new(Box::new(device), config, compile)?))
    };
    let checked = compare_types(types, &mut device, &mut cpu, 1, arch);
    let failed: Vec<_> = checked.cases.iter().filter(|case| !case.passed()).collect();
    assert!(checked.passed(), "{arch}: {:#?}\n{failed:#?}", checked.refused);
    if types.len() < GgmlType::ALL.len() {
        return;
    }
    let launched = launched.lock().unwrap();
    let each = |source: &'static Source| source.kernels.iter().map(|kernel| (source.name, *kernel));
    let ran =
        |(source, kernel): &(&str, &str)| launched.contains(&((*source).to_owned(), (*kernel).to_owned()));
    let used = |(_, kernel): &(&str, &str)| *kernel != "quantise_nvfp4" || arch.has_block_scales();
    let all = source::all(arch).flat_map(each).filter(used);
    let never: Vec<_> = all.filter(|kernel| !ran(kernel)).collect();
    assert!(never.is_empty(), "no case for {arch} runs {never:?}");
}

#[test]
fn every_kernel_for_sm_90_does_what_the_cpu_does() {
    let whole = std::env::var_os("KVASIR_WHOLE_MATRIX").is_some();
    assert_as_the_cpu(Arch::SM_90, if whole { &GgmlType::ALL } else { &SAMPLED });
}

#[test]
fn every_kernel_for_sm_121a_does_what_the_cpu_does() {
    assert_as_the_cpu(Arch::SM_121A, &GgmlType::ALL);
}

#[test]
fn a_backend_that_cannot_be_created_is_reported() {
    let mut none = |_| Err(Error::Unsupported { what: "anything" });
    let checked = compare(&mut none, &mut cpu, 1, Arch::SM_121A);
    assert!(!checked.passed() && checked.cases.is_empty() && checked.refused.len() > 10);
    assert!(checked.refused[0].contains("the device: this backend does not serve anything"));
}

#[test]
fn distances() {
    assert_eq!(distance(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
    assert!((distance(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-9);
    assert_eq!(distance(&[f32::NAN], &[f32::NAN]), 0.0);
    assert_eq!(distance(&[f32::NAN], &[1.0]), f64::INFINITY);
    assert_eq!(distance(&[1.0], &[1.0, 2.0]), f64::INFINITY);
    let case = |error| Case { op: "norm", what: String::new(), error, tolerance: 1e-5 };
    assert!(case(1e-5).passed() && !case(1.1e-5).passed() && !case(f64::NAN).passed());
    assert!(!Checked { cases: vec![case(1.0)], refused: Vec::new() }.passed());
}
