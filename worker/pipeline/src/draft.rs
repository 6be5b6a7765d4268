//! Drafting at the last stage, after sampling (docs/decisions/0052-draft-at-the-last-stage.md).
//!
//! A step requests draft tokens, so no extra message is needed: the hidden states of its rows are still
//! present, its tokens were just drawn, and its tables name the caches. The stage keeps no state between
//! steps.

use super::step;
use engine::Error;
use engine::decoder::{Decoder, DraftFrom};
use engine::kv_cache::Slabs;
use kernels::backend::BlockTable;
use proto::stage::{MAX_STAGE_DRAFT_TOKENS, StageDraftTokens, StageSequence, StageStep};
use std::collections::HashMap;
use std::ops::Range;

/// A step's request for draft tokens of one sequence.
pub struct DraftRequest<'a> {
    sequence: &'a StageSequence,
    /// The step's rows of the sequence.
    rows: Range<usize>,
    /// The first row that a token is drawn from.
    first: usize,
    max_tokens: usize,
}

/// Returns the draft requests of a step.
///
/// # Errors
/// [`Error::StageStep`] if a request is invalid or this stage has no drafter.
pub fn draft_requests<'a>(step: &'a StageStep, decoder: &Decoder) -> Result<Vec<DraftRequest<'a>>, Error> {
    let refuse = |reason: String| Err(Error::StageStep { reason });
    if !step.draft_requests.is_empty() && !decoder.drafts() {
        return refuse("draft tokens are asked for, and nothing draft tokens here".to_owned());
    }
    let mut requests = Vec::with_capacity(step.draft_requests.len());
    let (mut draft_tokens, mut start) = (step.draft_requests.iter().peekable(), 0usize);
    for (index, sequence) in (0u32..).zip(&step.sequences) {
        let rows = start..start.saturating_add(sequence.rows as usize);
        start = rows.end;
        let Some(draft_token) = draft_tokens.next_if(|draft_token| draft_token.sequence == index) else {
            continue;
        };
        let (first, max_tokens) = (draft_token.first as usize, draft_token.most as usize);
        if !rows.contains(&first) || max_tokens > MAX_STAGE_DRAFT_TOKENS {
            return refuse(format!(
                "{draft_token:?} of rows {rows:?}, the limit is {MAX_STAGE_DRAFT_TOKENS} draft tokens"
            ));
        }
        requests.push(DraftRequest { sequence, rows, first, max_tokens });
    }
    match draft_tokens.next() {
        Some(draft_token) => refuse(format!("{draft_token:?} is of no sequence behind the one before it")),
        None => Ok(requests),
    }
}

/// Whether these are valid draft tokens: in the vocabulary, and at most `requested[i]` for the i-th sequence.
pub(crate) fn answers(drafted: &[StageDraftTokens], requested: &[u32], vocab: usize) -> bool {
    let fits = |(StageDraftTokens { tokens }, max_tokens): (&StageDraftTokens, &u32)| {
        tokens.len() <= *max_tokens as usize && tokens.iter().all(|token| (*token as usize) < vocab)
    };
    drafted.len() == requested.len() && drafted.iter().zip(requested).all(fits)
}

