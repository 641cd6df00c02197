"""Checks of a release before it is published: version, changelog, tag, and the built distributions.

    python tools/release.py dist --shrink        compresses the source distribution again, with zopfli
    python tools/release.py dist                 all checks; status 1 and a line for each that fails
    python tools/release.py dist --install       also installs the wheel of this platform in an empty
                                                 environment and runs its selftest

Publishing is the workflow .github/workflows/wheels.yml, which a maintainer starts.
"""

from __future__ import annotations

import argparse
import gzip
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
import zlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
SDIST_LIMIT = 1_000_000
"""Bytes: the source distribution is smaller than this."""
PLAIN_LIMIT = 1_050_500
"""Bytes of these files in the order of `like_beside_like` as Python's gzip compresses them; better
places (`better_places`) take 0.5 % off, and zopfli 4.3 % of the rest.
"""
PLATFORMS = {
    "manylinux x86-64": r"manylinux.*_x86_64",
    "manylinux aarch64": r"manylinux.*_aarch64",
    "musllinux x86-64": r"musllinux.*_x86_64",
    "musllinux aarch64": r"musllinux.*_aarch64",
    "macOS arm64": r"macosx.*_arm64",
    "any (Windows)": r"any",
}
WHEEL = re.compile(r"halfbyte-(?P<version>[^-]+)-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl")


