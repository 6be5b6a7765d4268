//! Checked access to a file's hyper-parameters and tensors, for translators.

use std::borrow::Cow;
use std::fmt::Display;
use std::ops::RangeInclusive;

use crate::header::ModelHeader;
use crate::spec::{ConvSpec, LinearSpec, NormKind, NormSpec, RowSlice};
use crate::{Error, GgmlType};
use metadata::{KeyError, Metadata, Value};

/// A header read as architecture `arch`; keys are `ARCH.key`.
pub(super) struct Source<'a> {
    header: &'a ModelHeader,
    arch: &'a str,
}

impl<'a> Source<'a> {
    pub(super) const fn new(header: &'a ModelHeader, arch: &'a str) -> Self {
        Self { header, arch }
    }

    pub(super) const fn arch(&self) -> &'a str {
        self.arch
    }

    pub(super) const fn header(&self) -> &'a ModelHeader {
        self.header
    }

    pub(super) fn metadata(&self) -> &'a Metadata {
        self.header.metadata()
    }

    pub(super) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    /// The error that the value `found` of `key` is refused.
    pub(super) fn refuse(&self, key: &str, found: impl Display, needs: impl Display) -> Error {
        Error::HyperParameter { key: self.key(key), found: found.to_string(), needs: needs.to_string() }
    }

    /// A count in `range`, if the key is there.
    pub(super) fn count(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, Error> {
        let found = self.metadata().get(&self.key(key))?;
        found.map(|found| self.in_range(key, found, &range)).transpose()
    }

    /// A count in `range`.
    pub(super) fn require_count(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize, Error> {
        self.count(key, range)?.ok_or_else(|| KeyError::Missing { key: self.key(key) }.into())
    }

    /// One count per layer in `range`: an array, or one number for all layers. `None` if the key is missing.
    pub(super) fn layer_counts(
        &self,
        key: &str,
        layers: usize,
        range: RangeInclusive<usize>,
    ) -> Result<Option<Vec<usize>>, Error> {
        if !matches!(self.metadata().value(&self.key(key)), Some(Value::Array(_))) {
            return Ok(self.count(key, range)?.map(|count| vec![count; layers]));
        }
        let list = self.counts(key, range)?;
        if list.len() != layers {
            return Err(self.refuse(key, format_args!("an array of {}", list.len()), layers));
        }
        Ok(Some(list))
    }

    /// A list of counts in `range`.
    pub(super) fn counts(&self, key: &str, range: RangeInclusive<usize>) -> Result<Vec<usize>, Error> {
        let list: Cow<'_, [u64]> = self.metadata().require(&self.key(key))?;
        let count = |&found: &u64| self.in_range(key, usize::try_from(found).unwrap_or(usize::MAX), &range);
        list.iter().map(count).collect()
    }

    /// A flag per layer: an array with one of the lengths `lens`. `None` if the key is missing.
    pub(super) fn layer_flags(&self, key: &str, lens: &[usize]) -> Result<Option<Vec<bool>>, Error> {
        let Some(list) = self.metadata().get::<Cow<'_, [bool]>>(&self.key(key))? else { return Ok(None) };
        if !lens.contains(&list.len()) {
            let needs: Vec<String> = lens.iter().map(|len| format!("an array of {len}")).collect();
            return Err(self.refuse(key, format_args!("an array of {}", list.len()), needs.join(" or ")));
        }
        Ok(Some(list.into_owned()))
    }

    /// A finite number above zero, if the key is there.
    pub(super) fn positive(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.metadata().get::<f32>(&self.key(key))? {
            Some(found) if !(found.is_finite() && found > 0.0) => {
                Err(self.refuse(key, found, "a finite number above 0"))
            }
            found => Ok(found),
        }
    }

    /// A finite number above zero.
    pub(super) fn require_positive(&self, key: &str) -> Result<f32, Error> {
        self.positive(key)?.ok_or_else(|| KeyError::Missing { key: self.key(key) }.into())
    }

    /// Like [`positive`](Self::positive), but 0 counts as absent.
    pub(super) fn positive_unless_zero(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.metadata().get::<f32>(&self.key(key))? {
            Some(0.0) => Ok(None),
            _ => self.positive(key),
        }
    }

    fn in_range(&self, key: &str, found: usize, range: &RangeInclusive<usize>) -> Result<usize, Error> {
        if !range.contains(&found) {
            let needs = format_args!("{} to {}", range.start(), range.end()).to_string();
            return Err(self.refuse(key, found, needs));
        }
        Ok(found)
    }

    /// Whether there is a tensor of this name.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.header.tensor(tensor).is_some()
    }

    /// Dimensions of a tensor without trailing ones.
    pub(super) fn dims(&self, tensor: &str) -> Result<&'a [u64], Error> {
        let info =
            self.header.tensor(tensor).ok_or_else(|| Error::MissingTensor { tensor: tensor.to_owned() })?;
        Ok(significant(info.dims()))
    }

    /// Returns `name` if the tensor exists with these dimensions.
    pub(super) fn tensor(&self, name: &str, expected: &[usize]) -> Result<String, Error> {
        let found = self.dims(name)?;
        let expected: Vec<u64> = expected.iter().map(|&dim| dim as u64).collect();
        if found != significant(&expected) {
            return Err(Error::TensorShape { tensor: name.to_owned(), found: found.to_vec(), expected });
        }
        Ok(name.to_owned())
    }

    /// Like [`tensor`](Self::tensor), for a tensor that kernels read as plain floats.
    pub(super) fn floats(&self, name: &str, expected: &[usize]) -> Result<String, Error> {
        let tensor = self.tensor(name, expected)?;
        match self.header.tensor(name).map(|info| info.ty()) {
            Some(found) if found != GgmlType::F32 => {
                Err(Error::TensorType { tensor, found, expected: GgmlType::F32 })
            }
            _ => Ok(tensor),
        }
    }

    /// Like [`floats`](Self::floats); `None` if the tensor does not exist.
    pub(super) fn optional_floats(&self, name: &str, expected: &[usize]) -> Result<Option<String>, Error> {
        self.has(name).then(|| self.floats(name, expected)).transpose()
    }

    /// RMS norm `STEM.weight` of `width` elements.
    pub(super) fn rms_norm(&self, stem: &str, width: usize, eps: f32) -> Result<NormSpec, Error> {
        let weight = Some(self.floats(&format!("{stem}.weight"), &[width])?);
        Ok(NormSpec { kind: NormKind::Rms, weight, bias: None, eps, width })
    }

    /// Layer norm `STEM.weight`, `STEM.bias` of `width` elements.
    pub(super) fn layer_norm(&self, stem: &str, width: usize, eps: f32) -> Result<NormSpec, Error> {
        let bias = Some(self.floats(&format!("{stem}.bias"), &[width])?);
        Ok(NormSpec { kind: NormKind::Layer, bias, ..self.rms_norm(stem, width, eps)? })
    }

    /// Matrix `STEM.weight` with optional bias and scale.
    pub(super) fn linear(&self, stem: &str, cols: usize, rows: usize) -> Result<LinearSpec, Error> {
        Ok(LinearSpec {
            bias: self.optional_floats(&format!("{stem}.bias"), &[rows])?,
            scale: self.optional_floats(&format!("{stem}.scale"), &[1])?,
            ..self.matrix(stem, cols, rows)?
        })
    }

    /// The rows `slice` of `STEM.weight`, with the optional bias and scale of the whole.
    pub(super) fn linear_slice(&self, stem: &str, cols: usize, slice: RowSlice) -> Result<LinearSpec, Error> {
        let whole = self.matrix(stem, cols, slice.of)?;
        let scale = self.optional_floats(&format!("{stem}.scale"), &[1])?;
        let bias = self.optional_floats(&format!("{stem}.bias"), &[slice.of])?;
        Ok(LinearSpec { rows: slice.rows(), slice: Some(slice), bias, scale, ..whole })
    }

    /// Matrix `STEM.weight` without bias and scale, with the optional order of its columns.
    pub(super) fn matrix(&self, stem: &str, cols: usize, rows: usize) -> Result<LinearSpec, Error> {
        Ok(LinearSpec {
            order: self.optional_floats(&format!("{stem}.order"), &[cols])?,
            ..LinearSpec::new(self.tensor(&format!("{stem}.weight"), &[cols, rows])?, cols, rows)
        })
    }

    /// The matrices `STEM.weight` of all experts, with an optional bias and scale per expert.
    pub(super) fn experts(
        &self,
        stem: &str,
        cols: usize,
        rows: usize,
        experts: usize,
    ) -> Result<LinearSpec, Error> {
        Ok(LinearSpec {
            bias: self.optional_floats(&format!("{stem}.bias"), &[rows, experts])?,
            scale: self.optional_floats(&format!("{stem}.scale"), &[experts])?,
            ..LinearSpec::new(self.tensor(&format!("{stem}.weight"), &[cols, rows, experts])?, cols, rows)
        })
    }

    /// Depthwise convolution `STEM.weight` of `taps` positions, with an optional bias.
    pub(super) fn conv(&self, stem: &str, taps: usize, channels: usize) -> Result<ConvSpec, Error> {
        Ok(ConvSpec {
            weight: self.floats(&format!("{stem}.weight"), &[taps, channels])?,
            bias: self.optional_floats(&format!("{stem}.bias"), &[channels])?,
            taps,
            channels,
            factors: Vec::new(),
        })
    }

    /// Refuses experts, for architectures whose mixtures have another name.
    pub(super) fn refuse_experts(&self) -> Result<(), Error> {
        match self.count("expert_count", 0..=usize::MAX)?.filter(|&experts| experts > 0) {
            Some(experts) => Err(self.refuse("expert_count", experts, "0")),
            None => Ok(()),
        }
    }
}

/// Dimensions without trailing ones; keeps at least one.
fn significant(dims: &[u64]) -> &[u64] {
    match dims {
        [head @ .., 1] if !head.is_empty() => significant(head),
        _ => dims,
    }
}
