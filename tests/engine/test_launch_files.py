"""Launch files: Megatron-LM scripts and YAMLs, gpt-neox, nanotron and DeepSpeed."""

import json
import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared import python
from words import assumed

import memcalc
from memcalc.answers.warnings import warnings
from memcalc.config import Experts, Latent, load, readers
from memcalc.config.readers.megatron import names
from memcalc.config.readers.shell.marks import opened
from memcalc.config.readers.shell.script import read as read_shell
from memcalc.errors import ConfigError, InputError, MemcalcError

GPT3 = """
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
--max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1
--global-batch-size 1536 --rampup-batch-size 16 16 5859375 --fp16
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
"""
MIXTRAL = """
--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope
--swiglu --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8
--no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000
--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--overlap-grad-reduce --micro-batch-size 1 --global-batch-size 256 --bf16
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
--use-distributed-optimizer --sequence-parallel
"""
LLAMA = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
--max-position-embeddings 8192 --position-embedding-type rope --attention-dropout 0.0
--hidden-dropout 0.0 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights
--disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --bf16
--tensor-model-parallel-size 4 --sequence-parallel --vocab-size 128256
"""
LLAMA_MODEL = {
    "layers": 32,
    "hidden_size": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn_size": 14336,
    "vocab_size": 128512,  # padded to a multiple of 128 x 4
    "max_seq_length": 8192,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rotary",
    "tied_embeddings": False,
    **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), False),
}
LLAMA_NATIVE = {
    "memcalc": 1,
    "model": LLAMA_MODEL,
    "parallel": {"tp": 4, "sp": True, "dp": 2},
    "run": {
        "seq_length": 8192,
        "micro_batch_size": 1,
        "global_batch_size": 128,
        "precision": "bf16",
        "implementation": "megatron",
    },
}
DEEPSEEK = """
--micro-batch-size 1 --bf16 --disable-bias-linear --untie-embeddings-and-output-weights
--position-embedding-type rope --normalization RMSNorm --swiglu --num-layers 61 --hidden-size 7168
--ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --multi-latent-attention
--kv-lora-rank 512 --v-head-dim 128 --q-lora-rank 1536 --qk-head-dim 128 --qk-layernorm
--qk-pos-emb-head-dim 64 --num-experts 256 --moe-layer-freq [0]*3+[1]*58
--moe-ffn-hidden-size 2048 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-topk 8 --moe-shared-expert-intermediate-size 2048 --seq-length 4096
--max-position-embeddings 163840 --make-vocab-size-divisible-by 1280 --sequence-parallel
--recompute-activations
"""
SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 128 "
TOY = SIZES + "--max-position-embeddings 128 --micro-batch-size 2 --bf16 "


@pytest.fixture
def write(tmp_path):
    def write(content, name):
        path = tmp_path / name
        if isinstance(content, dict):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


@pytest.fixture
def script(write):
    """A script that gives arguments to Megatron-LM, and the Config that it says."""

    def script(arguments, before="", **settings):
        text = f"#!/bin/bash\n{before}\ntorchrun pretrain_gpt.py {' '.join(arguments.split())}\n"
        return load(write(text, "train.sh"), **settings)

    return script


def as_yaml(arguments):
    """The same arguments, as Megatron's own tests write them down."""
    lines = ["ENV_VARS:", "  CUDA_DEVICE_MAX_CONNECTIONS: 1", "MODEL_ARGS:"]
    name, values = "", []
    for word in [*arguments.split(), "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            lines.append(f"  {name}: {' '.join(values) or 'true'}")
        name, values = word, []
    return "\n".join([*lines, "  --async-save: false", "TEST_TYPE: regular # a comment", ""])


class TestOneRunInThreeFormats:
    @pytest.mark.parametrize("command", ["layer", "ledger", "recompute", "flops", "comm"])
    def test_the_same_run_gives_the_same_columns_and_rows_to_the_byte(
        self, memcalc, write, command
    ):
        launch = f"#!/bin/bash\ntorchrun --nproc_per_node 8 x.py {' '.join(LLAMA.split())}"
        targets = [
            write(launch, "llama.sh"),
            f"{write(as_yaml(LLAMA), 'llama.yaml')} --run {write(LLAMA_NATIVE, 'run.json')}",
            write(LLAMA_NATIVE, "llama.json"),
        ]
        tables = []
        for target in targets:
            outcome = memcalc(f"{command} {target} --format json")
            assert (outcome.status, outcome.err) == (0, "")
            table = {key: outcome.document[key] for key in ("columns", "rows")}
            tables.append(json.dumps(table))
        assert tables[0] == tables[1] == tables[2]

    def test_a_file_is_told_by_its_content_not_by_its_name(self, write):
        launch = "#!/bin/bash\ntorchrun x.py " + TOY
        for name in ("x.sh", "x.slurm", "x", "x.yaml"):
            assert load(write(launch, name)).model.hidden_size == 512
        for name in ("x.yml", "x.sh", "x.txt"):
            assert load(write(as_yaml(TOY), name)).model.hidden_size == 512
        for name in ("native", "native.json", "native.txt", "native.yaml"):
            assert load(write(LLAMA_NATIVE, name)).model.hidden_size == 4096


class TestScripts:
    def test_gpt3_175b_is_the_papers(self, script):
        nodes = "GPUS_PER_NODE=8\nNUM_NODES=16\nWORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))"
        config = script(GPT3, nodes, implementation="paper")
        assert not warnings(config)
        assert (config.parallel.tp, config.parallel.pp, config.parallel.dp) == (8, 16, 1)
        assert (config.run.precision, config.run.global_batch_size) == ("fp16", 1536)
        assert memcalc.ledger(config).rows == memcalc.ledger(load("175b")).rows
        assert "attention-dropout 0.1 (Megatron's default)" in assumed(config)
        assert "global batch size 1536 (at the end of its ramp-up)" in assumed(config)

    def test_mixtral_has_its_experts(self, script):
        config = script(MIXTRAL)
        model, parallel = config.model, config.parallel
        assert model.experts == Experts(number=8, top_k=2, ffn_size=14336)
        assert (model.kv_heads, model.norm, model.position) == (8, "rmsnorm", "rotary")
        assert (parallel.ep, parallel.pp, parallel.etp) == (8, 4, None)
        assert warnings(config) == ("--sp has no effect with --tp 1",)

    def test_deepseek_has_its_latent_attention_and_its_dense_layers(self, script):
        model = script(DEEPSEEK).model
        assert model.moe_layers == (0,) * 3 + (1,) * 58
        assert (model.head_size, model.ffn_size) == (192, 18432)
        assert model.latent == Latent(
            q_lora_rank=1536, kv_lora_rank=512, rope_head_size=64, v_head_size=128
        )
        sizes = {"number": 256, "top_k": 8, "ffn_size": 2048, "shared_ffn_size": 2048}
        assert model.experts == Experts(**sizes, router="sigmoid")

    def test_arrays_variables_defaults_and_conditions_are_followed(self, write):
        text = r"""
            #!/bin/bash
            # --num-layers 99 in a comment does not count; neither does "an open quote
            TP_SIZE=4   # a comment
            DTYPE="fp8"
            TOKENIZER=${3:-"MOCK"}
            MODEL_ARGS=(
                --num-layers ${LAYERS:-12}
                # --hidden-size 1
                --hidden-size $((64*TP_SIZE*2))   # 512
                --num-attention-heads 8 --seq-length='128'
            )
            DTYPE_ARGS=()
            if [[ "$DTYPE" == "fp8" ]]; then
                DTYPE_ARGS+=( "--fp8-format hybrid" )
            else
                DTYPE_ARGS+=( "--fp16" )
            fi
            if [[ "$TOKENIZER" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
                DATA=( "--vocab-size 128256" "--split '99,1,0'" )
            else
                DATA=( "--vocab-size 1" )
            fi
            OTHER=(--bf16); MODEL_ARGS+=("${OTHER[@]}")
            cat <<EOF > file
            it's --num-layers 1 "
EOF
            mkdir -p "$(dirname "$SAVE")"
            torchrun --nproc_per_node 8 --nnodes=2 \
                pretrain_gpt.py "${MODEL_ARGS[@]}" ${DTYPE_ARGS[@]} ${DATA[@]} \
                --tensor-model-parallel-size ${TP_SIZE} --micro-batch-size 2 2>&1 | tee log
        """
        config = load(write(text, "train.sh"))
        assert (config.model.layers, config.model.hidden_size) == (12, 512)
        assert (config.parallel.tp, config.parallel.dp, config.run.seq_length) == (4, 4, 128)
        assert config.model.vocab_size == 128512  # 251 x 128 x 4
        assert "vocabulary 128512 (128256 padded to a multiple of 512)" in assumed(config)
        assert config.run.precision == "fp8"

    def test_arguments_in_one_string_that_is_evaluated_are_read(self, write):
        text = f'A=" \\\n {TOY} \\\n"\nrun_cmd="torchrun x.py ${{A}}"\necho $run_cmd\neval $run_cmd'
        assert load(write(text, "x.sh")).run.micro_batch_size == 2
        assert load(write(f"srun bash -c 'python x.py {TOY}'", "x.sh")).model.layers == 4

    def test_quotes_that_are_left_in_a_string_are_no_part_of_a_value(self, write):
        text = f"""F=1\nA="{TOY} --num-experts 2 --moe-layer-freq '${{F}}'"\neval python x.py $A"""
        assert load(write(text, "x.sh")).model.moe_layers == (1, 1, 1, 1)

    def test_deepspeeds_launcher_says_its_gpus(self, write):
        text = (
            f"deepspeed --num_nodes 2 --num_gpus=4 x.py {TOY} --deepspeed_config=c --zero-stage=1"
        )
        config = load(write(text, "x.sh"))
        assert config.parallel.dp == 8
        assert not warnings(config)

    def test_a_file_of_arguments_alone_is_read(self, write):
        config = load(write(f'MODEL_ARGS=" \\\n {SIZES} --swiglu \\\n"\n', "model.sh"))
        assert config.model.activation == "swiglu"
        assert config.run.precision == "bf16"  # nothing says that a run has fp32
        assert load(write(f"MODEL_ARGS=({SIZES})", "model.sh")).model.layers == 4

    def test_without_a_precision_a_run_is_in_fp32(self, script):
        config = script(TOY.replace("--bf16", "--attention-backend unfused"))
        assert config.run.precision == "fp32"
        assert "precision fp32 (Megatron's default)" in assumed(config)

    @pytest.mark.parametrize(
        ("size", "said"),
        [
            ("$1", "$1"),
            ("${H}", "$H"),
            ("$(touch {gone})", "$(touch"),
            ("`touch {gone}`", "$(touch"),
            ("$((touch))", "$((touch))"),
            ("${X%%y}", "${X%%y}"),
        ],
    )
    def test_nothing_runs_and_what_is_open_is_named(self, script, tmp_path, size, said):
        gone = tmp_path / "gone"
        arguments = TOY.replace("--hidden-size 512", '--hidden-size "$SIZE"')
        with pytest.raises(InputError) as caught:
            script(arguments, f"SIZE={size.replace('{gone}', str(gone))}")
        assert "--hidden-size has no known value: the file does not set " in str(caught.value)
        assert said in str(caught.value)
        assert not gone.exists()

    def test_what_is_open_of_a_run_is_left_out_with_a_warning(self, script):
        config = script(TOY.replace("--micro-batch-size 2", "--micro-batch-size $3"))
        assert config.run.micro_batch_size == 1
        assert warnings(config) == (
            "--micro-batch-size has no known value: the file does not set $3; set it on the "
            "command line",
        )

    def test_a_condition_that_is_open_is_not_guessed(self, script):
        before = """
            if [ $1 = 7B ]; then LAYERS=32; EXTRA=(--swiglu)
            elif [ $1 = 70B ]; then LAYERS=80; fi
            ARGS=(--disable-bias-linear)
            if [ -n "$WANDB" ]; then ARGS+=(--wandb-project x --squared-relu); fi
            if [ $SP = true ] && [ $2 -gt 1 ]; then OPTIONS="--sequence-parallel"; fi
        """
        with pytest.raises(InputError, match=r"--num-layers has no known value.*\$LAYERS"):
            script(TOY.replace("--num-layers 4", "--num-layers $LAYERS"), before)
        config = script(TOY + "${ARGS[@]} ${EXTRA[@]} $OPTIONS", before)
        assert config.model.activation == "gelu"
        assert not config.model.mlp_bias
        assert warnings(config) == (
            "ignored, because they depend on a condition that the file does not decide: "
            "--swiglu, --squared-relu, --sequence-parallel",
            "arguments may be missing: the file does not set $EXTRA, $OPTIONS",
        )

    def test_missing_sizes_are_asked_for_with_what_may_hold_them(self, script):
        with pytest.raises(
            InputError, match=r"--hidden-size is missing: it may be in \$GPT_ARGS, which is unknown"
        ):
            script("$GPT_ARGS --num-layers 2 --micro-batch-size 1")
        with pytest.raises(InputError, match=r"no command with arguments such as --num-layers"):
            script("")

    def test_two_commands_that_differ_contradict_each_other(self, script):
        first = f"torchrun x.py {TOY}"
        with pytest.raises(
            ConfigError, match="two commands have different values for --num-layers: 4 and 8"
        ):
            script(TOY.replace("--num-layers 4", "--num-layers 8"), first)
        assert script(TOY, first).model.layers == 4

    def test_of_one_argument_that_stands_twice_the_last_counts(self, script):
        assert script(TOY + "--num-layers 6").model.layers == 6


class TestMegatronArguments:
    @pytest.mark.parametrize(
        ("arguments", "facts"),
        [
            ("", {"ffn_size": 2048, "activation": "gelu", "qkv_bias": True, "position": "learned"}),
            ("--swiglu", {"ffn_size": 1344, "activation": "swiglu"}),  # int(4h 2/3 / 64) 64
            ("--squared-relu --ffn-hidden-size 100", {"ffn_size": 100}),
            ("--quick-geglu", {"activation": "geglu", "ffn_size": 2048}),
            ("--disable-bias-linear --add-qkv-bias", {"qkv_bias": True, "proj_bias": False}),
            ("--untie-embeddings-and-output-weights", {"tied_embeddings": False}),
            ("--use-rotary-position-embeddings --no-position-embedding", {"position": "rotary"}),
            ("--no-position-embedding", {"position": "none"}),
            ("--qk-layernorm --normalization RMSNorm", {"qk_norm": True, "norm": "rmsnorm"}),
            ("--hidden-dropout 0 --attention-dropout .05", {"attention_dropout": 0.05}),
            ("--group-query-attention --num-query-groups 2", {"kv_heads": 2}),
            ("--group-query-attention", {"kv_heads": 1}),
            ("--num-query-groups 2", {"kv_heads": 8}),
            ("--kv-channels 128", {"head_size": 128}),
            ("--padded-vocab-size 1000 --vocab-size 999", {"vocab_size": 1000}),
            ("--vocab-size 50257", {"vocab_size": 50304}),
            ("--vocab-size 50257 --tensor-model-parallel-size 8", {"vocab_size": 51200}),
            ("--vocab-size 50257 --make-vocab-size-divisible-by 1", {"vocab_size": 50257}),
            ("--vocab-size 151643 --extra-vocab-size 293", {"vocab_size": 151936}),
            ("--window-size '(127,0)'", {"sliding_window": 128, "window_layers": None}),
            ("--window-size 127,0 --window-attn-skip-freq 2", {"window_layers": (1, 0, 1, 0)}),
            ("--window-size -1,-1", {"sliding_window": None}),
            ("--softmax-type learnable", {"attention_sinks": True}),
            ("--mtp-num-layers 1", {"mtp_layers": 1}),
            ("--num-experts 4 --moe-layer-freq 2", {"moe_layers": (1, 0, 1, 0)}),
            ("--num-experts 4 --moe-layer-freq '([0]*1+[1]*3)'", {"moe_layers": (0, 1, 1, 1)}),
            ("--num-experts 4 --moe-layer-freq '([0]+[1])*2'", {"moe_layers": (0, 1, 0, 1)}),
            ("--num-experts 4 --moe-expert-capacity-factor 1.5", {"capacity_factor": 1.5}),
            ("--num-experts 4 --moe-expert-capacity-factor -1", {"capacity_factor": None}),
            ("--num-experts 0 --moe-router-topk 2", {"experts": None}),
            ("--num-experts 4", {"experts_per_token": 2, "expert_ffn_size": 2048}),
        ],
    )
    def test_they_say_what_the_model_is_in_a_script_and_in_yaml(self, write, arguments, facts):
        script = load(write(f"torchrun x.py {TOY} {arguments}", "x.sh")).model
        yaml = load(write(as_yaml(TOY + arguments), "x.yaml")).model
        assert script == yaml
        assert script.facts() | facts == script.facts()

    @pytest.mark.parametrize(
        ("arguments", "degrees"),
        [
            ("--context-parallel-size 2 --cp-comm-type a2a", {"cp": 2, "cp_kind": "all_to_all"}),
            ("--cp-comm-type p2p", {"cp_kind": "ring"}),
            (
                "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --num-experts 4",
                {"ep": 4, "etp": 1},
            ),
            (
                "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
                {"pp": 2, "vpp": 2},
            ),
            (
                "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
                {"vpp": 2},
            ),
        ],
    )
    def test_they_say_how_it_is_spread(self, script, arguments, degrees):
        parallel = script(TOY + arguments).parallel
        assert {name: getattr(parallel, name) for name in degrees} == degrees

    @pytest.mark.parametrize(
        ("arguments", "policy", "warning"),
        [
            ("--recompute-activations", "selective", ""),
            ("--recompute-granularity selective", "selective", ""),
            ("--activations-checkpoint-method uniform", "full", ""),
            ("--checkpoint-activations", "full", ""),
            ("--recompute-granularity full --recompute-method uniform", "full", ""),
            ("--recompute-granularity full --recompute-num-layers 1", "full", ""),
            (
                "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
                "full",
                "",
            ),
            (
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
                "full",
                "",
            ),
            (
                "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
                "full",
                "",
            ),
            (
                "--recompute-granularity full --recompute-method block --recompute-num-layers 0",
                "none",
                "recomputes nothing",
            ),
        ],
    )
    def test_they_say_what_is_recomputed(self, script, arguments, policy, warning):
        config = script(TOY + arguments)
        assert config.run.policy == load("22b", recompute=policy).run.policy
        assert len(warnings(config)) == bool(warning)
        assert warning in "".join(warnings(config))

    @pytest.mark.parametrize("modules", ["mlp core_attn", '"[core_attn mlp]"', "core_attn,mlp"])
    def test_modules_that_are_recomputed_are_read_however_they_are_listed(self, script, modules):
        config = script(f"{TOY} --recompute-granularity selective --recompute-modules {modules}")
        both = script(TOY, recompute="core_attention,mlp")
        assert memcalc.layer_bytes(config) == memcalc.layer_bytes(both)

    def test_modules_that_nobody_knows_are_named(self, script):
        config = script(f"{TOY} --recompute-granularity selective --recompute-modules foo mlp")
        assert warnings(config) == (
            "--recompute-modules foo is not modeled: actual memory is lower",
        )
        assert config.run.policy == load("22b", recompute="mlp").run.policy

    @pytest.mark.parametrize(
        ("arguments", "kernels"),
        [
            ("", ("megatron", "flash")),
            ("--transformer-impl local", ("megatron-local", "unfused")),
            ("--transformer-impl local --use-flash-attn", ("megatron-local", "flash")),
            ("--attention-backend unfused", ("megatron", "unfused")),
            ("--attention-backend fused", ("megatron", "flash")),
        ],
    )
    def test_they_say_whose_kernels_run(self, script, arguments, kernels):
        implementation = script(TOY + arguments).run.implementation
        assert (implementation.name, implementation.attention) == kernels

    def test_gpus_that_the_parallel_sizes_do_not_divide_are_warned_about(self, script):
        config = script(TOY + "--tensor-model-parallel-size 8", "GPUS_PER_NODE=4\nNNODES=1")
        assert config.parallel.dp == 1
        assert warnings(config) == (
            "the file's 4 GPUs are not a multiple of TP x PP x CP = 8: counted with --dp 1",
        )

    def test_what_is_not_modelled_and_what_is_not_known_is_named(self, script):
        config = script(TOY + "--cpu-offloading --frobnicate 3 --save x --lr 1e-4 --foo_bar")
        assert warnings(config) == (
            "--cpu-offloading is not modeled: actual GPU memory is lower",
            "unknown to memcalc, ignored: --foo-bar, --frobnicate",
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("--num-layers 12x", "--num-layers must be a whole number, not '12x'"),
            ("--num-layers 0", "layers must be a whole number from 1"),
            ("--num-layers", "--num-layers needs a value"),
            ("--tensor-model-parallel-size", "--tensor-model-parallel-size needs a value"),
            ("--recompute-modules", "--recompute-modules needs a value"),
            ("--window-size --swiglu", "--window-size needs a value"),
            ("--num-layers 4 5", "--num-layers takes one value, not 2"),
            ("--hidden-dropout high", "--hidden-dropout must be a number, not 'high'"),
            ("--hidden-dropout 1.2.3", "--hidden-dropout must be a number, not '1.2.3'"),
            ("--normalization RMSnorm", "--normalization 'RMSnorm' is not modeled; choose from"),
            ("--fp16", "--bf16 and --fp16 are mutually exclusive"),
            ("--swiglu --squared-relu", "--swiglu and --squared-relu are mutually exclusive"),
            ("--recompute-granularity some", "--recompute-granularity 'some' is unknown"),
            ("--multi-latent-attention", "needs --kv-lora-rank"),
            ("--window-size x", "--window-size must start with a whole number"),
            ("--num-experts 4 --moe-layer-freq 0", "--moe-layer-freq must be at least 1"),
            ("--num-experts 4 --moe-layer-freq [0]*9", "moe_layers has 9 entries for"),
            (
                "--num-layers-per-virtual-pipeline-stage 3",
                "3 x --pipeline-model-parallel-size 1 must",
            ),
            (
                "--num-layers-per-virtual-pipeline-stage 0",
                "0 x --pipeline-model-parallel-size 1 must",
            ),
            (
                "--vocab-size 5 --make-vocab-size-divisible-by 0",
                "must be padded to a multiple of at least 1, not 0",
            ),
            ("--tensor-model-parallel-size 3", "--tp 3 must divide heads 8"),
            ("--tensor-model-parallel-size 0", "tp must be a whole number"),
        ],
    )
    def test_what_cannot_be_is_refused_in_one_line(self, script, arguments, message):
        with pytest.raises(MemcalcError, match=message) as caught:
            script(TOY + arguments)
        assert "\n" not in str(caught.value)

    def test_a_yamls_argument_without_its_value_is_refused(self, write):
        text = "MODEL_ARGS:\n  --num-layers: 2\n  --tensor-model-parallel-size:\n"
        with pytest.raises(ConfigError, match="parallel-size needs a value"):
            load(write(text, "x.yaml"))

    def test_products_of_experts_are_said_of_experts_alone(self, script):
        assert script(TOY).run.implementation.expert_products == "grouped"
        assert not warnings(script(TOY + "--num-experts 0"))
        assert script(TOY + "--num-experts 4").run.implementation.expert_products == "sequential"

    def test_every_argument_is_in_one_list_only(self):
        lists = [names.FLAGS, names.VALUES, names.HARMLESS, set(names.UNMODELLED)]
        assert sum(map(len, lists)) == len(set.union(*lists))


