//! Compares with results of `faster-whisper` 1.2 (`add_word_timestamps`, `split_to_word_tokens`).

use super::*;

/// A text with its start and end.
type Timed = (String, f64, f64);

/// Words with their number of tokens, start and end; segments with start, end and number of tokens.
fn placed(
    words: &[(&str, usize, f64, f64)],
    spans: &[(f64, f64, usize)],
    offset: f64,
    last_speech: f64,
) -> Vec<(f64, f64, Vec<Timed>)> {
    let word = |(text, tokens, start, end): &(&str, usize, f64, f64)| TimedWord {
        text: (*text).to_owned(),
        tokens: *tokens,
        start: *start,
        end: *end,
        probability: 0.5,
    };
    let span = |(start, end, tokens): &(f64, f64, usize)| Span {
        start: *start,
        end: *end,
        tokens: *tokens,
        words: Vec::new(),
    };
    let mut spans: Vec<Span> = spans.iter().map(span).collect();
    place_words(words.iter().map(word).collect(), &mut spans, offset, last_speech);
    // Hundredths, since the last bits depend on the order of additions.
    let near = |seconds: f64| (seconds * 100.0).round() / 100.0;
    let words = |words: Vec<TimedWord>| {
        words.into_iter().map(|word| (word.text, near(word.start), near(word.end))).collect()
    };
    spans.into_iter().map(|span| (near(span.start), near(span.end), words(span.words))).collect()
}

fn words(all: &[(&str, f64, f64)]) -> Vec<Timed> {
    all.iter().map(|(text, start, end)| ((*text).to_owned(), *start, *end)).collect()
}

#[test]
fn punctuation_is_joined_with_its_word() {
    let spoken = [
        (" She", 1, 0.0, 0.3),
        (" said", 1, 0.3, 0.6),
        (",", 1, 0.6, 0.7),
        (" \"", 1, 0.7, 0.7),
        ("Stop", 1, 0.7, 1.1),
        ("!", 1, 1.1, 1.9),
        ("\"", 1, 1.9, 2.0),
        (" -", 1, 2.0, 2.1),
        (" and", 1, 2.1, 2.4),
        (".", 1, 2.4, 2.4),
    ];
    let expected = [
        (0.0, 0.6, words(&[(" She", 0.0, 0.3), (" said,", 0.3, 0.6)])),
        (0.7, 2.4, words(&[(" \"Stop!\"", 0.7, 1.1), (" - and.", 2.1, 2.4)])),
    ];
    assert_eq!(placed(&spoken, &[(0.0, 1.0, 3), (1.0, 2.5, 7)], 0.0, 0.0), expected);
}

#[test]
fn words_beside_a_pause_are_not_much_longer_than_others() {
    let first = [(" One", 1, 0.0, 4.0), (" two", 1, 4.0, 4.3), (" three", 1, 4.3, 4.6), (".", 1, 4.6, 4.6)];
    let expected = words(&[(" One", 33.4, 34.0), (" two", 34.0, 34.3), (" three.", 34.3, 34.6)]);
    assert_eq!(placed(&first, &[(0.5, 4.7, 4)], 30.0, 28.0), [(33.4, 34.6, expected)]);
    let two = [
        (" One", 1, 0.0, 2.0),
        (" two", 1, 2.0, 4.0),
        (" three", 1, 4.0, 4.2),
        (" four", 1, 4.2, 4.5),
        (" five", 1, 4.5, 4.8),
    ];
    let expected = words(&[
        (" One", 32.8, 33.4),
        (" two", 33.4, 34.0),
        (" three", 34.0, 34.2),
        (" four", 34.2, 34.5),
        (" five", 34.5, 34.8),
    ]);
    assert_eq!(placed(&two, &[(30.5, 34.7, 5)], 30.0, 28.0), [(32.8, 34.8, expected)]);
    // The segment's own times count if a word reaches far beyond them.
    let beyond = [(" One", 1, 0.0, 0.9), (" two", 1, 0.9, 1.2), (" three", 1, 1.2, 3.6)];
    let expected = words(&[(" One", 30.2, 30.9), (" two", 30.9, 31.2), (" three", 31.2, 32.0)]);
    assert_eq!(placed(&beyond, &[(30.7, 32.0, 3)], 30.0, 30.0), [(30.7, 32.0, expected)]);
    let sentences = [
        (" a", 1, 0.0, 0.3),
        (" b", 1, 0.3, 0.5),
        ("?", 1, 0.5, 2.5),
        (" c", 1, 2.5, 2.8),
        (" d", 1, 2.8, 3.0),
        (".", 1, 3.0, 3.1),
        (" e", 1, 3.1, 6.0),
    ];
    let expected =
        words(&[(" a", 0.0, 0.3), (" b?", 0.3, 0.5), (" c", 2.5, 2.8), (" d.", 2.8, 3.0), (" e", 5.4, 6.0)]);
    assert_eq!(placed(&sentences, &[(0.0, 6.0, 7)], 0.0, 0.0), [(0.0, 6.0, expected)]);
}

