//! Default sampling parameters of a model: from its file, else from the catalog.

use metadata::{KeyError, Metadata};

/// Sampling parameters for requests that do not set them. Like vLLM's use of `generation_config.json`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingDefaults {
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
}

impl SamplingDefaults {
    /// Defaults of OpenAI's API: plain sampling from the whole vocabulary.
    pub const PLAIN: Self =
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 };

    /// `general.sampling.*` of the file where present and in range, else `self`.
    ///
    /// # Errors
    /// A key of the wrong type.
    pub fn or_file(self, metadata: &Metadata) -> Result<Self, KeyError> {
        let number = |key: &str, low: f32, high: f32, otherwise: f32| -> Result<f32, KeyError> {
            let found: Option<f32> = metadata.get(&format!("general.sampling.{key}"))?;
            Ok(found.filter(|value| (low..=high).contains(value)).unwrap_or(otherwise))
        };
        let top_k: Option<i64> = metadata.get("general.sampling.top_k")?;
        Ok(Self {
            temperature: number("temp", 0.0, 100.0, self.temperature)?,
            top_p: number("top_p", f32::MIN_POSITIVE, 1.0, self.top_p)?,
            top_k: top_k.map_or(self.top_k, |k| u32::try_from(k).unwrap_or(0)),
            min_p: number("min_p", 0.0, 1.0, self.min_p)?,
            repetition_penalty: number("penalty_repeat", 0.01, 100.0, self.repetition_penalty)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metadata::Value;

    #[test]
    fn the_file_comes_before_the_catalog() {
        let file = Metadata::from_iter([
            ("general.sampling.temp".to_owned(), Value::from(0.7f32)),
            ("general.sampling.top_k".to_owned(), Value::from(20i32)),
            ("general.sampling.top_p".to_owned(), Value::from(7.0f32)),
        ]);
        let catalog = SamplingDefaults { temperature: 0.2, top_p: 0.9, ..SamplingDefaults::PLAIN };
        let expected = SamplingDefaults { temperature: 0.7, top_k: 20, ..catalog };
        assert_eq!(catalog.or_file(&file).unwrap(), expected);
        assert_eq!(catalog.or_file(&Metadata::default()).unwrap(), catalog);
    }
}