class TestHostileScripts:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("X=aaaaaaaaaa\n" + "X=$X$X\n" * 60, "expand to more than 1048576 characters"),
            ("A=(a b c d)\n" + "A+=(${A[@]})\n" * 60, "expand to more than 1048576 characters"),
            ("A=b\n" + "A+=bbbbbbbbbb\n" * 18_000, "more than"),
            ("X=" + "${a:-" * 1000 + "1" + "}" * 1000, "nested more than 20 levels deep"),
            ("echo '", "' is not closed"),
            ('echo "', '" is not closed'),
            ("A=(", "( is not closed"),
            ("echo $(", "$( is not closed"),
            ("echo ${", "${ is not closed"),
            ("echo `", "` is not closed"),
            ("x " * 100_000, "more than 20000 words"),
            ("if " * 19_000, "no command with arguments"),
            ("A=1 " * 19_000 + "x", "no command with arguments"),
            ("x" + "'a'" * 80_000, "no command with arguments"),
            (
                "A=aaaaaaaaaaaaaaaaaaaa\nx " + "$A" * 100_000,
                "expand to more than 1048576 characters",
            ),
            ("(((( " * 50_000, "no command with arguments"),
            ("cat <<A\n" * 9000, "no command with arguments"),
            ("\\", "no command with arguments"),
            ("\0", "not text"),
            ("fi done esac then elif else }", "no command with arguments"),
            ("[ " + "! " * 19_000 + "]", "no command with arguments"),
            ("A=(" * 5000, "arrays are nested more than 20 levels deep"),
            (
                "".join(f"x --num-layers {i}\n" for i in range(6000)),
                "two commands have different values",
            ),
            ("A='--num-layers'", "--num-layers needs a value"),
            ("A='--num-layers'\nB=4", "--num-layers needs a value"),
        ],
        ids=lambda value: value[:12].strip() or "nul",
    )
    def test_they_are_one_clear_line_soon(self, write, text, message):
        path = write(f"#!/bin/bash\n{text}", "x.sh")
        start = time.monotonic()
        with pytest.raises(MemcalcError) as caught:
            load(path)
        assert time.monotonic() - start < 20
        assert message in str(caught.value)
        assert str(caught.value).startswith(path)
        assert "\n" not in str(caught.value)

    def test_variables_that_need_one_another_are_open(self, write):
        text = f"A=$B\nB=$A\nA=$B\ntorchrun x.py {TOY} --ffn-hidden-size $A"
        with pytest.raises(InputError, match=r"the file does not set \$B"):
            load(write(text, "x.sh"))

    @pytest.mark.parametrize(
        "body", ["9**9**9", "1/0", "9" * 30, "((", "1+", "999999999999*999999999999", "$1+1", "-"]
    )
    def test_arithmetic_is_bounded(self, body):
        body = body.replace("((", "(" * 90 + ")" * 90)
        ((_, words),) = read_shell(f"x $(({body}))").commands
        assert opened(words[1])


