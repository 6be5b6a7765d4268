//! Numbered prefixes: a coordinator numbers the prefix of a prompt that it expects to recur, and the worker
//! keeps it. Later prompts with that prefix are sent as the number and the remaining tokens.
//!
//! This is exact. A number stands for the tokens that were sent with it on this connection. The coordinator
//! compares all tokens before it uses a number, except those of parts with equal names
//! ([`TokenIds::shared_parts`]). It uses a number only after the worker has replied to the request that
//! defined it. Both ends drop the oldest prefixes by the same bounds. A worker that receives an unknown
//! number replies with [`StreamCode::UnknownPrefix`](super::StreamCode::UnknownPrefix), and gets the whole
//! prompt.

use proto::message::{MAX_TOKEN_IDS, NumberedPrefix, TokenIds};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most prefixes that are kept for a connection.
const MAX_PREFIXES: usize = 64;
/// Most tokens of all prompts whose prefixes are kept for a connection.
const MAX_TOKENS: usize = 512 << 10;
/// Shortest prefix that gets a number. Fewer tokens hardly fill a packet.
const MIN_TOKENS: usize = 512;
/// Number of last tokens that are compared first. Different prefixes of equal length mostly differ here.
const LAST: usize = 16;

/// The first `length` tokens of a prompt.
#[derive(Debug, Clone)]
struct Prefix {
    number: u64,
    prompt: TokenIds,
    length: usize,
    /// Last tokens of the prefix, padded with zeros in front. The other tokens are compared only if these
    /// are equal.
    last: [u32; LAST],
}

impl Prefix {
    fn new(number: u64, prompt: TokenIds, length: usize) -> Self {
        let last = last_of(&prompt, length).unwrap_or_default();
        Self { number, prompt, length, last }
    }

    fn tokens(&self) -> &[u32] {
        self.prompt.get(..self.length).unwrap_or_default()
    }

    fn begins(&self, prompt: &TokenIds) -> bool {
        last_of(prompt, self.length) == Some(self.last) && {
            let shared = self.prompt.shared_parts(prompt).min(self.length);
            prompt.get(shared..self.length) == self.prompt.get(shared..self.length)
        }
    }

    fn named(&self) -> NumberedPrefix {
        // No prompt has more than `u32::MAX` tokens.
        NumberedPrefix { number: self.number, tokens: u32::try_from(self.length).unwrap_or(u32::MAX) }
    }
}

/// Returns the last of the first `length` tokens, padded with zeros in front. `None` if the prompt is
/// shorter.
fn last_of(prompt: &[u32], length: usize) -> Option<[u32; LAST]> {
    let tokens = prompt.get(..length)?;
    let mut last = [0; LAST];
    let from = LAST.saturating_sub(length);
    last[from..].copy_from_slice(&tokens[length.saturating_sub(LAST)..]);
    Some(last)
}

/// Prefixes, the oldest first, within the bounds.
#[derive(Debug)]
struct Shelf<T> {
    prefixes: VecDeque<(Prefix, T)>,
    tokens: usize,
}

impl<T> Default for Shelf<T> {
    fn default() -> Self {
        Self { prefixes: VecDeque::new(), tokens: 0 }
    }
}

impl<T> Shelf<T> {
    fn put(&mut self, prefix: Prefix, with: T) {
        self.tokens += prefix.prompt.len();
        self.prefixes.push_back((prefix, with));
        while (self.prefixes.len() > MAX_PREFIXES || self.tokens > MAX_TOKENS)
            && let Some((oldest, _)) = self.prefixes.pop_front()
        {
            self.tokens -= oldest.prompt.len();
        }
    }

    fn retain(&mut self, keep: impl Fn(&(Prefix, T)) -> bool) {
        self.prefixes.retain(keep);
        self.tokens = self.prefixes.iter().map(|(prefix, _)| prefix.prompt.len()).sum();
    }
}

#[derive(Debug, Default)]
pub(super) struct SentPrefixes(Mutex<Sent>);

#[derive(Debug, Default)]
struct Sent {
    shelf: Shelf<Arc<PrefixAck>>,
    next: u64,
}

/// Whether a worker has read the definition of a prefix.
#[derive(Debug)]
struct PrefixAck(AtomicU8);

const UNDER_WAY: u8 = 0;
const READ: u8 = 1;
const LOST: u8 = 2;

/// A prefix that a request defines. If it is dropped before [`read`](Self::read), the number is never used.
#[derive(Debug)]
pub(super) struct Numbering(Arc<PrefixAck>);

impl Numbering {
    /// Marks the prefix as read by the worker.
    pub(super) fn read(self) {
        self.0.0.store(READ, Ordering::Relaxed);
    }
}

