//! A small HTTP/1.1 client on a plain socket, so that a test sees exactly the bytes on the wire.

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How the end of a response body is determined.
#[derive(Debug)]
enum Framing {
    Length(u64),
    /// Bytes left of the current chunk; `None` before the first chunk.
    Chunked(Option<u64>),
    UntilClose,
}

/// A response whose body has not been read yet.
#[derive(Debug)]
pub struct HttpAnswer {
    pub status: u16,
    headers: Vec<(String, String)>,
    body: Body,
}

#[derive(Debug)]
struct Body {
    stream: BufReader<TcpStream>,
    framing: Framing,
}

pub fn get(server: SocketAddr, path: &str) -> anyhow::Result<HttpAnswer> {
    send(server, "GET", path, &[], b"")
}

/// Sends a JSON body.
pub fn post(server: SocketAddr, path: &str, body: &Value) -> anyhow::Result<HttpAnswer> {
    post_with(server, path, &[], body)
}

/// Sends a JSON body and further headers.
pub fn post_with(
    server: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    body: &Value,
) -> anyhow::Result<HttpAnswer> {
    send(server, "POST", path, headers, body.to_string().as_bytes())
}

/// Sends a body of any bytes.
pub fn send(
    server: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> anyhow::Result<HttpAnswer> {
    let mut stream = TcpStream::connect_timeout(&server, Duration::from_secs(5))
        .with_context(|| format!("connecting to {server}"))?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    request += "\r\n";
    stream.write_all(&[request.as_bytes(), body].concat())?;
    HttpAnswer::read_head(BufReader::new(stream)).with_context(|| format!("{method} {path} of {server}"))
}

impl HttpAnswer {
    fn read_head(mut stream: BufReader<TcpStream>) -> anyhow::Result<Self> {
        let status_line = line(&mut stream)?;
        let status = status_line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.with_context(|| format!("no status in {status_line:?}"))?;
        let mut headers = Vec::new();
        loop {
            let text = line(&mut stream)?;
            let Some((name, value)) = text.split_once(':') else {
                ensure!(text.is_empty(), "not a header: {text:?}");
                break;
            };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let named = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
        let framing = match (named("content-length"), named("transfer-encoding")) {
            (Some(length), None) => Framing::Length(length.parse()?),
            (None, Some("chunked")) => Framing::Chunked(None),
            (None, None) => Framing::UntilClose,
            other => bail!("how the body ends is unclear: {other:?}"),
        };
        Ok(Self { status, headers, body: Body { stream, framing } })
    }

    /// The value of a header; `name` in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The whole body as text.
    pub fn text(mut self) -> anyhow::Result<String> {
        let mut text = String::new();
        self.body.read_to_string(&mut text)?;
        Ok(text)
    }

    /// The body as JSON, for any status.
    pub fn json(self) -> anyhow::Result<Value> {
        let text = self.text()?;
        serde_json::from_str(&text).with_context(|| format!("not JSON: {text:?}"))
    }

    /// The body as JSON; any status but 200 is an error that shows the body.
    pub fn ok(self) -> anyhow::Result<Value> {
        let status = self.status;
        let body = self.json()?;
        ensure!(status == 200, "status {status}: {body}");
        Ok(body)
    }

    /// The body as server-sent events; any status but 200 is an error that shows the body.
    pub fn events(self) -> anyhow::Result<Events> {
        if self.status != 200 {
            let status = self.status;
            bail!("status {status}: {}", self.text()?);
        }
        ensure!(self.header("content-type") == Some("text/event-stream"), "not a stream of events");
        Ok(Events { lines: BufReader::new(self.body), done: false })
    }
}

impl Read for Body {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let broken = |reason: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, reason.to_owned());
        if let Framing::Chunked(left) = &mut self.framing
            && left.is_none_or(|left| left == 0)
        {
            let mut text = String::new();
            if left.is_some() {
                self.stream.read_line(&mut text)?;
                text.clear();
            }
            self.stream.read_line(&mut text)?;
            let size =
                u64::from_str_radix(text.trim(), 16).map_err(|_| broken("bad or missing chunk size"))?;
            if size == 0 {
                self.framing = Framing::Length(0);
                return Ok(0);
            }
            *left = Some(size);
        }
        let left = match &mut self.framing {
            Framing::UntilClose => return self.stream.read(out),
            Framing::Length(left) => left,
            Framing::Chunked(Some(left)) => left,
            Framing::Chunked(None) => return Err(broken("no chunk")),
        };
        let len = out.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
        if len == 0 {
            // Some servers keep the connection open after the whole body.
            return Ok(0);
        }
        let (out, _) = out.split_at_mut(len);
        let read = self.stream.read(out)?;
        if read == 0 {
            return Err(broken("the connection closed inside the body"));
        }
        *left -= read as u64;
        Ok(read)
    }
}

