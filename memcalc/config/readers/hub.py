"""``hf:org/name``: a model's ``config.json`` from the Hugging Face Hub, and nothing else of it.

huggingface_hub fetches the file, or finds it in its cache, and keeps the user's tokens to itself.
No code of a repository is ever run.
"""

import re
from pathlib import Path

from memcalc import lazy
from memcalc.errors import ConfigError, InputError, UsageError

PREFIX = "hf:"

# What can go wrong, by the exception of huggingface_hub that says so, the narrowest first.
PROBLEMS = {
    "GatedRepoError": "the repository is gated: accept its terms on the Hub and log in (hf auth)",
    "RevisionNotFoundError": "the repository has no such revision",
    "RepositoryNotFoundError": "no such repository, or a private one: log in (hf auth)",
    "LocalEntryNotFoundError": "neither in the local cache nor to be had: the Hub is out of reach",
    "OfflineModeIsEnabled": "not in the local cache, and HF_HUB_OFFLINE forbids to fetch it",
    "EntryNotFoundError": "the repository has no config.json",
    "HFValidationError": "not the name of a repository",
}

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_TARGET = re.compile(rf"hf:(?P<repo>(?:{_PART}/)?{_PART})(?:@(?P<revision>[\w./-]{{1,100}}))?")


def fetch(target: str) -> tuple[Path, str]:
    """The path of a repository's ``config.json``, and the repository's name.

    Args:
        target: ``hf:org/name``, or ``hf:org/name@revision``: a branch, a tag or a commit.

    Raises:
        ConfigError: The target is not of that form.
        UsageError: huggingface_hub is not installed.
        InputError: The file is not to be had; the message says why.

    >>> fetch("hf:../x")
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: 'hf:../x' is not of the form hf:org/name or hf:org/name@revision
    """
    match = _TARGET.fullmatch(target)
    if match is None:
        shown = target[:60]
        raise ConfigError(f"{shown!r} is not of the form hf:org/name or hf:org/name@revision")
    try:
        download = lazy.resolve("huggingface_hub:hf_hub_download")
    except ImportError as error:
        message = "hf: needs huggingface_hub: pip install 'activation-memcalc[hub]'"
        raise UsageError(message) from error
    try:
        path = download(match["repo"], "config.json", revision=match["revision"])
    except Exception as error:  # the Hub's own errors, and those of whatever speaks HTTP for it
        raise InputError(f"{target}: {_problem(error)}") from error
    return Path(path), match["repo"]


def _problem(error: Exception) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    for name, problem in PROBLEMS.items():
        if name in kinds:
            return problem
    lines = str(error).split("\n")
    return f"not to be had: {type(error).__name__} {lines[0][:200]}".rstrip()
