"""Hugging Face ``config.json``: which family it is of, its sizes, and what of it is not used."""

from collections.abc import Mapping
from typing import Any

from memcalc.config import fields
from memcalc.config.config import Source
from memcalc.config.model import Model
from memcalc.config.readers.hf_content import ALIASES, Content
from memcalc.config.readers.hf_families import DEFAULTS, FAMILIES, FOUR_H
from memcalc.errors import InputError, nearest

# What changes memory or FLOPs where it is set, and is not modelled: key -> what to know.
UNMODELLED = {
    "gradient_checkpointing": "choose recomputation with --recompute full",
    "attn_implementation": "choose kernels with --implementation",
    "_attn_implementation": "choose kernels with --implementation",
    "quantization_config": "activations are counted in the run's precision",
    "add_cross_attention": "the cross-attention's activations are missing",
    "reorder_and_upcast_attn": "unfused attention keeps a wider softmax than counted",
    "router_jitter_noise": "the router's noise keeps more than counted",
    "clip_qkv": "the clamps of query, key and value keep more than counted",
    "vision_config": "the language model alone is counted, and images come on top",
    "audio_config": "the language model alone is counted, and sounds come on top",
}

# What changes neither a layer's memory nor its FLOPs.
HARMLESS = """
    _sliding_window_pattern attention_multiplier auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens boi_token_index bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout decoder_start_token_id dense_act_fn do_sample dtype embedding_multiplier
    encoder_stride eoi_token_index eos_token_id ep_size experts_per_token finetuning_task gate_type
    id2label image_token_index init_std initial_context_length initializer_factor initializer_range
    is_encoder_decoder is_gated_act kv_channels label2id layer_norm_eps layer_norm_epsilon
    layerdrop logit_scale logits_scaling masked_softmax_fusion max_length max_window_layers
    mlp_type mm_tokens_per_image n_ctx n_embed n_group name_or_path norm_eps norm_epsilon norm_type
    offset_alibi original_max_position_embeddings output_attentions output_hidden_states
    output_past output_router_logits pad_token_id partial_rotary_factor pooler_act
    pooler_output_size prefix pretraining_tp qk_head_dim query_pre_attn_scalar
    relative_attention_max_distance residual_multiplier return_dict rms_norm_eps rope_interleave
    rope_local_base_freq rope_parameters rope_scaling rope_theta rotary_dim rotary_emb_base
    rotary_pct routed_scaling_factor router_aux_loss_coef scale_attention_softmax_in_fp32
    scale_attn_by_inverse_layer_idx scale_attn_weights sep_token_id seq_aux seq_length
    skip_bias_add skip_bias_add_qkv slow_but_exact summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj swiglu_alpha swiglu_limit
    task_specific_params tokenizer_class topk_group topk_method torch_dtype transformers_version
    unk_token_id use_cache use_mrope
""".split()  # noqa: SIM905 - words read best as words
NAMES = ("model_type", "architectures", "_name_or_path")

# Where the language model stands in the config of a model of more than one part.
_PARTS = ("thinker_config", "text_config")

ARCHITECTURES = {
    "BertForMaskedLM": "bert",
    "BertModel": "bert",
    "BloomForCausalLM": "bloom",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "GPT2Model": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTNeoForCausalLM": "gpt_neo",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "MT5ForConditionalGeneration": "mt5",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Starcoder2ForCausalLM": "starcoder2",
    "T5ForConditionalGeneration": "t5",
    "ViTForImageClassification": "vit",
    "ViTModel": "vit",
}

# Families that Model cannot say, each with what it lacks for them.
REFUSED = {
    "dbrx": "its sizes stand in attn_config and ffn_config, and its norms have no bias",
    "llama4": "its chunked attention and its layers without positions are not modelled",
    "mpt": "its sizes stand in attn_config and expansion_ratio",
    "olmo": "its norms have no weights",
    "olmo2": "its norms of query and key are over all heads at once, and follow the sublayers",
    "umt5": "each of its layers has a table of relative positions",
}