/// Drafts tokens after the tokens `drawn` (row, token) of a step that has just passed the last layer.
/// Overwrites the step's residual stream.
pub fn draft(
    decoder: &mut Decoder,
    slabs: &Slabs,
    (step, requests): (&StageStep, &[DraftRequest<'_>]),
    drawn: impl Iterator<Item = (u32, u32)>,
) -> Result<Vec<StageDraftTokens>, Error> {
    let drawn: HashMap<u32, u32> = drawn.collect();
    let newest = |request: &DraftRequest<'_>| {
        let of = |row: usize| drawn.get(&(row as u32)).copied();
        let mut row = request.first;
        // While the token of the next row equals the one drawn from this row, that draft token was accepted.
        while row + 1 < request.rows.end && of(row).is_some_and(|token| step.tokens[row + 1] == token) {
            row += 1;
        }
        Some((row, of(row).filter(|_| request.max_tokens > 0)?))
    };
    let newest: Vec<Option<(usize, u32)>> = requests.iter().map(newest).collect();
    let rows: Vec<u32> = newest.iter().flatten().map(|(row, _)| *row as u32).collect();
    let mut results = vec![StageDraftTokens::default(); requests.len()];
    if rows.is_empty() {
        return Ok(results);
    }
    let tables = |request: &DraftRequest<'_>| {
        let groups = request.sequence.tables.iter().enumerate();
        groups.map(|(group, table)| step::offsets(slabs, group, table)).collect::<Result<Vec<_>, Error>>()
    };
    let tables: Vec<Vec<Vec<u32>>> = requests.iter().map(tables).collect::<Result<_, Error>>()?;
    let mut hidden = decoder.hidden(&rows)?.into_iter();
    let mut from = Vec::with_capacity(rows.len());
    for ((request, newest), tables) in requests.iter().zip(&newest).zip(&tables) {
        let Some((row, token)) = *newest else { continue };
        from.push(DraftFrom {
            token,
            context: request.sequence.context as usize + row + 1 - request.rows.start,
            hidden: hidden.next().unwrap_or_default(),
            tables: tables.iter().map(|offsets| BlockTable::Paged(offsets)).collect(),
            most: request.max_tokens,
        });
    }
    let rounds = from.iter().map(|from| from.most).max().unwrap_or(0);
    let mut drafted = decoder.draft(&from, rounds)?.into_iter();
    let drafting = results.iter_mut().zip(requests).zip(&newest).filter(|(_, newest)| newest.is_some());
    for (((result, request), _), drafted) in drafting.zip(&mut drafted) {
        result.tokens = drafted.tokens;
        result.tokens.truncate(request.max_tokens);
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_stage;
    use proto::stage::{StageDraftRequest, StageStep, StageTable};

    /// The last layers of a small model, with a drafter if `drafts`, and the slabs of their arena.
    fn stage(drafts: bool) -> (Decoder, Slabs) {
        test_stage::load("gemma4", drafts.then_some("gemma4-assistant"))
    }

    /// Two sequences, of three rows and of two, that request draft tokens.
    fn good() -> StageStep {
        let sequence = |rows, context, block| {
            // Each slab belongs to one group.
            let table = |slab: u32| StageTable { skipped: 0, blocks: vec![3 * slab + block] };
            StageSequence { rows, context, tables: vec![table(0), table(1)], state: None }
        };
        let draft_requests = vec![
            StageDraftRequest { sequence: 0, first: 0, most: 3 },
            StageDraftRequest { sequence: 1, first: 4, most: 2 },
        ];
        StageStep {
            step: 1,
            tokens: vec![3, 4, 5, 6, 7],
            sequences: vec![sequence(3, 0, 1), sequence(2, 4, 2)],
            draft_requests,
            ..StageStep::default()
        }
    }

    /// A change that makes a step invalid, and its name.
    type Spoil = (&'static str, fn(&mut StageStep));

    /// An invalid draft request is refused before anything is computed.
    #[test]
    fn sec_draft_tokens_oob() {
        let (decoder, _) = stage(true);
        assert_eq!(draft_requests(&good(), &decoder).unwrap().len(), 2);
        let spoils: [Spoil; 7] = [
            ("a sequence", |step| step.draft_requests[1].sequence = 2),
            ("twice", |step| step.draft_requests[1].sequence = 0),
            ("another order", |step| step.draft_requests.reverse()),
            ("a row before", |step| step.draft_requests[1].first = 2),
            ("a row behind", |step| step.draft_requests[0].first = 3),
            ("no row", |step| step.draft_requests[1].first = u32::MAX),
            ("a number", |step| step.draft_requests[0].most = MAX_STAGE_DRAFT_TOKENS as u32 + 1),
        ];
        for (what, spoil) in spoils {
            let mut step = good();
            spoil(&mut step);
            let refused = draft_requests(&step, &decoder).err();
            assert!(matches!(refused, Some(Error::StageStep { .. })), "{what}: {refused:?}");
        }
        let (without, _) = stage(false);
        assert!(matches!(draft_requests(&good(), &without).err(), Some(Error::StageStep { .. })));
        let none = StageStep { draft_requests: Vec::new(), ..good() };
        assert!(draft_requests(&none, &without).unwrap().is_empty());
    }

    /// Draft tokens continue the last accepted row, which depends on the drawn tokens.
    #[test]
    fn draft_tokens_follow_the_drawn_tokens() {
        let (mut decoder, slabs) = stage(true);
        let step = good();
        let activations: Vec<f32> =
            (0..5 * decoder.spec().hidden).map(|i| ((i * i) % 17) as f32 / 8.0 - 1.0).collect();
        let mut draft_token = |step: &StageStep, drawn: &[(u32, u32)]| -> Vec<Vec<u32>> {
            step::forward(&mut decoder, &slabs, step, Some(&activations), &mut |_| {}).unwrap();
            let requests = draft_requests(step, &decoder).unwrap();
            let drafted = draft(&mut decoder, &slabs, (step, &requests), drawn.iter().copied()).unwrap();
            assert!(answers(&drafted, &[3, 2], decoder.spec().vocab));
            drafted.into_iter().map(|drafted| drafted.tokens).collect()
        };
        // Both draft tokens of the first sequence are accepted; the result equals a request at its last row.
        let all = draft_token(&step, &[(0, 4), (1, 5), (2, 9), (4, 8)]);
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [3, 2]);
        let mut last = step.clone();
        last.draft_requests[0].first = 2;
        assert_eq!(draft_token(&last, &[(2, 9), (4, 8)]), all);
        // The first draft token is rejected, so tokens drawn after it are ignored.
        let wrong = draft_token(&step, &[(0, 300), (1, 5), (2, 9), (4, 8)]);
        assert_eq!(wrong[1], all[1]);
        assert_eq!(draft_token(&step, &[(0, 300), (4, 8)])[0], wrong[0]);
        // No token was drawn for the other sequence.
        assert_eq!(draft_token(&step, &[(0, 4), (1, 5), (2, 9)]), [all[0].clone(), Vec::new()]);
    }

    #[test]
    fn only_requested_draft_tokens_are_valid() {
        let drafted = |tokens: &[u32]| StageDraftTokens { tokens: tokens.to_vec() };
        assert!(answers(&[drafted(&[1, 9]), drafted(&[])], &[2, 1], 10));
        assert!(!answers(&[drafted(&[1, 10])], &[2], 10), "a token that is none");
        assert!(!answers(&[drafted(&[1, 2, 3])], &[2], 10), "more than asked for");
        assert!(!answers(&[drafted(&[1])], &[2, 1], 10), "of fewer sequences");
        assert!(!answers(&[drafted(&[1])], &[], 10), "of a sequence that was not asked for");
    }
}
