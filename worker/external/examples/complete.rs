//! Sends one prompt of token ids to an engine and prints every event.
//!
//! `cargo run -p kvasir-external --example complete -- llama-server http://127.0.0.1:8080 1,2,3 [MAX_TOKENS [LOGPROBS]]`

use kvasir_external::{EngineConfig, EngineKind, EngineOptions, EngineRequest, HttpLimits, connect_engine};
use proto::message::{Sampling, Stop};
use std::error::Error;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, url, prompt, rest @ ..] = arguments.as_slice() else {
        return Err("arguments: ENGINE URL TOKEN_IDS [MAX_TOKENS [LOGPROBS]]".into());
    };
    let prompt: Vec<u32> = prompt.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let engine = connect_engine(EngineConfig {
        kind: EngineKind::from_name(kind).ok_or("the engines are vllm, sglang, llama-server")?,
        url: url.clone(),
        api_key: None,
        model: String::new(),
        options: EngineOptions::default(),
        limits: HttpLimits::default(),
    })?;
    engine.health().await?;
    println!("{:?}\n{:?}", engine.info().await?, engine.load().await?);
    let request = EngineRequest {
        prompt: prompt.into(),
        sampling: Sampling {
            logprobs: rest.get(1).map(|count| count.parse()).transpose()?,
            ..Sampling::default()
        },
        stop: Stop { max_tokens: rest.first().map_or(Ok(8), |count| count.parse())?, ..Stop::default() },
        ..EngineRequest::default()
    };
    let mut answer = engine.submit(request).await?;
    while let Some(event) = answer.next().await {
        println!("{:?}", event?);
    }
    println!("{:?}", engine.load().await?);
    Ok(())
}
