"""Help, the names of options, what leads from a wrong one on, and completion by the shell."""

import os
import re
import subprocess
import sys

import click
import pytest
from shared import is_refused

from memcalc.cli import names
from memcalc.cli.command import GROUPS, Command, Option
from memcalc.cli.main import COMMANDS, cli
from memcalc.config import catalog
from memcalc.config.gpus import gpus
from memcalc.lazy import resolve

ALL = {name: resolve(reference) for name, (reference, _) in COMMANDS.items()}
KINDS = ALL.pop("plot").commands  # which stand in its help
ALL |= {f"plot {kind}": command for kind, command in KINDS.items()}
SAID = r"\w.*(\.  \[default: .+\]|\(required\)\.)$"  # what an option does, and its default


def shown(command):
    return [each for each in command.params if isinstance(each, click.Option)]


class TestHelp:
    @pytest.mark.parametrize("name", ALL)
    def test_every_option_says_its_default_and_what_it_does(self, name):
        assert isinstance(ALL[name], Command)
        for option in shown(ALL[name]):
            assert isinstance(option, Option), option.name
            assert option.required or re.search(SAID, option.help, re.S)

    @pytest.mark.parametrize("name", ALL)
    def test_no_range_and_no_type_of_python_is_printed(self, memcalc, name):
        text = memcalc(f"{name} --help").out
        assert not re.search(r"INTEGER|FLOAT|TEXT|RANGE|<=x<=|\bPATH\b", text)
        assert all(len(line) <= 90 for line in text.splitlines())

    @pytest.mark.parametrize("name", ALL)
    def test_no_name_of_an_option_or_a_choice_is_broken_at_the_end_of_a_line(self, memcalc, name):
        assert not re.search(r"\w-$", memcalc(f"{name} --help").out, re.M)

    def test_options_stand_in_named_groups_in_one_order(self, memcalc):
        text = memcalc("memory --help").out
        headings = re.findall(r"^(\w.*):$", text, re.M)
        assert tuple(headings) == GROUPS
        of = {heading: text.split(f"\n{heading}:\n")[1].split("\n\n")[0] for heading in GROUPS}
        assert "--tp " in of["Parallelism"]
        assert "--vpp " in of["Pipeline"]
        assert "--zero " in of["Sharding and optimizer"]
        assert "--recompute " in of["Recomputation"]
        assert "--attention " in of["Kernels"]
        assert "--seq-length " in of["Run"]
        assert "--vocab-size " in of["Model"]
        assert "--output " in of["Output"]

    @pytest.mark.parametrize("name", ALL)
    def test_the_short_help_has_usage_examples_and_the_way_to_all_options(self, memcalc, name):
        brief, full = memcalc(f"{name} -h"), memcalc(f"{name} --help")
        assert (brief.status, brief.err) == (0, "")
        assert brief.out.startswith(f"Usage: memcalc {name} ")
        assert f"  memcalc {name}" in brief.out
        number = len(shown(ALL[name])) + 2  # -h and --help
        assert f"`memcalc {name} --help` shows all {number} options." in brief.out
        assert len(brief.out) < len(full.out)
        assert "Documentation: " in full.out

    def test_the_short_help_of_the_largest_command_fits_on_one_screen(self, memcalc):
        assert memcalc("memory -h").out.count("\n") <= 50

    @pytest.mark.parametrize("name", [*ALL, "plot", ""])
    def test_help_command_is_command_help(self, memcalc, name):
        assert memcalc(f"help {name}") == memcalc(f"{name} --help")


