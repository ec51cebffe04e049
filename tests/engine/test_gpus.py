"""The catalogue of GPUs: its rows, names as people and drivers write them, and the smallest."""

import pytest

from memcalc.config.gpus import gpu, gpus, smallest

MIB, GIB = 2**20, 2**30


class TestSmallest:
    @pytest.mark.parametrize(
        ("size", "name"),
        [
            (70 * GIB, "h100-sxm"),
            (81559 * MIB, "h100-sxm"),
            (81559 * MIB + 1, "a100-80gb"),
            (143771 * MIB, "h200-sxm"),
        ],
    )
    def test_it_has_the_least_memory_of_those_that_hold_the_bytes(self, size, name):
        found = smallest(size)
        assert found is not None
        assert found.name == name

    def test_there_is_none_for_more_than_the_largest_holds(self):
        most = max(each.memory_bytes for each in gpus() if each.capability)
        assert smallest(most) is not None
        assert smallest(most + 1) is None

    def test_it_is_no_gpu_without_tensor_cores(self):
        """A TITAN X has 12 GiB and a P100 has 16: neither is what anyone trains on today."""
        found = smallest(1)
        assert found is not None
        assert found.name not in ("titan-x", "p100-16gb")


class TestNames:
    @pytest.mark.parametrize(
        ("said", "name"),
        [
            ("A100", "a100-80gb"),
            ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
            ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("Tesla V100-SXM2-32GB", "v100-32gb"),
            ("Tesla T4", "t4"),
            ("NVIDIA B200", "b200"),
        ],
    )
    def test_a_drivers_name_is_the_same_gpu(self, said, name):
        assert gpu(said).name == name
