//! Framing of response bodies.

use super::{invalid, named};
use model::catalog::Head;
use std::io::{self, BufRead, ErrorKind, Read};

/// Longest line with a chunk's length.
const MAX_LINE: u64 = 1 << 10;
/// Longest trailer after the last chunk.
const MAX_TRAILER: u64 = 64 << 10;

/// How the end of a body is determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// Bytes left of the body.
    Length(u64),
    /// Bytes left of the current chunk; `None` if the next line has a chunk's length.
    Chunk(Option<u64>),
    /// The body ends with the connection, so a truncated body cannot be detected.
    Unknown,
    Ended,
}

impl Framing {
    /// Framing declared by the head.
    pub(super) fn of(head: &Head) -> io::Result<Self> {
        if matches!(head.status, 204 | 304) {
            return Ok(Self::Ended);
        }
        match head.header("transfer-encoding").map(str::to_ascii_lowercase).as_deref() {
            Some("chunked") => return Ok(Self::Chunk(None)),
            Some("identity") | None => {}
            Some(other) => return Err(invalid(&format!("an answer in {other}"))),
        }
        match head.header("content-length") {
            Some(length) => Ok(Self::Length(length.parse().map_err(|_| invalid("a length that is none"))?)),
            None => Ok(Self::Unknown),
        }
    }
}

/// A streamed body.
pub(super) struct Body<S> {
    stream: S,
    framing: Framing,
}

impl<S: BufRead> Body<S> {
    pub(super) fn new(stream: S, framing: Framing) -> Self {
        Self { stream, framing }
    }

    fn line(&mut self, most: u64) -> io::Result<String> {
        let mut line = Vec::new();
        (&mut self.stream).take(most).read_until(b'\n', &mut line).map_err(named)?;
        if line.last() != Some(&b'\n') {
            return Err(if line.len() as u64 == most { invalid("an endless line") } else { cut() });
        }
        Ok(String::from_utf8_lossy(&line).trim().to_owned())
    }

    /// Reads the length of the next chunk; 0 after the last one.
    fn next_chunk(&mut self) -> io::Result<u64> {
        let line = self.line(MAX_LINE)?;
        let length = line.split(';').next().unwrap_or_default().trim();
        let length = u64::from_str_radix(length, 16).map_err(|_| invalid("a chunk without a length"))?;
        if length == 0 {
            let mut left = MAX_TRAILER;
            loop {
                let line = self.line(left)?;
                if line.is_empty() {
                    break;
                }
                left = left.saturating_sub(line.len() as u64);
            }
        }
        Ok(length)
    }

    /// Reads at most `left` bytes. The end of the connection inside the body is an error.
    fn some(&mut self, to: &mut [u8], left: u64) -> io::Result<usize> {
        let most = to.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        match self.stream.read(to.get_mut(..most).unwrap_or_default()).map_err(named)? {
            0 => Err(cut()),
            got => Ok(got),
        }
    }
}

impl<S: BufRead> Read for Body<S> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        match self.framing {
            Framing::Ended | Framing::Length(0) => Ok(0),
            Framing::Unknown => Err(invalid("the server does not say how long the file is")),
            Framing::Length(left) => {
                let got = self.some(to, left)?;
                self.framing = Framing::Length(left - got as u64);
                Ok(got)
            }
            Framing::Chunk(Some(left)) => {
                let got = self.some(to, left)?;
                let left = left - got as u64;
                self.framing = Framing::Chunk((left > 0).then_some(left));
                if left == 0 && !self.line(MAX_LINE)?.is_empty() {
                    return Err(invalid("a chunk that is longer than it says"));
                }
                Ok(got)
            }
            Framing::Chunk(None) => match self.next_chunk()? {
                0 => {
                    self.framing = Framing::Ended;
                    Ok(0)
                }
                length => {
                    self.framing = Framing::Chunk(Some(length));
                    self.read(to)
                }
            },
        }
    }
}

fn cut() -> io::Error {
    io::Error::new(ErrorKind::UnexpectedEof, "the connection was cut")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(framing: Framing, bytes: &[u8]) -> Result<Vec<u8>, ErrorKind> {
        let mut body = Vec::new();
        Body::new(bytes, framing).read_to_end(&mut body).map(|_| body).map_err(|error| error.kind())
    }

    #[test]
    fn a_body_ends_where_it_says() {
        assert_eq!(all(Framing::Length(5), b"hello world"), Ok(b"hello".into()));
        assert_eq!(all(Framing::Length(0), b"x"), Ok(Vec::new()));
        assert_eq!(all(Framing::Ended, b"x"), Ok(Vec::new()));
        assert_eq!(all(Framing::Length(12), b"hello world"), Err(ErrorKind::UnexpectedEof));
        assert_eq!(all(Framing::Unknown, b"hello"), Err(ErrorKind::InvalidData));
    }

    #[test]
    fn chunks_are_put_together() {
        let chunked = |bytes: &[u8]| all(Framing::Chunk(None), bytes);
        assert_eq!(
            chunked(b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nA: b\r\n\r\nmore"),
            Ok(b"hello world".into())
        );
        assert_eq!(chunked(b"5\r\nhel"), Err(ErrorKind::UnexpectedEof));
        assert_eq!(chunked(b"5\r\nhello\r\n"), Err(ErrorKind::UnexpectedEof));
        assert_eq!(chunked(b"0\r\n"), Err(ErrorKind::UnexpectedEof));
        assert_eq!(chunked(b"5\r\nhello world\r\n"), Err(ErrorKind::InvalidData));
        assert_eq!(chunked(b"five\r\n"), Err(ErrorKind::InvalidData));
        assert_eq!(chunked(&[b'1'; 5000]), Err(ErrorKind::InvalidData));
    }

    #[test]
    fn the_head_says_how_a_body_is_marked_out() {
        let of = |status, headers: &[(&str, &str)]| {
            let headers = headers.iter().map(|(n, v)| ((*n).into(), (*v).into())).collect();
            Framing::of(&Head { status, headers }).map_err(|error| error.kind())
        };
        assert_eq!(of(200, &[("content-length", " 7 ")]), Ok(Framing::Length(7)));
        assert_eq!(
            of(200, &[("transfer-encoding", "Chunked"), ("content-length", "7")]),
            Ok(Framing::Chunk(None))
        );
        assert_eq!(of(200, &[("transfer-encoding", "gzip")]), Err(ErrorKind::InvalidData));
        assert_eq!(of(200, &[("content-length", "-7")]), Err(ErrorKind::InvalidData));
        assert_eq!((of(200, &[]), of(304, &[])), (Ok(Framing::Unknown), Ok(Framing::Ended)));
    }
}
