//! ModernBERT: an encoder.

use super::{Family, Form, Rule, formed, none, rule};

pub(super) const MODERN_BERT: Family = Family {
    types: &["modernbert"],
    arch: "modern-bert",
    keys: |keys, _| {
        let config = keys.config;
        config.one_of(&["classifier_activation"], &["gelu"])?;
        keys.activation("hidden_activation")?;
        let layers = keys.decoder_with("norm_eps", "attention.layer_norm_epsilon")?;
        keys.set("attention.causal", false);
        keys.set("attention.sliding_window", config.need_count("local_attention")?);
        match config.layer_types(layers, &["full_attention", "sliding_attention"])? {
            Some(kinds) => {
                let slides: Vec<bool> = kinds.iter().map(|&kind| kind == 1).collect();
                keys.set("attention.sliding_window_pattern", slides);
            }
            None => keys.counts(&[("global_attn_every_n_layers", "attention.sliding_window_pattern")])?,
        }
        for (kind, old, key) in [
            ("full_attention", "global_rope_theta", "rope.freq_base"),
            ("sliding_attention", "local_rope_theta", "rope.freq_base_swa"),
        ] {
            let rope = keys.rope_config(kind)?;
            if rope.kind != "default" {
                return Err(config.refuse("rope_type", format!("{:?}", rope.kind), "default"));
            }
            let theta = match rope.number("rope_theta") {
                Some(theta) => theta,
                None => config.need_number(old)?,
            };
            keys.set(key, theta);
        }
        let poolings = ["mean", "cls"];
        config.one_of(&["classifier_pooling"], &poolings)?;
        let found = config.get("classifier_pooling").and_then(|found| found.as_str()).unwrap_or("cls");
        keys.set("classifier.pooling_type", if found == "mean" { 1_u32 } else { 2 });
        none()
    },
    rules: &[RULES],
};

const RULES: &[Rule] = &[
    rule("embeddings.tok_embeddings.*", "token_embd.*"),
    rule("embeddings.norm.*", "token_embd_norm.*"),
    rule("final_norm.*", "output_norm.*"),
    rule("layers.{l}.attn_norm.*", "blk.{l}.attn_norm.*"),
    rule("layers.{l}.attn.Wqkv.*", "blk.{l}.attn_qkv.*"),
    rule("layers.{l}.attn.Wo.*", "blk.{l}.attn_output.*"),
    rule("layers.{l}.mlp_norm.*", "blk.{l}.ffn_norm.*"),
    rule("layers.{l}.mlp.Wi.*", "blk.{l}.ffn_up.*"),
    rule("layers.{l}.mlp.Wo.*", "blk.{l}.ffn_down.*"),
    rule("head.dense.*", "cls.*"),
    rule("head.norm.*", "cls.norm.*"),
    rule("classifier.*", "cls.output.*"),
    // The head of training by masked tokens, which vectors and scores do not use.
    formed("decoder.*", "", Form::Unused),
];
