//! The load generator: minimal HTTP/1.1 on persistent connections, because it shares the machine with the
//! measured router.

use super::bodies::{Bodies, Kind};
use anyhow::{Context, bail};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::LocalSet;

/// Options of the load.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The server.
    #[arg(long)]
    address: SocketAddr,
    /// The model's name.
    #[arg(long, default_value = "smollm2-135m")]
    model: String,
    /// Kind of bodies.
    #[arg(long, value_enum)]
    body: Kind,
    /// Tokens to request.
    #[arg(long, default_value_t = 16)]
    tokens: u32,
    /// Request answers as server-sent events.
    #[arg(long)]
    stream: bool,
    /// Concurrent requests.
    #[arg(long, default_value_t = 1)]
    concurrency: usize,
    /// Requests per second, sent without waiting for earlier ones; instead of a fixed concurrency.
    #[arg(long)]
    rate: Option<f64>,
    /// Duration of the load.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Length of the warm-up in seconds. Requests that finish in it do not count as finished in time.
    #[arg(long, default_value_t = 0.0)]
    warm: f64,
    /// Number of requests, instead of a duration.
    #[arg(long)]
    requests: Option<u64>,
    /// Limit of the duration in seconds.
    #[arg(long, requires = "requests")]
    at_most: Option<f64>,
    /// Seed of new texts: equal seeds give equal requests.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Process whose CPU time and memory are also reported.
    #[arg(long)]
    watch: Option<u32>,
    /// Requests between two readings of the watched process's memory.
    #[arg(long)]
    memory_every: Option<u64>,
}

/// Results of the requests.
#[derive(Default)]
struct Tally {
    /// Latency in microseconds of completed requests.
    finished: Vec<u32>,
    /// Latency in microseconds of refusals.
    refused: Vec<u32>,
    /// Refusals without `Retry-After`.
    no_retry_after: u64,
    /// Completed between the end of the warm-up and the end of the run.
    in_time: u64,
    failed: u64,
    first_failure: Option<String>,
    /// Number of requests done, and the watched process's memory in bytes.
    memory: Vec<(u64, u64)>,
}

struct Run {
    args: Args,
    head: String,
    bodies: RefCell<Bodies>,
    tally: RefCell<Tally>,
    idle: RefCell<Vec<Connection>>,
    started: Instant,
    sent: RefCell<u64>,
    /// The generator's share of a CPU while sending, in the open loop. Accepted requests finish much later.
    own_share: RefCell<Option<f64>>,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let bodies = Bodies::new(args.body, &args.model, args.tokens, args.stream, args.seed);
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: ",
        args.address
    );
    let before = args.watch.map(cpu_seconds).transpose()?;
    let run = Rc::new(Run {
        args,
        head,
        bodies: RefCell::new(bodies),
        tally: RefCell::default(),
        idle: RefCell::default(),
        started: Instant::now(),
        sent: RefCell::new(0),
        own_share: RefCell::default(),
    });
    let local = LocalSet::new();
    match run.args.rate {
        Some(rate) => local.run_until(open_loop(&run, rate)).await,
        None => local.run_until(closed_loop(&run)).await,
    }
    let wall = run.started.elapsed().as_secs_f64();
    let own = run.own_share.take().unwrap_or(cpu_seconds(std::process::id())? / wall);
    let watched = run.args.watch.map(cpu_seconds).transpose()?.zip(before).map(|(now, before)| now - before);
    run.tally.take().print(&run.args, wall, own, watched);
    Ok(())
}

