"""The native core's aarch64 kernels under an emulator: its tests, hashes and outputs in Python.

    tools/neon.py [--sets i8mm neon] [--model FILE ...] [--parts hash outputs tests] [--log FILE]

Builds the module with the cross compiler, unpacks Debian's Python 3.11 of arm64 and the wheels that
halfbyte needs (no torch) under build/neon-python, and runs, by qemu-user and on each set
(`HALFBYTE_CPU`): `selftest --hash`, with each `--model` the hash of its logits;
`support.output_bytes` (GGUF is refused there, whose writer needs transformers); TESTS. Needs
g++-aarch64-linux-gnu, qemu-user, apt-get with Debian 12's sources, pip and CMake; exits with 1
where a step fails.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "build" / "neon-python"
BUILD = ROOT / "build" / "neon-module"
SYSTEM, SITE, TREE, PYTHON = HERE / "root", HERE / "site", HERE / "tree", HERE / "python"
DEBIAN = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "python3.11", "libpython3.11-dev", "libc6",
    "libstdc++6", "libgcc-s1", "zlib1g", "libssl3", "libffi8", "libexpat1", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1",
    "libcrypt1", "libtinfo6", "libncursesw6", "libreadline8", "libdb5.3", "libnsl2", "libtirpc3",
)  # fmt: skip
WHEELS = ("numpy", "ml_dtypes", "safetensors", "gguf", "typer", "rich", "nanobind-backend", "tokenizers", "pytest", "hypothesis")
PLATFORMS = (*(f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 26, 24, 17)), "manylinux2014_aarch64")
TESTS = (
    "test_cases.py", "test_decode.py", "test_memory.py", "test_offsets.py", "test_pages.py", "test_linear.py", "test_boundary.py",
)  # fmt: skip
"""Of tests/backends/cpu: all but test_product_hash.py, which makes models with torch."""
LEFT_OUT = "not torch and not forked_child"
"""Tests of torch's threads; qemu 7.2 itself aborts where a forked child starts threads."""
MARKS = "not gpu and not slow and not ecosystem and not hypothesis"


def system() -> None:
    """Debian's Python of arm64, unpacked beside the system and not into it."""
    state = [f"Dir::State={HERE}/state", "Dir::State::status=/dev/null", f"Dir::Cache={HERE}/cache"]
    state += ["APT::Architecture=arm64", "APT::Architectures=arm64", "APT::Sandbox::User=root"]
    apt = ["apt-get", "-q", *(word for one in state for word in ("-o", one))]
    for folder in ("state/lists/partial", "cache/archives/partial", "debs", "root"):
        (HERE / folder).mkdir(parents=True, exist_ok=True)
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *DEBIAN], check=True, cwd=HERE / "debs")
    for package in sorted((HERE / "debs").glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, SYSTEM], check=True)


def wheels() -> None:
    """The packages that halfbyte and its tests import."""
    platforms = [word for one in PLATFORMS for word in ("--platform", one)]
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(SITE), *platforms]
    subprocess.run([*command, "--python-version", "3.11", "--only-binary=:all:", *WHEELS], check=True)


def module() -> None:
    """The native module, cross-compiled, in a copy of the sources, and the emulated Python."""
    headers = SYSTEM / "usr" / "include"
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DPython_INCLUDE_DIR={headers}/python3.11"]
    options += ["-DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake", f"-DCMAKE_CXX_FLAGS=-idirafter {headers}"]
    subprocess.run(["cmake", "-S", ".", "-B", str(BUILD), *options], check=True, cwd=ROOT)
    subprocess.run(["cmake", "--build", str(BUILD), "--target", "_native"], check=True, cwd=ROOT)
    shutil.rmtree(TREE, ignore_errors=True)
    others = shutil.ignore_patterns("_native*.so", "__pycache__")
    for name in ("src", "tests", "docs", "native"):
        shutil.copytree(ROOT / name, TREE / name, ignore=others)
    for name in ("pyproject.toml", "pytest.ini"):
        shutil.copy(ROOT / name, TREE)
    [built] = BUILD.glob("_native*.so")
    shutil.copy(built, TREE / "src" / "halfbyte")
    paths = os.pathsep.join(map(str, (HERE / "own", TREE / "src", TREE / "tests", SITE)))
    # Processes that Python starts are this command again: no aarch64 program runs here by itself.
    (HERE / "own").mkdir(exist_ok=True)
    (HERE / "own" / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(PYTHON)!r}\n")
    libraries = SYSTEM / "usr" / "lib" / "aarch64-linux-gnu"
    PYTHON.write_text(
        f"#!/bin/sh\nexport PYTHONPATH=${{PYTHONPATH:-{paths}}} PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1\n"
        f'exec qemu-aarch64 -cpu max -L {SYSTEM} -E LD_LIBRARY_PATH={libraries} {SYSTEM}/usr/bin/python3.11 "$@"\n'
    )
    PYTHON.chmod(0o755)


def main() -> int:
    """Every part, logged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=[], help="GGUF files whose logits are hashed")
    parser.add_argument("--parts", nargs="+", default=["hash", "outputs", "tests"], choices=["hash", "outputs", "tests"])
    parser.add_argument("--sets", nargs="+", default=["i8mm", "neon"], help="instruction sets of the core, one after another")
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    if not (SYSTEM / "usr" / "bin" / "python3.11").exists():
        system()
    if not SITE.exists():
        wheels()
    module()
    models = [["--model", os.path.abspath(path)] for path in given.model] or [[]]
    hashes = [["-m", "halfbyte", "selftest", "--hash", *model] for model in models]
    tests = [
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS, "-k", LEFT_OUT, f"tests/backends/cpu/{name}"]
        for name in TESTS
    ]
    steps = {"hash": hashes, "outputs": [["-m", "support.output_bytes"]], "tests": tests}
    lines, failed = [f"# tools/neon.py {shlex.join(sys.argv[1:])}; {datetime.date.today()}; qemu-user"], False
    for name, step in ((name, step) for part in given.parts for name in given.sets for step in steps[part]):
        environment = {**os.environ, "HALFBYTE_CPU": name}
        done = subprocess.run([str(PYTHON), *step], cwd=TREE, capture_output=True, text=True, env=environment)
        failed |= done.returncode != 0
        out = [line for line in done.stdout.splitlines() if not line.startswith(("output ", "{"))]
        out += done.stderr.splitlines() if done.returncode else []
        words = [f"FILE/{os.path.basename(word)}" if os.path.isabs(word) else word for word in step]
        lines += [f"$ HALFBYTE_CPU={name} python {shlex.join(words)}", *out[-40:], f"-> status {done.returncode}"]
        print("\n".join(lines[-len(out[-40:]) - 2 :]), flush=True)
        if given.log:
            given.log.write_text("\n".join(lines) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
