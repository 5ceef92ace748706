"""Names that several families have for a layer's tensors, in safetensors and in GGUF files, and ours; and
what GGUF files call settings of config.json.

What one family alone has, or has in another form, is in its own file, and holds before these.
"""

from __future__ import annotations

from phasewise.serving.loaders.cuts import Names, OfLayer, OtherForm, TensorCut

FED = ("gate", "up", "down")
"""The weights of a feed-forward layer."""


def fed(stem: str, ours: str = "", theirs: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Names:
    """Those of one whose names begin with `stem`."""
    return {f"{stem}.{name}.weight": ours + part for name, part in zip(theirs, FED, strict=True)}


def stacked(stem: str) -> Names:
    """Those of all experts: gates and ups of each in one matrix."""
    pair = TensorCut(("gate", "up"), of_experts=True)
    return {f"{stem}.gate_up_proj": pair, f"{stem}.down_proj": TensorCut(("down",), of_experts=True)}


def _mamba(stem: str) -> Names:
    return {
        f"{stem}.in_proj.weight": "state_in",
        f"{stem}.out_proj.weight": OfLayer(("state_o", "o")),
        f"{stem}.conv1d.weight": OtherForm("taps"),
        f"{stem}.conv1d.bias": "taps_bias",
        f"{stem}.A_log": OtherForm("rates", negated_exponential=True),
        f"{stem}.dt_bias": "time_offsets",
        f"{stem}.D": "skips",
        f"{stem}.norm.weight": "state_scale",
    }


HF_LLAMA: dict[str, str] = {
    "self_attn.q_proj.weight": "q", "self_attn.k_proj.weight": "k", "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o", "mlp.gate_proj.weight": "gate", "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down", "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "ffn_norm", "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias", "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.bias": "o_bias", "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
}  # fmt: skip
HF_LAYER: Names = {
    **HF_LLAMA,
    "post_attention_layernorm.weight": OfLayer(("attn_post_norm", "ffn_norm")),
    "pre_feedforward_layernorm.weight": "ffn_norm",
    "post_feedforward_layernorm.weight": "ffn_post_norm",
    "self_attn.qkv_proj.weight": TensorCut(("q", "k", "v")),
    "mlp.gate_up_proj.weight": TensorCut(("gate", "up")),
    **dict.fromkeys(("mlp.gate.weight", "block_sparse_moe.gate.weight", "mixer.gate.weight"), "router"),
    **{
        f"{stem}.e_score_correction_bias": "choice_bias"
        for router in ("mlp", "block_sparse_moe", "mixer")
        for stem in (router, f"{router}.gate")
    },
    **fed("mlp.experts.{e}", "experts.{e}."),
    **fed("block_sparse_moe.experts.{e}", "experts.{e}.", ("w1", "w3", "w2")),
    **stacked("mlp.experts"),
    **fed("mlp.shared_experts"),
    **fed("feed_forward"),
    **_mamba("mamba"),
    **_mamba("mixer"),
}
HF_OUTSIDE = {
    "model.embed_tokens.weight": "embed",
    "lm_head.weight": "lm_head",
    "model.norm.weight": "final_norm",
}

GGUF_LAYER: Names = {
    "attn_q.weight": "q", "attn_k.weight": "k", "attn_v.weight": "v", "attn_output.weight": "o",
    "ffn_gate.weight": "gate", "ffn_up.weight": "up", "ffn_down.weight": "down",
    "attn_norm.weight": "attn_norm", "ffn_norm.weight": "ffn_norm",
    "attn_q.bias": "q_bias", "attn_k.bias": "k_bias", "attn_v.bias": "v_bias",
    "attn_output.bias": "o_bias", "attn_q_norm.weight": "q_norm", "attn_k_norm.weight": "k_norm",
    "post_attention_norm.weight": OfLayer(("attn_post_norm", "ffn_norm")),
    "post_ffw_norm.weight": "ffn_post_norm",
    "ffn_gate_inp.weight": "router", "exp_probs_b.bias": "choice_bias",
    **{f"ffn_{part}_shexp.weight": part for part in FED},
    **{f"ffn_{part}_exps.weight": TensorCut((part,), of_experts=True) for part in FED},
    "ffn_gate_inp_shexp.weight": OtherForm("shared_gate", vector=False),
    "ssm_in.weight": "state_in", "ssm_out.weight": OfLayer(("state_o", "o")),
    "ssm_conv1d.weight": OtherForm("taps"), "ssm_conv1d.bias": "taps_bias", "ssm_a": OtherForm("rates"),
    "ssm_dt.bias": "time_offsets", "ssm_d": OtherForm("skips"), "ssm_norm.weight": OtherForm("state_scale"),
}  # fmt: skip
GGUF_OUTSIDE = {"token_embd.weight": "embed", "output.weight": "lm_head", "output_norm.weight": "final_norm"}

GGUF_KEYS = {
    "sliding_window": "attention.sliding_window",
    **dict.fromkeys(("num_experts", "num_local_experts"), "expert_count"),
    "num_experts_per_tok": "expert_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
"""Settings that mean the same in both formats: families read them by their names in config.json."""
GGUF_NONE = {"sliding_window": 0}
"""The values that llama.cpp writes where a model has none."""
