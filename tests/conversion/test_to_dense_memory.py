"""Row 43: a checkpoint becomes dense in the memory of one packed tensor and a block of rows,
whatever its size.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte import open as open_checkpoint
from support.gguf_writer import GGUF, Q4_K, Tensor

RUN = """
import sys
from halfbyte.checkpoints import open
from halfbyte.conversion.to_dense import dequantize_checkpoint
def peak():
    return next(int(l.split()[1]) for l in __builtins__.open('/proc/self/status') if l.startswith('VmHWM'))
with open(sys.argv[1]) as ckpt:
    ckpt['t0'][:8].dequantize()
    before = peak()
    dequantize_checkpoint(ckpt, sys.argv[2])
    print(before, peak())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is Linux's")
@pytest.mark.parametrize("out", ["dense", "dense.safetensors"])
def test_case_43_dequantize_streams(out, tmp_path):
    n, k, count = 4096, 2048, 5
    nbytes = n * k // 256 * 144
    file = GGUF(tensors=[Tensor(f"t{i}.weight", (k, n), Q4_K, b"", offset=i * nbytes) for i in range(count)])
    path = tmp_path / "large.gguf"
    head = file.head()
    with path.open("wb") as f:
        f.write(head)
        f.truncate(-(-len(head) // 32) * 32 + count * nbytes)  # zeros
    command = [sys.executable, "-c", RUN, str(path), str(tmp_path / out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = (int(v) for v in done.stdout.split())
    dense = n * k * 4 // 1024
    with open_checkpoint(tmp_path / out) as result:
        assert sum(i.nbytes for i in result.infos()) == count * dense * 1024
    # One tensor of the file, its canonical parts, and some MB of a block's temporaries; a dense
    # matrix is 32 MB.
    assert after - before < 2 * nbytes // 1024 + 40_000, (before, after)
    assert after - before < count * dense // 3
