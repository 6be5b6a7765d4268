//! Parser of function bodies. Calls are inlined.

use super::scope::{self, Named, Scope};
use super::{Header, ModuleVariable, Parser, number};
use crate::PtxError;
use crate::ast::{File, Function, Number, Operand, Raw, Reg, Space};
use crate::lex::{PlacedToken, Token};
use std::collections::HashMap;

/// Maximum depth of nested calls. Deeper nesting counts as recursion, which is not supported.
const MAX_DEPTH: usize = 16;
/// Maximum number of instructions of a kernel, including inlined functions.
const MAX_CODE: usize = 1 << 20;

/// A body that is being parsed.
struct Body {
    function: Function,
    scopes: Vec<Scope>,
    /// Module variables that the kernel has used so far.
    outside: HashMap<String, Operand>,
    next_scope: u32,
    source: (u32, u32),
    /// Functions that are being inlined, with the label after each call.
    calls: Vec<Call>,
}

struct Call {
    name: String,
    end: String,
}

impl Body {
    fn new(function: Function) -> Self {
        Self {
            function,
            scopes: Vec::new(),
            outside: HashMap::new(),
            next_scope: 0,
            source: (0, 0),
            calls: Vec::new(),
        }
    }

    fn open(&mut self) {
        self.scopes.push(Scope { id: self.next_scope, ..Scope::default() });
        self.next_scope += 1;
    }

    fn name(&mut self, name: &str, named: Named) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.names.insert(name.into(), named);
        }
    }

    /// Allocates local memory for variables and for parameters of calls.
    fn local(&mut self, bytes: u64, align: u32) -> u64 {
        let offset = self.function.local_bytes.checked_next_multiple_of(align).unwrap_or(u32::MAX);
        self.function.local_bytes = offset.saturating_add(bytes as u32);
        u64::from(offset)
    }

    fn shared(&mut self, bytes: u64, align: u32) -> u64 {
        let offset = self.function.shared_bytes.checked_next_multiple_of(align).unwrap_or(u32::MAX);
        self.function.shared_bytes = offset.saturating_add(bytes as u32);
        u64::from(offset)
    }

    /// Labels may be used before their definition, so this lists all scopes that the label may belong to,
    /// innermost first.
    fn label_in_scope(&self, label: &str) -> String {
        let scopes: Vec<_> = self.scopes.iter().rev().map(|scope| scope.id.to_string()).collect();
        format!("{label}@{}", scopes.join("."))
    }
}

