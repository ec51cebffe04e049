"""Text split into words, array assignments and operators."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from memcalc.errors import InputError

MAX_NESTED = 20  # levels of expansions within defaults of expansions, and of arrays
MAX_WORDS = 20_000
_PLAIN = re.compile(r"[^\s\\'\"`$;&|<>()]+")
_PLAIN_QUOTED = re.compile(r'[^"\\$`]+')
_MARKS = re.compile(r"[\\'\"`(){}]|\$[({]")
_REDIRECTION = re.compile(r"&>>?|\d*(?:<<<|<<-?|>>|<>|[<>])[&|]?")
_OPERATOR = re.compile(r"&&|\|\||;;&?|[;&|()]")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")


class WordPart(NamedTuple):
    """A piece of a word: literal text, or an expansion."""

    kind: str  # text, variable, command or arithmetic
    body: str
    quoted: bool


Word = list[WordPart]


class Array(NamedTuple):
    """``NAME=(words)`` or ``NAME+=(words)``."""

    name: str
    append: bool
    words: list[Word]


def bare(word: Word | Array) -> str | None:
    """The text of a word that is one unquoted text, as keywords are; None for others."""
    if isinstance(word, list) and len(word) == 1 and word[0].kind == "text" and not word[0].quoted:
        return word[0].body
    return None


def assigned(word: Word | Array) -> bool:
    """Whether a word assigns a variable."""
    if isinstance(word, Array):
        return True
    first = word[0] if word else None
    unquoted = first is not None and first.kind == "text" and not first.quoted
    return first is not None and unquoted and ASSIGNMENT.match(first.body) is not None


class Lexer:
    """Splits text into words, array assignments and operators, in order."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.count = 0
        self.arrays = 0  # how many are open
        self.here: list[str] = []  # delimiters of the here-documents that start on the next line

    def tokens(self) -> Iterator[Word | Array | str]:
        """Words, array assignments and operators, in order."""
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
                yield self.word()

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

    def word(self) -> Word | Array:
        """The word that starts here."""
        begin = self.at
        self.count += 1
        if self.count > MAX_WORDS:
            raise InputError(f"a script of more than {MAX_WORDS} words is not read")
        word: Word = []
        while self.at < len(self.text):
            first = self.text[self.at]
            if match := _PLAIN.match(self.text, self.at):
                word.append(WordPart("text", match[0], False))
                self.at = match.end()
            elif first == "(" and (match := ASSIGNMENT.fullmatch(self.text, begin, self.at)):
                return self._array(match)
            elif first == "\\":
                if not self.text.startswith("\\\n", self.at):
                    word.append(WordPart("text", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif first == "'":
                word.append(WordPart("text", self._single(self.at), True))
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
        word = [WordPart("text", "", True)]
        while self.at < len(self.text):
            first = self.text[self.at]
            if first == '"':
                self.at += 1
                return word
            if match := _PLAIN_QUOTED.match(self.text, self.at):
                word.append(WordPart("text", match[0], True))
                self.at = match.end()
            elif first == "\\":
                after = self.text[self.at + 1 : self.at + 2]
                kept = after if after in '"\\$`' else f"\\{after}"
                word.append(WordPart("text", "" if after == "\n" else kept, True))
                self.at += 2
            elif first == "`":
                word.append(self._backquoted(True))
            else:
                word.append(self._dollar(True))
        raise self._unclosed('"', begin)

    def _backquoted(self, quoted: bool) -> WordPart:
        end = self.text.find("`", self.at + 1)
        if end < 0:
            raise self._unclosed("`", self.at)
        body = self.text[self.at + 1 : end]
        self.at = end + 1
        return WordPart("command", body, quoted)

    def _dollar(self, quoted: bool) -> WordPart:
        begin, after = self.at, self.text[self.at + 1 : self.at + 2]
        if after in ("(", "{"):
            self.at = self._closing(begin + 2, ")" if after == "(" else "}")
            body = self.text[begin + 2 : self.at - 1]
            if after == "{":
                return WordPart("variable", body, quoted)
            if body.startswith("(") and body.endswith(")"):
                return WordPart("arithmetic", body[1:-1], quoted)
            return WordPart("command", body, quoted)
        if after == "'" and not quoted:
            return WordPart("text", self._single(begin + 1), True)
        if match := _NAME.match(self.text, begin + 1):
            self.at = match.end()
            return WordPart("variable", match[0], quoted)
        self.at += 1
        return WordPart("text", "$", quoted)

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
            self.word()
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
