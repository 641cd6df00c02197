"""The boundary of the native core: what does not fit is refused by name, and nothing outside an
array is read or written.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from halfbyte import ops
from halfbyte.backends.cpu import activations_named, native
from halfbyte.backends.cpu.pack import PackedWeight, native_fields
from halfbyte.errors import ShapeError
from halfbyte.formats import format_named
from support.cpu_weights import CPU, act_ordered, needs_native, ordinary_tensor

pytestmark = needs_native


def prepared(n=32, k=64, word="int4:g32"):
    return CPU.prepare(ordinary_tensor(format_named(word), (n, k), 1))


def misaligned(x):
    """The same numbers at an address that is no multiple of their size."""
    raw = np.empty(x.nbytes + 1, np.uint8)
    out = raw[1:].view(x.dtype).reshape(x.shape)
    out[...] = x
    assert not out.flags.aligned
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_misaligned_activations_and_biases_are_copied(dtype):
    w, rng = prepared(), np.random.default_rng(2)
    x, bias = rng.standard_normal((3, 64)).astype(dtype), rng.standard_normal(32).astype(np.float32)
    wanted = CPU.linear(x, w, bias)
    assert np.array_equal(CPU.linear(misaligned(x), w, misaligned(bias)), wanted)
    assert np.array_equal(ops.linear(misaligned(x), w, misaligned(bias)), wanted)


def test_misaligned_ids_are_copied():
    w, ids = prepared(), np.array([3, 0, 31])
    assert np.array_equal(CPU.embedding(misaligned(ids), w, "float32"), CPU.embedding(ids, w, "float32"))


def test_the_core_refuses_what_is_misaligned_or_strided():
    w, x, out = prepared().data.native, np.zeros((3, 64), np.float32), np.empty((3, 32), np.float32)
    exact = activations_named("exact")
    with pytest.raises(ShapeError, match="x is misaligned"):
        native().linear(w, misaligned(x), None, exact, out)
    with pytest.raises(ShapeError, match=r"out is float32 .*; allowed: a contiguous array"):
        native().linear(w, x, None, exact, np.empty((3, 64), np.float32)[:, ::2])
    with pytest.raises(ShapeError, match=r"out has 2 rows; x has 3"):
        native().linear(w, x, None, exact, out[:2])
    with pytest.raises(ShapeError, match=r"x is float64 \(3, 64\); allowed: float32, float16 or bfloat16"):
        native().linear(w, x.astype(np.float64), None, exact, out)
    with pytest.raises(TypeError):
        native().linear(w, [[0.0] * 64], None, exact, out)


EXTREMES = (0, 1, 2, 7, 8, 255, 2**31 - 1, 2**31, 2**46, 2**62, 2**63 - 1, -1, -(2**31), -(2**63))


@pytest.mark.parametrize("word", ["int4:g32", "uint4:g16", "affine4:g64", "q4_K", "mxfp8_e4m3", "nf4:g64", "int8:channel"])
def test_changed_fields_are_refused_or_leave_memory_alone(word):
    """Numbers and arrays of a packed weight, one changed at a time: the core refuses the weight, or
    computes without reading or writing outside an array (`make test-sanitize` watches).
    """
    k = 256
    w = prepared(19, k, word).data
    rng = np.random.default_rng(1)
    x, ids = np.ones((3, k), np.float32), np.arange(19)
    numbers = [n for n, v in w.fields.items() if isinstance(v, int)]
    changes = [(w.fields | {n: e}, w.arrays) for n in (*numbers, "first_row", "total_rows", "group_rows") for e in EXTREMES]
    changes += [(w.fields | {"grouping": g}, w.arrays) for g in ("flat", "strided", "block")]
    for name, a in w.arrays.items():
        changes += [(w.fields, w.arrays | {name: a.ravel()[:i]}) for i in (0, 1, max(a.size - 1, 0))]
        changes.append((w.fields, {n: b for n, b in w.arrays.items() if n != name}))
        if a.dtype.kind in "iu" and a.size:
            changes.append((w.fields, w.arrays | {name: rng.integers(0, 127, a.shape).astype(a.dtype)}))
    refused = 0
    for fields, arrays in changes:
        try:
            changed = native().Weight(native_fields(fields, arrays))
        except (ShapeError, OverflowError, TypeError):  # the last two: a number that the field's type cannot hold
            refused += 1
            continue
        if changed.shape != (19, k):
            continue
        for mode in ("exact", "int8"):
            native().linear(changed, x, None, activations_named(mode), np.empty((3, 19), np.float32))
        native().dequantize(changed, np.empty((19, k), np.float32))
        native().embedding(changed, ids, np.empty((19, k), np.float16))
    assert refused > len(changes) // 2
    assert refused < len(changes)


@pytest.mark.parametrize("shape", [(64, 64), (16, 64), (32, 128), (32, 32)])
def test_a_prepared_weight_whose_shape_was_replaced_is_refused(shape):
    w = dataclasses.replace(prepared(), shape=shape)
    x = np.zeros((2, shape[1]), np.float32)
    with pytest.raises(ShapeError, match=r"\[linear\]"):
        CPU.linear(x, w, None)
    if shape != (32, 64):
        with pytest.raises(ShapeError):
            CPU.dequantize(w, "float32")


def test_the_arrays_of_a_prepared_weight_are_read_only():
    for word in ("int4:g32", "q4_K", "nf4:g64"):
        w = prepared(k=256, word=word)
        for name, a in w.data.arrays.items():
            with pytest.raises(ValueError, match="read-only"):
                a.reshape(-1)[0] = 0
            assert not a.flags.writeable, name


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("plane4", lambda a: a[:-1]),
        ("scales", lambda a: a.reshape(-1)[:-1]),
        ("scales", lambda a: a.astype(np.float32)),
        ("values", lambda a: a[:-1]),
        ("plane4", lambda a: a.astype(np.int8)),
    ],
)
def test_a_weight_whose_arrays_do_not_fit_its_numbers_is_refused(name, wrong):
    packed = prepared().data
    arrays = dict(packed.arrays)
    arrays[name] = wrong(arrays[name])
    with pytest.raises(ShapeError, match=rf"\[weight\] {name}"):
        native().Weight(native_fields(packed.fields, arrays))


def test_indices_outside_the_weight_are_refused():
    packed = CPU.prepare(act_ordered(ordinary_tensor(format_named("uint4:g32"), (32, 70), 1), 2)).data
    gather = packed.arrays["gather"].copy()
    gather[3] = 70
    with pytest.raises(ShapeError, match=r"\[weight\] gather has 70; -1 to 69 are allowed"):
        PackedWeight(packed.fields, packed.arrays | {"gather": gather})
    plain = prepared(k=96).data
    with pytest.raises(ShapeError, match=r"groups 1 of 32 do not hold k = 96"):
        PackedWeight(plain.fields | {"groups": 1}, plain.arrays)
    with pytest.raises(AttributeError, match="misspelt"):
        PackedWeight(packed.fields | {"misspelt": 1}, packed.arrays)


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("word", ["int8:channel", "uint4:g32"])
def test_no_inputs_give_zeros_and_the_bias(word, activations):
    w = CPU.prepare(ordinary_tensor(format_named(word), (20, 0), 1))
    bias = np.arange(20, dtype=np.float32)
    x = np.zeros((3, 0), np.float32)
    assert (CPU.linear(x, w, None, activations=activations) == 0).all()
    assert (CPU.linear(x, w, bias, activations=activations) == bias).all()
    assert CPU.dequantize(w, "float32").shape == (20, 0)


def python(code, **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "HALFBYTE_THREADS")} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False)


DAEMON = """
import threading, time, numpy as np
import halfbyte as hb
w = hb.prepare(hb.quantize(np.ones((512, 512), np.float32), "int4:g32"), backend="cpu")
x = np.ones((64, 512), np.float32)
def work():
    while True:
        hb.linear(x, w)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""


