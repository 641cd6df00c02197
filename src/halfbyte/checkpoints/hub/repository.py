"""One repository on the hub at one commit: its files and their sizes, byte ranges of them, small
files through the cache.

    repository = Repository.of(HubName("org/name"))       one request
    repository.sizes["model.safetensors"]                 bytes
    repository.read("model.safetensors", 0, 65536)        a byte range, checked against its headers

A reply is trusted as far as it can be checked: its range must be the one that was asked for, its
length the announced one, and size and ETag of a file the same in every reply.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from ...errors import CheckpointError
from .names import HubName

ATTEMPTS = 4
"""Tries of a range whose reply breaks off, or that the server is too busy for."""
WAIT = 1.0
"""Seconds before the second try; twice as long before each further one."""
LONGEST_WAIT = 60.0
"""Most seconds that a Retry-After is waited for."""
BYTES_PER_SECOND = 4096
"""Slowest transfer that is waited for, after `PATIENCE` seconds."""
PATIENCE = 30.0
QUIET_BYTES = 16 << 20
"""Bytes of weights that are read without a warning."""


class HubWarning(UserWarning):
    """Weights that are read over the network, or are about to be downloaded."""


def human(nbytes: int) -> str:
    """Bytes in decimal units."""
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:  # 1000 of three digits
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


class Repository:
    """A repository at a commit. `of` makes one.

    name      as it was given
    commit    the commit that the revision names
    sizes     file -> bytes
    requests  range requests that were made, and `received`: bytes of their replies
    """

    def __init__(self, name: HubName, commit: str, sizes: dict[str, int]) -> None:
        self.name, self.commit, self.sizes = name, commit, sizes
        self.requests = self.received = 0
        self._tags: dict[str, str] = {}
        self._quiet = QUIET_BYTES
        self._lock = Lock()

    @classmethod
    def of(cls, name: HubName) -> Repository:
        """CheckpointError when the hub does not know the name, does not let us in, or does not
        answer.
        """
        hub = library(name)
        with explained(name):
            try:
                info = hub.HfApi().model_info(
                    name.repo, revision=name.revision or None, files_metadata=True, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT
                )
            except (TypeError, KeyError, AttributeError) as error:  # huggingface_hub trusts the reply
                raise CheckpointError(
                    f"[hub] {name}: {hub.HfApi().endpoint} answers with something else than a model's page "
                    f"({type(error).__name__}); check HF_ENDPOINT, or give a local folder"
                ) from error
        sizes: dict[str, int] = {}
        for file in info.siblings or ():
            size = getattr(file, "size", None)
            if type(size) is int and size >= 0:
                sizes[str(file.rfilename)] = size
        if not isinstance(info.sha, str) or not sizes:
            raise CheckpointError(f"[hub] {name}: the hub lists no files with sizes; download it: {download_command(name)}")
        return cls(name, info.sha, sizes)

    @property
    def where(self) -> str:
        """The repository and its commit, for messages."""
        return f"{self.name.repo}@{self.commit[:12]}"

    def file(self, name: str) -> RemoteFile:
        """A file of the repository by name."""
        return RemoteFile(self, name)

    def small(self, name: str) -> Path:
        """A configuration file, in the hub's cache."""
        hub = library()
        with explained(self.name):
            return Path(hub.hf_hub_download(self.name.repo, name, revision=self.commit, endpoint=hub.HfApi().endpoint))

    def announce(self, nbytes: int) -> None:
        """Warn, once, before weights beyond `QUIET_BYTES` are read over the network."""
        with self._lock:
            before, self._quiet = self._quiet, self._quiet - nbytes
        if before >= 0 > self._quiet:
            warnings.warn(
                f"[hub] {self.where}: weights are read over the network and not kept, {human(nbytes)} for this one; "
                f"`{download_command(self.name)}` keeps them",
                HubWarning,
                stacklevel=4,
            )

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Bytes start to stop of a file. CheckpointError when the server cannot give them."""
        if start >= stop:
            return b""
        error: Exception | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(min(LONGEST_WAIT, getattr(error, "after", None) or WAIT * 2 ** (attempt - 1)))
            try:
                with explained(self.name):
                    return self._read(file, start, stop)
            except _TryAgainError as again:
                error = again
        raise CheckpointError(
            f"[hub] {self.where}/{file}: {error}, in each of {ATTEMPTS} tries; try again later, or download it: "
            f"{download_command(self.name)}"
        )

    def _read(self, file: str, start: int, stop: int) -> bytes:
        hub = library()
        url = hub.hf_hub_url(self.name.repo, file, revision=self.commit, endpoint=hub.HfApi().endpoint)
        headers = {**hub.utils.build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        deadline = time.monotonic() + PATIENCE + (stop - start) / BYTES_PER_SECOND
        session = hub.utils.get_session()
        network = importlib.import_module(type(session).__module__.partition(".")[0])
        with self._lock:
            self.requests += 1
        data = bytearray()
        try:
            with session.stream(
                "GET", url, headers=headers, follow_redirects=True, timeout=hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as reply:
                self._check(reply, file, start, stop)
                for chunk in reply.iter_raw():
                    data += chunk[: stop - start - len(data)]
                    if len(data) >= stop - start:
                        break
                    if time.monotonic() > deadline:
                        raise _TryAgainError(
                            f"{len(data):,} of {stop - start:,} bytes came in {time.monotonic() - deadline + PATIENCE:.0f} s"
                        )
        except (network.TimeoutException, network.TransportError) as error:
            raise _TryAgainError(
                f"the reply broke off after {len(data):,} of {stop - start:,} bytes ({type(error).__name__})"
            ) from error
        finally:
            with self._lock:
                self.received += len(data)
        if len(data) != stop - start:
            raise _TryAgainError(f"the reply ended after {len(data):,} of {stop - start:,} bytes")
        return bytes(data)

    def _check(self, reply: Any, file: str, start: int, stop: int) -> None:
        """Status, range, size and ETag of a reply, before its body is read."""
        about = f"[hub] {self.where}/{file}"
        if reply.status_code in (429, 500, 502, 503, 504):
            after = reply.headers.get("retry-after", "")
            busy = "is limiting the rate of requests" if reply.status_code == 429 else "has a fault"
            raise _TryAgainError(f"the server {busy} (HTTP {reply.status_code})", float(after) if after.isdecimal() else None)
        library().utils.hf_raise_for_status(reply)
        whole = self.sizes[file]
        if reply.headers.get("content-encoding", "identity") not in ("", "identity"):
            raise CheckpointError(f"{about}: the server compresses byte ranges; download it: {download_command(self.name)}")
        if reply.status_code == 200:
            length = reply.headers.get("content-length")
            if start or (length is not None and length != str(whole)):
                why = "sends the whole file for a byte range" if start else f"has {length} bytes, the hub lists {whole:,}"
                raise CheckpointError(f"{about}: the server {why}; download it: {download_command(self.name)}")
        else:
            given = reply.headers.get("content-range", "")
            if given != f"bytes {start}-{stop - 1}/{whole}":
                raise CheckpointError(
                    f"{about}: bytes {start}-{stop - 1}/{whole} were asked for, the server sends {given!r:.80}; the file was "
                    f"changed, or the server is at fault: open it again, or download it: {download_command(self.name)}"
                )
        tag = reply.headers.get("etag", "")
        with self._lock:
            first = self._tags.setdefault(file, tag)
        if tag != first:
            raise CheckpointError(
                f"{about}: the file was changed on the server between two requests (ETag {first!r:.80}, now {tag!r:.80}); "
                "open it again"
            )


class _TryAgainError(Exception):
    """A reply that another try may better. after: seconds the server asks to wait, None if it does
    not say.
    """

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class RemoteFile:
    """A file of a repository, read by ranges.

    path  repository, commit and name, for messages
    size  bytes
    """

    def __init__(self, repository: Repository, name: str) -> None:
        self.repository, self.name = repository, name
        self.path = Path(f"{repository.where}/{name}")
        self.size = repository.sizes[name]

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start to stop, of the header."""
        return self.repository.read(self.name, start, min(stop, self.size))

    def data(self, start: int, stop: int) -> bytes:
        """Bytes start to stop, of weights: announced where they are many."""
        self.repository.announce(stop - start)
        return self.repository.read(self.name, start, stop)


