//! Sources as they are needed: compiled once for the device that a backend runs on.

use super::super::source::Source;
use super::super::{Compiled, CudaError};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Compiles a source for the device that a backend runs on.
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
    /// What the compiler says.
    pub(super) fn of(&mut self, source: &Source) -> Result<&Compiled, CudaError> {
        Ok(match self.compiled.entry(source.name) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert((self.compile)(source)?),
        })
    }
}
