//! Runs a parsed template.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use indexmap::IndexMap;

use super::ast::{
    Arguments, Binary, CAPTURED, Comparison, Const, Does, Expr, For, Macro, Name, Stmt, Target,
};
use super::budget::{Budget, VISIT};
use super::calls::Args;
use super::outline::{Passage, TextPositions};
use super::value::{
    Callable, Dict, Fallible, Fault, Iter, Key, Kind, Namespaces, Text, Value, Writer, failed, items,
};
use super::{Limit, OUTPUT, checks, filters, methods, operators, print};

mod globals;
mod loops;

/// Maximum bytes written, including those of blocks and macros: a macro's caller writes its output again.
const WRITTEN: usize = 4 * OUTPUT;

/// Names of one scope. Inner scopes see outer ones.
#[derive(Debug, Default)]
struct Scope {
    names: RefCell<Vec<(Name, Value)>>,
    around: Option<Rc<Self>>,
}

impl Scope {
    fn within(around: &Rc<Self>) -> Rc<Self> {
        Rc::new(Self { names: RefCell::default(), around: Some(Rc::clone(around)) })
    }

    fn set(&self, name: &Name, value: Value) {
        let mut names = self.names.borrow_mut();
        match names.iter_mut().find(|(bound, _)| bound == name) {
            Some((_, old)) => *old = value,
            None => names.push((Arc::clone(name), value)),
        }
    }

    fn get(&self, name: &str, budget: &Budget) -> Fallible<Option<Value>> {
        let mut scope = self;
        loop {
            let names = scope.names.borrow();
            budget.charge_len(2 * names.len())?;
            if let Some((_, value)) = names.iter().find(|(bound, _)| **bound == *name) {
                return Ok(Some(value.clone()));
            }
            match scope.around.as_deref() {
                Some(around) => scope = around,
                None => return Ok(None),
            }
        }
    }
}

/// State of a running loop.
struct Loop {
    node: Arc<For>,
    around: Rc<Scope>,
    items: Iter,
    /// Read ahead, but not yet consumed.
    pending: VecDeque<Value>,
    passed: usize,
    length: Option<usize>,
    before: Option<Value>,
    current: Option<Value>,
    changed: Option<Vec<Value>>,
    level: usize,
}

enum Flow {
    On,
    Break,
    Continue,
}

pub(super) struct Machine<'b> {
    pub(super) budget: &'b Budget,
    pub(super) namespaces: Namespaces,
    variables: IndexMap<Key, Value>,
    top: Rc<Scope>,
    scope: Rc<Scope>,
    /// Output stack; the first writer is the prompt.
    outputs: Vec<Writer<'b>>,
    written: usize,
    loops: Vec<Loop>,
    macros: Vec<(Arc<Macro>, Rc<Scope>)>,
    now: SystemTime,
    /// While building an outline: positions of unknown texts.
    positions: Option<TextPositions>,
    line: u32,
}

impl<'b> Machine<'b> {
    pub(super) fn new(
        budget: &'b Budget,
        variables: IndexMap<Key, Value>,
        room: usize,
        outline: bool,
        now: SystemTime,
    ) -> Self {
        let top = Rc::<Scope>::default();
        Self {
            budget,
            namespaces: Vec::new(),
            variables,
            scope: Rc::clone(&top),
            top,
            outputs: vec![Writer::with_room(budget, room)],
            written: 0,
            loops: Vec::new(),
            macros: Vec::new(),
            now,
            positions: outline.then(TextPositions::new),
            line: 1,
        }
    }

    /// Renders `body`. Returns the prompt, its quoted ranges and the positions of unknown texts.
    pub(super) fn run(
        mut self,
        body: &[Stmt],
    ) -> Fallible<(String, Vec<std::ops::Range<usize>>, TextPositions)> {
        self.budget.check_time()?;
        self.body(body).map_err(|fault| match fault {
            Fault::Failed(reason) => Fault::Failed(format!("{reason} (line {})", self.line)),
            other => other,
        })?;
        let (text, quoted) = self.outputs.swap_remove(0).into_parts();
        Ok((text, quoted, self.positions.unwrap_or_default()))
    }

    fn body(&mut self, body: &[Stmt]) -> Fallible<Flow> {
        self.budget.enter()?;
        for stmt in body {
            self.line = stmt.line;
            self.budget.step()?;
            match self.statement(&stmt.does)? {
                Flow::On => {}
                flow => {
                    self.budget.leave();
                    return Ok(flow);
                }
            }
        }
        self.budget.leave();
        Ok(Flow::On)
    }

