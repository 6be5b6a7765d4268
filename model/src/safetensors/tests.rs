use proptest::prelude::*;

use super::*;

/// A file with this header and `data` bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..data).map(|byte| byte as u8));
    file
}

/// Two tensors and metadata; the header is padded to a multiple of 8.
fn good() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]},"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"none":{"dtype":"F16","shape":[0,7],"data_offsets":[32,32]}}"#;
    file(&format!("{header:<216}"), 32)
}

#[test]
fn tensors_come_in_the_order_of_their_bytes() {
    let tensors = parse(&good()).unwrap();
    let ranges: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), t.offset, t.bytes)).collect();
    assert_eq!(ranges, [("a", 224, 8), ("b", 232, 24), ("none", 256, 0)]);
    assert_eq!((tensors[1].dtype, &tensors[1].shape[..]), (Dtype::F32, &[2, 3][..]));
}

#[test]
fn each_bad_file_is_refused_with_its_fault() {
    let single = |dtype: &str, shape: &str, offsets: &str| {
        let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#);
        file(&format!("{header:<80}"), 32)
    };
    assert!(parse(&single("F32", "[2,4]", "[0,32]")).is_ok());
    let long = "n".repeat(1_025);
    let many: Vec<String> =
        (0..65_537).map(|n| format!(r#""{n}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#)).collect();
    let rows: [(Vec<u8>, &str); 22] = [
        (vec![1, 2, 3], "the file has 3 bytes, its header needs 8"),
        (file("{}", 0)[..9].to_vec(), "the file has 9 bytes, its header needs 10"),
        (
            u64::MAX.to_le_bytes().to_vec(),
            "the length of the header is 18446744073709551615, the limit is 16777216",
        ),
        (file("[]", 0), "invalid type: sequence, expected a map from names to tensors"),
        (file("{\"w\":3}", 0), "tensor w: invalid type: integer `3`, expected struct TensorInfo"),
        (file(r#"{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":{}}"#, 0), "tensor w occurs twice"),
        (file(r#"{"__metadata__":3}"#, 0), "expected a map"),
        (single("F31", "[8]", "[0,32]"), "tensor w: unknown variant `F31`, expected one of `BOOL`"),
        (
            single("F32", "[7]", "[0,32]"),
            "tensor w of shape [7] and type F32 does not fit its byte range 0 to 32",
        ),
        (single("U8", "[8]", "[8,0]"), "does not fit its byte range 8 to 0"),
        (single("F64", "[4294967296,4294967296]", "[0,0]"), "tensor w of shape"),
        (single("U8", "[33]", "[0,33]"), "tensor w ends at 33 of the data section, which has 32 bytes"),
        (single("F32", "[2]", "[2,10]"), "tensor w starts at byte 90 of the file, not a multiple of 4"),
        (single("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), "the number of dimensions of w is 9, the limit is 8"),
        (single("U8", "[18446744073709551615,2]", "[0,32]"), "tensor w of shape"),
        (single("U8", "[1099511627776]", "[0,1099511627776]"), "ends at 1099511627776 of the data section"),
        (
            single("U8", "[2]", "[18446744073709551615,1]"),
            "does not fit its byte range 18446744073709551615 to 1",
        ),
        (single(&long, "[8]", "[0,8]"), "tensor w: unknown variant `nnn"),
        (
            single("F4", "[3]", "[0,1]"),
            "tensor w of shape [3] and type F4 does not fit its byte range 0 to 1",
        ),
        (file("", 0), "EOF while parsing a value"),
        (file(&format!(r#"{{"{long}":3}}"#), 0), "the length of a tensor's name is 1025, the limit is 1024"),
        (file(&format!("{{{}}}", many.join(",")), 0), "the number of tensors is 65537, the limit is 65536"),
    ];
    for (bytes, expected) in rows {
        let error = parse(&bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error} / {expected}");
        assert!(error.len() < 400, "{error}");
    }
    let not_utf8 = [&7_u64.to_le_bytes()[..], b"{\"\xff\":3}"].concat();
    assert!(matches!(parse(&not_utf8), Err(Malformed::Header { .. })));
    let header = r#"{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"y":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}"#;
    let error = parse(&file(header, 8)).unwrap_err();
    assert_eq!(error, Malformed::Overlap { first: "x".to_owned(), second: "y".to_owned() });
}

#[test]
fn every_truncation_is_an_error() {
    let good = good();
    for end in 0..good.len() {
        assert!(parse(&good[..end]).is_err(), "{end}");
    }
}

#[test]
fn deep_nesting_is_an_error_and_no_crash() {
    let deep = "[".repeat(1 << 20);
    assert!(matches!(parse(&file(&format!("{{\"w\":{deep}"), 0)), Err(Malformed::Header { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// With a few changed bytes: an error, or tensors inside the file without overlap.
    #[test]
    fn changed_bytes_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = good();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        check(&bytes)?;
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        check(&bytes)?;
    }

    /// Well-formed headers with arbitrary numbers.
    #[test]
    fn random_numbers_never_panic(
        entries in prop::collection::vec((prop::sample::select(vec!["F32", "BF16", "I64", "Q4"]),
            prop::collection::vec(number(), 0..4), number(), number()), 0..5),
        data in 0..64_usize,
    ) {
        let entries: Vec<String> = entries.iter().enumerate().map(|(index, (ty, shape, start, end))| {
            format!(r#""t{index}":{{"dtype":"{ty}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#)
        }).collect();
        check(&file(&format!("{{{}}}", entries.join(",")), data))?;
    }
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0..33_u64, 1 => any::<u64>(), 1 => Just(1 << 32)]
}

fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(tensors) = parse(bytes) {
        let mut end = 0;
        for tensor in tensors {
            prop_assert!(tensor.offset >= end);
            end = tensor.offset + tensor.bytes;
            prop_assert!(end <= bytes.len() as u64);
        }
    }
    Ok(())
}
