//! Compressed bodies of requests (`Content-Encoding`), decompressed while they arrive. The limits of bodies hold for
//! what comes out.

use super::error::ApiError;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH};
use flate2::write::{MultiGzDecoder, ZlibDecoder};
use futures::stream::{self, Stream};
use http_body_util::BodyExt;
use std::io::{self, Write};

/// Bytes that are decompressed at once. At most about 4 MiB come out of them.
const PIECE: usize = 4 << 10;

/// A request whose body is decompressed.
///
/// # Errors
///
/// If its encoding is none of [`ENCODINGS`](crate::error::ENCODINGS).
pub(super) fn decoded(request: Request) -> Result<Request, ApiError> {
    let Some(encoding) = request.headers().get(CONTENT_ENCODING) else { return Ok(request) };
    let decoder = match encoding.as_bytes().to_ascii_lowercase().as_slice() {
        b"identity" | b"" => return Ok(request),
        b"gzip" | b"x-gzip" => Decoder::Gzip(MultiGzDecoder::new(Vec::new())),
        b"deflate" => Decoder::Deflate(ZlibDecoder::new(Vec::new())),
        other => {
            let given = String::from_utf8_lossy(other).chars().take(64).collect();
            return Err(ApiError::ContentEncoding { given });
        }
    };
    let (mut head, body) = request.into_parts();
    head.headers.remove(CONTENT_ENCODING);
    head.headers.remove(CONTENT_LENGTH);
    Ok(Request::from_parts(head, Body::from_stream(decompressed(body, decoder))))
}

enum Decoder {
    Gzip(MultiGzDecoder<Vec<u8>>),
    Deflate(ZlibDecoder<Vec<u8>>),
}

impl Decoder {
    /// Decompresses `piece`. An empty one ends the body.
    fn push(&mut self, piece: &[u8]) -> io::Result<Bytes> {
        let out = match (self, piece) {
            (Self::Gzip(decoder), []) => {
                decoder.try_finish()?;
                decoder.get_mut()
            }
            (Self::Gzip(decoder), piece) => {
                decoder.write_all(piece)?;
                decoder.get_mut()
            }
            (Self::Deflate(decoder), []) => {
                decoder.try_finish()?;
                decoder.get_mut()
            }
            (Self::Deflate(decoder), piece) => {
                decoder.write_all(piece)?;
                decoder.get_mut()
            }
        };
        Ok(std::mem::take(out).into())
    }
}

/// The contents of a compressed body. Nothing follows an error.
fn decompressed(body: Body, decoder: Decoder) -> impl Stream<Item = io::Result<Bytes>> {
    stream::try_unfold(Some((body, decoder, Bytes::new())), |state| async {
        let Some((mut body, mut decoder, mut waiting)) = state else { return Ok(None) };
        while waiting.is_empty() {
            let Some(frame) = body.frame().await else {
                return Ok(Some((decoder.push(&[])?, None)));
            };
            waiting = frame.map_err(io::Error::other)?.into_data().unwrap_or_default();
        }
        let piece = waiting.split_to(waiting.len().min(PIECE));
        let out = decoder.push(&piece)?;
        Ok(Some((out, Some((body, decoder, waiting)))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;
    use flate2::Compression;
    use flate2::write::{GzEncoder, ZlibEncoder};

    async fn read(encoding: &str, body: Vec<u8>, max: usize) -> Result<Bytes, ApiError> {
        let request = Request::builder().header(CONTENT_ENCODING, encoding).body(Body::from(body)).unwrap();
        limits::read_within(decoded(request)?.into_body(), max).await
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn deflate(text: &[u8]) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[tokio::test]
    async fn bodies_are_decompressed_up_to_the_limit() {
        let text: Vec<u8> = (0..20_000u32).flat_map(|n| (n * n).to_le_bytes()).collect();
        for (encoding, body) in [
            ("gzip", gzip(&text)),
            ("X-GZIP", [gzip(&text[..7]), gzip(&text[7..])].concat()),
            ("deflate", deflate(&text)),
            ("identity", text.clone()),
        ] {
            assert_eq!(read(encoding, body.clone(), text.len()).await.unwrap(), text, "{encoding}");
            let limit = text.len() - 1;
            let above = read(encoding, body.clone(), limit).await;
            assert_eq!(above, Err(ApiError::BodyTooLarge { limit }), "{encoding}");
        }
        let bomb = gzip(&vec![0; 64 << 20]);
        assert_eq!(read("gzip", bomb, 1 << 20).await, Err(ApiError::BodyTooLarge { limit: 1 << 20 }));
    }

    #[tokio::test]
    async fn what_is_damaged_or_of_another_encoding_is_refused() {
        let (mut cut, mut more) = (gzip(b"text"), deflate(b"text"));
        cut.truncate(cut.len() - 3);
        more.push(7);
        for (encoding, body) in
            [("gzip", cut), ("gzip", b"text".to_vec()), ("deflate", more), ("deflate", gzip(b"x"))]
        {
            let refused = read(encoding, body, 100).await;
            assert_eq!(refused, Err(ApiError::field("body", "cut off or malformed")), "{encoding}");
        }
        for encoding in ["br", "gzip, gzip"] {
            let refused = read(encoding, Vec::new(), 100).await;
            assert_eq!(refused, Err(ApiError::ContentEncoding { given: encoding.into() }));
        }
    }
}