async fn closed_loop(run: &Rc<Run>) {
    let clients = (0..run.args.concurrency).map(|_| {
        let run = Rc::clone(run);
        tokio::task::spawn_local(async move {
            while run.continues() {
                run.send_one().await;
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        // The panic of a client is printed to stderr. Its remaining requests are missing in the count.
        let _ = client.await;
    }
}

async fn open_loop(run: &Rc<Run>, rate: f64) {
    let mut requests = Vec::new();
    let mut due = 0u64;
    while run.continues() {
        let at = run.started + Duration::from_secs_f64(due as f64 / rate);
        tokio::time::sleep_until(at.into()).await;
        // Timers are coarse: send all requests that are due.
        while due as f64 / rate <= run.started.elapsed().as_secs_f64() && run.continues() {
            let run = Rc::clone(run);
            requests.push(tokio::task::spawn_local(async move { run.send_one().await }));
            due += 1;
        }
    }
    let own = cpu_seconds(std::process::id()).ok();
    *run.own_share.borrow_mut() = own.map(|own| own / run.started.elapsed().as_secs_f64());
    for request in requests {
        // As above.
        let _ = request.await;
    }
}

impl Run {
    fn continues(&self) -> bool {
        match self.args.requests {
            Some(max) => {
                let enough = |limit| self.started.elapsed().as_secs_f64() >= limit;
                *self.sent.borrow() < max && !self.args.at_most.is_some_and(enough)
            }
            None => self.started.elapsed().as_secs_f64() < self.args.seconds,
        }
    }

    /// Sends one request and records its result.
    async fn send_one(&self) {
        *self.sent.borrow_mut() += 1;
        let mut connection = self.idle.borrow_mut().pop().unwrap_or_default();
        connection.fill(&self.head, &mut self.bodies.borrow_mut());
        let start = Instant::now();
        let outcome = connection.exchange(self.args.address).await;
        let micros = u32::try_from(start.elapsed().as_micros()).unwrap_or(u32::MAX);
        let mut tally = self.tally.borrow_mut();
        match outcome {
            Ok(Outcome::Finished) => {
                tally.finished.push(micros);
                let counted = self.args.warm..self.args.seconds;
                tally.in_time += u64::from(counted.contains(&self.started.elapsed().as_secs_f64()));
                self.idle.borrow_mut().push(connection);
            }
            Ok(Outcome::Refused { retry_after }) => {
                tally.refused.push(micros);
                tally.no_retry_after += u64::from(!retry_after);
                self.idle.borrow_mut().push(connection);
            }
            Err(error) => {
                tally.failed += 1;
                tally.first_failure.get_or_insert_with(|| format!("{error:#}"));
            }
        }
        if let (Some(every), Some(pid)) = (self.args.memory_every, self.args.watch) {
            let done = tally.finished.len() as u64;
            if done.is_multiple_of(every)
                && let Ok(bytes) = resident_bytes(pid)
            {
                tally.memory.push((done, bytes));
            }
        }
    }
}

impl Tally {
    fn print(mut self, args: &Args, wall: f64, own: f64, watched: Option<f64>) {
        self.finished.sort_unstable();
        self.refused.sort_unstable();
        let done = self.finished.len() as f64;
        let answer = serde_json::json!({
            "body": format!("{:?}", args.body).to_lowercase(),
            "stream": args.stream,
            "concurrency": args.concurrency,
            "rate": args.rate,
            "finished": self.finished.len(),
            "in_time": self.in_time,
            "refused": self.refused.len(),
            "no_retry_after": self.no_retry_after,
            "failed": self.failed,
            "first_failure": self.first_failure,
            "seconds": wall,
            "per_second": done / wall,
            "p50_us": quantile(&self.finished, 0.5),
            "p99_us": quantile(&self.finished, 0.99),
            "refused_p50_us": quantile(&self.refused, 0.5),
            "refused_p99_us": quantile(&self.refused, 0.99),
            "refused_max_us": self.refused.last(),
            "generator_cpu": own,
            "watched_cpu_us": watched.map(|seconds| seconds * 1e6 / done),
            "memory": self.memory,
        });
        println!("{answer}");
    }
}

fn quantile(sorted: &[u32], share: f64) -> Option<u32> {
    sorted.get(((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1))).copied()
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Finished,
    Refused { retry_after: bool },
}

/// A connection, opened at first use, and its buffers.
#[derive(Default)]
struct Connection {
    stream: Option<TcpStream>,
    body: String,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl Connection {
    fn fill(&mut self, head: &str, bodies: &mut Bodies) {
        self.body.clear();
        bodies.next(&mut self.body);
        self.request.clear();
        self.request.extend_from_slice(head.as_bytes());
        self.request.extend_from_slice(self.body.len().to_string().as_bytes());
        self.request.extend_from_slice(b"\r\n\r\n");
        self.request.extend_from_slice(self.body.as_bytes());
    }

    /// A server may close a persistent connection while the next request is sent. As in HTTP clients, that
    /// request is sent once more on a new connection.
    async fn exchange(&mut self, address: SocketAddr) -> anyhow::Result<Outcome> {
        let reused = self.stream.is_some();
        self.answer.clear();
        match self.attempt(address).await {
            Err(_) if reused && self.answer.is_empty() => self.attempt(address).await,
            outcome => outcome,
        }
    }

    async fn attempt(&mut self, address: SocketAddr) -> anyhow::Result<Outcome> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(address).await.context("connecting")?;
                stream.set_nodelay(true)?;
                stream
            }
        };
        stream.write_all(&self.request).await.context("sending")?;
        let head = loop {
            if let Some(end) = find(&self.answer, b"\r\n\r\n") {
                break end + 4;
            }
            more(&mut stream, &mut self.answer).await?;
        };
        let lower = self.answer.get(..head).unwrap_or_default().to_ascii_lowercase();
        let status = lower.get(9..12).unwrap_or_default().to_vec();
        let streamed = find(&lower, b"transfer-encoding: chunked").is_some();
        if streamed {
            while !self.answer.ends_with(b"0\r\n\r\n") {
                more(&mut stream, &mut self.answer).await?;
            }
        } else {
            let length = content_length(&lower).context("neither a length nor chunks")?;
            while self.answer.len() < head + length {
                more(&mut stream, &mut self.answer).await?;
            }
        }
        if find(&lower, b"connection: close").is_none() {
            self.stream = Some(stream);
        }
        match status.as_slice() {
            b"200" => {
                let whole = !streamed || find(&self.answer, b"data: [DONE]").is_some();
                if !whole {
                    bail!("a stream that does not end in [DONE]");
                }
                Ok(Outcome::Finished)
            }
            b"429" => Ok(Outcome::Refused { retry_after: find(&lower, b"\r\nretry-after:").is_some() }),
            _ => bail!("{}", String::from_utf8_lossy(&self.answer)),
        }
    }
}

async fn more(stream: &mut TcpStream, answer: &mut Vec<u8>) -> anyhow::Result<()> {
    // Routers that leave Nagle's algorithm on wait for an acknowledgement between two writes. The kernel
    // would delay it by 40 ms, which is not the router's work.
    stream.set_quickack(true)?;
    answer.reserve(16 << 10);
    if stream.read_buf(answer).await.context("reading")? == 0 {
        bail!("cut off after {} bytes", answer.len());
    }
    Ok(())
}

fn find(text: &[u8], pattern: &[u8]) -> Option<usize> {
    text.windows(pattern.len()).position(|window| window == pattern)
}

fn content_length(head: &[u8]) -> Option<usize> {
    const NAME: &[u8] = b"\r\ncontent-length:";
    let (_, rest) = head.split_at_checked(find(head, NAME)? + NAME.len())?;
    let line = rest.split(|byte| *byte == b'\r').next()?;
    std::str::from_utf8(line).ok()?.trim().parse().ok()
}

/// User and system time of a process, including exited threads.
fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    /// Unit of `/proc`, on every Linux that Rust supports.
    const TICKS_PER_SECOND: f64 = 100.0;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name before the parenthesis may contain spaces.
    let (_, fields) = text.rsplit_once(')').context("stat")?;
    let ticks = fields.split(' ').skip(12).take(2).map(str::parse::<u64>);
    let ticks: u64 = ticks.sum::<Result<_, _>>().context("stat")?;
    Ok(ticks as f64 / TICKS_PER_SECOND)
}

fn resident_bytes(pid: u32) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm"))?;
    let pages: u64 = text.split(' ').nth(1).and_then(|n| n.parse().ok()).context("statm")?;
    Ok(pages * 4096)
}
