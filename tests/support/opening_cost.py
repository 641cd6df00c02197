"""Run as a script: open each path given, each in a fresh process, and print what it cost as JSON
lines.

python opening_cost.py PATH...  ->  {"path", "error", "seconds", "peak_mb"} a line
"""

from __future__ import annotations

import json
import os
import resource
import sys

from cpu_time import cpu_time


def main() -> None:
    import halfbyte as hb

    for path in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            error = ""
            with cpu_time() as spent:
                try:
                    checkpoint = hb.open(path)
                    for key in checkpoint:
                        checkpoint.info(key)
                    checkpoint.header_findings()
                except hb.HalfbyteError as problem:
                    error = f"{type(problem).__name__}: {problem}"
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps({"path": path, "error": error, "seconds": spent.seconds, "peak_mb": peak}), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(
                json.dumps({"path": path, "error": f"the process ended with {status}", "seconds": 1e9, "peak_mb": 1e9}),
                flush=True,
            )


if __name__ == "__main__":
    main()
