"""Steps of Hugging Face's causal language models on fake CUDA tensors."""

from contextlib import nullcontext
from unittest import mock

import torch
import transformers

from memcalc.validation.step.fake_cuda import FakeCuda
from memcalc.validation.step.tracker import Tracker

LLAMA_3 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
# Name -> family and sizes: vocabulary, h, f, layers, heads, key heads, whether embeddings are tied.
MODELS = {
    "toy": ("Llama", 1024, 256, 704, 2, 8, 2, True),
    "small": ("Llama", 64, 256, 1024, 3, 8, 4, False),
    "llama-3.2-1b": ("Llama", 128256, 2048, 8192, 16, 32, 8, True),
    "llama-3.2-3b": ("Llama", 128256, 3072, 8192, 28, 24, 8, True),
    "llama-3.1-8b": ("Llama", 128256, 4096, 14336, 32, 32, 8, False),
    "qwen2.5-1.5b": ("Qwen2", 151936, 1536, 8960, 28, 12, 2, True),
}
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, momentum=0.9, foreach=True),
    "adamw 8bit": lambda params: __import__("bitsandbytes").optim.AdamW8bit(params),
}
TARGETS = {
    "qkvo": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def config(name):
    """A model's config in transformers."""
    family, vocabulary, h, f, layers, heads, kv_heads, tied = MODELS[name]
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": h,
        "intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131072,
        "use_cache": False,
    }
    if name in ("llama-3.2-1b", "llama-3.2-3b"):
        sizes |= _positions(LLAMA_3)
    return getattr(transformers, f"{family}Config")(**sizes)


def _positions(rotary):
    if transformers.__version__ >= "5":
        return {"rope_parameters": rotary}
    scaling = dict(rotary)
    return {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}


def step(
    name="toy",
    b=1,
    s=2048,
    attn="sdpa",
    dtype="bf16",
    amp=False,
    checkpoint=None,
    accumulate=1,
    optimizer="adamw",
    set_to_none=True,
    holds_logits=True,
    clip=False,
    lora=None,
    targets="qkvo",
    dropout=0.0,
    adapters="fp32",
    mask=False,
    ema=False,
    gpu="a100",
    kernels=True,
    empty_cache=False,
):
    """The tracker of two steps, with peaks of the second.

    ``kernels``: with their own memory. ``empty_cache``: between the steps.
    """
    cuda = FakeCuda(gpu)
    tracker = Tracker(cublas=cuda.cublas if kernels else 0, workspaces=kernels)
    no_warning = mock.patch.object(
        transformers.PreTrainedModel, "warn_if_padding_and_no_attention_mask", mock.Mock()
    )
    with no_warning, cuda, tracker:
        known = config(name)
        model = transformers.AutoModelForCausalLM.from_config(
            known,
            attn_implementation=attn,
            dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype],
        )
        if lora:
            import peft

            of = peft.LoraConfig(
                r=lora,
                lora_alpha=lora,
                lora_dropout=dropout,
                target_modules=TARGETS[targets],
                task_type="CAUSAL_LM",
            )
            model = peft.get_peft_model(model, of, autocast_adapter_dtype=adapters == "fp32")
        model.train()
        if checkpoint:
            new = getattr(model, "activation_checkpointing_enable", None)  # from 5.24 on
            enable = new or model.gradient_checkpointing_enable
            enable({"use_reentrant": checkpoint == "reentrant"})
            if lora or checkpoint == "reentrant":
                model.enable_input_require_grads()
        params = [each for each in model.parameters() if each.requires_grad]
        of = OPTIMIZERS[optimizer](params)
        tracker.watch(model, of)
        ids = torch.randint(0, known.vocab_size, (b, s))
        attention_mask = torch.ones_like(ids) if mask else None
        average = [each.detach().clone() for each in params] if ema else []
        for number in range(2):
            if number:
                tracker.reset_peaks(empty_cache)
            for _ in range(accumulate):
                tracker.phase("forward")
                with torch.autocast("cuda", torch.bfloat16) if amp else nullcontext():
                    out = model(input_ids=ids, labels=ids, attention_mask=attention_mask)
                    loss = out.loss
                if not holds_logits:
                    del out
                tracker.phase("backward")
                loss.backward()
                if holds_logits:
                    del out
                del loss
            if clip:
                tracker.phase("clip")
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            tracker.phase("step")
            of.step()
            if ema:
                torch._foreach_lerp_(average, [each.detach() for each in params], 0.01)
            tracker.phase("zero")
            of.zero_grad(set_to_none=set_to_none)
        tracker.phase("end")
    return tracker
