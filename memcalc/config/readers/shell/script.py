"""The commands of a script: its control flow, followed as far as its tests are known."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from memcalc.config.readers.shell.conditions import both, negated, test
from memcalc.config.readers.shell.expand import Variables
from memcalc.config.readers.shell.lexer import ASSIGNMENT, Array, Lexer, Word, assigned, bare
from memcalc.config.readers.shell.marks import unknown
from memcalc.errors import InputError

MAX_CHARACTERS = 2**18  # launch scripts have some thousands
_DECLARING = ("export", "local", "declare", "readonly", "typeset")
_LOOPS = ("for", "while", "until", "select", "case")


@dataclass
class Script:
    """The commands and variables of a script.

    Attributes:
        commands: For each command, whether it certainly runs, and its words.
        variables: The values of the variables at the end.
    """

    commands: list[tuple[bool, list[str]]] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)


def read(text: str) -> Script:
    r"""Read the commands of a script, with their words expanded.

    Raises:
        InputError: A quote or a bracket is not closed, or the script or its expansions are too
            large.

    >>> script = read('N=8\nARGS=(--layers ${L:-12} --tp $N)\ntorchrun x.py "${ARGS[@]}"')
    >>> script.commands
    [(True, ['torchrun', 'x.py', '--layers', '12', '--tp', '8'])]
    >>> from memcalc.config.readers.shell.marks import opened
    >>> [opened(word) for word in read('run --size $1 --date $(date)').commands[0][1]]
    [[], [], ['$1'], [], ['$(date)']]
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"a script of more than {MAX_CHARACTERS} characters is not read")
    return _Reader().read(text.replace("\r\n", "\n"))


@dataclass
class _If:
    """An ``if`` or a loop being read. Each state is true, false, or None where it is unknown."""

    outside: bool | None  # whether the block itself runs
    tested: bool | None = None  # the result of the last test
    taken: bool | None = False  # whether an earlier branch runs
    testing: bool = True


class _Reader:
    """Follows a script's assignments and collects its commands."""

    def __init__(self) -> None:
        self.script = Script()
        self.variables = Variables()
        self.active: bool | None = True
        self.blocks: list[_If] = []

    def read(self, text: str) -> Script:
        link, result = "", None
        words: list[Word | Array] = []
        for token in chain(Lexer(text).tokens(), ["\n"]):
            if not isinstance(token, str):
                words.append(token)
                continue
            if words:
                result = self._command(words, link, result)
                words = []
                link = ""
            if token in ("&&", "||"):
                link = token
        self.script.variables = self.variables.values
        return self.script

    def _command(self, words: list[Word | Array], link: str, before: bool | None) -> bool | None:
        """Read one command, and return its result where that is known."""
        words = self._keywords(words)
        testing = bool(self.blocks) and self.blocks[-1].testing
        if not words:
            return before
        active = self.active
        if link:
            active = both(active, before if link == "&&" else negated(before))
        result = self._simple(words, active, testing)
        if link == "&&":
            result = both(before, result)
        elif link == "||":
            result = negated(both(negated(before), negated(result)))
        if testing:
            self.blocks[-1].tested = result
        return result

    def _keywords(self, words: list[Word | Array]) -> list[Word | Array]:
        """The words after leading keywords."""
        for index, word in enumerate(words):
            keyword = bare(word)
            if keyword not in _KEYWORDS:
                return words[index:]
            _KEYWORDS[keyword](self)
            if keyword in _LOOPS:  # its words are not a command
                return []
        return []

    def _if(self) -> None:
        self.blocks.append(_If(self.active))

    def _loop(self) -> None:
        self.blocks.append(_If(self.active, testing=False))
        self.active = both(self.active, None)

    def _then(self) -> None:
        if self.blocks and self.blocks[-1].testing:
            self._branch(self.blocks[-1], self.blocks[-1].tested)

    def _elif(self) -> None:
        if self.blocks:
            self.blocks[-1].testing = True
            self.active = both(self.blocks[-1].outside, negated(self.blocks[-1].taken))

    def _else(self) -> None:
        if self.blocks:
            self._branch(self.blocks[-1], True)

    def _end(self) -> None:
        if self.blocks:
            self.active = self.blocks.pop().outside

    def _branch(self, block: _If, tested: bool | None) -> None:
        here = both(tested, negated(block.taken))
        block.taken = negated(both(negated(block.taken), negated(here)))
        block.testing = False
        self.active = both(block.outside, here)

    def _simple(self, words: list[Word | Array], active: bool | None, testing: bool) -> bool | None:
        if active is False:
            return None
        if bare(words[0]) in _DECLARING:
            words = [word for word in words[1:] if not (bare(word) or "").startswith("-")]
        first = next((at for at, word in enumerate(words) if not assigned(word)), len(words))
        rest = words[first:]
        if not rest:
            for word in words:
                self._assign(word, active)
            return True
        given = [text for word in rest for text in self.variables.fields(word)]
        if given and given[0] in ("[", "[[", "test"):
            return test(given)
        self.script.commands.append((active is True, given))
        return None if testing else True

    def _assign(self, word: Word | Array, active: bool | None) -> None:
        if isinstance(word, Array):
            name, append = word.name, word.append
            value = [text for each in word.words for text in self.variables.fields(each)]
        else:
            match = ASSIGNMENT.match(word[0].body)
            assert match is not None
            name, append = match[1], bool(match[2])
            first = word[0]._replace(body=word[0].body[match.end() :])
            value = ["".join(self.variables.value(part) for part in (first, *word[1:]))]
        old = self.variables.values.get(name, [])
        if append and isinstance(word, Array):
            value = old + value
        elif append:
            value = ["".join([*old[:1], *value]), *old[1:]]
        if append:
            self.variables.spend(sum(map(len, value)) + len(value))
        if active is None and value != old:
            added = isinstance(word, Array) and append
            self.script.commands.append((False, value[len(old) :] if added else value))
            if not append:
                value = [unknown(f"${name}")]
            elif isinstance(word, Array):
                value = old
            else:
                value = [*(old or [""])[:1], unknown(f"${name}")]
                value = ["".join(value)]
        self.variables.values[name] = value


_KEYWORDS: dict[str | None, Callable[[_Reader], None]] = {
    "if": _Reader._if,
    "then": _Reader._then,
    "elif": _Reader._elif,
    "else": _Reader._else,
    "fi": _Reader._end,
    "do": lambda _: None,
    "done": _Reader._end,
    "esac": _Reader._end,
    "{": lambda _: None,
    "}": lambda _: None,
    "time": lambda _: None,
    **dict.fromkeys(_LOOPS, _Reader._loop),
}
