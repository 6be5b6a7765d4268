//! Loads weights where they share memory with the page cache of their file, as on a GPU with unified memory.

use engine::Error;
use engine::kv_cache::memory::{MemInfo, MemoryFloor};
use engine::weights::{TensorSource, TensorView};
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
    fn tensor(&self, name: &str) -> Result<TensorView<'_>, Error> {
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
    use std::cell::Cell;
    use std::io;

    /// Tensors of 100 bytes, each of which takes as much memory when it is read.
    struct Host {
        free: Cell<u64>,
        forgotten: RefCell<Vec<String>>,
    }

    impl TensorSource for Host {
        fn tensor(&self, _: &str) -> Result<TensorView<'_>, Error> {
            self.free.set(self.free.get() - 100);
            Ok(TensorView { ggml_type: 0, dims: &[25], bytes: std::borrow::Cow::Borrowed(&[0; 100]) })
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
        let host = Host { free: Cell::new(350), forgotten: RefCell::default() };
        let staged = Staged::new(&host, MemoryFloor { bytes: 100 }, &host);
        assert_eq!(staged.tensor("a").unwrap().bytes.len(), 100);
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
