//! Replaces operators that the runtime lacks, or computes otherwise than onnxruntime, by others with the right
//! values.
//!
//! - `ConvInteger` with pads: the runtime pads with 0, but the input's zero point stands for 0. A `Pad` with the
//!   zero point comes before it.
//! - Microsoft's `FusedMatMul` of matrices in one batch, which the runtime does not read: `Transpose` and
//!   `MatMul`, if it does not scale.
//! - PyTorch's `atan2(y, x)`, which its exporter writes as `Atan` of a quotient and a shift by the signs. Where
//!   `y` is 0, this gives `-pi` for a negative `x`, and no number for `x` = 0. PyTorch gives `pi` and 0. The
//!   runtime's Fourier transforms have such zeros, those of onnxruntime have rounding errors instead.

use super::sizes::{Fields, Value};
use std::collections::HashMap;

// Numbers of fields, by onnx.proto.
pub(super) const GRAPH: u64 = 7;
pub(super) const NODE: u64 = 1;
pub(super) const INITIALIZER: u64 = 5;
const INPUT: u64 = 1;
pub(super) const OUTPUT: u64 = 2;
pub(super) const OPERATOR: u64 = 4;
pub(super) const ATTRIBUTE: u64 = 5;
const ATTRIBUTE_NAME: u64 = 1;
const ATTRIBUTE_FLOAT: u64 = 2;
const ATTRIBUTE_INTEGER: u64 = 3;
const ATTRIBUTE_INTEGERS: u64 = 8;
const ATTRIBUTE_TYPE: u64 = 20;
pub(super) const TENSOR_DIMS: u64 = 1;
pub(super) const TENSOR_TYPE: u64 = 2;
pub(super) const TENSOR_NAME: u64 = 8;
pub(super) const TENSOR_BYTES: u64 = 9;
/// Type of an attribute with a list of integers, and of a tensor of integers of 64 bits.
const INTEGERS: u64 = 7;
const INT64: u64 = 7;

/// Returns the file with other operators, or `None` if it has none that must be replaced.
///
/// # Errors
/// The fault of a file that [`check`](super::sizes::check) refuses, or an operator that cannot be replaced.
pub(super) fn rewritten(file: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let (mut out, mut replaced) = (Vec::new(), 0);
    let mut model = Fields(file);
    loop {
        let before = model.0;
        match model.next()? {
            None => return Ok((replaced > 0).then_some(out)),
            Some((GRAPH, Value::Bytes(graph))) => {
                let graph = rewritten_graph(graph, &mut replaced)?;
                bytes(&mut out, GRAPH, &graph);
            }
            Some(_) => out.extend_from_slice(&before[..before.len() - model.0.len()]),
        }
    }
}

/// The `y` of each `atan2(y, x)` of a graph, by the results of its nodes `Greater` and `Atan`.
fn arctangents(graph: &[u8]) -> Result<HashMap<&[u8], &[u8]>, String> {
    let mut nodes = HashMap::new();
    let mut fields = Fields(graph);
    while let Some((field, value)) = fields.next()? {
        if let (NODE, Value::Bytes(node)) = (field, value) {
            let node = Node::read(node)?;
            nodes.insert(node.output, node);
        }
    }
    // The inputs of the node of this operator that has this result.
    let inputs = |result: &[u8], operator: &[u8]| {
        let node = nodes.get(result).filter(|node| node.operator == operator)?;
        Some(node.inputs.as_slice())
    };
    let mut found = HashMap::new();
    for node in nodes.values().filter(|node| node.operator == b"Where") {
        let &[above, left, right] = node.inputs.as_slice() else { continue };
        let parts = (inputs(above, b"Greater"), inputs(left, b"Add"), inputs(right, b"Sub"));
        let (Some([y, _]), Some([angle, _]), Some([same, _])) = parts else { continue };
        let quotient = inputs(angle, b"Atan").and_then(|quotient| inputs(quotient.first()?, b"Div"));
        if angle == same && quotient.is_some_and(|quotient| quotient.first() == Some(y)) {
            found.extend([(above, *y), (*angle, *y)]);
        }
    }
    Ok(found)
}

fn rewritten_graph(graph: &[u8], replaced: &mut usize) -> Result<Vec<u8>, String> {
    let arctangents = arctangents(graph)?;
    let mut out = Vec::with_capacity(graph.len());
    let mut fields = Fields(graph);
    loop {
        let before = fields.0;
        let Some((field, value)) = fields.next()? else { return Ok(out) };
        let whole = &before[..before.len() - fields.0.len()];
        match value {
            Value::Bytes(node) if field == NODE => {
                let nodes = replacement(node, &arctangents, *replaced)?;
                *replaced += usize::from(nodes.is_some());
                out.extend(nodes.as_deref().unwrap_or(whole));
            }
            _ => out.extend_from_slice(whole),
        }
    }
}

