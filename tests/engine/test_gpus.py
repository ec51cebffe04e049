"""The catalog of GPUs: its rows, names as people and drivers write them, and every command."""

import re
from math import log2

import pytest

from memcalc import resources
from memcalc.analysis.buffers import lasting, unknown
from memcalc.analysis.onchip import missing
from memcalc.analysis.rank import Rank
from memcalc.config import load
from memcalc.config.gpus import aliases, gpu, gpus, is_gpu, smallest
from memcalc.errors import ConfigError

KIB, MIB, GIB, TERA = 2**10, 2**20, 2**30, 10**12
NAMES = [each.name for each in gpus()]
SOURCES = ("source", "memory_source", "chip_source")
ROWS = {row["name"]: row for row in resources.rows("gpus.csv")}

# Of an SM, by compute capability times 10: the most shared memory in KiB. The register file has
# 256 KiB in all of them (NVIDIA CCCL, cuda/__device/arch_traits.h).
SHARED = {52: 96, 60: 64, 70: 96, 75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 103: 228}
SHARED[120] = 100

# fp32 cores of an SM, by compute capability times 10 (NVIDIA cuda-samples, Common,
# helper_cuda.h: _ConvertSMVer2Cores).
CORES = {60: 64, 70: 64, 75: 64, 80: 64} | dict.fromkeys((52, 86, 89, 90, 100, 103, 120), 128)


class TestRows:
    @pytest.mark.parametrize("name", NAMES)
    def test_every_cell_is_a_number_or_empty_and_the_sources_are_given(self, name):
        for key, cell in ROWS[name].items():
            if key not in ("name", "aliases", "usable_source", *SOURCES):
                assert re.fullmatch(r"[1-9][0-9]*|", cell), key
        assert all(ROWS[name][key].strip() for key in SOURCES)

    @pytest.mark.parametrize("name", NAMES)
    def test_every_number_is_plausible(self, name):
        found = gpu(name)
        assert 10 * GIB <= found.memory_bytes <= 300 * GIB
        assert found.memory_bytes - GIB <= found.usable_bytes <= found.memory_bytes
        assert found.usable_bytes < found.memory_bytes or not found.capability or name == "titan-x"
        assert bool(ROWS[name]["usable_bytes"]) == bool(ROWS[name]["usable_source"])
        assert 300 * 10**9 <= found.memory_bandwidth <= 10 * TERA
        for peak in (*found.peaks.values(), found.fp8_flops):
            assert peak is None or 50 * TERA <= peak <= 6000 * TERA
        assert found.fp32_flops is None or 5 * TERA <= found.fp32_flops <= 200 * TERA
        assert found.nvlink_bandwidth is None or 10**11 <= found.nvlink_bandwidth <= 2 * TERA
        assert found.sms is None or 20 <= found.sms <= 200
        assert found.l2_bytes is None or 3 * MIB <= found.l2_bytes <= 128 * MIB

    @pytest.mark.parametrize("name", NAMES)
    def test_the_memories_of_an_sm_are_those_of_its_compute_capability(self, name):
        found = gpu(name)
        if found.capability is None:
            assert (found.sms, found.register_bytes, found.shared_bytes) == (None, None, None)
        else:
            assert found.register_bytes == 256 * KIB
            assert found.shared_bytes == SHARED[found.capability] * KIB

    @pytest.mark.parametrize("name", NAMES)
    def test_a_peak_in_8_bits_is_twice_the_one_in_16(self, name):
        """Each was rounded by its vendor, to half a per cent at most; the L40S's by 1.2."""
        found = gpu(name)
        if found.fp8_flops:
            assert found.fp8_flops == pytest.approx(2 * found.peaks["bf16"], rel=0.013)

    @pytest.mark.parametrize("name", NAMES)
    def test_an_fp32_peak_is_that_of_all_cores_at_a_clock_of_1_to_2_7_ghz(self, name):
        """A core does a multiply-add, two FLOPs, per clock."""
        found = gpu(name)
        if found.capability and found.sms and found.fp32_flops:
            clock = found.fp32_flops / (2 * found.sms * CORES[found.capability])
            assert 10**9 <= clock <= 2.7 * 10**9

    @pytest.mark.parametrize("name", NAMES)
    def test_a_tensor_core_peak_is_a_power_of_2_times_the_fp32_peak(self, name):
        """Both at one clock, before Hopper; rounded to 1.3 per cent, as above."""
        found = gpu(name)
        if (found.capability or 0) < 90 and found.fp32_flops and found.peaks["fp16"]:
            power = log2(found.peaks["fp16"] / found.fp32_flops)
            assert abs(2 ** (power - round(power)) - 1) < 0.013

    @pytest.mark.parametrize(
        ("name", "mib", "bf16", "fp16", "fp8", "bandwidth"),
        [  # TFLOP/s of dense peaks and TB/s, from data sheets and white papers
            ("titan-x", 12212, None, None, None, 0.3365),
            ("p100", 16384, None, None, None, 0.732),
            ("v100", 32768, None, 125, None, 0.9),
            ("t4", 15360, None, 65, None, 0.32),
            ("rtx-3090", 24576, 71, 71, None, 0.936),
            ("a10", 23028, 125, 125, None, 0.6),
            ("a10g", 23028, 70, 70, None, 0.6),
            ("a30", 24576, 165, 165, None, 0.933),
            ("a40", 46068, 149.7, 149.7, None, 0.696),
            ("a6000", 49140, 154.8, 154.8, None, 0.768),
            ("a100-40gb", 40960, 312, 312, None, 1.555),
            ("a100", 81920, 312, 312, None, 2.039),
            ("a800", 81920, 312, 312, None, 2.039),
            ("l4", 23034, 121, 121, 242.5, 0.3),
            ("l40s", 46068, 362.05, 362.05, 733, 0.864),
            ("rtx-4090", 24564, 165.2, 165.2, 330.3, 1.008),
            ("rtx-6000-ada", 49140, 364.25, 364.25, 728.5, 0.96),
            ("rtx-5090", 32607, 209.5, 209.5, 419, 1.792),
            ("h100-pcie", 81559, 756, 756, 1513, 2.0),
            ("h100", 81559, 989, 989, 1979, 3.35),
            ("h100-nvl", 95830, 835.5, 835.5, 1670.5, 3.9),
            ("h800", 81559, 989, 989, 1979, 3.35),
            ("gh200", 97871, 989, 989, 1979, 4.0),
            ("h20", 97871, 148, 148, 296, 4.0),
            ("h200", 143771, 989, 989, 1979, 4.8),
            ("b200", 183359, 2250, 2250, 4500, 8.0),
            ("gb300", 284208, 2500, 2500, 5000, 8.0),
            ("b300", 275040, 2250, 2250, 4500, 8.0),
            ("mi250x", 65520, 191.5, 191.5, None, 1.6384),  # one of its two dies
            ("mi300x", 196592, 1307.4, 1307.4, 2614.9, 5.3),
            ("mi325x", 262144, 1307.4, 1307.4, 2614.9, 6.0),
        ],
    )
    def test_memory_is_the_drivers_and_peaks_are_the_data_sheets(
        self, name, mib, bf16, fp16, fp8, bandwidth
    ):
        found = gpu(name)
        assert found.memory_bytes // MIB == mib
        peaks = (found.peaks["bf16"], found.peaks["fp16"], found.fp8_flops)
        assert peaks == tuple(peak and round(peak * TERA) for peak in (bf16, fp16, fp8))
        assert found.memory_bandwidth == round(bandwidth * TERA)


