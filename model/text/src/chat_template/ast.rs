//! Syntax tree of a template.

use std::sync::Arc;

pub(super) type Name = Arc<str>;
pub(super) type Body = Vec<Stmt>;

#[derive(Debug, Clone)]
pub(super) enum Const {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Rem,
    Pow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(Name, Expr)>,
    /// `*list`
    pub(super) rest: Option<Expr>,
    /// `**dict`
    pub(super) named_rest: Option<Expr>,
}

#[derive(Debug)]
pub(super) enum Expr {
    Const(Const),
    Name(Name),
    List(Vec<Self>),
    Tuple(Vec<Self>),
    Dict(Vec<(Self, Self)>),
    Not(Box<Self>),
    Neg(Box<Self>),
    Pos(Box<Self>),
    And(Box<(Self, Self)>),
    Or(Box<(Self, Self)>),
    Binary(Binary, Box<(Self, Self)>),
    Concat(Vec<Self>),
    Compare(Box<Self>, Vec<(Comparison, Self)>),
    /// `then if condition else otherwise`
    Cond(Box<(Self, Self)>, Option<Box<Self>>),
    Attribute(Box<Self>, Name),
    Item(Box<(Self, Self)>),
    Slice(Box<Self>, Box<[Option<Self>; 3]>),
    Call(Box<Self>, Box<Arguments>),
    Filter(Box<Self>, Name, Box<Arguments>),
    Test(Box<Self>, Name, Box<Arguments>),
}

#[derive(Debug)]
pub(super) enum Target {
    Name(Name),
    Tuple(Vec<Self>),
    /// An attribute of a namespace.
    Namespace(Name, Name),
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) iter: Expr,
    pub(super) condition: Option<Expr>,
    pub(super) recursive: bool,
    pub(super) body: Body,
    pub(super) otherwise: Body,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Name,
    pub(super) parameters: Vec<(Name, Option<Expr>)>,
    pub(super) body: Body,
    /// Whether it reads `caller`, `varargs` or `kwargs`.
    pub(super) takes_caller: bool,
    pub(super) takes_rest: bool,
    pub(super) takes_named_rest: bool,
}

/// A statement and its line.
#[derive(Debug)]
pub(super) struct Stmt {
    pub(super) line: u32,
    pub(super) does: Does,
}

#[derive(Debug)]
pub(super) enum Does {
    Text(Arc<str>),
    Emit(Expr),
    Set(Target, Expr),
    /// The filter reads the name [`CAPTURED`].
    SetBlock(Target, Expr, Body),
    For(Arc<For>),
    If(Vec<(Expr, Body)>, Body),
    With(Vec<(Target, Expr)>, Body),
    Macro(Arc<Macro>),
    /// The body as a macro, and the call that receives it.
    CallBlock(Arc<Macro>, Expr, Box<Arguments>),
    /// The filter reads the name [`CAPTURED`].
    Filter(Expr, Body),
    /// Names set inside are local.
    Scope(Body),
    /// Sees only the template's global names.
    Block(Body),
    Break,
    Continue,
}

/// Name of a block's text while its filters are applied. No template can write this name.
pub(super) const CAPTURED: &str = "\0captured";