    fn statement(&mut self, does: &Does) -> Fallible<Flow> {
        match does {
            Does::Text(text) => self.write(text)?,
            Does::Emit(expr) => {
                let value = self.eval(expr)?;
                self.emit(&value)?;
            }
            Does::Set(target, expr) => {
                let value = self.eval(expr)?;
                self.assign(target, value)?;
            }
            Does::SetBlock(target, filter, body) => {
                let text = self.captured(|machine| machine.scoped(body))?;
                let value = self.filtered(filter, text)?;
                self.assign(target, value)?;
            }
            Does::Filter(filter, body) => {
                let text = self.captured(|machine| machine.scoped(body))?;
                let value = self.filtered(filter, text)?;
                self.emit(&value)?;
            }
            Does::For(node) => {
                let value = self.eval(&node.iter)?;
                let around = Rc::clone(&self.scope);
                return self.for_loop(node, &value, around, 0);
            }
            Does::If(cases, otherwise) => {
                for (condition, body) in cases {
                    if truth(&self.eval(condition)?) {
                        return self.body(body);
                    }
                    self.budget.step()?;
                }
                return self.body(otherwise);
            }
            Does::With(pairs, body) => {
                let values: Vec<Value> =
                    pairs.iter().map(|(_, expr)| self.eval(expr)).collect::<Fallible<_>>()?;
                let outer = self.go_within();
                for ((target, _), value) in pairs.iter().zip(values) {
                    self.assign(target, value)?;
                }
                let flow = self.body(body)?;
                self.scope = outer;
                return Ok(flow);
            }
            Does::Macro(node) => {
                let value = self.closure(node)?;
                self.scope.set(&node.name, value);
            }
            Does::CallBlock(node, callee, arguments) => {
                let caller = self.closure(node)?;
                let callee = self.eval(callee)?;
                let mut args = self.arguments(arguments)?;
                args.named.push(("caller".into(), caller));
                let value = self.call(&callee, args)?;
                self.emit(&value)?;
            }
            Does::Scope(body) => return self.scoped(body),
            Does::Block(body) => {
                let outer = std::mem::replace(&mut self.scope, Scope::within(&self.top));
                self.body(body)?;
                self.scope = outer;
            }
            Does::Break => return Ok(Flow::Break),
            Does::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::On)
    }

    /// Enters a new scope and returns the previous one.
    fn go_within(&mut self) -> Rc<Scope> {
        let inner = Scope::within(&self.scope);
        std::mem::replace(&mut self.scope, inner)
    }

    fn scoped(&mut self, body: &[Stmt]) -> Fallible<Flow> {
        let outer = self.go_within();
        let flow = self.body(body)?;
        self.scope = outer;
        Ok(flow)
    }

    /// Returns the output of `run`.
    fn captured<T>(&mut self, run: impl FnOnce(&mut Self) -> Fallible<T>) -> Fallible<Text> {
        self.outputs.push(Writer::new(self.budget));
        run(self)?;
        self.budget.charge(VISIT)?;
        Ok(self.outputs.pop().map(Writer::finish).unwrap_or_default())
    }

    fn filtered(&mut self, filter: &Expr, text: Text) -> Fallible<Value> {
        let outer = self.go_within();
        self.scope.set(&CAPTURED.into(), Value::Str(text));
        let value = self.eval(filter)?;
        self.scope = outer;
        Ok(value)
    }

    fn closure(&mut self, node: &Arc<Macro>) -> Fallible<Value> {
        // The macro captures its scope.
        self.budget.charge(4 * VISIT)?;
        self.macros.push((Arc::clone(node), Rc::clone(&self.scope)));
        Ok(Value::callable(Callable::Macro(self.macros.len() - 1)))
    }

    fn count_written(&mut self, bytes: usize) -> Fallible<()> {
        self.written = self.written.saturating_add(bytes);
        let prompt = self.outputs.first().map_or(0, Writer::len);
        if self.written > WRITTEN || prompt > OUTPUT { Err(Limit::Output.into()) } else { Ok(()) }
    }

    fn write(&mut self, text: &str) -> Fallible<()> {
        self.count_written(text.len())?;
        self.outputs.last_mut().map_or(Ok(()), |output| output.push(text))
    }

