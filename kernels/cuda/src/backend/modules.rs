//! Sources compiled on demand, each once for the backend's device.

use super::super::source::Source;
use super::super::{Compiled, CudaError};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Compiles a source for the backend's device.
pub type Compile = dyn FnMut(&Source) -> Result<Compiled, CudaError> + Send;

pub(super) struct Modules {
    compile: Box<Compile>,
    compiled: HashMap<&'static str, Compiled>,
}

impl Modules {
    pub(super) fn new(compile: Box<Compile>) -> Self {
        Self { compile, compiled: HashMap::new() }
    }

    /// # Errors
    /// Errors of the compiler.
    pub(super) fn of(&mut self, source: &Source) -> Result<&Compiled, CudaError> {
        Ok(match self.compiled.entry(source.name) {
            Entry::Occupied(occupied) => occupied.into_mut(),
            Entry::Vacant(vacant) => vacant.insert((self.compile)(source)?),
        })
    }
}
