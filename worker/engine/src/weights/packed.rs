//! Repacked weights on disk. They are mapped if an earlier load has written them.

use super::Repacking;
use crate::Error;
use kernels::backend::{Backend, MatrixId, MatrixSource, Packer, SharedBytes};
use model::shard::{PackedFile, PackedWriter, ShardStore, StoreError, StoreReservation};
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// The repacked matrices of a layer range.
#[derive(Debug)]
pub enum Packs {
    Off,
    Mapped(PackedFile),
    Written(Box<Writing>),
}

/// State of [`Packs::Written`].
#[derive(Debug)]
pub struct Writing {
    pub(super) writer: PackedWriter,
    pub(super) room: StoreReservation,
    /// Repacks independently of the device. `None` if the device cannot.
    pub(super) packer: Option<Packer>,
    /// Matrices that are still to be repacked.
    pub(super) deferred: Vec<DeferredMatrix>,
}

/// A matrix that is read in the source's format until it is repacked.
pub(super) struct DeferredMatrix {
    pub(super) matrix: MatrixId,
    /// Name in the store of repacked weights.
    pub(super) name: String,
    pub(super) shape: MatrixSource<'static>,
    pub(super) bytes: SharedBytes,
    pub(super) packed_bytes: usize,
}

impl fmt::Debug for DeferredMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredMatrix").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Packs {
    /// Path of the repacked weights of these layers in a device's layout.
    pub fn path(store: &ShardStore, layout: &str, model: &[u8; 32], layers: &Range<usize>) -> PathBuf {
        let digest: String = model[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        store.packed_path(&format!("{digest}-{layout}-{}-{}", layers.start, layers.end))
    }

    /// Opens the repacked weights of these layers in the device's layout. `bytes` is their approximate size.
    /// Waits while another process writes them. An error is logged and only costs memory and time.
    pub fn open(
        store: Option<&ShardStore>,
        backend: &dyn Backend,
        model: &[u8; 32],
        layers: &Range<usize>,
        bytes: u64,
    ) -> Self {
        let (Some(store), Some(layout)) = (store, backend.pack_layout()) else { return Self::Off };
        let path = Self::path(store, layout, model, layers);
        let opened = || -> Result<Self, StoreError> {
            if let Some(file) = PackedFile::open(&path)? {
                return Ok(Self::Mapped(file));
            }
            Ok(match PackedWriter::begin(&path)? {
                Ok(file) => Self::Mapped(file),
                Err(writer) => {
                    let (room, packer) = (store.reserve(bytes)?, backend.packer());
                    Self::Written(Box::new(Writing { writer, room, packer, deferred: Vec::new() }))
                }
            })
        };
        opened().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot cache repacked weights; the next start repacks them again");
            Self::Off
        })
    }

    /// The matrix `name`, if it is stored with the shape of `source`; the bytes of `source` are ignored.
    pub(crate) fn find(
        &self,
        name: &str,
        source: MatrixSource<'_>,
        backend: &mut dyn Backend,
    ) -> Option<MatrixId> {
        let Self::Mapped(file) = self else { return None };
        let region: SharedBytes = Arc::new(file.region(name)?);
        match backend.create_packed_matrix(source, region) {
            Ok(matrix) => Some(matrix),
            Err(error) => {
                tracing::warn!(name, %error, "a cached repacked matrix cannot be used; it is repacked again");
                None
            }
        }
    }

    /// Repacks a matrix into the store and maps it from there. `None` if it is not to be stored or storing
    /// fails.
    pub(crate) fn store_matrix(
        &mut self,
        name: &str,
        source: MatrixSource<'_>,
        backend: &mut dyn Backend,
    ) -> Result<Option<MatrixId>, Error> {
        let Self::Written(writing) = self else { return Ok(None) };
        let Writing { writer, room, .. } = writing.as_mut();
        let bytes = backend.packed_bytes(source)? as u64;
        let mut packed = Ok(());
        let added = writer.add(name, bytes, |region| {
            packed = backend.pack_matrix(source, &|offset, piece| region.piece(offset as u64, piece));
        });
        packed?;
        match added {
            Ok(region) => {
                room.used(bytes);
                Ok(Some(backend.create_packed_matrix(source, Arc::new(region))?))
            }
            Err(error) => {
                tracing::warn!(%error, "cannot cache repacked weights; the next start repacks them again");
                *self = Self::Off;
                Ok(None)
            }
        }
    }

    /// Whether [`Self::defer_matrix`] may succeed.
    pub(crate) fn can_wait(&self) -> bool {
        matches!(self, Self::Written(writing) if writing.packer.is_some())
    }

    /// Uploads a matrix that is read from `bytes` until [`Repacking`] has repacked it into the store. `None`
    /// if the device does not support that. The bytes of `shape` are ignored.
    pub(crate) fn defer_matrix(
        &mut self,
        name: &str,
        shape: MatrixSource<'_>,
        bytes: SharedBytes,
        backend: &mut dyn Backend,
    ) -> Result<Option<MatrixId>, Error> {
        let Self::Written(writing) = self else { return Ok(None) };
        let Some(matrix) = backend.create_matrix_in_place(shape, &bytes)? else { return Ok(None) };
        let (name, shape) = (name.to_owned(), MatrixSource { bytes: &[], ..shape });
        let packed_bytes = backend.packed_bytes(shape)?;
        writing.deferred.push(DeferredMatrix { matrix, name, shape, bytes, packed_bytes });
        Ok(Some(matrix))
    }

    /// Called when all matrices are loaded. Starts the remaining repacking in the background.
    pub(crate) fn finish(self) -> Option<Repacking> {
        let Self::Written(writing) = self else { return None };
        if let (Some(packer), false) = (writing.packer, writing.deferred.is_empty()) {
            return Repacking::begin(*writing, packer);
        }
        if let Err(error) = writing.writer.finish() {
            tracing::warn!(%error, "cannot cache repacked weights; the next start repacks them again");
        }
        None
    }
}
