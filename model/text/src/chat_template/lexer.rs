//! Jinja lexer with `trim_blocks` and `lstrip_blocks`, as Transformers sets them.

use std::sync::Arc;

use super::value::is_space;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    Data(Arc<str>),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(Arc<str>),
    Str(String),
    Int(i128),
    Float(f64),
    Operator(&'static str),
    End,
}

const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

/// A token and its line.
pub(super) type Placed = (Token, u32);

pub(super) fn tokens(source: &str) -> Result<Vec<Placed>, String> {
    let source = normalised(source);
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { source, at: 0, line: 1, counted: 0, tokens: Vec::new(), open: Vec::new() };
    lexer.run().map_err(|reason| format!("{reason} (line {})", lexer.line()))?;
    Ok(lexer.tokens)
}

/// Normalises line ends to `\n`.
fn normalised(text: &str) -> String {
    text.replace("\r\n", "\n").replace('\r', "\n")
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    /// Line number at byte `counted`.
    line: u32,
    counted: usize,
    tokens: Vec<Placed>,
    /// Closing brackets of the open ones.
    open: Vec<&'static str>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        self.source.get(self.at..).unwrap_or_default()
    }

    fn line(&mut self) -> u32 {
        let passed = self.source.get(self.counted..self.at).unwrap_or_default();
        self.line += u32::try_from(passed.matches('\n').count()).unwrap_or(u32::MAX);
        self.counted = self.at;
        self.line
    }

    fn push(&mut self, token: Token) {
        let line = self.line();
        self.tokens.push((token, line));
    }

    fn run(&mut self) -> Result<(), String> {
        while self.at < self.source.len() {
            self.data()?;
        }
        self.push(Token::End);
        Ok(())
    }

    /// Reads text up to a tag, and the tag.
    fn data(&mut self) -> Result<(), String> {
        let rest = self.rest();
        let starts = |at: usize| rest.get(at + 1..at + 2).is_some_and(|c| matches!(c, "{" | "%" | "#"));
        let Some(tag) = rest.match_indices('{').map(|(at, _)| at).find(|&at| starts(at)) else {
            self.push(Token::Data(rest.into()));
            self.at = self.source.len();
            return Ok(());
        };
        let kind = rest.as_bytes().get(tag + 1).copied().unwrap_or_default();
        let sign = rest.as_bytes().get(tag + 2).copied().filter(|sign| matches!(sign, b'-' | b'+'));
        let text = self.before_tag(rest.get(..tag).unwrap_or_default(), sign, kind != b'{');
        if !text.is_empty() {
            self.push(Token::Data(text.into()));
        }
        self.at += tag + 2 + usize::from(sign.is_some());
        match kind {
            b'#' => {
                let end = self.rest().find("#}").ok_or("missing end of comment tag")?;
                let sign = self.rest().as_bytes().get(end.wrapping_sub(1)).copied();
                self.at += end + 2;
                self.after_block(sign);
                Ok(())
            }
            b'%' => match self.raw()? {
                true => Ok(()),
                false => {
                    self.push(Token::BlockBegin);
                    self.tag(Token::BlockEnd, "%}")
                }
            },
            _ => {
                self.push(Token::VariableBegin);
                self.tag(Token::VariableEnd, "}}")
            }
        }
    }

    /// Strips the text before a tag.
    fn before_tag<'t>(&self, text: &'t str, sign: Option<u8>, block: bool) -> &'t str {
        match sign {
            Some(b'-') => text.trim_end_matches(is_space),
            None if block => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let begins =
                    line > 0 || self.at == 0 || self.source.as_bytes().get(self.at - 1) == Some(&b'\n');
                let blank = text.get(line..).is_some_and(|last| last.chars().all(is_space));
                if begins && blank { text.get(..line).unwrap_or_default() } else { text }
            }
            _ => text,
        }
    }

    /// Skips whitespace after a block or comment whose end has `sign`.
    fn after_block(&mut self, sign: Option<u8>) {
        match sign {
            Some(b'-') => self.skip_space(),
            Some(b'+') => {}
            _ => self.at += usize::from(self.rest().starts_with('\n')),
        }
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start_matches(is_space).len();
    }

    /// Reads a `{% raw %}` block if there is one, starting after the tag's sign.
    fn raw(&mut self) -> Result<bool, String> {
        let word = |text: &'s str, word: &str| -> Option<&'s str> {
            Some(text.trim_start_matches(is_space).strip_prefix(word)?.trim_start_matches(is_space))
        };
        let Some(after) = word(self.rest(), "raw") else { return Ok(false) };
        let Some(body) = after
            .strip_prefix("-%}")
            .map(|body| body.trim_start_matches(is_space))
            .or_else(|| after.strip_prefix("%}"))
        else {
            return Ok(false);
        };
        self.at = self.source.len() - body.len();
        for (end, _) in body.match_indices("{%") {
            let tag = body.get(end + 2..).unwrap_or_default();
            let sign = tag.as_bytes().first().copied().filter(|sign| matches!(sign, b'-' | b'+'));
            let Some(close) = word(tag.get(usize::from(sign.is_some())..).unwrap_or_default(), "endraw")
            else {
                continue;
            };
            let closing = close.as_bytes().first().copied().filter(|sign| matches!(sign, b'-' | b'+'));
            let Some(rest) = close.get(usize::from(closing.is_some())..).and_then(|c| c.strip_prefix("%}"))
            else {
                continue;
            };
            let text = self.before_tag(body.get(..end).unwrap_or_default(), sign, true);
            if !text.is_empty() {
                self.push(Token::Data(text.into()));
            }
            self.at = self.source.len() - rest.len();
            self.after_block(closing);
            return Ok(true);
        }
        Err("missing end of raw directive".into())
    }

    /// Reads the tokens of a tag that ends with `close`.
    fn tag(&mut self, end: Token, close: &str) -> Result<(), String> {
        loop {
            self.skip_space();
            let rest = self.rest();
            if self.open.is_empty() {
                let block = end == Token::BlockEnd;
                let sign = rest.as_bytes().first().copied();
                let sign = sign.filter(|&sign| sign == b'-' || (block && sign == b'+'));
                if rest.get(usize::from(sign.is_some())..).is_some_and(|rest| rest.starts_with(close)) {
                    self.push(end);
                    self.at += close.len() + usize::from(sign.is_some());
                    match block {
                        true => self.after_block(sign),
                        false if sign.is_some() => self.skip_space(),
                        false => {}
                    }
                    return Ok(());
                }
            }
            let Some(c) = rest.chars().next() else { return Err("unexpected end of the template".into()) };
            match c {
                '0'..='9' => self.number()?,
                '\'' | '"' => self.string(c)?,
                '_' => self.name()?,
                c if c.is_alphanumeric() => self.name()?,
                _ => self.operator(c)?,
            }
        }
    }

    fn operator(&mut self, c: char) -> Result<(), String> {
        let Some(&operator) = OPERATORS.iter().find(|operator| self.rest().starts_with(**operator)) else {
            return Err(format!("unexpected character {c:?}"));
        };
        match operator {
            "{" => self.open.push("}"),
            "(" => self.open.push(")"),
            "[" => self.open.push("]"),
            "}" | ")" | "]" if self.open.pop() != Some(operator) => {
                return Err(format!("unexpected '{operator}'"));
            }
            _ => {}
        }
        self.push(Token::Operator(operator));
        self.at += operator.len();
        Ok(())
    }

    fn name(&mut self) -> Result<(), String> {
        let rest = self.rest();
        let end = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
        let name = rest.get(..end).unwrap_or_default();
        if name.starts_with(char::is_numeric) {
            return Err("invalid character in identifier".into());
        }
        self.push(Token::Name(name.into()));
        self.at += end;
        Ok(())
    }

    fn number(&mut self) -> Result<(), String> {
        let rest = self.rest();
        let digits = |from: usize, digit: fn(char) -> bool| -> usize {
            // Digits separated by single underscores.
            let bytes = rest.as_bytes();
            let is = |at: usize| bytes.get(at).is_some_and(|&b| b.is_ascii() && digit(char::from(b)));
            let mut at = from;
            while is(at) || (at > from && bytes.get(at) == Some(&b'_') && is(at + 1)) {
                at += 1;
            }
            at
        };
        let decimal = |c: char| c.is_ascii_digit();
        let whole = digits(0, decimal);
        let mut end = whole;
        let mut float = false;
        // In `messages.0.1` there is no float.
        if self.at == 0 || self.source.as_bytes().get(self.at - 1) != Some(&b'.') {
            if rest.get(end..).is_some_and(|rest| rest.starts_with('.')) && digits(end + 1, decimal) > end + 1
            {
                end = digits(end + 1, decimal);
                float = true;
            }
            if rest.get(end..).is_some_and(|rest| rest.starts_with(['e', 'E'])) {
                let sign = usize::from(rest.get(end + 1..).is_some_and(|rest| rest.starts_with(['+', '-'])));
                let exponent = digits(end + 1 + sign, decimal);
                if exponent > end + 1 + sign {
                    end = exponent;
                    float = true;
                }
            }
        }
        let clean = |text: &str| text.replace('_', "");
        let token = if float {
            let text = clean(rest.get(..end).unwrap_or_default());
            Token::Float(text.parse().map_err(|_| "a number that cannot be read")?)
        } else {
            let based = |radix: u32, digit: fn(char) -> bool| (radix, digits(2, digit));
            let (radix, based_end) = match rest.get(..2).unwrap_or_default().to_ascii_lowercase().as_str() {
                "0x" => based(16, |c| c.is_ascii_hexdigit()),
                "0o" => based(8, |c| ('0'..='7').contains(&c)),
                "0b" => based(2, |c| matches!(c, '0' | '1')),
                _ => (10, 0),
            };
            let (radix, from) = if based_end > 2 { (radix, 2) } else { (10, 0) };
            end = if from > 0 { based_end } else { whole };
            // A leading zero is a separate number.
            if from == 0
                && rest.starts_with('0')
                && clean(rest.get(..end).unwrap_or_default()).contains(|c| c != '0')
            {
                end = digits(0, |c| c == '0');
            }
            let text = clean(rest.get(from..end).unwrap_or_default());
            Token::Int(i128::from_str_radix(&text, radix).map_err(|_| "an integer beyond 128 bits")?)
        };
        self.push(token);
        self.at += end;
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), String> {
        let mut text = String::new();
        let body = self.rest().get(1..).unwrap_or_default();
        let mut chars = body.char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => escape(&mut chars, &mut text)?,
                c if c == quote => {
                    self.push(Token::Str(text));
                    self.at += at + 2;
                    return Ok(());
                }
                c => text.push(c),
            }
        }
        Err(format!("unexpected character {quote:?}"))
    }
}

