//! Measurement of the path to another node.

use super::connection::Connection;
use super::probe::ZEROS;
use super::streams::read_error;
use crate::Error;
use quinn::RecvStream;
use std::time::Duration;
use tokio::time::Instant;

/// Bytes per second that arrive over all connections together. They are counted for `time` after a start of a
/// quarter of it, in which congestion windows open; together at most five seconds.
///
/// # Errors
/// A lost connection, and [`Error::StreamCut`] if a peer answers too many others or is of a version without
/// probes.
pub async fn receive_rate(connections: &[Connection], time: Duration) -> Result<f64, Error> {
    let begun = Instant::now() + time / 4;
    let ends = begun + time;
    let receive = async |connection: &Connection| {
        let mut stream: RecvStream = connection.open_probe().await?;
        let mut bytes = 0;
        loop {
            let chunk = match tokio::time::timeout_at(ends, stream.read_chunk(ZEROS.len(), false)).await {
                Ok(chunk) => chunk.map_err(read_error)?,
                Err(_) => return Ok::<usize, Error>(bytes),
            };
            let chunk = chunk.ok_or(Error::StreamCut { what: "measurement of a path" })?;
            if Instant::now() >= begun {
                bytes += chunk.bytes.len();
            }
        }
    };
    let received = futures::future::try_join_all(connections.iter().map(receive)).await?;
    Ok(received.iter().sum::<usize>() as f64 / time.as_secs_f64())
}
