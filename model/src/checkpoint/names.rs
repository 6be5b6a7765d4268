//! GGUF names of the tensors of BERT and RoBERTa, and of word pieces.

/// Names without `.weight` and `.bias`.
const MODEL: [(&str, &str); 4] = [
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
];

const LAYER: [(&str, &str); 8] = [
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
];

/// The layers of a classifier; those of BERT, and those of RoBERTa.
const CLASSIFIER: [(&str, &str); 4] = [
    ("pooler.dense", "cls"),
    ("classifier", "cls.output"),
    ("classifier.dense", "cls"),
    ("classifier.out_proj", "cls.output"),
];

/// Names of the matrices with a row for each label.
pub(super) const CLASSIFIERS: [&str; 2] = ["classifier.weight", "classifier.out_proj.weight"];

/// Strips the prefix that models with a head add.
fn of_body(name: &str) -> &str {
    ["bert.", "roberta."].iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

/// True for position numbers.
pub(super) fn is_number(name: &str) -> bool {
    of_body(name) == "embeddings.position_ids"
}

/// True if the tensor does not affect a pooled vector: position numbers, and the training layer on the first
/// token's vector.
pub(super) fn is_left_out(name: &str) -> bool {
    is_number(name) || of_body(name).starts_with("pooler.dense.")
}

/// The GGUF name. An unknown name stays unchanged, and the translator refuses it.
pub(super) fn of_gguf(name: &str) -> String {
    translated(name).unwrap_or_else(|| name.to_owned())
}

fn translated(name: &str) -> Option<String> {
    let (stem, part) = of_body(name).rsplit_once('.')?;
    let among = |names: &[(&str, &'static str)], stem: &str| {
        names.iter().find(|(hf, _)| *hf == stem).map(|(_, gguf)| *gguf)
    };
    if let Some(gguf) = among(&MODEL, stem).or_else(|| among(&CLASSIFIER, stem)) {
        return Some(format!("{gguf}.{part}"));
    }
    let (layer, stem) = stem.strip_prefix("encoder.layer.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    Some(format!("blk.{layer}.{}.{part}", among(&LAYER, stem)?))
}

/// Converts a line of `vocab.txt`. There a piece that continues a word begins with `##`; in GGUF a piece that
/// begins a word starts with U+2581.
pub(super) fn piece_of_gguf(line: &str) -> String {
    match line.strip_prefix("##") {
        Some(rest) if !rest.is_empty() => rest.to_owned(),
        _ if line.starts_with('[') && line.ends_with(']') && line.len() > 2 => line.to_owned(),
        _ => format!("\u{2581}{line}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, expected) in [
            ("embeddings.word_embeddings.weight", "token_embd.weight"),
            ("bert.embeddings.LayerNorm.bias", "token_embd_norm.bias"),
            ("encoder.layer.11.attention.self.key.bias", "blk.11.attn_k.bias"),
            ("encoder.layer.0.output.LayerNorm.weight", "blk.0.layer_output_norm.weight"),
            ("bert.encoder.layer.3.intermediate.dense.weight", "blk.3.ffn_up.weight"),
            ("encoder.layer.x.output.dense.weight", "encoder.layer.x.output.dense.weight"),
            ("encoder.layer.1.crossattention.self.key.bias", "encoder.layer.1.crossattention.self.key.bias"),
            ("bert.pooler.dense.bias", "cls.bias"),
            ("classifier.weight", "cls.output.weight"),
            ("roberta.encoder.layer.2.output.dense.bias", "blk.2.ffn_down.bias"),
            ("classifier.dense.weight", "cls.weight"),
            ("classifier.out_proj.weight", "cls.output.weight"),
            ("cls.predictions.bias", "cls.predictions.bias"),
            ("", ""),
        ] {
            assert_eq!(of_gguf(name), expected);
        }
        assert!(is_left_out("embeddings.position_ids") && is_left_out("bert.pooler.dense.bias"));
        assert!(!is_left_out("embeddings.position_embeddings.weight"));
    }

    #[test]
    fn pieces() {
        for (line, expected) in
            [("##ing", "ing"), ("go", "▁go"), ("[CLS]", "[CLS]"), ("##", "▁##"), ("[", "▁[")]
        {
            assert_eq!(piece_of_gguf(line), expected);
        }
    }
}
