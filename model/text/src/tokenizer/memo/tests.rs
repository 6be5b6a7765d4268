use crate::cpu_time::CpuDeadline;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::super::{Tokenizer, pretokenize, tests as tokenizers};
use super::*;

const BYTES: usize = 1 << 20;

/// Every style of word splitting, and every kind of vocabulary.
fn all() -> Vec<(String, Tokenizer)> {
    let merges = ["Ġ a", "a b", "Ġa b", "o o", "Ċ Ċ", "> Ċ", "Ċ <", "Ġ Ġ", "1 2", "' s", "Ċ a", "b Ġ"];
    let words =
        ["Ġa", "ab", "Ġab", "oo", "ĊĊ", ">Ċ", "Ċ<", "ĠĠ", "12", "'s", "Ċa", "bĠ", "<|x|>", "<|a b|>", "<|y"];
    let styles = pretokenize::TABLE.iter().map(|row| {
        let metadata = tokenizers::bytes_merged(row.name, &words, &merges);
        (row.name.to_owned(), Tokenizer::from_metadata(&metadata).unwrap())
    });
    let scored = [false, true].map(|prefix| {
        let pieces = ["▁a", "ab", "a", "b", "▁", "a▁", "▁▁", "b▁a", "x", "▁x", "\n", "\n\n", "<|a b|>"];
        (format!("scored, space prefix {prefix}"), tokenizers::score_based(&pieces, prefix))
    });
    let tiny = tokenizers::TINY.iter().chain(tokenizers::MORE);
    let tiny = tiny.map(|name| ((*name).to_owned(), tokenizers::tiny(name)));
    styles.chain(scored).chain(tiny).collect()
}

/// A memo of the same vocabulary that uses every allowed cut point.
fn finest(tokenizer: &Tokenizer) -> Option<Memo> {
    Memo::new(tokenizer.cuts()?, BYTES).map(Memo::finest)
}

