//! Reads a model's tensors while they are loaded: ahead of the loader, and once for both weights and digest.

use engine::Error;
use engine::weights::TensorSource;
use kernels::backend::SharedBytes;
use model::header::TensorInfo;
use model::{ModelFile, TensorBytes};
use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Bytes of tensors that are read ahead of the one being loaded: enough to keep a disk busy while a large tensor is
/// repacked.
const AHEAD_BYTES: u64 = 256 << 20;

/// A file whose next tensors are read into the page cache while one is loaded.
pub(super) struct Reading<'a> {
    file: &'a ModelFile,
    /// Whether tensors are also hashed when they are loaded, so that their bytes are read from disk once.
    hashes: bool,
    /// For each tensor the bytes of those before it, in the order of loading.
    starts: HashMap<&'a str, u64>,
    /// Start of the tensor that is being loaded; `None` when loading has ended.
    place: Mutex<Option<u64>>,
    moved: Condvar,
}

impl<'a> Reading<'a> {
    /// Calls `load` with a source of the tensors of `file`, which it reads about in the order of `names`.
    pub(super) fn with<T>(
        (file, hashes): (&'a ModelFile, bool),
        names: &[&'a str],
        load: impl FnOnce(&dyn TensorSource) -> T,
    ) -> T {
        let (mut starts, mut end) = (HashMap::new(), 0);
        for name in names {
            starts.entry(*name).or_insert(end);
            end += file.tensor(name).map_or(0, TensorInfo::bytes);
        }
        let reading = Self { file, hashes, starts, place: Mutex::new(Some(0)), moved: Condvar::new() };
        thread::scope(|scope| {
            let ended = Ended(&reading);
            let ahead = || reading.read_ahead(names);
            // If no thread can be started, tensors are read when they are loaded.
            let _ = thread::Builder::new().name("model-read-ahead".to_owned()).spawn_scoped(scope, ahead);
            let result = load(&reading);
            drop(ended);
            result
        })
    }

    fn place(&self) -> MutexGuard<'_, Option<u64>> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_ahead(&self, names: &[&str]) {
        for name in names {
            let start = self.starts.get(name).copied().unwrap_or_default();
            let far = |place: &mut Option<u64>| place.is_some_and(|place| start > place + AHEAD_BYTES);
            let place = self.moved.wait_while(self.place(), far).unwrap_or_else(PoisonError::into_inner);
            if place.is_none() {
                return;
            }
            drop(place);
            self.file.read_ahead(name);
        }
    }

    fn move_to(&self, place: Option<u64>) {
        *self.place() = place;
        self.moved.notify_all();
    }
}

/// Ends the reading ahead, also if loading panics.
struct Ended<'a>(&'a Reading<'a>);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.move_to(None);
    }
}

impl TensorSource for Reading<'_> {
    fn tensor(&self, name: &str) -> Result<TensorBytes<'_>, Error> {
        if let Some(start) = self.starts.get(name) {
            self.move_to(Some(*start));
        }
        match self.file.tensor(name) {
            Some(_) if self.hashes => Ok(self.file.tensor_bytes_to_hash(name)?),
            _ => TensorSource::tensor(self.file, name),
        }
    }

    fn shared(&self, name: &str) -> Result<Option<SharedBytes>, Error> {
        self.file.shared(name)
    }

    fn forget(&self, name: &str) {
        TensorSource::forget(self.file, name);
    }

    fn measure(&self, name: &str) -> Result<(u32, u64), Error> {
        self.file.measure(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metadata::Metadata;
    use model::GgmlType;
    use model::gguf::writer::Writer;

    #[test]
    fn tensors_are_hashed_when_they_are_read_and_loading_may_end_early() {
        let mut writer = Writer::new(Metadata::default()).unwrap();
        for name in ["a", "b", "c"] {
            writer.tensor(name, GgmlType::F32, &[25]).unwrap();
        }
        let mut path = tempfile::NamedTempFile::new().unwrap();
        writer.write(&mut path, |info| vec![info.name().as_bytes()[0]; 100]).unwrap();
        let open = || ModelFile::open(path.path()).unwrap();
        let file = open();
        let names = ["b", "a", "b"];
        Reading::with((&file, true), &names, |source| {
            for name in names {
                let bytes = source.tensor(name).unwrap();
                assert_eq!(*bytes.part(0..100).unwrap(), [name.as_bytes()[0]; 100]);
            }
            assert!(matches!(source.tensor("d"), Err(Error::MissingTensor { .. })));
        });
        assert_eq!(file.digest().unwrap(), open().digest().unwrap());
        let panics = || Reading::with((&file, false), &names, |_| panic!("ended"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    }
}
