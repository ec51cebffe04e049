"""On chip: capacities, rooflines, and the published persistent kernels."""

from fractions import Fraction
from math import isqrt

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import is_refused

import memcalc as library
from memcalc import rnn_formulas
from memcalc.analysis.onchip import (
    Chip,
    Storage,
    fit,
    largest,
    missing,
    step_seconds,
    storages,
)
from memcalc.checks.claims import claims
from memcalc.config.gpus import gpu, gpus
from memcalc.config.recurrent import CELLS, OnChip, Recurrent
from memcalc.errors import ConfigError, UsageError
from memcalc.figures import onchip as figure

MIB = 2**20
GATES = {"vanilla": 1, "gru": 3, "lstm": 4}


def held(name, cell="vanilla", hidden=2304, batch=4, storage=-1, layers=1, **options):
    asked = OnChip(**options)
    config = Recurrent(cell=cell, hidden_size=hidden, batch_size=batch, layers=layers)
    return fit(config, Chip.of(gpu(name), asked), storages(asked)[storage], asked)


def test_what_is_on_chip_is_what_the_vendor_states():
    """NVIDIA's tables: register file of a GPU in KB, L2 in KB, shared memory of an SM in KB.

    P100, V100, A100: A100 white paper; H100 (SXM, PCIe): Hopper Architecture In-Depth, table 3.
    TitanX: V100 white paper, table 1 (GM200); T4: Turing white paper (40 SMs), and 512 KB of L2 for
    each 32 of its 256 bits to memory; H200: cudnn-frontend (132 SMs), and GH100 with its six stacks
    of memory; B200: cuda-rust (148 SMs), and the Blackwell Tuning Guide (126 MB).
    """
    tables = {
        "titan-x": (24 * 256, 3072, 96),
        "p100-16gb": (14336, 4096, 64),
        "v100-32gb": (20480, 6144, 96),
        "t4": (40 * 256, 4096, 64),
        "a100-40gb": (27648, 40960, 164),
        "a100-80gb": (27648, 40960, 164),
        "h100-sxm": (33792, 50 * 1024, 228),
        "h100-pcie": (29184, 50 * 1024, 228),
        "h200-sxm": (132 * 256, 60 * 1024, 228),
        "b200": (148 * 256, 126 * 1024, 228),
    }
    for name, (registers, l2, shared) in tables.items():
        found = gpu(name)
        assert found.sms * found.register_bytes == registers * 1024, name
        assert (found.l2_bytes, found.shared_bytes) == (l2 * 1024, shared * 1024), name
    assert gpu("gp100") == gpu("p100")


