//! Repacked weights that are kept on disk, mapped where somebody has repacked them before.

use crate::Error;
use kernels::backend::{Backend, MatrixId, MatrixSource, SharedBytes};
use model::shard::{PackedFile, PackedWriter, Room, ShardStore, StoreError};
use std::ops::Range;
use std::sync::Arc;

/// The repacked matrices of a layer range.
#[derive(Debug)]
pub(crate) enum Packs {
    /// They are not kept.
    Off,
    /// They are there.
    There(PackedFile),
    /// They are being written.
    Written(Box<PackedWriter>, Room),
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
                Err(writer) => Self::Written(Box::new(writer), store.reserve(bytes)?),
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
        let Self::Written(writer, room) = self else { return Ok(None) };
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

    /// All matrices have been loaded.
    pub(crate) fn finish(self) {
        if let Self::Written(writer, _room) = self
            && let Err(error) = writer.finish()
        {
            tracing::warn!(%error, "repacked weights are not kept");
        }
    }
}
