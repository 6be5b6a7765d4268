//! The weights of a network by name, from a file of any form. Names and layouts are those of CTranslate2's
//! format ([`file`](super::file)); [`named`](super::named) has those of the other forms.

use crate::Error;
use kernels::quant::{GgmlType, dequantize};

pub(super) trait Source {
    /// Error for a file that is not supported.
    fn wrong(&self, reason: String) -> Error;

    fn has(&self, name: &str) -> bool;

    fn dims_of(&self, name: &str) -> Result<Vec<usize>, Error>;

    /// An integer; `None` if there is none of this name.
    fn number(&mut self, name: &str) -> Result<Option<i32>, Error>;

    /// Floats in the file's format, of these dimensions.
    fn floats(&mut self, name: &str, dims: &[usize]) -> Result<(GgmlType, Vec<u8>), Error>;

    /// The dimensions of a variable, which must have `N`.
    fn dims<const N: usize>(&self, name: &str) -> Result<[usize; N], Error> {
        let wrong = |dims: Vec<usize>| self.wrong(format!("{name} is {dims:?}, it must have {N} dimensions"));
        self.dims_of(name)?.try_into().map_err(wrong)
    }

    fn vector(&mut self, name: &str, dims: &[usize]) -> Result<Vec<f32>, Error> {
        let (ty, bytes) = self.floats(name, dims)?;
        let mut values = vec![0.0; dims.iter().product()];
        dequantize(ty, &bytes, &mut values)?;
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) => Err(self.wrong(format!("value {at} of {name} is not a number"))),
        }
    }
}
