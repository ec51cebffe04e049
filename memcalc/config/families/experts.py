"""What families of experts share: facts of their config.json, and its keys."""

from typing import Any

from memcalc.config import fields
from memcalc.config.families.content import Content
from memcalc.config.families.layers import moe_layers
from memcalc.config.families.record import Facts, Word
from memcalc.config.model import Model


def read(said: Content, width: Any) -> Facts:
    """The number and width of the experts, and which layers have them."""
    return {
        "experts": said.optional("experts"),
        "experts_per_token": said.fact("experts_per_token"),
        "expert_ffn_size": width,
        "moe_layers": moe_layers(said),
    }


def shared(said: Content, width: Any, default: int) -> Any:
    """The width of all shared experts together; a null or a 0 means none."""
    count = said.size("n_shared_experts", 0 if said.states("n_shared_experts") else default)
    if count == 0:
        return None
    fields.whole("n_shared_experts", count, 2**16)
    fields.whole("moe_intermediate_size", width, 2**26)
    return count * width


def mtp(said: Content) -> Any:
    """The layers that predict further tokens; a null means none."""
    found = said.optional("mtp_layers")
    return 0 if found is None else found


def cast_router(said: Content) -> Facts:
    """Qwen's router."""
    return {"router_dtype": "cast", "router_norm": said.get("norm_topk_prob", False)}


def scores(said: Content, default: str) -> Any:
    """What scores the experts."""
    return said.get("scoring_func", default)


def dense_layers(model: Model, dense: bool | None) -> list[int]:
    """The numbers of the dense layers: the first or none, or as in the model."""
    if dense is not None:
        return [0] if dense else []
    return [number for number, moe in enumerate(model.moe_layers or ()) if not moe]


def _first_dense(model: Model, dense: bool | None) -> int:
    return len(dense_layers(model, dense))


def _shared_experts(model: Model, dense: bool | None) -> int | None:
    """The number of shared experts, each as wide as a routed expert."""
    experts = model.experts
    if experts is None or experts.shared_ffn_size is None:
        return None
    return experts.shared_ffn_size // experts.ffn_size


LOCAL: dict[str, Word] = {
    "intermediate_size": "expert_ffn_size",
    "num_local_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
}
ROUTED: dict[str, Word] = {
    "n_routed_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_ffn_size",
    "n_shared_experts": _shared_experts,
    "norm_topk_prob": "router_norm",
    "first_k_dense_replace": _first_dense,
    "n_group": lambda model, dense: 1,
    "topk_group": lambda model, dense: 1,
}
