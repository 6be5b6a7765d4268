//! Survey of this machine's GPUs, driver and compiler, with the reasons for missing parts.

use super::{Compiler, CudaError, GpuInfo, driver_version, gpus};

/// Driver, compiler and devices, each with its error if it is missing.
#[derive(Debug)]
pub struct Survey {
    /// CUDA version of the driver: 13000 for 13.0.
    pub driver: Result<i32, CudaError>,
    /// An error if there is no driver.
    pub gpus: Result<Vec<GpuInfo>, CudaError>,
    pub nvrtc: Result<Compiler, CudaError>,
}

impl Survey {
    /// Takes the survey. Without a driver it costs a few failed attempts to open a file, and it looks for
    /// the compiler only if `thorough`.
    pub fn take(thorough: bool) -> Self {
        let driver = driver_version();
        let gpus = match &driver {
            Ok(_) => gpus(),
            Err(error) => Err(error.clone()),
        };
        let nvrtc = match &driver {
            Err(error) if !thorough => Err(error.clone()),
            _ => Compiler::find(),
        };
        Self { driver, gpus, nvrtc }
    }

    /// Returns the GPU with this ordinal among the visible ones, and the compiler, if both exist.
    ///
    /// # Errors
    /// Text about everything that is missing.
    pub fn usable(self, ordinal: u32) -> Result<(GpuInfo, Compiler), String> {
        let missing = self.missing();
        let gpus = self.gpus.unwrap_or_default();
        let count = gpus.len();
        match (gpus.into_iter().nth(ordinal as usize), self.nvrtc) {
            (Some(gpu), Ok(compiler)) => Ok((gpu, compiler)),
            (None, Ok(_)) if count > 0 => {
                let visible = std::env::var_os("CUDA_VISIBLE_DEVICES");
                let visible = visible.map_or(String::new(), |list| {
                    format!(" (CUDA_VISIBLE_DEVICES is {})", list.to_string_lossy())
                });
                Err(format!("there is no GPU {ordinal}, only 0 to {}{visible}", count - 1))
            }
            _ => Err(missing.join("; ")),
        }
    }

    /// Returns the missing parts, each once.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        match (&self.driver, &self.gpus) {
            (Err(error), _) | (Ok(_), Err(error)) => missing.push(error.to_string()),
            (Ok(_), Ok(gpus)) if gpus.is_empty() => missing.push("the CUDA driver has no device".to_owned()),
            (Ok(_), Ok(_)) => {}
        }
        if let Err(error) = &self.nvrtc
            && self.driver.as_ref().err() != Some(error)
        {
            missing.push(error.to_string());
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::super::Arch;
    use super::*;

    fn no_driver() -> CudaError {
        CudaError::Missing { library: "CUDA driver", looked_for: vec!["libcuda.so".into()] }
    }

    #[test]
    fn each_missing_part_is_reported_once() {
        let survey = Survey { driver: Err(no_driver()), gpus: Err(no_driver()), nvrtc: Err(no_driver()) };
        assert_eq!(survey.missing(), ["cannot find CUDA driver; tried libcuda.so"]);
        let nvrtc = CudaError::Version { library: "NVRTC", found: "12.8".into(), required: "13.x" };
        let survey = Survey { driver: Ok(13_000), gpus: Ok(Vec::new()), nvrtc: Err(nvrtc) };
        let missing = survey.usable(0).unwrap_err();
        assert_eq!(missing, "the CUDA driver has no device; NVRTC has version 12.8; 13.x is required");
    }

    #[test]
    fn a_gpu_is_selected_by_its_ordinal() {
        let gpu = |ordinal| GpuInfo {
            ordinal,
            name: format!("GPU {ordinal}"),
            arch: Arch::SM_90,
            memory_bytes: 80 << 30,
            multiprocessors: 132,
            clock_khz: 1_980_000,
            shared_bytes: 227 << 10,
            l2_bytes: 50 << 20,
            unified: false,
        };
        let survey =
            || Survey { driver: Ok(13_000), gpus: Ok(vec![gpu(0), gpu(1)]), nvrtc: Compiler::find() };
        for ordinal in 0..2 {
            assert_eq!(survey().usable(ordinal).unwrap().0, gpu(ordinal));
        }
        let missing = survey().usable(2).unwrap_err();
        assert!(missing.starts_with("there is no GPU 2, only 0 to 1"), "{missing}");
    }
}
