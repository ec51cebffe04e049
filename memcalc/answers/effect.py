"""Warnings about settings that differ from the defaults and change no answer."""

from collections.abc import Iterable

from memcalc.config.implementation import CROSS_ENTROPIES, IMPLEMENTATIONS
from memcalc.config.model import Model
from memcalc.config.parallel import Parallel
from memcalc.config.recompute import policy
from memcalc.config.run import Run

_SPREAD, _RUN = Parallel(), Run(seq_length=1)  # the defaults


def without_effect(model: Model, parallel: Parallel, run: Run) -> list[str]:
    """Settings that are not defaults and change nothing, each with the reason.

    >>> model = Model(name="toy", layers=1, hidden_size=512, heads=8)
    >>> without_effect(model, Parallel(sp=True), _RUN)
    ['--sp has no effect with --tp 1']
    """
    one_stage = "with --pp 1" if parallel.pp == 1 else ""
    dense = f"on {model.name}, which has no experts" if model.experts is None else ""
    kernels = run.implementation
    usual = IMPLEMENTATIONS.get(kernels.name, kernels).expert_products
    loss = kernels.cross_entropy
    no_logits = "" if CROSS_ENTROPIES[loss].makes_logits else f"with --cross-entropy {loss}"
    said = {
        "--sp": (parallel.sp, parallel.tp == 1 and "with --tp 1"),
        f"--schedule {parallel.schedule}": (
            parallel.schedule not in (None, parallel.order),
            one_stage,
        ),
        "--embedding-as-layer": (parallel.embedding_as_layer, one_stage),
        "--loss-as-layer": (parallel.loss_as_layer, one_stage),
        f"--cp-kind {parallel.cp_kind}": (
            parallel.cp_kind != _SPREAD.cp_kind,
            parallel.cp == 1 and "with --cp 1",
        ),
        f"--bucket {run.bucket}": (
            run.bucket is not None,
            (parallel.sharding.bucket is None or parallel.zero == 0)
            and "without DeepSpeed's ZeRO (--sharder deepspeed and --zero 1, 2 or 3)",
        ),
        f"--main-params {run.main_params}": (
            run.main_params != _RUN.main_params,
            run.precision == "fp32" and "with --precision fp32, which needs no master weights",
        ),
        f"--imbalance {run.imbalance:g}": (
            run.imbalance != _RUN.imbalance,
            dense or (parallel.ep == 1 and "with --ep 1, where each rank has all experts"),
        ),
        f"--expert-products {kernels.expert_products}": (kernels.expert_products != usual, dense),
        "--holds-logits": (kernels.holds_logits, no_logits),
    }
    lines = [f"{what} has no effect {why}" for what, (there, why) in said.items() if there and why]
    idle = sorted(nothing_frozen(model, run).items())
    return lines + [f"--frozen {name} has no effect: {reason}" for name, reason in idle]


def nothing_recomputed(model: Model, run: Run) -> list[str]:
    """Recomputed regions that no layer of the model has.

    >>> model = Model(name="toy", layers=1, hidden_size=512, heads=8)
    >>> nothing_recomputed(model, _RUN.recomputing("moe"))
    ['--recompute moe recomputes nothing: toy has no such region']
    """
    regions = run.policy.regions
    alone = model.latent or model.experts or model.block != "pre_norm"
    typed = {region: word for word in run.recompute for region in policy([word]).regions}
    lines = [
        f"--recompute {typed[name]} recomputes nothing: {model.name} has no such region"
        for name in _absent(model, regions)
    ]
    if "norm" in regions and run.implementation.norms_in_linears and not alone:
        lines.append(
            f"--recompute {typed['norm']} recomputes nothing here: Transformer Engine fuses the "
            "norms into the linears"
        )
    return lines


def nothing_frozen(model: Model, run: Run) -> dict[str, str]:
    """Frozen parts that the model does not have, or that have no parameters, with the reason."""
    absent = _absent(model, run.frozen)
    bare = {"expert_act"} if model.attention_sinks else {"expert_act", "core_attention"}
    why = {name: "it has no parameters" for name in run.frozen if name in bare}
    return why | dict.fromkeys(absent, f"{model.name} has no such part")


def _absent(model: Model, regions: Iterable[str]) -> list[str]:
    """Those of some regions that no layer of the model has."""
    there = {
        "mla_up": model.latent is not None,
        "cross_attention": model.encoder_layers is not None,
        "mlp": model.experts is None or 0 in (model.moe_layers or ()),
        "moe": model.experts is not None,
        "expert_act": model.experts is not None,
        "shared_experts": model.experts is not None and model.experts.shared_ffn_size is not None,
    }
    return sorted(name for name in regions if not there.get(name, True))
