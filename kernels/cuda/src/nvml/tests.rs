//! The library is a fake one, compiled here.

use super::*;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/src/fake_nvml.c");

/// A library in a folder of its own, with planted values.
struct Fake(PathBuf);

impl Fake {
    fn new(name: &str, values: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("kvasir-nvml-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let fake = Self(folder);
        let built =
            Command::new("cc").args(["-shared", "-fPIC", SOURCE, "-o"]).arg(fake.library()).status().unwrap();
        assert!(built.success());
        fake.plant(values);
        fake
    }

    fn library(&self) -> PathBuf {
        self.0.join("libnvidia-ml.so.1")
    }

    fn plant(&self, values: &str) {
        std::fs::write(self.0.join("values"), values).unwrap();
    }

    fn open(&self) -> Result<Nvml, CudaError> {
        Ok(Nvml { api: Api::load(&self.library())?, only: None })
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn all_values_of_a_gpu_are_read() {
    let fake = Fake::new(
        "all",
        "gpus 1\npower 45500\npower_limit 140000\nstate 0\nsm_clock 2400\nsm_clock_max 3003\nmemory_clock 9001\n\
         memory_clock_max 9501\ntemperature 71\nslowdown 92\nreasons 0x24\npcie_generation 4\npcie_generation_max 5\n\
         pcie_width 8\npcie_width_max 16\npcie_replays 7\nnvlinks 2\nnvlink_replays 3\necc_corrected 5\n\
         ecc_uncorrected 0\n",
    );
    let health = fake.open().unwrap().read().unwrap().remove(0);
    assert_eq!(health.faults().collect::<Vec<_>>(), ["sw_thermal"]);
    let expected = GpuHealth {
        index: 0,
        name: Some("NVIDIA GB10".into()),
        lost: false,
        power_watts: Some(45.5),
        power_limit_watts: Some(140.0),
        performance_state: Some(0),
        sm_clock_mhz: Some(2400),
        sm_clock_max_mhz: Some(3003),
        memory_clock_mhz: Some(9001),
        memory_clock_max_mhz: Some(9501),
        temperature_celsius: Some(71),
        slowdown_celsius: Some(92),
        clock_reasons: Some(0x24),
        pcie_generation: Some(4),
        pcie_generation_max: Some(5),
        pcie_width: Some(8),
        pcie_width_max: Some(16),
        pcie_replays: Some(7),
        nvlink_errors: vec![(0, "replay", 3), (1, "replay", 3)],
        ecc_errors: vec![("corrected", 5), ("uncorrected", 0)],
    };
    assert_eq!(health, expected);
}

#[test]
fn values_that_a_gpu_does_not_report_are_none() {
    let fake = Fake::new("some", "gpus 2\npower 5000\ntemperature error\nsm_clock 4294967295\n");
    let read = fake.open().unwrap().read().unwrap();
    let expected = |index| GpuHealth {
        index,
        name: Some("NVIDIA GB10".into()),
        power_watts: Some(5.0),
        ..GpuHealth::default()
    };
    assert_eq!(read, [expected(0), expected(1)]);
    assert_eq!(read[0].slowed_by(CLOCK_REASONS[0]), None);
}

#[test]
fn the_energy_of_a_gpu_is_read_if_it_reports_it() {
    let fake = Fake::new("energy", "gpus 1\nenergy 123456789012\n");
    let nvml = fake.open().unwrap();
    assert_eq!(nvml.energy_millijoules().unwrap(), Some(123_456_789_012));
    fake.plant("gpus 1\n");
    assert_eq!(nvml.energy_millijoules().unwrap(), None);
}

#[test]
fn a_lost_gpu_is_listed_and_comes_back() {
    let fake = Fake::new("lost", "gpus 1\npower lost\n");
    let nvml = fake.open().unwrap();
    assert_eq!(nvml.read().unwrap(), [GpuHealth { lost: true, ..GpuHealth::default() }]);
    fake.plant("gpus 1\npower 9000\n");
    assert_eq!(nvml.read().unwrap()[0].power_watts, Some(9.0));
    fake.plant("gpus error\n");
    assert!(matches!(nvml.read(), Err(CudaError::Call { call: "nvmlDeviceGetCount_v2", .. })));
}

#[test]
fn a_library_that_does_not_start_is_an_error() {
    let fake = Fake::new("broken", "init error\n");
    let error = fake.open().unwrap_err().to_string();
    assert_eq!(error, "nvmlInit_v2: Unknown Error");
    assert!(Api::load(Path::new("/nowhere/libnvidia-ml.so.1")).is_err());
}
