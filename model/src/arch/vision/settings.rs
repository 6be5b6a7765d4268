//! Checked access to settings in the form of `config.json`.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Value as Json};

use crate::Error;
use crate::arch::shape::limits;
use crate::spec::Activation;
use crate::vision::CONFIG_KEY;

/// An object of the settings.
#[derive(Clone, Copy)]
pub(super) struct Settings<'a> {
    map: &'a Map<String, Json>,
    /// Its place in the whole, with a dot at the end.
    place: &'static str,
}

/// A function between matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Function {
    Plain(Activation),
    /// `x sigmoid(1.702 x)`.
    QuickGelu,
}

impl<'a> Settings<'a> {
    pub(super) fn new(map: &'a Map<String, Json>) -> Self {
        Self { map, place: "" }
    }

    /// The settings of the tower.
    pub(super) fn vision(&self) -> Result<Self, Error> {
        match self.map.get("vision_config") {
            Some(Json::Object(map)) => Ok(Self { map, place: "vision_config." }),
            _ => Err(self.refuse("vision_config", "absent or no object", "an object")),
        }
    }

    pub(super) fn refuse(&self, key: &str, found: impl Display, needs: impl Display) -> Error {
        let key = format!("{CONFIG_KEY}: {}{key}", self.place);
        let found = found.to_string().chars().take(100).collect();
        Error::HyperParameter { key, found, needs: needs.to_string() }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Json> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A count in `range`, or `absent`.
    pub(super) fn count(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
        absent: usize,
    ) -> Result<usize, Error> {
        let Some(found) = self.get(key) else { return Ok(absent) };
        let count = found.as_u64().and_then(|count| usize::try_from(count).ok());
        let needs = || format!("{} to {}", range.start(), range.end());
        count.filter(|count| range.contains(count)).ok_or_else(|| self.refuse(key, found, needs()))
    }

    pub(super) fn width(&self, key: &str, absent: usize) -> Result<usize, Error> {
        self.count(key, 1..=limits::WIDTH, absent)
    }

    /// A finite number above zero, or `absent`.
    pub(super) fn positive(&self, key: &str, absent: f32) -> Result<f32, Error> {
        let Some(found) = self.get(key) else { return Ok(absent) };
        let number = found.as_f64().map(|number| number as f32);
        let good = number.filter(|number| number.is_finite() && *number > 0.0);
        good.ok_or_else(|| self.refuse(key, found, "a finite number above 0"))
    }

    pub(super) fn text(&self, key: &str, absent: &'a str) -> Result<&'a str, Error> {
        let Some(found) = self.get(key) else { return Ok(absent) };
        found.as_str().ok_or_else(|| self.refuse(key, found, "a text"))
    }

    pub(super) fn function(&self, key: &str, absent: &'a str) -> Result<Function, Error> {
        Ok(Function::Plain(match self.text(key, absent)? {
            "silu" | "swish" => Activation::Silu,
            "gelu" => Activation::GeluErf,
            "gelu_pytorch_tanh" | "gelu_new" => Activation::GeluTanh,
            "quick_gelu" => return Ok(Function::QuickGelu),
            other => {
                return Err(self.refuse(key, other, "silu, gelu, gelu_pytorch_tanh or quick_gelu"));
            }
        }))
    }

    /// A list of integers, or a single one as a list.
    pub(super) fn integers(&self, key: &str, absent: &[i64]) -> Result<Vec<i64>, Error> {
        let Some(found) = self.get(key) else { return Ok(absent.to_vec()) };
        let list = match found {
            Json::Array(list) if list.len() <= limits::LAYERS => list.iter().map(Json::as_i64).collect(),
            Json::Array(_) => None,
            single => single.as_i64().map(|single| vec![single]),
        };
        list.ok_or_else(|| self.refuse(key, found, format_args!("at most {} integers", limits::LAYERS)))
    }

    /// Distinct numbers of layers, ascending, or `absent`.
    pub(super) fn layers(&self, key: &str, layers: usize, absent: &[i64]) -> Result<Vec<usize>, Error> {
        let mut list = self.integers(key, absent)?;
        if self.get(key).is_none() {
            list.retain(|&layer| layer < layers as i64);
        }
        let in_range = |&layer: &i64| usize::try_from(layer).ok().filter(|&layer| layer < layers);
        let numbers: Option<Vec<usize>> = list.iter().map(in_range).collect();
        let ascending = |numbers: &Vec<usize>| numbers.is_sorted_by(|first, second| first < second);
        numbers.filter(ascending).ok_or_else(|| {
            self.refuse(key, format_args!("{list:?}"), format_args!("ascending numbers below {layers}"))
        })
    }
}