    fn emit(&mut self, value: &Value) -> Fallible<()> {
        match value {
            Value::Passage(passage) => self.emit_passage(passage),
            Value::Str(text) => self.emit_text(text),
            Value::Undefined(_) => Ok(()),
            other => {
                let text = print::string(self, other)?;
                self.emit_text(&text)
            }
        }
    }

    fn emit_text(&mut self, text: &Text) -> Fallible<()> {
        self.count_written(text.as_str().len())?;
        self.outputs.last_mut().map_or(Ok(()), |output| output.push_text(text))?;
        self.count_written(0)
    }

    fn emit_passage(&mut self, passage: &Passage) -> Fallible<()> {
        match (&mut *self.outputs, &mut self.positions) {
            ([prompt], Some(positions)) => passage.write(prompt, positions),
            _ => Err(Fault::Read),
        }
    }

    fn assign(&mut self, target: &Target, value: Value) -> Fallible<()> {
        match target {
            Target::Name(name) => {
                self.budget.charge_len(2 * self.scope.names.borrow().len())?;
                self.scope.set(name, value);
            }
            Target::Tuple(targets) => {
                let values = items(&value, self.budget)?;
                if values.len() != targets.len() {
                    return failed(format!("{} values to unpack, expected {}", values.len(), targets.len()));
                }
                for (target, value) in targets.iter().zip(values) {
                    self.assign(target, value)?;
                }
            }
            Target::Namespace(name, attribute) => match self.lookup(name)? {
                Value::Namespace(at) => {
                    self.budget.charge(VISIT)?;
                    if let Some(namespace) = self.namespaces.get(at) {
                        namespace.borrow_mut().insert(Key::Str(Text::own(Arc::clone(attribute))), value);
                    }
                }
                _ => return failed(format!("`{name}` is not a namespace, its attributes cannot be set")),
            },
        }
        Ok(())
    }

    fn lookup(&self, name: &str) -> Fallible<Value> {
        if let Some(value) = self.scope.get(name, self.budget)? {
            return Ok(value);
        }
        if let Some(value) = self.variables.get(name) {
            return Ok(value.clone());
        }
        Ok(match globals::NAMES.iter().find(|global| **global == name) {
            Some(global) => Value::callable(Callable::Global(global)),
            None => Value::undefined(format!("`{name}` is undefined")),
        })
    }

    /// Evaluates an expression.
    pub(super) fn eval(&mut self, expr: &Expr) -> Fallible<Value> {
        match expr {
            Expr::Const(constant) => Ok(match constant {
                Const::None => Value::None,
                Const::Bool(truth) => Value::Bool(*truth),
                Const::Int(int) => Value::Int(*int),
                Const::Float(float) => Value::Float(*float),
                Const::Str(text) => Value::own(Arc::clone(text)),
            }),
            Expr::Name(name) => self.lookup(name),
            _ => {
                self.budget.enter()?;
                self.budget.step()?;
                let value = self.operation(expr)?;
                self.budget.leave();
                Ok(value)
            }
        }
    }

    fn evals(&mut self, exprs: &[Expr]) -> Fallible<Vec<Value>> {
        self.budget.charge(VISIT.saturating_mul(exprs.len() as u64))?;
        exprs.iter().map(|expr| self.eval(expr)).collect()
    }