/// Interprets an escape sequence like Python.
fn escape(chars: &mut std::str::CharIndices<'_>, text: &mut String) -> Result<(), String> {
    let Some((_, c)) = chars.next() else { return Ok(()) };
    let mut numbered = |digits: usize| -> Result<u32, String> {
        let code: String = chars.as_str().chars().take(digits).collect();
        if code.len() != digits {
            return Err("truncated escape in a string".into());
        }
        for _ in 0..digits {
            chars.next();
        }
        u32::from_str_radix(&code, 16).map_err(|_| "truncated escape in a string".into())
    };
    let code = match c {
        'n' => 10,
        't' => 9,
        'r' => 13,
        'a' => 7,
        'b' => 8,
        'f' => 12,
        'v' => 11,
        '\\' | '\'' | '"' => u32::from(c),
        '\n' => return Ok(()),
        'x' => numbered(2)?,
        'u' => numbered(4)?,
        'U' => numbered(8)?,
        'N' => return Err("\\N escapes are not supported".into()),
        '0'..='7' => {
            let mut code = c.to_digit(8).unwrap_or(0);
            for _ in 0..2 {
                let Some(digit) = chars.as_str().chars().next().and_then(|c| c.to_digit(8)) else { break };
                chars.next();
                code = code * 8 + digit;
            }
            code
        }
        other => {
            text.extend(['\\', other]);
            return Ok(());
        }
    };
    text.push(char::from_u32(code).ok_or("an escape that is no character")?);
    Ok(())
}