class TestSmallest:
    @pytest.mark.parametrize(
        ("size", "name"),
        [
            (70 * GIB, "h100-sxm"),
            (round(79.11 * GIB), "h100-sxm"),
            (round(79.11 * GIB) + 1, "a100-80gb"),
            (45 * GIB, "a6000"),
            (90 * GIB, "h100-nvl"),
            (95 * GIB, "gh200"),
            (139 * GIB, "h200-sxm"),
        ],
    )
    def test_it_has_the_least_memory_of_those_that_hold_the_bytes(self, size, name):
        found = smallest(size)
        assert found is not None
        assert found.name == name

    def test_there_is_none_for_more_than_the_largest_holds(self):
        most = max(each.usable_bytes for each in gpus() if each.capability)
        assert smallest(most) is not None
        assert smallest(most + 1) is None

    def test_it_is_an_nvidia_gpu_with_tensor_cores(self):
        """A TITAN X has 12 GiB and a P100 has 16: neither is what anyone trains on today."""
        found = smallest(1)
        assert found is not None
        assert found.name == "t4"
        assert smallest(gpu("mi325x").memory_bytes) == gpu("b300")


class TestNames:
    @pytest.mark.parametrize(
        ("said", "name"),
        [
            ("A100", "a100-80gb"),
            ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
            ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
            ("NVIDIA A100 80GB PCIe", "a100-pcie"),
            ("NVIDIA A800-SXM4-80GB", "a800"),
            ("NVIDIA H100 80GB HBM3", "h100-sxm"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("h100-sxm5", "h100-sxm"),
            ("NVIDIA H200", "h200-sxm"),
            ("NVIDIA GH200 480GB", "gh200"),
            ("NVIDIA GH200 96GB HBM3", "gh200"),
            ("NVIDIA B200", "b200"),
            ("NVIDIA B300 SXM6 AC", "b300"),
            ("NVIDIA GeForce RTX 3090", "rtx-3090"),
            ("NVIDIA GeForce RTX 4090", "rtx-4090"),
            ("RTX4090", "rtx-4090"),
            ("4090", "rtx-4090"),
            ("rtx5090", "rtx-5090"),
            ("NVIDIA RTX A6000", "a6000"),
            ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA H100 NVL", "h100-nvl"),
            ("NVIDIA A10G", "a10g"),
            ("Tesla V100-SXM2-32GB", "v100-32gb"),
            ("Tesla P100-SXM2-16GB", "p100-16gb"),
            ("Tesla T4", "t4"),
            ("NVIDIA GeForce GTX TITAN X", "titan-x"),
            ("AMD Instinct MI300X", "mi300x"),
            ("AMD Instinct MI300X OAM", "mi300x"),
        ],
    )
    def test_people_and_drivers_may_write_it_their_way(self, said, name):
        assert gpu(said).name == name

    def test_no_two_gpus_share_a_name(self):
        names = [name for each in gpus() for name in (each.name, *aliases(each))]
        assert (
            len(names)
            == len(set(names))
            == sum(1 + len(row["aliases"].split()) for row in ROWS.values())
        )
        for each in gpus():
            assert all(gpu(name) is each for name in (each.name, *aliases(each)))

    @pytest.mark.parametrize(
        ("said", "hint"),
        [
            ("a1000", "did you mean 'a100'"),
            ("h10", "did you mean 'h100'"),
            ("NVIDIA H10O", "did you mean 'h100'?"),
            ("l4s", "did you mean 'l40s'"),
            ("rtx-4080", "did you mean 'rtx-4090'"),
            ("mi350x", "did you mean 'mi355x'"),
            ("TPUv5p", "`memcalc gpus` lists all"),
        ],
    )
    def test_a_mistyped_name_leads_to_names_and_aliases(self, said, hint):
        with pytest.raises(ConfigError) as refused:
            gpu(said)
        assert hint in str(refused.value)
        assert str(refused.value).endswith("`memcalc gpus` lists all")

    @pytest.mark.parametrize(
        "said", ["", " ", "-", "NVIDIA", "sxm", "H" * 5000, "a" * 50 + "100", "gpu\t", "\u0661"]
    )
    def test_what_is_no_name_is_no_gpu(self, said):
        assert not is_gpu(said)


class TestCommands:
    @pytest.mark.parametrize("name", NAMES)
    def test_memory_answers_for_every_gpu(self, memcalc, name):
        line = f"memory llama-3-8b -s 512 --implementation megatron --gpu {name} --format json"
        outcome = memcalc(line)
        assert outcome.status == 0
        assert outcome.document["rows"][0]["capacity_bytes"] == gpu(name).usable_bytes

    @pytest.mark.parametrize("name", NAMES)
    def test_rnn_answers_or_says_what_it_lacks(self, memcalc, name):
        outcome = memcalc(f"rnn --gpu {name} --format json")
        if lacking := missing(gpu(name)):
            assert outcome.status == 2
            assert f"the catalog lacks its {', '.join(lacking)}" in outcome.err
        else:
            assert {row["gpu"] for row in outcome.document["rows"]} == {name}

    @pytest.mark.parametrize("name", NAMES)
    def test_flops_answers_or_says_that_the_peak_is_not_known(self, memcalc, name):
        outcome = memcalc(f"flops llama-3-8b -s 512 --iteration-time 9 --gpu {name} --format json")
        if gpu(name).peaks["bf16"] is None:
            assert outcome.status == 2
            assert f"{name} has no known peak for bf16" in outcome.err
        else:
            assert outcome.document["rows"][0]["mfu_percent"] > 0

    def test_workspaces_of_an_amd_gpu_are_not_counted_and_named(self, memcalc):
        config = load("llama-3-8b", implementation="megatron", gpu="mi300x")
        assert unknown(config) == ["cuBLAS", "Transformer Engine"]
        line = "memory llama-3-8b -s 512 --implementation megatron --gpu mi300x --format json"
        notes = memcalc(line).document["notes"]
        assert (
            "not counted: workspaces of cuBLAS and Transformer Engine, which are known for NVIDIA "
            "GPUs only"
        ) in notes
        assert "mi300x: CUDA context and NCCL are estimated as on NVIDIA GPUs" in notes

    @pytest.mark.parametrize(
        ("name", "pytorch", "cublas", "engine"),
        [  # MiB: of one of PyTorch's two handles, and of Transformer Engine
            ("rtx-3090", None, 8.125, 4),  # 8.6
            ("rtx-4090", None, 8.125, 4),  # 8.9
            ("h100", "2.6", 32, 32),
            ("rtx-5090", "2.11", 8.125, 32),  # 12.0: PyTorch has 32 since 2.12
            ("rtx-5090", "2.12", 32, 32),
            ("b300", "2.12", 32, 32),
        ],
    )
    def test_workspaces_go_by_the_compute_capability(self, name, pytorch, cublas, engine):
        environment = {"pytorch": pytorch} if pytorch else {}
        config = load("llama-3-8b", implementation="megatron", gpu=name, environment=environment)
        sizes = {part.name: part.bytes for part in lasting(Rank(config, 0))}
        assert sizes["cuBLAS workspaces"] == 2 * cublas * MIB
        assert sizes["Transformer Engine workspace"] == engine * MIB
