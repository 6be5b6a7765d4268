//! Execution of loops.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::super::ast::{For, Name};
use super::super::budget::VISIT;
use super::super::calls::Args;
use super::super::operators;
use super::super::value::{Callable, Fallible, Iter, Value, failed};
use super::{Flow, Loop, Machine, Scope, truth};

impl Machine<'_> {
    pub(super) fn for_loop(
        &mut self,
        node: &Arc<For>,
        value: &Value,
        around: Rc<Scope>,
        level: usize,
    ) -> Fallible<Flow> {
        self.budget.charge(4 * VISIT)?;
        let items = Iter::of(value)?;
        let length = if node.condition.is_none() { items.len(self.budget)? } else { None };
        let outer = std::mem::replace(&mut self.scope, Rc::clone(&around));
        let at = self.loops.len();
        self.loops.push(Loop {
            node: Arc::clone(node),
            around: Rc::clone(&around),
            items,
            pending: VecDeque::new(),
            passed: 0,
            length,
            before: None,
            current: None,
            changed: None,
            level,
        });
        let name: Name = "loop".into();
        let mut flow = Flow::On;
        let mut empty = true;
        while let Some(item) = self.advance(at)? {
            self.budget.step()?;
            self.scope = Scope::within(&around);
            self.scope.set(&name, Value::callable(Callable::Loop(at)));
            self.assign(&node.target, item)?;
            match self.body(&node.body)? {
                // Jinja treats a loop as empty until one iteration has completed.
                Flow::On => empty = false,
                Flow::Break => break,
                Flow::Continue => {}
            }
        }
        if empty {
            self.scope = Scope::within(&around);
            flow = self.body(&node.otherwise)?;
        }
        if let Some(done) = self.loops.get_mut(at) {
            done.items = Iter::Empty;
        }
        self.scope = outer;
        Ok(flow)
    }

    /// The next item that passes the loop's condition and was not read ahead.
    fn pull(&mut self, at: usize) -> Fallible<Option<Value>> {
        loop {
            let Some(running) = self.loops.get_mut(at) else { return Ok(None) };
            let Some(item) = running.items.next(self.budget)? else { return Ok(None) };
            let node = Arc::clone(&running.node);
            let Some(condition) = &node.condition else { return Ok(Some(item)) };
            self.budget.step()?;
            let inner = Scope::within(&running.around);
            let outer = std::mem::replace(&mut self.scope, inner);
            self.assign(&node.target, item.clone())?;
            let passes = truth(&self.eval(condition)?);
            self.scope = outer;
            if passes {
                return Ok(Some(item));
            }
        }
    }

    fn peek(&mut self, at: usize) -> Fallible<Option<Value>> {
        if let Some(item) = self.loops.get(at).and_then(|running| running.pending.front()) {
            return Ok(Some(item.clone()));
        }
        let item = self.pull(at)?;
        if let (Some(item), Some(running)) = (&item, self.loops.get_mut(at)) {
            running.pending.push_back(item.clone());
        }
        Ok(item)
    }

    fn advance(&mut self, at: usize) -> Fallible<Option<Value>> {
        let pending = self.loops.get_mut(at).and_then(|running| running.pending.pop_front());
        let item = match pending {
            Some(item) => Some(item),
            None => self.pull(at)?,
        };
        if let (Some(item), Some(running)) = (&item, self.loops.get_mut(at)) {
            running.passed += 1;
            running.before = running.current.replace(item.clone());
        }
        Ok(item)
    }

    fn loop_length(&mut self, at: usize) -> Fallible<usize> {
        if let Some(length) = self.loops.get(at).and_then(|running| running.length) {
            return Ok(length);
        }
        while let Some(item) = self.pull(at)? {
            if let Some(running) = self.loops.get_mut(at) {
                running.pending.push_back(item);
            }
        }
        let Some(running) = self.loops.get_mut(at) else { return Ok(0) };
        let length = running.passed + running.pending.len();
        running.length = Some(length);
        Ok(length)
    }

    pub(super) fn loop_attribute(&mut self, at: usize, name: &str) -> Fallible<Option<Value>> {
        let Some(running) = self.loops.get(at) else { return Ok(None) };
        let (passed, level) = (running.passed, running.level);
        Ok(Some(match name {
            "index" => Value::int(passed),
            "index0" => Value::Int(passed as i128 - 1),
            "first" => Value::Bool(passed == 1),
            "depth" => Value::int(level + 1),
            "depth0" => Value::int(level),
            "last" => Value::Bool(self.peek(at)?.is_none()),
            "length" => Value::int(self.loop_length(at)?),
            "revindex" => Value::Int(self.loop_length(at)? as i128 - passed as i128 + 1),
            "revindex0" => Value::Int(self.loop_length(at)? as i128 - passed as i128),
            "previtem" => {
                let before = running.before.clone();
                before.unwrap_or_else(|| Value::undefined("there is no previous item"))
            }
            "nextitem" => {
                let next = self.peek(at)?;
                next.unwrap_or_else(|| Value::undefined("there is no next item"))
            }
            "cycle" | "changed" => {
                Value::callable(Callable::Method(Value::callable(Callable::Loop(at)), name.into()))
            }
            _ => return Ok(None),
        }))
    }

    pub(super) fn loop_method(&mut self, at: usize, name: &str, args: Args) -> Fallible<Value> {
        let values = args.positional;
        match name {
            "cycle" => {
                let passed = self.loops.get(at).map_or(1, |running| running.passed);
                let index = passed.saturating_sub(1).checked_rem(values.len());
                let value = index.and_then(|index| values.into_iter().nth(index));
                value.map_or_else(|| failed("no items for cycling given"), Ok)
            }
            _ => {
                let before = self.loops.get(at).and_then(|running| running.changed.clone());
                let same = match &before {
                    Some(before) if before.len() == values.len() => {
                        let mut same = true;
                        for (one, other) in before.iter().zip(&values) {
                            same = same && operators::equal(self, one, other)?;
                        }
                        same
                    }
                    _ => false,
                };
                if let Some(running) = self.loops.get_mut(at).filter(|_| !same) {
                    running.changed = Some(values);
                }
                Ok(Value::Bool(!same))
            }
        }
    }

    pub(super) fn recursion(&mut self, at: usize, args: Args) -> Fallible<Value> {
        let [value] = args.bind("loop", ["iterable"], 1)?;
        let Some(running) = self.loops.get(at) else { return Ok(Value::None) };
        if !running.node.recursive {
            return failed("the loop must be marked as recursive to be called");
        }
        let (node, around, level) =
            (Arc::clone(&running.node), Rc::clone(&running.around), running.level + 1);
        let value = value.unwrap_or(Value::None);
        let budget = self.budget;
        let text = budget.call(|| self.captured(|machine| machine.for_loop(&node, &value, around, level)))?;
        Ok(Value::Str(text))
    }
}
