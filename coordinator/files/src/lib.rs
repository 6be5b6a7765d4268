//! Uploaded files, batches and responses of tenants, kept on disk by the coordinator that took them.
//!
//! Guarantees: a tenant reaches only its own objects. Sizes and numbers are bounded by [`Limits`]. A change is on disk
//! when its call returns. A crash at any moment leaves the state before or after a change. A line of a batch has at
//! most one result, and a recorded result is never lost.
//! Must not contain: HTTP, the run of a line, async code. Calls block on the disk.

mod error;
mod journal;
mod lines;
mod record;
mod responses;
mod results;
mod store;

pub use error::FilesError;
pub use lines::{BatchLine, Line, Lines, MAX_CUSTOM_ID, MAX_LINE_BYTES};
pub use record::{BatchRecord, Counts, FileRecord, LineError, Purpose, Status};
pub use responses::{ResponseLimits, Responses, StoredResponse};
pub use results::{MAX_RESULT_BYTES, Outcome, Results};
pub use store::{Limits, NewBatch, Order, Page, Paging, Store, Upload, now};
