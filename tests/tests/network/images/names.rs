//! A name server of one name, and what a pod's resolver is told of it: a Service's short name is found by the domains that
//! are searched.

use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;

/// Of the loopback range, with port 53 of its own.
const SERVER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 153);
/// The namespace's domain, as the resolver has it.
const DOMAIN: &str = "models.svc.test";
const ADDRESS: u16 = 1;

/// Answers `name` with 127.0.0.1 until the process ends, and writes a `resolv.conf` as the kubelet does.
pub(super) fn serve(name: &str, resolv_conf: &Path) {
    let text = format!("search {DOMAIN} svc.test test\nnameserver {SERVER}\noptions ndots:5\n");
    std::fs::write(resolv_conf, text).unwrap();
    let socket = UdpSocket::bind((SERVER, 53)).unwrap();
    let known = format!("{name}.{DOMAIN}");
    std::thread::spawn(move || {
        let mut packet = [0; 512];
        while let Ok((len, from)) = socket.recv_from(&mut packet) {
            if let Some(answer) = answer(&packet[..len], &known) {
                // Who asks asks again.
                let _ = socket.send_to(&answer, from);
            }
        }
    });
}

/// To one question; None for what is none.
fn answer(question: &[u8], known: &str) -> Option<Vec<u8>> {
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
    let named = labels.join(".") == known;
    let found = named && kind == ADDRESS;
    // The name exists, also for questions of other kinds.
    let code = if named { 0 } else { 3 };
    let mut answer = question.get(..2)?.to_vec();
    answer.extend([0x81, 0x80 | code, 0, 1, 0, u8::from(found), 0, 0, 0, 0]);
    answer.extend(question.get(12..at)?);
    if found {
        // The name of the question, an address of the internet, for no time, four bytes.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 127, 0, 0, 1]);
    }
    Some(answer)
}
