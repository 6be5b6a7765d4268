//! Guesses at the last stage, behind what it has drawn (docs/decisions/0073-guesses-are-part-of-a-step.md).
//!
//! A step asks for them, so they need no way of their own: the hidden states of its rows are still there, the tokens have
//! just been drawn, and its tables name the caches. The stage remembers nothing of them.

use super::step;
use crate::Error;
use crate::decoder::{Decoder, DraftFrom};
use crate::kv_cache::Slabs;
use kernels::backend::BlockTable;
use proto::stage::{MAX_GUESSES, StageGuessedV1, StageSequenceV1, StageStepV2};
use std::collections::HashMap;
use std::ops::Range;

/// Guesses that a step asks for, of one of its sequences.
pub(super) struct Asked<'a> {
    sequence: &'a StageSequenceV1,
    /// The step's rows of the sequence.
    rows: Range<usize>,
    /// The first that is drawn from.
    first: usize,
    most: usize,
}

/// What a step asks for.
///
/// # Errors
/// [`Error::StageStep`] for what a step cannot ask for, or not of this stage.
pub(super) fn asked<'a>(step: &'a StageStepV2, decoder: &Decoder) -> Result<Vec<Asked<'a>>, Error> {
    let refuse = |reason: String| Err(Error::StageStep { reason });
    if !step.guesses.is_empty() && !decoder.drafts() {
        return refuse("guesses are asked for, and nothing guesses here".to_owned());
    }
    let mut asked = Vec::with_capacity(step.guesses.len());
    let (mut guesses, mut start) = (step.guesses.iter().peekable(), 0usize);
    for (index, sequence) in (0u32..).zip(&step.plan.sequences) {
        let rows = start..start.saturating_add(sequence.rows as usize);
        start = rows.end;
        let Some(guess) = guesses.next_if(|guess| guess.sequence == index) else { continue };
        let (first, most) = (guess.first as usize, guess.most as usize);
        if !rows.contains(&first) || most > MAX_GUESSES {
            return refuse(format!("{guess:?} of rows {rows:?}, the limit is {MAX_GUESSES} guesses"));
        }
        asked.push(Asked { sequence, rows, first, most });
    }
    match guesses.next() {
        Some(guess) => refuse(format!("{guess:?} is of no sequence behind the one before it")),
        None => Ok(asked),
    }
}

/// Guesses what comes behind the tokens that were `drawn` from rows of a step which has just left the last layer. Nothing
/// is left of its residual stream.
pub(super) fn draft(
    decoder: &mut Decoder,
    slabs: &Slabs,
    (step, asked): (&StageStepV2, &[Asked<'_>]),
    drawn: impl Iterator<Item = (u32, u32)>,
) -> Result<Vec<StageGuessedV1>, Error> {
    let drawn: HashMap<u32, u32> = drawn.collect();
    let newest = |asked: &Asked<'_>| {
        let of = |row: usize| drawn.get(&(row as u32)).copied();
        let mut row = asked.first;
        // As long as the token behind a row was drawn from it, that was a guess which counts.
        while row + 1 < asked.rows.end && of(row).is_some_and(|token| step.plan.tokens[row + 1] == token) {
            row += 1;
        }
        Some((row, of(row).filter(|_| asked.most > 0)?))
    };
    let newest: Vec<Option<(usize, u32)>> = asked.iter().map(newest).collect();
    let rows: Vec<u32> = newest.iter().flatten().map(|(row, _)| *row as u32).collect();
    let mut guessed = vec![StageGuessedV1::default(); asked.len()];
    if rows.is_empty() {
        return Ok(guessed);
    }
    let tables = |asked: &Asked<'_>| {
        let groups = asked.sequence.tables.iter().enumerate();
        groups.map(|(group, table)| step::offsets(slabs, group, table)).collect::<Result<Vec<_>, Error>>()
    };
    let tables: Vec<Vec<Vec<u32>>> = asked.iter().map(tables).collect::<Result<_, Error>>()?;
    let mut hidden = decoder.hidden(&rows)?.into_iter();
    let mut from = Vec::with_capacity(rows.len());
    for ((asked, newest), tables) in asked.iter().zip(&newest).zip(&tables) {
        let Some((row, token)) = *newest else { continue };
        from.push(DraftFrom {
            token,
            context: asked.sequence.context as usize + row + 1 - asked.rows.start,
            hidden: hidden.next().unwrap_or_default(),
            tables: tables.iter().map(|offsets| BlockTable::Paged(offsets)).collect(),
            most: asked.most,
        });
    }
    let rounds = from.iter().map(|from| from.most).max().unwrap_or(0);
    let mut drafted = decoder.draft(&from, rounds)?.into_iter();
    let places = guessed.iter_mut().zip(asked).zip(&newest).filter(|(_, newest)| newest.is_some());
    for (((place, asked), _), drafted) in places.zip(&mut drafted) {
        place.tokens = drafted.tokens;
        place.tokens.truncate(asked.most);
    }
    Ok(guessed)
}
