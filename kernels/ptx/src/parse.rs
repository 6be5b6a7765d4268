//! Parser: tokens to functions, with declarations, scopes and operands.

mod body;
mod number;
mod scope;

use crate::PtxError;
use crate::ast::{Function, Parameter, Space, Variable};
use crate::lex::{PlacedToken, Token, tokens};
use std::collections::HashMap;

#[derive(Debug, Default)]
pub(crate) struct Parsed {
    pub(crate) kernels: Vec<Function>,
    pub(crate) globals: Vec<Variable>,
    pub(crate) constants: Vec<u8>,
    /// Source files by number.
    pub(crate) files: HashMap<u32, String>,
}

pub(crate) fn parse(text: &str) -> Result<Parsed, PtxError> {
    let tokens = tokens(text)?;
    let mut parser = Parser::new(&tokens);
    parser.module()?;
    let entries: Vec<_> = parser.functions.iter().filter(|f| f.entry && f.body.is_some()).cloned().collect();
    for entry in entries {
        let kernel = parser.kernel(&entry)?;
        parser.parsed.kernels.push(kernel);
    }
    Ok(parser.parsed)
}

/// Declaration of a function in the text.
#[derive(Debug, Clone)]
struct Header {
    name: String,
    entry: bool,
    parameters: Vec<(String, u32, u32)>,
    returns: Vec<(String, u32, u32)>,
    max_threads: Option<([u32; 3], bool)>,
    /// Index of the token after its `{`; `None` for a declaration without a body.
    body: Option<usize>,
}

/// A variable outside of functions.
#[derive(Debug, Clone)]
enum ModuleVariable {
    Global(usize),
    Const(u64),
    Shared { align: u32, bytes: u64 },
    DynamicShared,
}

/// Result of parsing `.space .align n .type name[n]`.
struct Declared {
    name: String,
    align: u32,
    bytes: u64,
    /// Bytes of one element, for initial values.
    element: u32,
    /// `name[]`
    unsized_array: bool,
}

struct Parser<'a> {
    tokens: &'a [PlacedToken<'a>],
    at: usize,
    parsed: Parsed,
    functions: Vec<Header>,
    variables: HashMap<String, ModuleVariable>,
}

