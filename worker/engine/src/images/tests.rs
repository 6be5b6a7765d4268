#![allow(clippy::single_range_in_vec_init, reason = "images with one run of rows")]

use super::*;

const ID: u32 = IMAGE_ID;

fn image(runs: &[Range<u32>]) -> PlacedImage {
    PlacedImage { runs: runs.to_vec(), digest: [runs[0].start as u8; 32] }
}

/// Embeddings of one value a row.
fn encoded(rows: usize, grid: Option<[u32; 3]>) -> Arc<EncodedImage> {
    Arc::new(EncodedImage { rows: vec![0.0; rows], deepstack: vec![vec![0.0; rows]], grid })
}

fn prompt(len: usize, images: &[PlacedImage]) -> Vec<u32> {
    let is_image = |at: u32| images.iter().flat_map(|image| &image.runs).any(|run| run.contains(&at));
    (0..len as u32).map(|at| if is_image(at) { ID + at } else { at }).collect()
}

fn placed(len: usize, see_ahead: bool, axes: bool, images: Vec<PlacedImage>) -> SequenceImages {
    SequenceImages::new(ImageRules { see_ahead, axes }, &prompt(len, &images), images).unwrap()
}

#[test]
fn rows_of_a_grid_have_its_positions_and_text_continues_behind_the_largest() {
    // Two tokens, an image of 2 x 3, one token, an image of 1 x 2, a token.
    let images = vec![image(&[2..8]), image(&[9..11])];
    let mut images = placed(12, false, true, images);
    images.embed(1, vec![encoded(6, Some([1, 2, 3])), encoded(2, Some([1, 1, 2]))]).unwrap();
    let axes: Vec<[u32; 3]> = (0..13).map(|position| images.axes(position)).collect();
    let grid = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]];
    assert_eq!(axes[..2], [[0; 3], [1; 3]]);
    assert_eq!(axes[2..8], grid);
    assert_eq!(axes[8..], [[5; 3], [6, 6, 6], [6, 6, 7], [8; 3], [9; 3]]);
    let (positions, delta) = vision::mrope_positions(
        12,
        &[vision::Placed { start: 2, grid: [1, 2, 3] }, vision::Placed { start: 9, grid: [1, 1, 2] }],
    );
    assert_eq!((&axes[..12], i64::from(axes[12][0])), (&positions[..], 12 + delta));
    let plain = placed(12, false, false, vec![image(&[2..8])]);
    assert_eq!(plain.axes(7), [7; 3]);
}

#[test]
fn hits_end_where_an_image_is_identified_and_outside_spans() {
    let images = || vec![image(&[10..30, 32..40]), image(&[40..44]), image(&[44..50])];
    let ends = |see_ahead: bool| {
        let images = placed(60, see_ahead, false, images());
        (8..54).map(|end| images.hit_end(end)).collect::<Vec<u32>>()
    };
    let expected = |end: u32| match end {
        11..=17 => 10,
        // The whole of a small image identifies it.
        41..=43 => 40,
        45..=49 => 44,
        end => end,
    };
    assert_eq!(ends(false), (8..54).map(expected).collect::<Vec<u32>>());
    let expected = |end: u32| match end {
        11..=29 => 10,
        33..=39 => 32,
        41..=43 => 40,
        45..=49 => 44,
        end => end,
    };
    assert_eq!(ends(true), (8..54).map(expected).collect::<Vec<u32>>());
}

#[test]
fn chunks_do_not_cut_spans() {
    let images = placed(60, true, false, vec![image(&[10..30]), image(&[30..35])]);
    assert_eq!(
        (images.span(9), images.span(10), images.span(29), images.span(30)),
        (0..0, 10..30, 10..30, 30..35)
    );
    assert_eq!(images.longest_span(), 20);
    let uncut = |from, rows| images.uncut(from, rows);
    assert_eq!([uncut(0, 10), uncut(0, 11), uncut(0, 29), uncut(0, 30), uncut(0, 31)], [10, 10, 10, 30, 30]);
    assert_eq!([uncut(10, 5), uncut(10, 20), uncut(10, 24), uncut(10, 25), uncut(35, 3)], [0, 20, 20, 25, 3]);
    assert_eq!([images.at_least(10, 5), images.at_least(9, 5), images.at_least(30, 9)], [20, 5, 9]);
}

#[test]
fn places_outside_the_prompt_or_its_images_are_refused() {
    let rules = ImageRules { see_ahead: false, axes: true };
    let good = image(&[2..8]);
    let tokens = prompt(12, std::slice::from_ref(&good));
    let refused = |images: Vec<PlacedImage>| SequenceImages::new(rules, &tokens, images).is_err();
    assert!(!refused(vec![good.clone()]));
    assert!(refused(vec![]));
    assert!(refused(vec![good.clone(), good]));
    #[allow(clippy::reversed_empty_ranges, reason = "what a request may say")]
    for run in [2..9, 1..8, 3..8, 2..2, 8..2, 11..14] {
        assert!(refused(vec![image(std::slice::from_ref(&run))]), "{run:?}");
    }
}

#[test]
fn embeddings_of_other_shapes_are_refused() {
    let mut images = placed(12, false, true, vec![image(&[2..8])]);
    let mut embed = |embeddings: Vec<Arc<EncodedImage>>| images.embed(1, embeddings).is_ok();
    assert!(embed(vec![encoded(6, Some([1, 2, 3]))]));
    assert!(!embed(vec![]));
    assert!(!embed(vec![encoded(5, Some([1, 2, 3]))]));
    let uneven = EncodedImage { rows: vec![0.0; 6], deepstack: vec![vec![0.0; 5]], grid: Some([1, 2, 3]) };
    assert!(!embed(vec![Arc::new(uneven)]));
    for grid in [None, Some([1, 2, 2]), Some([u32::MAX, u32::MAX, 2]), Some([0, 0, 0])] {
        assert!(!embed(vec![encoded(6, grid)]), "{grid:?}");
    }
    let mut two = placed(12, false, true, vec![image(&[2..5, 6..9])]);
    assert!(two.embed(1, vec![encoded(6, Some([1, 2, 3]))]).is_err());
}

#[test]
fn a_step_has_the_places_and_rows_of_its_sequences() {
    let mut images = placed(12, true, false, vec![image(&[2..5, 6..8])]);
    images.embed(1, vec![encoded(5, None)]).unwrap();
    let mut step = StepImages::default();
    step.push(None, 7, 2);
    step.push(Some(&images), 2, 5);
    assert_eq!(step.axes, [[7; 3], [8; 3], [2; 3], [3; 3], [4; 3], [5; 3], [6; 3]]);
    assert_eq!(step.spans, [(0, 0), (0, 0), (2, 5), (2, 5), (2, 5), (0, 0), (6, 8)]);
    let rows: Vec<_> = step.rows.iter().map(|rows| (rows.first, rows.rows.clone())).collect();
    assert_eq!(rows, [(2, 0..3), (6, 3..4)]);
}
