//! Queue of messages from a compute thread to another stage.
//!
//! Small messages are sent on the compute thread itself, which saves waking another thread. A task sends
//! larger ones while the next step is computed, because they take longer or block until the peer reads.
//! Messages never overtake each other.

use super::wait_policy::step_aside;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, mpsc};
use transport::{Error, Handover};

/// Messages of at most this size are sent on the calling thread: the rows of some streams. That takes one to
/// two microseconds a KiB.
const SMALL_BYTES: usize = 64 << 10;

/// Writes messages to another stage.
pub trait Writes: Send + 'static {
    type Message: Send + 'static;

    fn write(&mut self, message: Self::Message) -> impl Future<Output = Result<(), Error>> + Send;

    /// Size of a message's payload in bytes.
    fn bytes(message: &Self::Message) -> usize;
}

/// Work for the sending task.
enum Item<M> {
    Write(M),
    /// A message that was written in part. The future holds the writer's lock.
    Begun(Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>),
    Failed(Error),
}

pub struct SendQueue<W: Writes> {
    runtime: Handle,
    handover: Handover,
    writer: Arc<Mutex<W>>,
    queue: mpsc::UnboundedSender<Item<W::Message>>,
    /// Number of items that are not sent yet.
    queued: Arc<AtomicUsize>,
}

/// The receiving end of a [`SendQueue`], for the task that sends.
pub struct Queue<W: Writes> {
    writer: Arc<Mutex<W>>,
    items: mpsc::UnboundedReceiver<Item<W::Message>>,
    queued: Arc<AtomicUsize>,
}

impl<W: Writes> std::fmt::Debug for SendQueue<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendQueue").field("queued", &self.queued).finish_non_exhaustive()
    }
}

impl<W: Writes> SendQueue<W> {
    /// `handover` and `runtime` must belong to the connection that `writer` writes to.
    pub fn new(runtime: Handle, writer: W, handover: Handover) -> (Self, Queue<W>) {
        let (queue, items) = mpsc::unbounded_channel();
        let (writer, queued) = (Arc::new(Mutex::new(writer)), Arc::new(AtomicUsize::new(0)));
        let other = Queue { writer: Arc::clone(&writer), items, queued: Arc::clone(&queued) };
        (Self { runtime, handover, writer, queue, queued }, other)
    }

    /// Sends a message after all earlier ones. Must not be called on a thread of the runtime.
    /// [`Queue::write_all`] returns the error if a write fails.
    pub fn send(&mut self, message: W::Message) {
        let idle = self.queued.load(Ordering::Acquire) == 0;
        if idle
            && W::bytes(&message) <= SMALL_BYTES
            && let Ok(mut writer) = Arc::clone(&self.writer).try_lock_owned()
        {
            let mut write = Box::pin(async move { writer.write(message).await });
            match self.handover.poll(&self.runtime, write.as_mut()) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => self.put(Item::Failed(error)),
                Poll::Pending => self.put(Item::Begun(write)),
            }
        } else {
            self.put(Item::Write(message));
            step_aside();
        }
    }

    fn put(&self, item: Item<W::Message>) {
        self.queued.fetch_add(1, Ordering::AcqRel);
        // If the receiver is gone, its task has already returned the error.
        let _ = self.queue.send(item);
    }
}

