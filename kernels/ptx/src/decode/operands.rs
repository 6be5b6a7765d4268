//! Words and operands of an instruction, taken one by one. Untaken words or operands make the instruction
//! unknown.

use super::Decoded;
use super::ty::Ty;
use crate::ast::{File, Number, Operand, Raw, Reg, Space, Special};
use crate::op::{Address, Condition, Data};
use std::collections::HashMap;

/// Registers for constants and special registers. They follow the kernel's own registers.
#[derive(Debug)]
pub(super) struct Constants {
    /// Number of registers: `[32 bits, 64 bits, predicates]`.
    pub(super) registers: [u32; 3],
    values32: HashMap<u32, u32>,
    values64: HashMap<u64, u32>,
    specials: HashMap<Special, u32>,
}

impl Constants {
    pub(super) fn new(registers: [u32; 3]) -> Self {
        Self { registers, values32: HashMap::new(), values64: HashMap::new(), specials: HashMap::new() }
    }

    fn allocate(&mut self, file: usize) -> u32 {
        self.registers[file] += 1;
        self.registers[file] - 1
    }

    fn value32(&mut self, value: u32) -> u32 {
        if let Some(&index) = self.values32.get(&value) {
            return index;
        }
        let index = self.allocate(0);
        self.values32.insert(value, index);
        index
    }

    fn value64(&mut self, value: u64) -> u32 {
        if let Some(&index) = self.values64.get(&value) {
            return index;
        }
        let index = self.allocate(1);
        self.values64.insert(value, index);
        index
    }

    fn special(&mut self, special: Special) -> u32 {
        if let Some(&index) = self.specials.get(&special) {
            return index;
        }
        let index = self.allocate(0);
        self.specials.insert(special, index);
        index
    }

    pub(super) fn list32(&self) -> Vec<(u32, u32)> {
        self.values32.iter().map(|(&value, &index)| (index, value)).collect()
    }

    pub(super) fn list64(&self) -> Vec<(u32, u64)> {
        self.values64.iter().map(|(&value, &index)| (index, value)).collect()
    }

    pub(super) fn specials(&self) -> Vec<(Special, u32)> {
        self.specials.iter().map(|(&special, &index)| (special, index)).collect()
    }
}

