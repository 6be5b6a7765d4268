//! Divides a text into sentences and clauses. A clause is what espeak-ng speaks without a pause, by its rules
//! for punctuation. Unlike there, an abbreviation (`Dr. Smith`) ends neither.

/// End of a clause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    Comma,
    Semicolon,
    Colon,
    Period,
    Question,
    Exclamation,
    /// A new paragraph, or the end of the text.
    Nothing,
}

/// Part of a sentence, with its mark at the end. It has a letter or digit, and no line ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Clause {
    pub(super) text: String,
    pub(super) stop: Stop,
}

/// Words before a dot that does not end a sentence, in lower case.
const TITLES: &[&str] = &[
    "adm", "capt", "cmdr", "col", "dr", "fr", "gen", "gov", "hon", "jr", "lt", "maj", "messrs", "mlle",
    "mme", "mr", "mrs", "ms", "mt", "pres", "prof", "rep", "rev", "sen", "sgt", "sr", "st", "vs",
];
/// Words before a dot that does not end a sentence if a digit follows, in lower case.
const NUMBERED: &[&str] = &["art", "ca", "ch", "eq", "fig", "no", "nos", "nr", "p", "pp", "sec", "vol"];

impl Stop {
    /// The mark in phonemes.
    pub(super) fn mark(self) -> &'static str {
        match self {
            Self::Comma => ",",
            Self::Semicolon => ";",
            Self::Colon => ":",
            Self::Period => ".",
            Self::Question => "?",
            Self::Exclamation => "!",
            Self::Nothing => "",
        }
    }

    pub(super) fn ends_sentence(self) -> bool {
        !matches!(self, Self::Comma | Self::Semicolon | Self::Colon)
    }

    fn of(mark: char) -> Option<Self> {
        Some(match mark {
            ',' | '،' | '、' | '，' => Self::Comma,
            ';' | '؛' | '；' | '–' | '—' => Self::Semicolon,
            ':' | '：' => Self::Colon,
            '.' | '۔' | '।' | '॥' | '。' | '．' => Self::Period,
            '?' | '\u{37e}' | '؟' | '？' => Self::Question,
            '!' | '！' => Self::Exclamation,
            _ => return None,
        })
    }
}

/// Marks of scripts without spaces.
fn needs_no_space(mark: char) -> bool {
    matches!(mark, '、' | '，' | '；' | '：' | '。' | '．' | '？' | '！')
}

fn is_bracket(c: char) -> bool {
    "()[]{}<>\"'`«»‘’‚‛“”„‟‹›「」『』（）".contains(c)
}

/// The sentences of a text, each with its clauses. Control characters count as spaces, and `[[`, with which
/// espeak-ng would begin phonemes, as one bracket.
pub(super) fn sentences(text: &str) -> Vec<Vec<Clause>> {
    let text: Vec<char> = text
        .chars()
        .map(|c| if c.is_control() && c != '\n' || matches!(c, '\u{2028}' | '\u{2029}') { ' ' } else { c })
        .collect();
    let mut reader = Reader { sentences: Vec::new(), clauses: Vec::new(), clause: String::new() };
    let mut at = 0;
    while let Some(&c) = text.get(at) {
        let space = text[at..].iter().take_while(|c| c.is_whitespace()).count();
        if space > 0 {
            let lines = text[at..at + space].iter().filter(|c| **c == '\n').count();
            reader.clause.push(' ');
            if lines > 1 {
                reader.end(Stop::Nothing);
            }
            at += space;
            continue;
        }
        let same = text[at..].iter().take_while(|other| **other == c).count();
        if c == '.' && same > 1 || c == '…' {
            // A pause in a sentence, or its end.
            at += same;
            let rest = &text[at..];
            let next = rest.iter().find(|c| !c.is_whitespace() && !is_bracket(**c));
            let ends = next.is_none_or(|c| c.is_uppercase());
            reader.clause.push(' ');
            if rest.first().is_none_or(|c| c.is_whitespace() || is_bracket(*c)) {
                reader.end(if ends { Stop::Period } else { Stop::Comma });
            }
            continue;
        }
        at += if c == '[' { same } else { 1 };
        if let Some(stop) = Stop::of(c)
            && reader.ends(c, &text[at..])
        {
            reader.clause.push(c);
            // Of `?!` the first mark counts.
            at += text[at..].iter().take_while(|c| matches!(**c, '?' | '!' | '？' | '！')).count();
            reader.end(stop);
        } else {
            reader.clause.push(c);
        }
    }
    reader.end(Stop::Nothing);
    reader.sentences
}

/// The sentences so far, and the unfinished one.
struct Reader {
    sentences: Vec<Vec<Clause>>,
    clauses: Vec<Clause>,
    clause: String,
}

