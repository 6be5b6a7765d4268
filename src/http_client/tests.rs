use super::*;
use hub::catalog::{Address, CatalogError, Store, Url, Verification};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::Write;
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};

/// A server in a thread. It passes each connection's request to `answer` and sends the returned bytes
/// unchanged.
fn serve(answer: impl Fn(usize, &str) -> Vec<u8> + Send + 'static) -> (u16, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (requests_tx, requests) = channel();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let request = head_of(&mut stream);
            let _ = stream.write_all(&answer(number, &request));
            // The test may have ended.
            let _ = requests_tx.send(request);
        }
    });
    (port, requests)
}

fn head_of(stream: &mut impl Read) -> String {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|got| got == 1) {
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

fn client(variables: &[(&str, &str)]) -> Client {
    let variable = |name: &str| {
        let found = variables.iter().find(|(n, _)| *n == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Client::new(variable).unwrap()
}

fn request(url: &str) -> Request {
    Request { url: Url::parse(url).unwrap(), from: None, if_range: None, bearer: None }
}

fn text(response: Response) -> io::Result<String> {
    let mut body = response.body;
    let mut text = String::new();
    body.read_to_string(&mut text).map(|_| text)
}

#[test]
fn a_request_is_written_and_its_answer_is_read() {
    let answer =
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 206 Partial\r\nETag: \"a\"\r\nContent-Length: 3\r\n\r\nabc";
    let (port, requests) = serve(move |_, _| answer.to_vec());
    let url = format!("http://127.0.0.1:{port}/x?y");
    let ranged = Request {
        from: Some(7),
        if_range: Some("\"a\"".into()),
        bearer: Some("token".into()),
        ..request(&url)
    };
    let response = client(&[("http_proxy", "nobody:1")]).get(&ranged).unwrap();
    assert_eq!((response.head.status, response.head.header("etag")), (206, Some("\"a\"")));
    assert_eq!(text(response).unwrap(), "abc");
    let received = requests.recv().unwrap();
    assert!(received.starts_with("GET /x?y HTTP/1.1\r\n"), "{received}");
    for header in [
        &format!("Host: 127.0.0.1:{port}"),
        "Range: bytes=7-",
        "If-Range: \"a\"",
        "Authorization: Bearer token",
    ] {
        assert!(received.contains(&format!("{header}\r\n")), "{header} in {received}");
    }
}

#[test]
fn an_invalid_response_is_an_error() {
    for (answer, kind) in [
        (&b"SSH-2.0-x\r\n\r\n"[..], ErrorKind::InvalidData),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n", ErrorKind::UnexpectedEof),
        (b"", ErrorKind::UnexpectedEof),
    ] {
        let (port, _requests) = serve(move |_, _| answer.to_vec());
        let error = client(&[]).get(&request(&format!("http://127.0.0.1:{port}/"))).err().unwrap();
        assert_eq!(error.kind(), kind, "{error}");
    }
    let (port, _requests) = serve(|_, _| [b"HTTP/1.1 200 OK\r\n", &b"A: b\r\n".repeat(20_000)[..]].concat());
    let error = client(&[]).get(&request(&format!("http://127.0.0.1:{port}/"))).err().unwrap();
    assert!(error.to_string().contains("too large"), "{error}");
}

/// The body of a response that consists of `head` and `body`.
fn body(head: &str, body: &'static [u8]) -> Result<String, ErrorKind> {
    let answer = [format!("HTTP/1.1 {head}\r\n\r\n").as_bytes(), body].concat();
    let (port, _requests) = serve(move |_, _| answer.clone());
    let response = client(&[]).get(&request(&format!("http://127.0.0.1:{port}/")));
    response.and_then(text).map_err(|error| error.kind())
}

#[test]
fn a_body_ends_at_its_declared_length() {
    let long = "200 OK\r\nContent-Length: 5";
    assert_eq!(body(long, b"hello world"), Ok("hello".into()));
    assert_eq!(body("200 OK\r\nContent-Length: 0", b"x"), Ok(String::new()));
    assert_eq!(body("304 Not Modified", b""), Ok(String::new()));
    assert_eq!(body(long, b"hell"), Err(ErrorKind::UnexpectedEof));
    assert_eq!(body("200 OK", b"hello"), Err(ErrorKind::InvalidData));
    assert_eq!(body("200 OK\r\nContent-Length: -7", b"hello"), Err(ErrorKind::InvalidData));
    for way in ["gzip", "gzip, chunked"] {
        let head = format!("200 OK\r\nTransfer-Encoding: {way}");
        assert_eq!(body(&head, b"5\r\nhello\r\n0\r\n\r\n"), Err(ErrorKind::InvalidData), "{way}");
    }
}

#[test]
fn chunks_are_put_together() {
    let chunked = |bytes| body("200 OK\r\nTransfer-Encoding: Chunked", bytes);
    assert_eq!(chunked(b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nA: b\r\n\r\nmore"), Ok("hello world".into()));
    for cut in [&b"5\r\nhel"[..], b"5\r\nhello\r\n", b"0\r\n"] {
        assert_eq!(chunked(cut), Err(ErrorKind::UnexpectedEof), "{cut:?}");
    }
    for wrong in [&b"5\r\nhello world\r\n"[..], b"five\r\n", &[b'1'; 5000]] {
        let kind = chunked(wrong).unwrap_err();
        assert!(matches!(kind, ErrorKind::InvalidData | ErrorKind::InvalidInput), "{kind:?} for {wrong:?}");
    }
}

#[test]
fn a_server_that_falls_silent_is_left() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let impatient = Client { silence: Duration::from_millis(50), ..client(&[]) };
    let error = impatient.get(&request(&url)).err().unwrap();
    assert_eq!(
        (error.kind(), error.to_string().as_str()),
        (ErrorKind::TimedOut, "no data was received in time")
    );
    drop(listener);
}

#[test]
fn a_proxy_is_asked_for_what_lies_behind_it() {
    let (port, requests) = serve(|_, _| b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".to_vec());
    let proxy = format!("http://me:pass@127.0.0.1:{port}");
    let response = client(&[("http_proxy", &proxy)]).get(&request("http://behind.example/x")).unwrap();
    assert_eq!(text(response).unwrap(), "hi");
    let received = requests.recv().unwrap();
    assert!(
        received.starts_with("GET http://behind.example/x HTTP/1.1\r\nHost: behind.example\r\n"),
        "{received}"
    );
    assert!(received.contains("Proxy-Authorization: Basic bWU6cGFzcw==\r\n"), "{received}");
    let (port, requests) = serve(|_, _| b"HTTP/1.1 407 Who are you\r\n\r\n".to_vec());
    let proxy = format!("http://127.0.0.1:{port}");
    let error = client(&[("https_proxy", &proxy)]).get(&request("https://behind.example/x")).err().unwrap();
    assert!(error.to_string().ends_with("responded with status 407"), "{error}");
    assert!(requests.recv().unwrap().starts_with("CONNECT behind.example:443 HTTP/1.1\r\n"));
}

#[test]
fn tls_wants_a_certificate_that_is_trusted_also_behind_a_proxy() {
    let dir = tempfile::tempdir().unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["127.0.0.1".to_owned(), "behind.example".to_owned()])
        .unwrap()
        .self_signed(&key)
        .unwrap();
    let pem = dir.path().join("ca.pem");
    std::fs::write(&pem, certificate.pem()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let private = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], private)
        .unwrap();
    let config = Arc::new(config);
    // A server, or a proxy with the server behind it.
    let serve_tls = |tunnel: bool| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let config = Arc::clone(&config);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                if tunnel {
                    let received = head_of(&mut stream);
                    assert!(received.starts_with("CONNECT behind.example:443 HTTP/1.1\r\n"), "{received}");
                    stream.write_all(b"HTTP/1.1 200 Connected\r\n\r\n").unwrap();
                }
                let session = ServerConnection::new(Arc::clone(&config)).unwrap();
                let mut stream = StreamOwned::new(session, stream);
                if !head_of(&mut stream).is_empty() {
                    // Closed without close_notify after the full length: the body is complete.
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nGGUFhi");
                }
            }
        });
        address
    };
    let url = format!("https://{}/", serve_tls(false));
    let error = client(&[]).get(&request(&url)).err().unwrap();
    assert!(error.kind() == ErrorKind::InvalidData && error.to_string().contains("certificate"), "{error}");
    let proxy = format!("http://{}", serve_tls(true));
    let trusting = client(&[("SSL_CERT_FILE", pem.to_str().unwrap()), ("https_proxy", &proxy)]);
    assert_eq!(text(trusting.get(&request(&url)).unwrap()).unwrap(), "GGUFhi");
    let network = Network { http: Box::new(trusting), hub: Hub::default(), plain: PlainHttp::Loopback };
    let address = Address::parse("https://behind.example/m.gguf").unwrap();
    let path = Store::at(dir.path()).fetch(&address, &[], &network, &mut ()).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), b"GGUFhi");
    std::fs::write(&pem, "none").unwrap();
    for wrong in ["/no/such.pem", pem.to_str().unwrap()] {
        assert!(Client::new(|name| (name == "SSL_CERT_FILE").then(|| wrong.to_owned())).is_err(), "{wrong}");
    }
}

