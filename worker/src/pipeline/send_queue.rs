//! Where the thread that computes hands over what another stage is to have.
//!
//! What is small leaves from that thread itself: nobody has to be woken for it. The rest is written by a task beside the
//! next step, since it takes longer, or waits until the other side reads.

use super::wait_policy::step_aside;
use proto::Error;
use proto::transport::Handover;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, mpsc};

/// What is not longer leaves at once: the rows of some streams. A microsecond or two for each KiB is what that takes.
const SMALL_BYTES: usize = 64 << 10;

/// What writes messages to another stage.
pub(super) trait Writes: Send + 'static {
    type Message: Send + 'static;

    fn write(&mut self, message: Self::Message) -> impl Future<Output = Result<(), Error>> + Send;

    /// The bytes behind a message, which are the most of it.
    fn bytes(message: &Self::Message) -> usize;
}

/// What the task has to do.
enum Item<M> {
    Write(M),
    /// It has the writer, and what has been written is part of a message.
    Begun(Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>),
    Failed(Error),
}

pub(super) struct SendQueue<W: Writes> {
    runtime: Handle,
    handover: Handover,
    writer: Arc<Mutex<W>>,
    queue: mpsc::UnboundedSender<Item<W::Message>>,
    /// Items that are not done.
    queued: Arc<AtomicUsize>,
}

/// What does not leave at once.
pub(super) struct Queue<W: Writes> {
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
    /// `handover` is of the connection that `writer` writes to, and `runtime` that one's.
    pub(super) fn new(runtime: Handle, writer: W, handover: Handover) -> (Self, Queue<W>) {
        let (queue, items) = mpsc::unbounded_channel();
        let (writer, queued) = (Arc::new(Mutex::new(writer)), Arc::new(AtomicUsize::new(0)));
        let other = Queue { writer: Arc::clone(&writer), items, queued: Arc::clone(&queued) };
        (Self { runtime, handover, writer, queue, queued }, other)
    }

    /// Hands a message over, behind all before it; never on a thread of the runtime. Why one cannot be written is told by
    /// [`Queue::write_all`].
    pub(super) fn send(&mut self, message: W::Message) {
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
        // Without the other end it is told already why.
        let _ = self.queue.send(item);
    }
}

impl<W: Writes> Queue<W> {
    /// Writes what does not leave at once, until the outlet is gone or something cannot be written.
    pub(super) async fn write_all(mut self) -> Result<(), Error> {
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
    use proto::ca::Authority;
    use proto::ids::{ClusterName, Epoch, NodeId, Role};
    use proto::stage::{ReplicaId, StageFeed, StageFrame, StageStep};
    use proto::transport::{
        ActivationReceiver, ActivationSender, Connection, Endpoint, EndpointConfig, Expected, Incoming,
    };
    use std::time::SystemTime;

    const ROW_BYTES: usize = 1 << 10;
    const MAX_ROWS: usize = 1 << 10;

    /// Both ends of a stream, and what it needs.
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

    /// The step of this number, and so many rows.
    fn message(number: u64, rows: usize) -> (StageFrame, Vec<u8>) {
        let step = StageStep { step: number, tokens: vec![0; rows], ..StageStep::default() };
        (StageFrame::Step(step), vec![number as u8; rows * ROW_BYTES])
    }

    async fn read(receiver: &mut ActivationReceiver) -> (u64, Vec<u8>) {
        let mut bytes = Vec::new();
        let mut sink = |part: &[u8]| bytes.extend_from_slice(part);
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
        // Small ones fill all windows while nobody reads, and more come; then large and small ones by turns.
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
    fn whoever_has_nobody_to_write_to_says_so() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let Ends { sender, receiver, _connections: [dialed, _accepted], _endpoints } =
            runtime.block_on(ends());
        let handover = sender.handover();
        let (mut outlet, queue) = SendQueue::new(runtime.handle().clone(), sender, handover);
        drop(receiver);
        runtime.block_on(async { dialed.close(proto::transport::CloseCode::Shutdown) });
        outlet.send(message(0, 1));
        assert!(runtime.block_on(queue.write_all()).is_err());
    }
}
