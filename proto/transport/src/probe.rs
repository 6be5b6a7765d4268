//! The answering side of a measurement of a path: zeros for a few seconds, or until the stream is no longer read.

use bytes::Bytes;
use quinn::SendStream;
use std::time::Duration;
use tokio::sync::Semaphore;

/// A stream ends after this time.
const LONGEST: Duration = Duration::from_secs(5);
/// Streams that this process answers at once; further ones end without a byte.
const AT_ONCE: usize = 16;
/// Below all other streams of the connection.
const PRIORITY: i32 = -2;
/// Streams that are answered now.
static ANSWERED: Semaphore = Semaphore::const_new(AT_ONCE);
pub(super) static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Answers a peer's request in a task of its own. It ends with the stream, at the latest after [`LONGEST`].
pub(super) fn answer(mut send: SendStream) {
    tokio::spawn(async move {
        let Ok(_permit) = ANSWERED.try_acquire() else { return drop(send.finish()) };
        // Fails only for an ended stream.
        let _ = send.set_priority(PRIORITY);
        let zeros = async { while send.write_chunk(Bytes::from_static(&ZEROS)).await.is_ok() {} };
        // The time limit is the usual end of a stream whose reader is gone.
        let _ = tokio::time::timeout(LONGEST, zeros).await;
        let _ = send.finish();
    });
}
