"""Every producer in an environment of its own: python tests/support/producers/run.py OUT [--venvs
FOLDER] [--only NAME ...].

Makes the environments that are missing (environments.py; 1 to 2 GB each, half an hour in all, and a
compiler for llama.cpp), lets each write its tiny models into OUT/NAME, and prints a table of what
was written and what was refused, with the producer's reason. `make test-ecosystem` does this, then
runs the tests of every environment, those that load OUT among them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from environments import SETTINGS, WRITERS, llama_cpp_source, python_of

HERE = Path(__file__).parent


def llama_cpp(venvs: Path, python: Path) -> dict[str, str]:
    """llama.cpp's converter and llama-quantize, built from its sources."""
    source, build = llama_cpp_source(venvs, python), venvs / "llama.cpp" / "build"
    if not (build / "bin" / "llama-quantize").exists():
        flags = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_SERVER", "CURL", "OPENSSL")
        # Tiny models are quantized in no time; what takes long is the compiler.
        options = ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_C_FLAGS=-O1", "-DCMAKE_CXX_FLAGS=-O1", "-DGGML_NATIVE=OFF"]
        options += ["-DGGML_LLAMAFILE=OFF", *(f"-DLLAMA_{f}=OFF" for f in flags)]
        subprocess.run(["cmake", "-S", str(source), "-B", str(build), *options], check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", "llama-quantize", "-j2"], check=True)
    return {"LLAMA_CPP": str(source), "LLAMA_QUANTIZE": str(build / "bin" / "llama-quantize")}


def main() -> None:
    """Write everything, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--venvs", type=Path, default=Path(".venv-producers"))
    parser.add_argument("--only", nargs="*", default=list(WRITERS), choices=list(WRITERS))
    given = parser.parse_args()
    out, venvs = given.out.absolute(), given.venvs.absolute()
    if not (out / "dense").exists():
        subprocess.run([sys.executable, str(HERE / "dense.py"), str(out / "dense")], check=True)
    print("| producer | checkpoint | bytes, or why not |\n|---|---|---|", flush=True)
    for name in given.only:
        try:
            python = python_of(venvs, name)
            tools = llama_cpp(venvs, python) if name == "llamacpp" else {}
        except (subprocess.CalledProcessError, OSError, StopIteration) as error:
            print(f"| {name} | | not installed: {error} |", flush=True)
            continue
        command = [str(python), str(HERE / f"{name}_write.py"), str(out / "dense"), str(out / name)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | SETTINGS | tools, cwd=out)
        (out / f"{name}.log").write_text(done.stdout + done.stderr)
        found = False
        for line in done.stdout.splitlines():
            at = max(line.find('{"wrote"'), line.find('{"refused"'))
            if at >= 0:
                record, found = json.loads(line[at:]), True
                what = f"{record['bytes']:,}" if "wrote" in record else record["why"].replace("\n", " ").replace("|", "/")[:200]
                print(f"| {name} | {record.get('wrote') or record['refused']} | {what} |", flush=True)
        if done.returncode or not found:
            print(f"| {name} | | stopped with {done.returncode}; see {out / (name + '.log')} |", flush=True)


if __name__ == "__main__":
    main()
