//! Queue of texts to be encoded: first come, first served; several requests share a step; cancelled requests
//! are dropped. Sans-IO: the caller provides the time and reports which requests were cancelled.

use super::{Limits, Text};
use std::collections::VecDeque;
use std::time::Instant;

/// A request in the queue.
#[derive(Debug)]
struct Waiting<R> {
    texts: Vec<Text>,
    /// Results of the first texts.
    done: Vec<Vec<f32>>,
    /// When its first text was taken.
    started: Option<Instant>,
    received: Instant,
    deadline: Option<Instant>,
    reply: R,
}

/// A request that has left the queue.
#[derive(Debug, PartialEq)]
pub(super) struct Dequeued<R> {
    pub(super) reply: R,
    pub(super) received: Instant,
    /// When its first text was taken, if it was.
    pub(super) started: Option<Instant>,
    /// Results of its texts, if all were computed.
    pub(super) encoded: Vec<Vec<f32>>,
}

/// The queue. `R` is the reply handle of a request.
#[derive(Debug)]
pub(super) struct Queue<R> {
    limits: Limits,
    waiting: VecDeque<Waiting<R>>,
}

impl<R> Queue<R> {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, waiting: VecDeque::new() }
    }

    /// Appends a request. Its texts must be within the limits.
    pub(super) fn push(&mut self, now: Instant, texts: Vec<Text>, deadline: Option<Instant>, reply: R) {
        let done = Vec::with_capacity(texts.len());
        self.waiting.push_back(Waiting { texts, done, started: None, received: now, deadline, reply });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Number of requests with some computed texts, number of requests without, and tokens left to compute.
    pub(super) fn sizes(&self) -> (usize, usize, u64) {
        let running = self.waiting.iter().filter(|request| request.started.is_some()).count();
        let tokens =
            self.waiting.iter().flat_map(|request| request.left()).map(|text| text.tokens.len() as u64);
        (running, self.waiting.len() - running, tokens.sum())
    }

    /// Drops cancelled requests and returns their number.
    pub(super) fn forget(&mut self, is_cancelled: impl Fn(&R) -> bool) -> usize {
        let before = self.waiting.len();
        self.waiting.retain(|request| !is_cancelled(&request.reply));
        before - self.waiting.len()
    }

    /// Removes and returns requests that have passed their deadline.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Dequeued<R>> {
        let is_expired = |request: &Waiting<R>| request.deadline.is_some_and(|deadline| deadline <= now);
        self.remove_where(is_expired)
    }

    /// The texts of the next step, in order.
    pub(super) fn step(&mut self, now: Instant) -> Vec<&Text> {
        let texts = || self.waiting.iter().flat_map(Waiting::left);
        let fit = self.limits.fit(texts().map(|text| text.tokens.len()));
        let mut left = fit;
        for request in &mut self.waiting {
            if left == 0 {
                break;
            }
            request.started.get_or_insert(now);
            left = left.saturating_sub(request.texts.len() - request.done.len());
        }
        self.waiting.iter().flat_map(Waiting::left).take(fit).collect()
    }

    /// The requests of the last [`step`](Self::step) of `texts` texts, in order, each with its rows.
    pub(super) fn step_rows(&self, texts: usize) -> impl Iterator<Item = (usize, &R)> {
        let mut left = texts;
        self.waiting.iter().map_while(move |request| {
            let taken = left.min(request.texts.len() - request.done.len());
            left -= taken;
            let rows = request.left().take(taken).map(|text| text.tokens.len()).sum();
            (taken > 0).then_some((rows, &request.reply))
        })
    }

    /// Stores the results of the last [`step`](Self::step), in order. Removes and returns the completed
    /// requests.
    pub(super) fn complete(&mut self, encoded: Vec<Vec<f32>>) -> Vec<Dequeued<R>> {
        let mut encoded = encoded.into_iter();
        for request in &mut self.waiting {
            let missing = request.texts.len() - request.done.len();
            request.done.extend(encoded.by_ref().take(missing));
        }
        self.remove_where(|request| request.done.len() == request.texts.len())
    }

    fn remove_where(&mut self, leaves: impl Fn(&Waiting<R>) -> bool) -> Vec<Dequeued<R>> {
        let (out, stay): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(leaves);
        self.waiting.extend(stay);
        let left = |Waiting { reply, received, started, done, .. }| Dequeued {
            reply,
            received,
            started,
            encoded: done,
        };
        out.into_iter().map(left).collect()
    }
}