#[test]
fn words_are_split_at_spaces_and_punctuation_or_at_characters() {
    // Tokens of Whisper's vocabulary, and their bytes.
    let bytes: &[(u32, &[u8])] = &[
        (467, b" It"),
        (311, b"'s"),
        (503, b" \""),
        (69, b"f"),
        (533, b"ine"),
        (1, b"\""),
        (359, b" -"),
        (5497, b" costs"),
        (1848, b" $"),
        (19, b"4"),
        (13, b"."),
        (2803, b"50"),
        (522, b" ("),
        (284, b"or"),
        (945, b" 20"),
        (4, b"%"),
        (3050, b")."),
        (26410, "你好".as_bytes()),
        (11, b","),
        (12074, "今天".as_bytes()),
        (25118, " café".as_bytes()),
        (220, b" "),
        (3526, &"甲".as_bytes()[..2]),
        (110, &"甲".as_bytes()[2..]),
        (3509, &"幌".as_bytes()[..2]),
        (234, &"幌".as_bytes()[2..]),
    ];
    let decode = |tokens: &[u32]| {
        let of = |token: &u32| bytes.iter().find(|(id, _)| id == token).map(|(_, bytes)| *bytes).unwrap();
        String::from_utf8_lossy(&tokens.iter().flat_map(of).copied().collect::<Vec<u8>>()).into_owned()
    };
    let split = |tokens: &[u32], spaces| split_words(tokens, spaces, decode);
    let of = |all: &[(&str, usize)]| -> Vec<(String, usize)> {
        all.iter().map(|(text, tokens)| ((*text).to_owned(), *tokens)).collect()
    };
    let english = [467, 311, 503, 69, 533, 1, 359, 5497, 1848, 19, 13, 2803, 522, 284, 945, 4, 3050];
    let expected = of(&[
        (" It's", 2),
        (" \"fine", 3),
        ("\"", 1),
        (" -", 1),
        (" costs", 1),
        (" $4", 2),
        (".50", 2),
        (" (or", 2),
        (" 20", 1),
        ("%).", 2),
    ]);
    assert_eq!(split(&english, true), expected);
    let chinese = [26410, 11, 12074, 25118, 220, 3526, 110, 3509, 234];
    let expected = of(&[("你好", 1), (",", 1), ("今天", 1), (" café", 1), (" ", 1), ("甲", 2), ("幌", 2)]);
    assert_eq!(split(&chinese, false), expected);
    assert_eq!(split(&[], true), []);
}

#[test]
fn the_path_goes_through_the_largest_sum() {
    let rows = [[9.0, 8.0, -1.0, -1.0, -1.0], [-1.0, -1.0, 7.0, 1.0, -1.0], [-1.0, -1.0, -1.0, 6.0, 5.0]];
    let rows: Vec<&[f32]> = rows.iter().map(|row| &row[..]).collect();
    assert_eq!(warp(&rows), [0, 2, 3]);
    // More tokens than positions: some share one.
    assert_eq!(warp(&[&[1.0, -1.0], &[1.0, -1.0], &[-1.0, 1.0]]), [0, 0, 1]);
    assert_eq!(warp(&[&[], &[]]), [0, 0]);
    assert!(warp(&[]).is_empty());
}

#[test]
fn attention_is_normalized_and_smoothed_over_the_audio_alone() {
    let mut row = [0.0, 9.0, 1.0, 2.0, 3.0, 4.0];
    smooth(&mut row);
    // The neighbors of the first value, mirrored, are 2 1 9 0 9 1 2.
    assert_eq!(row, [2.0, 2.0, 3.0, 3.0, 3.0, 2.0]);
    let mut short = [3.0, 1.0, 2.0];
    smooth(&mut short);
    assert_eq!(short, [3.0, 1.0, 2.0]);
    let mut columns = [1.0, 5.0, 3.0, 5.0];
    normalize_columns(&mut columns, 2);
    assert_eq!(columns, [-1.0, 0.0, 1.0, 0.0]);
    // Scores behind the audio change nothing.
    let starts = |behind: f32| {
        let mut attention = Attention::new(Isa::detect(), 8);
        let scores: Vec<f32> = (0..6)
            .flat_map(|token| {
                (0..10).map(move |at| {
                    if at >= 8 {
                        behind
                    } else if at == token {
                        9.0
                    } else {
                        0.0
                    }
                })
            })
            .collect();
        attention.add(&scores, 10);
        attention.starts(1)
    };
    assert_eq!(starts(0.0).len(), 4);
    assert_eq!(starts(0.0), starts(50.0));
}
