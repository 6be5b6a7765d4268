//! `kvasir stage`: a worker that serves a layer range for a replica led by another process.

use crate::config::ByteSize;
use crate::identity;
use crate::local::EngineArgs;
use crate::node::{self, StopSignals};
use crate::otlp;
use crate::shipped;
use crate::spec::SpecArg;
use pipeline::weight_distribution::ShippingConfig;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use worker::load::EngineOptions;
use worker::rank_server::{StageConfig, StageService};

/// Runs one stage of a replica: a layer range of a model, for a first stage such as `kvasir logits --shards 2`
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  kvasir stage smollm2-135m --identity ./w1 --quic 10.0.0.2:7001\n\n\
    Once it listens it prints one line of JSON with its address on stdout; logs go to stderr. The first stage assigns its \
    layers. Threads and types are set here; the numeric class must equal the first stage's.")]
pub(crate) struct Stage {
    /// Catalog name, https:// or hf:// address, or path to a .gguf or a Hugging Face folder; with --from, a name or
    /// blake3:HEX of a model that other workers have
    model: String,
    /// Workers that have the model or parts of it, separated by commas
    #[arg(long, value_name = "HOST:PORT,..", env = "KVASIR_FROM", value_delimiter = ',')]
    from: Vec<String>,
    /// Limit of this host's shard store, which keeps models received from other workers [default: 256GiB]
    #[arg(long, value_name = "SIZE", env = "KVASIR_SHARD_BYTES")]
    shard_bytes: Option<ByteSize>,
    /// Sockets that receive a model from other workers, each with a connection to every source, so that several CPUs
    /// share the work [default: computed from the CPUs]
    #[arg(long, value_name = "N", env = "KVASIR_SHIPPING_LANES", value_parser = clap::value_parser!(u8).range(1..=shipped::MAX_LANES as i64))]
    shipping_lanes: Option<u8>,
    /// Directory with node.crt, node.key and ca.crt, as created by `kvasir ca issue`
    #[arg(long, value_name = "DIR", env = "KVASIR_IDENTITY")]
    identity: PathBuf,
    /// UDP address that other stages connect to; port 0 selects a free port
    #[arg(long, value_name = "ADDR", env = "KVASIR_QUIC", default_value = "127.0.0.1:7001", value_parser = crate::config::listen)]
    quic: SocketAddr,
    /// OTLP collector that receives the spans of requests, such as http://127.0.0.1:4318; without it nothing is traced
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp_endpoint: Option<String>,
    /// PEM file of certificates that verify a collector at https:// [default: those that browsers trust, and SSL_CERT_FILE]
    #[arg(long, value_name = "FILE", env = "OTEL_EXPORTER_OTLP_CERTIFICATE")]
    otlp_certificate: Option<PathBuf>,
    /// Drafter of speculative decoding if this is the last stage; equal to the first stage's. Only draft-mtp:MODEL has
    /// an effect here; it is not needed if --from names workers that have that file
    #[arg(long, value_name = "SPEC", default_value = "off", env = "KVASIR_SPEC")]
    spec: SpecArg,
    #[command(flatten)]
    engine: EngineArgs,
}

/// The line printed on stdout when the stage listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StageAnnouncement {
    pub(crate) id: String,
    pub(crate) pid: u32,
    pub(crate) quic: SocketAddr,
}

impl Stage {
    /// Runs until a stop signal.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let identity = identity::identity(Some(&self.identity))?;
        let own = identity.clone();
        let (model, shipping) =
            shipped::resolve(&self.model, &self.from, self.shard_bytes, self.quic, || Ok(own))?;
        let lanes = self.shipping_lanes.map_or_else(|| shipped::lanes(1).value, usize::from);
        let config = StageConfig {
            model_path: Some(model.path),
            listen: self.quic,
            engine: EngineOptions {
                packed: shipping.store.clone(),
                speculative_method: self.spec.speculative_method()?,
                ..self.engine.options()?
            },
            shipping: ShippingConfig { lanes, ..shipping },
        };
        let node = &identity.name().node;
        let (endpoint, certificates) = (self.otlp_endpoint.as_deref(), self.otlp_certificate.as_deref());
        let _exporting = otlp::start(endpoint, certificates, None, "kvasir-worker", node)?;
        let runtime = node::io_runtime(lanes)?;
        runtime.block_on(async {
            let mut signals = StopSignals::listen()?;
            identity::keep_renewed(&identity, &self.identity);
            let service = StageService::start(config, &identity)?;
            let announcement = StageAnnouncement {
                id: identity.name().node.to_string(),
                pid: std::process::id(),
                quic: service.quic_address(),
            };
            node::announce(serde_json::to_string(&announcement)? + "\n")?;
            signals.next().await;
            service.stop().await;
            Ok(())
        })
    }
}