NEOX_20B = """# a comment
{
  "pipe-parallel-size": 4,
  "model-parallel-size": 2,
  "num-layers": 44, "hidden-size": 6144, "num-attention-heads": 64,
  "seq-length": 2048, "max-position-embeddings": 2048,
  "norm": "layernorm", "pos-emb": "rotary", "rotary_pct": 0.25,
  "no-weight-tying": true, "gpt_j_residual": true, "output_layer_parallelism": "column",
  "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95], }},
  "zero_optimization": {"stage": 1, "allgather_partitions": True, "overlap_comm": True, },
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
  "checkpoint-activations": true, "checkpoint-num-layers": 1, "partition-activations": false,
  "hidden-dropout": 0, "attention-dropout": 0,
  "fp16": {"fp16": true, "enabled": true, "loss_scale": 0},
  "train-iters": 150000, "lr-decay-iters": 150000, "log-interval": 2, "wall_clock_breakdown": false,
}
"""
NEOX_LLAMA = """
{
  "pipe_parallel_size": 0, "model_parallel_size": 8, "make_vocab_size_divisible_by": 1,
  "num_layers": 80, "hidden_size": 8192, "intermediate_size": 86016,
  "num_attention_heads": 64, "num_kv_heads": 8, "seq_length": 4096,
  "max_position_embeddings": 4096, "pos_emb": "rotary", "rotary_pct": 1,
  "no_weight_tying": true, "gpt_j_residual": false, "norm": "rmsnorm", "rms_norm_epsilon": 1.0e-5,
  "attention_config": [[["flash"], 80]], "use_bias_in_norms": false,
  "use_bias_in_attn_linear": false, "use_bias_in_mlp": false,
  "activation": "swiglu", "mlp_multiple_of": 256,
}
"""


