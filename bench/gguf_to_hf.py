#!/usr/bin/env python3
"""Converts a GGUF of architecture `llama` to a Hugging Face folder of bf16 weights, for engines that do not
read GGUF.

Weights are dequantised, so the engine computes the same model. The rows of q and k are put back into the
order of the original checkpoint. The head stays tied. The tokenizer is rebuilt from the GGUF's vocabulary and
merges.
"""
import argparse
import json
import pathlib

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
               "output.weight": "lm_head.weight"}


def hf_name(name):
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def unpermute(rows, heads):
    """Reverses GGUF's interleaving of the two halves that rotary embedding pairs. A checkpoint stores the
    halves one after the other.
    """
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def tensors(reader, heads, kv_heads):
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            values = unpermute(values, heads if "attn_q" in tensor.name else kv_heads)
        yield hf_name(tensor.name), torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def tokenizer(field):
    texts = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    built = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    built.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                   pre_tokenizers.ByteLevel(add_prefix_space=False)])
    built.decoder = decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    built.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(texts, kinds) if kind == CONTROL])
    return built, texts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.gguf)

    def field(key):
        return reader.get_field(key).contents()

    if field("general.architecture") != "llama":
        parser.error("only architecture llama is known")
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    weights = dict(tensors(reader, heads, kv_heads))
    built, texts = tokenizer(field)
    bos, eos = field("tokenizer.ggml.bos_token_id"), field("tokenizer.ggml.eos_token_id")
    width = field("llama.embedding_length")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": width, "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"), "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width // heads, "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"), "rope_theta": field("llama.rope.freq_base"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"), "vocab_size": len(texts),
        "tie_word_embeddings": "lm_head.weight" not in weights, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": bos, "eos_token_id": eos,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "config.json").write_text(json.dumps(config, indent=1))
    built.save(str(args.out / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": texts[bos], "eos_token": texts[eos],
             "clean_up_tokenization_spaces": False, "model_max_length": config["max_position_embeddings"]}
    if template := reader.get_field("tokenizer.chat_template"):
        names["chat_template"] = template.contents()
    (args.out / "tokenizer_config.json").write_text(json.dumps(names, indent=1))


if __name__ == "__main__":
    main()
