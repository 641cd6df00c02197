"""The native core under sanitizers: its own test program, its fuzzer's program and the Python tests
that reach the module.

    tools/sanitize.py address thread neon [--sets avx2 scalar] [--jobs 1] [--built] [--log FILE]

address  AddressSanitizer and UndefinedBehaviorSanitizer; thread  ThreadSanitizer. Each builds the
whole module with `-DHALFBYTE_SANITIZE`, preloads the sanitizer's library into Python and runs TESTS
once for each instruction set of this machine (`HALFBYTE_CPU`) on two threads. neon  both programs
for aarch64 (i8mm, NEON, scalar) under the sanitizers of `address`, by the cross compiler and
qemu-user; left out with a line in the log where one of them is missing. A report ends the process,
so a run that passes had none. Needs GCC, CMake and nanobind; exits with 1 where a step fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
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
LIBRARY = {"address": "libasan.so.8", "thread": "libtsan.so.2"}
EMULATED = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max"]


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
        self.path, self.lines, self.failed, self.lock = path, [], False, threading.Lock()

    def add(self, line: str) -> None:
        with self.lock:
            self.lines.append(line)
            print(line, flush=True)
            if self.path:
                self.path.write_text("\n".join(self.lines) + "\n")

    def run(self, command: list[str], env: dict[str, str] | None = None, prefix: str = "") -> bool:
        """Runs a command, logs it and its last line; whether it passed."""
        words = [os.path.relpath(w, ROOT) if os.path.isabs(w) and w.startswith(str(ROOT)) else w for w in command]
        done = subprocess.run(command, env={**os.environ, **(env or {})}, cwd=ROOT, capture_output=True, text=True)
        out = (done.stdout + done.stderr).strip()
        outcome = "passed" if done.returncode == 0 else f"FAILED, status {done.returncode}"
        tail = ["\n".join(out.splitlines()[-60:])] if done.returncode else []
        self.failed |= done.returncode != 0
        self.add("\n".join([f"$ {prefix}{shlex.join(words)}", *tail, f"-> {outcome}: {(out.splitlines() or [''])[-1]}"]))
        return done.returncode == 0


def setting(env: dict[str, str]) -> str:
    """The variables as a shell's command has them."""
    return " ".join(f"{k}={shlex.quote(v)}" for k, v in env.items()) + " "


def build(kind: str, targets: list[str], log: Log, *options: str) -> Path | None:
    """The folder of a build, None where it fails."""
    folder = ROOT / "build" / f"sanitize-{kind}"
    steps = [["cmake", "-S", ".", "-B", str(folder), *options], ["cmake", "--build", str(folder), "--target", *targets]]
    return folder if all(log.run(step) for step in steps) else None


def programs(folder: Path, before: list[str], env: dict[str, str], given: argparse.Namespace, log: Log) -> None:
    """The core's own test, then random cases for some seconds."""
    for name, arguments in (("halfbyte_selfcheck", []), ("halfbyte_fuzz", [str(given.fuzz), str(given.seed)])):
        if (folder / name).exists():
            log.run([*before, str(folder / name), *arguments], env, setting(env))
        else:
            log.add(f"{folder.name}: {name} left out, it was not built")


def on_neon(given: argparse.Namespace, log: Log) -> None:
    """The programs for aarch64, under qemu-user."""
    missing = [tool for tool in ("aarch64-linux-gnu-g++", EMULATED[0]) if not shutil.which(tool)]
    if missing:
        log.add(f"neon: left out, {' and '.join(missing)} missing")
        return
    options = ["-DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake", "-DHALFBYTE_SANITIZE=address", "-DHALFBYTE_MODULE=OFF"]
    folder = build("neon", ["halfbyte_selfcheck", "halfbyte_fuzz"], log, *options)
    if folder:
        programs(folder, EMULATED, OPTIONS["address"], given, log)


def sanitize(kind: str, given: argparse.Namespace, log: Log) -> None:
    """Builds with one sanitizer, then runs the programs and TESTS."""
    folder: Path | None = ROOT / "build" / f"sanitize-{kind}"
    if not given.built:
        targets = ["_native", "halfbyte_selfcheck", "halfbyte_fuzz"]
        folder = build(kind, targets, log, f"-DHALFBYTE_SANITIZE={kind}", f"-DPython_EXECUTABLE={sys.executable}")
    if folder is None:
        return
    env = dict(OPTIONS[kind])
    # libstdc++ too: the sanitizer takes over its throw, which Python alone does not load.
    names = [LIBRARY[kind], "libstdc++.so.6"]
    if given.runtime:
        env["LD_LIBRARY_PATH"] = str(given.runtime.resolve())
    else:
        names = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in names]
    still = ["setarch", "-R"] if kind == "thread" else []  # ThreadSanitizer needs addresses that are not random
    programs(folder, still, env, given, log)
    [module] = folder.glob("_native*.so")
    tests = [list(TESTS[kind])]
    if given.jobs > 1:  # a file a process
        paths = [ROOT / name for name in TESTS[kind]]
        files = [f for path in paths for f in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]
        tests = [[str(f.relative_to(ROOT))] for f in files]
    steps = []
    for name in given.sets or subprocess.check_output([folder / "halfbyte_selfcheck", "--sets"], text=True).split():
        variables = {
            **env,
            "LD_PRELOAD": " ".join(names),
            "PYTHONMALLOC": "malloc",
            "HALFBYTE_CPU": name,
            "HALFBYTE_THREADS": "2",
            "PYTHONPATH": os.pathsep.join(["src", "tests", *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        for files in tests:
            command = [*still, sys.executable, str(Path(__file__).resolve()), "--module", str(module), *files, "-m", SKIPPED]
            steps.append(([*command, "-x", "-s", "-p", "no:cacheprovider"], variables, setting(variables)))
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda step: log.run(*step), steps))


def main() -> int:
    """The steps of every sanitizer asked for."""
    if "--module" in sys.argv:
        at = sys.argv.index("--module")
        return run_tests(sys.argv[at + 1], sys.argv[at + 2 :])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=["address", "thread", "neon"])
    parser.add_argument("--sets", nargs="+", default=[], help="instruction sets; all that this machine has when left out")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes at a time, each with one file of tests where there are several"
    )
    parser.add_argument("--fuzz", type=int, default=20, help="seconds of random cases of the core")
    parser.add_argument("--seed", type=int, default=0, help="of the random cases")
    parser.add_argument("--built", action="store_true", help="run what an earlier call built")
    parser.add_argument("--runtime", type=Path, help="where the sanitizers' libraries are; GCC's when left out")
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    log = Log(given.log)
    log.add("# The native core under sanitizers (tools/sanitize.py); a report ends the process that makes it.")
    log.add(f"# command: {shlex.join(['tools/sanitize.py', *sys.argv[1:]])}")
    log.add(f"# date: {datetime.date.today()}; {platform.system()} {platform.machine()}, Python {platform.python_version()}")
    for kind in given.kinds:
        if kind == "neon":
            on_neon(given, log)
        else:
            sanitize(kind, given, log)
    return 1 if log.failed else 0


if __name__ == "__main__":
    sys.exit(main())