    fn operation(&mut self, expr: &Expr) -> Fallible<Value> {
        match expr {
            Expr::Const(_) | Expr::Name(_) => self.eval(expr),
            Expr::List(items) => Value::list(self.evals(items)?),
            Expr::Tuple(items) => Value::tuple(self.evals(items)?),
            Expr::Dict(pairs) => self.dict(pairs),
            Expr::Not(operand) => Ok(Value::Bool(!truth(&self.eval(operand)?))),
            Expr::Neg(operand) => {
                let value = self.eval(operand)?;
                operators::negative(&value)
            }
            Expr::Pos(operand) => {
                let value = self.eval(operand)?;
                operators::positive(&value)
            }
            Expr::And(pair) => {
                let left = self.eval(&pair.0)?;
                if truth(&left) { self.eval(&pair.1) } else { Ok(left) }
            }
            Expr::Or(pair) => {
                let left = self.eval(&pair.0)?;
                if truth(&left) { Ok(left) } else { self.eval(&pair.1) }
            }
            Expr::Binary(operator, pair) => {
                let (left, right) = (self.eval(&pair.0)?, self.eval(&pair.1)?);
                self.binary(*operator, &left, &right)
            }
            Expr::Concat(parts) => self.concat(parts),
            Expr::Compare(first, others) => self.compare(first, others),
            Expr::Cond(pair, otherwise) => {
                if truth(&self.eval(&pair.0)?) {
                    return self.eval(&pair.1);
                }
                match otherwise {
                    Some(otherwise) => self.eval(otherwise),
                    None => Ok(Value::undefined("the inline if-expression has no else")),
                }
            }
            Expr::Attribute(object, name) => {
                let object = self.eval(object)?;
                self.attribute(&object, name)
            }
            Expr::Item(pair) => {
                let (object, index) = (self.eval(&pair.0)?, self.eval(&pair.1)?);
                self.item(&object, &index)
            }
            Expr::Slice(object, bounds) => self.slice(object, bounds),
            Expr::Call(callee, arguments) => self.call_expression(callee, arguments),
            Expr::Filter(operand, name, arguments) => {
                let value = self.eval(operand)?;
                let args = self.arguments(arguments)?;
                filters::apply(self, name, value, args)
            }
            Expr::Test(operand, name, arguments) => {
                let value = self.eval(operand)?;
                let args = self.arguments(arguments)?;
                Ok(Value::Bool(checks::holds(self, name, &value, args)?))
            }
        }
    }

    #[inline(never)]
    fn binary(&mut self, operator: Binary, left: &Value, right: &Value) -> Fallible<Value> {
        operators::binary(self, operator, left, right)
    }

    #[inline(never)]
    fn dict(&mut self, pairs: &[(Expr, Expr)]) -> Fallible<Value> {
        let mut entries = IndexMap::with_capacity(pairs.len());
        for (key, value) in pairs {
            let key = self.eval(key)?;
            let key = Key::of(&key, self.budget)?;
            let value = self.eval(value)?;
            entries.insert(key, value);
        }
        Value::dict(entries)
    }

    #[inline(never)]
    fn concat(&mut self, parts: &[Expr]) -> Fallible<Value> {
        let values = self.evals(parts)?;
        if values.iter().any(|value| matches!(value, Value::Passage(_))) {
            let mut values = values.into_iter();
            let first = values.next().unwrap_or(Value::None);
            return values.try_fold(first, |left, right| Passage::joined(&left, &right));
        }
        let texts: Vec<Text> =
            values.iter().map(|value| print::string(self, value)).collect::<Fallible<_>>()?;
        let mut text =
            Writer::with_room(self.budget, texts.iter().map(|text| text.as_str().len()).sum::<usize>());
        texts.iter().try_for_each(|piece| text.push_text(piece))?;
        Ok(Value::Str(text.finish()))
    }

