//! Rows of images in a step: embeddings in place of embedded tokens, and additions after the first layers.

use super::Decoder;
use crate::Error;
use crate::images::{ImageRules, StepImages};
use kernels::backend::{Backend, BufferId, RowPlaces};
use std::borrow::Cow;

impl StepImages {
    /// The tokens with 0 in place of the ids of rows that have embeddings.
    pub(super) fn without_ids<'a>(&self, tokens: &'a [u32]) -> Cow<'a, [u32]> {
        let mut tokens = Cow::Borrowed(tokens);
        for rows in &self.rows {
            let of_image = rows.first..rows.first + rows.rows.len();
            tokens.to_mut().get_mut(of_image).into_iter().flatten().for_each(|token| *token = 0);
        }
        tokens
    }
}

impl Decoder {
    /// Rules of rows of images. `None`: its layers or its device cannot have rows of images.
    pub fn image_rules(&self) -> Option<ImageRules> {
        let whole = self.config.layers == (0..self.spec.layers.len());
        let plain = self.spec.per_layer_input.is_none() && self.spec.embedding.positions.is_none();
        let serves = self.backend.places_rows() && self.backend.serves_parts();
        let attentions = (0..self.spec.layers.len()).filter_map(|layer| self.spec.attention(layer));
        let axes = attentions.filter_map(|attention| attention.rope.as_ref()).any(|rope| rope.axes.is_some());
        (whole && plain && serves).then_some(ImageRules { see_ahead: self.spec.images_see_ahead, axes })
    }

    /// Sets the images of the next step. The steps after it have none.
    pub fn use_images(&mut self, images: StepImages) {
        self.images = images;
    }

    pub(super) fn place(&mut self, images: &StepImages) -> Result<(), Error> {
        let (axes, spans) = (&images.axes[..], &images.spans[..]);
        match axes.is_empty() {
            true => Ok(()),
            false => Ok(self.backend.place_rows(&RowPlaces { axes, spans })?),
        }
    }
}

/// Replaces the rows of images in the residual stream by their embeddings.
pub(super) fn write(
    backend: &mut dyn Backend,
    x: BufferId,
    images: &StepImages,
    hidden: usize,
) -> Result<(), Error> {
    for rows in &images.rows {
        for (row, source) in (rows.first..).zip(rows.rows.clone()) {
            backend.write_part(x, row, 0, &rows.embedding.rows[source * hidden..(source + 1) * hidden])?;
        }
    }
    Ok(())
}

/// Adds what images add after a layer.
pub(super) fn add(
    backend: &mut dyn Backend,
    x: BufferId,
    images: &StepImages,
    layer: usize,
    hidden: usize,
) -> Result<(), Error> {
    let mut values = vec![0f32; if images.rows.is_empty() { 0 } else { hidden }];
    for rows in &images.rows {
        let Some(list) = rows.embedding.deepstack.get(layer) else { continue };
        for (row, source) in (rows.first..).zip(rows.rows.clone()) {
            backend.read_row(x, row, &mut values)?;
            let addition = &list[source * hidden..(source + 1) * hidden];
            values.iter_mut().zip(addition).for_each(|(value, addition)| *value += addition);
            backend.write_part(x, row, 0, &values)?;
        }
    }
    Ok(())
}
