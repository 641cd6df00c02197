"""The native core under sanitizers: its own test program, and the Python tests that reach the
module.

    tools/sanitize.py address thread [--sets avx2 scalar] [--built] [--log FILE]

address  AddressSanitizer and UndefinedBehaviorSanitizer; thread  ThreadSanitizer. Each builds the
whole module with `-DHALFBYTE_SANITIZE`, preloads the sanitizer's library into Python and runs TESTS
once for each instruction set of this machine (`HALFBYTE_CPU`) on two threads. A report ends the
process, so a run that passes had none. Needs GCC, CMake and nanobind; exits with 1 where a step
fails.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "address": (
        "tests/backends/cpu",
        "tests/numerics/test_transpose.py",
        "tests/gguf_models/test_bpe_merges.py",
        "tests/transformers/test_native_step.py",
    ),
    "thread": (
        "tests/backends/cpu/test_boundary.py",
        "tests/backends/cpu/test_offsets.py",
        "tests/numerics/test_transpose.py",
        "tests/gguf_models/test_bpe_merges.py",
        "tests/transformers/test_native_step.py",
        "tests/backends/cpu/test_product_hash.py",
    ),
}
"""Bindings, products and packing, transposes, merges, the decoding step. What waits for a timing is
left out by SKIPPED."""
SKIPPED = "not gpu and not slow and not ecosystem and not hypothesis"
OPTIONS = {
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    },
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:exitcode=99:report_signal_unsafe=0:ignore_noninstrumented_modules=1"},
}
LIBRARY = {"address": "libasan.so", "thread": "libtsan.so"}


def run_tests(module: str, arguments: list[str]) -> int:
    """pytest in this process, with `module` as `halfbyte._native`. Processes that the tests start
    have the installed module and no sanitizer.
    """
    import pytest

    for name in ("LD_PRELOAD", "PYTHONMALLOC"):
        os.environ.pop(name, None)
    spec = importlib.util.spec_from_file_location("halfbyte._native", module)
    if spec is None or spec.loader is None:
        raise SystemExit(f"[sanitize] {module} is no extension module")
    native = importlib.util.module_from_spec(spec)
    sys.modules["halfbyte._native"] = native
    spec.loader.exec_module(native)
    code = pytest.main(arguments)
    loaded = sys.modules["halfbyte._native"].__file__
    if loaded != module:
        raise SystemExit(f"[sanitize] the tests loaded {loaded}, not {module}")
    return int(code)


class Log:
    """The commands and what came of them, printed and written."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.lines, self.failed = path, [], False

    def add(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)
        if self.path:
            self.path.write_text("\n".join(self.lines) + "\n")

    def run(self, command: list[str], env: dict[str, str] | None = None, prefix: str = "") -> bool:
        """Runs a command, logs it and its last line; whether it passed."""
        words = [os.path.relpath(w, ROOT) if os.path.isabs(w) and w.startswith(str(ROOT)) else w for w in command]
        done = subprocess.run(command, env={**os.environ, **(env or {})}, cwd=ROOT, capture_output=True, text=True)
        out = (done.stdout + done.stderr).strip()
        self.add(f"$ {prefix}{shlex.join(words)}")
        if done.returncode:
            self.failed = True
            self.add("\n".join(out.splitlines()[-60:]))
        outcome = "passed" if done.returncode == 0 else f"FAILED, status {done.returncode}"
        self.add(f"-> {outcome}: {(out.splitlines() or [''])[-1]}")
        return done.returncode == 0


def sanitize(kind: str, sets: list[str], built: bool, log: Log) -> None:
    """Builds with one sanitizer, then runs the test program and TESTS."""
    build = ROOT / "build" / f"sanitize-{kind}"
    steps = [
        ["cmake", "-S", ".", "-B", str(build), f"-DHALFBYTE_SANITIZE={kind}", f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", str(build), "--target", "_native", "halfbyte_selfcheck"],
    ]
    if not built and not all(log.run(step) for step in steps):
        return
    options = OPTIONS[kind]
    still = ["setarch", "-R"] if kind == "thread" else []  # ThreadSanitizer needs addresses that are not random
    log.run([*still, str(build / "halfbyte_selfcheck")], options, " ".join(f"{k}={v}" for k, v in options.items()) + " ")
    [module] = build.glob("_native*.so")
    # libstdc++ too: the sanitizer takes over its throw, which Python alone does not load.
    names = (LIBRARY[kind], "libstdc++.so")
    library = " ".join(subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in names)
    for name in sets or subprocess.check_output([build / "halfbyte_selfcheck", "--sets"], text=True).split():
        env = {
            **options,
            "LD_PRELOAD": library,
            "PYTHONMALLOC": "malloc",
            "HALFBYTE_CPU": name,
            "HALFBYTE_THREADS": "2",
            "PYTHONPATH": os.pathsep.join(["src", "tests", *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        command = [*still, sys.executable, str(Path(__file__).resolve()), "--module", str(module), *TESTS[kind], "-m", SKIPPED]
        log.run(
            [*command, "-q", "-x", "-s", "-p", "no:cacheprovider"],
            env,
            " ".join(f"{k}={shlex.quote(v)}" for k, v in env.items()) + " ",
        )


def main() -> int:
    """The steps of every sanitizer asked for."""
    if "--module" in sys.argv:
        at = sys.argv.index("--module")
        return run_tests(sys.argv[at + 1], sys.argv[at + 2 :])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=["address", "thread"])
    parser.add_argument("--sets", nargs="+", default=[], help="instruction sets; all that this machine has when left out")
    parser.add_argument("--built", action="store_true", help="run what an earlier call built")
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    log = Log(given.log)
    log.add("# The native core under sanitizers (tools/sanitize.py); a report ends the process that makes it.")
    log.add(f"# command: {shlex.join(['tools/sanitize.py', *sys.argv[1:]])}")
    log.add(f"# date: {datetime.date.today()}; {platform.system()} {platform.machine()}, Python {platform.python_version()}")
    for kind in given.kinds:
        sanitize(kind, given.sets, given.built, log)
    return 1 if log.failed else 0


if __name__ == "__main__":
    sys.exit(main())