/// Server-sent events, one JSON value each, up to `[DONE]`.
#[derive(Debug)]
pub struct Events {
    lines: BufReader<Body>,
    done: bool,
}

impl Events {
    /// The next event; `None` after `[DONE]`. An event named `error` is an error, and so is an end without
    /// `[DONE]`.
    pub fn next_event(&mut self) -> anyhow::Result<Option<Value>> {
        while !self.done {
            let mut text = String::new();
            ensure!(self.lines.read_line(&mut text)? > 0, "the stream ended without [DONE]");
            let text = text.trim_end();
            match text.strip_prefix("data:").map(str::trim_start) {
                Some("[DONE]") => self.done = true,
                Some(data) => {
                    let value: Value = serde_json::from_str(data).with_context(|| data.to_owned())?;
                    return Ok(Some(value));
                }
                None => {
                    let named = text.starts_with("event:") && text != "event: error";
                    let expected = text.is_empty() || text.starts_with(':') || named;
                    ensure!(expected, "not an event line: {text:?}");
                }
            }
        }
        Ok(None)
    }

    /// All remaining events; an `error` event is an error.
    pub fn all(mut self) -> anyhow::Result<Vec<Value>> {
        let mut events = Vec::new();
        while let Some(event) = self.next_event()? {
            ensure!(event.get("error").is_none(), "the stream carries an error: {event}");
            events.push(event);
        }
        Ok(events)
    }
}

/// Sum over all series of a metric of `server`; a missing metric is an error.
pub fn metric(server: SocketAddr, name: &str) -> anyhow::Result<f64> {
    sum_of(&get(server, "/metrics")?.text()?, name)
}

fn sum_of(exposition: &str, name: &str) -> anyhow::Result<f64> {
    let mut found = false;
    let mut sum = 0.0;
    for line in exposition.lines().filter(|line| !line.starts_with('#')) {
        let Some(rest) = line.strip_prefix(name).filter(|rest| rest.starts_with(['{', ' '])) else {
            continue;
        };
        let value = rest.rsplit_once(' ').map(|(_, value)| value).context("a sample without a value")?;
        sum += value.parse::<f64>().with_context(|| line.to_owned())?;
        found = true;
    }
    if found { Ok(sum) } else { bail!("no metric {name}") }
}

fn line(stream: &mut impl BufRead) -> anyhow::Result<String> {
    let mut text = String::new();
    ensure!(stream.read_line(&mut text)? > 0, "the connection closed before the answer");
    Ok(text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Serves `answer` once and returns what a client parses from it.
    fn answered(answer: &'static [u8]) -> anyhow::Result<HttpAnswer> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let server = listener.local_addr()?;
        let thread = std::thread::spawn(move || -> std::io::Result<()> {
            let (mut stream, _) = listener.accept()?;
            let mut request = BufReader::new(stream.try_clone()?);
            let mut text = String::new();
            while request.read_line(&mut text)? > 2 {}
            stream.write_all(answer)
        });
        let answer = get(server, "/");
        thread.join().unwrap()?;
        answer
    }

    #[test]
    fn bodies_end_where_their_framing_ends() {
        let fixed =
            answered(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nX-A: b\r\n\r\n{\"a\":1}garbage").unwrap();
        assert_eq!(fixed.header("x-a"), Some("b"));
        assert_eq!(fixed.ok().unwrap()["a"], 1);
        let chunked = answered(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{\"a\r\n4\r\n\":2}\r\n0\r\n\r\n",
        );
        assert_eq!(chunked.unwrap().ok().unwrap()["a"], 2);
    }

    #[test]
    fn events_end_with_done_and_a_cut_stream_is_an_error() {
        let whole = answered(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {\"a\":1}\n\ndata: [DONE]\n\n",
        );
        assert_eq!(whole.unwrap().events().unwrap().all().unwrap().len(), 1);
        let cut = answered(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {\"a\":1}\n\n");
        let error = cut.unwrap().events().unwrap().all().unwrap_err();
        assert!(error.to_string().contains("[DONE]"), "{error}");
    }

    #[test]
    fn errors_show_status_and_body() {
        let refused = answered(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}").unwrap();
        assert!(refused.ok().unwrap_err().to_string().contains("429"));
    }

    #[test]
    fn metrics_are_summed_over_their_series_and_not_over_longer_names() {
        let text = "# TYPE a counter\na_total{w=\"1\"} 2\na_total{w=\"2\"} 3.5\na_total_sum 100\nb 7\n";
        assert_eq!(sum_of(text, "a_total").unwrap(), 5.5);
        assert_eq!(sum_of(text, "b").unwrap(), 7.0);
        assert!(sum_of(text, "a").is_err());
    }
}