impl Parser<'_> {
    /// Parses a kernel's body with its parameters bound to names.
    pub(super) fn body(
        &mut self,
        function: Function,
        header: &Header,
        bound: Vec<(String, Named)>,
    ) -> Result<Function, PtxError> {
        let mut body = Body::new(function);
        body.open();
        for (name, named) in bound {
            body.name(&name, named);
        }
        self.at = header.body.ok_or_else(|| self.error("a kernel without a body"))?;
        self.statements(&mut body)?;
        body.emit("exit", None, Vec::new(), 0);
        Ok(body.function)
    }

    /// Parses up to the brace that closes the body.
    fn statements(&mut self, body: &mut Body) -> Result<(), PtxError> {
        body.open();
        let depth = body.scopes.len();
        loop {
            if body.function.code.len() > MAX_CODE {
                return Err(self.error("a kernel too long"));
            }
            let line = self.tokens.get(self.at).map_or(0, |placed| placed.line);
            match self.next()? {
                Token::Mark('{') => body.open(),
                Token::Mark('}') => {
                    body.scopes.pop();
                    if body.scopes.len() < depth {
                        return Ok(());
                    }
                }
                Token::Mark(';') => {}
                Token::Mark('@') => {
                    let negated = self.take('!');
                    let word = self.word()?;
                    let Some(Operand::Reg(reg @ Reg { file: File::Pred, .. })) =
                        scope::find(&body.scopes, word)
                    else {
                        return Err(self.error(format!("{word} is no predicate")));
                    };
                    let opcode = self.word()?;
                    self.instruction(body, opcode, Some((reg, negated)), line)?;
                }
                Token::Word(".loc") => self.loc(body, line)?,
                Token::Word(".reg") => self.registers(body)?,
                Token::Word(".pragma") => self.skip_to(';')?,
                Token::Word(space @ (".shared" | ".local" | ".param")) => self.variable(body, space)?,
                Token::Word(word) if word.starts_with('.') => {
                    return Err(self.error(format!("unknown directive {word} in a function")));
                }
                Token::Word(word) if self.peek_mark(':') => {
                    self.at += 1;
                    self.label(body, word)?;
                }
                Token::Word(opcode) => self.instruction(body, opcode, None, line)?,
                other => return Err(self.error(format!("{other:?} where an instruction was expected"))),
            }
        }
    }

    /// `.loc file line column`, optionally with the location of inlining.
    fn loc(&mut self, body: &mut Body, line: u32) -> Result<(), PtxError> {
        let (file, source_line) = (self.integer()? as u32, self.integer()? as u32);
        if source_line != 0 {
            body.source = (file, source_line);
        }
        self.skip_line(line);
        Ok(())
    }

    /// `.reg .b32 %r<9>, a, b;`
    fn registers(&mut self, body: &mut Body) -> Result<(), PtxError> {
        let ty = self.word()?;
        let file = scope::file(ty).ok_or_else(|| self.error(format!("registers of type {ty}")))?;
        let counter = match file {
            File::B16 | File::B32 => 0,
            File::B64 => 1,
            File::Pred => 2,
        };
        loop {
            let name = self.word()?;
            let count = if self.take('<') {
                let count = self.integer()?;
                self.expect('>')?;
                Some(u32::try_from(count).ok().filter(|&n| n <= 1 << 20))
            } else {
                None
            };
            let first = body.function.registers[counter];
            let reg = Reg { file, index: first };
            let count = match count {
                Some(Some(count)) => {
                    if let Some(scope) = body.scopes.last_mut() {
                        scope.rows.insert(name.into(), (reg, count));
                    }
                    count
                }
                Some(None) => return Err(self.error("too many registers")),
                None => {
                    body.name(name, Named::Register(reg));
                    1
                }
            };
            body.function.registers[counter] = first + count;
            if body.function.registers[counter] > 1 << 22 {
                return Err(self.error("too many registers"));
            }
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    fn variable(&mut self, body: &mut Body, space: &str) -> Result<(), PtxError> {
        let declared = self.declared()?;
        self.expect(';')?;
        if declared.unsized_array || declared.bytes > 1 << 24 {
            return Err(self.error(format!("{} has no size", declared.name)));
        }
        let named = match space {
            ".shared" => Named::Variable(Space::Shared, body.shared(declared.bytes, declared.align)),
            _ => Named::Variable(Space::Local, body.local(declared.bytes, declared.align)),
        };
        body.name(&declared.name, named);
        Ok(())
    }

    /// `label:`, or `label: .branchtargets a, b;`
    fn label(&mut self, body: &mut Body, label: &str) -> Result<(), PtxError> {
        let id = body.scopes.last().map_or(0, |scope| scope.id);
        let name = format!("{label}@{id}");
        if let Some(PlacedToken {
            token: Token::Word(directive @ (".branchtargets" | ".callprototype")),
            ..
        }) = self.tokens.get(self.at)
        {
            self.at += 1;
            if *directive == ".callprototype" {
                return Err(self.error("calls through pointers are not known"));
            }
            let mut targets = Vec::new();
            loop {
                let target = self.word()?;
                targets.push(body.label_in_scope(target));
                if !self.take(',') {
                    break;
                }
            }
            body.function.tables.push((name, targets));
            return self.expect(';');
        }
        let at = body.function.code.len() as u32;
        body.function.labels.push((name, at));
        Ok(())
    }

    fn instruction(
        &mut self,
        body: &mut Body,
        opcode: &str,
        guard: Option<(Reg, bool)>,
        line: u32,
    ) -> Result<(), PtxError> {
        if opcode == "call" || opcode.starts_with("call.") {
            return self.call(body, guard);
        }
        let mut operands = Vec::new();
        if !self.take(';') {
            loop {
                operands.push(self.operand(body)?);
                if !self.take(',') {
                    break;
                }
            }
            self.expect(';')?;
        }
        match (opcode, body.calls.last()) {
            ("ret" | "ret.uni", Some(call)) => {
                let end = Operand::Name(call.end.clone());
                body.emit("bra", guard, vec![end], line);
            }
            _ => body.emit(opcode, guard, operands, line),
        }
        Ok(())
    }

    fn operand(&mut self, body: &mut Body) -> Result<Operand, PtxError> {
        let first = match self.next()? {
            Token::Mark('{') => {
                let mut list = Vec::new();
                loop {
                    list.push(self.operand(body)?);
                    if !self.take(',') {
                        break;
                    }
                }
                self.expect('}')?;
                Operand::List(list)
            }
            Token::Mark('[') => {
                let base = self.operand(body)?;
                self.expect(']')?;
                match base {
                    Operand::Memory(..) => base,
                    base => Operand::Memory(Box::new(base), 0),
                }
            }
            Token::Mark('!') => Operand::Not(Box::new(self.operand(body)?)),
            Token::Mark('-') => {
                self.at -= 1;
                Operand::Number(self.number()?)
            }
            Token::Word(word) => self.named(body, word)?,
            other => return Err(self.error(format!("{other:?} where an operand was expected"))),
        };
        if self.take('|') {
            let second = self.operand(body)?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        let plus = self.peek_mark('+');
        if !plus && !self.peek_mark('-') {
            return Ok(first);
        }
        self.at += usize::from(plus);
        let Number::Int(offset) = self.number()? else {
            return Err(self.error("an offset that is no integer"));
        };
        let offset = offset.cast_signed();
        Ok(match first {
            Operand::Variable(space, at) => Operand::Variable(space, at.wrapping_add_signed(offset)),
            Operand::Global(number, at) => Operand::Global(number, at.wrapping_add(offset)),
            Operand::Dynamic(at) => Operand::Dynamic(at.wrapping_add(offset)),
            // Valid only inside brackets; elsewhere the decoder refuses it.
            other => Operand::Memory(Box::new(other), offset),
        })
    }

    fn named(&mut self, body: &mut Body, word: &str) -> Result<Operand, PtxError> {
        if word == "_" {
            return Ok(Operand::Sink);
        }
        if let Some(found) = scope::find(&body.scopes, word) {
            return Ok(found);
        }
        if word.starts_with('%') {
            return scope::special(word)
                .map(Operand::Special)
                .ok_or_else(|| self.error(format!("unknown register {word}")));
        }
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return number::read(word)
                .map(Operand::Number)
                .ok_or_else(|| self.error(format!("{word} is no number")));
        }
        if word == "WARP_SZ" {
            return Ok(Operand::Number(Number::Int(32)));
        }
        if let Some(operand) = body.outside.get(word) {
            return Ok(operand.clone());
        }
        let variable = match self.variables.get(word) {
            Some(ModuleVariable::DynamicShared) => Operand::Dynamic(0),
            Some(&ModuleVariable::Global(number)) => Operand::Global(number, 0),
            Some(&ModuleVariable::Const(offset)) => Operand::Variable(Space::Const, offset),
            // Its address in the kernel's shared memory is assigned at the first use.
            Some(&ModuleVariable::Shared { align, bytes }) => {
                Operand::Variable(Space::Shared, body.shared(bytes, align))
            }
            None => return Ok(Operand::Name(body.label_in_scope(word))),
        };
        body.outside.insert(word.into(), variable.clone());
        Ok(variable)
    }

    /// `call.uni (result), function, (argument, ...);`: inlines the function's statements. Parameters are
    /// addresses in the caller's local memory, which the function accesses by its own names.
    fn call(&mut self, body: &mut Body, guard: Option<(Reg, bool)>) -> Result<(), PtxError> {
        if guard.is_some() {
            return Err(self.error("calls under a predicate are not known"));
        }
        let results = if self.peek_mark('(') { self.arguments(body)? } else { Vec::new() };
        if !results.is_empty() {
            self.expect(',')?;
        }
        let name = self.word()?.to_owned();
        let arguments = if self.take(',') { self.arguments(body)? } else { Vec::new() };
        self.expect(';')?;
        let header = self.functions.iter().find(|f| f.name == name && !f.entry).cloned();
        let Some(header @ Header { body: Some(at), .. }) = header else {
            return Err(self.error(format!("call of {name}, which has no body here")));
        };
        if body.calls.len() >= MAX_DEPTH || body.calls.iter().any(|call| call.name == name) {
            return Err(self.error(format!("{name} calls itself")));
        }
        if header.parameters.len() != arguments.len() || header.returns.len() != results.len() {
            return Err(self.error(format!("{name} takes other arguments")));
        }
        let (back, source) = (self.at, body.source);
        // The function does not see the caller's names.
        let outer = std::mem::take(&mut body.scopes);
        body.open();
        let id = body.scopes.last().map_or(0, |scope| scope.id);
        let parameters = header.parameters.iter().chain(&header.returns);
        for ((name, ..), offset) in parameters.zip(arguments.into_iter().chain(results)) {
            body.name(name, Named::Variable(Space::Local, offset));
        }
        body.calls.push(Call { name, end: format!("@return@{id}") });
        self.at = at;
        self.statements(body)?;
        body.calls.pop();
        let end = body.function.code.len() as u32;
        body.function.labels.push((format!("@return@{id}"), end));
        body.scopes = outer;
        body.source = source;
        self.at = back;
        Ok(())
    }

    /// `(a, b)`: addresses in the caller's local memory.
    fn arguments(&mut self, body: &mut Body) -> Result<Vec<u64>, PtxError> {
        self.expect('(')?;
        let mut out = Vec::new();
        while !self.take(')') {
            if !out.is_empty() {
                self.expect(',')?;
            }
            match self.operand(body)? {
                Operand::Variable(Space::Local, offset) => out.push(offset),
                other => return Err(self.error(format!("{other:?} as an argument"))),
            }
        }
        Ok(out)
    }
}

impl Body {
    fn emit(&mut self, opcode: &str, guard: Option<(Reg, bool)>, operands: Vec<Operand>, line: u32) {
        let (opcode, source) = (opcode.to_owned(), self.source);
        self.function.code.push(Raw { opcode, guard, operands, line, source });
    }
}
