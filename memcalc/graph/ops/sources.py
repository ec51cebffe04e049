"""Where it is documented or implemented that an operation saves a tensor."""

KORTHIKANTI = "Korthikanti et al. 2022, section 4.1"
KORTHIKANTI_ENDS = "Korthikanti et al. 2022, section 4.3"
KORTHIKANTI_SP = "Korthikanti et al. 2022, section 4.2.2"
TORCH_NORM = "PyTorch derivatives.yaml, native_layer_norm: result1 and result2 (fp32 on CUDA)"
TORCH_RMS_NORM = "PyTorch derivatives.yaml, _fused_rms_norm: input and result1 (fp32)"
TORCH_CHAIN = "PyTorch autograd, operation by operation (derivatives.yaml)"
MEGATRON_CE = "Megatron-core tensor_parallel/cross_entropy.py: save_for_backward"
MEGATRON_FUSED_CE = "Megatron-core fusions/fused_cross_entropy.py: save_for_backward"
TE_CE = "Transformer Engine pytorch/cross_entropy.py, triton/cross_entropy.py"
TORCH_CE = "PyTorch derivatives.yaml: _log_softmax (result), nll_loss_forward (self, target)"
DTENSOR_CE = (
    "PyTorch distributed/tensor/parallel/loss.py: _log_softmax, _nll_loss_and_log_softmax_backward"
)
INDUCTOR_CE = (
    "PyTorch _functorch/partitioners.py: min_cut_rematerialization_partition; "
    "_inductor/fx_passes/post_grad.py: scatter_upon_const_tensor"
)
LIGER_CE = "Liger-Kernel ops/cross_entropy.py: cross_entropy_forward"
LIGER_LINEAR_CE = (
    "Liger-Kernel ops/fused_linear_cross_entropy.py: fused_linear_cross_entropy_forward"
)
CUT_CE = "ml-cross-entropy cut_cross_entropy/cce.py: save_for_backward"
RETURNED = "the training loop: out = model(...); out.loss.backward()"
TE_FLASH = "Transformer Engine dot_product_attention/backends.py: FlashAttention, sbhd"
TE_PADDING = (
    "Transformer Engine dot_product_attention/backends.py: UnfusedDotProductAttention; "
    "dot_product_attention/utils.py: get_full_mask"
)
MEGATRON_VP = "Megatron-core tensor_parallel/layers.py: VocabParallelEmbedding"
HF_BIAS = "transformers integrations/sdpa_attention.py: create_position_bias_mask"
TORCH_BIAS = (
    "PyTorch aten/src/ATen/native/transformers/attention.cpp: convert_boolean_attn_mask, pad_bias"
)
TORCH_EFFICIENT = (
    "PyTorch derivatives.yaml, _scaled_dot_product_efficient_attention: query, key, value, "
    "attn_bias, output, log_sumexp, philox_seed, philox_offset"
)
HF_T5 = "transformers models/t5/modeling_t5.py: T5LayerNorm"
HF_ROTARY = "transformers models/llama/modeling_llama.py: LlamaRotaryEmbedding"
HF_GPT_OSS = "transformers models/gpt_oss/modeling_gpt_oss.py: GptOssExperts._apply_gate"
HF_COHERE = "transformers models/cohere/modeling_cohere.py: CohereLayerNorm"
HF_BATCHED = "transformers integrations/moe.py: batched_mm_experts_forward"
HF_EXPERTS = "transformers integrations/moe.py: grouped_mm_experts_forward"
MEGATRON_ROUTER = (
    "Megatron-core transformer/moe/router.py, moe_utils.py: topk_routing_with_score_function"
)
MEGATRON_EXPERTS = "Megatron-core transformer/moe/experts.py: bias_act_func"
MEGATRON_GATE = "Megatron-core fusions/fused_bias_swiglu.py, fused_bias_geglu.py: input"
FLASH = "FlashAttention: save_for_backward(q, k, v, out_padded, softmax_lse, rng_state)"
TORCH_RNN = "PyTorch aten/src/ATen/native/RNN.cpp: SimpleCell, GRUCell, LSTMCell"
TORCH_FUSED_RNN = "PyTorch derivatives.yaml: _thnn_fused_gru_cell, _thnn_fused_lstm_cell"
DIFFERENTIABLE = "saved for a double backward, whether or not there is one"
