"""``models``: the catalog."""

from typing import Any

from memcalc.analysis.parameters import active_parameters, parameters
from memcalc.blocks.layer import kinds
from memcalc.config import Model, catalog, load
from memcalc.config.model import NORM_SCALES, ROUTER_DTYPES
from memcalc.report import Column, Report

COLUMNS = (
    Column("name", "text"),
    Column("layers", "count"),
    Column("hidden_size", "count"),
    Column("heads", "count"),
    Column("kv_heads", "count"),
    Column("head_size", "count", detail=True),
    Column("ffn_size", "count"),
    Column("experts", "count", optional=True),
    Column("vocab_size", "count", optional=True),
    Column("max_seq_length", "count", detail=True, optional=True),
    Column("norm", "text", detail=True),
    Column("activation", "text", detail=True),
    Column("position", "text", detail=True),
    Column("source", "text", detail=True),
)
FACTS = (
    Column("meaning", "text", title="fact", description="The fact in words."),
    Column("value", "text"),
    Column(
        "fact",
        "text",
        detail=1,
        title="name in JSON",
        description="The fact's name in memcalc's own format of models, or of a count.",
    ),
)
# Field of a Model -> what it is, in words. What a model does not have is not listed.
WORDS = {
    "name": "name",
    "layers": "layers",
    "hidden_size": "hidden size",
    "heads": "attention heads",
    "kv_heads": "key and value heads",
    "head_size": "head size",
    "ffn_size": "MLP width (intermediate size)",
    "encoder_layers": "encoder layers",
    "vocab_size": "vocabulary size",
    "max_seq_length": "context length",
    "norm": "norm",
    "block": "position of norms",
    "activation": "MLP activation",
    "position": "position encoding",
    "relative_buckets": "buckets of relative positions",
    "qk_norm": "norm of query and key",
    "attention_sinks": "attention sinks",
    "attention_softcap": "soft cap of attention scores",
    "final_softcap": "soft cap of logits",
    "sliding_window": "sliding window",
    "window_layers": "layers with a sliding window (1)",
    "q_lora_rank": "MLA: rank of the query",
    "kv_lora_rank": "MLA: rank of key and value",
    "rope_head_size": "MLA: rotated part of the head size",
    "v_head_size": "MLA: head size of values",
    "experts": "MoE: experts",
    "experts_per_token": "MoE: experts per token (top-k)",
    "expert_ffn_size": "MoE: width of an expert",
    "shared_ffn_size": "MoE: width of the shared experts",
    "shared_gate": "MoE: gate of the shared experts",
    "moe_layers": "MoE: layers with experts (1)",
    "router": "MoE: score function of the router",
    "router_bias": "MoE: bias of the router",
    "router_dtype": "MoE: router in fp32",
    "router_norm": "MoE: top-k scores are normalized",
    "capacity_factor": "MoE: capacity factor",
    "mtp_layers": "multi-token prediction (MTP) layers",
    "packed_qkv": "query, key and value from one linear",
    "repeated_kv": "key and value repeated for flash attention",
    "calls_attention": "calls PyTorch's attention with a mask",
    "norm_scale": "norm's scale",
    "norm_keeps_input": "RMSNorm keeps its input",
    "norm_bias": "bias of LayerNorms",
    "embedding_norm": "norm after the embedding",
    "final_norm": "norm before the head",
    "drops_activation": "dropout of the MLP's activation",
    "image_size": "image size in pixels",
    "patch_size": "patch size in pixels",
    "image_channels": "image channels",
    "classes": "classes",
    "token_types": "token types",
    "head_transform": "linear and norm before the logits",
    "head_bias": "bias of the logits",
    "pooled": "head of next-sentence prediction",
    "qkv_bias": "bias of query, key and value",
    "proj_bias": "bias of the attention's output",
    "mlp_bias": "bias of the MLP",
    "causal": "causal mask",
    "softmax_fp32": "softmax of attention in fp32",
    "tied_embeddings": "tied embeddings",
    "attention_dropout": "attention dropout",
    "hidden_dropout": "hidden dropout",
    "embedding_dropout": "embedding dropout",
    "source": "source",
}
# Field -> its words in memcalc's own format, and what they mean.
MEANINGS = {"norm_scale": NORM_SCALES, "router_dtype": ROUTER_DTYPES}
# Fields that a reader expects even where the answer is no.
ALWAYS = (
    *("qkv_bias", "proj_bias", "mlp_bias", "causal", "tied_embeddings"),
    *("attention_dropout", "hidden_dropout"),
)


