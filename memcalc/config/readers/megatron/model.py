"""The model that arguments describe."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from memcalc.config import fields, pipeline
from memcalc.config.assumption import Assumption
from memcalc.config.model import Model
from memcalc.config.readers.keys import listed
from memcalc.config.readers.megatron.arguments import Arguments
from memcalc.config.readers.megatron.names import ACTIVATIONS, NORMS, POSITIONS
from memcalc.errors import ConfigError, InputError


def model(said: Arguments, name: str, tp: int, programs: Iterable[str]) -> Model:
    """Read the model; ``programs`` are the file names of the programs that get the arguments."""
    layers = said.count("encoder-num-layers" if "num-layers" not in said.words else "num-layers")
    sizes = {
        "layers": ("num-layers", layers),
        "hidden_size": ("hidden-size", said.count("hidden-size")),
        "heads": ("num-attention-heads", said.count("num-attention-heads")),
    }
    for argument, value in sizes.values():
        if value is None:
            hint = f": it may be in {listed(said.loose)}, which is unknown" if said.loose else ""
            raise InputError(f"--{argument} is missing{hint}")
    whole = {fact: value or 0 for fact, (_, value) in sizes.items()}
    fields.whole("layers", whole["layers"], pipeline.MOST)
    fields.whole("hidden_size", whole["hidden_size"], 2**24)
    facts = {
        **whole,
        **_kinds(said),
        **_widths(said, whole["hidden_size"]),
        **_dropouts(said),
        **_windows(said, whole["layers"]),
        **(_latent(said, whole["heads"]) if said.flag("multi-latent-attention") else _heads(said)),
        **_experts(said, whole["layers"]),
        "vocab_size": _vocabulary(said, tp),
        "max_seq_length": said.count("max-position-embeddings"),
        "mtp_layers": said.count("mtp-num-layers"),
    }
    if any(program.startswith("pretrain_bert") for program in programs):
        binary = not said.flag("bert-no-binary-head")
        facts |= {"causal": False, "head_transform": True, "head_bias": True, "pooled": binary}
        facts["token_types"] = 2 if binary else None
    if any(program.startswith("pretrain_t5") for program in programs):
        said.unmodelled.append(
            "pretrain_t5 trains an encoder and a decoder: only one of them is counted"
        )
    stated = {fact: value for fact, value in facts.items() if value is not None}
    return Model.of(name=name, source="Megatron-LM arguments", **stated)


def _kinds(said: Arguments) -> dict[str, Any]:
    """Norms, biases, positions and the other words and flags."""
    biases = not said.flag("disable-bias-linear")
    position = said.word("position-embedding-type", POSITIONS) or "learned"
    if position == "learned" and said.flag("no-position-embedding"):
        position = "none"
    if said.flag("use-rotary-position-embeddings") or said.flag("multi-latent-attention"):
        position = "rotary"
    fp32 = said.flag("attention-softmax-in-fp32") or said.flag("apply-query-key-layer-scaling")
    return {
        "norm": said.word("normalization", NORMS),
        "position": position,
        "qkv_bias": biases or said.flag("add-qkv-bias"),
        "proj_bias": biases,
        "mlp_bias": biases,
        "qk_norm": said.flag("qk-layernorm"),
        "attention_sinks": said.text("softmax-type") == "learnable",
        "softmax_fp32": fp32,
        "tied_embeddings": not said.flag("untie-embeddings-and-output-weights"),
    }


def _widths(said: Arguments, hidden: int) -> dict[str, Any]:
    """The activation, and the MLP's width, whose default depends on the activation."""
    chosen = [name for name in ACTIVATIONS if said.flag(name)]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(f'--{name}' for name in chosen)} are mutually exclusive")
    width = said.count("ffn-hidden-size")
    if width is None:
        gated = chosen == ["swiglu"]
        width = 8 * hidden // 192 * 64 if gated else 4 * hidden
        said.assumed.append(Assumption("ffn_size", width, "Megatron's default"))
    return {"activation": ACTIVATIONS[chosen[0]] if chosen else "gelu", "ffn_size": width}