#[test]
fn a_model_comes_through_cuts_redirects_and_chunks() {
    let body: Vec<u8> = b"GGUF".iter().copied().chain((0..200_000u32).map(|at| (at % 251) as u8)).collect();
    let sent = body.clone();
    let (port, requests) = serve(move |number, request| {
        let head =
            |status: &str, more: &str| format!("HTTP/1.1 {status}\r\nETag: \"a\"\r\n{more}\r\n").into_bytes();
        let length = sent.len();
        match number {
            0 => head("302 Found", "Location: /real.gguf\r\n"),
            1 => [head("200 OK", &format!("Content-Length: {length}\r\n")), sent[..50_000].to_vec()].concat(),
            _ => {
                let from = request
                    .split("Range: bytes=")
                    .nth(1)
                    .and_then(|rest| rest.split('-').next()?.parse().ok());
                let from: usize = from.unwrap_or(0);
                let range = format!("Content-Range: bytes {from}-{}/{length}\r\n", length - 1);
                let rest = &sent[from..];
                let chunk = [format!("{:x}\r\n", rest.len()).as_bytes(), rest, b"\r\n0\r\n\r\n"].concat();
                [head("206 Partial", &format!("{range}Transfer-Encoding: chunked\r\n")), chunk].concat()
            }
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let store = Store::at(dir.path());
    struct Hasty(Client);
    impl Http for Hasty {
        fn get(&self, request: &Request) -> io::Result<Response> {
            self.0.get(request)
        }
        fn pause(&self, _: Duration) {}
    }
    let network =
        Network { http: Box::new(Hasty(client(&[]))), hub: Hub::default(), plain: PlainHttp::Loopback };
    let address = Address::parse(&format!("http://127.0.0.1:{port}/m.gguf")).unwrap();
    let path = store.fetch(&address, &[], &network, &mut ()).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), body);
    assert_eq!(store.verification(&path), Some(Verification::Unverified));
    let received: Vec<String> = requests.try_iter().collect();
    assert!(received.iter().any(|request| request.contains("If-Range: \"a\"\r\n")), "{received:?}");
    let elsewhere = Address::parse("http://models.example/m.gguf").unwrap();
    let error = store.fetch(&elsewhere, &[], &network, &mut ()).unwrap_err();
    assert!(matches!(error, hub::Error::Catalog(CatalogError::Download { .. })), "{error}");
}