class TestNeox:
    def test_20b_has_its_parallel_residual_and_its_run(self, write):
        config = load(write(NEOX_20B, "20B.yml"))
        model, parallel, run = config.model, config.parallel, config.run
        assert (model.layers, model.hidden_size, model.heads) == (44, 6144, 64)
        assert (model.block, model.position, model.ffn_size) == (
            "parallel_two_norms",
            "rotary",
            24576,
        )
        assert not model.tied_embeddings
        assert (parallel.tp, parallel.pp, parallel.dp) == (2, 4, 1)
        assert (run.micro_batch_size, run.global_batch_size, config.microbatches) == (4, 128, 32)
        assert (run.precision, run.policy.regions) == ("fp16", {"layer"})
        assert run.implementation.attention == "unfused"
        assert not [line for line in warnings(config) if "not counted" not in line]

    def test_the_width_of_a_gated_mlp_is_a_third_of_what_is_written(self, write):
        config = load(write(NEOX_LLAMA, "70B.yml"))
        assert config.model.ffn_size == 28672
        ours = load("llama-2-70b", tp=8, implementation="megatron-local", attention="flash")
        assert memcalc.ledger(config).rows == memcalc.ledger(ours).rows

    @pytest.mark.parametrize(
        ("change", "width"),
        [
            ({"intermediate_size": 33024}, 11008),  # Llama-2-7B, 3 x 11008
            ({"intermediate_size": 32768}, 11008),  # rounded up from 10922
            ({"intermediate_size": 32768, "mlp_multiple_of": 2}, 10922),
            ({}, 5632),  # a third of 4h, 5461.3, rounded up to a multiple of 256
            ({"intermediate_size": 11008, "mlp_type": "llama"}, 11008),
            ({"activation": "gelu", "intermediate_size": 11008}, 11008),
            ({"activation": "gelu", "expansion_factor": 3.5}, 14336),
            ({"activation": "geglu", "intermediate_size": 24576}, 8192),
        ],
    )
    def test_widths_follow_the_activation(self, write, change, width):
        sizes = {"num_layers": 2, "hidden-size": 4096, "num_attention_heads": 32}
        run = {"seq_length": 8, "activation": "swiglu"}
        assert load(write(sizes | run | change, "x.yml")).model.ffn_size == width

    def test_one_key_in_two_spellings_must_agree(self, write):
        sizes = {"num_layers": 2, "hidden-size": 64, "num_attention_heads": 4, "seq_length": 8}
        assert load(write(sizes | {"num-layers": 2}, "x.yml")).model.layers == 2
        with pytest.raises(ConfigError, match="'num_layers' is given twice"):
            load(write(sizes | {"num-layers": 3}, "x.yml"))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_size": None}, "hidden_size is missing"),
            ({"hidden_size": "64"}, "hidden_size must be a whole number, not '64'"),
            ({"num_layers": 0}, "num_layers must be at least 1"),
            ({"norm": "scalenorm"}, "norm 'scalenorm' is not modeled; did you mean 'layernorm'"),
            ({"activation": ["gelu"]}, "activation"),
            ({"gpt_j_residual": "yes please"}, "gpt_j_residual must be true or false"),
            ({"attention_config": 3}, "attention_config must be a list such as"),
            ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both enabled"),
            ({"fp16": [1]}, "fp16 must be a section of keys and values"),
            ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, "must be a multiple of"),
            ({"train_micro_batch_size_per_gpu": 0}, "micro-batch size must be at least 1"),
            ({"intermediate_size": -3}, "intermediate_size must be at least 1"),
            ({"expansion_factor": "x"}, "expansion_factor must be a number"),
        ],
    )
    def test_what_cannot_be_is_refused(self, write, change, message):
        sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 8}
        run = {"train_micro_batch_size_per_gpu": 1}
        with pytest.raises(MemcalcError, match=message):
            load(write(sizes | run | change, "x.yml"))

    def test_what_is_not_modelled_and_what_is_not_known_is_named(self, write):
        odd = {"moe_num_experts": 8, "frobnicate": 3, "lora": {"enabled": False}, "save": "x"}
        sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 8}
        assert warnings(load(write(sizes | odd, "x.yml"))) == (
            "moe_num_experts is not modeled: MoE layers are counted as dense",
            "unknown to memcalc, ignored: frobnicate",
        )