def _dropouts(said: Arguments) -> dict[str, Any]:
    attention = said.defaulted(said.number("attention-dropout"), 0.1, "attention-dropout")
    hidden = said.defaulted(said.number("hidden-dropout"), 0.1, "hidden-dropout")
    return {
        "attention_dropout": attention,
        "hidden_dropout": hidden,
        "embedding_dropout": hidden,
    }


def _heads(said: Arguments) -> dict[str, Any]:
    groups = said.count("num-query-groups")
    if said.flag("group-query-attention"):
        groups = said.defaulted(groups, 1, "num-query-groups")
    elif groups is not None:
        said.unmodelled.append("--num-query-groups has no effect without --group-query-attention")
        groups = None
    return {"kv_heads": groups, "head_size": said.count("kv-channels")}


def _latent(said: Arguments, heads: int) -> dict[str, Any]:
    """Multi-head latent attention."""
    rank = said.count("kv-lora-rank")
    if rank is None:
        raise InputError(
            "--multi-latent-attention needs --kv-lora-rank, whose default differs between versions"
        )
    rotated = said.defaulted(said.count("qk-pos-emb-head-dim"), 64, "qk-pos-emb-head-dim")
    plain = said.defaulted(said.count("qk-head-dim"), 128, "qk-head-dim")
    return {
        "kv_heads": heads,
        "head_size": plain + rotated,
        "rope_head_size": rotated,
        "v_head_size": said.defaulted(said.count("v-head-dim"), 128, "v-head-dim"),
        "q_lora_rank": said.count("q-lora-rank"),
        "kv_lora_rank": rank,
    }


def _windows(said: Arguments, layers: int) -> dict[str, Any]:
    """Sliding windows: ``left,right`` are tokens besides the token itself; -1 is unlimited."""
    window = "".join(said.several("window-size")[:1]).strip("()")
    if not window:
        return {}
    if not re.fullmatch(r"-1|[0-9]{1,9}", window):
        raise InputError(f"--window-size must start with a whole number, not {window[:40]!r}")
    if window == "-1":
        return {}
    skipped = _frequency(said, "window-attn-skip-freq", layers, lambda layer, n: (layer + 1) % n)
    return {"sliding_window": int(window) + 1, "window_layers": skipped}


def _experts(said: Arguments, layers: int) -> dict[str, Any]:
    """Mixture of experts."""
    experts = said.count("num-experts")
    if not experts:
        return {}
    capacity = said.number("moe-expert-capacity-factor")
    return {
        "experts": experts,
        "experts_per_token": said.defaulted(said.count("moe-router-topk"), 2, "moe-router-topk"),
        "expert_ffn_size": said.count("moe-ffn-hidden-size"),
        "shared_ffn_size": said.count("moe-shared-expert-intermediate-size"),
        "shared_gate": said.flag("moe-shared-expert-gate"),
        "moe_layers": _frequency(said, "moe-layer-freq", layers, lambda layer, n: layer % n == 0),
        "router": said.text("moe-router-score-function"),
        "capacity_factor": capacity if capacity is not None and capacity >= 0 else None,
    }


def _frequency(said: Arguments, name: str, layers: int, chosen: Callable[[int, int], Any]) -> Any:
    """A 0 or 1 per layer, from a number or a pattern; None where the argument is missing."""
    values = said.words.get(name)
    if values is None:
        return None
    said.closed(name, values)
    pattern = "".join(values)
    if re.fullmatch(r"[0-9]{1,9}", pattern):
        if int(pattern) < 1:
            raise ConfigError(f"--{name} must be at least 1")
        return tuple(int(bool(chosen(layer, int(pattern)))) for layer in range(layers))
    listed = said.several(name)
    if len(listed) > 1 and set(listed) <= {"0", "1"}:  # a YAML list
        return tuple(int(value) for value in listed)
    return pattern


def _vocabulary(said: Arguments, tp: int) -> int | None:
    """The vocabulary size, padded as Megatron pads it."""
    padded = said.count("padded-vocab-size")
    size = said.count("vocab-size")
    if padded is not None or size is None:
        return padded
    size += said.count("extra-vocab-size") or 0
    return fields.padded(size, vocab_multiple(said), tp, said.assumed)


def vocab_multiple(said: Arguments) -> int:
    """The multiple that the vocabulary is padded to, per tensor-parallel rank."""
    multiple = said.count("make-vocab-size-divisible-by")
    return 128 if multiple is None else multiple
