use super::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// A client that also reaches this machine.
fn client(hosts: &[&str]) -> ImageUrls {
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    ImageUrls { reachable: |_| true, ..ImageUrls::new(&hosts).unwrap().unwrap() }
}

/// A server that answers each request by what `answer` makes of its target and its own address.
async fn server(answer: fn(&str, &str) -> Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = format!("http://{}", listener.local_addr().unwrap());
    let own = at.clone();
    tokio::spawn(async move {
        let mut slow = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") && stream.read_buf(&mut head).await.unwrap_or(0) > 0 {}
            let head = String::from_utf8(head).unwrap();
            let target = head.split(' ').nth(1).unwrap().to_owned();
            let _ = stream.write_all(&answer(&target, &own)).await;
            if target == "/slow" {
                slow.push(stream);
            }
        }
    });
    at
}

fn ok(body: &[u8]) -> Vec<u8> {
    [format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(), body].concat()
}

fn moved(to: &str) -> Vec<u8> {
    format!("HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n").into_bytes()
}

#[test]
fn the_setting_lists_hosts() {
    let new =
        |hosts: &[&str]| ImageUrls::new(&hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>());
    assert!(new(&[]).unwrap().is_none());
    for wrong in ["", "https://example.com", "example.com:80", "a b", "*."] {
        assert_eq!(new(&["example.com", wrong]).map(|_| ()), Err(wrong.to_owned()));
    }
    let listed = new(&["Example.com", "*.img.example"]).unwrap().unwrap();
    let allowed = ["example.com", "a.img.example", "a.b.img.example"];
    assert!(allowed.iter().all(|host| listed.allows(host)));
    let others = ["www.example.com", "img.example", "evilimg.example", "example.com.evil", "127.0.0.1"];
    assert!(!others.iter().any(|host| listed.allows(host)));
    assert!(new(&["any"]).unwrap().unwrap().allows("whatever.example"));
}

#[test]
fn only_addresses_of_the_internet_are_public() {
    for public in ["1.1.1.1", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8"] {
        assert!(is_public(public.parse().unwrap()), "{public}");
    }
    for private in [
        "127.0.0.1",
        "127.9.9.9",
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "192.88.99.1",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::7f00:1",
        "fc00::1",
        "fd12::1",
        "fe80::1",
        "ff02::1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001::1",
        "2001:db8::1",
        "3fff::1",
    ] {
        assert!(!is_public(private.parse().unwrap()), "{private}");
    }
}

#[tokio::test]
async fn images_are_fetched_within_limits() {
    let at = server(|target, own| match target {
        "/a.png?x=1" => ok(b"file"),
        "/one" => moved("/two"),
        "/two" => moved("three"),
        "/three" => moved(&format!("{own}/a.png?x=1")),
        "/four" => moved("/one"),
        "/away" => moved("http://elsewhere.example/a.png"),
        "/file" => moved("file:///etc/passwd"),
        "/nowhere" => b"HTTP/1.1 302 Found\r\n\r\n".to_vec(),
        "/large" => b"HTTP/1.1 200 OK\r\ncontent-length: 20971521\r\n\r\n".to_vec(),
        "/endless" => [&b"HTTP/1.1 200 OK\r\n\r\n"[..], &vec![b'x'; MAX_FILE_BYTES + 1]].concat(),
        "/cut" => b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx".to_vec(),
        _ => b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_vec(),
    })
    .await;
    let client = client(&["127.0.0.1"]);
    let fetch = async |target: &str| client.fetch(&format!("{at}{target}")).await;
    assert_eq!(fetch("/a.png?x=1").await.as_deref(), Ok(&b"file"[..]));
    assert_eq!(fetch("/one").await.as_deref(), Ok(&b"file"[..]));
    for (target, reason) in [
        ("/four", "the address is redirected more than 3 times"),
        (
            "/away",
            "the server fetches no images from elsewhere.example: the setting image_urls lists the hosts",
        ),
        ("/file", "the address that 127.0.0.1 names must begin with https://"),
        ("/nowhere", "127.0.0.1 answered 302 Found without an address"),
        ("/large", "the image has more than 20971520 bytes"),
        ("/endless", "the image has more than 20971520 bytes"),
        ("/cut", "127.0.0.1: "),
        ("/none", "127.0.0.1 answered 404 Not Found"),
    ] {
        let refused = fetch(target).await.unwrap_err();
        assert!(refused.starts_with(reason), "{target}: {refused}");
    }
    let user = client.fetch("http://user@127.0.0.1/").await.unwrap_err();
    assert!(user.contains("credentials"), "{user}");
}

/// The address is checked after it is resolved, whatever the name.
#[tokio::test]
async fn private_addresses_are_not_connected_to() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let hosts = ["any".to_owned()];
    let client = ImageUrls::new(&hosts).unwrap().unwrap();
    for host in ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"] {
        let refused = client.fetch(&format!("http://{host}:{port}/x.png")).await.unwrap_err();
        assert!(refused.starts_with(&format!("{host} has no public address")), "{refused}");
    }
    let accepted = timeout(Duration::from_millis(50), listener.accept()).await;
    assert!(accepted.is_err(), "a connection was made");
}

#[tokio::test]
async fn a_fault_names_the_field_and_slow_servers_end() {
    let at = server(|target, _| match target {
        "/slow" => b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n".to_vec(),
        _ => ok(&vec![b'x'; 8 << 20]),
    })
    .await;
    let client = ImageUrls { time: Duration::from_millis(300), ..client(&["any"]) };
    let slow = vec![("a".to_owned(), format!("{at}/slow"))];
    let refused = client.fetch_all(slow).await.unwrap_err();
    assert_eq!(refused, ApiError::field("a", "the image was not fetched within 300ms"));
    let client = ImageUrls { time: FETCH_TIME, ..client };
    let images = |targets: &[&str]| {
        let image = |(index, target): (usize, &&str)| (format!("field {index}"), format!("{at}{target}"));
        targets.iter().enumerate().map(image).collect::<Vec<_>>()
    };
    assert_eq!(client.fetch_all(images(&["/1", "/2"])).await.unwrap().len(), 2);
    let refused = client.fetch_all(images(&["/1", "/2", "/3"])).await.unwrap_err();
    let limit = "the limit is 24117248 for all images of a request";
    assert_eq!(
        refused,
        ApiError::field("field 2", format!("the images up to here have 25165824 bytes, {limit}"))
    );
}
