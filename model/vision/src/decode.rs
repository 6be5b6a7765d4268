//! From a file to pixels, within limits.
//!
//! Transparent pixels lie on white, and the orientation of EXIF is applied, as transformers does when it loads an
//! image. Of 16 bits the upper 8 are used. Of an animation the first picture is used.

#[cfg(test)]
mod tests;

use crate::error::Error;
use crate::limits::{MAX_DECODE_BYTES, MAX_FILE_BYTES, MAX_RATIO, MAX_SIDE};
use crate::resize::Rgb;
use image::{ColorType, DynamicImage, ImageBuffer, ImageDecoder, ImageFormat, ImageReader, Limits, Pixel};
use std::io::Cursor;

/// The picture in `file`.
pub(crate) fn decode(file: &[u8]) -> Result<Rgb, Error> {
    if file.len() > MAX_FILE_BYTES {
        return Err(Error::FileTooLarge { bytes: file.len() });
    }
    let format = match image::guess_format(file) {
        Ok(format @ (ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::WebP | ImageFormat::Gif)) => format,
        _ => return Err(Error::Format),
    };
    let name = name(format);
    let damaged = |detail: String| Error::Damaged { format: name, detail };
    let progressive = match format {
        ImageFormat::Jpeg => jpeg_head(file).map_err(|detail| damaged(detail.to_owned()))?,
        _ => false,
    };
    let mut reader = ImageReader::with_format(Cursor::new(file), format);
    let mut limits = Limits::default();
    limits.max_alloc = Some(MAX_DECODE_BYTES);
    reader.limits(limits);
    let decoder = reader.into_decoder();
    let mut decoder = decoder.map_err(|error| damaged(error.to_string()))?;
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err(damaged(format!("it has {width} x {height} pixels")));
    }
    if width.max(height) > MAX_SIDE {
        return Err(Error::Side { width, height });
    }
    if width.max(height) > width.min(height) * MAX_RATIO {
        return Err(Error::Ratio { width, height });
    }
    let pixels = u64::from(width) * u64::from(height);
    // Bytes a pixel beside the decoder's result: coefficients of all scans, planes or a second frame; and the
    // colours of files with other channels.
    let beside = match format {
        ImageFormat::Jpeg if progressive => 6,
        ImageFormat::WebP | ImageFormat::Gif => 4,
        _ => 0,
    };
    let colours = match decoder.color_type() {
        ColorType::Rgb8 | ColorType::Rgba8 => 0,
        _ => 3,
    };
    let needed = decoder.total_bytes().saturating_add(pixels * (beside + colours));
    if needed > MAX_DECODE_BYTES {
        return Err(Error::DecodeMemory { width, height, format: name, bytes: needed });
    }
    let orientation = decoder.orientation().map_err(|error| damaged(error.to_string()))?;
    let mut image = DynamicImage::from_decoder(decoder).map_err(|error| damaged(error.to_string()))?;
    image.apply_orientation(orientation);
    rgb(image).ok_or_else(|| damaged("its pixels have a form that is not read".to_owned()))
}

fn name(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Png => "PNG",
        ImageFormat::Jpeg => "JPEG",
        ImageFormat::WebP => "WebP",
        _ => "GIF",
    }
}

/// If the JPEG file is a progressive one. An error if it ends before its end marker: the decoder would
/// fill the rest with grey.
fn jpeg_head(file: &[u8]) -> Result<bool, &'static str> {
    const TRUNCATED: &str = "it is truncated";
    let (mut at, mut progressive) = (2, false);
    loop {
        let Some(&[0xff, marker]) = file.get(at..at + 2) else { return Err(TRUNCATED) };
        match marker {
            // Fill bytes, and markers without a length.
            0xff => at += 1,
            0x01 | 0xd0..=0xd8 => at += 2,
            0xd9 => return Err("it has no picture"),
            _ => {
                progressive |= matches!(marker, 0xc2 | 0xc6 | 0xca | 0xce);
                let Some(&[high, low]) = file.get(at + 2..at + 4) else { return Err(TRUNCATED) };
                at += 2 + usize::from(u16::from_be_bytes([high, low])).max(2);
                if marker == 0xda {
                    let rest = file.get(at..).unwrap_or_default();
                    // Coded data has no such bytes: after 0xff there is a zero or a restart marker.
                    return match memchr::memmem::find(rest, &[0xff, 0xd9]) {
                        Some(_) => Ok(progressive),
                        None => Err(TRUNCATED),
                    };
                }
            }
        }
    }
}

/// The colours of an image, its transparent pixels on white.
fn rgb(image: DynamicImage) -> Option<Rgb> {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let bytes = match image {
        DynamicImage::ImageLuma8(image) => each(&image, |&[grey]| [grey; 3]),
        DynamicImage::ImageLumaA8(image) => each(&image, |&[grey, alpha]| on_white([grey; 3], alpha)),
        DynamicImage::ImageRgb8(image) => image.into_raw(),
        DynamicImage::ImageRgba8(image) => {
            // In place: the largest images are of this kind.
            let mut bytes = image.into_raw();
            for at in 0..bytes.len() / 4 {
                let pixel = [bytes[at * 4], bytes[at * 4 + 1], bytes[at * 4 + 2]];
                let colour = on_white(pixel, bytes[at * 4 + 3]);
                bytes[at * 3..at * 3 + 3].copy_from_slice(&colour);
            }
            bytes.truncate(bytes.len() / 4 * 3);
            bytes
        }
        DynamicImage::ImageLuma16(image) => each(&image, |&[grey]| [high(grey); 3]),
        DynamicImage::ImageLumaA16(image) => {
            each(&image, |&[grey, alpha]| on_white([high(grey); 3], high(alpha)))
        }
        DynamicImage::ImageRgb16(image) => each(&image, |pixel: &[u16; 3]| pixel.map(high)),
        DynamicImage::ImageRgba16(image) => {
            each(&image, |&[red, green, blue, alpha]| on_white([red, green, blue].map(high), high(alpha)))
        }
        _ => return None,
    };
    Some(Rgb { width, height, bytes })
}

fn high(value: u16) -> u8 {
    value.to_be_bytes()[0]
}

fn each<P: Pixel, const N: usize>(
    image: &ImageBuffer<P, Vec<P::Subpixel>>,
    colour: impl Fn(&[P::Subpixel; N]) -> [u8; 3],
) -> Vec<u8> {
    let (pixels, _) = image.as_raw().as_chunks::<N>();
    pixels.iter().flat_map(colour).collect()
}

/// Pillow's `alpha_composite` over an opaque white.
fn on_white(colour: [u8; 3], alpha: u8) -> [u8; 3] {
    let alpha = u32::from(alpha);
    colour.map(|value| {
        let sum = (u32::from(value) * alpha + 255 * (255 - alpha)) * 128 + (128 << 7);
        (((sum >> 8) + sum) >> 15) as u8
    })
}
