//! Parses templates as Jinja 3.1 does, with the loop controls and the `generation` tag of Transformers.
//!
//! The parser limits the depth of brackets and blocks, which recurse here, and of expressions, which recurse
//! when evaluated and dropped.

use std::sync::Arc;

use super::TemplateError;
use super::ast::{Body, CAPTURED, Const, Does, Expr, For, Macro, Name, Stmt, Target};
use super::lexer::{Placed, Token, tokens};

mod expressions;

/// Deepest nesting of brackets and blocks.
const NESTING: u32 = 64;
/// Deepest nesting of operations: `1 + 1 + 1` has two. Python accepts 200 in Jinja's generated code.
const HEIGHT: u32 = 200;

pub(super) fn parse(source: &str) -> Result<Body, TemplateError> {
    let tokens = tokens(source).map_err(|reason| TemplateError::Syntax { reason })?;
    let mut parser = Parser {
        tokens,
        at: 0,
        depth: 0,
        loops: 0,
        caller: false,
        varargs: false,
        kwargs: false,
        unsupported: None,
    };
    let body = parser.body(&[]).and_then(|body| match parser.peek() {
        Token::End => Ok(body),
        _ => Err("unexpected tag".to_owned()),
    });
    match (body, parser.unsupported) {
        (_, Some(construct)) => Err(TemplateError::Unsupported { construct }),
        (Ok(body), None) => Ok(body),
        (Err(reason), None) => {
            Err(TemplateError::Syntax { reason: format!("{reason} (line {})", parser.line()) })
        }
    }
}

struct Parser {
    tokens: Vec<Placed>,
    at: usize,
    depth: u32,
    /// Enclosing loops, up to the next macro.
    loops: u32,
    /// Special names that the current macro reads.
    caller: bool,
    varargs: bool,
    kwargs: bool,
    unsupported: Option<&'static str>,
}

type Parsed<T> = Result<T, String>;

/// An expression and its height.
struct Node(Expr, u32);

impl Node {
    fn leaf(expr: Expr) -> Self {
        Self(expr, 1)
    }

    /// One level above `below`.
    fn above(below: u32, expr: impl FnOnce() -> Expr) -> Parsed<Self> {
        if below >= HEIGHT {
            return Err(format!("an expression of more than {HEIGHT} operations within each other"));
        }
        Ok(Self(expr(), below + 1))
    }
}

/// Splits nodes into expressions and their greatest height.
fn unzip(nodes: Vec<Node>) -> (Vec<Expr>, u32) {
    let height = nodes.iter().map(|node| node.1).max().unwrap_or(0);
    (nodes.into_iter().map(|node| node.0).collect(), height)
}

impl Parser {
    fn peek(&self) -> &Token {
        self.look(0)
    }

