//! Decides which decode steps get their logits from the first stage, for models whose output head is also the
//! embedding, so that the first stage has it.
//!
//! The head of a small model costs up to a third of its layers and would make the last stage the slowest.
//! Moving layers away from the last stage would unbalance prompts, which need the head for only one row. So
//! decode steps are shared between both stages in proportion to the time that their layers leave. Sans-IO.

use std::time::Duration;

/// Weight of a new time in an average.
const BLEND: f64 = 0.1;

#[derive(Debug, Default)]
pub(super) struct HeadShare {
    /// Seconds that a step's layers take at the first stage. `None` until measured.
    first: Option<f64>,
    last: Option<f64>,
    /// Seconds that the head takes for a step.
    head: Option<f64>,
    /// Sum of shares that were not yet used by a whole step.
    accumulated: f64,
}

fn blend(average: &mut Option<f64>, took: Duration) {
    let took = took.as_secs_f64();
    *average = Some(average.map_or(took, |average| average + BLEND * (took - average)));
}

impl HeadShare {
    /// Whether the first stage computes the logits of the step that is sent now.
    pub(super) fn takes_next(&mut self) -> bool {
        self.accumulated += self.share();
        let takes = self.accumulated >= 1.0;
        if takes {
            self.accumulated -= 1.0;
        }
        takes
    }

    /// Share of steps for which the first stage computes the logits, so that both stages have equal work.
    fn share(&self) -> f64 {
        match (self.first, self.last, self.head) {
            (Some(first), Some(last), Some(head)) if head > 0.0 => {
                (0.5 + (last - first) / (2.0 * head)).clamp(0.0, 1.0)
            }
            // Not measured yet.
            _ => 0.5,
        }
    }

    /// Records the time of the layers at both stages, for a step whose logits the first stage computes.
    pub(super) fn layers_took(&mut self, first: Duration, last: Duration) {
        blend(&mut self.first, first);
        blend(&mut self.last, last);
    }

    /// Records the time of the head at the first stage.
    pub(super) fn head_took(&mut self, took: Duration) {
        blend(&mut self.head, took);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(first: u64, last: u64, head: u64) -> Vec<bool> {
        let ms = Duration::from_millis;
        let mut share = HeadShare::default();
        share.layers_took(ms(first), ms(last));
        share.head_took(ms(head));
        (0..8).map(|_| share.takes_next()).collect()
    }

    #[test]
    fn equal_stages_alternate_and_a_slower_one_gets_less() {
        let turns = [false, true, false, true, false, true, false, true];
        assert_eq!(taken(10, 10, 5), turns);
        let mut unknown = HeadShare::default();
        assert_eq!(turns.map(|_| unknown.takes_next()), turns);
        assert_eq!(taken(15, 10, 5), [false; 8]);
        assert_eq!(taken(10, 16, 5), [true; 8]);
        assert_eq!(taken(12, 10, 5).iter().filter(|takes| **takes).count(), 2, "three tenths");
        assert_eq!(taken(10, 10, 0), turns, "a head that costs nothing");
    }
}
