//! Sliding windows by layer.

use super::shape::limits;
use super::source::Source;
use crate::Error;
use metadata::Value;

/// The window of each layer; `None` for full attention. Uses the file's list, or makes every `period`th layer
/// full. `period` is the architecture's default for files without one.
pub(super) fn windows(
    source: &Source<'_>,
    layers: usize,
    period: usize,
) -> Result<Vec<Option<usize>>, Error> {
    let window = source.count("attention.sliding_window", 0..=limits::CONTEXT)?.filter(|&window| window > 0);
    let key = "attention.sliding_window_pattern";
    if let Some(Value::Array(_)) = source.metadata().value(&source.key(key)) {
        let slides = source.layer_flags(key, &[layers])?;
        return Ok(slides.iter().flatten().map(|&slides| window.filter(|_| slides)).collect());
    }
    let period = source.count(key, 1..=usize::MAX)?.unwrap_or(period);
    Ok((1..=layers).map(|nth| window.filter(|_| !nth.is_multiple_of(period))).collect())
}
