//! Products of few tokens with large matrices, which read every weight once.

use super::{Speed, random_values};
use crate::matmul::{Activations, Experts, MatmulKernels, Matrix, Product, Quantised, reads_int8};
use crate::pack::TiledShape;
use crate::rowwise::{Rows, RowwiseKernels};
use crate::{Device, quantised_row_bytes, source};
use kernels::Error;
use kernels::quant::GgmlType;

/// Maximum number of copies of a matrix, which are the launches of one graph.
const MAX_COPIES: usize = 256;

/// A matrix, and the number of tokens that it is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductCase {
    /// Type of the weights. Activations have 8 bits, or f32 for plain floats.
    pub ty: GgmlType,
    pub rows: usize,
    pub cols: usize,
    pub tokens: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProductSpeed {
    /// Bytes of the matrix, each read once.
    pub bytes: usize,
    pub seconds: f64,
}

impl Speed {
    /// Multiplies with more copies of the matrix than the device's caches hold, one after the other.
    ///
    /// # Errors
    /// [`Error::NoMatmul`]; errors of the compiler or the device.
    pub fn product(&self, case: &ProductCase) -> Result<ProductSpeed, Error> {
        let ProductCase { ty, rows, cols, tokens } = *case;
        let shape = TiledShape::new(ty, rows, cols, 1)?;
        let bytes = shape.packed_bytes();
        let copies = self.spread.div_ceil(bytes).clamp(1, MAX_COPIES);
        let (mut held, mut device) = (self.held(), self.device.clone());
        let kernels = MatmulKernels::load(&mut device, &self.compiled(MatmulKernels::source(ty)?)?, ty)?;
        let weights = held.random(copies * bytes)?;
        let (values, out) = (held.bytes(&random_values(tokens * cols))?, held.room(4 * tokens * rows)?);
        let x = match reads_int8(ty) {
            false => Activations::F32(values),
            true => {
                let quantised = held.room(tokens * quantised_row_bytes(cols))?;
                let rowwise = RowwiseKernels::load(&mut device, &self.compiled(&source::ROWWISE)?)?;
                rowwise.quantise(
                    &mut device,
                    Rows { rows: tokens, cols },
                    values,
                    (Quantised::Int8, quantised),
                )?;
                Activations::Int8(quantised)
            }
        };
        let mut multiply = |device: &mut dyn Device| -> Result<(), Error> {
            for copy in 0..copies {
                let matrix = Matrix { shape, start: weights.offset(copy * bytes) };
                let product = Product {
                    matrix: &matrix,
                    x,
                    tokens,
                    share: 1,
                    experts: Experts::One,
                    scale: 1.0,
                    bias: None,
                    accumulate: false,
                    out,
                    ld: rows,
                };
                kernels.multiply(device, &[product])?;
            }
            Ok(())
        };
        let seconds = self.time(&mut [&mut multiply])?[0] / copies as f64;
        Ok(ProductSpeed { bytes, seconds })
    }
}
