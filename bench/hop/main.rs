//! Parts of the router-hop benchmark: workers and servers that compute nothing, and a cheap load generator.
//! `bench/hop/run.py` and `bench/overload/run.py` combine them.

mod bodies;
mod load;
mod parts;
mod relay;
mod server;
mod vllm;
mod worker;

use clap::Parser;

/// The same allocator as `kvasir`: a dummy worker stands for one of its processes.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(name = "hop", about = "Dummy backends and a load generator")]
enum Command {
    /// A worker of a coordinator, over QUIC, that answers without computing.
    Worker(worker::Args),
    /// An OpenAI server that answers without computing.
    Server(server::Args),
    /// A vLLM server that answers without computing.
    Vllm(vllm::Args),
    /// A relay from HTTP to dummy workers that does nothing else: the lower bound for any relay.
    Relay(relay::Args),
    /// Send requests and print their latencies as one line of JSON.
    Load(load::Args),
    /// Run the coordinator's steps from a body to a placed request in this process, and time each.
    Parts(parts::Args),
}

fn main() -> anyhow::Result<()> {
    let command = Command::parse();
    // One thread each: the router between them is measured, on the remaining cores.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match command {
        Command::Worker(args) => runtime.block_on(worker::run(args)),
        Command::Server(args) => runtime.block_on(server::run(args)),
        Command::Vllm(args) => runtime.block_on(vllm::run(args)),
        Command::Relay(args) => runtime.block_on(relay::run(args)),
        Command::Load(args) => runtime.block_on(load::run(args)),
        Command::Parts(args) => parts::run(args),
    }
}