/// The parts of a node that matter here.
#[derive(Default)]
struct Node<'a> {
    inputs: Vec<&'a [u8]>,
    output: &'a [u8],
    operator: &'a [u8],
    integers: Vec<(&'a [u8], Vec<u64>)>,
    scale: Option<f32>,
}

impl<'a> Node<'a> {
    fn read(node: &'a [u8]) -> Result<Self, String> {
        let mut read = Self::default();
        let mut fields = Fields(node);
        while let Some((field, value)) = fields.next()? {
            let Value::Bytes(bytes) = value else { continue };
            match field {
                INPUT => read.inputs.push(bytes),
                OUTPUT if read.output.is_empty() => read.output = bytes,
                OPERATOR => read.operator = bytes,
                ATTRIBUTE => {
                    let (name, integers, float) = attribute(bytes)?;
                    if name == b"alpha" {
                        read.scale = float;
                    }
                    read.integers.push((name, integers));
                }
                _ => {}
            }
        }
        Ok(read)
    }

    /// The integers of an attribute; none if it is missing.
    fn integers(&self, name: &[u8]) -> &[u64] {
        self.integers.iter().find(|(found, _)| *found == name).map_or(&[], |(_, integers)| integers)
    }
}

/// The name, the integers and the float of an attribute.
type Attribute<'a> = (&'a [u8], Vec<u64>, Option<f32>);

fn attribute(bytes: &[u8]) -> Result<Attribute<'_>, String> {
    let (mut name, mut integers, mut float): (&[u8], _, _) = (&[], Vec::new(), None);
    let mut fields = Fields(bytes);
    while let Some((field, value)) = fields.next()? {
        match (field, value) {
            (ATTRIBUTE_NAME, Value::Bytes(bytes)) => name = bytes,
            (ATTRIBUTE_INTEGER | ATTRIBUTE_INTEGERS, Value::Number(number)) => integers.push(number),
            (ATTRIBUTE_INTEGERS, Value::Bytes(packed)) => {
                let mut packed = Fields(packed);
                while !packed.0.is_empty() {
                    integers.push(packed.number()?);
                }
            }
            (ATTRIBUTE_FLOAT, Value::Fixed(bytes)) => {
                float = bytes.try_into().ok().map(f32::from_le_bytes);
            }
            _ => {}
        }
    }
    Ok((name, integers, float))
}

/// The nodes that replace a node, as fields of the graph. `number` makes names unique.
fn replacement(
    node: &[u8],
    arctangents: &HashMap<&[u8], &[u8]>,
    number: usize,
) -> Result<Option<Vec<u8>>, String> {
    let read = Node::read(node)?;
    let name = |what: &str| format!("kvasir/{what}/{number}").into_bytes();
    let mut out = Vec::new();
    match (read.operator, read.inputs.as_slice(), arctangents.get(read.output)) {
        (b"ConvInteger", [input, _, zero, ..], _) => {
            let pads = read.integers(b"pads");
            if pads.iter().all(|pad| *pad == 0) || zero.is_empty() {
                return Ok(None);
            }
            // The first two axes are those of the batch and the channels.
            let (begin, end) = pads.split_at(pads.len() / 2);
            let pads = [&[0, 0], begin, &[0, 0], end].concat();
            let (sizes, padded) = (name("pads"), name("padded"));
            integer_tensor(&mut out, &sizes, &pads);
            simple_node(&mut out, b"Pad", &[input, &sizes, zero], &padded, None);
            // The same node, with another input and without pads.
            let (mut convolution, mut first) = (Vec::new(), true);
            let mut fields = Fields(node);
            loop {
                let before = fields.0;
                let Some((field, value)) = fields.next()? else { break };
                match value {
                    Value::Bytes(_) if field == INPUT && std::mem::take(&mut first) => {
                        bytes(&mut convolution, INPUT, &padded);
                    }
                    Value::Bytes(inner) if field == ATTRIBUTE && attribute(inner)?.0 == b"pads" => {}
                    _ => convolution.extend_from_slice(&before[..before.len() - fields.0.len()]),
                }
            }
            bytes(&mut out, NODE, &convolution);
        }
        (b"FusedMatMul", [a, b], _) => {
            let is_set = |name: &[u8]| read.integers(name).iter().any(|value| *value != 0);
            if read.scale.is_some_and(|scale| scale != 1.0)
                || is_set(b"transBatchA")
                || is_set(b"transBatchB")
            {
                return Err("FusedMatMul scales or transposes a batch, which is not supported".to_owned());
            }
            let (mut left, mut right) = (a.to_vec(), b.to_vec());
            for (input, flag, what) in [(&mut left, "transA", "left"), (&mut right, "transB", "right")] {
                if is_set(flag.as_bytes()) {
                    let turned = name(what);
                    simple_node(&mut out, b"Transpose", &[input], &turned, Some(("perm", &[0, 2, 1])));
                    *input = turned;
                }
            }
            simple_node(&mut out, b"MatMul", &[&left, &right], read.output, None);
        }
        (b"Greater", inputs, Some(_)) => simple_node(&mut out, b"GreaterOrEqual", inputs, read.output, None),
        (b"Atan", [quotient], Some(y)) => {
            // 0/0 does not equal itself.
            let (is_number, slope) = (name("is_number"), name("slope"));
            simple_node(&mut out, b"Equal", &[quotient, quotient], &is_number, None);
            simple_node(&mut out, b"Where", &[&is_number, quotient, y], &slope, None);
            simple_node(&mut out, b"Atan", &[&slope], read.output, None);
        }
        _ => return Ok(None),
    }
    Ok(Some(out))
}

