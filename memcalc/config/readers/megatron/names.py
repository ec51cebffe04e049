"""Megatron-LM's arguments by name: those that are read, not modeled, or without effect."""

from collections.abc import Iterator, Mapping

from memcalc.config.readers.keys import OFFLOADED

HYBRID = "state-space layers are counted as attention"
GRAPHS = "actual memory is higher (CUDA graphs have buffers of their own)"
MEGATRON_FSDP = "actual memory is higher (buckets of gathered weights and of gradients)"
TORCH_FSDP2 = (
    "counted as fsdp2 with fp32 shards; fp32 gradients in the optimizer step are not counted"
)
PADDED = "actual memory is higher (inputs of experts are padded)"
RESIDUAL = "counted as if the residual were taken before the norm"
ALIKE = "all layers are counted as identical"
VISION = "the vision model is not counted"

# Arguments that change memory and are not modeled, with the likely sign of the error and why.
UNMODELLED = {
    "apply-residual-connection-post-layernorm": RESIDUAL,
    "attention-output-gate": "actual memory is higher (a gate on the attention output)",
    "cpu-offloading": OFFLOADED,
    "cpu-offloading-num-layers": OFFLOADED,
    "cuda-graph-impl": GRAPHS,
    "decoder-num-layers": "the decoder layers are not counted",
    "delay-wgrad-compute": "actual memory is higher (weight gradients are delayed)",
    "distribute-saved-activations": "actual memory is lower (saved inputs are sharded)",
    "enable-cuda-graph": GRAPHS,
    "enable-gpt-oss": "the defaults that it sets are not read",
    "experimental-attention-variant": "counted as plain attention",
    "external-cuda-graph": GRAPHS,
    "fine-grained-activation-offloading": OFFLOADED,
    "fp4-format": "actual memory is lower (linears save their inputs in 4 bits)",
    "fp32-residual-connection": "actual memory is higher (the residual stream is fp32)",
    "freeze-LM": "actual memory is lower (the language model is not trained)",
    "freeze-ViT": "actual memory is lower (the vision model is not trained)",
    "heterogeneous-layers-config-encoded-json": ALIKE,
    "heterogeneous-layers-config-path": ALIKE,
    "hierarchical-context-parallel-sizes": "context parallelism is counted with one level",
    "hybrid-attention-ratio": HYBRID,
    "hybrid-context-parallel": "all sequences are counted with equal length",
    "hybrid-layer-pattern": HYBRID,
    "hybrid-override-pattern": HYBRID,
    "img-h": VISION,
    "is-hybrid-model": HYBRID,
    "language-model-type": VISION,
    "mamba-num-heads": HYBRID,
    "mamba-state-dim": HYBRID,
    "moe-latent-size": "experts are counted at the full hidden size",
    "moe-pad-expert-input-to-capacity": PADDED,
    "moe-router-padding-for-fp8": PADDED,
    "moe-router-padding-for-quantization": PADDED,
    "optimizer-cpu-offload": OFFLOADED,
    "overlap-moe-expert-parallel-comm": "actual memory is higher (two micro-batches at once)",
    "perform-rl-step": "inference buffers are not counted",
    "qk-l2-norm": "actual memory is higher (a norm of query and key without weights)",
    "quick-geglu": "counted as GeGLU",
    "retro-add-retriever": "the retriever is not counted",
    "spec": "the layer of a custom spec may differ from the counted one; only `local` is modeled",
    "tp-comm-overlap": "actual memory is higher (communication buffers)",
    "use-custom-fsdp": MEGATRON_FSDP,
    "use-kitchen": "other layers run instead of the counted ones",
    "use-megatron-fsdp": MEGATRON_FSDP,
    "use-torch-fsdp2": TORCH_FSDP2,
    "use-transformer-engine-op-fuser": "fused operations save other tensors",
}

# The same for single values of an argument.
UNMODELLED_VALUES = {
    ("cp-comm-type", "a2a+p2p"): "counted as p2p",
    ("moe-token-dispatcher-type", "flex"): "counted as all-to-all",
    ("position-embedding-type", "relative"): "the attention bias is not counted",
    ("softmax-type", "off-by-one"): "counted as the plain softmax",
}
MODELLED = {("spec", "local")}  # Megatron-core's own layers
NOTHING = ("none", "0")  # values that disable an argument

