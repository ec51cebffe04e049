"""Hugging Face ``config.json``: the model's family, its sizes, and the keys that are ignored."""

from collections.abc import Mapping
from typing import Any

from memcalc.config import fields, pipeline
from memcalc.config.assumption import Assumption
from memcalc.config.families import FAMILIES
from memcalc.config.families.content import ALIASES, Content
from memcalc.config.model import OF_EXPERTS, Model
from memcalc.config.readers import keys
from memcalc.config.source import Source
from memcalc.errors import InputError, nearest

# Keys that change memory or FLOPs and are not modeled, each with what to know.
UNMODELLED = {
    "gradient_checkpointing": "set --recompute full",
    "attn_implementation": "set --implementation",
    "_attn_implementation": "set --implementation",
    "quantization_config": "activations are counted in the precision of the run",
    "add_cross_attention": "cross-attention is not counted",
    "reorder_and_upcast_attn": "actual memory is higher (an fp32 softmax)",
    "router_jitter_noise": "actual memory is higher (router noise)",
    "clip_qkv": "actual memory is higher (clamps of query, key and value)",
    "vision_config": "only the language model is counted, not the vision model",
    "audio_config": "only the language model is counted, not the audio model",
}

# Keys that change neither memory nor FLOPs.
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

# Sections that hold the language model in configs of models with several parts.
_PARTS = ("thinker_config", "text_config")

# Families that Model cannot express, each with what is missing.
REFUSED = {
    "dbrx": "its sizes are in attn_config and ffn_config, and its norms have no bias",
    "llama4": "its chunked attention and its layers without positions are not modeled",
    "mpt": "its sizes are in attn_config and expansion_ratio",
    "olmo": "its norms have no weights",
    "olmo2": "its query and key norms span all heads, and its norms follow the sublayers",
    "umt5": "each of its layers has a table of relative positions",
}


def read(content: Mapping[str, Any], name: str) -> Source:
    """Read a ``config.json``.

    Args:
        content: The parsed file.
        name: The model's name where the file has none.

    Raises:
        InputError: The family is not modeled, or a size is missing.
        ConfigError: Two names of one fact disagree, or a value is out of range.

    >>> config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None}
    >>> read(config, "gpt2").model.ffn_size
    3072
    """
    text, lines = _language_model(content)
    family = _family(text)
    record = FAMILIES[family]
    said = Content(text, record.defaults)
    facts = {**_sizes(said), **record.read(said)}
    if not facts.get("experts"):
        facts = {fact: value for fact, value in facts.items() if fact not in OF_EXPERTS}
    _width(said, family, facts)
    model = Model.of(
        name=_name(content, name),
        family=family,
        source=f"Hugging Face config.json, model_type {family}",
        **{fact: value for fact, value in facts.items() if value is not None},
    )
    known = (*HARMLESS, *NAMES, *said.read)
    unmodelled = (*lines, *said.unmodelled, *keys.lines(text, UNMODELLED, known))
    assumed = tuple(dict.fromkeys(said.assumed))
    unmodelled = tuple(dict.fromkeys(unmodelled))
    return Source(model, {}, assumed, unmodelled, framework="transformers")


def _language_model(content: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The part of a config that holds the language model, and lines for the keys it overrides."""
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
                    lines.append(f"{key} is ignored: {part} has the language model's value")
                outer.pop(key, None)
        content = {**outer, **inner}
    return content, lines


def _sizes(said: Content) -> dict[str, Any]:
    """The sizes that every family has; three are required."""
    sizes = {fact: said.fact(fact) for fact in _SIZES}
    for fact in ("layers", "hidden_size", "heads"):
        if sizes[fact] is None:
            names = ALIASES[fact]
            raise InputError(f"the config needs {names[0]} (or {', '.join(names[1:])})")
    fields.whole("layers", sizes["layers"], pipeline.MOST)
    return sizes


_SIZES = (
    *("layers", "hidden_size", "heads", "kv_heads", "head_size", "ffn_size"),
    *("vocab_size", "max_seq_length"),
)


def _width(said: Content, family: str, facts: dict[str, Any]) -> None:
    """Fill in the MLP's width where the family has a rule for it, and require it elsewhere."""
    if facts["ffn_size"] is not None:
        return
    if FAMILIES[family].four_h:
        fields.whole("hidden_size", facts["hidden_size"], 2**24)
        facts["ffn_size"] = 4 * facts["hidden_size"]
        why = "4 x hidden_size, missing in the config"
        said.assumed.append(Assumption("ffn_size", facts["ffn_size"], why))
        return
    patterned = facts.get("moe_layers") is not None
    if facts.get("expert_ffn_size") is None or patterned:
        ratio = " (mlp_ratio alone does not give the width of a gated MLP)"
        raise InputError(
            f"the config needs intermediate_size: {family} has no rule for the MLP's width"
            f"{ratio if said.states('mlp_ratio') else ''}"
        )
    facts["ffn_size"] = facts["expert_ffn_size"]  # all layers are MoE layers: no layer uses it


def _family(content: Mapping[str, Any]) -> str:
    family = content.get("model_type")
    if family is None:
        architectures = content.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        ours = (name for name, each in FAMILIES.items() if first in each.architectures)
        family = next(ours, first)
    if not isinstance(family, str):
        raise InputError("the config names no model family: model_type is missing")
    if family in REFUSED:
        raise InputError(f"model_type {family!r} is not modeled: {REFUSED[family]}")
    if family not in FAMILIES:
        raise InputError(
            f"model_type {family[:40]!r} is not modeled; {nearest(family[:40], sorted(FAMILIES))}"
        )
    return family


def _name(content: Mapping[str, Any], fallback: str) -> str:
    path = content.get("_name_or_path")
    if isinstance(path, str) and 0 < len(path) <= 200 and path.isprintable():
        return path
    return fallback
