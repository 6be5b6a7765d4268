//! The tokens of a model in a file of whisper.cpp, which has only their bytes, in the order of their ranks. The
//! merges, the special tokens and the suppressed ones follow from that.

use super::network::POSITIONS;
use super::words::{Added, Bpe, Config, File, Merge, Words};
use std::collections::HashMap;

/// Codes of Whisper's languages, in the order of their tokens.
const LANGUAGES: &str = "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th \
    ur hr bg lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af \
    oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue";
/// Special tokens between the languages and the times.
const TASKS: [&str; 6] = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"];
/// Signs that are not spoken.
const SIGNS: &str = "\" # ( ) * + / : ; < = > @ [ \\ ] ^ _ ` { | } ~ 「 」 『 』 << >> <<< >>> -- --- -( -[ (' (\" (( )) \
    ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪";
/// Signs whose first token is suppressed, if they have several.
const NOTES: &str = "♩ ♪ ♫ ♬ ♭ ♮ ♯";

/// Makes the words of a model with a vocabulary of `size` tokens, of which these are text. `config` has the heads
/// that align words, if they are known.
///
/// # Errors
/// The fault of the vocabulary.
pub(super) fn words(tokens: &[Vec<u8>], size: u32, config: Config) -> Result<Words, String> {
    let end = tokens.len() as u32;
    let languages: Vec<&str> = LANGUAGES.split_whitespace().collect();
    // The end, the start, and a token for each time.
    let others = 2 + TASKS.len() as u32 + POSITIONS as u32 + 1;
    let count = size.checked_sub(end).and_then(|rest| rest.checked_sub(others)).map(|count| count as usize);
    let count = count.filter(|count| (99..=languages.len()).contains(count));
    let count = count.ok_or_else(|| {
        format!("it has {size} tokens, {end} of them of text, so not 99 or 100 languages: models of English alone are not served")
    })?;
    let special = ["endoftext", "startoftranscript"].into_iter();
    let special = special.chain(languages[..count].iter().copied()).chain(TASKS);
    let added: Vec<Added> =
        special.zip(end..).map(|(name, id)| Added { id, content: format!("<|{name}|>") }).collect();
    let mut vocab = HashMap::with_capacity(tokens.len());
    for (token, id) in tokens.iter().zip(0..).filter(|(token, _)| !token.is_empty()) {
        vocab.insert(written(token), id);
    }
    let model = Bpe { kind: None, vocab, merges: merges(tokens) };
    let mut words = Words::new(File { model, added_tokens: added }, config, size as usize)?;
    let blank = words.encode(" ");
    words.rules.suppressed_first = blank.first().copied().into_iter().chain([end]).collect();
    let tasks = end + 2 + count as u32;
    let mut suppressed: Vec<u32> = unspoken(&words);
    suppressed.extend([end + 1].into_iter().chain(tasks..tasks + TASKS.len() as u32 - 1));
    suppressed.sort_unstable();
    suppressed.dedup();
    words.rules.suppressed = suppressed;
    Ok(words)
}

/// Tokens of signs that are not spoken, as OpenAI's reference lists them.
fn unspoken(words: &Words) -> Vec<u32> {
    // A hyphen or an apostrophe may be within a word, not before one.
    let mut found: Vec<u32> =
        [" -", " '"].iter().filter_map(|text| words.encode(text).first().copied()).collect();
    let signs = SIGNS.split_whitespace().map(|sign| (sign, false));
    for (sign, first) in signs.chain(NOTES.split_whitespace().map(|sign| (sign, true))) {
        for tokens in [words.encode(sign), words.encode(&format!(" {sign}"))] {
            found.extend(tokens.first().filter(|_| first || tokens.len() == 1));
        }
    }
    found
}