/// Appends a node to a graph's fields.
fn simple_node(
    out: &mut Vec<u8>,
    operator: &[u8],
    inputs: &[&[u8]],
    output: &[u8],
    integers: Option<(&str, &[u64])>,
) {
    let mut node = Vec::new();
    inputs.iter().for_each(|input| bytes(&mut node, INPUT, input));
    bytes(&mut node, OUTPUT, output);
    bytes(&mut node, OPERATOR, operator);
    if let Some((name, values)) = integers {
        let mut attribute = Vec::new();
        bytes(&mut attribute, ATTRIBUTE_NAME, name.as_bytes());
        values.iter().for_each(|value| number(&mut attribute, ATTRIBUTE_INTEGERS, *value));
        number(&mut attribute, ATTRIBUTE_TYPE, INTEGERS);
        bytes(&mut node, ATTRIBUTE, &attribute);
    }
    bytes(out, NODE, &node);
}

/// Appends a constant to a graph's fields.
fn integer_tensor(out: &mut Vec<u8>, name: &[u8], values: &[u64]) {
    let mut tensor = Vec::new();
    number(&mut tensor, TENSOR_DIMS, values.len() as u64);
    number(&mut tensor, TENSOR_TYPE, INT64);
    bytes(&mut tensor, TENSOR_NAME, name);
    let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    bytes(&mut tensor, TENSOR_BYTES, &raw);
    bytes(out, INITIALIZER, &tensor);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    varint(out, field << 3);
    varint(out, value);
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::Tensor;
    use std::f32::consts::PI;
    use std::path::Path;

    fn node(operator: &[u8], inputs: &[&[u8]], integers: Option<(&str, &[u64])>) -> Vec<u8> {
        let mut graph = Vec::new();
        simple_node(&mut graph, operator, inputs, b"y", integers);
        let mut model = Vec::new();
        number(&mut model, 1, 9);
        bytes(&mut model, GRAPH, &graph);
        model
    }

    /// Of each node its operator, inputs, output and attributes.
    fn nodes(model: &[u8]) -> Vec<String> {
        let mut found = Vec::new();
        let mut fields = Fields(model);
        while let Some((field, value)) = fields.next().unwrap() {
            let Value::Bytes(graph) = value else { continue };
            assert_eq!(field, GRAPH);
            let mut fields = Fields(graph);
            while let Some((field, value)) = fields.next().unwrap() {
                let Value::Bytes(inner) = value else { panic!() };
                if field == NODE {
                    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
                    let node = Node::read(inner).unwrap();
                    let inputs: Vec<_> = node.inputs.iter().map(|input| text(input)).collect();
                    let integers: Vec<_> = node
                        .integers
                        .iter()
                        .map(|(name, values)| format!("{}{values:?}", text(name)))
                        .collect();
                    let (operator, output) = (text(node.operator), text(node.output));
                    found.push(format!("{operator} {} -> {output} {}", inputs.join(" "), integers.join(" ")));
                }
            }
        }
        found
    }

    /// PyTorch's `atan2(y, x)` as its exporter writes it. `compared` is compared with 0 in the place of `y`.
    fn exported_arctangent(compared: &str) -> Vec<u8> {
        let mut graph = Vec::new();
        let greater = format!("Greater {compared} zero g");
        // Operators, their inputs and outputs.
        for node in [
            "Div y x q",
            "Atan q a",
            "Add a pi p",
            "Sub a pi m",
            &greater,
            "Where g p m s",
            "Less x zero l",
            "Where l s a angle",
        ] {
            let words: Vec<_> = node.split(' ').map(str::as_bytes).collect();
            let [operator, inputs @ .., output] = words.as_slice() else { panic!() };
            simple_node(&mut graph, operator, inputs, output, None);
        }
        for (name, value) in [(&b"pi"[..], PI), (b"zero", 0.0)] {
            let mut tensor = Vec::new();
            number(&mut tensor, TENSOR_TYPE, 1);
            bytes(&mut tensor, TENSOR_NAME, name);
            bytes(&mut tensor, TENSOR_BYTES, &value.to_le_bytes());
            bytes(&mut graph, INITIALIZER, &tensor);
        }
        // Inputs and outputs of the graph.
        for (field, name) in [(11, &b"y"[..]), (11, b"x"), (12, b"angle")] {
            let mut value = Vec::new();
            bytes(&mut value, 1, name);
            bytes(&mut graph, field, &value);
        }
        let mut model = Vec::new();
        number(&mut model, 1, 9);
        bytes(&mut model, GRAPH, &graph);
        model
    }

    #[test]
    fn arctangents_have_the_values_of_pytorch() {
        let file = exported_arctangent("y");
        assert_eq!(nodes(&rewritten(&file).unwrap().unwrap()).len(), 10);
        let model = super::super::load(Path::new(""), &file).unwrap();
        let (mut y, mut x) = (Vec::new(), Vec::new());
        for a in [0.0f32, 1e-30, -1e-30, 2.0, -3.0] {
            for b in [0.0, -1e-30, 2.0, -3.0] {
                y.push(a);
                x.push(b);
            }
        }
        let node = |name: &str| model.find_node(name).unwrap();
        let tensor = |values: &[f32]| Tensor::from_data(&[values.len()], values.to_vec()).into();
        let inputs = vec![(node("y"), tensor(&y)), (node("x"), tensor(&x))];
        let [angle] = model.run_n(inputs, [node("angle")], None).unwrap();
        let angle = angle.into_tensor::<f32>().unwrap().into_data();
        for (at, found) in angle.iter().enumerate() {
            let expected = y[at].atan2(x[at]);
            assert!((found - expected).abs() < 1e-6, "{} {}: {found}, not {expected}", y[at], x[at]);
        }
        assert_eq!(rewritten(&exported_arctangent("x")).unwrap(), None, "another function");
    }

    #[test]
    fn only_operators_that_need_it_are_replaced() {
        let pads: &[u64] = &[1, 2];
        let conv = node(b"ConvInteger", &[b"x", b"w", b"z", b"v"], Some(("pads", pads)));
        assert_eq!(
            nodes(&rewritten(&conv).unwrap().unwrap()),
            ["Pad x kvasir/pads/0 z -> kvasir/padded/0 ", "ConvInteger kvasir/padded/0 w z v -> y "]
        );
        let turned = node(b"FusedMatMul", &[b"a", b"b"], Some(("transA", &[1])));
        assert_eq!(
            nodes(&rewritten(&turned).unwrap().unwrap()),
            ["Transpose a -> kvasir/left/0 perm[0, 2, 1]", "MatMul kvasir/left/0 b -> y "]
        );
        for same in [
            node(b"ConvInteger", &[b"x", b"w", b"z"], Some(("pads", &[0, 0]))),
            node(b"ConvInteger", &[b"x", b"w", b"z"], None),
            node(b"ConvInteger", &[b"x", b"w"], Some(("pads", pads))),
            node(b"Conv", &[b"x", b"w", b"z"], Some(("pads", pads))),
        ] {
            assert_eq!(rewritten(&same).unwrap(), None);
        }
        let batch = node(b"FusedMatMul", &[b"a", b"b"], Some(("transBatchA", &[1])));
        assert!(rewritten(&batch).unwrap_err().contains("transposes a batch"));
        for cut in 0..conv.len() {
            // Refused or read, but never a panic.
            let _ = rewritten(&conv[..cut]);
        }
    }
}
