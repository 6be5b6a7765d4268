//! A DNS server for one name, and a pod's resolver configuration: a Service's short name is found through the
//! search domains.

use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;

/// A loopback address with its own port 53.
const SERVER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 153);
/// The namespace's search domain.
const DOMAIN: &str = "models.svc.test";
const ADDRESS: u16 = 1;

/// Resolves `name` to 127.0.0.1 until the process ends, and writes a `resolv.conf` like the kubelet's.
pub(super) fn serve(name: &str, resolv_conf: &Path) {
    let text = format!("search {DOMAIN} svc.test test\nnameserver {SERVER}\noptions ndots:5\n");
    std::fs::write(resolv_conf, text).unwrap();
    let socket = UdpSocket::bind((SERVER, 53)).unwrap();
    let full_name = format!("{name}.{DOMAIN}");
    std::thread::spawn(move || {
        let mut packet = [0; 512];
        while let Ok((len, from)) = socket.recv_from(&mut packet) {
            if let Some(answer) = answer(&packet[..len], &full_name) {
                // The client retries.
                let _ = socket.send_to(&answer, from);
            }
        }
    });
}

/// The response to a question; `None` if it is malformed.
fn answer(question: &[u8], full_name: &str) -> Option<Vec<u8>> {
    let mut at = 12;
    let mut labels = Vec::new();
    loop {
        let len = usize::from(*question.get(at)?);
        at += 1;
        if len == 0 {
            break;
        }
        labels.push(String::from_utf8_lossy(question.get(at..at + len)?).to_ascii_lowercase());
        at += len;
    }
    let kind = u16::from_be_bytes(question.get(at..at + 2)?.try_into().ok()?);
    at += 4;
    let named = labels.join(".") == full_name;
    let found = named && kind == ADDRESS;
    // The name exists for questions of any type.
    let code = if named { 0 } else { 3 };
    let mut answer = question.get(..2)?.to_vec();
    answer.extend([0x81, 0x80 | code, 0, 1, 0, u8::from(found), 0, 0, 0, 0]);
    answer.extend(question.get(12..at)?);
    if found {
        // Name pointer, type A, class IN, TTL 0, four bytes.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 127, 0, 0, 1]);
    }
    Some(answer)
}
