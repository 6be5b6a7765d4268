//! Which steps the first stage makes the logits of, where it has the output head because that is the embedding too.
//!
//! The head of a small model costs as much as a third of its layers. Behind the last layers it would make the last
//! stage the slowest by far, and cutting before fewer layers would do the same to prompts, of which only one row needs
//! it. So steps that decode are shared out, as evenly as the stages' layers leave room for. Sans-IO.

use std::time::Duration;

/// Weight of a new time in an average.
const BLEND: f64 = 0.1;

#[derive(Debug, Default)]
pub(super) struct HeadShare {
    /// Seconds that a step's layers take at the first stage.
    first: Option<f64>,
    last: Option<f64>,
    /// Seconds that its head takes.
    head: Option<f64>,
    /// Steps that the first stage owes.
    owed: f64,
}

fn blend(known: &mut Option<f64>, took: Duration) {
    let took = took.as_secs_f64();
    *known = Some(known.map_or(took, |known| known + BLEND * (took - known)));
}

impl HeadShare {
    /// Whether the first stage makes the logits of the step that is handed over now.
    pub(super) fn takes_next(&mut self) -> bool {
        self.owed += self.share();
        let takes = self.owed >= 1.0;
        if takes {
            self.owed -= 1.0;
        }
        takes
    }

    /// Both have the same to do when the first takes so much of it.
    fn share(&self) -> f64 {
        match (self.first, self.last, self.head) {
            (Some(first), Some(last), Some(head)) if head > 0.0 => {
                (0.5 + (last - first) / (2.0 * head)).clamp(0.0, 1.0)
            }
            // To be measured.
            _ => 0.5,
        }
    }

    /// A step whose logits the first stage makes has taken so long there and at the last stage.
    pub(super) fn layers_took(&mut self, first: Duration, last: Duration) {
        blend(&mut self.first, first);
        blend(&mut self.last, last);
    }

    /// The first stage has made the logits of a step.
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
    fn equal_stages_take_turns_and_a_slower_one_is_spared() {
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
