use std::borrow::Cow;

use super::*;

fn sample() -> Metadata {
    Metadata::from_iter([
        ("u16", Value::U16(7)),
        ("i32", Value::I32(-3)),
        ("u64", Value::U64(1 << 40)),
        ("f64", Value::F64(0.5)),
        ("one", Value::I8(1)),
        ("two", Value::U8(2)),
        ("name", Value::from("Kvasir")),
        ("tokens", Value::from(Strings::from_iter(["a", "", "bc"]))),
        ("scores", Value::from(vec![1.0_f32, -2.0])),
        ("types", Value::from(vec![1_i32, 3])),
        ("negative", Value::from(vec![-1_i32])),
        ("flags", Value::from(vec![1_i32, 0])),
        ("pattern", Value::from(vec![true, false])),
    ])
}

#[test]
fn integers_are_read_from_any_width() {
    let metadata = sample();
    assert_eq!(metadata.get::<u32>("u16").unwrap(), Some(7));
    assert_eq!(metadata.get::<usize>("u16").unwrap(), Some(7));
    assert_eq!(metadata.get::<i64>("i32").unwrap(), Some(-3));
    assert_eq!(metadata.get::<u64>("u64").unwrap(), Some(1 << 40));
    assert_eq!(metadata.get::<u32>("absent").unwrap(), None);
}

#[test]
fn integers_that_do_not_fit_are_named() {
    let metadata = sample();
    let error = metadata.get::<u32>("u64").unwrap_err();
    assert_eq!(error.to_string(), "u64 is 1099511627776, which is not a valid u32");
    assert!(matches!(metadata.get::<u64>("i32"), Err(KeyError::Range { found: -3, .. })));
    assert!(matches!(metadata.get::<Cow<'_, [u32]>>("negative"), Err(KeyError::Range { found: -1, .. })));
}

#[test]
fn other_types_are_refused_by_name() {
    let metadata = sample();
    let error = metadata.get::<u32>("name").unwrap_err();
    assert_eq!(error.to_string(), "name is string, expected u32");
    let error = metadata.get::<&str>("scores").unwrap_err();
    assert_eq!(error.to_string(), "scores is array of f32, expected string");
    assert!(matches!(metadata.get::<f32>("u16"), Err(KeyError::Type { .. })));
    assert!(matches!(metadata.get::<Cow<'_, [f32]>>("types"), Err(KeyError::Type { .. })));
    assert!(matches!(metadata.get::<&Strings>("name"), Err(KeyError::Type { .. })));
}

#[test]
fn a_required_key_is_missed_by_name() {
    let error = sample().require::<u32>("llama.block_count").unwrap_err();
    assert_eq!(error.to_string(), "the file has no key llama.block_count");
}

#[test]
fn bools_may_be_integers() {
    let metadata = sample();
    assert_eq!(metadata.get::<bool>("one").unwrap(), Some(true));
    assert!(matches!(metadata.get::<bool>("two"), Err(KeyError::Range { found: 2, .. })));
    assert_eq!(metadata.require::<Cow<'_, [bool]>>("flags").unwrap(), [true, false].as_slice());
    assert_eq!(metadata.require::<Cow<'_, [bool]>>("pattern").unwrap(), [true, false].as_slice());
    assert!(matches!(metadata.get::<Cow<'_, [bool]>>("types"), Err(KeyError::Range { found: 3, .. })));
}

#[test]
fn arrays_are_borrowed_where_stored_so() {
    let metadata = sample();
    assert!(matches!(metadata.get::<Cow<'_, [i32]>>("types").unwrap(), Some(Cow::Borrowed([1, 3]))));
    assert!(matches!(metadata.get::<Cow<'_, [u32]>>("types").unwrap(), Some(Cow::Owned(_))));
    assert!(matches!(metadata.get::<Cow<'_, [f32]>>("scores").unwrap(), Some(Cow::Borrowed([1.0, -2.0]))));
    assert_eq!(metadata.get::<f32>("f64").unwrap(), Some(0.5));
}

#[test]
fn strings_keep_order_and_empties() {
    let metadata = sample();
    let tokens: &Strings = metadata.require("tokens").unwrap();
    assert_eq!(tokens.iter().collect::<Vec<_>>(), ["a", "", "bc"]);
    assert_eq!((tokens.len(), tokens.get(2), tokens.get(3)), (3, Some("bc"), None));
    assert_eq!(metadata.require::<&str>("name").unwrap(), "Kvasir");
}
