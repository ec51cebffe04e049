"""Shell scripts, read and never run: the arguments that each command would receive.

Assignments, arrays, quotes, line continuations, ``${X:-default}`` and integer arithmetic are
evaluated, and ``if`` where its test can be decided. What only a running shell knows (positional
parameters, the environment, command substitutions, loops) stays open: it is marked by name in the
words, and ``opened`` returns the names.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from memcalc.config import fields
from memcalc.errors import InputError

MAX_CHARACTERS = 2**18  # launch scripts have some thousands
MAX_EXPANDED = 2**20  # characters of all expansions of a script together
MAX_NESTED = 20  # levels of expansions within defaults of expansions, and of arrays
MAX_WORDS = 20_000

_SPACE = "\1"  # stands for a space in an open name, since words are split at spaces
_PLAIN = re.compile(r"[^\s\\'\"`$;&|<>()]+")
_PLAIN_QUOTED = re.compile(r'[^"\\$`]+')
_MARKS = re.compile(r"[\\'\"`(){}]|\$[({]")
_REDIRECTION = re.compile(r"&>>?|\d*(?:<<<|<<-?|>>|<>|[<>])[&|]?")
_OPERATOR = re.compile(r"&&|\|\||;;&?|[;&|()]")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BRACED = re.compile(
    r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[(?:[@*]|[0-9]{1,6})\])?(?:(:?[-=+?])(.*))?", re.DOTALL
)
_DECLARING = ("export", "local", "declare", "readonly", "typeset")
_LOOPS = ("for", "while", "until", "select", "case")


class Part(NamedTuple):
    """A piece of a word: literal text, or an expansion."""

    kind: str  # text, variable, command or arithmetic
    body: str
    quoted: bool


Word = list[Part]


class Array(NamedTuple):
    """``NAME=(words)`` or ``NAME+=(words)``."""

    name: str
    append: bool
    words: list[Word]


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
    >>> [opened(word) for word in read('run --size $1 --date $(date)').commands[0][1]]
    [[], [], ['$1'], [], ['$(date)']]
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"a script of more than {MAX_CHARACTERS} characters is not read")
    return _Reader().read(text.replace("\r\n", "\n"))


def unknown(name: str) -> str:
    """The mark, within a word, of a value that only a running shell knows."""
    return f"\0{shown(name).replace(' ', _SPACE)}\0"


def shown(text: str) -> str:
    """A text as a message shows it: the start, on one line, with open values by their names."""
    text = text[:40].replace("\0", "").replace(_SPACE, " ")
    return fields.printable(text, instead=" ")


def opened(word: str) -> list[str]:
    """The names of a word's open values."""
    return word.replace(_SPACE, " ").split("\0")[1::2]


