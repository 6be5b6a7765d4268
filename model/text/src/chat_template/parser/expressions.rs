//! Expressions, from the lowest to the highest precedence.

use super::super::ast::{Arguments, Binary, Comparison, Const, Expr, Name};
use super::super::lexer::Token;
use super::{Node, Parsed, Parser, unzip};

impl Parser {
    /// An expression, or several separated by commas.
    pub(super) fn tuple(&mut self, conditional: bool, empty: bool, ends: &[&str]) -> Parsed<Node> {
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            if !items.is_empty() {
                self.expect(",")?;
            }
            if self.ends_tuple(ends) {
                break;
            }
            items.push(self.expression(conditional)?);
            if !self.is_operator(",") {
                break;
            }
            is_tuple = true;
        }
        if !is_tuple && let Some(item) = items.pop() {
            return Ok(item);
        }
        if !is_tuple && !empty {
            return self.unexpected("an expression");
        }
        let (items, height) = unzip(items);
        Node::above(height, || Expr::Tuple(items))
    }

    pub(super) fn expression(&mut self, conditional: bool) -> Parsed<Node> {
        self.nested(|parser| if conditional { parser.conditional() } else { parser.or() })
    }

    fn conditional(&mut self) -> Parsed<Node> {
        let mut then = self.or()?;
        while self.skip_name("if") {
            let condition = self.or()?;
            let otherwise = if self.skip_name("else") { Some(self.nested(Self::conditional)?) } else { None };
            let height = then.1.max(condition.1).max(otherwise.as_ref().map_or(0, |node| node.1));
            then = Node::above(height, || {
                Expr::Cond(Box::new((condition.0, then.0)), otherwise.map(|node| Box::new(node.0)))
            })?;
        }
        Ok(then)
    }

    fn or(&mut self) -> Parsed<Node> {
        let mut left = self.and()?;
        while self.skip_name("or") {
            let right = self.and()?;
            left = Node::above(left.1.max(right.1), || Expr::Or(Box::new((left.0, right.0))))?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Parsed<Node> {
        let mut left = self.not()?;
        while self.skip_name("and") {
            let right = self.not()?;
            left = Node::above(left.1.max(right.1), || Expr::And(Box::new((left.0, right.0))))?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Parsed<Node> {
        let mut nots = 0_u32;
        while self.skip_name("not") {
            nots += 1;
        }
        let mut node = self.compare()?;
        for _ in 0..nots {
            node = Node::above(node.1, || Expr::Not(Box::new(node.0)))?;
        }
        Ok(node)
    }

    fn comparison(&mut self) -> Option<Comparison> {
        let (found, length) = match self.peek() {
            Token::Operator("==") => (Comparison::Eq, 1),
            Token::Operator("!=") => (Comparison::Ne, 1),
            Token::Operator("<") => (Comparison::Lt, 1),
            Token::Operator("<=") => (Comparison::Le, 1),
            Token::Operator(">") => (Comparison::Gt, 1),
            Token::Operator(">=") => (Comparison::Ge, 1),
            Token::Name(name) if &**name == "in" => (Comparison::In, 1),
            Token::Name(name) if &**name == "not" => match self.look(1) {
                Token::Name(next) if &**next == "in" => (Comparison::NotIn, 2),
                _ => return None,
            },
            _ => return None,
        };
        self.at += length;
        Some(found)
    }

    fn compare(&mut self) -> Parsed<Node> {
        let first = self.sum()?;
        let mut height = first.1;
        let mut others = Vec::new();
        while let Some(comparison) = self.comparison() {
            let other = self.sum()?;
            height = height.max(other.1);
            others.push((comparison, other.0));
        }
        if others.is_empty() {
            return Ok(first);
        }
        Node::above(height, || Expr::Compare(Box::new(first.0), others))
    }

    fn binary(
        &mut self,
        operators: &[(&str, Binary)],
        operand: fn(&mut Self) -> Parsed<Node>,
    ) -> Parsed<Node> {
        let mut left = operand(self)?;
        while let Some(&(_, operator)) = operators.iter().find(|(text, _)| self.is_operator(text)) {
            self.at += 1;
            let right = operand(self)?;
            left = Node::above(left.1.max(right.1), || Expr::Binary(operator, Box::new((left.0, right.0))))?;
        }
        Ok(left)
    }

    fn sum(&mut self) -> Parsed<Node> {
        self.binary(&[("+", Binary::Add), ("-", Binary::Sub)], Self::concat)
    }

    fn concat(&mut self) -> Parsed<Node> {
        let first = self.product()?;
        if !self.is_operator("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_operator("~") {
            parts.push(self.product()?);
        }
        let (parts, height) = unzip(parts);
        Node::above(height, || Expr::Concat(parts))
    }

    fn product(&mut self) -> Parsed<Node> {
        let operators =
            [("*", Binary::Mul), ("/", Binary::Div), ("//", Binary::FloorDiv), ("%", Binary::Rem)];
        self.binary(&operators, |parser| parser.binary(&[("**", Binary::Pow)], |parser| parser.unary(true)))
    }

    fn unary(&mut self, filters: bool) -> Parsed<Node> {
        let mut signs = Vec::new();
        while self.is_operator("-") || self.is_operator("+") {
            signs.push(self.is_operator("-"));
            self.at += 1;
        }
        let mut node = self.primary()?;
        node = self.postfix(node)?;
        for negative in signs.into_iter().rev() {
            node = Node::above(node.1, || {
                if negative { Expr::Neg(Box::new(node.0)) } else { Expr::Pos(Box::new(node.0)) }
            })?;
            node = self.postfix(node)?;
        }
        if filters { self.filter_expression(node) } else { Ok(node) }
    }

    fn primary(&mut self) -> Parsed<Node> {
        let constant = |constant| Ok(Node::leaf(Expr::Const(constant)));
        match self.peek() {
            Token::Name(_) | Token::Str(_) | Token::Int(_) | Token::Float(_) => {}
            Token::Operator("(") => {
                self.at += 1;
                let node = self.tuple(true, true, &[])?;
                self.expect(")")?;
                return Ok(node);
            }
            Token::Operator("[") => {
                self.at += 1;
                let mut items = Vec::new();
                while !self.is_operator("]") {
                    items.push(self.expression(true)?);
                    if !self.is_operator("]") {
                        self.expect(",")?;
                    }
                }
                self.at += 1;
                let (items, height) = unzip(items);
                return Node::above(height, || Expr::List(items));
            }
            Token::Operator("{") => return self.dict(),
            _ => return self.unexpected("an expression"),
        }
        match self.advance() {
            Token::Name(name) => match &*name {
                "true" | "True" => constant(Const::Bool(true)),
                "false" | "False" => constant(Const::Bool(false)),
                "none" | "None" => constant(Const::None),
                _ => {
                    self.caller |= &*name == "caller";
                    self.varargs |= &*name == "varargs";
                    self.kwargs |= &*name == "kwargs";
                    Ok(Node::leaf(Expr::Name(name)))
                }
            },
            Token::Str(mut text) => {
                while let Token::Str(more) = self.peek() {
                    text.push_str(more);
                    self.at += 1;
                }
                constant(Const::Str(text.into()))
            }
            Token::Int(int) => constant(Const::Int(int)),
            Token::Float(float) => constant(Const::Float(float)),
            _ => Err("unexpected token".into()),
        }
    }

    fn dict(&mut self) -> Parsed<Node> {
        self.expect("{")?;
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        while !self.is_operator("}") {
            keys.push(self.expression(true)?);
            self.expect(":")?;
            values.push(self.expression(true)?);
            if !self.is_operator("}") {
                self.expect(",")?;
            }
        }
        self.at += 1;
        let ((keys, high), (values, higher)) = (unzip(keys), unzip(values));
        Node::above(high.max(higher), || Expr::Dict(keys.into_iter().zip(values).collect()))
    }

    fn postfix(&mut self, mut node: Node) -> Parsed<Node> {
        loop {
            node = match self.peek() {
                Token::Operator(".") => {
                    self.at += 1;
                    match self.advance() {
                        Token::Name(name) => Node::above(node.1, || Expr::Attribute(Box::new(node.0), name))?,
                        Token::Int(int) => {
                            let index = Expr::Const(Const::Int(int));
                            Node::above(node.1, || Expr::Item(Box::new((node.0, index))))?
                        }
                        _ => return Err("expected a name or number after `.`".into()),
                    }
                }
                Token::Operator("[") => self.subscript(node)?,
                Token::Operator("(") => self.call(node)?,
                _ => return Ok(node),
            };
        }
    }

    fn subscript(&mut self, node: Node) -> Parsed<Node> {
        self.expect("[")?;
        let mut bounds = [None, None, None];
        let mut given = 0;
        let mut height = node.1;
        loop {
            if !self.is_operator(":") && !self.is_operator("]") {
                let bound = self.expression(true)?;
                height = height.max(bound.1);
                if let Some(slot) = bounds.get_mut(given) {
                    *slot = Some(bound.0);
                }
            }
            if given == 2 || !self.skip_operator(":") {
                break;
            }
            given += 1;
        }
        if given == 0 && self.is_operator(",") {
            return self.unsupported("an index of several values");
        }
        self.expect("]")?;
        let [first, stop, step] = bounds;
        match (given, first) {
            (0, Some(index)) => Node::above(height, || Expr::Item(Box::new((node.0, index)))),
            (0, None) => Err("an index is missing".into()),
            (_, first) => {
                Node::above(height, || Expr::Slice(Box::new(node.0), Box::new([first, stop, step])))
            }
        }
    }

    /// Parenthesised arguments and their height.
    fn arguments(&mut self) -> Parsed<(Arguments, u32)> {
        self.expect("(")?;
        let mut arguments = Arguments::default();
        let mut height = 0;
        while !self.is_operator(")") {
            let wrong = "invalid syntax for a call";
            if self.skip_operator("*") {
                let rest = self.expression(true)?;
                height = height.max(rest.1);
                if arguments.rest.replace(rest.0).is_some() || arguments.named_rest.is_some() {
                    return Err(wrong.into());
                }
            } else if self.skip_operator("**") {
                let rest = self.expression(true)?;
                height = height.max(rest.1);
                if arguments.named_rest.replace(rest.0).is_some() {
                    return Err(wrong.into());
                }
            } else if matches!(self.peek(), Token::Name(_)) && *self.look(1) == Token::Operator("=") {
                let name = self.name()?;
                self.at += 1;
                let value = self.expression(true)?;
                height = height.max(value.1);
                if arguments.named_rest.is_some() || arguments.named.iter().any(|(other, _)| *other == name) {
                    return Err(wrong.into());
                }
                arguments.named.push((name, value.0));
            } else {
                let value = self.expression(true)?;
                height = height.max(value.1);
                if arguments.rest.is_some() || arguments.named_rest.is_some() || !arguments.named.is_empty() {
                    return Err(wrong.into());
                }
                arguments.positional.push(value.0);
            }
            if !self.is_operator(")") {
                self.expect(",")?;
            }
        }
        self.at += 1;
        Ok((arguments, height))
    }

    fn call(&mut self, node: Node) -> Parsed<Node> {
        let (arguments, height) = self.arguments()?;
        Node::above(height.max(node.1), || Expr::Call(Box::new(node.0), Box::new(arguments)))
    }

    fn filter_expression(&mut self, mut node: Node) -> Parsed<Node> {
        loop {
            node = match self.peek() {
                Token::Operator("|") => self.filters(node, false)?,
                Token::Name(name) if &**name == "is" => self.test(node)?,
                Token::Operator("(") => self.call(node)?,
                _ => return Ok(node),
            };
        }
    }

    /// Filters of `node`. If `bare`, the first has no `|` before it.
    pub(super) fn filters(&mut self, mut node: Node, mut bare: bool) -> Parsed<Node> {
        while std::mem::take(&mut bare) || self.skip_operator("|") {
            let name = self.dotted()?;
            let (arguments, height) = self.optional_arguments()?;
            node = Node::above(height.max(node.1), || {
                Expr::Filter(Box::new(node.0), name, Box::new(arguments))
            })?;
        }
        Ok(node)
    }

    fn optional_arguments(&mut self) -> Parsed<(Arguments, u32)> {
        if self.is_operator("(") { self.arguments() } else { Ok((Arguments::default(), 0)) }
    }

    fn dotted(&mut self) -> Parsed<Name> {
        let mut name = self.name()?;
        while self.skip_operator(".") {
            name = format!("{name}.{}", self.name()?).into();
        }
        Ok(name)
    }

    fn test(&mut self, node: Node) -> Parsed<Node> {
        self.expect_word("is")?;
        let negated = self.skip_name("not");
        let name = self.dotted()?;
        let bare = match self.peek() {
            Token::Name(next) => match &**next {
                "else" | "or" | "and" => false,
                "is" => return Err("several tests with `is` in a row".into()),
                _ => true,
            },
            Token::Str(_) | Token::Int(_) | Token::Float(_) | Token::Operator("[" | "{") => true,
            _ => false,
        };
        let (arguments, height) = if bare {
            let argument = self.nested(Self::primary)?;
            let argument = self.postfix(argument)?;
            (Arguments { positional: vec![argument.0], ..Arguments::default() }, argument.1)
        } else {
            self.optional_arguments()?
        };
        let tested =
            Node::above(height.max(node.1), || Expr::Test(Box::new(node.0), name, Box::new(arguments)))?;
        if negated { Node::above(tested.1, || Expr::Not(Box::new(tested.0))) } else { Ok(tested) }
    }
}
