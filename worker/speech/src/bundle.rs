//! Folders with the models of operations.

use proto::ids::ModelId;
use proto::operation::Operation;
use std::path::PathBuf;

/// A directory with a folder for each of its operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    /// Name in the API.
    pub id: ModelId,
    pub dir: PathBuf,
}

impl Bundle {
    pub fn folder(&self, operation: Operation) -> PathBuf {
        self.dir.join(operation.name())
    }

    /// The operations that it has a folder for.
    pub fn operations(&self) -> Vec<Operation> {
        Operation::ALL.into_iter().filter(|operation| self.folder(*operation).is_dir()).collect()
    }
}
