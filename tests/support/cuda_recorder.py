"""A stand-in for a CUDA kernel and for what it is compiled to: the arguments of launches by name,
without a GPU.
"""

from __future__ import annotations


def flat(name, value):
    """(name, value) of an argument; of a record, one for each field: `weight.bias`."""
    fields = getattr(value, "_fields", None)
    if fields is None:
        return [(name, value)]
    return [(f"{name}.{field}", getattr(value, field)) for field in fields]


class Recorder:
    """`calls`: (grid, arguments) of every launch in order; `first` those by way of Triton, `later`
    those past it.
    """

    def __init__(self, names):
        self.names = names
        self.calls, self.first, self.later = [], [], []

    def __getitem__(self, grid):
        def launch(*values, **named):
            options = {name: value for name, value in named.items() if name not in self.names}
            assert options.keys() <= {"launch_pdl", "num_warps", "enable_fp_fusion"}
            constants = {name: value for name, value in named.items() if name in self.names}
            assert [*self.names[: len(values)], *constants] == self.names
            pairs = zip(self.names, [*values, *constants.values()], strict=True)
            call = (*grid, 1, 1)[:3], dict(item for name, value in pairs for item in flat(name, value))
            self.calls.append(call)
            (self.first if named else self.later).append(call)
            return self

        return launch
