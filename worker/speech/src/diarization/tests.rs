use super::*;

#[test]
fn options_are_applied_or_refused_by_name() {
    let none = DiarizationOptions::default();
    let wrong = |options: DiarizationOptions| match limits(&options).unwrap_err() {
        OperationError::InvalidField { field, .. } => field,
        other => panic!("{other:?}"),
    };
    let default = ClusterLimits { threshold: f64::from(THRESHOLD), min: 1, max: usize::MAX };
    assert_eq!(limits(&none).unwrap(), default);
    let exact = DiarizationOptions { num_speakers: Some(3), threshold: Some(0.5), ..none.clone() };
    assert_eq!(limits(&exact).unwrap(), ClusterLimits { threshold: 0.5, min: 3, max: 3 });
    let range = DiarizationOptions { min_speakers: Some(2), max_speakers: Some(4), ..none.clone() };
    assert_eq!(limits(&range).unwrap(), ClusterLimits { min: 2, max: 4, ..default });
    assert_eq!(wrong(DiarizationOptions { num_speakers: Some(0), ..none.clone() }), "num_speakers");
    assert_eq!(wrong(DiarizationOptions { num_speakers: Some(101), ..none.clone() }), "num_speakers");
    assert_eq!(wrong(DiarizationOptions { num_speakers: Some(2), ..range.clone() }), "num_speakers");
    assert_eq!(wrong(DiarizationOptions { min_speakers: Some(5), ..range }), "min_speakers");
    assert_eq!(wrong(DiarizationOptions { max_speakers: Some(0), ..none.clone() }), "max_speakers");
    assert_eq!(wrong(DiarizationOptions { threshold: Some(2.1), ..none.clone() }), "threshold");
    assert_eq!(wrong(DiarizationOptions { threshold: Some(f32::NAN), ..none }), "threshold");
}

#[test]
fn the_samples_of_frames_are_consecutive_pieces() {
    assert_eq!(pieces(|_| true), vec![0..WINDOW]);
    assert_eq!(pieces(|_| false), Vec::<Range<usize>>::new());
    // A frame has 160,000 / 589 samples.
    assert_eq!(pieces(|frame| frame < 2), vec![0..544]);
    assert_eq!(pieces(|frame| frame == 1 || frame == 588), vec![272..544, 159_729..WINDOW]);
}

#[test]
fn a_folder_without_a_network_is_refused_by_the_files_name() {
    let dir = tempfile::tempdir().unwrap();
    let refusal = |dir: &Path| is_in(dir).unwrap_err().to_string();
    assert!(refusal(dir.path()).contains(SEGMENTATION));
    std::fs::write(dir.path().join(SEGMENTATION), b"no").unwrap();
    assert!(refusal(dir.path()).contains("pretrained.pt"));
    std::fs::write(dir.path().join("pretrained.pt"), b"no").unwrap();
    is_in(dir.path()).unwrap();
    let error = Diarization::load(dir.path(), NonZeroUsize::MIN).err().unwrap().to_string();
    assert!(error.contains(SEGMENTATION) && error.contains("not a file of torch.save"), "{error}");
}
