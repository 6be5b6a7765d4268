//! Loads weights where they share memory with the page cache of their file, as on a GPU with unified memory.

use engine::Error;
use engine::kv_cache::memory::{MemInfo, MemoryFloor};
use engine::weights::TensorSource;
use model::TensorBytes;
use std::cell::RefCell;

/// A source that reads one tensor at a time. Before each tensor it checks that there is memory for it, since
/// other processes allocate too, and drops the pages of the previous one.
pub(super) struct Staged<'a> {
    source: &'a dyn TensorSource,
    floor: MemoryFloor,
    memory: &'a dyn MemInfo,
    taken: RefCell<Option<String>>,
}

impl<'a> Staged<'a> {
    pub(super) fn new(source: &'a dyn TensorSource, floor: MemoryFloor, memory: &'a dyn MemInfo) -> Self {
        Self { source, floor, memory, taken: RefCell::new(None) }
    }

    fn release(&self, next: Option<String>) {
        if let Some(before) = self.taken.replace(next) {
            self.source.forget(&before);
        }
    }
}

impl TensorSource for Staged<'_> {
    /// # Errors
    /// [`Error::Memory`] if less than the floor would stay free.
    fn tensor(&self, name: &str) -> Result<TensorBytes<'_>, Error> {
        self.release(None);
        let (_, bytes) = self.source.measure(name)?;
        self.floor.admit(self.memory, "a tensor of the weights", bytes)?;
        self.release(Some(name.to_owned()));
        self.source.tensor(name)
    }

    fn measure(&self, name: &str) -> Result<(u32, u64), Error> {
        self.source.measure(name)
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        self.release(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metadata::Metadata;
    use model::gguf::writer::Writer;
    use model::{GgmlType, ModelFile};
    use std::cell::Cell;
    use std::io;

    /// Tensors of 100 bytes, each of which takes as much memory when it is read.
    struct Host {
        file: ModelFile,
        free: Cell<u64>,
        forgotten: RefCell<Vec<String>>,
    }

    impl TensorSource for Host {
        fn tensor(&self, name: &str) -> Result<TensorBytes<'_>, Error> {
            self.free.set(self.free.get() - 100);
            Ok(self.file.tensor_bytes(name)?)
        }

        fn measure(&self, _: &str) -> Result<(u32, u64), Error> {
            Ok((0, 100))
        }

        fn forget(&self, name: &str) {
            self.forgotten.borrow_mut().push(name.to_owned());
        }
    }

    impl MemInfo for Host {
        fn available_bytes(&self) -> io::Result<u64> {
            Ok(self.free.get())
        }
    }

    #[test]
    fn loading_ends_before_the_floor_and_leaves_no_pages_behind() {
        let mut writer = Writer::new(Metadata::default()).unwrap();
        for name in ["a", "b", "c", "d"] {
            writer.tensor(name, GgmlType::F32, &[25]).unwrap();
        }
        let mut path = tempfile::NamedTempFile::new().unwrap();
        writer.write(&mut path, |_| vec![0; 100]).unwrap();
        let file = ModelFile::open(path.path()).unwrap();
        let host = Host { file, free: Cell::new(350), forgotten: RefCell::default() };
        let staged = Staged::new(&host, MemoryFloor { bytes: 100 }, &host);
        assert_eq!(staged.tensor("a").unwrap().info().bytes(), 100);
        assert!(host.forgotten.borrow().is_empty());
        staged.tensor("b").unwrap();
        assert_eq!(*host.forgotten.borrow(), ["a"]);
        let refused = staged.tensor("c").unwrap_err();
        assert!(matches!(refused, Error::Memory(_)), "{refused}");
        assert_eq!(
            refused.to_string(),
            "cannot allocate 100 bytes for a tensor of the weights: 150 are available and 100 must stay free"
        );
        assert_eq!(*host.forgotten.borrow(), ["a", "b"]);
        // Another process has freed memory.
        host.free.set(200);
        staged.tensor("d").unwrap();
        drop(staged);
        assert_eq!(*host.forgotten.borrow(), ["a", "b", "d"]);
    }
}