/// Texts that are difficult to cut, including special tokens of the vocabularies.
fn texts() -> impl Strategy<Value = String> {
    let odd = [
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\u{a0}",
        "\u{3000}",
        "\u{85}",
        "\u{2028}",
        "\u{200d}",
        "\u{301}",
        "a",
        "ab",
        "b",
        "A",
        "oo",
        "x",
        "s",
        "don't",
        "'s",
        "'",
        "’ll",
        "1",
        "12",
        "123",
        "٣",
        "½",
        "é",
        "ß",
        "你好",
        "。",
        "ไทย",
        "हिन्दी",
        "😀",
        "<",
        ">",
        "/",
        ".",
        "!",
        "_",
        "-",
        "(",
        "▁",
        "Ġ",
        "<|im_start|>",
        "<|im_end|>",
        "<s>",
        "</s>",
        "<t>",
        "<bos>",
        "<eos>",
        "<|x|>",
        "<|a b|>",
        "<|y",
        "[CLS]",
        "<unk>",
        "\u{0}",
        "\u{feff}",
    ];
    let spaced = prop_oneof![
        4 => prop::sample::select(odd.to_vec()).prop_map(String::from),
        2 => "[a-zA-Z]{1,6} ",
        1 => "[a-z.>]\n[a-z<(1]",
        1 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(spaced, 0..40).prop_map(|parts| parts.concat())
}

#[test]
fn remembered_or_not_the_ids_are_the_same() {
    let mut vocabularies: Vec<_> = all();
    let mut memos: Vec<Option<Memo>> = vocabularies.iter().map(|(_, tokenizer)| finest(tokenizer)).collect();
    let cut = memos.iter().flatten().count();
    assert!(cut >= pretokenize::TABLE.len() + 2, "only {cut} are cut at all");
    // The tokens of each name so far, across vocabularies.
    let meant = RefCell::new(HashMap::<u64, Vec<u32>>::new());
    let reported = Cell::new(0);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(600));
    let run = runner.run(&(texts(), any::<bool>()), |(text, special)| {
        for ((name, tokenizer), memo) in vocabularies.iter().zip(&memos) {
            let Some(memo) = memo else { continue };
            let other = format!("{text}ab {text}");
            // The second time from the memo, then from runs, finally with other text after a run.
            for text in [&text, &text, &text, &other, &other, &other, &text] {
                let mut ids = Vec::new();
                let encode = |text: &str, how, quoted: Quoted<'_>, ids: &mut Vec<u32>| {
                    tokenizer.encode_part(text, how, quoted, ids);
                    true
                };
                let parts = memo.encode(text, (special, Quoted::NONE), &mut ids, encode).unwrap();
                let mut from = 0;
                for KnownPart { name, end } in parts {
                    let tokens = &ids[std::mem::replace(&mut from, end)..end];
                    let mut meant = meant.borrow_mut();
                    prop_assert_eq!(tokens, &meant.entry(name).or_insert_with(|| tokens.to_vec())[..]);
                    reported.set(reported.get() + 1);
                }
                prop_assert_eq!(&ids, &tokenizer.encode(text, special), "{}: {:?}", name, text);
            }
        }
        Ok(())
    });
    run.unwrap();
    let (reported, names) = (reported.get(), meant.borrow().len());
    assert!(reported > 2 * names && names > 1_000, "{reported} parts of {names} names");
    let hits: u64 = memos.iter().flatten().map(|memo| memo.usage().hits).sum();
    assert!(hits > 10_000, "{hits} pieces were known");
    // The API's settings: the same cut points, fewer of them.
    let text =
        "the quick brown fox jumps over the lazy dog.\nAnd (then) it  sleeps\n\nfor 12345 hours ".repeat(40);
    for ((name, tokenizer), memo) in vocabularies.drain(..).zip(memos.drain(..)) {
        let plain = tokenizer.encode(&text, true);
        let remembering = tokenizer.remembering(BYTES);
        assert_eq!(remembering.encode(&text, true), plain, "{name}");
        assert_eq!(remembering.encode(&text, true), plain, "{name}");
        assert_eq!(remembering.memo_usage().is_some_and(|usage| usage.hits > 0), memo.is_some(), "{name}");
    }
}

/// Quoted ranges change a piece's tokens, so such a piece is neither stored nor looked up.
#[test]
fn quoted_control_tokens_are_neither_remembered_nor_recalled() {
    for (name, tokenizer) in all() {
        let Some(memo) = finest(&tokenizer) else { continue };
        let control = (0..tokenizer.vocab_size() as u32).find(|id| {
            tokenizer.kind(*id) == Some(super::super::Kind::Control) && tokenizer.token_text(*id).is_some()
        });
        let Some(control) = control else { continue };
        let mark = tokenizer.token_text(control).unwrap();
        let text = format!("ab ab{mark}ab ab\nab {mark} ab");
        let first = 5..5 + mark.len();
        let last = text.rfind(mark).unwrap()..text.len() - 3;
        let both = [first, last];
        for quoted in [&[][..], &both[..1], &both[1..], &both, &[]] {
            let matter = tokenizer.specials.relevant_ranges(&text, quoted);
            for _ in 0..3 {
                let mut ids = Vec::new();
                let encode = |text: &str, how, quoted: Quoted<'_>, ids: &mut Vec<u32>| {
                    tokenizer.encode_part(text, how, quoted, ids);
                    true
                };
                memo.encode(&text, (true, Quoted::new(&matter)), &mut ids, encode).unwrap();
                let controls = ids.iter().filter(|id| **id == control).count();
                assert_eq!(controls, 2 - quoted.len(), "{name}: {text:?} {quoted:?}");
                assert_eq!(ids, tokenizer.encode_prompt(&text, quoted).0, "{name}: {text:?} {quoted:?}");
            }
        }
    }
}