class _Lexer:
    """Splits text into words, array assignments and operators, in order."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.count = 0
        self.arrays = 0  # how many are open
        self.here: list[str] = []  # delimiters of the here-documents that start on the next line

    def tokens(self) -> Iterator[Word | Array | str]:
        while self.at < len(self.text):
            rest = self.text[self.at]
            if rest == "\n":
                self.at += 1
                self._skip_here_documents()
                yield "\n"
            elif rest.isspace():
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif rest == "#":
                self.at = self._until("\n", self.at)
            elif match := _REDIRECTION.match(self.text, self.at):
                self.at = match.end()
                self._skip_target(match[0])
            elif match := _OPERATOR.match(self.text, self.at):
                self.at = match.end()
                yield match[0]
            else:
                yield self._word()

    def words(self) -> list[Word]:
        """The words up to the bracket that closes an array."""
        begin = self.at
        words: list[Word] = []
        for token in self.tokens():
            if token == ")":
                return words
            if isinstance(token, list):
                words.append(token)
        raise self._unclosed("(", begin)

    def _word(self) -> Word | Array:
        begin = self.at
        self.count += 1
        if self.count > MAX_WORDS:
            raise InputError(f"a script of more than {MAX_WORDS} words is not read")
        word: Word = []
        while self.at < len(self.text):
            first = self.text[self.at]
            if match := _PLAIN.match(self.text, self.at):
                word.append(Part("text", match[0], False))
                self.at = match.end()
            elif first == "(" and (match := _ASSIGNMENT.fullmatch(self.text, begin, self.at)):
                return self._array(match)
            elif first == "\\":
                if not self.text.startswith("\\\n", self.at):
                    word.append(Part("text", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif first == "'":
                word.append(Part("text", self._single(self.at), True))
            elif first == '"':
                word += self._double()
            elif first == "`":
                word.append(self._backquoted(False))
            elif first == "$":
                word.append(self._dollar(False))
            else:
                break
        return word

    def _array(self, assignment: re.Match[str]) -> Array:
        if self.arrays > MAX_NESTED:
            raise InputError(f"arrays are nested more than {MAX_NESTED} levels deep")
        self.at += 1
        self.arrays += 1
        words = self.words()
        self.arrays -= 1
        return Array(assignment[1], bool(assignment[2]), words)

    def _single(self, quote: int) -> str:
        end = self.text.find("'", quote + 1)
        if end < 0:
            raise self._unclosed("'", quote)
        self.at = end + 1
        return self.text[quote + 1 : end]

    def _double(self) -> Word:
        begin = self.at
        self.at += 1
        word = [Part("text", "", True)]
        while self.at < len(self.text):
            first = self.text[self.at]
            if first == '"':
                self.at += 1
                return word
            if match := _PLAIN_QUOTED.match(self.text, self.at):
                word.append(Part("text", match[0], True))
                self.at = match.end()
            elif first == "\\":
                after = self.text[self.at + 1 : self.at + 2]
                kept = after if after in '"\\$`' else f"\\{after}"
                word.append(Part("text", "" if after == "\n" else kept, True))
                self.at += 2
            elif first == "`":
                word.append(self._backquoted(True))
            else:
                word.append(self._dollar(True))
        raise self._unclosed('"', begin)

    def _backquoted(self, quoted: bool) -> Part:
        end = self.text.find("`", self.at + 1)
        if end < 0:
            raise self._unclosed("`", self.at)
        body = self.text[self.at + 1 : end]
        self.at = end + 1
        return Part("command", body, quoted)

    def _dollar(self, quoted: bool) -> Part:
        begin, after = self.at, self.text[self.at + 1 : self.at + 2]
        if after in ("(", "{"):
            self.at = self._closing(begin + 2, ")" if after == "(" else "}")
            body = self.text[begin + 2 : self.at - 1]
            if after == "{":
                return Part("variable", body, quoted)
            if body.startswith("(") and body.endswith(")"):
                return Part("arithmetic", body[1:-1], quoted)
            return Part("command", body, quoted)
        if after == "'" and not quoted:
            return Part("text", self._single(begin + 1), True)
        if match := _NAME.match(self.text, begin + 1):
            self.at = match.end()
            return Part("variable", match[0], quoted)
        self.at += 1
        return Part("text", "$", quoted)

    def _closing(self, begin: int, closer: str) -> int:
        """The position after the bracket that closes one opened before ``begin``."""
        awaited, at = [closer], begin
        while match := _MARKS.search(self.text, at):
            at, mark = match.end(), match[0]
            if mark == "\\":
                at += 1
            elif mark in ("$(", "${"):
                awaited.append(")" if mark == "$(" else "}")
            elif mark == awaited[-1]:
                awaited.pop()
            elif awaited[-1] == '"':
                continue
            elif mark == '"':
                awaited.append('"')
            elif mark in ("'", "`"):
                at = self._until(mark, at) + 1
            elif mark == "(" and awaited[-1] == ")":
                awaited.append(")")
            if not awaited:
                return at
        raise self._unclosed("$(" if closer == ")" else "${", begin)

    def _skip_target(self, operator: str) -> None:
        while self.text.startswith((" ", "\t"), self.at):
            self.at += 1
        begin = self.at
        if begin < len(self.text) and self.text[begin] not in "\n;&|<>()":
            self._word()
        if operator.rstrip("-").endswith("<<"):
            self.here.append(self.text[begin : self.at].strip("'\"\\"))

    def _skip_here_documents(self) -> None:
        for delimiter in self.here:
            ended = False
            while not ended and self.at < len(self.text):
                end = self._until("\n", self.at)
                ended = self.text[self.at : end].lstrip("\t") == delimiter
                self.at = end + 1
        self.here.clear()

    def _until(self, mark: str, begin: int) -> int:
        end = self.text.find(mark, begin)
        return len(self.text) if end < 0 else end

    def _unclosed(self, mark: str, at: int) -> InputError:
        line = self.text.count("\n", 0, at) + 1
        return InputError(f"not a shell script: {mark} is not closed (line {line})")


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
        self.values: dict[str, list[str]] = {}
        self.arrays: set[str] = set()
        self.spent = 0
        self.active: bool | None = True
        self.blocks: list[_If] = []

    def read(self, text: str) -> Script:
        link, result = "", None
        words: list[Word | Array] = []
        for token in chain(_Lexer(text).tokens(), ["\n"]):
            if not isinstance(token, str):
                words.append(token)
                continue
            if words:
                result = self._command(words, link, result)
                words = []
                link = ""
            if token in ("&&", "||"):
                link = token
        self.script.variables = self.values
        return self.script

    def _command(self, words: list[Word | Array], link: str, before: bool | None) -> bool | None:
        """Read one command, and return its result where that is known."""
        words = self._keywords(words)
        testing = bool(self.blocks) and self.blocks[-1].testing
        if not words:
            return before
        active = self.active
        if link:
            active = _both(active, before if link == "&&" else _not(before))
        result = self._simple(words, active, testing)
        if link == "&&":
            result = _both(before, result)
        elif link == "||":
            result = _not(_both(_not(before), _not(result)))
        if testing:
            self.blocks[-1].tested = result
        return result

    def _keywords(self, words: list[Word | Array]) -> list[Word | Array]:
        """The words after leading keywords."""
        for index, word in enumerate(words):
            keyword = _bare(word)
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
        self.active = _both(self.active, None)

    def _then(self) -> None:
        if self.blocks and self.blocks[-1].testing:
            self._branch(self.blocks[-1], self.blocks[-1].tested)

    def _elif(self) -> None:
        if self.blocks:
            self.blocks[-1].testing = True
            self.active = _both(self.blocks[-1].outside, _not(self.blocks[-1].taken))

    def _else(self) -> None:
        if self.blocks:
            self._branch(self.blocks[-1], True)

    def _end(self) -> None:
        if self.blocks:
            self.active = self.blocks.pop().outside

    def _branch(self, block: _If, tested: bool | None) -> None:
        here = _both(tested, _not(block.taken))
        block.taken = _not(_both(_not(block.taken), _not(here)))
        block.testing = False
        self.active = _both(block.outside, here)

    def _simple(self, words: list[Word | Array], active: bool | None, testing: bool) -> bool | None:
        if active is False:
            return None
        if _bare(words[0]) in _DECLARING:
            words = [word for word in words[1:] if not (_bare(word) or "").startswith("-")]
        first = next((at for at, word in enumerate(words) if not _assigned(word)), len(words))
        rest = words[first:]
        if not rest:
            for word in words:
                self._assign(word, active)
            return True
        given = [text for word in rest for text in self._fields(word)]
        if given and given[0] in ("[", "[[", "test"):
            return _test(given)
        self.script.commands.append((active is True, given))
        return None if testing else True

    def _assign(self, word: Word | Array, active: bool | None) -> None:
        if isinstance(word, Array):
            name, append = word.name, word.append
            value = [text for each in word.words for text in self._fields(each)]
        else:
            match = _ASSIGNMENT.match(word[0].body)
            assert match is not None
            name, append = match[1], bool(match[2])
            first = word[0]._replace(body=word[0].body[match.end() :])
            value = ["".join(self._value(part) for part in (first, *word[1:]))]
        old = self.values.get(name, [])
        if append and isinstance(word, Array):
            value = old + value
        elif append:
            value = ["".join([*old[:1], *value]), *old[1:]]
        if append:
            self._spend(sum(map(len, value)) + len(value))
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
        self.values[name] = value
        if isinstance(word, Array):
            self.arrays.add(name)

    def _fields(self, word: Word | Array) -> list[str]:
        """The words that a word expands to: unquoted expansions are split at spaces."""
        if isinstance(word, Array):
            return []
        fields: list[str] = []
        current: list[str] = []  # pieces of the field being read
        begun = False  # a quoted empty text is a field too
        for part in word:
            if part.kind == "variable" and part.quoted and part.body.endswith("[@]"):
                pieces, before, after = self._elements(part.body), False, False
            elif part.kind == "text" or part.quoted:
                pieces, before, after = [self._value(part)], False, False
            else:
                value = self._value(part)
                pieces = value.split()
                before, after = value[:1].isspace(), value[-1:].isspace()
            for index, piece in enumerate(pieces):
                if begun and (index or before):
                    fields.append("".join(current))
                    current = []
                current.append(piece)
                begun = True
            if after and begun:
                fields.append("".join(current))
                current, begun = [], False
        return [*fields, "".join(current)] if begun else fields

    def _elements(self, body: str) -> list[str]:
        name = body.removesuffix("[@]")
        values = self.values.get(name, [unknown(f"${name}")])
        self._spend(sum(map(len, values)) + len(values))
        return values

    def _value(self, part: Part, nested: int = 0) -> str:
        """The text that a part expands to."""
        if part.kind == "text":
            return part.body
        if part.kind == "command":
            return unknown(f"$({part.body})")
        if nested > MAX_NESTED:
            raise InputError(f"expansions are nested more than {MAX_NESTED} levels deep")
        if part.kind == "arithmetic":
            value = self._arithmetic(part.body)
        else:
            value = self._variable(part.body, nested)
        self._spend(len(value) + 1)
        return value

    def _variable(self, body: str, nested: int) -> str:
        match = _BRACED.fullmatch(body)
        if match is None:
            return unknown(f"${{{body}}}")
        name, index, operator, default = match.groups()
        values = self.values.get(name)
        if values is None or (operator and operator.startswith(":") and values == [""]):
            if operator and operator[-1] in "-=":
                return self._default(default, nested)
            if values is None:
                return unknown(f"${name}")
        elif operator and operator[-1] == "+":
            return self._default(default, nested)
        if index in ("[@]", "[*]"):
            return " ".join(values)
        at = int(index[1:-1]) if index else 0
        return values[at] if at < len(values) else ""

    def _default(self, text: str, nested: int) -> str:
        """Expand what follows ``:-``: quotes and expansions, with spaces kept."""
        parts = []
        lexer = _Lexer(text)
        while lexer.at < len(text):
            begin = lexer.at
            word = lexer._word()
            if isinstance(word, list) and word:
                parts += [self._value(part, nested + 1) for part in word]
            if lexer.at == begin:
                parts.append(text[begin])
                lexer.at += 1
        return "".join(parts)

    def _arithmetic(self, body: str) -> str:
        def named(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            value = self.values.get(name, [""])[0]
            return value if value.isdigit() and len(value) <= 18 else "?"

        numbers = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?|\$\{?([0-9@*#])\}?", named, body[:1000])
        value = _whole(numbers) if len(body) <= 1000 else None
        return unknown(f"$(({body}))") if value is None else str(value)

    def _spend(self, characters: int) -> None:
        self.spent += characters
        if self.spent > MAX_EXPANDED:
            raise InputError(
                f"the script's variables expand to more than {MAX_EXPANDED} characters"
            )


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


def _bare(word: Word | Array) -> str | None:
    """The text of a word that is one unquoted text, as keywords are; None for others."""
    if isinstance(word, list) and len(word) == 1 and word[0].kind == "text" and not word[0].quoted:
        return word[0].body
    return None


def _assigned(word: Word | Array) -> bool:
    if isinstance(word, Array):
        return True
    first = word[0] if word else None
    unquoted = first is not None and first.kind == "text" and not first.quoted
    return first is not None and unquoted and _ASSIGNMENT.match(first.body) is not None


def _both(one: bool | None, other: bool | None) -> bool | None:
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def _not(one: bool | None) -> bool | None:
    return None if one is None else not one


def _test(words: list[str]) -> bool | None:
    """The result of ``[ ... ]``, or None where it is unknown.

    >>> _test(["[", "fp8", "=", "bf16", "]"]), _test(["[", "-f", "x", "]"])
    (False, None)
    """
    words = words[1:-1] if words[-1] in ("]", "]]") else words[1:] if words[0] == "test" else []
    negated = False
    while words[:1] == ["!"] and len(words) <= MAX_NESTED:
        words, negated = words[1:], not negated
    result = _compared(words)
    return _not(result) if negated else result


def _compared(words: list[str]) -> bool | None:
    if any(opened(word) for word in words):
        return None
    match words:
        case ["-z", word]:
            return word == ""
        case ["-n", word] | [word]:
            return word != ""
        case [one, "=" | "==", other]:
            return one == other
        case [one, "!=", other]:
            return one != other
        case [one, sign, other] if sign in _COMPARISONS and _number(one) and _number(other):
            return _COMPARISONS[sign](int(one), int(other))
    return None


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda one, other: one == other,
    "-ne": lambda one, other: one != other,
    "-lt": lambda one, other: one < other,
    "-le": lambda one, other: one <= other,
    "-gt": lambda one, other: one > other,
    "-ge": lambda one, other: one >= other,
}


def _number(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,18}", text) is not None


def _whole(text: str) -> int | None:
    """The value of integer arithmetic, or None for anything else.

    >>> _whole("8 * (2 + 2)"), _whole("2 ** 99999"), _whole("1 / 0")
    (32, None, None)
    """
    tokens = re.findall(r"[0-9]+|[-+*/%()]", text)
    if "".join(tokens) != "".join(text.split()) or len(tokens) > 100:
        return None
    try:
        value = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return value if not tokens and abs(value) < 10**18 else None


def _sum(tokens: list[str]) -> int:
    value = _product(tokens)
    while tokens and tokens[0] in "+-":
        value = value + _product(tokens) if tokens.pop(0) == "+" else value - _product(tokens)
    return value


def _product(tokens: list[str]) -> int:
    value = _atom(tokens)
    while tokens and tokens[0] in "*/%":
        sign = tokens.pop(0)
        other = _atom(tokens)
        value = value * other if sign == "*" else value // other if sign == "/" else value % other
        if abs(value) > 10**18:
            raise ValueError
    return value


def _atom(tokens: list[str]) -> int:
    token = tokens.pop(0)
    if token != "(":
        return int(token) if len(token) <= 18 else int("")
    value = _sum(tokens)
    if tokens.pop(0) != ")":
        raise ValueError
    return value