impl Reader {
    /// Whether a mark ends the clause before it.
    fn ends(&self, mark: char, rest: &[char]) -> bool {
        let follows = |c: char| c.is_whitespace() || is_bracket(c) || matches!(c, '?' | '!');
        if !needs_no_space(mark) && !rest.first().is_none_or(|c| follows(*c)) {
            return false;
        }
        if !self.clause.contains(char::is_alphanumeric) {
            return false;
        }
        let space = rest.iter().take_while(|c| c.is_whitespace()).count();
        let Some(next) = rest.get(space) else { return true };
        let new_paragraph = rest[..space].iter().filter(|c| **c == '\n').count() > 1;
        if mark != '.' || new_paragraph {
            return true;
        }
        !next.is_lowercase() && *next != '\'' && !self.is_abbreviated(*next)
    }

    /// Whether the last word of the clause is an abbreviation, with a dot before `next`.
    fn is_abbreviated(&self, next: char) -> bool {
        let mut words = self.clause.split_whitespace().rev();
        let bare = |word: &str| word.trim_start_matches(is_bracket).to_owned();
        let Some(word) = words.next().map(bare) else { return false };
        let lower = word.to_lowercase();
        if TITLES.contains(&lower.as_str()) || next.is_numeric() && NUMBERED.contains(&lower.as_str()) {
            return true;
        }
        // An initial, also after a first name: `J. R. R. Tolkien`, `George W. Bush`.
        let mut letters = word.chars();
        let initial = matches!((letters.next(), letters.next()), (Some(c), None) if c.is_uppercase());
        let mut named = || words.next().map(bare).is_none_or(|before| before.starts_with(char::is_uppercase));
        initial && word != "I" && next.is_uppercase() && named()
    }

    fn end(&mut self, stop: Stop) {
        let text = std::mem::take(&mut self.clause);
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if text.contains(char::is_alphanumeric) {
            self.clauses.push(Clause { text, stop });
        } else if let Some(last) = self.clauses.last_mut()
            && stop.ends_sentence()
            && !last.stop.ends_sentence()
            && stop != Stop::Nothing
        {
            last.stop = stop;
        }
        if stop.ends_sentence() && !self.clauses.is_empty() {
            self.sentences.push(std::mem::take(&mut self.clauses));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sentences, with `|` before the mark of each clause.
    fn divided(text: &str) -> Vec<String> {
        let clause = |Clause { text, stop }: &Clause| format!("{text}|{}", stop.mark());
        sentences(text).iter().map(|all| all.iter().map(clause).collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn abbreviations_and_numbers_end_no_sentence() {
        assert_eq!(
            divided("Dr. Smith paid $3.50, or was it 3.5? Yes!"),
            ["Dr. Smith paid $3.50,|, or was it 3.5?|?", "Yes!|!"]
        );
        assert_eq!(divided("The U.S. economy, said Mr. Jones."), ["The U.S. economy,|, said Mr. Jones.|."]);
        assert_eq!(
            divided("J. R. R. Tolkien and George W. Bush."),
            ["J. R. R. Tolkien and George W. Bush.|."]
        );
        assert_eq!(divided("No. 5 lives. Say no. Then go."), ["No. 5 lives.|.", "Say no.|.", "Then go.|."]);
        assert_eq!(
            divided("I like A. You like B. So do I. Fine."),
            ["I like A.|.", "You like B.|.", "So do I.|.", "Fine.|."]
        );
        assert_eq!(
            divided("Version 1.2.3 is out. go now, e.g. here."),
            ["Version 1.2.3 is out. go now,|, e.g. here.|."]
        );
    }

    #[test]
    fn marks_and_paragraphs_end_clauses() {
        assert_eq!(
            divided("\"Stop!\" he cried. (Why?) a: b; c"),
            ["\"Stop!|!", "\" he cried.|.", "(Why?|?", ") a:|: b;|; c|"]
        );
        assert_eq!(divided("one\ntwo\n\n three\r\n\r\nfour"), ["one two|", "three|", "four|"]);
        assert_eq!(divided("Wait... what?! Well… Then"), ["Wait|, what?|?", "Well|.", "Then|"]);
        assert_eq!(divided("here — there – a-b, x—y"), ["here —|; there –|; a-b,|, x—y|"]);
        assert_eq!(divided("你好。世界！"), ["你好。|.", "世界！|!"]);
        assert_eq!(divided("a\u{1}b [[h@]] c"), ["a b [h@]] c|"]);
        for nothing in ["", " \n\n ", "...", "?! - ;", "(.)", "\u{0}"] {
            assert!(divided(nothing).is_empty(), "{nothing:?}");
        }
    }
}
