//! Weights in an ONNX file, for networks that this engine's kernels compute: initializers, and nodes `Constant`.

use super::rewrite::{
    ATTRIBUTE, GRAPH, INITIALIZER, NODE, OPERATOR, OUTPUT, TENSOR_BYTES, TENSOR_DIMS, TENSOR_NAME,
    TENSOR_TYPE,
};
use super::sizes::{Fields, Value, check};
use crate::Error;
use std::path::{Path, PathBuf};

// Numbers of fields, by onnx.proto.
const ATTRIBUTE_TENSOR: u64 = 5;
const ATTRIBUTE_GRAPH: u64 = 6;
const TENSOR_FLOATS: u64 = 4;
/// Type of a tensor of floats of 32 bits.
const FLOAT: u64 = 1;

/// Float constants of one graph, without those of graphs in it.
pub(crate) struct Constants {
    path: PathBuf,
    tensors: Tensors,
}

/// The float constants of each graph in a file.
///
/// # Errors
/// [`Error::Artefact`] if the file is not valid; I/O errors.
pub(crate) fn constants(path: &Path) -> Result<Vec<Constants>, Error> {
    let fault = |reason: String| Error::Artefact { path: path.to_owned(), reason };
    let file = std::fs::read(path)
        .map_err(|source| Error::Io { what: format!("cannot read {}", path.display()), source })?;
    check(&file, path.parent().unwrap_or(Path::new(""))).map_err(fault)?;
    let mut graphs = Vec::new();
    let mut model = Fields(&file);
    while let Some((field, value)) = model.next().map_err(fault)? {
        if let (GRAPH, Value::Bytes(graph)) = (field, value) {
            read_graph(graph, &mut graphs).map_err(fault)?;
        }
    }
    Ok(graphs.into_iter().map(|tensors| Constants { path: path.to_owned(), tensors }).collect())
}

/// Name, shape and values.
type Named = (String, Vec<usize>, Vec<f32>);
type Tensors = Vec<Named>;

/// The depth of graphs has been checked.
fn read_graph(graph: &[u8], graphs: &mut Vec<Tensors>) -> Result<(), String> {
    let mut tensors = Vec::new();
    let mut fields = Fields(graph);
    while let Some((field, value)) = fields.next()? {
        match (field, value) {
            (INITIALIZER, Value::Bytes(bytes)) => tensors.extend(read_tensor(bytes, None)?),
            (NODE, Value::Bytes(node)) => read_node(node, &mut tensors, graphs)?,
            _ => {}
        }
    }
    graphs.push(tensors);
    Ok(())
}

