use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn trace() -> RpcTrace {
    RpcTrace { trace: 0x0102_0304, span: 7, sampled: true }
}

/// The bytes of every version. Lines are only added and never changed.
#[test]
fn golden_bytes() {
    let requests = [
        (RequestHead::Call { id: 300, deadline_ms: 5000, trace: trace() }, "00fb2c01fb8813fc040302010701"),
        (RequestHead::Cancel { id: 300, trace: trace() }, "01fb2c01fc040302010701"),
    ];
    for (head, golden) in requests {
        let bytes = codec::encode(&head, Cap::Control).unwrap();
        assert_eq!(hex(&bytes), golden, "{head:?}");
        assert_eq!(codec::decode::<RequestHead>(&bytes, Cap::Control).unwrap(), head);
    }
    let failures = [
        RpcFailure::UnknownMethod,
        RpcFailure::Malformed,
        RpcFailure::Throttled,
        RpcFailure::TooLong,
        RpcFailure::Other,
    ];
    let failed = failures.map(|failure| ResponseHead::Failed { id: 1, failure, detail: "x".into() });
    let responses = std::iter::once(ResponseHead::Done { id: 9 }).chain(failed);
    let golden = ["0009", "0101000178", "0101010178", "0101020178", "0101030178", "0101040178"];
    for (head, golden) in responses.zip(golden) {
        let bytes = codec::encode(&head, Cap::Control).unwrap();
        assert_eq!(hex(&bytes), golden, "{head:?}");
        assert_eq!(codec::decode::<ResponseHead>(&bytes, Cap::Control).unwrap(), head);
    }
}

fn call(deadline_ms: u64, body: &[u8]) -> Vec<u8> {
    let head = RequestHead::Call { id: 4, deadline_ms, trace: trace() };
    let mut frame = codec::encode(&head, Cap::Control).unwrap();
    frame.extend_from_slice(body);
    frame
}

fn request<T: DeserializeOwned + std::fmt::Debug>(frame: &[u8], now: Instant) -> tarpc::Request<T> {
    match decode_request(frame, now).unwrap() {
        Decoded::Item(ClientMessage::Request(request)) => request,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_hostile_deadline_is_cut_to_the_longest() {
    let now = Instant::now();
    for deadline_ms in [600_001, u64::MAX] {
        let request = request::<u8>(&call(deadline_ms, &[5]), now);
        assert_eq!(request.context.deadline, now + MAX_DEADLINE);
        assert_eq!(request.message, 5);
    }
    assert_eq!(request::<u8>(&call(20, &[5]), now).context.deadline, now + Duration::from_millis(20));
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Old {
    A,
}

#[derive(Debug, Serialize, Deserialize)]
enum New {
    A,
    B(u32),
}

#[test]
fn an_unknown_method_is_answered_to_its_caller() {
    let frame = call(1000, &codec::encode(&New::B(3), Cap::Control).unwrap());
    let Decoded::Refused(answer) = decode_request::<Old>(&frame, Instant::now()).unwrap() else {
        panic!("accepted");
    };
    let response = decode_response::<Old>(&answer).unwrap();
    assert_eq!(response.request_id, 4);
    assert_eq!(response.message.unwrap_err().kind, io::ErrorKind::Unsupported);
}

#[test]
fn an_unknown_result_fails_its_own_call() {
    let frame = encode_response(&Response { request_id: 8, message: Ok(New::B(1)) }).unwrap();
    let response = decode_response::<Old>(&frame).unwrap();
    assert_eq!(response.request_id, 8);
    assert_eq!(response.message.unwrap_err().kind, io::ErrorKind::Unsupported);
    let frame = encode_response(&Response { request_id: 9, message: Ok(New::A) }).unwrap();
    assert_eq!(decode_response::<Old>(&frame).unwrap().message.unwrap(), Old::A);
}

#[test]
fn a_result_longer_than_a_frame_fails_its_own_call() {
    let message = Ok("x".repeat(Cap::Control.bytes()));
    let frame = encode_response(&Response { request_id: 1, message }).unwrap();
    let response = decode_response::<String>(&frame).unwrap();
    assert_eq!(response.message.unwrap_err().kind, io::ErrorKind::FileTooLarge);
}
