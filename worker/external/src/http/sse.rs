//! Server-sent events: the `data` of each event, from bytes that arrive in any pieces.

use bytes::{Buf, Bytes, BytesMut};

/// An event has more bytes than allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventTooLong;

/// Splits a body into events. Comments and other fields than `data` are dropped.
#[derive(Debug)]
pub(crate) struct SseParser {
    /// Bytes of the body after the last complete line.
    rest: BytesMut,
    /// Bytes of `rest` that contain no end of a line.
    scanned: usize,
    /// `data` of the event so far.
    data: Option<BytesMut>,
    max_event: usize,
}

impl SseParser {
    pub(crate) fn new(max_event: usize) -> Self {
        Self { rest: BytesMut::new(), scanned: 0, data: None, max_event }
    }

    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
    }

    /// The `data` of the next complete event.
    pub(crate) fn next_event(&mut self) -> Result<Option<Bytes>, EventTooLong> {
        loop {
            let Some(length) = self.rest[self.scanned..].iter().position(|&byte| byte == b'\n') else {
                self.scanned = self.rest.len();
                let pending = self.rest.len() + self.data.as_ref().map_or(0, BytesMut::len);
                return if pending > self.max_event { Err(EventTooLong) } else { Ok(None) };
            };
            let mut line = self.rest.split_to(self.scanned + length);
            self.rest.advance(1);
            self.scanned = 0;
            if line.last() == Some(&b'\r') {
                line.truncate(line.len() - 1);
            }
            if line.is_empty() {
                match self.data.take() {
                    Some(data) => return Ok(Some(data.freeze())),
                    None => continue,
                }
            }
            let Some(value) = line.strip_prefix(b"data:") else { continue };
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match &mut self.data {
                Some(data) => {
                    data.extend_from_slice(b"\n");
                    data.extend_from_slice(value);
                }
                None => self.data = Some(BytesMut::from(value)),
            }
            if self.data.as_ref().is_some_and(|data| data.len() > self.max_event) {
                return Err(EventTooLong);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn events(parser: &mut SseParser) -> Vec<String> {
        std::iter::from_fn(|| parser.next_event().unwrap())
            .map(|event| String::from_utf8(event.to_vec()).unwrap())
            .collect()
    }

    const BODY: &[u8] =
        b": ping\n\ndata: {\"a\":1}\r\n\r\nevent: x\ndata:one\ndata: two\n\n\ndata: [DONE]\n\ndata: cut";

    proptest! {
        #[test]
        fn events_do_not_depend_on_how_the_body_is_split(cuts in prop::collection::vec(0..BODY.len(), 0..8)) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut parser = SseParser::new(100);
            let (mut found, mut from) = (Vec::new(), 0);
            for cut in cuts.into_iter().chain([BODY.len()]) {
                parser.feed(&BODY[from..cut]);
                from = cut;
                found.extend(events(&mut parser));
            }
            prop_assert_eq!(found, ["{\"a\":1}", "one\ntwo", "[DONE]"]);
        }
    }

    #[test]
    fn an_event_has_a_limit_with_and_without_line_ends() {
        let mut parser = SseParser::new(16);
        parser.feed(&[b'x'; 17]);
        assert_eq!(parser.next_event(), Err(EventTooLong));
        let mut parser = SseParser::new(16);
        parser.feed(b"data: 12345678\ndata: 123456789\n");
        assert_eq!(parser.next_event(), Err(EventTooLong));
    }
}