impl Drop for Numbering {
    fn drop(&mut self) {
        // Fails if the prefix was read.
        let _ = self.0.0.compare_exchange(UNDER_WAY, LOST, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Form in which a prompt is sent.
#[derive(Debug, Default)]
pub(super) struct Sending {
    /// Prefix that is replaced by its number.
    pub(super) after: Option<NumberedPrefix>,
    pub(super) keep: Option<(NumberedPrefix, Numbering)>,
}

impl SentPrefixes {
    /// Decides how to send `prompt`. The first `cached` tokens are expected to be cached at the worker, so
    /// such a prefix is likely to recur.
    pub(super) fn sending(&self, prompt: &TokenIds, cached: usize) -> Sending {
        let mut sent = self.lock();
        let state = |ack: &Arc<PrefixAck>| ack.0.load(Ordering::Relaxed);
        if sent.shelf.prefixes.iter().any(|(_, with)| state(with) == LOST) {
            sent.shelf.retain(|(_, with)| state(with) != LOST);
        }
        let begins = |(prefix, _): &&(Prefix, Arc<PrefixAck>)| prefix.begins(prompt);
        let longest = sent.shelf.prefixes.iter().filter(begins).max_by_key(|(prefix, _)| prefix.length);
        let after = longest.filter(|(_, with)| state(with) == READ).map(|(prefix, _)| prefix.named());
        let length = cached.min(prompt.len());
        let more = length.saturating_sub(longest.map_or(0, |(prefix, _)| prefix.length));
        if more < MIN_TOKENS || prompt.len() > MAX_TOKENS {
            return Sending { after, keep: None };
        }
        let prefix = Prefix::new(sent.next, prompt.clone(), length);
        sent.next += 1;
        let (named, with) = (prefix.named(), Arc::new(PrefixAck(AtomicU8::new(UNDER_WAY))));
        sent.shelf.put(prefix, Arc::clone(&with));
        Sending { after, keep: Some((named, Numbering(with))) }
    }

    /// Drops a prefix that the worker does not have.
    pub(super) fn forget(&self, number: u64) {
        self.lock().shelf.retain(|(prefix, _)| prefix.number != number);
    }

    fn lock(&self) -> MutexGuard<'_, Sent> {
        // No holder of this lock panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
pub(super) struct KeptPrefixes(Mutex<Shelf<()>>);

impl KeptPrefixes {
    /// Returns the prompt that consists of this prefix and `rest`, or `None` if the prefix is unknown.
    pub(super) fn whole(&self, after: NumberedPrefix, rest: &[u32]) -> Option<TokenIds> {
        let prefix = {
            let shelf = self.lock();
            shelf
                .prefixes
                .iter()
                .find(|(prefix, ())| prefix.named() == after)
                .map(|(prefix, ())| prefix.clone())?
        };
        let tokens = prefix.tokens();
        if tokens.len() + rest.len() > MAX_TOKEN_IDS {
            return None;
        }
        Some([tokens, rest].concat().into())
    }

    /// Keeps the first tokens of a prompt. Ignores a prefix that is longer than the prompt, or whose number
    /// is in use.
    pub(super) fn keep(&self, keep: NumberedPrefix, prompt: &TokenIds) {
        let NumberedPrefix { number, tokens } = keep;
        let length = tokens as usize;
        let mut shelf = self.lock();
        let taken = shelf.prefixes.iter().any(|(prefix, ())| prefix.number == number);
        if length <= prompt.len() && prompt.len() <= MAX_TOKENS && !taken {
            shelf.put(Prefix::new(number, prompt.clone(), length), ());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shelf<()>> {
        // No holder of this lock panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proto::message::TokenPart;

    fn prompt(text: u32, length: usize, end: u32) -> TokenIds {
        let mut tokens: Vec<u32> = (0..length as u32).map(|at| at * 7 + text).collect();
        tokens.push(end);
        tokens.into()
    }

    /// Sends `prompt` from one end to the other. The prompt is `None` if the receiver does not know the
    /// prefix.
    fn send(
        sent: &SentPrefixes,
        kept: &KeptPrefixes,
        prompt: &TokenIds,
        cached: usize,
    ) -> (usize, Option<TokenIds>) {
        let Sending { after, keep } = sent.sending(prompt, cached);
        let from = after.map_or(0, |prefix| prefix.tokens as usize);
        let rest = &prompt[from..];
        let whole = match after {
            Some(after) => kept.whole(after, rest),
            None => Some(rest.into()),
        };
        if let (Some(whole), Some((keep, numbering))) = (&whole, keep) {
            kept.keep(keep, whole);
            numbering.read();
        }
        if let (None, Some(after)) = (&whole, after) {
            sent.forget(after.number);
        }
        (from, whole)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn received_data_equals_sent_data(
            prompts in prop::collection::vec((0..4u32, 0..3_000usize, any::<u32>(), 0..4_000usize, 0..8u8), 1..60),
        ) {
            let (sent, mut kept) = (SentPrefixes::default(), KeptPrefixes::default());
            for (text, length, end, cached, forgets) in prompts {
                if forgets == 0 {
                    kept = KeptPrefixes::default();
                }
                let prompt = prompt(text, length, end);
                let (from, whole) = send(&sent, &kept, &prompt, cached);
                match whole {
                    Some(whole) => prop_assert_eq!(&whole, &prompt),
                    // Then the whole prompt is sent, and no tokens are expected to be cached.
                    None => prop_assert!(from > 0 && sent.sending(&prompt, 0).after.is_none_or(|next| (next.tokens as usize) < from)),
                }
            }
        }
    }

    #[test]
    fn a_later_prompt_is_sent_without_its_known_prefix() {
        let (sent, kept) = (SentPrefixes::default(), KeptPrefixes::default());
        let sent_from = |end, cached| send(&sent, &kept, &prompt(1, 4_000, end), cached).0;
        assert_eq!([sent_from(1, 0), sent_from(2, 4_000), sent_from(3, 4_000)], [0, 0, 4_000]);
        // Another text of equal length is another prefix. A growing chat gets new numbers.
        assert_eq!(send(&sent, &kept, &prompt(2, 4_000, 3), 0).0, 0);
        let grown = prompt(1, 6_000, 9);
        assert_eq!(send(&sent, &kept, &grown, 5_000).0, 4_000);
        assert_eq!(send(&sent, &kept, &grown, 5_000).0, 5_000);
    }

    #[test]
    fn tokens_after_the_shared_parts_are_compared() {
        let (sent, kept) = (SentPrefixes::default(), KeptPrefixes::default());
        let with_parts = |end| {
            let parts = [(1, 1_000), (2, 3_900)].map(|(name, end)| TokenPart { name, end });
            TokenIds::from_parts(prompt(1, 4_000, end).to_vec(), parts.to_vec())
        };
        let mut other = with_parts(3).to_vec();
        other[3_950] += 1;
        let other = TokenIds::from_parts(other, with_parts(3).parts().to_vec());
        let sent_from = |prompt: &TokenIds, cached| send(&sent, &kept, prompt, cached).0;
        assert_eq!([sent_from(&with_parts(1), 4_000), sent_from(&with_parts(2), 4_000)], [0, 4_000]);
        assert_eq!(sent_from(&other, 0), 0);
        // The same tokens without parts.
        assert_eq!(sent_from(&prompt(1, 4_000, 4), 0), 4_000);
    }

    #[test]
    fn a_prefix_number_is_used_only_after_its_request_was_read() {
        let sent = SentPrefixes::default();
        let prompt = prompt(1, 4_000, 0);
        let first = sent.sending(&prompt, 4_000);
        let second = sent.sending(&prompt, 4_000);
        assert!(second.after.is_none() && second.keep.is_none(), "its number is under way");
        drop(first);
        let third = sent.sending(&prompt, 4_000);
        assert!(third.after.is_none() && third.keep.is_some(), "what was lost is numbered anew");
        third.keep.unwrap().1.read();
        assert!(sent.sending(&prompt, 4_000).after.is_some());
    }

    #[test]
    fn both_ends_drop_the_oldest_prefixes_by_the_same_bounds() {
        let (sent, kept) = (SentPrefixes::default(), KeptPrefixes::default());
        for text in 0..3 * MAX_PREFIXES as u32 {
            assert!(send(&sent, &kept, &prompt(text, 2_000, 1), 2_000).1.is_some());
        }
        for text in 0..3 * MAX_PREFIXES as u32 {
            // A new number would displace another prefix.
            let (from, whole) = send(&sent, &kept, &prompt(text, 2_000, 2), 0);
            assert_eq!(from > 0, text as usize >= 2 * MAX_PREFIXES, "{text}");
            assert!(whole.is_some());
        }
        let long = prompt(7, MAX_TOKENS / 2, 1);
        for _ in 0..3 {
            assert!(send(&sent, &kept, &long, 2_000).1.is_some());
        }
        assert!(kept.lock().tokens <= MAX_TOKENS && sent.lock().shelf.tokens <= MAX_TOKENS);
        assert!(sent.sending(&prompt(7, MAX_TOKENS, 1), 2_000).keep.is_none(), "longer than may be kept");
    }
}
