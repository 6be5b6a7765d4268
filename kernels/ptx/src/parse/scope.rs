//! Scopes of names inside a body.

use crate::ast::{File, Operand, Reg, Space, Special};
use std::collections::HashMap;

/// Meaning of a name.
#[derive(Debug, Clone, Copy)]
pub(super) enum Named {
    Register(Reg),
    Variable(Space, u64),
}

#[derive(Debug, Default)]
pub(super) struct Scope {
    /// Distinguishes labels of different scopes.
    pub(super) id: u32,
    pub(super) names: HashMap<String, Named>,
    /// `%r<9>`: the first register and the number of registers.
    pub(super) rows: HashMap<String, (Reg, u32)>,
}

/// Looks up a name, innermost scope first.
pub(super) fn find(scopes: &[Scope], name: &str) -> Option<Operand> {
    let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = &name[prefix.len()..];
    for scope in scopes.iter().rev() {
        match scope.names.get(name) {
            Some(&Named::Register(reg)) => return Some(Operand::Reg(reg)),
            Some(&Named::Variable(space, offset)) => return Some(Operand::Variable(space, offset)),
            None => {}
        }
        if let (Some(&(first, count)), Ok(number)) = (scope.rows.get(prefix), digits.parse::<u32>())
            && number < count
        {
            return Some(Operand::Reg(Reg { file: first.file, index: first.index + number }));
        }
    }
    None
}

/// Returns the file of a declared register, or `None` for an unsupported type.
pub(super) fn file(ty: &str) -> Option<File> {
    Some(match ty {
        ".pred" => File::Pred,
        ".b8" | ".u8" | ".s8" | ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => File::B16,
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => File::B32,
        ".b64" | ".u64" | ".s64" | ".f64" => File::B64,
        _ => return None,
    })
}

/// Returns a special register, which the machine sets.
pub(super) fn special(name: &str) -> Option<Special> {
    let axis = |name: &str| match name {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    if let Some((name, suffix)) = name.split_once('.') {
        let axis = axis(suffix)?;
        return match name {
            "%tid" => Some(Special::Tid(axis)),
            "%ntid" => Some(Special::BlockDim(axis)),
            "%ctaid" => Some(Special::Ctaid(axis)),
            "%nctaid" => Some(Special::GridDim(axis)),
            _ => None,
        };
    }
    Some(match name {
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%nwarpid" => Special::Warps,
        "%lanemask_eq" => Special::MaskEq,
        "%lanemask_lt" => Special::MaskLt,
        "%lanemask_le" => Special::MaskLe,
        "%lanemask_gt" => Special::MaskGt,
        "%lanemask_ge" => Special::MaskGe,
        "%dynamic_smem_size" => Special::DynamicShared,
        "%total_smem_size" => Special::TotalShared,
        _ => return None,
    })
}
