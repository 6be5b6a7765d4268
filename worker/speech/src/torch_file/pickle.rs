//! Reads the pickles of PyTorch's files without running them: a name of a class or function is a text that is
//! never looked up, and an object is the list of what it was made from.
//!
//! Only the instructions of protocol 2 that `torch.save` writes are known; others are an error. Values refer
//! to each other by number, so references in circles need no care here. Their number, and the bytes of a
//! pickle, are limited.

use std::collections::HashMap;

/// Maximum bytes of a pickle.
pub(super) const MAX_BYTES: usize = 4 << 20;
/// Maximum number of values of a pickle.
pub(super) const MAX_VALUES: usize = 1 << 18;

/// Number of a value in [`Pickle::values`].
pub(super) type Index = usize;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    /// `None`: it does not fit.
    Int(Option<i64>),
    Float,
    Text(&'a str),
    /// A tuple or list.
    List(Vec<Index>),
    /// Keys and values.
    Dict(Vec<(Index, Index)>),
    /// Module and name of a class or function.
    Global(&'a str, &'a str),
    /// A value from outside the pickle, by its description.
    Persistent(Index),
    /// A call of a function or class with arguments. Items that are set later are in `items`.
    Called {
        function: Index,
        arguments: Index,
        items: Vec<(Index, Index)>,
    },
}

/// A pickle that has been read.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    pub(super) values: Vec<Value<'a>>,
    pub(super) root: Index,
    /// Bytes that it takes.
    pub(super) len: usize,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value<'a>>,
    stack: Vec<Index>,
    marks: Vec<usize>,
    memo: HashMap<u32, Index>,
}

/// Reads the pickle at the start of `bytes`.
///
/// # Errors
/// The fault and its position, in words.
pub(super) fn read(bytes: &[u8]) -> Result<Pickle<'_>, String> {
    let bytes = &bytes[..bytes.len().min(MAX_BYTES)];
    let mut reader = Reader {
        bytes,
        at: 0,
        values: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
    };
    loop {
        let at = reader.at;
        let more = reader.step().map_err(|fault| format!("pickle, byte {at}: {fault}"))?;
        if !more {
            let Reader { at, values, mut stack, .. } = reader;
            let root = stack.pop().ok_or("pickle: it ends without a value")?;
            return Ok(Pickle { values, root, len: at });
        }
    }
}

