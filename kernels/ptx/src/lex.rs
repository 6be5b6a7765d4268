//! Lexer: PTX text to tokens.

use crate::PtxError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token<'a> {
    /// A name, an opcode with its modifiers, a directive or a number.
    Word(&'a str),
    Text(&'a str),
    /// Any other character.
    Mark(char),
}

/// A token and its line, from 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedToken<'a> {
    pub(crate) token: Token<'a>,
    pub(crate) line: u32,
}

/// Returns all tokens of a text, without comments.
pub(crate) fn tokens(text: &str) -> Result<Vec<PlacedToken<'_>>, PtxError> {
    let mut out = Vec::new();
    let mut rest = text;
    let mut line = 1;
    while let Some(first) = rest.chars().next() {
        let taken = match first {
            '\n' => {
                line += 1;
                1
            }
            c if c.is_whitespace() => c.len_utf8(),
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => {
                let end = rest.find("*/").ok_or_else(|| unfinished(line, "a comment"))?;
                line += newlines(&rest[..end]);
                end + 2
            }
            '"' => {
                let end = rest[1..].find('"').ok_or_else(|| unfinished(line, "a string"))?;
                out.push(PlacedToken { token: Token::Text(&rest[1..=end]), line });
                line += newlines(&rest[1..=end]);
                end + 2
            }
            c if is_word(c) => {
                let end = word_end(rest);
                out.push(PlacedToken { token: Token::Word(&rest[..end]), line });
                end
            }
            c => {
                out.push(PlacedToken { token: Token::Mark(c), line });
                c.len_utf8()
            }
        };
        rest = &rest[taken..];
    }
    Ok(out)
}

fn unfinished(line: u32, construct: &str) -> PtxError {
    PtxError::Syntax { line, what: format!("{construct} that does not end") }
}

fn newlines(text: &str) -> u32 {
    text.bytes().filter(|&b| b == b'\n').count() as u32
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%' | '.')
}

/// Returns the end of the word at the beginning of a text: `shared::cta` is one word, `label:` is not.
fn word_end(text: &str) -> usize {
    let mut end = 0;
    while let Some(c) = text[end..].chars().next() {
        if is_word(c) {
            end += 1;
        } else if text[end..].starts_with("::") {
            end += 2;
        } else {
            break;
        }
    }
    end
}
