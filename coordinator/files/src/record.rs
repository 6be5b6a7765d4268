//! The records of a file and of a batch.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The purpose of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// The input of batches.
    Batch,
    /// The results of a batch.
    BatchOutput,
}

impl Purpose {
    pub fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::BatchOutput => "batch_output",
        }
    }
}

/// A file. Times are seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    pub id: String,
    pub tenant: String,
    pub name: String,
    pub bytes: u64,
    pub purpose: Purpose,
    pub created_at: u64,
    pub expires_at: u64,
}

/// The state of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Its lines are being checked, or it waits for its turn.
    Validating,
    /// Its lines were refused.
    Failed,
    InProgress,
    /// Its result files are being written.
    Finalizing,
    Completed,
    /// Its time ended before its last line.
    Expired,
    Cancelling,
    Cancelled,
}

impl Status {
    pub fn name(self) -> &'static str {
        match self {
            Self::Validating => "validating",
            Self::Failed => "failed",
            Self::InProgress => "in_progress",
            Self::Finalizing => "finalizing",
            Self::Completed => "completed",
            Self::Expired => "expired",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether the batch has ended.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Failed | Self::Completed | Self::Expired | Self::Cancelled)
    }
}

/// Lines of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub total: u64,
    pub completed: u64,
    pub failed: u64,
}

/// Why the input of a batch is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineError {
    pub code: String,
    pub message: String,
    pub param: Option<String>,
    /// Number of the line, from 1.
    pub line: Option<u64>,
}

/// A batch. Times are seconds since 1970.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchRecord {
    pub id: String,
    pub tenant: String,
    /// Id of the key that created it; `None` without a key.
    pub key: Option<String>,
    /// Path of the API that its lines are for.
    pub endpoint: String,
    pub input_file_id: String,
    pub metadata: Option<Map<String, Value>>,
    /// Seconds that the result files are kept.
    pub keep_output_s: u64,
    pub status: Status,
    /// The status with which it ends once its result files are written.
    pub ends_as: Option<Status>,
    pub counts: Counts,
    pub errors: Vec<LineError>,
    pub created_at: u64,
    pub expires_at: u64,
    pub in_progress_at: Option<u64>,
    pub finalizing_at: Option<u64>,
    pub completed_at: Option<u64>,
    pub failed_at: Option<u64>,
    pub expired_at: Option<u64>,
    pub cancelling_at: Option<u64>,
    pub cancelled_at: Option<u64>,
    pub output_file_id: Option<String>,
    pub error_file_id: Option<String>,
}

impl BatchRecord {
    /// The time at which the batch ended; `None` before.
    pub fn ended_at(&self) -> Option<u64> {
        match self.status {
            Status::Failed => self.failed_at,
            Status::Completed => self.completed_at,
            Status::Expired => self.expired_at,
            Status::Cancelled => self.cancelled_at,
            _ => None,
        }
    }

    /// Changes the status at a time.
    pub(crate) fn set(&mut self, status: Status, now: u64) {
        self.status = status;
        let time = match status {
            Status::Validating => return,
            Status::Failed => &mut self.failed_at,
            Status::InProgress => &mut self.in_progress_at,
            Status::Finalizing => &mut self.finalizing_at,
            Status::Completed => &mut self.completed_at,
            Status::Expired => &mut self.expired_at,
            Status::Cancelling => &mut self.cancelling_at,
            Status::Cancelled => &mut self.cancelled_at,
        };
        *time = time.or(Some(now));
    }
}