def read(content: Mapping[str, Any], name: str) -> Source:
    """The Source that a ``config.json`` describes.

    Args:
        content: The parsed file.
        name: What to call the model if the file does not say.

    Raises:
        InputError: The family is not one that memcalc models, or a size is missing.
        ConfigError: Two names of one fact disagree, or a value is out of its bounds.

    >>> config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None}
    >>> read(config, "gpt2").model.ffn_size
    3072
    """
    text, lines = _language_model(content)
    family = _family(text)
    said = Content(text, DEFAULTS.get(family, {}))
    facts = {**_sizes(said), **FAMILIES[family](said)}
    if not facts.get("experts"):
        facts = {fact: value for fact, value in facts.items() if fact not in _OF_EXPERTS}
    _width(said, family, facts)
    model = Model(
        name=_name(content, name),
        source=f"Hugging Face config.json, model_type {family}",
        **{fact: value for fact, value in facts.items() if value is not None},
    )
    unmodelled = (*lines, *said.unmodelled, *_unmodelled(text, said))
    return Source(model, {}, tuple(dict.fromkeys(said.assumed)), tuple(dict.fromkeys(unmodelled)))


def _language_model(content: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The part of a config that describes the language model, and a line for what it overrules."""
    lines: list[str] = []
    for part in _PARTS:
        inner = content.get(part)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise InputError(f"{part} must be an object")
        outer = {key: value for key, value in content.items() if key != part}
        inner = {key: value for key, value in inner.items() if value is not None}
        for names in ALIASES.values():
            for key in names:
                if outer.get(key) not in (None, inner.get(key)):
                    lines.append(f"{key} is not used: that of {part} is the language model's")
                outer.pop(key, None)
        content = {**outer, **inner}
    return content, lines


def _sizes(said: Content) -> dict[str, Any]:
    """The sizes that every family has, of which three must be there."""
    sizes = {fact: said.fact(fact) for fact in _SIZES}
    for fact in ("layers", "hidden_size", "heads"):
        if sizes[fact] is None:
            names = ALIASES[fact]
            raise InputError(f"no {names[0]} (nor {', '.join(names[1:])}) in the config")
    fields.whole("layers", sizes["layers"], 100_000)
    return sizes


_SIZES = (
    *("layers", "hidden_size", "heads", "kv_heads", "head_size", "ffn_size"),
    *("vocab_size", "max_seq_length"),
)
_OF_EXPERTS = (
    *("experts", "experts_per_token", "expert_ffn_size", "shared_ffn_size", "shared_gate"),
    *("moe_layers", "router", "router_bias"),
)


def _width(said: Content, family: str, facts: dict[str, Any]) -> None:
    """Fill in the MLP's width where the family has a rule for it, and ask for it elsewhere."""
    if facts["ffn_size"] is not None:
        return
    if family in FOUR_H:
        said.assumed.append("ffn_size 4 x hidden_size (the config gives none)")
        return
    patterned = facts.get("moe_layers") is not None
    if facts.get("expert_ffn_size") is None or patterned:
        ratio = " (mlp_ratio does not say how wide a gated one is)"
        raise InputError(
            f"no intermediate_size in the config, and {family} has no rule for its MLP's width"
            f"{ratio if said.states('mlp_ratio') else ''}"
        )
    facts["ffn_size"] = facts["expert_ffn_size"]  # every layer has experts: nothing else has it


def _family(content: Mapping[str, Any]) -> str:
    family = content.get("model_type")
    if family is None:
        architectures = content.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        family = ARCHITECTURES.get(first, first) if isinstance(first, str) else None
    if not isinstance(family, str):
        raise InputError("neither model_type nor architectures names a model family")
    if family in REFUSED:
        raise InputError(f"model_type {family!r} is not modelled: {REFUSED[family]}")
    if family not in FAMILIES:
        raise InputError(f"model_type {family[:40]!r} is not modelled; {nearest(family, FAMILIES)}")
    return family


def _name(content: Mapping[str, Any], fallback: str) -> str:
    path = content.get("_name_or_path")
    if isinstance(path, str) and 0 < len(path) <= 200 and path.isprintable():
        return path
    return fallback


def _printable(key: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in key[:40])


def _unmodelled(content: Mapping[str, Any], said: Content) -> list[str]:
    """A line for each key that changes what is counted, and one for all that are not known."""
    known = {*UNMODELLED, *HARMLESS, *NAMES, *said.read}
    unknown = sorted(
        _printable(key) for key, value in content.items() if value and key not in known
    )
    lines = [f"{key} is not modelled: {UNMODELLED[key]}" for key in UNMODELLED if content.get(key)]
    if unknown:
        lines.append(f"not used, for memcalc does not know it: {', '.join(unknown)}")
    return lines