def test_the_interpreter_ends_while_daemon_threads_multiply():
    for _ in range(3):
        done = python(DAEMON)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""


THREADS = "from halfbyte.backends.cpu import native; print(native().threads())"


def test_openmp_s_number_of_threads_is_a_bound():
    usable = int(python(THREADS).stdout)
    assert python(THREADS, OMP_NUM_THREADS="1").stdout == "1\n"
    assert python(THREADS, OMP_NUM_THREADS="1,2").stdout == "1\n"
    assert int(python(THREADS, OMP_NUM_THREADS="4096").stdout) == usable
    assert python(THREADS, OMP_NUM_THREADS="1", HALFBYTE_THREADS="3").stdout == "3\n"


FOLLOWED = """
import numpy as np, torch
import halfbyte as hb
from halfbyte.backends import backend_named
from halfbyte.backends.cpu import native, set_threads
from halfbyte.torch import QLinear
q = hb.quantize(np.ones((64, 64), np.float32), "int4:g32")
x, w, layer = np.ones((64, 64), np.float32), hb.prepare(q, backend="cpu"), QLinear(q)
calls = (lambda: hb.linear(x, w), lambda: layer(torch.from_numpy(x)), lambda: hb.embedding(np.arange(9), w),
         lambda: backend_named('cpu').dequantize(w, 'float32'))
for number in (1, 2, 4096):
    for call in calls:
        torch.set_num_threads(3)
        call()
        torch.set_num_threads(number)
        call()
        print(native().threads(), end=" ")
set_threads(5)
hb.linear(x, w)
print(native().threads(), end=" ")
set_threads(0)
torch.set_num_threads(1)
hb.linear(x, w)
print(native().threads())
"""


