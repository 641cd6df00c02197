"""Tiles by card: the nearest shape, the smallest m that is enough, the user's file before the
default one; no GPU needed.
"""

from __future__ import annotations

import json

import pytest

from halfbyte.backends.cuda.tuning import table as f
from halfbyte.backends.cuda.tuning.mma_tiles import FragmentTile, expert_tile, fragment_tile, steps
from halfbyte.errors import BackendError

CARD = "NVIDIA T9 80GB"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    f.entries_for.cache_clear()
    f.found.cache_clear()
    yield f.user_file(CARD)
    f.entries_for.cache_clear()
    f.found.cache_clear()


def entry(n, k, m, tile, family="int"):
    return {"kernel": "fragments", "family": family, "n": n, "k": k, "m": m, "tile": tile}


def test_nearest_shape_and_smallest_m(cache):
    f.write(cache, CARD, "today", [entry(4096, 4096, 4, [1, 1, 8, 1]), entry(4096, 4096, 16, [2, 2, 8, 1]),
                                   entry(14336, 4096, 4, [2, 1, 16, 1])])  # fmt: skip
    assert f.found(CARD, "fragments", "int", 4000, 4096, 1) == (1, 1, 8, 1)
    assert f.found(CARD, "fragments", "int", 4096, 4096, 5) == (2, 2, 8, 1)
    assert f.found(CARD, "fragments", "int", 20000, 2048, 4) == (2, 1, 16, 1)
    assert f.found(CARD, "fragments", "int", 4096, 4096, 17) is None
    assert f.found(CARD, "fragments", "e2m1", 4096, 4096, 1) is None
    assert fragment_tile(64, 4096, 3, "int", CARD) == FragmentTile(1, 1, 8, 1)
    assert fragment_tile(64, 4096, 3, "int") != FragmentTile(1, 1, 8, 1)


def test_writing_again_replaces_what_it_measured(cache):
    f.write(cache, CARD, "one", [entry(64, 64, 4, [1]), entry(64, 128, 4, [2])])
    f.write(cache, CARD, "two", [entry(64, 64, 4, [3])])
    assert [(e["k"], e["tile"]) for e in f.read(cache)] == [(64, [3]), (128, [2])]
    assert json.loads(cache.read_text())["card"] == CARD


@pytest.mark.parametrize("text", ["", "[]", '{"tiles": 3}', '{"tiles": [{"kernel": "fragments"}]}'])
def test_a_file_that_is_no_table_is_named(cache, text):
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(text)
    with pytest.raises(BackendError, match=r"\[cuda\] .*tiles-t9.json holds no tiles: .*; remove it, or run `halfbyte tune`"):
        f.found(CARD, "fragments", "int", 1, 1, 1)


def test_words_of_cards():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB")
    assert [f.word_of(c) for c in names] == ["h100", "h200", "nvidia-geforce-rtx-4090", "a100"]


@pytest.mark.parametrize("path", sorted(f.DEFAULT.glob("*.json")), ids=lambda path: path.stem)
def test_a_call_takes_the_default_tile_of_its_card(path, cache):
    """Through the functions that the launches call, by the card's full name; and no tile asks for
    more warps than a program has, or for a step that the kernel cannot take.
    """
    card = json.loads(path.read_text())["card"]
    assert f.word_of(card) == path.stem
    entries = f.read(path)
    assert {e["kernel"] for e in entries} <= {"fragments", "experts"}
    assert len({f.key(e) for e in entries}) == len(entries) > 0
    for e in entries:
        choose = fragment_tile if e["kernel"] == "fragments" else expert_tile
        tile = choose(e["k"] // 64, e["n"], e["m"], e["family"], card)
        assert tile == FragmentTile(*e["tile"])
        assert tile.input_warps * tile.row_warps <= 16
        assert tile.ahead in (0, 1, 2)
        groups = {"e2m1": 32, "fine": 16}.get(e["family"], 128)
        step, _, tokens = steps(groups, e["k"] // 64, e["m"], tile)
        assert step & (step - 1) == 0
        assert tokens * tile.columns >= min(e["m"], 8)


def test_cards_with_default_tiles():
    assert [path.stem for path in sorted(f.DEFAULT.glob("*.json"))] == ["h100", "h200"]


def test_tuning_without_a_gpu_says_what_is_missing(capsys):
    from halfbyte.backends import backend_named
    from halfbyte.cli import main

    why = backend_named("cuda").reason()
    if why is None:
        pytest.skip("a GPU is here")
    assert main(["tune"]) == 2
    assert capsys.readouterr().err == f"halfbyte: [tune] {why}\n"


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--shape", "64"], "--shape '64'; N,K"), (["--m", "0"], "--m '0'; whole numbers")]
)
def test_tune_names_itself_where_its_options_are_wrong(arguments, says, capsys):
    from halfbyte.cli import main

    assert main(["tune", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"halfbyte: [tune] {says}")