impl<'a> Parser<'a> {
    fn new(tokens: &'a [PlacedToken<'a>]) -> Self {
        Self { tokens, at: 0, parsed: Parsed::default(), functions: Vec::new(), variables: HashMap::new() }
    }

    fn module(&mut self) -> Result<(), PtxError> {
        let mut external = false;
        while let Some(placed) = self.tokens.get(self.at).copied() {
            let Token::Word(word) = placed.token else {
                return Err(self.error(format!("{:?} outside of functions", placed.token)));
            };
            self.at += 1;
            match word {
                ".version" | ".target" | ".address_size" => self.skip_line(placed.line),
                ".file" => self.file(placed.line)?,
                ".visible" | ".weak" | ".common" => {}
                ".extern" => external = true,
                ".global" | ".const" | ".shared" => {
                    self.module_variable(word, external)?;
                    external = false;
                }
                ".entry" | ".func" => {
                    let header = self.header(word == ".entry")?;
                    self.functions.retain(|f| f.name != header.name || f.body.is_some());
                    self.functions.push(header);
                    external = false;
                }
                ".section" => {
                    self.word()?;
                    self.expect('{')?;
                    self.skip_block()?;
                }
                ".pragma" => self.skip_to(';')?,
                other => return Err(self.error(format!("unknown directive {other}"))),
            }
        }
        Ok(())
    }

    /// `.file 1 "name"`, optionally with a time and a size.
    fn file(&mut self, line: u32) -> Result<(), PtxError> {
        let number = self.integer()?;
        if let Some(PlacedToken { token: Token::Text(name), .. }) = self.tokens.get(self.at) {
            self.parsed.files.insert(number as u32, (*name).into());
        }
        self.skip_line(line);
        Ok(())
    }

    fn module_variable(&mut self, space: &str, external: bool) -> Result<(), PtxError> {
        let declared = self.declared()?;
        let initial = if self.take('=') { self.initial(&declared)? } else { Vec::new() };
        self.expect(';')?;
        let Declared { name, align, bytes, unsized_array, .. } = declared;
        let variable = match space {
            ".shared" if unsized_array && external => ModuleVariable::DynamicShared,
            _ if unsized_array || external => {
                return Err(self.error(format!("{space} {name} is defined elsewhere")));
            }
            ".shared" => ModuleVariable::Shared { align, bytes },
            ".const" => {
                let constants = &mut self.parsed.constants;
                constants.resize(constants.len().next_multiple_of(align as usize), 0);
                let offset = constants.len();
                constants.extend_from_slice(&initial);
                constants.resize(offset + bytes as usize, 0);
                ModuleVariable::Const(offset as u64)
            }
            _ => {
                self.parsed.globals.push(Variable { name: name.clone(), bytes, initial });
                ModuleVariable::Global(self.parsed.globals.len() - 1)
            }
        };
        self.variables.insert(name, variable);
        Ok(())
    }

    /// `{1, 2, 3}` or one value, little-endian.
    fn initial(&mut self, declared: &Declared) -> Result<Vec<u8>, PtxError> {
        let mut out = Vec::new();
        let list = self.take('{');
        loop {
            let value = self.number()?;
            let bits = number::bits(value, declared.element).ok_or_else(|| self.error("a value too wide"))?;
            out.extend_from_slice(&bits.to_le_bytes()[..declared.element as usize]);
            if out.len() as u64 > declared.bytes {
                return Err(self.error(format!("too many initial values of {}", declared.name)));
            }
            if !list || !self.take(',') {
                break;
            }
        }
        if list {
            self.expect('}')?;
        }
        Ok(out)
    }

    /// `[.align n] [.v4] .type name[n][m]`
    fn declared(&mut self) -> Result<Declared, PtxError> {
        let (mut align, mut lanes, mut element, mut pointer) = (None, 1, None, false);
        loop {
            let word = self.word()?;
            match word {
                // The alignment of the pointee, not of the parameter.
                ".align" if pointer => _ = self.integer()?,
                ".ptr" if element.is_some() => pointer = true,
                ".align" => align = Some(self.integer()? as u32),
                ".global" | ".shared" | ".const" | ".local" if element.is_some() => {}
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                _ => match word.strip_prefix('.') {
                    Some(ty) => element = Some(self.type_bytes(ty)?),
                    None => {
                        let element = element.ok_or_else(|| self.error("a variable without a type"))?;
                        return self.array(word, align, lanes, element);
                    }
                },
            }
        }
    }

    fn array(
        &mut self,
        name: &str,
        align: Option<u32>,
        lanes: u32,
        element: u32,
    ) -> Result<Declared, PtxError> {
        let mut bytes = u64::from(element) * u64::from(lanes);
        let mut unsized_array = false;
        while self.take('[') {
            if self.take(']') {
                unsized_array = true;
                continue;
            }
            bytes = bytes.checked_mul(self.integer()?).ok_or_else(|| self.error("an array too large"))?;
            self.expect(']')?;
        }
        if bytes > 1 << 30 {
            return Err(self.error(format!("{name} is larger than 1 GiB")));
        }
        let align = align.unwrap_or(element * lanes);
        if !align.is_power_of_two() || align > 4096 {
            return Err(self.error(format!("alignment {align}")));
        }
        Ok(Declared { name: name.into(), align, bytes, element, unsized_array })
    }

    fn type_bytes(&self, ty: &str) -> Result<u32, PtxError> {
        match ty {
            "b8" | "u8" | "s8" => Ok(1),
            "b16" | "u16" | "s16" | "f16" | "bf16" => Ok(2),
            "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => Ok(4),
            "b64" | "u64" | "s64" | "f64" => Ok(8),
            other => Err(self.error(format!("unknown type .{other}"))),
        }
    }

    /// `name(.param ...)`, optionally preceded by `(.param ... result)` and followed by directives, then
    /// `;` or a body.
    fn header(&mut self, entry: bool) -> Result<Header, PtxError> {
        let returns = if self.peek_mark('(') { self.parameters()? } else { Vec::new() };
        let name = self.word()?.to_owned();
        let parameters = if self.peek_mark('(') { self.parameters()? } else { Vec::new() };
        let mut max_threads = None;
        loop {
            if self.take(';') {
                return Ok(Header { name, entry, parameters, returns, max_threads, body: None });
            }
            if self.take('{') {
                let body = Some(self.at);
                self.skip_block()?;
                return Ok(Header { name, entry, parameters, returns, max_threads, body });
            }
            match self.word()? {
                directive @ (".maxntid" | ".reqntid") => {
                    let mut threads = [1; 3];
                    for thread in &mut threads {
                        *thread = self.integer()? as u32;
                        if !self.take(',') {
                            break;
                        }
                    }
                    max_threads = Some((threads, directive == ".reqntid"));
                }
                ".minnctapersm" | ".maxnreg" => {
                    self.integer()?;
                }
                ".noreturn" => {}
                other => return Err(self.error(format!("unknown directive {other} of a function"))),
            }
        }
    }

    /// Parses (name, bytes, alignment) of each parameter.
    fn parameters(&mut self) -> Result<Vec<(String, u32, u32)>, PtxError> {
        self.expect('(')?;
        let mut out = Vec::new();
        while !self.take(')') {
            if !out.is_empty() {
                self.expect(',')?;
            }
            match self.word()? {
                ".param" => {}
                other => return Err(self.error(format!("a parameter in {other}"))),
            }
            let declared = self.declared()?;
            if declared.unsized_array || declared.bytes > 32764 {
                return Err(self.error(format!("parameter {} has no size", declared.name)));
            }
            out.push((declared.name, declared.bytes as u32, declared.align));
        }
        Ok(out)
    }

    fn kernel(&mut self, header: &Header) -> Result<Function, PtxError> {
        let mut parameters = Vec::new();
        let mut offset = 0u32;
        for (name, bytes, align) in &header.parameters {
            offset = offset.next_multiple_of(*align);
            parameters.push(Parameter { name: name.clone(), offset, bytes: *bytes });
            offset += bytes;
        }
        let function = Function {
            name: header.name.clone(),
            parameters,
            parameter_bytes: offset,
            max_threads: header.max_threads,
            ..Function::default()
        };
        let bound = function
            .parameters
            .iter()
            .map(|p| (p.name.clone(), scope::Named::Variable(Space::Param, u64::from(p.offset))))
            .collect();
        self.body(function, header, bound)
    }

    fn error(&self, what: impl Into<String>) -> PtxError {
        let line = self.tokens.get(self.at.saturating_sub(1)).map_or(0, |placed| placed.line);
        PtxError::Syntax { line, what: what.into() }
    }

    fn next(&mut self) -> Result<Token<'a>, PtxError> {
        let token = self.tokens.get(self.at).ok_or_else(|| self.error("the text ends here"))?.token;
        self.at += 1;
        Ok(token)
    }

    fn word(&mut self) -> Result<&'a str, PtxError> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            other => Err(self.error(format!("{other:?} where a word was expected"))),
        }
    }

    fn peek_mark(&self, mark: char) -> bool {
        self.tokens.get(self.at).is_some_and(|placed| placed.token == Token::Mark(mark))
    }

    fn take(&mut self, mark: char) -> bool {
        let found = self.peek_mark(mark);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, mark: char) -> Result<(), PtxError> {
        match self.next()? {
            Token::Mark(found) if found == mark => Ok(()),
            other => Err(self.error(format!("{other:?} where `{mark}` was expected"))),
        }
    }

    /// Skips the rest of a line.
    fn skip_line(&mut self, line: u32) {
        while self.tokens.get(self.at).is_some_and(|placed| placed.line == line) {
            self.at += 1;
        }
    }

    fn skip_to(&mut self, mark: char) -> Result<(), PtxError> {
        while self.next()? != Token::Mark(mark) {}
        Ok(())
    }

    /// Skips to the `}` that closes the open block.
    fn skip_block(&mut self) -> Result<(), PtxError> {
        let mut open = 1;
        while open > 0 {
            match self.next()? {
                Token::Mark('{') => open += 1,
                Token::Mark('}') => open -= 1,
                _ => {}
            }
        }
        Ok(())
    }
}
