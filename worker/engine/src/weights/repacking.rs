//! Repacks matrices in the background, on a low-priority thread, while the model is already served from the
//! shard store's format. The device then reads the repacked matrices.

use super::packed::{DeferredMatrix, Writing};
use crate::Error;
use kernels::aligned::AlignedBuf;
use kernels::backend::{Backend, MatrixId, MatrixSource, Packer, SharedBytes};
use model::shard::{PackedWriter, StoreError, StoreReservation};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

/// A running repacking. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Repacking {
    done: Receiver<(MatrixId, SharedBytes)>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Repacking {
    /// Starts to repack all deferred matrices. If no thread can be started, weights stay in the source's
    /// format, which is logged.
    pub(super) fn begin(writing: Writing, packer: Packer) -> Option<Self> {
        let Writing { writer, room, deferred, .. } = writing;
        let (done_tx, done) = mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let work = Work { room, packer, stop: Arc::clone(&stop) };
        let work = move || {
            kernels::pool::give_way();
            work.run(writer, deferred, &mut |matrix, packed| done_tx.send((matrix, packed)).is_ok());
        };
        match thread::Builder::new().name("repacking".to_owned()).spawn(work) {
            Ok(thread) => Some(Self { done, stop, thread: Some(thread) }),
            Err(error) => {
                tracing::warn!(%error, "cannot repack weights; steps take longer");
                None
            }
        }
    }

    /// Switches the device to matrices that were repacked since the last call. Returns true if no more will
    /// follow.
    pub(crate) fn adopt(&self, backend: &mut dyn Backend) -> Result<bool, Error> {
        loop {
            match self.done.try_recv() {
                Ok((matrix, packed)) => backend.replace_by_packed(matrix, packed)?,
                Err(TryRecvError::Empty) => return Ok(false),
                Err(TryRecvError::Disconnected) => return Ok(true),
            }
        }
    }
}

impl Drop for Repacking {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The thread stops within one piece. A panic was already reported by the panic handler.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Work {
    room: StoreReservation,
    packer: Packer,
    stop: Arc<AtomicBool>,
}

impl Work {
    /// Repacks the matrices one by one: into the store as long as writing works, else into memory.
    fn run(
        self,
        writer: PackedWriter,
        deferred: Vec<DeferredMatrix>,
        publish: &mut dyn FnMut(MatrixId, SharedBytes) -> bool,
    ) {
        let (started, matrices) = (Instant::now(), deferred.len());
        let mut writer = Some(writer);
        for DeferredMatrix { matrix, name, shape, bytes, packed_bytes } in deferred {
            let bytes: &[u8] = bytes.as_ref().as_ref();
            let source = (MatrixSource { bytes: &bytes, ..shape }, packed_bytes);
            let packed = match writer.as_mut().map(|writer| self.pack_into_store(writer, &name, source)) {
                Some(Ok(packed)) => packed,
                _ if self.stops() => return,
                result => {
                    if let Some(Err(error)) = result {
                        tracing::warn!(%error, "cannot cache repacked weights; the next start repacks them again");
                        writer = None;
                    }
                    self.pack_into_memory(source)
                }
            };
            match packed {
                Ok(packed) => {
                    if self.stops() || !publish(matrix, packed) {
                        return;
                    }
                }
                Err(error) => tracing::warn!(name, %error, "cannot repack a matrix; steps take longer"),
            }
        }
        if let Some(Err(error)) = writer.map(PackedWriter::finish) {
            tracing::warn!(%error, "cannot cache repacked weights; the next start repacks them again");
        }
        tracing::info!(
            matrices,
            seconds = started.elapsed().as_secs_f64(),
            "repacked weights in the background"
        );
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn next(&self) -> ControlFlow<()> {
        if self.stops() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Repacks a matrix into the store.
    fn pack_into_store(
        &self,
        writer: &mut PackedWriter,
        name: &str,
        (source, bytes): (MatrixSource<'_>, usize),
    ) -> Result<Result<SharedBytes, kernels::Error>, StoreError> {
        let mut packed = Ok(());
        let region = writer.add(name, bytes as u64, |region| {
            packed = (self.packer)(source, &mut |offset, piece| {
                region.piece(offset as u64, piece);
                self.next()
            });
        })?;
        self.room.used(bytes as u64);
        Ok(packed.map(|()| Arc::new(region) as SharedBytes))
    }

    /// Repacks a matrix into memory of this process.
    fn pack_into_memory(
        &self,
        (source, bytes): (MatrixSource<'_>, usize),
    ) -> Result<SharedBytes, kernels::Error> {
        let mut memory = AlignedBuf::<u8>::zeroed(bytes);
        (self.packer)(source, &mut |offset, piece| {
            if let Some(to) = memory.get_mut(offset..offset + piece.len()) {
                to.copy_from_slice(piece);
            }
            self.next()
        })?;
        Ok(Arc::new(memory))
    }
}