class TestPublishedDenseKernels:
    """baidu-research/persistent-rnn: its largest layers and, of its tiles, weights of a thread."""

    @pytest.mark.parametrize(
        ("name", "width", "published", "bound"),
        [("titan-x", 4, 1152, 1254), ("gp100", 4, 1792, 1915), ("gp100", 2, 2432, 2709)],
    )
    def test_their_largest_layers_are_below_the_bound_and_near_it(
        self, name, width, published, bound
    ):
        found = held(name, hidden=published, storage=0, value_bytes=width)
        assert found.largest == bound
        assert found.largest == isqrt(gpu(name).sms * 2**18 // width)
        assert published < bound
        assert found.weight_bytes == width * published**2
        assert found.weight_bytes >= Fraction(80, 100) * width * bound**2
        assert found.resident_in == "registers"

    @pytest.mark.parametrize(
        ("name", "tile", "threads", "width", "percent"),
        [
            ("titan-x", 216, 256, 4, 84.4),
            ("gp100", 224, 256, 4, 87.5),
            ("gp100", 176, 640, 2, 85.9),
        ],
    )
    def test_their_tiles_fill_that_much_of_the_registers(self, name, tile, threads, width, percent):
        share = Fraction(tile * threads * width, gpu(name).register_bytes)
        assert round(float(100 * share), 1) == percent


class TestPublishedSparseKernels:
    def test_2304_at_30_percent_needs_these_shares_of_a_p100(self):
        shares = {}
        for way in storages(OnChip()):
            size = way.bytes(2304**2)
            shares[way.label] = round(float(100 * size / (56 * 2**18)), 1)
        assert shares == {"dense 4": 144.6, "30% 2+2": 43.4, "30% 4+4": 86.8}

    @pytest.mark.parametrize(("usable", "where"), [(0.868, "registers"), (0.867, "shared")])
    def test_in_8_byte_pairs_it_fits_from_86_8_percent_on(self, usable, where):
        assert held("p100", value_bytes=4, usable=usable).resident_in == where

    def test_one_percent_of_5760_fits_on_45_of_its_sms(self):
        found = held("p100", hidden=5760, batch=2, densities=0.01, sms=45)
        assert found.resident_in == "registers"
        assert round(float(found.weight_bytes / MIB), 2) == 2.53
        assert found.state_bytes_per_sm == 45 * 1024

    @pytest.mark.parametrize(
        ("density", "value", "ratio"),
        [(0.3, 2, "3.33"), (0.3, 4, "1.67"), (0.1, 2, "10.00"), (0.1, 4, "5.00")],
    )
    def test_weights_of_a_layer_over_those_of_a_dense_one_of_its_bytes(self, density, value, ratio):
        *_, pair = storages(OnChip(densities=(density,), value_bytes=value))
        assert f"{float(4 * 2304**2 / pair.bytes(2304**2)):.2f}" == ratio

    def test_every_row_names_its_gpu_its_share_and_its_bytes(self):
        for claim in claims():
            if claim.id.startswith("zhu2018/") and claim.quantity.startswith("largest/"):
                assert "100" in claim.explanation
                assert "u = " in claim.explanation
                assert "bytes per non-zero" in claim.explanation


class TestCapacity:
    @settings(deadline=None)
    @given(
        st.sampled_from(CELLS),
        st.sampled_from([each.name for each in gpus() if not missing(each)]),
        st.integers(1, 3),
        st.sampled_from([0.01, 0.1, 0.3, 0.77, 1]),
        st.sampled_from([0.5, 0.875, 1]),
        st.sampled_from([1, 2, 4, 8]),
    )
    def test_the_largest_hidden_size_is_the_closed_form(
        self, cell, name, layers, density, usable, value
    ):
        found = held(
            name, cell, layers=layers, densities=(density,), usable=usable, value_bytes=value
        )
        stored = Fraction(str(density)) * 2 * value * GATES[cell] * layers
        room = Fraction(str(usable)) * gpu(name).sms * 2**18
        assert found.largest == isqrt(int(room / stored))

    @settings(deadline=None)
    @given(st.sampled_from(CELLS), st.integers(1, 64), st.sampled_from([0, 2, 4]))
    def test_one_more_does_not_fit(self, cell, batch, width):
        options = {"activation_bytes": width, "usable": 0.9}
        found = held("v100", cell, batch=batch, **options)
        sizes = [(found.largest, "registers"), (found.largest_with_shared, "shared")]
        for size, where in sizes:
            if size > found.largest or where == "registers":
                assert held("v100", cell, size, batch, **options).resident_in == where
                assert held("v100", cell, size + 1, batch, **options).resident_in != where
        if width:
            most = found.largest_states
            assert most == 96 * 1024 // (batch * width)
            assert held("v100", cell, most, batch, **options).states_fit
            assert not held("v100", cell, most + 1, batch, **options).states_fit
        else:
            assert found.largest_states is None

    @pytest.mark.parametrize("cell", CELLS)
    def test_the_formulas_are_the_numbers_and_each_others_inverse(self, cell):
        forms = dict(rnn_formulas.on_chip(Recurrent(cell=cell, layers=2)))
        letters = {x: getattr(rnn_formulas, x) for x in "hbuMRSDBw"}
        sizes = {
            "b": 4,
            "u": Fraction(7, 8),
            "M": 56,
            "R": 2**18,
            "S": 2**16,
            "D": Fraction(3, 10),
            "B": 8,
            "w": 4,
        }
        at = {letters[x]: sympy.Rational(str(value)) for x, value in sizes.items()}
        found = held("p100", cell, layers=2, usable=0.875, value_bytes=4)
        assert int(forms["largest hidden size"].subs(at)) == found.largest
        with_shared = forms["largest hidden size, registers and shared memory"]
        assert int(with_shared.subs(at)) == found.largest_with_shared
        with_states = forms["largest hidden size whose hidden states fit"]
        assert int(with_states.subs(at)) == found.largest_states
        h, density, share = (letters[x] for x in "hDu")
        largest_h = forms["largest hidden size"]
        assert sympy.simplify(forms["largest density"].subs(h, largest_h) - density) == 0
        assert sympy.simplify(forms["share of registers needed"].subs(h, largest_h) - share) == 0
        gates = GATES[cell] * 2
        printed = sympy.sqrt(
            letters["u"] * letters["M"] * letters["R"] / (density * letters["B"] * gates)
        )
        assert sympy.simplify(largest_h - printed) == 0

    def test_nothing_fits_where_not_even_one_weight_does(self):
        assert largest(lambda h: False) == 0


class TestRoofline:
    """GP100: 10.6 TFLOP/s, 732 GB/s, 4 MiB of L2; h 2304, b 4, density 30 %, pairs of 4 + 4."""

    NONZEROS = Fraction(3, 10) * 2304**2

    def test_gemms_alone_bound_a_step_on_chip(self):
        found = held("p100")
        assert found.flops == 2 * 4 * self.NONZEROS
        assert found.resident_seconds == found.flops / Fraction(10600000000000)

    def test_streamed_weights_come_from_memory(self):
        assert held("p100").streamed_seconds == 8 * self.NONZEROS / 732000000000

    def test_weights_that_fit_in_l2_are_not_read_from_memory(self):
        found = held("p100", densities=0.05)
        assert found.weight_bytes < 4 * MIB
        assert found.streamed_seconds == found.flops / Fraction(10600000000000)
        known = held("p100", densities=0.05, l2_bandwidth=1e12)
        assert known.streamed_seconds == (known.l2_traffic_bytes + known.weight_bytes) / 10**12

    def test_every_sm_reads_all_hidden_states_through_l2(self):
        assert held("p100").l2_traffic_bytes == (56 + 1) * 2304 * 4 * 4

    def test_the_synchronization_is_added_to_both(self):
        without, with_ = held("p100"), held("p100", sync_seconds=2e-6)
        wait = Fraction(2, 10**6)
        assert with_.resident_seconds == without.resident_seconds + wait
        assert with_.streamed_seconds == without.streamed_seconds + wait

    def test_what_does_not_fit_has_no_time_on_chip(self):
        assert held("p100", storage=0).resident_in == "memory"
        assert held("p100", storage=0).resident_seconds is None

    def test_fewer_sms_do_less(self):
        whole, part = held("p100", densities=0.1), held("p100", densities=0.1, sms=28)
        assert part.resident_seconds == 2 * whole.resident_seconds

    def test_another_peak_may_be_given(self):
        assert (
            held("p100", peak_flops=21.2e12).resident_seconds == held("p100").resident_seconds / 2
        )

    def test_a_step_takes_its_longest_part(self):
        chip = Chip(1, 0, Fraction(1), 0, Fraction(10), 5, 100, Fraction(20))
        seconds = [
            step_seconds(chip, Fraction(30), Fraction(0), Fraction(0)),
            step_seconds(chip, Fraction(0), Fraction(80), Fraction(0)),
            step_seconds(chip, Fraction(0), Fraction(0), Fraction(200)),
        ]
        assert seconds == [3, 4, 40]


class TestCommand:
    def test_an_assumption_names_the_option_that_changes_it(self, memcalc):
        notes = memcalc("rnn --format json").document["notes"]
        assumed = " ".join(note for note in notes if note.startswith("assumed"))
        for option in ("--value-bytes", "--index-bytes", "--activation-bytes"):
            assert option in assumed
        said = " ".join(notes)
        for option in ("--usable", "--sms", "--peak-flops", "--l2-bandwidth", "--sync"):
            assert option in said

    def test_what_was_asked_for_is_not_assumed(self, memcalc):
        line = "rnn --value-bytes 2 --activation-bytes 2 --hidden-size 9 --density 0.1 --gpu t4"
        notes = memcalc(f"{line} --format json").document["notes"]
        (assumed,) = (note for note in notes if note.startswith("assumed"))
        assert assumed.startswith("assumed: one layer on chip (--layers)")

    def test_a_published_value_that_was_overridden_is_not_assumed(self, memcalc):
        notes = memcalc("rnn --gpu v100 --density 0.1 --format json").document["notes"]
        (assumed,) = (note for note in notes if note.startswith("assumed, from"))
        assert assumed.startswith("assumed, from the abstract of Zhu et al. 2018: h 2304 and b 4 (")
        assert not any(word in assumed for word in ("30 %", "P100"))

    def test_a_note_names_gpus_whose_shared_memory_the_states_exceed(self, memcalc):
        """2304 x 64 x 4 bytes are 576 KiB: more than the 64 KiB of a P100, or a B200's 228."""
        notes = memcalc("rnn -b 64 --gpu p100 --gpu b200 --format json").document["notes"]
        (told,) = (note for note in notes if note.startswith("does not fit"))
        assert "(576 KiB)" in told
        assert "of p100-16gb, b200;" in told
        others = memcalc("rnn --format json").document["notes"]
        assert not any(note.startswith("does not fit") for note in others)

    def test_a_repeated_gpu_or_density_is_shown_once(self, memcalc):
        rows = memcalc(
            "rnn --gpu p100 --gpu gp100 --density 0.1 --density 0.1 --value-bytes 2 --format json"
        ).document["rows"]
        assert [row["storage"] for row in rows] == ["dense 2", "10% 2+2"]

    def test_the_largest_size_is_never_where_the_search_ends(self):
        """The least that is allowed of density and bytes, on the largest chip."""
        found = held("b200", densities=1e-6, value_bytes=0.125, index_bytes=0)
        assert found.largest == isqrt(148 * 2**18 * 8 * 10**6)

    def test_there_is_a_row_per_gpu_and_storage(self, memcalc):
        rows = memcalc("rnn --gpu v100 --gpu t4 --format json").document["rows"]
        assert [(row["gpu"], row["storage"]) for row in rows] == [
            (name, storage)
            for name in ("v100-32gb", "t4")
            for storage in ("dense 4", "30% 2+2", "30% 4+4")
        ]

    def test_there_is_a_row_per_density(self, memcalc):
        line = "rnn --density 0.1 --density 0.01 --value-bytes 2 --format json"
        rows = memcalc(line).document["rows"]
        assert [row["storage"] for row in rows] == ["dense 2", "10% 2+2", "1% 2+2"]
        assert [row["density_percent"] for row in rows] == [100, 10, 1]
        assert [row["largest_hidden"] for row in rows] == [
            isqrt(56 * 2**18 // 2),
            isqrt(56 * 2**18 * 10 // 4),
            isqrt(56 * 2**18 * 100 // 4),
        ]

    def test_a_step_reads_weights_that_do_not_stay_on_chip(self, memcalc):
        rows = memcalc("rnn --format json").document["rows"]
        assert [row["step_memory_bytes"] for row in rows] == [4 * 2304**2, 0, 0]

    def test_training_names_the_best_spacing(self, memcalc):
        line = "rnn --scope training -s 100 --checkpoint-every 4 --format json"
        rows = memcalc(line).document["rows"]
        assert [row["checkpoints"] for row in rows] == ["none", "asked", "best"]
        state = 4 * 2304 * 4
        assert rows[0]["kept_bytes"] == 100 * state + 101 * state
        assert rows[1]["kept_bytes"] == 100 * state + 25 * state
        assert rows[2]["peak_bytes"] == min(row["peak_bytes"] for row in rows)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("--hidden 9", "no option --hidden; did you mean --hidden-size?"),
            ("--density 0", "density must be a number from 1e-06 to 1, not 0.0"),
            ("--density nan", "--density must be a number, not 'nan'"),
            ("--hidden-size 0", "--hidden-size must be a whole number from 1 to 16,777,216, not"),
            (
                f"--hidden-size {10**40}",
                "--hidden-size must be a whole number from 1 to 16,777,216",
            ),
            ("--usable 1.01", "usable must be a number from 1e-06 to 1"),
            ("--gpu v1000", "did you mean 'v100'"),
            ("--gpu p100 --sms 57", "--sms 57 is more than the 56 SMs of p100-16gb"),
            ("--shared-bytes 100000", "more than the 65536 bytes per SM of p100-16gb"),
            ("--sync -1", "sync seconds must be a number from 0 to 1"),
            ("--peak-flops inf", "--peak-flops must be a number, not 'inf'"),
            ("--index-bytes 9", "index bytes must be a number from 0 to 8"),
            ("--scope training", "--scope training needs --seq-length"),
            (
                "--scope training -s 5 --checkpoint-every 6",
                "--checkpoint-every 6 must be from 1 to --seq-length = 5",
            ),
            (
                "--scope training -s 5 --density 0.1",
                "--density needs --scope onchip, not training",
            ),
            ("-s 5", "--seq-length needs --scope training, not onchip"),
            (
                "--kernels torch-cuda",
                "--kernels needs --scope training, step or formula, not onchip",
            ),
            (
                "--scope formula --hidden-size 5",
                "--hidden-size needs --scope onchip, training or step, not formula",
            ),
        ],
    )
    def test_what_cannot_be_is_one_line_and_status_2(self, memcalc, line, message):
        outcome = memcalc(f"rnn {line}")
        is_refused(outcome, message)


def test_the_library_refuses_too():
    with pytest.raises(UsageError, match="did you mean 'training'"):
        library.rnn(scope="trainign")
    with pytest.raises(ConfigError, match="value bytes"):
        OnChip(value_bytes=0)
    with pytest.raises(ConfigError, match="usable must be a number from 1e-06 to 1, not None"):
        OnChip(usable=None)
    with pytest.raises(ConfigError, match="density must be a number"):
        OnChip(densities=("all",))


def test_the_figure_has_every_published_layer_on_or_below_its_gpus_curve():
    (left, right) = library.plot("onchip").axes
    points = {(p.density, p.hidden) for p in figure.published()}
    assert points == {
        (1.0, 1152),
        (1.0, 1792),
        (1.0, 2432),
        (0.3, 2304),
        (0.1, 2304),
        (0.1, 1792),
        (0.01, 5760),
    }
    for axes, width in ((left, 4), (right, 8)):
        curves = {line.get_label(): line for line in axes.lines if len(line.get_xdata()) > 10}
        assert set(curves) == {gpu(name).name for name in figure.GPUS}
        xs, ys = curves["p100-16gb"].get_data()
        assert (xs[0], xs[-1]) == (pytest.approx(1), pytest.approx(100))
        assert ys[-1] == isqrt(56 * 2**18 // width)
        assert ys[0] == isqrt(56 * 2**18 * 100 // width)
    drawn = {
        (round(x / 100, 4), y)
        for axes in (left, right)
        for line in axes.lines
        if line.get_marker() in ("o", "D")
        for x, y in zip(*line.get_data(), strict=True)
    }
    assert drawn == points


def test_a_pair_may_have_any_widths():
    assert [way.label for way in storages(OnChip(value_bytes=2, index_bytes=0.5))] == [
        "dense 2",
        "30% 2+0.5",
    ]
    assert storages(OnChip(index_bytes=1))[1] == Storage(Fraction(3, 10), Fraction(1), Fraction(1))


def test_a_gpu_whose_chip_is_not_known_is_refused(memcalc):
    outcome = memcalc("rnn --gpu gb200")
    assert (outcome.status, outcome.out) == (2, "")
    assert "rnn cannot answer for gb200: the catalog lacks its SMs, fp32 FLOP/s" in outcome.err
    assert "gb200" not in memcalc("rnn --gpu all --format csv").out
