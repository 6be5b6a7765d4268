//! A metadata value and its conversions.

use std::borrow::Cow;

use super::Strings;

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// Values of one type, stored compactly.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Strings),
    Array(Vec<Self>),
}

impl Value {
    /// Name of the stored type.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
            Self::Array(array) => array.type_name(),
        }
    }

    fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(n) => n.into(),
            Self::I8(n) => n.into(),
            Self::U16(n) => n.into(),
            Self::I16(n) => n.into(),
            Self::U32(n) => n.into(),
            Self::I32(n) => n.into(),
            Self::U64(n) => n.into(),
            Self::I64(n) => n.into(),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => return None,
        })
    }
}

/// Expands to `$body` with `$list` bound to the elements, for any element type.
macro_rules! for_each_list {
    ($array:expr, $list:ident => $body:expr) => {
        match $array {
            Array::U8($list) => $body,
            Array::I8($list) => $body,
            Array::U16($list) => $body,
            Array::I16($list) => $body,
            Array::U32($list) => $body,
            Array::I32($list) => $body,
            Array::U64($list) => $body,
            Array::I64($list) => $body,
            Array::F32($list) => $body,
            Array::F64($list) => $body,
            Array::Bool($list) => $body,
            Array::String($list) => $body,
            Array::Array($list) => $body,
        }
    };
}

impl Array {
    /// Name of the stored type.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "array of u8",
            Self::I8(_) => "array of i8",
            Self::U16(_) => "array of u16",
            Self::I16(_) => "array of i16",
            Self::U32(_) => "array of u32",
            Self::I32(_) => "array of i32",
            Self::U64(_) => "array of u64",
            Self::I64(_) => "array of i64",
            Self::F32(_) => "array of f32",
            Self::F64(_) => "array of f64",
            Self::Bool(_) => "array of bool",
            Self::String(_) => "array of string",
            Self::Array(_) => "array of arrays",
        }
    }

    pub fn len(&self) -> usize {
        for_each_list!(self, list => list.len())
    }

    pub fn is_empty(&self) -> bool {
        for_each_list!(self, list => list.is_empty())
    }

    fn integers<T: TryFrom<i128>>(&self) -> Result<Vec<T>, Mismatch> {
        fn convert<N: Copy + Into<i128>, T: TryFrom<i128>>(list: &[N]) -> Result<Vec<T>, Mismatch> {
            list.iter().map(|&n| integer(n.into())).collect()
        }
        match self {
            Self::U8(list) => convert(list),
            Self::I8(list) => convert(list),
            Self::U16(list) => convert(list),
            Self::I16(list) => convert(list),
            Self::U32(list) => convert(list),
            Self::I32(list) => convert(list),
            Self::U64(list) => convert(list),
            Self::I64(list) => convert(list),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => {
                Err(Mismatch::Type)
            }
        }
    }
}

fn integer<T: TryFrom<i128>>(n: i128) -> Result<T, Mismatch> {
    T::try_from(n).map_err(|_| Mismatch::Range(n))
}

/// Error of a value that cannot be read as a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mismatch {
    /// Wrong type.
    Type,
    /// An integer out of the type's range.
    Range(i128),
}

/// A type that a [`Value`] converts to. Integers convert from every integer type that holds them, `f32` from
/// `f32` and (rounded) `f64`, `bool` from `bool` and the integers 0 and 1. Arrays convert likewise, and are
/// borrowed if the stored type is the wanted one.
pub trait FromValue<'a>: Sized {
    /// Type name for errors.
    const NAME: &'static str;

    /// Reads `value`.
    fn from_value(value: &'a Value) -> Result<Self, Mismatch>;
}

macro_rules! from_integer {
    ($($ty:ty),*) => {$(
        impl FromValue<'_> for $ty {
            const NAME: &'static str = stringify!($ty);
            fn from_value(value: &Value) -> Result<Self, Mismatch> {
                integer(value.integer().ok_or(Mismatch::Type)?)
            }
        }
    )*};
}
from_integer!(u8, u16, u32, u64, usize, i32, i64);

macro_rules! from_integers {
    ($($variant:ident $ty:ty),*) => {$(
        impl<'a> FromValue<'a> for Cow<'a, [$ty]> {
            const NAME: &'static str = concat!("array of ", stringify!($ty));
            fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
                match value {
                    Value::Array(Array::$variant(list)) => Ok(Cow::Borrowed(list)),
                    Value::Array(other) => other.integers().map(Cow::Owned),
                    _ => Err(Mismatch::Type),
                }
            }
        }
    )*};
}
from_integers!(U8 u8, U32 u32, I32 i32, U64 u64);

impl FromValue<'_> for f32 {
    const NAME: &'static str = "f32";
    fn from_value(value: &Value) -> Result<Self, Mismatch> {
        match *value {
            Value::F32(x) => Ok(x),
            Value::F64(x) => Ok(x as Self),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for Cow<'a, [f32]> {
    const NAME: &'static str = "array of f32";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(Array::F32(list)) => Ok(Cow::Borrowed(list)),
            Value::Array(Array::F64(list)) => Ok(list.iter().map(|&x| x as f32).collect()),
            _ => Err(Mismatch::Type),
        }
    }
}

impl FromValue<'_> for bool {
    const NAME: &'static str = "bool";
    fn from_value(value: &Value) -> Result<Self, Mismatch> {
        match value {
            Value::Bool(flag) => Ok(*flag),
            other => flag(other.integer().ok_or(Mismatch::Type)?),
        }
    }
}

impl<'a> FromValue<'a> for Cow<'a, [bool]> {
    const NAME: &'static str = "array of bool";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(Array::Bool(list)) => Ok(Cow::Borrowed(list)),
            Value::Array(other) => other.integers::<i128>()?.into_iter().map(flag).collect(),
            _ => Err(Mismatch::Type),
        }
    }
}

fn flag(n: i128) -> Result<bool, Mismatch> {
    match n {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Mismatch::Range(other)),
    }
}

impl<'a> FromValue<'a> for &'a str {
    const NAME: &'static str = "string";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::String(string) => Ok(string),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for &'a Strings {
    const NAME: &'static str = "array of string";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(Array::String(list)) => Ok(list),
            _ => Err(Mismatch::Type),
        }
    }
}

macro_rules! into_value {
    ($($variant:ident $ty:ty),*) => {$(
        impl From<$ty> for Value {
            fn from(x: $ty) -> Self {
                Self::$variant(x)
            }
        }
        impl From<Vec<$ty>> for Value {
            fn from(list: Vec<$ty>) -> Self {
                Self::Array(Array::$variant(list))
            }
        }
    )*};
}
into_value!(U8 u8, I8 i8, U16 u16, I16 i16, U32 u32, I32 i32, U64 u64, I64 i64, F32 f32, F64 f64, Bool bool);

impl From<&str> for Value {
    fn from(string: &str) -> Self {
        Self::String(string.to_owned())
    }
}

impl From<String> for Value {
    fn from(string: String) -> Self {
        Self::String(string)
    }
}

impl From<Strings> for Value {
    fn from(list: Strings) -> Self {
        Self::Array(Array::String(list))
    }
}