NANOTRON = """
general: {project: x, seed: 42}
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  make_vocab_size_divisible_by: 1
  model_config:
    _attn_implementation: flash_attention_2
    hidden_act: silu
    hidden_size: 256
    intermediate_size: 768
    is_qwen2_config: true
    max_position_embeddings: 4096
    moe_config: null
    num_attention_heads: 4
    num_hidden_layers: 12
    num_key_value_heads: 2
    rope_scaling: null
    sliding_window_size: null
    tie_word_embeddings: true
    vocab_size: 128257
    moe_config:
      num_experts: 8
      top_k: 2
      moe_intermediate_size: 384
      enable_shared_expert: true
      shared_expert_intermediate_size: 512
optimizer: {zero_stage: 1}
parallelism:
  context_parallel_size: 2
  dp: 6
  expert_parallel_size: 4
  pp: 1
  pp_engine: 1f1b
  recompute_layer: false
  tp: 2
  tp_mode: REDUCE_SCATTER
  tp_recompute_allgather: true
tokens:
  batch_accumulation_per_replica: 5
  micro_batch_size: 3
  sequence_length: 4096
"""


class TestNanotron:
    def test_a_qwen_of_experts_is_read_with_its_run(self, write):
        config = load(write(NANOTRON, "qwen.yaml"))
        model, parallel, run = config.model, config.parallel, config.run
        assert (model.layers, model.hidden_size, model.heads, model.kv_heads) == (12, 256, 4, 2)
        assert (model.norm, model.activation, model.position) == ("rmsnorm", "swiglu", "rotary")
        assert (parallel.tp, parallel.dp, parallel.cp, parallel.ep) == (2, 6, 2, 4)
        assert parallel.sp
        assert (run.micro_batch_size, run.global_batch_size) == (3, 3 * 5 * 6)
        assert (run.seq_length, run.precision, run.policy.regions) == (4096, "bf16", frozenset())
        assert model.vocab_size == 128258
        assert not warnings(config)

    def test_a_key_that_is_null_first_is_what_it_is_later(self, write):
        model = load(write(NANOTRON, "qwen.yaml")).model
        assert model.experts == Experts(number=8, top_k=2, ffn_size=384, shared_ffn_size=512)
        twice = NANOTRON.replace("moe_config: null", "moe_config: {num_experts: 4}")
        with pytest.raises(InputError, match="the key 'moe_config' is given twice"):
            load(write(twice, "qwen.yaml"))

    @pytest.mark.parametrize(
        ("old", "new", "warning"),
        [
            (
                "pp_engine: 1f1b",
                "pp_engine: afab",
                "pp_engine afab is not modeled: actual memory is higher",
            ),
            ("allgather: true", "allgather: false", "tp_recompute_allgather false is not mod"),
            ("512", "null", "a shared expert but gives no width"),
            ("rope_scaling: null", "frobnicate: 3", "unknown to memcalc, ignored: frobnicate"),
        ],
    )
    def test_what_is_not_modelled_is_named(self, write, old, new, warning):
        (line,) = warnings(load(write(NANOTRON.replace(old, new), "x.yaml")))
        assert warning in line

    def test_tensor_parallelism_without_scattering_has_no_sequence_parallelism(self, write):
        text = NANOTRON.replace("REDUCE_SCATTER", "all_reduce")
        config = load(write(text.replace("recompute_layer: false", "recompute_layer: true"), "x"))
        assert not config.parallel.sp
        assert config.run.policy.regions == {"layer"}

    def test_layers_of_experts_may_be_listed(self, write):
        text = NANOTRON.replace("top_k: 2", "top_k: 2\n      layers: [0, 11]")
        assert load(write(text, "x.yaml")).model.moe_layers == (1, *[0] * 10, 1)


DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "steps_per_print": 10,
}


class TestVocabulary:
    """Scripts with a tokenizer of a file, and gpt-neox's configs, do not say how many tokens."""

    SCRIPT = f"torchrun x.py {TOY} --tokenizer-type HuggingFaceTokenizer --micro-batch-size 1"
    COMMANDS = ("memory", "flops", "comm")
    MORE = ("recompute --fill --recompute full --budget 80GB", "plot memory -o x.png")

    @pytest.mark.parametrize("command", [*COMMANDS, *MORE])
    def test_what_lacks_one_says_how_to_give_it(self, write, memcalc, command):
        for file in (write(self.SCRIPT, "mix.sh"), write(NEOX_20B, "20B.yml")):
            verb, *options = command.split()
            kind = [options.pop(0)] if verb == "plot" else []
            outcome = memcalc(" ".join([verb, *kind, str(file), "--pp 1", *options]))
            assert outcome.status == 2
            assert "gives no vocabulary size: pass --vocab-size" in outcome.err

    @pytest.mark.parametrize("command", COMMANDS)
    def test_it_is_padded_as_the_files_framework_pads_it(self, write, memcalc, command):
        """Megatron-LM and gpt-neox: to a multiple of make_vocab_size_divisible_by x t, 128 x t."""
        neox = NEOX_20B.replace('"seq-length"', '"make_vocab_size_divisible_by": 256, "seq-length"')
        for file, size, multiple in (
            (write(f"{self.SCRIPT} --tensor-model-parallel-size 4", "mix.sh"), 50688, 512),
            (write(f"{self.SCRIPT} --make-vocab-size-divisible-by 1", "one.sh"), 50257, 1),
            (write(neox, "20B.yml"), 50688, 512),
        ):
            document = memcalc(f"{command} {file} --vocab-size 50257 --format json").document
            assert document["symbols"]["v"] == size
            padded = f"vocabulary {size} (50257 padded to a multiple of {multiple})"
            assert any(padded in note for note in document["notes"]) == (size != 50257)

    def test_it_wins_over_a_models_own(self, write):
        assert load("llama-3-8b", vocab_size=32000).model.vocab_size == 32000
        script = write(f"{self.SCRIPT} --padded-vocab-size 1024", "mix.sh")
        assert load(script).model.vocab_size == 1024
        assert load(script, vocab_size=1000, tp=2).model.vocab_size == 1024

    @pytest.mark.parametrize(
        ("model", "size", "message"),
        [
            ("vit-large", 1000, "vit-large is a classifier and has no vocabulary"),
            ("gpt2", 0, "vocab_size must be a whole number from 1"),
            ("gpt2", "1000", "vocab_size must be a whole number"),
        ],
    )
    def test_what_cannot_be_is_refused(self, model, size, message):
        with pytest.raises(MemcalcError, match=message):
            load(model, vocab_size=size)


