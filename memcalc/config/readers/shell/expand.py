"""Variables, and the words that words expand to."""

import re

from memcalc.config.readers.shell.arithmetic import whole
from memcalc.config.readers.shell.lexer import MAX_NESTED, Array, Lexer, Word, WordPart
from memcalc.config.readers.shell.marks import unknown
from memcalc.errors import InputError

MAX_EXPANDED = 2**20  # characters of all expansions of a script together
_BRACED = re.compile(
    r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[(?:[@*]|[0-9]{1,6})\])?(?:(:?[-=+?])(.*))?", re.DOTALL
)


class Variables:
    """The values of a script's variables, and the text that words expand to with them."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.spent = 0

    def fields(self, word: Word | Array) -> list[str]:
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
                pieces, before, after = [self.value(part)], False, False
            else:
                value = self.value(part)
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
        self.spend(sum(map(len, values)) + len(values))
        return values

    def value(self, part: WordPart, nested: int = 0) -> str:
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
        self.spend(len(value) + 1)
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
        lexer = Lexer(text)
        while lexer.at < len(text):
            begin = lexer.at
            word = lexer.word()
            if isinstance(word, list) and word:
                parts += [self.value(part, nested + 1) for part in word]
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
        value = whole(numbers) if len(body) <= 1000 else None
        return unknown(f"$(({body}))") if value is None else str(value)

    def spend(self, characters: int) -> None:
        """Count expanded characters, and refuse a script with too many."""
        self.spent += characters
        if self.spent > MAX_EXPANDED:
            raise InputError(
                f"the script's variables expand to more than {MAX_EXPANDED} characters"
            )
