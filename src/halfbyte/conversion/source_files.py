"""The files that a checkpoint is read from, and the identity of a source: a run is resumed only
from the same one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..checkpoints import Checkpoint


def source_files(checkpoint: Checkpoint) -> list[Path]:
    """The weight files of a checkpoint that are on disk, in order."""
    path = checkpoint.path.resolve()
    base = path if path.is_dir() else path.parent
    names = sorted({f for info in checkpoint.infos() for f in info.files})
    return [base / f for f in names if (base / f).is_file()]


def source_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a result depends on: the source's path, files and configuration."""
    stats = [(str(f), f.stat()) for f in source_files(checkpoint)]
    config = json.dumps(checkpoint.config, sort_keys=True, default=str)
    return {
        "source": str(checkpoint.path.resolve()),
        "files": [[f, s.st_size, s.st_mtime_ns] for f, s in stats],
        "config": hashlib.sha256(config.encode("utf-8", "surrogatepass")).hexdigest(),
    }