/// An instruction that is being decoded.
pub(super) struct Decoder<'a> {
    raw: &'a Raw,
    /// Modifiers after the opcode's first word; `None` for taken ones.
    words: Vec<Option<&'a str>>,
    taken: usize,
    constants: &'a mut Constants,
    labels: &'a HashMap<&'a str, u32>,
    tables: &'a [(String, Vec<String>)],
    globals: &'a [u64],
    dynamic: u32,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(
        raw: &'a Raw,
        constants: &'a mut Constants,
        labels: &'a HashMap<&'a str, u32>,
        tables: &'a [(String, Vec<String>)],
        globals: &'a [u64],
        dynamic: u32,
    ) -> Self {
        let words = raw.opcode.split('.').skip(1).map(Some).collect();
        Self { raw, words, taken: 0, constants, labels, tables, globals, dynamic }
    }

    pub(super) fn base(&self) -> &'a str {
        self.raw.opcode.split('.').next().unwrap_or_default()
    }

    /// Whether a modifier is a float type.
    pub(super) fn is_float(&self) -> bool {
        self.words.iter().flatten().any(|word| Ty::read(word).is_some_and(Ty::is_float))
    }

    /// Takes a modifier if it is present.
    pub(super) fn word(&mut self, word: &str) -> bool {
        match self.words.iter_mut().find(|w| **w == Some(word)) {
            Some(found) => {
                *found = None;
                true
            }
            None => false,
        }
    }

    /// Takes one of several modifiers.
    pub(super) fn one_of(&mut self, words: &[&'static str]) -> Option<&'static str> {
        words.iter().copied().find(|word| self.word(word))
    }

    /// Takes the first modifier with this beginning. Returns the rest of it.
    pub(super) fn prefixed(&mut self, beginning: &str) -> Option<&'a str> {
        self.words.iter_mut().find_map(|word| {
            let rest = word.and_then(|word| word.strip_prefix(beginning))?;
            *word = None;
            Some(rest)
        })
    }

    /// Takes the first modifier that is a type.
    pub(super) fn ty(&mut self) -> Decoded<Ty> {
        for word in &mut self.words {
            if let Some(ty) = word.and_then(Ty::read) {
                *word = None;
                return Ok(ty);
            }
        }
        Err("it has no type that is known".into())
    }

    pub(super) fn finish(&self) -> Decoded<()> {
        if let Some(word) = self.words.iter().flatten().next() {
            return Err(format!("the modifier .{word} is not known here"));
        }
        if self.taken != self.raw.operands.len() {
            return Err(format!("it has {} operands, {} are known", self.raw.operands.len(), self.taken));
        }
        Ok(())
    }

    pub(super) fn left(&self) -> usize {
        self.raw.operands.len() - self.taken
    }

    /// Takes the next operand.
    pub(super) fn operand(&mut self) -> Decoded<&'a Operand> {
        let operand = self.raw.operands.get(self.taken).ok_or("an operand is missing")?;
        self.taken += 1;
        Ok(operand)
    }

    /// Takes a register to write.
    pub(super) fn to(&mut self, bits: u8) -> Decoded<u32> {
        let operand = self.operand()?;
        self.target(operand, bits)
    }

    pub(super) fn target(&mut self, operand: &Operand, bits: u8) -> Decoded<u32> {
        match (operand, bits) {
            (Operand::Reg(Reg { file: File::B16, index }), 16)
            | (Operand::Reg(Reg { file: File::B32, index }), 32)
            | (Operand::Reg(Reg { file: File::B64, index }), 64)
            | (Operand::Reg(Reg { file: File::Pred, index }), 1) => Ok(*index),
            (Operand::Sink, 1) => Ok(self.constants.allocate(2)),
            (Operand::Sink, 64) => Ok(self.constants.allocate(1)),
            (Operand::Sink, _) => Ok(self.constants.allocate(0)),
            (other, _) => Err(format!("{other:?} cannot be written as {bits} bits")),
        }
    }

    /// Takes a value to read, of 16, 32 or 64 bits.
    pub(super) fn from(&mut self, bits: u8) -> Decoded<u32> {
        let operand = self.operand()?;
        self.source(operand, bits)
    }

    pub(super) fn source(&mut self, operand: &Operand, bits: u8) -> Decoded<u32> {
        match (operand, bits) {
            (Operand::Reg(Reg { file: File::B16, index }), 16)
            | (Operand::Reg(Reg { file: File::B32, index }), 32)
            | (Operand::Reg(Reg { file: File::B64, index }), 64) => Ok(*index),
            (&Operand::Special(special), 32) => Ok(self.constants.special(special)),
            (&Operand::Number(Number::Int(value)), 16) => Ok(self.constants.value32(value as u32 & 0xffff)),
            (&Operand::Number(Number::Int(value)), 32) => Ok(self.constants.value32(value as u32)),
            (&Operand::Number(Number::Int(value)), 64) => Ok(self.constants.value64(value)),
            (&Operand::Number(Number::F32(value)), 32) => Ok(self.constants.value32(value)),
            (&Operand::Number(Number::F64(value)), 32) => {
                Ok(self.constants.value32((value as f32).to_bits()))
            }
            (&Operand::Number(Number::F64(value)), 64) => Ok(self.constants.value64(value.to_bits())),
            (Operand::Variable(..) | Operand::Global(..) | Operand::Dynamic(_), 32) => {
                let (_, value) = self.variable(operand)?;
                Ok(self.constants.value32(value as u32))
            }
            (Operand::Variable(..) | Operand::Global(..) | Operand::Dynamic(_), 64) => {
                let (_, value) = self.variable(operand)?;
                Ok(self.constants.value64(value))
            }
            (other, _) => Err(format!("{other:?} cannot be read as {bits} bits")),
        }
    }

    /// Returns a 32-bit register with a constant.
    pub(super) fn constant32(&mut self, value: u32) -> u32 {
        self.constants.value32(value)
    }

    /// Returns the width of an operand's register, which may be larger than that of its type.
    pub(super) fn register_bits(&self, index: usize, least: u8) -> Decoded<u8> {
        let bits = match self.raw.operands.get(index) {
            Some(Operand::Reg(Reg { file: File::B16, .. })) => 16,
            Some(Operand::Reg(Reg { file: File::B32, .. }) | Operand::Special(_)) => 32,
            Some(Operand::Reg(Reg { file: File::B64, .. })) => 64,
            Some(Operand::Number(_)) => least.max(32),
            other => return Err(format!("{other:?} has no width")),
        };
        if bits < least { Err(format!("a register of {bits} bits for {least}")) } else { Ok(bits) }
    }

    /// Returns a variable's space and address.
    fn variable(&self, operand: &Operand) -> Decoded<(Space, u64)> {
        match operand {
            &Operand::Variable(space, at) => Ok((space, at)),
            &Operand::Dynamic(offset) => {
                Ok((Space::Shared, u64::from(self.dynamic).wrapping_add_signed(offset)))
            }
            &Operand::Global(number, offset) => {
                let address = self.globals.get(number).ok_or("a variable without an address")?;
                Ok((Space::Global, address.wrapping_add_signed(offset)))
            }
            other => Err(format!("{other:?} is no variable")),
        }
    }

    /// Takes a literal number.
    pub(super) fn number(&mut self) -> Decoded<u64> {
        match self.operand()? {
            Operand::Number(Number::Int(value)) => Ok(*value),
            other => Err(format!("{other:?} where a number was expected")),
        }
    }

    pub(super) fn condition(&mut self) -> Decoded<Condition> {
        match self.operand()? {
            &Operand::Reg(Reg { file: File::Pred, index }) => Ok(Condition { pred: index, negated: false }),
            Operand::Not(inner) => match **inner {
                Operand::Reg(Reg { file: File::Pred, index }) => Ok(Condition { pred: index, negated: true }),
                ref other => Err(format!("{other:?} is no predicate")),
            },
            other => Err(format!("{other:?} is no predicate")),
        }
    }

    /// `d|p` or `d`.
    pub(super) fn pair(&mut self) -> Decoded<(&'a Operand, Option<&'a Operand>)> {
        Ok(match self.operand()? {
            Operand::Pair(first, second) => (&**first, Some(&**second)),
            other => (other, None),
        })
    }

    /// Returns the register of an access with elements of `bits`. The register may be wider.
    pub(super) fn data(&mut self, operand: &Operand, bits: u8, written: bool) -> Decoded<Option<Data>> {
        Ok(Some(match operand {
            Operand::Sink if written => return Ok(None),
            &Operand::Reg(Reg { file: File::B16, index }) if bits <= 16 => Data::B16(index),
            &Operand::Reg(Reg { file: File::B32, index }) if bits <= 32 => Data::B32(index),
            &Operand::Reg(Reg { file: File::B64, index }) => Data::B64(index),
            other if !written && bits == 64 => Data::B64(self.source(other, 64)?),
            other if !written => Data::B32(self.source(other, 32)?),
            other => return Err(format!("{other:?} cannot hold {bits} bits")),
        }))
    }

    /// Takes `[...]` in the space that the opcode names. A variable's own space has precedence, because
    /// function parameters are in local memory here.
    pub(super) fn address(&mut self, space: Space) -> Decoded<(Space, Address)> {
        let operand = self.operand()?;
        let Operand::Memory(base, offset) = operand else {
            return Err(format!("{operand:?} is no address"));
        };
        let offset = *offset;
        match &**base {
            &Operand::Reg(Reg { file: File::B32, index }) => {
                Ok((space, Address { base: Data::B32(index), offset }))
            }
            &Operand::Reg(Reg { file: File::B64, index }) => {
                Ok((space, Address { base: Data::B64(index), offset }))
            }
            &Operand::Number(Number::Int(value)) => {
                Ok((space, Address { base: Data::B64(self.constants.value64(value)), offset }))
            }
            other => {
                let (own, at) = self.variable(other)?;
                let matches_space = own == space
                    || (own == Space::Local && space == Space::Param)
                    || (own == Space::Global && space == Space::Generic);
                if !matches_space {
                    return Err(format!("a variable of {} memory in {} memory", own.name(), space.name()));
                }
                Ok((own, Address { base: Data::B64(self.constants.value64(at)), offset }))
            }
        }
    }

    pub(super) fn label(&mut self) -> Decoded<u32> {
        match self.operand()? {
            Operand::Name(name) => self.find_label(name),
            other => Err(format!("{other:?} is no label")),
        }
    }

    fn find_label(&self, name: &str) -> Decoded<u32> {
        in_scopes(name, |full| self.labels.get(full).copied())
    }

    pub(super) fn label_table(&mut self) -> Decoded<Vec<u32>> {
        let Operand::Name(name) = self.operand()? else {
            return Err("a list of labels is missing".into());
        };
        let tables = self.tables;
        let names = in_scopes(name, |full| tables.iter().find(|(n, _)| n == full).map(|(_, labels)| labels))?;
        names.iter().map(|label| self.find_label(label)).collect()
    }
}

/// Looks up a label in the scopes that it may belong to: `label@3.2.0`.
fn in_scopes<T>(name: &str, find: impl Fn(&str) -> Option<T>) -> Decoded<T> {
    let (label, scopes) = name.rsplit_once('@').ok_or("a label without a scope")?;
    scopes
        .split('.')
        .find_map(|scope| find(&format!("{label}@{scope}")))
        .ok_or_else(|| format!("the name {label} is not known"))
}