class TestNames:
    @pytest.mark.parametrize("alias", names.ALIASES)
    def test_an_alias_is_an_option_of_memory_and_no_name_of_an_own_one(self, alias):
        known = {
            name for each in shown(ALL["memory"]) for name in (*each.opts, *each.secondary_opts)
        }
        assert names.ALIASES[alias][0] in known
        for command in ALL.values():
            assert not any(alias in each.opts for each in shown(command))

    @pytest.mark.parametrize(
        ("other", "own"),
        [
            (
                "--tensor-model-parallel-size 8 --pipeline-parallel-size=2 --sequence-parallel",
                "--tp 8 --pp 2 --sp",
            ),
            ("--data-parallel-size 4 --use-distributed-optimizer", "--dp 4 --zero 1"),
            ("--dp 4 --zero_stage 1", "--dp 4 --zero 1"),
            ("--seq-len 1024 --mbs 2 --gbs 64", "-s 1024 -b 2 --global-batch-size 64"),
            ("--max_seq_len 1024 --micro-batch 2", "-s 1024 -b 2"),
            ("--gradient-checkpointing", "--recompute full"),
            ("--recompute-activations", "--recompute selective"),
            (
                "--recompute-granularity full --recompute-num-layers 2",
                "--recompute full --recompute-layers 2",
            ),
            ("--bf16 --use-flash-attn", "--precision bf16 --attention flash"),
        ],
    )
    def test_names_of_other_tools_are_answered_as_our_own(self, memcalc, other, own):
        outcome = memcalc(f"memory llama-3-8b --json {other}")
        assert outcome.status == 0
        assert outcome == memcalc(f"memory llama-3-8b --format json {own}")

    @pytest.mark.parametrize("format_", ["json", "csv"])
    def test_a_format_is_an_option_too(self, memcalc, format_):
        assert memcalc(f"layer 22b --{format_}") == memcalc(f"layer 22b --format {format_}")

    @pytest.mark.parametrize("name", ALL)
    def test_help_names_aliases_of_options_that_the_command_has(self, memcalc, name):
        text = " ".join(memcalc(f"{name} --help").out.split())
        own = {word for each in shown(ALL[name]) for word in (*each.opts, *each.secondary_opts)}
        sentence = text.partition("Other tools' names work too:")[2].partition("Documentation")[0]
        assert ("--tp" in own) == bool(sentence)
        assert {names.ALIASES[alias][0] for alias in re.findall(names.OPTION, sentence)} <= own

    def test_a_suggestion_names_options_of_memory(self):
        own = {word for each in shown(ALL["memory"]) for word in (*each.opts, *each.secondary_opts)}
        assert {*re.findall(names.OPTION, " ".join(names.CONCEPTS.values()))} <= own

    def test_what_follows_two_dashes_is_no_option(self, memcalc):
        outcome = memcalc("layer -- --mbs")
        assert outcome.status == 2
        assert "'--mbs' is neither a model of the catalog nor a file" in outcome.err

    def test_aliases_are_in_one_line_of_help_and_nowhere_else(self, memcalc):
        text = " ".join(memcalc("memory --help").out.split())
        assert text.count("--tensor-model-parallel-size") == 1
        assert "--sequence-length" not in text


# Command line -> what its message leads to.
LEADS = {
    "memory 22b --lora": "adapters are not modeled; --frozen names the parts that are not trained",
    "memory 22b --offload": "--recompute offload offloads activations",
    "memory 22b --verbose": "`memcalc memory --explain`, which shows every part",
    "memory 22b --world-size 8": "the number of GPUs is --tp x --pp x --cp x --dp; set --dp",
    "memory 22b --batch 8": "use --micro-batch-size",
    "memory 22b --batch-size 8": "or --global-batch-size",
    "memory 22b --num-layers 8": "sizes come from MODEL",
    "memory 22b --fsdp": "use --zero 3 --sharder fsdp2",
    "memory 22b --seqlength 8": "did you mean --seq-length?",
    "memory 22b --tensor-paralel-size 8": "did you mean --tp?",
    "memory 22b --gradient-checkpoint": "did you mean --recompute full?",
    "memory 22b --micro 8": "did you mean --micro-batch-size or --microbatch-group-size?",
    "memory 22b -tp 8": "no option -tp; did you mean --tp?",
    "memory 22b --TP 8": "did you mean --tp?",
    "memory 22b --zzzz": "`memcalc memory --help` lists all",
    "layer 22b --budget 80GB": "`memcalc memory`, `memcalc recompute`, `memcalc trace` have it",
    "flops 22b --quiet": "no option --quiet; progress and warnings are on stderr",
    "plot -o x.png memory 22b": "KIND comes first: memcalc plot KIND [MODEL] -o FILE",
    "gpus --fill": "no option --fill; `memcalc memory`, `memcalc recompute` have it",
    "recompute 22b --explain": "no option --explain; `memcalc memory` has it",
    "flops 22b --fsdp": "no option --fsdp; in `memcalc memory`: use --zero 3 --sharder fsdp2",
    "layer 22b --world-size 8": "no option --world-size; in `memcalc memory`: the number of GPUs",
    "rnn --num-layers 3": "no option --num-layers; did you mean --layers?",
    "layer 22b --recompute-layers 3": "`memcalc memory`, `memcalc ledger`",
    "layer 22b --sequence-parallel": "drop --sp, or use `memcalc ledger --sp`",
    "layer bert": "did you mean 'bert-large'?",
    "175b": "no command '175b'; for a model, try `memcalc memory 175b` or `memcalc layer 175b`",
    "/": "for a model, try `memcalc memory /`",
    "memry 22b": "did you mean 'memory'?",
    "memory": "MODEL is missing: usage: memcalc memory [OPTIONS] MODEL; try `memcalc memory -h`",
    "backtest": "FILE is missing: usage: memcalc backtest",
}


@pytest.mark.parametrize("line", LEADS)
def test_a_wrong_name_leads_to_the_right_one_in_one_line(memcalc, line):
    outcome = memcalc(line)
    is_refused(outcome, LEADS[line])