TWO_THREADS = """
import threading
import numpy as np, torch
import halfbyte as hb
from halfbyte.backends.cpu import native
q = hb.quantize(np.ones((64, 64), np.float32), "int4:g32")
x, w = np.ones((64, 64), np.float32), hb.prepare(q, backend="cpu")
turns, seen = threading.Barrier(2), {1: set(), 2: set()}
def run(number):
    for turn in range(40):
        turns.wait()
        if turn == number - 1:
            torch.set_num_threads(number)
            torch.get_num_threads()  # from now on the thread's own
        if turn % 2 == number - 1:
            hb.linear(x, w)
            seen[number].add(native().threads())
runs = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
for one in runs:
    one.start()
for one in runs:
    one.join()
print(seen)
"""


def test_each_thread_has_torch_s_number_of_its_own():
    usable = int(python(THREADS).stdout)
    done = python(TWO_THREADS)
    assert done.stdout == f"{ {1: {1}, 2: {min(2, usable)}} }\n", done.stderr


def test_torch_s_number_of_threads_is_a_bound():
    usable = int(python(THREADS).stdout)
    wanted = [min(number, usable) for number in (1, 2, 4096) for _ in range(4)]
    done = python(FOLLOWED)
    assert [int(n) for n in done.stdout.split()] == [*wanted, 5, 1], done.stderr
    assert python(FOLLOWED, HALFBYTE_THREADS="3").stdout.split()[:12] == ["3"] * 12


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity masks are Linux'")
def test_the_affinity_mask_is_a_bound():
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + THREADS
    assert python(one).stdout == "1\n"


@pytest.mark.parametrize(
    ("files", "line", "threads"),
    [
        ({}, "0::/", None),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "150000 100000"}, "0::/", 2),
        ({"a/cpu.max": "100000 100000"}, "0::/a", 1),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 3),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "50000 100000"}, "0::/a/b", 1),
        ({"a/cpu.max": "100000 100000"}, "0::/other", None),
        ({"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/a", 2),
        ({"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, "4:cpu:/a", None),
        ({"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, "4:cpuset:/a", None),
    ],
)
def test_the_quotas_of_nested_control_groups(tmp_path, files, line, threads):
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    own = tmp_path / "cgroup"
    own.write_text("1:name=systemd:/x\n" + line + "\n")
    found = native().quota_threads(str(own), str(tmp_path / "mount"))
    assert found == threads if threads else found > 4096