def version_of(root: Path = ROOT) -> tuple[str, list[str]]:
    """(the version of pyproject.toml, what disagrees with it)."""
    stated = re.search(r'^version = "(.+)"', (root / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    imported = re.search(r'^__version__ = "(.+)"', (root / "src/halfbyte/__init__.py").read_text("utf-8"), re.MULTILINE)
    version = stated[1] if stated else ""
    same = imported is not None and imported[1] == version
    return version, [] if same else [f"halfbyte.__version__ is {imported and imported[1]}; pyproject.toml has {version}"]


def changelog_problems(text: str, version: str) -> list[str]:
    """What CHANGELOG.md lacks for a release: a dated section of this version before all others."""
    first = re.search(r"^## (.+)$", text, re.MULTILINE)
    heading = first[1] if first else ""
    if re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)", heading):
        return []
    return [f"CHANGELOG.md begins with {heading!r}; a release needs '## {version} (YYYY-MM-DD)'"]


def tag_problems(version: str, root: Path = ROOT) -> list[str]:
    """HEAD must have the tag of the version, and nothing uncommitted beside it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout

    found = [] if f"v{version}" in git("tag", "--points-at", "HEAD").split() else [f"HEAD has no tag v{version}"]
    return found + (["the work tree has uncommitted changes"] if git("status", "--porcelain", "--untracked-files=no") else [])


def wheel_problems(path: Path, version: str, root: Path = ROOT) -> list[str]:
    """A wheel must state the version, be abi3 or pure, and hold the Python sources of this tree."""
    match = WHEEL.fullmatch(path.name)
    if match is None or match["version"] != version:
        return [f"{path.name} is no wheel of halfbyte {version}"]
    found = []
    pure = match["platform"] == "any"
    if (match["python"], match["abi"]) != (("py3", "none") if pure else ("cp310", "abi3")):
        found.append(f"{path.name}: tags {match['python']}-{match['abi']}; cp310-abi3, or py3-none for any platform")
    with zipfile.ZipFile(path) as archive:
        inside = {n: archive.read(n) for n in archive.namelist() if n.startswith(("halfbyte/", "halfbyte_autoload/"))}
        metadata = archive.read(f"halfbyte-{version}.dist-info/METADATA").decode()
    if f"\nVersion: {version}\n" not in metadata:
        found.append(f"{path.name}: its METADATA has another version")
    if pure == any("_native" in n and n.endswith(".so") for n in inside):
        found.append(f"{path.name}: {'has' if pure else 'lacks'} the native core")
    sources = [p for package in ("halfbyte", "halfbyte_autoload") for p in (root / "src" / package).rglob("*")]
    wanted = {p.relative_to(root / "src").as_posix(): p for p in sources if p.suffix in (".py", ".metal", ".pyi", ".typed")}
    differing = sorted(n for n, p in wanted.items() if inside.get(n) != p.read_bytes())
    if differing:
        found.append(f"{path.name}: {len(differing)} files are missing or not those of this tree ({', '.join(differing[:3])})")
    return found


def word_pairs(files: Mapping[str, bytes]) -> dict[str, set[tuple[bytes, bytes]]]:
    """The pairs of words that follow each other in each file."""
    return {name: set(pairwise(re.findall(rb"\w+", content))) for name, content in files.items()}


def like_beside_like(files: Mapping[str, bytes]) -> list[str]:
    """Names in an order in which each file has many pairs of words with those just before it, which
    gzip finds within 32 KiB: 4 % less. Longer files come earlier than their share alone would say.
    """
    pairs = word_pairs(files)
    out: list[str] = []
    while len(out) < len(files):
        near: set[tuple[bytes, bytes]] = set()
        length = 0
        for name in reversed(out):
            near |= pairs[name]
            length += len(files[name])
            if length > 24_000:
                break
        left = files.keys() - set(out)
        out.append(max(left, key=lambda name: (len(pairs[name] & near) / (len(pairs[name]) ** 0.8 + 20), len(pairs[name]), name)))
    return out


def better_places(order: list[str], files: Mapping[str, bytes]) -> list[str]:
    """The order in which each file, the longest first, is moved beside one of the five that it
    shares most pairs of words with, where gzip makes less of the neighbours. Takes a minute.
    """
    pairs = word_pairs(files)

    def size(names: list[str]) -> int:
        return len(zlib.compress(b"".join(files[name] for name in names), 9))

    def around(names: list[str], at: int, between: list[str]) -> list[str]:
        return names[max(0, at - 4) : at] + between + names[at : at + 4]

    for name in sorted(files, key=lambda name: (-len(files[name]), name)):
        at = order.index(name)
        rest = order[:at] + order[at + 1 :]
        least, best = size(around(rest, at, [name])) - size(around(rest, at, [])), order
        shared = {other: len(pairs[name] & pairs[other]) / (len(pairs[other]) ** 0.5 + 10) for other in rest}
        for other in sorted(rest, key=lambda other: (-shared[other], other))[:5]:
            for place in (rest.index(other), rest.index(other) + 1):
                if abs(place - at) > 4 and (more := size(around(rest, place, [name])) - size(around(rest, place, []))) < least:
                    least, best = more, [*rest[:place], name, *rest[place:]]
        order = best
    return order


def ordered(content: bytes, places: Callable[[list[str], Mapping[str, bytes]], list[str]] = better_places) -> bytes:
    """A tar file with the same members in the order of `like_beside_like`, then `places`."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(content)) as old,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        members = {m.name: m for m in old.getmembers()}
        if len(members) != len(old.getmembers()) or not all(m.isfile() for m in members.values()):
            return content
        files = {name: old.extractfile(m).read() for name, m in members.items()}  # type: ignore[union-attr]
        for name in places(like_beside_like(files), files):
            new.addfile(members[name], io.BytesIO(files[name]))
    return packed.getvalue()


def members_of(content: bytes) -> dict[str, bytes | None]:
    """What a tar file holds."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {m.name: archive.extractfile(m).read() if m.isfile() else None for m in archive}  # type: ignore[union-attr]


def shrink(folder: Path, compress: Callable[[bytes], bytes]) -> tuple[int, int]:
    """The source distribution of `folder`, its tar ordered and compressed anew: (bytes before,
    bytes after). `compress` makes a gzip file. Raises ValueError when it changed the content or
    made more of it.
    """
    [path] = folder.glob("halfbyte-*.tar.gz")
    before = path.read_bytes()
    content = ordered(gzip.decompress(before))
    after = compress(content)
    if gzip.decompress(after) != content or members_of(content) != members_of(gzip.decompress(before)):
        raise ValueError(f"{path.name}: compressed again, it holds other bytes; left as it was")
    if len(after) > len(before):
        raise ValueError(f"{path.name}: {len(before):,} bytes would become {len(after):,}; left as it was")
    path.write_bytes(after)
    return len(before), len(after)


def distribution_problems(folder: Path, version: str, root: Path = ROOT) -> list[str]:
    """Every platform has one wheel, each is right, and the source distribution is small."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    found = [problem for wheel in wheels for problem in wheel_problems(wheel, version, root)]
    platforms = [m["platform"] for w in wheels if (m := WHEEL.fullmatch(w.name))]
    found += [f"no wheel for {n}" for n, p in PLATFORMS.items() if not any(re.fullmatch(p, have) for have in platforms)]
    if [s.name for s in sdists] != [f"halfbyte-{version}.tar.gz"]:
        return [*found, f"{folder} has {[s.name for s in sdists]}; one halfbyte-{version}.tar.gz is wanted"]
    if sdists[0].stat().st_size >= SDIST_LIMIT:
        found.append(f"{sdists[0].name} has {sdists[0].stat().st_size:,} bytes; below {SDIST_LIMIT:,} are wanted")
    with tarfile.open(sdists[0]) as archive:
        if f"halfbyte-{version}/CMakeLists.txt" not in archive.getnames():
            found.append(f"{sdists[0].name} lacks CMakeLists.txt")
    return found


def install_problems(folder: Path) -> list[str]:
    """The wheel that pip chooses here runs its selftest in an environment of its own."""
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)
        scripts = Path(place) / ("Scripts" if sys.platform == "win32" else "bin")
        for words in (
            ["pip", "install", "-q", "--find-links", str(folder), "--only-binary=halfbyte", "halfbyte"],
            ["halfbyte", "selftest"],
        ):
            done = subprocess.run([str(scripts / words[0]), *words[1:]], capture_output=True, text=True)
            if done.returncode:
                return [f"{' '.join(words)}: status {done.returncode}: {(done.stderr or done.stdout)[-300:]}"]
    return []


def main() -> int:
    """Prints what fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="wheels and the source distribution")
    parser.add_argument("--install", action="store_true", help="install and run the wheel of this platform")
    parser.add_argument(
        "--shrink", action="store_true", help="compress the source distribution again (pip install zopfli); no checks"
    )
    options = parser.parse_args()
    if options.shrink:
        from zopfli.gzip import compress

        before, after = shrink(options.folder, compress)
        print(f"source distribution: {before:,} bytes before, {after:,} now")
        return 0
    version, found = version_of()
    found += changelog_problems((ROOT / "CHANGELOG.md").read_text("utf-8"), version)
    found += tag_problems(version) + distribution_problems(options.folder, version)
    found += install_problems(options.folder) if options.install else []
    for problem in found:
        print(problem)
    print(f"halfbyte {version}: {len(found)} problems" if found else f"halfbyte {version}: ready")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