impl<R> Waiting<R> {
    /// Texts that are not computed yet.
    fn left(&self) -> impl Iterator<Item = &Text> {
        self.texts.iter().skip(self.done.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const LIMITS: Limits = Limits { vocab: 100, text_tokens: 10, step_tokens: 12, step_texts: 4 };

    fn texts(lengths: &[usize]) -> Vec<Text> {
        lengths.iter().map(|len| Text { tokens: vec![1; *len], second: None }).collect()
    }

    /// Runs the next step; the result of each text is its length.
    fn run(queue: &mut Queue<&'static str>, now: Instant) -> (Vec<usize>, Vec<Dequeued<&'static str>>) {
        let lengths: Vec<usize> = queue.step(now).iter().map(|text| text.tokens.len()).collect();
        let encoded = lengths.iter().map(|len| vec![*len as f32]).collect();
        (lengths, queue.complete(encoded))
    }

    #[test]
    fn requests_share_steps_and_leave_in_order() {
        let (mut queue, now) = (Queue::new(LIMITS), Instant::now());
        queue.push(now, texts(&[5, 6, 7]), None, "a");
        queue.push(now, texts(&[3]), None, "b");
        queue.push(now, texts(&[1, 1, 1, 1]), None, "c");
        assert_eq!(queue.sizes(), (0, 3, 25));
        let first_step_at = now + Duration::from_secs(1);
        assert_eq!(run(&mut queue, first_step_at).0, [5, 6]);
        assert_eq!(queue.sizes(), (1, 2, 14));
        let (lengths, left) = run(&mut queue, first_step_at + Duration::from_secs(1));
        assert_eq!(lengths, [7, 3, 1, 1]);
        let names: Vec<_> = left.iter().map(|left| (left.reply, left.encoded.concat())).collect();
        assert_eq!(names, [("a", vec![5.0, 6.0, 7.0]), ("b", vec![3.0])]);
        assert_eq!((left[0].received, left[0].started), (now, Some(first_step_at)));
        let (lengths, left) = run(&mut queue, first_step_at);
        assert_eq!((lengths, left[0].encoded.concat()), (vec![1, 1], vec![1.0; 4]));
        assert!(queue.is_empty() && queue.step(first_step_at).is_empty());
    }

    #[test]
    fn canceled_and_late_requests_are_dropped_anywhere_in_the_queue() {
        let (mut queue, now) = (Queue::new(LIMITS), Instant::now());
        queue.push(now, texts(&[10, 10]), None, "gone");
        queue.push(now, texts(&[10]), Some(now + Duration::from_secs(5)), "late");
        queue.push(now, texts(&[2]), Some(now + Duration::from_secs(9)), "stays");
        assert_eq!(run(&mut queue, now).0, [10]);
        assert_eq!(queue.forget(|reply| *reply == "gone"), 1);
        let expired = queue.expire(now + Duration::from_secs(5));
        assert_eq!(expired.iter().map(|left| left.reply).collect::<Vec<_>>(), ["late"]);
        assert_eq!(run(&mut queue, now).1[0].reply, "stays");
    }

    #[test]
    fn a_request_without_texts_completes_with_the_next_step() {
        let (mut queue, now) = (Queue::new(LIMITS), Instant::now());
        queue.push(now, texts(&[]), None, "empty");
        queue.push(now, texts(&[4]), None, "full");
        let (lengths, left) = run(&mut queue, now);
        assert_eq!((lengths, left.len()), (vec![4], 2));
    }
}
