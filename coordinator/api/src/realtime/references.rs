//! Voices to compare with, in a session of the operation `speaker`.

use crate::error::ApiError;
use crate::limits::{MAX_REFERENCE_NAME, MAX_REFERENCES};
use proto::operation::{MAX_SPEAKER_VALUES, SpeakerVector};
use serde::Serialize;

/// Likeness of a voice to a reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Score {
    pub(super) reference: String,
    /// Cosine of the vectors.
    pub(super) score: f32,
    pub(super) same: bool,
}

/// The references of a session. One with a known name replaces the former.
#[derive(Debug, Default)]
pub(super) struct References(Vec<(String, Vec<f32>)>);

impl References {
    pub(super) fn add(&mut self, name: String, embedding: Vec<f32>) -> Result<(), ApiError> {
        let wrong = |rule: String| Err(ApiError::field("reference", rule));
        if name.is_empty() || name.len() > MAX_REFERENCE_NAME {
            return wrong(format!("its name has {} bytes, must have 1 to {MAX_REFERENCE_NAME}", name.len()));
        }
        if embedding.is_empty() || embedding.len() > MAX_SPEAKER_VALUES {
            return wrong(format!("has {} values, must have 1 to {MAX_SPEAKER_VALUES}", embedding.len()));
        }
        if let Some(at) = embedding.iter().position(|value| !value.is_finite()) {
            return wrong(format!("value {at} is not finite"));
        }
        let full = self.0.len() == MAX_REFERENCES;
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, former)) => *former = embedding,
            None if full => return wrong(format!("a session has at most {MAX_REFERENCES}")),
            None => self.0.push((name, embedding)),
        }
        Ok(())
    }

    /// Compares a voice with all references.
    pub(super) fn scores(
        &self,
        voice: &SpeakerVector,
        threshold: Option<f32>,
    ) -> Result<Vec<Score>, ApiError> {
        let threshold = threshold.unwrap_or(voice.threshold);
        let score = |(name, embedding): &(String, Vec<f32>)| {
            let wrong = || {
                let (has, must) = (embedding.len(), voice.values.len());
                let rule =
                    format!("{name:?} has {has} values, the model's vectors have {must}, not all of them 0");
                ApiError::field("reference", rule)
            };
            let score = voice.cosine(embedding).ok_or_else(wrong)?;
            Ok(Score { reference: name.clone(), score, same: score >= threshold })
        };
        self.0.iter().map(score).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn voices_are_compared_with_all_references() {
        let mut references = References::default();
        references.add("ann".into(), vec![3.0, 4.0]).unwrap();
        references.add("bob".into(), vec![1.0, 0.0]).unwrap();
        references.add("bob".into(), vec![-0.8, 0.6]).unwrap();
        let voice = SpeakerVector { at: 0, values: vec![0.6, 0.8], threshold: 0.75 };
        let scores = references.scores(&voice, None).unwrap();
        let of = |at: usize| (scores[at].reference.as_str(), scores[at].same);
        assert_eq!((scores.len(), of(0), of(1)), (2, ("ann", true), ("bob", false)));
        assert!((scores[0].score - 1.0).abs() < 1e-6 && scores[1].score.abs() < 1e-6, "{scores:?}");
        assert!(references.scores(&voice, Some(-0.5)).unwrap()[1].same, "by the client's threshold");
    }

    #[test]
    fn references_are_limited() {
        let mut references = References::default();
        let voice = SpeakerVector { at: 0, values: vec![0.6, 0.8], threshold: 0.75 };
        for (name, embedding) in [
            ("", vec![1.0]),
            ("a", vec![]),
            ("a", vec![1.0; MAX_SPEAKER_VALUES + 1]),
            ("a", vec![f32::INFINITY]),
            (&*"x".repeat(MAX_REFERENCE_NAME + 1), vec![1.0]),
        ] {
            let error = references.add(name.to_owned(), embedding).unwrap_err();
            assert_eq!(error.param(), Some("reference"), "{error}");
        }
        for n in 0..MAX_REFERENCES {
            references.add(n.to_string(), vec![1.0, 0.0]).unwrap();
        }
        assert!(references.add("one more".into(), vec![1.0, 0.0]).is_err());
        references.add("0".into(), vec![1.0]).unwrap();
        assert!(references.scores(&voice, None).unwrap_err().to_string().contains("has 1 values"));
        references.add("0".into(), vec![0.0, 0.0]).unwrap();
        assert!(references.scores(&voice, None).is_err(), "it has no direction");
    }
}