fn read_node(node: &[u8], tensors: &mut Tensors, graphs: &mut Vec<Tensors>) -> Result<(), String> {
    let (mut output, mut operator, mut tensor): (&[u8], &[u8], _) = (&[], &[], None);
    let mut fields = Fields(node);
    while let Some((field, value)) = fields.next()? {
        match (field, value) {
            (OUTPUT, Value::Bytes(name)) if output.is_empty() => output = name,
            (OPERATOR, Value::Bytes(name)) => operator = name,
            (ATTRIBUTE, Value::Bytes(attribute)) => {
                let mut attribute = Fields(attribute);
                while let Some((field, value)) = attribute.next()? {
                    match (field, value) {
                        (ATTRIBUTE_TENSOR, Value::Bytes(bytes)) => tensor = Some(bytes),
                        (ATTRIBUTE_GRAPH, Value::Bytes(graph)) => read_graph(graph, graphs)?,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if let (b"Constant", Some(tensor)) = (operator, tensor) {
        tensors.extend(read_tensor(tensor, Some(output))?);
    }
    Ok(())
}

/// Reads a tensor of floats in the file; `None` for another one. `name`: that of a node's result.
fn read_tensor(bytes: &[u8], name: Option<&[u8]>) -> Result<Option<Named>, String> {
    let (mut own_name, mut dims, mut is_float): (&[u8], Vec<u64>, _) = (&[], Vec::new(), false);
    let mut data: Vec<&[u8]> = Vec::new();
    let mut fields = Fields(bytes);
    while let Some((field, value)) = fields.next()? {
        match (field, value) {
            (TENSOR_DIMS, Value::Number(dim)) => dims.push(dim),
            (TENSOR_DIMS, Value::Bytes(packed)) => {
                let mut packed = Fields(packed);
                while !packed.0.is_empty() {
                    dims.push(packed.number()?);
                }
            }
            (TENSOR_TYPE, Value::Number(kind)) => is_float = kind == FLOAT,
            (TENSOR_NAME, Value::Bytes(name)) => own_name = name,
            (TENSOR_BYTES, Value::Bytes(raw)) => data.push(raw),
            (TENSOR_FLOATS, Value::Bytes(floats) | Value::Fixed(floats)) => data.push(floats),
            _ => {}
        }
    }
    let values: Vec<f32> = data
        .iter()
        .flat_map(|bytes| bytes.as_chunks::<4>().0)
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect();
    let dims: Option<Vec<usize>> = dims.into_iter().map(|dim| usize::try_from(dim).ok()).collect();
    let count = |dims: &Vec<usize>| dims.iter().try_fold(1_usize, |all, dim| all.checked_mul(*dim));
    let whole = dims.filter(|dims| is_float && count(dims) == Some(values.len()));
    let name = String::from_utf8_lossy(name.unwrap_or(own_name)).into_owned();
    Ok(whole.map(|dims| (name, dims, values)))
}

impl Constants {
    /// The values of the constant whose name ends with `end`, or `None`.
    pub(crate) fn find(&self, end: &str) -> Option<(&[usize], &[f32])> {
        let found = self.tensors.iter().find(|(name, ..)| name.ends_with(end));
        found.map(|(_, shape, values)| (shape.as_slice(), values.as_slice()))
    }

    /// Like [`find`](Self::find), with this shape.
    ///
    /// # Errors
    /// [`Error::Artefact`] if there is none, or it has another shape.
    pub(crate) fn floats(&self, end: &str, shape: &[usize]) -> Result<&[f32], Error> {
        let fault = |reason: String| Error::Artefact { path: self.path.clone(), reason };
        let (found, values) = self.find(end).ok_or_else(|| fault(format!("it has no constant {end}")))?;
        match found == shape {
            true => Ok(values),
            false => Err(fault(format!("{end} has the shape {found:?}, must be {shape:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sizes::tests::{field, number};
    use super::*;

    fn tensor(name: &str, dims: &[u64], kind: u64, values: &[u8]) -> Vec<u8> {
        let dims = dims.iter().flat_map(|dim| [number(TENSOR_DIMS << 3), number(*dim)].concat());
        let kind = [number(TENSOR_TYPE << 3), number(kind)].concat();
        [dims.collect(), kind, field(TENSOR_NAME, name.as_bytes()), field(TENSOR_BYTES, values)].concat()
    }

    #[test]
    fn constants_of_nested_graphs_are_found_by_the_ends_of_their_names() {
        let floats: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let constant = |name: &str, tensor: &[u8]| {
            let value = field(ATTRIBUTE, &field(ATTRIBUTE_TENSOR, tensor));
            field(NODE, &[field(OUTPUT, name.as_bytes()), field(OPERATOR, b"Constant"), value].concat())
        };
        let inner = [
            constant("branch/a.weight", &tensor("", &[2, 2], FLOAT, &floats)),
            constant("branch/short", &tensor("", &[5], FLOAT, &floats)),
            constant("branch/integers", &tensor("", &[4], 6, &floats)),
        ]
        .concat();
        let branch = field(NODE, &field(ATTRIBUTE, &field(ATTRIBUTE_GRAPH, &inner)));
        let outer = [branch, field(INITIALIZER, &tensor("bias", &[4], FLOAT, &floats))].concat();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.onnx");
        std::fs::write(&path, field(GRAPH, &outer)).unwrap();
        let graphs = constants(&path).unwrap();
        let [branch, outer] = graphs.as_slice() else { panic!("{} graphs", graphs.len()) };
        assert_eq!(branch.floats("a.weight", &[2, 2]).unwrap(), [1.0, 2.0, 3.0, 4.0]);
        assert!(branch.find("short").is_none() && branch.find("integers").is_none());
        assert_eq!(outer.find("bias").map(|(shape, _)| shape), Some(&[4][..]));
        let error = |end, shape: &[usize]| branch.floats(end, shape).unwrap_err().to_string();
        assert!(
            error("a.weight", &[4]).contains("[2, 2]") && error("bias", &[4]).contains("no constant bias")
        );
        std::fs::write(&path, field(GRAPH, &outer.tensors[0].0.as_bytes()[..2])).unwrap();
        assert!(constants(&path).is_err());
    }
}
