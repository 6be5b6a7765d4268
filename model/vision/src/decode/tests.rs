use super::*;
use crate::test_images::{bytes, file, fixtures, worst};
use proptest::prelude::*;

#[test]
fn files_have_the_colours_of_pillow() {
    for image in fixtures()["files"].as_array().unwrap() {
        let name = &image["name"];
        let ours = decode(&bytes(&image["file"])).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(
            [ours.width, ours.height].map(|side| side as u64),
            [&image["width"], &image["height"]].map(|side| side.as_u64().unwrap()),
            "{name}"
        );
        let worst = worst(&ours.bytes, &bytes(&image["rgb"]));
        assert!(u64::from(worst) <= image["tolerance"].as_u64().unwrap(), "{name}: {worst}");
    }
}

/// A PNG file with these pixels and no data.
fn png(width: u32, height: u32, depth: u8, colour: u8) -> Vec<u8> {
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
    file.extend(width.to_be_bytes());
    file.extend(height.to_be_bytes());
    file.extend([depth, colour, 0, 0, 0]);
    let crc = crc(&file[12..]);
    file.extend(crc.to_be_bytes());
    file.extend(b"\0\0\0\0IDAT");
    file.extend(0x35af_061e_u32.to_be_bytes());
    file
}

fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & 0_u32.wrapping_sub(crc & 1)))
    })
}

#[test]
fn refusals_name_the_fault() {
    let refused = |file: &[u8]| decode(file).unwrap_err().to_string();
    assert_eq!(refused(b""), "the image is no PNG, JPEG, WebP or GIF file");
    assert_eq!(refused(b"BM6\0\0\0"), "the image is no PNG, JPEG, WebP or GIF file");
    assert_eq!(refused(&vec![0; MAX_FILE_BYTES + 1]), "the image has 20971521 bytes, the limit is 20971520");
    let side = "the image has 16385 x 200 pixels, the limit is 16384 on each side";
    assert_eq!(refused(&png(16_385, 200, 8, 2)), side);
    assert_eq!(refused(&png(402, 2, 8, 2)), "the image has 402 x 2 pixels, the limit is 200 to 1");
    let large =
        "the image has 16384 x 16384 pixels; as PNG it takes 1024 MiB to decode, the limit is 144 MiB";
    assert_eq!(refused(&png(16_384, 16_384, 8, 6)), large);
    assert!(refused(&png(0, 5, 8, 2)).starts_with("the PNG image is damaged: "));
    assert!(refused(&png(5, 5, 8, 2)).starts_with("the PNG image is damaged: "));
}

#[test]
fn truncated_files_are_refused() {
    for image in fixtures()["files"].as_array().unwrap() {
        let (name, file) = (image["name"].as_str().unwrap(), bytes(&image["file"]));
        // The end of an animation may lack: its first picture is there.
        let lengths =
            if name.contains("animated") { [10, 30, 60] } else { [10, file.len() / 2, file.len() * 3 / 4] };
        for length in lengths {
            assert!(decode(&file[..length]).is_err(), "{name}, {length} of {} bytes", file.len());
        }
    }
}

#[test]
fn sixteen_bits_become_their_upper_eight() {
    let image =
        image::ImageBuffer::<image::Rgb<u16>, _>::from_raw(1, 1, vec![0x12ff, 0x8000, 0x00ff]).unwrap();
    let mut file = Vec::new();
    image.write_to(&mut Cursor::new(&mut file), ImageFormat::Png).unwrap();
    assert_eq!(decode(&file).unwrap().bytes, [0x12, 0x80, 0]);
}

proptest! {
    #[test]
    fn damaged_files_are_read_or_refused(
        name in prop::sample::select(vec![
            "png palette", "jpeg progressive", "jpeg cmyk", "webp lossy", "webp lossless", "gif animated",
        ]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut file = file(name);
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        if let Ok(image) = decode(&file) {
            prop_assert_eq!(image.bytes.len(), image.width * image.height * 3);
        }
    }
}
