"""The training command of a launch script, with its arguments and its number of GPUs."""

import re
from collections.abc import Iterable

from memcalc.config.readers.keys import listed
from memcalc.config.readers.megatron.arguments import Arguments
from memcalc.config.readers.megatron.names import FLAGS, LAUNCHER, TELLING, is_harmless
from memcalc.config.readers.megatron.source import source
from memcalc.config.readers.shell import script as shell
from memcalc.config.readers.shell.marks import opened, shown
from memcalc.config.source import Source
from memcalc.errors import ConfigError, InputError


def read_script(text: str, name: str) -> Source:
    r"""Read a launch script; ``name`` is the model's name.

    Raises:
        InputError: Neither a command nor a variable of the script has Megatron-LM's arguments.
        ConfigError: Two arguments contradict each other, or a value is out of range.

    >>> script = "H=64\ntorchrun --nproc_per_node 8 x.py --num-layers 2 --hidden-size $H "
    >>> source = read_script(script + "--num-attention-heads 4 --micro-batch-size 1 --bf16", "x")
    >>> source.model.ffn_size, source.settings["dp"], source.settings["precision"]
    (256, 8, 'bf16')
    """
    script = shell.read(text)
    commands = _training(script)
    words, maybe = _options(commands)
    said = Arguments(words, _loose(command for certain, command in commands if certain))
    if maybe:
        said.unmodelled.append(
            "ignored, because they depend on a condition that the file does not decide: "
            f"{listed(maybe)}"
        )
    if said.loose:
        said.unmodelled.append(
            f"arguments may be missing: the file does not set {listed(said.loose)}"
        )
    programs = {word.rpartition("/")[2] for _, command in commands for word in command}
    return source(said, name, _world(said, script), programs)


def _training(script: shell.Script) -> list[tuple[bool, list[str]]]:
    """The training commands and what may be passed to them; without any, the variables."""
    commands = [(certain, _split(words)) for certain, words in script.commands]
    training = [_is_training(words) for _, words in commands]
    found = [each for each, trains in zip(commands, training, strict=True) if trains]
    if any(certain for certain, _ in found):
        return [
            (certain, words)
            for (certain, words), trains in zip(commands, training, strict=True)
            if trains or not certain
        ]
    if found:
        return [(True, words) for _, words in found]
    before: list[str] = []  # of each variable, the words before its first argument
    held: list[str] = []
    for values in script.variables.values():
        words = _split(values)
        first = next((i for i, word in enumerate(words) if _option(word)[0]), len(words))
        before += words[:first]
        held += words[first:]
    if held:
        return [(True, before + held)]
    raise InputError("no command with arguments such as --num-layers or --micro-batch-size")


def _is_training(words: Iterable[str]) -> bool:
    return any(_option(word)[0] in TELLING for word in words)


def _split(words: Iterable[str]) -> list[str]:
    """Words, with those split that hold several arguments for ``bash -c`` or ``eval``."""
    found: list[str] = []
    for word in words:
        found += word.split() if " --" in f" {word}" else [word]
    return found


def _option(word: str) -> tuple[str, str | None]:
    """The name and value of ``--name=value``; an empty name for words that are no argument."""
    match = re.match(r"--([A-Za-z][\w-]*)(?:=(.*))?$", word, re.DOTALL)
    return (match[1].replace("_", "-"), match[2]) if match else ("", None)


def _options(commands: Iterable[tuple[bool, list[str]]]) -> tuple[dict[str, list[str]], list[str]]:
    """The arguments of commands that run, and the names of those that may be passed."""
    words: dict[str, list[str]] = {}
    maybe: dict[str, None] = {}
    for certain, command in commands:
        for name, values in _command_options(command).items():
            if is_harmless(name):
                words.setdefault(name, values)
            elif not certain:
                maybe[name] = None
            elif words.setdefault(name, values) != values:
                both = " and ".join(shown(" ".join(v)) for v in (words[name], values))
                raise ConfigError(f"two commands have different values for --{name}: {both}")
    return words, [f"--{name}" for name in maybe if name not in words]


def _command_options(command: Iterable[str]) -> dict[str, list[str]]:
    """Arguments of one command; the last one of a name counts, as in Megatron's parser."""
    found: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in command:
        name, value = _option(word)
        if name:
            values = found[name] = [] if value is None else [_unquoted(value)]
        elif values is not None:
            values.append(_unquoted(word))
    return {name: values[:1] if name in LAUNCHER else values for name, values in found.items()}


def _unquoted(word: str) -> str:
    """A value without the quotes that are left inside an evaluated string."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _loose(commands: Iterable[list[str]]) -> list[str]:
    """Open values that may hold arguments rather than the value of one."""
    found: list[str] = []
    for command in commands:
        taken = 0  # values that the last argument may still take
        for word in command[1:]:
            name, value = _option(word)
            if name:
                many = name.startswith(("data", "train-data", "valid-data", "test-data"))
                taken = 0 if name in FLAGS or value is not None else len(command) if many else 1
            elif taken:
                taken -= 1
            elif word.startswith("\0") and word.count("\0") == 2:
                found += opened(word)
    return list(dict.fromkeys(found))


def _world(said: Arguments, script: shell.Script) -> int | None:
    """The number of GPUs that a script starts, where it says so."""

    def held(*names: str) -> str:
        found = [script.variables[name] for name in names if script.variables.get(name)]
        return found[0][0] if found else ""

    def given(name: str) -> str:
        return next(iter(said.words.get(name, ())), "")

    launched = (
        given("nproc-per-node") or given("num-gpus"),
        given("nnodes") or given("num-nodes") or "1",
    )
    variables = held("GPUS_PER_NODE", "NPROC_PER_NODE"), held("NNODES", "NUM_NODES")
    for pair in (launched, variables, (held("WORLD_SIZE"), "1")):
        if all(re.fullmatch(r"[0-9]{1,6}", each) for each in pair):
            return int(pair[0]) * int(pair[1])
    return None
