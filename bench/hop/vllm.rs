//! A vLLM server that sends the same tokens for every completion, at minimal cost.

use anyhow::Context;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::net::SocketAddr;
use tokio::net::TcpListener;

const MAX_MODEL_LEN: u32 = 1 << 20;
/// The metrics that a worker reads.
const METRICS: &str = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"65536\"} 1\n\
                       vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n";
/// A token and its text.
const TOKEN: (u32, &str) = (1, " word");

/// Options of the server.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:0")]
    http: SocketAddr,
    /// Tokens of an answer, if the request allows as many.
    #[arg(long, default_value_t = 16)]
    tokens: usize,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let listener = TcpListener::bind(args.http).await.context("binding")?;
    println!("{}", listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(async move {
            let service = service_fn(|request| answer(request, args.tokens));
            // The client reports broken connections.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(request: Request<Incoming>, tokens: usize) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let (kind, body) = match (head.method, head.uri.path()) {
        (Method::POST, "/v1/completions") => {
            let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            ("text/event-stream", completion(&body, tokens))
        }
        (_, "/health") => ("text/plain", String::new()),
        (_, "/version") => ("application/json", r#"{"version":"0.0"}"#.into()),
        (_, "/v1/models") => (
            "application/json",
            format!(r#"{{"object":"list","data":[{{"id":"dummy","max_model_len":{MAX_MODEL_LEN}}}]}}"#),
        ),
        (_, "/metrics") => ("text/plain", METRICS.into()),
        _ => {
            let mut missing = Response::new(Full::default());
            *missing.status_mut() = StatusCode::NOT_FOUND;
            return Ok(missing);
        }
    };
    let mut response = Response::new(Full::new(body.into()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

/// A streamed completion: all tokens at once, then the usage.
fn completion(body: &[u8], tokens: usize) -> String {
    let tokens = number_after(body, b"\"max_tokens\":").map_or(tokens, |most| most.min(tokens));
    let prompt = after(body, b"\"prompt\":[").map_or(0, |rest| {
        let ids = rest.split(|byte| *byte == b']').next().unwrap_or_default();
        1 + ids.iter().filter(|byte| **byte == b',').count()
    });
    let (id, word) = TOKEN;
    let ids = vec![id.to_string(); tokens].join(",");
    let text = word.repeat(tokens);
    let head = r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"dummy","choices":["#;
    format!(
        "data: {head}{{\"index\":0,\"text\":\"{text}\",\"token_ids\":[{ids}],\"logprobs\":null,\
         \"finish_reason\":\"length\",\"stop_reason\":null}}]}}\n\n\
         data: {head}],\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{tokens},\
         \"prompt_tokens_details\":{{\"cached_tokens\":0}}}}}}\n\ndata: [DONE]\n\n"
    )
}

fn after<'a>(body: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let at = body.windows(name.len()).position(|window| window == name)?;
    body.get(at + name.len()..)
}

fn number_after(body: &[u8], name: &[u8]) -> Option<usize> {
    let digits = after(body, name)?.split(|byte| !byte.is_ascii_digit()).next()?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}
