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
            Some(ClassifierSpec { dense, out }) => {
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
