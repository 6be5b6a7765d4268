use super::*;
use proptest::prelude::*;

fn sampler(params: Sampling) -> Sampler {
    Sampler::new(params, &Stop::default(), &[1, 2], vec![3], 5).unwrap()
}

fn params(temperature: f32) -> Sampling {
    Sampling { temperature, ..Sampling::default() }
}

const LOGITS: [f32; 5] = [0.5, 2.0, 1.0, -1.0, 1.9];

/// Distribution of `n` draws from the same logits.
fn histogram(mut s: Sampler, n: u32) -> Vec<f64> {
    let mut counts = vec![0.0; 5];
    for _ in 0..n {
        let (token, _) = s.draw(&mut LOGITS.clone()).unwrap();
        counts[token as usize] += 1.0 / f64::from(n);
        s.drawn += 1;
    }
    counts
}

#[test]
fn greedy_ties_go_to_the_lowest_token() {
    assert_eq!(sampler(params(0.0)).draw(&mut [1.0, 3.0, 3.0, 0.0, 0.0]).unwrap().0, 1);
}

#[test]
fn draws_follow_the_softmax() {
    for temperature in [0.5f32, 1.0, 2.0] {
        let got = histogram(sampler(Sampling { seed: 7, ..params(temperature) }), 40_000);
        let weights: Vec<f64> = LOGITS.iter().map(|&l| f64::from(l / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (g, w) in got.iter().zip(&weights) {
            assert!((g - w / total).abs() < 0.012, "temperature {temperature}: {got:?}");
        }
    }
}

#[test]
fn filters_keep_the_expected_tokens() {
    let seen = |p: Sampling| {
        let got = histogram(sampler(p), 3000);
        (0..5).filter(|&t| got[t] > 0.0).collect::<Vec<_>>()
    };
    assert_eq!(seen(Sampling { top_k: 2, ..params(1.0) }), [1, 4]);
    assert_eq!(seen(Sampling { top_k: 1, ..params(5.0) }), [1]);
    // Softmax: 0.086 0.385 0.142 0.019 0.349 -> two tokens fill 0.7.
    assert_eq!(seen(Sampling { top_p: 0.7, ..params(1.0) }), [1, 4]);
    assert_eq!(seen(Sampling { top_p: 0.01, ..params(1.0) }), [1]);
    assert_eq!(seen(Sampling { min_p: 0.3, ..params(1.0) }), [1, 2, 4]);
    assert_eq!(seen(params(1.0)), [0, 1, 2, 3, 4]);
}

#[test]
fn a_draw_depends_on_seed_and_index_only() {
    let run = |seed| {
        let mut s = sampler(Sampling { seed, ..params(1.0) });
        (0..20)
            .map(|_| {
                let token = s.draw(&mut LOGITS.clone()).unwrap().0;
                s.accept(token);
                token
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    let mut continued = sampler(Sampling { seed: 1, ..params(1.0) });
    run(1)[..7].iter().for_each(|&token| continued.accept(token));
    assert_eq!(continued.draw(&mut LOGITS.clone()).unwrap().0, run(1)[7]);
}

#[test]
fn penalties_and_bias_change_the_logits() {
    let mut s = sampler(Sampling {
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        logit_bias: vec![(0, 1.5)],
        ..params(0.0)
    });
    s.accept(4);
    s.accept(4);
    let mut row = [0.5, 2.0, -1.0, -1.0, 4.0];
    s.adjust(&mut row, None);
    // Bias on token 0. Prompt tokens 1 and 2 and drawn token 4 are repetitions. Token 4 was drawn twice.
    assert_eq!(row, [2.0, 1.0, -2.0, -1.0, 4.0 / 2.0 - 0.5 - 0.5]);
}

#[test]
fn no_output_ends_before_its_minimum_length() {
    let stop = Stop { min_tokens: 2, ..Stop::default() };
    let mut s = Sampler::new(params(0.0), &stop, &[], vec![3], 5).unwrap();
    let row = [0.0, 1.0, 0.0, 9.0, 0.0];
    assert!(!s.is_plain_argmax());
    for expected in [1, 1, 3] {
        let (token, _) = s.draw(&mut row.clone()).unwrap();
        assert_eq!(token, expected);
        s.accept(token);
    }
    assert!(s.is_plain_argmax());
}

#[test]
fn log_probabilities_are_those_of_the_raw_row() {
    let s = sampler(Sampling { logprobs: Some(2), logit_bias: vec![(3, 100.0)], ..params(0.0) });
    let (token, logprobs) = s.draw(&mut LOGITS.clone()).unwrap();
    let logprobs = logprobs.unwrap();
    let total: f64 = LOGITS.iter().map(|&l| f64::from(l).exp()).sum();
    assert_eq!(token, 3);
    assert!((f64::from(logprobs.chosen) - (-1.0 - total.ln())).abs() < 1e-6);
    assert_eq!(logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 4]);
}

#[test]
fn bad_parameters_name_the_field() {
    let bad: [(&str, Sampling); 7] = [
        ("temperature", params(f32::NAN)),
        ("temperature", params(-0.1)),
        ("top_p", Sampling { top_p: 0.0, ..params(1.0) }),
        ("min_p", Sampling { min_p: 1.1, ..params(1.0) }),
        ("repetition_penalty", Sampling { repetition_penalty: 0.0, ..params(1.0) }),
        ("logit_bias", Sampling { logit_bias: vec![(5, 1.0)], ..params(1.0) }),
        ("logprobs", Sampling { logprobs: Some(21), ..params(1.0) }),
    ];
    for (name, params) in bad {
        match Sampler::new(params, &Stop::default(), &[], vec![], 5) {
            Err(GenerateError::InvalidField { field, .. }) => assert_eq!(field, name),
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// A row, and the parameters of a draw from it.
fn rows_and_params() -> impl Strategy<Value = (Vec<f32>, Sampling)> {
    // Few and distant values, so that some are equal and some differ but have the same weight.
    let logit = prop_oneof![
        8 => -20f32..20.0,
        4 => (-8i8..8).prop_map(f32::from),
        1 => Just(f32::NEG_INFINITY),
        1 => (-1e-9f32..1e-9).prop_map(|x| x),
        1 => Just(f32::NAN),
    ];
    let rows = prop::collection::vec(logit, 1..200);
    let filters = (0u32..12, prop_oneof![Just(1.0f32), 0.05f32..1.0], prop_oneof![Just(0.0f32), 0.0f32..0.9]);
    (rows, prop_oneof![0.01f32..3.0, Just(100.0)], filters, any::<u64>()).prop_map(
        |(row, temperature, (top_k, top_p, min_p), seed)| {
            (row, Sampling { temperature, top_k, top_p, min_p, seed, ..Sampling::default() })
        },
    )
}

/// The best logits in the order of a device.
fn best_of(row: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut best: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
    best.sort_by(|a, b| b.1.is_nan().cmp(&a.1.is_nan()).then(b.1.total_cmp(&a.1)).then(a.0.cmp(&b.0)));
    best.truncate(count);
    best.reverse();
    best
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// If the best logits determine a draw, it is the draw from the whole row.
    #[test]
    fn a_draw_from_the_best_is_the_draw_from_the_row((row, params) in rows_and_params(), count in 1usize..40) {
        let sampler = Sampler::new(params, &Stop::default(), &[], vec![], row.len()).unwrap();
        if let Some(token) = sampler.draw_of_best(&best_of(&row, count)) {
            prop_assert_eq!(Some(token), sampler.draw(&mut row.clone()).map(|drawn| drawn.0));
        }
    }
}

#[test]
fn the_best_logits_decide_only_draws_that_filters_narrow() {
    let row: Vec<f32> = (0..100u8).map(|i| 10.0 - f32::from(i) / 10.0).collect();
    let decided = |params: Sampling, count| {
        let sampler = Sampler::new(params, &Stop::default(), &[], vec![3], row.len()).unwrap();
        sampler.draw_of_best(&best_of(&row, count)).is_some()
    };
    let top_k = |top_k| Sampling { top_k, ..params(1.0) };
    assert!(decided(top_k(8), 9) && !decided(top_k(8), 8) && !decided(params(1.0), 99));
    let likely = Sampling { min_p: 0.5, ..params(1.0) };
    assert!(decided(likely.clone(), 8) && !decided(likely, 7));
    assert!(decided(params(0.01), 10) && !decided(Sampling { top_p: 0.1, ..params(1.0) }, 50));
    let penalised = Sampling { presence_penalty: 1.0, ..top_k(8) };
    assert!(!decided(penalised, 9) && !decided(Sampling { logprobs: Some(1), ..top_k(8) }, 9));
    assert!(!decided(Sampling { logit_bias: vec![(3, 1.0)], ..top_k(8) }, 9));
}

#[test]
fn a_mask_applies_before_filters_and_before_the_minimum_length() {
    // Tokens 0 and 3.
    let mask = TokenMask::new(vec![0b1001]);
    assert!(mask.allows(0) && !mask.allows(1) && mask.allows(3) && !mask.allows(64) && !mask.is_empty());
    let greedy = sampler(params(0.0));
    assert_eq!(greedy.draw_allowed(&mut [1.0, 9.0, 3.0, 2.0, 0.0], Some(&mask)).unwrap().0, 3);
    let narrow = sampler(Sampling { top_k: 1, seed: 4, ..params(1.0) });
    assert_eq!(
        narrow.draw_allowed(&mut [5.0, 9.0, 3.0, 2.0, 0.0], Some(&mask)).unwrap().0,
        0,
        "the best of those allowed"
    );
    // Only the token that ends the output may follow, although the minimum length is not reached.
    let stop = Stop { min_tokens: 9, ..Stop::default() };
    let long = Sampler::new(params(1.0), &stop, &[], vec![3], 5).unwrap();
    let end = TokenMask::new(vec![0b1000]);
    assert_eq!(long.draw_allowed(&mut [5.0, 9.0, 3.0, 2.0, 0.0], Some(&end)).unwrap().0, 3);
    assert_eq!(
        long.draw_allowed(&mut [5.0, 9.0, 3.0, 2.0, 0.0], Some(&mask)).unwrap().0,
        0,
        "another one may come"
    );
}

#[test]
fn nothing_is_drawn_from_what_is_no_number() {
    let bad: [[f32; 5]; 5] = [
        [f32::NAN; 5],
        [0.0, 1.0, 2.0, f32::NAN, 0.0],
        [0.0, -f32::NAN, 2.0, 0.0, 0.0],
        [0.0, 1.0, f32::INFINITY, 0.0, 0.0],
        [f32::NEG_INFINITY; 5],
    ];
    let all = [
        params(0.0),
        params(1.0),
        Sampling { top_k: 2, seed: 3, ..params(1.0) },
        Sampling { top_p: 0.5, logprobs: Some(2), ..params(0.7) },
        Sampling { logit_bias: vec![(3, 5.0)], ..params(0.0) },
    ];
    let mask = TokenMask::new(vec![0b00101]);
    for row in bad {
        for params in &all {
            let sampler = sampler(params.clone());
            assert_eq!(sampler.draw(&mut row.clone()), None, "{row:?} {params:?}");
            assert_eq!(sampler.draw_allowed(&mut row.clone(), Some(&mask)), None, "{row:?} {params:?}");
            assert_eq!(sampler.draw_of_best(&best_of(&row, 3)), None, "{row:?} {params:?}");
        }
    }
    // Some models bar tokens by minus infinity.
    let barred = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 0.5, f32::NEG_INFINITY];
    assert_eq!(sampler(params(0.0)).draw(&mut barred.clone()).unwrap().0, 1);
}