def test_models_show_a_model_by_its_name_alone(memcalc):
    outcome = memcalc("models deepseek-v3")
    assert outcome == memcalc("models --show deepseek-v3")
    assert outcome.status == 0


class TestCompletion:
    """By the protocol that the shells' functions speak; theirs are click's."""

    def complete(self, shell, line, tmp_path, probe=""):
        words = line.split(" ")
        environment = {
            **os.environ,
            "_MEMCALC_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
        }
        code = f"import sys\nfrom memcalc.cli.main import main\nstatus = main()\n{probe}"
        done = subprocess.run(
            [sys.executable, "-c", f"{code}\nsys.exit(status)"],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("memcalc la", ["layer"]),
            ("memcalc --ver", ["--version"]),
            ("memcalc memory deepseek-v3", ["deepseek-v3"]),
            ("memcalc memory 22b --recompute-m", ["--recompute-method"]),
            ("memcalc memory 22b --attention f", ["flash"]),
            ("memcalc memory 22b --recompute mlp,no", ["mlp,none", "mlp,norm"]),
            ("memcalc memory 22b --frozen emb", ["embedding"]),
            ("memcalc layer 22b --sch", []),
        ],
    )
    def test_commands_options_choices_and_names_are_completed(self, tmp_path, line, expected):
        found = self.complete("bash", line, tmp_path)
        assert [x for x in found if x] == [f"plain,{word}" for word in expected]

    def test_every_model_and_command_is_completed(self, tmp_path):
        models = self.complete("bash", "memcalc layer ", tmp_path)
        assert models == [f"plain,{name}" for name in catalog.names()]
        commands = self.complete("bash", "memcalc ", tmp_path)
        assert commands == [f"plain,{name}" for name in COMMANDS]

    @pytest.mark.parametrize("option", ["--gpu", "--budget"])
    def test_every_gpu_is_completed(self, tmp_path, option):
        found = self.complete("bash", f"memcalc memory 22b {option} ", tmp_path)
        assert {f"plain,{each.name}" for each in gpus()} <= {*found}

    def test_where_no_model_begins_so_files_are_completed(self, tmp_path):
        assert self.complete("bash", "memcalc layer ./c", tmp_path) == ["file,./c"]

    def test_zsh_and_fish_are_answered_too(self, tmp_path):
        assert self.complete("zsh", "memcalc la", tmp_path)[:2] == ["plain", "layer"]
        assert self.complete("fish", "memcalc la", tmp_path)[0].startswith("plain,layer")

    @pytest.mark.parametrize("line", ["memcalc ", "memcalc memory ", "memcalc memory 22b --gpu h"])
    def test_completion_loads_nothing_heavy(self, tmp_path, line):
        heavy = {"sympy", "numpy", "pandas", "matplotlib", "torch", "rich"}
        probe = f"print('loaded:', *({heavy} & set(sys.modules)))"
        assert self.complete("bash", line, tmp_path, probe)[-1] == "loaded:"

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_each_shell_gets_its_script(self, memcalc, monkeypatch, capsys, shell):
        monkeypatch.setenv("_MEMCALC_COMPLETE", f"{shell}_source")
        assert resolve("memcalc.cli.main:main")() == 0
        assert "_memcalc_completion" in capsys.readouterr().out

    @pytest.mark.parametrize("line", ["memcalc zzz ", "memcalc plot zzz ", "memcalc plot -o x "])
    def test_after_a_wrong_word_nothing_is_completed(self, monkeypatch, capsys, line):
        monkeypatch.setenv("_MEMCALC_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
        assert resolve("memcalc.cli.main:main")() == 0
        assert capsys.readouterr() == ("", "")

    def test_what_is_no_line_to_complete_is_one_line(self, monkeypatch, capsys):
        monkeypatch.setenv("_MEMCALC_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", "memcalc")
        monkeypatch.setenv("COMP_CWORD", "x")
        assert resolve("memcalc.cli.main:main")() == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_another_shell_is_one_line(self, monkeypatch, capsys):
        monkeypatch.setenv("_MEMCALC_COMPLETE", "tcsh_source")
        assert resolve("memcalc.cli.main:main")() == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_bash_completes_in_earnest(self, tmp_path):
        """Bash itself runs its function for ``memcalc layer deepseek-v3``."""
        command = tmp_path / "memcalc"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memcalc "$@"\n')
        command.chmod(0o755)
        script = (
            'PATH="$PWD:$PATH"; eval "$(_MEMCALC_COMPLETE=bash_source memcalc)"\n'
            "COMP_WORDS=(memcalc layer deepseek-v3); COMP_CWORD=2\n"
            '_memcalc_completion memcalc; echo "${COMPREPLY[@]}"\n'
        )
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60
        )
        assert done.stdout == "deepseek-v3\n"


def test_the_group_itself_knows_no_command_until_it_is_asked():
    assert list(cli.commands) == []
