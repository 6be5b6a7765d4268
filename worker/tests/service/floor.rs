//! A worker on a host with little free memory.

use crate::{TIMEOUT, pair_above, request};
use engine::kv_cache::memory::{HostFloor, MemInfo, MemoryFloor};
use proto::message::{GenerateError, GenerateFrame};
use proto::worker::WorkerState;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use transport::service::deadline;

struct Host(AtomicU64);

impl MemInfo for Host {
    fn available_bytes(&self) -> io::Result<u64> {
        Ok(self.0.load(Ordering::Relaxed))
    }
}

async fn readyz(ops: std::net::SocketAddr) -> String {
    let mut stream = tokio::net::TcpStream::connect(ops).await.unwrap();
    stream.write_all(b"GET /readyz HTTP/1.1\r\nhost: w\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_memory_is_short_no_new_work_is_taken() {
    let host = Arc::new(Host(AtomicU64::new(2000)));
    let floor = HostFloor { floor: MemoryFloor { bytes: 800 }, memory: host.clone() };
    let pair = pair_above(Some(floor)).await;
    let api = pair.connection.worker_api().await.unwrap();
    let wait_for_state = async |expected: WorkerState| {
        let start = Instant::now();
        loop {
            let status = api.status(deadline(TIMEOUT)).await.unwrap();
            if status.load.state == expected {
                return;
            }
            assert!(start.elapsed() < TIMEOUT, "{:?}, not {expected:?}", status.load.state);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    wait_for_state(WorkerState::Ready).await;
    host.0.store(700, Ordering::Relaxed);
    wait_for_state(WorkerState::Draining).await;
    let answer = readyz(pair.worker.ops_address()).await;
    assert!(
        answer.starts_with("HTTP/1.1 503") && answer.contains("free memory is below the floor"),
        "{answer}"
    );
    let mut stream = pair.connection.open_generate(&request(3)).await.unwrap();
    let refused = stream.next().await.unwrap().unwrap();
    assert!(matches!(refused, GenerateFrame::Failed(GenerateError::Draining)), "{refused:?}");
    let metrics = api.metrics_text(deadline(TIMEOUT)).await.unwrap();
    assert!(
        metrics.contains("kvasir_host_memory_short 1\n") && metrics.contains("available_bytes 700\n"),
        "{metrics}"
    );
    host.0.store(2000, Ordering::Relaxed);
    wait_for_state(WorkerState::Ready).await;
    let answer = readyz(pair.worker.ops_address()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    pair.worker.stop().await;
}
