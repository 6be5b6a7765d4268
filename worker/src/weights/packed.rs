//! Repacked weights that are kept on disk, mapped where somebody has repacked them before.

use super::Repacking;
use crate::Error;
use kernels::backend::{Backend, MatrixId, MatrixSource, Packer, SharedBytes};
use model::shard::{PackedFile, PackedWriter, ShardStore, StoreError, StoreReservation};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The repacked matrices of a layer range.
#[derive(Debug)]
pub(crate) enum Packs {
    Off,
    There(PackedFile),
    Written(Box<Writing>),
}

/// See [`Packs::Written`].
#[derive(Debug)]
pub(crate) struct Writing {
    pub(super) writer: PackedWriter,
    pub(super) room: StoreReservation,
    /// What repacks beside the device.
    pub(super) packer: Option<Packer>,
    /// Matrices that are to be repacked.
    pub(super) later: Vec<DeferredMatrix>,
}

/// A matrix that is read where it is until it is repacked.
pub(super) struct DeferredMatrix {
    pub(super) matrix: MatrixId,
    /// What it is called where repacked ones are kept.
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
    /// Of these layers of a model, in the layout of the device; `bytes` is about what they take. Waits while another
    /// process writes them. What fails here costs memory and time, and is logged.
    pub(crate) fn open(
        store: Option<&ShardStore>,
        backend: &dyn Backend,
        model: &[u8; 32],
        layers: &Range<usize>,
        bytes: u64,
    ) -> Self {
        let (Some(store), Some(layout)) = (store, backend.pack_layout()) else { return Self::Off };
        let digest: String = model[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        let path = store.packed_path(&format!("{digest}-{layout}-{}-{}", layers.start, layers.end));
        let opened = || -> Result<Self, StoreError> {
            if let Some(file) = PackedFile::open(&path)? {
                return Ok(Self::There(file));
            }
            Ok(match PackedWriter::begin(&path)? {
                Ok(file) => Self::There(file),
                Err(writer) => {
                    let (room, packer) = (store.reserve(bytes)?, backend.packer());
                    Self::Written(Box::new(Writing { writer, room, packer, later: Vec::new() }))
                }
            })
        };
        opened().unwrap_or_else(|error| {
            tracing::warn!(%error, "repacked weights are not kept");
            Self::Off
        })
    }

    /// The matrix `name`, if it is there as `source`, whose bytes do not matter, says.
    pub(crate) fn find(
        &self,
        name: &str,
        source: MatrixSource<'_>,
        backend: &mut dyn Backend,
    ) -> Option<MatrixId> {
        let Self::There(file) = self else { return None };
        let region: SharedBytes = Arc::new(file.region(name)?);
        match backend.create_packed_matrix(source, region) {
            Ok(matrix) => Some(matrix),
            Err(error) => {
                tracing::warn!(name, %error, "a repacked matrix does not fit");
                None
            }
        }
    }

    /// Repacks a matrix to where it is kept and read from then on; none where it is not to be kept, or cannot be.
    pub(crate) fn keep(
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
            packed = backend.pack_matrix(source, &|place, piece| region.piece(place as u64, piece));
        });
        packed?;
        match added {
            Ok(region) => {
                room.used(bytes);
                Ok(Some(backend.create_packed_matrix(source, Arc::new(region))?))
            }
            Err(error) => {
                tracing::warn!(%error, "repacked weights are not kept");
                *self = Self::Off;
                Ok(None)
            }
        }
    }

    /// Whether [`Self::keep_later`] may be of use.
    pub(crate) fn can_wait(&self) -> bool {
        matches!(self, Self::Written(writing) if writing.packer.is_some())
    }

    /// A matrix that is read as it stands in `bytes` until [`Repacking`] has repacked it to where it is kept; none where
    /// the device cannot do that. Of `shape` the bytes do not matter.
    pub(crate) fn keep_later(
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
        writing.later.push(DeferredMatrix { matrix, name, shape, bytes, packed_bytes });
        Ok(Some(matrix))
    }

    /// All matrices have been loaded. What is left to be done is done beside the serving.
    pub(crate) fn finish(self) -> Option<Repacking> {
        let Self::Written(writing) = self else { return None };
        if let (Some(packer), false) = (writing.packer, writing.later.is_empty()) {
            return Repacking::begin(*writing, packer);
        }
        if let Err(error) = writing.writer.finish() {
            tracing::warn!(%error, "repacked weights are not kept");
        }
        None
    }
}