class TestRunFiles:
    def test_deepspeed_gives_a_run_to_a_model(self, write):
        path = write(DEEPSPEED, "ds.json")
        config = load("llama-3-8b", path, dp=2, seq_length=64)
        assert (config.run.micro_batch_size, config.run.global_batch_size) == (4, 4 * 8 * 2)
        assert config.run.precision == "bf16"
        assert not warnings(config)

    def test_accumulation_replaces_the_batch_of_the_models_own_run(self, write):
        config = load("530b", write(DEEPSPEED, "ds.json"), schedule="1f1b", pp=1)
        assert (config.run.micro_batch_size, config.run.global_batch_size) == (4, 4 * 8)

    def test_auto_says_nothing(self, write):
        silent = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "fp16": "auto"}
        assert load("22b", write(silent, "ds.json")) == load("22b", sharder="deepspeed")

    @pytest.mark.parametrize(
        ("said", "found"),
        [
            ((64, 4, 2), (4, 64, 8)),
            ((64, 4, None), (4, 64, 1)),
            ((64, None, 8), (8, 64, 1)),
            ((None, 4, 8), (4, 32, 1)),
            ((None, 4, None), (4, None, 1)),
        ],
    )
    def test_of_the_three_sizes_of_a_batch_the_missing_one_follows(self, write, said, found):
        names = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
        run = {"bf16": {}, **{k: v for k, v in zip(names, said, strict=True) if v}}
        config = load("gpt2", write(run, "ds.json"))
        sizes = (config.run.micro_batch_size, config.run.global_batch_size, config.parallel.dp)
        assert sizes == found

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"train_batch_size": 63},
                "63 must be a multiple of micro-batch size 4 x gradient acc",
            ),
            ({"train_batch_size": "64"}, "train_batch_size must be a whole number, not '64'"),
            (
                {"gradient_accumulation_steps": 0},
                "gradient accumulation steps must be at least 1, not 0",
            ),
            ({"fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
            ({"zero_optimization": 3}, "zero_optimization must be a section of keys and values"),
        ],
    )
    def test_what_cannot_be_is_refused(self, write, change, message):
        with pytest.raises(MemcalcError, match=message):
            load("gpt2", write(DEEPSPEED | change, "ds.json"))

    def test_checkpointing_says_how_and_not_what(self, write):
        run = {"activation_checkpointing": {"partition_activations": True}, "frobnicate": 1}
        assert warnings(load("gpt2", write(DEEPSPEED | run, "ds.json"))) == (
            "unknown to memcalc, ignored: frobnicate",
            "partition_activations is not modeled: actual memory is lower (saved "
            "inputs are sharded over ranks)",
            "activation_checkpointing does not say what is recomputed: set --recompute",
        )

    @pytest.mark.parametrize(
        ("section", "said", "lines"),
        [
            ("zero_optimization", {"stage": 3, "foo": 1}, ["ignored: zero_optimization.foo"]),
            (
                "zero_optimization",
                {"stage": 3, "zero_hpz_partition_size": 8, "mics_shard_size": 4},
                ["size is not modeled: actual memory is higher"] * 2,
            ),
            (
                "zero_optimization",
                {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True},
                ["is not modeled: actual memory is higher (quantized copies"] * 2,
            ),
            (
                "zero_optimization",
                {"stage": 3, "stage3_param_persistence_threshold": 1e6},
                ["stage3_param_persistence_threshold is not modeled: actual memory is higher"],
            ),
            (  # DeepSpeed's defaults, and what moves no byte
                "zero_optimization",
                {
                    "stage": 3,
                    "zero_hpz_partition_size": 1,
                    "mics_shard_size": -1,
                    "stage3_max_live_parameters": 1e9,
                    "stage3_max_reuse_distance": 1e9,
                    "stage3_prefetch_bucket_size": "auto",
                    "sub_group_size": 1e9,
                    "stage3_param_persistence_threshold": 100000,
                    "overlap_comm": True,
                    "stage3_gather_16bit_weights_on_model_save": True,
                    "round_robin_gradients": True,
                    "ignore_unused_parameters": True,
                    "elastic_checkpoint": True,
                    "load_from_fp32_weights": True,
                },
                [],
            ),
            (  # of stage 3 alone
                "zero_optimization",
                {"stage": 2, "stage3_max_live_parameters": 10, "zero_hpz_partition_size": 8},
                [],
            ),
            ("zero_optimization", {"stage": 2, "overlap_comm": True}, ["a second gradient bucket"]),
            (
                "zero_optimization",
                {"stage": 2, "cpu_offload": True},
                ["offload_optimizer is not modeled: actual GPU memory is lower"],
            ),
            ("zero_optimization", {"stage": 0, "overlap_comm": True}, []),
            ("bf16", {"enabled": True, "foo": 1}, ["ignored: bf16.foo"]),
            ("data_types", {"grad_accum": "fp32"}, ["ignored: data_types.grad_accum"]),
            ("fp16", {"enabled": False, "loss_scale": 0, "hysteresis": 2}, []),
            (
                "torch_autocast",
                {"enabled": True},
                ["actual memory is higher (weights stay in fp32"],
            ),
            ("torch_autocast", {"enabled": False}, []),
            ("aio", {"block_size": 1048576}, []),
        ],
    )
    def test_what_a_section_says_and_is_not_modelled_is_named(self, write, section, said, lines):
        """Keys and defaults: DeepSpeed 0.18.2, runtime/zero/config.py, precision_config.py."""
        found = warnings(load("gpt2", write(DEEPSPEED | {section: said}, "ds.json"), dp=2))
        assert len(found) == len(lines)
        assert all(any(line in warning for warning in found) for line in lines)

    def test_checkpointings_keys_are_known(self, write):
        run = {"activation_checkpointing": {"contiguous_memory_optimization": True, "foo": 1}}
        unknown, _ = warnings(load("gpt2", write(DEEPSPEED | run, "ds.json")))
        assert unknown.endswith("unknown to memcalc, ignored: activation_checkpointing.foo")

    def test_the_command_line_is_heard_before_the_run_file_and_that_before_the_models(self, write):
        run = write(f"torchrun x.py {TOY} --tensor-model-parallel-size 2", "run.sh")
        config = load("22b", run, micro_batch_size=4)
        assert config.model.name == "22b"
        assert (config.parallel.tp, config.run.seq_length) == (2, 128)
        assert (config.run.micro_batch_size, config.run.precision) == (4, "bf16")
        assert config.run.implementation.name == "megatron"
        assert "only parallelism and run settings are read from run, not its model" in assumed(
            config
        )

    def test_a_run_without_a_model_says_so_where_one_is_needed(self, write, memcalc):
        for content, name in [
            (DEEPSPEED, "ds.json"),
            ({"memcalc": 1, "run": {"seq_length": 8}}, "run.json"),
            ("torchrun x.py --micro-batch-size 1 --bf16 --swiglu", "run.sh"),
            ("pipe_parallel_size: 2", "run.yml"),
            ("parallelism: {tp: 2}", "run.yaml"),
        ]:
            path = write(content, name)
            outcome = memcalc(f"layer {path}")
            assert outcome.status == 2
            assert outcome.err.strip() == (
                f"memcalc: {path}: the file has run settings but no model: name a MODEL, and "
                "pass this file with --run"
            )
            assert memcalc(f"ledger gpt2 --run {path}").status == 0

    def test_a_run_is_a_path(self):
        with pytest.raises(ConfigError, match="run must be a path, not a int"):
            load("22b", 3)

    def test_yaml_is_not_loaded_until_it_is_read(self, tmp_path):
        code = "import sys, memcalc; memcalc.load('22b'); print('yaml' in sys.modules)"
        done = python("-c", code, cwd=tmp_path, check=True)
        assert done.stdout == "False\n"


