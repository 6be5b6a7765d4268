//! The baseline's file.

use crate::facts::Baseline;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Longest file that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Error of a baseline's file.
#[derive(Debug, thiserror::Error)]
pub enum BaselineError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: not a baseline of `kvasir doctor`: {reason}; delete it, and the next run writes a new one", path.display())]
    Invalid { path: PathBuf, reason: String },
}

impl Baseline {
    /// Reads a file. `None` if there is none.
    ///
    /// # Errors
    /// [`BaselineError`].
    pub fn read(path: &Path) -> Result<Option<Self>, BaselineError> {
        let failed = |source| BaselineError::Io { path: path.to_owned(), source };
        let file = match std::fs::File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text).map_err(failed)?;
        let parsed = serde_json::from_str(&text);
        parsed
            .map(Some)
            .map_err(|error| BaselineError::Invalid { path: path.to_owned(), reason: error.to_string() })
    }

    /// Replaces the file atomically.
    ///
    /// # Errors
    /// [`BaselineError::Io`].
    pub fn write(&self, path: &Path) -> Result<(), BaselineError> {
        let write = || {
            let temporary = path.with_extension("tmp");
            let mut file = std::fs::File::create(&temporary)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            std::fs::rename(&temporary, path)
        };
        write().map_err(|source| BaselineError::Io { path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Facts, Gpu, Interface};
    use std::time::SystemTime;

    #[test]
    fn the_best_values_are_kept_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("baseline.json");
        assert_eq!(Baseline::read(&path).unwrap(), None);
        let mut facts = Facts::at(SystemTime::now());
        let mut baseline = Baseline::default();
        for (state, clock, megabits) in
            [(8, 500, 100_000), (0, 2400, 200_000), (0, 900, 10_000), (5, 3000, 1)]
        {
            facts.gpus = vec![Gpu {
                performance_state: Some(state),
                sm_clock_mhz: Some(clock),
                power_limit_watts: Some(f64::from(clock)),
                ..Gpu::default()
            }];
            facts.interfaces =
                vec![Interface { name: "a".into(), mtu: 1500, megabits: Some(megabits), physical: true }];
            baseline = baseline.after(&facts);
        }
        baseline.write(&path).unwrap();
        let read = Baseline::read(&path).unwrap().unwrap();
        assert_eq!(read, baseline);
        assert_eq!((read.gpus[0].performance_state, read.gpus[0].sm_clock_mhz), (Some(0), Some(2400)));
        assert_eq!(
            (read.gpus[0].power_limit_watts, read.interfaces[0].megabits),
            (Some(3000.0), Some(200_000))
        );
    }

    #[test]
    fn another_file_is_named_with_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("baseline.json");
        std::fs::write(&path, "[").unwrap();
        let error = Baseline::read(&path).unwrap_err().to_string();
        assert!(error.contains("baseline.json") && error.contains("delete it"), "{error}");
    }
}
