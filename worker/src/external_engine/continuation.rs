//! Answers that go on at another engine, with the emitted tokens as a part of the prompt.

use external::EngineRequest;

/// An argument that would lose its meaning if emitted tokens became a part of the prompt.
pub(super) fn lost_in_continuation(request: &EngineRequest) -> Option<String> {
    let sampling = &request.sampling;
    // The engine would draw the rest with other random numbers than an undisturbed run.
    if request.reproducible && sampling.temperature > 0.0 {
        return Some("seed".to_owned());
    }
    if let Some(grammar) = &request.grammar {
        return Some(grammar.field.clone());
    }
    [(sampling.presence_penalty, "presence_penalty"), (sampling.frequency_penalty, "frequency_penalty")]
        .iter()
        .find(|(penalty, _)| *penalty != 0.0)
        .map(|(_, field)| (*field).to_owned())
}
