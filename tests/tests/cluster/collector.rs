//! A trace collector like OpenTelemetry's: accepts OTLP over HTTP or HTTPS during a test.

use kvasir_cluster_tests::{binary, wait};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value as Attribute};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex};

/// A span and the node that recorded it.
#[derive(Debug, Clone)]
pub(crate) struct RecordedSpan {
    pub(crate) node: String,
    pub(crate) span: Span,
}

/// A trace collector.
pub(crate) struct Collector {
    scheme: &'static str,
    address: SocketAddr,
    exports: Arc<Exports>,
}

#[derive(Default)]
struct Exports {
    spans: Mutex<Vec<RecordedSpan>>,
    /// All bodies, concatenated.
    raw: Mutex<Vec<u8>>,
    /// Whether responses are held back.
    hangs: Mutex<bool>,
    answers: Condvar,
}

impl Collector {
    /// A collector that accepts everything.
    pub(crate) fn start() -> Self {
        Self::listen(false, None)
    }

    /// A collector at `https://`, and its self-signed certificate as PEM.
    pub(crate) fn with_certificate() -> (Self, String) {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(["127.0.0.1".to_owned()]).unwrap().self_signed(&key).unwrap();
        let private = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], private)
            .unwrap();
        (Self::listen(false, Some(Arc::new(config))), certificate.pem())
    }

    /// A collector that accepts requests and sends no response until [`Self::answer`] is called.
    pub(crate) fn that_hangs() -> Self {
        Self::listen(true, None)
    }

    fn listen(hangs: bool, tls: Option<Arc<ServerConfig>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let exports = Arc::new(Exports { hangs: Mutex::new(hangs), ..Exports::default() });
        let into = Arc::clone(&exports);
        let scheme = if tls.is_some() { "https" } else { "http" };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (into, tls) = (Arc::clone(&into), tls.clone());
                std::thread::spawn(move || match tls {
                    Some(tls) => into.serve(StreamOwned::new(ServerConnection::new(tls).unwrap(), stream)),
                    None => into.serve(stream),
                });
            }
        });
        Self { scheme, address, exports }
    }

    /// Sends responses from now on.
    pub(crate) fn answer(&self) {
        *self.exports.hangs.lock().unwrap() = false;
        self.exports.answers.notify_all();
    }

    /// Value of `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub(crate) fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// All spans so far.
    pub(crate) fn spans(&self) -> Vec<RecordedSpan> {
        self.exports.spans.lock().unwrap().clone()
    }

    /// All bytes so far.
    pub(crate) fn raw(&self) -> Vec<u8> {
        self.exports.raw.lock().unwrap().clone()
    }

    /// The spans of a trace, once `enough` returns true.
    pub(crate) fn trace(&self, trace: &[u8], enough: impl Fn(&[RecordedSpan]) -> bool) -> Vec<RecordedSpan> {
        wait::until("the trace has been exported", binary::NODE_TIMEOUT, || {
            let all = self.exports.spans.lock().unwrap();
            let of_trace: Vec<RecordedSpan> =
                all.iter().filter(|recorded| recorded.span.trace_id == trace).cloned().collect();
            enough(&of_trace).then_some(of_trace)
        })
        .unwrap()
    }
}

impl Exports {
    /// Reads exports until the connection ends.
    fn serve(&self, stream: impl Read + Write) {
        let mut reader = BufReader::new(stream);
        loop {
            let (mut length, mut line) = (0, String::new());
            loop {
                line.clear();
                if reader.read_line(&mut line).unwrap_or(0) == 0 {
                    return;
                }
                let header = line.trim_end().to_ascii_lowercase();
                if let Some(value) = header.strip_prefix("content-length: ") {
                    length = value.parse().unwrap();
                }
                if header.is_empty() {
                    break;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            drop(self.answers.wait_while(self.hangs.lock().unwrap(), |hangs| *hangs).unwrap());
            let export = ExportTraceServiceRequest::decode(body.as_slice()).unwrap();
            self.raw.lock().unwrap().extend(body);
            for of_node in export.resource_spans {
                let node = text(&of_node.resource.unwrap().attributes, "service.instance.id").unwrap();
                let spans = of_node.scope_spans.into_iter().flat_map(|scope| scope.spans);
                self.spans
                    .lock()
                    .unwrap()
                    .extend(spans.map(|span| RecordedSpan { node: node.clone(), span }));
            }
            let answer =
                "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n";
            if reader.get_mut().write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    }
}

/// An attribute's value.
pub(crate) fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Attribute> {
    attributes.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.as_ref()
}

/// An attribute that is a text.
pub(crate) fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    match value(attributes, key)? {
        Attribute::StringValue(text) => Some(text.clone()),
        other => panic!("{key} is {other:?}"),
    }
}
