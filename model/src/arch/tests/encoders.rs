use super::fixtures::{config, only_part, size, spec};
use crate::ModelSpec;
use crate::spec::*;
use crate::test_files::Plan;

#[test]
fn bert() {
    for arch in ["bert", "bert-rerank"] {
        let (spec, config) = (spec(&format!("tiny/{arch}/{arch}-f32.gguf")), config(arch));
        let positions = spec.embedding.positions.as_ref().unwrap();
        assert_eq!(positions.rows, size(&config, "max_position_embeddings"));
        assert_eq!(spec.embedding.token_types.as_ref().unwrap().rows, size(&config, "type_vocab_size"));
        let norm = spec.embedding.norm.as_ref().unwrap();
        assert_eq!((norm.kind, norm.eps), (NormKind::Layer, 1e-12));
        assert!(norm.bias.is_some());
        assert_eq!(spec.embedding_tensors().len(), 5);
        for (index, layer) in spec.layers.iter().enumerate() {
            let attention = spec.attention(index).unwrap();
            assert_eq!((attention.causal, &attention.rope), (false, &None));
            assert_eq!(attention.heads, size(&config, "num_attention_heads"));
            assert_eq!(attention.scale, ((spec.hidden / 4) as f32).sqrt().recip());
            assert_eq!((&layer.mixer_norm, &layer.ffn_norm), (&None, &None));
            let weight = |norm: &Option<NormSpec>| norm.as_ref().unwrap().weight.clone().unwrap();
            assert_eq!(weight(&layer.mixer_out_norm), format!("blk.{index}.attn_output_norm.weight"));
            assert_eq!(weight(&layer.ffn_out_norm), format!("blk.{index}.layer_output_norm.weight"));
            let FfnSpec::Plain { up, down, activation: Activation::GeluErf } = only_part(layer) else {
                panic!("{:?}", layer.ffn)
            };
            assert_eq!(up.rows, size(&config, "intermediate_size"));
            assert!(up.bias.is_some() && down.bias.is_some());
        }
        let OutputSpec::Pooled(pooled) = &spec.output else { panic!("{:?}", spec.output) };
        match &pooled.classifier {
            None => assert_eq!((arch, pooled.pooling), ("bert", Pooling::Mean)),
            Some(ClassifierSpec { dense, out, .. }) => {
                assert_eq!((arch, pooled.pooling), ("bert-rerank", Pooling::First));
                assert_eq!(dense.as_ref().unwrap().rows, spec.hidden);
                assert_eq!((out.rows, out.bias.as_deref()), (1, Some("cls.output.bias")));
            }
        }
    }
}

#[test]
fn other_poolings_and_heads() {
    let plan = || Plan::of_fixture("tiny/bert/bert-f32.gguf");
    let pooled = |plan: Plan| match ModelSpec::from_file(&plan.open()).unwrap().output {
        OutputSpec::Pooled(pooled) => pooled,
        other => panic!("{other:?}"),
    };
    for (number, pooling) in [(1_u32, Pooling::Mean), (2, Pooling::First), (3, Pooling::Last)] {
        let expected = PooledSpec { pooling, classifier: None };
        assert_eq!(pooled(plan().set("bert.pooling_type", number)), expected);
    }
    let labels = metadata::Strings::from_iter(["a", "b", "c"]);
    let ranks = plan().set("bert.pooling_type", 4_u32).set("bert.classifier.output_labels", labels);
    let classifier = pooled(ranks.tensor("cls.output.weight", &[64, 3])).classifier.unwrap();
    assert_eq!((classifier.out.rows, classifier.dense), (3, None));
}

#[test]
fn a_model_without_segments_has_no_table_of_them() {
    let plan = Plan::of_fixture("tiny/bert/bert-f32.gguf")
        .without("token_types.weight")
        .unset("tokenizer.ggml.token_type_count");
    assert_eq!(ModelSpec::from_file(&plan.open()).unwrap().embedding.token_types, None);
}

#[test]
fn modern_bert() {
    let plan = Plan::of_fixture("hf/modernbert");
    let read = |plan: &Plan| ModelSpec::from_file(&plan.open());
    let spec = read(&plan).unwrap();
    let base = |layer: usize| spec.attention(layer).unwrap().rope.as_ref().unwrap().base;
    assert_eq!([base(0), base(1)], [160_000.0, 10_000.0]);
    // Of 8 positions around a token, 4 are on each side.
    let windows = |spec: &ModelSpec| [0, 1, 2].map(|layer| spec.attention(layer).unwrap().window);
    assert_eq!(windows(&spec), [None, Some(5), Some(5)]);
    assert!(spec.layers.iter().all(|layer| !layer.attention().unwrap().causal));
    assert_eq!((&spec.layers[0].mixer_norm, spec.layers[1].mixer_norm.is_some()), (&None, true));
    let key = "modern-bert.attention.sliding_window_pattern";
    assert_eq!(windows(&read(&plan.clone().set(key, 2_u32)).unwrap()), [None, Some(5), None]);
    assert_eq!(windows(&read(&plan.clone().unset(key)).unwrap()), [None, Some(5), Some(5)]);
    // Heads that are not used.
    read(&plan.clone().tensor("cls.weight", &[8, 8])).unwrap();
    for (key, value) in [("attention.causal", metadata::Value::from(true)), ("pooling_type", 7_u32.into())] {
        let key = format!("modern-bert.{key}");
        let error = read(&plan.clone().set(&key, value)).unwrap_err().to_string();
        assert!(error.contains(&key), "{error}");
    }
    let plan = Plan::of_fixture("hf/modernbert-rerank");
    let pooled = |plan: &Plan| match read(plan).unwrap().output {
        OutputSpec::Pooled(pooled) => pooled,
        other => panic!("{other:?}"),
    };
    let found = pooled(&plan);
    let classifier = found.classifier.unwrap();
    assert_eq!((found.pooling, classifier.activation), (Pooling::Mean, PoolerActivation::GeluErf));
    assert!(classifier.norm.unwrap().bias.is_some() && classifier.dense.unwrap().bias.is_some());
    let key = "modern-bert.classifier.pooling_type";
    assert_eq!(pooled(&plan.clone().set(key, 2_u32)).pooling, Pooling::First);
    assert_eq!(pooled(&plan.clone().unset(key)).pooling, Pooling::Mean);
}
