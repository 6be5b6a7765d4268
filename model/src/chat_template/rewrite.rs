//! Puts guards into a compiled template.

use minijinja::machinery::{CompiledTemplate, Instruction as I, Instructions};

use super::TemplateError;
use super::limits::{
    CONTAINS, DEEP, FLAT, Guard, INDENT, JOIN, JOIN_TEXTS, JOINED_BY, KIND, MAP, REPEAT, REPLACE, TICK,
};

/// The instructions of `template`, with a guard before each whose cost depends on its operands.
pub(super) fn guarded<'a>(template: &CompiledTemplate<'a>) -> Result<Instructions<'a>, TemplateError> {
    rewritten(template, false)
}

/// The same for chats whose texts are [`Passage`](super::outline::Passage)s; none if what the template writes does not
/// go straight into the prompt, or depends on the time.
pub(super) fn outlining<'a>(template: &CompiledTemplate<'a>) -> Option<Instructions<'a>> {
    let all = (0..).map_while(|at| template.instructions.get(at));
    let fits = |instruction: &I<'_>| match instruction {
        I::BeginCapture(_) | I::EndCapture | I::BuildMacro(..) => false,
        I::CallFunction(name, _) | I::Lookup(name) => *name != "strftime_now",
        _ => true,
    };
    if all.into_iter().all(fits) { rewritten(template, true).ok() } else { None }
}

fn rewritten<'a>(template: &CompiledTemplate<'a>, outline: bool) -> Result<Instructions<'a>, TemplateError> {
    if !template.blocks.is_empty() {
        return Err(TemplateError::Unsupported { construct: "blocks" });
    }
    let old = &template.instructions;
    let all = || (0..).map_while(|at| Some((at, old.get(at)?)));
    let mut new = Instructions::new(old.name(), old.source());
    // Where each old instruction begins now, its guard included.
    let mut begins = Vec::new();
    for (at, instruction) in all() {
        let line = old.get_line(at).and_then(|line| u16::try_from(line).ok()).unwrap_or(u16::MAX);
        let kind = matches!(instruction, I::PerformTest(name, Some(1), _) if KINDS.contains(name));
        let guard = match instruction {
            I::Add | I::StringConcat if outline => None,
            I::PerformTest(..) if outline && kind => Some((KIND, 1)),
            _ => guard(instruction)?,
        };
        let first = match guard {
            Some((guard, operands)) => {
                let first = new.add_with_line(I::CallFunction(guard, Some(operands)), line);
                new.add_with_line(I::UnpackList(usize::from(operands)), line);
                first
            }
            None => u32::MAX,
        };
        let own = match instruction {
            // Raw text goes where expressions go, to be counted.
            I::EmitRaw(text) => {
                let own = new.add_with_line(I::LoadConst((*text).into()), line);
                new.add_with_line(I::Emit, line);
                own
            }
            I::Add | I::StringConcat if outline => {
                new.add_with_line(I::CallFunction(JOIN_TEXTS, Some(2)), line)
            }
            I::Iterate(_) => {
                let own = new.add_with_line(instruction.clone(), line);
                new.add_with_line(I::CallFunction(TICK, Some(0)), line);
                new.add_with_line(I::DiscardTop, line);
                own
            }
            _ => new.add_with_line(instruction.clone(), line),
        };
        begins.push(first.min(own));
    }
    let end = new.add(I::LoadConst(().into()));
    new.add(I::DiscardTop);
    for at in 0..end {
        let target = match new.get_mut(at) {
            Some(
                I::Iterate(target)
                | I::Jump(target)
                | I::JumpIfFalse(target)
                | I::JumpIfFalseOrPop(target)
                | I::JumpIfTrueOrPop(target)
                | I::BuildMacro(_, target, _),
            ) => target,
            _ => continue,
        };
        *target = usize::try_from(*target).ok().and_then(|old| begins.get(old)).copied().unwrap_or(end);
    }
    Ok(new)
}

/// Tests that say the same of all texts that are not empty.
const KINDS: [&str; 10] = [
    "defined",
    "undefined",
    "none",
    "string",
    "mapping",
    "sequence",
    "iterable",
    "number",
    "boolean",
    "integer",
];

/// The guard of an instruction and how many operands it has.
fn guard(instruction: &I<'_>) -> Result<Option<(Guard, u16)>, TemplateError> {
    let unsupported = |construct| Err(TemplateError::Unsupported { construct });
    let counted = |guard, operands: Option<u16>| match operands {
        Some(operands) => Ok(Some((guard, operands))),
        None => unsupported("unpacked arguments of a filter, test or method"),
    };
    let built = |operands: usize| match u16::try_from(operands) {
        Ok(0) => Ok(None),
        Ok(operands) => Ok(Some((DEEP, operands))),
        Err(_) => unsupported("a list of more than 65535 items"),
    };
    match instruction {
        I::Add | I::Sub | I::Rem => Ok(Some((FLAT, 2))),
        I::Mul => Ok(Some((REPEAT, 2))),
        I::StringConcat | I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte => Ok(Some((DEEP, 2))),
        I::CompareAndPreserve(_) => Ok(Some((DEEP, 2))),
        I::In => Ok(Some((CONTAINS, 2))),
        I::Slice => Ok(Some((FLAT, 4))),
        I::BuildList(Some(items)) | I::BuildTuple(Some(items)) => built(*items),
        I::BuildMap(pairs) | I::BuildKwargs(pairs) => built(pairs.saturating_mul(2)),
        I::ApplyFilter(name, operands, _) => counted(filter(name), *operands),
        I::PerformTest(_, operands, _) => counted(DEEP, *operands),
        I::CallMethod("format", _) => unsupported("the method format"),
        I::CallMethod(name, operands) => counted(method(name), *operands),
        // What remains of a loop's items after its condition; nothing but the loop can see it.
        I::BuildList(None) => Ok(None),
        I::BuildTuple(None) | I::UnpackLists(_) => unsupported("unpacked arguments"),
        I::FastSuper | I::CallBlock(_) | I::LoadBlocks | I::Include(_) | I::ExportLocals => {
            unsupported("other templates")
        }
        _ => Ok(None),
    }
}

fn filter(name: &str) -> Guard {
    match name {
        "length" | "count" | "first" | "last" | "default" | "d" | "attr" | "int" | "float" | "abs"
        | "round" | "bool" | "safe" | "upper" | "lower" | "title" | "capitalize" | "trim" | "split"
        | "lines" | "list" | "reverse" | "items" => FLAT,
        "replace" => REPLACE,
        "join" => JOIN,
        "indent" => INDENT,
        "map" => MAP,
        _ => DEEP,
    }
}

fn method(name: &str) -> Guard {
    match name {
        "replace" => REPLACE,
        "join" => JOINED_BY,
        "count" | "index" => DEEP,
        _ => FLAT,
    }
}