# Arguments that change no counted memory: logging, learning rate, data, numbers within a kernel.
HARMLESS = set(
    """
    activation-func-clamp-value app-tag-run-name app-tag-run-version apply-layernorm-1p
    async-save auto-detect-ckpt-format barrier-with-L1-time bias-dropout-fusion bias-gelu-fusion
    bias-swiglu-fusion calculate-per-token-loss check-for-large-grads
    check-for-nan-in-loss-and-grad check-for-spiky-loss
    check-weight-hash-across-dp-replicas-interval classes-fraction clip-grad
    create-attention-mask-in-dataloader cuda-graph-scope cuda-graph-warmup-steps
    data-parallel-random-init dataloader-type ddp-average-in-collective DDP-impl decoupled-lr
    decoupled-min-lr deepspeed deepspeed-activation-checkpointing deepspeed-config
    disable-bf16-reduced-precision-matmul disable-gloo-process-groups
    distrib-optim-fully-reshardable-mem-efficient empty-unused-memory-level enable-experimental
    enable-ft-package enable-gloo-process-groups end-weight-decay eod-mask-loss finetune
    first-last-layers-bf16 fp16-lm-cross-entropy fp4-param-gather fp4-recipe glu-linear-offset
    gradient-accumulation-fusion high-priority-stream-groups hysteresis
    init-model-with-meta-device initial-loss-scale keep-fp8-transpose-cache layernorm-epsilon
    lazy-mpu-init legacy-tokenizer local-rank loss-scale loss-scale-window manual-gc
    manual-gc-eval manual-gc-interval merge-file mid-level-dataset-surplus min-loss-scale min-lr
    mmap-bin-files mock-data moe-apply-probs-on-input moe-deepep-num-sms moe-enable-deepep
    moe-extended-tp moe-input-jitter-eps moe-per-layer-logging moe-permute-fusion
    moe-shared-expert-overlap moe-token-dispatcher-type moe-token-drop-policy
    moe-upcycling-granularity moe-use-legacy-grouped-gemm moe-use-upcycling moe-z-loss-coeff
    mrope-section mscale mscale-all-dim mtp-loss-scaling-factor nccl-communicator-config-path
    nccl-ub no-align-grad-reduce no-align-param-gather no-async-tensor-model-parallel-allreduce
    no-barrier-with-level-1-timing no-bias-dropout-fusion no-bias-gelu-fusion
    no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save no-data-sharding
    no-initialization no-load-optim no-load-rng no-log-loss-scale-to-tensorboard
    no-mmap-bin-files no-one-logger no-overlap-p2p-communication no-persist-layer-norm
    no-pipeline-parallel no-query-key-layer-scaling no-rope-freq no-rope-fusion no-save-optim
    no-save-rng no-scatter-gather-tensors-in-pipeline non-persistent-ckpt-type norm-epsilon
    num-dataset-builder-threads num-layers-at-end-in-bf16 num-layers-at-start-in-bf16
    num-workers onnx-safe optimizer-offload-fraction outer-dp-sharding-strategy
    overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce overlap-p2p-communication
    overlap-p2p-communication-warmup-flush overlap-param-gather
    overlap-param-gather-with-optimizer-step override-opt-param-scheduler
    per-split-data-args-path persist-layer-norm pytorch-profiler-collect-callstack replication
    replication-factor replication-jump reset-attention-mask reset-position-ids
    result-rejected-tracker-filename rope-type run-workload-inspector-server seed
    sharp-enabled-group short-seq-prob skip-train split start-weight-decay symmetric-ar-type
    te-rng-tracker tiktoken-num-special-tokens tiktoken-pattern tiktoken-special-tokens
    use-checkpoint-args use-checkpoint-opt-param-scheduler use-cpu-initialization use-dist-ckpt
    use-mcore-models use-mp-args-from-checkpoint-args use-nccl-ub use-one-sent-docs
    use-persistent-ckpt-worker use-pytorch-profiler use-ring-exchange-p2p use-rope-scaling
    use-sharp use-tokenizer-model-from-checkpoint-args use-tp-pp-dp-mapping verify-integrity
    vocab-extra-ids vocab-file warmup weight-decay weight-decay-incr-style world-size yaml-cfg
    zero-stage
    """.split()  # noqa: SIM905 - words read best as words
)
HARMLESS_FAMILIES = tuple(
    """
    adam- ckpt- config-logger- data- dataset- ddp- disable-straggler- disable-symmetric-
    dist-ckpt- distributed- eval- exit- expert-init export- fim- fp8- inference- init-method
    inprocess- iterations- load log- logging- lr master- moe-aux-loss- moe-router- muon- no-fp8-
    node-rank non-persistent- one-logger- profile rdzv- record-memory- rerun- rope- rotary- save
    straggler- tensorboard- test- timing- tokenizer- train- valid- wandb-
    """.split()  # noqa: SIM905 - as above
)

# Arguments of torchrun and other launchers, which are in the same command.
LAUNCHER = set(
    """
    container-image container-mounts container-name container-workdir error exclude export
    force-multi hostfile include job-name label launcher launcher-args local-addr
    local-ranks-filter log-dir master-addr master-port max-restarts module monitor-interval mpi
    nnodes no-python node-rank nodes nproc-per-node ntasks ntasks-per-node num-gpus num-nodes
    output rdzv-backend rdzv-conf rdzv-endpoint rdzv-id redirects role standalone start-method
    tee use-env
    """.split()  # noqa: SIM905 - as above
)

NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS = {
    "learned_absolute": "learned",
    "rope": "rotary",
    "mrope": "rotary",
    "yarn": "rotary",
    "relative": "none",
    "none": "none",
    "alibi": "alibi",
}
CONTEXT_KINDS = {"p2p": "ring", "all_gather": "all_gather", "a2a": "all_to_all", "a2a+p2p": "ring"}
BACKENDS = {
    "auto": "",
    "flash": "flash",
    "fused": "flash",
    "unfused": "unfused",
    "local": "unfused",
}
CROSS_ENTROPIES = {"native": "native", "te": "te", "linear": "chunked"}
IMPLEMENTATIONS = {"transformer_engine": "megatron", "local": "megatron-local"}
# Arguments that are read: flags, and those that take a value.
FLAGS = set(
    """
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
    accumulate-allreduce-grads-in-fp32 add-qkv-bias apply-query-key-layer-scaling
    attention-softmax-in-fp32 bert-no-binary-head bf16 checkpoint-activations
    cross-entropy-loss-fusion defer-embedding-wgrad-compute deterministic-mode
    disable-bias-linear fp16 fp8-param-gather grad-reduce-in-bf16 group-query-attention
    moe-grouped-gemm moe-layer-recompute moe-shared-expert-gate multi-latent-attention
    no-bias-swiglu-fusion no-create-attention-mask-in-dataloader no-gradient-accumulation-fusion
    no-masked-softmax-fusion no-position-embedding openai-gelu qk-layernorm
    recompute-activations sequence-parallel squared-relu swiglu
    torch-fsdp2-no-reshard-after-forward untie-embeddings-and-output-weights
    use-distributed-optimizer use-flash-attn use-legacy-models use-precision-aware-optimizer
    use-rotary-position-embeddings
    """.split()  # noqa: SIM905 - words read best as words
)
VALUES = set(
    """
    activations-checkpoint-method attention-backend attention-dropout context-parallel-size
    cp-comm-type cross-entropy-fusion-impl data-parallel-sharding-strategy
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers encoder-num-layers
    encoder-seq-length exp-avg-dtype exp-avg-sq-dtype expert-model-parallel-size
    expert-tensor-parallel-size extra-vocab-size ffn-hidden-size global-batch-size
    hidden-dropout hidden-size kv-channels kv-lora-rank main-grads-dtype main-params-dtype
    make-vocab-size-divisible-by max-position-embeddings micro-batch-size
    microbatch-group-size-per-virtual-pipeline-stage moe-expert-capacity-factor
    moe-ffn-hidden-size moe-layer-freq moe-router-score-function moe-router-topk
    moe-shared-expert-intermediate-size mtp-num-layers normalization num-attention-heads
    num-distributed-optimizer-instances num-experts num-layers
    num-layers-per-virtual-pipeline-stage num-query-groups num-virtual-stages-per-pipeline-rank
    optimizer padded-vocab-size pipeline-model-parallel-layout pipeline-model-parallel-size
    position-embedding-type q-lora-rank qk-head-dim qk-pos-emb-head-dim rampup-batch-size
    recompute-granularity recompute-method recompute-modules recompute-num-layers seq-length
    sgd-momentum
    softmax-type tensor-model-parallel-size torch-fsdp2-reshard-after-forward transformer-impl
    v-head-dim vocab-size wgrad-deferral-limit window-attn-skip-freq window-size
    """.split()  # noqa: SIM905 - as above
)

# Megatron-FSDP's names for what is sharded over data-parallel ranks, as ZeRO stages.
SHARDING = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}
# Whether PyTorch's FSDP2 reshards weights after forward, as ZeRO stages.
RESHARDING = {"auto": "3", "true": "3", "false": "2"}

# Activations by their flag; without a flag it is GeLU.
ACTIVATIONS = {
    "swiglu": "swiglu",
    "squared-relu": "squared_relu",
    "quick-geglu": "geglu",
    "openai-gelu": "gelu_new",
}

SIZES = ("num-layers", "encoder-num-layers", "hidden-size", "num-attention-heads")

# Arguments that mark a training command.
TELLING = {"micro-batch-size", "seq-length", "tensor-model-parallel-size", *SIZES}


def is_read(name: str) -> bool:
    """Whether an argument is read, or its effect on memory is known.

    >>> is_read("num-layers"), is_read("seed"), is_read("no-such-argument")
    (True, True, False)
    """
    return name in UNMODELLED or name in FLAGS or name in VALUES or is_harmless(name)


def is_harmless(name: str) -> bool:
    """Whether an argument is known to change no counted memory, or is the launcher's."""
    if name in UNMODELLED or name in FLAGS or name in VALUES:
        return False
    return name in HARMLESS or name in LAUNCHER or name.startswith(HARMLESS_FAMILIES)


def unmodelled(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Arguments that are not modeled, with the likely sign of the error and why.

    Args:
        values: The arguments, each with its value as it is written.

    >>> list(unmodelled({"moe-token-dispatcher-type": "flex", "cuda-graph-impl": "none"}))
    [('--moe-token-dispatcher-type flex', 'counted as all-to-all')]
    """
    for name, reason in UNMODELLED.items():
        value = values.get(name)
        if value is not None and value not in NOTHING and (name, value) not in MODELLED:
            yield f"--{name}", reason
    for (name, value), reason in UNMODELLED_VALUES.items():
        if values.get(name) == value:
            yield f"--{name} {value}", reason
