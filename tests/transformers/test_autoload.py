"""halfbyte in programs that do not import it: a folder of its own layout in transformers, its model
in lm-evaluation-harness.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import halfbyte as hb
import torch
from support.tiny_models import ids, logits, write_tiny
from support.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torch
assert "halfbyte" not in sys.modules
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
assert "halfbyte" in sys.modules
"""


def run(code, folder, *arguments):
    """A program in an environment where halfbyte is installed, as far as entry points go."""
    installed = folder / "site" / "halfbyte-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: halfbyte\nVersion: 0\n")
    text = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."torch.backends"]\n')[2]
    (installed / "entry_points.txt").write_text("[torch.backends]\n" + text.partition("\n")[0].replace('"', ""))
    path = os.pathsep.join([str(folder / "site"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.fixture
def saved(tmp_path):
    """What PROGRAM takes, and the logits it has to give."""
    write_tiny(tmp_path / "in", "llama", "mlx")
    model = hb.load_model(tmp_path / "in")[0]
    model.save_pretrained(tmp_path / "saved")
    torch.save(ids(), tmp_path / "ids.pt")
    return (tmp_path / "saved", tmp_path / "ids.pt", tmp_path / "logits.pt"), logits(model, ids())


def test_from_pretrained_without_an_import(tmp_path, saved):
    done = run(PROGRAM, tmp_path, *saved[0])
    assert torch.equal(torch.load(tmp_path / "logits.pt"), saved[1])
    assert "Unknown quantization type" not in done.stderr


OWN_CLASSES = """
assert "halfbyte" in auto.AUTO_QUANTIZER_MAPPING
import halfbyte.transformers as t
assert auto.AUTO_QUANTIZER_MAPPING["halfbyte"] is t.HalfbyteQuantizer
assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["halfbyte"] is t.HalfbyteConfig
"""
NOTHING_PATCHED = """
import transformers.modeling_utils as m
before = m.get_hf_quantizer
import halfbyte.transformers as t
assert m.get_hf_quantizer is before
t.HalfbyteConfig()
assert m.get_hf_quantizer is not before
"""
FORKED = """
import os, sys, traceback
{first}
for name, code in {programs!r}.items():
    child = os.fork()
    if not child:
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(name)
"""
"""Programs that go on from the same imports, each in a fork of its own."""


def test_programs_that_have_imported_transformers(tmp_path, saved):
    """The model is loaded without an import, importing halfbyte registers its own classes, and
    nothing is patched by that.
    """
    programs = {"from_pretrained": PROGRAM, "own classes": OWN_CLASSES, "nothing is patched": NOTHING_PATCHED}
    first = "import torch, transformers.modeling_utils, transformers.quantizers.auto as auto"
    done = run(FORKED.format(first=first, programs=programs), tmp_path, *saved[0])
    assert torch.equal(torch.load(tmp_path / "logits.pt"), saved[1])
    assert "Unknown quantization type" not in done.stderr


def test_a_program_without_transformers_imports_nothing_more(tmp_path):
    run("import sys, torch; assert 'transformers' not in sys.modules and 'halfbyte' not in sys.modules", tmp_path)


REGISTRY = """
class Registry(dict):
    def register(self, name, target=None):
        assert name not in self, name
        self[name] = target
model_registry = Registry()
"""


REGISTRIES = {
    REGISTRY: "halfbyte.evaluation.lm_harness:HalfbyteLM",
    "": None,
    REGISTRY + "model_registry['halfbyte'] = 'theirs'": "theirs",
}
ENTRY_POINTS = "torch._import_device_backends()"
"""What torch does at the end of its import, and in these forks on either side of the harness."""


@pytest.mark.parametrize("order", [f"{ENTRY_POINTS}; import lm_eval.models", f"import lm_eval.models; {ENTRY_POINTS}"])
def test_the_harness_gets_the_model_by_its_place(tmp_path, order):
    """A harness of two modules. A registry of another kind, or with the name, stays as it is."""
    programs = {}
    for i, (registry, want) in enumerate(REGISTRIES.items()):
        site = tmp_path / f"{i}"
        modules = {"": "", "api/": "", "models/": "import lm_eval.api.registry"}
        for folder, text in modules.items():
            (site / "lm_eval" / folder).mkdir(parents=True, exist_ok=True)
            (site / "lm_eval" / folder / "__init__.py").write_text(text)
        (site / "lm_eval" / "api" / "registry.py").write_text(registry)
        programs[f"registry {i}"] = (
            f"sys.path.insert(0, {str(site)!r})\n{order}\n"
            "registry = getattr(lm_eval.api.registry, 'model_registry', {})\n"
            f"assert registry.get('halfbyte') == {want!r}, registry\n"
            "assert 'halfbyte' not in sys.modules"
        )
    first = "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import torch"
    run(FORKED.format(first=first, programs=programs), tmp_path)


TASK = """
task: two_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: ["<tok9>", "<tok10>"]
metric_list: [{{metric: acc}}]
"""


@pytest.mark.ecosystem("applications")
def test_the_harness_command_runs_a_packed_model(tmp_path):
    """`lm_eval run --model halfbyte` on a task of a local file; the choices are those of the
    model's own likelihoods.
    """
    write_tiny(tmp_path / "in", "llama", "mlx")
    write_tokenizer(tmp_path / "in")
    model, tokenizer = hb.load_model(tmp_path / "in")
    questions = ["<tok7> <tok8>", "<tok6>", "<tok15> <tok16> <tok14>", "<tok11> <tok12>"]
    (tmp_path / "data.json").write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    (tmp_path / "two_words.yaml").write_text(TASK.format(data=tmp_path / "data.json"))
    arguments = ["run", "--model", "halfbyte", "--model_args", f"path={tmp_path / 'in'}", "--tasks", "two_words",
                 "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--batch_size", "1"]  # fmt: skip
    run(f"import sys; sys.argv[1:] = {arguments!r}; from lm_eval.__main__ import cli_evaluate; cli_evaluate()", tmp_path)
    [written] = (tmp_path / "out").rglob("results_*.json")
    first = 0
    for question in questions:
        prompt = torch.tensor([tokenizer(question)["input_ids"]])
        [nine, ten] = (tokenizer(" " + word, add_special_tokens=False)["input_ids"][-1] for word in ("<tok9>", "<tok10>"))
        last = logits(model, prompt)[0, -1]
        first += bool(last[nine] > last[ten])
    assert json.loads(written.read_text())["results"]["two_words"]["acc,none"] == first / len(questions)
