/// An image in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// The prompt's row where it begins.
    pub start: usize,
    /// Rows of the prompt in time, height and width: their product is the number of rows.
    pub grid: [u32; 3],
}

/// The positions of a prompt of `rows` rows on the axes time, height and width, and what is added to a later row's
/// index to get its position. A text row has one position on all axes; an image's rows have those of their
/// place in its grid, and the text goes on after the largest of them. The images are in order and within the prompt.
pub fn mrope_positions(rows: usize, images: &[Placed]) -> (Vec<[u32; 3]>, i64) {
    let mut positions: Vec<[u32; 3]> = Vec::with_capacity(rows);
    let mut next = 0;
    let text = |positions: &mut Vec<[u32; 3]>, next: &mut u32, until: usize| {
        while positions.len() < until {
            positions.push([*next; 3]);
            *next += 1;
        }
    };
    for image in images {
        text(&mut positions, &mut next, image.start.min(rows));
        let [times, heights, widths] = image.grid;
        for time in 0..times {
            for height in 0..heights {
                positions.extend((0..widths).map(|width| [next + time, next + height, next + width]));
            }
        }
        next += times.max(heights).max(widths);
    }
    text(&mut positions, &mut next, rows);
    positions.truncate(rows);
    (positions, i64::from(next) - rows as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_goes_on_after_the_largest_axis_of_an_image() {
        let (positions, delta) = mrope_positions(9, &[Placed { start: 2, grid: [1, 2, 3] }]);
        let image = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]];
        assert_eq!(positions[..2], [[0; 3], [1; 3]]);
        assert_eq!(positions[2..8], image);
        assert_eq!(positions[8..], [[5; 3]]);
        assert_eq!(delta, -3);
    }

    #[test]
    fn a_prompt_without_images_counts_its_rows() {
        assert_eq!(mrope_positions(3, &[]), (vec![[0; 3], [1; 3], [2; 3]], 0));
    }

    #[test]
    fn a_prompt_may_end_with_an_image() {
        let (positions, delta) = mrope_positions(4, &[Placed { start: 0, grid: [1, 2, 2] }]);
        assert_eq!(positions, [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]);
        assert_eq!(delta, -2);
    }
}