    #[inline(never)]
    fn compare(&mut self, first: &Expr, others: &[(Comparison, Expr)]) -> Fallible<Value> {
        let mut left = self.eval(first)?;
        for (comparison, other) in others {
            let right = self.eval(other)?;
            if !operators::compares(self, *comparison, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    #[inline(never)]
    fn slice(&mut self, object: &Expr, bounds: &[Option<Expr>; 3]) -> Fallible<Value> {
        let object = self.eval(object)?;
        let mut values = [None, None, None];
        for (value, bound) in values.iter_mut().zip(bounds) {
            *value = bound.as_ref().map(|bound| self.eval(bound)).transpose()?;
        }
        operators::slice(self, &object, &values)
    }

    #[inline(never)]
    fn call_expression(&mut self, callee: &Expr, arguments: &Arguments) -> Fallible<Value> {
        // Method calls do not create a method value.
        if let Expr::Attribute(object, name) = callee {
            let object = self.eval(object)?;
            if methods::has(&object, name) {
                let args = self.arguments(arguments)?;
                return methods::call(self, &object, name, args);
            }
            let callee = self.attribute(&object, name)?;
            let args = self.arguments(arguments)?;
            return self.call(&callee, args);
        }
        let callee = self.eval(callee)?;
        let args = self.arguments(arguments)?;
        self.call(&callee, args)
    }

    fn arguments(&mut self, arguments: &Arguments) -> Fallible<Args> {
        let mut args = Args { positional: self.evals(&arguments.positional)?, named: Vec::new() };
        for (name, expr) in &arguments.named {
            args.named.push((Arc::clone(name), self.eval(expr)?));
        }
        if let Some(rest) = &arguments.rest {
            let rest = self.eval(rest)?;
            args.positional.extend(items(&rest, self.budget)?);
        }
        if let Some(rest) = &arguments.named_rest {
            let rest = self.eval(rest)?;
            let Value::Dict(dict) = &rest else {
                return failed(format!("arguments after ** must be a dict, not {}", rest.type_name()));
            };
            for (key, value) in &dict.entries {
                self.budget.charge(VISIT)?;
                let Key::Str(name) = key else { return failed("keywords must be strings") };
                args.named.push((name.as_str().into(), value.clone()));
            }
        }
        Ok(args)
    }

    /// `object.name`: attributes first, then items.
    pub(super) fn attribute(&mut self, object: &Value, name: &str) -> Fallible<Value> {
        if let Some(value) = self.own_attribute(object, name)? {
            return Ok(value);
        }
        if let Value::Dict(dict) = object
            && let Some(value) = dict.entries.get(name)
        {
            return Ok(value.clone());
        }
        Ok(missing(object, name))
    }

    /// `object[index]`: items first, then attributes.
    pub(super) fn item(&mut self, object: &Value, index: &Value) -> Fallible<Value> {
        let found = match object {
            Value::Undefined(about) => return failed(&**about),
            Value::Passage(_) => return Err(Fault::Read),
            Value::Dict(dict) => self.entry(dict, index)?,
            Value::Seq(seq) if !matches!(seq.kind, Kind::Keys | Kind::Values | Kind::Items) => index
                .number()
                .and_then(|_| operators::position(index, seq.items.len()))
                .and_then(|at| seq.items.get(at).cloned()),
            Value::Str(text) if index.number().is_some() => operators::character(self.budget, text, index)?,
            _ => None,
        };
        match (found, index) {
            (Some(value), _) => Ok(value),
            (None, Value::Str(name)) => {
                let value = self.own_attribute(object, name.as_str())?;
                Ok(value.unwrap_or_else(|| missing(object, name.as_str())))
            }
            (None, Value::Passage(_)) => Err(Fault::Read),
            (None, _) => {
                let index = print::repr(self, index)?;
                Ok(Value::undefined(format!(
                    "{} object has no element {}",
                    object.type_name(),
                    index.as_str()
                )))
            }
        }
    }

    fn entry(&mut self, dict: &Dict, index: &Value) -> Fallible<Option<Value>> {
        Ok(match index {
            Value::Str(name) => {
                self.budget.charge_len(name.as_str().len())?;
                dict.entries.get(name.as_str()).cloned()
            }
            Value::Passage(_) => return Err(Fault::Read),
            Value::Undefined(_) => None,
            _ => match Key::of(index, self.budget) {
                Ok(key) => dict.entries.get(&key).cloned(),
                Err(Fault::Failed(_)) => None,
                Err(fault) => return Err(fault),
            },
        })
    }

    /// Like Python's `getattr`.
    pub(super) fn own_attribute(&mut self, object: &Value, name: &str) -> Fallible<Option<Value>> {
        Ok(match object {
            Value::Undefined(about) => return failed(&**about),
            Value::Passage(_) => return Err(Fault::Read),
            Value::Namespace(at) => {
                let namespace = self.namespaces.get(*at);
                namespace.and_then(|namespace| namespace.borrow().get(name).cloned())
            }
            Value::Seq(seq) if seq.kind == Kind::Group && matches!(name, "grouper" | "list") => {
                seq.items.get(usize::from(name == "list")).cloned()
            }
            Value::Callable(callable) => match &**callable {
                Callable::Loop(at) => self.loop_attribute(*at, name)?,
                Callable::Macro(at) if name == "name" => {
                    self.macros.get(*at).map(|(node, _)| Value::own(Arc::clone(&node.name)))
                }
                Callable::Cycler(items, at) if name == "current" => items.items.get(at.get()).cloned(),
                Callable::Cycler(..) if matches!(name, "next" | "reset") => {
                    Some(Value::callable(Callable::Method(object.clone(), name.into())))
                }
                _ => None,
            },
            _ if methods::has(object, name) => {
                Some(Value::callable(Callable::Method(object.clone(), name.into())))
            }
            _ => None,
        })
    }

    pub(super) fn call(&mut self, callee: &Value, args: Args) -> Fallible<Value> {
        self.budget.step()?;
        let Value::Callable(callable) = callee else {
            return match callee {
                Value::Undefined(about) => failed(&**about),
                Value::Passage(_) => Err(Fault::Read),
                _ => failed(format!("'{}' object is not callable", callee.type_name())),
            };
        };
        match &**callable {
            Callable::Global(name) => self.global(name, args),
            Callable::Macro(at) => {
                let Some((node, scope)) = self.macros.get(*at).cloned() else { return Ok(Value::None) };
                self.macro_call(&node, &scope, args)
            }
            Callable::Loop(at) => self.recursion(*at, args),
            Callable::Method(receiver, name) => match receiver {
                Value::Callable(receiver) => match &**receiver {
                    Callable::Loop(at) => self.loop_method(*at, name, args),
                    Callable::Cycler(items, at) => {
                        let value = items.items.get(at.get()).cloned().unwrap_or(Value::None);
                        at.set(if &**name == "reset" {
                            0
                        } else {
                            (at.get() + 1) % items.items.len().max(1)
                        });
                        Ok(if &**name == "reset" { Value::None } else { value })
                    }
                    _ => failed("not callable"),
                },
                receiver => methods::call(self, receiver, name, args),
            },
            Callable::Cycler(..) => failed("'Cycler' object is not callable"),
            Callable::Joiner(separator, used) => {
                Ok(if used.replace(true) { Value::Str(separator.clone()) } else { Value::own("") })
            }
        }
    }

    #[inline(never)]
    fn macro_call(&mut self, node: &Arc<Macro>, around: &Rc<Scope>, args: Args) -> Fallible<Value> {
        let inner = Scope::within(around);
        let Args { positional, mut named } = args;
        let mut positional = positional.into_iter();
        let mut take_named = |name: &str| {
            let at = named.iter().position(|(given, _)| **given == *name)?;
            Some(named.swap_remove(at).1)
        };
        let mut values = Vec::with_capacity(node.parameters.len());
        for (name, _) in &node.parameters {
            values.push(positional.next().or_else(|| take_named(name)));
        }
        let declares = |name: &str| node.parameters.iter().any(|(parameter, _)| **parameter == *name);
        if node.takes_caller && !declares("caller") {
            let caller = take_named("caller").unwrap_or_else(|| Value::undefined("no caller is defined"));
            inner.set(&"caller".into(), caller);
        }
        if node.takes_named_rest {
            let mut entries = IndexMap::new();
            for (name, value) in named.drain(..) {
                entries.insert(Key::Str(Text::own(name)), value);
            }
            inner.set(&"kwargs".into(), Value::dict(entries)?);
        } else if let Some((name, _)) = named.first() {
            return failed(format!("the macro `{}` takes no argument `{name}`", node.name));
        }
        let rest: Vec<Value> = positional.collect();
        if node.takes_rest {
            inner.set(&"varargs".into(), Value::tuple(rest)?);
        } else if !rest.is_empty() {
            let parameters = node.parameters.len();
            return failed(format!("the macro `{}` takes not more than {parameters} arguments", node.name));
        }
        let outer = std::mem::replace(&mut self.scope, inner);
        for ((name, default), value) in node.parameters.iter().zip(values) {
            let value = match (value, default) {
                (Some(value), _) => value,
                (None, Some(default)) => self.eval(default)?,
                (None, None) => Value::undefined(format!("parameter `{name}` was not provided")),
            };
            self.scope.set(name, value);
        }
        let budget = self.budget;
        let text = budget.call(|| self.captured(|machine| machine.body(&node.body)))?;
        self.scope = outer;
        Ok(Value::Str(text))
    }
}

fn missing(object: &Value, name: &str) -> Value {
    let name: String = name.chars().take(100).collect();
    Value::undefined(match object {
        Value::Dict(_) => format!("the dict has no key `{name}`"),
        _ => format!("a value of type {} has no attribute `{name}`", object.type_name()),
    })
}

/// Python's truth value.
pub(super) fn truth(value: &Value) -> bool {
    match value {
        Value::Undefined(_) | Value::None => false,
        Value::Bool(truth) => *truth,
        Value::Int(int) => *int != 0,
        Value::Float(float) => *float != 0.0,
        Value::Str(text) => !text.as_str().is_empty(),
        Value::Seq(seq) => !seq.items.is_empty(),
        Value::Dict(dict) => !dict.entries.is_empty(),
        // A passage is never empty.
        Value::Generator(_) | Value::Namespace(_) | Value::Callable(_) | Value::Passage(_) => true,
    }
}