impl<W: Writes> Queue<W> {
    /// Sends all queued messages until the [`SendQueue`] is dropped or a write fails.
    pub async fn write_all(mut self) -> Result<(), Error> {
        while let Some(item) = self.items.recv().await {
            match item {
                Item::Write(message) => self.writer.lock().await.write(message).await?,
                Item::Begun(write) => write.await?,
                Item::Failed(error) => return Err(error),
            }
            self.queued.fetch_sub(1, Ordering::AcqRel);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pki::Expected;
    use pki::ca::Authority;
    use proto::ids::{ClusterName, Epoch, NodeId, Role};
    use proto::stage::{ReplicaId, StageFeed, StageFrame, StageStep};
    use std::time::SystemTime;
    use transport::{ActivationReceiver, ActivationSender, Connection, Endpoint, EndpointConfig, Incoming};

    const ROW_BYTES: usize = 1 << 10;
    const MAX_ROWS: usize = 1 << 10;

    /// Both ends of a stream, with the connections and endpoints that keep it open.
    struct Ends {
        sender: ActivationSender,
        receiver: ActivationReceiver,
        _connections: [Connection; 2],
        _endpoints: [Endpoint; 2],
    }

    async fn ends() -> Ends {
        let authority = Authority::new(ClusterName::new("stages").unwrap(), SystemTime::now()).unwrap();
        let bind = |name: &str| {
            let issued = authority.issue(Role::Worker, NodeId::new(name).unwrap(), SystemTime::now());
            let identity = issued.unwrap().identity().unwrap();
            let config = EndpointConfig::new(Epoch(1), [Role::Worker]);
            Endpoint::bind("127.0.0.1:0".parse().unwrap(), &identity, config).unwrap()
        };
        let (first, second) = (bind("first"), bind("second"));
        let expected = Expected::any(Role::Worker);
        let (dialed, accepted) = tokio::join!(first.connect(second.address(), &expected), second.accept());
        let (dialed, accepted) = (dialed.unwrap(), accepted.unwrap());
        let feed = StageFeed { replica: ReplicaId([7; 16]) };
        let sender = dialed.open_activations(&feed).await.unwrap();
        let Incoming::Activations(receiver) = accepted.accept().await.unwrap() else {
            panic!("another stream")
        };
        Ends { sender, receiver, _connections: [dialed, accepted], _endpoints: [first, second] }
    }

    /// A step with this number and this many rows.
    fn message(number: u64, rows: usize) -> (StageFrame, Vec<u8>) {
        let step = StageStep { step: number, tokens: vec![0; rows], ..StageStep::default() };
        (StageFrame::Step(step), vec![number as u8; rows * ROW_BYTES])
    }

    async fn read(receiver: &mut ActivationReceiver) -> (u64, Vec<u8>) {
        let mut bytes = Vec::new();
        let mut sink = |data: &[u8]| bytes.extend_from_slice(data);
        let frame = receiver.next(ROW_BYTES, MAX_ROWS, &mut sink).await.unwrap().unwrap();
        let StageFrame::Step(step) = frame else { panic!("{frame:?}") };
        (step.step, bytes)
    }

    #[test]
    fn messages_arrive_in_order_whether_they_leave_at_once_or_wait() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let Ends { sender, mut receiver, _connections, _endpoints } = runtime.block_on(ends());
        let handover = sender.handover();
        let (mut outlet, queue) = SendQueue::new(runtime.handle().clone(), sender, handover);
        let writing = runtime.spawn(queue.write_all());
        // Small messages fill all flow-control windows while nobody reads. Large and small ones follow in
        // turn.
        let small = SMALL_BYTES / ROW_BYTES;
        let rows = |step: u64| if step < 200 || step.is_multiple_of(3) { small } else { 3 * small };
        let count = 260;
        let mut waited = false;
        for step in 0..count {
            let (plan, bytes) = message(step, rows(step));
            outlet.send((plan, bytes));
            waited |= step < 200 && outlet.queued.load(Ordering::Acquire) > 0;
        }
        assert!(waited, "12 MiB leave though nobody reads");
        runtime.block_on(async {
            for step in 0..count {
                let (number, bytes) = read(&mut receiver).await;
                assert_eq!((number, bytes.len()), (step, rows(step) * ROW_BYTES));
                assert!(bytes.iter().all(|byte| *byte == step as u8), "{step}");
            }
        });
        drop(outlet);
        runtime.block_on(writing).unwrap().unwrap();
    }

    #[test]
    fn a_write_to_a_closed_connection_returns_an_error() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let Ends { sender, receiver, _connections: [dialed, _accepted], _endpoints } =
            runtime.block_on(ends());
        let handover = sender.handover();
        let (mut outlet, queue) = SendQueue::new(runtime.handle().clone(), sender, handover);
        drop(receiver);
        runtime.block_on(async { dialed.close(transport::CloseCode::Shutdown) });
        outlet.send(message(0, 1));
        assert!(runtime.block_on(queue.write_all()).is_err());
    }
}
