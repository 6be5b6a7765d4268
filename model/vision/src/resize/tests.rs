use super::*;
use crate::test_images::{bytes, fixtures, worst};

/// Pillow's weights have more bits, so that a value may be rounded to the next one in each direction.
#[test]
fn resized_images_are_those_of_pillow() {
    let fixtures = fixtures();
    let from = &fixtures["resize"];
    let side = |value: &serde_json::Value, key: &str| value[key].as_u64().unwrap() as usize;
    let image = Rgb { width: side(from, "width"), height: side(from, "height"), bytes: bytes(&from["rgb"]) };
    let (mut values, mut different) = (0, 0);
    for to in from["to"].as_array().unwrap() {
        let filter = match to["filter"].as_str().unwrap() {
            "lanczos" => Filter::Lanczos,
            "bilinear" => Filter::Bilinear,
            _ => Filter::Bicubic,
        };
        let ours = resize(image.clone(), side(to, "width"), side(to, "height"), filter);
        let theirs = bytes(&to["rgb"]);
        assert!(worst(&ours.bytes, &theirs) <= 1, "{to}");
        values += theirs.len();
        different += ours.bytes.iter().zip(&theirs).filter(|(ours, theirs)| ours != theirs).count();
    }
    assert!(different * 20 < values, "{different} of {values}");
}

#[test]
fn an_image_of_its_size_stays() {
    let image = Rgb { width: 2, height: 1, bytes: vec![0, 255, 3, 4, 5, 6] };
    assert_eq!(resize(image.clone(), 2, 1, Filter::Lanczos), image);
}

#[test]
fn one_colour_stays() {
    for filter in [Filter::Lanczos, Filter::Bilinear, Filter::Bicubic] {
        let image = Rgb::filled(7, 300, [0, 128, 255]);
        assert_eq!(resize(image, 90, 11, filter), Rgb::filled(90, 11, [0, 128, 255]));
    }
}