def models() -> Report:
    """The catalog's models with their sizes, each with its source.

    >>> [name for name in models().column("name") if name.startswith("llama-2")]
    ['llama-2-13b', 'llama-2-70b', 'llama-2-7b']
    """
    found = [source.model.facts() for source in catalog.entries() if source.model]
    return Report(
        "models",
        "Models of the catalog",
        COLUMNS,
        tuple(tuple(each[column.name] for column in COLUMNS) for each in found),
        notes=(f"other names: {', '.join(f'{k} ({v})' for k, v in catalog.ALIASES.items())}",),
        answer=f"{len(found)} models; `memcalc models NAME` shows all facts about one",
    )


def model(name: str) -> Report:
    """Every fact of one model, one row per fact, with its parameter counts.

    Raises:
        ConfigError: There is no such model.

    >>> facts = {row["fact"]: row["value"] for row in model("mixtral-8x7b").records()}
    >>> facts["parameters"], facts["active parameters"]
    ('46,702,792,704', '12,879,925,248')
    """
    config = load(name)
    found = config.model
    every = found.facts()
    facts = {name: every[name] for name in WORDS if _applies(found, name, every[name])}
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds(config).items())
    facts = {"name": facts.pop("name"), "kinds of layers": layers, **facts}
    if found.vocab_size is not None or found.classes is not None:
        facts["parameters"] = parameters(config)
    if found.experts is not None:
        facts["active parameters"] = active_parameters(config)
    return Report(
        "models",
        f"Facts about {found.name}",
        FACTS,
        tuple((WORDS.get(key, key), _shown(key, value), key) for key, value in facts.items()),
        {},
        tuple(f"warning: {line}" for line in config.unmodelled),
        answer=_answer(found.name, facts),
    )


def _answer(name: str, facts: dict[str, Any]) -> str:
    """The size of a model in a line.

    >>> _answer("big", {"kinds of layers": "1 dense, 2 moe, 1 mtp", "parameters": 1000})
    'big has 1 dense, 2 MoE and 1 MTP layers and 1,000 parameters without the MTP layers'
    """
    kinds_ = facts["kinds of layers"].replace("moe", "MoE").replace("mtp", "MTP")
    line = f"{name} has {' and '.join(kinds_.rsplit(', ', 1))} layers"
    if "parameters" in facts:
        line += f" and {facts['parameters']:,} parameters"
        line += " without the MTP layers" if "MTP" in kinds_ else ""
    if "active parameters" in facts:
        line += f", {facts['active parameters']:,} of them active per token"
    return line


def _applies(model: Model, name: str, value: Any) -> bool:
    """Whether a model has what a field describes."""
    of_router = name.startswith(("router", "shared_gate"))
    return (
        value is not None
        and (name in ALWAYS or (value is not False and value != 0))
        and (model.experts is not None or not of_router)
        and (name, value) != ("norm_scale", "cast")  # the usual way
        and (model.norm == "layernorm" or name != "norm_bias")
        and (model.vision is not None or name != "image_channels")
    )


def _shown(name: str, value: Any) -> str:
    """A value in words: yes or no, a number, or a pattern of layers by its runs."""
    if name in MEANINGS:
        return MEANINGS[name][value]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return _runs(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _runs(pattern: tuple[int, ...]) -> str:
    """A pattern as ``moe_layers`` writes it.

    >>> _runs((0, 0, 0, 1, 1))
    '[0]*3+[1]*2'
    """
    runs: list[list[int]] = []
    for each in pattern:
        if runs and runs[-1][0] == each:
            runs[-1][1] += 1
        else:
            runs.append([each, 1])
    terms = [f"[{each}]*{count}" for each, count in runs]
    return "+".join(terms) if len(terms) <= 8 else f"{'+'.join(terms[:8])}+..."
