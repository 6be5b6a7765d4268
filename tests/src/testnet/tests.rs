use super::*;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Instant;

const PORT: u16 = 5000;

fn socket(net: &Net, host: usize) -> UdpSocket {
    let address = SocketAddr::from((net.address(host), PORT));
    let socket = net.on(host, || UdpSocket::bind(address)).unwrap().unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket
}

/// Sends packets one by one, each after the previous one arrived or `timeout` passed. Returns the numbers
/// received.
fn send(from: &UdpSocket, to: &UdpSocket, count: u32, timeout: Duration) -> Vec<u32> {
    let address = to.local_addr().unwrap();
    to.set_read_timeout(Some(timeout)).unwrap();
    let mut received = Vec::new();
    let mut take = |timeouts: &mut u32| {
        let mut bytes = [0; 4];
        match to.recv(&mut bytes) {
            Ok(_) => received.push(u32::from_le_bytes(bytes)),
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
                *timeouts += 1;
            }
        }
    };
    let mut timeouts = 0;
    for number in 0..count {
        from.send_to(&number.to_le_bytes(), address).unwrap();
        take(&mut timeouts);
    }
    let seen = timeouts;
    while timeouts == seen {
        take(&mut timeouts);
    }
    received
}

#[test]
fn hosts_reach_each_other_and_no_other_host() {
    let net = Net::new(3, 1).unwrap();
    let sockets: Vec<UdpSocket> = (0..3).map(|host| socket(&net, host)).collect();
    for (from, to) in [(0, 1), (1, 0), (2, 1), (0, 2)] {
        assert_eq!(send(&sockets[from], &sockets[to], 20, Duration::from_millis(500)).len(), 20);
    }
    // The machine's own loopback is not reachable from hosts.
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = outside.local_addr().unwrap();
    let reached = net.on(0, || TcpStream::connect_timeout(&address, Duration::from_secs(1))).unwrap();
    assert!(reached.is_err());
}

#[test]
fn a_link_delays() {
    let net = Net::new(2, 2).unwrap();
    let [there, here] = [socket(&net, 0), socket(&net, 1)];
    net.everywhere(Link { delay: Duration::from_millis(40), ..Link::default() });
    let started = Instant::now();
    assert_eq!(send(&there, &here, 5, Duration::from_secs(2)).len(), 5);
    // The last wait receives nothing.
    assert!(started.elapsed() >= Duration::from_millis(5 * 40));
}

#[test]
fn a_cut_is_of_one_direction_and_heals() {
    let net = Net::new(3, 3).unwrap();
    let sockets: Vec<UdpSocket> = (0..3).map(|host| socket(&net, host)).collect();
    let short = Duration::from_millis(100);
    net.link(0, 1, Link::CUT);
    assert_eq!(send(&sockets[0], &sockets[1], 3, short), [0; 0]);
    assert_eq!(send(&sockets[1], &sockets[0], 3, short).len(), 3);
    assert_eq!(send(&sockets[0], &sockets[2], 3, short).len(), 3);
    net.everywhere(Link::default());
    assert_eq!(send(&sockets[0], &sockets[1], 3, short).len(), 3);
}

#[test]
fn packets_are_lost_doubled_and_overtaken() {
    let net = Net::new(2, 4).unwrap();
    let [there, here] = [socket(&net, 0), socket(&net, 1)];
    net.everywhere(Link { loss: 0.3, ..Link::default() });
    let arrived = send(&there, &here, 200, Duration::from_millis(20)).len();
    assert!((100..=180).contains(&arrived), "{arrived} of 200 at a loss of 30 %");
    net.everywhere(Link { duplication: 0.5, ..Link::default() });
    let arrived = send(&there, &here, 200, Duration::from_millis(200)).len();
    assert!((250..=350).contains(&arrived), "{arrived} of 200, half of them doubled");
    net.everywhere(Link { jitter: Duration::from_millis(20), ..Link::default() });
    for number in 0..50u32 {
        there.send_to(&number.to_le_bytes(), here.local_addr().unwrap()).unwrap();
    }
    let order: Vec<u32> = (0..50)
        .map(|_| {
            let mut bytes = [0; 4];
            here.recv(&mut bytes).unwrap();
            u32::from_le_bytes(bytes)
        })
        .collect();
    assert!(!order.is_sorted(), "{order:?}");
}

#[test]
fn a_bit_flips_unseen_by_the_kernel() {
    let net = Net::new(2, 7).unwrap();
    let [there, here] = [socket(&net, 0), socket(&net, 1)];
    net.everywhere(Link { corruption: 1.0, ..Link::default() });
    let arrived = send(&there, &here, 50, Duration::from_millis(500));
    assert_eq!(arrived.len(), 50);
    let flipped: Vec<u32> =
        (0..).zip(&arrived).map(|(sent, got): (u32, _)| (sent ^ got).count_ones()).collect();
    assert_eq!(flipped, [1; 50]);
}

#[test]
fn tcp_works_over_a_bad_link() {
    let net = Net::new(2, 5).unwrap();
    net.everywhere(Link {
        delay: Duration::from_millis(5),
        jitter: Duration::from_millis(5),
        loss: 0.02,
        duplication: 0.05,
        ..Link::default()
    });
    let listener = net.on(0, || TcpListener::bind((address(0), PORT))).unwrap().unwrap();
    let sent: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
    let received = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = Vec::new();
            stream.read_to_end(&mut received).unwrap();
            received
        });
        let mut stream = net.on(1, || TcpStream::connect((address(0), PORT))).unwrap().unwrap();
        stream.write_all(&sent).unwrap();
        drop(stream);
        receiver.join().unwrap()
    });
    assert!(received == sent);
}

#[test]
fn processes_started_on_a_host_are_there() {
    let net = Net::new(2, 6).unwrap();
    let routes = net.on(1, || std::fs::read_to_string("/proc/thread-self/net/fib_trie")).unwrap().unwrap();
    assert!(routes.contains("10.77.0.2") && !routes.contains("10.77.0.1\n"));
    let child = net.on(1, || std::process::Command::new("cat").arg("/proc/self/net/fib_trie").output());
    let seen = String::from_utf8(child.unwrap().unwrap().stdout).unwrap();
    assert!(seen.contains("10.77.0.2"), "{seen}");
}