/// The character that stands for a byte in the files of byte pair encodings.
fn character(byte: u8) -> char {
    let plain = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    match plain(byte) {
        true => char::from(byte),
        // The others are numbered from 256 on.
        false => {
            let number = (0..byte).filter(|other| !plain(*other)).count() as u32;
            char::from_u32(256 + number).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    }
}

fn written(token: &[u8]) -> String {
    token.iter().map(|byte| character(*byte)).collect()
}

/// The two parts of each token that has more than one byte, in the order of ranks: those of which it is
/// composed by the merges before its own.
fn merges(tokens: &[Vec<u8>]) -> Vec<Merge> {
    let ranks: HashMap<&[u8], usize> = tokens.iter().map(Vec::as_slice).zip(0..).collect();
    let mut all = Vec::new();
    for (rank, token) in tokens.iter().enumerate().filter(|(_, token)| token.len() > 1) {
        let mut bounds: Vec<usize> = (0..=token.len()).collect();
        while bounds.len() > 3 {
            let joined = |at: usize| {
                ranks.get(&token[bounds[at]..bounds[at + 2]]).copied().filter(|joined| *joined < rank)
            };
            let next = (0..bounds.len() - 2).filter_map(|at| Some((joined(at)?, at))).min();
            let Some((_, at)) = next else { break };
            bounds.remove(at + 1);
        }
        // Others cannot be composed.
        if let [from, middle, to] = bounds[..] {
            all.push(Merge::Pair(written(&token[from..middle]), written(&token[middle..to])));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_follow_from_the_ranks() {
        let tokens: Vec<Vec<u8>> = ["a", "b", "c", " ", "bc", "ab", "abc", " abc"]
            .iter()
            .map(|token| token.as_bytes().to_vec())
            .collect();
        let pairs: Vec<(String, String)> = merges(&tokens)
            .into_iter()
            .filter_map(|merge| match merge {
                Merge::Pair(left, right) => Some((left, right)),
                Merge::Line(_) => None,
            })
            .collect();
        let of = |all: &[(&str, &str)]| -> Vec<(String, String)> {
            all.iter().map(|(left, right)| ((*left).to_owned(), (*right).to_owned())).collect()
        };
        // "bc" has a lower rank than "ab".
        assert_eq!(pairs, of(&[("b", "c"), ("a", "b"), ("a", "bc"), ("Ġ", "abc")]));
        assert_eq!(written("é\n!".as_bytes()), "Ã©Ċ!");
    }

    /// All bytes, and the signs that the reference suppresses as one token.
    fn tokens() -> Vec<Vec<u8>> {
        let bytes = (0..=255u8).map(|byte| vec![byte]);
        bytes.chain([b"<<".to_vec(), b" (".to_vec(), b"th".to_vec()]).collect()
    }

    #[test]
    fn special_and_suppressed_tokens_have_their_places() {
        let end = 259;
        let size = end + 2 + 99 + 6 + 1501;
        let words = words(&tokens(), size, Config::default()).unwrap();
        assert_eq!((words.rules.end, words.start), (end, end + 1));
        assert_eq!(
            (words.language("en"), words.language("su"), words.language("yue")),
            (Some(end + 2), Some(end + 100), None)
        );
        assert_eq!((words.translate, words.transcribe, words.before), (end + 101, end + 102, end + 104));
        assert_eq!((words.silence, words.rules.no_times), (end + 105, end + 106));
        assert_eq!(words.rules.suppressed_first, [32, end]);
        let suppressed = &words.rules.suppressed;
        let has = |token: u32| suppressed.contains(&token);
        // `(`, `<<`, ` (`, the first byte of notes and of a space before them, the tasks; not `t`, `th` and the end.
        assert!(
            [40, 256, 257, 0xe2, 32, end + 1, end + 101, end + 105].into_iter().all(has),
            "{suppressed:?}"
        );
        assert!(![116, 258, end, end + 106].into_iter().any(has), "{suppressed:?}");
        assert_eq!(words.encode("th("), [258, 40]);
        assert!(
            super::words(&tokens(), size - 1, Config::default())
                .is_err_and(|reason| reason.contains("English alone"))
        );
    }
}
