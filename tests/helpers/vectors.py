"""Bytes that PyTorch 2.13 was measured to save for backward, without memcalc.

They were measured with torch.autograd.graph.saved_tensors_hooks on meta tensors, counting live
storages once and leaving parameters out, with CUDA's kernels for dropout, norms and flash
attention. Ranks were a fake process group.
"""

from memcalc.config import Model

# A pre-norm GPT layer in plain PyTorch: bytes per layer and rank, by model, tensor-parallel size,
# sequence parallelism and recomputation.
GPT_LAYER = {
    ("22b", 1, False, "none"): 7080116224,
    ("22b", 8, False, "none"): 1325531136,
    ("22b", 8, True, "none"): 885014528,
    ("175b", 1, False, "none"): 2868936704,
    ("175b", 8, False, "none"): 578846720,
    ("175b", 8, True, "none"): 358617088,
    ("530b", 1, False, "none"): 4110450688,
    ("530b", 8, False, "none"): 880836608,
    ("530b", 8, True, "none"): 513806336,
    ("1t", 1, False, "none"): 5138055168,
    ("1t", 8, False, "none"): 1101037568,
    ("1t", 8, True, "none"): 642256896,
    # Megatron-core 0.16.1's layer, without the 4 bytes of its int32
    ("22b", 8, False, "selective"): 654442500 - 4,
    ("22b", 8, True, "selective"): 213925892 - 4,
    ("175b", 8, False, "selective"): 327188484 - 4,
    ("175b", 8, True, "selective"): 106958852 - 4,
    ("530b", 8, False, "selective"): 545292292 - 4,
    ("530b", 8, True, "selective"): 178262020 - 4,
    ("1t", 8, False, "selective"): 681607172 - 4,
    ("1t", 8, True, "selective"): 222826500 - 4,
}

# The same with tensor-parallel size 8 and sequence parallelism that saves the gathered inputs, as
# DTensor's does.
GATHERED = {"22b": 1061175296, "175b": 446697472, "530b": 660606976, "1t": 825757696}

# One decoder layer of transformers 5.24, as the difference of two depths.
HUGGING_FACE = [
    ("llama-3-8b", {"seq_length": 8192}, "transformers-eager", 14629797888),
    ("llama-3-8b", {"seq_length": 8192}, "transformers-sdpa", 1645281304),
    ("llama-3-70b", {"seq_length": 8192}, "transformers-sdpa", 3256942616),
    ("llama-3.1-405b", {"seq_length": 8192}, "transformers-sdpa", 6211829784),
    ("gpt2", {"seq_length": 64, "micro_batch_size": 2}, "transformers-eager", 6195200),
    ("gpt2", {"seq_length": 64, "micro_batch_size": 2}, "transformers-sdpa", 5709848),
]

# Megatron-core 0.16.1's local layer of this model for s 64 and b 2: GQA and a fused SwiGLU.
GROUPED = Model(
    name="toy",
    layers=1,
    hidden_size=128,
    heads=4,
    kv_heads=2,
    ffn_size=352,
    norm="rmsnorm",
    activation="swiglu",
    position="none",
)
GROUPED_BYTES = 599040
