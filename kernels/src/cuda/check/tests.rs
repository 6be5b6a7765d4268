//! The cases themselves: the CPU agrees with itself, and what is wrong is seen.

use super::{Case, Checked, OPS, compare, distance};
use crate::backend::{ActivationMode, Backend};
use crate::cpu::{CpuBackend, CpuConfig};
use crate::cuda::source::Source;
use crate::cuda::tests::compiled;
use crate::cuda::{Arch, CudaBackend, CudaConfig, SimDevice};
use crate::error::Error;
use crate::pool::{Pool, PoolConfig};
use std::num::NonZeroUsize;

pub(crate) fn cpu() -> Result<Box<dyn Backend>, Error> {
    let config = CpuConfig::select(ActivationMode::Int8, |_| None).unwrap();
    Ok(Box::new(CpuBackend::new(config, Pool::new(PoolConfig::new(NonZeroUsize::MIN))?)?))
}

#[test]
fn every_op_is_compared_and_the_cpu_agrees_with_itself() {
    let checked = compare(&mut cpu, &mut cpu);
    assert_eq!(checked.refused, Vec::<String>::new());
    assert!(checked.passed() && checked.cases.iter().all(|case| case.error == 0.0));
    // What `accept` leaves is seen by the ops behind it; no case copies blocks.
    for op in OPS.into_iter().filter(|op| !["accept", "copy_kv"].contains(op)) {
        assert!(checked.cases.iter().any(|case| case.op == op), "{op}");
    }
}

/// The very code that a GPU would run, on the interpreter.
fn assert_as_the_cpu(arch: Arch) {
    let mut device = || -> Result<Box<dyn Backend>, Error> {
        let config = CudaConfig { arch, activations: ActivationMode::Int8, threads: 1 };
        let device = Box::new(SimDevice::new(ptx::Limits::GB10, 1));
        let compile = Box::new(move |source: &Source| Ok(compiled(source, arch).clone()));
        Ok(Box::new(CudaBackend::new(device, config, compile)?))
    };
    let checked = compare(&mut device, &mut cpu);
    let failed: Vec<_> = checked.cases.iter().filter(|case| !case.passed()).collect();
    assert!(checked.passed(), "{arch}: {:#?}\n{failed:#?}", checked.refused);
    assert!(checked.cases.len() > 100);
}

#[test]
fn the_cuda_backend_for_sm_90_does_what_the_cpu_does() {
    assert_as_the_cpu(Arch::SM_90);
}

#[test]
fn the_cuda_backend_for_sm_121a_does_what_the_cpu_does() {
    assert_as_the_cpu(Arch::SM_121A);
}

#[test]
fn a_backend_that_cannot_be_made_is_refused() {
    let mut none = || Err(Error::Unsupported { what: "anything" });
    let checked = compare(&mut none, &mut cpu);
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
