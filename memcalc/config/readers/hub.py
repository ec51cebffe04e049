"""``hf:org/name``: a model's ``config.json`` from the Hugging Face Hub, and nothing else of it.

huggingface_hub fetches the file, or finds it in its cache, and keeps the user's tokens to itself.
No code of a repository is ever run.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

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
        hub = import_module("huggingface_hub")
    except ImportError as error:
        message = "hf: needs huggingface_hub: pip install 'activation-memcalc[hub]'"
        raise UsageError(message) from error
    try:
        with _silent(hub):
            path = _path(hub, match["repo"], match["revision"])
    except Exception as error:  # the Hub's own errors, and those of whatever speaks HTTP for it
        raise InputError(f"{target}: {_problem(error)}") from error
    return Path(path), match["repo"]


def _path(hub: Any, repository: str, revision: str | None) -> str:
    """Where the file lies once the Hub has been asked; where it does not answer, in the cache.

    The Hub is asked once whether the file is there: a download would ask again and again.
    """
    target = {"repo_id": repository, "filename": "config.json", "revision": revision}
    url = hub.hf_hub_url(**target)
    found: str
    try:
        hub.get_hf_file_metadata(url)
    except Exception as refused:  # by the Hub, or by what is between
        try:
            found = hub.hf_hub_download(**target, local_files_only=True)
        except hub.errors.LocalEntryNotFoundError:
            if _known(refused) or isinstance(refused, hub.errors.HfHubHTTPError):
                raise refused from None
            raise
        return found
    found = hub.hf_hub_download(**target)
    return found


@contextmanager
def _silent(hub: Any) -> Iterator[None]:
    """Without the Hub's own lines of warnings and retries: what goes wrong is one line of ours."""
    before = hub.logging.get_verbosity()
    hub.logging.set_verbosity_error()
    try:
        yield
    finally:
        hub.logging.set_verbosity(before)


def _known(error: Exception) -> str:
    """What the table of problems says of an error; nothing of one that it does not have."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return next((problem for name, problem in PROBLEMS.items() if name in kinds), "")


def _problem(error: Exception) -> str:
    lines = str(error).split("\n")
    return _known(error) or f"not to be had: {type(error).__name__} {lines[0][:200]}".rstrip()
