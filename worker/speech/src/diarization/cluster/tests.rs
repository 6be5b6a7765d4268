use super::*;
use proptest::prelude::*;
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    voices: Vec<Vec<f32>>,
    threshold: f64,
    min: usize,
    max: usize,
    clusters: Vec<usize>,
}

fn run(voices: &[Vec<f32>], threshold: f64, min: usize, max: usize) -> (Vec<usize>, Vec<Vec<f64>>) {
    let voices: Vec<&[f32]> = voices.iter().map(Vec::as_slice).collect();
    clusters(&voices, ClusterLimits { threshold, min, max })
}

/// Made by `reference.py`.
#[test]
fn clusters_are_those_of_scipy_by_pyannotes_rules() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("reference.json")).unwrap();
    let mut counts = Vec::new();
    for Case { voices, threshold, min, max, clusters } in cases {
        let (found, means) = run(&voices, threshold, min, max);
        assert_eq!(found, clusters, "{} voices, threshold {threshold}", voices.len());
        counts.push(means.len());
    }
    assert!(counts.iter().max() >= Some(&4) && counts.contains(&1), "{counts:?}");
}

#[test]
fn few_voices_and_one_speaker_need_no_clusters() {
    assert_eq!(run(&[], 0.7, 1, 9), (vec![], vec![]));
    assert_eq!(run(&[vec![0.0, 1.0]], 0.7, 1, 9), (vec![0], vec![vec![0.0, 1.0]]));
    let two = [vec![0.0, 1.0], vec![1.0, 0.0]];
    assert_eq!(run(&two, 0.7, 1, 1), (vec![0, 0], vec![vec![0.5, 0.5]]));
    assert_eq!(run(&two, 0.7, 1, 9).0, [0, 1]);
    assert_eq!(run(&two, 1.5, 1, 9).0, [0, 0]);
    // The first merge is always made, as in pyannote.
    assert_eq!(run(&two, 1.5, 2, 9).0, [0, 0]);
    let means = run(&two, 0.7, 1, 9).1;
    assert_eq!((closest(&[0.5, 0.6], &means), closest(&[0.5, 0.5], &means)), (0, 0));
    assert_eq!(closest(&[0.6, 0.5], &means), 1);
}

proptest! {
    #[test]
    fn clusters_are_numbered_without_gaps_within_their_limits(
        voices in prop::collection::vec(prop::array::uniform3(1..100i32), 0..60),
        (threshold, min, max) in (0.0..2.0f64, 1..8usize, 1..8usize),
    ) {
        let voices: Vec<Vec<f32>> =
            voices.iter().map(|voice| voice.iter().map(|value| *value as f32).collect()).collect();
        let (found, means) = run(&voices, threshold, min.min(max), max);
        prop_assert_eq!(found.len(), voices.len());
        prop_assert!(means.len() <= max);
        for cluster in 0..means.len() {
            prop_assert!(found.contains(&cluster));
        }
        prop_assert!(found.iter().all(|cluster| *cluster < means.len()));
    }
}
