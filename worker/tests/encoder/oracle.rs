//! Vectors and scores compared with an independent implementation.

use crate::{Reference, open, options, text, worst};
use engine::encoder::Text;
use proto::served_model::ModelTask;

const MAX_DIFFERENCE: f32 = 1e-4;

fn unit(values: &[f32]) -> Vec<f32> {
    let length = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    values.iter().map(|x| (f64::from(*x) / length) as f32).collect()
}

#[test]
fn token_vectors_and_their_mean_equal_the_reference() {
    let reference = Reference::of("bert");
    let mut encoder = open("bert", &options());
    assert_eq!(encoder.task(), ModelTask::Embed { width: 64 });
    let mut prompts = 0;
    while let Some(ids) = reference.tokens(&format!("p{prompts}.ids")) {
        let text = text(ids);
        encoder.limits().check(&text).unwrap();
        let mut step = encoder.run(&[&text]).unwrap();
        let rows = step.rows(0).unwrap();
        let pooled = step.pooled(0).unwrap();
        for (tensor, found) in [
            ("tokens", rows.concat()),
            ("mean", pooled.clone()),
            ("mean_l2", unit(&pooled)),
            ("cls_l2", unit(&rows[0])),
        ] {
            let name = format!("p{prompts}.{tensor}");
            let difference = worst(&found, &reference.floats(&name));
            println!("{name}: {difference:e}");
            assert!(difference <= MAX_DIFFERENCE, "{name}: {difference}");
        }
        prompts += 1;
    }
    assert_eq!(prompts, 3);
}

/// `scores_token_types_0_1` is the trained model's result; `scores` is that of engines without segment types.
#[test]
fn scores_of_pairs_equal_the_reference_with_and_without_types() {
    let reference = Reference::of("bert-rerank");
    let mut encoder = open("bert-rerank", &options());
    assert_eq!(encoder.task(), ModelTask::Rerank { scores: 1 });
    let sep = encoder.tokenizer().eos().unwrap();
    let pairs: Vec<Vec<u32>> = (0..).map_while(|pair| reference.tokens(&format!("pair{pair}.ids"))).collect();
    assert_eq!(pairs.len(), 10);
    for (typed, name) in [(true, "scores_token_types_0_1"), (false, "scores")] {
        let expected = reference.floats(name);
        let texts: Vec<Text> = pairs
            .iter()
            .map(|ids| {
                let second = ids.iter().position(|id| *id == sep).unwrap() + 1;
                Text { tokens: ids.clone(), second: typed.then_some(second) }
            })
            .collect();
        let texts: Vec<&Text> = texts.iter().collect();
        let mut step = encoder.run(&texts).unwrap();
        let found: Vec<f32> = (0..texts.len()).flat_map(|index| step.pooled(index).unwrap()).collect();
        let difference = worst(&found, &expected);
        println!("{name}: {difference:e}");
        assert!(difference <= MAX_DIFFERENCE, "{name}: {difference}");
    }
}
