//! An OpenAI server that sends the same text for every chat, at minimal cost.

use anyhow::Context;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::net::SocketAddr;
use tokio::net::TcpListener;

/// Options of the server.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:0")]
    http: SocketAddr,
    /// The model's name.
    #[arg(long, default_value = "smollm2-135m")]
    model: String,
    /// Tokens of an answer.
    #[arg(long, default_value_t = 16)]
    tokens: usize,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let listener = TcpListener::bind(args.http).await.context("binding")?;
    println!("{}", listener.local_addr()?);
    let answers: &'static Answers = Box::leak(Box::new(Answers::new(&args)));
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(async move {
            let service = service_fn(|request| answers.to(request));
            // The client reports broken connections.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// Prepared bodies.
struct Answers {
    models: Bytes,
    whole: Bytes,
    streamed: Bytes,
}

impl Answers {
    fn new(args: &Args) -> Self {
        let Args { model, tokens, .. } = args;
        let (text, usage) = text_and_usage(*tokens);
        let whole = format!(
            r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"{model}","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"logprobs":null,"finish_reason":"length"}}],"usage":{usage}}}"#
        );
        let models = format!(
            r#"{{"object":"list","data":[{{"id":"{model}","object":"model","created":1,"owned_by":"nobody"}}],"model_path":"{model}","status":"ready"}}"#
        );
        Self { models: models.into(), whole: whole.into(), streamed: streamed_answer(model, *tokens) }
    }

    async fn to(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        let (kind, body) = match *request.method() {
            Method::POST => {
                let streams = match request.into_body().collect().await {
                    // The generator writes this at the end of its bodies; routers may rewrite them.
                    Ok(body) => names_stream(&body.to_bytes(), [b"\"stream\":true", b"\"stream\": true"]),
                    Err(_) => false,
                };
                if streams {
                    ("text/event-stream", &self.streamed)
                } else {
                    ("application/json", &self.whole)
                }
            }
            _ => ("application/json", &self.models),
        };
        let mut response = Response::new(Full::new(body.clone()));
        response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
        Ok(response)
    }
}

/// The text of an answer, and its usage.
fn text_and_usage(tokens: usize) -> (String, String) {
    let all = 100 + tokens;
    let usage = format!(r#"{{"prompt_tokens":100,"completion_tokens":{tokens},"total_tokens":{all}}}"#);
    (" word".repeat(tokens), usage)
}

/// An answer of `tokens` tokens as events.
pub(super) fn streamed_answer(model: &str, tokens: usize) -> Bytes {
    let (text, usage) = text_and_usage(tokens);
    let chunk = |delta: &str, finish: &str| {
        format!(
            "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"{model}\",\
             \"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
        )
    };
    let streamed = [
        chunk(r#"{"role":"assistant","content":""}"#, "null"),
        chunk(&format!(r#"{{"content":"{text}"}}"#), "null"),
        chunk("{}", r#""length""#),
        format!(
            "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"{model}\",\
             \"choices\":[],\"usage\":{usage}}}\n\ndata: [DONE]\n\n"
        ),
    ];
    streamed.concat().into()
}

/// Whether one of `needles` occurs near the end or the beginning of `body`.
fn names_stream(body: &[u8], needles: [&[u8]; 2]) -> bool {
    const NEAR: usize = 512;
    let (_, end) = body.split_at(body.len().saturating_sub(NEAR));
    let (begin, _) = body.split_at(body.len().min(NEAR));
    needles
        .iter()
        .any(|needle| [end, begin].iter().any(|part| part.windows(needle.len()).any(|w| w == *needle)))
}
