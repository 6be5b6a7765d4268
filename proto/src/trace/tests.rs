use super::*;

const HEADER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

#[test]
fn a_traceparent_is_parsed_as_the_standard_defines_it() {
    let parent = TraceParent::parse(HEADER).unwrap();
    assert_eq!(parent.context.trace.to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(parent.context.span.0, [0, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7]);
    assert!(parent.sampled && !TraceParent::parse(&HEADER.replace("-01", "-02")).unwrap().sampled);
    assert!(TraceParent::parse(&HEADER.replacen("00", "cc", 1)).is_some(), "a later version");
    assert!(TraceParent::parse(&format!("{}-more", HEADER.replacen("00", "cc", 1))).is_some());
    for wrong in [
        "",
        "00",
        &HEADER[..54],
        &format!("{HEADER}-more"),
        &HEADER.replacen("00", "ff", 1),
        &HEADER.replace("4bf9", "4BF9"),
        &HEADER.replace("4bf9", "4bg9"),
        &HEADER.replace("4bf92f3577b34da6a3ce929d0e0e4736", "00000000000000000000000000000000"),
        &HEADER.replace("00f067aa0ba902b7", "0000000000000000"),
        &HEADER.replace("4bf9", "4b-9"),
        "00-ä-ö-01",
    ] {
        assert_eq!(TraceParent::parse(wrong), None, "{wrong}");
    }
}

/// A single test, because a process has only one queue.
#[test]
fn spans_are_recorded_in_a_bounded_queue_once_it_is_installed() {
    let name = || Cow::Borrowed("chat");
    let (before, unrecorded) = (Instant::now(), HEADER.replace("-01", "-00"));
    assert!(receive(|| Some(HEADER), name, before).is_none(), "nobody wants to know");
    let queue = install(0.0, 3).unwrap();
    assert!(install(1.0, 3).is_none());
    assert!(receive(|| None, name, before).is_none(), "none of those without a parent");
    assert!(receive(|| Some(&unrecorded), name, before).is_none());

    let mut root = receive(|| Some(HEADER), name, before).unwrap();
    let mut call = root.call("dispatch", before);
    let served = follow(call.context(), "generate", before).unwrap();
    call.fail("lost");
    drop(served);
    drop(call);
    root.set("tokens", 3u32);
    root.end(before + Duration::from_secs(1));
    drop(follow(TraceParent::parse(HEADER).unwrap().context, "one too many", before));

    let spans = queue.take(Duration::ZERO, 9);
    let [served, call, root] = <[SpanRecord; 3]>::try_from(spans).unwrap();
    assert!([&served, &call, &root].iter().all(|s| s.context.trace.to_string() == HEADER[3..35]));
    assert_eq!((served.parent, served.remote), (Some(call.context.span), true));
    assert_eq!((call.parent, call.remote), (Some(root.context.span), false));
    assert_eq!(root.parent.unwrap().0, [0, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7]);
    assert_eq!((call.kind, call.error.as_deref()), (SpanKind::Client, Some("lost")));
    assert_eq!(root.attributes, [("tokens", Value::Count(3))]);
    assert_eq!(root.end.duration_since(root.start).unwrap(), Duration::from_secs(1));
    queue.record_export(2, true);
    queue.record_export(1, false);
    assert_eq!(counts(), SpanCounts { exported: 2, queue_full: 1, failed: 1 });
    assert_eq!(queue.take(Duration::ZERO, 9), Vec::new());
}
