//! A fake of NVIDIA's management library, for processes that load it (`fake_nvml.c`).

use anyhow::{Context, ensure};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// The loader's variable for folders of libraries.
pub const LOADER_PATH: &str = "LD_LIBRARY_PATH";

/// The library in a folder of its own, with planted values.
#[derive(Debug)]
pub struct FakeNvml(TempDir);

impl FakeNvml {
    /// Compiles the library. `values` has a line `key value` for each value; see `fake_nvml.c`.
    pub fn new(values: &str) -> anyhow::Result<Self> {
        let fake = Self(tempfile::tempdir()?);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/fake_nvml.c");
        let library = fake.0.path().join("libnvidia-ml.so.1");
        let mut compiler = Command::new("cc");
        let built =
            compiler.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().context("cc")?;
        ensure!(built.success(), "cc cannot compile {}", source.display());
        fake.plant(values)?;
        Ok(fake)
    }

    /// Replaces all values, at once.
    pub fn plant(&self, values: &str) -> anyhow::Result<()> {
        let next = self.0.path().join("next");
        std::fs::write(&next, values)?;
        Ok(std::fs::rename(next, self.0.path().join("values"))?)
    }

    /// The folder to put on [`LOADER_PATH`].
    pub fn folder(&self) -> &Path {
        self.0.path()
    }
}