def library(name: HubName | None = None) -> Any:
    """huggingface_hub. CheckpointError, with the command to install it, where it is missing."""
    try:
        import huggingface_hub.constants
        import huggingface_hub.utils
    except ImportError:
        what = f"{name}: there is no such file or folder here, and a name" if name else "a name"
        raise CheckpointError(f"[hub] {what} on the hub needs the package huggingface_hub: pip install 'halfbyte[hub]'") from None
    return huggingface_hub


def download_command(name: HubName) -> str:
    """The command that downloads a repository."""
    file = f" {name.file}" if name.file else ""
    revision = f" --revision {name.revision}" if name.revision else ""
    return f"hf download {name.repo}{file}{revision} --local-dir {name.repo.partition('/')[2]}"


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """The hub's errors as CheckpointError, each with what to do."""
    hub = library()
    errors = importlib.import_module("huggingface_hub.errors")
    network = importlib.import_module(type(hub.utils.get_session()).__module__.partition(".")[0])
    try:
        yield
    except (CheckpointError, _TryAgainError):
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"[hub] {name}: access is restricted; accept its terms at {hub.HfApi().endpoint}/{name.repo}, then "
            "`hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"[hub] {name.repo} has no revision {name.revision!r}; give a branch, a tag or a commit of it"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"[hub] {name}: neither a file or folder here, nor a repository that {hub.HfApi().endpoint} shows; check the name, "
            "and for a private one `hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.EntryNotFoundError as error:
        raise CheckpointError(f"[hub] {name}: a file of it is missing: {str(error).splitlines()[0]:.200}") from error
    except errors.OfflineModeIsEnabled as error:
        raise CheckpointError(
            f"[hub] {name}: offline (HF_HUB_OFFLINE), and not in the cache; unset HF_HUB_OFFLINE, or give a local folder"
        ) from error
    except (network.HTTPError, errors.HfHubHTTPError, OSError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        advice = {
            401: "the token is not accepted; `hf auth login`, or set HF_TOKEN",
            403: f"access is refused; see {hub.HfApi().endpoint}/{name.repo}",
            429: "the hub limits the rate of requests; try again in some minutes, with a token for more of them",
        }.get(status or 0, "check the connection and HF_ENDPOINT, or give a local folder")
        text = f"HTTP {status}" if status else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise CheckpointError(f"[hub] {name}: {hub.HfApi().endpoint} answers {text:.200}; {advice}") from error
