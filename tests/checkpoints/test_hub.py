"""Checkpoints on the hub, against a local server: what is read, how many bytes of it, and every
fault of a server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("huggingface_hub")

import halfbyte as hb
from halfbyte.checkpoints.hub import HubName, HubWarning, local_copy, parse_name, repository
from halfbyte.checkpoints.hub.repository import PATIENCE, human
from halfbyte.cli import main
from halfbyte.errors import CheckpointError
from support.gguf_writer import GGUF, Q8_0, Tensor
from support.hub_server import COMMIT, SPOILT, HubServer
from support.safetensors_bytes import MLX, SHARDS, A, B, gptq_weight, mlx_weight, two_shards, under, write

N, K = 2048, 4096
"""A weight of 4.7 MB, so that one percent of the file is more than its header."""


def big(seed: int = 0) -> dict[str, np.ndarray]:
    return mlx_weight(N, K, seed=seed)


@pytest.fixture
def shards(tmp_path: Path) -> dict[str, bytes]:
    """Two shards of an MLX checkpoint with an index."""
    folder = tmp_path / "written"
    folder.mkdir()
    two_shards(folder)
    write(folder / SHARDS[0], under(A, big()) | {f"{B}.scales": big(1)["scales"], f"{B}.biases": big(1)["biases"]})
    write(folder / SHARDS[1], {f"{B}.weight": big(1)["weight"]})
    index = {f"{A}.{s}": SHARDS[0] for s in big()} | {f"{B}.{s}": SHARDS[0] for s in ("scales", "biases")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index | {f"{B}.weight": SHARDS[1]}}))
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234, "1.23 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (10**9 - 1, "1 GB"),
     (25 * 10**9, "25 GB"), (3 * 10**12, "3 TB")],
)  # fmt: skip
def test_bytes_have_three_digits_and_a_unit(nbytes, text):
    assert human(nbytes) == text


@pytest.fixture
def hub(shards, monkeypatch, tmp_path):
    with HubServer(shards) as server:
        server.point(monkeypatch, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        yield server


def failure(name: str = "org/model") -> str:
    with pytest.raises(CheckpointError) as raised:
        hb.open(name)
    return str(raised.value)


# ------------------------------------------------------------------------------------------------
# names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name/q4/model.gguf@main", HubName("org/name", "main", "q4/model.gguf")),
        ("hf://org/name", HubName("org/name")),
        ("hf:/org/name/x.gguf", HubName("org/name", "", "x.gguf")),
        ("name", None), ("./org/name", None), ("/org/name", None), ("org/name/part", None), ("org/model.safetensors", None),
        ("../name", None), ("org/", None), ("org/name@", None), ("a b/c", None), ("org//name", None),
    ],
)  # fmt: skip
def test_names_of_repositories(text, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_name(text) == name
    if name:
        assert parse_name(Path(text)) == name
    if name and not text.startswith("hf:"):
        assert str(name) == text


def test_a_folder_of_that_name_is_opened_and_one_beside_it_is_missed(tmp_path, monkeypatch, hub):
    (tmp_path / "org" / "model").mkdir(parents=True)
    write(tmp_path / "org" / "model" / "model.safetensors", under(A, mlx_weight()))
    (tmp_path / "org" / "model" / "config.json").write_text(json.dumps(MLX))
    assert hb.open("org/model").remote is None
    assert "no such file or folder" in failure("org/other")  # org is a folder here: a local name was mistyped
    assert hub.pages == []
    assert hb.open("hf://org/model").remote is not None


# ------------------------------------------------------------------------------------------------
# what is read


def test_headers_are_read_and_under_one_percent_of_the_bytes(hub):
    with hb.open("org/model") as checkpoint:
        assert checkpoint.keys() == (A, B)
        assert checkpoint.info(B).shape == (N, K)
        assert set(checkpoint.info(B).files) == set(SHARDS)
        assert {f.code for f in checkpoint.findings()} == {"read-remotely"}
        assert checkpoint.ledger().problems == ()
        assert len(hub.requests) == checkpoint.remote.requests == 2
        assert checkpoint.remote.received <= hub.sent < hub.size / 100 + 65536
    assert sorted(hub.requests) == [(name, "bytes=0-65535") for name in SHARDS]
    assert len(hub.pages) == 1


def test_inspect_prints_what_was_read(hub, capsys):
    assert main(["inspect", f"org/model@{COMMIT}"]) == 0
    out = capsys.readouterr().out
    assert f"org/model@{COMMIT[:12]}: mlx" in out
    assert "read by 2 range requests of 131 kB in all" in out
    assert hub.sent < hub.size / 50


def test_a_longer_header_takes_a_second_request(hub, monkeypatch):
    from halfbyte.checkpoints.hub import files

    monkeypatch.setattr(files, "FIRST_BYTES", 100)
    assert hb.open("org/model").keys() == (A, B)
    assert len(hub.requests) == 4
    assert hub.sent < 20_000


def test_a_weight_is_read_by_its_own_ranges(hub, shards):
    hub.redirects = True
    with hb.open("org/model") as checkpoint, warnings.catch_warnings():
        warnings.simplefilter("error", HubWarning)
        weight = checkpoint[B]
    assert np.array_equal(weight.parts["biases"], big(1)["biases"])
    assert np.array_equal(weight.dequantize("float32"), hb.open(written(shards, hub))[B].dequantize("float32"))
    assert len(hub.requests) == 2 + 3


def written(files: dict[str, bytes], hub: HubServer) -> Path:
    folder = Path("as-local")
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_many_bytes_are_announced_once(hub, monkeypatch):
    monkeypatch.setattr(repository, "QUIET_BYTES", 1000)
    with (
        hb.open("org/model") as checkpoint,
        pytest.warns(HubWarning, match=r"over the network and not kept, .*hf download") as seen,
    ):
        checkpoint[A], checkpoint[B]
    assert len(seen) == 1


def test_exactly_the_quiet_bytes_are_not_announced(hub):
    """The byte after them is, and none that follows."""
    with hb.open("org/model"):
        read = repository.Repository(HubName("org/model"), "c" * 40, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read.announce(repository.QUIET_BYTES)
        read.announce(0)
    with pytest.warns(HubWarning, match="over the network and not kept"):
        read.announce(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read.announce(repository.QUIET_BYTES)


def test_the_version_label_of_gptq_is_said_not_to_be_read(hub):
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}}
    path = write(Path("gptq.safetensors"), under(A, gptq_weight(stored_zero=8)))
    hub.files = {"config.json": json.dumps(config).encode(), "model.safetensors": path.read_bytes()}
    codes = {f.code for f in hb.open("org/model").findings()}
    assert "gptq-label-unread" in codes
    assert "gptq-label" not in codes


def test_a_gguf_is_opened_by_its_header(hub, monkeypatch):
    from halfbyte.checkpoints.hub import files

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 255, (256, 4096 // 32 * 34), dtype=np.uint8)
    blocks.reshape(-1, 34)[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    words = [("tokenizer.ggml.tokens", "array[string]", [f"token {i}" for i in range(500)])]
    model = GGUF(
        [("general.architecture", "string", "llama"), *words],
        [Tensor("blk.0.attn_q.weight", (4096, 256), Q8_0, blocks.tobytes())],
    ).bytes()
    hub.files = {"a/model-Q8_0.gguf": model, "model-Q4_K.gguf": model, "mmproj.gguf": b"GGUF"}
    monkeypatch.setattr(files, "FIRST_GGUF", 1000)
    with hb.open("org/model/a/model-Q8_0.gguf") as checkpoint:
        assert checkpoint.info("blk.0.attn_q").shape == (256, 4096)
        assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 500
        assert not {"tied-head-twice", "unknown-tensor"} & {f.code for f in checkpoint.findings()}
        assert hub.sent < 40_000
        raw = checkpoint["blk.0.attn_q"]
    Path("local.gguf").write_bytes(model)
    assert np.array_equal(raw.dequantize("float32"), hb.open("local.gguf")["blk.0.attn_q"].dequantize("float32"))
    assert "2 models: a/model-Q8_0.gguf (1.12 MB), model-Q4_K.gguf (1.12 MB); open one" in failure()


def test_a_split_gguf_is_all_of_its_parts(hub):
    """By the repository's name and by the first part's; a part that is missing is named."""
    blocks = np.zeros((4, 34), np.uint8)
    for i in range(3):
        pairs = [("split.no", "uint16", i), ("split.count", "uint16", 3), ("split.tensors.count", "int32", 3)]
        tensor = Tensor(f"blk.{i}.attn_q.weight", (32, 4), Q8_0, (blocks + i).tobytes())
        hub.files[f"m-0000{i + 1}-of-00003.gguf"] = GGUF([("general.architecture", "string", "llama"), *pairs], [tensor]).bytes()
    hub.files = {name: data for name, data in hub.files.items() if name.endswith(".gguf")}
    for name in ("org/model", "org/model/m-00001-of-00003.gguf"):
        with hb.open(name) as checkpoint:
            assert checkpoint.keys() == tuple(f"blk.{i}.attn_q" for i in range(3))
            assert [checkpoint.info(f"blk.{i}.attn_q").files for i in range(3)] == [
                (f"m-0000{i + 1}-of-00003.gguf",) for i in range(3)
            ]
    del hub.files["m-00002-of-00003.gguf"]
    assert "m-00001-of-00003.gguf: part 'm-00002-of-00003.gguf' is missing in the repository" in failure()


# ------------------------------------------------------------------------------------------------
# downloads


def test_a_command_that_reads_weights_says_the_size_and_downloads_once(hub, capsys):
    assert main(["dequantize", "org/model", "dense"]) == 0
    said = capsys.readouterr().err
    assert f"downloading 10.5 MB in 4 files of org/model@{COMMIT[:12]}" in said
    assert hb.open("dense")[f"{A}.weight"].shape == (N, K)
    sent = hub.sent
    assert main(["verify", "org/model", "dense"]) == 0
    assert "downloading" not in capsys.readouterr().err
    assert hub.sent - sent < 10_000


def test_offline_the_cache_serves_and_nothing_is_asked(hub, monkeypatch):
    from huggingface_hub import constants

    with pytest.warns(HubWarning, match="downloading"):
        folder = local_copy("org/model@main")
    pages, requests = len(hub.pages), len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    checkpoint = hb.open(f"org/model@{COMMIT}")
    assert checkpoint.path == folder
    assert (len(hub.pages), len(hub.requests)) == (pages, requests)
    assert "offline (HF_HUB_OFFLINE)" in failure("org/never-fetched") or "cache" in failure("org/never-fetched")


def test_plan_reads_headers(hub):
    pytest.importorskip("transformers")
    tiny = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
        "vocab_size": 64, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    at = "model.layers.0."
    linear = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
    norms = ("model.norm", f"{at}input_layernorm", f"{at}post_attention_layernorm")
    tensors = {f"{at}{name}.weight": np.ones((64, 64), np.float32) for name in (*linear, "mlp.down_proj")}
    tensors |= {f"{n}.weight": np.ones(64, np.float32) for n in norms} | {
        "model.embed_tokens.weight": np.ones((64, 64), np.float32)
    }
    path = write(Path("plain.safetensors"), tensors)
    hub.files = {"config.json": json.dumps(tiny).encode(), "model.safetensors": path.read_bytes()}
    assert main(["plan", "org/model", "--context", "64"]) == 0
    assert len(hub.requests) == 1


# ------------------------------------------------------------------------------------------------
# servers


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("other-range", "the server sends 'bytes 1-"),
        ("compressed", "compresses byte ranges"),
        ("short", "in each of 4 tries"),
    ],
)
def test_a_spoilt_reply_is_an_error_with_a_way_on(hub, fault, said):
    hub.fault = fault
    message = failure()
    assert said in message
    assert "hf download org/model --local-dir model" in message
    assert ".safetensors" in message


@pytest.mark.parametrize("when", ["opening", "reading"])
@pytest.mark.parametrize("fault", [*SPOILT, "hang-up"])
def test_whatever_a_server_answers_is_an_error_with_the_name(hub, monkeypatch, fault, when):
    """On opening and between two requests; within seconds, nothing of the weights is taken over."""
    monkeypatch.setattr(repository, "ATTEMPTS", 2)
    checkpoint = hb.open("org/model") if when == "reading" else None
    hub.fault, sent = fault, len(hub.requests)
    start = time.monotonic()
    if checkpoint is None:
        message = failure()
    elif fault in ("zeros", "ones", "text"):  # its range, size and ETag are those of the file: bytes like any others
        assert checkpoint[A].shape == (N, K)
        return
    else:
        with pytest.raises(CheckpointError) as raised:
            checkpoint[A]
        message = str(raised.value)
    assert "org/model" in message
    assert len(message) < 1000
    assert time.monotonic() - start < 10
    assert len(hub.requests) - sent <= 60


@pytest.mark.parametrize(
    "listing",
    [
        [], {}, "files", 7, [None], [{}], [{"rfilename": "model.safetensors"}], [{"rfilename": "model.safetensors", "size": -1}],
        [{"rfilename": "model.safetensors", "size": "9"}], [{"rfilename": "model.safetensors", "size": 10**30}],
        [{"rfilename": "../model.safetensors", "size": 9}], [{"rfilename": "/etc/model.safetensors", "size": 9}],
        [{"rfilename": "a\\model.safetensors", "size": 9}], [{"rfilename": "", "size": 9}], [{"rfilename": 5, "size": 9}],
        [{"rfilename": "model.safetensors", "size": 3}], [{"rfilename": "model\x00.safetensors", "size": 900}],
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_a_damaged_list_of_files_is_an_error_with_the_name(hub, listing):
    hub.listing = listing
    assert "org/model" in failure()


@pytest.mark.parametrize("shard", [SHARDS[1], "model-00009-of-00009.safetensors", "", 5, None, "a/../../x.safetensors"])
def test_an_index_that_names_another_shard_is_refused_by_its_name(hub, shard):
    index = json.loads(hub.files["model.safetensors.index.json"])
    if shard == SHARDS[1]:
        del hub.files[shard]
    else:
        index["weight_map"][f"{B}.weight"] = shard
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    message = failure()
    assert "org--model" in message  # the index is a file of the cache
    assert "model.safetensors.index.json" in message
    assert f"{B}.weight" in message or "'..'" in message


def test_a_server_without_ranges_gives_headers_and_no_weights(hub):
    hub.fault = "no-ranges"
    with hb.open("org/model") as checkpoint:
        assert checkpoint.remote.received == 2 * 65536  # the rest of each reply is not read
        with pytest.raises(CheckpointError, match="sends the whole file for a byte range; download it"):
            checkpoint[A]


def test_more_bytes_than_asked_for_are_not_read(hub):
    hub.fault = "longer"
    assert hb.open("org/model").keys() == (A, B)


def test_a_file_that_changes_between_requests_is_noticed(hub):
    hub.fault = "changed"
    with hb.open("org/model") as checkpoint, pytest.raises(CheckpointError, match=r"changed on the server .* open it again"):
        checkpoint[A]


def test_a_busy_server_is_asked_again(hub):
    hub.busy = 2
    assert hb.open("org/model").keys() == (A, B)
    assert len(hub.requests) == 4
    hub.busy = 100
    assert "limiting the rate of requests (HTTP 429), in each of 4 tries" in failure()


def test_a_server_that_drips_is_given_up(hub, monkeypatch):
    hub.fault = "drip"
    monkeypatch.setattr(repository, "PATIENCE", 0.05 if PATIENCE else 0)
    monkeypatch.setattr(repository, "BYTES_PER_SECOND", 1 << 30)
    monkeypatch.setattr(repository, "ATTEMPTS", 2)
    assert "of 65,536 bytes came in" in failure()


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (404, "RepoNotFound", "neither a file or folder here, nor a repository"),
        (401, "RepoNotFound", "hf auth login"),
        (403, "GatedRepo", "accept its terms at"),
        (404, "RevisionNotFound", "give a branch, a tag or a commit"),
        (429, "", "limits the rate of requests"),
        (500, "", "answers HTTP 500"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(hub, status, error, said):
    hub.status, hub.error = status, error
    message = failure("org/model@v2")
    assert said in message
    assert hub.requests == []


def test_no_server_at_all(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "check the connection and HF_ENDPOINT" in failure()


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.token, hub.redirects = "hf_secret", True
    hb.open("org/model")
    sent = {path.startswith("/cdn/"): ok for path, ok in hub.authorized if path.endswith(".safetensors")}
    assert sent == {False: True, True: False}


def test_without_the_package_the_message_names_the_extra(monkeypatch, tmp_path):
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "no such file or folder here" in failure()
    assert "pip install 'halfbyte[hub]'" in failure()


def test_an_index_that_leaves_the_repository_is_refused(hub):
    index = {"weight_map": {f"{A}.weight": "../other/model.safetensors"}}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    assert "'..'" in failure()
    assert hub.requests == []


def test_a_name_on_the_hub_in_a_new_process(tmp_path):
    """huggingface_hub imports its parts when they are asked for; no other test has done so here."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = "from halfbyte.cli import main; raise SystemExit(main(['inspect', 'org/model']))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("halfbyte: [hub] org/model: ")


def test_waits_double_up_to_the_longest_unless_the_server_says_how_long(hub, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(repository.time, "sleep", waits.append)
    monkeypatch.setattr(repository, "WAIT", 3.0)
    monkeypatch.setattr(repository, "LONGEST_WAIT", 10.0)
    with hb.open("org/model") as checkpoint:
        hub.busy = 100
        with pytest.raises(CheckpointError, match="in each of 4 tries"):
            checkpoint.remote.read("model-00001-of-00002.safetensors", 0, 8)
    assert waits == [3.0, 6.0, 10.0]