const EMPTY: &str = "the stack is empty";

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or_else(|| format!("it ends, or has more than {MAX_BYTES} bytes"))?;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.take(N).map(|bytes| std::array::from_fn(|at| bytes[at]))
    }

    fn byte(&mut self) -> Result<u8, String> {
        self.array().map(|[byte]| byte)
    }

    fn number(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn text(&mut self, len: usize) -> Result<&'a str, String> {
        std::str::from_utf8(self.take(len)?).map_err(|_| "a text is not UTF-8".to_owned())
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let rest = &self.bytes[self.at..];
        let len = rest.iter().position(|byte| *byte == b'\n').ok_or("a name has no end")?;
        let line = self.text(len)?;
        self.at += 1;
        Ok(line)
    }

    fn push(&mut self, value: Value<'a>) -> Result<(), String> {
        if self.values.len() == MAX_VALUES {
            return Err(format!("it has more than {MAX_VALUES} values"));
        }
        self.stack.push(self.values.len());
        self.values.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Index, String> {
        match self.marks.last() {
            Some(mark) if *mark == self.stack.len() => Err(EMPTY.to_owned()),
            _ => self.stack.pop().ok_or_else(|| EMPTY.to_owned()),
        }
    }

    /// The last `count` values.
    fn last(&mut self, count: usize) -> Result<Vec<Index>, String> {
        let mut last: Vec<_> = (0..count).map(|_| self.pop()).collect::<Result<_, _>>()?;
        last.reverse();
        Ok(last)
    }

    /// All values since the last mark.
    fn marked(&mut self) -> Result<Vec<Index>, String> {
        let mark = self.marks.pop().ok_or("there is no mark")?;
        Ok(self.stack.split_off(mark))
    }

    fn top(&mut self) -> Result<&mut Value<'a>, String> {
        let top = self.stack.last().ok_or(EMPTY)?;
        Ok(&mut self.values[*top])
    }

    /// Repeats a value of the memo.
    fn get(&mut self, key: u32) -> Result<(), String> {
        let index = self.memo.get(&key).ok_or_else(|| format!("nothing is stored as {key}"))?;
        self.stack.push(*index);
        Ok(())
    }

    fn put(&mut self, key: u32) -> Result<(), String> {
        let top = *self.stack.last().ok_or(EMPTY)?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn append(&mut self, new: Vec<Index>) -> Result<(), String> {
        match self.top()? {
            Value::List(items) => items.extend(new),
            // Items of an object that is not read.
            Value::Called { .. } => {}
            _ => return Err("items are added to what is not a list".to_owned()),
        }
        Ok(())
    }

    fn set_items(&mut self, new: &[Index]) -> Result<(), String> {
        let (pairs, []) = new.as_chunks::<2>() else { return Err("a key has no value".to_owned()) };
        match self.top()? {
            Value::Dict(items) | Value::Called { items, .. } => {
                items.extend(pairs.iter().map(|[key, value]| (*key, *value)));
                Ok(())
            }
            _ => Err("items are set in what is not a dictionary".to_owned()),
        }
    }

    /// Runs the next instruction. Returns false after the last one.
    fn step(&mut self) -> Result<bool, String> {
        let instruction = self.byte()?;
        match instruction {
            // PROTO
            0x80 => match self.byte()? {
                2 => {}
                version => return Err(format!("its protocol is {version}, it must be 2")),
            },
            // STOP
            b'.' => return Ok(false),
            // MARK
            b'(' => self.marks.push(self.stack.len()),
            // NONE
            b'N' => self.push(Value::None)?,
            // NEWTRUE, NEWFALSE
            0x88 | 0x89 => self.push(Value::Bool(instruction == 0x88))?,
            // BININT, BININT1, BININT2
            b'J' => {
                let value = i32::from_le_bytes(self.array()?);
                self.push(Value::Int(Some(i64::from(value))))?;
            }
            b'K' => {
                let value = self.byte()?;
                self.push(Value::Int(Some(i64::from(value))))?;
            }
            b'M' => {
                let value = u16::from_le_bytes(self.array()?);
                self.push(Value::Int(Some(i64::from(value))))?;
            }
            // LONG1: two's complement
            0x8a => {
                let len = self.byte()?;
                let bytes = self.take(usize::from(len))?;
                let sign = if bytes.last().is_some_and(|last| last & 0x80 != 0) { 0xff } else { 0 };
                let value = (bytes.len() <= 8).then(|| {
                    i64::from_le_bytes(std::array::from_fn(|at| bytes.get(at).copied().unwrap_or(sign)))
                });
                self.push(Value::Int(value))?;
            }
            // BINFLOAT
            b'G' => {
                self.take(8)?;
                self.push(Value::Float)?;
            }
            // BINUNICODE
            b'X' => {
                let len = self.number()?;
                let text = self.text(len as usize)?;
                self.push(Value::Text(text))?;
            }
            // EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b']' | b')' => self.push(Value::List(Vec::new()))?,
            // TUPLE1, TUPLE2, TUPLE3, TUPLE
            0x85..=0x87 => {
                let items = self.last(usize::from(instruction - 0x84))?;
                self.push(Value::List(items))?;
            }
            b't' => {
                let items = self.marked()?;
                self.push(Value::List(items))?;
            }
            // APPEND, APPENDS
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' => {
                let items = self.marked()?;
                self.append(items)?;
            }
            // SETITEM, SETITEMS
            b's' => {
                let items = self.last(2)?;
                self.set_items(&items)?;
            }
            b'u' => {
                let items = self.marked()?;
                self.set_items(&items)?;
            }
            // BINPUT, LONG_BINPUT, BINGET, LONG_BINGET
            b'q' => {
                let key = self.byte()?;
                self.put(u32::from(key))?;
            }
            b'r' => {
                let key = self.number()?;
                self.put(key)?;
            }
            b'h' => {
                let key = self.byte()?;
                self.get(u32::from(key))?;
            }
            b'j' => {
                let key = self.number()?;
                self.get(key)?;
            }
            // GLOBAL
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Value::Global(module, name))?;
            }
            // REDUCE, NEWOBJ: nothing is called
            b'R' | 0x81 => {
                let arguments = self.pop()?;
                let function = self.pop()?;
                self.push(Value::Called { function, arguments, items: Vec::new() })?;
            }
            // BUILD: the attributes of an object are not read
            b'b' => {
                self.pop()?;
                self.top()?;
            }
            // BINPERSID
            b'Q' => {
                let description = self.pop()?;
                self.push(Value::Persistent(description))?;
            }
            other => return Err(format!("instruction {other:#04x} is not one of a file of tensors")),
        }
        Ok(true)
    }
}