class TestHostileYaml:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("MODEL_ARGS: " + "[" * 100_000, "nested more than 32 levels deep"),
            ("{a: " * 50_000, "nested more than 32 levels deep"),
            ("a: &a [x]\nb: [*a, *a]", "YAML anchors are not accepted (line 1)"),
            ("a: *a", "YAML anchors are not accepted (line 1)"),
            ("a: 1\n---\nb: 2", "more than one YAML document"),
            ("a: 1\na: 2", "the key 'a' is given twice, with different values"),
            ("a: [", "not YAML: "),
            ("%", "not YAML: "),
            ("'\\x", "not YAML: "),
            ("# nothing", "must be YAML, or a launch script"),
            ("[1, 2]", "must be YAML, or a launch script"),
            (
                "a: !!python/object/apply:os.system ['touch /tmp/x']",
                "unknown format; known formats",
            ),
            ("a: " + "- " * 100_000, "not YAML: "),
            ("\n".join(f"k{i}: 1" for i in range(12_000)), "YAML of more than 20000 values"),
            ("a: " + "x" * 2_000_000, "YAML of more than 262144 characters"),
            ("MODEL_ARGS: 3", "MODEL_ARGS must map arguments to values"),
            ("MODEL_ARGS: {--num-layers: {a: 1}}", "--num-layers must be a value or a list"),
            ("parallelism: 3", "parallelism must be a section of keys and values"),
            ("model_parallel_size: 99999999999999999999", "must be a whole number"),
            ("\x07: 1", "not YAML: "),
            ("a: 1\0", "not text"),
            (b"\xff\xfea", "not UTF-8 text"),
        ],
        ids=lambda value: str(value)[:14],
    )
    def test_it_is_one_clear_line_soon(self, write, text, message):
        path = write(text, "x.yaml")
        start = time.monotonic()
        with pytest.raises(MemcalcError) as caught:
            load(path)
        assert time.monotonic() - start < 20
        assert message in str(caught.value)
        assert str(caught.value).startswith(path)
        assert "\n" not in str(caught.value)


SCRIPT = f"""#!/bin/bash
N=${{LAYERS:-12}}; A=(--bf16 "--swiglu")
if [[ "$N" == "12" ]]; then A+=(--vocab-size 1000) ; else A=() ; fi
torchrun --nproc_per_node 8 x.py {" ".join(DEEPSEEK.split())} ${{A[@]}} "$N" $(date) $((1+2)) > log
"""
PIECES = st.sampled_from(
    [
        *("'", '"', "`", "$(", "${", "}", ")", "((", "\\", "\n", "if ", "fi\n", "then ", "<<E\n"),
        *("--num-layers ", "--", "[0]*9", ": ", "{", "[", "- ", "&a ", "*a ", "!!int ", "#", "\t"),
        *("99999999999999999999", "-1", "null", "true", "é", "\x00", "\x01", "$N", "A+=($N)"),
        *("A=$A$A\n", "elif ", "done ", "&& ", "|| ", "[[ ", "]] ", "=", "\r\n", "1e9", ","),
    ]
)
CUTS = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 40), PIECES), max_size=8)


def refusal(read, path):
    """What is said where a file is refused, else its warnings. Another error goes through."""
    try:
        found = read(path)
    except (ConfigError, InputError) as error:
        return str(error)
    return "".join([*assumed(found), *found.unmodelled])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.sh", SCRIPT),
        ("x.yaml", as_yaml(DEEPSEEK)),
        ("neox.yml", NEOX_20B),
        ("nano.yaml", NANOTRON),
        ("ds.json", json.dumps(DEEPSPEED)),
    ],
)
@settings(
    max_examples=int(os.environ.get("MEMCALC_FUZZ", "200")),
    derandomize="MEMCALC_FUZZ" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cuts=CUTS)
def test_whatever_a_file_holds_it_is_read_or_refused_in_one_line(tmp_path, name, text, cuts):
    for at, length, piece in cuts:
        text = text[:at] + piece + text[at + length :]
    path = tmp_path / name
    path.write_text(text)
    for read in (load, lambda path: load("gpt2", path), readers.read_run):
        said = refusal(read, path)
        assert said.isprintable()
