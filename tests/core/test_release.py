"""The release script finds what is wrong with a version, a changelog and distributions."""

from __future__ import annotations

import gzip
import importlib.util
import io
import re
import subprocess
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)
PLATFORMS = [
    "manylinux_2_28_x86_64",
    "manylinux_2_28_aarch64",
    "musllinux_1_2_x86_64",
    "musllinux_1_2_aarch64",
    "macosx_13_0_arm64",
    "any",
]


@pytest.fixture
def tree(tmp_path):
    """A small source tree and its distributions, all right."""
    source, dist = tmp_path / "tree", tmp_path / "dist"
    files = {
        "pyproject.toml": 'version = "1.2.0"\n',
        "src/halfbyte/__init__.py": '__version__ = "1.2.0"\n',
        "src/halfbyte_autoload/__init__.py": "x = 1\n",
    }
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    dist.mkdir()
    for platform in PLATFORMS:
        tags = "py3-none" if platform == "any" else "cp310-abi3"
        with zipfile.ZipFile(dist / f"halfbyte-1.2.0-{tags}-{platform}.whl", "w") as archive:
            for name, text in files.items():
                if name.startswith("src/"):
                    archive.writestr(name.removeprefix("src/"), text)
            archive.writestr("halfbyte-1.2.0.dist-info/METADATA", "Name: halfbyte\nVersion: 1.2.0\n")
            if platform != "any":
                archive.writestr("halfbyte/_native.abi3.so", b"")
    with tarfile.open(dist / "halfbyte-1.2.0.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("halfbyte-1.2.0/CMakeLists.txt"), io.BytesIO())
    return source, dist


def test_what_is_right_has_no_problem(tree):
    source, dist = tree
    assert release.version_of(source) == ("1.2.0", [])
    assert release.changelog_problems("# Changelog\n\n## 1.2.0 (2027-01-02)\n", "1.2.0") == []
    assert release.distribution_problems(dist, "1.2.0", source) == []


def test_this_tree_states_one_version():
    assert release.version_of()[1] == []


def test_the_source_distribution_of_this_tree_is_small():
    """What git tracks and scikit-build does not leave out, as a tar.gz, before it is shrunk. As
    scikit-build writes it, all files have one time and no owner, whatever the checkout's are.
    """
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git repository: the files of a source distribution are those that git tracks")
    [excluded] = re.findall(
        r"^sdist\.exclude = \[(.*?)\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    left_out = tuple(f"{name}/" for name in re.findall(r'"(.+?)"', excluded))

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in listed.stdout.splitlines():
            if not f"/{name}/".startswith(left_out) and (ROOT / name).is_file():
                archive.add(ROOT / name, f"halfbyte-0.1.0/{name}", filter=plain)
        assert "halfbyte-0.1.0/CMakeLists.txt" in archive.getnames()
        assert not any(name.startswith("halfbyte-0.1.0/tests/") for name in archive.getnames())
    content = release.ordered(packed.getvalue(), lambda order, files: order)
    assert 300_000 < len(gzip.compress(content, 9)) < release.PLAIN_LIMIT


def test_a_smaller_source_distribution_has_the_same_content(tree):
    _, dist = tree
    path = dist / "halfbyte-1.2.0.tar.gz"
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content, 0))
    before, after = release.shrink(dist, gzip.compress)
    assert before > len(content) > after == path.stat().st_size
    assert release.members_of(gzip.decompress(path.read_bytes())) == release.members_of(content)


def test_a_file_is_moved_to_where_less_is_left_of_it():
    random = np.random.default_rng(1)
    files = {f"f{i:02}": " ".join(f"w{j}" for j in random.integers(0, 1 << 40, 400)).encode() for i in range(16)}
    files["f15"] = files["f02"] + b" and more"
    order = sorted(files)
    found = release.better_places(order, files)
    assert sorted(found) == order
    before, after = (len(zlib.compress(b"".join(files[name] for name in names), 9)) for names in (order, found))
    assert after < 0.96 * before  # a sixteenth is there twice, and gzip sees it once


def test_like_files_lie_side_by_side():
    """Of two kinds of text, too long for one window together, each compresses its own."""
    random = np.random.default_rng(0)
    kinds = [" ".join(f"w{i}" for i in random.integers(0, 1 << 40, 2500)).encode() for _ in range(2)]
    files = {f"{i}{kind}": kinds[kind] + b" %d" % i for i in range(3) for kind in range(2)}
    order = [name[1] for name in release.like_beside_like(files)]
    assert order in (list("000111"), list("111000"))


@pytest.mark.parametrize("compress", [lambda content: gzip.compress(content, 0), lambda content: gzip.compress(content[:512])])
def test_what_is_larger_or_other_content_is_not_written(tree, compress):
    path = tree[1] / "halfbyte-1.2.0.tar.gz"
    before = path.read_bytes()
    with pytest.raises(ValueError, match="left as it was"):
        release.shrink(tree[1], compress)
    assert path.read_bytes() == before


@pytest.mark.parametrize("heading", ["Unreleased (1.2.0)", "1.2.0", "1.1.0 (2026-01-01)"])
def test_a_changelog_without_the_release(heading):
    [problem] = release.changelog_problems(f"# Changelog\n\n## {heading}\n", "1.2.0")
    assert "a release needs '## 1.2.0 (YYYY-MM-DD)'" in problem


def spoil_source(source, dist):
    (source / "src/halfbyte/__init__.py").write_text("changed")


def spoil_wheel(source, dist):
    (dist / "halfbyte-1.2.0-cp310-abi3-macosx_13_0_arm64.whl").unlink()


def spoil_tags(source, dist):
    wheel = dist / "halfbyte-1.2.0-cp310-abi3-macosx_13_0_arm64.whl"
    wheel.rename(dist / "halfbyte-1.2.0-cp312-cp312-macosx_13_0_arm64.whl")


def spoil_core(source, dist):
    with zipfile.ZipFile(dist / "halfbyte-1.2.0-py3-none-any.whl", "a") as archive:
        archive.writestr("halfbyte/_native.abi3.so", b"")


def spoil_sdist(source, dist):
    with (dist / "halfbyte-1.2.0.tar.gz").open("ab") as file:
        file.write(bytes(1 << 20))


SPOILT = {
    spoil_source: "files are missing or not those of this tree (halfbyte/__init__.py)",
    spoil_wheel: "no wheel for macOS arm64",
    spoil_tags: "tags cp312-cp312; cp310-abi3",
    spoil_core: "has the native core",
    spoil_sdist: "below 1,000,000 are wanted",
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT.items())
def test_each_fault_is_named(tree, spoil, message):
    source, dist = tree
    spoil(source, dist)
    assert any(message in problem for problem in release.distribution_problems(dist, "1.2.0", source))