#[test]
fn a_document_is_known_again_behind_another() {
    let tokenizer = tokenizers::tiny("qwen2").remembering(1 << 22);
    let document = |n: u64| {
        let word = |i: u64| format!("{:x}w", (n * 1_000 + i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40);
        (0..150).map(word).collect::<Vec<_>>().join(" ")
    };
    let together = |order: &[u64]| {
        order.iter().map(|&n| format!("<doc>\n{}\n</doc>\n", document(n))).collect::<String>()
    };
    tokenizer.encode(&together(&[1, 2, 3, 4, 5]), true);
    let before = tokenizer.memo_usage().unwrap();
    tokenizer.encode(&together(&[4, 1, 5, 3, 2]), true);
    let after = tokenizer.memo_usage().unwrap();
    let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
    assert!(hits > 8 * misses, "{hits} known, {misses} not");
}

#[test]
fn nothing_is_cut_inside_or_right_behind_a_special_token() {
    let cuts = Cuts::new(|_| false, true, [&b"<|a b|>"[..], b"end", b"x\ny"].into_iter());
    let cut_at = |text: &str, at| cuts.allow(text.as_bytes(), at);
    assert_eq!(cut_at("ca b", 2), None, "a special token goes on so");
    assert_eq!(cut_at("d b", 1), None, "a special token may end there");
    assert_eq!(cut_at("c b", 1), Some(CutPoint::Space));
    assert_eq!(cut_at("c\nb", 2), None, "a special token has text behind a newline");
    let cuts = Cuts::new(|letter| letter == 'c', true, std::iter::empty());
    let cut_at = |text: &str, at| cuts.allow(text.as_bytes(), at);
    assert_eq!(cut_at("c b", 1), None, "a token goes on so");
    assert_eq!(cut_at("c\nb", 2), Some(CutPoint::Newline));
    for (text, at) in [
        ("c\n\nb", 3),
        ("c\n b", 2),
        ("c\n/", 2),
        (" \nb", 2),
        ("\nb", 1),
        ("é b", 2),
        ("1 b", 1),
        ("c b", 0),
    ] {
        assert_eq!(cut_at(text, at), None, "{text:?}");
    }
}

#[test]
fn encoding_is_given_up_where_it_takes_too_long() {
    let none = &CpuDeadline::after(Duration::ZERO);
    let all = &CpuDeadline::after(Duration::from_secs(600));
    let plain = tokenizers::tiny("qwen2");
    let tokenizer = tokenizers::tiny("qwen2").remembering(1 << 22);
    let text = "the same words again and again, in lines\nof a text that is ".repeat(100);
    assert_eq!(tokenizer.encode_prompt_shortly(&text, &[], none), None);
    let encoded = tokenizer.encode_prompt_shortly(&text, &[], all).expect("there is time");
    assert_eq!(encoded.0, plain.encode(&text, true), "what was given up left nothing wrong behind");
    let encoded = tokenizer.encode_prompt_shortly(&text, &[], none).expect("all of it is remembered");
    assert_eq!(encoded.0, plain.encode(&text, true));
    assert_eq!(tokenizer.encode_prompt_shortly(&format!("{text} and an end"), &[], none), None);

    let word = "a".repeat(10_000);
    for tokenizer in [&tokenizer, &plain] {
        assert_eq!(tokenizer.encode_prompt_shortly(&word, &[], all), None, "a piece is too long");
        assert_eq!(tokenizer.encode_prompt_shortly(&word[..100], &[], none), None);
        assert!(tokenizer.encode_prompt_shortly(&word[..100], &[], all).is_some());
    }
}

#[test]
fn a_deadline_is_checked_before_the_first_piece_and_every_4_kib() {
    let checks = |pieces: &[usize]| {
        let unchecked = Cell::new(super::super::UNCHECKED_BYTES);
        pieces.iter().map(|&bytes| super::super::is_checked(&unchecked, bytes)).collect::<Vec<_>>()
    };
    let small = checks(&[64; 129]);
    assert_eq!((0..129).filter(|&i| small[i]).collect::<Vec<_>>(), [0, 64, 128]);
    assert_eq!(checks(&[8192, 64, 4000, 96, 8192]), [true, true, false, true, true]);
}
