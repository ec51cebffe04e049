"""``hf:org/name``: a model's ``config.json`` from the Hugging Face Hub, and no other file.

huggingface_hub downloads the file or finds it in its cache, and handles the user's tokens. No code
of a repository is ever run.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from memcalc.errors import ConfigError, InputError, UsageError

PREFIX = "hf:"

# Messages by huggingface_hub's exceptions, the narrowest first.
PROBLEMS = {
    "GatedRepoError": "the repository is gated: accept its terms on the Hub, then "
    "run `hf auth login`",
    "RevisionNotFoundError": "the repository has no such revision",
    "RepositoryNotFoundError": "the repository does not exist or is private: run `hf auth login`",
    "LocalEntryNotFoundError": "not in the local cache, and the Hub cannot be reached",
    "OfflineModeIsEnabled": "not in the local cache, and HF_HUB_OFFLINE forbids a download",
    "EntryNotFoundError": "the repository has no config.json",
    "HFValidationError": "not a valid repository name",
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
        InputError: The file cannot be downloaded; the message says why.

    >>> fetch("hf:../x")
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: 'hf:../x' must have the form hf:org/name or hf:org/name@revision
    """
    match = _TARGET.fullmatch(target)
    if match is None:
        shown = target[:60]
        raise ConfigError(f"{shown!r} must have the form hf:org/name or hf:org/name@revision")
    try:
        hub = import_module("huggingface_hub")
    except ImportError as error:
        message = "hf: needs huggingface_hub: pip install '.[hub]' in memcalc's repository"
        raise UsageError(message) from error
    try:
        with _silent(hub):
            path = _path(hub, match["repo"], match["revision"])
    except Exception as error:  # the Hub's own errors, and those of its HTTP client
        raise InputError(f"{target}: {_problem(error)}") from error
    return Path(path), match["repo"]


def _path(hub: Any, repository: str, revision: str | None) -> str:
    """The file's path in the cache, downloaded first if the Hub answers.

    The Hub is asked once whether the file exists: a download would retry many times.
    """
    target = {"repo_id": repository, "filename": "config.json", "revision": revision}
    url = hub.hf_hub_url(**target)
    found: str
    try:
        hub.get_hf_file_metadata(url)
    except Exception as refused:  # by the Hub, or by a proxy
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
    """Silence the Hub's own warnings and retries: an error is one line of memcalc's."""
    before = hub.logging.get_verbosity()
    hub.logging.set_verbosity_error()
    try:
        yield
    finally:
        hub.logging.set_verbosity(before)


def _known(error: Exception) -> str:
    """The message of a known error; an empty text for others."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return next((problem for name, problem in PROBLEMS.items() if name in kinds), "")


def _problem(error: Exception) -> str:
    lines = str(error).split("\n")
    return (
        _known(error) or f"cannot be downloaded: {type(error).__name__} {lines[0][:200]}".rstrip()
    )