    fn look(&self, ahead: usize) -> &Token {
        self.tokens.get(self.at + ahead).map_or(&Token::End, |(token, _)| token)
    }

    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |&(_, line)| line)
    }

    fn advance(&mut self) -> Token {
        let token = self.tokens.get_mut(self.at).map(|(token, _)| std::mem::replace(token, Token::End));
        self.at += usize::from(token.is_some());
        token.unwrap_or(Token::End)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if **found == *name)
    }

    fn is_operator(&self, operator: &str) -> bool {
        matches!(self.peek(), Token::Operator(found) if *found == operator)
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    fn skip_operator(&mut self, operator: &str) -> bool {
        let found = self.is_operator(operator);
        self.at += usize::from(found);
        found
    }

    fn unexpected<T>(&self, expected: &str) -> Parsed<T> {
        let found = match self.peek() {
            Token::End => "the end of the template".to_owned(),
            Token::Data(_) => "text".into(),
            Token::VariableBegin | Token::BlockBegin => "a tag".into(),
            Token::VariableEnd | Token::BlockEnd => "the end of a tag".into(),
            Token::Name(name) => format!("`{name}`"),
            Token::Str(_) => "a string".into(),
            Token::Int(_) | Token::Float(_) => "a number".into(),
            Token::Operator(operator) => format!("`{operator}`"),
        };
        Err(format!("expected {expected}, got {found}"))
    }

    fn expect(&mut self, operator: &str) -> Parsed<()> {
        if self.skip_operator(operator) { Ok(()) } else { self.unexpected(&format!("`{operator}`")) }
    }

    fn expect_token(&mut self, token: &Token, expected: &str) -> Parsed<()> {
        if self.peek() != token {
            return self.unexpected(expected);
        }
        self.at += 1;
        Ok(())
    }

    fn expect_word(&mut self, name: &str) -> Parsed<()> {
        if self.skip_name(name) { Ok(()) } else { self.unexpected(&format!("`{name}`")) }
    }

    fn name(&mut self) -> Parsed<Name> {
        match self.peek() {
            Token::Name(name) => {
                let name = Arc::clone(name);
                self.at += 1;
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        self.depth += 1;
        if self.depth > NESTING {
            return Err(format!("more than {NESTING} brackets and blocks within each other"));
        }
        let parsed = parse(self)?;
        self.depth -= 1;
        Ok(parsed)
    }

    /// Parses statements up to a tag of one of these names, which is not consumed.
    fn body(&mut self, ends: &[&str]) -> Parsed<Body> {
        self.nested(|parser| {
            let mut body = Body::new();
            loop {
                let line = parser.line();
                let does = match parser.advance() {
                    Token::End => {
                        return if ends.is_empty() {
                            Ok(body)
                        } else {
                            Err(format!("the template ends where `{}` is missing", ends.join("` or `")))
                        };
                    }
                    Token::Data(text) => Does::Text(text),
                    Token::VariableBegin => {
                        let expr = parser.tuple(true, false, &[])?;
                        parser.expect_token(&Token::VariableEnd, "the end of the expression")?;
                        Does::Emit(expr.0)
                    }
                    Token::BlockBegin => {
                        if matches!(parser.peek(), Token::Name(name) if ends.contains(&&**name)) {
                            return Ok(body);
                        }
                        let tag = parser.name()?;
                        let Some(does) = parser.statement(&tag, &mut body, line)? else { continue };
                        does
                    }
                    _ => return Err("unexpected token".into()),
                };
                body.push(Stmt { line, does });
            }
        })
    }

    /// Parses the rest of a block's tag and its body. Returns also the name of the tag that ends it.
    fn block(&mut self, ends: &[&str]) -> Parsed<(Body, Name)> {
        self.skip_operator(":");
        self.block_end()?;
        let body = self.body(ends)?;
        let end = self.name()?;
        Ok((body, end))
    }

    /// Like [`Self::block`], with one possible end tag.
    fn whole_block(&mut self, end: &str) -> Parsed<Body> {
        let (body, _) = self.block(&[end])?;
        self.block_end()?;
        Ok(body)
    }

    fn block_end(&mut self) -> Parsed<()> {
        self.expect_token(&Token::BlockEnd, "the end of the tag")
    }

    /// Parses a statement after its tag's name. `None` if its effect was added to `body`.
    fn statement(&mut self, tag: &str, body: &mut Body, line: u32) -> Parsed<Option<Does>> {
        Ok(Some(match tag {
            "for" => self.for_loop()?,
            "if" => self.condition()?,
            "set" => self.set()?,
            "with" => {
                let mut values = Vec::new();
                while *self.peek() != Token::BlockEnd {
                    if !values.is_empty() {
                        self.expect(",")?;
                    }
                    let target = self.target(&[])?;
                    self.expect("=")?;
                    values.push((target, self.expression(true)?.0));
                }
                Does::With(values, self.whole_block("endwith")?)
            }
            "macro" => {
                let name = self.name()?;
                Does::Macro(Arc::new(self.macro_body(name, true, "endmacro")?))
            }
            "call" => self.call_block()?,
            "filter" => {
                let filter = self.filters(Node::leaf(Expr::Name(CAPTURED.into())), true)?.0;
                Does::Filter(filter, self.whole_block("endfilter")?)
            }
            "print" => {
                let mut first = true;
                while *self.peek() != Token::BlockEnd {
                    if !std::mem::take(&mut first) {
                        self.expect(",")?;
                    }
                    body.push(Stmt { line, does: Does::Emit(self.expression(true)?.0) });
                }
                self.block_end()?;
                return Ok(None);
            }
            "generation" => {
                let loops = std::mem::take(&mut self.loops);
                let scope = Does::Scope(self.whole_block("endgeneration")?);
                self.loops = loops;
                scope
            }
            "autoescape" => {
                let escapes = self.expression(true)?.0;
                if !matches!(escapes, Expr::Const(Const::Bool(false))) {
                    return self.unsupported("escaping for HTML");
                }
                Does::Scope(self.whole_block("endautoescape")?)
            }
            "break" | "continue" => {
                if self.loops == 0 {
                    return Err(format!("`{tag}` outside of a loop"));
                }
                self.block_end()?;
                if tag == "break" { Does::Break } else { Does::Continue }
            }
            "block" => {
                self.name()?;
                let scoped = self.skip_name("scoped");
                let loops = std::mem::take(&mut self.loops);
                let (body, _) = self.block(&["endblock"])?;
                self.loops = loops;
                if let Token::Name(_) = self.peek() {
                    self.at += 1;
                }
                self.block_end()?;
                if scoped { Does::Scope(body) } else { Does::Block(body) }
            }
            "include" | "import" | "from" | "extends" => return self.unsupported("other templates"),
            other => return Err(format!("unknown tag `{other}`")),
        }))
    }

    fn unsupported<T>(&mut self, construct: &'static str) -> Parsed<T> {
        self.unsupported = Some(construct);
        Err(construct.into())
    }

    fn for_loop(&mut self) -> Parsed<Does> {
        let target = self.target(&["in"])?;
        self.expect_word("in")?;
        let iter = self.tuple(false, false, &["recursive"])?.0;
        let condition = if self.skip_name("if") { Some(self.expression(true)?.0) } else { None };
        let recursive = self.skip_name("recursive");
        self.loops += 1;
        let (body, end) = self.block(&["endfor", "else"])?;
        self.loops -= 1;
        let otherwise = if &*end == "else" {
            self.whole_block("endfor")?
        } else {
            self.block_end()?;
            Body::new()
        };
        Ok(Does::For(Arc::new(For { target, iter, condition, recursive, body, otherwise })))
    }

    fn condition(&mut self) -> Parsed<Does> {
        let mut cases = Vec::new();
        loop {
            let condition = self.tuple(false, false, &[])?.0;
            let (body, end) = self.block(&["elif", "else", "endif"])?;
            cases.push((condition, body));
            match &*end {
                "elif" => {}
                "else" => return Ok(Does::If(cases, self.whole_block("endif")?)),
                _ => {
                    self.block_end()?;
                    return Ok(Does::If(cases, Body::new()));
                }
            }
        }
    }

    fn set(&mut self) -> Parsed<Does> {
        let target = self.target(&[])?;
        if self.skip_operator("=") {
            let value = self.tuple(true, false, &[])?.0;
            self.block_end()?;
            return Ok(Does::Set(target, value));
        }
        let filter = self.filters(Node::leaf(Expr::Name(CAPTURED.into())), false)?.0;
        Ok(Does::SetBlock(target, filter, self.whole_block("endset")?))
    }

    /// Parses a macro's parameters, if `given`, and its body.
    fn macro_body(&mut self, name: Name, given: bool, end: &str) -> Parsed<Macro> {
        let mut parameters: Vec<(Name, Option<Expr>)> = Vec::new();
        if given {
            self.expect("(")?;
            while !self.is_operator(")") {
                if !parameters.is_empty() {
                    self.expect(",")?;
                }
                let parameter = self.name()?;
                let default = if self.skip_operator("=") { Some(self.expression(true)?.0) } else { None };
                if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                    return Err("a parameter without a default follows one with a default".into());
                }
                parameters.push((parameter, default));
            }
            self.expect(")")?;
        }
        self.macro_rest(name, parameters, end)
    }

    fn macro_rest(&mut self, name: Name, parameters: Vec<(Name, Option<Expr>)>, end: &str) -> Parsed<Macro> {
        let outer = (self.caller, self.varargs, self.kwargs, std::mem::take(&mut self.loops));
        (self.caller, self.varargs, self.kwargs) = (false, false, false);
        let body = self.whole_block(end)?;
        let found = Macro {
            name,
            parameters,
            body,
            takes_caller: self.caller,
            takes_rest: self.varargs,
            takes_named_rest: self.kwargs,
        };
        // A nested macro may read the outer macro's arguments.
        (self.caller, self.varargs, self.kwargs) =
            (outer.0 || self.caller, outer.1 || self.varargs, outer.2 || self.kwargs);
        self.loops = outer.3;
        Ok(found)
    }

    fn call_block(&mut self) -> Parsed<Does> {
        let mut parameters = Vec::new();
        if self.skip_operator("(") {
            while !self.is_operator(")") {
                if !parameters.is_empty() {
                    self.expect(",")?;
                }
                let parameter = self.name()?;
                let default = if self.skip_operator("=") { Some(self.expression(true)?.0) } else { None };
                parameters.push((parameter, default));
            }
            self.expect(")")?;
        }
        match self.expression(true)?.0 {
            Expr::Call(callee, arguments) => {
                let body = self.macro_rest("caller".into(), parameters, "endcall")?;
                Ok(Does::CallBlock(Arc::new(body), *callee, arguments))
            }
            _ => Err("expected a call".into()),
        }
    }

    /// Parses the target of an assignment.
    fn target(&mut self, ends: &[&str]) -> Parsed<Target> {
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            if !targets.is_empty() {
                self.expect(",")?;
            }
            if self.ends_tuple(ends) || self.is_operator("=") {
                break;
            }
            targets.push(self.single_target()?);
            if !self.is_operator(",") {
                break;
            }
            is_tuple = true;
        }
        match (is_tuple, targets.pop()) {
            (false, Some(target)) => Ok(target),
            (false, None) => self.unexpected("a name"),
            (true, last) => {
                targets.extend(last);
                Ok(Target::Tuple(targets))
            }
        }
    }

    fn single_target(&mut self) -> Parsed<Target> {
        if self.skip_operator("(") {
            let target = self.nested(|parser| parser.target(&[]))?;
            self.expect(")")?;
            return Ok(target);
        }
        let name = self.name()?;
        if matches!(&*name, "true" | "false" | "none" | "True" | "False" | "None" | "loop") {
            return Err(format!("`{name}` cannot be assigned to"));
        }
        if self.skip_operator(".") {
            Ok(Target::Namespace(name, self.name()?))
        } else {
            Ok(Target::Name(name))
        }
    }

    fn ends_tuple(&self, ends: &[&str]) -> bool {
        match self.peek() {
            Token::VariableEnd | Token::BlockEnd | Token::Operator(")") => true,
            Token::Name(name) => ends.contains(&&**name),
            _ => false,
        }
    }
}
