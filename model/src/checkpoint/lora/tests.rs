use super::*;

#[test]
fn patterns_match_whole_words_at_the_end() {
    let patterns = [
        ("down_proj", 4.0),
        ("layers.0.self_attn.q_proj", 2.0),
        ("^layers.1.mlp.up_proj", 3.0),
        ("q_proj", 5.0),
    ];
    let patterns = Patterns(patterns.map(|(name, value)| (name.to_owned(), value)).to_vec());
    let rank = ByModule { patterns, default: 8.0 };
    for (module, expected) in [
        ("model.layers.3.mlp.down_proj", 4.0),
        ("model.layers.0.self_attn.q_proj", 2.0),
        ("model.layers.10.self_attn.q_proj", 5.0),
        ("model.layers.10.self_attn.xq_proj", 8.0),
        ("layers.1.mlp.up_proj", 3.0),
        ("model.layers.1.mlp.up_proj", 8.0),
    ] {
        assert_eq!(rank.of(module), expected, "{module}");
    }
}

#[test]
fn names_of_tensors_are_taken_apart() {
    let q = "model.layers.0.self_attn.q_proj";
    for (name, expected) in [
        ("lora_A.weight", Some((q, false))),
        ("lora_B.weight", Some((q, true))),
        ("lora_B.default.weight", Some((q, true))),
        ("lora_B.bias", None),
        ("lora_embedding_A", None),
        ("lora_magnitude_vector", None),
    ] {
        assert_eq!(part(&format!("base_model.model.{q}.{name}")), expected);
        assert_eq!(part(&format!("{q}.{name}")), None);
    }
}

#[test]
fn halves_become_pairs_in_each_head() {
    let b: Vec<f32> = (0..16).map(|value| value as f32).collect();
    // Two heads of four rows of two values.
    let expected = [0, 2, 1, 3, 4, 6, 5, 7].map(|row: usize| [2.0 * row as f32, 2.0 * row as f32 + 1.0]);
    assert_eq!(paired(&b, 2, 4), expected.as_flattened());
}

#[test]
fn modules_have_the_names_of_old_and_new_classes() {
    for prefix in ["backbone", "model"] {
        let weight = families::weight_of_module("nemotron_h", &format!("{prefix}.layers.3.mixer.q_proj"));
        assert_eq!(weight.as_deref(), Some("blk.3.attn_q.weight"));
    }
}
